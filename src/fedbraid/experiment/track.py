"""Finished runs to other people's dashboards: TensorBoard and MLflow (the extra ``track``).

A sink is written ``tensorboard:FOLDER`` or ``mlflow:URI`` and takes run folders after the fact, so that a run itself
depends on neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.experiment.config import ConfigError

if TYPE_CHECKING:
    from fedbraid.experiment.report import Entry

__all__ = ["send"]

EXPERIMENT = "fedbraid"


def send(entries: Sequence[Entry], sink: str) -> int:
    """Send runs to a sink; returns the number of values written."""
    kind, colon, place = sink.partition(":")
    if not colon or not place or kind not in ("tensorboard", "mlflow"):
        raise ConfigError(f"a sink reads tensorboard:FOLDER or mlflow:URI, got {sink!r}")
    return _tensorboard(entries, place) if kind == "tensorboard" else _mlflow(entries, place)


def _values(entry: Entry) -> Iterator[tuple[str, int, float]]:
    """(name, round, value) of everything measured in a run."""
    rounds = entry.table["round"]
    for name, column in entry.table.items():
        if name == "round" or not np.issubdtype(column.dtype, np.number):
            continue
        for round_, value in zip(rounds, column, strict=True):
            if np.isfinite(value):
                yield name, int(round_), float(value)


def _options(entry: Entry) -> dict[str, Any]:
    from fedbraid.experiment.report import flat

    return flat(entry.config.model_dump(mode="json"))


def _name(entry: Entry) -> str:
    return f"{entry.label}-seed-{entry.config.seed}".replace("/", "-").replace(" ", "-")


def _tensorboard(entries: Sequence[Entry], folder: str) -> int:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError("sending to TensorBoard needs tensorboardX: pip install 'fedbraid[track]'") from None
    written = 0
    for entry in entries:
        with SummaryWriter(f"{folder}/{_name(entry)}") as writer:
            writer.add_text("config", "\n".join(f"    {key} = {json.dumps(v)}" for key, v in _options(entry).items()))
            for name, round_, value in _values(entry):
                writer.add_scalar(name, value, round_)
                written += 1
    return written


def _mlflow(entries: Sequence[Entry], uri: str) -> int:
    try:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise ConfigError("sending to MLflow needs mlflow-skinny: pip install 'fedbraid[track]'") from None
    client = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
    written = 0
    for entry in entries:
        run = client.create_run(experiment, run_name=_name(entry)).info.run_id
        options = [Param(key, json.dumps(value)) for key, value in _options(entry).items()]
        client.log_batch(run, params=options[:100])
        # MLflow's own clock is of no use here: rounds are the steps
        metrics = [Metric(name.replace("/", "."), value, 0, round_) for name, round_, value in _values(entry)]
        for start in range(0, len(metrics), 1000):  # the most that one batch may hold
            client.log_batch(run, metrics=metrics[start : start + 1000])
        client.set_terminated(run)
        written += len(metrics)
    return written
