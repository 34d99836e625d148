"""What a loss declares, and how clients differentiate it: the one place where an engine may change a loss.

`value_and_grad` and `grad` are jax's functions, but an engine may first rewrite the loss (see :func:`rewriting`), for
example to replace slow operations by fast ones, or compute its gradient in parts of the batch (see :func:`dividing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from fedbraid.core import StructureError

__all__ = [
    "APPLIES_MASK",
    "HEAD",
    "NORM",
    "STATISTICS",
    "WEIGHTS",
    "Statistics",
    "collecting_statistics",
    "dividing",
    "grad",
    "leaf_names",
    "rewriting",
    "rewritten",
    "value_and_grad",
]

PyTree = Any
APPLIES_MASK = "applies_mask"  # attribute of a loss that is known to ignore padded rows
HEAD = "head_leaves"  # attribute of a loss: patterns of the names of the model's last layer
NORM = "norm_leaves"  # attribute of a loss: names of the leaves of the model's normalisation layers
STATISTICS = "statistics"  # attribute of a loss whose model has statistics of batches; see `Statistics`
WEIGHTS = "example_weights"  # attribute of a loss: (params, batch) -> weight of each example in its mean; else the mask

_rewrite = jax.make_user_context(None)  # part of the key of jax's caches: each rewrite compiles its own program


def rewriting(change: Callable[[Callable], Callable] | None) -> AbstractContextManager[Any]:
    """For engines: a context in which functions are replaced by ``change(function)`` before they are differentiated.

    The changed function must have the same values and derivatives. None changes nothing.
    """
    return _rewrite(change)


def rewritten(function: Callable) -> Callable:
    """``function`` as the engine rewrites it, for derivatives other than those below, such as Hessians."""

    def run(*args: Any) -> Any:
        change = _rewrite.value
        return function(*args) if change is None else change(function)(*args)

    return run


_divide = jax.make_user_context(None)


def dividing(divide: Callable[[Callable, Callable], Callable] | None) -> AbstractContextManager[Any]:
    """For engines: a context in which the gradient of a loss may be computed in parts of its batch.

    ``divide(loss, function)`` returns a function with the results of ``function``, which takes the arguments of the
    loss and returns its gradient, or its value and its gradient. None changes nothing.
    """
    return _divide(divide)


def _divided(loss: Callable, function: Callable) -> Callable:
    def run(*args: Any) -> Any:
        divide = _divide.value
        return function(*args) if divide is None else divide(loss, function)(*args)

    return run


def leaf_names(params: PyTree) -> list[str]:
    """The names of a model's leaves.

    >>> import jax.numpy as jnp
    >>> leaf_names({"body": [jnp.zeros(2)], "head": {"w": jnp.zeros(1)}})
    ['body.0', 'head.w']
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path in paths]


class Statistics(NamedTuple):
    """The leaves of a model that every training step updates by a rule: running means of batch normalisation.

    leaves: their names. update: ``(params, batch, key) -> (loss, new statistics)``, the latter in the structure of the
    model, with None at the other leaves. The gradient of the loss with respect to these leaves is 0.
    """

    leaves: tuple[str, ...]
    update: Callable


_collected: ContextVar[list[tuple[PyTree, PyTree]] | None] = ContextVar("statistics", default=None)


@contextmanager
def collecting_statistics() -> Iterator[list[tuple[PyTree, PyTree]]]:
    """New statistics of the losses that are differentiated in this context: pairs of a model and its statistics."""
    seen: list[tuple[PyTree, PyTree]] = []
    token = _collected.set(seen)
    try:
        yield seen
    finally:
        _collected.reset(token)


def _with_statistics(statistics: Statistics) -> Callable:
    """``value_and_grad`` of a loss whose model has statistics, which are collected."""

    def run(params: PyTree, batch: Any, key: Any = None) -> tuple[Any, PyTree]:
        seen = _collected.get()
        if seen is None:
            raise StructureError(
                f"this model has batch normalisation: its statistics ({', '.join(statistics.leaves[:3])} ...) belong "
                "to the examples of one client, and this method would average them like weights. Use a method that "
                "keeps them on the clients (fedbn; fedper, fedrep and others with private leaves; the transform "
                "private), or a model with group or layer normalisation"
            )
        if _divide.value is not None:
            raise StructureError(
                "microbatch: this model has batch normalisation, whose statistics are those of a whole batch. Set "
                "microbatch = None, or use a model with group or layer normalisation"
            )
        (value, new), g = jax.value_and_grad(rewritten(statistics.update), has_aux=True)(params, batch, key)
        seen.append((params, new))
        return value, g

    return run


def value_and_grad(loss: Callable) -> Callable:
    """``jax.value_and_grad(loss)``, with respect to the first argument, of the loss as the engine rewrites it.

    >>> import jax.numpy as jnp
    >>> value, gradient = value_and_grad(lambda params, batch, key: jnp.sum(params**2))(jnp.array([3.0]), {}, None)
    >>> float(value), gradient.tolist()
    (9.0, [6.0])
    """
    _check_loss(loss)
    statistics = getattr(loss, STATISTICS, None)
    if statistics is not None:
        return _with_statistics(statistics)
    return _divided(loss, jax.value_and_grad(rewritten(loss)))


def grad(loss: Callable) -> Callable:
    """``jax.grad(loss)``, with respect to the first argument, of the loss as the engine rewrites it."""
    _check_loss(loss)
    if getattr(loss, STATISTICS, None) is not None:
        return lambda *args: value_and_grad(loss)(*args)[1]
    return _divided(loss, jax.grad(rewritten(loss)))


def _check_loss(loss: Any) -> None:
    """Refuse a loss that is not a function, such as a whole model."""
    if not callable(loss):
        hint = "; pass model.loss instead of the model" if callable(getattr(loss, "loss", None)) else ""
        raise TypeError(f"loss must be a function (params, batch, key) -> number, got a {type(loss).__name__}{hint}")
