"""Client states that survive lost uploads, late uploads and restarts.

A client's state may change only together with the server's: SCAFFOLD's c is the mean of all c_i, FedSplit's x the mean
of all z_i. But a client cannot know whether its upload arrived in time. So it keeps both the old state (*committed*)
and the new one (*pending*), each under a tag. The next order gives the tag to start from, ``base``: that of the last
upload that the server accepted. It also gives ``durable``, the tag in the server's last checkpoint, from which a
restarted server would continue. States with other tags are deleted. A client that lost its base state never starts from
another one: ``recover`` in :mod:`fedbraid.flower.rounds` handles it between rounds.

If the node's config names a folder (``state-dir``), the states are kept there and survive a restart of the node. Else
they are kept in the node's Flower context, until the SuperNode's process ends.
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
    """This client's states: in the folder that the node's config names, else in the node's context."""
    folder = context.node_config.get(STATE_DIR)
    if folder is None:
        return ContextStates(context, f"{run}/{client}")
    return FolderStates(Path(str(folder)).expanduser() / run / str(client))


class ContextStates:
    """States in the node's context, until the SuperNode's process ends.

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
    """States in a folder. Each is written to a temporary file and then renamed, so a state with its name is complete.

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
        with np.load(place, allow_pickle=False) as archive:  # raw bytes, because NumPy's format has no bfloat16
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
        for place in self._folder.glob("*.npz"):  # also temporary files that a killed process left
            if place.name.removesuffix(".npz") not in tags:
                place.unlink(missing_ok=True)
