"""Products, convolutions and pools that are fast on a CPU (one client per core) and on a GPU (batched over clients)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from fedbraid.lowering import kernels, winograd
from fedbraid.lowering.normalisation import Norm, plainly
from fedbraid.lowering.taps import Tap, inner_taps, sum_of_taps, taps_pay
from fedbraid.lowering.transposable import computed_by, linear
from fedbraid.lowering.winograd import conv_blocks, from_blocks, to_blocks

__all__ = [
    "Dense",
    "Pads",
    "along_weights",
    "computed_by",
    "conv2d",
    "conv_relu",
    "convolutions_later",
    "dense",
    "group_norm",
    "has_kernel",
    "linear",
    "max_pool",
    "paddings",
    "patches",
    "plain_products",
    "product",
    "window_counts",
    "window_max",
]

Array = jax.Array
Dense = dict[str, Array]
_later: ContextVar[bool] = ContextVar("fedbraid_convolutions_later", default=False)
# For matrices with adapters: `product` is ``x @ w``, without a rule for its gradient. Part of the key of jax's caches.
plain_products: Any = jax.make_user_context(False)
FEW_ROWS = 16  # up to this batch size, transposing the inputs costs less than it saves


@contextmanager
def convolutions_later() -> Iterator[None]:
    """For mixed precision: `conv2d` gives XLA's convolution, which is replaced later. It and `group_norm` take and
    return bfloat16.
    """
    before = _later.set(True)
    try:
        yield
    finally:
        _later.reset(before)


def product(x: Array, w: Array) -> Array:
    """``x @ w``, with a gradient of w that is faster on a CPU if a batch has few examples."""
    few = x.ndim == w.ndim == 2 and x.shape[0] <= FEW_ROWS
    if few and kernels.platform() == "cpu" and not plain_products.value:
        return _product(x, w)
    return x @ w


@jax.custom_jvp
def _product(x: Array, w: Array) -> Array:
    return x @ w


@partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    terms = [] if isinstance(dx, SymbolicZero) else [dx @ w]
    if not isinstance(dw, SymbolicZero):
        terms.append(along_weights(x, dw))
    y = x @ w
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


def along_weights(x: Array, dw: Array) -> Array:
    """``x @ dw`` over the last axis, linear in dw.

    Its transpose is the gradient of the weights, a sum over x's rows. XLA's fast products on a CPU need this sum along
    the rows of their left matrix, so there x is transposed in memory first.
    """
    if kernels.platform() != "cpu":
        return x @ dw

    def transpose(x: Array, dy: Array) -> Array:
        return lax.optimization_barrier(x.T) @ dy

    rows = x.reshape(-1, x.shape[-1])
    return linear(lambda x, dw: x @ dw, transpose, rows, dw).reshape(*x.shape[:-1], -1)


def dense(params: Dense, x: Array) -> Array:
    """``x @ w + b`` over the last axis."""
    if x.ndim <= 2:
        return product(x, params["w"]) + params["b"]
    # As one matrix: with more axes, XLA transposes arrays for the gradient's product on a CPU, which takes longer.
    return dense(params, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def group_norm(
    x: Array,
    scale: Array,
    shift: Array,
    groups: int,
    *,
    epsilon: float = 1e-5,
    relu: bool = False,
    residual: Array | None = None,
) -> Array:
    """Normalises [B, H, W, C] to mean 0 and variance 1 over space and groups of channels, then scales and shifts.

    ``residual`` is added to the result, then a ReLU may follow. On NVIDIA's GPUs all this is one kernel, and one for
    the gradient.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> group_norm(x, jnp.ones(1), jnp.zeros(1), 1, epsilon=0.0).ravel().tolist()
    [-1.0, 1.0]
    """
    b, h, w, c = x.shape
    x = x.astype(jnp.bfloat16) if _later.get() else x
    flat, past = x.reshape(b, h * w, c), None if residual is None else residual.astype(x.dtype).reshape(b, h * w, c)
    how, weights = Norm(groups, epsilon, relu), (scale, shift)
    if kernels.available() and kernels.precision() != "exact" and x.dtype in (jnp.float32, jnp.bfloat16):
        from fedbraid.lowering.kernels.normalisation import normalise

        return normalise(flat, weights, past, how).reshape(x.shape)
    return plainly(flat, weights, past, how).reshape(x.shape)


Padding = str | int | Sequence[tuple[int, int]]
Pads = tuple[tuple[int, int], tuple[int, int]]


def conv2d(
    x: Array,
    kernel: Array,
    *,
    stride: int | tuple[int, int] = 1,
    padding: Padding = "VALID",
    precision: lax.PrecisionLike = None,
) -> Array:
    """Convolution of images [B, H, W, in] with a kernel [kh, kw, in, out], made of matrix products.

    XLA's own convolution is slow in the two places where a federated simulation uses it: on a CPU inside a loop (one
    client after the other), and with per-client kernels under ``vmap`` (a grouped convolution). Here, 3x3 kernels of
    stride 1 on a CPU use Winograd's tiles, those with many channels one product per position of the window, and all
    others patches times kernel (im2col). On NVIDIA's GPUs one kernel gathers the patches and multiplies them. They are
    never written to memory.

    Args:
        x: images, channels last.
        kernel: [kh, kw, in, out].
        stride: one for both axes, or (down, across).
        padding: ``"VALID"``, ``"SAME"`` (as XLA and TensorFlow define it), a number, or ((top, bottom), (left, right)).
        precision: of the matrix products, as in ``jax.numpy.matmul``; Winograd's tiles always use the highest.

    >>> import jax.numpy as jnp
    >>> conv2d(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)))[0, :, :, 0]
    Array([[9., 9.],
           [9., 9.]], dtype=float32)
    """
    kh, kw, c, out = kernel.shape
    _check_images(x, kernel)
    strides = (stride, stride) if isinstance(stride, int) else (stride[0], stride[1])
    pads = paddings(x.shape[1:3], (kh, kw), strides, padding)
    if _later.get() and precision is None:
        x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
        return lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    b, (h, w) = x.shape[0], window_counts(x, (kh, kw), strides, pads)
    if has_kernel(x, kernel, precision):
        from fedbraid.lowering.kernels.convolution import convolve

        return convolve(x, kernel, _geometry(x, kernel, strides, pads))
    way = products_for(x, kernel, strides, pads)
    if way.taps is not None:
        return sum_of_taps(x, kernel, strides, way.taps, (h, w), precision)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0))) if any(map(any, pads)) else x
    if way.tile is not None:
        return from_blocks(conv_blocks(to_blocks(x, way.tile), kernel), h, w)
    columns = patches(x, (kh, kw), strides).reshape(b * h * w, kh * kw * c)
    return jnp.matmul(columns, kernel.reshape(kh * kw * c, out), precision=precision).reshape(b, h, w, out)


class Products(NamedTuple):
    """Of which matrix products a convolution is made: tiles, positions of the window (taps), or patches if neither."""

    tile: int | None = None
    taps: list[Tap] | None = None

    def __str__(self) -> str:
        if self.tile is not None:
            return f"Winograd's tiles of {self.tile} x {self.tile}"
        return "patches" if self.taps is None else "one for each position of the window"


def products_for(x: Any, kernel: Any, strides: tuple[int, int], pads: Pads) -> Products:
    """The fastest products for a convolution of arrays, or of their shapes."""
    kh, kw, c, _ = kernel.shape
    b, (h, w) = x.shape[0], window_counts(x, (kh, kw), strides, pads)
    taps = inner_taps(x.shape[1:3], (kh, kw), strides, pads) if taps_pay((kh, kw), c) else None
    if strides == (1, 1) and (kh, kw) == (3, 3):
        pairs = 9 * h * w if taps is None else sum(tap.counts[0] * tap.counts[1] for tap in taps)
        tile = winograd_tile(b, h, w, c, x.dtype, b * pairs)
        if tile is not None:
            return Products(tile)
    return Products(taps=taps)


def conv_relu(
    params: Dense, x: Array, *, stride: int | tuple[int, int] = 1, padding: Padding = "VALID", pool: bool = False
) -> Array:
    """ReLU(convolution + bias); with ``pool``, ReLU(2 x 2 max pool of the convolution + bias).

    On NVIDIA's GPUs this is one kernel, and one for each gradient. With the precision bfloat16 the output is stored in
    bfloat16 there: the next layer would round it anyway.

    >>> import jax.numpy as jnp
    >>> layer = {"w": jnp.ones((3, 3, 1, 1)), "b": jnp.array([-8.5])}
    >>> conv_relu(layer, jnp.ones((1, 4, 4, 1)))[0, :, :, 0].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    >>> conv_relu(layer, jnp.ones((1, 4, 4, 1)), pool=True)[0, :, :, 0].tolist()
    [[0.5]]
    """
    kernel, bias = params["w"], params["b"]
    _check_images(x, kernel)
    strides = (stride, stride) if isinstance(stride, int) else (stride[0], stride[1])
    if has_kernel(x, kernel):
        from fedbraid.lowering.kernels import activated

        pads = paddings(x.shape[1:3], (kernel.shape[0], kernel.shape[1]), strides, padding)
        geometry = _geometry(x, kernel, strides, pads)
        weights = jnp.concatenate([kernel.reshape(-1, kernel.shape[-1]), bias[None]]).astype(jnp.float32)
        if not pool:
            return activated.convolve_relu(x, weights, geometry, kernels.stored())
        if activated.pools(kernel.shape[2], geometry.window, strides):
            return activated.convolve_relu_pool(x, weights, geometry)
    x = conv2d(x.astype(kernel.dtype), kernel, stride=strides, padding=padding)
    # Bias and ReLU commute with the maximum: after it, they touch a quarter of the values.
    return jax.nn.relu((max_pool(x) if pool else x) + bias)


def _check_images(x: Array, kernel: Array) -> None:
    c = kernel.shape[2]
    if x.ndim != 4 or x.shape[-1] != c:
        raise ValueError(
            f"a convolution takes images [B, H, W, {c}] for a kernel of shape {kernel.shape}, got {x.shape}"
        )


def _geometry(x: Array, kernel: Array, strides: tuple[int, int], pads: Pads) -> Any:
    """Window, strides, padding and output size of a convolution, in the form that kernels take."""
    from fedbraid.lowering.kernels.convolution import Geometry

    window, ((top, _), (left, _)) = (kernel.shape[0], kernel.shape[1]), pads
    return Geometry(window, strides, low=(top, left), out=window_counts(x, window, strides, pads))


def has_kernel(x: Any, kernel: Any, precision: lax.PrecisionLike = None) -> bool:
    """Whether a convolution of arrays (or their shapes) is one kernel of this library: NVIDIA's GPUs, float32."""
    if precision is not None or not kernels.available():
        return False
    from fedbraid.lowering.kernels.convolution import pays

    return pays(x, kernel)


def winograd_tile(b: int, h: int, w: int, channels: int, dtype: DTypeLike, direct: int) -> int | None:
    """The size of Winograd's tiles for a 3x3 convolution with an output of b images of h x w; None if they are slower.

    They are mostly faster on a CPU. On a GPU tiles and patches need about the same memory traffic, but tiles need full
    precision while patches use tensor cores: 61 against 48 ms for ten steps of 100 clients of the EMNIST CNN on an
    H200.

    direct: multiplications per pair of channels of the convolution without tiles.
    """
    if kernels.platform() != "cpu" or channels < 8 or dtype not in (jnp.float32, jnp.float64):
        return None
    tile = min(winograd.POINTS, key=lambda tile: winograd.products(b, h, w, tile))
    # 0.55 is the cost of transforming images, fitted to timings on one AVX-512 core.
    return tile if winograd.products(b, h, w, tile) <= 0.55 * direct else None


def patches(x: Array, window: tuple[int, int], strides: tuple[int, int] = (1, 1)) -> Array:
    """im2col: the windows of [B, H, W, C] as [B, h, w, kh * kw * C], in the order of a kernel's first three axes."""
    h, w = window_counts(x, window, strides)
    (down, across), (kh, kw) = strides, window
    taps = [
        x[:, i : i + (h - 1) * down + 1 : down, j : j + (w - 1) * across + 1 : across]
        for i in range(kh)
        for j in range(kw)
    ]
    return taps[0] if len(taps) == 1 else jnp.concatenate(taps, axis=-1)


def window_counts(
    x: Array, window: tuple[int, int], strides: tuple[int, int], pads: Pads = ((0, 0), (0, 0))
) -> tuple[int, int]:
    """How many windows fit images [B, H, W, C], down and across."""
    sizes = [x.shape[1 + axis] + sum(pads[axis]) for axis in (0, 1)]
    h, w = ((sizes[axis] - window[axis]) // strides[axis] + 1 for axis in (0, 1))
    if min(h, w) < 1:
        raise ValueError(f"a window of {window[0]} x {window[1]} does not fit images of {sizes[0]} x {sizes[1]}")
    return h, w


def paddings(sizes: Sequence[int], window: tuple[int, int], strides: tuple[int, int], padding: Padding) -> Pads:
    """The numbers of zeros before and after each axis of images of ``sizes``, as ``padding`` defines them."""
    if padding == "VALID":
        return (0, 0), (0, 0)
    if padding == "SAME":
        short = [max((-(-size // s) - 1) * s + k - size, 0) for size, k, s in zip(sizes, window, strides, strict=True)]
        return (short[0] // 2, short[0] - short[0] // 2), (short[1] // 2, short[1] - short[1] // 2)
    if isinstance(padding, int):
        return (padding, padding), (padding, padding)
    if isinstance(padding, str):
        raise ValueError(f"padding must be 'VALID', 'SAME', a number or two pairs of numbers, got {padding!r}")
    (top, bottom), (left, right) = padding
    return (top, bottom), (left, right)


def max_pool(x: Array, window: int = 2) -> Array:
    """The largest value of each window of [B, H, W, C]. Windows do not overlap; incomplete ones are left out.

    If several values are the largest, the gradient goes to the first, as in XLA and PyTorch.

    >>> import jax.numpy as jnp
    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    b, h, w, c = x.shape
    x = x[:, : h - h % window, : w - w % window].reshape(b, h // window, window, w // window, window, c)
    return window_max(x, (2, 4))


@partial(jax.custom_jvp[Array], nondiff_argnums=(1,))
def window_max(x: Array, axes: tuple[int, ...]) -> Array:
    """``x.max(axes)`` whose gradient goes to the first largest entry only: cheaper than dividing it among ties."""
    return x.max(axes)


@window_max.defjvp
def _window_max_jvp(axes, primals, tangents):
    (x,), (dx,) = primals, tangents
    largest = window_max(x, axes)
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.ndim)]
    entries = list(np.ndindex(*shape))
    first = jnp.full(largest.shape, len(entries) - 1, jnp.uint8 if len(entries) < 256 else jnp.int32)
    for number, entry in reversed(list(enumerate(entries[:-1]))):
        here = x[tuple(at if axis in axes else slice(None) for axis, at in enumerate(entry))]
        first = jnp.where(here == largest, first.dtype.type(number), first)
    number = np.arange(len(entries), dtype=first.dtype).reshape(shape)
    return largest, jnp.where(jnp.expand_dims(first, axes) == number, dx, 0).sum(axes)
