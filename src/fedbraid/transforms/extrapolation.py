"""FedExP: the server's step is extrapolated as far as the disagreement of the clients allows.

D. Jhunjhunwala, S. Wang, G. Joshi. FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023.

Client i also uploads the squared length of its pseudogradient D_i = x - y_i, one number. With the weights p_i of the
uploads (the paper: 1/M each) and their mean D = sum_i p_i D_i, the server moves by

    x <- x - s D,    s = max(1, sum_i p_i ||D_i||^2 / (2 (||D||^2 + eps))).

If every client projects onto its own convex set (overparametrised least squares with many local steps), s without the
maximum and without the factor 2 is the step of the extrapolated parallel projection method. Clients that agree have
s = 1, so the method is then the one inside. Near a point where only the mean of the D_i vanishes, as where clients
disagree at the optimum of FedAvg, s is large and only ``eps`` and ``limit`` bound it: the iterates then oscillate, and
the mean of the last two is better than either (``average``).

Sends: the messages of the algorithm, and one number up. Keeps: nothing; with ``average``, one model on the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import (
    MEAN,
    Aggregate,
    Algorithm,
    Exchange,
    Logged,
    Reducer,
    Report,
    StructureError,
    Up,
    check_number,
    finite,
    logged,
)
from fedbraid.transforms.clients import map_report
from fedbraid.transforms.uploads import Extended, averages, change_exchanges, extend_server, norm, refuse_sealed

__all__ = ["extrapolation_rate", "fedexp"]

PyTree = Any
RATE = "server_rate"  # the column of the history


class Measured(NamedTuple):
    """Up: the exchange's own aux, and the squared length of the pseudogradient."""

    aux: PyTree
    square: Any


def extrapolation_rate(square: Any, mean: PyTree, eps: Any, limit: Any = None) -> Any:
    """max(1, square / (2 (||mean||^2 + eps))), at most ``limit``; 1 if nothing moves.

    square: the mean of the squared lengths. mean: the mean pseudogradient.

    >>> float(extrapolation_rate(jnp.array(32.0), jnp.array([2.0, 0.0]), 0.0))
    4.0
    """
    below = 2 * (norm(mean) ** 2 + eps)
    safe = jnp.where(below > 0, below, 1)
    rate = jnp.maximum(jnp.where(below > 0, square.astype(safe.dtype) / safe, 1), 1)
    return rate if limit is None else jnp.minimum(rate, limit)


def fedexp(
    alg: Algorithm, *, eps: Any = 1e-3, limit: Any = None, average: bool = False, exchange: str = "train"
) -> Algorithm:
    """FedExP over any algorithm whose "train" exchange uploads a change of the model: FedAvg, FedProx, SCAFFOLD ...

    eps: the paper's constant. It has the unit of a squared model. limit: the largest rate; None for no limit.
    average: evaluate the mean of the last two models, as the paper does at the end of a run.

    The history has the rate as ``train/server_rate``.

    >>> from fedbraid.algorithms import scaffold
    >>> alg = fedexp(scaffold(lambda params, batch, key: jnp.sum(params**2), client_lr=0.05))
    """
    check_number("eps", eps, low=0)
    if limit is not None:
        check_number("limit", limit, low=1)
    if not isinstance(average, bool):
        raise ValueError(f"average must be true or false, got {average!r}")

    def change(one: Exchange) -> Exchange:
        refuse_sealed(one, "fedexp")
        refuse_kept(one, "fedexp")
        return _extrapolated(one, eps, limit)

    changed = change_exchanges(alg, [exchange], change, argument="exchange")
    return _last_two(changed, exchange) if average else changed


def refuse_kept(exchange: Exchange, what: str) -> None:
    """Refuse clients that keep their pseudogradient: the server multiplies it by a rate that they do not know."""
    if "pseudograd" in exchange.keeps:
        raise StructureError(
            f"{what} over exchange {exchange.name!r}: the states of server and clients would disagree. Clients keep "
            "the update they sent (as in h = mean g_i), but the server scales it. SCAFFOLD can be used: its clients "
            "keep only their aux"
        )


def _extrapolated(exchange: Exchange, eps: Any, limit: Any) -> Exchange:
    reducer = exchange.reducer

    def measure(report: Report, down: PyTree, state: PyTree, key: Any) -> Report:
        del down, state, key
        square = norm(report.up.pseudograd) ** 2
        return report._replace(up=Up(report.up.pseudograd, Measured(report.up.aux, square)))

    def receive(server: PyTree, aggregate: Aggregate, key: Any) -> Logged:
        up = aggregate.up
        rate = extrapolation_rate(up.aux.square, up.pseudograd, eps, limit)
        longer = jax.tree.map(lambda g: rate.astype(g.dtype) * g, up.pseudograd)
        inner = logged(exchange.receive(server, aggregate._replace(up=Up(longer, up.aux.aux)), key))
        return Logged(inner.server, {**inner.logs, RATE: rate})

    return exchange._replace(
        client=map_report(exchange.client, measure),
        receive=receive,
        reducer=_with_square(reducer, keeps_mean=averages(reducer)),
        reconcile=lambda state, meant, got: exchange.reconcile(state, _bare(meant), _bare(got)),
        admit=lambda up: exchange.admit(_bare(up)) & finite(up.aux.square),
        lockstep="the server's rate compares the lengths of uploads with their mean, which staleness weights change",
    )


def _bare(up: Up) -> Up:
    return Up(up.pseudograd, up.aux.aux)


def _with_square(reducer: Reducer, *, keeps_mean: bool) -> Reducer:
    """The exchange's own reduction, and the weighted mean of the squares."""

    def decode(up: Up) -> Up:
        bare = reducer.decode(_bare(up))
        return Up(bare.pseudograd, Measured(bare.aux, up.aux.square))

    if keeps_mean:  # it is still the weighted mean, so another rule may replace it
        return MEAN._replace(lift=lambda up, weight: MEAN.lift(decode(up), weight), decode=decode)

    def lift(up: Up, weight: Any) -> tuple[PyTree, Any]:
        return reducer.lift(_bare(up), weight), MEAN.lift(up.aux.square, weight)

    def finish(combined: tuple[PyTree, Any], weight: Any, count: Any) -> Up:
        up, square = reducer.finish(combined[0], weight, count), combined[1]
        if reducer.kind == "gather":
            square = jnp.sum(square, 0)
        return Up(up.pseudograd, Measured(up.aux, MEAN.finish(square, jnp.sum(weight), count)))

    return Reducer(lift, finish, kind=reducer.kind)


def _last_two(alg: Algorithm, name: str) -> Algorithm:
    """The algorithm whose evaluated model is the mean of its last two."""
    extended = extend_server(alg, lambda params: params)

    def change(exchange: Exchange) -> Exchange:
        inner: Callable = exchange.receive

        def receive(server: Extended, aggregate: Aggregate, key: Any) -> Logged:
            before = alg.params(server.inner)
            after = logged(inner(server, aggregate, key))
            return Logged(after.server._replace(own=before), after.logs)

        return exchange._replace(receive=receive)

    def params(server: Extended) -> PyTree:
        return jax.tree.map(lambda a, b: (a + b) / 2, alg.params(server.inner), server.own)

    return change_exchanges(extended, [name], change)._replace(params=params)
