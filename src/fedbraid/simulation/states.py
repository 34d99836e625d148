"""Client states on the host, in memory or in a file: for populations whose states do not fit on a device.

Only clients that were asked at least once take space. In a folder, a client's whole state is one record of
``states.bin``. Records are read and written by position, not through a memory map, so that the file does not count as
memory of this process.

A checkpoint does not copy states that are in a folder. It stores the record number of each client. A record that a
checkpoint refers to is never overwritten: the client's next state goes to another record. Records are used again when
the checkpoints that refer to them are deleted.

The checksum of every record is kept in memory and stored in checkpoints. A record is checked whenever it is read.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid import files
from fedbraid.notices import notice
from fedbraid.sealed import Damaged, read_sealed, seal_json
from fedbraid.simulation.checkpoint import KEEP, CheckpointError

__all__ = ["HostStates", "damage", "saved_rows"]

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


def damage(saved: dict[str, np.ndarray], places: Sequence[Path], first: Any) -> str | None:
    """What is wrong with the records that a checkpoint refers to, in words; None if they are intact.

    places: folders that may hold them. first: the state of a client that was never asked.
    """
    if "records" not in saved:
        return None
    like = HostStates(first, 1)._first
    for place in (*places, _folder_of(saved)):
        store = _Folder(place, like.dtype, 0)
        if not store.restore(saved):
            continue
        ids, step = np.asarray(saved["ids"]), max(1, BATCH // max(like.dtype.itemsize, 1))
        try:
            for at in range(0, len(ids), step):
                store.read(ids[at : at + step], np.repeat(like, len(ids[at : at + step])))
        except CheckpointError as error:
            return str(error)
        return None
    return f"the client states of this checkpoint are no longer in {_folder_of(saved)}"


def _folder_of(saved: dict[str, np.ndarray]) -> Path:
    return Path(bytes(saved["folder"]).decode())


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
        folder = _Folder(_folder_of(saved), first.dtype, 0)
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
        self._sums = np.zeros(0, np.uint64)  # per record: its checksum
        self._checked = True  # False for a checkpoint of an older version, which has no checksums
        self._free: list[int] = []
        self._saved: deque[np.ndarray] = deque(maxlen=KEEP + 1)  # records of the kept checkpoints and of the next one

    _close = staticmethod(os.close)  # bound here: when Python ends, the name os may be gone before this object

    def close(self) -> None:
        if self._file is not None:
            self._close(self._file)
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
        files.write_text(self.path / ABOUT, seal_json(about))
        opened = os.open(self.path / RECORDS, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        files.sync_folder(self.path)
        return opened

    def read(self, ids: np.ndarray, out: np.ndarray) -> None:
        at = np.where(ids < len(self._at), self._at[np.minimum(ids, len(self._at) - 1)], -1)
        size = self._dtype.itemsize
        for j, record in enumerate(at.tolist()):
            if record >= 0:
                assert self._file is not None
                row = out[j : j + 1].view(np.uint8)
                whole = _read_all(self._file, row.data, record * size)
                if not whole or (self._checked and checksum(row) != self._sums[record]):
                    raise CheckpointError(self._damaged(int(ids[j]), whole))

    def _damaged(self, client: int, whole: bool) -> str:
        what = "does not match its checksum" if whole else "is missing: the file ends before it"
        return (
            f"the state of client {client} in {self.path / RECORDS} {what}. The file was damaged or changed, or "
            "another run uses the same folder. Resume the run from its last checkpoint; if that is damaged as well, "
            "start again"
        )

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        if self._file is None:
            self._file = self._begin()
        at = self._at[ids]
        fresh = at < 0
        fresh[~fresh] = self._held[at[~fresh]]
        at[fresh] = self._take(int(fresh.sum()))
        size = self._dtype.itemsize
        for j, record in enumerate(at.tolist()):
            row = records[j : j + 1].view(np.uint8)
            self._sums[record] = checksum(row)
            try:
                _write_all(self._file, row.data, record * size)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path / RECORDS)) from error
        self._at[ids] = at

    def _take(self, count: int) -> list[int]:
        """Numbers of ``count`` unused records; the file grows if there are too few."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        end, more = len(self._held), count - len(taken)
        self._held = np.concatenate([self._held, np.zeros(more, bool)])
        self._sums = np.concatenate([self._sums, np.zeros(more, np.uint64)])
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
        found = {"ids": ids, "records": records} | ({"checksums": self._sums[records]} if self._checked else {})
        return found | {k: np.frombuffer(v.encode(), np.uint8) for k, v in words.items()}

    def restore(self, saved: dict[str, np.ndarray]) -> bool:
        """Continue with the records that a checkpoint refers to. Returns False if this folder does not hold them."""
        token = bytes(saved["token"]).decode()
        try:
            known = read_sealed(self.path / ABOUT).get("token")
            length = (self.path / RECORDS).stat().st_size // max(self._dtype.itemsize, 1)
        except (OSError, Damaged):
            return False
        if known != token:
            return False
        ids, records = np.asarray(saved["ids"]), np.asarray(saved["records"])
        length = max(length, int(records.max(initial=-1)) + 1)  # a file that was cut: reading it names the client
        self.close()
        self._population = max(self._population, int(ids.max(initial=-1)) + 1)
        self.clear()
        self._file, self._token = os.open(self.path / RECORDS, os.O_RDWR), token
        self._at[ids] = records
        # older checkpoints may refer to any record, so none is overwritten until these checkpoints are deleted
        self._held = np.ones(length, bool)
        self._saved.append(np.arange(length))
        self._sums, self._checked = np.zeros(length, np.uint64), "checksums" in saved
        if self._checked:
            self._sums[records] = saved["checksums"]
        else:
            notice(f"the client states in {self.path} are of an older version without checksums: they are not checked")
        return True


def checksum(data: np.ndarray) -> int:
    """A checksum of bytes: the sum of their 64-bit words, each times an odd weight of its position, modulo 2**64.

    Every change of a single word changes it, any other damage with near certainty. It takes a fifth of the time of
    CRC-32, which would be a tenth of a round of a small model.

    >>> data = np.arange(20, dtype=np.uint8)
    >>> checksum(data) == checksum(data.copy()), checksum(data) == checksum(np.roll(data, 8))
    (True, False)
    """
    words, rest = divmod(len(data), 8)
    weights = _weights(words + 1)
    total = int(np.einsum("i,i->", data[: 8 * words].view(np.uint64), weights[:words]))
    tail = int.from_bytes(data[8 * words :].tobytes(), "little") if rest else 0
    return (total + tail * int(weights[words])) % (1 << 64)


@functools.lru_cache(maxsize=4)
def _weights(count: int) -> np.ndarray:
    """Fixed odd numbers that look random (splitmix64 of the position)."""
    bits = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits | np.uint64(1)


def _read_all(file: int, into: memoryview, at: int) -> bool:
    """Fill ``into``; False if the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], at + done)
        if not count:
            return False
        done += count
    return True


def _write_all(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
