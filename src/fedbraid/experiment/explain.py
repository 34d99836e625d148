"""How a run would be computed, before it is."""

from __future__ import annotations

from typing import Any

from fedbraid.cost import cost
from fedbraid.experiment.build import build
from fedbraid.experiment.config import Config
from fedbraid.simulate.convolutions import explain_clients
from fedbraid.simulate.devices import client_mesh
from fedbraid.simulate.run import choose_plan, streams

__all__ = ["explain_config"]

PLANS = {
    "sequential": "every device takes one client after the other",
    "chunks": "every device takes {chunk} clients at a time, all as long as the longest of them",
    "lanes": "every device has {chunk} lanes, and a lane takes the next client when it is done with one",
}


def explain_config(config: Config) -> dict[str, Any]:
    """The plan, where the data lie, what a client sends, and how every convolution runs; nothing is trained."""
    experiment = build(config)
    alg, params, split, engine = experiment.algorithm, experiment.params, experiment.data.train, config.engine
    mesh = client_mesh(engine.devices)
    cohort = split.num_clients if config.cohort == "all" else config.cohort
    plan = choose_plan(alg, params, split, mesh, engine.plan, engine.chunk, cohort)
    return {
        "plan": plan.kind,
        "how": PLANS[plan.kind].format(chunk=plan.chunk),
        "devices": [str(device) for device in mesh.devices.flat],
        "data": "streamed from the host" if streams(engine.data_in, split, mesh) else "on the devices",
        "exchanges": [{"name": e.name, "down": e.down, "up": e.up} for e in cost(alg, params, split).exchanges],
        "convolutions": explain_clients(alg, params, split, engine.convolutions),
    }
