"""Statistics of batch normalisation: leaves of the model that steps update by a rule, not by a gradient.

A model with such leaves declares them in its loss (`fedbraid.local.Statistics`). They describe the examples of one
client, and the server cannot use them: they stay on the client. A client starts its local steps with its own
statistics, every local step updates them with the statistics of its batch, and the client keeps them. They never
change on the server, whatever its optimizer is, and an upload has zeros for them, or nothing if they are private.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from fedbraid.core import Algorithm, Exchange, Report, StructureError
from fedbraid.local import STATISTICS, Fold, LocalWork, Statistics, collecting_statistics
from fedbraid.transforms.private_leaves import join, keep_private, matching, split
from fedbraid.transforms.uploads import Extended

__all__ = ["keep_own", "keep_statistics", "statistics_of"]

PyTree = Any


def statistics_of(loss: Callable | None) -> Statistics | None:
    """The statistics that a loss declares; None if its model has none."""
    return getattr(loss, STATISTICS, None)


def keep_own(alg: Algorithm, loss: Callable | None, chosen: Callable[[PyTree], PyTree]) -> Algorithm:
    """The algorithm whose clients keep the chosen leaves and the model's statistics, and send neither.

    chosen: from the model to the tree of True and False that says which leaves are private.
    """
    statistics = statistics_of(loss)
    if statistics is None:
        return keep_private(alg, chosen)

    def both(params: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: a or b, chosen(params), matching(params, statistics.leaves))

    return keep_private(keep_statistics(alg, statistics), both)


def keep_statistics(alg: Algorithm, statistics: Statistics) -> Algorithm:
    """The algorithm whose clients update and keep the model's statistics."""

    def own(params: PyTree) -> PyTree:
        return split(params, matching(params, statistics.leaves))[1]

    def with_own(params: PyTree, found: PyTree) -> PyTree:
        return join(split(params, matching(params, statistics.leaves))[0], found)

    personal = alg.personal

    def model_of(server: PyTree, state: Extended) -> PyTree:
        plain = alg.params(server) if personal is None else personal(server, state.inner)
        return with_own(plain, state.own)

    return Algorithm(
        init=alg.init,
        init_client=lambda params: Extended(alg.init_client(params), own(params)),
        exchanges=tuple(_keeping(exchange, own, with_own) for exchange in alg.exchanges),
        params=alg.params,
        personal=model_of,
    )


def _keeping(exchange: Exchange, own: Callable[[PyTree], PyTree], with_own: Callable) -> Exchange:
    client = exchange.client
    if not isinstance(client, LocalWork):
        raise ValueError(
            f"the model has batch normalisation, but clients of exchange {exchange.name!r} do not work by local steps, "
            "so that its statistics cannot follow: use a method with local steps, such as fedbn"
        )

    def combine(results: tuple, down: PyTree, state: Extended, key: Any) -> Report:
        report = client.combine(tuple(result for result, _ in results), down, state.inner, key)
        found = [mine for _, mine in results if mine != ()]
        return report._replace(state=Extended(report.state, found[-1] if found else state.own))

    def reconcile(state: Extended, meant: PyTree, got: PyTree) -> Extended:
        return state._replace(inner=exchange.reconcile(state.inner, meant, got))

    folds = tuple(_keeping_fold(fold, own, with_own) for fold in client.folds)
    return exchange._replace(
        client=replace(client, folds=folds, combine=combine),
        reconcile=reconcile if exchange.keeps else exchange.reconcile,
    )


def _keeping_fold(fold: Fold, own: Callable[[PyTree], PyTree], with_own: Callable) -> Fold:
    """The fold that starts from the client's statistics; its result is (the fold's own, new statistics or ())."""

    def start(down: PyTree, state: Extended, key: Any) -> PyTree:
        return fold.start(down._replace(params=with_own(down.params, state.own)), state.inner, key)

    def step(carry: PyTree, batch: dict, key: Any, down: PyTree) -> PyTree:
        with collecting_statistics() as seen:
            after = fold.step(carry, batch, key, down)
        before = getattr(carry, "params", None)
        here = [new for params, new in seen if before is not None and _same(params, before)]
        if here:
            return after._replace(params=with_own(after.params, here[0]))
        if before is not None and seen:
            raise StructureError(
                "batch normalisation: this method takes no gradient at the model that its local steps move, so the "
                "statistics of that model cannot be updated: use fedbn, or a model with group normalisation"
            )
        return after

    def finish(carry: PyTree, down: PyTree, state: Extended, n: Any) -> Any:
        params = getattr(carry, "params", None)
        if params is None:
            return fold.finish(carry, down, state.inner, n), ()
        # the algorithm sees statistics that did not change, so that no upload depends on them
        unchanged = carry._replace(params=with_own(params, own(down.params)))
        return fold.finish(unchanged, down, state.inner, n), own(params)

    return Fold(start, step, finish, fold.batches)


def _same(a: PyTree, b: PyTree) -> bool:
    """Whether two models are the same traced values."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(x is y for x, y in pairs)
