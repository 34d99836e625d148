"""Figure 12 on CIFAR-100: training loss by client rate at a fixed server rate. It needs TFF's files."""

from __future__ import annotations

import numpy as np

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._cifar100 import CIFAR, DEVIATIONS, FILES, SMALL, colours
from fedbraid.reproduce.localupdate._client_rates import FIXED, GAMMAS, compare_fixed, draw, losses
from fedbraid.reproduce.localupdate._training import PAPER, run_grid

ROUNDS, STEPS, EVERY = 1500, 10, 50


def full(job: Job) -> Evidence:
    return compare_fixed(job, CIFAR, gammas=GAMMAS, steps=STEPS, rounds=ROUNDS, every=EVERY, piece=100)


def quick(job: Job) -> Evidence:
    small = {"task": SMALL, "gammas": (0.0, 1e-5, 0.1), "rates": (FIXED,), "steps": 2, "rounds": 4, "every": 2}
    result = run_grid("gamma", colours(), job, cohort="all", **small)
    curves = losses(result)
    near, far = (float(np.abs(curves[gamma] / curves[0.0] - 1).max()) for gamma in (1e-5, 0.1))
    findings = (
        Finding("gamma to 0 is gamma = 0: relative difference of losses at 1e-5", "0", near, 0.0, 1e-3, kind="own"),
        Finding("and at 0.1, over that", "above 1", far / max(near, 1e-7), 10.0, kind="own"),
    )
    return Evidence(findings, draw(result["rounds"], curves))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Local update methods, Figure 12, CIFAR-100: training loss by client rate at a fixed server rate",
    paper=f"{PAPER}, Figure 12",
    setting=f"{CIFAR.words}; "
    f"Theta_{{1:{STEPS}}} with server rate {FIXED}, no momentum, alpha 0, {ROUNDS} rounds. gamma 0, 0.001, 0.01, 0.1, "
    f"1 and 10. The loss is that of the server's model on all 50,000 training images, every {EVERY} rounds.",
    quick="small client rates are near gamma = 0; a small MLP on generated images",
    run=run,
    deviations=DEVIATIONS,
    remarks=(FILES,),
    needs=("cifar100",),
    duration="not run yet: TFF's files are needed",
)
