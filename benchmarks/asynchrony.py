"""Simulated time to a target accuracy: FedBuff against FedAvg, with log-normal delays, on FEMNIST.

    python benchmarks/asynchrony.py DATA/femnist_writers.npz [--seeds 3] [--picture docs/images/asynchrony.png] [--json]

300 writers train a perceptron with one hidden layer. The time of a client's local step is log-normal over clients and
over pieces of work. Every method is tuned over the same grid of client and server rates, by the simulated time to the
target on validation examples, with another seed than those of the results. The results are the times to the target on
the test examples.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid import FederatedData, Split
from fedbraid.experiment.config import Config, parse
from fedbraid.experiment.lab import hold_out_validation
from fedbraid.experiment.points import points_program, with_values
from fedbraid.units import format_bytes, format_seconds

CLOCK = {"seconds_per_step": 1.0, "speed_sigma": 1.0, "jitter_sigma": 0.5, "latency": 1.0, "latency_sigma": 0.5}
CLIENT_RATES = (0.1, 0.3, 1.0)
SERVER_RATES = (0.3, 1.0, 3.0)
TUNING_SEED = 1000
TARGET = 0.70
KEEP = 3  # evaluations whose mean must be at the target


class Method(NamedTuple):
    """A way to run FedAvg's clients: how many work at a time, when the server steps, and how often it is evaluated."""

    label: str
    cohort: int
    rounds: int
    every: int
    asynchrony: dict[str, Any]


METHODS = (
    Method("FedBuff, 100 clients at work, buffer of 10", 100, 1000, 10, {"name": "fedbuff", "buffer": 10}),
    Method("FedAvg, 100 clients a round", 100, 100, 1, {}),
    Method("FedAvg, 10 clients a round", 10, 400, 4, {}),
    Method("FedAvg, first 100 of 130 clients", 100, 100, 1, {"name": "semi-synchronous", "over": 1.3}),
)


def load(path: Path) -> FederatedData:
    """The writers with training examples."""
    stored = np.load(path)
    x, y = (255 - stored["images"].astype(np.float32)) / 255, stored["labels"].astype(np.int32)
    writer, is_test, trains = stored["writer"], stored["is_test"], stored["writer_has_train"]

    def split(rows: np.ndarray, writers: np.ndarray) -> Split:
        return Split.from_assignment({"x": x, "y": y}, [np.flatnonzero(rows & (writer == w)) for w in writers])

    own = np.flatnonzero(trains)
    return FederatedData(split(~is_test, own), split(is_test, own), "femnist", {"classes": 62})


def config_of(method: Method, rounds: int | None = None) -> Config:
    tree = {
        "rounds": rounds or method.rounds,
        "cohort": method.cohort,
        "data": {"name": "femnist"},
        "model": {"name": "mlp", "hidden": [64]},
        "algorithm": {"name": "fedavg", "batch_size": 20, "epochs": 1, "client_lr": 0.1, "server_lr": 1.0},
        "evaluation": {"every": method.every},
        "clock": CLOCK,
        "asynchrony": method.asynchrony,
    }
    return parse(tree)


def reached(times: np.ndarray, scores: np.ndarray) -> float:
    """The first time from which the mean of KEEP evaluations is at the target; infinity if there is none."""
    means = np.convolve(scores, np.ones(KEEP) / KEEP, "valid")
    at = np.flatnonzero((means >= TARGET) & (scores[: len(means)] >= TARGET))
    return float(times[at[0]]) if len(at) else np.inf


def curves(program: Any, points: list[dict[str, float]], seed: int, rounds: int) -> list[dict[str, np.ndarray]]:
    """Accuracy over simulated time of each point."""
    outcome = program.run(points, seed=seed, rounds=rounds)
    at = outcome.evaluations["round"] - 1
    score = next(name for name in outcome.evaluations if name.endswith("accuracy"))
    sent = outcome.history["train/bytes_down"] + outcome.history["train/bytes_up"]
    return [
        {
            "round": at + 1,
            "time": outcome.history["simulated_seconds"][i][at],
            "bytes": np.cumsum(sent[i])[at],
            "uploads": np.cumsum(outcome.history["train/arrived"][i])[at],
            "accuracy": np.asarray(outcome.evaluations[score][i]),
        }
        for i in range(len(points))
    ]


def measure(method: Method, data: FederatedData, seeds: int, say: Any) -> dict[str, Any]:
    """Tune a method on validation examples, then run it with every seed."""
    began, config = time.perf_counter(), config_of(method)
    keys = ("algorithm.client_lr", "algorithm.server_lr")
    grid = [dict(zip(keys, values, strict=True)) for values in product(CLIENT_RATES, SERVER_RATES)]
    held, _ = hold_out_validation(data, 0.15, TUNING_SEED)
    program = points_program(config, held, keys, points=len(grid), seeds=[TUNING_SEED], test=held.validation)
    tried = [
        curve for some in program.chunks(grid) for curve in curves(program, list(some), TUNING_SEED, config.rounds)
    ]
    # the time to the target; if no point reaches it, the best accuracy
    ranks = [(reached(c["time"], c["accuracy"]), -float(np.nanmax(c["accuracy"]))) for c in tried]
    best = grid[min(range(len(grid)), key=lambda i: ranks[i])]
    shown = ", ".join(f"{-top:.3f}" if np.isinf(first) else format_seconds(first) for first, top in ranks)
    say(f"{method.label}: tuned to {best} in {time.perf_counter() - began:.0f} s; {shown}")
    final = with_values(config, best)
    program = points_program(final, data, (), points=1, seeds=range(seeds), test=data.test)
    runs = [curves(program, [{}], seed, config.rounds)[0] for seed in range(seeds)]
    times = [reached(c["time"], c["accuracy"]) for c in runs]
    at = [int(np.searchsorted(c["time"], t)) for c, t in zip(runs, times, strict=True)]
    inside = all(np.isfinite(times))
    result = {
        "label": method.label,
        "best": {key.split(".")[1]: value for key, value in best.items()},
        "seconds": times,
        "rounds": [int(c["round"][i]) for c, i in zip(runs, at, strict=True)] if inside else None,
        "uploads": [int(c["uploads"][i]) for c, i in zip(runs, at, strict=True)] if inside else None,
        "bytes": [float(c["bytes"][i]) for c, i in zip(runs, at, strict=True)] if inside else None,
        "last": [float(c["accuracy"][-1]) for c in runs],
        "took": time.perf_counter() - began,
        "runs": [{"time": c["time"].tolist(), "accuracy": c["accuracy"].tolist()} for c in runs],
    }
    say(f"  to {TARGET}: {[format_seconds(t) for t in times]}, last {result['last']}, {result['took']:.0f} s")
    return result


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over simulated time: a line per method, and a band from the smallest to the largest seed."""
    from matplotlib.figure import Figure

    from fedbraid.drawing import COLOURS, style, tidy

    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axis = figure.subplots()
    for i, result in enumerate(results):
        last = min(run["time"][-1] for run in result["runs"])
        grid = np.linspace(0, last, 200)
        lines = np.array([np.interp(grid, run["time"], run["accuracy"], left=np.nan) for run in result["runs"]])
        axis.plot(grid / 3600, lines.mean(0), lw=1.8, label=result["label"], **style(i))
        axis.fill_between(grid / 3600, lines.min(0), lines.max(0), color=COLOURS[i], alpha=0.15, lw=0)
    reach = max(np.mean(r["seconds"]) for r in results if np.all(np.isfinite(r["seconds"]))) / 3600
    axis.set_xlim(0, 1.15 * reach)
    axis.set_ylim(0.4, None)
    axis.axhline(TARGET, color="0.5", lw=1, ls=":")
    axis.set_xlabel("simulated time (hours)")
    axis.set_ylabel("test accuracy")
    axis.legend(frameon=False, loc="lower right")
    tidy(axis)
    figure.suptitle("FEMNIST, 300 writers, log-normal delays", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the methods to run, from 0")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path, help="file for all numbers")
    given = parser.parse_args()
    data = load(given.data)
    chosen = METHODS if given.only is None else [METHODS[i] for i in given.only]
    results = [measure(method, data, given.seeds, lambda text: print(text, flush=True)) for method in chosen]
    if given.json is not None:
        given.json.write_text(json.dumps(results))
    if given.picture is not None:
        draw(results, given.picture)
    print("\n| method | rates (client, server) | simulated time to the target | steps | uploads | sent |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in results:
        if r["rounds"] is None:
            print(f"| {r['label']} | {tuple(r['best'].values())} | not reached, {np.mean(r['last']):.3f} | | | |")
            continue
        spread = f"{format_seconds(np.mean(r['seconds']))} ({', '.join(format_seconds(s) for s in r['seconds'])})"
        sent = format_bytes(np.mean(r["bytes"]))
        print(
            f"| {r['label']} | {r['best']['client_lr']:g}, {r['best']['server_lr']:g} | {spread} | "
            f"{np.mean(r['rounds']):.0f} | {np.mean(r['uploads']):.0f} | {sent} |"
        )


if __name__ == "__main__":
    main()
