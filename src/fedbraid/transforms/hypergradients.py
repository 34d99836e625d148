"""Hypergradient descent on the server's rate: the rate grows while successive pseudogradients agree.

A. G. Baydin, R. Cornish, D. Martinez Rubio, M. Schmidt, F. Wood. Online Learning Rate Adaptation with Hypergradient
Descent. ICLR 2018. For servers also: Z. Wang, J. Wang, A. Li. FedHyper: A Universal and Robust Learning Rate Scheduler
for Federated Learning with Hypergradient Descent. ICLR 2024.

The server moves by x_{t+1} = x_t - s_t D_t. If D is the gradient of F, then d F(x_{t+1}) / d s_t = -<D_{t+1}, D_t>, so
that gradient descent on the rate, when D_t arrives, is

    multiplicative:  s_t = s_{t-1} exp(beta <D_t, D_{t-1}> / (||D_t|| ||D_{t-1}||))      (s_0 = 1)
    additive:        s_t = s_{t-1} + beta <D_t, D_{t-1}>

and s_t is kept in [1 / limit, limit]. The multiplicative rule does not depend on the unit of the loss, of the model or
of the rate. The additive rule does (beta has the unit of 1 / ||D||^2): it is the one of FedHyper, with beta = 1.

Sends: the messages of the algorithm. Keeps: one more model on the server, nothing on the clients.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import Aggregate, Algorithm, Exchange, Logged, check_choice, check_number, logged
from fedbraid.transforms.extrapolation import RATE, refuse_kept
from fedbraid.transforms.uploads import Extended, change_exchanges, extend_server, norm, refuse_partial, refuse_sealed

__all__ = ["hypergradient"]

PyTree = Any


class Rated(NamedTuple):
    """The server's own state: its rate, and the last pseudogradient (0 before the first)."""

    rate: Any
    last: PyTree


def hypergradient(
    alg: Algorithm,
    *,
    beta: Any = 0.2,
    rule: Literal["multiplicative", "additive"] = "multiplicative",
    limit: Any = 100.0,
    exchange: str = "train",
) -> Algorithm:
    """The algorithm with a server rate that learns from the inner products of successive mean uploads.

    beta: how fast the rate changes; with the multiplicative rule by at most a factor exp(beta) per round.
    limit: the rate stays between 1 / limit and limit. It multiplies the algorithm's own ``server_lr``.

    The history has the rate as ``train/server_rate``.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = hypergradient(fedavg(lambda params, batch, key: jnp.sum(params**2), client_lr=0.05))
    """
    check_number("beta", beta, low=0)
    check_choice("rule", rule, ("multiplicative", "additive"))
    check_number("limit", limit, low=1)

    def adapted(own: Rated, g: PyTree) -> Any:
        inner = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(own.last), strict=True))
        if rule == "additive":
            moved = own.rate + beta * inner
        else:
            lengths = norm(g) * norm(own.last)
            agreement = jnp.where(lengths > 0, inner / jnp.where(lengths > 0, lengths, 1), 0)
            moved = own.rate * jnp.exp(beta * jnp.clip(agreement, -1, 1))
        return jnp.clip(moved, 1 / limit, limit).astype(own.rate.dtype)

    def change(one: Exchange) -> Exchange:
        refuse_sealed(one, "hypergradient")
        refuse_partial(one, "hypergradient")
        refuse_kept(one, "hypergradient")

        def receive(server: Extended, aggregate: Aggregate, key: Any) -> Logged:
            g = aggregate.up.pseudograd
            rate = adapted(server.own, g)
            scaled = aggregate.up._replace(pseudograd=jax.tree.map(lambda leaf: rate.astype(leaf.dtype) * leaf, g))
            after = logged(one.receive(server, aggregate._replace(up=scaled), key))
            return Logged(after.server._replace(own=Rated(rate, g)), {**after.logs, RATE: rate})

        return one._replace(receive=receive)

    def first(params: PyTree) -> Rated:
        return Rated(jnp.ones((), jnp.result_type(float)), jax.tree.map(jnp.zeros_like, params))

    return change_exchanges(extend_server(alg, first), [exchange], change, argument="exchange")
