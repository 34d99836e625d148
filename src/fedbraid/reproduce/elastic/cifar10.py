"""Table 1 and Figure 1 on CIFAR-10, the paper's data, with a convolutional network; and the controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.data.catalog import load, repartition
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.importing import open_source
from fedbraid.drawing import COLOURS, tidy
from fedbraid.reproduce.elastic import fig1, table1
from fedbraid.reproduce.elastic._synthetic import (
    CONTROL,
    EPOCHS,
    PAPER,
    at_rates,
    at_server_rate,
    best_rate,
    by_rate,
    control_points,
    logged,
    mean_factor,
    run_method,
    same_rows,
)
from fedbraid.reproduce.elastic.table1 import FEDAVG, FEWER, LARGER, SAME, VARIANTS
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.training import spent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN_IMAGES, TEST_IMAGES, CLIENTS, ROUNDS, RATE = 5_000, 1_700, 50, 30, 0.05
MODEL = {"name": "emnist_cnn", "dropout": False}
FORMS = ("elastic (average)", "elastic (momentum)")


def subset(data: FederatedData) -> FederatedData:
    """A random subset of the images, always the same one; of a smaller set all images."""

    def some(split: Split, most: int) -> Split:
        rows = np.arange(split.num_examples)
        if len(rows) > most:
            rows = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
        return Split.from_assignment(split.arrays, [rows])

    assert data.test is not None
    return replace(data, train=some(data.train, TRAIN_IMAGES), test=some(data.test, TEST_IMAGES))


def clients(job: Job) -> FederatedData:
    source = subset(open_source(job.path_of("cifar10")))
    return repartition(source, partition="dirichlet", per="client", clients=CLIENTS, alpha=0.1, sigma=0.3)


def full(job: Job) -> Evidence:
    data = clients(job)
    options: dict[str, Any] = {"algorithm": FEDAVG, "model": MODEL, "rounds": ROUNDS}
    points = at_rates((RATE,))
    forms = {
        name: run_method(f"cifar10-{name}", data, job, elastic=VARIANTS[name], points=points, **options)
        for name in FORMS
    }
    control = control_points(forms["elastic (momentum)"])
    both = [point | {"algorithm.server_lr": 1.0} for point in points] + control
    plain = run_method("cifar10-plain", data, job, points=both, **options)
    rows = run_method("cifar10-rows", data, job, points=both, swap=same_rows, **options)
    factor = control[0]["algorithm.server_lr"]
    results = {"naive": at_server_rate(plain, 1.0), **forms, LARGER: at_server_rate(plain, factor)}
    results |= {SAME: at_server_rate(rows, factor), FEWER: at_server_rate(rows, 1.0)}
    train, again = {}, []
    for name in ("naive", "elastic (momentum)"):
        seen, given = replace(data, test=data.train), dict[str, Any](options, evaluation={"every": ROUNDS})
        again.append(run_method(f"cifar10-{name}-train", seen, job, elastic=VARIANTS[name], points=points, **given))
        (train[name],) = by_rate(again[-1]).values()
    test = {name: best_rate(result)[1] for name, result in results.items()}
    share = fig1.evidence(forms, RATE)
    notes = (*table1.said(results, train), *share.notes, spent([*forms.values(), plain, rows, *again]))
    return Evidence((*table1.findings(test, train), *share.findings), draw(results, test, RATE), notes)


def draw(results: Mapping[str, Mapping[str, Any]], accuracy: Mapping[str, np.ndarray], rate: float) -> Figure:
    """The accuracy of every seed, and the share of boosted parameters over rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    table1.dots(left, accuracy)
    forms = [name for name in results if name.startswith("elastic")]
    for i, name in enumerate(forms):
        rows = 100 * logged(results[name], "boosted", rate)
        rounds = np.arange(1, rows.shape[1] + 1)
        label = f"{name}, mean factor {mean_factor(results[name], rate):.3f}"
        right.plot(rounds, rows.mean(0), color=COLOURS[i], ls=("-", "--")[i], label=label)
        right.fill_between(rounds, rows.min(0), rows.max(0), color=COLOURS[i], alpha=0.15, lw=0)
    right.set_xlabel("round")
    right.set_ylabel("parameters with factor > 1, %")
    right.legend(frameon=False, fontsize=8, loc="lower right")
    tidy(right)
    return figure


def quick(job: Job) -> Evidence:
    """With a large tau all factors are nearly equal, and elastic aggregation is its control on the same rows."""
    data, tau = load("digits", clients=8), 1000.0
    model = {"name": "mlp", "hidden": [16]}  # not a linear one: it starts at 0, where nothing is sensitive
    options: dict[str, Any] = {"rounds": 3, "cohort": 4, "seeds": (0, 1), "model": model, "evaluation": {"every": 3}}
    small = {"name": "fedavg", "server_lr": 1 / tau}
    over = run_method("large", data, job, algorithm=small, elastic={"tau": tau}, points=at_rates((0.1,)), **options)
    factor = mean_factor(over, 0.1)
    points = [{"algorithm.client_lr": 0.1, "algorithm.server_lr": factor / tau}]
    control = run_method("rows", data, job, algorithm=FEDAVG, points=points, swap=same_rows, **options)
    apart = float(np.abs(np.array(over["test_loss"]) / np.array(control["test_loss"]) - 1).max())
    results = {"elastic (momentum)": over, SAME: control}
    accuracy = {name: best_rate(result)[1] for name, result in results.items()}
    findings = (
        Finding(
            "tau = 1000: elastic is its control on the same rows, test losses apart", "0", apart, 0.0, 2e-3, kind="own"
        ),
        Finding("accuracy in % after 3 rounds", "learns", float(accuracy[SAME].min()), 40, 100, kind="own"),
    )
    return Evidence(findings, draw(results, accuracy, 0.1))


def run(job: Job) -> Evidence:
    return full(job) if job.full else quick(job)


ENTRY = Entry(
    title="Elastic aggregation, Table 1 and Figure 1 of the supplement on CIFAR-10",
    paper=f"{PAPER}, Table 1 and Figure 1",
    setting=f"CIFAR-10, {TRAIN_IMAGES:,} of its training images and {TEST_IMAGES:,} of its test images, drawn at "
    f"random with a fixed seed; {CLIENTS} clients with label ratios from Dirichlet(0.1) and log-normal sizes (sigma "
    "0.3). Two convolutions, a pool and two dense layers, no dropout. FedAvg with 10 clients per round, "
    f"{EPOCHS} local epochs, batches of 20, client rate {RATE}, {ROUNDS} rounds, three seeds. Elastic: tau 0.5, mu "
    f"0.95, a random tenth of every client's images held out, sensitivity in batches of 1. {CONTROL} A second "
    "control also trains only on the rows that elastic aggregation trains on; so does a second naive form.",
    quick="with a large tau elastic aggregation is its control on the same rows; digits",
    run=run,
    deviations=(
        "A tenth of CIFAR-10 on 50 clients: about 100 images for each, where 100 clients would have 500.",
        "The supplement names neither the network nor the number of clients, rounds, tau and mu of its table; this "
        "network is our CNN for small images.",
        "Training accuracy is measured for two of the three forms, to save time.",
        "The controls are not in the paper. Its explanation, that sensitive parameters should move less than others, "
        "needs a gain over them; so we expect a value above 0.",
        "The text on Figure 1 says only that momentum restricts more parameters and that averaging boosts more; a "
        "tenth is our reading of the first.",
    ),
    needs=("cifar10",),
    duration="about 150 s on one H200",
)
