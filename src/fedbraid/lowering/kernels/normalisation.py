"""Group normalisation on a GPU as one kernel, with the addition of a residual and the ReLU that follow it.

Compiled by XLA, a normalisation reads its input several times, forwards and backwards, with reductions that are far
from the rate of memory. Here a program takes one group of one image. It reads it once and keeps it in registers if it
is small enough (else it reads it again, from the cache), and writes the result once.

With groups g of n values, mean m and variance v, the value is ``y = act(h scale + shift + residual)`` where
``h = (x - m) / sqrt(v + epsilon)``. With e the gradient of y where the ReLU passes it and q = e scale,

    dx = (q - mean(q) - h mean(q h)) / sqrt(v + epsilon),    dscale = sum(e h),    dshift = sum(e),    dresidual = e,

where the means are over a group and the sums over space and images.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import power
from fedbraid.lowering.normalisation import Norm, Weights, plainly
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["normalise"]

Array = jax.Array
LARGE = 1 << 15  # values of a piece; larger ones are read in large blocks, since each block is a part of the program
KEPT, KEPT_BACK = 160, 96  # values that a thread keeps: more registers leave fewer programs to run at a time
LEAST_CHANNELS = 32  # of a program that takes some of an image's groups: neighbours in memory


@partial(jax.custom_jvp[Array], nondiff_argnums=(3,))
def normalise(x: Array, weights: Weights, residual: Array | None, norm: Norm) -> Array:
    """`plainly`, as a kernel: forwards one, backwards one."""
    return _forward(x, weights, residual, norm)[0]


@normalise.defjvp
def _normalise_jvp(norm: Norm, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    x, weights, residual = primals
    y, statistics = computed_by(partial(_forward, norm=norm), partial(_slowly, norm=norm))(*primals)
    kept = y if norm.relu and residual is not None else None  # else the ReLU's gate is computed from x

    def along(given: tuple, changes: tuple) -> Array:
        at = given[:3]
        return jax.jvp(partial(plainly, norm=norm), at, changes)[1]

    def back(given: tuple, dy: Array) -> tuple:
        fast = partial(_backward, norm=norm)
        return computed_by(fast, partial(_slowly_back, norm=norm))(*given, dy)

    return y, linear(along, back, (x, weights, residual, statistics, kept), tangents)


def _statistics(x: Array, norm: Norm) -> Array:
    """Mean and 1 / sqrt(variance + epsilon) of every image and group [B, 2, G]."""
    b, n, c = x.shape
    grouped = x.astype(jnp.float32).reshape(b, n, norm.groups, c // norm.groups)
    return jnp.stack([grouped.mean((1, 3)), jax.lax.rsqrt(grouped.var((1, 3)) + norm.epsilon)], 1)


def _slowly(x: Array, weights: Weights, residual: Array | None, norm: Norm) -> tuple[Array, Array]:
    return plainly(x, weights, residual, norm), _statistics(x, norm)


def _slowly_back(x, weights, residual, statistics, kept, dy, *, norm: Norm) -> tuple:
    del statistics, kept
    return jax.vjp(partial(plainly, norm=norm), x, weights, residual)[1](dy)


class _Shape(NamedTuple):
    """The piece of an image that one program takes: its sizes, and those of the tiles in which it is read."""

    n: int
    c: int  # channels of the piece
    groups: int  # groups of the piece
    rows: int
    columns: int
    warps: int

    @property
    def blocks(self) -> int:
        return -(-self.n // self.rows)

    def held(self, limit: int) -> bool:
        """Whether a thread keeps the piece, at most ``limit`` values of it, in registers. Else it is read again."""
        return self.blocks * self.rows * self.columns <= limit * 32 * self.warps


def _shape(x: Array, norm: Norm) -> _Shape:
    """The piece is one group of an image, or as few as have ``LEAST_CHANNELS`` channels: neighbours in memory."""
    _, n, c = x.shape
    pieces = max(p for p in range(1, norm.groups + 1) if norm.groups % p == 0 and (p == 1 or c // p >= LEAST_CHANNELS))
    columns = power(c // pieces)
    size = n * columns
    # warps, and values that a thread loads at a time: the fastest of those tried on an H200
    warps, loads = (2, 8) if size < 1 << 13 else (4, 8) if size < 1 << 14 else (4, 16) if size <= LARGE else (16, 32)
    rows = power(n, 1, max(loads * 32 * warps // columns, 1))
    return _Shape(n, c // pieces, norm.groups // pieces, rows, columns, warps)


def _call(kernel: Any, x: Array, norm: Norm, outputs: list, name: str, *inputs: Any) -> Any:
    shape = _shape(x, norm)
    return pl.pallas_call(
        partial(kernel, norm=norm, shape=shape),
        grid=(x.shape[0], norm.groups // shape.groups),
        out_shape=outputs,
        compiler_params=gpu.CompilerParams(num_warps=shape.warps, num_stages=1),
        interpret=interpreted(),
        name=name,
    )(*inputs)


def _forward(x: Array, weights: Weights, residual: Array | None, norm: Norm) -> tuple[Array, Array]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    statistics = jax.ShapeDtypeStruct((x.shape[0], 2, norm.groups), jnp.float32)
    given = [x, *weights, *([] if residual is None else [residual])]
    return tuple(_call(_forward_kernel, x, norm, [like, statistics], "group_norm", *given))


class _Piece(NamedTuple):
    """Where a program's piece is: the image, its channels and the number of its first group."""

    image: Any
    channels: Array
    inside: Array
    first: Any


def _piece(shape: _Shape) -> _Piece:
    piece, at = pl.program_id(1), jnp.arange(shape.columns)
    start = piece * shape.c
    return _Piece(pl.program_id(0), start + at, at < shape.c, piece * shape.groups)


def _members(shape: _Shape) -> Array:
    """Which channels of the piece belong to which of its groups, [G, C] of 0 and 1."""
    group, channel = jnp.arange(power(shape.groups, 1)), jnp.arange(shape.columns)
    size = shape.c // shape.groups
    inside = (jax.lax.div(channel, size)[None, :] == group[:, None]) & (channel < shape.c)[None, :]
    return inside.astype(jnp.float32)


def _of_channels(members: Array, values: Array) -> Array:
    """Values of groups [G] for each channel [C]."""
    return jnp.sum(members * values[:, None], 0)


def _block(ref: Any, block: int, piece: _Piece, shape: _Shape) -> tuple[Any, dict[str, Any]]:
    """A block of the piece in ref [B, N, C], and the mask of what is inside the image, if the block is not."""
    rows, where = block * shape.rows + jnp.arange(shape.rows), (shape.rows, shape.columns)
    at = [jnp.broadcast_to(a, where) for a in (piece.image, rows[:, None], piece.channels[None, :])]
    inside = []
    if (block + 1) * shape.rows > shape.n:
        inside.append(jnp.broadcast_to((rows < shape.n)[:, None], where))
    if shape.columns > shape.c:
        inside.append(jnp.broadcast_to(piece.inside[None, :], where))
    return ref.at[tuple(at)], {"mask": inside[0] & inside[-1]} if inside else {}


def _reader(ref: Any, piece: _Piece, shape: _Shape, *, held: bool) -> Any:
    """A function of a block's number: its values in float32, zero beyond the image."""

    def read(block: int) -> Array:
        at, mask = _block(ref, block, piece, shape)
        return gpu.load(at, **mask, other=0.0) if mask else gpu.load(at)

    if not held:
        return lambda block: read(block).astype(jnp.float32)
    blocks = [read(block) for block in range(shape.blocks)]
    return lambda block: blocks[block].astype(jnp.float32)


def _write(ref: Any, block: int, piece: _Piece, shape: _Shape, values: Array) -> None:
    at, mask = _block(ref, block, piece, shape)
    gpu.store(at, values.astype(ref.dtype), **mask)


def _vector(ref: Any, piece: _Piece) -> Array:
    return gpu.load(ref.at[piece.channels], mask=piece.inside, other=0.0)


def _of_groups(ref: Any, row: int, piece: _Piece, shape: _Shape) -> tuple[Any, Array]:
    """Where the numbers of the piece's groups are in [B, 2, G], and which are there."""
    group = jnp.arange(power(shape.groups, 1))
    at = (jnp.full(group.shape, piece.image), jnp.full(group.shape, row), piece.first + group)
    return ref.at[at], group < shape.groups


def _forward_kernel(x_ref, *refs, norm: Norm, shape: _Shape):
    *w_refs, y_ref, s_ref = refs
    w_refs, r_ref = w_refs[:2], w_refs[2:]
    piece, members = _piece(shape), _members(shape)
    read = _reader(x_ref, piece, shape, held=shape.held(KEPT))
    added = [_reader(ref, piece, shape, held=shape.held(KEPT_BACK)) for ref in r_ref]
    where = (jnp.full(shape.columns, piece.image), jnp.zeros_like(piece.channels), piece.channels)
    pivot = gpu.load(x_ref.at[where], mask=piece.inside, other=0.0).astype(jnp.float32)
    first = second = jnp.zeros((shape.rows, shape.columns), jnp.float32)  # sums of (x - pivot) and of its square
    for block in range(shape.blocks):
        off = read(block) - pivot[None, :]
        if (block + 1) * shape.rows > shape.n:
            there = block * shape.rows + jnp.arange(shape.rows) < shape.n
            off = jnp.where(there[:, None], off, 0.0)
        first, second = first + off, second + off * off
    first, second = jnp.sum(first, 0), jnp.sum(second, 0)  # for each channel, once: such a sum waits for all threads
    count = shape.n * (shape.c // shape.groups)
    mean = jnp.sum(members * (first + shape.n * pivot)[None, :], 1) / count
    apart = pivot - _of_channels(members, mean)
    squares = second + 2 * apart * first + shape.n * apart * apart
    inverse = jax.lax.rsqrt(jnp.sum(members * squares[None, :], 1) / count + norm.epsilon)
    for i, value in enumerate((mean, inverse)):
        at, mask = _of_groups(s_ref, i, piece, shape)
        gpu.store(at, value, mask=mask)
    scale, shift = (_vector(ref, piece) for ref in w_refs)
    factor = _of_channels(members, inverse) * scale
    offset = shift - _of_channels(members, mean) * factor
    for block in range(shape.blocks):
        y = read(block) * factor[None, :] + offset[None, :]
        for more in added:
            y += more(block)
        y = jnp.where(y <= 0, 0.0, y) if norm.relu else y  # propagates NaN
        _write(y_ref, block, piece, shape, y)


def _backward(x, weights, residual, statistics, kept, dy, *, norm: Norm) -> tuple:
    like, b = jax.ShapeDtypeStruct(x.shape, x.dtype), x.shape[0]
    outputs = [like, jax.ShapeDtypeStruct((b, 2, x.shape[2]), jnp.float32), *([] if kept is None else [like])]
    given = [x, dy, *weights, statistics, *([] if kept is None else [kept])]
    dx, dw, *gated = _call(_backward_kernel, x, norm, outputs, "group_norm_back", *given)
    dw = tuple(dw[:, i].sum(0).astype(each.dtype) for i, each in enumerate(weights))
    return dx, dw, None if residual is None else gated[0] if gated else dy


def _backward_kernel(x_ref, dy_ref, scale_ref, shift_ref, s_ref, *refs, norm: Norm, shape: _Shape):
    y_ref, (dx_ref, dw_ref), e_ref = ((), refs, ()) if len(refs) == 2 else (refs[:1], refs[1:3], refs[3:])
    piece, members = _piece(shape), _members(shape)
    held = shape.held(KEPT_BACK)
    values, slopes = (_reader(ref, piece, shape, held=held) for ref in (x_ref, dy_ref))
    results = [_reader(ref, piece, shape, held=False) for ref in y_ref]
    mean, inverse = (
        gpu.load(at, mask=mask, other=0.0) for at, mask in (_of_groups(s_ref, i, piece, shape) for i in (0, 1))
    )
    mean, inverse = _of_channels(members, mean), _of_channels(members, inverse)
    scale, shift = (_vector(ref, piece) for ref in (scale_ref, shift_ref))

    def passed(block: int) -> tuple[Array, Array]:
        """The normalised values, and the gradient that the ReLU lets through."""
        h = (values(block) - mean[None, :]) * inverse[None, :]
        e = slopes(block)
        if norm.relu:
            y = results[0](block) if results else h * scale[None, :] + shift[None, :]
            e = jnp.where(y > 0, e, 0.0)
        return h, e

    first = second = jnp.zeros((shape.rows, shape.columns), jnp.float32)
    gates = []
    for block in range(shape.blocks):
        h, e = passed(block)  # e is zero beyond the image
        gates.append(e.astype(dy_ref.dtype))
        first, second = first + e, second + e * h
    first, second = jnp.sum(first, 0), jnp.sum(second, 0)
    for i, value in enumerate((second, first)):
        at = (jnp.full(shape.columns, piece.image), jnp.full(shape.columns, i), piece.channels)
        gpu.store(dw_ref.at[at], value, mask=piece.inside)
    count = shape.n * (shape.c // shape.groups)
    along, across = (
        _of_channels(members, jnp.sum(members * (scale * total)[None, :], 1) / count) for total in (first, second)
    )
    for block in range(shape.blocks):
        if held:
            h, e = (values(block) - mean[None, :]) * inverse[None, :], gates[block].astype(jnp.float32)
        else:
            h, e = passed(block)
        dx = (e * scale[None, :] - along[None, :] - h * across[None, :]) * inverse[None, :]
        _write(dx_ref, block, piece, shape, dx)
        for ref in e_ref:
            _write(ref, block, piece, shape, e)
