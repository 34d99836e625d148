"""Sweeps on a cluster: every worker runs one bundle of points, through submitit.

The points of a grid or a random search are known before anything runs, so they can be divided among workers. Points of
one program stay together as far as the number of workers allows. A worker is the command ``fedbraid sweep --resume
FOLDER --bundle I``, which needs only the folder; submitit queues it (SLURM) or runs it on this machine (local).

    bundles.json        which points are in which bundle
    bundles/I.parquet   the trials of a bundle, rewritten after every program, so a stopped bundle can continue
    bundles/I.json      written when a bundle is done, so it is not run again
    jobs/               files of submitit: the scripts and the output of the workers

When all bundles are done, their trials become the sweep's ``trials.parquet``, as on one machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbraid import files
from fedbraid.experiment.config import Config, ConfigError
from fedbraid.experiment.lab import Lab, SweepSettings
from fedbraid.experiment.runfolder import held
from fedbraid.experiment.sweep import (
    SUMMARY,
    SWEEP,
    TRIALS,
    about,
    check_folder,
    reopen_sweep,
    sweep_in,
    write_sweep,
)
from fedbraid.experiment.trials import Trials, read_trials
from fedbraid.experiment.tuning import News, all_points, tune
from fedbraid.sealed import read_sealed, seal_json

__all__ = ["Cluster", "bundles", "collect", "run_bundle", "sweep_on"]

BUNDLES, FOLDER, JOBS = "bundles.json", "bundles", "jobs"
POLL = 0.5  # seconds between two checks of the workers


class Cluster(NamedTuple):
    """Where workers run, and how many; ``options`` are submitit's, such as timeout_min, slurm_partition."""

    name: Literal["slurm", "local"]
    workers: int
    options: Mapping[str, Any] = {}


def bundles(groups: Sequence[Sequence[int]], workers: int) -> list[list[int]]:
    """Points divided among at most ``workers``, in about equal numbers; groups are split as little as possible.

    >>> bundles([[0, 2, 4, 6], [1, 3, 5]], 3)
    [[0, 2, 4], [6, 1], [3, 5]]
    """
    flat = [i for group in groups for i in group]
    parts = np.array_split(np.array(flat, np.int64), max(1, min(workers, len(flat))))
    return [part.tolist() for part in parts]


def sweep_on(
    cluster: Cluster,
    config: Config,
    settings: SweepSettings,
    out: Path,
    *,
    resume: bool = False,
    on_news: Callable[[News], Any] | None = None,
) -> dict[str, Any]:
    """A sweep by workers on a cluster; its folder and its summary are those of `run_sweep`.

    The workers must also have access to the folder. With ``resume``, finished bundles are not run again.
    """
    began = time.perf_counter()
    if cluster.workers < 1:
        raise ConfigError(f"workers must be at least 1, got {cluster.workers}")
    executor = _executor(cluster, out)  # raises before a folder is made if something is missing
    if not resume:
        check_folder(out)
        lab = _lab(config, settings)
        parts = bundles(lab.groups(all_points(lab)), cluster.workers)
        with held(out):
            check_folder(out)
            write_sweep(out / SWEEP, config, settings)
            _write(out / BUNDLES, {"bundles": parts})
    elif not (out / BUNDLES).is_file():
        raise ConfigError(f"the sweep in {out} was not divided among workers: continue it with --resume {out} alone")
    todo = [i for i in range(len(_dealt(out))) if not _done(out, i).is_file()]
    command = [sys.executable, "-m", "fedbraid", "sweep", "--resume", str(out.absolute()), "--quiet", "--bundle"]
    if todo:
        _work(executor, [[*command, str(i)] for i in todo], out, on_news)
    left = [i for i in todo if not _done(out, i).is_file()]
    if left:
        raise ConfigError(
            f"{len(left)} of {len(_dealt(out))} bundles did not finish ({', '.join(map(str, left))}): their output is "
            f"in {out / JOBS}. The finished trials are kept; continue with --resume {out} --cluster {cluster.name}"
        )
    with held(out):
        programs = collect(out)
        summary = sweep_in(Lab(config, settings), out)
        summary |= {"programs": programs, "seconds": time.perf_counter() - began, "bundles": len(_dealt(out))}
        _write(out / SUMMARY, summary)
    return summary


def run_bundle(out: Path, index: int, *, on_news: Callable[[News], Any] | None = None) -> None:
    """Run the points of one bundle of a sweep; trials that are already in its file are not run again."""
    parts = _dealt(out)
    if not 0 <= index < len(parts):
        raise ConfigError(f"--bundle must be from 0 to {len(parts) - 1}, the bundles of {out}; got {index}")
    config, settings = reopen_sweep(out)
    (out / FOLDER).mkdir(exist_ok=True)
    with files.holding(out / FOLDER / f"{index}.lock"):
        found = tune(
            _lab(config, settings),
            Trials(out / FOLDER / f"{index}.parquet", about(settings)),
            only=parts[index],
            on_news=on_news,
        )
        _write(_done(out, index), {name: found[name] for name in ("trials", "programs", "seconds")})


def collect(out: Path) -> int:
    """Copy the trials of all bundles so far into the sweep's file; returns how many programs were compiled."""
    parts = [out / FOLDER / f"{i}.parquet" for i in range(len(_dealt(out)))]
    rows = {(row["point"], row["seed"]): row for part in parts if part.is_file() for row in read_trials(part)}
    _, settings = reopen_sweep(out)
    trials = Trials(out / TRIALS, about(settings))
    known = {(row["point"], row["seed"]) for row in trials.rows}
    trials.add([rows[key] for key in sorted(rows) if key not in known])
    said = [read_sealed(_done(out, i)) for i in range(len(parts)) if _done(out, i).is_file()]
    return sum(one["programs"] for one in said)


def _lab(config: Config, settings: SweepSettings) -> Lab:
    why = {
        settings.search == "adaptive": "search = adaptive chooses points by the scores of earlier points",
        settings.halving is not None: "halving drops points by their rank among all points",
    }
    if True in why:
        raise ConfigError(f"{why[True]}: its points cannot be divided among workers; use a grid or a random search")
    return Lab(config, settings)


def _executor(cluster: Cluster, out: Path) -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("sweeps on a cluster need submitit: pip install 'fedbraid[cluster]'") from None
    try:
        executor = submitit.AutoExecutor(folder=out / JOBS, cluster=cluster.name)
        executor.update_parameters(name="fedbraid-sweep", **{"timeout_min": 24 * 60, **cluster.options})
    except (RuntimeError, NameError, ValueError, TypeError) as error:
        raise ConfigError(f"--cluster {cluster.name}: {error}") from None
    finally:
        _drop_empty(out)
    return executor


def _drop_empty(out: Path) -> None:
    """Remove empty folders: submitit makes its folder at once, and a sweep that is refused must not leave it."""
    for folder in (out / JOBS, out):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _work(executor: Any, commands: Sequence[list[str]], out: Path, on_news: Callable | None) -> None:
    """Submit and wait. Ctrl-C cancels the workers too; their finished trials stay."""
    from submitit.helpers import CommandFunction

    (out / JOBS).mkdir(parents=True, exist_ok=True)
    with executor.batch():
        jobs = [executor.submit(CommandFunction(command)) for command in commands]
    try:
        while not all(job.done() for job in jobs):
            _tell(out, jobs, on_news)
            time.sleep(POLL)
    except BaseException:
        for job in jobs:
            job.cancel()
        raise
    _tell(out, jobs, on_news)


def _tell(out: Path, jobs: Sequence[Any], on_news: Callable | None) -> None:
    if on_news is None:
        return
    total = len(_dealt(out))
    done = sum(_done(out, i).is_file() for i in range(total))
    running = sum(job.state == "RUNNING" for job in jobs)
    on_news(News(done / total, 0, 0, None, None, f"{done} of {total} bundles done, {running} running"))


def _dealt(out: Path) -> list[list[int]]:
    if not (out / BUNDLES).is_file():
        raise ConfigError(f"{out} has no {BUNDLES}: it is not a sweep that was divided among workers")
    return read_sealed(out / BUNDLES)["bundles"]


def _done(out: Path, index: int) -> Path:
    return out / FOLDER / f"{index}.json"


def _write(path: Path, what: Mapping[str, Any]) -> None:
    files.write_text(path, seal_json(what))
