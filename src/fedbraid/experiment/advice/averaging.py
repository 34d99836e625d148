"""FedAvg, FedAvgM, FedAdam and FedProx as one algorithm, so that one compiled program runs settings of all of them.

They send the same messages and differ in numbers only. Client i takes local steps along g + alpha (y - x) and sends
x - y. With the mean g of the uploads the server updates

    m <- beta m + fresh g,    v <- b2 v + (1 - b2) g^2,    x <- x - server_lr m / (sqrt(v) + tau)^adaptive.

    method     alpha    beta    fresh    adaptive
    fedavg     0        0       1        0
    fedavgm    0        0.9     1        0           (0.1 with momentum of kind "average")
    fedprox    > 0      0       1        0
    fedadam    0        0.9     0.1      1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedbraid.algorithms import local_update
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm
from fedbraid.local import Weighting
from fedbraid.names import factory

__all__ = ["MEMBERS", "NAME", "averaging"]

NAME = f"{__name__}:averaging"
MEMBERS: Mapping[str, Mapping[str, float]] = {
    "fedavg": {"alpha": 0.0, "beta": 0.0, "fresh": 1.0, "adaptive": 0.0},
    "fedavgm": {"alpha": 0.0, "beta": 0.9, "fresh": 1.0, "adaptive": 0.0},
    "fedprox": {"alpha": 0.1, "beta": 0.0, "fresh": 1.0, "adaptive": 0.0},
    "fedadam": {"alpha": 0.0, "beta": 0.9, "fresh": 0.1, "adaptive": 1.0},
}
"""The numbers that make a method of the family, with the default options of the method."""

B2, TAU = 0.99, 1e-3


class Moments(NamedTuple):
    m: Any
    v: Any


def _server(lr: Any, beta: Any, fresh: Any, adaptive: Any) -> optax.GradientTransformation:
    def init(params: Any) -> Moments:
        return Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda p: jnp.full_like(p, TAU**2), params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Moments]:
        del params
        m = jax.tree.map(lambda g, m: beta * m + fresh * g, updates, state.m)
        v = jax.tree.map(lambda g, v: B2 * v + (1 - B2) * g * g, updates, state.v)

        def step(m: Any, v: Any) -> Any:
            return -lr * m / jnp.where(adaptive > 0, jnp.sqrt(v) + TAU, 1.0)

        return jax.tree.map(step, m, v), Moments(m, v)

    return optax.GradientTransformation(init, update)


@factory("algorithm")
def averaging(
    loss: Any,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    alpha: Any = 0.0,
    beta: Any = 0.0,
    fresh: Any = 1.0,
    adaptive: Any = 0.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """One member of the family; every number may be traced."""
    opt = _server(server_lr, beta, fresh, adaptive)
    options: Any = local
    return local_update(
        loss, gamma=client_lr, alpha=alpha, server_opt=opt, message="delta", weighting=weighting, **options
    )
