"""The server's side of a private run: secret cohorts, and a record of what was released for the accountant.

A server that restarts from its checkpoint repeats the rounds after it, with new noise. Whoever saw the models of both
attempts saw two noisy sums, and both cost epsilon. A checkpoint does not know of the first attempt. So every sum gets a
line in a file of its own, synced to the disk before the server uses the sum. After a restart all lines count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedbraid import address, files
from fedbraid.core import Algorithm
from fedbraid.flower import entropy
from fedbraid.transforms import epsilon_of_rows, is_private

__all__ = ["FILE", "PrivateRun", "Releases"]

FILE = "releases.jsonl"  # in the folder of the checkpoints


class Releases:
    """The releases of a run: in memory, and in a file if the run can be resumed.

    >>> releases = Releases(None)
    >>> releases.add("a1", 0, {"train/arrived": 5.0, "train/sampling": 0.5})
    >>> releases.rows()
    [{'train/arrived': 5.0, 'train/sampling': 0.5}]
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[tuple[str, int], dict[str, float]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole, _, torn = text.rpartition("\n")
        if torn:  # the server stopped while it wrote this line, so it did not use the sum
            files.write_text(path, whole + "\n" if whole else "")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                attempt, round_, columns = json.loads(line)
                self._put(str(attempt), int(round_), {name: float(value) for name, value in columns.items()})
            except (ValueError, TypeError, AttributeError):
                raise ValueError(
                    f"line {number} of {path} is damaged: without it the epsilon of this run is unknown. Start a new "
                    "run in another folder, and add up the epsilons"
                ) from None

    def _put(self, attempt: str, round_: int, columns: Mapping[str, float]) -> None:
        self._rows.setdefault((attempt, round_), {}).update(columns)

    def add(self, attempt: str, round_: int, columns: Mapping[str, float]) -> None:
        """Record the sum of one exchange. ``attempt`` differs between a server and its restart."""
        if self._path is not None:
            new = not self._path.exists()
            with self._path.open("a") as file:
                file.write(json.dumps([attempt, round_, dict(columns)]) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if new:
                files.sync_folder(self._path.parent)
        self._put(attempt, round_, columns)

    def rows(self) -> list[dict[str, float]]:
        """The columns of every round of every attempt."""
        return list(self._rows.values())


class PrivateRun:
    """Cohorts and epsilon of a run. Without a private exchange, cohorts come from the seed and there is no epsilon."""

    def __init__(self, alg: Algorithm) -> None:
        self._alg = alg
        self._secret = any(exchange.sealed is not None for exchange in alg.exchanges)
        self._accounted = is_private(alg)
        self._releases = Releases(None)
        self._sampling = 1.0  # the share of the connected clients that are in the last cohort
        if self._accounted:
            epsilon_of_rows(alg, [])  # raises an error now if the accountant is not installed

    def open(self, folder: Path | None) -> None:
        """Use the record in a folder of checkpoints. It may have releases of this run before a restart."""
        if self._accounted and folder is not None:
            self._releases = Releases(folder / FILE)

    def check(self, rounds: int) -> None:
        """Refuse a record with fewer rounds than the checkpoint from which the run continues."""
        if self._accounted and len(self._releases.rows()) < rounds:
            raise ValueError(
                f"the checkpoint is of round {rounds}, but {FILE} beside it has {len(self._releases.rows())} rounds: "
                "without the others the epsilon of this run is unknown. Put the file back, or start a new run"
            )

    def cohort(self, seed: int, round_: int, exchange: int, connected: int, size: int) -> np.ndarray:
        """The indices of the clients to ask. Those of a private run are secret: epsilon counts on it."""
        self._sampling = size / connected
        if self._secret:
            return entropy.cohort(connected, size)
        return address.cohort(seed, round_, exchange, connected, size)

    def record(self, exchange: str, attempt: str, round_: int, arrived: int) -> dict[str, float]:
        """Record the sum of an exchange. Call it before the server sends anything that depends on the sum."""
        if not self._accounted:
            return {}
        found = {"arrived": float(arrived), "sampling": self._sampling}
        self._releases.add(attempt, round_, {f"{exchange}/{name}": value for name, value in found.items()})
        return {"sampling": self._sampling}

    def spent(self) -> dict[str, float]:
        """The column ``epsilon``: of all releases so far, also of rounds that were repeated after a restart."""
        return {"epsilon": epsilon_of_rows(self._alg, self._releases.rows())} if self._accounted else {}
