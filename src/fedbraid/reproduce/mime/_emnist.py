"""A column of Table 2 on FEMNIST's writers: run all methods with one model, and check the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedbraid.data.catalog import load
from fedbraid.data.federated import FederatedData, Split
from fedbraid.reproduce.entry import Evidence, Finding, Job
from fedbraid.reproduce.mime._table2 import RATES, WAYS, accuracies, draw, notes, run_method
from fedbraid.reproduce.training import best, score

LAST, MARGIN = 50, 3.0
SHARE = 0.51  # digits of the paper's data: 341,873 of 671,585 training images of TFF's federated EMNIST
LONG, SOON = 1000, 100  # rounds of the thinned data, and after which it is also read
EPSILONS = tuple(10.0**-k for k in range(1, 6))
THINNED = f"digits thinned to {100 * SHARE:.0f}%, {LONG:,} rounds"

Results = Mapping[str, Mapping[str, Any]]


class Column(NamedTuple):
    """What one model runs: all images, thinned digits (rates by method), and FedAvgAdam over epsilon."""

    model: Mapping[str, Any]
    rounds: int  # with all images
    rates: Callable[[str], Sequence[float]] = lambda name: RATES  # with thinned digits
    epsilon_rates: Sequence[float] = RATES
    piece: int | None = None


def thinned(data: FederatedData, share: float = SHARE, *, seed: int = 0) -> FederatedData:
    """The data without some digits, drawn at random: labels below 10 are then ``share`` of the training images.

    Every split loses the same share of its digits; a client that would lose all examples keeps its first one.

    >>> split = Split.from_clients([{"y": np.array([1, 2, 3, 4, 11, 12])}])
    >>> (np.asarray(thinned(FederatedData(split), 0.5).train.arrays["y"]) < 10).mean().item()
    0.5
    """
    rng = np.random.default_rng(seed)
    digits = float(np.mean(np.asarray(data.train.arrays["y"]) < 10))
    keep = share * (1 - digits) / (digits * (1 - share))

    def some(split: Split) -> Split:
        of_digits = np.flatnonzero(np.asarray(split.arrays["y"]) < 10)
        drop = rng.choice(of_digits, len(of_digits) - round(keep * len(of_digits)), replace=False)
        left = np.ones(split.num_examples, bool)
        left[drop] = False
        parts = []
        for start, stop in zip(split.offsets[:-1], split.offsets[1:], strict=True):
            rows = np.arange(start, stop)
            parts.append(rows[left[start:stop]] if left[start:stop].any() else rows[:1])
        arrays = {name: np.asarray(array) for name, array in split.arrays.items()}
        return Split.from_assignment(arrays, parts, split.ids)

    test = None if data.test is None else some(data.test)
    return replace(data, train=some(data.train), test=test, unseen=None)


def column_arms(job: Job, column: Column) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every training run of a column, by the name of its file in the work folder."""
    data = replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)
    fewer = thinned(data)
    always: dict[str, Any] = {"model": column.model, "piece": column.piece, "work": job.work, "tell": job.tell}

    def until(rounds: int) -> list[int]:
        return list(range(rounds - LAST + 10, rounds + 1, 10))

    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in WAYS:
        found[name] = partial(run_method, name, data, rounds=column.rounds, marks=until(column.rounds), **always)
    for name in WAYS:
        long = {"rounds": LONG, "marks": [*until(SOON), *until(LONG)], "rates": column.rates(name)}
        found[f"thinned-{name}"] = partial(run_method, name, fewer, label=f"thinned-{name}", **long, **always)
    points = [{"algorithm.client_lr": rate, "algorithm.tau": e} for e in EPSILONS for rate in column.epsilon_rates]
    long = {"rounds": LONG, "marks": until(LONG), "points": points, "label": "epsilon-FedAvgAdam"}
    found["epsilon-FedAvgAdam"] = partial(run_method, "FedAvgAdam", fewer, **long, **always)
    return found


def judge_column(found: Results, paper: Mapping[str, float], *, title: str) -> Evidence:
    """The findings from the results, by the names of ``column_arms``; only methods that were run have rows."""
    everything = {name: found[name] for name in WAYS if name in found}
    fewer = {name: found[f"thinned-{name}"] for name in WAYS if f"thinned-{name}" in found}
    findings = [*_rows(everything, paper, ""), *_rows(fewer, paper, THINNED)]
    told = notes(everything, LAST)
    if fewer:
        soon = {name: _until(result, SOON) for name, result in fewer.items()}
        early = ", ".join(f"{name} {value:.1f}" for name, value in accuracies(soon, LAST).items())
        missing = ", ".join(name for name in WAYS if name not in fewer)
        gone = f" Not run with thinned digits: {missing}." if missing else ""
        told += (f"With thinned digits, after {SOON} rounds: {early}.{gone}", *notes(fewer, LAST))
    if "epsilon-FedAvgAdam" in found:
        result = found["epsilon-FedAvgAdam"]
        value, low = 100 * best(result, last=LAST)[1], paper["FedAvgAdam"] - MARGIN
        what = f"FedAvgAdam, best epsilon of 1e-1 to 1e-5, {THINNED}: accuracy in %"
        findings.append(Finding(what, f"{paper['FedAvgAdam']}", value, low, low + 2 * MARGIN))
        told += (_by_epsilon(result),)
    others = {THINNED: fewer} if fewer else None
    figure = draw(everything, paper, LAST, margin=MARGIN, title=f"{title}, 40 models sent per round", others=others)
    return Evidence(tuple(findings), figure, told)


def _rows(results: Results, paper: Mapping[str, float], reading: str) -> list[Finding]:
    """A row for every method, and, if all were run, the statements on their order."""
    ours, of = accuracies(results, LAST), f", {reading}" if reading else ""
    findings = [
        Finding(f"{name}{of}{':' if of else ','} accuracy in %", f"{paper[name]}", ours[name],
                paper[name] - MARGIN, paper[name] + MARGIN)
        for name in results
    ]  # fmt: skip
    if len(results) < len(WAYS):
        return findings
    finite = {name: value for name, value in ours.items() if math.isfinite(value)}
    ranked = sorted(finite, key=lambda name: -finite[name])
    apart = max(paper.values()) - min(paper.values())
    two = {"MimeAdam", "MimeLiteAdam"}
    spread = max(finite.values()) - min(finite.values())
    return [
        *findings,
        Finding(f"MimeAdam and MimeLiteAdam are the best two{of}", "yes", set(ranked[:2]) == two),
        Finding(f"best less worst, in points{of}", f"{apart:.1f}", spread, 0.0, 3.0),
        Finding(f"MimeLiteSGD is FedAvgSGD{of}", "yes", ours["MimeLiteSGD"] == ours["FedAvgSGD"]),
    ]


def _until(result: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """A result as it was after so many rounds."""
    seen = sum(r <= rounds for r in result["rounds"])
    cut = {"rounds": result["rounds"][:seen], "test_accuracy": [row[:seen] for row in result["test_accuracy"]]}
    return {**result, **cut}


def _by_epsilon(result: Mapping[str, Any]) -> str:
    """FedAvgAdam's accuracy at the best client rate of each epsilon, in words."""
    found: dict[float, tuple[float, float]] = {}
    for i, point in enumerate(result["points"]):
        own = 100 * score(result, i, last=LAST)
        epsilon = point["algorithm.tau"]
        if math.isfinite(own) and own > found.get(epsilon, (-math.inf, 0.0))[0]:
            found[epsilon] = own, point["algorithm.client_lr"]
    words = ", ".join(f"{e:.0e}: {value:.1f} (client rate {rate:.3g})" for e, (value, rate) in found.items())
    return f"FedAvgAdam by epsilon, server rate 1, {THINNED}: {words}."
