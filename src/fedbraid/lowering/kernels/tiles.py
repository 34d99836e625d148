"""Tiles of matrices in a kernel: their sizes and number, and masked loads and stores at the edges of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as gpu

__all__ = ["division", "load", "per_clients", "power", "store"]

Array = jax.Array
RESIDENT = 264  # large programs that an H200 runs at the same time: two on each of its 132 multiprocessors
PARTS = range(4, 17)
SUMMED = 0.02  # of the time of a program: writing the result of one part, and adding it to the others


def power(n: int, least: int = 16, most: int = 1 << 30) -> int:
    """The smallest power of two that is at least n, limited to the range from ``least`` to ``most``."""
    return min(max(1 << (n - 1).bit_length(), least), most)


def division(programs: int) -> int:
    """The number of parts into which each of ``programs`` equal programs is divided, so that the GPU is full.

    A GPU runs as many programs as fit, then the next ones. The last ones may leave most of it idle.

    >>> division(100), division(50), division(25)  # 500 and 250 programs fill it twice and once
    (5, 5, 10)
    """
    return min(PARTS, key=lambda each: -(-programs * each // RESIDENT) * (1 / each + SUMMED))


def per_clients(function: Callable[..., Array]) -> Callable[..., Array]:
    """``function(*arrays, clients=n)``, where n is the number of clients whose arrays are mapped by `jax.vmap`."""
    single = jax.custom_batching.custom_vmap(partial(function, clients=1))

    @single.def_vmap
    def _(clients: int, mapped: list[bool], *arrays: Array) -> tuple[Array, bool]:
        axes = [0 if yes else None for yes in mapped]
        return jax.vmap(partial(function, clients=clients), in_axes=axes)(*arrays), True

    return single


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
    width: int | Array,
    values: Array,
    *,
    at: tuple[Any, ...] = (),
    whole: bool = False,
) -> None:
    """ref[at][rows][:, columns] = values for rows < ``height`` and columns < ``width``; ``whole`` as in `load`."""
    rows, columns, inside = _places(rows, columns, height, width)
    gpu.store(ref.at[(*at, rows, columns)], values.astype(ref.dtype), mask=None if whole else inside)


def _places(rows: Array, columns: Array, height: int | Array, width: int | Array) -> tuple[Array, Array, Array]:
    shape = (rows.shape[0], columns.shape[0])
    inside = jnp.broadcast_to((rows < height)[:, None] & (columns < width)[None, :], shape)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape), inside
