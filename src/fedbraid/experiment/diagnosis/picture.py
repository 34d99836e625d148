"""A diagnosis as a picture of three panels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedbraid.drawing import log_scale
from fedbraid.experiment.diagnosis.measurement import Diagnosis
from fedbraid.theory.figures import COLOURS, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["diagnosis_figure"]

SHOWN = {
    "L_i max": "L_client_max",
    "L": "L",
    "delta": "delta",
    "zeta": "zeta",
    "$G^2$": "G2",
    "$\\sigma^2$": "sigma2",
}


def diagnosis_figure(diagnosis: Diagnosis) -> Figure:
    """Constants along the run, the errors of a round, and the rounds tried."""
    figure, (left, middle, right) = panels(3, width=4.4)
    _draw_constants(left, diagnosis)
    _draw_terms(middle, diagnosis)
    _draw_probes(right, diagnosis)
    return figure


def _draw_constants(ax: Axes, diagnosis: Diagnosis) -> None:
    for i, (label, name) in enumerate(SHOWN.items()):
        values = [getattr(p, name) for p in diagnosis.points]
        ax.errorbar(
            diagnosis.rounds,
            [v.value for v in values],
            yerr=[0.0 if math.isnan(v.stderr) else v.stderr for v in values],
            marker="o",
            capsize=3,
            color=COLOURS[i % len(COLOURS)],
            label=label,
        )
    ax.set(xlabel="round", xticks=diagnosis.rounds, title="constants along the run")
    log_scale(ax)
    ax.legend(fontsize=8, ncols=2)
    ax.grid(alpha=0.3)


def _draw_terms(ax: Axes, diagnosis: Diagnosis) -> None:
    terms = {**diagnosis.advice.terms, "$|\\nabla f|^2$": diagnosis.points[-1].grad_norm2.value}
    bars = ax.bar(list(terms), list(terms.values()), color=[*COLOURS[:3], "0.7"])
    ax.bar_label(bars, [f"{v:.2g}" for v in terms.values()], fontsize=9, padding=2)
    ax.set(title="error of a round's mean direction", ylabel="squared norm")
    ax.tick_params(axis="x", labelsize=8)
    ax.margins(y=0.12)


def _draw_probes(ax: Axes, diagnosis: Diagnosis) -> None:
    ax.set_title("one round, by number of local steps")
    if not diagnosis.probes:
        ax.set_axis_off()
        return
    steps = [p.steps for p in diagnosis.probes]
    for i, s in enumerate(diagnosis.probes[0].fell):
        ax.plot(steps, [p.fell[s] for p in diagnosis.probes], "o-", color=COLOURS[i], label=f"server step {s:g}")
    ax.set(xscale="log", xlabel="local steps", ylabel="decrease of the mean loss in one round")
    ax.set_xticks(steps, [str(k) for k in steps], minor=False)
    ax.minorticks_off()
    ax.axhline(0.0, color="0.6", lw=0.8)
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
