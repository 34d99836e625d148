"""Trials: points at a seed, judged by one criterion, in one file.

A trial that diverged is a row like any other, with the status "diverged" and no score: it is never dropped, and never
the best.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid.experiment.config import ConfigError
from fedbraid.simulation.points import PointsResult

__all__ = ["Criterion", "Row", "Trials", "best_point", "pick_metric", "read_trials", "write_trials"]

FORMAT = 1
Row = dict[str, Any]


class Criterion(NamedTuple):
    """What the best point is best at.

    >>> str(Criterion("validation_accuracy", 100, None))
    'highest validation_accuracy, averaged over the last 100 rounds'
    >>> str(Criterion("train/loss", 100, 0.5))
    'fewest rounds to train/loss <= 0.5'
    """

    metric: str
    last: int = 100
    target: float | None = None

    @property
    def lower_is_better(self) -> bool:
        return "loss" in self.metric or "error" in self.metric

    def __str__(self) -> str:
        if self.target is not None:
            return f"fewest rounds to {self.metric} {'<=' if self.lower_is_better else '>='} {self.target:g}"
        which = "lowest" if self.lower_is_better else "highest"
        return f"{which} {self.metric}, averaged over the last {self.last} rounds"

    def score(self, outcome: PointsResult, j: int) -> float:
        """The metric of point ``j``, averaged over the (evaluated) rounds among the last."""
        rounds, values = self._curve(outcome, j)
        return float(np.mean(values[rounds > outcome.rounds - self.last]))

    def rounds_to_target(self, outcome: PointsResult, j: int) -> int | None:
        """The first (evaluated) round at which point ``j`` is at the target; None if it never was."""
        if self.target is None:
            return None
        rounds, values = self._curve(outcome, j)
        reached = values <= self.target if self.lower_is_better else values >= self.target
        return int(rounds[np.argmax(reached)]) if reached.any() else None

    def _curve(self, outcome: PointsResult, j: int) -> tuple[np.ndarray, np.ndarray]:
        if self.metric in outcome.history:
            return np.arange(1, outcome.rounds + 1), outcome.history[self.metric][j]
        return outcome.evaluations["round"], outcome.evaluations[self.metric][j]

    def loss(self, rows: Sequence[Mapping[str, Any]], rounds: int) -> float:
        """One number to make small, from the trials of a point; inf if one of them diverged."""
        if not rows or any(row["score"] is None for row in rows):
            return math.inf
        mean = float(np.mean([row["score"] for row in rows]))
        if self.target is None:
            return mean if self.lower_is_better else -mean
        # a seed that never gets there counts for all rounds and up to as many again, by how far it stayed away
        missing = min(1.0, abs(mean - self.target))
        reached = [row["rounds_to_target"] for row in rows]
        return float(np.mean([rounds * (1 + missing) if r is None else r for r in reached]))


def pick_metric(wanted: str | None, evaluated: Sequence[str], logged: Sequence[str], prefix: str) -> str:
    """The full name of the metric to judge by, or what there is instead."""
    pooled = [name for name in evaluated if name != "round"]
    if wanted is None:
        choices = [prefix + name for name in ("accuracy", "loss") if prefix + name in pooled] or pooled
        if not choices:
            raise ConfigError("nothing is evaluated here: name a column of the training history as metric")
        return choices[0]
    for name in (wanted, prefix + wanted):
        if name in pooled or name in logged:
            return name
    raise ConfigError(f"metric {wanted!r} is not measured; there are: {', '.join(sorted([*pooled, *logged]))}")


class Trials:
    """The rows so far, in a Parquet file that is replaced as a whole whenever rows are added."""

    def __init__(self, path: Path | None, about: Mapping[str, Any] | None = None) -> None:
        self.path, self.about = path, dict(about or {})
        self.rows: list[Row] = read_trials(path) if path is not None and path.is_file() else []

    def of(self, **fixed: Any) -> list[Row]:
        return [row for row in self.rows if all(row.get(key) == value for key, value in fixed.items())]

    def add(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        if self.path is not None and rows:
            write_trials(self.path, self.rows, self.about)


def write_trials(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(dict.fromkeys(key for row in rows for key in row))
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        kinds = {type(v) for v in values if v is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:  # values of different kinds: as they would be written
            values = [None if v is None else json.dumps(v) for v in values]
        arrays[name] = pa.array(values)
    table = pa.table(arrays).replace_schema_metadata({"fedbraid": json.dumps({**about, "format": FORMAT})})
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial)
    os.replace(partial, path)  # whoever reads sees the old file or the new one


def read_trials(path: Path) -> list[Row]:
    """The rows of a ``trials.parquet``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"cannot read the trials in {path}: {error}") from None
    about = json.loads((table.schema.metadata or {}).get(b"fedbraid", b"{}"))
    if about.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format {about.get('format')!r}, this version of fedbraid reads {FORMAT}; "
            f"use the version that wrote it ({about.get('version', 'unknown')}) or sweep again"
        )
    return table.to_pylist()


def best_point(rows: Sequence[Row], keys: Sequence[str], criterion: Criterion, rounds: int) -> dict[str, Any]:
    """The best point among rows: its values, its score (mean and deviation over the seeds), and by what rule.

    Points that were stopped early or diverged are never the best; with no other, ``best`` is None.
    """
    by_id: dict[int, list[Row]] = {}
    for row in rows:
        by_id.setdefault(row["point"], []).append(row)
    whole = {i: own for i, own in by_id.items() if all(row["rounds"] >= max(1, rounds) for row in own)}
    losses = {i: criterion.loss(own, rounds) for i, own in whole.items()}
    alive = [i for i in losses if losses[i] < math.inf]
    found: dict[str, Any] = {"criterion": str(criterion), "metric": criterion.metric, "best": None, "score": None}
    if not alive:
        return found
    best = by_id[min(alive, key=lambda i: (losses[i], i))]
    scores = [row["score"] for row in best]
    reached = [row["rounds_to_target"] for row in best]
    return found | {
        "best": {key: best[0][key] for key in keys},
        "score": float(np.mean(scores)),
        "deviation": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "rounds_to_target": None if None in reached else float(np.mean(reached)),
    }
