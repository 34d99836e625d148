"""Figure 1: Mime against other methods, with and without momentum, with fixed and with locally updated state."""

from __future__ import annotations

import numpy as np

from fedbraid.data.catalog import load
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.mime._ablation import LAST, Arm, draw, femnist, final, rates_note, run_arm
from fedbraid.reproduce.training import best, rounds_to, spent

ROUNDS, BETA = 600, 0.9
HIGH, MIDDLE, LOW = (10**-0.5,), (10**-1.0,), (10**-1.5,)  # the best of these three over 100 rounds
ARMS = {
    "Mime": Arm("mime", {"base": "momentum", "beta": BETA}, MIDDLE),
    "MimeLite": Arm("mimelite", {"base": "momentum", "beta": BETA}, LOW),
    "FedAvg": Arm("fedavgm", {"momentum": BETA}, HIGH),
    "SCAFFOLD": Arm("scaffold", {"weighting": "examples"}, MIDDLE),
    "FedProx": Arm("fedprox", {"alpha": 0.1}, HIGH),
    "Loc-Mime": Arm("locmime", {"base": "momentum", "beta": BETA}, LOW),
    "FedAvg, no momentum": Arm("fedavg", {}, HIGH),
    "Mime, no momentum": Arm("mime", {"base": "sgd"}, MIDDLE),
}
PANELS = {
    "methods": ("Mime", "MimeLite", "FedAvg", "SCAFFOLD", "FedProx"),
    "momentum": ("Mime", "Mime, no momentum", "FedAvg", "FedAvg, no momentum"),
    "state": ("Mime", "Loc-Mime"),
}


def full(job: Job) -> Evidence:
    data = femnist(job)
    results = {name: run_arm(name, arm, data, job, rounds=ROUNDS) for name, arm in ARMS.items()}
    ours = final(results)
    target = ours["FedAvg"] / 100

    def rounds(name: str) -> float:
        return rounds_to(results[name], best(results[name], last=LAST)[0], target)

    gains = [ours[name] - ours[f"{name}, no momentum"] for name in ("Mime", "FedAvg")]
    findings = (
        Finding("Mime less MimeLite, accuracy in points", "nearly 0", ours["Mime"] - ours["MimeLite"], -2.0, 2.0),
        Finding("Mime is above FedAvg", "yes", ours["Mime"] > ours["FedAvg"]),
        Finding("MimeLite is above FedAvg", "yes", ours["MimeLite"] > ours["FedAvg"]),
        Finding("FedAvg is above SCAFFOLD", "yes", ours["FedAvg"] > ours["SCAFFOLD"]),
        Finding("SCAFFOLD is above FedProx", "yes", ours["SCAFFOLD"] > ours["FedProx"]),
        Finding("FedAvg's rounds over Mime's, to FedAvg's accuracy", "7", rounds("FedAvg") / rounds("Mime"), 3.5, 14),
        Finding("the same of MimeLite", "7", rounds("FedAvg") / rounds("MimeLite"), 3.5, 14),
        Finding("momentum helps Mime, accuracy in points", "large", gains[0], 0.0),
        Finding("momentum helps FedAvg", "slightly", gains[1], 0.0),
        Finding("momentum helps Mime more than FedAvg", "yes", gains[0] > gains[1]),
        Finding("a state that stays fixed (Mime) is above one updated locally", "yes", ours["Mime"] > ours["Loc-Mime"]),
    )
    return Evidence(findings, draw(results, PANELS), (rates_note(results), spent(results.values())))


def quick(job: Job) -> Evidence:
    data = load("digits", clients=8)
    settings = {"cohort": 4, "model": {"name": "mlp", "hidden": [8]}, "local": {"epochs": 2}}
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
    setting="FEMNIST, 300 writers with 41,495 training and 4,763 test images of 62 classes; MLP of 300 and 100 units; "
    f"10 clients per round, 10 local epochs, batches of 20, {ROUNDS} rounds, beta 0.9 for Mime, MimeLite, Loc-Mime (on "
    "the clients, two-phase) and FedAvg (on the server), none for SCAFFOLD and FedProx (mu 0.1), the paper's best. "
    "Client rates, each the best of three in a run of 100 rounds: 10^-0.5 (FedAvg, FedProx), 10^-1 (Mime, SCAFFOLD), "
    f"10^-1.5 (MimeLite, Loc-Mime); server rate 1. Accuracy is the mean over the last {LAST} rounds.",
    quick="with beta 0 Loc-Mime is Mime, number for number, and losses fall; a small MLP on digits",
    run=run,
    deviations=(
        "300 writers instead of 3,400, and 10 clients per round instead of 20: a writer takes part every 30 rounds "
        "(every 170 in the paper), so control variates are fresher.",
        f"{ROUNDS} rounds instead of 1,000.",
        "Client rates chosen by a run of 100 rounds among three a method (10^-0.5 to 10^-1.5; 10^-1 to 10^-2 with "
        "momentum on the clients, where a trial with 10^-0.5 and 1 failed to learn), and the paper's choices of beta "
        "and mu, instead of a search over all.",
        "The paper does not state the batch size of this figure; ours is twice that of its other experiments.",
    ),
    remarks=(
        "The order of the methods is that of the paper, with small differences: MimeLite and Mime end 1.3 to 1.6 "
        "points above FedAvg, FedAvg and SCAFFOLD do not differ significantly, and FedProx is last. This order appears "
        "late: Mime was 4 points below FedAvg after 30 rounds and half a point after 100, when SCAFFOLD was first and "
        "MimeLite last.",
        "No method is seven times faster. A writer takes part 20 times here, 6 times in the paper; perhaps drift costs "
        "FedAvg less on 300 writers than on 3,400. The paper does not say at which accuracy it measured its factor.",
        "The figure's statements on the parts of Mime hold: momentum helps, and the state should stay fixed. If it is "
        "updated locally, the accuracy changes by ten points between evaluations. Server momentum does not help FedAvg "
        "here.",
    ),
    needs=("femnist",),
    duration="about half an hour on two cores",
)  # fmt: skip
