"""Figure 13 on CIFAR-100: training loss by client rate with tuned server rates. It needs TFF's files."""

from __future__ import annotations

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._cifar100 import CIFAR, DEVIATIONS, FILES, SMALL, colours
from fedbraid.reproduce.localupdate._client_rates import GAMMAS, compare_tuned, draw, tuned
from fedbraid.reproduce.localupdate._training import PAPER, RATES, run_grid

ROUNDS, STEPS, EVERY, LAST, LATE = 1500, 10, 50, 100, 10


def full(job: Job) -> Evidence:
    grid = {"gammas": GAMMAS[:-1], "rates": RATES, "steps": STEPS, "rounds": ROUNDS, "every": EVERY}
    return compare_tuned(job, CIFAR, last=LAST, late=LATE, piece=100, **grid)


def quick(job: Job) -> Evidence:
    rates = (1e-3, 1e-1)
    small = {"task": SMALL, "gammas": (0.0, 0.01), "rates": rates, "steps": 2, "rounds": 4, "every": 2}
    result = run_grid("tuned", colours(), job, cohort="all", **small)
    best = tuned(result, 2)
    ends = [row[-1] for row in result["test_loss"]]
    excess = max(float(best[g][1][-1]) - min(ends[2 * i : 2 * i + 2]) for i, g in enumerate((0.0, 0.01)))
    findings = (
        Finding("loss at the chosen server rate less the lowest of the grid", "0", excess, 0.0, 0.0, kind="own"),
        Finding("points that diverged", "0", float(sum(result["diverged"])), 0.0, 0.0, kind="own"),
    )
    return Evidence(findings, draw(result["rounds"], {gamma: curve for gamma, (_, curve) in best.items()}))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Local update methods, Figure 13, CIFAR-100: training loss by client rate with tuned server rates",
    paper=f"{PAPER}, Figure 13",
    setting=f"{CIFAR.words}; "
    f"Theta_{{1:{STEPS}}}, no momentum, alpha 0, {ROUNDS} rounds. gamma 0, 0.001, 0.01, 0.1 and 1, each with the "
    "server rate, of 10^-3 to 10 by half decades, that has the lowest mean loss over the last "
    f"{LAST} rounds. The loss is that of the server's model on all 50,000 training images, every {EVERY} rounds and "
    f"every {LATE} in the last {LAST}.",
    quick="the chosen server rate is the best of the grid; a small MLP on generated images",
    run=run,
    deviations=(*DEVIATIONS, "gamma = 10 is left out."),
    remarks=(FILES,),
    needs=("cifar100",),
    duration="not run yet: TFF's files are needed",
)
