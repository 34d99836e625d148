"""XLA's convolution, with all its options, as slices and one matrix product.

Every convolution is, with p the output's positions, q the window's, s strides and d the window's dilation,

    out[n, p, o] = sum over q, c of x[n, p s + q d, c] kernel[q, c, o]

a product of the matrix of windows [n p, q c] with the kernel [q c, o]. The windows are gathered by slices: one for each
q (the usual im2col) or one for each p, whichever are fewer. Slices by p are fewer for the gradient of a kernel: there
the "window" is a whole image and the "output" is a kernel of 3 x 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["MOST_SLICES", "convolve", "outputs"]

Array = jax.Array
MOST_SLICES = 128  # with more slices, compilation takes longer than the faster program saves


def outputs(sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Number of output positions along each axis; ``sizes`` include padding."""
    return [(size - (q - 1) * d - 1) // s + 1 for size, q, s, d in zip(sizes, window, strides, dilation, strict=True)]


def convolve(
    x: Array,
    kernel: Array,
    *,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_groups: int = 1,
    batch_groups: int = 1,
    precision: Any = None,
) -> Array:
    """Images [N, *space, C] with a kernel [*window, C / feature_groups, O]; arguments as in ``lax``.

    >>> x, kernel = jnp.ones((1, 5, 1)), jnp.ones((2, 1, 1))
    >>> convolve(x, kernel, strides=(1,), padding=((0, 0),), lhs_dilation=(1,), rhs_dilation=(3,)).ravel()
    Array([2., 2.], dtype=float32)
    """
    inner = [(low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
    n, *sizes, c = x.shape
    *window, _, out = kernel.shape
    places = outputs(sizes, window, strides, rhs_dilation)
    columns = _windows(x, places, window, strides, rhs_dilation)  # [n, p, q, c]
    p, q = math.prod(places), math.prod(window)
    groups = feature_groups * batch_groups
    if groups == 1:
        flat = jnp.matmul(columns.reshape(n * p, q * c), kernel.reshape(q * c, out), precision=precision)
        return flat.reshape(n, *places, out)
    columns = columns.reshape(batch_groups, n // batch_groups, p, q, feature_groups, c // feature_groups)
    columns = columns.transpose(0, 4, 1, 2, 3, 5)  # groups first; one of the two group counts is 1
    columns = columns.reshape(groups, n // batch_groups * p, q * c // feature_groups)
    kernel = kernel.reshape(q * c // feature_groups, groups, out // groups).transpose(1, 0, 2)
    flat = jnp.matmul(columns, kernel, precision=precision)  # [groups, n p, out / groups]
    return flat.transpose(1, 0, 2).reshape(n // batch_groups, *places, out)


def _windows(x: Array, places: Sequence[int], window: Sequence[int], strides, dilation) -> Array:
    """The matrix of windows [n, p, q, c], by as few slices as possible."""
    n, c = x.shape[0], x.shape[-1]
    by_window = math.prod(window) <= math.prod(places)
    outer, outer_step, inner, inner_step = (
        (window, dilation, places, strides) if by_window else (places, strides, window, dilation)
    )
    slices = []
    for corner in np.ndindex(*outer):
        cut = [slice(None)]
        for at, step, count, stride in zip(corner, outer_step, inner, inner_step, strict=True):
            cut.append(slice(at * step, at * step + (count - 1) * stride + 1, stride))
        slices.append(x[tuple(cut)].reshape(n, math.prod(inner), c))
    return jnp.stack(slices, axis=2 if by_window else 1)
