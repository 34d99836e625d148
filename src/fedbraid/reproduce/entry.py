"""The parts of a reproduction: the setting, the paper's statements, our findings, our deviations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from fedbraid.experiment.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Entry", "Evidence", "Finding", "Job", "Kind", "Size"]

Size = Literal["quick", "full"]
Kind = Literal["paper", "own"]


class Finding(NamedTuple):
    """One row of a page: a statement and our value for it, which is within its band if ``low <= ours <= high``.

    kind: ``"paper"``, a comparison: the paper states the value, and ``paper`` quotes it. ``"own"``, a check of our own:
        the paper does not state it (an identity, our code against NumPy, our code against a closed form), and ``paper``
        is the value that follows from our derivation. Pages and the index show and count the two kinds apart.

    For a statement without a number ("A is above B") ``ours`` is a bool and there is no band. None: not run.

    >>> Finding("accuracy of FedAvg", "56.7", 55.9, 55.2, 58.2).within
    True
    >>> Finding("FedSplit reaches the optimum", "yes", False).within
    False
    >>> Finding("the simulator against NumPy", "0", 1e-16, 0.0, 1e-12, kind="own").within
    True
    """

    what: str
    paper: str
    ours: float | bool | None
    low: float = -math.inf
    high: float = math.inf
    kind: Kind = "paper"

    @property
    def within(self) -> bool:
        """Whether our value is in the band, or the statement holds; False if it was not run."""
        if self.ours is None or isinstance(self.ours, bool):
            return bool(self.ours)
        return bool(math.isfinite(self.ours) and self.low <= self.ours <= self.high)  # json cannot write NumPy's bool

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
    """The result of a run: findings, a figure, and notes on this run."""

    findings: tuple[Finding, ...]
    figure: Figure
    notes: tuple[str, ...] = ()


class Job(NamedTuple):
    """How to run an entry.

    size: "quick" takes seconds on a laptop and needs no files; "full" is the paper's setting, as far as the data allow.
    work: a folder of this entry, in which long runs are saved and continued after an interruption.
    data: folders of data sets, such as ``{"shakespeare": Path(...)}``.
    tell: called with one line of progress.
    """

    size: Size
    work: Path
    data: Mapping[str, Path] = {}
    tell: Callable[[str], None] = lambda line: None

    @property
    def full(self) -> bool:
        """Whether the size is "full"."""
        return self.size == "full"

    def path_of(self, dataset: str) -> Path:
        """The folder of a data set; if it was not given, the error says how to give it."""
        if dataset not in self.data:
            raise ConfigError(f"this entry needs {dataset} data for --full: add --data {dataset}=FOLDER")
        path = Path(self.data[dataset])
        if not path.exists():
            raise ConfigError(f"--data {dataset}={path}: no such file or folder")
        return path


class Entry(NamedTuple):
    """One figure or table of a paper.

    ``setting`` and ``deviations`` describe ``--full``; ``quick`` says what the quick form checks. ``remarks`` interpret
    the last full run: for example, why a finding is outside of its band, if that is known.
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
