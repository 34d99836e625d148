"""Figure 1: Mime against other methods, with and without momentum, with fixed and with locally updated state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from fedbraid.data.catalog import load
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.mime._ablation import LAST, Arm, among, draw, femnist, final, rates_note, run_arm, search
from fedbraid.reproduce.training import best, rounds_to, spent

ROUNDS, FIRST, KEEP = 1000, 100, 3
RATES = tuple(10.0 ** (-k / 2) for k in range(9))  # 1 to 1e-4
BETA, BETAS = 0.9, (0.0, 0.9, 0.99)
TARGETS = (0.7, 0.75, 0.8, 0.82)
ARMS = {
    "Mime": Arm("mime", {"base": "momentum", "beta": BETA}, RATES, "beta", BETAS),
    "MimeLite": Arm("mimelite", {"base": "momentum", "beta": BETA}, RATES, "beta", BETAS),
    "FedAvg": Arm("fedavgm", {"momentum": BETA, "kind": "average"}, RATES, "momentum", BETAS),
    "SCAFFOLD": Arm("scaffold", {"weighting": "examples"}, RATES),
    "FedProx": Arm("fedprox", {"alpha": 0.1}, RATES),
    "Loc-Mime": Arm("locmime", {"base": "momentum", "beta": BETA}, RATES),
}
PANELS = {
    "methods": ("Mime", "MimeLite", "FedAvg", "SCAFFOLD", "FedProx"),
    "momentum": ("Mime", "Mime, no momentum", "FedAvg", "FedAvg, no momentum"),
    "state": ("Mime", "Loc-Mime"),
}


def arms(job: Job) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every training run of the full form, by the name of its file in the work folder."""
    data = femnist(job)
    grid = {"rounds": ROUNDS, "first": FIRST, "keep": KEEP}
    return {name: partial(search, name, arm, data, job, **grid) for name, arm in ARMS.items()}


def full(job: Job) -> Evidence:
    return judge({name: train() for name, train in arms(job).items()})


def judge(found: Mapping[str, Mapping[str, Any]]) -> Evidence:
    """The findings from the results, by the names of ``arms``; statements on methods without a result are left out."""
    results = dict(found)
    for name in ("Mime", "FedAvg"):
        if name in found:
            results[f"{name}, no momentum"] = among(found[name], **{ARMS[name].option: 0.0})
    ours = final(results)
    findings = [*_order(ours), *_speed(found, ours.get("FedAvg", math.nan) / 100), *_parts(found, ours)]
    panels = {title: [name for name in names if name in results] for title, names in PANELS.items()}
    panels = {title: names for title, names in panels.items() if len(names) > 1}  # one curve is no comparison
    missing = ", ".join(name for name in ARMS if name not in found)
    told = (rates_note(results), *_times(found), spent(found.values()))
    told += (f"Not run here: {missing}.",) if missing else ()
    return Evidence(tuple(findings), draw(results, panels), told)


def _order(ours: Mapping[str, float]) -> list[Finding]:
    """Mime and MimeLite, then FedAvg, SCAFFOLD, FedProx."""
    findings = []
    if {"Mime", "MimeLite"} <= ours.keys():
        apart = ours["Mime"] - ours["MimeLite"]
        findings.append(Finding("Mime less MimeLite, accuracy in points", "nearly 0", apart, -2.0, 2.0))
    order = (("Mime", "FedAvg"), ("MimeLite", "FedAvg"), ("FedAvg", "SCAFFOLD"), ("SCAFFOLD", "FedProx"))
    findings += [
        Finding(f"{one} is above {other}", "yes", ours[one] > ours[other])
        for one, other in order
        if {one, other} <= ours.keys()
    ]
    return findings


def _speed(found: Mapping[str, Mapping[str, Any]], last: float) -> list[Finding]:
    """FedAvg's rounds over those of Mime and MimeLite, to FedAvg's final accuracy, and to fixed ones."""
    if "FedAvg" not in found:
        return []
    findings = []
    for name in ("Mime", "MimeLite"):
        if name in found:
            rounds = [rounds_to(found[n], best(found[n], last=LAST)[0], last) for n in ("FedAvg", name)]
            what = f"FedAvg's rounds over {name}'s, to FedAvg's final accuracy, each at its best rate and beta"
            findings.append(Finding(what, "7", rounds[0] / rounds[1], 3.5, 14))
            for target in TARGETS:
                what = f"FedAvg's rounds over {name}'s, to {100 * target:.0f}%, each at the fastest rate and beta"
                findings.append(Finding(what, "7", _soonest(found["FedAvg"], target) / _soonest(found[name], target),
                                        3.5, 14))  # fmt: skip
    return findings


def _soonest(result: Mapping[str, Any], target: float) -> float:
    return min(rounds_to(result, i, target) for i in range(len(result["points"])))


def _parts(found: Mapping[str, Mapping[str, Any]], ours: Mapping[str, float]) -> list[Finding]:
    """What momentum adds, which beta is best, and whether the state should stay fixed."""
    findings, gains = [], {}
    for name, paper in (("Mime", "large"), ("FedAvg", "slightly")):
        if name in found:
            with_it = [100 * best(among(found[name], **{ARMS[name].option: b}), last=LAST)[1] for b in BETAS[1:]]
            gains[name] = float(np.nanmax(with_it)) - ours[f"{name}, no momentum"]
            findings.append(Finding(f"momentum helps {name}, accuracy in points", paper, gains[name], 0.0))
    if len(gains) == 2:
        findings.append(Finding("momentum helps Mime more than FedAvg", "yes", gains["Mime"] > gains["FedAvg"]))
    for name in ("Mime", "MimeLite", "FedAvg"):
        if name in found:
            beta = found[name]["points"][best(found[name], last=LAST)[0]][f"algorithm.{ARMS[name].option}"]
            findings.append(Finding(f"best beta of {name}", "0.9", beta, BETA, BETA))
    if {"Mime", "Loc-Mime"} <= ours.keys():
        above = ours["Mime"] > ours["Loc-Mime"]
        findings.append(Finding("a state that stays fixed (Mime) is above one updated locally", "yes", above))
    return findings


def _times(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    rows = []
    for name, result in found.items():
        times = ", ".join(f"{_soonest(result, target):.0f}" for target in TARGETS)
        rows.append(f"{name} {times}")
    targets = ", ".join(f"{100 * target:.0f}" for target in TARGETS)
    return (f"Rounds to {targets} %, each at the fastest of its points: {'; '.join(rows)}.",)


def quick(job: Job) -> Evidence:
    data = load("digits", clients=8)
    settings: dict[str, Any] = {
        "cohort": 4,
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"epochs": 2, "batch_size": 20},
    }
    settings["evaluation"] = {"every": 2}
    rates = (0.1, 0.03)
    arms = {
        "Mime": Arm("mime", {"base": "momentum", "beta": 0.0}, rates),
        "Loc-Mime": Arm("locmime", {"base": "momentum", "beta": 0.0}, rates),
    }
    results = {name: run_arm(name, arm, data, job, rounds=6, **settings) for name, arm in arms.items()}
    one, other = (np.array(result["test_loss"]) for result in results.values())
    findings = (
        Finding(
            "without memory (beta 0) Loc-Mime is Mime: largest difference of test losses", "0",
            float(np.abs(one - other).max()), 0.0, 1e-6, kind="own",
        ),
        Finding("test loss at the end over that after two rounds", "below 1", float(one[1, -1] / one[1, 0]), 0.0, 0.95,
                kind="own"),
    )  # fmt: skip
    return Evidence(findings, draw(results, {"digits": tuple(results)}), (rates_note(results),))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Mime, Figure 1: methods, momentum and locally updated state on an MLP with ten local epochs",
    paper="Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, Figure 1",
    setting="FEMNIST, 300 writers with 41,495 training and 4,763 test images of 62 classes; MLP of 300 and 100 "
    f"units; 20 clients per round, 10 local epochs, batches of 10, {ROUNDS:,} rounds, server rate 1. Momentum on the "
    "clients for Mime, MimeLite and Loc-Mime (two-phase), on the server for FedAvg, as Table 5's average; none for "
    "SCAFFOLD and FedProx (mu 0.1), the paper's best. beta 0, 0.9 and 0.99 (Loc-Mime: 0.9) and nine client rates, 1 "
    f"to 1e-4 by half decades, for {FIRST} rounds; for every beta the best {KEEP} rates run for all {ROUNDS:,}. "
    f"Accuracy is the mean over the last {LAST} rounds. For this page FedAvg and Mime were run; rows on other methods "
    "are of an earlier run with 10 clients per round, batches of 20, 600 rounds, beta 0.9 and the best of three "
    "client rates.",
    quick="with beta 0 Loc-Mime is Mime, number for number, and losses fall; a small MLP on digits",
    run=run,
    deviations=(
        "300 writers instead of 3,400: a writer takes part every 15 rounds (every 170 in the paper), so control "
        "variates are fresher.",
        f"Of nine client rates the best {KEEP} after {FIRST} rounds are run for {ROUNDS:,}.",
        "The paper does not state the batch size of this figure; ours is that of its other experiments. It does not "
        "say at which accuracy its factor of 7 was measured: several are shown.",
    ),
    remarks=(
        "With the paper's cohort, rounds and grid Mime is not seven times as fast as FedAvg at any of the accuracies "
        "shown: FedAvg's rounds over Mime's are 0.5 to 70%, 0.8 to 75%, 1.1 to 80% and 1.7 to 82%, each at its "
        "fastest rate and beta, and 1.5 to FedAvg's final accuracy. Mime is slower at first and ahead later; it ends "
        "at 84.4%, FedAvg at 83.2%. An earlier run with 10 clients, batches of 20 and 600 rounds gave 1.34, so cohort "
        "and batch size are not the cause. A known difference is left: 300 writers instead of 3,400. A writer takes "
        "part 67 times here, 6 times in the paper, and perhaps drift costs FedAvg less here. The paper does not say "
        "at which accuracy it measured its factor.",
        "beta 0.9 is the best for Mime, as in the paper, and worth 1.3 points. Server momentum does not help FedAvg "
        "here: its best has none, 0.6 points above that with 0.9.",
        "FedAvg at rate 10^-0.5 collapses to 8% before the end, with and without momentum.",
        "MimeLite, SCAFFOLD, FedProx and Loc-Mime were not run in this setting. The rows on them are of the earlier "
        "run, and say so: there MimeLite and Mime ended 1.3 to 1.6 points above FedAvg, FedAvg and SCAFFOLD did not "
        "differ significantly, FedProx was last, and Loc-Mime, whose state is updated locally, changed by ten points "
        "between evaluations.",
    ),
    needs=("femnist",),
    duration="about ten minutes on one H200",
)  # fmt: skip
