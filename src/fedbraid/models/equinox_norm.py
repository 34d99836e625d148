"""Batch normalisation of equinox modules: the same layer with its statistics as leaves, and without padding.

`equinox.nn.BatchNorm` keeps its running statistics in a state beside the module, and averages over all rows of a batch.
`with_own_statistics` replaces it by a layer with the same arithmetic. Its statistics are arrays of the module, and rows
of padding do not count. The layer is called as before, and returns the state that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

__all__ = ["AXIS", "BatchNorm", "is_norm", "new_statistics", "normalising", "with_own_statistics"]

PyTree = Any
AXIS = "fedbraid_examples"  # the name of the axis over which a module is mapped
Seen = dict[int, tuple[Any, Any, Any]]  # new (mean, variance, count) by the layer's place
_example: ContextVar[tuple[Any, Seen] | None] = ContextVar("example", default=None)


@contextmanager
def normalising(weight: Any) -> Iterator[Seen]:
    """Inside, batch normalisation averages over examples by their ``weight``: 1, or 0 for padding."""
    seen: Seen = {}
    token = _example.set((weight, seen))
    try:
        yield seen
    finally:
        _example.reset(token)


class BatchNorm(eqx.nn.StatefulLayer):
    """`equinox.nn.BatchNorm` with its statistics as leaves."""

    weight: Any
    bias: Any
    mean: Any
    variance: Any
    count: Any  # of batches, as a float: all leaves of a model are floats
    inference: bool
    place: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    momentum: float = eqx.field(static=True)
    mode: str = eqx.field(static=True)

    def __call__(self, x: Any, state: Any = None, *, key: Any = None, inference: bool | None = None) -> tuple[Any, Any]:
        """As `equinox.nn.BatchNorm`: ``x`` is [channels, ...]; the state is returned unchanged."""
        del key
        if self.inference if inference is None else inference:
            mean, variance = self._running()
        else:
            mean, variance = self._of_batch(x)
        wide = (-1, *[1] * (x.ndim - 1))
        y = (x - mean.reshape(wide)) / jnp.sqrt(variance.reshape(wide) + self.eps)
        if self.weight is not None:
            y = y * self.weight.reshape(wide) + self.bias.reshape(wide)
        return y, state

    def _running(self) -> tuple[Any, Any]:
        if self.mode == "ema":
            return self.mean, self.variance
        scale = jnp.where(self.count == 0, 1, 1 - self.momentum**self.count)
        return self.mean / scale, self.variance / scale

    def _of_batch(self, x: Any) -> tuple[Any, Any]:
        """The mean and variance to normalise a batch with; the new running ones are noted."""
        here = _example.get()
        if here is None:
            raise ValueError("batch normalisation in training mode: call the model's loss, which has the whole batch")
        weight, seen = here
        weight = weight.astype(x.dtype)
        axes, places = tuple(range(1, x.ndim)), x[0].size
        number = jax.lax.psum(weight, AXIS)
        total = jnp.maximum(number, 1) * places
        mean = jax.lax.psum(weight * jnp.sum(x, axes), AXIS) / total
        squares = jnp.square(x - mean.reshape(-1, *[1] * (x.ndim - 1)))
        variance = jax.lax.psum(weight * jnp.sum(squares, axes), AXIS) / total
        old = tuple(jax.lax.stop_gradient(leaf) for leaf in (self.mean, self.variance, self.count))
        new = [self.momentum * o + (1 - self.momentum) * b for o, b in zip(old[:2], (mean, variance), strict=True)]
        if self.mode == "ema":  # it normalises with the running statistics, which start with those of the first batch
            new = [jnp.where(old[2] == 0, b, n) for n, b in zip(new, (mean, variance), strict=True)]
            mean, variance = new
        found = (*new, old[2] + 1)
        seen[self.place] = tuple(jnp.where(number > 0, n, o) for n, o in zip(found, old, strict=True))  # type: ignore
        return mean, variance


def is_norm(node: Any) -> bool:
    """Whether a part of a module is such a layer."""
    return isinstance(node, BatchNorm)


def with_own_statistics(module: Any, state: Any = None) -> Any:
    """The module with its layers of batch normalisation replaced; ``state``: that of a module made with one."""
    layers = [0]

    def replaced(node: Any) -> Any:
        if not isinstance(node, eqx.nn.BatchNorm):
            return node
        dtype = jnp.result_type(float) if node.weight is None else node.weight.dtype
        mean, variance, count = jnp.zeros(node.input_size), jnp.ones(node.input_size), jnp.zeros(())
        if state is not None and node.mode == "batch":
            (mean, variance), count = state.get(node.batch_state_index), state.get(node.batch_counter)
        elif state is not None:  # equinox leaves the statistics uninitialised before the first batch
            first, kept = state.get(node.ema_first_time_index), state.get(node.ema_state_index)
            mean, variance = (jnp.where(first, a, b) for a, b in zip((mean, variance), kept, strict=True))
            count = jnp.where(first, 0, 1)
        layers[0] += 1
        return BatchNorm(  # pyright: ignore[reportCallIssue]  (equinox declares __call__ like a field)
            weight=node.weight,
            bias=node.bias,
            mean=mean.astype(dtype),
            variance=variance.astype(dtype),
            count=count.astype(dtype),
            inference=node.inference,
            place=layers[0] - 1,
            eps=node.eps,
            momentum=node.momentum,
            mode=node.mode,
        )

    return jax.tree.map(replaced, module, is_leaf=lambda node: isinstance(node, eqx.nn.BatchNorm))


def new_statistics(params: PyTree, seen: Seen) -> PyTree:
    """The new statistics in the structure of the model, with None elsewhere."""

    def of(node: Any) -> Any:
        if not is_norm(node):
            return None
        found = seen.get(node.place, (node.mean, node.variance, node.count))
        blank = jax.tree.map(lambda leaf: None, node)
        return eqx.tree_at(lambda n: (n.mean, n.variance, n.count), blank, found, is_leaf=lambda leaf: leaf is None)

    return jax.tree.map(of, params, is_leaf=is_norm)
