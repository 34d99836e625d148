"""Figures of sweeps, comparisons and reports, as matplotlib draws them; the page of a report draws the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "COLOURS",
    "draw_clients",
    "draw_curves",
    "draw_drift",
    "draw_tuning",
    "save",
    "series",
    "tidy",
    "tuning_plot",
]

# Okabe and Ito's colours, told apart by colour-blind readers, without the yellow that vanishes on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
DASHES = ("-", "--", ":", "-.")
FEW = 14  # values of a key that still make rows or columns of a map


def style(i: int) -> dict[str, Any]:
    """Colour and dashes of series ``i``: colours first, then dashes."""
    return {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[(i // len(COLOURS)) % len(DASHES)]}


def save(figure: Any, path: Path, *, pdf: bool = False) -> list[Path]:
    """Write a figure as PNG and, if asked, as PDF beside it."""
    figure.savefig(path, dpi=130)
    paths = [path]
    if pdf:
        paths.append(path.with_suffix(".pdf"))
        figure.savefig(paths[-1], metadata={"CreationDate": None})  # the same figure, the same bytes
    return paths


def tidy(axis: Any) -> None:
    """A faint grid and no box."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


# --- tuning ----------------------------------------------------------------------------------------------------------


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _written(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _log(values: Sequence[Any]) -> bool:
    return _numeric(values) and min(values) > 0 and max(values) / min(values) >= 20


def tuning_plot(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """How the trials of one tuning are to be drawn: a line over one key, a map over two, or a scatter.

    Scores are means over seeds. A map over two of more keys shows the best over the others, as stability maps do.
    A cell without a score diverged (``status``) or was never tried.
    """
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
    distinct = {key: sorted({_hashable(p["values"][i]) for p in points}, key=_order) for i, key in enumerate(keys)}
    wide = sorted((k for k in keys if len(distinct[k]) > 1), key=lambda k: -len(distinct[k]))[:2] or list(keys[:1])
    shown = sorted(wide, key=list(keys).index)
    metric = rows[0]["metric"]
    lower = "loss" in metric or "error" in metric
    plot: dict[str, Any] = {"keys": list(keys), "metric": metric, "lower_is_better": lower, "points": points}
    if len(shown) == 1:
        x = shown[0]
        numeric = _numeric(distinct[x])
        return plot | {
            "kind": "line",
            "x": x,
            "y": None,
            "xs": distinct[x],
            "log": [_log(distinct[x])],
            "named": not numeric,
        }
    x, y = shown
    grid = max(len(distinct[x]), len(distinct[y])) <= FEW
    logs = [_log(distinct[x]), _log(distinct[y])]
    if not grid and _numeric(distinct[x]) and _numeric(distinct[y]):
        return plot | {"kind": "scatter", "x": x, "y": y, "log": logs}
    best: dict[tuple[Any, Any], dict[str, Any]] = {}
    for point in points:
        at = (_hashable(point["values"][list(keys).index(x)]), _hashable(point["values"][list(keys).index(y)]))
        if at not in best or _better(point, best[at], lower):
            best[at] = point
    cells = [
        {"x": distinct[x].index(a), "y": distinct[y].index(b), "score": p["score"], "status": p["status"]}
        for (a, b), p in best.items()
    ]
    return plot | {"kind": "map", "x": x, "y": y, "xs": distinct[x], "ys": distinct[y], "cells": cells, "log": logs}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if _numeric([value]) else (1, str(value))


def _better(a: Mapping[str, Any], b: Mapping[str, Any], lower: bool) -> bool:
    if a["score"] is None or b["score"] is None:
        return b["score"] is None and a["score"] is not None
    return a["score"] < b["score"] if lower else a["score"] > b["score"]


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
    for status, options in (("finished", {"mfc": COLOURS[0]}), ("stopped", {"mfc": "white"})):
        chosen = [(x, p) for x, p in zip(xs, scored, strict=True) if p["status"] == status]
        if chosen:
            axis.errorbar(
                [x for x, _ in chosen],
                [p["score"] for _, p in chosen],
                [p["spread"] for _, p in chosen],
                marker="o",
                ls="-" if status == "finished" else "",
                color=COLOURS[0],
                capsize=3,
                label=status if status != "finished" else None,
                **options,
            )
    lost = [place(_hashable(p["values"][where])) for p in plot["points"] if p["status"] == "diverged"]
    if lost:
        axis.plot(
            lost, [0.03] * len(lost), "x", color=COLOURS[1], transform=axis.get_xaxis_transform(), label="diverged"
        )
    marked = _best_of(plot, best)
    if marked is not None:
        at = place(_hashable(marked["values"][where]))
        axis.plot(
            at, marked["score"], "o", ms=14, mfc="none", mec=COLOURS[1], mew=2, label=f"best: {marked['score']:.4g}"
        )
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
    colours = "viridis_r" if plot["lower_is_better"] else "viridis"
    image = axis.imshow(np.ma.masked_invalid(scores), cmap=colours, origin="lower", aspect="auto")
    axis.set_facecolor("0.9")
    low, high = (np.nanmin(scores), np.nanmax(scores)) if np.isfinite(scores).any() else (0, 1)
    for (r, c), value in np.ndenumerate(scores):
        if np.isfinite(value):
            bright = (value - low) / max(high - low, 1e-12)
            dark_cell = bright > 0.5 if plot["lower_is_better"] else bright < 0.5
            axis.text(
                c, r, f"{value:.3g}", ha="center", va="center", fontsize=7, color="white" if dark_cell else "black"
            )
        elif status[r, c] == "diverged":
            axis.text(c, r, "×", ha="center", va="center", color=COLOURS[1], fontsize=12)
    marked = _best_of(plot, best)
    if marked is not None:
        at = [_hashable(marked["values"][plot["keys"].index(plot[k])]) for k in ("x", "y")]
        corner = (plot["xs"].index(at[0]) - 0.5, plot["ys"].index(at[1]) - 0.5)
        from matplotlib.patches import Rectangle

        axis.add_patch(Rectangle(corner, 1, 1, fill=False, ec=COLOURS[1], lw=2.5))
    axis.set_xticks(range(shape[1]), [_written(v) for v in plot["xs"]], rotation=45, ha="right")
    axis.set_yticks(range(shape[0]), [_written(v) for v in plot["ys"]])
    figure.colorbar(image, ax=axis, label=plot["metric"])


def _scatter(figure: Any, axis: Any, plot: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
    places = [plot["keys"].index(plot[k]) for k in ("x", "y")]

    def at(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        return [[p["values"][i] for p in points] for i in places]

    scored = [p for p in plot["points"] if p["score"] is not None]
    colours = "viridis_r" if plot["lower_is_better"] else "viridis"
    dots = axis.scatter(*at(scored), c=[p["score"] for p in scored], cmap=colours, s=40)
    lost = [p for p in plot["points"] if p["status"] == "diverged"]
    if lost:
        axis.plot(*at(lost), "x", color=COLOURS[1], label="diverged")
    marked = _best_of(plot, best)
    if marked is not None:
        axis.plot(*at([marked]), "o", ms=14, mfc="none", mec=COLOURS[1], mew=2, label=f"best: {marked['score']:.4g}")
    if plot["log"][0]:
        axis.set_xscale("log")
    if plot["log"][1]:
        axis.set_yscale("log")
    tidy(axis)
    axis.legend(frameon=False)
    figure.colorbar(dots, ax=axis, label=plot["metric"])


# --- runs ------------------------------------------------------------------------------------------------------------


def series(tables: Sequence[Mapping[str, np.ndarray]], metric: str, against: str) -> dict[str, Any]:
    """A metric of runs that differ in their seed alone: x, and over the runs its mean, least and largest value.

    ``against`` is "rounds", "bytes" (sent so far, both ways) or "seconds"; x is the mean over the runs, cut to the
    shortest. Rounds that were not evaluated are left out.
    """
    found = []
    for table in tables:
        seen = np.isfinite(table[metric])
        sent = {"rounds": "round", "seconds": "seconds"}.get(against)
        x = table["bytes_down"] + table["bytes_up"] if sent is None else table[sent]
        found.append((np.asarray(x, float)[seen], np.asarray(table[metric], float)[seen]))
    length = min(len(x) for x, _ in found)
    ys = np.array([y[:length] for _, y in found])
    x = np.mean([x[:length] for x, _ in found], axis=0)
    return {"x": x, "mean": ys.mean(0), "low": ys.min(0), "high": ys.max(0)}


def draw_curves(series: Sequence[Mapping[str, Any]], metric: str, against: str, title: str = "") -> Any:
    """A metric against rounds, bytes or seconds: a line for each series, its band the least and largest over seeds.

    Each series has ``label`` and, as arrays, ``x``, ``mean``, ``low`` and ``high``.
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
    axis.set_xlabel({"rounds": "round", "bytes": "bytes sent, both ways", "seconds": "seconds"}[against])
    if against == "bytes":
        axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.set_ylabel(metric)
    if "loss" in metric and lowest > 0:
        axis.set_yscale("log")
    tidy(axis)
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title or f"{metric} against {against}", x=0.01, ha="left", fontsize=11)
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
    log = min(peaks) > 0 and max(peaks) > 20 * min(peaks)  # methods tuned to different rates drift differently
    for i, one in enumerate(series):
        for t, row in enumerate(one["drift"]):
            steps, seen = t * (len(row) - 1) + np.arange(len(row)), np.array(row, float)
            if log:
                seen[seen <= 0] = np.nan
            axis.plot(steps, seen, lw=1.6, marker="o", ms=2.5, label=one["label"] if t == 0 else None, **style(i))
    axis.set_xlabel("local steps since the start; every round begins without drift")
    axis.set_ylabel("mean squared distance to the shadow")
    if log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    tidy(axis)
    axis.legend(frameon=False, fontsize=8)
    figure.suptitle("client drift", x=0.01, ha="left", fontsize=11)
    return figure
