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

import logging
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, Context

from fedbraid import files
from fedbraid.flower.pack import RAW

__all__ = ["INIT", "ContextStates", "FolderStates", "States", "states_of"]

INIT = "init"  # the tag of a client's first state
STATE_DIR = "state-dir"  # the key in a node's config

_log = logging.getLogger("flwr")

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
    """States in a folder, readable by their owner only. A file that was damaged counts as missing.

    >>> import tempfile
    >>> states = FolderStates(Path(tempfile.mkdtemp()) / "run" / "0")
    >>> states.write("init", {"bfloat16": np.ones(2, jnp.bfloat16)})
    >>> states.held(), states.read("init")["bfloat16"].dtype.name
    (['init'], 'bfloat16')
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def held(self) -> list[str]:
        places = list(self._folder.glob("[!.]*.npz"))
        for place in places:
            if not zipfile.is_zipfile(place):
                self._discard(place, "it is cut off")
        return sorted(p.name.removesuffix(".npz") for p in places if p.exists())

    def read(self, tag: str) -> dict[str, np.ndarray] | None:
        place = self._folder / f"{tag}.npz"
        if not place.exists():
            return None
        try:
            # raw bytes, because NumPy's format has no bfloat16
            with place.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {name: archive[name].view(jnp.dtype(name)) for name in archive.files}
        except (ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            self._discard(place, str(error))
            return None

    def _discard(self, place: Path, why: str) -> None:
        """A damaged state counts as lost: the server then decides how the client goes on."""
        _log.warning("the state file %s is damaged (%s): it is deleted and counts as lost", place, why)
        place.unlink(missing_ok=True)

    def write(self, tag: str, buffers: Buffers) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        raw: dict[str, Any] = {name: np.frombuffer(buffer.tobytes(), np.uint8) for name, buffer in buffers.items()}
        with (
            files.replacing(self._folder / f"{tag}.npz", mode=0o600) as partial,  # a state can tell about the data
            partial.open("wb") as file,
        ):
            np.savez(file, **raw)  # type: ignore[arg-type]  # bytes only: nothing is pickled

    def keep(self, tags: set[str]) -> None:
        for place in self._folder.glob("*.npz"):  # also temporary files that a killed process left
            if place.name.removesuffix(".npz") not in tags:
                place.unlink(missing_ok=True)
