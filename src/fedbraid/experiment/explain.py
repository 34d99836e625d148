"""How a run would be computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedbraid.costs import cost, data_shapes
from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import Config
from fedbraid.lowering import explain, kernels, notice_unmet
from fedbraid.lowering.remat import quietly
from fedbraid.simulation.devices import total_memory
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.placement import Placement, place_run
from fedbraid.simulation.plan import client_bytes, most_clients
from fedbraid.units import format_bytes

__all__ = ["explain_config"]

PLANS = {
    "sequential": "{places} runs one client after the other",
    "chunks": "{places} runs {chunk} clients at a time, padded to the longest of them",
    "lanes": "{places} has {chunk} lanes, and a lane starts the next client when it finishes one",
}


def explain_config(config: Config) -> dict[str, Any]:
    """The plan, where the data is kept, the bytes of a client, and how every convolution runs; nothing is trained."""
    experiment = build(config)
    alg, params, data, engine = experiment.algorithm, experiment.params, experiment.data, config.engine
    cohort = data.train.num_clients if config.cohort == "all" else config.cohort
    placement = place_run(alg, params, data, engine, cohort)
    plan = placement.plan
    notice_unmet(alg, params, data_shapes(data), engine, plan.lanes)
    by_rule = engine.plan == "auto" or (engine.chunk == "auto" and plan.kind != "sequential")
    how = PLANS[plan.kind].format(chunk=plan.chunk, places=_places(engine))
    return {
        "plan": plan.kind,
        "chunk": plan.chunk,
        "how": f"{how} ({'by rule' if by_rule else 'as asked'})",
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
    total = total_memory(placement.mesh.local_devices[0])

    def needed(options: EngineOptions) -> tuple[int, int] | None:
        need = client_bytes(experiment.algorithm, experiment.params, experiment.data, options)
        most = most_clients(need, placement.mesh)
        return None if need is None or most is None else (need, most if need <= 0.5 * total else 0)

    first = [f"one client at a time on {_places(engine)}"] if plan.kind == "sequential" else []
    found = needed(engine)
    if found is None:
        return [*first, "the memory of a client is not known before the run"]
    parts = "" if engine.microbatch is None else f" with microbatches of {engine.microbatch}"
    each = "" if engine.model_devices == 1 else f" on each of its {engine.model_devices} devices"
    need = f"a client needs {format_bytes(found[0])}{each}{parts} by the compiled program"
    lines = [*first, f"{need}: {found[1]:,} fit into half of {format_bytes(total)}"]
    with quietly():
        less = needed(replace(engine, remat="layers")) if engine.remat == "none" and not first else None
    if less is not None and less[0] < 0.9 * found[0]:
        lines.append(f'with engine.remat = "layers" a client needs {format_bytes(less[0])}: {less[1]:,} fit')
    if found[1] < (1 if first else -(-plan.cohort // plan.devices)):
        if engine.microbatch is None:
            lines.append("engine.microbatch divides batches into parts: a client then needs less memory")
        if engine.model_devices == 1 and placement.mesh.devices.size > 1:
            lines.append("engine.model_devices divides the model of a client over several devices")
    return lines


def _places(engine: EngineOptions) -> str:
    return "each device" if engine.model_devices == 1 else f"each group of {engine.model_devices} devices"


def _values(config: Config) -> str:
    """The dtype of the values between the layers of clients' networks."""
    narrow = config.engine.precision == "bfloat16" and kernels.available()
    return "bfloat16 between layers, float32 in sums, norms, losses and updates" if narrow else "float32"
