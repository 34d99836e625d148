"""The embedded data set: 1,797 handwritten digits of 8 x 8 pixels, values 0 to 16.

Alpaydin & Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository (1998), CC BY 4.0. It is
the part that scikit-learn also has: small enough for the package, and real data that shows client drift.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from fedbraid.data.preprocess import Pipeline

__all__ = ["INFO", "PREPROCESS", "arrays"]

INFO = {
    "classes": 10,
    "source": "Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI (1998)",
    "licence": "CC BY 4.0",
}
PREPROCESS = Pipeline.of({"name": "scale", "factor": 1 / 16})


def arrays() -> dict[str, np.ndarray]:
    """Fields ``x`` uint8 [1797, 64] and ``y`` int32 [1797].

    >>> data = arrays()
    >>> data["x"].shape, data["x"].dtype.name, int(data["y"].max())
    ((1797, 64), 'uint8', 9)
    """
    with (
        files("fedbraid.data").joinpath("files/digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        return {"x": archive["x"], "y": archive["y"].astype(np.int32)}
