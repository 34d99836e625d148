"""Gradient accumulation: the gradient of a batch as the sum of those of its microbatches, for less memory.

A loss is a mean over the examples of a batch, with the weights ``w_i`` (the mask, or what the loss declares as
``fedbraid.local.WEIGHTS``), plus terms that depend on the parameters only. Let ``W_m`` be the sum of the weights in
microbatch m and ``W`` that of the batch. Then

    L = sum_m W_m / W L_m        and        grad L = sum_m W_m / W grad L_m.

The sum is a loop, so only one microbatch's values between layers are stored at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from fedbraid.core import StructureError
from fedbraid.local import MASK, WEIGHTS

__all__ = ["HIDDEN", "WHOLE", "has_batch", "in_microbatches", "microbatches", "recording_microbatches"]

PyTree = Any
WHOLE = "gradients of whole batches: "  # begins the line of a gradient that is not divided
HIDDEN = "the function that is differentiated does not take the batch as its second argument"
_lines: ContextVar[list[str] | None] = ContextVar("fedbraid_microbatches", default=None)


@contextmanager
def recording_microbatches() -> Iterator[list[str]]:
    """Lines about the gradients that are traced in this context: how they are divided, or why they are not."""
    lines: list[str] = []
    token = _lines.set(lines)
    try:
        yield lines
    finally:
        _lines.reset(token)


def _record(line: str) -> None:
    lines = _lines.get()
    if lines is not None and line not in lines:
        lines.append(line)


def has_batch(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of a loss are ``(params, batch, ...)`` with a mask that has one entry for each example."""
    return len(args) > 1 and isinstance(args[1], Mapping) and MASK in args[1] and jnp.ndim(args[1][MASK]) == 1


def microbatches(size: int) -> Callable[..., Callable[..., Any]]:
    """For `fedbraid.local.dividing`: gradients over microbatches of at most ``size`` examples."""
    return _microbatches(size)


@cache  # the same function each time: jax's caches of compiled programs know it by identity
def _microbatches(size: int) -> Callable[..., Callable[..., Any]]:

    def divide(loss: Callable, function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            if not has_batch(args):
                _record(WHOLE + HIDDEN)
                return function(*args)
            rows = args[1][MASK].shape[0]
            if rows <= size:
                _record(f"{WHOLE}a batch has {rows} examples, which is at most a microbatch")
                return function(*args)
            return in_microbatches(loss, function, size)(*args)

        return run

    return divide


def in_microbatches(loss: Callable, function: Callable, size: int) -> Callable:
    """``function`` (the gradient of ``loss``, or its value and gradient), summed over microbatches of a batch.

    A batch is cut into parts of the same number of rows, at most ``size``. The last part may have padding. Each part
    has its own random key.

    >>> from fedbraid.local import masked_mean
    >>> def loss(w, batch, key):
    ...     return masked_mean((w - batch["x"]) ** 2, batch["mask"])
    >>> batch = {"x": jnp.array([1.0, 2.0, 6.0]), "mask": jnp.ones(3)}
    >>> float(jax.grad(loss)(0.0, batch, None)), float(in_microbatches(loss, jax.grad(loss), 2)(0.0, batch, None))
    (-6.0, -6.0)
    """

    def run(params: PyTree, batch: Mapping[str, Any], *rest: Any) -> PyTree:
        rows = batch[MASK].shape[0]
        parts = -(-rows // size)
        each = -(-rows // parts)
        _record(f"gradients of {rows} examples in {parts} microbatches of {each}")
        alone = {name: field for name, field in batch.items() if jnp.ndim(field) == 0}
        weights = _share(loss, params, batch, parts, each)
        cut = {name: _cut(name, field, rows, parts, each) for name, field in batch.items() if name not in alone}
        shapes = jax.eval_shape(function, params, alone | jax.tree.map(lambda leaf: leaf[0], cut), *rest)

        def add(sums: PyTree, part: tuple) -> tuple[PyTree, None]:
            number, fields, weight = part
            found = function(params, alone | fields, *(_own_key(argument, number) for argument in rest))
            return jax.tree.map(lambda a, b: a + _weighted(b, weight, a.dtype), sums, found), None

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)
        sums, _ = jax.lax.scan(add, zeros, (jnp.arange(parts), cut, weights))
        return jax.tree.map(lambda total, s: total.astype(s.dtype), sums, shapes)

    return run


def _share(loss: Callable, params: PyTree, batch: Mapping[str, Any], parts: int, each: int) -> Any:
    """The weight of each microbatch in the mean over the batch."""
    given = getattr(loss, WEIGHTS, None)
    weights = jax.lax.stop_gradient(batch[MASK] if given is None else given(params, batch))
    weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
    sums = jnp.pad(weights, (0, parts * each - len(weights))).reshape(parts, each).sum(1)
    whole = sums.sum()
    # a batch of padding: equal weights keep the terms of the loss that do not depend on examples
    return jnp.where(whole > 0, sums / jnp.where(whole > 0, whole, 1), jnp.full_like(sums, 1 / parts))


def _cut(name: str, field: Any, rows: int, parts: int, each: int) -> Any:
    """A field of a batch as ``[parts, each, ...]``. Padding repeats the first row; its mask is 0."""
    if field.shape[0] != rows:
        raise StructureError(
            f"microbatch: the field {name!r} of a batch has shape {field.shape}, and the batch has {rows} examples. A "
            "field must have one row for each example, or be a scalar"
        )
    more = parts * each - rows
    if more:
        padding = jnp.broadcast_to(field[:1], (more, *field.shape[1:]))
        field = jnp.concatenate([field, jnp.zeros_like(padding) if name == MASK else padding])
    return field.reshape(parts, each, *field.shape[1:])


def _own_key(argument: Any, number: Any) -> Any:
    is_key = isinstance(argument, jax.Array) and jnp.issubdtype(argument.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(argument, number) if is_key else argument


def _weighted(leaf: Any, weight: Any, dtype: Any) -> Any:
    """``weight * leaf``, and 0 for weight 0: the loss of a microbatch of padding may be NaN."""
    return jnp.where(weight > 0, leaf.astype(dtype) * weight.astype(dtype), 0)
