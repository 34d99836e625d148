"""How a run would be computed."""

from __future__ import annotations

from typing import Any

from fedbraid.costs import cost
from fedbraid.experiment.assembly import build, states_in
from fedbraid.experiment.config import Config
from fedbraid.lowering.convolutions import explain_clients, with_convolutions
from fedbraid.lowering.grown import explain_growth
from fedbraid.lowering.precision import with_precision
from fedbraid.simulation import tune
from fedbraid.simulation.devices import client_mesh
from fedbraid.simulation.plan import choose_plan
from fedbraid.simulation.run import states_on_host, streams

__all__ = ["explain_config"]

PLANS = {
    "sequential": "every device takes one client after the other",
    "chunks": "every device takes {chunk} clients at a time, padded to the longest of them",
    "lanes": "every device has {chunk} lanes, and a lane starts the next client when it is done with one",
}


def explain_config(config: Config) -> dict[str, Any]:
    """The plan, where the data is kept, the bytes of a client, and how every convolution runs; nothing is trained."""
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
    return {
        "plan": plan.kind,
        "chunk": plan.chunk,
        "how": f"{PLANS[plan.kind].format(chunk=plan.chunk)} ({why})",
        "devices": [str(device) for device in mesh.devices.flat],
        "data": "streamed from the host" if stream else "on the devices",
        "exchanges": [{"name": e.name, "down": e.down, "up": e.up} for e in cost(alg, params, split).exchanges],
        "convolutions": explain_clients(alg, params, split, engine.convolutions),
        "matrices": explain_growth(
            with_convolutions(with_precision(alg, engine.precision), engine.convolutions),
            params,
            split,
            plan,
            engine.matrices,
        ),
    }
