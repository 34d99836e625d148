"""The ablations of Figures 1 and 3: an MLP, ten local epochs, each method over a few rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbraid.data.federated import FederatedData
from fedbraid.drawing import COLOURS, DASHES, tidy
from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.training import best, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = 10  # a score is the mean over this many last rounds


class Arm(NamedTuple):
    """One method: the algorithm, its options and its client rates."""

    algorithm: str
    options: Mapping[str, Any]
    rates: Sequence[float]


def femnist(job: Job) -> FederatedData:
    """The writers that have training data; those without are left out."""
    from fedbraid.data.catalog import load

    return replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)


def run_arm(name: str, arm: Arm, data: FederatedData, job: Job, *, rounds: int, **changes: Any) -> dict[str, Any]:
    """One method over its rates; ``changes`` override the settings of the figures."""
    local = {"batch_size": 20, "epochs": 10} | changes.pop("local", {})
    config = parse(
        {
            "rounds": rounds,
            "cohort": 10,
            "model": {"name": "mlp", "hidden": [300, 100]},
            "evaluation": {"every": 2},
            **changes,
            "algorithm": {"name": arm.algorithm, "client_lr": 1.0, **arm.options, **local},
        }
    )
    points = [{"algorithm.client_lr": rate} for rate in arm.rates]
    return train(name, config, data, points, work=job.work, tell=job.tell)


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
        chosen.append(f"{name} {result['points'][at]['algorithm.client_lr']:.3g} ({100 * accuracy:.1f} %{gone})")
    return f"Best client rates, with the accuracy over the last {LAST} rounds: {'; '.join(chosen)}."


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
