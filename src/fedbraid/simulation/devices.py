"""The devices of this machine, and their memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbraid.notices import notice

__all__ = [
    "AXIS",
    "MODEL",
    "client_mesh",
    "cores",
    "free_memory",
    "host_memory",
    "place",
    "replicated",
    "sharded",
    "total_memory",
    "use_cores",
]

AXIS = "clients"
MODEL = "model"
DEVICES = 64  # most host devices on a machine with fewer cores


def cores() -> int:
    """Number of cores that this process may use; all cores where the system does not tell (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cores(count: int | None = None) -> int:
    """Make jax show ``count`` host devices (default: one per core), so that each core trains its own client.

    Call it before jax uses a device. A later call has no effect, and a notice says so. Returns the number of devices.
    """
    wanted = cores() if count is None else count
    if wanted > max(DEVICES, cores()):
        raise ValueError(
            f"devices = {wanted}: this machine has {cores()} cores, and more devices than cores do not make a run "
            f"faster; use at most {max(DEVICES, cores())}"
        )
    with contextlib.suppress(RuntimeError):  # the backend has started: its number of devices is fixed
        jax.config.update("jax_num_cpu_devices", wanted)
    found = jax.local_device_count()
    if found < wanted and jax.default_backend() == "cpu":
        notice(
            f"use_cores({wanted}) has no effect: jax has already started with {found} device{'s' * (found > 1)}. Call "
            "it before anything that uses jax, or set the environment variable JAX_NUM_CPU_DEVICES"
        )
    return found


def client_mesh(devices: int | None = None, model_devices: int = 1) -> Mesh:
    """A mesh over the first ``devices`` devices of every host (default: all).

    Its axis is ``clients``. With ``model_devices > 1`` there is a second axis of this length, ``model``.
    """
    local = jax.local_devices()
    if model_devices > 1 and jax.process_count() > 1:
        raise ValueError(f"model_devices = {model_devices}: a model can be divided over the devices of one host only")
    if devices is not None and not 1 <= devices <= len(local):
        raise ValueError(
            f"devices must be between 1 and {len(local)}, the devices jax shows here, got {devices}; on a CPU call "
            "fedbraid.use_cores(n) before anything else to get more"
        )
    every = [d for p in range(jax.process_count()) for d in jax.local_devices(process_index=p)[:devices]]
    if model_devices == 1:
        return Mesh(np.array(every), (AXIS,))
    if len(every) % model_devices:
        raise ValueError(
            f"model_devices = {model_devices}: it must divide the number of devices, which is {len(every)}; set "
            f"devices to a multiple of {model_devices}"
        )
    return Mesh(np.array(every).reshape(-1, model_devices), (AXIS, MODEL))


def place(tree: Any, where: NamedSharding) -> Any:
    """Put arrays on the devices of ``where``; every host must have the same arrays."""
    if not where.mesh.is_multi_process:
        return jax.device_put(tree, where)

    def put(leaf: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return jax.jit(jax.random.wrap_key_data, out_shardings=where)(put(jax.random.key_data(leaf)))
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

    return jax.tree.map(put, tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays of which every device has a copy."""
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays whose first axis is divided among the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


NO_LIMIT = 1 << 60  # version 1 of control groups writes a huge number for no limit
UNKNOWN_MEMORY = 8 << 30  # assumed bytes of memory where the system does not tell (Windows)


def free_memory(device: Any) -> int:
    """Free bytes on a device, by its own report; for a CPU, the machine's free memory."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_memory()


def total_memory(device: Any) -> int:
    """Total bytes of a device, used or not; for a CPU, the machine's memory, or what this process may use of it."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return _least(_pages("SC_PHYS_PAGES") or UNKNOWN_MEMORY, *(limit for limit, _ in _group_limits()), _address_space())


def host_memory() -> int:
    """Free bytes of this machine's memory; half of all memory where the system does not tell (macOS).

    A container, a service or a job of a cluster may use less: limits of control groups and of the process count.
    """
    free = _pages("SC_AVPHYS_PAGES") or (_pages("SC_PHYS_PAGES") or UNKNOWN_MEMORY) // 2
    return _least(free, *(max(0, limit - used) for limit, used in _group_limits()), _address_space())


def _least(first: int, *others: int | None) -> int:
    return min([first, *(other for other in others if other is not None)])


def _pages(name: str) -> int | None:
    """A number of memory pages by the system, in bytes; None if the system does not tell."""
    if name not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _group_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of every control group of this process that has a limit of memory (version 1 or 2)."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, place = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:  # version 2
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = PurePosixPath(place.lstrip("/"))
        for group in (inside, *inside.parents):  # a group is also bound by the limits of its parents
            limit, used = (_read(base / group / name).strip() for name in names)
            if limit.isdigit() and int(limit) < NO_LIMIT:
                found.append((int(limit), int(used) if used.isdigit() else 0))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _address_space() -> int | None:
    """The most bytes of address space that this process may still take (``ulimit -v``); None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _read(Path("/proc/self/statm")).split()
    return max(0, limit - (int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0))
