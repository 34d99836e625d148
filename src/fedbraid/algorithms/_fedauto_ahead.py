"""FedAuto ahead: FedAuto with accelerated server steps that are shorter the less the clients agree.

It combines known parts. Client rates from measured smoothness: FedAuto (see `fedbraid.algorithms._fedauto`), after Y.
Malitsky and K. Mishchenko, ICML 2020, and J. L. Kim et al., ICLR 2024. A server that sends the point ahead of its
momentum: G. Kim, J. Kim, B. Han. Communication-Efficient Federated Learning with Accelerated Client Gradient. CVPR
2024. Steps in proportion to the share of signal in a noisy gradient: T. Schaul, S. Zhang, Y. LeCun. No More Pesky
Learning Rates. ICML 2013. The mean of late models: O. Shamir, T. Zhang. Stochastic Gradient Descent for Non-smooth
Optimization: Convergence Results and Optimal Averaging Schemes. ICML 2013.

**Clients** start from the point z that the server sends, and step as in FedAuto with the rate

    c_t min(s, 1) E[L] / E[L^2]

of measured smoothness L; the server sends c_t min(s, 1). Client i sends D_i = z - y_i, its measurements and ||D_i||^2.

**Server.** It has the model x and its last step u, at first 0, and sends z = x - momentum u. D is the mean of the D_i
of the S clients that were heard, out of N. The part of ||D||^2 that is due to the choice of these clients is

    n = (mean ||D_i||^2 - ||D||^2) / (S - 1) (1 - S / N),

which is 0 if all clients take part. With moving averages a of ||D||^2 and b of n (weight 0.9 of the past), the server
trusts the mean by

    r = 1 - doubt b / a,    at least 0.1,

and takes the step u, in the direction of Adam with the length of momentum,

    m <- momentum m + D,    v <- 0.99 v + 0.01 D^2,    p = m / (sqrt(v) + tau rms(sqrt(v))),
    u = server_lr max(s, 1) r (||m|| / ||p||) p,    x <- x - u.

**Agreement.** s starts at 1, is multiplied by exp(beta cos(D, last m)) in every round, and stays between 1/5 and 5. If
successive updates agree, s lengthens the server's steps. If they contradict each other, the model moves back and forth
around its limit, and s shortens the local steps, which also reduces the drift of clients.

**Model.** It is the mean of the server's late points, w <- w + 17 / (16 + t) (x - w) in round t = 1, 2, ...

Every part is invariant to the unit of the loss: a loss times a constant has the same iterates.

Sends, in models: 1 down, 1 up, and eight numbers. Keeps: four more models on the server, nothing on the clients. A
local step takes two gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._fedauto import (
    EASE,
    MEMORY,
    Advice,
    Smoothness,
    agreement,
    best_rate,
    measuring_client,
    mixed,
    nothing,
    server_direction,
)
from fedbraid.algorithms._server_only import Loss
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Logged, check_choice, check_number
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of
from fedbraid.transforms.uploads import norm

__all__ = ["fedauto_ahead"]

PyTree = Any
PAST = 0.9  # weight of earlier rounds in the averages a and b
LEAST = 0.1  # of the trust r
SLOWEST, FASTEST = 0.2, 5.0  # bounds of the factor s
LATE = 16  # the larger, the later are the points of which the model is the mean
B2 = 0.99  # decay of v


class Noise(NamedTuple):
    """Moving averages of ||D||^2 and of the part of it that is due to the choice of clients."""

    strength: Any
    choice: Any


class AheadState(NamedTuple):
    """The server: its point x, the mean of its points, last step, m, v, factor s, round, smoothness and noise."""

    params: PyTree
    mean: PyTree
    step: PyTree
    m: PyTree
    v: PyTree
    factor: Any
    round: Any
    smoothness: Smoothness
    noise: Noise


class Measured(NamedTuple):
    """What a client sends beside its update: its mean smoothness, and the squared length of the update."""

    smoothness: Smoothness
    square: Any


def noise_of_choice(square: Any, strength: Any, heard: Any, population: Any) -> Any:
    """The part of ||D||^2 (``strength``) that is due to the choice of clients; ``square`` is the mean of ||D_i||^2.

    >>> updates, chosen = jnp.array([1.0, 3.0, 5.0, 7.0]), jnp.array([1.0, 5.0])
    >>> float(noise_of_choice(jnp.mean(chosen**2), jnp.mean(chosen) ** 2, 2.0, 4.0))
    2.0
    """
    apart = jnp.maximum(square - strength, 0) / jnp.maximum(heard - 1, 1)
    return apart * (1 - heard / population)


def trust(noise: Noise, doubt: Any) -> Any:
    """r = 1 - doubt b / a, at least 0.1; 1 if nothing was seen.

    >>> [round(float(trust(Noise(jnp.array(a), jnp.array(1.0)), 1.3)), 3) for a in (2.0, 1.0, 0.0)]
    [0.35, 0.1, 1.0]
    """
    seen = noise.strength > 0
    return jnp.where(seen, jnp.maximum(1 - doubt * noise.choice / jnp.where(seen, noise.strength, 1), LEAST), 1)


def fedauto_ahead(
    loss: Loss,
    *,
    caution: Any = 0.5,
    server_lr: Any = 1.0,
    momentum: Any = 0.85,
    tau: Any = 0.1,
    beta: Any = 0.3,
    doubt: Any = 1.3,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedAuto with accelerated server steps, which are shorter if they are mostly due to the choice of clients.

    caution: late client rates as a share of the rate that is best for the measured curvatures.
    server_lr, momentum, tau: the server's step; tau is relative to the size of sqrt(v).
    beta: how fast server steps grow while successive updates agree, and local steps shrink while they do not.
    doubt: how much the step is shortened if the mean update depends on which clients were drawn; 0: not at all.

    The defaults are meant to be used as they are. The history has the rates as ``train/client_rate`` (the next one) and
    ``train/server_rate``.

    >>> alg = fedauto_ahead(lambda params, batch, key: jnp.sum(params**2))
    """
    check_number("caution", caution, low=0, high=1, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_number("momentum", momentum, low=0, high=1, open_high=True)
    for name, value in {"tau": tau, "beta": beta, "doubt": doubt}.items():
        check_number(name, value, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)

    def caution_in(round_: Any, factor: Any) -> Any:
        share = caution + (1 - caution) / (1 + round_.astype(jnp.result_type(float)) / EASE)
        return share * jnp.minimum(factor, 1)

    def send(server: AheadState) -> Down:
        z = jax.tree.map(lambda x, u: x - jnp.asarray(momentum, u.dtype) * u, server.params, server.step)
        return Down(z, Advice(caution_in(server.round, server.factor), server.smoothness))

    def receive(server: AheadState, aggregate: Aggregate, key: Any) -> Logged:
        d, seen = aggregate.up
        real = jnp.result_type(float)
        past = jnp.where(server.smoothness.count > 0, MEMORY, 0)
        smoothness = mixed(past, server.smoothness, 1 - past, seen.smoothness)
        strength = norm(d).astype(real) ** 2
        heard, population = jnp.asarray(aggregate.count, real), jnp.asarray(aggregate.population, real)
        choice = noise_of_choice(seen.square, strength, heard, population)
        noise = Noise(
            *(PAST * old + (1 - PAST) * new for old, new in zip(server.noise, (strength, choice), strict=True))
        )
        turn = jnp.exp(beta * agreement(d, server.m)).astype(real)
        factor = jnp.clip(server.factor * turn, SLOWEST, FASTEST)
        m = jax.tree.map(lambda m, d: momentum * m + d, server.m, d)
        v = jax.tree.map(lambda v, d: B2 * v + (1 - B2) * d * d, server.v, d)
        rate = server_lr * jnp.maximum(factor, 1) * trust(noise, doubt)
        step = jax.tree.map(lambda p: jnp.asarray(rate, p.dtype) * p, server_direction(m, v, tau))
        x = jax.tree.map(jnp.subtract, server.params, step)
        count = server.round + 1
        weight = (LATE + 1) / (LATE + count.astype(real))
        mean = jax.tree.map(lambda w, x: w + weight.astype(x.dtype) * (x - w), server.mean, x)
        logs = {"client_rate": caution_in(count, factor) * best_rate(smoothness), "server_rate": rate}
        return Logged(AheadState(x, mean, step, m, v, factor, count, smoothness, noise), logs)

    def init(params: PyTree) -> AheadState:
        zeros, real = jax.tree.map(jnp.zeros_like, params), jnp.result_type(float)
        noise = Noise(jnp.zeros((), real), jnp.zeros((), real))
        return AheadState(params, params, zeros, zeros, zeros, jnp.ones((), real), jnp.int32(0), nothing(), noise)

    def numbers(sent: PyTree, smoothness: Smoothness) -> Measured:
        return Measured(smoothness, norm(sent).astype(jnp.result_type(float)) ** 2)

    client = measuring_client(loss, weighting, batches_of(**local), numbers)
    exchange = Exchange("train", send, client, receive)
    return Algorithm(init, lambda params: (), (exchange,), lambda server: server.mean)
