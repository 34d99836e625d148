"""When simulated clients are available: always, by day and night, or by a trace in a file.

An availability answers three questions about clients at a time in seconds: who is available, until when, and if not,
from when on. Times are numbers of seconds since the start of the run.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["Always", "Availability", "DayAndNight", "Trace", "read_trace"]

COLUMNS = ("client", "start", "end")


class Availability(Protocol):
    """The times at which clients are available. ``ids`` is an array of clients, or one client."""

    def until(self, ids: Any, time: float) -> Any:
        """The end of the interval of availability that contains ``time``; ``time`` itself if there is none."""
        ...

    def following(self, ids: Any, time: float) -> Any:
        """The first time from ``time`` on at which a client is available; infinity if there is none."""
        ...


@dataclass(frozen=True)
class Always:
    """Every client is always available."""

    def until(self, ids: Any, time: float) -> Any:
        """Infinity for every client."""
        del time
        return np.full(np.shape(ids), np.inf)

    def following(self, ids: Any, time: float) -> Any:
        """``time`` itself for every client."""
        return np.full(np.shape(ids), time)


@dataclass(frozen=True, eq=False)
class DayAndNight:
    """Every client is available for a share of each day. The days of clients begin at different times, ``phase``."""

    phase: np.ndarray  # of each client, as a share of a day
    day: float
    share: float

    def _hour(self, ids: Any, time: float) -> Any:
        return np.mod(time / self.day + self.phase[ids], 1.0)

    def until(self, ids: Any, time: float) -> Any:
        """The end of a client's day if ``time`` is in it, else ``time``."""
        left = self.share - self._hour(ids, time)
        return time + np.where(left > 0, left, 0.0) * self.day

    def following(self, ids: Any, time: float) -> Any:
        """``time`` if it is in a client's day, else the start of the next one."""
        hour = self._hour(ids, time)
        # a little later than the start of the day, because rounding may put its very start into the night
        return time + np.where(hour < self.share, 0.0, (1.0 - hour) * self.day * (1 + 1e-9) + 1e-9 * self.day)


@dataclass(frozen=True, eq=False)
class Trace:
    """Intervals of availability by client, repeated after ``period`` seconds."""

    intervals: Sequence[np.ndarray]  # by client: rows of (start, end), sorted and not overlapping
    period: float

    def _find(self, client: int, time: float) -> tuple[float, float]:
        """(start, end) of the first interval that ends after ``time``; infinite if there is none."""
        rows = self.intervals[client]
        if not len(rows):
            return np.inf, np.inf
        turn, inside = divmod(time, self.period)
        at = int(np.searchsorted(rows[:, 1], inside, side="right"))
        if at == len(rows):
            turn, at = turn + 1, 0
        start, end = rows[at] + turn * self.period
        return (start, end) if end > time else (start + self.period, end + self.period)

    def until(self, ids: Any, time: float) -> Any:
        """The end of the interval that contains ``time``, else ``time``."""
        found = [self._find(int(i), time) for i in np.ravel(ids)]
        ends = [end if start <= time < np.inf and end < np.inf else time for start, end in found]
        return np.reshape(ends, np.shape(ids))

    def following(self, ids: Any, time: float) -> Any:
        """``time`` if an interval contains it, else the start of the next one."""
        found = [max(self._find(int(i), time)[0], time) for i in np.ravel(ids)]
        return np.reshape(found, np.shape(ids))


def read_trace(path: Path, population: int, names: Sequence[str] = ()) -> Trace:
    """The trace in a CSV file with the columns client, start and end: one row per client and interval, in seconds.

    A client is a number from 0, or one of ``names``. Clients without rows are never available. The trace is repeated
    after its last end.
    """
    known: Mapping[str, int] = {str(name): i for i, name in enumerate(names)}
    rows: list[list[tuple[float, float]]] = [[] for _ in range(population)]
    try:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise ValueError(f"the trace {path} has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}")
            for number, row in enumerate(table, 2):
                client, interval = _row(row, known, population, f"{path}, line {number}")
                rows[client].append(interval)
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from None
    if not any(rows):
        raise ValueError(f"the trace {path} has no intervals: no client would ever be available")
    joined = [_joined(sorted(one)) for one in rows]
    return Trace(joined, max(float(one[-1, 1]) for one in joined if len(one)))


def _row(
    row: Mapping[str, str], known: Mapping[str, int], population: int, where: str
) -> tuple[int, tuple[float, float]]:
    name = (row["client"] or "").strip()
    client = known.get(name, int(name) if name.isdigit() else -1)
    if not 0 <= client < population:
        raise ValueError(
            f"{where}: client {name!r} is neither a number from 0 to {population - 1} nor the id of a client"
        )
    try:
        start, end = float(row["start"]), float(row["end"])
    except (TypeError, ValueError):
        raise ValueError(f"{where}: start and end must be numbers of seconds") from None
    if not 0 <= start < end < np.inf:
        raise ValueError(f"{where}: an interval needs 0 <= start < end, got {start:g} and {end:g}")
    return client, (start, end)


def _joined(intervals: list[tuple[float, float]]) -> np.ndarray:
    """Intervals sorted by their start, with those joined that overlap or touch."""
    out: list[list[float]] = []
    for start, end in intervals:
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return np.array(out, float).reshape(-1, 2)
