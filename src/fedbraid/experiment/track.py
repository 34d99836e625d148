"""Send finished runs to TensorBoard or MLflow (the extra ``track``).

A sink is written ``tensorboard:FOLDER`` or ``mlflow:URI``. Values are read from finished run folders, so a run itself
depends on neither tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.experiment.config import ConfigError
from fedbraid.experiment.differences import flat

if TYPE_CHECKING:
    from fedbraid.experiment.collect import ReportedRun

__all__ = ["send"]

EXPERIMENT = "fedbraid"


def send(runs: Sequence[ReportedRun], sink: str) -> int:
    """Send runs to a sink; returns the number of values written."""
    kind, colon, place = sink.partition(":")
    if not colon or not place or kind not in ("tensorboard", "mlflow"):
        raise ConfigError(f"a sink must be tensorboard:FOLDER or mlflow:URI, got {sink!r}")
    return _tensorboard(runs, place) if kind == "tensorboard" else _mlflow(runs, place)


def _values(run: ReportedRun) -> Iterator[tuple[str, int, float]]:
    """(name, round, value) of everything measured in a run."""
    rounds = run.table["round"]
    for name, column in run.table.items():
        if name == "round" or not np.issubdtype(column.dtype, np.number):
            continue
        for round_, value in zip(rounds, column, strict=True):
            if np.isfinite(value):
                yield name, int(round_), float(value)


def _options(run: ReportedRun) -> dict[str, Any]:
    return flat(run.config.model_dump(mode="json"))


def _name(run: ReportedRun) -> str:
    return f"{run.label}-seed-{run.config.seed}".replace("/", "-").replace(" ", "-")


def _tensorboard(runs: Sequence[ReportedRun], folder: str) -> int:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError("sending to TensorBoard needs tensorboardX: pip install 'fedbraid[track]'") from None
    written = 0
    for run in runs:
        with SummaryWriter(f"{folder}/{_name(run)}") as writer:
            writer.add_text("config", "\n".join(f"    {key} = {json.dumps(v)}" for key, v in _options(run).items()))
            for name, round_, value in _values(run):
                writer.add_scalar(name, value, round_)
                written += 1
    return written


def _mlflow(runs: Sequence[ReportedRun], uri: str) -> int:
    try:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise ConfigError("sending to MLflow needs mlflow-skinny: pip install 'fedbraid[track]'") from None
    client = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
    written = 0
    for run in runs:
        known_as = client.create_run(experiment, run_name=_name(run)).info.run_id
        options = [Param(key, json.dumps(value)) for key, value in _options(run).items()]
        client.log_batch(known_as, params=options[:100])
        # the timestamp of every value is 0, so MLflow orders them by the step, which is the round
        metrics = [Metric(name.replace("/", "."), value, 0, round_) for name, round_, value in _values(run)]
        for start in range(0, len(metrics), 1000):  # MLflow's limit for one batch
            client.log_batch(known_as, metrics=metrics[start : start + 1000])
        client.set_terminated(known_as)
        written += len(metrics)
    return written
