"""Figures 6 and 11 for any task: server momentum and the proximal term, each at its best rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fedbraid.drawing import COLOURS, tidy
from fedbraid.reproduce.entry import Evidence, Finding, Job
from fedbraid.reproduce.localupdate._training import Task, chosen, run_grid
from fedbraid.reproduce.training import best, rounds_to, spent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = (0.1, 1.0)
SERVERS = {"none": "no momentum", "nesterov": "Nesterov", "heavy-ball": "heavy ball"}


def grids(job: Job, task: Task, **grid: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """The training runs, by the name of their file in the work folder: all momenta, and all alphas."""
    data = task.load(job)
    grid["task"] = task
    left = {kind: partial(run_grid, kind, data, job, server=kind, **grid) for kind in SERVERS}
    return left | {f"alpha-{a:g}": partial(run_grid, f"alpha-{a:g}", data, job, alpha=a, **grid) for a in ALPHAS}


def compare(job: Job, task: Task, *, last: int, **grid: Any) -> Evidence:
    """All momenta and all alphas over a grid of rates (see ``run_grid``), judged by accuracy over the last rounds."""
    return judge({name: train() for name, train in grids(job, task, **grid).items()}, last=last)


def judge(found: Mapping[str, Mapping[str, Any]], *, last: int) -> Evidence:
    """The findings from the results, by the names of ``grids``."""
    left = {label: found[kind] for kind, label in SERVERS.items()}
    right = {"alpha = 0": left["no momentum"]} | {f"alpha = {a:g}": found[f"alpha-{a:g}"] for a in ALPHAS}
    at = {name: best(result, last=last) for name, result in (left | right).items()}
    target = at["no momentum"][1]
    needed = {name: rounds_to(result, at[name][0], target) for name, result in left.items()}
    pull = [100 * at[name][1] for name in right]
    gain = {name: 100 * (at[name][1] - target) for name in list(SERVERS.values())[1:]}
    findings = [
        *(Finding(f"{name}: accuracy above no momentum, in points", "above 0", g, 0.0) for name, g in gain.items()),
        *(
            Finding(f"{name}: rounds to the accuracy of no momentum over its rounds", "below 1", share, 0.0, 0.95)
            for name, share in ((n, needed[n] / needed["no momentum"]) for n in gain)
        ),
        Finding("alpha: best less worst accuracy, in points", "little to no effect", max(pull) - min(pull), 0.0, 1.0),
    ]
    rates = "; ".join(f"{name}: {chosen((left | right)[name], i)}, {100 * a:.1f} %" for name, (i, a) in at.items())
    notes = (
        f"Best rates and accuracy over the last {last} rounds: {rates}.",
        spent([*left.values(), *list(right.values())[1:]]),
    )
    return Evidence(tuple(findings), draw(left, right, last), notes)


def draw(left: Mapping[str, Mapping[str, Any]], right: Mapping[str, Mapping[str, Any]], last: int) -> Figure:
    """Accuracy over rounds at tuned rates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 3.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, results, title in zip(axes, (left, right), ("server momentum", "proximal term"), strict=True):
        for i, (name, result) in enumerate(results.items()):
            curve = [100 * (v or 0.0) for v in result["test_accuracy"][best(result, last=last)[0]]]
            dashes = ("-", "--", ":")[i % 3]
            axis.plot(result["rounds"], curve, lw=1.8, label=name, color=COLOURS[i], ls=dashes)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("round")
        tidy(axis)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0].set_ylabel("test accuracy, %")
    return figure
