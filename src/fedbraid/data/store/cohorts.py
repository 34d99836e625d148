"""Copy the rows of sampled clients into memory, optionally ahead of use."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedbraid.data.federated import Split
from fedbraid.data.store.layout import TextRows, bytes_of

__all__ = ["Cohort", "gather", "prefetch"]


class Cohort(NamedTuple):
    """Rows of some clients, concatenated: client ``j`` of the cohort has rows offsets[j] to offsets[j + 1]."""

    clients: np.ndarray
    arrays: dict[str, np.ndarray]
    offsets: np.ndarray

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())


def gather(split: Split, clients: Sequence[int] | np.ndarray) -> Cohort:
    """Copy the rows of some clients into flat arrays with their own offsets.

    Memory-mapped fields are read with ``pread`` instead of through the map: one system call per client instead of a
    page fault every 4 KiB, and the pages do not count as memory of this process.

    >>> split = Split.from_clients([{"x": np.array([1, 2])}, {"x": np.array([3])}])
    >>> cohort = gather(split, [1, 0])
    >>> cohort.arrays["x"].tolist(), cohort.offsets.tolist()
    ([3, 1, 2], [0, 1, 3])
    """
    clients = np.asarray(clients, np.int64)
    if clients.ndim != 1 or (len(clients) and (clients.min() < 0 or clients.max() >= split.num_clients)):
        raise ValueError(f"clients must be a 1-d array of indices from 0 to {split.num_clients - 1}")
    starts, stops = split.offsets[clients], split.offsets[clients + 1]
    offsets = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
    arrays = {}
    for field, array in split.arrays.items():
        if isinstance(array, TextRows):
            raise ValueError(
                f"field {field!r} is text: turn it into tokens first (load the data set by its catalog name)"
            )
        out = np.empty((int(offsets[-1]), *array.shape[1:]), array.dtype)
        # A slice of a memory map keeps the file offset of its parent, so only a whole map can be read by position.
        if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and hasattr(os, "preadv"):
            _read_rows(array, starts, stops, offsets, out)
        else:
            for j in range(len(clients)):
                out[offsets[j] : offsets[j + 1]] = array[starts[j] : stops[j]]
        arrays[field] = out
    return Cohort(clients, arrays, offsets)


def _read_rows(array: np.memmap, starts: np.ndarray, stops: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    row = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    flat = bytes_of(out)
    handle = os.open(array.filename, os.O_RDONLY)  # type: ignore[arg-type]
    try:
        for start, stop, at in zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=False):
            wanted, done = (stop - start) * row, 0
            while done < wanted:
                piece = flat[at * row + done : at * row + wanted]
                count = os.preadv(handle, [piece], array.offset + start * row + done)
                if not count:
                    raise ValueError(f"{array.filename}: ends early; the file was truncated while it was open")
                done += count
    finally:
        os.close(handle)


def prefetch(split: Split, cohorts: Iterable[Sequence[int] | np.ndarray], *, depth: int = 2) -> Iterator[Cohort]:
    """Gather cohorts in a thread, at most ``depth`` ahead of use; closing the iterator stops the thread.

    >>> split = Split.from_clients([{"x": np.array([1, 2])}, {"x": np.array([3])}])
    >>> [c.arrays["x"].tolist() for c in prefetch(split, [[0], [1]])]
    [[1, 2], [3]]
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    ready: queue.Queue[Cohort | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Cohort | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for clients in cohorts:
                if not put(gather(split, clients)):
                    return
            put(None)
        except BaseException as error:  # raised again in the consumer's thread
            put(error)

    thread = threading.Thread(target=work, name="fedbraid-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
