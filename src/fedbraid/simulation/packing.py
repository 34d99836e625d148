"""Packing: the small leaves of a tree as one vector for each dtype.

A kernel of a GPU takes two microseconds even if it does almost nothing. Sums and tests over a tree with many small
leaves (biases, normalisation) are a kernel each. Over packed leaves they are one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Packing"]

PyTree = Any
SMALL = 1 << 18  # bytes of a leaf that is packed; a larger one is worth a kernel of its own


class Packing:
    """How trees of these shapes are packed. Leaves may have further leading axes, all of them the same.

    >>> packing = Packing({"a": jnp.ones(2), "b": jnp.zeros((1, 3)), "n": jnp.int32(4)})
    >>> packed = packing.pack({"a": jnp.ones(2), "b": jnp.zeros((1, 3)), "n": jnp.int32(4)})
    >>> [leaf.tolist() for leaf in packed]
    [[1.0, 1.0, 0.0, 0.0, 0.0], 4]
    >>> packing.unpack(packed)["b"].shape
    (1, 3)
    """

    def __init__(self, shapes: PyTree) -> None:
        leaves = jax.tree.leaves(shapes)
        self.tree: Any = jax.tree.structure(shapes)
        self.shapes: list[tuple[int, ...]] = [jnp.shape(leaf) for leaf in leaves]
        self.groups: list[list[int]] = []  # numbers of the leaves that are one vector
        places: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            dtype = jnp.result_type(leaf)
            small = int(np.prod(self.shapes[i])) * dtype.itemsize <= SMALL
            group = places.setdefault(dtype if small else i, [])
            if not group:
                self.groups.append(group)
            group.append(i)

    def pack(self, tree: PyTree) -> list[Any]:
        """One array for each group. A group of one leaf keeps its shape."""
        leaves = self.tree.flatten_up_to(tree)
        return [
            leaves[group[0]] if len(group) == 1 else jnp.concatenate([self._flat(leaves[i], i) for i in group], -1)
            for group in self.groups
        ]

    def _flat(self, leaf: Any, i: int) -> Any:
        leading = jnp.ndim(leaf) - len(self.shapes[i])
        return jnp.reshape(leaf, (*jnp.shape(leaf)[:leading], -1))

    def unpack(self, packed: list[Any]) -> PyTree:
        """The tree, without further leading axes."""
        leaves: list[Any] = [None] * len(self.shapes)
        for group, array in zip(self.groups, packed, strict=True):
            ends = np.cumsum([int(np.prod(self.shapes[i])) for i in group])
            pieces = [array] if len(group) == 1 else jnp.split(array, ends[:-1])
            for i, piece in zip(group, pieces, strict=True):
                leaves[i] = jnp.reshape(piece, self.shapes[i])
        return jax.tree.unflatten(self.tree, leaves)
