"""Figures of tunings: scores over the points that were tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbraid.drawing import BLUE, ORANGE, tidy
from fedbraid.experiment.trials import judged_by
from fedbraid.metric import Metric

__all__ = ["draw_tuning", "tuning_plot"]

FEW = 14  # the most values of a key that is an axis of a map


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _written(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _log(values: Sequence[Any]) -> bool:
    return _numeric(values) and min(values) > 0 and max(values) / min(values) >= 20


def tuning_plot(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """How to draw the trials of one tuning: a line over one key, a map over two, or a scatter.

    Scores are means over seeds. With more than two keys, a map over two of them shows the best score over the others.
    A cell without a score diverged (``status``) or was not tried.
    """
    points = _points(rows, keys)
    distinct = {key: sorted({_hashable(p["values"][i]) for p in points}, key=_order) for i, key in enumerate(keys)}
    wide = sorted((k for k in keys if len(distinct[k]) > 1), key=lambda k: -len(distinct[k]))[:2] or list(keys[:1])
    shown = sorted(wide, key=list(keys).index)
    metric = judged_by(rows[0])
    plot: dict[str, Any] = {"keys": list(keys), "metric": metric.name, "better": metric.better, "points": points}
    plot |= {"x": shown[0], "y": shown[1] if len(shown) > 1 else None, "log": [_log(distinct[key]) for key in shown]}
    if len(shown) == 1:
        return plot | {"kind": "line", "xs": distinct[shown[0]], "named": not _numeric(distinct[shown[0]])}
    xs, ys = (distinct[key] for key in shown)
    if max(len(xs), len(ys)) > FEW and _numeric(xs) and _numeric(ys):
        return plot | {"kind": "scatter"}
    return plot | {"kind": "map", "xs": xs, "ys": ys, "cells": _cells(plot, xs, ys, metric)}


def _points(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Trials grouped by point: the mean score over seeds, its deviation, and how the point ended."""
    by_point: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_point.setdefault(row["point"], []).append(row)
    points = []
    for own in by_point.values():
        scores = [row["score"] for row in own]
        whole = None not in scores
        kinds = {row["status"] for row in own}
        points.append(
            {
                "values": [own[0][key] for key in keys],
                "score": float(np.mean(scores)) if whole else None,
                "spread": float(np.std(scores)) if whole and len(scores) > 1 else 0.0,
                "status": "diverged" if "diverged" in kinds else "stopped" if "stopped" in kinds else "finished",
                "rounds": max(row["rounds"] for row in own),
            }
        )
    return points


def _cells(plot: Mapping[str, Any], xs: list[Any], ys: list[Any], metric: Metric) -> list[dict[str, Any]]:
    """The best point of every pair of values of the two keys that a map shows."""
    i, j = (plot["keys"].index(plot[k]) for k in ("x", "y"))
    best: dict[tuple[Any, Any], dict[str, Any]] = {}
    for point in plot["points"]:
        at = (_hashable(point["values"][i]), _hashable(point["values"][j]))
        if at not in best or _better(point, best[at], metric):
            best[at] = point
    return [
        {"x": xs.index(a), "y": ys.index(b), "score": p["score"], "status": p["status"]} for (a, b), p in best.items()
    ]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if _numeric([value]) else (1, str(value))


def _better(a: Mapping[str, Any], b: Mapping[str, Any], metric: Metric) -> bool:
    if a["score"] is None or b["score"] is None:
        return b["score"] is None and a["score"] is not None
    return metric.is_better(a["score"], than=b["score"])


def short(key: str) -> str:
    """A key without its section, for axes."""
    return key.removeprefix("algorithm.")


def draw_tuning(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], found: Mapping[str, Any], title: str = ""
) -> Any:
    """The scores of a tuning over its points; the best one is marked, diverged ones are crosses."""
    from matplotlib.figure import Figure

    plot = tuning_plot(rows, keys)
    figure = Figure(figsize=(6.2, 4.2), layout="constrained")
    axis = figure.subplots()
    {"line": _line, "map": _map, "scatter": _scatter}[plot["kind"]](figure, axis, plot, found.get("best"))
    axis.set_xlabel(short(plot["x"]))
    if plot["y"]:
        axis.set_ylabel(short(plot["y"]))
    others = [short(key) for key in plot["keys"] if key not in (plot["x"], plot["y"])]
    best = f"best over {', '.join(others)}" if plot["kind"] == "map" and others else ""
    under = "; ".join(part for part in (str(found.get("criterion", "")), best) if part)
    axis.set_title(under, loc="left", fontsize=8, color="0.35")
    figure.suptitle(title or "tuning", x=0.01, ha="left", fontsize=11)
    return figure


def _best_of(plot: Mapping[str, Any], best: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if best is None:
        return None
    wanted = [_hashable(best[key]) for key in plot["keys"]]
    return next((p for p in plot["points"] if [_hashable(v) for v in p["values"]] == wanted), None)


def _line(figure: Any, axis: Any, plot: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
    where = plot["keys"].index(plot["x"])
    place = (lambda v: plot["xs"].index(v)) if plot["named"] else (lambda v: v)
    scored = sorted(
        (p for p in plot["points"] if p["score"] is not None), key=lambda p: place(_hashable(p["values"][where]))
    )
    xs = [place(_hashable(p["values"][where])) for p in scored]
    for status, options in (("finished", {"mfc": BLUE}), ("stopped", {"mfc": "white"})):
        chosen = [(x, p) for x, p in zip(xs, scored, strict=True) if p["status"] == status]
        if chosen:
            axis.errorbar(
                [x for x, _ in chosen],
                [p["score"] for _, p in chosen],
                [p["spread"] for _, p in chosen],
                marker="o",
                ls="-" if status == "finished" else "",
                color=BLUE,
                capsize=3,
                label=status if status != "finished" else None,
                **options,
            )
    lost = [place(_hashable(p["values"][where])) for p in plot["points"] if p["status"] == "diverged"]
    if lost:
        axis.plot(lost, [0.03] * len(lost), "x", color=ORANGE, transform=axis.get_xaxis_transform(), label="diverged")
    marked = _best_of(plot, best)
    if marked is not None:
        at = place(_hashable(marked["values"][where]))
        axis.plot(at, marked["score"], "o", ms=14, mfc="none", mec=ORANGE, mew=2, label=f"best: {marked['score']:.4g}")
    if plot["named"]:
        axis.set_xticks(range(len(plot["xs"])), [_written(v) for v in plot["xs"]])
    elif plot["log"][0]:
        axis.set_xscale("log")
    axis.set_ylabel(plot["metric"])
    tidy(axis)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)


def _map(figure: Any, axis: Any, plot: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
    shape = (len(plot["ys"]), len(plot["xs"]))
    scores, status = np.full(shape, np.nan), np.full(shape, "", object)
    for cell in plot["cells"]:
        scores[cell["y"], cell["x"]] = np.nan if cell["score"] is None else cell["score"]
        status[cell["y"], cell["x"]] = cell["status"]
    colours = "viridis_r" if plot["better"] == "lower" else "viridis"
    image = axis.imshow(np.ma.masked_invalid(scores), cmap=colours, origin="lower", aspect="auto")
    axis.set_facecolor("0.9")
    low, high = (np.nanmin(scores), np.nanmax(scores)) if np.isfinite(scores).any() else (0, 1)
    for (r, c), value in np.ndenumerate(scores):
        if np.isfinite(value):
            bright = (value - low) / max(high - low, 1e-12)
            dark_cell = bright > 0.5 if plot["better"] == "lower" else bright < 0.5
            axis.text(
                c, r, f"{value:.3g}", ha="center", va="center", fontsize=7, color="white" if dark_cell else "black"
            )
        elif status[r, c] == "diverged":
            axis.text(c, r, "×", ha="center", va="center", color=ORANGE, fontsize=12)
    marked = _best_of(plot, best)
    if marked is not None:
        at = [_hashable(marked["values"][plot["keys"].index(plot[k])]) for k in ("x", "y")]
        corner = (plot["xs"].index(at[0]) - 0.5, plot["ys"].index(at[1]) - 0.5)
        from matplotlib.patches import Rectangle

        axis.add_patch(Rectangle(corner, 1, 1, fill=False, ec=ORANGE, lw=2.5))
    axis.set_xticks(range(shape[1]), [_written(v) for v in plot["xs"]], rotation=45, ha="right")
    axis.set_yticks(range(shape[0]), [_written(v) for v in plot["ys"]])
    figure.colorbar(image, ax=axis, label=plot["metric"])


def _scatter(figure: Any, axis: Any, plot: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
    places = [plot["keys"].index(plot[k]) for k in ("x", "y")]

    def at(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        return [[p["values"][i] for p in points] for i in places]

    scored = [p for p in plot["points"] if p["score"] is not None]
    colours = "viridis_r" if plot["better"] == "lower" else "viridis"
    dots = axis.scatter(*at(scored), c=[p["score"] for p in scored], cmap=colours, s=40)
    lost = [p for p in plot["points"] if p["status"] == "diverged"]
    if lost:
        axis.plot(*at(lost), "x", color=ORANGE, label="diverged")
    marked = _best_of(plot, best)
    if marked is not None:
        axis.plot(*at([marked]), "o", ms=14, mfc="none", mec=ORANGE, mew=2, label=f"best: {marked['score']:.4g}")
    if plot["log"][0]:
        axis.set_xscale("log")
    if plot["log"][1]:
        axis.set_yscale("log")
    tidy(axis)
    axis.legend(frameon=False)
    figure.colorbar(dots, ax=axis, label=plot["metric"])
