"""Kernels for activations and cross entropies.

A bias and the activation that follows it are one kernel, and so is their gradient. With y = f(x + bias), the latter
reads x and the gradient of y, and writes the gradient of x and its sums over rows, the gradient of the bias. XLA's sums
over rows are far from the rate of memory.

log(sum(exp(x))) of rows is computed in one pass, with the largest value so far: XLA reads the rows twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import load, power, store

__all__ = ["activation", "activation_back", "log_sum_exp_rows", "tanh"]

Array = jax.Array
Sizes = tuple[int, int]
ROWS, COLUMNS = 32, 128  # of the values that a program takes
LOGITS = 4, 2048  # the same, of logits
WARPS, LOGITS_WARPS = 4, 8


def tanh(x: Array) -> Array:
    """tanh in one instruction, with a relative error of 2^-11; that of rounding to bfloat16 is 2^-9."""
    return jnp.tanh(x) if interpreted() else gpu.approx_tanh(x)


def activation(function: Callable, x: Array, bias: Array) -> Array:
    """``function(x + bias)`` of x [N, C] and bias [C], in the dtype of x."""
    n, c = x.shape
    rows, columns = power(n, 1, ROWS), power(c, most=COLUMNS)
    return pl.pallas_call(
        partial(_forward_kernel, function=function, sizes=(n, c), tile=(rows, columns)),
        grid=(-(-n // rows), -(-c // columns)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=gpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpreted(),
        name="activation",
    )(x, bias)


def activation_back(function: Callable, x: Array, bias: Array, dy: Array) -> tuple[Array, Array]:
    """The gradients of x [N, C] and of bias [C] of ``function(x + bias)``, for the gradient ``dy`` of the result."""
    n, c = x.shape
    rows, columns = power(n, 1, ROWS), power(c, most=COLUMNS)
    blocks = -(-n // rows)
    dx, shares = pl.pallas_call(
        partial(_back_kernel, function=function, sizes=(n, c), tile=(rows, columns)),
        grid=(blocks, -(-c // columns)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((blocks, c), jnp.float32)],
        compiler_params=gpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpreted(),
        name="activation_back",
    )(x, bias, dy)
    return dx, shares.sum(0)


def _sums(x_ref: Any, b_ref: Any, sizes: Sizes, tile: Sizes) -> tuple[Array, Array, Array, bool]:
    """Numbers of the rows and columns of a program, ``x + bias`` there, and whether no mask is needed."""
    rows, columns = (pl.program_id(i) * tile[i] + jnp.arange(tile[i]) for i in range(2))
    bias = gpu.load(b_ref.at[columns], mask=columns < sizes[1], other=0.0)
    whole = sizes[0] % tile[0] == 0 and sizes[1] % tile[1] == 0
    return rows, columns, load(x_ref, rows, columns, *sizes, whole=whole).astype(jnp.float32) + bias[None, :], whole


def _forward_kernel(x_ref, b_ref, y_ref, *, function: Callable, sizes: Sizes, tile: Sizes):
    rows, columns, x, whole = _sums(x_ref, b_ref, sizes, tile)
    store(y_ref, rows, columns, *sizes, function(x), whole=whole)


def _back_kernel(x_ref, b_ref, dy_ref, dx_ref, db_ref, *, function: Callable, sizes: Sizes, tile: Sizes):
    rows, columns, x, whole = _sums(x_ref, b_ref, sizes, tile)
    dy = load(dy_ref, rows, columns, *sizes, whole=whole).astype(jnp.float32)
    dx = jax.jvp(function, (x,), (dy,))[1]
    if not whole:  # beyond the array dy is 0, but a slope may be infinite
        dx = jnp.where(jnp.broadcast_to((rows < sizes[0])[:, None], dx.shape), dx, 0.0)
    store(dx_ref, rows, columns, *sizes, dx, whole=whole)
    gpu.store(db_ref.at[jnp.full(columns.shape, pl.program_id(0)), columns], jnp.sum(dx, 0), mask=columns < sizes[1])


def log_sum_exp_rows(x: Array) -> Array:
    """log(sum(exp(x))) over the last axis of x [N, C], in float32."""
    n, c = x.shape
    rows, columns = power(n, 1, LOGITS[0]), power(c, most=LOGITS[1])
    return pl.pallas_call(
        partial(_log_sum_exp_kernel, sizes=(n, c), tile=(rows, columns)),
        grid=(-(-n // rows),),
        out_shape=jax.ShapeDtypeStruct((n,), jnp.float32),
        compiler_params=gpu.CompilerParams(num_warps=LOGITS_WARPS, num_stages=1),
        interpret=interpreted(),
        name="log_sum_exp",
    )(x)


def _log_sum_exp_kernel(x_ref, y_ref, *, sizes: Sizes, tile: Sizes):
    rows = pl.program_id(0) * tile[0] + jnp.arange(tile[0])
    whole = sizes[0] % tile[0] == 0 and sizes[1] % tile[1] == 0

    def step(i, past):
        largest, total = past
        columns = i * tile[1] + jnp.arange(tile[1])
        x = load(x_ref, rows, columns, *sizes, whole=whole).astype(jnp.float32)
        if not whole:
            x = jnp.where(jnp.broadcast_to((columns < sizes[1])[None, :], x.shape), x, -jnp.inf)
        top = jnp.maximum(largest, jnp.max(x, 1))
        shift = jnp.where(top == -jnp.inf, 0.0, top)  # of a row without a finite value
        return top, total * jnp.exp(largest - shift) + jnp.sum(jnp.exp(x - shift[:, None]), 1)

    start = jnp.full(tile[0], -jnp.inf, jnp.float32), jnp.zeros(tile[0], jnp.float32)
    largest, total = lax.fori_loop(0, -(-sizes[1] // tile[1]), step, start)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    gpu.store(y_ref.at[rows], shift + jnp.log(total), mask=rows < sizes[0])
