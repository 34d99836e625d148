"""FedACG: the server sends its model one momentum step ahead, and clients stay close to that point.

G. Kim, J. Kim, B. Han. Communication-Efficient Federated Learning with Accelerated Client Gradient. CVPR 2024.
Algorithm 1.

The server has x and the momentum m, at first 0. It sends the point that its momentum leads to, z = x + lam m. Client i
starts from y = z and takes local steps on f_i(y) + (beta/2) |y - z|^2. It sends z - y. With S the clients whose uploads
arrived,

    m <- lam m - server_lr mean_S (z - y_i),     x <- x + m.

lam = 0 is FedProx with the weight beta, and lam = beta = 0 is FedAvg. One local step on all examples, with all clients
and server_lr = 1, is Nesterov's accelerated gradient method: the gradient is taken at the point ahead.

Sends, in models: 1 down, 1 up, as FedAvg. Keeps: nothing on the clients, except the state of an optimizer with
``client_opt_state="kept"``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss, fedprox
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Aggregate, Algorithm, Down, check_number
from fedbraid.local import Weighting

__all__ = ["AcgState", "fedacg"]

PyTree = Any


class AcgState(NamedTuple):
    """The server: its model and its momentum."""

    params: PyTree
    m: PyTree


def fedacg(
    loss: Loss,
    *,
    lam: Any = 0.85,
    beta: Any = 0.01,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedACG: FedProx from a model that is one server momentum step ahead.

    G. Kim, J. Kim, B. Han. Communication-Efficient Federated Learning with Accelerated Client Gradient. CVPR 2024.

    lam: momentum of the server.
    beta: weight of the proximal term.

    >>> alg = fedacg(lambda params, batch, key: jnp.sum(params**2), lam=0.9, client_lr=0.05)
    """
    check_number("lam", lam, low=0, high=1, open_high=True)
    check_number("beta", beta, low=0)
    check_number("server_lr", server_lr, low=0)
    train = fedprox(loss, alpha=beta, client_lr=client_lr, weighting=weighting, **local)

    def send(server: AcgState) -> Down:
        return Down(jax.tree.map(lambda x, m: x + lam * m, server.params, server.m))

    def receive(server: AcgState, aggregate: Aggregate, key: Any) -> AcgState:
        m = jax.tree.map(lambda m, d: lam * m - server_lr * d, server.m, aggregate.up.pseudograd)
        return AcgState(jax.tree.map(jnp.add, server.params, m), m)

    return Algorithm(
        init=lambda params: AcgState(params, jax.tree.map(jnp.zeros_like, params)),
        init_client=train.init_client,
        exchanges=(train.exchanges[0]._replace(send=send, receive=receive),),
        params=lambda server: server.params,
    )
