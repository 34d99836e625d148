"""Group normalisation on a GPU as one kernel, with the addition of a residual and the ReLU that follow it.

Compiled by XLA, a normalisation reads its input several times, forwards and backwards, with reductions that are far
from the rate of memory. Here a program takes one image. It reads the image once and keeps it in registers if it is
small enough (else it reads it again, from the cache), and writes the result once.

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
from fedbraid.lowering.kernels.tiles import load, power, store
from fedbraid.lowering.normalisation import Norm, plainly
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["normalise"]

Array = jax.Array
BLOCK = 8192  # values that a program loads at a time
HELD = 16 * 32 * 96  # values of an image that a program can keep in registers
WARPS = 16


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def normalise(x: Array, weights: Array, residual: Array | None, norm: Norm) -> Array:
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


def _slowly(x: Array, weights: Array, residual: Array | None, norm: Norm) -> tuple[Array, Array]:
    return plainly(x, weights, residual, norm), _statistics(x, norm)


def _slowly_back(x, weights, residual, statistics, kept, dy, *, norm: Norm) -> tuple:
    del statistics, kept
    return jax.vjp(partial(plainly, norm=norm), x, weights, residual)[1](dy)


class _Shape(NamedTuple):
    """Sizes of one image, and of the tiles in which it is read."""

    n: int
    c: int
    rows: int
    columns: int
    held: bool

    @property
    def blocks(self) -> int:
        return -(-self.n // self.rows)


def _shape(x: Array) -> _Shape:
    _, n, c = x.shape
    columns = power(c)
    rows = power(n, 1, max(BLOCK // columns, 1))
    return _Shape(n, c, rows, columns, held=-(-n // rows) * rows * columns <= HELD)


def _call(kernel: Any, x: Array, outputs: list, name: str, *inputs: Any) -> Any:
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0],),
        out_shape=outputs,
        compiler_params=gpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpreted(),
        name=name,
    )(*inputs)


def _forward(x: Array, weights: Array, residual: Array | None, norm: Norm) -> tuple[Array, Array]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    statistics = jax.ShapeDtypeStruct((x.shape[0], 2, norm.groups), jnp.float32)
    kernel = partial(_forward_kernel, norm=norm, shape=_shape(x))
    given = [x, weights, *([] if residual is None else [residual])]
    return tuple(_call(kernel, x, [like, statistics], "group_norm", *given))


def _members(norm: Norm, shape: _Shape) -> Array:
    """Which channels belong to which group, [G, C] of 0 and 1."""
    group, channel = jnp.arange(power(norm.groups, 1)), jnp.arange(shape.columns)
    size = shape.c // norm.groups
    inside = (jax.lax.div(channel, size)[None, :] == group[:, None]) & (channel < shape.c)[None, :]
    return inside.astype(jnp.float32)


def _of_channels(members: Array, values: Array) -> Array:
    """Values of groups [G] for each channel [C]."""
    return jnp.sum(members * values[:, None], 0)


def _reader(ref: Any, image: Any, shape: _Shape) -> Any:
    """A function of a block's number: its values in float32, zero beyond the image."""

    def read(block: int) -> Array:
        rows = block * shape.rows + jnp.arange(shape.rows)
        return load(ref, rows, jnp.arange(shape.columns), shape.n, shape.c, at=(jnp.full((1, 1), image),))

    if not shape.held:
        return lambda block: read(block).astype(jnp.float32)
    blocks = [read(block) for block in range(shape.blocks)]
    return lambda block: blocks[block].astype(jnp.float32)


def _vector(ref: Any, row: int, size: int, width: int) -> Array:
    at = jnp.arange(width)
    return gpu.load(ref.at[jnp.full(width, row), at], mask=at < size, other=0.0)


def _forward_kernel(x_ref, w_ref, *refs, norm: Norm, shape: _Shape):
    *r_ref, y_ref, s_ref = refs
    image, members = pl.program_id(0), _members(norm, shape)
    read = _reader(x_ref, image, shape)
    channels = jnp.arange(shape.columns)
    where = (jnp.full(shape.columns, image), jnp.zeros_like(channels), channels)
    pivot = gpu.load(x_ref.at[where], mask=channels < shape.c, other=0.0).astype(jnp.float32)
    first = second = jnp.zeros(shape.columns, jnp.float32)  # sums of (x - pivot) and of its square, for each channel
    for block in range(shape.blocks):
        there = (block * shape.rows + jnp.arange(shape.rows) < shape.n)[:, None]
        off = jnp.where(there, read(block) - pivot[None, :], 0.0)
        first, second = first + jnp.sum(off, 0), second + jnp.sum(off * off, 0)
    count = shape.n * (shape.c // norm.groups)
    mean = jnp.sum(members * (first + shape.n * pivot)[None, :], 1) / count
    apart = pivot - _of_channels(members, mean)
    squares = second + 2 * apart * first + shape.n * apart * apart
    inverse = jax.lax.rsqrt(jnp.sum(members * squares[None, :], 1) / count + norm.epsilon)
    group = jnp.arange(power(norm.groups, 1))
    for i, value in enumerate((mean, inverse)):
        at = (jnp.full(group.shape, image), jnp.full(group.shape, i), group)
        gpu.store(s_ref.at[at], value, mask=group < norm.groups)
    scale, shift = (_vector(w_ref, i, shape.c, shape.columns) for i in (0, 1))
    factor = _of_channels(members, inverse) * scale
    offset = shift - _of_channels(members, mean) * factor
    added = [_reader(ref, image, shape._replace(held=False)) for ref in r_ref]
    for block in range(shape.blocks):
        y = read(block) * factor[None, :] + offset[None, :]
        for more in added:
            y += more(block)
        y = jnp.where(y <= 0, 0.0, y) if norm.relu else y  # propagates NaN
        rows = block * shape.rows + jnp.arange(shape.rows)
        store(y_ref, rows, channels, shape.n, shape.c, y, at=(jnp.full((1, 1), image),))


def _backward(x, weights, residual, statistics, kept, dy, *, norm: Norm) -> tuple:
    like, b = jax.ShapeDtypeStruct(x.shape, x.dtype), x.shape[0]
    outputs = [like, jax.ShapeDtypeStruct((b, 2, x.shape[2]), jnp.float32), *([] if kept is None else [like])]
    kernel = partial(_backward_kernel, norm=norm, shape=_shape(x))
    given = [x, dy, weights, statistics, *([] if kept is None else [kept])]
    dx, dw, *gated = _call(kernel, x, outputs, "group_norm_back", *given)
    return dx, dw.sum(0).astype(weights.dtype), None if residual is None else gated[0] if gated else dy


def _backward_kernel(x_ref, dy_ref, w_ref, s_ref, *refs, norm: Norm, shape: _Shape):
    y_ref, (dx_ref, dw_ref), e_ref = ((), refs, ()) if len(refs) == 2 else (refs[:1], refs[1:3], refs[3:])
    image, members = pl.program_id(0), _members(norm, shape)
    values, slopes = _reader(x_ref, image, shape), _reader(dy_ref, image, shape)
    results = [_reader(ref, image, shape._replace(held=False)) for ref in y_ref]
    group, channels = jnp.arange(power(norm.groups, 1)), jnp.arange(shape.columns)
    mean, inverse = (
        gpu.load(
            s_ref.at[jnp.full(group.shape, image), jnp.full(group.shape, i), group], mask=group < norm.groups, other=0.0
        )
        for i in (0, 1)
    )
    mean, inverse = _of_channels(members, mean), _of_channels(members, inverse)
    scale, shift = (_vector(w_ref, i, shape.c, shape.columns) for i in (0, 1))

    def passed(block: int) -> tuple[Array, Array]:
        """The normalised values, and the gradient that the ReLU lets through."""
        h = (values(block) - mean[None, :]) * inverse[None, :]
        e = slopes(block)
        if norm.relu:
            y = results[0](block) if results else h * scale[None, :] + shift[None, :]
            e = jnp.where(y > 0, e, 0.0)
        return h, e

    first = second = jnp.zeros(shape.columns, jnp.float32)
    for block in range(shape.blocks):
        h, e = passed(block)  # e is zero beyond the image
        first, second = first + jnp.sum(e, 0), second + jnp.sum(e * h, 0)
    for i, value in enumerate((second, first)):
        at = (jnp.full(channels.shape, image), jnp.full(channels.shape, i), channels)
        gpu.store(dw_ref.at[at], value, mask=channels < shape.c)
    count = shape.n * (shape.c // norm.groups)
    along, across = (
        _of_channels(members, jnp.sum(members * (scale * total)[None, :], 1) / count) for total in (first, second)
    )
    where = (jnp.full((1, 1), image),)
    for block in range(shape.blocks):
        h, e = passed(block)
        rows = block * shape.rows + jnp.arange(shape.rows)
        dx = (e * scale[None, :] - along[None, :] - h * across[None, :]) * inverse[None, :]
        store(dx_ref, rows, channels, shape.n, shape.c, dx, at=where)
        for ref in e_ref:
            store(ref, rows, channels, shape.n, shape.c, e, at=where)
