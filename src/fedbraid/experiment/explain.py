"""How a run would be computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedbraid.costs import cost, data_shapes
from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import Config
from fedbraid.lowering import explain, kernels
from fedbraid.lowering.remat import quietly
from fedbraid.simulation.devices import total_memory
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.placement import Placement, place_run
from fedbraid.simulation.plan import client_bytes, most_clients
from fedbraid.units import format_bytes

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
        "memory": _memory(experiment, placement, config),
        "values": _values(config),
        "data": "streamed from the host" if placement.stream else "on the devices",
        "exchanges": [{"name": e.name, "down": e.down, "up": e.up} for e in cost(alg, params, data).exchanges],
        **explain(alg, params, data_shapes(data), engine, plan.lanes)._asdict(),
    }


def _memory(experiment: Any, placement: Placement, config: Config) -> list[str]:
    """How many clients fit on a device at a time, and why. Compiles the program of a client."""
    plan, engine = placement.plan, config.engine
    total = format_bytes(total_memory(placement.mesh.local_devices[0]))

    def needed(options: EngineOptions) -> tuple[int, int] | None:
        need = client_bytes(experiment.algorithm, experiment.params, experiment.data, options)
        most = most_clients(need, placement.mesh)
        return None if need is None or most is None else (need, most)

    first = ["one client at a time on each device"] if plan.kind == "sequential" else []
    found = needed(engine)
    if found is None:
        return [*first, "the memory of a client is not known before the run"]
    parts = "" if engine.microbatch is None else f" with microbatches of {engine.microbatch}"
    why = (
        f"a client needs {format_bytes(found[0])}{parts} by the compiled program: {found[1]:,} fit into half of {total}"
    )
    lines = [*first, why]
    with quietly():
        less = needed(replace(engine, remat="layers")) if engine.remat == "none" and not first else None
    if less is not None and less[0] < 0.9 * found[0]:
        lines.append(f'with engine.remat = "layers" a client needs {format_bytes(less[0])}: {less[1]:,} fit')
    if found[1] < -(-plan.cohort // plan.devices) and engine.microbatch is None:
        lines.append("engine.microbatch divides batches into parts, and a client then needs less memory")
    return lines


def _values(config: Config) -> str:
    """The dtype of the values between the layers of clients' networks."""
    narrow = config.engine.precision == "bfloat16" and kernels.available()
    return "bfloat16 between layers, float32 in sums, norms, losses and updates" if narrow else "float32"
