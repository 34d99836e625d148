"""FedAuto: a method to run as it is. Client rates are measured, and the server's step has the size that follows.

It combines known parts. Rates from measured smoothness: Y. Malitsky, K. Mishchenko. Adaptive Gradient Descent without
Descent. ICML 2020; on clients: J. L. Kim, M. T. Toghani, C. A. Uribe, A. Kyrillidis. Adaptive Federated Learning with
Auto-Tuned Clients. ICLR 2024. The direction of Adam with the length of momentum: N. Agarwal, R. Anil, E. Hazan, T.
Koren, C. Zhang. Disentangling Adaptive Gradient Methods from Learning Rates. arXiv:2002.11803, 2020. A server rate that
follows the agreement of successive updates: A. G. Baydin, R. Cornish, D. Martinez Rubio, M. Schmidt, F. Wood. Online
Learning Rate Adaptation with Hypergradient Descent. ICLR 2018.

**Clients.** A local step with the rate eta and the gradient g at y goes to y+ = y - eta g. The client also takes the
gradient g+ at y+ *of the same batch*, so that the noise of batches cancels, and measures

    L = ||g+ - g|| / ||y+ - y||.

On quadratics with curvatures L the rate that makes E(1 - eta L)^2 smallest is E[L] / E[L^2], and up to twice that rate
steps are stable. In round t = 0, 1, ... the client's rate is

    eta = c_t (5 M_1 + sum L) / (5 M_2 + sum L^2),    c_t = caution + (1 - caution) / (1 + t / 15),

with the sums over its own steps of this round, and with the means M_1 of L and M_2 of L^2 of earlier rounds, which the
server sends and which count as 5 steps. The first step of the first round knows no L: its length is 0.001 (1 + ||y||).
The server's means are moving averages over rounds, with the weight 0.7 of the past. c_t falls from 1, the fastest rate,
to ``caution``, because later the noise of batches and the drift of clients count more.

**Server.** With D the mean of x - y_i, and with moving averages (bias corrected) m of D and v of D^2,

    p = m / (sqrt(v) + tau rms(sqrt(v))),    x <- x - server_lr s sqrt(1 - momentum^(t+1)) (||m|| / ||p||) p,

where s starts at 1, is multiplied by exp(beta cos(D, last m)) in every round, and stays between 1/3 and 2. The root
makes the first steps shorter, while m is the mean of only a few rounds.

Every part is invariant to the unit of the loss: a loss times a constant has the same iterates.

Sends, in models: 1 down, 1 up, and seven numbers. Keeps: two more models on the server, nothing on the clients. A local
step takes two gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._server_only import Loss
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Logged, Report, Up, check_choice, check_number
from fedbraid.local import (
    WEIGHTINGS,
    Batches,
    LocalOptions,
    LocalWork,
    Weighting,
    batches_of,
    local_work,
    value_and_grad,
    weight_of,
)
from fedbraid.transforms.uploads import norm

__all__ = ["fedauto"]

PyTree = Any
PRIOR = 5  # how many steps the means of earlier rounds count for
TRIAL = 1e-3  # the length of the first step of all, as a share of 1 + ||y||
MEMORY = 0.7  # weight of earlier rounds in the measured smoothness
EASE = 15  # rounds after which half of the way from 1 to caution is done
B2 = 0.99  # decay of the server's v
SLOWEST, FASTEST = 1 / 3, 2.0  # bounds of the server's factor s


class Smoothness(NamedTuple):
    """Sums or means over local steps: number of measurements (as a mean: 0 before the first, then 1), L and L^2."""

    count: Any
    first: Any
    second: Any


class AutoState(NamedTuple):
    """The server: its model, the averages m and v, its factor s, the number of rounds, and the measured smoothness."""

    params: PyTree
    m: PyTree
    v: PyTree
    factor: Any
    round: Any
    smoothness: Smoothness


class Advice(NamedTuple):
    """Down: c_t, and the smoothness of earlier rounds."""

    caution: Any
    smoothness: Smoothness


class Walk(NamedTuple):
    """A client's carry: model, sums of its own measurements, step number and sum of losses."""

    params: PyTree
    own: Smoothness
    k: Any
    loss: Any


def nothing() -> Smoothness:
    zero = jnp.zeros((), jnp.result_type(float))
    return Smoothness(zero, zero, zero)


def mixed(a: Any, x: Smoothness, b: Any, y: Smoothness) -> Smoothness:
    return Smoothness(*(a * u + b * w for u, w in zip(x, y, strict=True)))


def best_rate(smoothness: Smoothness) -> Any:
    """E[L] / E[L^2]; 0 if nothing was measured, or a curvature of 0.

    >>> float(best_rate(Smoothness(jnp.array(2.0), jnp.array(6.0), jnp.array(24.0))))
    0.25
    """
    known = smoothness.second > 0
    return jnp.where(known, smoothness.first / jnp.where(known, smoothness.second, 1), 0)


def measured_step(gradient: Any, y: PyTree, caution: Any, known: Smoothness) -> tuple[PyTree, Any, Smoothness]:
    """One local step: the new model, the loss before it, and its measurement. ``gradient(y)``: loss and gradient."""
    real = jnp.result_type(float)
    value, g = gradient(y)
    length = norm(g).astype(real)
    safe = jnp.where(length > 0, length, 1)
    rate = caution * best_rate(known)
    eta = jnp.where(rate > 0, rate, TRIAL * (1 + norm(y).astype(real)) / safe)
    after = jax.tree.map(lambda a, d: a - eta.astype(d.dtype) * d, y, g)
    turned = norm(jax.tree.map(jnp.subtract, gradient(after)[1], g)).astype(real)
    curvature = turned / (eta * safe)
    ok = (length > 0) & jnp.isfinite(curvature**2)
    one = Smoothness(*(jnp.where(ok, part, 0) for part in (jnp.ones((), real), curvature, curvature**2)))
    return after, value, one


def server_direction(m: PyTree, v: PyTree, tau: Any) -> PyTree:
    """m / (sqrt(v) + tau rms(sqrt(v))), with the length of m; 0 if m is 0.

    >>> [round(float(p), 3) for p in server_direction(jnp.array([3.0, 4.0]), jnp.array([9.0, 16.0]), 0.0)]
    [3.536, 3.536]
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(v))
    rms = jnp.sqrt(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(v)) / size)
    below = jax.tree.map(lambda v: jnp.sqrt(v) + (tau * rms).astype(v.dtype), v)
    p = jax.tree.map(lambda m, b: jnp.where(b > 0, m / jnp.where(b > 0, b, 1), 0), m, below)
    length = norm(p)
    graft = jnp.where(length > 0, norm(m) / jnp.where(length > 0, length, 1), 0)
    return jax.tree.map(lambda p: graft.astype(p.dtype) * p, p)


def agreement(a: PyTree, b: PyTree) -> Any:
    """The cosine of the angle between two models; 0 if one is 0.

    >>> round(float(agreement(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0]))), 3)
    0.8
    """
    lengths = norm(a) * norm(b)
    inner = sum(jnp.sum(x * y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return jnp.where(lengths > 0, jnp.clip(inner / jnp.where(lengths > 0, lengths, 1), -1, 1), 0)


def fedauto(
    loss: Loss,
    *,
    caution: Any = 0.5,
    server_lr: Any = 2.5,
    momentum: Any = 0.8,
    tau: Any = 0.1,
    beta: Any = 0.1,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedAuto: client rates from the measured smoothness, Adam's direction with momentum's length on the server.

    caution: late client rates as a share of the rate that is best for the measured curvatures.
    server_lr, momentum, tau, beta: the server's step; tau is relative to the size of sqrt(v).

    The defaults are meant to be used as they are. The history has the rates as ``train/client_rate`` (the next one) and
    ``train/server_rate``.

    >>> alg = fedauto(lambda params, batch, key: jnp.sum(params**2))
    """
    check_number("caution", caution, low=0, high=1, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_number("momentum", momentum, low=0, high=1, open_high=True)
    check_number("tau", tau, low=0)
    check_number("beta", beta, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)

    def caution_in(round_: Any) -> Any:
        return caution + (1 - caution) / (1 + round_.astype(jnp.result_type(float)) / EASE)

    def receive(server: AutoState, aggregate: Aggregate, key: Any) -> Logged:
        g = aggregate.up.pseudograd
        past = jnp.where(server.smoothness.count > 0, MEMORY, 0)
        smoothness = mixed(past, server.smoothness, 1 - past, aggregate.up.aux)
        count = server.round + 1
        t = count.astype(jnp.result_type(float))
        turn = jnp.exp(beta * agreement(g, server.m)).astype(t.dtype)
        factor = jnp.clip(server.factor * turn, SLOWEST, FASTEST)
        m = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, server.m, g)
        v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, server.v, g)
        fair_m = jax.tree.map(lambda m: m / jnp.asarray(1 - momentum**t, m.dtype), m)
        fair_v = jax.tree.map(lambda v: v / (1 - B2**t).astype(v.dtype), v)
        rate = server_lr * factor * jnp.sqrt(1 - momentum**t)
        move = server_direction(fair_m, fair_v, tau)
        x = jax.tree.map(lambda x, d: x - jnp.asarray(rate, d.dtype) * d, server.params, move)
        logs = {"client_rate": caution_in(count) * best_rate(smoothness), "server_rate": rate}
        return Logged(AutoState(x, m, v, factor, count, smoothness), logs)

    def init(params: PyTree) -> AutoState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AutoState(params, zeros, zeros, jnp.ones((), jnp.result_type(float)), jnp.int32(0), nothing())

    exchange = Exchange(
        "train",
        lambda server: Down(server.params, Advice(caution_in(server.round), server.smoothness)),
        measuring_client(loss, weighting, batches_of(**local)),
        receive,
    )
    return Algorithm(init, lambda params: (), (exchange,), lambda server: server.params)


def measuring_client(
    loss: Loss, weighting: Weighting, batches: Batches, numbers: Callable[[PyTree, Smoothness], Any] | None = None
) -> LocalWork:
    """Local steps that measure the smoothness, at the rates that follow from it.

    numbers: from the update and the mean smoothness, what is sent beside the update; default the smoothness.
    """

    def start(down: Down, state: PyTree, key: Any) -> Walk:
        return Walk(down.params, nothing(), jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        known = mixed(PRIOR, down.aux.smoothness, 1, walk.own)

        def gradient(y: PyTree) -> tuple[Any, PyTree]:
            return value_and_grad(loss)(y, batch, key)

        y, value, one = measured_step(gradient, walk.params, down.aux.caution, known)
        return Walk(y, mixed(1, walk.own, 1, one), walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: Down, state: PyTree, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        mean = Smoothness(*(part / jnp.maximum(walk.own.count, 1) for part in walk.own))
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        aux = mean if numbers is None else numbers(sent, mean)
        return Report(Up(sent, aux), weight_of(weighting, n), (), {"loss": mean_loss})

    return local_work(start, step, finish, batches)
