"""The small problem of the laws: least squares, with five clients of 3 to 9 examples and different optima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.data.federated import Split
from fedbraid.local import masked_mean

__all__ = ["SQUARES", "Problem", "clients", "gradient", "loss", "outputs", "start"]

SIZES = (3, 9, 4, 7, 5)


class Problem(NamedTuple):
    """A problem on which an algorithm is built."""

    loss: Callable[[Any, dict, Any], Any]
    outputs: Callable[[Any, dict], Any]  # (params, batch) -> the model's outputs
    start: Callable[[], Any]
    clients: Callable[[], Split]


def clients(seed: int = 0, dtype: Any = np.float64) -> Split:
    """The clients' examples."""
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(SIZES):
        x = rng.normal(size=(n, 3))
        y = x @ (rng.normal(size=3) + i) + 0.5 * rng.normal(size=n)
        out.append({"x": x.astype(dtype), "y": y.astype(dtype)})
    return Split.from_clients(out)


def outputs(params: Any, batch: dict[str, Any]) -> Any:
    """The model: an affine function."""
    return batch["x"] @ params["w"] + params["b"]


def loss(params: Any, batch: dict[str, Any], key: Any) -> Any:
    """Half the mean squared residual over the real examples of a batch."""
    del key
    residual = outputs(params, batch) - batch["y"]
    return masked_mean(0.5 * residual**2, batch["mask"])


def start(dtype: Any = None) -> dict[str, Any]:
    """The first parameters."""
    return {"w": jnp.array([0.3, -0.2, 0.1], dtype), "b": jnp.array(0.5, dtype)}


def gradient(params: Any, split: Split) -> Any:
    """The gradient of the loss pooled over all examples."""
    batch = {k: jnp.asarray(v) for k, v in split.arrays.items()} | {"mask": jnp.ones(split.num_examples)}
    return jax.grad(loss)(params, batch, None)


SQUARES = Problem(loss, outputs, start, clients)
