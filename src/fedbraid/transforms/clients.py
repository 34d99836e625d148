"""How a transform changes a client: its inputs, its report, or one more pass over its examples.

A client made of local steps stays one: an engine can still run the steps of many clients together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from fedbraid.core import Report
from fedbraid.local import ClientData, Fold, LocalWork

__all__ = ["map_inputs", "map_report", "with_fold"]

PyTree = Any
_CHANGE = 0x5EED  # folded into the client's key to get the transform's own random key


def map_report(client: Callable, change: Callable) -> Callable:
    """The client with its report changed by ``change(report, down, client_state, key)``.

    ``client_state`` is the state before the round.
    """
    if isinstance(client, LocalWork):
        inner = client.combine

        def combine(results: tuple, down: PyTree, state: PyTree, key: Any) -> Report:
            return change(inner(results, down, state, key), down, state, jax.random.fold_in(key, _CHANGE))

        return replace(client, combine=combine)

    def changed(down: PyTree, state: PyTree, data: ClientData, key: Any) -> Report:
        return change(client(down, state, data, key), down, state, jax.random.fold_in(key, _CHANGE))

    return changed


def _same(value: PyTree) -> PyTree:
    return value


def map_inputs(client: Callable, *, down: Callable = _same, state: Callable = _same) -> Callable:
    """The client called with ``down(message)`` and ``state(client_state)``: for transforms that extend these."""
    if isinstance(client, LocalWork):

        def adapt(fold: Fold) -> Fold:
            return Fold(
                start=lambda d, s, key: fold.start(down(d), state(s), key),
                step=lambda carry, batch, key, d: fold.step(carry, batch, key, down(d)),
                finish=lambda carry, d, s, n: fold.finish(carry, down(d), state(s), n),
                batches=fold.batches,
            )

        inner = client.combine
        return LocalWork(
            tuple(adapt(fold) for fold in client.folds),
            lambda results, d, s, key: inner(results, down(d), state(s), key),
        )
    return lambda d, s, data, key: client(down(d), state(s), data, key)


def with_fold(client: Callable, fold: Fold, change: Callable[[Report, Any], Report]) -> Callable:
    """The client that also runs ``fold`` over its examples; its report is ``change(report, result of the fold)``."""
    if isinstance(client, LocalWork):
        inner = client.combine

        def combine(results: tuple, down: PyTree, state: PyTree, key: Any) -> Report:
            return change(inner(results[:-1], down, state, key), results[-1])

        return LocalWork((*client.folds, fold), combine)

    def changed(down: PyTree, state: PyTree, data: ClientData, key: Any) -> Report:
        return change(client(down, state, data, key), fold.run(down, state, data, key))

    return changed
