"""Clients with Dirichlet labels as in the elastic paper; methods with and without elastic aggregation, and controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbraid.algorithms import fedavg
from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.training import score, train
from fedbraid.transforms import elastic

PAPER = "Chen et al., Elastic Aggregation for Federated Optimization, supplement"
TAU, MU, HELD_OUT, EPOCHS = 0.5, 0.95, 0.1, 10
SEEDS, LAST = (0, 1, 2), 10
IMAGES, ROUNDS, RATES = 10_000, 25, (0.3, 0.1)
SETTING = (
    f"{IMAGES:,} of FEMNIST's images (62 classes), distributed to 100 clients with label ratios from Dirichlet(0.1) "
    "and log-normal sizes (sigma 0.3); MLP of 64 units; 10 clients per round, "
    f"{EPOCHS} local epochs (Section 4), batches of 20, {ROUNDS} rounds, three seeds. Elastic: tau 0.5, mu 0.95, a "
    "random tenth of every client's images held out to measure sensitivity."
)
CONTROL = (
    "The control is the same method without elastic aggregation, with the server rate equal to elastic's mean factor. "
    "The factor is measured in the elastic run (mean over rounds and seeds) at the same client rate."
)
UNNAMED = "FEMNIST's images and an MLP instead of CIFAR-10: differences are compared, not accuracies."


def clients(job: Job, *, images: int = IMAGES, alpha: float = 0.1, sigma: float = 0.3) -> FederatedData:
    """Some images of FEMNIST's training writers, distributed to 100 clients with label ratios from Dirichlet(alpha)."""
    from fedbraid.data.catalog import load, repartition

    # writers without training images have other label ratios: another distribution shift
    source = replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)
    rows = np.random.default_rng(0).permutation(source.train.num_examples)[:images]
    source = replace(source, train=Split.from_assignment(source.train.arrays, [np.sort(rows)]))
    return repartition(source, partition="dirichlet", per="client", clients=100, alpha=alpha, sigma=sigma)


def run_method(
    name: str,
    data: FederatedData,
    job: Job,
    *,
    algorithm: Mapping[str, Any],
    elastic: Mapping[str, Any] | None = None,
    points: Sequence[Mapping[str, Any]],
    seeds: Sequence[int] = SEEDS,
    swap: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """A method over points and seeds; ``elastic``: the options of elastic aggregation, None to leave it out.

    All entries on elastic aggregation save their runs in one folder, so that they share those that are the same.
    """
    transforms = [] if elastic is None else [{"name": "elastic", "held_out": HELD_OUT, "tau": TAU, "mu": MU, **elastic}]
    config = parse(
        {
            "rounds": ROUNDS,
            "cohort": 10,
            "model": {"name": "mlp", "hidden": [64]},
            "evaluation": {"every": 5},
            **changes,
            "algorithm": {"client_lr": 0.1, "batch_size": 20, "epochs": EPOCHS, **algorithm},
            "transforms": transforms,
        }
    )
    work = job.work.parent / f"elastic-{job.size}"
    return train(name, config, data, points, work=work, seeds=seeds, tell=job.tell, swap=swap)


def at_rates(rates: Sequence[float] = RATES) -> list[dict[str, float]]:
    """A point for each client rate."""
    return [{"algorithm.client_lr": rate} for rate in rates]


def control_points(measured: Mapping[str, Any]) -> list[dict[str, float]]:
    """The same client rates, each with the server rate equal to the mean factor of an elastic run at that rate."""
    return [
        {"algorithm.client_lr": rate, "algorithm.server_lr": round(float(mean_factor(measured, rate)), 4)}
        for rate in by_rate(measured)
    ]


def same_rows(loss: Any, options: Mapping[str, Any]) -> Algorithm:
    """FedAvg that holds the same rows out of training as elastic aggregation, with factor 1 for all parameters."""
    given = {key: value for key, value in options.items() if key != "name"}
    return elastic(fedavg(loss, **given), lambda params, batch: jnp.zeros_like(batch["mask"]), held_out=HELD_OUT)


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


def at_server_rate(result: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The points of a result that have this server rate."""
    at = [i for i, point in enumerate(result["points"]) if point["algorithm.server_lr"] == rate]
    return {**result, **{key: [result[key][i] for i in at] for key in ("points", "diverged", "test_accuracy")}}


def _at_rate(result: Mapping[str, Any], rows: Sequence[Any], rate: float) -> np.ndarray:
    at = [point["algorithm.client_lr"] == rate for point in result["points"]]
    return np.array([row for row, there in zip(rows, at, strict=True) if there], float)


def curve(result: Mapping[str, Any], rate: float) -> np.ndarray:
    """Accuracy in percent after every evaluated round at one rate, the mean over seeds."""
    return 100 * np.mean(_at_rate(result, result["test_accuracy"], rate), axis=0)


def logged(result: Mapping[str, Any], name: str, rate: float) -> np.ndarray:
    """What the server logged in every round at one rate: [seeds, rounds]."""
    return _at_rate(result, result["logs"][f"train/{name}"], rate)


def mean_factor(result: Mapping[str, Any], rate: float) -> float:
    """Elastic's mean factor over parameters, rounds and seeds."""
    return float(np.mean(logged(result, "mean_factor", rate)))
