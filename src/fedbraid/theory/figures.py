"""Figures of Charles and Konecny, "Convergence and Accuracy Trade-Offs ...", and of the command line.

Every function returns a new `matplotlib.figure.Figure` and does not use pyplot; `save` writes it. Colours are those of
Okabe and Ito, which colour-blind readers can distinguish. Line styles also differ, for print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.drawing import COLOURS, DASHES
from fedbraid.theory.bounds import Bound
from fedbraid.theory.frontier import (
    MOMENTA,
    Frontier,
    Momentum,
    Point,
    heavy_ball_delta,
    pareto_frontier,
    simulated_frontier,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FIGURES",
    "bound_figure",
    "figure_1",
    "figure_2",
    "figure_3",
    "figure_4",
    "figure_5",
    "figure_7",
    "figure_8",
    "figure_9",
    "figure_10",
    "fixed_point_figure",
    "frontier_figure",
    "panels",
    "rates_figure",
    "save",
]

NAMES = {"none": "no momentum", "nesterov": "Nesterov", "heavy_ball": "heavy ball"}


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure; the file extension chooses the format (png, pdf, svg).

    >>> import tempfile, pathlib
    >>> save(figure_3(), pathlib.Path(tempfile.mkdtemp()) / "figure3.png").name
    'figure3.png'
    """
    path = Path(path)
    if not path.suffix:
        raise ValueError(f"--out {str(path)!r} has no file extension; use .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"--out {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it first")
    supported = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in supported:
        raise ValueError(f"--out {str(path)!r}: {path.suffix} is not a supported format; use .png, .pdf or .svg")
    figure.savefig(path, dpi=160)
    return path


def frontier_figure(curves: Mapping[str, Frontier], *, title: str = "", mark: Point | None = None) -> Figure:
    """Frontiers in one panel; ``mark`` adds a dot per momentum at an operating point.

    >>> curves = {"FedAvg": pareto_frontier(mu=1.0, smoothness=10.0, gamma=0.01, values=[1, 10, 100])}
    >>> len(frontier_figure(curves).axes)
    1
    """
    figure, (ax,) = panels(1)
    _curves(ax, list(curves.values()), list(curves))
    if mark is not None:
        dots = [mark.rho[m] for m in MOMENTA]
        ax.plot(dots, [mark.delta] * 3, "o", color="black", ms=6, zorder=5, label="this point, by momentum")
    _frame(ax, title)
    return figure


def figure_1() -> Figure:
    """FedAvg's frontier, varying K (gamma = 0.01) and varying gamma (K = 100), for L = 5 and 50."""
    figure, axes = panels(2)
    for ax, over in zip(axes, ("steps", "gamma"), strict=True):
        curves = [
            pareto_frontier(mu=1.0, smoothness=L, over=over, gamma=0.01, steps=100, label=f"L = {L}") for L in (5, 50)
        ]
        _curves(ax, curves)
        _frame(ax, "varying K, $\\gamma$ = 0.01" if over == "steps" else "varying $\\gamma$, K = 100")
    return figure


def figure_2() -> Figure:
    """Server momentum on FedAvg's frontier, gamma = 1 / (2 L), L = 2, 10, 100; dots: the mirrored heavy-ball curve."""
    figure, axes = panels(3)
    for ax, L in zip(axes, (2, 10, 100), strict=True):
        for i, momentum in enumerate(MOMENTA):
            f = pareto_frontier(mu=1.0, smoothness=L, gamma=0.5 / L, momentum=momentum)
            _curve(ax, f, NAMES[momentum], i)
        rho = np.linspace(0.0, np.tanh(np.log(L) / 4), 15)
        ax.plot(heavy_ball_delta(rho, L), rho, "o", ms=4, mfc="none", color="black", label="heavy ball, mirrored (law)")
        ax.plot([0, 1], [0, 1], color="0.8", lw=0.8, zorder=0)
        _frame(ax, f"L = {L}")
    return _share_legend(figure)


def figure_3() -> Figure:
    """FedProx: its frontier is a part of FedAvg's, shorter for larger alpha (L = 10, gamma = 1 / (2 (L + alpha)))."""
    figure, (ax,) = panels(1)
    for i, alpha in enumerate((0.0, 0.5, 1.0, 5.0)):
        f = pareto_frontier(mu=1.0, smoothness=10.0, gamma=0.5 / (10.0 + alpha), alpha=alpha)
        _curve(ax, f, f"$\\alpha$ = {alpha:g}", i, width=8.0 - 2.2 * i, style="-")
    _frame(ax, "$\\Theta_{1:K}$, L = 10")
    return figure


def figure_4() -> Figure:
    """FedAvg (gamma = 0.001) against MAML-style messages (gamma = 1 / (2 L K)), by momentum, L = 10."""
    figure, axes = panels(3)
    for ax, momentum in zip(axes, MOMENTA, strict=True):
        fedavg = pareto_frontier(mu=1.0, smoothness=10.0, gamma=0.001, momentum=momentum)
        maml = pareto_frontier(
            mu=1.0, smoothness=10.0, family="last", gamma_of_steps=lambda k: 1 / (20 * k), momentum=momentum
        )
        _curve(ax, fedavg, "$\\Theta_{1:K}$ (FedAvg)", 0, width=4.5)
        _curve(ax, maml, "$\\Theta_K$ (MAML)", 1, style="-")
        _frame(ax, NAMES[momentum])
    return _share_legend(figure)


def figure_5() -> Figure:
    """Simulated MAML frontier beyond Lemma 4, d = 5 and 100, against FedAvg's (L = 10, gamma = 0.001)."""
    figure, (ax,) = panels(1)
    _simulated(ax, smoothness=10.0)
    _frame(ax, "L = 10, $\\gamma$ = 0.001")
    return _share_legend(figure)


def figure_7() -> Figure:
    """Simulated MAML frontiers for L = 2, 5, 10 and 100."""
    figure, axes = panels(4)
    for ax, L in zip(axes, (2, 5, 10, 100), strict=True):
        _simulated(ax, smoothness=float(L))
        _frame(ax, f"L = {L}")
    return _share_legend(figure)


def figure_8() -> Figure:
    """Simulated MAML frontiers by server momentum (L = 10)."""
    figure, axes = panels(3)
    for ax, momentum in zip(axes, MOMENTA, strict=True):
        _simulated(ax, smoothness=10.0, momentum=momentum)
        _frame(ax, NAMES[momentum])
    return _share_legend(figure)


def figure_9() -> Figure:
    """A proximal term with MAML-style messages inside Lemma 4 (gamma = 1e-7, K up to the lemma's limit)."""
    figure, (ax,) = panels(1)
    for i, alpha in enumerate((0.0, 0.5, 1.0, 5.0)):
        last = int((1e7 - alpha) / 10.0) - 1
        ks = np.unique(np.round(np.geomspace(1, min(last, 1_000_000), 200)).astype(int))
        f = pareto_frontier(mu=1.0, smoothness=10.0, family="last", gamma=1e-7, alpha=alpha, values=ks[ks <= last])
        _curve(ax, f, f"$\\alpha$ = {alpha:g}", i, width=8.0 - 2.2 * i, style="-")
    _frame(ax, "$\\Theta_K$, L = 10, $\\gamma = 10^{-7}$")
    return figure


def figure_10() -> Figure:
    """Simulated MAML frontiers for alpha = 0, 0.5, 1 and 10 (L = 10)."""
    figure, axes = panels(4)
    for ax, alpha in zip(axes, (0.0, 0.5, 1.0, 10.0), strict=True):
        _simulated(ax, smoothness=10.0, alpha=alpha)
        _frame(ax, f"$\\alpha$ = {alpha:g}")
    return _share_legend(figure)


FIGURES = {
    1: figure_1,
    2: figure_2,
    3: figure_3,
    4: figure_4,
    5: figure_5,
    7: figure_7,
    8: figure_8,
    9: figure_9,
    10: figure_10,
}


def fixed_point_figure(gaps: Mapping[str, tuple[np.ndarray, np.ndarray]], *, title: str = "") -> Figure:
    """``F(x_t) - F*`` against rounds, one line per method: (rounds, gaps).

    >>> len(fixed_point_figure({"FedSplit": (np.arange(3), np.array([1.0, 0.1, 0.01]))}).axes)
    1
    """
    figure, (ax,) = panels(1, width=6.0)
    for i, (name, (t, gap)) in enumerate(gaps.items()):
        ax.plot(t, np.maximum(gap, 1e-16), DASHES[i % len(DASHES)], color=COLOURS[i % len(COLOURS)], lw=2, label=name)
    ax.set(xlabel="round", ylabel="$F(x_t) - F^*$", yscale="log", title=title)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def bound_figure(bound: Bound) -> Figure:
    """The terms of a bound as bars, on a logarithmic axis if they differ by a factor above 100.

    >>> from fedbraid.theory import drift_bound
    >>> len(bound_figure(drift_bound(eta=0.1, tau=5, smoothness=1.0, zeta=1.0, sigma2=1.0)).axes)
    1
    """
    figure, (ax,) = panels(1, width=7.0, height=3.2)
    names, values = list(bound.terms), np.array(list(bound.terms.values()), float)
    bars = ax.barh(names, values, color=[COLOURS[i % len(COLOURS)] for i in range(len(names))])
    ax.bar_label(bars, [f"{v:.3g}" for v in values], padding=4, fontsize=9)
    positive = values[values > 0]
    if positive.size > 1 and positive.max() / positive.min() > 100:
        ax.set_xscale("log")
        ax.set_xlim(positive.min() / 10, positive.max() * 10)
    else:
        ax.set_xlim(0, max(float(values.max()), 1e-300) * 1.2)
    ax.invert_yaxis()
    state = "all assumptions checked" if bound.proven else "some assumptions not checked"
    ax.set_title(f"{bound.name}: {bound.value:.4g}\n{state}", fontsize=10)
    ax.grid(axis="x", alpha=0.3)
    return figure


def _simulated(ax: Axes, *, smoothness: float, alpha: float = 0.0, momentum: Momentum = "none") -> None:
    # Lemma 1 needs gamma < 1 / (L + alpha); all the figures' settings satisfy it with gamma = 0.001.
    _curve(
        ax,
        pareto_frontier(mu=1.0, smoothness=smoothness, gamma=0.001, alpha=alpha, momentum=momentum),
        "$\\Theta_{1:K}$ (FedAvg)",
        0,
        width=3.0,
    )
    for i, dim in enumerate((5, 100), start=1):
        f = simulated_frontier(mu=1.0, smoothness=smoothness, dim=dim, alpha=alpha, momentum=momentum)
        _curve(ax, f, f"$\\Theta_K$ (MAML), d = {dim}", i, width=1.0 if dim == 5 else 2.0)


def panels(count: int, *, width: float = 3.6, height: float = 3.6) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a row of axes; sizes are per panel, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = 4.6 if count == 1 and width == 3.6 else width
    figure = Figure(figsize=(width * count, height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _curves(ax: Axes, curves: Sequence[Frontier], labels: Sequence[str] | None = None) -> None:
    for i, (f, label) in enumerate(zip(curves, labels or [f.label for f in curves], strict=True)):
        _curve(ax, f, label, i)


def _curve(ax: Axes, f: Frontier, label: str, i: int, width: float = 2.0, style: str = "") -> None:
    ax.plot(f.rho, f.delta, style or DASHES[i % len(DASHES)], color=COLOURS[i % len(COLOURS)], lw=width, label=label)


def _share_legend(figure: Figure) -> Figure:
    """One legend above all panels, outside of the axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for ax in figure.axes:
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    return figure


def _frame(ax: Axes, title: str) -> None:
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="convergence rate $\\rho$", ylabel="suboptimality $\\Delta$")
    ax.set_title(title, fontsize=10)
    ax.set_aspect("equal")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7.5, loc="upper right")


def rates_figure(*, mu: float = 0.1, smoothness: float = 1.0, clients: int = 2, points: int = 13) -> Figure:
    """Four panels over the client's step size: FedAvg, FedProx, FedSplit, and the corrected methods."""
    from matplotlib.figure import Figure

    from fedbraid.theory.published_rates import compare
    from fedbraid.theory.worst_case import worst_case

    L = smoothness
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    common: dict[str, Any] = {"clients": clients, "smoothness": L}
    shown: list[tuple[str, str, str, tuple[float, float], dict[str, Any], str]] = [
        ("FedAvg, K = 2, two rounds, zeta = L", "fedavg", "mean gap", (0.02 / L, 0.25 / L),
         {"steps": 2, "rounds": 2, "zeta": L}, "mean gap of the loss, F - F*"),
        ("FedProx", "fedprox", "contraction", (0.1 / L, 100 / L), {"mu": mu}, "contraction a round"),
        ("FedSplit", "fedsplit", "contraction", (0.1 / L, 100 / L), {"mu": mu}, "contraction a round"),
    ]  # fmt: skip
    for axis, (title, method, measure, (low, high), setting, label) in zip(axes, shown, strict=False):
        grid = np.geomspace(low, high, points)
        rows = [compare(method, measure, client_lr=float(lr), **common, **setting) for lr in grid]
        axis.plot(grid, [row.exact for row in rows], color=COLOURS[0], marker="o", ms=4, label="exact worst case")
        axis.plot(grid, [row.published for row in rows], color=COLOURS[1], ls=DASHES[1], label=rows[0].theorem)
        _label_rates(axis, title, "prox step s" if method != "fedavg" else "client step size", label)
    axes[0].set(xscale="linear", yscale="log")
    _plain_ticks(axes[0])
    grid = np.geomspace(0.05 / L, 6.0 / L, 2 * points)
    for i, (method, steps) in enumerate([("mime", 1), ("mime", 2), ("mime", 3)]):
        values = [
            worst_case(
                method, client_lr=float(lr / steps), steps=steps, mu=mu, zeta=math.inf, measure="gap factor", **common
            ).certified
            for lr in grid
        ]
        axes[3].plot(grid, values, color=COLOURS[i], ls=DASHES[i], label=f"exact, K = {steps}")
    axes[3].plot([1 / (6 * L)], [1 - mu / (6 * L)], "x", color="black", ms=8, label="FedLin, Theorem 1")
    axes[3].set_ylim(0.2, 1.1)
    _label_rates(axes[3], "MimeSGD (SCAFFOLD's first round)", "client step size times K", "factor of F - F* in a round")
    figure.suptitle(f"Exact worst cases over all clients with mu = {mu:g}, L = {L:g} ({clients} clients)", fontsize=11)
    return figure


def _label_rates(axis: Axes, title: str, x: str, y: str) -> None:
    """Labels, and a legend of two rows between the title and the panel, where it hides no curve."""
    axis.set_xscale("log")
    axis.set_title(title, fontsize=10, pad=32)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    count = len(axis.get_legend_handles_labels()[0])
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axis.legend(fontsize=8, frameon=False, ncols=math.ceil(count / 2), labelspacing=0.3, **place)
    axis.grid(alpha=0.3)


def _plain_ticks(axis: Axes) -> None:
    """Label a logarithmic y axis with 0.5, 1, 2 and so on instead of powers of ten and their multiples."""
    low, high = axis.get_ylim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [unit * 10.0**k for k in decades for unit in (1, 2, 5) if low <= unit * 10.0**k <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
