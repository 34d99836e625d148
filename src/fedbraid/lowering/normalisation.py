"""Group normalisation, as it is defined. On a GPU it is a kernel, :mod:`fedbraid.lowering.kernels.normalisation`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Norm", "Weights", "plainly"]

Array = jax.Array
Weights = tuple[Array, Array]  # scale and shift of each channel


class Norm(NamedTuple):
    """Groups of channels, the number added to variances, and whether a ReLU follows."""

    groups: int
    epsilon: float = 1e-5
    relu: bool = False


def plainly(x: Array, weights: Weights, residual: Array | None, norm: Norm) -> Array:
    """The definition: x [B, N, C], weights (scale [C], shift [C]), residual [B, N, C] or None."""
    b, n, c = x.shape
    grouped = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(b, n, norm.groups, c // norm.groups)
    mean = grouped.mean((1, 3), keepdims=True)
    variance = jnp.square(grouped - mean).mean((1, 3), keepdims=True)
    y = ((grouped - mean) * jax.lax.rsqrt(variance + norm.epsilon)).reshape(x.shape) * weights[0] + weights[1]
    y = y if residual is None else y + residual
    return (jax.nn.relu(y) if norm.relu else y).astype(x.dtype)
