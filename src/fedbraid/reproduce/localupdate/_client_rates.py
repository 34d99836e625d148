"""Figures 12 and 13 for any task: training loss by client rate, at a fixed or at the best server rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.drawing import COLOURS
from fedbraid.reproduce.entry import Evidence, Finding, Job
from fedbraid.reproduce.localupdate._training import Task, run_grid
from fedbraid.reproduce.training import spent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIXED = 0.01  # Figure 12's server rate
GAMMAS = (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# deviations that several entries with the paper's networks share
IMAGES = (
    "300 writers instead of 3,400. Shakespeare has its own entry, and so has CIFAR-100, which runs where a user has "
    "TFF's files (--data cifar100=FOLDER)."
)
TEXT = (
    "The products with the recurrent weights take factors rounded to bfloat16 and sum in float32; other products are "
    "TF32 on a GPU. Padding is masked out of gradients and losses.",
    "The paper says only of FEMNIST and CIFAR-100 that smaller client rates end lower; it is not checked here.",
)


# --- Figure 12: one server rate --------------------------------------------------------------------------------------


def losses(result: Mapping[str, Any]) -> dict[float, np.ndarray]:
    """The loss on all training data after every evaluated round, by gamma, without diverged points."""
    return {
        point["algorithm.gamma"]: np.array(row, float)
        for point, row, diverged in zip(result["points"], result["test_loss"], result["diverged"], strict=True)
        if not diverged
    }


def learned(curves: Mapping[float, np.ndarray]) -> dict[float, np.ndarray]:
    """The curves that the figure shows: those that end below the first value of gamma = 0.

    If gamma = 0 diverged, the highest first value of the others takes its place.
    """
    start = curves[0.0][0] if 0.0 in curves else max((curve[0] for curve in curves.values()), default=0.0)
    return {gamma: curve for gamma, curve in curves.items() if curve[-1] < start}


def rounds_behind(curves: Mapping[float, np.ndarray], every: int) -> float:
    """Rounds after which gamma = 0 is still above gamma = 0.01; nan if one of them diverged."""
    if not {0.0, 1e-2} <= curves.keys():
        return math.nan
    return float(np.sum(curves[0.0] > curves[1e-2]) * every)


def compare_fixed(
    job: Job, task: Task, *, gammas: Sequence[float], rounds: int, every: int, small_wins: bool = True, **grid: Any
) -> Evidence:
    """All client rates at the one server rate, over the rest of a grid (see ``run_grid``).

    small_wins: whether the paper says for this task that smaller client rates end at a lower loss. For all tasks it
    says that the client rate changes the speed and the final loss.
    """
    data = task.load(job, on_train=True)
    fixed = {"gammas": gammas, "rates": (FIXED,), "rounds": rounds, "every": every}
    result = run_grid("gamma", data, job, task=task, **fixed, **grid)
    curves = losses(result)
    if not curves:
        raise ValueError(
            f"every gamma of {list(gammas)} diverged at the server rate {FIXED}: there is nothing to compare"
        )
    left_out = [gamma for gamma in gammas if gamma not in learned(curves)]
    shown = learned(curves) or curves
    first = min(shown, key=lambda gamma: shown[gamma][0])
    last = min(shown, key=lambda gamma: shown[gamma][-1])
    at_first, at_last = [[float(curve[look]) for curve in shown.values()] for look in (0, -1)]
    if small_wins:
        speed = Finding(
            "client rate with the lowest loss at the first evaluation is above that at the end", "yes", first > last
        )
        end = Finding(
            "loss at the end, highest gamma shown less the lowest of all", "above 0",
            float(shown[max(shown)][-1]) - min(at_last), 0.01,
        )  # fmt: skip
    else:
        speed = Finding(
            "loss at the first evaluation, highest less lowest",
            "gamma sets the speed",
            max(at_first) - min(at_first),
            0.01,
        )
        end = Finding("loss at the end, highest less lowest", "and the end", max(at_last) - min(at_last), 0.01)
    findings = (
        Finding("gamma = 10 diverges or learns nothing", "omitted as diverged", 10.0 in left_out),
        speed,
        Finding(
            "rounds after which gamma = 0 is still above gamma = 0.01", "gamma = 0 is slow",
            rounds_behind(curves, every), every,
        ),
        end,
    )  # fmt: skip
    ends = ", ".join(f"{gamma:g}: {curve[-1]:.4f}" for gamma, curve in shown.items())
    omitted = ", ".join(f"{gamma:g}" for gamma in left_out) or "none"
    notes = (
        f"Training loss after {rounds} rounds, by gamma: {ends}.",
        f"Left out, because the loss is no better than at the start: gamma {omitted}.",
        f"Lowest after {every} rounds: gamma = {first:g}; at the end: gamma = {last:g}.",
        spent([result]),
    )
    return Evidence(findings, draw(result["rounds"], shown), notes)


# --- Figure 13: the best server rate for each ------------------------------------------------------------------------


def tuned(result: Mapping[str, Any], last: int) -> dict[float, tuple[float, np.ndarray]]:
    """For every gamma the server rate with the lowest mean loss over the last rounds, and the curve at it."""
    late = np.array(result["rounds"]) > result["rounds"][-1] - last
    found: dict[float, tuple[float, np.ndarray]] = {}
    for point, row, diverged in zip(result["points"], result["test_loss"], result["diverged"], strict=True):
        gamma, eta, curve = point["algorithm.gamma"], point["algorithm.server_lr"], np.array(row, float)
        if not diverged and (gamma not in found or curve[late].mean() < found[gamma][1][late].mean()):
            found[gamma] = eta, curve
    return found


def run_tuned(
    job: Job, task: Task, *, rounds: int, every: int, last: int, late: int | None = None, **grid: Any
) -> dict[str, Any]:
    """All client rates and all server rates of a grid (see ``run_grid``), evaluated on the training data.

    last: number of last rounds; the mean loss over them chooses the server rate.
    late: evaluate every ``late``-th of these last rounds, in addition to every ``every``-th round.
    """
    data = task.load(job, on_train=True)
    marks = () if late is None else range(rounds - last + late, rounds, late)
    return run_grid("tuned", data, job, task=task, rounds=rounds, every=every, marks=marks, **grid)


def compare_tuned(
    job: Job, task: Task, *, rounds: int, every: int, last: int, small_wins: bool = True, **grid: Any
) -> Evidence:
    """All client rates, each at its best server rate, over the grid of ``run_tuned``; small_wins: as above."""
    result = run_tuned(job, task, rounds=rounds, every=every, last=last, **grid)
    return judge_tuned(result, every=every, last=last, small_wins=small_wins)


def judge_tuned(result: Mapping[str, Any], *, every: int, last: int, small_wins: bool = True) -> Evidence:
    """The findings from the result of ``run_tuned``."""
    rounds = result["rounds"][-1]
    best = tuned(result, last)
    start = {gamma: curve[0] for gamma, (_, curve) in best.items()}
    untuned = {
        point["algorithm.gamma"]: np.array(row, float)
        for point, row, diverged in zip(result["points"], result["test_loss"], result["diverged"], strict=True)
        if point["algorithm.server_lr"] == FIXED and not diverged
    }
    larger = min(start, key=lambda gamma: start[gamma])
    lowest = min(best, key=lambda gamma: best[gamma][1][-1])
    gains = [float(untuned[g][-1] - curve[-1]) for g, (_, curve) in best.items() if g in untuned]
    findings = [
        Finding("tuning eta helps every gamma: least gain over eta = 0.01 in loss at the end", "at least 0",
                min(gains), -0.02),
        Finding(f"client rate with the lowest loss after {every} rounds", "a larger one", larger, 1e-2, 1.0),
    ]  # fmt: skip
    if small_wins:
        what = f"a smaller gamma has the lowest loss at the end than after {every} rounds"
        findings.append(Finding(what, "yes", lowest < larger))
    ends = ", ".join(f"{g:g} (eta {eta:.3g}): {c[0]:.3f}, {c[-1]:.3f}" for g, (eta, c) in best.items())
    notes = (f"Training loss after {every} and {rounds} rounds, by gamma: {ends}.", spent([result]))
    return Evidence(tuple(findings), draw(result["rounds"], {g: curve for g, (_, curve) in best.items()}), notes)


# --- both ------------------------------------------------------------------------------------------------------------


def draw(rounds: list[int], curves: Mapping[float, np.ndarray]) -> Figure:
    """Loss over rounds, a line for each gamma."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 4.0), layout="constrained")
    axis = figure.add_subplot()
    for i, (gamma, curve) in enumerate(curves.items()):
        dashes = ("-", "--", "-.", ":")[i % 4]
        axis.plot(rounds, curve, lw=1.8, label=f"gamma = {gamma:g}", color=COLOURS[i], ls=dashes)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:.4g}")
    axis.yaxis.set_minor_formatter("{x:.4g}")
    axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.set_xlabel("round")
    axis.set_ylabel("loss of the server's model on all training data")
    axis.grid(alpha=0.25, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure
