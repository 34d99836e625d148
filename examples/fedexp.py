"""FedExP: FedAvg with a server step that is computed from the uploads of the round.

Jhunjhunwala, Wang, Joshi. FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023.

With the updates Delta_i = x - y_i of M clients and their mean D, the server steps x <- x - eta_g D, where
eta_g = max(1, sum_i ||Delta_i||^2 / (2 M (||D||^2 + eps))). Each client also sends ||Delta_i||^2, one number.

Sends: the model down; the update and one number up. Keeps: nothing on the client.

This file is a user's: a configuration beside it names it as ``algorithm.name = "fedexp:fedexp"``.
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

import fedbraid as fb
from fedbraid.core import check_number
from fedbraid.local import LocalOptions, batches_of, value_and_grad


class Walk(NamedTuple):
    """A client's carry: its model, the step number and the sum of its batch losses."""

    params: Any
    k: Any
    loss: Any


def squared(tree: Any) -> Any:
    """The squared norm of a tree."""
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree))


def fedexp(loss: Any, *, client_lr: Any = 0.1, eps: Any = 1e-3, **local: Unpack[LocalOptions]) -> fb.Algorithm:
    """FedAvg with the extrapolated server step of FedExP; the history has it as ``train/step``."""
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("eps", eps, low=0)

    def start(down: fb.Down, state: Any, key: Any) -> Walk:
        return Walk(down.params, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: fb.Down) -> Walk:
        value, g = value_and_grad(loss)(walk.params, batch, key)
        y = jax.tree.map(lambda y, g: y - client_lr * g, walk.params, g)
        return Walk(y, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: fb.Down, state: Any, n: Any) -> fb.Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        return fb.Report(fb.Up(sent, squared(sent)), jnp.ones(()), metrics={"loss": mean_loss})

    def receive(server: Any, aggregate: fb.Aggregate, key: Any) -> fb.Logged:
        mean = aggregate.up.pseudograd
        rate = jnp.maximum(1.0, aggregate.up.aux / (2 * (squared(mean) + eps)))  # aux: the mean of ||Delta_i||^2
        moved = jax.tree.map(lambda x, d: x - rate.astype(x.dtype) * d, server, mean)
        return fb.Logged(moved, {"step": rate})

    work = fb.local_work(start, step, finish, batches_of(**local))
    return fb.Algorithm(
        init=lambda params: params,
        init_client=lambda params: (),
        exchanges=(fb.Exchange("train", lambda server: fb.Down(server), work, receive),),
        params=lambda server: server,
    )
