"""FedNova: normalized averaging, so that clients with more local steps do not get a larger weight.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020.

Client i takes tau_i local steps. Its update is x - y_i = client_lr sum_k a_k g_k with weights a_k >= 0 that depend on
its local solver (all 1 for SGD). To first order in client_lr, FedAvg's mean of the updates is a gradient step on
sum_i p_i tau_i f_i instead of f = sum_i p_i f_i. FedNova sends the normalized update d_i = (x - y_i) / ||a_i||_1, and

    x <- x - server_lr tau_eff sum_i p_i d_i,    tau_eff = sum_i p_i ||a_i||_1.

The local solver is SGD with momentum rho and a proximal term alpha,

    u <- rho u + g(y) + alpha (y - x),    y <- y - client_lr u,

both 0 by default. Its ||a_i||_1 is the update for a constant gradient of 1, divided by client_lr. It is computed by
running the same recursion on scalars. For momentum alone or the proximal term alone this gives the closed forms of the
paper (Section 4); it is also correct for both together.

Sends, in models: 1 down, 1 up, and one number. Keeps: nothing on the clients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._server_only import Loss
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number, is_zero
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of, local_work, value_and_grad, weight_of

__all__ = ["fednova"]

PyTree = Any


class NovaState(NamedTuple):
    """The server's model."""

    params: PyTree


class Walk(NamedTuple):
    """A client's carry: model y, momentum u, ||a_i||_1 with its last increment, step number and sum of batch losses."""

    params: PyTree
    u: PyTree
    length: Any  # ||a_i||_1 so far
    pace: Any  # its last increment
    k: Any
    loss: Any


def fednova(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    rho: Any = 0.0,
    alpha: Any = 0.0,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedNova: FedAvg whose updates are divided by the local work, for clients that take different numbers of steps.

    J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in Heterogeneous
    Federated Optimization. NeurIPS 2020.

    rho: momentum of the local steps.
    alpha: weight of a proximal term in the local steps.
    client_lr, server_lr, weighting, local: as in `fedbraid.fedavg`.

    >>> alg = fednova(lambda params, batch, key: jnp.sum(params**2), client_lr=0.05, epochs=2)
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_number("rho", rho, low=0, high=1, open_high=True)
    check_number("alpha", alpha, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)

    def start(down: Down, state: Any, key: Any) -> Walk:
        zero = jnp.zeros((), jnp.result_type(float))
        u = () if is_zero(rho) else jax.tree.map(jnp.zeros_like, down.params)
        return Walk(down.params, u, zero, zero, jnp.int32(0), zero)

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, u = value_and_grad(loss)(walk.params, batch, key)
        if not is_zero(alpha):
            u = jax.tree.map(lambda g, y, x: g + alpha * (y - x), u, walk.params, down.params)
        if not is_zero(rho):
            u = jax.tree.map(lambda g, u: g + rho * u, u, walk.u)
        pace = rho * walk.pace + 1 - alpha * client_lr * walk.length
        return Walk(
            jax.tree.map(lambda y, u: y - client_lr * u, walk.params, u),
            () if is_zero(rho) else u,
            walk.length + pace,
            pace,
            walk.k + 1,
            walk.loss + value.astype(walk.loss.dtype),
        )

    def finish(walk: Walk, down: Down, state: Any, n: Any) -> Report:
        sent = jax.tree.map(lambda x, y: (x - y) / walk.length.astype(x.dtype), down.params, walk.params)
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        return Report(Up(sent, walk.length), weight_of(weighting, n), metrics={"loss": mean_loss})

    def receive(server: NovaState, aggregate: Aggregate, key: Any) -> NovaState:
        d, tau = aggregate.up  # tau_eff is the mean of ||a_i||_1 with the same weights
        return NovaState(jax.tree.map(lambda x, d: x - server_lr * tau.astype(x.dtype) * d, server.params, d))

    exchange = Exchange(
        "train", lambda server: Down(server.params), local_work(start, step, finish, batches_of(**local)), receive
    )
    return Algorithm(
        init=NovaState, init_client=lambda params: (), exchanges=(exchange,), params=lambda server: server.params
    )
