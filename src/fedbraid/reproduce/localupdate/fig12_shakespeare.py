"""Figure 12 on Shakespeare with the paper's network: training loss by client rate at a fixed server rate."""

from __future__ import annotations

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._client_rates import FIXED, GAMMAS, TEXT, compare_fixed, draw, losses
from fedbraid.reproduce.localupdate._generated import small_lstm, verses
from fedbraid.reproduce.localupdate._training import LSTM, PAPER, run_grid

ROUNDS, STEPS, EVERY = 600, 10, 25


def full(job: Job) -> Evidence:
    grid = {"gammas": GAMMAS, "steps": STEPS, "rounds": ROUNDS, "every": EVERY}
    return compare_fixed(job, LSTM, small_wins=False, piece=100, **grid)


def quick(job: Job) -> Evidence:
    """To first order in gamma the message is the gradient plus a term proportional to gamma, and so are the losses."""
    small = {"gammas": (0.0, 0.25, 0.5, 1.0), "rates": (0.1,), "steps": 2, "rounds": 20, "every": 5, "cohort": "all"}
    result = run_grid("gamma", verses(), job, task=small_lstm(4), **small)
    curves = losses(result)
    near, far = curves[0.25] - curves[0.0], curves[1.0] - curves[0.0]
    findings = (
        Finding("gamma = 0 learns: loss at the end over the first", "below 1",
                curves[0.0][-1] / curves[0.0][0], 0.0, 0.99, kind="own"),
        Finding("roles that differ: loss that gamma = 1 is above gamma = 0, least", "above 0", far.min(), 1e-4,
                kind="own"),
        Finding("its distance over that of gamma = 0.25, least", "4", (far / near).min(), 3.6, 4.4, kind="own"),
        Finding("and largest", "4", (far / near).max(), 3.6, 4.4, kind="own"),
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
    quick="gamma = 0 learns, and the loss that a client rate adds is proportional to it, as roles differ; two "
    "tiny LSTM layers on generated text",
    run=run,
    deviations=(
        f"{ROUNDS} rounds; the text does not say the paper's number.",
        *TEXT,
    ),
    remarks=(
        "At this server rate 600 rounds reach about the loss of a model that only knows character frequencies, at any "
        "client rate. Client rates differ in speed; at the end they differ in the third digit.",
    ),
    needs=("shakespeare",),
    duration="about 4 minutes on one H200 shared with two other entries",
)  # fmt: skip
