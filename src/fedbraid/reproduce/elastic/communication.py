"""Section 5 of the supplement: the number of models that each method sends per round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.algorithms import fedadam, fedavg, fedavgm, fedprox, pfnm, scaffold
from fedbraid.core import Algorithm
from fedbraid.costs import cost
from fedbraid.data.catalog import load
from fedbraid.drawing import COLOURS
from fedbraid.local import ClientData
from fedbraid.models import mlp
from fedbraid.reproduce.elastic._synthetic import PAPER
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.transforms import elastic

# models down plus up
PRINTED = {"FedAvg": 2, "FedAvgM": 2, "PFNM": 2, "FedProx": 2, "SCAFFOLD": 4, "AdaOpt (FedAdam)": 2, "Elastic": 3}


def _methods(loss: Any, outputs: Any) -> dict[str, Algorithm]:
    return {
        "FedAvg": fedavg(loss),
        "FedAvgM": fedavgm(loss, kind="average"),
        "PFNM": pfnm(loss),
        "FedProx": fedprox(loss),
        "SCAFFOLD": scaffold(loss),
        "AdaOpt (FedAdam)": fedadam(loss),
        "Elastic": elastic(fedavg(loss), outputs),
        "Elastic over SCAFFOLD": elastic(scaffold(loss), outputs),
    }


def _sent(method: Algorithm, params: Any, data: ClientData) -> tuple[int, int]:
    """Bytes down and up of a round that one client computes, summed over exchanges."""
    server, state = method.init(params), method.init_client(params)
    down, up = 0, 0
    for exchange in method.exchanges:
        message = exchange.send(server)
        report = jax.jit(exchange.client)(message, state, data, jax.random.key(0))
        down += sum(leaf.nbytes for leaf in jax.tree.leaves(message))
        up += sum(leaf.nbytes for leaf in jax.tree.leaves(report.up))
    return down, up


def run(job: Job) -> Evidence:
    from matplotlib.figure import Figure

    model = mlp(64, hidden=(64,), classes=10)
    data = load("digits", clients=10)
    arrays = {"x": jnp.asarray(data.train.arrays["x"], jnp.float32), "y": jnp.asarray(data.train.arrays["y"])}
    one = ClientData(arrays, jnp.int32(0), jnp.int32(int(data.train.sizes[0])), int(data.train.sizes.max()))
    params = model.init(jax.random.key(0))
    model_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    shapes = {"x": jnp.zeros((10, 64)), "y": jnp.zeros(10, jnp.int32)}
    methods = _methods(model.loss, lambda p, batch: model.predict(p, batch["x"]))
    costs = {name: cost(method, params, shapes) for name, method in methods.items()}
    real = {name: _sent(methods[name], params, one) for name in (methods if job.full else ("Elastic",))}
    findings = []
    for name, paper in PRINTED.items():
        findings.append(Finding(f"{name}: models per round", f"{paper}x", round(costs[name].multiple, 2), paper, paper))
    findings += [
        Finding(
            "Elastic: models down", "1x: no overhead", round(costs["Elastic"].down / costs["Elastic"].model, 2), 1, 1
        ),
        Finding(
            "Elastic: models up", "2x: sensitivities too", round(costs["Elastic"].up / costs["Elastic"].model, 2), 2, 2
        ),
        Finding("Elastic over SCAFFOLD", "5x", round(costs["Elastic over SCAFFOLD"].multiple, 2), 5, 5, kind="own"),
    ]
    for name, (down, up) in real.items():
        what = f"{name}: bytes of messages really computed, over those predicted"
        findings.append(Finding(what, "1", (down + up) / (costs[name].down + costs[name].up), 1, 1, kind="own"))
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.add_subplot()
    for down, colour, label in ((True, COLOURS[0], "down"), (False, COLOURS[1], "up")):
        left = [0.0 if down else c.down / c.model for c in costs.values()]
        width = [(c.down if down else c.up) / c.model for c in costs.values()]
        axis.barh(list(costs), width, left=left, color=colour, label=label)
    axis.invert_yaxis()
    axis.set_xlabel("models sent per client and round, read off the messages")
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    note = f"A model of {model_bytes} bytes ({np.dtype(np.float32).name})."
    return Evidence(tuple(findings), figure, (note,))


ENTRY = Entry(
    title="Elastic aggregation, supplement, Section 5: communication of each method",
    paper=f"{PAPER}, Section 5",
    setting="The shapes of every message of a round, by abstract evaluation, for a two-layer network on the embedded "
    "digits; and the bytes of the messages that a client computes from its examples.",
    quick="the same shapes; computed messages of elastic aggregation only",
    run=run,
    deviations=("AdaOpt is FedAdam here.",),
)
