"""Server optimizers as optax transformations, each variant under its own name.

The server uses the mean upload as a gradient. Two terms have two meanings in the literature, and both are here.
Momentum is ``m <- g + beta m`` (heavy-ball and Nesterov; Charles & Konecny 2021, optax) or the moving average
``m <- (1 - beta) g + beta m`` (Karimireddy et al. 2021, the elastic aggregation paper). Adaptive methods are without
bias correction (Reddi et al., Adaptive Federated Optimization, 2021, Algorithm 2) or with it (optax).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedbraid.core import check_choice, check_number

__all__ = ["ServerState", "adaptive", "momentum", "server_step", "sgd"]


def sgd(lr: Any) -> optax.GradientTransformation:
    """``x <- x - lr g``.

    >>> updates, _ = sgd(0.5).update(jnp.array(4.0), sgd(0.5).init(jnp.array(1.0)))
    >>> float(updates)
    -2.0
    """
    check_number("server_lr", lr, low=0)
    return optax.sgd(lr)


class MomentumState(NamedTuple):
    m: Any


def momentum(
    lr: Any, beta: Any, *, kind: Literal["heavy-ball", "nesterov", "average"] = "heavy-ball"
) -> optax.GradientTransformation:
    """Momentum of the named kind.

    heavy-ball: ``m <- g + beta m``, ``x <- x - lr m``. nesterov: ``x <- x - lr (g + beta m)`` after the same update.
    average: ``m <- (1 - beta) g + beta m``, ``x <- x - lr m``.
    """
    check_number("server_lr", lr, low=0)
    check_number("momentum", beta, low=0, high=1, open_high=True)
    check_choice("kind", kind, ("heavy-ball", "nesterov", "average"))
    gain = 1 - beta if kind == "average" else 1.0

    def init(params: Any) -> MomentumState:
        return MomentumState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MomentumState]:
        del params
        m = jax.tree.map(lambda g, m: gain * g + beta * m, updates, state.m)
        step = jax.tree.map(lambda g, m: g + beta * m, updates, m) if kind == "nesterov" else m
        return jax.tree.map(lambda s: -lr * s, step), MomentumState(m)

    return optax.GradientTransformation(init, update)


class AdaptiveState(NamedTuple):
    m: Any
    v: Any
    count: Any


def adaptive(
    kind: Literal["adagrad", "adam", "yogi"],
    lr: Any,
    *,
    b1: Any = 0.9,
    b2: Any = 0.99,
    tau: Any = 1e-3,
    bias_correction: bool = False,
) -> optax.GradientTransformation:
    """FedAdagrad, FedAdam, FedYogi: ``x <- x - lr m / (sqrt(v) + tau)`` with ``m <- b1 m + (1 - b1) g``.

    v starts at tau^2. adagrad: ``v + g^2``. adam: ``b2 v + (1 - b2) g^2``. yogi: ``v - (1 - b2) g^2 sign(v - g^2)``.
    With ``bias_correction`` (adam only) v starts at 0 and both averages are divided by ``1 - b^t`` when used.
    """
    check_choice("kind", kind, ("adagrad", "adam", "yogi"))
    check_number("server_lr", lr, low=0)
    check_number("b1", b1, low=0, high=1, open_high=True)
    check_number("b2", b2, low=0, high=1, open_high=True)
    check_number("tau", tau, low=0, open_low=True)
    if bias_correction and kind != "adam":
        raise ValueError(f"bias_correction is defined for kind='adam' only, got kind={kind!r}")

    def init(params: Any) -> AdaptiveState:
        start = 0.0 if bias_correction else tau**2
        return AdaptiveState(
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(lambda p: jnp.full_like(p, start), params),
            jnp.zeros((), jnp.int32),
        )

    def second_moment(g: Any, v: Any) -> Any:
        square = g * g
        if kind == "adagrad":
            return v + square
        if kind == "adam":
            return b2 * v + (1 - b2) * square
        moved = v - (1 - b2) * square * jnp.sign(v - square)
        return jnp.where(v == square, v, moved)  # two infinities, of uploads whose squares overflow, would give NaN

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdaptiveState]:
        del params
        m = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.m)
        v = jax.tree.map(second_moment, updates, state.v)
        count = state.count + 1
        t = count.astype(jnp.result_type(float))
        scale_m = 1 / (1 - b1**t) if bias_correction else 1.0
        scale_v = 1 / (1 - b2**t) if bias_correction else 1.0
        step = jax.tree.map(lambda m, v: -lr * (m * scale_m) / (jnp.sqrt(v * scale_v) + tau), m, v)
        return step, AdaptiveState(m, v, count)

    return optax.GradientTransformation(init, update)


class ServerState(NamedTuple):
    """A model and the state of its optimizer."""

    params: Any
    opt: Any


def server_step(opt: optax.GradientTransformation, server: ServerState, pseudograd: Any) -> ServerState:
    """One step of ServerOpt along ``-pseudograd``."""
    updates, state = opt.update(pseudograd, server.opt, server.params)
    return ServerState(optax.apply_updates(server.params, updates), state)
