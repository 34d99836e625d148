"""Tiles of matrices in a kernel: their sizes, and masked loads and stores at the edges of a matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as gpu

__all__ = ["load", "power", "store"]

Array = jax.Array


def power(n: int, least: int = 16, most: int = 1 << 30) -> int:
    """The smallest power of two that is at least n, limited to the range from ``least`` to ``most``."""
    return min(max(1 << (n - 1).bit_length(), least), most)


def load(
    ref: Any,
    rows: Array,
    columns: Array,
    height: int | Array,
    width: int,
    *,
    at: tuple[Any, ...] = (),
    whole: bool = False,
) -> Array:
    """ref[at][rows][:, columns], zero for rows >= ``height`` and columns >= ``width``.

    whole: there are no such rows and columns, so that no mask is needed.
    """
    rows, columns, inside = _places(rows, columns, height, width)
    if whole:
        return gpu.load(ref.at[(*at, rows, columns)])
    return gpu.load(ref.at[(*at, rows, columns)], mask=inside, other=0.0)


def store(
    ref: Any,
    rows: Array,
    columns: Array,
    height: int | Array,
    width: int,
    values: Array,
    *,
    at: tuple[Any, ...] = (),
    whole: bool = False,
) -> None:
    """ref[at][rows][:, columns] = values for rows < ``height`` and columns < ``width``; ``whole`` as in `load`."""
    rows, columns, inside = _places(rows, columns, height, width)
    gpu.store(ref.at[(*at, rows, columns)], values.astype(ref.dtype), mask=None if whole else inside)


def _places(rows: Array, columns: Array, height: int | Array, width: int) -> tuple[Array, Array, Array]:
    shape = (rows.shape[0], columns.shape[0])
    inside = jnp.broadcast_to((rows < height)[:, None] & (columns < width)[None, :], shape)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape), inside
