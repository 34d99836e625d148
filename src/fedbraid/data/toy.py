"""A linear problem with two classes and two parameters, so that client drift can be drawn.

T. Renard, Notes on Federated Optimization, 2022, Section 3: a single linear layer, y^(x) = w . x, classifies two
classes by its sign and is trained with the mean squared error against labels +1 and -1, which is convex and smooth.

The notes do not define the data. Here the classes of client i are centred at +c_i and -c_i, with c_i on the unit
circle. The directions c_i are spread evenly over an angle, so that each client alone has another optimal w. (If all
clients had the same centres and only different shares of the classes, they would have the same optimum: the loss of x
with label -1 is that of -x with label +1.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedbraid.core import check_count, check_number
from fedbraid.data.federated import Split
from fedbraid.local import MASK, masked_mean

__all__ = ["toy_loss", "toy_metrics", "toy_optimum", "two_class"]


def two_class(
    *, clients: int = 3, examples: int = 40, angle: float = 120.0, noise: float = 0.35, seed: int = 0
) -> Split:
    """Clients of the toy: ``x`` [n, 2] and ``y`` [n] of +1 and -1, in equal numbers.

    angle: degrees between the first and the last client's centres; with 0 clients differ only by random noise.
    noise: standard deviation of the examples about their centre, across its direction; half of it along the direction.

    >>> split = two_class(clients=3, examples=10)
    >>> split.num_clients, split.arrays["x"].shape, sorted(set(split.arrays["y"].tolist()))
    (3, (30, 2), [-1.0, 1.0])
    """
    check_count("clients", clients)
    check_count("examples", examples, low=2)
    check_number("angle", angle, low=0, high=180)
    check_number("noise", noise, low=0, open_low=True)
    turns = np.deg2rad(np.linspace(-angle / 2, angle / 2, clients) if clients > 1 else np.zeros(1))
    own = []
    for i, turn in enumerate(turns):
        rng = np.random.default_rng([seed, i])
        along = np.array([np.cos(turn), np.sin(turn)])
        across = np.array([-along[1], along[0]])
        y = np.where(np.arange(examples) % 2 == 0, 1.0, -1.0)
        spread = noise * rng.normal(size=(examples, 2))
        x = y[:, None] * along + 0.5 * spread[:, :1] * along + spread[:, 1:] * across
        own.append({"x": x.astype(np.float32), "y": y.astype(np.float32)})
    return Split.from_clients(own)


def toy_loss(params: Any, batch: dict[str, Any], key: Any) -> Any:
    """The mean of (w . x - y)^2; ``params`` is w [2].

    >>> import jax.numpy as jnp
    >>> batch = {"x": jnp.eye(2), "y": jnp.array([1.0, -1.0]), "mask": jnp.ones(2)}
    >>> float(toy_loss(jnp.array([1.0, 0.0]), batch, None))
    0.5
    """
    del key
    return masked_mean((batch["x"] @ params - batch["y"]) ** 2, batch[MASK])


def toy_metrics(params: Any, batch: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Squared error and accuracy of the sign, as metrics for ``simulate`` and evaluators."""
    output, mask = batch["x"] @ params, batch[MASK]
    right = (output > 0) == (batch["y"] > 0)
    return {"loss": ((output - batch["y"]) ** 2 * mask, mask), "accuracy": (right * mask, mask)}


def toy_optimum(split: Split) -> np.ndarray:
    """The w that minimizes the mean over clients of their losses, by the normal equations.

    >>> bool(np.abs(toy_optimum(two_class(angle=0.0, noise=0.2)) - [1.0, 0.0]).max() < 0.1)
    True
    """
    normal, right = np.zeros((2, 2)), np.zeros(2)
    for i in range(split.num_clients):
        x, y = split.client(i)["x"].astype(float), split.client(i)["y"].astype(float)
        normal += x.T @ x / len(y)
        right += x.T @ y / len(y)
    return np.linalg.solve(normal, right)
