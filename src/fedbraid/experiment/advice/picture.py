"""A pilot as a picture: the curves of the best settings, and the regret over the client rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbraid.drawing import GREY, log_scale, style, tidy
from fedbraid.experiment.advice.candidates import Setting
from fedbraid.experiment.advice.pilot import Found
from fedbraid.experiment.advice.race import Race, best_of_each

__all__ = ["draw_advice"]

CURVES = 6
HIGHEST = 8.0  # regrets above are drawn at the upper edge, as times the rounds


def draw_advice(race: Race, found: Found, summary: Mapping[str, Any]) -> Any:
    """Left: the best setting of each method over the rounds. Right: how the rounds depend on the client rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(one.method for one in found.tried))
    looks = {name: style(i) for i, name in enumerate(names)}
    _curves(left, race, found, looks)
    _rates(right, race, found, looks)
    words = summary["problem"] or f"advised: {found.best}"
    if summary["runners_up"]:
        count = len(summary["runners_up"])
        others = "1 other setting is" if count == 1 else f"{count} other settings are"
        words += f"; {others} as good within the noise of the seeds"
    figure.suptitle(words if len(words) < 130 else f"{words[:127]}...", x=0.01, ha="left", fontsize=11)
    return figure


def _curves(axis: Any, race: Race, found: Found, looks: Mapping[str, Any]) -> None:
    axis.set(xlabel="round", ylabel=race.metric.name, title="the settings that ran longest, best of each method")
    tidy(axis)
    if found.ranking is None:
        axis.text(0.5, 0.5, "every setting diverged", ha="center", transform=axis.transAxes)
        return
    shown: list[Any] = best_of_each(found.ranking.order)[:CURVES]
    if found.best is not None and found.best not in shown:
        shown = [found.best, *shown]
    sign = race.metric.sign
    for one in shown:
        curve = race.curves(one, race.longest(one))
        wide = {"lw": 2.5} if one == found.best else {"lw": 1.2}
        axis.plot(curve.rounds, sign * curve.values.mean(0), label=str(one), **looks[one.method], **wide)
        low, high = sign * curve.values.min(0), sign * curve.values.max(0)
        axis.fill_between(curve.rounds, low, high, color=looks[one.method]["color"], alpha=0.12, lw=0)
    own = found.configured
    if own not in shown and own in found.ranking.order:
        curve = race.curves(own, race.longest(own))
        axis.plot(curve.rounds, sign * curve.values.mean(0), color=GREY, ls=":", label=f"as configured: {own}")
    drawn = np.concatenate([race.curves(one, race.longest(one)).values.ravel() for one in shown]) * sign
    if race.metric.lower_is_better and drawn.min() > 0 and drawn.max() / drawn.min() > 3:
        log_scale(axis)
    axis.set_ylim(*_limits(drawn, race.start * sign))
    axis.legend(frameon=False, fontsize=7.5)


def _limits(values: np.ndarray, start: float) -> tuple[float, float]:
    """From the best to the initial value, so that a curve that begins with a peak does not hide the others."""
    low, high = float(values.min()), float(values.max())
    if start > low:
        high = min(high, start * 1.05) if start > 0 else high
    space = 0.04 * (high - low) or 1.0
    return (low * 0.9 if low > 0 else low - space), high + space


def _rates(axis: Any, race: Race, found: Found, looks: Mapping[str, Any]) -> None:
    """For each horizon a setting has run to, only the longest is drawn; larger dots ran longer.

    A method without a client rate is a horizontal line. Dots of different methods at one rate are shifted sideways, so
    that they do not hide each other.
    """
    axis.set(
        xlabel="client rate (methods are shifted a little)",
        ylabel="rounds, as a multiple of the best",
        title="every setting that was tried",
    )
    tidy(axis)
    drawn: set[Setting] = set()
    shift = {name: 10 ** (0.03 * (i - (len(looks) - 1) / 2)) for i, name in enumerate(looks)}
    lines: set[str] = set()
    dots: set[str] = set()
    diverged = False
    for size, horizon in zip((70, 40, 24, 12), reversed(race.horizons), strict=False):
        field = [one for one in found.tried if race.rows_of(one, horizon)]
        ranking = race.ranking(field, horizon)
        for one in field:
            if one in drawn:
                continue
            drawn.add(one)
            alive = ranking is not None and one in ranking.regret
            best = 0.0 if ranking is None else ranking.regret[ranking.order[0]]
            times = math.exp(ranking.regret[one] - best) if alive and ranking is not None else math.inf
            look = looks[one.method]
            if not one.rates:
                lines.add(one.method)
                width = 2.5 if one == found.best else 1.2
                axis.axhline(min(times, HIGHEST), color=look["color"], ls="--" if alive else ":", lw=width, zorder=1)
                continue
            dots |= {one.method} if alive else set()
            diverged = diverged or not alive
            edge = {"edgecolors": "black", "linewidths": 1.5} if one == found.best else {}
            place = one.rates[0][1] * shift[one.method], min(times, HIGHEST)
            axis.scatter(*place, s=size, marker="o" if alive else "x", color=look["color"], **edge)
    _explain(axis, race, found, looks, lines, dots, diverged)


def _explain(
    axis: Any, race: Race, found: Found, looks: Mapping[str, Any], lines: set[str], dots: set[str], diverged: bool
) -> None:
    """The axes and the legend of the client rates: only what is drawn has an entry."""
    for name, look in looks.items():
        if name in dots:
            axis.scatter([], [], color=look["color"], label=name)
        if name in lines:
            axis.plot([], [], color=look["color"], ls="--", label=f"{name}\n(has no client rate)")
    if found.best is not None and found.best.rates:
        axis.scatter([], [], s=70, facecolors="none", edgecolors="black", linewidths=1.5, label="advised")
    if diverged:
        axis.scatter([], [], color=GREY, marker="x", label="diverged")
    axis.set(xscale="log", yscale="log", ylim=(0.93, HIGHEST * 1.1))
    axis.set_yticks([1, 1.5, 2, 3, 5, HIGHEST], ["1", "1.5", "2", "3", "5", f"{HIGHEST:g} or more"])
    axis.minorticks_off()
    lasts = ", ".join(map(str, race.horizons))
    axis.legend(
        frameon=False,
        fontsize=7.5,
        title=f"larger dots ran\nlonger: {lasts}\nrounds",
        title_fontsize=7.5,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
