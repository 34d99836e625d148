"""Figure 5: non-adaptive methods over the server rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedbraid.data.catalog import load
from fedbraid.drawing import style, tidy
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.mime._ablation import femnist
from fedbraid.reproduce.mime._stability import run_grid, tuned
from fedbraid.reproduce.training import spent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS = 40
SERVER = tuple(10.0 ** (k / 2) for k in (2, 1, 0, -1, -2, -3, -4))
CLIENT = tuple(10.0 ** (k / 2) for k in (0, -1, -2, -3, -4))
METHODS = ("FedAvgSGD", "MimeSGD", "FedAvgMom", "MimeLiteMom", "MimeMom")  # MimeLiteSGD is FedAvgSGD


def full(job: Job) -> Evidence:
    data = femnist(job)
    grid = {"server_lr": SERVER, "client_lr": CLIENT}
    results = {name: run_grid(name, data, job, grid=grid, rounds=ROUNDS) for name in METHODS}
    curves = {name: tuned(result, ("server_lr",)) for name, result in results.items()}
    spread = {name: max(cells.values()) - min(cells.values()) for name, cells in curves.items()}
    findings = [
        Finding(f"{name}: points lost at server rate 1", "about 0", max(cells.values()) - cells[(1.0,)], 0.0, 2.0)
        for name, cells in curves.items()
    ]
    for way in ("FedAvg", "Mime"):
        less = spread[f"{way}Mom"] < spread[f"{way}SGD"]
        findings.append(Finding(f"{way}: momentum is less sensitive to the server rate than SGD", "yes", less))
    note = "Best less worst over server rates, in points: " + ", ".join(f"{n} {s:.1f}" for n, s in spread.items()) + "."
    return Evidence(tuple(findings), draw(curves), (note, spent(results.values())))


def draw(curves: Mapping[str, Mapping[tuple[float, ...], float]]) -> Figure:
    """Accuracy over server rates, at the best client rate for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.add_subplot()
    for i, (name, cells) in enumerate(curves.items()):
        rates = sorted(at[0] for at in cells)
        axis.plot(rates, [cells[(rate,)] for rate in rates], marker="o", ms=4, label=name, **style(i))
    axis.axvline(1.0, color="0.6", lw=1, ls=":")
    axis.set_xscale("log")
    axis.set_xlabel("server rate (dotted: the default)")
    axis.set_ylabel("test accuracy, %, at the best client rate")
    tidy(axis)
    axis.legend(frameon=False, fontsize=8)
    return figure


def quick(job: Job) -> Evidence:
    data = load("digits", clients=20)
    grid = {"server_lr": (1.0, 0.1), "client_lr": (1.0, 0.1)}
    result = run_grid("FedAvgSGD", data, job, grid=grid, rounds=5, batch_size=None, marks=())
    losses = {tuple(p.values()): r[-1] for p, r in zip(result["points"], result["test_loss"], strict=True)}
    apart = abs(losses[1.0, 0.1] / losses[0.1, 1.0] - 1)
    findings = (
        Finding(
            "FedAvg, one local step: server rate 1 and client rate 0.1, or the reverse",
            "0",
            apart,
            0.0,
            1e-5,
            kind="own",
        ),
        Finding(
            "both rates 1: test loss over that of both 0.1",
            "below 1",
            losses[1.0, 1.0] / losses[0.1, 0.1],
            0,
            0.9,
            kind="own",
        ),
    )
    return Evidence(findings, draw({"FedAvgSGD": tuned(result, ("server_lr",))}))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Mime, Figure 5: stability of SGD and momentum over the server rate",
    paper="Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, Figure 5",
    setting=f"FEMNIST, 300 writers, softmax regression, {ROUNDS} rounds of one local epoch, batches of 10, cohorts of "
    "Table 4, beta 0.9. Server rates 10 to 0.01 by half decades; for each the best of the client rates 1 to 0.01 by "
    "half decades, by the mean of two evaluations in the last ten rounds.",
    quick="with one local step FedAvg depends only on the product of both rates; digits",
    run=run,
    deviations=(
        "Softmax regression on 300 writers instead of a convolutional network on 3,400.",
        f"{ROUNDS} rounds instead of 1,000; 7 x 5 rates instead of 9 x 9.",
    ),
    remarks=(
        "Above server rate 1 momentum is less sensitive, as in the paper: it loses at most 2 points, SGD 7 to 10. "
        "Below 1 all are slow in so few rounds, and FedAvg with momentum, which starts at 0, is slowest. Most of the "
        "spread over all rates comes from there, and it is why FedAvgMom is best above 1.",
    ),
    needs=("femnist",),
    duration="about 5 minutes on two cores",
)
