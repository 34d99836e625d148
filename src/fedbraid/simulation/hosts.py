"""Several hosts: one process on each, and the clients of a round spread over the devices of all hosts.

Every process runs the same program with the same configuration and lays out the same rounds. ``jax.distributed`` sums
the uploads over the devices. A decision that depends on local values (the clock, free memory, a key press) must be the
same on all hosts, so the processes first agree on the value. Only process 0 writes files.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

__all__ = [
    "HostLost",
    "agreed",
    "any_of",
    "first_alone",
    "is_first",
    "join",
    "least",
    "leave",
    "local",
    "lost",
    "number",
    "placement",
    "same",
    "several",
    "watch_over",
]

HEARTBEAT = 20  # seconds without a heartbeat after which a host counts as lost
LOST = (
    "a host of this run no longer answers: all hosts stop. Continue from the last checkpoint with "
    "fedbraid run --resume, also on fewer hosts"
)
APART = (
    "the hosts did not connect in time: start all of them with the same --hosts and --host-count, each with its own "
    "--host-id, and check that the port of the first host can be reached"
)
TEXT = 4096  # bytes of a message between hosts


class HostLost(RuntimeError):
    """Another host of the run no longer answers."""


def check(hosts: str | None, count: int | None, index: int | None) -> None:
    """Refuse wrong options before anything starts."""
    if hosts in (None, "auto"):
        if count is not None or index is not None:
            raise ValueError("--host-count and --host-id need --hosts ADDRESS:PORT")
        return
    address, colon, port = hosts.rpartition(":")
    if not (colon and address and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"--hosts must be ADDRESS:PORT of the first host, such as 10.0.0.1:9876, or auto; got {hosts!r}"
        )
    if count is None or index is None:
        raise ValueError(f"--hosts {hosts} needs --host-count, the number of hosts, and --host-id, this host's number")
    if count < 1:
        raise ValueError(f"--host-count must be at least 1, got {count}")
    if not 0 <= index < count:
        raise ValueError(f"--host-id must be from 0 to {count - 1} among {count} hosts, got {index}")


def join(hosts: str, count: int | None = None, index: int | None = None, *, timeout: int = 300) -> None:
    """Connect this process with those of the other hosts; call it before jax uses a device.

    hosts: ``ADDRESS:PORT`` of process 0, to which the others connect; or ``auto`` to read all three arguments from the
        environment that SLURM, Open MPI or Kubernetes set.
    count, index: the number of processes, and the number of this one.
    """
    check(hosts, count, index)
    arguments: dict[str, Any] = {}
    if hosts != "auto":
        arguments = {"coordinator_address": hosts, "num_processes": count, "process_id": index}
        arguments["cluster_detection_method"] = "deactivate"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=60,
        )
    except ValueError as error:
        raise ValueError(
            f"--hosts auto: this process was not started by SLURM, Open MPI or Kubernetes ({error}); give "
            "--hosts ADDRESS:PORT --host-count N --host-id I"
        ) from None
    except RuntimeError as error:  # jax's own, when process 0 does not answer in time
        raise ValueError(f"--hosts {hosts}: the hosts did not connect: {_first_line(error)}") from error


def several() -> bool:
    """Whether the run has several processes (hosts)."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which writes the files."""
    return jax.process_index() == 0


def number() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def agreed(value: Any) -> Any:
    """The value of process 0: a tree of arrays. All processes must give the same shapes."""
    if not several():
        return value
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.broadcast_one_to_all(value)
    except jax.errors.JaxRuntimeError as error:
        raise lost(error) from error


def _gathered(value: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    try:
        gathered = multihost_utils.process_allgather(value)
    except jax.errors.JaxRuntimeError as error:
        raise lost(error) from error
    return np.asarray(gathered).reshape(jax.process_count(), *value.shape)


def any_of(flag: bool) -> bool:
    """Whether the flag is true on any host."""
    return bool(_gathered(np.array([flag])).any()) if several() else flag


def least(amount: float) -> float:
    """The smallest amount over all hosts, to seven digits."""
    return float(_gathered(np.array([amount], np.float32)).min()) if several() else amount


def _texts(text: str) -> list[str]:
    """The texts of all hosts."""
    words = np.zeros(TEXT, np.uint8)
    data = text.encode()[:TEXT]
    words[: len(data)] = np.frombuffer(data, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _gathered(words)]


def same(text: str, what: str) -> None:
    """Refuse hosts whose texts differ."""
    if several() and len(set(_texts(text))) > 1:
        raise ValueError(f"the hosts were started with different {what}: start all of them with the same ones")


def first_alone(act: Callable[[], Any]) -> None:
    """Let process 0 do something. If it raises an error, all processes raise it."""
    problem = ""
    if is_first():
        try:
            act()
        except (OSError, ValueError) as error:
            if not several():
                raise
            problem = str(error) or type(error).__name__
    if several() and (problem := _texts(problem)[0]):
        raise ValueError(problem)


def local(tree: Any) -> Any:
    """This process's copy of arrays that every device of every host has."""
    if not several():
        return tree

    def own(leaf: Any) -> Any:
        shared = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return leaf.addressable_shards[0].data if shared else leaf

    return jax.tree.map(own, tree)


def placement(devices: int | None = None) -> list[str]:
    """A line for each host: its process, its name, its devices. All hosts must call it."""
    kinds = [f"{d.platform}:{d.id}" for d in jax.local_devices()[:devices]]
    mine = f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}: {' '.join(kinds)}"
    return _texts(mine) if several() else [mine]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def lost(error: BaseException) -> HostLost:
    """The exception for an error of the network between hosts."""
    return HostLost(f"{LOST} ({_first_line(error)[:200]})")


def watch_over(say: Callable[[str], None]) -> Callable[[], Any]:
    """Fork before jax starts. The child returns and does the work; the parent waits and reports how the child ended.

    When a host dies or does not connect, jax aborts the processes of all other hosts from one of its threads. No
    exception handler of Python runs, and jax prints only a stack trace. The parent then prints a readable message and
    exits with a normal status. The child must call the returned function once it has connected to the other hosts.
    """
    if not hasattr(os, "fork"):  # Windows: jax's own stack trace must do
        return lambda: None
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns about forks, but its threads have not started yet
        child = os.fork()
    if child == 0:
        threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
        os.close(reads)
        return lambda: os.write(writes, b"joined")
    os.close(writes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal also sends it to the child, which ends the run cleanly
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == -signal.SIGABRT:
        say(LOST if os.read(reads, 6) else APART)
    elif ended < 0:
        say(f"this host's process was ended by {signal.Signals(-ended).name}")
    return leave(ended if ended >= 0 else 1)


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def leave(status: int) -> NoReturn:
    """End this process at once: a normal exit of jax would wait for hosts that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
