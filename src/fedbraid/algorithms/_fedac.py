"""FedAc: federated accelerated SGD. Clients take local steps of Nesterov's method, on two coupled sequences.

H. Yuan, T. Ma. Federated Accelerated Stochastic Gradient Descent. NeurIPS 2020.

Client i takes K steps on the pair (w, w_ag), both of which the server averages afterwards (Algorithm 1):

    w_md <- w / beta + (1 - 1 / beta) w_ag,      g = grad f_i(w_md; batch),
    w_ag <- w_md - eta g,                        w <- (1 - 1 / alpha) w + w_md / alpha - gamma g.

Here eta is ``client_lr``. The paper has two choices of the other three, for mu-strongly convex losses:

    gamma = max(sqrt(eta / (mu K)), eta)
    FedAc-I       alpha = 1 / (gamma mu)                beta = alpha + 1
    FedAc-II      alpha = 3 / (2 gamma mu) - 1 / 2      beta = (2 alpha^2 - 1) / (alpha - 1)

FedAc-II is less accelerated and more stable. With alpha = beta = 1 and gamma = eta both sequences are FedAvg's. The
model is w_ag.

Sends, in models: 2 down, 2 up. Keeps: nothing on the clients.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._server_only import Loss
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
    is_traced,
)
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of, local_work, value_and_grad, weight_of

__all__ = ["Coupling", "fedac", "fedac_coupling"]

PyTree = Any


class Pair(NamedTuple):
    """The server's state: w_ag, which is the model, and w."""

    params: PyTree
    w: PyTree


class Walk(NamedTuple):
    """A client's carry: both sequences, step number and sum of its batch losses."""

    params: PyTree
    w: PyTree
    k: Any
    loss: Any


class Coupling(NamedTuple):
    """How the two sequences are coupled."""

    alpha: Any
    beta: Any
    gamma: Any


def fedac_coupling(variant: Literal["I", "II"], *, eta: Any, mu: Any, steps: int) -> Coupling:
    """The paper's choices of alpha, beta and gamma for K = ``steps`` local steps (eqs. 3.1 and 3.2).

    >>> [round(float(value), 3) for value in fedac_coupling("I", eta=0.1, mu=0.1, steps=4)]
    [20.0, 21.0, 0.5]
    """
    check_choice("variant", variant, ("I", "II"))
    check_count("steps", steps)
    check_number("client_lr", eta, low=0, open_low=True)
    check_number("strong_convexity", mu, low=0, open_low=True)
    root = (eta / (mu * steps)) ** 0.5
    gamma = jnp.maximum(root, eta) if is_traced(root) else max(root, eta)
    if not is_traced(gamma) and gamma * mu >= 1:
        raise ValueError(
            f"client_lr={eta!r} is too large for strong_convexity={mu!r}: gamma mu = {gamma * mu:g} must be below 1 "
            "(client_lr is at most 1 / L in the paper)"
        )
    if variant == "I":
        alpha = 1 / (gamma * mu)
        return Coupling(alpha, alpha + 1, gamma)
    alpha = 3 / (2 * gamma * mu) - 0.5
    return Coupling(alpha, (2 * alpha**2 - 1) / (alpha - 1), gamma)


def _coupling(given: Coupling, variant: Any, eta: Any, mu: Any, local: LocalOptions) -> Coupling:
    """The three numbers that were given, or those of the variant."""
    missing = [name for name, value in given._asdict().items() if value is None]
    if not missing:
        check_number("alpha", given.alpha, low=1)
        check_number("beta", given.beta, low=1)
        check_number("gamma", given.gamma, low=0, open_low=True)
        return given
    if len(missing) < 3:
        raise ValueError(
            f"alpha, beta and gamma belong together: give {missing[0]} too, or none for variant={variant!r}"
        )
    steps = local.get("steps")
    if steps is None:
        raise ValueError(
            f"variant={variant!r} depends on the number K of local steps: give steps instead of epochs, or alpha, beta "
            "and gamma"
        )
    return fedac_coupling(variant, eta=eta, mu=mu, steps=steps)


def fedac(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    variant: Literal["I", "II"] = "II",
    strong_convexity: Any = 0.1,
    alpha: Any = None,
    beta: Any = None,
    gamma: Any = None,
    weighting: Weighting = "uniform",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedAc with the coupling of a variant of the paper, or with your own ``alpha``, ``beta`` and ``gamma``.

    strong_convexity: mu of the variants; a number to tune if the loss is not strongly convex.
    steps: K, by default 10. With ``epochs`` K differs between clients: then give alpha, beta and gamma.

    >>> alg = fedac(lambda params, batch, key: jnp.sum(params**2), client_lr=0.1, variant="I", steps=8)
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_choice("weighting", weighting, WEIGHTINGS)
    if local.get("epochs") is None and local.get("steps") is None:
        local["steps"] = 10
    a, b, c = _coupling(Coupling(alpha, beta, gamma), variant, client_lr, strong_convexity, local)

    def start(down: Down, state: Any, key: Any) -> Walk:
        return Walk(down.params, down.aux, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        middle = jax.tree.map(lambda w, ag: w / b + (1 - 1 / b) * ag, walk.w, walk.params)
        value, g = value_and_grad(loss)(middle, batch, key)
        ag = jax.tree.map(lambda md, g: md - client_lr * g, middle, g)
        w = jax.tree.map(lambda w, md, g: (1 - 1 / a) * w + md / a - c * g, walk.w, middle, g)
        return Walk(ag, w, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: Down, state: Any, n: Any) -> Report:
        up = Up(*(jax.tree.map(jnp.subtract, *pair) for pair in ((down.params, walk.params), (down.aux, walk.w))))
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        return Report(up, weight_of(weighting, n), metrics={"loss": mean_loss})

    def receive(server: Pair, aggregate: Aggregate, key: Any) -> Pair:
        return Pair(*(jax.tree.map(jnp.subtract, *pair) for pair in zip(server, aggregate.up, strict=True)))

    work = local_work(start, step, finish, batches_of(**local))
    exchange = Exchange("train", lambda server: Down(server.params, server.w), work, receive)
    return Algorithm(
        init=lambda params: Pair(params, params),
        init_client=lambda params: (),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
