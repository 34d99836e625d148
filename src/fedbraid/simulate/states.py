"""Client states on the host, in memory or in a memory-mapped file: for populations whose states fit no device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = ["HostStates"]


class HostStates:
    """One row per client, made on first touch: a client never asked costs nothing but address space.

    >>> store = HostStates({"c": np.zeros(2)}, population=1_000)
    >>> store.write(np.array([7]), {"c": np.ones((1, 2))})
    >>> store.read(np.array([6, 7]))["c"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, first: Any, population: int, path: Path | None = None) -> None:
        leaves, self._tree = jax.tree.flatten(jax.tree.map(np.asarray, first))
        self._first = leaves
        self._touched = np.zeros(population, bool)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)

        def rows(i: int, leaf: np.ndarray) -> np.ndarray:
            shape = (population, *leaf.shape)
            if path is None:
                return np.empty(shape, leaf.dtype)  # pages are not backed before they are written
            return np.lib.format.open_memmap(path / f"{i:03d}.npy", "w+", leaf.dtype, shape)

        self._rows = [rows(i, leaf) for i, leaf in enumerate(leaves)]

    def read(self, ids: np.ndarray) -> Any:
        """The states of clients ``ids``; ids past the population (empty slots) read as the first state."""
        inside = np.minimum(ids, len(self._touched) - 1)
        fresh = ~self._touched[inside]
        out = []
        for leaf, rows in zip(self._first, self._rows, strict=True):
            taken = rows[inside]
            taken[fresh] = leaf
            out.append(taken)
        return jax.tree.unflatten(self._tree, out)

    def write(self, ids: np.ndarray, states: Any) -> None:
        real = ids < len(self._touched)
        for rows, new in zip(self._rows, jax.tree.leaves(states), strict=True):
            rows[ids[real]] = np.asarray(new)[real]
        self._touched[ids[real]] = True

    def export(self) -> dict[str, np.ndarray]:
        """The touched rows, for a checkpoint."""
        ids = np.flatnonzero(self._touched)
        return {"ids": ids} | {f"{i:03d}": np.asarray(rows[ids]) for i, rows in enumerate(self._rows)}

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        ids = np.asarray(saved["ids"])
        self._touched[:] = False
        self._touched[ids] = True
        for i, rows in enumerate(self._rows):
            rows[ids] = saved[f"{i:03d}"]
