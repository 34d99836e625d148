"""Run a method in the simulator in float64, and record the gap to the optimum after every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData, Split
from fedbraid.drawing import COLOURS, DASHES, tidy
from fedbraid.simulation import simulate

PAPER = "Pathak and Wainwright, FedSplit: an algorithmic framework for fast federated optimization, NeurIPS 2020"


def trace(
    method: Algorithm, start: Any, clients: Split, gap: Callable[[Any], Any], *, rounds: int, every: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds (from 0) and ``gap(x)`` after them; every client takes part in every round."""
    one = {name: np.asarray(field[:1]) for name, field in clients.arrays.items()}  # the gap depends on the model only

    def metrics(params: Any, batch: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        return {"gap": (batch["mask"] * gap(params), batch["mask"])}

    with jax.enable_x64(True):
        start = jax.tree.map(jnp.asarray, start)
        data = FederatedData(clients, Split.from_clients([one]))
        run = simulate(method, start, data, rounds=rounds, metrics=metrics, eval_every=every, devices=1)
        at = np.concatenate([[0], np.asarray(run.evaluations["round"])])
        return at, np.concatenate([[float(gap(start))], np.asarray(run.evaluations["test_gap"])])


def residual_loss(x: Any, batch: Mapping[str, Any], key: Any) -> Any:
    """Least squares, the mean over a client's examples; ``objective="sum"`` makes it the paper's sum."""
    return 0.5 * jnp.sum(batch["mask"] * (batch["x"] @ x - batch["y"]) ** 2) / jnp.sum(batch["mask"])


def draw(axis: Any, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], *, floor: float) -> None:
    """Gap against round, logarithmic; curves end at ``floor``, below which rounding errors dominate."""
    for i, (name, (at, gap)) in enumerate(curves.items()):
        last = int(np.argmax(gap < floor)) or len(gap)
        axis.plot(at[:last], gap[:last], DASHES[i % 4], color=COLOURS[i % 7], lw=1.8, label=name)
    axis.set(xlabel="round", ylabel="$F(x_t) - F^*$", yscale="log")
    tidy(axis)
