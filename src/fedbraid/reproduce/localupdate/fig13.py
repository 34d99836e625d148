"""Figure 13: the client rate again, with the server rate tuned for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbraid.data.catalog import load
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._training import PAPER, femnist, run_grid
from fedbraid.reproduce.localupdate.fig12 import draw
from fedbraid.reproduce.training import spent

ROUNDS, STEPS, LAST = 200, 10, 100
GAMMAS = (0.0, 1e-2, 1e-1, 1.0)
RATES = tuple(10.0 ** (k / 2) for k in (0, -1, -2, -3, -4))


def tuned(result: Mapping[str, Any]) -> dict[float, tuple[float, np.ndarray]]:
    """For every gamma the server rate with the lowest mean loss over the last rounds, and the curve at it."""
    late = np.array(result["rounds"]) > result["rounds"][-1] - LAST
    found: dict[float, tuple[float, np.ndarray]] = {}
    for point, row, diverged in zip(result["points"], result["test_loss"], result["diverged"], strict=True):
        gamma, eta, curve = point["algorithm.gamma"], point["algorithm.server_lr"], np.array(row, float)
        if not diverged and (gamma not in found or curve[late].mean() < found[gamma][1][late].mean()):
            found[gamma] = eta, curve
    return found


def full(job: Job) -> Evidence:
    data = femnist(job, on_train=True)
    fixed = {"gammas": GAMMAS, "steps": STEPS, "rounds": ROUNDS, "every": 20}
    result = run_grid("tuned", data, job, rates=RATES, **fixed)
    best = tuned(result)
    start = {gamma: curve[0] for gamma, (_, curve) in best.items()}
    untuned = {
        point["algorithm.gamma"]: np.array(row, float)
        for point, row in zip(result["points"], result["test_loss"], strict=True)
        if point["algorithm.server_lr"] == 0.01
    }
    larger = min(start, key=lambda gamma: start[gamma])
    lowest = min(best, key=lambda gamma: best[gamma][1][-1])
    findings = (
        Finding("tuning eta helps every gamma: least gain over eta = 0.01 in loss at the end", "at least 0",
                float(min(untuned[g][-1] - curve[-1] for g, (_, curve) in best.items())), -0.02),
        Finding("client rate with the lowest loss after 20 rounds", "a larger one", larger, 1e-2, 1.0),
        Finding("a smaller gamma has the lowest loss at the end than after 20 rounds", "yes", lowest < larger),
    )  # fmt: skip
    ends = ", ".join(f"{g:g} (eta {eta:.3g}): {c[0]:.3f}, {c[-1]:.3f}" for g, (eta, c) in best.items())
    notes = (f"Training loss after 20 and {ROUNDS} rounds, by gamma: {ends}.", spent([result]))
    return Evidence(findings, draw(result["rounds"], {gamma: curve for gamma, (_, curve) in best.items()}), notes)


def quick(job: Job) -> Evidence:
    data = load("digits", clients=10)
    small = {"cohort": "all", "model": {"name": "softmax_regression"}, "every": 10, "rounds": 20, "steps": 5}
    result = run_grid("tuned", data, job, gammas=(0.0, 0.03), rates=(0.1, 0.01, 0.001), **small)
    best = tuned(result)
    losses = np.array(result["test_loss"])[:, -1].reshape(2, 3)
    excess = float(best[0.0][1][-1] - losses[0].min())
    findings = (
        Finding("server rate chosen for gamma = 0", "the lowest loss", best[0.0][0], 0.1, 0.1),
        Finding("loss at the chosen rate less the lowest of the grid", "0", excess, 0, 0),
        Finding("loss falls with the server rate", "yes", bool((np.diff(losses[0]) > 0).all())),
    )
    return Evidence(findings, draw(result["rounds"], {gamma: curve for gamma, (_, curve) in best.items()}))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Local update methods, Figure 13: training loss by client rate with tuned server rates",
    paper=f"{PAPER}, Figure 13",
    setting=f"As Figure 12 (FEMNIST, 300 writers, MLP of 100 units, Theta_{{1:{STEPS}}}), {ROUNDS} rounds, with the "
    "server rate of every gamma chosen from 1 to 10^-2 by half decades for the lowest mean loss over the last "
    f"{LAST} rounds.",
    quick="the lowest loss is chosen, and small server rates are slow; softmax regression on digits",
    run=run,
    deviations=(
        "FEMNIST alone, and an MLP on 300 writers instead of a convolutional network on 3,400.",
        f"{ROUNDS} rounds, gamma 0, 0.01, 0.1 and 1, and five server rates instead of nine.",
    ),
    remarks=(
        "With a tuned server rate gamma = 1 leads from the first look to the last: the start, in which larger client "
        "rates do better in the paper too, lasts all of our rounds. The best server rate grows with gamma: the "
        "gradients that a client sums shrink on its way.",
    ),
    needs=("femnist",),
    duration="about 2 minutes on two cores",
)  # fmt: skip
