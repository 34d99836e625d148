"""What a reproduction consists of: a setting, what the paper says, what we found, how we deviate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedbraid.experiment.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Entry", "Evidence", "Finding", "Job", "Size"]

Size = Literal["quick", "full"]


class Finding(NamedTuple):
    """One thing that the paper states and what we found; ``ours`` counts if ``low <= ours <= high``.

    A statement without a number ("A is above B") has a truth value for ``ours`` and no band; None was not run.

    >>> Finding("accuracy of FedAvg", "56.7", 55.9, 55.2, 58.2).within
    True
    >>> Finding("FedSplit reaches the optimum", "yes", False).within
    False
    """

    what: str
    paper: str
    ours: float | bool | None
    low: float = -math.inf
    high: float = math.inf

    @property
    def within(self) -> bool:
        if self.ours is None or isinstance(self.ours, bool):
            return bool(self.ours)
        return bool(math.isfinite(self.ours) and self.low <= self.ours <= self.high)  # NumPy's is no bool for JSON

    @property
    def band(self) -> str:
        """The band in words."""
        if isinstance(self.ours, bool):
            return "holds"
        if math.isinf(self.low) and math.isinf(self.high):
            return "finite"
        if math.isinf(self.high):
            return f"at least {self.low:.4g}"
        if math.isinf(self.low):
            return f"at most {self.high:.4g}"
        if self.low == self.high:
            return f"{self.low:.4g}"
        return f"{self.low:.4g} to {self.high:.4g}"


class Evidence(NamedTuple):
    """What a reproduction gives: findings, a picture, and what was noticed in this very run."""

    findings: tuple[Finding, ...]
    figure: Figure
    notes: tuple[str, ...] = ()


class Job(NamedTuple):
    """How an entry is to run.

    ``quick`` takes seconds on a laptop and needs no files; ``full`` is the paper's setting, as near as the data allow.
    ``work`` is a folder of the entry's own in which long work is kept, to go on from after an interruption.
    ``data`` names folders of data sets (``{"shakespeare": Path(...)}``). ``tell`` takes one line of progress.
    """

    size: Size
    work: Path
    data: Mapping[str, Path] = {}
    tell: Callable[[str], None] = lambda line: None

    @property
    def full(self) -> bool:
        return self.size == "full"

    def path_of(self, dataset: str) -> Path:
        """Where a data set lies; an error says how to name it."""
        if dataset not in self.data:
            raise ConfigError(f"this entry needs {dataset} data for --full: add --data {dataset}=FOLDER")
        path = Path(self.data[dataset])
        if not path.exists():
            raise ConfigError(f"--data {dataset}={path}: there is nothing there")
        return path


class Entry(NamedTuple):
    """One figure or table of a paper.

    ``setting`` and ``deviations`` are of ``--full``; ``quick`` says what the quick form checks. ``remarks`` hold what
    we make of the last full run: why a finding lies outside its band, if we know.
    """

    title: str
    paper: str  # authors, title, year
    setting: str
    quick: str
    run: Callable[[Job], Evidence]
    deviations: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # data sets of --full
    duration: str = "seconds"  # of --full, in words, with the machine
