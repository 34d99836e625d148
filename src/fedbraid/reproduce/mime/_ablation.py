"""The ablations of Figures 1 and 3: an MLP, ten local epochs, each method over a few rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbraid.data.federated import FederatedData
from fedbraid.drawing import COLOURS, DASHES, tidy
from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.training import best, score, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = 50  # a score is the mean over this many last rounds


class Arm(NamedTuple):
    """One method: the algorithm, its options, its client rates, and values of one more option, such as beta."""

    algorithm: str
    options: Mapping[str, Any]
    rates: Sequence[float]
    option: str = ""
    values: Sequence[float] = ()

    @property
    def points(self) -> list[dict[str, float]]:
        rates = [{"algorithm.client_lr": rate} for rate in self.rates]
        if not self.option:
            return rates
        return [{**rate, f"algorithm.{self.option}": value} for value in self.values for rate in rates]


def femnist(job: Job) -> FederatedData:
    """The writers that have training data; those without are left out."""
    from fedbraid.data.catalog import load

    return replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)


def run_arm(
    name: str,
    arm: Arm,
    data: FederatedData,
    job: Job,
    *,
    rounds: int,
    points: Sequence[Mapping[str, float]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One method over its points, or over some of them; ``changes`` override the settings of the figures."""
    local = {"batch_size": 10, "epochs": 10} | changes.pop("local", {})
    config = parse(
        {
            "rounds": rounds,
            "cohort": 20,
            "model": {"name": "mlp", "hidden": [300, 100]},
            "evaluation": {"every": 5},
            **changes,
            "algorithm": {"name": arm.algorithm, "client_lr": 1.0, **arm.options, **local},
        }
    )
    return train(name, config, data, arm.points if points is None else points, work=job.work, tell=job.tell)


def search(
    name: str, arm: Arm, data: FederatedData, job: Job, *, rounds: int, first: int, keep: int, **changes: Any
) -> dict[str, Any]:
    """All points for the ``first`` rounds; then, for each value of the option, the best ``keep`` rates for all."""
    tried = run_arm(f"{name}-first", arm, data, job, rounds=first, **changes)
    chosen: list[dict[str, float]] = []
    for value in arm.values or (None,):
        own = [i for i, p in enumerate(tried["points"]) if value is None or p[f"algorithm.{arm.option}"] == value]
        scores = {i: score(tried, i, last=first // 5) for i in own}
        ranked = sorted(own, key=lambda i: -scores[i] if math.isfinite(scores[i]) else math.inf)
        chosen += [tried["points"][i] for i in sorted(ranked[:keep])]
    return run_arm(name, arm, data, job, rounds=rounds, points=chosen, **changes)


def among(result: Mapping[str, Any], **options: float) -> dict[str, Any]:
    """The points of a result that have these options.

    >>> points = [{"algorithm.client_lr": 1.0, "algorithm.beta": b} for b in (0.0, 0.9)]
    >>> among({"points": points, "test_accuracy": [[0.1], [0.2]], "diverged": [False, True]}, beta=0.9)["diverged"]
    [True]
    """
    own = [i for i, p in enumerate(result["points"]) if all(p[f"algorithm.{k}"] == v for k, v in options.items())]
    return {**result, **{key: [result[key][i] for i in own] for key in ("points", "test_accuracy", "diverged")}}


def final(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy in percent over the last rounds, at each method's best rate."""
    return {name: 100 * best(result, last=LAST)[1] for name, result in results.items()}


def rates_note(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The learning rate at which each method is shown."""
    chosen = []
    for name, result in results.items():
        at, accuracy = best(result, last=LAST)
        lost = sum(result["diverged"])
        gone = f", {lost} of {len(result['points'])} diverged" if lost else ""
        point = ", ".join(f"{value:.3g}" for value in result["points"][at].values())
        chosen.append(f"{name} {point} ({100 * accuracy:.1f} %{gone})")
    about = f"Best client rates (and beta, where several were tried), with the accuracy over the last {LAST} rounds"
    return f"{about}: {'; '.join(chosen)}."


def draw(results: Mapping[str, Mapping[str, Any]], panels: Mapping[str, Sequence[str]]) -> Figure:
    """Accuracy over rounds at each method's best rate, a panel for each comparison."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.1 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    looks = {
        name: {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[i % len(DASHES)]} for i, name in enumerate(results)
    }
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            result = results[name]
            curve = [
                100 * v if v is not None else float("nan") for v in result["test_accuracy"][best(result, last=LAST)[0]]
            ]
            axis.plot(result["rounds"], curve, label=name, lw=1.7, **looks[name])
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("round")
        tidy(axis)
        axis.legend(frameon=False, fontsize=8, loc="best")
    axes[0].set_ylabel("test accuracy, %")
    return figure
