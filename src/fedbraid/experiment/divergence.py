"""Divergence: whether a run ended worse than it began, since when, why, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedbraid.experiment.assembly import find_parts
from fedbraid.experiment.config import Config
from fedbraid.metric import is_client_column
from fedbraid.names import options_of

__all__ = ["diverged", "divergence", "lower_rate"]

WORSE = 2.0  # a loss this many times that of the first model is a divergence


def diverged(history: Mapping[str, Any], evaluations: Mapping[str, Any], params: Any = ()) -> tuple[int, str] | None:
    """The first round in which a run was not finite, and what was not; None if everything is finite.

    The engine refuses uploads that are not finite. If all uploads of a round are refused, the model does not change.
    """
    found: list[tuple[int, str]] = []
    for name, refused in history.items():
        if name.endswith("/refused"):
            arrived = np.asarray(history.get(name.removesuffix("refused") + "arrived", np.inf))
            _first(found, (np.asarray(refused) > 0) & (arrived == 0), "every upload was refused: none was finite")
    # A statistic over clients is nan if no client has test examples, R2 if all targets are the same: no divergence.
    pooled = {name: np.asarray(column) for name, column in evaluations.items() if not is_client_column(name)}
    losses = {name: column for name, column in pooled.items() if name.endswith("_loss")} or pooled
    for name, column in losses.items():
        _first(found, ~np.isfinite(column), f"{name} is not finite", evaluations.get("round"))
    leaves = [leaf for leaf in map(np.asarray, jax.tree.leaves(params)) if np.issubdtype(leaf.dtype, np.floating)]
    if not all(bool(np.isfinite(leaf).all()) for leaf in leaves):
        rounds = max((len(np.atleast_1d(column)) for column in history.values()), default=0)
        found.append((rounds, "the model is not finite"))
    return min(found, default=None)


def divergence(
    config: Config,
    history: Mapping[str, Any],
    evaluations: Mapping[str, Any],
    params: Any,
    start: Mapping[str, Any] | None = None,
) -> str:
    """One line on the divergence of a run: the round, the likely cause and the next step; empty if it did not diverge.

    start: the evaluation of the first model. A run whose last test loss is more than twice as high has diverged too.

    >>> finite = {"round": [5, 10], "test_loss": [2.0, 1.0]}
    >>> config = Config.model_validate({"algorithm": {"name": "fedavg"}})
    >>> divergence(config, {}, finite, (), {"test_loss": 2.3})
    ''
    >>> divergence(config, {}, {"round": [5, 10], "test_loss": [9.0, 2e5]}, (), {"test_loss": 2.3})
    'diverged at round 5: test_loss is 2e+05 after the last round and was 2.3 before training. The likely cause is a \
learning rate that is too large: try --set algorithm.client_lr=0.01 (now 0.1)'
    """
    found = diverged(history, evaluations, params)
    if found is None and start is not None:
        for name, first in start.items():
            column = np.asarray(evaluations.get(name, ()))
            if name.endswith("_loss") and len(column) and column[-1] > WORSE * max(float(first), 1e-12):
                at = int(np.asarray(evaluations["round"])[np.argmax(column > WORSE * float(first))])
                found = (at, f"{name} is {column[-1]:.3g} after the last round and was {first:.3g} before training")
                break
    if found is None:
        return ""
    at, what = found
    return f"diverged at round {at}: {what}. {_advice(config)}"


def lower_rate(config: Config) -> tuple[str, float, float] | None:
    """The rate to lower after a divergence: its key, a tenth of it (at most 1), and its value; None without a rate."""
    options = {**options_of(find_parts(config)["algorithm"].thing), **config.algorithm.options}
    for name in ("client_lr", "lr", "server_lr"):
        value = options.get(name)
        value = value.get("value") if isinstance(value, Mapping) else value  # a rate over rounds
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return f"algorithm.{name}", min(value / 10, 1.0), float(value)
    return None


def _advice(config: Config) -> str:
    rate = lower_rate(config)
    if rate is None:
        return "The likely cause is a step size that is too large: lower the rates of the algorithm"
    key, lower, now = rate
    return f"The likely cause is a learning rate that is too large: try --set {key}={lower:.3g} (now {now:.3g})"


def _first(found: list[tuple[int, str]], bad: np.ndarray, what: str, rounds: Any = None) -> None:
    where = np.flatnonzero(bad)
    if len(where):
        found.append((int(where[0]) + 1 if rounds is None else int(np.asarray(rounds)[where[0]]), what))
