"""Functions that networks share: initialisation, shapes of inputs, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fedbraid.lowering.operations import Dense
from fedbraid.models.model import check_sizes

__all__ = ["as_floats", "batch_norm", "conv_init", "dense_init", "dropout", "glorot_uniform", "image_shape"]

Array = jax.Array


def glorot_uniform(key: Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
    """Uniform on +-sqrt(6 / (fan_in + fan_out)): Glorot and Bengio, 2010, Keras' default for dense and convolution.

    The last two axes are (in, out); axes before them are a convolution's window, which multiplies both fans.
    """
    window = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (window * (shape[-2] + shape[-1])))
    return jax.random.uniform(key, tuple(shape), dtype, -limit, limit)


def dense_init(key: Array, d: int, out: int) -> Dense:
    """Glorot-uniform kernel [d, out] and zero bias [out]."""
    return {"w": glorot_uniform(key, (d, out)), "b": jnp.zeros(out)}


def conv_init(key: Array, window: tuple[int, int], channels: int, out: int) -> Dense:
    """Glorot-uniform kernel [kh, kw, channels, out] and zero bias [out]."""
    return {"w": glorot_uniform(key, (*window, channels, out)), "b": jnp.zeros(out)}


def image_shape(image: Sequence[int]) -> tuple[int, int, int]:
    """(height, width, channels); one channel if only two sizes are given."""
    shape = tuple(image)
    if len(shape) not in (2, 3):
        raise ValueError(f"image must be (height, width) or (height, width, channels), got {shape}")
    height, width, channels = (*shape, 1) if len(shape) == 2 else shape
    check_sizes(height=height, width=width, channels=channels)
    return height, width, channels


def as_floats(x: Array, shape: Sequence[int]) -> Array:
    """[B, ...] as floats of shape [B, *shape]. Values are not scaled: the data's preprocessing does that."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float32)
    if math.prod(x.shape[1:]) != math.prod(shape):
        raise ValueError(f"this model takes examples of shape {tuple(shape)}, got a batch of shape {x.shape}")
    if len(shape) == 3 and x.ndim == 4 and [n for n in x.shape[1:] if n > 1] != [n for n in shape if n > 1]:
        raise ValueError(
            f"this model takes images of shape {tuple(shape)}, that is (height, width, channels), got a batch of shape "
            f"{x.shape}: correct the option image, or move the axes of the data"
        )
    return x.reshape(x.shape[0], *shape)


MOMENTUM, EPSILON = 0.1, 1e-5  # of batch normalisation, as in PyTorch


def norm_init(channels: int) -> dict[str, Array]:
    """A batch normalisation: scale 1, shift 0, running mean 0 and variance 1, all of shape [channels]."""
    return {
        "scale": jnp.ones(channels),
        "shift": jnp.zeros(channels),
        "mean": jnp.zeros(channels),
        "variance": jnp.ones(channels),
    }


def batch_norm(layer: dict[str, Array], x: Array, mask: Array | None = None) -> tuple[Array, dict[str, Any]]:
    """Batch normalisation over all axes but the last: (outputs, the layer's new statistics).

    S. Ioffe, C. Szegedy. Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift.
    ICML 2015. Padding does not count. The running statistics are exponential means with the weight 0.1 of the newest
    batch, whose variance is divided by n - 1, as in PyTorch.

    mask: [B], 1 for real examples, in training. Without it the running statistics are used, as in evaluation, and the
        new statistics are the old ones.

    >>> layer = norm_init(1)
    >>> y, new = batch_norm(layer, jnp.array([[1.0], [3.0], [99.0]]), jnp.array([1.0, 1.0, 0.0]))
    >>> y[:2, 0].round(3).tolist(), round(float(new["mean"][0]), 3), round(float(new["variance"][0]), 3)
    ([-1.0, 1.0], 0.2, 1.1)
    """
    if mask is None:
        mean, variance, new = layer["mean"], layer["variance"], {k: layer[k] for k in ("mean", "variance")}
    else:
        weight = jnp.broadcast_to(mask.reshape(-1, *[1] * (x.ndim - 1)), (*x.shape[:-1], 1)).astype(x.dtype)
        axes, count = tuple(range(x.ndim - 1)), jnp.sum(weight)
        mean = jnp.sum(x * weight, axes) / jnp.maximum(count, 1)
        variance = jnp.sum(jnp.square(x - mean) * weight, axes) / jnp.maximum(count, 1)
        unbiased = variance * count / jnp.maximum(count - 1, 1)
        share = jnp.where(count > 0, MOMENTUM, 0).astype(x.dtype)  # a batch of padding changes nothing
        pairs = {"mean": mean, "variance": unbiased}
        new = {k: jax.lax.stop_gradient((1 - share) * layer[k] + share * v) for k, v in pairs.items()}
    y = (x - mean) * jax.lax.rsqrt(variance + EPSILON)
    return y * layer["scale"] + layer["shift"], new


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Each entry is 0 with probability ``rate`` and divided by ``1 - rate`` otherwise; ``key=None`` changes nothing.

    The probability is rounded to 1/256 (0.25 and 0.5 are exact): one random byte per entry is four times cheaper than
    a random float.

    >>> import jax, jax.numpy as jnp
    >>> sorted(set(dropout(jnp.ones(100), 0.5, jax.random.key(0)).tolist()))
    [0.0, 2.0]
    """
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate must be 0 or more and less than 1, got {rate}")
    threshold = min(round(256 * rate), 255)
    if key is None or threshold == 0:
        return x
    words = jax.random.bits(key, (-(-x.size // 4),), jnp.uint32)
    random_bytes = ((words[:, None] >> np.array([0, 8, 16, 24], np.uint32)) & 255).reshape(-1)[: x.size]
    return jnp.where(random_bytes.reshape(x.shape) >= threshold, x / (1 - threshold / 256), 0)
