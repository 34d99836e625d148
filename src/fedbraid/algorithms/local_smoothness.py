"""Delta-SGD: step sizes from the smoothness that a client measures along its own path.

J. L. Kim, M. T. Toghani, C. A. Uribe, A. Kyrillidis. Adaptive Federated Learning with Auto-Tuned Clients. ICLR 2024.

A client starts with eta_0 and theta_0 = 1. With its (stochastic) gradients g_k at x_k,

    x_1 = x_0 - eta_0 g_0,
    eta_k = min(gamma ||x_k - x_{k-1}|| / (2 ||g_k - g_{k-1}||),  sqrt(1 + delta theta_{k-1}) eta_{k-1}),
    theta_k = eta_k / eta_{k-1},    x_{k+1} = x_k - eta_k g_k        (k = 1, 2, ...).

The first term is gamma / (2 L) for the smoothness L between the last two points; the second limits the growth. On a
quadratic with curvatures in [mu, L] the first term is in [gamma / (2 L), gamma / (2 mu)], whatever the path is. If the
gradient did not change, only the second term counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedbraid.core import check_number

__all__ = ["DeltaState", "delta_sgd_steps"]

PyTree = Any


class DeltaState(NamedTuple):
    """The last step's rate, the ratio of the last two rates, the last point and gradient, and the number of steps."""

    eta: Any
    theta: Any
    params: PyTree
    gradient: PyTree
    k: Any


def distance(a: PyTree, b: PyTree) -> Any:
    """The Euclidean distance of two models."""
    return jnp.sqrt(
        sum(jnp.sum(jnp.square(x - y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    )


def delta_sgd_steps(learning_rate: Any = 0.2, gamma: Any = 2.0, delta: Any = 0.1) -> optax.GradientTransformation:
    """Delta-SGD as an optimizer. ``learning_rate`` is eta_0, the rate of a client's first step.

    >>> opt = delta_sgd_steps(0.1)
    >>> x, state, rates = jnp.array([1.0]), opt.init(jnp.array([1.0])), []
    >>> for _ in range(3):  # the gradient of 2 x^2: a curvature of 4
    ...     update, state = opt.update(4 * x, state, x)
    ...     x, rates = x + update, [*rates, round(float(state.eta), 4)]
    >>> rates  # 0.1; sqrt(1.1) 0.1; sqrt(1 + 0.1 sqrt(1.1)) sqrt(1.1) 0.1
    [0.1, 0.1049, 0.1102]
    """
    check_number("delta_sgd.gamma", gamma, low=0, open_low=True)
    check_number("delta_sgd.delta", delta, low=0)

    def init(params: PyTree) -> DeltaState:
        real = jnp.result_type(float)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DeltaState(jnp.asarray(learning_rate, real), jnp.ones((), real), params, zeros, jnp.int32(0))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, DeltaState]:
        if params is None:
            raise ValueError("delta_sgd needs the parameters in update(gradient, state, params)")
        turned = distance(updates, state.gradient)
        local = gamma * distance(params, state.params) / jnp.where(turned > 0, 2 * turned, 1)
        grown = jnp.sqrt(1 + delta * state.theta) * state.eta
        eta = jnp.where(turned > 0, jnp.minimum(local.astype(grown.dtype), grown), grown)
        eta = jnp.where(state.k == 0, state.eta, eta)
        safe = jnp.where(state.eta > 0, state.eta, 1)
        theta = jnp.where((state.k == 0) | (state.eta <= 0), state.theta, eta / safe)
        moves = jax.tree.map(lambda g: -eta.astype(g.dtype) * g, updates)
        return moves, DeltaState(eta, theta, params, updates, state.k + 1)

    return optax.GradientTransformation(init, update)
