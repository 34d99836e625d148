"""IFCA: k global models; every client trains the one that fits its data best, so that clients form clusters.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran. An Efficient Framework for Clustered Federated Learning. NeurIPS 2020.
Algorithm 1 with model averaging.

The server has k models and sends all of them. Client i computes its mean loss with each, chooses the model j with the
lowest loss (the first of equal ones), and trains it by local steps from x_j to y_i. It sends x_j - y_i and which j it
chose. With S_j the clients whose uploads arrived and that chose j,

    x_j <- x_j - server_lr mean over S_j of (x_j - y_i),     and x_j stays if S_j is empty.

The k models must differ at the start, otherwise all clients choose the first. The first model is the initial one; the
others are that model plus Gaussian noise of ``spread`` times the root mean square of its numbers (times 0.1 for a model
of zeros). k = 1 is FedAvg.

A client's model is that of its cluster: the one that it chose last. The global model, which the usual evaluation
scores, is the model that most clients chose in the last round, by weight; clients that have not yet taken part use it
as well.

Sends, in models: k down, 1 up (and k numbers). Keeps: the number of its cluster, only to use it; clients choose anew in
every round. A round costs k more passes over the data without gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._fair import mean_loss
from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Reducer, Report, Up, check_count, check_number
from fedbraid.local import ClientData, Weighting

__all__ = ["ClusterServer", "ifca"]

PyTree = Any
FLAT = 0.1  # scale of the noise for a model of zeros


class ClusterServer(NamedTuple):
    """The server: all models along a leading axis, and the share of the last uploads that chose each."""

    models: PyTree
    share: Any


class ClusterClient(NamedTuple):
    """What a client keeps: the number of the model that it chose (-1: none yet), and its optimizer's state."""

    chosen: Any
    opt: PyTree


def _of_cluster(values: Any, like: Any) -> Any:
    """One number per cluster, in a shape that multiplies stacked leaves."""
    return values.reshape(-1, *[1] * (like.ndim - 1)).astype(like.dtype)


def _lift(up: Up, weight: Any) -> Up:
    mine = up.aux * jnp.asarray(weight, up.aux.dtype)
    return Up(jax.tree.map(lambda d: _of_cluster(mine, d[None]) * d[None], up.pseudograd), mine)


def _finish(total: Up, weight: Any, count: Any) -> Up:
    safe = jnp.where(total.aux > 0, total.aux, 1)
    each = jax.tree.map(lambda d: d / _of_cluster(safe, d), total.pseudograd)
    return Up(each, total.aux / jnp.where(weight > 0, weight, 1).astype(total.aux.dtype))


BY_CLUSTER = Reducer(_lift, _finish)
"""The weighted mean of every cluster's uploads, stacked, and the clusters' shares of the weight."""


def _spread_out(params: PyTree, clusters: int, spread: float, seed: int) -> PyTree:
    """The models at the start, stacked: the given one, and noisy copies."""
    leaves, tree = jax.tree.flatten(params)
    total = sum(jnp.sum(leaf.astype(jnp.result_type(float)) ** 2) for leaf in leaves)
    size = jnp.sqrt(total / sum(leaf.size for leaf in leaves))
    scale = spread * jnp.where(size > 0, size, FLAT)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def copies(leaf: Any, key: Any) -> Any:
        noise = jax.random.normal(key, (clusters, *leaf.shape), leaf.dtype).at[0].set(0)
        return leaf[None] + scale.astype(leaf.dtype) * noise

    return jax.tree.unflatten(tree, [copies(jnp.asarray(leaf), key) for leaf, key in zip(leaves, keys, strict=True)])


def ifca(
    loss: Loss,
    *,
    clusters: int = 2,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    spread: float = 0.5,
    seed: int = 0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """IFCA: k models, and every client trains the one with the lowest loss on its data.

    A. Ghosh, J. Chung, D. Yin, K. Ramchandran. An Efficient Framework for Clustered Federated Learning. NeurIPS 2020.

    clusters: k, the number of models.
    spread, seed: size and seed of the noise by which the initial models differ.

    >>> alg = ifca(lambda params, batch, key: jnp.sum(params**2), clusters=3, client_lr=0.05)
    """
    check_count("clusters", clusters)
    check_number("spread", spread, low=0, open_low=True)
    check_number("server_lr", server_lr, low=0)
    train = fedavg(loss, client_lr=client_lr, weighting=weighting, **local)
    work, looking = train.exchanges[0].client, mean_loss(loss, local.get("batch_size", 20))

    def client(down: Down, state: ClusterClient, data: ClientData, key: Any) -> Report:
        losses = jax.lax.map(lambda model: looking.run(Down(model), (), data, key), down.params)
        chosen = jnp.argmin(losses).astype(jnp.int32)
        report = work(Down(jax.tree.map(lambda m: m[chosen], down.params)), state.opt, data, key)
        mine = (jnp.arange(clusters, dtype=jnp.int32) == chosen).astype(jnp.result_type(float))
        return report._replace(
            up=Up(report.up.pseudograd, mine),
            state=ClusterClient(chosen, report.state),
            metrics={**report.metrics, "loss_before": losses[chosen]},
        )

    def receive(server: ClusterServer, aggregate: Aggregate, key: Any) -> ClusterServer:
        move, share = aggregate.up
        return ClusterServer(jax.tree.map(lambda m, d: m - server_lr * d, server.models, move), share)

    def init(params: PyTree) -> ClusterServer:
        first = jnp.zeros(clusters, jnp.result_type(float)).at[0].set(1)
        return ClusterServer(_spread_out(params, clusters, spread, seed), first)

    def model(server: ClusterServer, number: Any) -> PyTree:
        return jax.tree.map(lambda m: m[number], server.models)

    def largest(server: ClusterServer) -> Any:
        return jnp.argmax(server.share).astype(jnp.int32)

    def personal(server: ClusterServer, state: ClusterClient) -> PyTree:
        return model(server, jnp.where(state.chosen < 0, largest(server), state.chosen))

    return Algorithm(
        init=init,
        init_client=lambda params: ClusterClient(jnp.int32(-1), train.init_client(params)),
        exchanges=(Exchange("train", lambda server: Down(server.models), client, receive, reducer=BY_CLUSTER),),
        params=lambda server: model(server, largest(server)),
        personal=personal,
    )
