"""Layers that run fast one client per core on a CPU and batched over clients on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Array = jax.Array
Dense = dict[str, Array]


def glorot_uniform(key: Array, shape: Sequence[int], dtype=jnp.float32) -> Array:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)): Glorot and Bengio, 2010, Keras' default for dense and convolution.

    The last two axes are (in, out); axes before them are a convolution's window, which multiplies both fans.
    """
    window = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (window * (shape[-2] + shape[-1])))
    return jax.random.uniform(key, tuple(shape), dtype, -limit, limit)


def dense_init(key: Array, d: int, out: int) -> Dense:
    """Glorot-uniform kernel [d, out] and zero bias [out]."""
    return {"w": glorot_uniform(key, (d, out)), "b": jnp.zeros(out)}


def dense(params: Dense, x: Array) -> Array:
    """``x @ w + b`` over the last axis."""
    return x @ params["w"] + params["b"]


def as_floats(x: Array, shape: Sequence[int]) -> Array:
    """[B, ...] as floats of shape [B, *shape]; whole numbers of one byte are pixels and become 0 to 1."""
    if x.dtype == jnp.uint8:
        x = x.astype(jnp.float32) / 255
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    if math.prod(x.shape[1:]) != math.prod(shape):
        raise ValueError(f"this model takes examples of shape {tuple(shape)}, got a batch of shape {x.shape}")
    return x.reshape(x.shape[0], *shape)
