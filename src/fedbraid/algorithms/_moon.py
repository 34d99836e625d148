"""MOON: local features shall be closer to those of the global model than to those of the client's last model.

Q. Li, B. He, D. Song. Model-Contrastive Federated Learning. CVPR 2021. Algorithm 1.

FedAvg with a contrastive term in the local loss. With the features R_y(x) of an example under the local model y, those
of the global model z_glob = R_x(x), and those of the client's last local model z_prev, the term is

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) ),

with the cosine similarity sim. Local steps minimize f_i + mu mean(l_con). z_glob and z_prev are constants of the
gradient. mu = 0 is FedAvg. A client's last model is at first the initial one. The paper's networks have a projection
head before the features; here they are the activations before the last layer.

Sends, in models: 1 down, 1 up. Keeps: one model per client, its last local model. A local step computes features with
three models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.client_optimizers import OptimizerSpec, client_optimizer
from fedbraid.algorithms.local_steps import Walk, moved, walking
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number, is_zero
from fedbraid.local import (
    MASK,
    WEIGHTINGS,
    LocalOptions,
    Weighting,
    batches_of,
    local_work,
    masked_mean,
    value_and_grad,
    weight_of,
)

__all__ = ["MoonState", "contrast", "moon"]

PyTree = Any
TINY = 1e-16  # squared: the similarity with features that are all 0 is 0


class MoonState(NamedTuple):
    """What a client keeps: its last local model, and its optimizer's state."""

    last: PyTree
    opt: PyTree


def _cosine(a: Any, b: Any) -> Any:
    squared = jnp.sum(a * a, -1) * jnp.sum(b * b, -1)
    return jnp.sum(a * b, -1) * jax.lax.rsqrt(jnp.maximum(squared, TINY))


def contrast(z: Any, z_glob: Any, z_prev: Any, tau: Any) -> Any:
    """l_con of every example; features are ``[B, D]``.

    >>> z = jnp.array([[1.0, 0.0]])
    >>> [round(float(contrast(z, z, other, 0.5)[0]), 4) for other in (z, -z)]
    [0.6931, 0.0181]
    """
    return jax.nn.softplus((_cosine(z, z_prev) - _cosine(z, z_glob)) / tau)


def moon(
    loss: Loss,
    features: Callable[[PyTree, dict], Any],
    *,
    mu: Any = 1.0,
    tau: Any = 0.5,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    client_opt: OptimizerSpec = "sgd",
    client_opt_state: Literal["reset", "kept"] = "reset",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """MOON: FedAvg with a contrastive loss between local, global and previous features.

    Q. Li, B. He, D. Song. Model-Contrastive Federated Learning. CVPR 2021.

    features: ``(params, batch) -> activations before the last layer``, one row per example.
    mu: weight of the contrastive term.
    tau: temperature of the contrastive term.

    >>> alg = moon(lambda params, batch, key: jnp.sum(params**2), lambda params, batch: batch["x"] * params, mu=1.0)
    """
    if not callable(features):
        raise ValueError(f"features must be a function (params, batch) -> features, got {features!r}")
    check_number("mu", mu, low=0)
    check_number("tau", tau, low=0, open_low=True)
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_choice("weighting", weighting, WEIGHTINGS)
    opt, server_opt = client_optimizer(client_lr, client_opt, client_opt_state), server_optimizers.sgd(server_lr)

    def flat_features(params: PyTree, batch: dict) -> Any:
        z = features(params, batch)
        return z.reshape(len(z), -1)

    def direction(y: PyTree, batch: dict, key: Any, down: Down, last: PyTree) -> tuple[Any, PyTree]:
        def total(y: PyTree) -> Any:
            value = loss(y, batch, key)
            if is_zero(mu):
                return value
            fixed = jax.lax.stop_gradient((down.params, last))
            z, z_glob, z_prev = (flat_features(params, batch) for params in (y, *fixed))
            return value + mu * masked_mean(contrast(z, z_glob, z_prev, tau), batch[MASK]).astype(value.dtype)

        return value_and_grad(total)(y)

    def finish(walk: Walk, down: Down, state: MoonState, n: Any) -> Report:
        after = MoonState(walk.params, opt.after(walk.opt))
        return Report(Up(moved(walk, down)), weight_of(weighting, n), after, {"loss": walk.mean_loss()})

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        return server_step(server_opt, server, aggregate.up.pseudograd)

    start, step = walking(opt, direction, hold=lambda down, state: state.last, kept=lambda state: state.opt)
    work = local_work(start, step, finish, batches_of(**local))
    return Algorithm(
        init=lambda params: ServerState(params, server_opt.init(params)),
        init_client=lambda params: MoonState(params, opt.of_client(params)),
        exchanges=(Exchange("train", lambda server: Down(server.params), work, receive),),
        params=lambda server: server.params,
    )
