"""Kernels that update weights: a matrix by a product over the batch, and many small arrays at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import load, power, store

__all__ = ["add_product", "add_scaled"]

Array = jax.Array


class Tile(NamedTuple):
    """The part of a matrix that a program updates, and the rows of the batch that it reads at a time."""

    rows: int
    columns: int
    batch: int
    warps: int
    stages: int


WIDE, NARROW = Tile(128, 128, 64, warps=8, stages=3), Tile(64, 64, 64, warps=4, stages=4)
ENTRIES = 1 << 17  # of a matrix from which wide tiles are used


def add_product(w: Array, x: Array, y: Array, scale: Any) -> tuple[Array, Array]:
    """``w + scale x' y`` of w [m, n], x [k, m] and y [k, n] in float32, written over w, and the same in bfloat16."""
    (k, m), n = x.shape, y.shape[1]
    t = WIDE if m * n >= ENTRIES else NARROW
    return pl.pallas_call(
        partial(_product_kernel, t=t, sizes=(k, m, n)),
        grid=(-(-m // t.rows), -(-n // t.columns)),
        out_shape=[jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct(w.shape, jnp.bfloat16)],
        input_output_aliases={0: 0},
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="add_product",
    )(w, x, y, jnp.asarray(scale, jnp.float32).reshape(1))


def _product_kernel(w_ref, x_ref, y_ref, scale_ref, out_ref, half_ref, *, t: Tile, sizes: tuple[int, int, int]):
    k, m, n = sizes
    rows, columns = pl.program_id(0) * t.rows + jnp.arange(t.rows), pl.program_id(1) * t.columns + jnp.arange(t.columns)
    whole = m % t.rows == 0 and n % t.columns == 0
    filled = whole and k % t.batch == 0

    def step(i, total):
        batch = i * t.batch + jnp.arange(t.batch)
        x, y = load(x_ref, batch, rows, k, m, whole=filled), load(y_ref, batch, columns, k, n, whole=filled)
        return total + jnp.dot(x.T, y, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, -(-k // t.batch), step, jnp.zeros((t.rows, t.columns), jnp.float32))
    new = load(w_ref, rows, columns, m, n, whole=whole) + scale_ref[0] * total
    store(out_ref, rows, columns, m, n, new, whole=whole)
    store(half_ref, rows, columns, m, n, new, whole=whole)


def add_scaled(arrays: Sequence[Array], changes: Sequence[tuple[Array, int, Any]]) -> list[Array]:
    """``array + scale * change`` of many small arrays, written over them by one program.

    changes: (source, first, scale) for each array: its change is the entries of the source from the ``first`` on.
    """
    sources, starts, scales = zip(*changes, strict=True)
    sizes = [array.size for array in arrays]
    factors = jnp.stack([jnp.asarray(scale, jnp.float32) for scale in scales])
    found = pl.pallas_call(
        partial(_scaled_kernel, sizes=sizes, starts=starts),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes],
        input_output_aliases={i: i for i in range(len(sizes))},
        compiler_params=gpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpreted(),
        name="add_scaled",
    )(*(array.ravel() for array in (*arrays, *sources)), factors)
    return [new.reshape(array.shape) for new, array in zip(found, arrays, strict=True)]


def _scaled_kernel(*refs, sizes: Sequence[int], starts: Sequence[int]):
    many = len(sizes)
    before, changes, factors, after = refs[:many], refs[many : 2 * many], refs[2 * many], refs[2 * many + 1 :]
    new = []
    for i, size in enumerate(sizes):  # all are read before any is written
        place = jnp.arange(power(size, 1))
        inside = place < size
        w = gpu.load(before[i].at[place], mask=inside, other=0.0)
        change = gpu.load(changes[i].at[starts[i] + place], mask=inside, other=0.0)
        new.append((place, inside, w + factors[i] * change))
    for ref, (place, inside, values) in zip(after, new, strict=True):
        gpu.store(ref.at[place], values, mask=inside)
