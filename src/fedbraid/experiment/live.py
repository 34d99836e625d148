"""A run that is going on, for `fedbraid report --live`: rows of its progress in ``live.parquet`` of its folder.

A run writes this file every few seconds and deletes it when its own files are complete. A run that ends sooner never
writes it. The rows are those of progress reports: the newest value of each column, in some rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.experiment import runfolder
from fedbraid.experiment.assembly import Experiment
from fedbraid.experiment.config import ConfigError
from fedbraid.experiment.summary import RunSummary, machine_of_run, partition_words
from fedbraid.metric import directions
from fedbraid.simulation import Progress, hosts

__all__ = ["LIVE", "SILENT", "forget", "read_live", "recorder", "running", "silence"]

LIVE = "live.parquet"
EVERY = 2.0  # seconds between two versions of the file
MOST_ROWS = 2000  # half of the rows that were not evaluated is dropped beyond
SILENT = 60.0  # seconds without news after which a run may have been stopped
KEY = b"fedbraid_live"


def recorder(folder: Path, experiment: Experiment) -> Callable[[Progress], None]:
    """A function that takes the progress reports of a run and writes them to its folder every EVERY seconds.

    Rows of an earlier part of the run, which was stopped, are kept.
    """
    config = experiment.config
    rows: list[dict[str, float]] = []
    written = [time.monotonic()]
    machine = machine_of_run() | {"clients": experiment.data.train.num_clients}
    if partition := experiment.data.info.get("partition"):
        machine["partition"] = partition_words(partition)

    def record(now: Progress) -> None:
        if not hosts.is_first():
            return
        if not rows:
            rows.extend(row for row in _rows_before(folder) if row["round"] < now.round)
        before = rows[-1] if rows else {"round": 0, "bytes_down": 0.0, "bytes_up": 0.0}
        fresh = now.round % config.evaluation.every == 0 or now.round == config.rounds
        row = {name: value for name, value in now.row.items() if fresh or not name.startswith("test_")}
        row |= {"round": float(now.round), "seconds": now.seconds}
        for way in ("down", "up"):
            sent = sum(v for n, v in now.row.items() if n.endswith(f"/bytes_{way}"))
            row[f"bytes_{way}"] = before[f"bytes_{way}"] + sent * (now.round - before["round"])
        rows.append(row)
        if time.monotonic() - written[0] >= EVERY:
            rows[:] = _thinned(rows)
            names = [name for name in row if "/" in name or name.startswith("test_")]
            about = {"metrics": directions(names, experiment.metrics.declared), "machine": machine}
            _write(folder, rows, about)
            written[0] = time.monotonic()

    return record


def _thinned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    if len(rows) <= MOST_ROWS:
        return rows
    last = len(rows) - 1
    return [row for i, row in enumerate(rows) if i % 2 == 0 or i == last or any(n.startswith("test_") for n in row)]


def _write(folder: Path, rows: list[dict[str, float]], about: dict[str, Any]) -> None:
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names})
    runfolder.write_table(folder / LIVE, table.replace_schema_metadata({KEY: json.dumps(about)}))


def _rows_before(folder: Path) -> list[dict[str, float]]:
    if not (folder / LIVE).is_file():
        return []
    try:
        rows = runfolder.read_table(folder / LIVE).to_pylist()
    except ConfigError:  # a damaged file is written anew
        return []
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def running(folder: Path) -> bool:
    """Whether a run folder has news of a run that is not finished."""
    return (folder / LIVE).is_file()


def read_live(folder: Path) -> tuple[RunSummary, dict[str, np.ndarray]]:
    """A summary and the columns of a run so far."""
    config = runfolder.read_config(folder)
    table = runfolder.read_table(folder / LIVE)
    about = runfolder.about_of(folder / LIVE, table, KEY)
    columns = {name: table[name].to_numpy().astype(float) for name in table.column_names}
    seen = {n: c[np.isfinite(c)] for n, c in columns.items() if n.startswith("test_")}
    final = {name: float(values[-1]) for name, values in seen.items() if len(values)}
    summary = RunSummary(
        algorithm=config.algorithm.name,
        data=config.data.name,
        model=config.model.name,
        rounds=int(columns["round"][-1]),
        seconds=float(columns["seconds"][-1]),
        finished=False,
        final=final,
        metrics=about.get("metrics", {}),
        machine=about.get("machine", {}),
        bytes={way: int(columns[f"bytes_{way}"][-1]) for way in ("down", "up")},
        out=str(folder),
    )
    return summary, columns


def silence(folder: Path) -> float:
    """Seconds since a run that is going on wrote its last rows."""
    return time.time() - (folder / LIVE).stat().st_mtime


def forget(folder: Path) -> None:
    """Delete the rows of a run whose own files are complete."""
    (folder / LIVE).unlink(missing_ok=True)
