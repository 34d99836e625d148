"""Client states on the host, in memory or in a file: for populations whose states do not fit on a device.

Only clients that were asked at least once take space. In a folder, a client's whole state is one record of
``states.bin``. Records are read and written by position, not through a memory map, so that the file does not count as
memory of this process.

A checkpoint does not copy states that are in a folder. It stores the record number of each client. A record that a
checkpoint refers to is never overwritten: the client's next state goes to another record. Records are used again when
the checkpoints that refer to them are deleted.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.simulation.checkpoint import KEEP, CheckpointError

__all__ = ["HostStates", "saved_rows"]

RECORDS, ABOUT = "states.bin", "states.json"
FORMAT = 1
BATCH = 1 << 26  # bytes of states that are read or written at a time


class HostStates:
    """The states of all clients. A client that was never written has the first state.

    >>> store = HostStates({"c": np.zeros(2)}, population=1_000)
    >>> store.write(np.array([7]), {"c": np.ones((1, 2))})
    >>> store.read(np.array([6, 7]))["c"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, first: Any, population: int, path: Path | None = None) -> None:
        leaves, self._tree = jax.tree.flatten(jax.tree.map(np.asarray, first))
        dtype = np.dtype([(f"{i:03d}", leaf.dtype, leaf.shape) for i, leaf in enumerate(leaves)])
        self._first = _records(dtype, [leaf[None] for leaf in leaves])
        self._population = population
        self._rows: _Memory | _Folder = _Memory() if path is None else _Folder(path, self._first.dtype, population)

    @property
    def touched(self) -> np.ndarray:
        """The clients whose states are stored."""
        return self._rows.clients()

    def read(self, ids: np.ndarray) -> Any:
        """The states of clients ``ids``; ids past the population (empty slots) read as the first state."""
        out = np.repeat(self._first, len(ids))
        self._rows.read(np.asarray(ids), out)
        return self._unpack(out)

    def write(self, ids: np.ndarray, states: Any) -> None:
        """Write the next states of clients ``ids``; ids past the population (empty slots) are dropped."""
        real = np.asarray(ids) < self._population
        leaves = [np.asarray(leaf)[real] for leaf in jax.tree.leaves(states)]
        self._rows.write(np.asarray(ids)[real], _records(self._first.dtype, leaves))

    def export(self) -> dict[str, np.ndarray]:
        """The arrays for a checkpoint: the stored states, or the record numbers of states in a folder."""
        return self._rows.export(self._first)

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        """Take over the states of a checkpoint, whether it has states or record numbers."""
        if isinstance(self._rows, _Folder) and "records" in saved and self._rows.restore(saved):
            return
        self._rows.clear()
        for ids, records in saved_rows(saved, self._first):
            self._rows.write(ids, records)

    def dense(self, saved: dict[str, np.ndarray]) -> Any:
        """The states of a checkpoint with a row for every client, for a run that keeps them on devices."""
        out = np.repeat(self._first, self._population)
        for ids, records in saved_rows(saved, self._first):
            out[ids] = records
        return self._unpack(out)

    def _unpack(self, records: np.ndarray) -> Any:
        leaves = [np.ascontiguousarray(records[name]) for name in records.dtype.names or ()]
        return jax.tree.unflatten(self._tree, leaves)


def _records(dtype: np.dtype, leaves: list[np.ndarray]) -> np.ndarray:
    """Several arrays with one row per client as one structured array."""
    out = np.empty(len(leaves[0]), dtype)
    for name, leaf in zip(dtype.names or (), leaves, strict=True):
        out[name] = leaf
    return out


def saved_rows(saved: dict[str, np.ndarray], first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The states in any form of checkpoint, in batches of clients: their ids, and records like ``first``."""
    names, step = first.dtype.names or (), max(1, BATCH // max(first.dtype.itemsize, 1))
    if "records" in saved:
        folder = _Folder(Path(bytes(saved["folder"]).decode()), first.dtype, 0)
        if not folder.restore(saved):
            raise CheckpointError(f"the client states of this checkpoint are no longer in {folder.path}")
        ids = np.asarray(saved["ids"])
        for at in range(0, len(ids), step):
            some = np.repeat(first, len(ids[at : at + step]))
            folder.read(ids[at : at + step], some)
            yield ids[at : at + step], some
        return
    columns = [saved[key] for key in sorted(saved) if key != "ids"]
    shapes = [(first.dtype[name].base, first.dtype[name].shape) for name in names]
    found = [(column.dtype, column.shape[1:]) for column in columns]
    if found != shapes:
        raise CheckpointError(
            f"the checkpoint's client states are {found}, this run's are {shapes}: resume with the configuration it "
            "was made with"
        )
    ids = np.asarray(saved["ids"]) if "ids" in saved else np.arange(len(columns[0]) if columns else 0)
    for at in range(0, len(ids), step):
        yield ids[at : at + step], _records(first.dtype, [column[at : at + step] for column in columns])


class _Memory:
    """Records by client."""

    def __init__(self) -> None:
        self._of: dict[int, np.ndarray] = {}

    def clients(self) -> np.ndarray:
        return np.array(sorted(self._of), np.int64)

    def read(self, ids: np.ndarray, out: np.ndarray) -> None:
        for j, i in enumerate(ids.tolist()):
            if (record := self._of.get(i)) is not None:
                out[j] = record

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        for j, i in enumerate(ids.tolist()):
            self._of[i] = records[j : j + 1].copy()[0]  # a view would keep the whole cohort in memory

    def export(self, first: np.ndarray) -> dict[str, np.ndarray]:
        ids = self.clients()
        records = np.repeat(first, len(ids))
        self.read(ids, records)
        return {"ids": ids} | {name: np.ascontiguousarray(records[name]) for name in first.dtype.names or ()}

    def clear(self) -> None:
        self._of.clear()


class _Folder:
    """Records in a file, and the record number of each client."""

    def __init__(self, path: Path, dtype: np.dtype, population: int) -> None:
        self.path, self._dtype, self._population = path, dtype, population
        self._file: int | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all states; the next write starts a new file."""
        self.close()
        self._at = np.full(self._population, -1, np.int64)
        self._held = np.zeros(0, bool)  # per record: whether a checkpoint may need it
        self._free: list[int] = []
        self._saved: deque[np.ndarray] = deque(maxlen=KEEP + 1)  # records of the kept checkpoints and of the next one

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()

    def clients(self) -> np.ndarray:
        return np.flatnonzero(self._at >= 0)

    # -- the file

    def _begin(self) -> int:
        self.path.mkdir(parents=True, exist_ok=True)
        self._token = secrets.token_hex(16)  # differs between runs in one folder, so that none reads another's records
        about = {"format": FORMAT, "token": self._token, "bytes": self._dtype.itemsize}
        (self.path / ABOUT).write_text(json.dumps(about, indent=1))
        return os.open(self.path / RECORDS, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)

    def read(self, ids: np.ndarray, out: np.ndarray) -> None:
        at = np.where(ids < len(self._at), self._at[np.minimum(ids, len(self._at) - 1)], -1)
        size = self._dtype.itemsize
        for j, record in enumerate(at.tolist()):
            if record >= 0:
                assert self._file is not None
                _read_all(self._file, out[j : j + 1].view(np.uint8).data, record * size)

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        if self._file is None:
            self._file = self._begin()
        at = self._at[ids]
        fresh = at < 0
        fresh[~fresh] = self._held[at[~fresh]]
        at[fresh] = self._take(int(fresh.sum()))
        size = self._dtype.itemsize
        for j, record in enumerate(at.tolist()):
            _write_all(self._file, records[j : j + 1].view(np.uint8).data, record * size)
        self._at[ids] = at

    def _take(self, count: int) -> list[int]:
        """Numbers of ``count`` unused records; the file grows if there are too few."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        end, more = len(self._held), count - len(taken)
        self._held = np.concatenate([self._held, np.zeros(more, bool)])
        return taken + list(range(end, end + more))

    # -- checkpoints

    def export(self, first: np.ndarray) -> dict[str, np.ndarray]:
        del first
        if self._file is None:
            self._file = self._begin()
        os.fsync(self._file)
        ids = self.clients()
        records = self._at[ids]
        self._saved.append(records)
        self._held[:] = False
        for kept in self._saved:
            self._held[kept] = True
        used = self._held.copy()
        used[records] = True
        self._free = np.flatnonzero(~used)[::-1].tolist()
        words = {"token": self._token, "folder": str(self.path.absolute())}
        return {"ids": ids, "records": records} | {k: np.frombuffer(v.encode(), np.uint8) for k, v in words.items()}

    def restore(self, saved: dict[str, np.ndarray]) -> bool:
        """Continue with the records that a checkpoint refers to. Returns False if this folder does not hold them."""
        token = bytes(saved["token"]).decode()
        try:
            known = json.loads((self.path / ABOUT).read_text()).get("token")
            length = (self.path / RECORDS).stat().st_size // self._dtype.itemsize
        except (OSError, ValueError):
            return False
        ids, records = np.asarray(saved["ids"]), np.asarray(saved["records"])
        if known != token or (len(records) and length <= records.max()):
            return False
        self.close()
        self._population = max(self._population, int(ids.max(initial=-1)) + 1)
        self.clear()
        self._file, self._token = os.open(self.path / RECORDS, os.O_RDWR), token
        self._at[ids] = records
        # older checkpoints may refer to any record, so none is overwritten until these checkpoints are deleted
        self._held = np.ones(length, bool)
        self._saved.append(np.arange(length))
        return True


def _read_all(file: int, into: memoryview, at: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], at + done)
        if not count:
            raise CheckpointError("the file of client states ends early: it was truncated during the run")
        done += count


def _write_all(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
