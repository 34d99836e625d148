"""Attention, as it is defined. On a GPU it is a kernel, :mod:`fedbraid.lowering.kernels.attention`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Given", "Heads", "plainly"]

Array = jax.Array


class Heads(NamedTuple):
    """How queries, keys and values lie in arrays [B, T, heads, size], and how scores are masked.

    places: for queries, keys and values: the number of the array, and the first head in it.
    queries, keys: numbers of heads; some queries may share a head of keys and values.
    scale: factor of the scores.
    causal: a query sees itself and what is before it.
    filler: value of masked scores.
    factor: of the weights that dropout keeps.
    added: the filler is added to masked scores, instead of replacing them.
    """

    places: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    queries: int
    keys: int
    scale: float
    causal: bool = False
    filler: float = -1e30
    factor: float = 1.0
    added: bool = False

    @property
    def group(self) -> int:
        """Queries that share a head of keys and values."""
        return self.queries // self.keys


class Given(NamedTuple):
    """What attention takes besides queries, keys and values.

    bias: [heads, size] is added to the array that holds queries, keys and values, if there is only one.
    mask: [B or 1, heads or 1, T or 1, S or 1] is 0 where a query does not see a key.
    kept: of the same shape, is 0 where dropout removes a weight.
    """

    bias: Array | None = None
    mask: Array | None = None
    kept: Array | None = None


def plainly(sources: tuple[Array, ...], given: Given, heads: Heads) -> Array:
    """The definition."""
    bias, mask, kept = given
    if bias is not None:
        (source,) = sources
        sources = ((source.astype(jnp.float32) + bias).astype(source.dtype),)
    counts = (heads.queries, heads.keys, heads.keys)
    q, k, v = (
        sources[at][:, :, first : first + count] for (at, first), count in zip(heads.places, counts, strict=True)
    )
    k, v = (jnp.repeat(x, heads.group, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * np.float32(heads.scale)
    if heads.causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, np.float32(heads.filler))
    if mask is not None:
        scores = jnp.where(mask != 0, scores, np.float32(heads.filler) + (scores if heads.added else 0))
    weights = jax.nn.softmax(scores) * np.float32(heads.factor)
    if kept is not None:
        weights = jnp.where(kept != 0, weights, 0)
    weights = weights.astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)
