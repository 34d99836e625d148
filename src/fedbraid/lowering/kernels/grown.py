"""Products with a matrix that is stored as rows, ``left' right``, on a GPU.

Each step of a client adds one row to ``left`` [R, d] and one to ``right`` [R, o] for every example of its batch. So
only the first rows of these buffers are filled. These kernels read the filled rows and no others: the rest may hold
NaN. Each client has its own count of filled rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import load, power, store

__all__ = ["added", "empty", "inner", "meets", "outer", "spread", "total"]

Array = jax.Array
COPIED = 2048  # values of a row that one program of `added` copies


class Tiles(NamedTuple):
    """Tile sizes, and launch options of a kernel."""

    rows: int  # of left
    columns: int  # of left, in one product
    warps: int
    stages: int
    split: int = 4  # programs that share the columns


# By the bytes of a value: the fastest of those tried on an H200, over 0 to 180 rows of 9,216 columns.
INNER = {2: Tiles(rows=32, columns=128, warps=4, stages=3, split=6), 4: Tiles(32, 64, warps=4, stages=3, split=4)}
OUTER = {2: Tiles(rows=64, columns=128, warps=4, stages=2), 4: Tiles(rows=16, columns=256, warps=4, stages=4)}
SHORT = Tiles(rows=64, columns=128, warps=4, stages=2)  # of products with right


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised buffer."""
    return pl.pallas_call(
        lambda _: None,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=gpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpreted(),
        name="grown_empty",
    )()


def inner(x: Array, left: Array, count: Array, tiles: Tiles | None = None) -> tuple[Array, Array]:
    """``x left'`` of x [b, d] with the first ``count`` rows of left, as summands [S, b, R]. The rest is uninitialised.

    Also returns left with x written in place after its first ``count`` rows. Rows beyond the buffer are dropped.
    """
    (b, d), rows = x.shape, left.shape[0]
    tiles = tiles or INNER[left.dtype.itemsize]
    shares, left = pl.pallas_call(
        partial(_inner_kernel, t=tiles, b=b, d=d),
        grid=(-(-rows // tiles.rows) + 1, tiles.split),
        out_shape=[
            jax.ShapeDtypeStruct((tiles.split, b, rows), jnp.float32),
            jax.ShapeDtypeStruct(left.shape, left.dtype),
        ],
        input_output_aliases={2: 1},
        compiler_params=gpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpreted(),
        name="grown_inner",
    )(count.reshape(1), x.astype(left.dtype), left)
    return shares, left


def _inner_kernel(count_ref, x_ref, left_ref, out_ref, new_ref, *, t: Tiles, b: int, d: int):
    block, share = pl.program_id(0), pl.program_id(1)
    count, height = count_ref[0], out_ref.shape[2]
    batch, rows = jnp.arange(power(b)), block * t.rows + jnp.arange(t.rows)
    blocks = -(-d // (t.columns * t.split))

    def columns(i):
        return (share * blocks + i) * t.columns + jnp.arange(t.columns)

    def meet(i, total):
        x, left = load(x_ref, batch, columns(i), b, d), load(left_ref, rows, columns(i), count, d)
        return total + jnp.dot(x, left.T, preferred_element_type=jnp.float32)

    def write(i, _):  # in separate programs: a loop that multiplies and writes would wait for each load
        end = jnp.minimum(count + b, height)
        store(new_ref, count + batch, columns(i), end, d, load(x_ref, batch, columns(i), b, d))

    zero = jnp.zeros((batch.shape[0], t.rows), jnp.float32)
    total = lax.fori_loop(0, blocks * lax.clamp(0, count - block * t.rows, 1), meet, zero)
    store(out_ref, batch, rows, b, jnp.minimum(count, height), total, at=(share,))
    lax.fori_loop(0, blocks * lax.clamp(0, block + 1 - -(-height // t.rows), 1), write, None)


def meets(x: Array, rows: Array, count: Array, dtype: Any) -> Array:
    """``x rows'`` [b, R] of x [b, d] with the first ``count`` rows, in ``dtype``; zero for the other rows."""
    (b, d), height, t = x.shape, rows.shape[0], SHORT
    return pl.pallas_call(
        partial(_meets_kernel, t=t, b=b, d=d),
        grid=(-(-height // t.rows),),
        out_shape=jax.ShapeDtypeStruct((b, height), dtype),
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="grown_meets",
    )(count.reshape(1), x.astype(rows.dtype), rows)


def _meets_kernel(count_ref, x_ref, rows_ref, out_ref, *, t: Tiles, b: int, d: int):
    first, count = pl.program_id(0) * t.rows, count_ref[0]
    batch, rows = jnp.arange(power(b)), first + jnp.arange(t.rows)

    def step(i, total):
        columns = i * t.columns + jnp.arange(t.columns)
        x, some = load(x_ref, batch, columns, b, d), load(rows_ref, rows, columns, count, d)
        return total + jnp.dot(x, some.T, preferred_element_type=jnp.float32)

    zero = jnp.zeros((batch.shape[0], t.rows), jnp.float32)
    total = lax.fori_loop(0, -(-d // t.columns) * lax.clamp(0, count - first, 1), step, zero)
    store(out_ref, batch, rows, b, out_ref.shape[1], total)


def spread(shares: Array, rows: Array, count: Array) -> Array:
    """``h rows`` [b, d] with the first ``count`` rows [R, d], in float32; h is the sum of ``shares`` [S, b, R].

    Each program takes some rows, and the results are summed in a fixed order: one program for all rows would take
    longer than all other products with these rows together.
    """
    (_, b, height), d, t = shares.shape, rows.shape[1], SHORT
    blocks = -(-height // t.rows)
    return pl.pallas_call(
        partial(_spread_kernel, t=t, b=b, d=d),
        grid=(blocks, -(-d // t.columns)),
        out_shape=jax.ShapeDtypeStruct((blocks, b, d), jnp.float32),
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="grown_spread",
    )(count.reshape(1), shares, rows).sum(0)


def _spread_kernel(count_ref, h_ref, rows_ref, out_ref, *, t: Tiles, b: int, d: int):
    block, count = pl.program_id(0), count_ref[0]
    columns, batch = pl.program_id(1) * t.columns + jnp.arange(t.columns), jnp.arange(power(b))
    rows = block * t.rows + jnp.arange(t.rows)

    def product(_, total):
        h = load(h_ref, batch, rows, b, count, at=(0,))
        for share in range(1, h_ref.shape[0]):
            h += load(h_ref, batch, rows, b, count, at=(share,))
        some = load(rows_ref, rows, columns, count, d)
        return total + jnp.dot(h.astype(some.dtype), some, preferred_element_type=jnp.float32)

    zero = jnp.zeros((batch.shape[0], t.columns), jnp.float32)
    total = lax.fori_loop(0, lax.clamp(0, count - block * t.rows, 1), product, zero)
    store(out_ref, batch, columns, b, d, total, at=(block,))


def outer(start: Array, h: Array, rows: Array, count: Array, tiles: Tiles | None = None) -> Array:
    """``start + h rows`` [b, d] of h [b, R] with the first ``count`` rows [R, d], in their dtype."""
    b, d = start.shape
    tiles = tiles or OUTER[rows.dtype.itemsize]
    return pl.pallas_call(
        partial(_outer_kernel, t=tiles, b=b, d=d),
        grid=(-(-d // tiles.columns),),
        out_shape=jax.ShapeDtypeStruct((b, d), rows.dtype),
        compiler_params=gpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpreted(),
        name="grown_outer",
    )(count.reshape(1), start.astype(rows.dtype), h.astype(rows.dtype), rows)


def _outer_kernel(count_ref, start_ref, h_ref, rows_ref, out_ref, *, t: Tiles, b: int, d: int):
    columns, batch = pl.program_id(0) * t.columns + jnp.arange(t.columns), jnp.arange(power(b))
    count = count_ref[0]

    def step(i, total):
        rows = i * t.rows + jnp.arange(t.rows)
        h, some = load(h_ref, batch, rows, b, count), load(rows_ref, rows, columns, count, d)
        return total + jnp.dot(h, some, preferred_element_type=jnp.float32)

    start = load(start_ref, batch, columns, b, d).astype(jnp.float32)
    total = lax.fori_loop(0, lax.div(count + t.rows - 1, t.rows), step, start)
    store(out_ref, batch, columns, b, d, total)


def total(left: Array, right: Array, lane: Array, count: Array) -> Array:
    """``left[lane]' right[lane]`` [d, o] of the first ``count`` rows, of left [lanes, R, d] and right [lanes, R, o].

    The factors of the product have the narrower of their dtypes.
    """
    (_, _, d), o = left.shape, right.shape[2]
    columns, width = power(d, most=128), power(o, most=128)
    return pl.pallas_call(
        partial(_total_kernel, d=d, o=o, columns=columns, width=width),
        grid=(-(-d // columns), -(-o // width)),
        out_shape=jax.ShapeDtypeStruct((d, o), jnp.float32),
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpreted(),
        name="grown_total",
    )(jnp.stack([lane, count]), left, right)


def _total_kernel(which_ref, left_ref, right_ref, out_ref, *, d: int, o: int, columns: int, width: int):
    lane, count = which_ref[0], which_ref[1]
    kind = min((left_ref.dtype, right_ref.dtype), key=lambda dtype: dtype.itemsize)
    i, j = pl.program_id(0) * columns + jnp.arange(columns), pl.program_id(1) * width + jnp.arange(width)

    def step(block, total):
        rows = block * 32 + jnp.arange(32)
        left = load(left_ref, rows, i, count, d, at=(lane,)).astype(kind)
        right = load(right_ref, rows, j, count, o, at=(lane,)).astype(kind)
        return total + jnp.dot(left.T, right, preferred_element_type=jnp.float32)

    zero = jnp.zeros((columns, width), jnp.float32)
    store(out_ref, i, j, d, o, lax.fori_loop(0, lax.div(count + 31, 32), step, zero))


def added(left: Array, rows: Array, count: Array, after: tuple[Array, ...] = ()) -> Array:
    """``left`` with ``rows`` written in place after its first ``count`` rows. Rows beyond the buffer are dropped.

    ``after`` are values that are computed from the old left. As inputs they make the compiler run this kernel last, so
    that it can write in place without a copy.
    """
    b, d = rows.shape
    width = power(d, most=COPIED)
    return pl.pallas_call(
        partial(_added_kernel, d=d, width=width),
        grid=(b, -(-d // width)),
        out_shape=jax.ShapeDtypeStruct(left.shape, left.dtype),
        input_output_aliases={2: 0},
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpreted(),
        name="grown_added",
    )(count.reshape(1), rows, left, *after)


def _added_kernel(count_ref, rows_ref, _, *refs, d: int, width: int):
    *_, out_ref = refs
    row, columns = pl.program_id(0), pl.program_id(1) * width + jnp.arange(width)
    at = count_ref[0] + row
    values = gpu.load(rows_ref.at[row, columns], mask=columns < d, other=0.0)
    gpu.store(out_ref.at[at, columns], values.astype(out_ref.dtype), mask=(columns < d) & (at < out_ref.shape[0]))
