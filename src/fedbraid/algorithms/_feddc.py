"""FedDC: every client tracks how far its local model drifts from the global one, and the server adds the drifts back.

L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C.-Z. Xu. FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling
and Correction. CVPR 2022. Algorithm 1; for partial cohorts as in the authors' code.

The server has x, the mean h of all clients' drifts and the mean c of all clients' directions; client i keeps its drift
h_i and its direction c_i. All start at 0. Client i takes K local steps from y = x on

    f_i(y) + (alpha/2) |y - (x - h_i)|^2 + <y, c - c_i>,

whose last term is the gradient correction (the paper writes it with g_i = -client_lr K c_i). Then

    h_i <- h_i - (x - y),      c_i <- c_i - c + (x - y) / (K client_lr).

It sends x - y and the change of c_i. With S the clients whose uploads arrived, out of N,

    h <- h - |S|/N mean_S (x - y_i),    x <- mean_S y_i + h,    c <- c + |S|/N mean_S (change of c_i).

So h and c are always the means over all clients, and with all clients x is the paper's mean of y_i + h_i. Without the
gradient correction this is FedDyn: its g_i is -alpha h_i. At a fixed point y_i = x and h = 0, so x is the optimum of
the unweighted mean of the client losses. Uploads therefore have equal weights.

Sends, in models: 2 down, 2 up; without the gradient correction 1 down, 1 up. Keeps: two models per client (one), so the
same clients must take part again (cross-silo).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms._scaffold import share_heard
from fedbraid.algorithms.client_optimizers import client_optimizer
from fedbraid.algorithms.local_steps import Walk, moved, walking
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number
from fedbraid.local import LocalOptions, batches_of, local_work, value_and_grad, weight_of

__all__ = ["DriftClient", "DriftServer", "feddc"]

PyTree = Any


class DriftServer(NamedTuple):
    """The server: its model, the mean of all drifts h_i, and the mean of all c_i (() without the correction)."""

    params: PyTree
    h: PyTree
    c: PyTree


class DriftClient(NamedTuple):
    """What a client keeps: its drift and its direction (() without the correction)."""

    h: PyTree
    c: PyTree


def feddc(
    loss: Loss,
    *,
    alpha: Any = 0.1,
    client_lr: Any = 0.1,
    correction: bool = True,
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedDC: drifts of the clients are tracked, penalized and added back by the server.

    L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C.-Z. Xu. FedDC: Federated Learning with Non-IID Data via Local Drift
    Decoupling and Correction. CVPR 2022.

    alpha: weight of the penalty.
    correction: whether local gradients are corrected as in SCAFFOLD; False is FedDyn.

    >>> alg = feddc(lambda params, batch, key: jnp.sum(params**2), alpha=0.1, client_lr=0.05, epochs=5)
    """
    check_number("alpha", alpha, low=0, open_low=True)
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_choice("correction", correction, (True, False))

    def zeros(params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def hold(down: Down, state: DriftClient) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.subtract, down.params, state.h), jax.tree.map(jnp.subtract, down.aux, state.c)

    def direction(y: PyTree, batch: dict, key: Any, down: Down, held: tuple) -> tuple[Any, PyTree]:
        value, g = value_and_grad(loss)(y, batch, key)
        goal, shift = held
        g = jax.tree.map(lambda g, y, z: g + alpha * (y - z), g, y, goal)
        return value, jax.tree.map(jnp.add, g, shift) if correction else g

    def finish(walk: Walk, down: Down, state: DriftClient, n: Any) -> Report:
        sent = moved(walk, down)
        change = ()
        if correction:
            change = jax.tree.map(lambda d, c: d / (walk.k.astype(d.dtype) * client_lr) - c, sent, down.aux)
        after = DriftClient(
            jax.tree.map(jnp.subtract, state.h, sent),
            jax.tree.map(jnp.add, state.c, change),
        )
        return Report(Up(sent, change), weight_of("uniform", n), after, {"loss": walk.mean_loss()})

    def reconcile(state: DriftClient, meant: Up, decoded: Up) -> DriftClient:
        """Update h_i and c_i with the decoded upload, as the server does, so that h and c stay the means."""
        return DriftClient(
            jax.tree.map(lambda h, m, d: h - (d - m), state.h, meant.pseudograd, decoded.pseudograd),
            jax.tree.map(lambda c, m, d: c + (d - m), state.c, meant.aux, decoded.aux),
        )

    def receive(server: DriftServer, aggregate: Aggregate, key: Any) -> DriftServer:
        move, change = aggregate.up
        heard = share_heard(aggregate)
        h = jax.tree.map(lambda h, d: h - heard.astype(h.dtype) * d, server.h, move)
        x = jax.tree.map(lambda x, d, h: x - d + h, server.params, move, h)
        return DriftServer(x, h, jax.tree.map(lambda c, d: c + heard.astype(c.dtype) * d, server.c, change))

    start, step = walking(client_optimizer(client_lr), direction, hold=hold)
    exchange = Exchange(
        "train",
        lambda server: Down(server.params, server.c),
        local_work(start, step, finish, batches_of(**local)),
        receive,
        reconcile=reconcile,
        keeps=("pseudograd", "aux") if correction else ("pseudograd",),
    )
    return Algorithm(
        init=lambda params: DriftServer(params, zeros(params), zeros(params) if correction else ()),
        init_client=lambda params: DriftClient(zeros(params), zeros(params) if correction else ()),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
