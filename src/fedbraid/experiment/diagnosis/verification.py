"""Train with the configured and with the advised settings, and count rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import Config, parse
from fedbraid.metric import declared_by, metric_of_column
from fedbraid.simulation import simulate

__all__ = ["verify"]


def verify(
    config: Config, changes: Sequence[str], *, target: float = 0.9, seeds: int = 5, metric: str = "test_accuracy"
) -> dict[str, list[int | None]]:
    """Rounds until ``metric`` reaches ``target`` with the configured and with the advised settings.

    One number per seed; None if a run does not reach the target. If lower is better, the target is reached when the
    metric falls to it, otherwise when it rises to it. An example is in docs/theory/diagnose.md: it trains ten models.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    outcome: dict[str, list[int | None]] = {"configured": [], "advised": []}
    for seed in range(seeds):
        for name, changed in (("configured", ()), ("advised", changes)):
            tree = config.model_dump(mode="json")
            _change(tree, changed)
            made = build(parse({**tree, "seed": seed}))
            if made.data.test is None:
                raise ValueError("verify needs a test split to evaluate on, and the data has none")
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
            if metric not in result.evaluations:
                evaluated = ", ".join(name for name in result.evaluations if name != "round")
                raise ValueError(f"metric {metric!r} is not evaluated; choose one of {evaluated}")
            better = metric_of_column(metric, declared_by(made.metrics))
            reached = np.flatnonzero(better.reached(np.asarray(result.evaluations[metric]), target))
            outcome[name].append(int(result.evaluations["round"][reached[0]]) if len(reached) else None)
    return outcome


def _change(tree: dict[str, Any], changes: Sequence[str]) -> None:
    """Apply the advised settings; ``steps`` replaces ``epochs``."""
    for change in changes:
        key, _, value = change.partition("=")
        name = key.removeprefix("algorithm.")
        tree["algorithm"][name] = float(value) if name != "steps" else int(value)
        if name == "steps":
            tree["algorithm"].pop("epochs", None)
