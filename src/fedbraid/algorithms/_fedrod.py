"""FedRoD: a global model for all classes alike, and on every client a second head for the classes that it has.

H.-Y. Chen, W.-L. Chao. On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022.
Algorithm 1 with the linear personal head.

The global model is trained by FedAvg on a balanced loss, so that clients with few classes do not bias it: with n_ic the
number of examples of class c of client i, it is the cross entropy of the scores s_c + log n_ic (balanced softmax).
Client i keeps a personal head p_i, which is added to the head of the global model: its scores are the sum of both
heads' scores. On every batch both move from the same point,

    y   <- y - client_lr grad of the balanced loss of y,
    p_i <- p_i - head_lr grad of p -> f_i(y with the head y_head + p_i),

so p_i is trained with the client's own loss, and has no effect on what the client sends. p_i is at first 0: a client
that has not yet taken part uses the global model. The scores must be linear in the head, as those of a dense layer are.

Sends, in models: 1 down, 1 up. Keeps: the personal head. A round has one more pass over the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_count, check_number
from fedbraid.local import (
    MASK,
    WEIGHTINGS,
    Batches,
    ClientData,
    Fold,
    LocalOptions,
    Weighting,
    batches_of,
    grad,
    masked_mean,
    value_and_grad,
    weight_of,
)
from fedbraid.transforms.private_leaves import head_of, not_all, split

__all__ = ["fedrod"]

PyTree = Any
NONE = 1e-12  # instead of log 0 for a class that a client does not have


class Heads(NamedTuple):
    """A client's carry: the global model, the personal head, the step number and the sum of its batch losses."""

    params: PyTree
    own: PyTree
    k: Any
    loss: Any


def _added(params: PyTree, own: PyTree) -> PyTree:
    """The model with its head plus the personal one."""
    return jax.tree.map(lambda p, y: y if p is None else y + p, own, params, is_leaf=lambda leaf: leaf is None)


def fedrod(
    loss: Loss,
    outputs: Callable[[PyTree, dict], Any],
    num_classes: int,
    *,
    head: str | Sequence[str] | Callable | None = None,
    client_lr: Any = 0.1,
    head_lr: Any = None,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedRoD: a global model trained on a balanced loss, and a personal head on every client beside its head.

    outputs: ``(params, batch) -> scores of the classes``, ``[B, num_classes]``.
    head: the leaves of the head, as patterns of their names; by default those that the model declares.
    head_lr: rate of the personal head, by default ``client_lr``.

    >>> def loss(params, batch, key): return jnp.sum(params["w"] ** 2)
    >>> alg = fedrod(loss, lambda params, batch: batch["x"] @ params["w"] @ params["head"], 10, head="head")
    """
    if not callable(outputs):
        raise ValueError(f"outputs must be a function (params, batch) -> scores, got {outputs!r}")
    check_count("num_classes", num_classes, low=2)
    check_number("client_lr", client_lr, low=0, open_low=True)
    head_rate = client_lr if head_lr is None else check_number("head_lr", head_lr, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)
    choose, opt, batches = not_all(head_of(loss, head), "head"), server_optimizers.sgd(server_lr), batches_of(**local)

    def labels(batch: dict) -> Any:
        return jnp.where(batch[MASK] > 0, batch["y"].astype(jnp.int32), 0)  # padding may have any label

    def balanced(params: PyTree, batch: dict, counts: Any) -> Any:
        scores = outputs(params, batch)
        scores = scores + jnp.log(jnp.maximum(counts, NONE)).astype(scores.dtype)
        picked = jnp.take_along_axis(scores, labels(batch)[:, None], -1)[:, 0]
        return masked_mean(jax.nn.logsumexp(scores, -1) - picked, batch[MASK])

    def step(at: Heads, batch: dict, key: Any, given: tuple) -> Heads:
        value, g = value_and_grad(lambda params: balanced(params, batch, given[1]))(at.params)
        g_own = grad(lambda own: loss(_added(at.params, own), batch, key))(at.own)
        return Heads(
            jax.tree.map(lambda y, g: y - client_lr * g, at.params, g),
            jax.tree.map(lambda p, g: p - head_rate * g, at.own, g_own),
            at.k + 1,
            at.loss + value.astype(at.loss.dtype),
        )

    def start(given: tuple, own: PyTree, key: Any) -> Heads:
        return Heads(given[0], own, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def count(counts: Any, batch: dict, key: Any, given: Any) -> Any:
        one = jax.nn.one_hot(labels(batch), num_classes, dtype=counts.dtype)
        return counts + jnp.sum(one * batch[MASK][:, None].astype(counts.dtype), 0)

    counting = Fold(
        lambda *_: jnp.zeros(num_classes, jnp.result_type(float)),
        count,
        lambda counts, *_: counts,
        Batches(batches.size, epochs=1, shuffle=False, augment=False),
    )
    training = Fold(start, step, lambda at, *_: at, batches)

    def client(down: Down, own: PyTree, data: ClientData, key: Any) -> Report:
        counts = counting.run((), (), data, key)
        at: Heads = training.run((down.params, counts), own, data, key)
        sent = jax.tree.map(jnp.subtract, down.params, at.params)
        mean_loss = at.loss / at.k.astype(at.loss.dtype)
        return Report(Up(sent), weight_of(weighting, data.size), at.own, {"loss": mean_loss})

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        return server_step(opt, server, aggregate.up.pseudograd)

    return Algorithm(
        init=lambda params: ServerState(params, opt.init(params)),
        init_client=lambda params: split(jax.tree.map(jnp.zeros_like, params), choose(params))[1],
        exchanges=(Exchange("train", lambda server: Down(server.params), client, receive),),
        params=lambda server: server.params,
        personal=lambda server, own: _added(server.params, own),
    )
