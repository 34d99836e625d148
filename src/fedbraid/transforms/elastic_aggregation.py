"""Elastic aggregation: the more the model's output depends on a parameter, the less the parameter moves.

D. Chen, J. Hu, V. J. Tan, X. Wei, E. Wu. Elastic Aggregation for Federated Optimization. CVPR 2023, and its supplement.

Client k draws a random subset B_k of its examples once and keeps it out of training. Before it trains, it runs over B_k
and measures at the server's model theta, without labels, how sensitive the output F is to each parameter i:

    g = grad ||F(theta; x)||^2        momentum:  Omega_k <- mu Omega_k + (1 - mu) |g|   batch by batch, from 0
                                      average:   Omega_k = sum |g| / |B_k|              (eq. 1)

It uploads Omega_k with its update; the server averages both with the same weights and scales the mean update by

    zeta_i = 1 + tau - Omega_i / max_j Omega_j,

with the maximum over all coordinates of all arrays. If it is 0, zeta = 1. The algorithm inside receives
zeta * pseudograd and moves along its negative: towards the clients' models.

The history has the share of parameters with zeta > 1 and the mean of zeta as the columns train/boosted and
train/mean_factor (Figure 1 of the supplement).

Sends: the messages of the algorithm, and one array of the model's size up (FedAvg 2x becomes 3x). Keeps: no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import (
    MEAN,
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Logged,
    Reducer,
    Report,
    StructureError,
    Up,
    check_choice,
    check_count,
    check_number,
    finite,
    logged,
)
from fedbraid.local import MASK, Batches, ClientData, Fold, LocalWork, grad, masked_mean
from fedbraid.transforms.clients import with_fold
from fedbraid.transforms.uploads import averages, change_exchanges, refuse_partial, refuse_sealed

__all__ = ["elastic", "elasticity"]

PyTree = Any


class Sensed(NamedTuple):
    """Up: the exchange's own aux, and the sensitivity of the output to every parameter."""

    aux: PyTree
    omega: PyTree


class Sensing(NamedTuple):
    """A client's carry in its pass over B_k."""

    omega: PyTree
    seen: Any


def elasticity(omega: PyTree, tau: Any) -> PyTree:
    """zeta = 1 + tau - Omega / max Omega, with the maximum over all arrays; 1 if Omega is 0 everywhere.

    >>> [float(z) for z in elasticity([jnp.array(4.0), jnp.array(1.0)], 0.5)]
    [0.5, 1.25]
    """
    largest = jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(omega)]))
    unit = jnp.where(largest > 0, largest, 1)
    return jax.tree.map(lambda o: jnp.where(largest > 0, 1 + tau - o / unit.astype(o.dtype), 1).astype(o.dtype), omega)


def elastic(
    alg: Algorithm,
    outputs: Callable[[PyTree, dict], Any],
    *,
    tau: Any = 0.5,
    mu: Any = 0.95,
    sensitivity: Literal["momentum", "average"] = "momentum",
    held_out: float = 0.1,
    batch_size: int | None = 20,
    exchange: str = "train",
) -> Algorithm:
    """Elastic aggregation over any algorithm with a "train" exchange.

    outputs: ``(params, batch) -> F``, the model's outputs with the examples along the first axis.
    tau: updates are scaled by 1 + tau where the output does not depend on a parameter, by tau at the most sensitive.
    mu: decay of the momentum form. batch_size: examples per g; 1 with "average" is exactly eq. 1.
    held_out: the share of a client's rows in B_k, drawn at random once per run; no exchange trains on them. If a
        client has only one row, it is used for both.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = elastic(fedavg(lambda params, batch, key: jnp.sum(params**2)), lambda params, batch: batch["x"] @ params)
    """
    if not callable(outputs):
        raise ValueError(f"outputs must be a function (params, batch) -> model outputs, got {outputs!r}")
    check_number("tau", tau, low=0)
    check_number("mu", mu, low=0, high=1, open_high=True)
    check_choice("sensitivity", sensitivity, ("momentum", "average"))
    check_number("held_out", held_out, low=0, high=1, open_low=True, open_high=True)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    held = Batches(batch_size, epochs=1, shuffle=False, part=(1 - held_out, 1.0), augment=False, drawn=True)
    sense = _sensing(outputs, mu, sensitivity, held)

    def change(one: Exchange) -> Exchange:
        refuse_sealed(one, "elastic")
        refuse_partial(one, "elastic")
        _check_kept(one)
        return _receive_elastically(one._replace(client=with_fold(one.client, sense, _sensed)), tau)

    rest = alg._replace(exchanges=tuple(e._replace(client=_on_the_rest(e.client, 1 - held_out)) for e in alg.exchanges))
    return change_exchanges(rest, [exchange], change, argument="exchange")


def _sensing(outputs: Callable, mu: Any, sensitivity: str, batches: Batches) -> Fold:
    def size(params: PyTree, batch: dict) -> Any:
        out = outputs(params, batch)
        return masked_mean(jnp.sum(jnp.square(out.reshape(len(out), -1)), 1), batch[MASK])

    def start(down: Down, state: PyTree, key: Any) -> Sensing:
        return Sensing(jax.tree.map(jnp.zeros_like, down.params), jnp.zeros((), jnp.result_type(float)))

    def step(at: Sensing, batch: dict, key: Any, down: Down) -> Sensing:
        g = grad(size)(down.params, batch)
        if sensitivity == "momentum":
            return Sensing(jax.tree.map(lambda o, g: mu * o + (1 - mu) * jnp.abs(g), at.omega, g), at.seen)
        n = jnp.sum(batch[MASK])
        return Sensing(
            jax.tree.map(lambda o, g: o + n.astype(o.dtype) * jnp.abs(g), at.omega, g),
            at.seen + n.astype(at.seen.dtype),
        )

    def finish(at: Sensing, down: Down, state: PyTree, n: Any) -> PyTree:
        if sensitivity == "momentum":
            return at.omega
        return jax.tree.map(lambda o: o / at.seen.astype(o.dtype), at.omega)

    return Fold(start, step, finish, batches)


def _check_kept(exchange: Exchange) -> None:
    """Refuse clients that keep their pseudograd: the server scales it by factors that they do not know."""
    if "pseudograd" in exchange.keeps:
        raise StructureError(
            f"elastic over exchange {exchange.name!r}: the states of server and clients would disagree. Clients keep "
            "the update they sent (as in h = mean g_i), but the server scales it. SCAFFOLD can be used: its clients "
            "keep only their aux"
        )


def _sensed(report: Report, omega: PyTree) -> Report:
    return report._replace(up=Up(report.up.pseudograd, Sensed(report.up.aux, omega)))


def _on_the_rest(client: Callable, share: float) -> Callable:
    """The client on ``share`` of its rows, those outside of B_k."""
    if isinstance(client, LocalWork):

        def shorten(fold: Fold) -> Fold:
            low, high = fold.batches.part
            return fold._replace(batches=replace(fold.batches, part=(share * low, share * high), drawn=True))

        return replace(client, folds=tuple(map(shorten, client.folds)))
    first = Batches(None, epochs=1, part=(0.0, share))

    def rest(down: Down, state: PyTree, data: ClientData, key: Any) -> Report:
        return client(down, state, replace(data.in_random_order(), size=first.bounds(data.size)[1]), key)

    return rest


def _receive_elastically(exchange: Exchange, tau: Any) -> Exchange:
    reducer = exchange.reducer

    def receive(server: PyTree, aggregate: Aggregate, key: Any) -> Logged:
        zeta = elasticity(aggregate.up.aux.omega, tau)
        scaled = jax.tree.map(jnp.multiply, zeta, aggregate.up.pseudograd)
        inner = logged(exchange.receive(server, aggregate._replace(up=Up(scaled, aggregate.up.aux.aux)), key))
        return Logged(inner.server, inner.logs | _factors(zeta))

    return exchange._replace(
        receive=receive,
        reducer=_averaged(reducer) if averages(reducer) else _with_omega(reducer),
        reconcile=lambda state, meant, got: exchange.reconcile(state, _bare(meant), _bare(got)),
        admit=lambda up: exchange.admit(_bare(up)) & finite(up.aux.omega),
    )


def _factors(zeta: PyTree) -> dict[str, Any]:
    """For the round's history: the share of parameters that move further than the mean update, and the mean factor."""
    leaves = [leaf.astype(jnp.result_type(float)) for leaf in jax.tree.leaves(zeta)]
    number = sum(leaf.size for leaf in leaves)
    return {
        "boosted": sum(leaf.size / number * jnp.mean(leaf > 1, dtype=leaf.dtype) for leaf in leaves),
        "mean_factor": sum(leaf.size / number * jnp.mean(leaf) for leaf in leaves),
    }


def _bare(up: Up) -> Up:
    return Up(up.pseudograd, up.aux.aux)


def _averaged(reducer: Reducer) -> Reducer:
    """The weighted means of update and sensitivity. It is still a mean, so another rule may replace it."""

    def decode(up: Up) -> Up:
        bare = reducer.decode(_bare(up))
        return Up(bare.pseudograd, Sensed(bare.aux, up.aux.omega))

    return MEAN._replace(lift=lambda up, weight: MEAN.lift(decode(up), weight), decode=decode)


def _with_omega(reducer: Reducer) -> Reducer:
    """The exchange's own reduction, and the weighted mean of the sensitivities."""

    def lift(up: Up, weight: Any) -> tuple[PyTree, PyTree]:
        return reducer.lift(_bare(up), weight), MEAN.lift(up.aux.omega, weight)

    def finish(combined: tuple[PyTree, PyTree], weight: Any, count: Any) -> Up:
        up, omega = reducer.finish(combined[0], weight, count), combined[1]
        if reducer.kind == "gather":
            omega = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), omega)
        return Up(up.pseudograd, Sensed(up.aux, MEAN.finish(omega, jnp.sum(weight), count)))

    return Reducer(lift, finish, kind=reducer.kind)
