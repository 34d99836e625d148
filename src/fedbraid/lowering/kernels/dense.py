"""Kernels for dense layers: a matrix product, and an activation of it before it is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import load, store

__all__ = ["activated", "gradient"]

Array = jax.Array


class Tile(NamedTuple):
    """The part of a product that a program computes, and the terms of its sums that it reads at a time."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


class Product(NamedTuple):
    """The sizes of ``x w``, of x [n, k] and w [k, m]; turned: w is [m, k]."""

    n: int
    k: int
    m: int
    turned: bool
    tile: Tile

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.n // self.tile.rows), -(-self.m // self.tile.columns)

    @property
    def whole(self) -> bool:
        """Whether no tile extends beyond the result."""
        return self.n % self.tile.rows == 0 and self.m % self.tile.columns == 0

    def places(self) -> tuple[Array, Array]:
        """The rows and columns of a program."""
        t = self.tile
        return pl.program_id(0) * t.rows + jnp.arange(t.rows), pl.program_id(1) * t.columns + jnp.arange(t.columns)

    def compute(self, x_ref: Any, w_ref: Any) -> Array:
        """The product at the places of a program, in float32; zero beyond the result."""
        t, (rows, columns) = self.tile, self.places()
        whole = self.whole and self.k % t.terms == 0

        def step(i, total):
            terms = i * t.terms + jnp.arange(t.terms)
            x = load(x_ref, rows, terms, self.n, self.k, whole=whole)
            if self.turned:
                w = load(w_ref, columns, terms, self.m, self.k, whole=whole).T
            else:
                w = load(w_ref, terms, columns, self.k, self.m, whole=whole)
            return total + jnp.dot(x, w, preferred_element_type=jnp.float32)

        return lax.fori_loop(0, -(-self.k // t.terms), step, jnp.zeros((t.rows, t.columns), jnp.float32))


# With these, an H200 runs two programs of `activated` and three of `gradient` at a time on each multiprocessor. Of
# `gradient` with 128 columns it would run one: a program needs more than half of the registers.
WIDE, WIDE_BACK = Tile(128, 128, 64, warps=8, stages=3), Tile(128, 64, 64, warps=8, stages=3)
NARROW = Tile(64, 64, 64, warps=4, stages=4)
ENTRIES = 1 << 17  # of a product from which wide tiles are used


def _product(x: Array, w: Array, turned: bool, wide: Tile) -> Product:
    (n, k), m = x.shape, w.shape[0 if turned else 1]
    return Product(n, k, m, turned, wide if n * m >= ENTRIES else NARROW)


def activated(function: Callable, x: Array, w: Array, bias: Array, turned: bool = False) -> tuple[Array, Array]:
    """``h = x w`` and ``function(h + bias)``, both in the dtype of x; ``x w'`` if turned."""
    p = _product(x, w, turned, WIDE)
    h, a = pl.pallas_call(
        partial(_activated_kernel, function=function, p=p),
        grid=p.grid,
        out_shape=[jax.ShapeDtypeStruct((p.n, p.m), x.dtype)] * 2,
        compiler_params=gpu.CompilerParams(num_warps=p.tile.warps, num_stages=p.tile.stages),
        interpret=interpreted(),
        name="dense_activation",
    )(x, w, bias)
    return h, a


def _activated_kernel(x_ref, w_ref, b_ref, h_ref, a_ref, *, function: Callable, p: Product):
    rows, columns = p.places()
    h = p.compute(x_ref, w_ref).astype(h_ref.dtype)  # rounded, as its gradient reads it
    store(h_ref, rows, columns, p.n, p.m, h, whole=p.whole)
    store(a_ref, rows, columns, p.n, p.m, function(h.astype(jnp.float32) + _bias(b_ref, columns, p)), whole=p.whole)


def gradient(
    function: Callable, x: Array, w: Array, h: Array, bias: Array, turned: bool = False
) -> tuple[Array, Array]:
    """The gradients of h and of bias of ``function(h + bias)``, if that of the result is ``x w`` (``x w'`` if turned).

    That of h is written over h.
    """
    p = _product(x, w, turned, WIDE_BACK)
    dh, shares = pl.pallas_call(
        partial(_gradient_kernel, function=function, p=p),
        grid=p.grid,
        out_shape=[jax.ShapeDtypeStruct(h.shape, h.dtype), jax.ShapeDtypeStruct((p.grid[0], p.m), jnp.float32)],
        input_output_aliases={2: 0},
        compiler_params=gpu.CompilerParams(num_warps=p.tile.warps, num_stages=p.tile.stages),
        interpret=interpreted(),
        name="dense_activation_back",
    )(x, w, h, bias)
    return dh, shares.sum(0)


def _gradient_kernel(x_ref, w_ref, h_ref, b_ref, dh_ref, db_ref, *, function: Callable, p: Product):
    rows, columns = p.places()
    da = p.compute(x_ref, w_ref).astype(h_ref.dtype).astype(jnp.float32)  # in half of the registers
    h = load(h_ref, rows, columns, p.n, p.m, whole=p.whole).astype(jnp.float32) + _bias(b_ref, columns, p)
    dh = jax.jvp(function, (h,), (da,))[1]
    if not p.whole:  # beyond the array da is 0, but a slope may be infinite
        dh = jnp.where(jnp.broadcast_to((rows < p.n)[:, None], dh.shape), dh, 0.0)
    store(dh_ref, rows, columns, p.n, p.m, dh, whole=p.whole)
    gpu.store(db_ref.at[jnp.full(columns.shape, pl.program_id(0)), columns], jnp.sum(dh, 0), mask=columns < p.m)


def _bias(b_ref: Any, columns: Array, p: Product) -> Array:
    return gpu.load(b_ref.at[columns], mask=columns < p.m, other=0.0)[None, :]
