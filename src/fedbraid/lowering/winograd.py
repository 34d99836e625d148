"""3x3 convolutions with a quarter of the multiplications: Winograd's minimal filtering F(4x4, 3x3) and F(3x3, 3x3).

Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2016. A tile of 4x4 outputs needs 6x6 inputs d and a 3x3 filter g; with the matrices of Cook and Toom

    y = A^T [ (G g G^T) * (B^T d B) ] A        (* is the product entry by entry)

so a layer is 36 matrix products [tiles, in] @ [in, out] instead of one [16 tiles, 9 in] @ [9 in, out]. The three
transforms are products with the constant matrices B (x) B, G (x) G and A (x) A. Forwards and backwards, all operations
are dense matrix products. Compilers make these fast, also in a loop on a CPU. Tiles of 3x3 outputs need 5x5 inputs and
25 products. They save less, but fit images of 3, 6 or 9 pixels, where tiles of 4x4 would compute outputs that are then
cropped.

With tiles of t x t outputs, inputs and outputs have the *block layout* [t, t, rows, cols, B, C]: pixel
(t r + i, t c + j) of image b is at [i, j, r, c, b]. In this layout the overlapping tiles are four plain slices, whose
gradient is four plain additions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# For each size of tiles: the finite points at which the polynomials are evaluated. The last point is infinity. The
# textbook's points 0, +-1, +-2 have about three times the rounding error in single precision. The transforms are matrix
# products for any points, so these are not slower.
POINTS = {4: (0.0, 0.75, -0.75, 1.5, -1.5), 3: (0.0, 0.75, -0.75, 2.0)}


def cook_toom(points: tuple[float, ...] = POINTS[4], taps: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A^T [m, n], G [n, taps] and B^T [n, n] with correlate(d, g) = A^T [(G g) * (B^T d)], n = len(points) + 1.

    Row i of B^T is the polynomial that is zero at all points but point i. Row i of G evaluates the filter at point i,
    divided by that polynomial's value there. A^T are the powers of the points. The last row of each is for infinity.
    """
    n = len(points) + 1
    m = n - taps + 1
    at, g, bt = np.zeros((m, n)), np.zeros((n, taps)), np.zeros((n, n))
    for i, p in enumerate(points):
        others = [q for j, q in enumerate(points) if j != i]
        at[:, i] = p ** np.arange(m)
        g[i] = p ** np.arange(taps) / np.prod([p - q for q in others])
        bt[i, : n - 1] = np.poly(others)[::-1]
    at[-1, -1] = g[-1, -1] = 1.0
    bt[-1] = np.poly(points)[::-1]
    return at, g, bt


# A, G and B for both axes at once, by the size of tiles
_TRANSFORMS = {tile: [np.kron(matrix, matrix) for matrix in cook_toom(points)] for tile, points in POINTS.items()}


def products(b: int, h: int, w: int, tile: int) -> int:
    """Multiplications per pair of channels for b images with h x w outputs. 15 tiles stand for the cost of transforming
    the kernel, which was fitted to timings on one AVX-512 core.
    """
    return (tile + 2) ** 2 * (b * -(-h // tile) * -(-w // tile) + 15)


def blocks_for(size: int, tile: int) -> int:
    """The number of input blocks of a valid 3x3 convolution over ``size`` pixels: its output tiles plus one."""
    return -(-(size - 2) // tile) + 1


def to_blocks(x: Array, tile: int) -> Array:
    """[B, H, W, C] in the block layout, zero-padded below and to the right to the size that ``conv_blocks`` reads."""
    b, h, w, c = x.shape
    rows, cols = blocks_for(h, tile), blocks_for(w, tile)
    x = jnp.pad(x, ((0, 0), (0, tile * rows - h), (0, tile * cols - w), (0, 0)))
    return x.reshape(b, rows, tile, cols, tile, c).transpose(2, 4, 1, 3, 0, 5)


def from_blocks(y: Array, h: int, w: int) -> Array:
    """From the block layout (with any block size) back to [B, h, w, C], cropped."""
    p, q, rows, cols, b, c = y.shape
    return y.transpose(4, 2, 0, 3, 1, 5).reshape(b, rows * p, cols * q, c)[:, :h, :w]


def conv_blocks(x: Array, kernel: Array) -> Array:
    """Valid 3x3 convolution: [t, t, rows + 1, cols + 1, B, in] and [3, 3, in, out] give [t, t, rows, cols, B, out]."""
    tile, rows, cols, b, c = x.shape[0], x.shape[2] - 1, x.shape[3] - 1, x.shape[4], x.shape[5]
    out, n = kernel.shape[-1], (tile + 2) ** 2
    a2, g2, b2 = (matrix.astype(x.dtype) for matrix in _TRANSFORMS[tile])
    # The last two rows and columns of a tile's inputs are the first two of the next block.
    upper = jnp.concatenate([x[:, :, :-1, :-1], x[:, :2, :-1, 1:]], axis=1)
    lower = jnp.concatenate([x[:2, :, 1:, :-1], x[:2, :2, 1:, 1:]], axis=1)
    tiles = jnp.concatenate([upper, lower], axis=0).reshape(n, rows * cols * b * c)
    points = _product(b2, tiles).reshape(n, rows * cols * b, c)
    filters = _product(g2, kernel.reshape(9, c * out)).reshape(n, c, out)
    products = _product(points, filters).reshape(n, rows * cols * b * out)
    return _product(a2, products).reshape(tile, tile, rows, cols, b, out)


def _product(x: Array | np.ndarray, y: Array) -> Array:
    # Full single precision even if the default is lower (TF32): in the transforms large terms cancel.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
