"""Figures of runs: one run, curves of several, clients and drift. A report's page draws the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid import files
from fedbraid.drawing import BLUE, COLOURS, GREEN, GREY, ORANGE, log_scale, style, tidy, whole_numbers
from fedbraid.metric import Metric
from fedbraid.simulation.history import SIMULATED

__all__ = ["draw_clients", "draw_curves", "draw_drift", "draw_run", "save", "series"]

X_LABELS = {
    "rounds": "round",
    "bytes": "bytes sent, both ways",
    "seconds": "seconds",
    "simulated": "simulated time (seconds)",
}


def save(figure: Any, path: Path, *, pdf: bool = False) -> list[Path]:
    """Write a figure as PNG, and with ``pdf`` also as PDF into the same folder."""
    with files.replacing(path) as partial:
        figure.savefig(partial, dpi=130)
    paths = [path]
    if pdf:
        paths.append(path.with_suffix(".pdf"))
        with files.replacing(paths[-1]) as partial:
            figure.savefig(partial, metadata={"CreationDate": None})  # equal figures give equal bytes
    return paths


def draw_run(table: Mapping[str, np.ndarray], title: str) -> Any:
    """One run against rounds: the loss, and if there is one the accuracy, pooled and of the worst tenth of clients.

    If the clients have own models, these have lines of their own.
    """
    from matplotlib.figure import Figure

    accuracy = "test_accuracy" in table
    figure = Figure(figsize=(9.6 if accuracy else 5.4, 3.8), layout="constrained")
    axes: Any = figure.subplots(1, 2 if accuracy else 1, squeeze=False)[0]
    trained = next((name for name in table if name.endswith("/loss")), None)
    if trained:
        axes[0].plot(table["round"], table[trained], color=GREY, lw=1, alpha=0.6, label="training batches")
    if "test_loss" in table:
        own = "test_personal_loss" in table
        axes[0].plot(*_evaluated(table, "test_loss"), color=BLUE, lw=2, label="test, global model" if own else "test")
        if own:
            axes[0].plot(*_evaluated(table, "test_personal_loss"), color=GREEN, lw=2, label="test, personal models")
    axes[0].set_ylabel("loss")
    positive = [v for v in (table.get(trained or ""), table.get("test_loss")) if v is not None]
    if positive and all(np.nanmin(v) > 0 for v in positive if np.isfinite(v).any()):
        log_scale(axes[0])
    if accuracy:
        _draw_accuracy(axes[1], table)
    for axis in axes:
        axis.set_xlabel("round")
        tidy(axis)
        whole_numbers(axis)
        for line in axis.lines:
            if len(line.get_xdata()) == 1:  # a line through one point is not seen
                line.set_marker("o")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, loc="best")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _draw_accuracy(axis: Any, table: Mapping[str, np.ndarray]) -> None:
    rounds, pooled = _evaluated(table, "test_accuracy")
    own = "test_personal_accuracy" in table
    axis.plot(rounds, pooled, color=BLUE, lw=2, label="test, global model" if own else "test, all examples")
    if own:
        rounds, pooled = _evaluated(table, "test_personal_accuracy")
        axis.plot(rounds, pooled, color=GREEN, lw=2, label="test, personal models")
    worst = f"test_{'personal_' if own else ''}accuracy_client_worst_tenth"
    if worst in table:
        about = "personal models: a tenth are below" if own else "a tenth of the clients are below"
        axis.plot(*_evaluated(table, worst), color=ORANGE, lw=1.5, ls="--", label=about)
    axis.set_ylabel("accuracy")
    axis.set_ylim(0, 1.02)
    if len(pooled):
        at = (rounds[-1], pooled[-1])
        axis.annotate(f"{pooled[-1]:.3f}", at, textcoords="offset points", xytext=(-4, -14), ha="right")


def _evaluated(table: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The rounds at which a column was evaluated, and its values there."""
    seen = np.isfinite(table[name])
    return table["round"][seen], table[name][seen]


def series(tables: Sequence[Mapping[str, np.ndarray]], metric: str, against: str) -> dict[str, Any]:
    """A metric of runs that differ only in their seed: x, and its mean, smallest and largest value over the runs.

    ``against`` is "rounds", "bytes" (sent so far, both ways), "seconds" or "simulated" (seconds of simulated time). x
    is the mean over the runs, up to the end of the shortest run. Rounds that were not evaluated are left out.
    """
    found = []
    for table in tables:
        seen = np.isfinite(table[metric])
        sent = {"rounds": "round", "seconds": "seconds", "simulated": SIMULATED}.get(against)
        x = table["bytes_down"] + table["bytes_up"] if sent is None else table[sent]
        found.append((np.asarray(x, float)[seen], np.asarray(table[metric], float)[seen]))
    length = min(len(x) for x, _ in found)
    ys = np.array([y[:length] for _, y in found])
    x = np.mean([x[:length] for x, _ in found], axis=0)
    return {"x": x, "mean": ys.mean(0), "low": ys.min(0), "high": ys.max(0)}


def draw_curves(series: Sequence[Mapping[str, Any]], metric: Metric, against: str, title: str = "") -> Any:
    """A metric against rounds, bytes or seconds: per series a line, and a band from the smallest to the largest value.

    Each series has ``label`` and, as arrays, ``x``, ``mean``, ``low`` and ``high``. If lower is better and all values
    are positive, the scale is logarithmic.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(6.8, 4.2), layout="constrained")
    axis = figure.subplots()
    lowest = np.inf
    for i, one in enumerate(series):
        axis.plot(one["x"], one["mean"], lw=1.8, label=one["label"], **style(i))
        if np.any(np.asarray(one["high"]) > np.asarray(one["low"])):
            axis.fill_between(one["x"], one["low"], one["high"], color=COLOURS[i % len(COLOURS)], alpha=0.15, lw=0)
        lowest = min(lowest, np.nanmin(one["low"])) if len(one["low"]) else lowest
    axis.set_xlabel(X_LABELS[against])
    if against == "bytes":
        axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.set_ylabel(metric.name)
    if metric.lower_is_better and 0 < lowest < np.inf:
        log_scale(axis)
    tidy(axis)
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=8)
    what = "simulated time" if against == "simulated" else against
    figure.suptitle(title or f"{metric.name} against {what}", x=0.01, ha="left", fontsize=11)
    return figure


def draw_clients(series: Sequence[Mapping[str, Any]], metric: str) -> Any:
    """Each client's own metric at the end, sorted: a line for each series, clients from worst to best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 4.2), layout="constrained")
    axis = figure.subplots()
    for i, one in enumerate(series):
        values = np.asarray(one["values"])
        share = (np.arange(len(values)) + 0.5) / max(len(values), 1) * 100
        axis.plot(share, values, lw=1.8, label=one["label"], **style(i))
    axis.axvline(10, color="0.6", lw=1, ls=":")
    axis.set_xlabel("clients, worst to best (percentile)")
    axis.set_ylabel(f"{metric} of the client")
    axis.set_xlim(0, 100)
    tidy(axis)
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{metric}, client by client", x=0.01, ha="left", fontsize=11)
    return figure


def draw_drift(series: Sequence[Mapping[str, Any]]) -> Any:
    """The clients' mean squared distance from the shadow sequence over the local steps of the first rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 4.2), layout="constrained")
    axis = figure.subplots()
    peaks = [float(np.max(one["drift"])) for one in series]
    log = min(peaks) > 0 and max(peaks) > 20 * min(peaks)  # drift differs a lot between learning rates
    for i, one in enumerate(series):
        for t, row in enumerate(one["drift"]):
            steps, seen = t * (len(row) - 1) + np.arange(len(row)), np.array(row, float)
            if log:
                seen[seen <= 0] = np.nan
            axis.plot(steps, seen, lw=1.6, marker="o", ms=2.5, label=one["label"] if t == 0 else None, **style(i))
    axis.set_xlabel("local steps since the start; every round starts again at 0")
    axis.set_ylabel("mean squared distance to the shadow")
    if log:
        log_scale(axis)
    else:
        axis.set_ylim(bottom=0)
    tidy(axis)
    axis.legend(frameon=False, fontsize=8)
    figure.suptitle("client drift", x=0.01, ha="left", fontsize=11)
    return figure
