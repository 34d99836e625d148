"""Figure 13 on Shakespeare with the paper's network: training loss by client rate with tuned server rates."""

from __future__ import annotations

import numpy as np

from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._client_rates import GAMMAS, TEXT, compare_tuned, draw, tuned
from fedbraid.reproduce.localupdate._generated import small_lstm, verses
from fedbraid.reproduce.localupdate._training import LSTM, PAPER, RATES, run_grid
from fedbraid.reproduce.training import train

ROUNDS, STEPS, EVERY, LAST, LATE = 300, 10, 20, 100, 10


def full(job: Job) -> Evidence:
    grid = {"gammas": GAMMAS[:-1], "rates": RATES, "steps": STEPS, "rounds": ROUNDS, "every": EVERY}
    return compare_tuned(job, LSTM, last=LAST, late=LATE, small_wins=False, piece=100, **grid)


def quick(job: Job) -> Evidence:
    """If client and server rate are equal, a round averages models: that is FedAvg with server rate 1."""
    data, task, gamma, rounds = verses(), small_lstm(4), 0.3, 20
    rates = (0.01, 0.1, gamma, 1.0)
    small = {"gammas": (gamma,), "rates": rates, "steps": 2, "rounds": rounds, "every": 5, "cohort": "all"}
    result = run_grid("tuned", data, job, task=task, **small)
    averaging = {"name": "fedavg", "server_lr": 1.0, "steps": 2, **task.local}
    config = {
        "model": task.model,
        "algorithm": averaging,
        "rounds": rounds,
        "cohort": "all",
        "evaluation": {"every": 5},
    }
    points = [{"algorithm.client_lr": gamma}]
    averaged = train("fedavg", parse(config), data, points, work=job.work, tell=job.tell)
    slow, _, diagonal, fast = np.array(result["test_loss"])
    best = tuned(result, rounds)
    findings = (
        Finding("eta = gamma: losses apart from those of FedAvg with server rate 1", "0",
                np.abs(diagonal - averaged["test_loss"][0]).max(), 0.0, 1e-5, kind="own"),
        Finding("the server rate that is chosen", "1", best[gamma][0], 1.0, 1.0, kind="own"),
        Finding("loss at the end, FedAvg's less that at the chosen rate", "above 0", diagonal[-1] - fast[-1], 1e-3,
                kind="own"),
        Finding("loss at the end, eta = 0.01 less FedAvg's", "above 0", slow[-1] - diagonal[-1], 1e-3, kind="own"),
    )  # fmt: skip
    return Evidence(findings, draw(result["rounds"], {gamma: best[gamma][1]}))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Local update methods, Figure 13, Shakespeare: training loss by client rate with tuned server rates",
    paper=f"{PAPER}, Figure 13",
    setting=f"{LSTM.words}; "
    f"Theta_{{1:{STEPS}}}, no momentum, alpha 0, {ROUNDS} rounds. gamma 0, 0.001, 0.01, 0.1 and 1, each with the "
    f"server rate, of 10^-3 to 10 by half decades, that has the lowest mean loss over the last {LAST} rounds. The loss "
    "is that of the server's model on all training text, a mean over its characters, "
    f"every {EVERY} rounds and every {LATE} in the last {LAST}.",
    quick="where client and server rate are equal it is FedAvg, and tuned server rates do better; two tiny LSTM layers "
    "on generated text",
    run=run,
    deviations=(
        f"{ROUNDS} rounds; the text does not say the paper's number. gamma = 10 is left out.",
        f"The mean over the last {LAST} rounds is that of ten evaluations.",
        *TEXT,
    ),
    remarks=(
        "After 20 rounds every gamma of at least 0.01 has a lower loss than the smaller ones. Then all stay at the "
        "loss of a model that only knows character frequencies. Within 300 rounds gamma = 1, with a server rate of 3, "
        "gets below it, and gamma = 0.1 begins to.",
    ),
    needs=("shakespeare",),
    duration="about 5 minutes on one H200 shared with two other entries",
)  # fmt: skip
