"""The description of federated data, without its examples, from which a model and an algorithm are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

__all__ = ["DataDescription", "Preprocess"]

Preprocess = Callable[[Mapping[str, Any], Any, bool], dict[str, Any]]
"""``(batch, key, train) -> batch``: pure, and deterministic if ``train`` is False (then ``key`` may be None)."""


@dataclass(frozen=True)
class DataDescription:
    """Fields, labels, preprocessing and number of clients of a federated data set.

    It comes from a ``FederatedData`` (``data.description``), or from the ``federation.toml`` of a deployed app, whose
    examples are on its sites. ``fedbraid.experiment.assembly.assemble`` builds a run from it.

    fields: shape and dtype of one example of each field, as stored.
    population: number of clients that train.
    classes: number of labels (for text: of tokens); None if there are none.
    preprocess: from a batch of stored fields to the batch that a model reads.

    >>> from fedbraid.data.preprocess import Pipeline
    >>> fields = {"x": jax.ShapeDtypeStruct((32, 32, 3), "uint8"), "y": jax.ShapeDtypeStruct((), "int32")}
    >>> crop = Pipeline.of({"name": "scale"}, {"name": "crop-flip", "size": 24})
    >>> DataDescription(fields, population=500, classes=100, preprocess=crop).shapes
    {'x': (24, 24, 3), 'y': ()}
    """

    fields: Mapping[str, jax.ShapeDtypeStruct]
    population: int
    classes: int | None = None
    preprocess: Preprocess | None = None
    name: str = "data"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one example of each field after preprocessing. It sets the sizes of a model."""
        return {name: tuple(field.shape[1:]) for name, field in self.prepared.items()}

    @property
    def prepared(self) -> Mapping[str, Any]:
        """Shapes and dtypes of a batch of one example after preprocessing; nothing is computed."""
        canonical = jax.dtypes.canonicalize_dtype
        batch = {name: jax.ShapeDtypeStruct((1, *f.shape), canonical(f.dtype)) for name, f in self.fields.items()}
        prepare = self.preprocess
        return batch if prepare is None else jax.eval_shape(lambda batch: prepare(batch, None, False), batch)


def fields_of(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of one example of each array, whose rows are examples.

    >>> fields_of({"x": np.zeros((5, 3), np.uint8)})["x"]
    ShapeDtypeStruct(shape=(3,), dtype=uint8)
    """
    out = {}
    for name, array in arrays.items():
        if array.dtype == object:
            raise ValueError(
                f"field {name!r} holds text, and models read numbers: load the set by its catalog name, which turns "
                "text into tokens, or convert the field yourself"
            )
        out[name] = jax.ShapeDtypeStruct(tuple(array.shape[1:]), np.dtype(array.dtype))
    return out
