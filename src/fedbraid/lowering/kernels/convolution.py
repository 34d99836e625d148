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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted, precision, stored
from fedbraid.lowering.kernels.tiles import power
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["Geometry", "convolve", "pays"]

Array = jax.Array
Pair = tuple[int, int]
MOST_CHANNELS = 128
LEAST_CHANNELS = 16
BLOCK = 64  # channels


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


def pays(x: Any, kernel: Any) -> bool:
    """Whether this kernel is used for these arrays: products in a lower precision than float32 are allowed.

    In float32 (TF32 factors) it is used with few channels only. With many, a product over patches does more arithmetic
    for each value that is written to memory, so XLA's products are fast enough.
    """
    fits = x.dtype in (jnp.float32, stored()) and kernel.dtype in (jnp.float32, stored())
    few = max(kernel.shape[2:]) <= MOST_CHANNELS
    return fits and precision() != "exact" and (few or _wide(x, kernel, kernel.shape[-1]))


def _wide(x: Any, other: Any, out: int) -> bool:
    """Whether blocks of 64 channels fit: in bfloat16, with channels and outputs in such blocks."""
    return x.dtype == other.dtype == jnp.bfloat16 and x.shape[-1] % BLOCK == 0 and out % BLOCK == 0


# The tile sizes that were fastest of those tried on an H200, for 20 clients with 20 images of 24 x 24 to 3 x 3.


def _tiles(x: Array, kernel: Array, geometry: Geometry, out: int, positions: int) -> Tiles:
    """For the convolution and the gradient of the images; ``positions`` of one part."""
    if _wide(x, kernel, out):
        outer = 2 * BLOCK if out % (2 * BLOCK) == 0 else BLOCK
        few = positions <= 3 * BLOCK
        return Tiles(64 if few else 128, BLOCK, outer, warps=4, stages=4 if few else 3)
    return _narrow_tiles(x.shape[-1], geometry.window, out, 128)


def _narrow_tiles(channels: int, window: Pair, out: int, positions: int) -> Tiles:
    places = math.prod(window) * channels  # with few channels a block spans several places of the window
    inner = power(places, 16, 64) if channels < LEAST_CHANNELS else 32 if channels % 32 == 0 else 16
    outer = power(out, 16, 64)
    return Tiles(positions, inner, outer, warps=4 if outer == 64 else 2, stages=3 if channels >= LEAST_CHANNELS else 1)


def _gradient_tiles(x: Array, dy: Array, geometry: Geometry) -> Tiles:
    channels, out, positions = x.shape[-1], dy.shape[-1], math.prod(dy.shape[:-1])
    if _wide(x, dy, out):
        inner, outer = (2 * BLOCK if n % (2 * BLOCK) == 0 else BLOCK for n in (channels, out))
        split = min(max(positions // 1440, 1), 4)
        t = Tiles(64, inner, outer, warps=4, stages=3, together=3 if inner == outer == BLOCK else 1, split=split)
        return t if split > 1 else t._replace(positions=32, stages=4 if positions > 3 * BLOCK else 3)
    if channels < LEAST_CHANNELS:  # little arithmetic: many small programs, so that their waits for memory overlap
        return _narrow_tiles(channels, geometry.window, out, 32)._replace(warps=2, stages=3, split=20)
    return _narrow_tiles(channels, geometry.window, out, 64)._replace(warps=4, stages=2)


@partial(jax.custom_jvp[Array], nondiff_argnums=(2,))
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
                lambda kernel, dy: images_gradient(dy, kernel, geometry, size).astype(x.dtype),
                kernel,
                dx,
            )
        )
    if not isinstance(dk, SymbolicZero):
        terms.append(
            linear(
                lambda x, dk: convolve(x, dk, geometry),
                lambda x, dy: kernel_gradient(x, dy, geometry, kernel.dtype).astype(kernel.dtype),
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


def images_gradient(dy: Array, kernel: Array, geometry: Geometry, size: Pair) -> Array:
    """The gradient of images of ``size``, given that of the output [B, h, w, O]."""
    back = _back(geometry, size)

    def fast(dy: Array, kernel: Array) -> Array:
        return _forward(dy, kernel, back, dtype=kernel.dtype, turned=True)

    return computed_by(fast, lambda dy, kernel: convolve(dy, _turned(kernel), back))(dy, kernel)


def kernel_gradient(x: Array, dy: Array, geometry: Geometry, dtype: Any = jnp.float32) -> Array:
    """The gradient of the kernel [kh, kw, C, O], given that of the output [B, h, w, O].

    It is float32, or ``dtype`` where that saves writing it twice.
    """

    def by_patches(x: Array, dy: Array) -> Array:  # used for second derivatives only, which are rare
        flat = jnp.einsum("bhwqc,bhwo->qco", _windows(x, geometry), dy)
        return flat.reshape(*geometry.window, x.shape[-1], dy.shape[-1])

    if geometry.spread != (1, 1):
        return by_patches(x, dy)
    return computed_by(lambda x, dy: _kernel_gradient(x, dy, geometry, dtype=dtype), by_patches)(x, dy)


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


class _Part(NamedTuple):
    """The part of the window that meets the positions of one program, and where these positions are.

    With images that are spread by l, an output position p meets only the places q for which p + q - low is a multiple
    of l. Positions with the same p modulo l (``rest``) meet the same places: ``first``, ``first`` + l, and so on,
    ``many`` of them. So they are computed together, by a convolution without spread whose window has only these
    places. Numbers are for both axes; they may be traced.
    """

    rest: tuple[Any, Any]
    first: tuple[Any, Any]
    many: tuple[Any, Any]
    shift: tuple[Any, Any]  # the first image value that position 0 of this part reads


def _part(geometry: Geometry, index: Any) -> _Part:
    """Part ``index`` of the positions. There are as many parts as pairs of remainders."""
    if geometry.spread == (1, 1):
        return _Part((0, 0), (0, 0), geometry.window, (-geometry.low[0], -geometry.low[1]))
    across = geometry.spread[1]
    axes = []
    for r, k, l, low in zip(
        (lax.div(index, across), lax.rem(index, across)), geometry.window, geometry.spread, geometry.low, strict=True
    ):
        more = 1 + abs(low)  # keeps what is divided positive: the quotient is then rounded down
        first = lax.rem(low - r + more * l, l)
        axes.append((r, first, lax.div(k - first + l - 1, l), lax.div(r + first - low + more * l, l) - more))
    return _Part(*zip(*axes, strict=True))


class _Places(NamedTuple):
    """Positions of one tile: their number in the output, image, first row and column of the window that they read.

    ``real`` is False for padding.
    """

    at: Array
    image: Array
    row: Array
    column: Array
    real: Array


def _places(first, count: int, images: int, geometry: Geometry, part: _Part) -> _Places:
    (height, width), (up, across) = geometry.out, geometry.spread
    h, w = -(-height // up), -(-width // across)
    at = first + jnp.arange(count)
    image, rest = lax.div(at, h * w), lax.rem(at, h * w)
    row, column, real = lax.div(rest, w), lax.rem(rest, w), at < images * h * w
    if up * across > 1:
        down, right = part.rest[0] + up * row, part.rest[1] + across * column
        real &= (down < height) & (right < width)
        at = (image * height + down) * width + right
    row, column = row * geometry.stride[0] + part.shift[0], column * geometry.stride[1] + part.shift[1]
    return _Places(at, image, row, column, real)


class _How(NamedTuple):
    """What a kernel of the forward kind is given besides its arrays.

    turned: the kernel is that of the forward convolution, [place, out, channel], to be read in the opposite order.
    columns: the kernel is [out, place channel], which TF32 products need. Else it is [place channel, out].
    """

    size: Pair
    geometry: Geometry
    tiles: Tiles
    images: int
    channels: int
    out: int
    turned: bool
    columns: bool

    def outs(self, o: Array) -> Array | None:
        """The mask of the outputs of a block, None if all blocks are full."""
        return None if self.out % self.tiles.outer == 0 else o < self.out

    @property
    def spans(self) -> bool:
        """Whether a block of columns has several places of the window: with few channels."""
        return self.channels < LEAST_CHANNELS and not self.turned and self.geometry.spread == (1, 1)


class _Columns(NamedTuple):
    """Columns of one block of the windows, flattened as [place, channel]: place of the window, channel, both or 1."""

    down: Any
    right: Any
    channel: Array
    inside: Array | None

    def at(self, geometry: Geometry, part: _Part) -> Any:
        """The number of the place in the whole window."""
        down, right = (f + l * q for f, l, q in zip(part.first, geometry.spread, (self.down, self.right), strict=True))
        return down * geometry.window[1] + right


def _blocks(how: _How) -> int:
    """The number of blocks of columns: of the whole window if a block spans several places, else of one place."""
    places = math.prod(how.geometry.window) if how.spans else 1
    return -(-places * how.channels // how.tiles.inner)


def _columns(block, how: _How, part: _Part) -> _Columns:
    inner, channels, across = how.tiles.inner, how.channels, part.many[1]
    if how.spans:
        k = block * inner + jnp.arange(inner)
        q, c = k if channels == 1 else lax.div(k, channels), lax.rem(k, channels)
        return _Columns(lax.div(q, across), lax.rem(q, across), c, k < math.prod(how.geometry.window) * channels)
    many = _blocks(how)
    q, c = (block, 0) if many == 1 else (lax.div(block, many), lax.rem(block, many) * inner)
    c = c + jnp.arange(inner)
    across = jnp.asarray(across, q.dtype)
    return _Columns(lax.div(q, across), lax.rem(q, across), c, None if channels % inner == 0 else c < channels)


def _gather(x_ref, size: Pair, places: _Places, columns: _Columns) -> Array:
    """One block [positions, inner] of the windows."""

    def across(value: Any) -> Any:
        return value[None, :] if getattr(value, "ndim", 0) else value

    row, column = places.row[:, None] + across(columns.down), places.column[:, None] + across(columns.right)
    inside = places.real[:, None] & (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])
    inside = inside if columns.inside is None else inside & columns.inside[None, :]
    at = (places.image[:, None] * size[0] + row) * size[1] + column
    shape = (places.real.shape[0], columns.channel.shape[0])
    at, c, inside = (jnp.broadcast_to(value, shape) for value in (at, columns.channel[None, :], inside))
    return gpu.load(x_ref.at[at, c], mask=inside, other=0.0)


def _forward(
    x: Array,
    kernel: Array,
    geometry: Geometry,
    tiles: Tiles | None = None,
    *,
    bias: Array | None = None,
    dtype: Any = jnp.float32,
    turned: bool = False,
) -> Array:
    """The convolution; with a bias [1, O], ReLU(convolution + bias).

    With ``turned`` it is the gradient of the images: x is that of the output, ``kernel`` that of the forward
    convolution, and ``geometry`` comes from `_back`.
    """
    images, *size, channels = x.shape
    out = kernel.shape[2 if turned else 3]
    each = images * math.prod(-(-n // l) for n, l in zip(geometry.out, geometry.spread, strict=True))
    t = tiles or _tiles(x, kernel, geometry, out, each)
    how = _How((size[0], size[1]), geometry, t, images, channels, out, turned, kernel.dtype == jnp.float32)
    if channels < LEAST_CHANNELS and not how.spans:
        how = how._replace(tiles=t._replace(inner=LEAST_CHANNELS))
    flat = kernel.reshape(-1, kernel.shape[-1])
    parts = math.prod(geometry.spread)
    positions = images * math.prod(geometry.out)
    y = pl.pallas_call(
        partial(_forward_kernel, how=how),
        grid=(-(-each // t.positions) * parts, -(-out // t.outer)),
        out_shape=jax.ShapeDtypeStruct((positions, out), dtype),
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="convolution_images" if turned else "convolution" if bias is None else "convolution_relu",
    )(x.reshape(-1, channels), flat.T if how.columns and not turned else flat, *([] if bias is None else [bias]))
    return y.reshape(images, *geometry.out, out)


def _weights(k_ref, o: Array, columns: _Columns, part: _Part, how: _How) -> Array:
    """A block [inner, outer] of the kernel."""
    place, c, outs = columns.at(how.geometry, part), columns.channel, how.outs(o)
    if how.turned:  # the window is read from its end
        rows = (math.prod(how.geometry.window) - 1 - place) * how.out + o
        return _masked(k_ref, rows, c, outs, columns.inside).T
    rows = place * how.channels + c
    if how.columns:
        return _masked(k_ref, o, rows, outs, columns.inside).T
    return _masked(k_ref, rows, o, columns.inside, outs)


def _masked(ref, rows: Array, columns: Array, real: Array | None, inside: Array | None) -> Array:
    """ref[rows][:, columns], zero where one of the masks is False; None is a mask that is True."""
    shape = (rows.shape[0], columns.shape[0])
    masks = [] if real is None else [jnp.broadcast_to(real[:, None], shape)]
    masks += [] if inside is None else [jnp.broadcast_to(inside[None, :], shape)]
    at = ref.at[jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)]
    return gpu.load(at, mask=masks[0] & masks[-1], other=0.0) if masks else gpu.load(at)


def _forward_kernel(x_ref, k_ref, *refs, how: _How):
    *bias_ref, y_ref = refs
    t, geometry = how.tiles, how.geometry
    parts = math.prod(geometry.spread)
    tile, index = (
        (pl.program_id(0), 0) if parts == 1 else (lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts))
    )
    part = _part(geometry, index)
    o = pl.program_id(1) * t.outer + jnp.arange(t.outer)
    places = _places(tile * t.positions, t.positions, how.images, geometry, part)

    def step(i, total):
        columns = _columns(i, how, part)
        windows = _gather(x_ref, how.size, places, columns)
        weights = _weights(k_ref, o, columns, part, how)
        return total + jnp.dot(windows, weights, preferred_element_type=jnp.float32)

    blocks = _blocks(how) if how.spans else part.many[0] * part.many[1] * _blocks(how)
    total = lax.fori_loop(0, blocks, step, jnp.zeros((t.positions, t.outer), jnp.float32))
    for ref in bias_ref:
        total += gpu.load(ref.at[jnp.zeros_like(o), o], mask=o < how.out, other=0.0)[None, :]
        total = jnp.where(total <= 0, 0.0, total)  # propagates NaN
    rows, columns = jnp.broadcast_to(places.at[:, None], total.shape), jnp.broadcast_to(o[None, :], total.shape)
    gpu.store(y_ref.at[rows, columns], total.astype(y_ref.dtype), mask=places.real[:, None] & (o < how.out)[None, :])


def _kernel_gradient(
    x: Array,
    dy: Array,
    geometry: Geometry,
    tiles: Tiles | None = None,
    *,
    gate: Array | None = None,
    dtype: Any = jnp.float32,
) -> Array:
    """The gradient of the kernel [kh, kw, C, O]. With ``gate``, that of weights and bias; dy passes where gate > 0."""
    images, *size, channels = x.shape
    out = dy.shape[-1]
    t = tiles or _gradient_tiles(x, dy, geometry)
    depth, positions = math.prod(geometry.window) * channels, images * math.prod(geometry.out)
    how = _How((size[0], size[1]), geometry, t, images, channels, out, False, x.dtype == jnp.float32)
    blocks = _blocks(how) if how.spans else _blocks(how) * math.prod(geometry.window)
    t = t._replace(together=min(t.together, blocks))
    how = how._replace(tiles=t)
    dtype = jnp.float32 if t.split > 1 or gate is not None else dtype
    shares = pl.pallas_call(
        partial(_kernel_gradient_kernel, how=how),
        grid=(t.split, -(-blocks // t.together), -(-out // t.outer)),
        out_shape=jax.ShapeDtypeStruct((t.split, depth + (gate is not None), out), dtype),
        compiler_params=gpu.CompilerParams(num_warps=t.warps, num_stages=t.stages),
        interpret=interpreted(),
        name="convolution_kernel_gradient" if gate is None else "convolution_relu_weights",
    )(x.reshape(-1, channels), *(a.reshape(positions, out) for a in (dy, gate) if a is not None))
    total = shares[0] if t.split == 1 else shares.sum(0)
    return total.reshape(*geometry.window, channels, out) if gate is None else total


def _kernel_gradient_kernel(x_ref, dy_ref, *refs, how: _How):
    *gate_ref, dk_ref = refs
    t, geometry, part = how.tiles, how.geometry, _part(how.geometry, 0)
    share, block = pl.program_id(0), pl.program_id(1) * t.together
    o = pl.program_id(2) * t.outer + jnp.arange(t.outer)
    positions = how.images * math.prod(geometry.out)
    rounds = -(-positions // (t.positions * t.split))

    def step(i, carry):
        bias, totals = carry
        places = _places((share * rounds + i) * t.positions, t.positions, how.images, geometry, part)
        dy, *gate = (_masked(r, places.at, o, places.real, how.outs(o)) for r in (dy_ref, *gate_ref))
        for values in gate:
            dy = jnp.where(values > 0, dy, jnp.zeros((), dy.dtype))
            bias += dy.astype(jnp.float32)
        dy = dy.astype(x_ref.dtype)
        found = []
        for b, total in enumerate(totals):
            columns = _columns(block + b, how, part)
            windows = _gather(x_ref, how.size, places, columns)
            left, right = (dy, windows) if how.columns else (windows, dy)
            found.append(total + jnp.dot(left.T, right, preferred_element_type=jnp.float32))
        return bias, tuple(found)

    zero = jnp.zeros((t.outer, t.inner) if how.columns else (t.inner, t.outer), jnp.float32)
    bias = jnp.zeros((t.positions, t.outer) if gate_ref else (), jnp.float32)
    bias, totals = lax.fori_loop(0, rounds, step, (bias, (zero,) * t.together))
    for b, total in enumerate(totals):
        columns = _columns(block + b, how, part)
        place = columns.at(geometry, part)
        inside = place < math.prod(geometry.window)  # the last program may have blocks to spare
        inside = inside if columns.inside is None else inside & columns.inside
        rows = place * how.channels + columns.channel
        inside = jnp.broadcast_to(inside, rows.shape)
        rows, inside, outs = rows[:, None], inside[:, None], o[None, :]
        if how.columns:
            rows, inside, outs = rows.T, inside.T, outs.T
        rows, inside, outs = (jnp.broadcast_to(a, total.shape) for a in (rows, inside & (outs < how.out), outs))
        gpu.store(dk_ref.at[share, rows, outs], total.astype(dk_ref.dtype), mask=inside)
    if gate_ref:
        depth = dk_ref.shape[1] - 1
        gpu.store(dk_ref.at[share, jnp.full(o.shape, depth), o], bias.sum(0), mask=(o < how.out) & (block == 0))
