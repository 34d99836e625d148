"""FedSpeed: a corrected proximal term against drift, and a gradient from a point ahead for flat minima.

Y. Sun, L. Shen, T. Huang, L. Ding, D. Tao. FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy. ICLR 2023. Algorithm 1.

Client i keeps g_i, at first 0, the correction of its proximal term. It starts from y = x and repeats K times

    g_1 = grad f_i(y; batch),    g_2 = grad f_i(y + rho g_1; batch),    g = (1 - alpha) g_1 + alpha g_2,
    y <- y - client_lr (g - g_i + (y - x) / lam).

Then g_i <- g_i + (x - y) / lam. It sends x - z with the corrected model z = y - lam g_i, and the server averages:
x <- x - mean (x - z_i).

With rho = 0 and all clients this is FedDyn with the regularizer 1 / lam. FedDyn's server subtracts the mean of all
clients' g_i, FedSpeed's that of the cohort, so the server keeps nothing. Uploads have equal weights.

Sends, in models: 1 down, 1 up. Keeps: one model per client, so the same clients must take part again (cross-silo). A
local step costs two gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.client_optimizers import client_optimizer
from fedbraid.algorithms.local_steps import Walk, moved, walking
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_number, is_zero
from fedbraid.local import LocalOptions, batches_of, grad, local_work, value_and_grad, weight_of

__all__ = ["fedspeed"]

PyTree = Any


class SpeedState(NamedTuple):
    """The server's model."""

    params: PyTree


def fedspeed(
    loss: Loss,
    *,
    lam: Any = 1.0,
    rho: Any = 0.1,
    alpha: Any = 1.0,
    client_lr: Any = 0.1,
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedSpeed: corrected proximal local steps with a gradient from a point ahead.

    lam: the proximal term has the weight 1 / lam.
    rho: length of the step to the point ahead.
    alpha: weight of the gradient at that point.

    >>> alg = fedspeed(lambda params, batch, key: jnp.sum(params**2), lam=5.0, client_lr=0.05)
    """
    check_number("lam", lam, low=0, open_low=True)
    check_number("rho", rho, low=0)
    check_number("alpha", alpha, low=0, high=1)
    check_number("client_lr", client_lr, low=0, open_low=True)

    def direction(y: PyTree, batch: dict, key: Any, down: Down, g_i: PyTree) -> tuple[Any, PyTree]:
        value, g = value_and_grad(loss)(y, batch, key)
        if not (is_zero(rho) or is_zero(alpha)):
            ahead = grad(loss)(jax.tree.map(lambda y, g: y + rho * g, y, g), batch, key)
            g = jax.tree.map(lambda g, a: (1 - alpha) * g + alpha * a, g, ahead)
        return value, jax.tree.map(lambda g, g_i, y, x: g - g_i + (y - x) / lam, g, g_i, y, down.params)

    def finish(walk: Walk, down: Down, g_i: PyTree, n: Any) -> Report:
        d = moved(walk, down)
        g_i = jax.tree.map(lambda g, d: g + d / lam, g_i, d)
        sent = jax.tree.map(lambda d, g: d + lam * g, d, g_i)
        return Report(Up(sent), weight_of("uniform", n), g_i, {"loss": walk.mean_loss()})

    def receive(server: SpeedState, aggregate: Aggregate, key: Any) -> SpeedState:
        return SpeedState(jax.tree.map(jnp.subtract, server.params, aggregate.up.pseudograd))

    start, step = walking(client_optimizer(client_lr), direction, hold=lambda down, g_i: g_i)
    work = local_work(start, step, finish, batches_of(**local))
    return Algorithm(
        init=SpeedState,
        init_client=lambda params: jax.tree.map(jnp.zeros_like, params),
        exchanges=(Exchange("train", lambda server: Down(server.params), work, receive),),
        params=lambda server: server.params,
    )
