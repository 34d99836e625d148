"""Local work: a client that folds over its batches and reports the result. An engine can take it apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from fedbraid.core import Algorithm, Report
from fedbraid.local.batches import Batches, ClientData

__all__ = ["Fold", "LocalWork", "local_work", "map_work"]

PyTree = Any


class Fold(NamedTuple):
    """One pass over a client's batches, in three parts that an engine may run itself."""

    start: Callable  # (down, client_state, key) -> carry
    step: Callable  # (carry, batch, key, down) -> carry; down is not in the carry because all clients share it
    finish: Callable  # (carry, down, client_state, n) -> result
    batches: Batches

    def run(self, down: PyTree, state: PyTree, data: ClientData, key: Any) -> Any:
        """The result of a fold over all batches of a client's data."""
        carry = jax.lax.fori_loop(
            0,
            self.batches.count(data.size),
            lambda k, carry: self.advance(carry, k, down, data, key),
            self.begin(down, state, key),
        )
        return self.end(carry, down, state, data)

    def begin(self, down: PyTree, state: PyTree, key: Any) -> PyTree:
        """The carry before the first step."""
        return self.start(down, state, jax.random.fold_in(key, 0))

    def advance(self, carry: PyTree, k: Any, down: PyTree, data: ClientData, key: Any) -> PyTree:
        """Step number ``k``. Its batch and its random numbers depend only on ``k`` and the client's key."""
        step_key = jax.random.fold_in(jax.random.fold_in(key, 2), k)
        batch = self.batches.take(data, k, jax.random.fold_in(key, 1), step_key)
        return self.step(carry, batch, step_key, down)

    def end(self, carry: PyTree, down: PyTree, state: PyTree, data: ClientData) -> Any:
        """The fold's result."""
        return self.finish(carry, down, state, self.batches.bounds(data.size)[1])


def _only(results: tuple, down: PyTree, state: PyTree, key: Any) -> Report:
    """The report of work with one fold: the fold's result."""
    del down, state, key
    return results[0]


@dataclass(frozen=True)
class LocalWork:
    """A client function: folds over its batches, run one after the other, and a report made of their results."""

    folds: tuple[Fold, ...]
    combine: Callable = _only  # (results of the folds, down, client_state, key) -> Report

    def __call__(self, down: PyTree, state: PyTree, data: ClientData, key: Any) -> Report:
        results = tuple(f.run(down, state, data, self.fold_key(key, i)) for i, f in enumerate(self.folds))
        return self.report(results, down, state, key)

    def fold_key(self, key: Any, i: int) -> Any:
        """The random key of fold ``i``."""
        return jax.random.fold_in(key, i)

    def report(self, results: tuple[Any, ...], down: PyTree, state: PyTree, key: Any) -> Report:
        """The client's report, from the results of its folds."""
        return self.combine(results, down, state, jax.random.fold_in(key, len(self.folds)))

    def count(self, n: Any) -> Any:
        """The number of local steps of a client that has ``n`` examples, over all folds."""
        return sum(f.batches.count(n) for f in self.folds)


def local_work(start: Callable, step: Callable, finish: Callable, batches: Batches) -> LocalWork:
    """A client function made of local steps, like a training loop: the usual way to write an algorithm.

    start: ``(down, state, key) -> carry``: before the first step, from the server's message and the client's state.
    step: ``(carry, batch, key, down) -> carry``: one local step.
    finish: ``(carry, down, state, n) -> Report``: the upload, from the last carry; n is the number of examples.
    batches: the batches that the steps go over.
    """
    return LocalWork((Fold(start, step, finish, batches),))


def map_work(alg: Algorithm, change: Callable[[Callable], Callable]) -> Algorithm:
    """``alg`` with ``change`` applied to its clients' local steps, or to the whole client if it has no steps."""

    def changed(client: Callable) -> Callable:
        if not isinstance(client, LocalWork):
            return change(client)
        return replace(client, folds=tuple(fold._replace(step=change(fold.step)) for fold in client.folds))

    return alg._replace(exchanges=tuple(e._replace(client=changed(e.client)) for e in alg.exchanges))
