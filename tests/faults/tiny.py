"""The smallest run that touches every kind of file: three rounds, a checkpoint each, client states in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from forks import Ended, Forks

from fedbraid.experiment.runfolder import read_clients, read_metrics, read_summary

SETTINGS = (
    "rounds=3",
    "cohort=2",
    "data.clients=4",
    "model.hidden=[4]",
    "checkpoint.every=1",
    "evaluation.every=2",
    "algorithm.name=scaffold",
    "engine.devices=1",
)


def arguments(out: Path, *more: str) -> list[Any]:
    """The command that starts the run in ``out``."""
    settings = [*SETTINGS, f"engine.states_in={out / 'states'}", *more]
    return ["run", *(part for one in settings for part in ("--set", one)), "--out", out, "--quiet"]


def result(out: Path) -> tuple[Any, ...]:
    """The bytes of a finished run that do not depend on the clock."""
    table = {name: column.tobytes() for name, column in read_metrics(out).items() if name != "seconds"}
    clients = {name: column.tobytes() for name, column in read_clients(out).items()}
    summary = read_summary(out)
    return summary.params_sha256, summary.finished, summary.rounds, dict(summary.final), table, clients


def finish(forks: Forks, out: Path) -> Ended:
    """What a user or a queue does after a crash: resume; if nothing had been written yet, start the run again."""
    ended = forks.run("run", "--resume", out, "--quiet")
    if ended.status == 2 and "start it again with --out" in ended.err:
        ended = forks.run(*arguments(out))
    return ended


def clean(out: Path) -> bool:
    """Whether no partial file is left. The file of a lock may be: the lock itself ended with its process."""
    return not any(path.name.startswith((".partial-", "partial-")) for path in out.rglob("*"))


def restore(saved: Path, out: Path) -> None:
    """Make ``out`` a copy of ``saved`` again: paths inside a run folder are absolute, so it must keep its place."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(saved, out)
