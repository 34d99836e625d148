"""FedALA: a client mixes its last local model with the new global one, with a learned weight for every number.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan. FedALA: Adaptive Local Aggregation for Personalized
Federated Learning. AAAI 2023. Algorithm 1.

Client i keeps its last local model theta_i and weights W_i in [0, 1], at first the initial model and 1. In a round with
the global model x it first learns its weights, on a random share of its examples,

    theta = theta_i + (x - theta_i) * W_i,
    W_i <- clip(W_i - weight_lr grad f_i(theta; batch) * (x - theta_i), 0, 1),

with products number by number. Then it trains from theta by local steps, keeps the result as its new theta_i, and sends
it; the server averages. Only the leaves named by ``layers`` have weights, in the paper those of the last layers; for
the others theta is x. With weight_lr = 0 all weights stay 1 and this is FedAvg.

The paper learns the weights until they converge in a client's first round with weights, and for one pass in later
rounds. Here every round has ``weight_epochs`` passes.

Sends, in models: 1 down, 1 up. Keeps: one model and the weights on every client. A client's model is the mixture of its
last local model and the newest global one, with its last weights; before its first round that is the global model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm, Down, Report, Up, check_count, check_number
from fedbraid.local import Batches, ClientData, Fold, Weighting, grad
from fedbraid.transforms.private_leaves import matching, split

__all__ = ["AlaState", "fedala"]

PyTree = Any


class AlaState(NamedTuple):
    """What a client keeps: its last local model, the weights (None for leaves without), its optimizer's state."""

    theta: PyTree
    weights: PyTree
    opt: PyTree


def _mixed(theta: PyTree, weights: PyTree, x: PyTree) -> PyTree:
    """theta + (x - theta) * weights; x for leaves without weights."""

    def mix(w: Any, theta: Any, x: Any) -> Any:
        return x if w is None else theta + (x - theta) * w

    return jax.tree.map(mix, weights, theta, x, is_leaf=lambda leaf: leaf is None)


def fedala(
    loss: Loss,
    *,
    layers: str | Sequence[str] = (),
    weight_lr: Any = 1.0,
    share: float = 0.8,
    weight_epochs: int = 1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedALA: FedAvg whose clients start from a learned mixture of their own model and the global one.

    layers: patterns of the leaves that are mixed, such as ``"dense2"``; () means all. Other leaves start from the
        global model.
    weight_lr: learning rate of the mixing weights.
    share: part of the client's examples on which the weights are learned, drawn anew in every round.
    weight_epochs: passes over these examples.

    >>> alg = fedala(lambda params, batch, key: jnp.sum(params**2), weight_lr=1.0, client_lr=0.05)
    """
    check_number("weight_lr", weight_lr, low=0)
    check_number("share", share, low=0, high=1, open_low=True)
    check_count("weight_epochs", weight_epochs)
    train = fedavg(loss, client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)
    exchange = train.exchanges[0]
    some = Batches(local.get("batch_size", 20), epochs=weight_epochs, shuffle=False, part=(0.0, share))

    def ones(params: PyTree) -> PyTree:
        chosen = matching(params, layers, argument="layers") if layers else jax.tree.map(lambda _: True, params)
        return split(jax.tree.map(jnp.ones_like, params), chosen)[1]

    def learn(weights: PyTree, batch: dict, key: Any, down: tuple) -> PyTree:
        theta, x = down
        g = grad(loss)(_mixed(theta, weights, x), batch, key)

        def move(w: Any, g: Any, x: Any, theta: Any) -> Any:
            return None if w is None else jnp.clip(w - weight_lr * g * (x - theta), 0, 1)

        return jax.tree.map(move, weights, g, x, theta, is_leaf=lambda leaf: leaf is None)

    learning = Fold(lambda down, weights, key: weights, learn, lambda weights, *_: weights, some)

    def client(down: Down, state: AlaState, data: ClientData, key: Any) -> Report:
        own = jax.random.fold_in(key, 0x0A1A)
        drawn = data if data.order is not None else replace(data, order=(own, data.size))
        weights = learning.run((state.theta, down.params), state.weights, drawn, own)
        first = _mixed(state.theta, weights, down.params)
        report = exchange.client(Down(first), state.opt, data, key)
        after = jax.tree.map(jnp.subtract, first, report.up.pseudograd)
        sent = jax.tree.map(jnp.subtract, down.params, after)
        return report._replace(up=Up(sent), state=AlaState(after, weights, report.state))

    return train._replace(
        init_client=lambda params: AlaState(params, ones(params), train.init_client(params)),
        exchanges=(exchange._replace(client=client),),
        personal=lambda server, state: _mixed(state.theta, state.weights, server.params),
    )
