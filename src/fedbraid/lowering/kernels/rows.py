"""Normalisation of rows (layer norm, root mean square norm) on a GPU as one kernel forwards and one backwards.

A program takes some rows, reads them once and keeps them in registers. With h = (x - mean) / sqrt(variance + epsilon)
(the mean is 0 for a root mean square norm), e the gradient of y = h scale + shift, and q = e scale,

    dx = (q - mean(q) - h mean(q h)) / sqrt(variance + epsilon),    dscale = sum(e h),    dshift = sum(e),

where the means are over a row (mean(q) is left out without the mean of x) and the sums over rows.

A residual connection before the norm is part of its kernel: x = r + a + bias, with both x and the norm as results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import load, power, store
from fedbraid.lowering.row_norm import RowNorm, Weights, plainly
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["add_normalise_rows", "normalise_rows"]

Array = jax.Array
Sizes = tuple[int, int]
BLOCK = 8192  # values that a program takes
WARPS = 4


@partial(jax.custom_jvp[Array], nondiff_argnums=(2,))
def normalise_rows(x: Array, weights: Weights, norm: RowNorm) -> Array:
    """`fedbraid.lowering.row_norm.plainly`, as a kernel: forwards one, backwards one. x [N, C]."""
    return _forward(x, weights, norm=norm)


@normalise_rows.defjvp
def _jvp(norm: RowNorm, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    y = computed_by(partial(_forward, norm=norm), partial(plainly, norm=norm))(*primals)

    def along(given: tuple, changes: tuple) -> Array:
        return jax.jvp(partial(plainly, norm=norm), given, changes)[1]

    def back(given: tuple, dy: Array) -> tuple:
        return computed_by(partial(_backward, norm=norm), partial(_slowly_back, norm=norm))(*given, dy)

    return y, linear(along, back, primals, tangents)


def _slowly_back(x: Array, weights: Weights, dy: Array, *, norm: RowNorm) -> tuple:
    return jax.vjp(partial(plainly, norm=norm), x, weights)[1](dy)


@partial(jax.custom_jvp[tuple[Array, Array]], nondiff_argnums=(4,))
def add_normalise_rows(r: Array, a: Array, bias: Array, weights: Weights, norm: RowNorm) -> tuple[Array, Array]:
    """``x = r + a + bias`` and the norm of x, as a kernel: forwards one, backwards one."""
    return _add_forward(r, a, bias, weights, norm=norm)


def _added(r: Array, a: Array, bias: Array, weights: Weights, norm: RowNorm) -> tuple[Array, Array]:
    x = (r.astype(jnp.float32) + a.astype(jnp.float32) + bias).astype(r.dtype)
    return x, plainly(x, weights, norm)


@add_normalise_rows.defjvp
def _add_jvp(norm: RowNorm, primals: tuple, tangents: tuple) -> tuple:
    results = computed_by(partial(_add_forward, norm=norm), partial(_added, norm=norm))(*primals)

    def along(given: tuple, changes: tuple) -> tuple:
        x, weights = given
        dr, da, dbias, dweights = changes
        dx = (dr.astype(jnp.float32) + da.astype(jnp.float32) + dbias).astype(x.dtype)
        return dx, jax.jvp(partial(plainly, norm=norm), (x, weights), (dx, dweights))[1]

    def back(given: tuple, slopes: tuple) -> tuple:
        return computed_by(partial(_add_backward, norm=norm), partial(_add_slowly_back, norm=norm))(*given, *slopes)

    return results, linear(along, back, (results[0], primals[3]), tangents)


def _add_slowly_back(x: Array, weights: Weights, dx: Array, dy: Array, *, norm: RowNorm) -> tuple:
    more, dweights = jax.vjp(partial(plainly, norm=norm), x, weights)[1](dy)
    total = dx.astype(jnp.float32) + more.astype(jnp.float32)
    return total.astype(x.dtype), total.astype(x.dtype), total.sum(0), dweights


def _tile(x: Array) -> tuple[int, int]:
    columns = power(x.shape[1])
    return power(x.shape[0], 1, max(BLOCK // columns, 1)), columns


def _call(kernel: Any, x: Array, outputs: list, name: str, *inputs: Any) -> Any:
    return pl.pallas_call(
        kernel,
        grid=(-(-x.shape[0] // _tile(x)[0]),),
        out_shape=outputs,
        compiler_params=gpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpreted(),
        name=name,
    )(*inputs)


def _forward(x: Array, weights: Weights, *, norm: RowNorm) -> Array:
    kernel = partial(_forward_kernel, norm=norm, sizes=(x.shape[0], x.shape[1]), tile=_tile(x))
    return _call(kernel, x, [jax.ShapeDtypeStruct(x.shape, x.dtype)], "row_norm", x, *weights)[0]


def _add_forward(r: Array, a: Array, bias: Array, weights: Weights, *, norm: RowNorm) -> tuple[Array, Array]:
    kernel = partial(_add_forward_kernel, norm=norm, sizes=(r.shape[0], r.shape[1]), tile=_tile(r))
    like = jax.ShapeDtypeStruct(r.shape, r.dtype)
    x, y = _call(kernel, r, [like, like], "add_row_norm", r, a, bias, *weights)
    return x, y


def _vector(ref: Any, width: int) -> Array:
    at = jnp.arange(width)
    return gpu.load(ref.at[at], mask=at < ref.shape[0], other=0.0)


def _whole(sizes: Sizes, tile: Sizes) -> bool:
    """Whether tiles fill an array, so that no mask is needed."""
    return sizes[0] % tile[0] == 0 and sizes[1] == tile[1]


def _rows(ref: Any, at: tuple[Array, Array], sizes: Sizes) -> Array:
    whole = _whole(sizes, (at[0].shape[0], at[1].shape[0]))
    return load(ref, *at, *sizes, whole=whole).astype(jnp.float32)


def _block(tile: Sizes) -> tuple[Array, Array]:
    """Numbers of the rows and columns of a program."""
    return pl.program_id(0) * tile[0] + jnp.arange(tile[0]), jnp.arange(tile[1])


def _normalised(x: Array, norm: RowNorm, sizes: Sizes) -> tuple[Array, Array]:
    """The normalised rows of float32 x, and their 1 / sqrt(variance + epsilon)."""
    if norm.centred:
        x = x - (jnp.sum(x, 1) / sizes[1])[:, None]
        if sizes[1] != x.shape[1]:
            x = jnp.where(jnp.broadcast_to((jnp.arange(x.shape[1]) < sizes[1])[None, :], x.shape), x, 0.0)
    inverse = jax.lax.rsqrt(jnp.sum(x * x, 1) / sizes[1] + np.float32(norm.epsilon))
    return x * inverse[:, None], inverse


def _scaled(h: Array, refs: Any, tile: Sizes) -> Array:
    scale, shift = (_vector(ref, tile[1]) for ref in refs)
    return h * scale[None, :] + shift[None, :]


def _forward_kernel(x_ref, scale_ref, shift_ref, y_ref, *, norm: RowNorm, sizes: Sizes, tile: Sizes):
    at = _block(tile)
    h, _ = _normalised(_rows(x_ref, at, sizes), norm, sizes)
    store(y_ref, *at, *sizes, _scaled(h, (scale_ref, shift_ref), tile), whole=_whole(sizes, tile))


def _add_forward_kernel(r_ref, a_ref, b_ref, *refs, norm: RowNorm, sizes: Sizes, tile: Sizes):
    *weights, x_ref, y_ref = refs
    at, whole = _block(tile), _whole(sizes, tile)
    x = _rows(r_ref, at, sizes) + _rows(a_ref, at, sizes) + _vector(b_ref, tile[1])[None, :]
    x = x.astype(x_ref.dtype)
    store(x_ref, *at, *sizes, x, whole=whole)
    h, _ = _normalised(x.astype(jnp.float32), norm, sizes)
    store(y_ref, *at, *sizes, _scaled(h, weights, tile), whole=whole)


def _backward(x: Array, weights: Weights, dy: Array, *, norm: RowNorm) -> tuple[Array, Weights]:
    dx, shares = _back(x, weights, [dy], norm, "row_norm_back")
    sums = shares.sum(0)
    return dx, (sums[0], sums[1])


def _add_backward(x: Array, weights: Weights, dx: Array, dy: Array, *, norm: RowNorm) -> tuple:
    total, shares = _back(x, weights, [dy, dx], norm, "add_row_norm_back")
    sums = shares.sum(0)
    return total, total, sums[2], (sums[0], sums[1])


def _back(x: Array, weights: Weights, slopes: list[Array], norm: RowNorm, name: str) -> tuple[Array, Array]:
    """The gradient of x, and for every program its shares of the gradients of scale, shift and bias."""
    blocks = -(-x.shape[0] // _tile(x)[0])
    kernel = partial(_backward_kernel, norm=norm, sizes=(x.shape[0], x.shape[1]), tile=_tile(x))
    shares = jax.ShapeDtypeStruct((blocks, 1 + len(slopes), x.shape[1]), jnp.float32)  # [dscale, dshift, dbias]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    dx, shares = _call(kernel, x, [like, shares], name, x, weights[0], *slopes)
    return dx, shares


def _backward_kernel(x_ref, w_ref, dy_ref, *refs, norm: RowNorm, sizes: Sizes, tile: Sizes):
    *past_ref, dx_ref, dw_ref = refs
    rows, columns = _block(tile)
    at, whole = (rows, columns), _whole(sizes, tile)
    h, inverse = _normalised(_rows(x_ref, at, sizes), norm, sizes)
    e = _rows(dy_ref, at, sizes)
    q = e * _vector(w_ref, tile[1])[None, :]
    dx = q - h * (jnp.sum(q * h, 1) / sizes[1])[:, None]
    if norm.centred:
        dx = dx - (jnp.sum(q, 1) / sizes[1])[:, None]
    dx = dx * inverse[:, None]
    totals = [jnp.sum(e * h, 0), jnp.sum(e, 0)]
    for ref in past_ref:  # the gradient of x that comes past the norm
        dx = dx + _rows(ref, at, sizes)  # zero beyond the array
        totals.append(jnp.sum(dx, 0))
    store(dx_ref, rows, columns, *sizes, dx, whole=whole)
    for i, values in enumerate(totals):
        where = (jnp.full(columns.shape, pl.program_id(0)), jnp.full(columns.shape, i), columns)
        gpu.store(dw_ref.at[where], values, mask=columns < sizes[1])
