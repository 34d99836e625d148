"""pFedMe: clients minimize Moreau envelopes of their losses, and keep the minimizers as personal models.

C. T. Dinh, N. H. Tran, T. D. Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020. Algorithm 1.

The objective is the mean of F_i(w) = min over theta of f_i(theta) + (lam/2) |theta - w|^2. Its gradient is
lam (w - theta_i(w)) with the minimizer theta_i(w), the personal model. Client i starts from w_i = x. For each of its
batches it approximates the minimizer by ``inner_steps`` gradient steps of rate ``personal_lr`` from its last theta (at
first x), and takes a step on the envelope:

    theta <- theta - personal_lr (grad f_i(theta; batch) + lam (theta - w_i)),     ``inner_steps`` times,
    w_i   <- w_i - client_lr lam (w_i - theta).

The server averages: x <- (1 - beta) x + beta mean_i w_i. The paper's beta may be larger than 1; it is ``server_lr``.

Sends, in models: 1 down, 1 up. Keeps: one model per client, its last theta, which is the client's model. It has no
effect on later rounds. A client that has not yet taken part has the initial model.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Report,
    Up,
    check_choice,
    check_count,
    check_number,
)
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of, local_work, value_and_grad, weight_of

__all__ = ["pfedme"]

PyTree = Any


class Envelope(NamedTuple):
    """A client's carry: its iterate w_i, the personal model theta, the step number and the sum of its batch losses."""

    w: PyTree
    theta: PyTree
    k: Any
    loss: Any


def pfedme(
    loss: Loss,
    *,
    lam: Any = 15.0,
    client_lr: Any = 0.05,
    personal_lr: Any = 0.05,
    inner_steps: int = 5,
    server_lr: Any = 1.0,
    weighting: Weighting = "uniform",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """pFedMe: personal models are proximal points of the global model, which minimizes the Moreau envelopes.

    C. T. Dinh, N. H. Tran, T. D. Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.

    lam: weight of the proximal term; smaller values give more personal models.
    client_lr: learning rate of the client's copy w of the global model; a step is ``client_lr lam (w - theta)``.
    personal_lr, inner_steps: learning rate and number of the steps on the personal model theta, for each batch.
    server_lr: beta in the paper.

    >>> alg = pfedme(lambda params, batch, key: jnp.sum(params**2), lam=5.0, client_lr=0.05)
    """
    check_number("lam", lam, low=0, open_low=True)
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("personal_lr", personal_lr, low=0, open_low=True)
    check_count("inner_steps", inner_steps)
    check_choice("weighting", weighting, WEIGHTINGS)
    opt = server_optimizers.sgd(server_lr)

    def start(down: Down, state: PyTree, key: Any) -> Envelope:
        return Envelope(down.params, down.params, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(at: Envelope, batch: dict, key: Any, down: Down) -> Envelope:
        def approach(_: Any, inside: tuple) -> tuple:
            value, g = value_and_grad(loss)(inside[0], batch, key)
            pulled = jax.tree.map(lambda t, g, w: t - personal_lr * (g + lam * (t - w)), inside[0], g, at.w)
            return pulled, value.astype(at.loss.dtype)

        theta, value = jax.lax.fori_loop(0, inner_steps, approach, (at.theta, jnp.zeros_like(at.loss)))
        w = jax.tree.map(lambda w, t: w - client_lr * lam * (w - t), at.w, theta)
        return Envelope(w, theta, at.k + 1, at.loss + value)

    def finish(at: Envelope, down: Down, state: PyTree, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, at.w)
        return Report(Up(sent), weight_of(weighting, n), at.theta, {"loss": at.loss / at.k.astype(at.loss.dtype)})

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        return server_step(opt, server, aggregate.up.pseudograd)

    work = local_work(start, step, finish, batches_of(**local))
    return Algorithm(
        init=lambda params: ServerState(params, opt.init(params)),
        init_client=lambda params: params,
        exchanges=(Exchange("train", lambda server: Down(server.params), work, receive),),
        params=lambda server: server.params,
        personal=lambda server, state: state,
    )
