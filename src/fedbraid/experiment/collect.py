"""Reading the folders of a report: runs, sweeps and comparisons."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid.experiment import runfolder
from fedbraid.experiment.assembly import load_named
from fedbraid.experiment.compare import SUMMARY, read_drift
from fedbraid.experiment.comparison import COMPARE
from fedbraid.experiment.config import Config, ConfigError, dump
from fedbraid.experiment.drift import trace_drift
from fedbraid.experiment.live import SILENT, read_live, running, silence
from fedbraid.experiment.summary import RunSummary
from fedbraid.experiment.sweep import SWEEP, TRIALS
from fedbraid.experiment.trials import Row, read_trials
from fedbraid.metric import Metric
from fedbraid.sealed import Damaged, read_sealed

__all__ = ["Collection", "ReportedRun", "Tuned", "collect"]


class ReportedRun(NamedTuple):
    """The contents of a run folder."""

    folder: Path
    label: str  # shared with the runs that differ only in their seed
    config: Config
    summary: RunSummary
    table: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    drift: dict[str, Any] | None


class Tuned(NamedTuple):
    """The trials of one tuning."""

    label: str
    rows: list[Row]
    keys: list[str]
    best: dict[str, Any] | None
    criterion: str


class Collection(NamedTuple):
    """Everything that a report shows."""

    runs: list[ReportedRun]
    tunings: list[Tuned]
    comparisons: list[dict[str, Any]]  # their summaries
    commands: list[str]  # the commands that repeat the runs
    notices: list[str]

    def metric(self, column: str) -> Metric:
        """A column with its direction, from the first run that has the column and records directions."""
        having = [run for run in self.runs if column in run.table or column in run.clients]
        recorded = [run for run in having if run.summary.metrics]
        return (recorded or having)[0].summary.metric(column)

    @property
    def groups(self) -> dict[str, list[ReportedRun]]:
        """Runs by label, in order."""
        found: dict[str, list[ReportedRun]] = {}
        for run in self.runs:
            found.setdefault(run.label, []).append(run)
        return found


def collect(folders: Sequence[Path], *, drift: int = 0, live: bool = False) -> Collection:
    """Read folders of runs, sweeps and comparisons; other, incomplete and older folders are refused.

    drift: the number of first rounds of plain runs to run again, with every local step recorded.
    live: read the rows so far of runs that are going on, instead of refusing them.
    """
    if not folders:
        raise ConfigError("nothing to report on: name folders of runs, sweeps or comparisons")
    runs: list[ReportedRun] = []
    tunings: list[Tuned] = []
    comparisons: list[dict[str, Any]] = []
    commands: list[str] = []
    for folder in folders:
        if (folder / COMPARE).is_file():
            summary = _summary(folder, "compare")
            comparisons.append(summary)
            runs += _compared(folder, summary)
            tunings += _tunings(folder, summary)
            commands.append(f"fedbraid compare {folder / COMPARE}")
        elif (folder / SWEEP).is_file():
            summary = _summary(folder, "sweep")
            label = f"{summary['algorithm']} ({folder.name})"
            tunings.append(
                Tuned(label, read_trials(folder / TRIALS), summary["keys"], summary["best"], summary["criterion"])
            )
            commands.append(f"fedbraid sweep {folder / SWEEP}")
        elif (folder / runfolder.CONFIG).is_file():
            going_on = live and running(folder)
            runs.append(_read_going_on(folder) if going_on else _read_run(folder, folder.name, drift))
            commands.append(f"fedbraid run {folder / runfolder.CONFIG}")
        elif not folder.exists():
            raise ConfigError(f"{folder} does not exist; name the folder of a run, a sweep or a comparison")
        else:
            raise ConfigError(
                f"{folder} is not the folder of a run, a sweep or a comparison: it has no {runfolder.CONFIG}, {SWEEP} "
                f"or {COMPARE}"
            )
    runs = _named(runs)
    return Collection(runs, tunings, comparisons, commands, _notices(runs, comparisons))


def _summary(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.is_file():
        raise ConfigError(
            f"{folder} is incomplete: it has no {SUMMARY}; finish it with fedbraid {kind} --resume {folder}"
        )
    try:
        summary = read_sealed(path)
    except Damaged as error:
        raise ConfigError(f"{error}; write it again with fedbraid {kind} --resume {folder}") from None
    if summary.get("kind") != kind:
        raise ConfigError(f"{path} is not the summary of a {kind}: {summary.get('kind')!r}")
    return summary


def _read_run(folder: Path, label: str, drift: int = 0) -> ReportedRun:
    summary = runfolder.read_summary(folder)
    if not summary.finished:
        raise ConfigError(f"the run in {folder} stopped after round {summary.rounds}; finish it: --resume {folder}")
    config = runfolder.read_config(folder)
    if summary.rounds < config.rounds and not summary.stopped:
        raise ConfigError(
            f"the run in {folder} is at round {summary.rounds} of {config.rounds}; finish it: --resume {folder}"
        )
    traced = trace_drift(config, load_named(config), drift) if drift else None
    table, clients = runfolder.read_metrics(folder), runfolder.read_clients(folder)
    return ReportedRun(folder, label, config, summary, table, clients, traced)


def _read_going_on(folder: Path) -> ReportedRun:
    summary, table = read_live(folder)
    return ReportedRun(folder, folder.name, runfolder.read_config(folder), summary, table, {}, None)


def _compared(folder: Path, summary: Mapping[str, Any]) -> list[ReportedRun]:
    runs = []
    for method in summary["methods"]:
        place = folder / method["folder"]
        drift = read_drift(place)
        for seed in summary["seeds"] if method["best"] is not None else ():
            runs.append(_read_run(place / f"seed-{seed}", method["label"])._replace(drift=drift))
    return runs


def _tunings(folder: Path, summary: Mapping[str, Any]) -> list[Tuned]:
    if not (folder / TRIALS).is_file():
        return []
    rows = read_trials(folder / TRIALS)
    own = {method["label"]: [row for row in rows if row["method"] == method["label"]] for method in summary["methods"]}
    return [
        Tuned(method["label"], own[method["label"]], method["tuned_over"], method["best"], method["tuned_by"])
        for method in summary["methods"]
        if own[method["label"]]
    ]


def _named(runs: list[ReportedRun]) -> list[ReportedRun]:
    """Plain runs that differ only in their seed get one label; equal labels of others get the folder's name added."""

    def method(run: ReportedRun) -> str:
        # a deployed run may have the configuration of a simulated run with which it is compared
        return f"{run.summary.deployed} {dump(run.config.model_copy(update={'seed': 0}))}"

    same: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        same.setdefault(method(run) + run.folder.parent.name, []).append(i)
    named = list(runs)
    for members in same.values():
        if len(members) > 1:
            for i in members:
                named[i] = named[i]._replace(label=runs[members[0]].label)
    owners: dict[str, str] = {}
    for i, run in enumerate(named):
        key = method(run)
        if owners.setdefault(run.label, key) != key:
            named[i] = run._replace(label=f"{run.label} ({run.folder.parent.name})")
    return named


def _notices(runs: Sequence[ReportedRun], comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings about runs that cannot be compared directly."""

    def several(values: Sequence[Any]) -> list[str]:
        return sorted({json.dumps(v, sort_keys=True, default=str) for v in values})

    notices = []
    data = several([run.config.data.model_dump() for run in runs])
    if len(data) > 1:
        names = ", ".join(re.sub(r'["{}]', "", one) for one in data)
        notices.append(f"These runs are on different data, so their scores cannot be compared: {names}.")
    for what, values in (
        ("models", [run.config.model.model_dump() for run in runs]),
        ("numbers of rounds", [run.config.rounds for run in runs]),
        ("versions of fedbraid", [run.summary.version for run in runs]),
    ):
        if len(several(values)) > 1:
            notices.append(f"These runs have different {what}: {', '.join(several(values))}.")
    for name in dict.fromkeys(name for run in runs for name in run.summary.metrics):
        if len({run.summary.metrics[name] for run in runs if name in run.summary.metrics}) > 1:
            notices.append(f"These runs disagree on whether a higher or a lower {name} is better.")
    for summary in comparisons:
        for method in summary["methods"]:
            if method["best"] is None:
                notices.append(f"{method['label']}: every point of its grid diverged, so it was not run.")
            elif method["at_edge"]:
                keys = ", ".join(method["at_edge"])
                notices.append(f"{method['label']} is best at the edge of its grid ({keys}): try values outside it.")
    for run in runs:
        if not run.summary.finished:
            notices.append(_going_on(run))
        if run.summary.diverged:
            notices.append(f"{run.label}, seed {run.config.seed}, {run.summary.problem or 'diverged'}.")
    return notices


def _going_on(run: ReportedRun) -> str:
    what = f"{run.label} is at round {run.summary.rounds:,} of {run.config.rounds:,}."
    quiet = silence(run.folder) if running(run.folder) else 0.0
    if quiet < SILENT:
        return what
    return f"{what} It wrote nothing for {quiet:.0f} s. If it was stopped, continue it with --resume {run.folder}."
