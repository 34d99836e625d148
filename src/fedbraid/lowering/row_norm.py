"""Layer norm and root mean square norm, as they are defined. On a GPU they are kernels:
:mod:`fedbraid.lowering.kernels.rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["RowNorm", "Weights", "plainly"]

Array = jax.Array
Weights = tuple[Array, Array]  # scale and shift [C]


class RowNorm(NamedTuple):
    """The number added to variances, and whether the mean is subtracted (a layer norm) or not."""

    epsilon: float = 1e-5
    centred: bool = True


def plainly(x: Array, weights: Weights, norm: RowNorm) -> Array:
    """The definition, for x [N, C]."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - wide.mean(-1, keepdims=True) if norm.centred else wide
    h = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + np.float32(norm.epsilon))
    return (h * weights[0] + weights[1]).astype(x.dtype)
