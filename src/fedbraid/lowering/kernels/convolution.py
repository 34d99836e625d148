"""Convolutions on a GPU as one kernel, which gathers windows and multiplies them without writing them to memory.

A convolution as a product of patches with a kernel (im2col) writes every value of an image to memory once for each
place of the window, and reads it again. With separate kernels for every client, most of the time of a step is this
traffic. Here each program takes some output positions, gathers their windows tile by tile into the chip's own memory
and multiplies. Both gradients are computed in the same way: the gradient of the images is a convolution with the
flipped window, and the gradient of the kernel is a product of the transposed windows with the output's gradient.

Let p be an output position, q a place of the window, s the stride, l the spread of the images (l - 1 zeros between
values, as in the gradient of a strided convolution) and low the padding in front. Then position p reads, at place q,
the image value at (p s + q - low) / l, if that is a whole number inside the image.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted, precision, stored
from fedbraid.lowering.kernels.tiles import load, power
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["Geometry", "convolve", "pays"]

Array = jax.Array
Pair = tuple[int, int]
MOST_CHANNELS = 128


class Geometry(NamedTuple):
    """Window, strides, dilation of the images (``spread``), padding in front (``low``) and output size of both axes."""

    window: Pair
    stride: Pair = (1, 1)
    spread: Pair = (1, 1)
    low: Pair = (0, 0)
    out: Pair = (1, 1)


class Tiles(NamedTuple):
    """Tile sizes, and launch options of a kernel."""

    positions: int
    inner: int  # columns of the windows in one product
    outer: int  # outputs
    warps: int
    stages: int
    together: int = 9  # blocks of columns whose gradients one program sums
    split: int = 8  # programs that share the positions of one kernel's gradient


def pays(x: Array | jax.ShapeDtypeStruct, kernel: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether this kernel is used for these arrays: float32, products in a lower precision allowed, few channels.

    With many channels, a product over patches does more arithmetic per value that is written to memory, so XLA's
    products are fast enough.
    """
    fits = x.dtype in (jnp.float32, stored()) and kernel.dtype in (jnp.float32, stored())
    return fits and max(kernel.shape[2:]) <= MOST_CHANNELS and precision() != "exact"


def _tiles(channels: int, window: Pair, out: int, positions: int) -> Tiles:
    """The tile sizes that were fastest of those tried on an H200, with 1 to 64 channels."""
    places = math.prod(window) * channels  # with few channels a block spans several places of the window
    inner = power(places, 16, 64) if channels < 16 else 32 if channels % 32 == 0 else 16
    outer = power(out, 16, 64)
    return Tiles(positions, inner, outer, warps=4 if outer == 64 else 2, stages=3 if channels >= 16 else 1)


def _gradient_tiles(channels: int, window: Pair, out: int) -> Tiles:
    if channels < 16:  # little arithmetic: many small programs, so that their waits for memory overlap
        return _tiles(channels, window, out, 32)._replace(warps=2, stages=2, split=16)
    return _tiles(channels, window, out, 64)._replace(warps=4, stages=2)


def _halves(x: Array, other: Array) -> bool:
    """Whether a block may have 64 channels: with bfloat16 values this was faster (59 against 65 microseconds)."""
    return x.dtype == other.dtype == jnp.bfloat16 and x.shape[-1] % 64 == 0


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def convolve(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """Images [B, H, W, C] with a kernel [kh, kw, C, O] to [B, h, w, O]."""
    return _forward(x, kernel, geometry, dtype=kernel.dtype)


@partial(convolve.defjvp, symbolic_zeros=True)
def _convolve_jvp(geometry, primals, tangents):
    x, kernel = primals
    dx, dk = tangents
    out = convolve(x, kernel, geometry)
    size = x.shape[1:3]
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(
            linear(
                lambda kernel, dx: convolve(dx, kernel, geometry),
                lambda kernel, dy: convolve(dy, _turned(kernel), _back(geometry, size)).astype(x.dtype),
                kernel,
                dx,
            )
        )
    if not isinstance(dk, SymbolicZero):
        terms.append(
            linear(
                lambda x, dk: convolve(x, dk, geometry),
                lambda x, dy: kernel_gradient(x, dy, geometry).astype(kernel.dtype),
                x,
                dk,
            )
        )
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


def _turned(kernel: Array) -> Array:
    """The kernel of the images' gradient: the window flipped, input and output channels exchanged."""
    return kernel[::-1, ::-1].swapaxes(2, 3)


def _back(geometry: Geometry, size: Pair) -> Geometry:
    """The convolution that carries an output's gradient back to images of ``size``."""
    low = tuple(k - 1 - low for k, low in zip(geometry.window, geometry.low, strict=True))
    return Geometry(geometry.window, geometry.spread, geometry.stride, (low[0], low[1]), size)


def kernel_gradient(x: Array, dy: Array, geometry: Geometry) -> Array:
    """The gradient of the kernel [kh, kw, C, O], given that of the output [B, h, w, O]."""

    def by_patches(x: Array, dy: Array) -> Array:  # used for second derivatives only, which are rare
        flat = jnp.einsum("bhwqc,bhwo->qco", _windows(x, geometry), dy)
        return flat.reshape(*geometry.window, x.shape[-1], dy.shape[-1])

    return computed_by(lambda x, dy: _kernel_gradient(x, dy, geometry), by_patches)(x, dy)


def _windows(x: Array, geometry: Geometry) -> Array:
    """Windows of x as [B, h, w, q, C], by slices."""
    window, stride, spread, low, out = geometry
    pads = []
    for axis in (0, 1):
        size = (x.shape[1 + axis] - 1) * spread[axis] + 1
        reach = (out[axis] - 1) * stride[axis] + window[axis]
        pads.append((low[axis], reach - low[axis] - size, spread[axis] - 1))
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    cuts = [
        x[:, i : i + (out[0] - 1) * stride[0] + 1 : stride[0], j : j + (out[1] - 1) * stride[1] + 1 : stride[1]]
        for i in range(window[0])
        for j in range(window[1])
    ]
    return jnp.stack(cuts, axis=3)


class _Places(NamedTuple):
    """Output positions of one tile: image, first row and column of the window; ``real`` is False for padding."""

    image: Array
    row: Array
    column: Array
    real: Array


def _places(first, count: int, images: int, geometry: Geometry) -> _Places:
    h, w = geometry.out
    at = first + jnp.arange(count)
    image, rest = lax.div(at, h * w), lax.rem(at, h * w)
    row = lax.div(rest, w) * geometry.stride[0] - geometry.low[0]
    column = lax.rem(rest, w) * geometry.stride[1] - geometry.low[1]
    return _Places(image, row, column, at < images * h * w)


def _gather(x_ref, size: Pair, geometry: Geometry, places: _Places, block, inner: int, channels: int) -> Array:
    """One block [positions, inner] of the windows; a window is flattened as [q, c]."""
    (kh, kw), (up, across) = geometry.window, geometry.spread
    if channels % inner == 0:  # one place of the window: neighbouring columns are neighbours in memory
        many = channels // inner
        q, c = (block, 0) if many == 1 else (lax.div(block, many), lax.rem(block, many) * inner)
        c = (c + jnp.arange(inner))[None, :]
        inside = places.real[:, None]
    else:
        k = block * inner + jnp.arange(inner)
        q, c = (k if channels == 1 else lax.div(k, channels))[None, :], lax.rem(k, channels)[None, :]
        inside = places.real[:, None] & (k < kh * kw * channels)[None, :]
    row, column = places.row[:, None] + lax.div(q, kw), places.column[:, None] + lax.rem(q, kw)
    if up > 1:
        row, inside = lax.div(row, up), inside & (lax.rem(row, up) == 0)
    if across > 1:
        column, inside = lax.div(column, across), inside & (lax.rem(column, across) == 0)
    inside &= (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])
    at = (places.image[:, None] * size[0] + row) * size[1] + column
    shape = (places.real.shape[0], inner)
    at, c, inside = (jnp.broadcast_to(value, shape) for value in (at, c, inside))
    return gpu.load(x_ref.at[at, c], mask=inside, other=0.0)


def _forward(
    x: Array,
    kernel: Array,
    geometry: Geometry,
    tiles: Tiles | None = None,
    *,
    bias: Array | None = None,
    dtype=jnp.float32,
) -> Array:
    """The convolution; with a bias [1, O], ReLU(convolution + bias)."""
    images, *size, channels = x.shape
    depth, out = math.prod(geometry.window) * channels, kernel.shape[-1]
    t = tiles or _tiles(channels, geometry.window, out, 128)
    t = t if tiles or not _halves(x, kernel) else t._replace(inner=64)
    positions = images * math.prod(geometry.out)
    flat = pl.pallas_call(
        partial(_forward_kernel, size=tuple(size), geometry=geometry, t=t, shape=(images, channels, out)),
        grid=(-(-positions // t.positions), -(-out // t.outer)),
        out_shape=jax.ShapeDtypeStruct((positions, out), dtype),
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="convolution" if bias is None else "convolution_relu",
    )(x.reshape(-1, channels), kernel.reshape(depth, out).T, *([] if bias is None else [bias]))
    return flat.reshape(images, *geometry.out, out)


def _forward_kernel(x_ref, k_ref, *refs, size, geometry, t, shape):
    *bias_ref, y_ref = refs
    images, channels, out = shape
    first = pl.program_id(0) * t.positions
    o = pl.program_id(1) * t.outer + jnp.arange(t.outer)
    places = _places(first, t.positions, images, geometry)
    depth = math.prod(geometry.window) * channels

    def step(i, total):
        windows = _gather(x_ref, size, geometry, places, i, t.inner, channels)
        weights = load(k_ref, o, i * t.inner + jnp.arange(t.inner), out, depth)
        return total + jnp.dot(windows, weights.T, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, -(-depth // t.inner), step, jnp.zeros((t.positions, t.outer), jnp.float32))
    for ref in bias_ref:
        total += gpu.load(ref.at[jnp.zeros_like(o), o], mask=o < out, other=0.0)[None, :]
        total = jnp.where(total <= 0, 0.0, total)  # propagates NaN
    at = first + jnp.arange(t.positions)
    rows, columns = jnp.broadcast_to(at[:, None], total.shape), jnp.broadcast_to(o[None, :], total.shape)
    gpu.store(y_ref.at[rows, columns], total.astype(y_ref.dtype), mask=places.real[:, None] & (o < out)[None, :])


def _kernel_gradient(
    x: Array, dy: Array, geometry: Geometry, tiles: Tiles | None = None, *, gate: Array | None = None
) -> Array:
    """The gradient of the kernel [kh, kw, C, O]. With ``gate``, that of weights and bias; dy passes where gate > 0."""
    images, *size, channels = x.shape
    out = dy.shape[-1]
    depth = math.prod(geometry.window) * channels
    t = tiles or _gradient_tiles(channels, geometry.window, out)
    t = t if tiles or not _halves(x, dy) else t._replace(inner=64, together=3)
    blocks = -(-depth // t.inner)
    t = t._replace(together=min(t.together, blocks))
    positions = images * math.prod(geometry.out)
    shares = pl.pallas_call(
        partial(_kernel_gradient_kernel, size=tuple(size), geometry=geometry, t=t, shape=(images, channels, out)),
        grid=(t.split, -(-blocks // t.together), -(-out // t.outer)),
        out_shape=jax.ShapeDtypeStruct((t.split, depth + (gate is not None), out), jnp.float32),
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="convolution_kernel_gradient" if gate is None else "convolution_relu_weights",
    )(x.reshape(-1, channels), *(a.reshape(positions, out) for a in (dy, gate) if a is not None))
    total = shares.sum(0)
    return total.reshape(*geometry.window, channels, out) if gate is None else total


def _kernel_gradient_kernel(x_ref, dy_ref, *refs, size, geometry, t, shape):
    *gate_ref, dk_ref = refs
    images, channels, out = shape
    share, block = pl.program_id(0), pl.program_id(1) * t.together
    o = pl.program_id(2) * t.outer + jnp.arange(t.outer)
    depth, positions = math.prod(geometry.window) * channels, images * math.prod(geometry.out)
    rounds = -(-positions // (t.positions * t.split))

    def step(i, carry):
        bias, totals = carry
        first = (share * rounds + i) * t.positions
        places = _places(first, t.positions, images, geometry)
        dy, *gate = (load(r, first + jnp.arange(t.positions), o, positions, out) for r in (dy_ref, *gate_ref))
        dy = dy.astype(jnp.float32) if gate_ref or x_ref.dtype == jnp.float32 else dy
        for values in gate:
            dy = jnp.where(values > 0, dy, 0.0)
            bias += dy
        found = []
        for b, total in enumerate(totals):
            windows = _gather(x_ref, size, geometry, places, block + b, t.inner, channels)
            found.append(total + jnp.dot(dy.T, windows, preferred_element_type=jnp.float32))
        return bias, tuple(found)

    zero = jnp.zeros((t.outer, t.inner), jnp.float32)
    bias = jnp.zeros((t.positions, t.outer) if gate_ref else (), jnp.float32)
    bias, totals = lax.fori_loop(0, rounds, step, (bias, (zero,) * t.together))
    for b, total in enumerate(totals):
        k = (block + b) * t.inner + jnp.arange(t.inner)
        rows, columns = jnp.broadcast_to(k[None, :], total.shape), jnp.broadcast_to(o[:, None], total.shape)
        gpu.store(dk_ref.at[share, rows, columns], total, mask=(k < depth)[None, :] & (o < out)[:, None])
    if gate_ref:
        gpu.store(dk_ref.at[share, jnp.full(o.shape, depth), o], bias.sum(0), mask=(o < out) & (block == 0))
