"""The summary of a run, as in ``summary.json`` of a run folder, for simulated, deployed and compared runs."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.drawing import image_html, table_html
from fedbraid.experiment.config import Config, ConfigError
from fedbraid.metric import WORST_TENTH, Better, Metric, directions, is_client_column, metric_of_column
from fedbraid.simulation.history import SIMULATED
from fedbraid.units import format_bytes, format_seconds
from fedbraid.version import __version__

__all__ = ["RunSummary", "current_name", "machine_of_run", "partition_words", "summarize_run"]

OLD_WORST_TENTH = "_client_p10"
FORMAT = 1  # of a run folder as a whole; another format is refused


@dataclass(frozen=True, repr=False)
class RunSummary:
    """A run in a few numbers. Simulated, deployed and compared runs have the same fields.

    problem: one line on a divergence, with the round, the likely cause and the next step; empty if all went well.
    stopped: why the run ended before its last round; empty if it did not.
    final: the last value of every evaluated column.
    best: ``metric``, ``round`` and ``value`` of the best evaluation; empty if nothing was evaluated.
    metrics: which direction is better, for every evaluated column and every reported metric that has a direction.
    bytes: sent over the whole run, ``down`` to the clients and ``up`` to the server.
    simulated_seconds: simulated time of the whole run; None without a clock.
    engine: how it was computed; the keys depend on the engine.
    machine: hardware, versions and date (see `machine_of_run`), number of clients, partition; empty in older folders.

    >>> summary = RunSummary("fedavg", "digits", "mlp", rounds=2, seconds=0.5, final={"test_rank": 3.0},
    ...                      metrics={"test_rank": "lower"})
    >>> summary.rounds_per_second, summary.metric("test_rank_client_worst").better
    (4.0, 'lower')
    >>> RunSummary.from_json(summary.to_json()) == summary
    True
    """

    algorithm: str
    data: str
    model: str
    rounds: int
    seconds: float
    finished: bool = True
    diverged: bool = False
    problem: str = ""
    stopped: str = ""
    final: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Better] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    engine: Mapping[str, Any] = field(default_factory=dict)
    params_sha256: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    simulated_seconds: float | None = None
    out: str = ""
    version: str = __version__

    @property
    def rounds_per_second(self) -> float:
        """Rounds per second; nan if no time was measured."""
        return self.rounds / self.seconds if self.seconds > 0 else float("nan")

    @property
    def deployed(self) -> bool:
        """Whether the run was a deployment through Flower, not a simulation."""
        return self.engine.get("plan") == "flower"

    def rows(self) -> list[tuple[str, str]]:
        """The summary as a small table: names and words."""
        rows = [("run", f"{self.algorithm} on {self.data}: {self.model}"), ("rounds", self._rounds)]
        if self._scores:
            rows.append(("last scores", self._scores))
        if self.best:
            rows.append(("best", f"{self.best['metric']} {self.best['value']:.4g} after round {self.best['round']}"))
        if "epsilon" in self.final:
            rows.append(("epsilon", f"{self.final['epsilon']:.3g}"))
        rows.append(("sent", f"{format_bytes(self.bytes['down'])} down, {format_bytes(self.bytes['up'])} up"))
        if self.simulated_seconds is not None:
            rows.append(("simulated time", format_seconds(self.simulated_seconds)))
        if self.stopped:
            rows.append(("ended early", self.stopped))
        return [*rows, ("problem", self.problem)] if self.problem else rows

    @property
    def _rounds(self) -> str:
        state = "" if self.finished else ", stopped before the end"
        return f"{self.rounds} in {self.seconds:.1f} s{', deployed' if self.deployed else ''}{state}"

    @property
    def _scores(self) -> str:
        pooled = {name: value for name, value in self.final.items() if name != "epsilon" and not is_client_column(name)}
        return ", ".join(f"{name} {value:.4g}" for name, value in pooled.items())

    def __repr__(self) -> str:
        """Two or three lines: the run, its last scores, and why it ended early or diverged."""
        lines = [f"RunSummary of {self.out or 'a run'}: {self.algorithm} on {self.data}, {self.model}"]
        lines.append(f"  rounds: {self._rounds}; {self._scores or 'nothing was evaluated'}")
        return "\n".join([*lines, *(f"  {why}" for why in (self.stopped, self.problem) if why)])

    def _repr_html_(self) -> str:
        picture = Path(self.out) / "curves.png" if self.out else None
        shown = ""
        if picture is not None and picture.is_file():
            shown = image_html(picture.read_bytes(), f"curves of {self.out}")
        return table_html([*self.rows(), ("folder", self.out)]) + shown

    def metric(self, column: str) -> Metric:
        """A column with its direction. Folders of older versions do not record it: then the name must be well known."""
        try:
            return metric_of_column(column, [Metric(name, better) for name, better in self.metrics.items()])
        except ValueError:
            raise ConfigError(
                f"{self.out or 'this run'} does not say whether higher or lower {column!r} is better: an older version "
                f"of fedbraid ({self.version}) wrote it; run its config.toml again"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """Plain data, as ``summary.json`` holds it."""
        rate = self.rounds_per_second
        return {"format": FORMAT, **asdict(self), "rounds_per_second": rate if np.isfinite(rate) else None}

    @staticmethod
    def from_json(tree: Mapping[str, Any], where: str = "the summary") -> RunSummary:
        """The summary in plain data; other formats are refused. ``where`` names its place in error messages."""
        if tree.get("format") != FORMAT:
            raise ConfigError(
                f"{where} has format {tree.get('format')!r} (written by fedbraid {tree.get('version', 'unknown')}), "
                f"this version reads {FORMAT}: use the version that wrote it, or run its config.toml again"
            )
        known = {one.name for one in fields(RunSummary)}
        missing = [name for name in ("algorithm", "rounds", "seconds", "finished") if name not in tree]
        if missing:
            raise ConfigError(f"{where} is incomplete: it has no {', '.join(missing)}; run its config.toml again")
        given: dict[str, Any] = {"data": "", "model": ""} | {name: tree[name] for name in tree if name in known}
        given["final"] = {current_name(name): value for name, value in tree.get("final", {}).items()}
        return RunSummary(**given)


def current_name(column: str) -> str:
    """The current name of a column of an older run folder.

    >>> current_name("test_loss_client_p10")
    'test_loss_client_worst_tenth'
    """
    return column.removesuffix(OLD_WORST_TENTH) + WORST_TENTH if column.endswith(OLD_WORST_TENTH) else column


def machine_of_run() -> dict[str, Any]:
    """The hardware of this process, the versions of what computes, and the date.

    >>> sorted(machine_of_run())
    ['cores', 'date', 'devices', 'hardware', 'jax', 'python']
    """
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    return {
        "hardware": _processor() if devices[0].platform == "cpu" else kind,
        "devices": len(devices),
        "cores": os.cpu_count() or 1,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def partition_words(partition: Mapping[str, Any]) -> str:
    """A partition in words.

    >>> partition_words({"name": "dirichlet", "seed": 0, "alpha": 0.3, "clients": 50})
    'dirichlet, alpha 0.3'
    """
    rest = [f"{key} {value}" for key, value in partition.items() if key not in ("name", "seed", "clients")]
    return ", ".join([str(partition.get("name", "natural")), *rest])


@functools.cache
def _processor() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):  # Linux; elsewhere the platform module knows it
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def summarize_run(
    config: Config,
    table: Mapping[str, np.ndarray],
    evaluations: Mapping[str, Any],
    *,
    seconds: float,
    declared: Iterable[Metric] = (),
    clients: int | None = None,
    partition: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunSummary:
    """The summary of the run whose columns are ``table`` (see `runfolder.columns`); ``more``: further fields.

    clients: the number of all training clients. partition: how the data was divided, as ``data.info`` records it.
    """
    known = {"clients": clients, "partition": None if partition is None else partition_words(partition)}
    final = {name: float(np.asarray(column)[-1]) for name, column in evaluations.items() if name != "round"}
    return RunSummary(
        algorithm=config.algorithm.name,
        data=config.data.name,
        model=config.model.name,
        rounds=len(table["round"]),
        seconds=seconds,
        final=final | ({"epsilon": float(table["epsilon"][-1])} if "epsilon" in table else {}),
        metrics=directions([*evaluations, *(name for name in table if "/" in name)], declared),
        machine=machine_of_run() | {key: value for key, value in known.items() if value is not None},
        bytes={way: int(table[f"bytes_{way}"][-1]) for way in ("down", "up")},
        simulated_seconds=float(table[SIMULATED][-1]) if SIMULATED in table else None,
        **more,
    )
