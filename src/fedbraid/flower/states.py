"""Client states that survive lost uploads, late uploads and restarts.

A client's state may change only together with the server's: SCAFFOLD's c is the mean of all c_i, FedSplit's x the mean
of all z_i. But a client cannot know whether its upload arrived in time. So it keeps what it had (*committed*) beside
what its newest work led to (*pending*), each under a tag, and the next order says from which tag to start: ``base``,
that of the last upload which the server took in. What the server does not name is dropped, except ``durable``, the tag
in the server's last checkpoint: a restarted server would start from there. A client that no longer has its base is
helped between rounds (``recover`` in :mod:`fedbraid.flower.rounds`): it never starts from anything else.

The states live in a folder of the node where its config names one (``state-dir``): they then survive a restart of the
node too. Else they live in the node's Flower context, which lives as long as the SuperNode's process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, Context

from fedbraid.flower.pack import RAW

__all__ = ["INIT", "ContextStates", "FolderStates", "States", "states_of"]

INIT = "init"  # the tag of a client's first state
STATE_DIR = "state-dir"  # the key in a node's config

Buffers = Mapping[str, np.ndarray]


class States(Protocol):
    """One client's states in one run, by tag."""

    def held(self) -> list[str]: ...
    def read(self, tag: str) -> dict[str, np.ndarray] | None: ...
    def write(self, tag: str, buffers: Buffers) -> None: ...
    def keep(self, tags: set[str]) -> None: ...


def states_of(context: Context, run: str, client: int) -> States:
    """Where this client's states are: the folder that the node's config names, or the node's context."""
    folder = context.node_config.get(STATE_DIR)
    if folder is None:
        return ContextStates(context, f"{run}/{client}")
    return FolderStates(Path(str(folder)).expanduser() / run / str(client))


class ContextStates:
    """States in the node's context: gone when the SuperNode's process ends.

    >>> from flwr.app import RecordDict
    >>> states = ContextStates(Context(1, 2, {}, RecordDict(), {}), "run/0")
    >>> states.write("init", {"float32": np.zeros(2, np.float32)})
    >>> states.held(), states.read("init")["float32"].tolist(), states.read("other")
    (['init'], [0.0, 0.0], None)
    """

    def __init__(self, context: Context, name: str) -> None:
        self._state, self._prefix = context.state, f"fedbraid/{name}/"

    def held(self) -> list[str]:
        return sorted(key.removeprefix(self._prefix) for key in self._state if key.startswith(self._prefix))

    def read(self, tag: str) -> dict[str, np.ndarray] | None:
        record = self._state.array_records.get(self._prefix + tag)
        if record is None:
            return None
        return {name: np.frombuffer(array.data, jnp.dtype(name)) for name, array in record.items()}

    def write(self, tag: str, buffers: Buffers) -> None:
        arrays = {
            name: Array(dtype=name, shape=buffer.shape, stype=RAW, data=buffer.tobytes())
            for name, buffer in buffers.items()
        }
        self._state[self._prefix + tag] = ArrayRecord(arrays)

    def keep(self, tags: set[str]) -> None:
        for tag in self.held():
            if tag not in tags:
                del self._state[self._prefix + tag]


class FolderStates:
    """States in a folder, each written beside its place and renamed into it: a state that has a name is whole.

    >>> import tempfile
    >>> states = FolderStates(Path(tempfile.mkdtemp()) / "run" / "0")
    >>> states.write("init", {"bfloat16": np.ones(2, jnp.bfloat16)})
    >>> states.held(), states.read("init")["bfloat16"].dtype.name
    (['init'], 'bfloat16')
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def held(self) -> list[str]:
        return sorted(p.name.removesuffix(".npz") for p in self._folder.glob("[!.]*.npz"))

    def read(self, tag: str) -> dict[str, np.ndarray] | None:
        place = self._folder / f"{tag}.npz"
        if not place.exists():
            return None
        with np.load(place, allow_pickle=False) as archive:  # raw bytes: NumPy's own format forgets bfloat16
            return {name: archive[name].view(jnp.dtype(name)) for name in archive.files}

    def write(self, tag: str, buffers: Buffers) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f".partial-{os.getpid()}-{tag}.npz"
        with partial.open("wb") as file:
            raw = {name: np.frombuffer(buffer.tobytes(), np.uint8) for name, buffer in buffers.items()}
            np.savez(file, allow_pickle=False, **raw)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / f"{tag}.npz")

    def keep(self, tags: set[str]) -> None:
        for place in self._folder.glob("*.npz"):  # what a killed process left half written too
            if place.name.removesuffix(".npz") not in tags:
                place.unlink(missing_ok=True)
