"""Train with the configured and with the advised settings, and count rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import Config, parse
from fedbraid.metric import declared_by, metric_of_column
from fedbraid.simulation import simulate
from fedbraid.simulation.evaluate import metrics_of

__all__ = ["goal_of", "verify"]


def verify(
    config: Config,
    changes: Sequence[str],
    *,
    target: float | None = None,
    seeds: int = 5,
    metric: str | None = None,
) -> dict[str, list[int | None]]:
    """Rounds until ``metric`` reaches ``target`` with the configured and with the advised settings.

    One number per seed; None if a run does not reach the target. If lower is better, the target is reached when the
    metric falls to it, otherwise when it rises to it. An example is in docs/theory/diagnose.md: it trains ten models.

    metric: default ``test_accuracy``, or ``test_loss`` for a model without accuracy. target: default 0.9 for an
    accuracy, else the last value of the configured run with the first seed; `goal_of` gives both.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    metric, target = goal_of(config, metric, target)
    outcome: dict[str, list[int | None]] = {"configured": [], "advised": []}
    for seed in range(seeds):
        for name, changed in (("configured", ()), ("advised", changes)):
            evaluations, declared = _trained(config, changed, seed)
            better = metric_of_column(metric, declared)
            reached = np.flatnonzero(better.reached(np.asarray(evaluations[metric]), target))
            outcome[name].append(int(evaluations["round"][reached[0]]) if len(reached) else None)
    return outcome


def goal_of(config: Config, metric: str | None, target: float | None) -> tuple[str, float]:
    """The metric and the target of `verify`; one run is trained only if the target is that of the configured run."""
    made = build(config)
    if made.data.test is None:
        raise ValueError("verify needs a test split to evaluate on, and the data has none")
    known = [f"test_{found.name}" for found in metrics_of(made.metrics, made.shapes, made.data.test)]
    if metric is None:
        metric = "test_accuracy" if "test_accuracy" in known else "test_loss"
    if metric not in known:
        raise ValueError(f"metric {metric!r} is not evaluated; choose one of {', '.join(known)}")
    if target is None and metric == "test_accuracy":
        target = 0.9
    return metric, float(_trained(config, (), 0)[0][metric][-1]) if target is None else target


def _trained(config: Config, changes: Sequence[str], seed: int) -> tuple[Any, Any]:
    """The evaluations of a run after every round, and the metrics that it declares."""
    tree = config.model_dump(mode="json")
    _change(tree, changes)
    made = build(parse({**tree, "seed": seed}))
    result = simulate(
        made.algorithm,
        made.params,
        made.data,
        rounds=config.rounds,
        cohort=None if config.cohort == "all" else config.cohort,
        seed=seed,
        metrics=made.metrics,
        eval_every=1,
    )
    return result.evaluations, declared_by(made.metrics)


def _change(tree: dict[str, Any], changes: Sequence[str]) -> None:
    """Apply the advised settings; ``steps`` replaces ``epochs``."""
    for change in changes:
        key, _, value = change.partition("=")
        name = key.removeprefix("algorithm.")
        tree["algorithm"][name] = float(value) if name != "steps" else int(value)
        if name == "steps":
            tree["algorithm"].pop("epochs", None)
