"""Figure 12 on Shakespeare with the paper's network: training loss by client rate at a fixed server rate."""

from __future__ import annotations

import numpy as np

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._client_rates import FIXED, GAMMAS, TEXT, compare_fixed, draw, losses
from fedbraid.reproduce.localupdate._generated import small_lstm, verses
from fedbraid.reproduce.localupdate._training import LSTM, PAPER, run_grid

ROUNDS, STEPS, EVERY = 600, 10, 25


def full(job: Job) -> Evidence:
    grid = {"gammas": GAMMAS, "steps": STEPS, "rounds": ROUNDS, "every": EVERY}
    return compare_fixed(job, LSTM, small_wins=False, piece=100, **grid)


def quick(job: Job) -> Evidence:
    """At gamma = 0 the batches of an epoch add up to the whole; from there losses go off in proportion to gamma."""
    data = verses()
    small = {"gammas": (0.0, 0.5, 1.0), "rounds": 20, "every": 5, "cohort": "all"}
    result = run_grid("gamma", data, job, task=small_lstm(4), rates=(0.1,), steps=2, **small)
    once = losses(run_grid("whole", data, job, task=small_lstm(8), rates=(0.2,), steps=1, **small))
    curves = losses(result)
    apart = np.abs(curves[0.0] / once[0.0] - 1).max()
    ratio = (curves[1.0] - curves[0.0]) / (curves[0.5] - curves[0.0])
    findings = (
        Finding("gamma = 0: two batches of half the text against all of it at twice the rate, relative difference of "
                "losses", "0", apart, 0.0, 1e-5),
        Finding("distance from gamma = 0, that of gamma = 1 over that of 0.5, least", "2", ratio.min(), 1.8, 2.2),
        Finding("and largest", "2", ratio.max(), 1.8, 2.2),
        Finding("gamma = 0 learns: loss at the end over the first", "below 1",
                curves[0.0][-1] / curves[0.0][0], 0.0, 0.99),
    )  # fmt: skip
    return Evidence(findings, draw(result["rounds"], curves))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Local update methods, Figure 12, Shakespeare: training loss by client rate at a fixed server rate",
    paper=f"{PAPER}, Figure 12",
    setting=f"{LSTM.words}; "
    f"Theta_{{1:{STEPS}}} with server rate {FIXED}, no momentum, alpha 0, {ROUNDS} rounds. "
    "gamma 0, 0.001, 0.01, 0.1, 1 and 10. The loss is that of the server's model on all "
    f"training text, a mean over its characters, every {EVERY} rounds.",
    quick="at gamma = 0 the batches of an epoch add up to the whole text, and for small gamma losses differ from there "
    "in proportion; two tiny LSTM layers on generated text",
    run=run,
    deviations=(
        f"{ROUNDS} rounds; the text does not say the paper's number.",
        *TEXT,
    ),
    needs=("shakespeare",),
    duration="a few minutes on one GPU, by estimate: not run yet",
)  # fmt: skip
