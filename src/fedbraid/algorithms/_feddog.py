"""FedDoG: DoG steps on the clients, with a rate that the whole federation finds together.

M. Ivgi, O. Hinder, Y. Carmon. DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size Schedule. ICML 2023.

DoG divides the distance from the start by the root of the sum of all squared gradients:

    x_{t+1} = x_t - eta_t g_t,    eta_t = max_{s <= t} ||x_s - x_0|| / sqrt(sum_{s <= t} ||g_s||^2),

with the distance r (1 + ||x_0||) at first. It needs no rate, and a loss times a constant has the same iterates. If each
client began anew in every round, every round would have DoG's tiny first steps. So the start is that of the run, and
the server keeps the two numbers: the distance d and the sum G. Client i, given the model x, steps from y_0 = x by

    G_k = G + sum_{j <= k} ||g_j||^2,   d_k = max(d, max_{j <= k} ||y_j - x||),   y_{k+1} = y_k - d_k / sqrt(G_k) g_k,

and uploads x - y_K and sum_k ||g_k||^2. The server averages both and takes

    x <- x - mean(x - y_i),    G <- G + mean(sum of squares),    d <- max(d, ||x - x_0||).

With one client and one local step per round this is DoG.

Sends, in models: 1 down, 1 up, and three numbers. Keeps: one more model on the server, nothing on the clients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._server_only import Loss
from fedbraid.algorithms.local_smoothness import distance
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Logged, Report, Up, check_choice, check_number
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of, local_work, value_and_grad, weight_of
from fedbraid.transforms.uploads import norm

__all__ = ["feddog"]

PyTree = Any


class DogState(NamedTuple):
    """The server: its model, the model at the start of the run, the distance d and the sum G."""

    params: PyTree
    start: PyTree
    reach: Any
    squares: Any


class Scale(NamedTuple):
    """Down: the distance d and the sum G."""

    reach: Any
    squares: Any


class Walk(NamedTuple):
    """A client's carry: model, distance d_k, sum of the squares of this round, step number and sum of losses."""

    params: PyTree
    reach: Any
    squares: Any
    k: Any
    loss: Any


def feddog(
    loss: Loss, *, initial: Any = 1e-4, weighting: Weighting = "examples", **local: Unpack[LocalOptions]
) -> Algorithm:
    """FedDoG: local DoG steps without a rate; the server keeps the distance and the sum of squared gradients.

    initial: the first distance is ``initial (1 + ||x_0||)``, which must be small (the paper: 1e-6 to 1e-4).

    >>> alg = feddog(lambda params, batch, key: jnp.sum(params**2), steps=10)
    """
    check_number("initial", initial, low=0, open_low=True)
    check_choice("weighting", weighting, WEIGHTINGS)
    batches = batches_of(**local)

    def start(down: Down, state: PyTree, key: Any) -> Walk:
        zero = jnp.zeros((), jnp.result_type(float))
        return Walk(down.params, down.aux.reach, zero, jnp.int32(0), zero)

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, g = value_and_grad(loss)(walk.params, batch, key)
        real = walk.loss.dtype
        squares = walk.squares + (norm(g) ** 2).astype(real)
        reach = jnp.maximum(walk.reach, distance(walk.params, down.params).astype(real))
        total = down.aux.squares + squares
        eta = jnp.where(total > 0, reach / jnp.sqrt(jnp.where(total > 0, total, 1)), 0)
        y = jax.tree.map(lambda y, g: y - eta.astype(g.dtype) * g, walk.params, g)
        return Walk(y, reach, squares, walk.k + 1, walk.loss + value.astype(real))

    def finish(walk: Walk, down: Down, state: PyTree, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        return Report(Up(sent, walk.squares), weight_of(weighting, n), (), {"loss": mean_loss})

    def receive(server: DogState, aggregate: Aggregate, key: Any) -> Logged:
        x = jax.tree.map(jnp.subtract, server.params, aggregate.up.pseudograd)
        reach = jnp.maximum(server.reach, distance(x, server.start).astype(server.reach.dtype))
        squares = server.squares + aggregate.up.aux
        logs = {"client_rate": reach / jnp.sqrt(jnp.where(squares > 0, squares, 1))}
        return Logged(DogState(x, server.start, reach, squares), logs)

    def init(params: PyTree) -> DogState:
        real = jnp.result_type(float)
        return DogState(params, params, initial * (1 + norm(params).astype(real)), jnp.zeros((), real))

    exchange = Exchange(
        "train",
        lambda server: Down(server.params, Scale(server.reach, server.squares)),
        local_work(start, step, finish, batches),
        receive,
    )
    return Algorithm(init, lambda params: (), (exchange,), lambda server: server.params)
