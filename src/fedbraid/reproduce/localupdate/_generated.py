"""Generated images and text that the paper's networks learn in seconds: the data of the quick forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedbraid.data.federated import FederatedData, Split
from fedbraid.reproduce.localupdate._training import EQUAL_WEIGHTS, Task
from fedbraid.reproduce.mime.table2_shakespeare import rhymes

# full batches and no dropout: every local step is an exact gradient step
GRADIENTS = Task("bars", {"name": "emnist_cnn", "dropout": False}, {"batch_size": None, **EQUAL_WEIGHTS})
SIDE = 6  # the smallest image for two valid convolutions and a pooling layer
CLASSES = 4
SKEW = 0.7  # share of images that always have the client's own class


def bars(*, clients: int = 8, size: int = 8) -> FederatedData:
    """Images of a bright row, column, or one of two diagonals, with noise; each client has one class more often.

    >>> data = bars(clients=4, size=8)
    >>> data.train.arrays["x"].shape, data.train.sizes.tolist()
    ((32, 6, 6), [8, 8, 8, 8])
    """
    rng = np.random.default_rng(0)
    row, column = np.indices((SIDE, SIDE))
    off = np.stack([row, column, row - column, row + column])  # distance from the bar through the corner

    def rows(favourite: int, n: int) -> dict[str, np.ndarray]:
        y = np.where(rng.random(n) < SKEW, favourite, rng.integers(0, CLASSES, n)).astype(np.int32)
        at = np.stack([*rng.integers(0, SIDE, (2, n)), np.zeros(n, int), np.full(n, SIDE - 1)], 1)
        shape = off[y] == at[np.arange(n), y][:, None, None]
        return {"x": (shape + 0.3 * rng.standard_normal(shape.shape)).astype(np.float32), "y": y}

    favourites = [i % CLASSES for i in range(clients)]
    train, test = [[rows(favourite, n) for favourite in favourites] for n in (size, 4)]
    return FederatedData(Split.from_clients(train), Split.from_clients(test), "bars", {"classes": CLASSES})


def verses() -> FederatedData:
    """Eight lines per client, without padding, evaluated on the training text."""
    data = rhymes(size=8)
    return replace(data, test=data.train)


def small_lstm(batch_size: int) -> Task:
    """Two layers, as in the paper, for ``verses``."""
    model = {"name": "char_lstm", "layers": 2, "hidden": 8, "embed": 4}
    return Task("verses", model, {"batch_size": batch_size, **EQUAL_WEIGHTS})
