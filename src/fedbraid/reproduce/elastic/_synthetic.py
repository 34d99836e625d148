"""Clients with Dirichlet labels as in the elastic paper, and one method on them with or without elastic aggregation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbraid.data.federated import FederatedData
from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.training import score, train

PAPER = "Chen et al., Elastic Aggregation for Federated Optimization, supplement"
TAU, MU, HELD_OUT = 0.5, 0.95, 0.1
SEEDS, LAST = (0, 1, 2), 10


def clients(job: Job, *, count: int = 100, alpha: float = 0.1, sigma: float = 0.3) -> FederatedData:
    """Images of FEMNIST's training writers, partitioned with label ratios from Dirichlet(alpha) and log-normal "
    "sizes."""
    from fedbraid.data.catalog import load, repartition

    # writers without training images have other label ratios: another distribution shift
    source = replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)
    return repartition(source, partition="dirichlet", per="client", clients=count, alpha=alpha, sigma=sigma)


def run_method(
    name: str,
    data: FederatedData,
    job: Job,
    *,
    algorithm: Mapping[str, Any],
    elastic: Mapping[str, Any] | None,
    rates: Sequence[float],
    rounds: int,
    seeds: Sequence[int] = SEEDS,
    **changes: Any,
) -> dict[str, Any]:
    """A method over client rates and seeds; ``elastic``: the options of elastic aggregation, None to leave it out."""
    transforms = [] if elastic is None else [{"name": "elastic", "held_out": HELD_OUT, "tau": TAU, "mu": MU, **elastic}]
    config = parse(
        {
            "rounds": rounds,
            "cohort": 10,
            "model": {"name": "mlp", "hidden": [64]},
            "evaluation": {"every": 5},
            **changes,
            "algorithm": {"client_lr": 0.1, "batch_size": 20, "epochs": 2, **algorithm},
            "transforms": transforms,
        }
    )
    points = [{"algorithm.client_lr": rate} for rate in rates]
    return train(name, config, data, points, work=job.work, seeds=seeds, tell=job.tell)


def by_rate(result: Mapping[str, Any]) -> dict[float, np.ndarray]:
    """Accuracy in percent of every seed, by client rate."""
    found: dict[float, list[float]] = {}
    for i, point in enumerate(result["points"]):
        found.setdefault(point["algorithm.client_lr"], []).append(100 * score(result, i, last=LAST))
    return {rate: np.array(values) for rate, values in found.items()}


def best_rate(result: Mapping[str, Any]) -> tuple[float, np.ndarray]:
    """The rate with the best mean over seeds, and the accuracy of every seed at it."""
    rates = by_rate(result)
    means = {rate: -np.inf if np.isnan(values).any() else values.mean() for rate, values in rates.items()}
    rate = max(means, key=lambda rate: means[rate])
    return rate, rates[rate]


def curve(result: Mapping[str, Any], rate: float) -> np.ndarray:
    """Accuracy in percent after every evaluated round at one rate, the mean over seeds."""
    rows = [
        row
        for point, row in zip(result["points"], result["test_accuracy"], strict=True)
        if point["algorithm.client_lr"] == rate
    ]
    return 100 * np.mean(np.array(rows, float), axis=0)
