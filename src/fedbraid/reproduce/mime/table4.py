"""Table 4: the models that each method sends, and the clients per round at equal total communication."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedbraid.algorithms import fedavg, mime, mimelite
from fedbraid.core import Algorithm
from fedbraid.costs import cost
from fedbraid.drawing import BLUE, ORANGE
from fedbraid.experiment.comparison import cohorts_of
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job

# models sent by a pair of clients (one sends a gradient, one an update); clients at 40 and at 100 models per round
PAPER = {
    "FedAvg": (2, 20, 50),
    "MimeLiteMom": (5, 8, 20),
    "MimeLiteAdagrad": (5, 8, 20),
    "MimeLiteAdam": (6, 6, 16),
    "MimeMom": (6, 6, 16),
    "MimeAdagrad": (6, 6, 16),
    "MimeAdam": (7, 5, 14),
}


def _loss(params: jax.Array, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    return jnp.mean((batch["x"] @ params) ** 2)


def _methods() -> dict[str, Algorithm]:
    bases = {"Mom": "momentum", "Adagrad": "adagrad", "Adam": "adam"}
    found = {"FedAvg": fedavg(_loss)}
    for family, make in (("MimeLite", mimelite), ("Mime", mime)):
        for name, base in bases.items():
            found[family + name] = make(_loss, base=base, protocol="split-cohort")
    return {name: found[name] for name in PAPER}


def run(job: Job) -> Evidence:
    from matplotlib.figure import Figure

    params, data = jnp.zeros(1000), {"x": jnp.zeros((10, 1000))}
    costs = {name: cost(method, params, data) for name, method in _methods().items()}
    clients = {total: cohorts_of("total-communication", total // 2, list(costs.values())) for total in (40, 100)}
    findings = []
    for i, (name, (multiple, at_40, at_100)) in enumerate(PAPER.items()):
        exact = round(costs[name].multiple, 2)  # rounded, because messages also hold a few counters
        findings.append(Finding(f"{name}: models sent per pair", str(multiple), exact, multiple, multiple))
        for total, paper in ((40, at_40), (100, at_100)):
            ours = float(clients[total][i])
            findings.append(Finding(f"{name}: clients for {total} models per round", str(paper), ours, paper, paper))
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axis = figure.add_subplot()
    for down, colour, label in ((True, BLUE, "down"), (False, ORANGE, "up")):
        left = [0.0 if down else one.down / one.model for one in costs.values()]
        width = [(one.down if down else one.up) / one.model for one in costs.values()]
        axis.barh(list(costs), width, left=left, color=colour, label=label)
    axis.invert_yaxis()
    axis.set_xlabel("models sent per pair of clients and round, read off the messages")
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    return Evidence(tuple(findings), figure)


ENTRY = Entry(
    title="Mime, Table 4: communication of each method and clients per round at equal total communication",
    paper="Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, Table 4",
    setting="The shapes of every message of a round, by abstract evaluation; cohorts split in two halves, one of which "
    "sends gradients and the other updates. A round may send 40 models (EMNIST, Shakespeare) or 100 (StackOverflow).",
    quick="the same; it takes seconds",
    run=run,
)
