"""Table 2, EMNIST with logistic regression: twelve methods at equal communication, on FEMNIST's writers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedbraid.data.catalog import load
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.mime._emnist import SHARE, THINNED, Column, column_arms, judge_column
from fedbraid.reproduce.mime._table2 import DEVIATIONS, draw, run_method

PAPER = {
    "FedAvgSGD": 66.8,
    "MimeLiteSGD": 66.8,
    "MimeSGD": 67.4,
    "FedAvgMom": 67.4,
    "MimeLiteMom": 67.4,
    "MimeMom": 67.5,
    "FedAvgAdam": 67.3,
    "MimeLiteAdam": 68.0,
    "MimeAdam": 68.0,
    "FedAvgAdagrad": 67.6,
    "MimeLiteAdagrad": 66.6,
    "MimeAdagrad": 67.4,
}
ROUNDS = 100


COLUMN = Column({"name": "softmax_regression"}, ROUNDS)


def arms(job: Job) -> dict[str, Callable[[], dict[str, Any]]]:
    return column_arms(job, COLUMN)


def judge(found: Mapping[str, Mapping[str, Any]]) -> Evidence:
    return judge_column(found, PAPER, title=f"FEMNIST (300 writers), logistic regression, {ROUNDS} rounds")


def full(job: Job) -> Evidence:
    return judge({name: train() for name, train in arms(job).items()})


def quick(job: Job) -> Evidence:
    data, model = load("digits", clients=24), {"name": "softmax_regression"}
    once = {"model": model, "rounds": 1, "every": 1, "rates": (0.1, 0.03), "work": job.work, "tell": job.tell}
    # the first step of AdaGrad from 0.1 divides by sqrt(0.1): a server rate of 1 / sqrt(0.1) does the same
    ada = run_method("FedAvgAdagrad", data, **once)
    avg = run_method("FedAvgSGD", data, overrides={"server_lr": 1 / math.sqrt(0.1)}, **once)
    adam = run_method("MimeAdam", data, **{**once, "rounds": 20, "every": 20, "rates": (0.01, 0.001)})
    apart = float(np.abs(np.array(ada["test_loss"]) / np.array(avg["test_loss"]) - 1).max())
    findings = (
        Finding(
            "first round of FedAvgAdagrad against FedAvg at rate 1/sqrt(0.1), test losses",
            "0",
            apart,
            0.0,
            1e-5,
            kind="own",
        ),
        Finding("MimeAdam, eps 1e-7: no point diverges", "stable", not any(adam["diverged"])),
        Finding(
            "MimeAdam: accuracy in % after 20 rounds", "learns", 100 * adam["test_accuracy"][0][-1], 50, 100, kind="own"
        ),
        Finding("MimeAdam: models sent per round", "35", round(adam["models"], 1), 35, 35),
    )
    figure = draw({"FedAvgAdagrad": ada, "FedAvgSGD": avg, "MimeAdam": adam}, {}, 20, margin=0, title="digits")
    return Evidence(findings, figure)


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Mime, Table 2, EMNIST logistic: accuracy of twelve methods at equal communication",
    paper="Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, Table 2",
    setting="FEMNIST, 300 writers with 41,495 training and 4,763 test images of 62 classes, pixels inverted; softmax "
    f"regression. {ROUNDS} rounds of one local epoch, batches of 10; otherwise as for Shakespeare: 40 models sent a "
    f"round, nine client rates from 1 to 1e-4, server rate 1, the same base optimizers. Second reading, with its own "
    f"rows: {THINNED}. 70% of the images of these writers are digits; in the paper's data {100 * SHARE:.0f}% are. "
    "Third: FedAvgAdam with epsilon 1e-1 to 1e-5, at nine client rates each, on the thinned digits.",
    quick="the first round of FedAvg under AdaGrad is FedAvg's at another server rate; Mime over Adam with eps 1e-7 "
    "learns; softmax regression on digits",
    run=run,
    deviations=(
        f"300 writers instead of 3,400. {ROUNDS} rounds instead of 1,000 with all images: with 20 clients per round a "
        "writer then takes part about 7 times, 6 in the paper; 67 times in 1,000 rounds. Hence a band of 3 points.",
        *DEVIATIONS,
    ),
    remarks=(
        "No reading gives the paper's numbers; they lie between two of ours. With all images and 100 rounds most "
        "methods are 2 to 3 points above them, because 70% of these images are digits, which are easier. With the "
        "digits thinned to the paper's share and 1,000 rounds all but FedAvgAdam are 2.7 to 3.8 points below (6 to 8 "
        "after 100 rounds), with a tenth of the paper's writers. So rows within the band with all images owe it "
        "partly to the digits.",
        "With thinned digits MimeAdam and MimeLiteAdam are the best two, as in the paper; with all images MimeAdam is "
        "first by 0.1 points and MimeLiteAdam is not second. All but FedAvgAdam are within 1.4 points, as in the "
        "paper.",
        "FedAvgAdam depends on epsilon. With C.4's 1e-7 it has 53.0 with thinned digits, 10 to 12 points below the "
        "others, where the paper has 67.3, as good as the others. With epsilon 1e-1 to 1e-4, each at its best client "
        "rate, it has 64.1, 64.0, 64.0 and 63.8, as good as FedAvg with SGD (63.9); with 1e-5 57.7. The best client "
        "rate is equal to epsilon, up to 1e-4, where the grid of rates ends. So Section 5.3's reading gives the "
        "paper's picture, and C.4's does not. In points it misses the band by 0.2, as most rows with thinned digits "
        "do.",
        "SGD and FedAvg with momentum are best at rate 1, the edge of the paper's grid.",
    ),
    needs=("femnist",),
    duration="about six minutes on one H200 shared with four other entries",
)  # fmt: skip
