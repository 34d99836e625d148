"""Compressed arrays: quantized numbers packed into bytes, or the few largest entries with their indices.

A code is a pytree node that replaces an array inside an upload. It has two methods: ``decode`` returns the array, and
``scaled`` returns the code of the array times a number, for clipping and attacks. Its leaves are the bytes that are
sent, so they give the cost of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Quantized", "Sparse", "decoded", "is_code", "quantized", "scaled", "sparse"]

Norm = Literal["max", "l2"]


def per_byte(levels: int) -> int:
    """How many numbers, each with ``2 levels + 1`` possible values, fit into one byte.

    >>> per_byte(127), per_byte(7), per_byte(1)
    (1, 2, 5)
    """
    count = 1
    while (2 * levels + 1) ** (count + 1) <= 256:
        count += 1
    return count


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scale"],
    meta_fields=["shape", "dtype", "levels", "bucket"],
)
@dataclass(frozen=True)
class Quantized:
    """Integers from ``-levels`` to ``levels`` times a scale per bucket, several packed into a byte if they fit."""

    packed: Any  # uint8
    scale: Any  # one per bucket
    shape: tuple[int, ...]
    dtype: np.dtype
    levels: int
    bucket: int

    def decode(self) -> Any:
        """The array that the code stands for."""
        d, base, many = math.prod(self.shape), 2 * self.levels + 1, per_byte(self.levels)
        places = jnp.asarray([base**j for j in range(many)], jnp.int32)
        digits = (self.packed.astype(jnp.int32)[:, None] // places) % base
        steps = (digits.reshape(-1)[:d] - self.levels).astype(self.scale.dtype)
        return (steps * _spread(self.scale, self.bucket, d)).astype(self.dtype).reshape(self.shape)

    def scaled(self, factor: Any) -> Quantized:
        """The code of the array times ``factor``."""
        return replace(self, scale=self.scale * jnp.asarray(factor, self.scale.dtype))


def _spread(per_bucket: Any, bucket: int, d: int) -> Any:
    """Repeats one number per bucket to one per entry."""
    if per_bucket.shape == (1,):
        return per_bucket
    return jnp.repeat(per_bucket, bucket, total_repeat_length=len(per_bucket) * bucket)[:d]


def quantized(key: Any, array: Any, *, levels: int, norm: Norm, bucket: int | None, shrink: bool = False) -> Quantized:
    """``array`` rounded at random, without bias, to a grid of ``levels`` steps for each sign.

    The step of a bucket is its largest magnitude (or its Euclidean norm, as in QSGD) divided by ``levels``. An entry of
    y steps becomes floor(y + U) with U uniform on [0, 1). Its mean is y, and its variance f (1 - f) with f the
    fractional part of y.

    ``shrink`` divides the result by 1 + omega, where omega is the total variance divided by the array's squared norm.
    The mean squared error is then exactly omega / (1 + omega) of the squared norm. Error feedback needs this ratio to
    be below 1, and unbiased rounding to few levels alone can exceed 1.
    """
    wide = array.dtype if array.dtype.itemsize >= 4 else np.dtype(np.float32)
    x = array.reshape(-1).astype(wide)
    d = x.size
    width = d if bucket is None else min(bucket, d)
    rows = jnp.pad(x, (0, -d % width)).reshape(-1, width)
    size = jnp.max(jnp.abs(rows), 1) if norm == "max" else jnp.sqrt(jnp.sum(rows**2, 1))
    scale = size / levels
    y = x / _spread(jnp.where(scale > 0, scale, 1), width, d)
    steps = jnp.clip(jnp.floor(y + jax.random.uniform(key, (d,), wide)), -levels, levels)
    if shrink:
        fraction = y - jnp.floor(y)
        variance = jnp.sum(fraction * (1 - fraction) * _spread(scale, width, d) ** 2)
        total = jnp.sum(x**2)
        scale = scale / (1 + variance / jnp.where(total > 0, total, 1))
    many, base = per_byte(levels), 2 * levels + 1
    digits = jnp.pad((steps + levels).astype(jnp.int32), (0, -d % many), constant_values=levels).reshape(-1, many)
    packed = jnp.sum(digits * jnp.asarray([base**j for j in range(many)], jnp.int32), 1).astype(jnp.uint8)
    return Quantized(packed, scale, array.shape, np.dtype(array.dtype), levels, width)


def quantized_bytes(d: int, itemsize: int, levels: int, bucket: int | None) -> int:
    """The number of bytes of ``d`` numbers after ``quantized``."""
    return -(-d // per_byte(levels)) + max(itemsize, 4) * (1 if bucket is None else -(-d // bucket))


@partial(jax.tree_util.register_dataclass, data_fields=["values", "places"], meta_fields=["shape"])
@dataclass(frozen=True)
class Sparse:
    """Some entries of an array and their indices; the other entries are 0."""

    values: Any  # may be a code itself
    places: Any
    shape: tuple[int, ...]

    def decode(self) -> Any:
        """The array that the code stands for."""
        values = decoded(self.values)
        return jnp.zeros(math.prod(self.shape), values.dtype).at[self.places].set(values).reshape(self.shape)

    def scaled(self, factor: Any) -> Sparse:
        """The code of the array times ``factor``."""
        return replace(self, values=scaled(self.values, factor))


def sparse(array: Any, count: int) -> Sparse:
    """The ``count`` entries of largest magnitude."""
    x = array.reshape(-1)
    _, places = jax.lax.top_k(jnp.abs(x), count)
    return Sparse(x[places], places.astype(place_dtype(x.size)), array.shape)


def place_dtype(d: int) -> Any:
    """The smallest unsigned integer dtype that can index ``d`` entries."""
    return np.dtype(np.uint8 if d <= 1 << 8 else np.uint16 if d <= 1 << 16 else np.uint32)


CODES = (Quantized, Sparse)


def is_code(node: Any) -> bool:
    """Whether a node of an upload is a code."""
    return isinstance(node, CODES)


def decoded(tree: Any, kinds: tuple[type, ...] = CODES) -> Any:
    """The upload with every code of these kinds replaced by the array that it encodes."""
    return _map_codes(lambda node: node.decode() if isinstance(node, kinds) else node, tree, kinds)


def scaled(tree: Any, factor: Any) -> Any:
    """The upload times a number; codes stay codes."""

    def one(node: Any) -> Any:
        if is_code(node):
            return node.scaled(factor)
        return node * jnp.asarray(factor, node.dtype) if jnp.issubdtype(node.dtype, jnp.inexact) else node

    return _map_codes(one, tree, CODES)


def _map_codes(function: Callable, tree: Any, kinds: tuple[type, ...]) -> Any:
    return jax.tree.map(function, tree, is_leaf=lambda node: isinstance(node, kinds))
