"""How a run would be computed."""

from __future__ import annotations

from typing import Any

from fedbraid.costs import cost, data_shapes
from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import Config
from fedbraid.lowering import explain
from fedbraid.simulation.placement import place_run

__all__ = ["explain_config"]

PLANS = {
    "sequential": "every device runs one client after the other",
    "chunks": "every device runs {chunk} clients at a time, padded to the longest of them",
    "lanes": "every device has {chunk} lanes, and a lane starts the next client when it finishes one",
}


def explain_config(config: Config) -> dict[str, Any]:
    """The plan, where the data is kept, the bytes of a client, and how every convolution runs; nothing is trained."""
    experiment = build(config)
    alg, params, data, engine = experiment.algorithm, experiment.params, experiment.data, config.engine
    cohort = data.train.num_clients if config.cohort == "all" else config.cohort
    placement = place_run(alg, params, data, engine, cohort)
    plan = placement.plan
    by_rule = engine.plan == "auto" or (engine.chunk == "auto" and plan.kind != "sequential")
    return {
        "plan": plan.kind,
        "chunk": plan.chunk,
        "how": f"{PLANS[plan.kind].format(chunk=plan.chunk)} ({'by rule' if by_rule else 'as asked'})",
        "devices": [str(device) for device in placement.mesh.devices.flat],
        "data": "streamed from the host" if placement.stream else "on the devices",
        "exchanges": [{"name": e.name, "down": e.down, "up": e.up} for e in cost(alg, params, data).exchanges],
        **explain(alg, params, data_shapes(data), engine, plan.lanes)._asdict(),
    }
