"""How a run would be computed, before it is."""

from __future__ import annotations

from typing import Any

from fedbraid.costs import cost, data_shapes
from fedbraid.experiment.assembly import build, states_in
from fedbraid.experiment.config import Config
from fedbraid.lowering import Lanes, LoweringOptions, explain
from fedbraid.simulation import tune
from fedbraid.simulation.devices import client_mesh
from fedbraid.simulation.plan import choose_plan
from fedbraid.simulation.run import states_on_host, streams

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
    stream = streams(engine.data_in, split, mesh)
    on_host, _ = states_on_host(alg, params, split.num_clients, states_in(config), mesh, None)
    how = (experiment.arrival, engine.convolutions, engine.precision, engine.matrices)
    job = tune.Job(alg, params, split, mesh, engine.plan, cohort, stream, on_host, *how)
    by_rule = "auto" if engine.chunk == "tuned" else engine.chunk
    base = choose_plan(alg, params, split, mesh, engine.plan, by_rule, cohort)
    plan, why = tune.foresee(engine.chunk, base, job)
    lanes = Lanes(plan.chunk if plan.kind == "lanes" else 0, plan.alike, plan.usual)
    lowered = explain(alg, params, data_shapes(split), LoweringOptions(*how[1:]), lanes)
    return {
        "plan": plan.kind,
        "chunk": plan.chunk,
        "how": f"{PLANS[plan.kind].format(chunk=plan.chunk)} ({why})",
        "devices": [str(device) for device in mesh.devices.flat],
        "data": "streamed from the host" if stream else "on the devices",
        "exchanges": [{"name": e.name, "down": e.down, "up": e.up} for e in cost(alg, params, split).exchanges],
        **lowered._asdict(),
    }
