"""One kernel for a convolution, its bias, a ReLU, and a max pool over cells of 2 x 2.

Compiled separately, the operations after a convolution read and write its whole output several times, forwards and
backwards, which takes as long as the convolution. Here a kernel writes only the input of the next layer.

With a pool, a program computes the four values of each of its cells together, so that a value of the images is loaded
once for all four. It writes only the largest one and its index in the cell. The backward kernels compute the gradient
of the convolution from the gradient of the cell and this index: it is zero at the other three places.

Weights and bias are one matrix [kh kw C + 1, O], whose last row is the bias: one kernel computes both gradients.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import convolution as plain
from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.convolution import Geometry, Pair, convolve
from fedbraid.lowering.kernels.tiles import division, per_clients, power
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["convolve_relu", "convolve_relu_pool", "pools"]

Array = jax.Array
LEAST_CHANNELS, MOST_PLACES = 16, 9
SLOTS = tuple(product((0, 1), (0, 1)))  # the places of a cell
DEAD = len(SLOTS)  # marks a cell whose maximum the ReLU set to zero


class Tiles(NamedTuple):
    """Tile sizes, and launch options of a kernel."""

    cells: int = 64
    warps: int = 4
    stages: int = 1
    ahead: int = 0  # number of loads that are issued before they are needed
    split: int = 0  # programs that share one kernel's gradient; 0 depends on the number of clients


# The fastest of those tried on an H200, by pass and by bytes of a value.
TILES = {
    ("forward", 4): Tiles(),
    ("forward", 2): Tiles(ahead=3),
    ("images", 4): Tiles(),
    ("images", 2): Tiles(),
    ("weights", 4): Tiles(cells=32, stages=2),
    ("weights", 2): Tiles(cells=32, stages=3),
}


def pools(channels: int, window: Pair, stride: Pair) -> bool:
    """Whether these kernels can compute a convolution with a pool: no strides, enough channels, a small window."""
    return stride == (1, 1) and channels >= LEAST_CHANNELS and math.prod(window) <= MOST_PLACES


def _as_matrix(weights: Array, geometry: Geometry, channels: int) -> Array:
    return weights[:-1].reshape(*geometry.window, channels, weights.shape[-1])


# ReLU(convolution + bias)


@partial(jax.custom_jvp[Array], nondiff_argnums=(2, 3))
def convolve_relu(x: Array, weights: Array, geometry: Geometry, dtype: Any = jnp.float32) -> Array:
    """Images [B, H, W, C] with weights [kh kw C + 1, O] to ReLU(convolution + bias) [B, h, w, O] of type ``dtype``."""
    kernel = _as_matrix(weights, geometry, x.shape[-1])
    kernel = kernel.astype(dtype) if x.dtype == dtype else kernel
    return plain._forward(x, kernel, geometry, bias=weights[-1:], dtype=dtype)


@partial(convolve_relu.defjvp, symbolic_zeros=True)
def _convolve_relu_jvp(geometry, dtype, primals, tangents):
    x, weights = primals
    dx, dw = tangents
    y = convolve_relu(x, weights, geometry, dtype)
    channels, size = x.shape[-1], x.shape[1:3]

    def gated(y: Array, z: Array) -> Array:
        return jnp.where(y > 0, z, 0).astype(dtype)

    def along_images(residuals, dx):
        y, weights = residuals
        return gated(y, convolve(dx.astype(jnp.float32), _as_matrix(weights, geometry, channels), geometry))

    def to_images(residuals, dy):
        y, weights = residuals
        kernel = _as_matrix(weights, geometry, channels).astype(dtype)
        return plain.images_gradient(gated(y, dy), kernel, geometry, size).astype(x.dtype)

    def along_weights(residuals, dw):
        x, y = residuals
        return gated(y, convolve(x.astype(jnp.float32), _as_matrix(dw, geometry, channels), geometry) + dw[-1])

    def to_weights(residuals, dy):
        def slowly(x, y, dy):
            return _weights_gradient(x, jnp.where(y > 0, dy, 0), geometry)

        def fast(x, y, dy):
            return plain._kernel_gradient(x, dy, geometry, gate=y)

        return computed_by(fast, slowly)(*residuals, dy)

    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(linear(along_images, to_images, (y, weights), dx))
    if not isinstance(dw, SymbolicZero):
        terms.append(linear(along_weights, to_weights, (x, y), dw))
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


def _weights_gradient(x: Array, dz: Array, geometry: Geometry) -> Array:
    """The gradient of weights and bias, given that of the convolution [B, h, w, O]; differentiable."""
    x, dz = x.astype(jnp.float32), dz.astype(jnp.float32)
    kernel = plain.kernel_gradient(x, dz, geometry)
    return jnp.concatenate([kernel.reshape(-1, dz.shape[-1]), dz.sum((0, 1, 2))[None]])


# ReLU(max pool(convolution) + bias)


def convolve_relu_pool(x: Array, weights: Array, geometry: Geometry) -> Array:
    """Images [B, H, W, C] with weights [kh kw C + 1, O] to ReLU(max pool(convolution) + bias) [B, h // 2, w // 2, O].

    The geometry is that of the convolution, without strides or spread. The factors of products have the dtype of ``x``,
    sums are float32, and the result has the dtype of ``x``. If several values of a cell are the largest, the gradient
    goes to the first.
    """
    return _pooled(x, weights, geometry)[0]


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _pooled(x: Array, weights: Array, geometry: Geometry) -> tuple[Array, Array]:
    return _forward(x, weights, geometry)


@partial(_pooled.defjvp, symbolic_zeros=True)
def _pooled_jvp(geometry, primals, tangents):
    x, weights = primals
    dx, dw = tangents
    y, which = _pooled(x, weights, geometry)
    channels, size = x.shape[-1], x.shape[1:3]

    def along_images(residuals, dx):
        which, weights = residuals
        z = convolve(dx.astype(jnp.float32), _as_matrix(weights, geometry, channels), geometry)
        return _chosen(which, z).astype(y.dtype)

    def to_images(residuals, dy):
        def slowly(which, weights, dy):
            turned = plain._turned(_as_matrix(weights, geometry, channels))
            dz = _spread(which, dy.astype(jnp.float32), geometry.out)
            return convolve(dz, turned, plain._back(geometry, size)).astype(x.dtype)

        def fast(which, weights, dy):
            return _images_gradient(which, weights, dy, geometry, (*size, channels), x.dtype)

        return computed_by(fast, slowly)(*residuals, dy)

    def along_weights(residuals, dw):
        x, which = residuals
        z = convolve(x.astype(jnp.float32), _as_matrix(dw, geometry, channels), geometry)
        return _chosen(which, z + dw[-1]).astype(y.dtype)

    def to_weights(residuals, dy):
        def slowly(x, which, dy):
            return _weights_gradient(x, _spread(which, dy, geometry.out), geometry)

        def fast(x, which, dy):
            return per_clients(partial(_pooled_weights_gradient, geometry=geometry))(x, which, dy)

        return computed_by(fast, slowly)(*residuals, dy)

    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(linear(along_images, to_images, (which, weights), dx))
    if not isinstance(dw, SymbolicZero):
        terms.append(linear(along_weights, to_weights, (x, which), dw))
    tangent = sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)
    return (y, which), (tangent, np.zeros(which.shape, jax.dtypes.float0))


def _chosen(which: Array, z: Array) -> Array:
    """The value of each cell of z [B, h, w, O] at the index ``which``; zero where the ReLU was zero."""
    _, rows, columns, _ = which.shape
    places = [z[:, i : 2 * rows : 2, j : 2 * columns : 2] for i, j in SLOTS]
    return jnp.stack([jnp.where(which == slot, value, 0) for slot, value in enumerate(places)]).sum(0)


def _spread(which: Array, dy: Array, out: Pair) -> Array:
    """The transpose of `_chosen`."""
    b, rows, columns, o = which.shape
    values = [jnp.where(which == slot, dy, 0) for slot in range(DEAD)]
    cells = jnp.stack(values, axis=3).reshape(b, rows, columns, 2, 2, o)
    wide = cells.transpose(0, 1, 3, 2, 4, 5).reshape(b, 2 * rows, 2 * columns, o)
    return jnp.pad(wide, ((0, 0), (0, out[0] - 2 * rows), (0, out[1] - 2 * columns), (0, 0)))


class _Cells(NamedTuple):
    """The cells of one tile: image, row and column; ``real`` is False for padding."""

    at: Array
    image: Array
    row: Array
    column: Array
    real: Array


def _cells(first, count: int, images: int, grid: Pair) -> _Cells:
    rows, columns = grid
    at = first + jnp.arange(count)
    image, rest = lax.div(at, rows * columns), lax.rem(at, rows * columns)
    return _Cells(at, image, lax.div(rest, columns), lax.rem(rest, columns), at < images * rows * columns)


def _load(ref, rows: Array, columns: Array, mask: Array) -> Array:
    """ref[rows][:, columns], zero where the mask of the rows is False or a column is out of range."""
    shape = (rows.shape[0], columns.shape[0])
    mask = mask[:, None] & (columns < ref.shape[1])[None, :] if ref.shape[1] % columns.shape[0] else mask[:, None]
    rows, columns, mask = (jnp.broadcast_to(a, shape) for a in (rows[:, None], columns[None, :], mask))
    return gpu.load(ref.at[rows, columns], mask=mask, other=0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0)


def _store(ref, rows: Array, columns: Array, value: Array, mask: Array) -> None:
    mask = jnp.broadcast_to(mask[:, None] & (columns < ref.shape[1])[None, :], value.shape)
    rows, columns = jnp.broadcast_to(rows[:, None], value.shape), jnp.broadcast_to(columns[None, :], value.shape)
    gpu.store(ref.at[rows, columns], value.astype(ref.dtype), mask=mask)


def _patch(x_ref, cells: _Cells, place: Pair, size: Pair, geometry: Geometry, channels: Array) -> Array:
    """The images' values at one place of the cells' patches: [cells, channels]."""
    row, column = (2 * at + p - low for at, p, low in zip((cells.row, cells.column), place, geometry.low, strict=True))
    mask, grid = cells.real, _grid(geometry)
    for at, p, low, n, length in zip((row, column), place, geometry.low, grid, size, strict=True):
        if p < low or 2 * (n - 1) + p - low >= length:
            mask = mask & (at >= 0) & (at < length)
    return _load(x_ref, (cells.image * size[0] + row) * size[1] + column, channels, mask)


def _at(slot: int, which: Array, dy: Array) -> Array:
    """The convolution's gradient at one place of the cells."""
    return jnp.where(which == jnp.uint8(slot), dy, jnp.zeros((), dy.dtype))


def _grid(geometry: Geometry) -> Pair:
    return geometry.out[0] // 2, geometry.out[1] // 2


def _blocks(n: int, most: int) -> tuple[int, int]:
    """The size of a block of channels, a power of two, and how many there are."""
    size = power(n, 16, most)
    return size, -(-n // size)


def _call(kernel, grid, shapes, tiles: Tiles, name: str):
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shapes,
        compiler_params=gpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpreted(),
        name=name,
    )


def _ahead(parts: list, load, ahead: int):
    """Yields each part with its loaded value. Loads are issued ``ahead`` parts before they are used."""
    loaded: list = []
    for i, part in enumerate(parts):
        while len(loaded) < min(i + 1 + ahead, len(parts)):
            loaded.append(load(parts[len(loaded)]))
        yield part, loaded[i]


def _forward(x: Array, weights: Array, geometry: Geometry, tiles: Tiles | None = None) -> tuple[Array, Array]:
    images, *size, channels = x.shape
    t, out, grid = tiles or TILES["forward", x.dtype.itemsize], weights.shape[-1], _grid(geometry)
    count, (outer, blocks) = images * math.prod(grid), _blocks(out, 64)
    shapes = [jax.ShapeDtypeStruct((count, out), kind) for kind in (x.dtype, jnp.uint8)]
    kernel = partial(_forward_kernel, size=tuple(size), geometry=geometry, t=t, shape=(images, channels, outer))
    programs = (-(-count // t.cells), blocks)
    y, which = _call(kernel, programs, shapes, t, "convolution_relu_pool")(
        x.reshape(-1, channels), weights[:-1].astype(x.dtype).T, weights[-1:]
    )
    return y.reshape(images, *grid, out), which.reshape(images, *grid, out)


def _forward_kernel(x_ref, k_ref, b_ref, y_ref, which_ref, *, size, geometry, t, shape):
    images, channels, outer = shape
    window, (inner, blocks) = geometry.window, _blocks(channels, 64)
    o = pl.program_id(1) * outer + jnp.arange(outer)
    inside = o < b_ref.shape[1]
    weights = {}
    for q, block in product(np.ndindex(*window), range(blocks)):
        c = block * inner + jnp.arange(inner)
        place = (q[0] * window[1] + q[1]) * channels
        mask = jnp.broadcast_to(inside[:, None] & (c < channels)[None, :], (outer, inner))
        rows, columns = (jnp.broadcast_to(a, mask.shape) for a in (o[:, None], (place + c)[None, :]))
        weights[q, block] = gpu.load(k_ref.at[rows, columns], mask=mask, other=0.0).T
    bias = gpu.load(b_ref.at[jnp.zeros_like(o), o], mask=inside, other=0.0)

    cells = _cells(pl.program_id(0) * t.cells, t.cells, images, _grid(geometry))
    totals = [jnp.zeros((t.cells, outer), jnp.float32) for _ in SLOTS]
    parts = list(product(range(window[0] + 1), range(blocks)))

    def load(part):
        c = part[1] * inner + jnp.arange(inner)
        return [_patch(x_ref, cells, (part[0], j), size, geometry, c) for j in range(window[1] + 1)]

    for (row, block), patches in _ahead(parts, load, t.ahead):
        for column, values in enumerate(patches):
            for slot, (i, j) in enumerate(SLOTS):
                q = (row - i, column - j)
                if (q, block) in weights:
                    totals[slot] += jnp.dot(values, weights[q, block], preferred_element_type=jnp.float32)
    best, which = totals[0], jnp.zeros(totals[0].shape, jnp.int32)
    for slot, value in enumerate(totals[1:], 1):
        better = (value > best) | (value != value)  # propagates NaN
        best, which = jnp.where(better, value, best), jnp.where(better, slot, which)
    best += bias[None, :]
    dead = best <= 0
    _store(y_ref, cells.at, o, jnp.where(dead, 0.0, best), cells.real)
    _store(which_ref, cells.at, o, jnp.where(dead, DEAD, which), cells.real)


def _images_gradient(which, weights, dy, geometry, shape, dtype, tiles: Tiles | None = None) -> Array:
    t, (images, *_, out) = tiles or TILES["images", jnp.dtype(dtype).itemsize], dy.shape
    *size, channels = shape
    grid = -(-size[0] // 2), -(-size[1] // 2)
    inner, blocks = _blocks(channels, 64)
    programs = (-(-images * math.prod(grid) // t.cells), blocks)
    kernel = partial(_images_kernel, size=tuple(size), grid=grid, geometry=geometry, t=t, shape=(images, inner))
    dx = _call(
        kernel,
        programs,
        jax.ShapeDtypeStruct((images * math.prod(size), channels), dtype),
        t,
        "convolution_relu_pool_images",
    )(dy.reshape(-1, out), which.reshape(-1, out), weights[:-1].astype(dtype))
    return dx.reshape(images, *shape)


def _images_kernel(dy_ref, which_ref, k_ref, dx_ref, *, size, grid, geometry, t, shape):
    images, inner = shape
    (kh, kw), channels, (outer, blocks) = geometry.window, dx_ref.shape[1], _blocks(dy_ref.shape[1], 64)
    rows, columns = _grid(geometry)
    c = pl.program_id(1) * inner + jnp.arange(inner)

    # Image position 2 i + p is multiplied by window place q for output position 2 i + p + low - q, which is place s of
    # cell i + d.
    def meetings(axis):
        n, low = geometry.window[axis], geometry.low[axis]
        return [(p, q, *divmod(p + low - q, 2)) for p in (0, 1) for q in range(n)]

    pairs = list(product(meetings(0), meetings(1)))
    weights = {}
    for q, block in product(range(kh * kw), range(blocks)):
        o = block * outer + jnp.arange(outer)
        mask = jnp.broadcast_to((c < channels)[:, None] & (o < dy_ref.shape[1])[None, :], (inner, outer))
        at, o = (jnp.broadcast_to(a, mask.shape) for a in ((q * channels + c)[:, None], o[None, :]))
        weights[q, block] = gpu.load(k_ref.at[at, o], mask=mask, other=0.0).T

    cells = _cells(pl.program_id(0) * t.cells, t.cells, images, grid)
    totals: dict[Pair, Any] = {p: jnp.zeros((t.cells, inner), jnp.float32) for p in SLOTS}

    def load(part):
        d, block = part
        row, column, o = cells.row + d[0], cells.column + d[1], block * outer + jnp.arange(outer)
        real = cells.real & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        at = (cells.image * rows + row) * columns + column
        return _load(dy_ref, at, o, real).astype(k_ref.dtype), _load(which_ref, at, o, real)

    parts = list(product(sorted({(a[2], b[2]) for a, b in pairs}), range(blocks)))
    for (d, block), (dy, which) in _ahead(parts, load, t.ahead):
        for slot, s in enumerate(SLOTS):
            values = _at(slot, which, dy)
            for a, b in pairs:
                if (a[2], b[2]) == d and (a[3], b[3]) == s:
                    tap = weights[a[1] * kw + b[1], block]
                    totals[a[0], b[0]] += jnp.dot(values, tap, preferred_element_type=jnp.float32)
    for p, total in totals.items():
        row, column = 2 * cells.row + p[0], 2 * cells.column + p[1]
        real = cells.real & (row < size[0]) & (column < size[1])
        _store(dx_ref, (cells.image * size[0] + row) * size[1] + column, c, total, real)


def _pooled_weights_gradient(x, which, dy, geometry, tiles: Tiles | None = None, clients: int = 1) -> Array:
    (images, *size, channels), out = x.shape, dy.shape[-1]
    depth, count = math.prod(geometry.window) * channels, images * math.prod(_grid(geometry))
    t = tiles or TILES["weights", x.dtype.itemsize]
    (outer, outers), (inner, inners) = _blocks(out, 64), _blocks(channels, 32)
    t = t._replace(split=t.split or division(clients * inners * outers))
    shares = _call(
        partial(_weights_kernel, size=tuple(size), geometry=geometry, t=t, shape=(images, channels, outer, inner)),
        (t.split, inners, outers),
        jax.ShapeDtypeStruct((t.split, depth + 1, out), jnp.float32),
        t,
        "convolution_relu_pool_weights",
    )(x.reshape(-1, channels), which.reshape(count, out), dy.reshape(count, out))
    return shares.sum(0)


def _weights_kernel(x_ref, which_ref, dy_ref, dw_ref, *, size, geometry, t, shape):
    images, channels, outer, inner = shape
    kh, kw = geometry.window
    share, block = pl.program_id(0), pl.program_id(1)
    c, o = block * inner + jnp.arange(inner), pl.program_id(2) * outer + jnp.arange(outer)
    places = list(np.ndindex(kh, kw))
    rounds = -(-dy_ref.shape[0] // (t.cells * t.split))

    def load(i):
        cells = _cells((share * rounds + i) * t.cells, t.cells, images, _grid(geometry))
        return cells, *(_load(ref, cells.at, o, cells.real) for ref in (dy_ref, which_ref))

    def tile(i, carry):
        (cells, dy, which), bias, totals = carry
        following = load(i + 1)  # issued one iteration early, to hide its latency
        values = [_at(slot, which, dy.astype(x_ref.dtype)).T for slot in range(DEAD)]
        totals = list(totals)
        for place in np.ndindex(kh + 1, kw + 1):
            patch = _patch(x_ref, cells, place, size, geometry, c)
            for slot, (a, b) in enumerate(SLOTS):
                q = (place[0] - a, place[1] - b)
                if q in places:
                    totals[places.index(q)] += jnp.dot(values[slot], patch, preferred_element_type=jnp.float32)
        bias += jnp.where(which == jnp.uint8(DEAD), 0.0, dy.astype(jnp.float32))
        return following, bias, tuple(totals)

    bias, total = jnp.zeros((t.cells, outer), jnp.float32), jnp.zeros((outer, inner), jnp.float32)
    _, bias, totals = lax.fori_loop(0, rounds, tile, (load(0), bias, (total,) * len(places)))
    for q, total in enumerate(totals):
        mask = jnp.broadcast_to((c < channels)[None, :] & (o < dy_ref.shape[1])[:, None], total.shape)
        at = (q * channels + c)[None, :]
        rows, columns = jnp.broadcast_to(at, mask.shape), jnp.broadcast_to(o[:, None], mask.shape)
        gpu.store(dw_ref.at[share, rows, columns], total, mask=mask)
    last = jnp.full(o.shape, kh * kw * channels)
    gpu.store(dw_ref.at[share, last, o], bias.sum(0), mask=(o < dy_ref.shape[1]) & (block == 0))
