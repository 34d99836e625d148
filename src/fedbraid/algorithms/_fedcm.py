"""FedCM: every local step is mixed with the last round's mean step, a momentum that clients share.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao. FedCM: Federated Learning with Client-level Momentum. arXiv:2106.10874, 2021.
Algorithm 2.

The server has x and the direction Delta of the last round, at first 0, and sends both. Client i starts from y = x and
repeats K times

    y <- y - client_lr (alpha grad f_i(y; batch) + (1 - alpha) Delta).

It sends x - y and its number of steps K. With S the clients whose uploads arrived,

    Delta <- mean_S (x - y_i) / (client_lr mean_S K_i),     x <- x - server_lr mean_S (x - y_i).

In the paper all K_i are equal and the server's rate is eta_g = server_lr client_lr K. With unequal K_i, Delta is the
mean step of all clients. alpha = 1 is FedAvg. One local step on all examples, with all clients, is gradient descent
with the momentum Delta <- alpha grad + (1 - alpha) Delta. Clients keep nothing, so any cohort may take part.

Sends, in models: 2 down, 1 up (and a number). Keeps: nothing on the clients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.client_optimizers import client_optimizer
from fedbraid.algorithms.local_steps import Walk, moved, walking
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of, local_work, value_and_grad, weight_of

__all__ = ["MomentumState", "fedcm"]

PyTree = Any


class MomentumState(NamedTuple):
    """The server: its model, and the mean step of the last round."""

    params: PyTree
    delta: PyTree


def fedcm(
    loss: Loss,
    *,
    alpha: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "uniform",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedCM: FedAvg with client-level momentum.

    J. Xu, S. Wang, L. Wang, A. C.-C. Yao. FedCM: Federated Learning with Client-level Momentum. arXiv:2106.10874, 2021.

    alpha: weight of the client's own gradient; 1 is FedAvg.

    >>> alg = fedcm(lambda params, batch, key: jnp.sum(params**2), alpha=0.2, client_lr=0.05)
    """
    check_number("alpha", alpha, low=0, high=1, open_low=True)
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)

    def direction(y: PyTree, batch: dict, key: Any, down: Down, held: PyTree) -> tuple[Any, PyTree]:
        value, g = value_and_grad(loss)(y, batch, key)
        return value, jax.tree.map(lambda g, d: alpha * g + (1 - alpha) * d, g, down.aux)

    def finish(walk: Walk, down: Down, state: PyTree, n: Any) -> Report:
        steps = walk.k.astype(walk.loss.dtype)
        return Report(Up(moved(walk, down), steps), weight_of(weighting, n), (), {"loss": walk.mean_loss()})

    def receive(server: MomentumState, aggregate: Aggregate, key: Any) -> MomentumState:
        move, steps = aggregate.up
        rate = client_lr * jnp.where(steps > 0, steps, 1)
        return MomentumState(
            jax.tree.map(lambda x, d: x - server_lr * d, server.params, move),
            jax.tree.map(lambda d: d / rate.astype(d.dtype), move),
        )

    start, step = walking(client_optimizer(client_lr), direction)
    work = local_work(start, step, finish, batches_of(**local))
    return Algorithm(
        init=lambda params: MomentumState(params, jax.tree.map(jnp.zeros_like, params)),
        init_client=lambda params: (),
        exchanges=(Exchange("train", lambda server: Down(server.params, server.delta), work, receive),),
        params=lambda server: server.params,
    )
