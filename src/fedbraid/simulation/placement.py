"""Where a run is computed: its devices, its plan, and where examples and client states are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedbraid.core import Algorithm
from fedbraid.costs import nbytes
from fedbraid.data.federated import Split
from fedbraid.simulation import hosts
from fedbraid.simulation.devices import client_mesh, free_memory, host_memory
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.plan import Plan, choose_plan

__all__ = ["Placement", "fits", "place_run", "states_on_host", "streams", "without_lanes"]

PyTree = Any


class Placement(NamedTuple):
    """The choices that :class:`EngineOptions` lead to for one run on this machine."""

    mesh: Mesh
    plan: Plan
    stream: bool  # examples stay on the host and are copied cohort by cohort
    on_host: bool  # client states stay on the host
    folder: Path | None  # folder of client states on the host; None: in memory

    def resumed(self, options: EngineOptions, tree: dict[str, Any]) -> Placement:
        """The placement of a run that continues from a checkpoint.

        The run may have halved its chunk when a device ran out of memory. The same chunk gives the same bits.
        """
        if tree.get("plan") is None or options.chunk != "auto":
            return self
        had = json.loads(bytes(np.asarray(tree["plan"], np.uint8)))
        same = {key: had.get(key) for key in ("kind", "devices", "cohort")} == {
            key: value for key, value in self.plan.record().items() if key != "chunk"
        }
        keep = bool(hosts.agreed(np.array(same)))
        return self._replace(plan=self.plan._replace(chunk=int(had["chunk"]))) if keep else self


def place_run(
    alg: Algorithm,
    params: PyTree,
    data: Any,
    options: EngineOptions,
    cohort: int,
    states_beside: Path | None = None,
    *,
    asynchronous: bool = False,
) -> Placement:
    """Where a run of ``alg`` is computed.

    data: federated data. states_beside: a folder for client states that fit neither the devices nor memory.
    asynchronous: clients have different models, so the plan cannot be lanes.
    """
    split = data.train
    mesh = client_mesh(options.devices, options.model_devices)
    if asynchronous and options.model_devices > 1:
        raise ValueError(
            f"model_devices = {options.model_devices}: an asynchronous run keeps many models, and they are not divided "
            "over devices; use model_devices = 1"
        )
    plan = choose_plan(alg, params, data, mesh, without_lanes(options, mesh) if asynchronous else options, cohort)
    on_host, folder = states_on_host(alg, params, split.num_clients, options, mesh, states_beside)
    return Placement(mesh, plan, streams(options, split, mesh), on_host, folder)


def without_lanes(options: EngineOptions, mesh: Mesh) -> EngineOptions:
    """The options of an asynchronous run: lanes share one model, and here every client has its own."""
    if options.plan == "lanes":
        raise ValueError('plan = "lanes": clients of an asynchronous run have different models; use "chunks" or "auto"')
    accelerated = mesh.local_devices[0].platform != "cpu"
    return replace(options, plan="chunks") if options.plan == "auto" and accelerated else options


def streams(options: EngineOptions, split: Split, mesh: Mesh) -> bool:
    """Whether examples stay on the host and are copied round by round."""
    return options.data_in == "host" or (options.data_in == "auto" and not fits(split.nbytes, mesh))


def fits(wanted: int, mesh: Mesh) -> bool:
    """Whether ``wanted`` bytes fit on every device and leave memory for the computation."""
    device = mesh.local_devices[0]
    copies = len(mesh.local_devices) if device.platform == "cpu" else 1
    return wanted * copies <= 0.4 * hosts.least(free_memory(device))


def states_on_host(
    alg: Algorithm,
    params: PyTree,
    population: int,
    options: EngineOptions,
    mesh: Mesh,
    beside: Path | None = None,
    points: int = 1,
) -> tuple[bool, Path | None]:
    """Whether the host keeps the client states, and in which folder (None: in its memory)."""
    bytes_each = points * nbytes(jax.eval_shape(alg.init_client, params))
    if options.states_folder is not None:
        return bytes_each > 0, options.states_folder
    if options.states_in != "auto":
        return options.states_in == "host" and bytes_each > 0, None
    if fits(bytes_each * population, mesh):
        return False, None
    too_many = bytes_each * population > 0.4 * hosts.least(host_memory())
    return True, beside if too_many else None
