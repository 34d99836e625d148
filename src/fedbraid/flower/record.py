"""The run folder of a deployed run. It has the same files as that of a simulated run, so reports can compare them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid import files
from fedbraid.data.description import DataDescription
from fedbraid.experiment import runfolder
from fedbraid.experiment.config import Config
from fedbraid.experiment.divergence import divergence
from fedbraid.experiment.figures import draw_run, save
from fedbraid.experiment.judging import notice_unused
from fedbraid.experiment.params import PARAMS, params_sha256, write_params
from fedbraid.experiment.summary import RunSummary, summarize_run
from fedbraid.flower.server import Served
from fedbraid.metric import Metric

__all__ = ["ARRIVALS", "open_folder", "write_run"]

ARRIVALS = "arrivals.jsonl"  # of an asynchronous run: one line per server step; a simulation can repeat it


def open_folder(out: Path, config: Config) -> Path:
    """Make a run folder, or open the folder of a stopped run; returns the folder of its checkpoints."""
    if (out / runfolder.CONFIG).is_file():
        runfolder.reopen(out)
    else:
        runfolder.create(out, config)
    notice_unused(config, "deployed runs")
    return out / runfolder.CHECKPOINTS


def write_run(
    out: Path,
    config: Config,
    served: Served,
    *,
    finished: bool,
    clients: Mapping[str, Any] | None = None,
    declared: Sequence[Metric] = (),
    description: DataDescription | None = None,
) -> RunSummary:
    """Write metrics, picture and summary as a simulated run does; returns the summary.

    clients: each test client's own metrics with the last model.
    declared: the metrics that the evaluating function declares (see `fedbraid.metric`).
    description: of the data, stored beside the parameters, so that the model can be built again without the data.
    """
    table = runfolder.columns(served.history, served.evaluations, served.rounds)
    table["seconds"] = np.cumsum(table["seconds"])  # since the start, at the end of every round
    runfolder.write_metrics(out, table)
    if served.arrivals:
        files.write_text(out / ARRIVALS, "".join(json.dumps(step) + "\n" for step in served.arrivals))
    if clients:
        runfolder.write_clients(out, clients)
    what = f"{config.algorithm.name} on {config.data.name}, deployed"
    title = f"{what}: {config.model.name}, cohort {config.cohort}, seed {config.seed}"
    save(draw_run(table, title), out / runfolder.CURVES)
    problem = divergence(config, served.history, {}, served.params)  # without evaluations: nan if no client answered
    summary = summarize_run(
        config,
        table,
        served.evaluations,
        seconds=float(table["seconds"][-1]),  # of all rounds, also of those before a restart
        declared=declared,
        clients=len(served.nodes),
        finished=finished,
        diverged=bool(problem),
        problem=problem,
        engine={"plan": "flower", "clients": len(served.nodes), "counts": served.counts, "secure": served.secure},
        params_sha256=params_sha256(served.params),
        out=str(out),
    )
    write_params(out / PARAMS, served.params, round=served.rounds, description=description)
    runfolder.write_summary(out, summary)
    return summary
