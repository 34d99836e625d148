"""What the page of a report shows, as plain data: curves, clients, tunings and drift, thinned and rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbraid.experiment.collect import Collection, ReportedRun
from fedbraid.experiment.figures import series
from fedbraid.experiment.tuningplot import tuning_plot
from fedbraid.metric import is_client_column
from fedbraid.simulation.history import SIMULATED

__all__ = ["AXES", "clients_of", "columns_of", "curves_of", "drifts_of", "page_data"]

MOST_POINTS = 400  # of a curve on the page
AXES = ("rounds", "bytes", "seconds", "simulated")
COLUMN = {"seconds": "seconds", "simulated": SIMULATED}  # columns of axes that some runs do not have


def page_data(found: Collection) -> dict[str, Any]:
    """Curves, clients, tunings and drift, thinned and rounded, as the page's script reads them."""
    groups = found.groups
    curves: dict[str, Any] = {}
    for name in columns_of(found):
        metric = found.metric(name)
        positive = all(_positive(run.table[name]) for run in found.runs if name in run.table)
        curves[name] = {
            "better": metric.better,
            "log": metric.lower_is_better and positive,
            "series": [
                {"label": label, "axes": curves_of(own, name), "seeds": [run.config.seed for run in own]}
                for label, own in groups.items()
                if all(name in run.table for run in own)
            ],
        }
    return {
        "labels": list(groups),
        "curves": curves,
        "clients": clients_of(found),
        "tunings": [
            _rounded({"label": t.label, "criterion": t.criterion, "best": t.best, **tuning_plot(t.rows, t.keys)})
            for t in found.tunings
        ],
        "drift": drifts_of(groups),
        "baselines": [
            _rounded({"label": row["label"], "metric": summary["metric"], "value": row["score"]})
            for summary in found.comparisons
            for row in summary.get("baselines", ())
            if row.get("score") is not None
        ],
    }


def drifts_of(groups: Mapping[str, list[ReportedRun]]) -> list[dict[str, Any]]:
    """Drift per label and round over local steps; values below 1e-10 of the largest are rounding errors: set to 0."""
    found = []
    for label, own in groups.items():
        if own[0].drift and "drift" in own[0].drift:
            drift = np.array(own[0].drift["drift"])
            found.append({"label": label, "rounds": _rounded(np.where(drift < 1e-10 * drift.max(), 0.0, drift))})
    return found


def columns_of(found: Collection) -> list[str]:
    """The columns that a report draws: evaluated metrics by name, training losses, statistics over clients."""
    names = list(dict.fromkeys(name for run in found.runs for name in run.table))
    tested = sorted(n for n in names if n.startswith("test_"))
    logged = [n for n in names if n.endswith("/loss")]
    return [*(n for n in tested if not is_client_column(n)), *logged, *filter(is_client_column, tested)]


def _positive(column: np.ndarray) -> bool:
    seen = column[np.isfinite(column)]
    return len(seen) > 0 and bool(seen.min() > 0)


def curves_of(runs: Sequence[ReportedRun], metric: str) -> dict[str, Any]:
    """Per axis: x and the mean, smallest and largest value, and the line of each seed; all thinned."""
    axes = {}
    for against in AXES:
        tables = [run.table for run in runs]
        column = COLUMN.get(against)
        if column is not None and not all(column in t and np.isfinite(t[column]).all() for t in tables):
            continue
        if not all(np.isfinite(t[metric]).any() for t in tables):
            continue
        line = _thinned(series(tables, metric, against))
        each = [_thinned(series([table], metric, against)) for table in tables]
        axes[against] = _rounded(line) | {"each": [_rounded([one["x"], one["mean"]]) for one in each]}
    return axes


def _thinned(line: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A curve of at most MOST_POINTS points: means over intervals of equal length."""
    length = len(line["x"])
    if length <= MOST_POINTS:
        return dict(line)
    cuts = np.array_split(np.arange(length), MOST_POINTS)
    return {name: np.array([column[cut].mean() for cut in cuts]) for name, column in line.items()}


def clients_of(found: Collection) -> dict[str, Any]:
    """Per metric and label the clients' values of all seeds, from worst to best."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for label, own in found.groups.items():
        for name in own[0].clients:
            if name in ("client", "id", "examples") or any(name not in run.clients for run in own):
                continue
            values = np.concatenate([np.asarray(run.clients[name], float) for run in own])
            values = np.sort(values[np.isfinite(values)])
            if found.metric(name).lower_is_better:
                values = values[::-1]
            lines.setdefault(name, []).append({"label": label, "values": _rounded(_quantiles(values))})
    return dict(sorted(lines.items()))


def _quantiles(values: np.ndarray) -> np.ndarray:
    if len(values) <= MOST_POINTS:
        return values
    return values[np.linspace(0, len(values) - 1, MOST_POINTS).round().astype(int)]


def _rounded(value: Any) -> Any:
    """Numbers rounded to six digits; nan and infinities become null, because JSON has neither."""
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _rounded(value.tolist())
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value
