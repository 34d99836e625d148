"""The run folder of a deployed run: the same files as a simulated run's, so that reports compare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.experiment import runfolder
from fedbraid.experiment.config import Config
from fedbraid.experiment.plots import curves
from fedbraid.flower.server import Served

__all__ = ["open_folder", "write_run"]


def open_folder(out: Path, config: Config) -> Path:
    """Make a run folder, or open one whose run stopped; returns the place of its checkpoints."""
    if (out / runfolder.CONFIG).is_file():
        runfolder.reopen(out)
    else:
        runfolder.create(out, config)
    return out / runfolder.CHECKPOINTS


def write_run(
    out: Path, config: Config, served: Served, *, finished: bool, clients: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Metrics, picture and summary, as a simulated run has them; returns the summary.

    clients: each test client's own metrics under the last model.
    """
    table = runfolder.columns(served.history, served.evaluations, served.rounds)
    table["seconds"] = np.cumsum(table["seconds"])  # since the start, at the end of every round
    runfolder.write_metrics(out, table)
    if clients:
        runfolder.write_clients(out, clients)
    what = f"{config.algorithm.name} on {config.data.name}, deployed"
    title = f"{what}: {config.model.name}, cohort {config.cohort}, seed {config.seed}"
    curves(table, title, out / runfolder.CURVES)
    final = {name: float(column[-1]) for name, column in served.evaluations.items() if name != "round"}
    summary = {
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "model": config.model.name,
        "finished": finished,
        "rounds": served.rounds,
        "seconds": float(table["seconds"][-1]),  # of all rounds, also of those before a restart
        "rounds_per_second": served.rounds / float(table["seconds"][-1]),
        "final": final,
        "bytes": {way: int(table[f"bytes_{way}"][-1]) for way in ("down", "up")},
        "engine": {"plan": "flower", "clients": len(served.nodes), "counts": served.counts},
        "params_sha256": runfolder.params_sha256(served.params),
        "out": str(out),
    }
    runfolder.write_summary(out, summary)
    return summary
