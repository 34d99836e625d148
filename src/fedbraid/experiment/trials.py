"""Trials in one file, judged by one criterion. A trial is one point run with one seed.

A trial that diverged has a row with the status "diverged" and no score. It cannot be the best.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid.experiment.config import ConfigError
from fedbraid.experiment.runfolder import about_of, read_table, write_table
from fedbraid.metric import PERSONAL, Better, Metric, metric_of_column
from fedbraid.names import nearest
from fedbraid.notices import notice
from fedbraid.simulation.points import PointsResult

__all__ = ["Criterion", "Row", "Trials", "best_point", "judged_by", "pick_metric", "read_trials", "write_trials"]

FORMAT = 1
Row = dict[str, Any]


class Criterion(NamedTuple):
    """How points are ranked: by a metric averaged over the last rounds, or by the number of rounds to a target.

    >>> str(Criterion(Metric("validation_accuracy", "higher"), 100, None))
    'highest validation_accuracy, averaged over the last 100 rounds'
    >>> str(Criterion(Metric("train/loss", "lower"), 100, 0.5))
    'fewest rounds to train/loss <= 0.5'
    """

    metric: Metric
    last: int = 100
    target: float | None = None

    def __str__(self) -> str:
        lower = self.metric.lower_is_better
        if self.target is not None:
            return f"fewest rounds to {self.metric.name} {'<=' if lower else '>='} {self.target:g}"
        return f"{'lowest' if lower else 'highest'} {self.metric.name}, averaged over the last {self.last} rounds"

    def score_of(self, rounds: np.ndarray, values: np.ndarray, done: int) -> float:
        """The average of the values at the ``rounds`` among the last ones of ``done`` rounds; nan if there are none."""
        late = values[rounds > done - self.last]
        return float(np.mean(late)) if len(late) else math.nan

    def first_round(self, rounds: np.ndarray, values: np.ndarray) -> int | None:
        """The first of ``rounds`` whose value is at the target or better; None if there is none."""
        if self.target is None:
            return None
        reached = self.metric.reached(values, self.target)
        return int(rounds[np.argmax(reached)]) if reached.any() else None

    def score(self, outcome: PointsResult, j: int) -> float:
        """The score of point ``j``."""
        return self.score_of(*self._curve(outcome, j), outcome.rounds)

    def rounds_to_target(self, outcome: PointsResult, j: int) -> int | None:
        """The first evaluated round in which point ``j`` reaches the target; None if it does not reach it."""
        return self.first_round(*self._curve(outcome, j))

    def _curve(self, outcome: PointsResult, j: int) -> tuple[np.ndarray, np.ndarray]:
        name = self.metric.name
        if name in outcome.history:
            return np.arange(1, outcome.rounds + 1), outcome.history[name][j]
        return outcome.evaluations["round"], outcome.evaluations[name][j]

    def loss(self, rows: Sequence[Mapping[str, Any]], rounds: int) -> float:
        """The loss of a point from its trials, to be minimised; inf if one of them diverged."""
        if not rows or any(row["score"] is None for row in rows):
            return math.inf
        mean = float(np.mean([row["score"] for row in rows]))
        if self.target is None:
            return -self.metric.sign * mean
        # a seed that misses the target counts between all rounds and twice all rounds, by its distance to the target
        missing = min(1.0, abs(mean - self.target))
        reached = [row["rounds_to_target"] for row in rows]
        return float(np.mean([rounds * (1 + missing) if r is None else r for r in reached]))


def judged_by(row: Mapping[str, Any]) -> Metric:
    """The metric by which a trial was scored. Files of older versions lack its direction: it follows from the name."""
    better = row.get("better")
    return metric_of_column(row["metric"]) if better is None else Metric(row["metric"], better)


def pick_metric(
    wanted: str | None,
    evaluated: Sequence[str],
    logged: Sequence[str],
    *,
    prefix: str,
    declared: Sequence[Metric] = (),
    better: Better | None = None,
) -> Metric:
    """The metric by which points are ranked, with the full name of its column.

    evaluated, logged: the existing columns. ``prefix``: of the evaluated columns; ``wanted`` may leave it out.
    declared: metrics whose names are not well known. ``better`` overrides the direction of the chosen metric.
    By default it is the accuracy, else the loss, of the model that clients use: their own one where they have one.

    >>> pick_metric(None, ["test_loss", "test_personal_loss"], [], prefix="test_").name
    'test_personal_loss'
    >>> pick_metric("loss", ["test_loss", "test_accuracy"], ["train/loss"], prefix="test_")
    Metric(name='test_loss', better='lower')
    """
    pooled = [name for name in evaluated if name != "round"]
    for name in pooled:
        metric_of_column(name, declared)  # raises if it has no direction, which is needed to find the worst clients
    if wanted is None:
        usual = [prefix + model + name for name in ("accuracy", "loss") for model in (PERSONAL, "")]
        choices = [name for name in usual if name in pooled] or pooled
        if not choices:
            raise ConfigError("nothing is evaluated here: name a column of the training history as metric")
        found = choices[0]
    else:
        found = next((name for name in (wanted, prefix + wanted) if name in pooled or name in logged), None)
    if found is None:
        there = sorted([*pooled, *logged])
        near = nearest(str(wanted), there)
        raise ConfigError(f"metric {wanted!r} is not measured{near}; there are: {', '.join(there)}")
    if better is not None:
        return Metric(found, better)
    try:
        return metric_of_column(found, declared)
    except ValueError as error:
        raise ConfigError(f'{error}; or set better = "higher" or "lower" beside metric = {wanted!r}') from None


class Trials:
    """The rows so far. The Parquet file, if there is one, is replaced as a whole when rows are added.

    every: seconds from one write to the next at least; then call `write` at the end. 0: write whenever rows are added.
    """

    path: Path | None
    about: dict[str, Any]
    every: float
    written: float
    unwritten: int

    def __init__(self, path: Path | None, about: Mapping[str, Any] | None = None, *, every: float = 0.0) -> None:
        self.path, self.about = path, dict(about or {})
        self.every, self.written, self.unwritten = every, time.monotonic(), 0
        self.rows: list[Row] = [] if path is None else _rows_so_far(path)

    def of(self, **fixed: Any) -> list[Row]:
        """The rows whose columns have these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in fixed.items())]

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows, and write the file if it is time to."""
        self.rows.extend(rows)
        self.unwritten += len(rows)
        if time.monotonic() - self.written >= self.every:
            self.write()

    def write(self) -> None:
        """Write the rows that are not in the file yet."""
        if self.path is not None and self.unwritten:
            write_trials(self.path, self.rows, self.about)
        self.written, self.unwritten = time.monotonic(), 0


def _rows_so_far(path: Path) -> list[Row]:
    """The rows of a file to continue; a damaged file counts as not there, so that its trials run again."""
    if not path.is_file():
        return []
    try:
        about_of(path, read_table(path), b"fedbraid")
    except ConfigError as error:
        notice(f"{error}. Its trials run again")
        return []
    return read_trials(path)


def write_trials(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Write the rows of a tuning as a Parquet file; ``about`` is stored in its metadata."""
    import pyarrow as pa

    columns = list(dict.fromkeys(key for row in rows for key in row))
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        kinds = {type(v) for v in values if v is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:  # a column has one type: mixed values are kept as JSON
            values = [None if v is None else json.dumps(v) for v in values]
        arrays[name] = pa.array(values)
    table = pa.table(arrays).replace_schema_metadata({"fedbraid": json.dumps({**about, "format": FORMAT})})
    write_table(path, table)


def read_trials(path: Path) -> list[Row]:
    """The rows of a ``trials.parquet``."""
    table = read_table(path)
    about = about_of(path, table, b"fedbraid")
    if about.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format {about.get('format')!r}, this version of fedbraid reads {FORMAT}; "
            f"use the version that wrote it ({about.get('version', 'unknown')}) or sweep again"
        )
    return table.to_pylist()


def best_point(rows: Sequence[Row], keys: Sequence[str], criterion: Criterion, rounds: int) -> dict[str, Any]:
    """The best point among rows: its values, its score (mean and deviation over the seeds), and the criterion.

    Points that were stopped early or diverged cannot be the best. If there are no others, ``best`` is None.
    """
    by_id: dict[int, list[Row]] = {}
    for row in rows:
        by_id.setdefault(row["point"], []).append(row)
    whole = {i: own for i, own in by_id.items() if all(row["rounds"] >= max(1, rounds) for row in own)}
    losses = {i: criterion.loss(own, rounds) for i, own in whole.items()}
    alive = [i for i in losses if losses[i] < math.inf]
    found: dict[str, Any] = {"criterion": str(criterion), "metric": criterion.metric.name}
    found |= {"better": criterion.metric.better, "best": None, "score": None}
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
