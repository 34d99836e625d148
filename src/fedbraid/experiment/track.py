"""Send the numbers of runs to TensorBoard, MLflow or Weights & Biases, while a run goes on or afterwards.

A sink is written ``tensorboard:FOLDER``, ``mlflow:URI``, ``wandb:PROJECT`` (offline: files that ``wandb sync`` uploads
later) or ``wandb+online:PROJECT``. The packages are imported only if they are asked for: TensorBoard and MLflow are in
the extra ``track``. A sink that fails never ends a run: a notice says so, and the run goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedbraid import files
from fedbraid.experiment.config import Config, ConfigError
from fedbraid.experiment.differences import flat
from fedbraid.notices import notice
from fedbraid.sealed import Damaged, read_sealed, seal_json
from fedbraid.simulation import Progress, hosts

if TYPE_CHECKING:
    from fedbraid.experiment.collect import ReportedRun

__all__ = ["check_sinks", "send", "tracking"]

EXPERIMENT = "fedbraid"
MEMORY = "track.json"  # in a run folder: the names that the sinks gave the run, and how much was sent
Row = Mapping[str, float]  # the numbers of a round; "round" is its number


class Sink(NamedTuple):
    """An open sink."""

    where: str  # where the numbers can be seen, as a sentence
    name: str  # by which the sink knows the run
    log: Callable[[Sequence[Row]], None]
    close: Callable[[bool], None]  # with whether the run is finished


class About(NamedTuple):
    """What a sink is told about a run.

    known: the name that the sink gave the run before it was resumed. sent: rounds that were sent before.
    """

    name: str
    options: Mapping[str, Any]
    known: str | None = None
    sent: int = 0
    live: bool = True


def check_sinks(sinks: Sequence[str]) -> None:
    """Refuse sinks that do not exist, or whose package is not installed."""
    for sink in sinks:
        kind, _ = _parts(sink)
        package, install = PACKAGES[kind]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{sink}: this needs {package}: pip install {install}")


def _parts(sink: str) -> tuple[str, str]:
    kind, colon, place = sink.partition(":")
    if not colon or not place or kind not in SINKS:
        raise ConfigError(
            "a sink must be tensorboard:FOLDER or mlflow:URI or wandb:PROJECT (offline) or wandb+online:PROJECT, got "
            f"{sink!r}"
        )
    return kind, place


def _open(sink: str, about: About) -> Sink:
    check_sinks([sink])
    kind, place = _parts(sink)
    return SINKS[kind](place, about)


# --- while a run goes on ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracking(config: Config, folder: Path) -> Iterator[Callable[[Progress], None]]:
    """A function that sends the rounds since the last call to all sinks of a configuration."""
    if not config.track.to or not hosts.is_first():
        yield lambda now: None
        return
    memory = _memory(folder)
    sinks: dict[str, Sink] = {}
    for one in config.track.to:
        about = About(folder.name, flat(config.model_dump(mode="json")), memory.get(one), memory["sent"])
        with _survived(one, sinks):
            sinks[one] = _open(one, about)
            notice(f"{one}: {sinks[one].where}")
    sent = memory["sent"]

    def save() -> None:
        names = {one: sink.name for one, sink in sinks.items()}
        files.write_text(folder / MEMORY, seal_json({**memory, **names, "sent": sent}))

    def send_new(now: Progress) -> None:
        nonlocal sent
        rows = now.since(sent)
        for one, sink in list(sinks.items()):
            with _survived(one, sinks):
                sink.log(rows)
        sent = max(sent, now.round)

    save()
    done = False
    try:
        yield send_new
        done = True
    finally:
        for one, sink in list(sinks.items()):
            with _survived(one, sinks):
                sink.close(done)
        save()


def _memory(folder: Path) -> dict[str, Any]:
    try:
        return {"sent": 0, **read_sealed(folder / MEMORY)}
    except FileNotFoundError:
        return {"sent": 0}
    except Damaged as error:
        notice(f"{error}. All rounds are sent again")
        return {"sent": 0}


@contextlib.contextmanager
def _survived(sink: str, sinks: dict[str, Sink]) -> Iterator[None]:
    """Turn an error of a sink into a notice, and use the sink no more."""
    try:
        yield
    except Exception as error:  # of other packages, of any kind
        sinks.pop(sink, None)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        notice(f"{sink}: sending failed ({reason}). The run goes on without it")


# --- finished runs ---------------------------------------------------------------------------------------------------


def send(runs: Sequence[ReportedRun], sink: str) -> int:
    """Send finished runs to a sink; returns the number of values written."""
    written = 0
    for run in runs:
        options = flat(run.config.model_dump(mode="json"))
        name = f"{run.label}-seed-{run.config.seed}".replace("/", "-").replace(" ", "-")
        opened = _open(sink, About(name, options, live=False))
        rows = _rows(run.table)
        opened.log(rows)
        opened.close(True)
        written += sum(len(_numbers(row)) for row in rows)
    return written


def _rows(table: Mapping[str, np.ndarray]) -> list[Row]:
    columns = {name: column for name, column in table.items() if np.issubdtype(column.dtype, np.number)}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(table["round"]))]


def _numbers(row: Row) -> dict[str, float]:
    """The finite numbers of a round."""
    return {name: float(value) for name, value in row.items() if name != "round" and np.isfinite(value)}


# --- the sinks -------------------------------------------------------------------------------------------------------


def _tensorboard(folder: str, about: About) -> Sink:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(
        f"{folder}/{about.name}",
        # on a resume, TensorBoard drops the points after the first round that is sent now: they are sent again
        purge_step=about.sent + 1 if about.sent else None,
        # tensorboardX names a file by the second and overwrites one that exists
        filename_suffix=f".{time.time_ns()}",
        # its flush does not wait for events in its queue; they are flushed a second later
        flush_secs=1,
    )
    text = "\n".join(f"    {key} = {json.dumps(value)}" for key, value in about.options.items())
    writer.add_text("config", text)

    def log(rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in _numbers(row).items():
                writer.add_scalar(name, value, int(row["round"]))
        writer.flush()

    where = f"the numbers go to {folder}/{about.name}; see them with: tensorboard --logdir {folder}"
    return Sink(where, about.name, log, lambda done: writer.close())


def _mlflow(uri: str, about: About) -> Sink:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    run = about.known
    if run is None:
        known = client.get_experiment_by_name(EXPERIMENT)
        experiment = client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
        run = str(client.create_run(experiment, run_name=about.name).info.run_id)
        client.log_batch(run, params=[Param(key, json.dumps(v)) for key, v in about.options.items()][:100])
    else:
        client.update_run(run, status="RUNNING")

    def log(rows: Sequence[Row]) -> None:
        # the values of finished runs have the time 0, so that MLflow orders them by the step, which is the round
        now = int(time.time() * 1000) if about.live else 0
        metrics = [
            Metric(name.replace("/", "."), value, now, int(row["round"]))
            for row in rows
            for name, value in _numbers(row).items()
        ]
        for start in range(0, len(metrics), 1000):  # MLflow's limit for one batch
            client.log_batch(run, metrics=metrics[start : start + 1000])

    def close(done: bool) -> None:
        client.set_terminated(run, status="FINISHED" if done else "KILLED")

    where = f"the numbers go to the experiment {EXPERIMENT!r}, run {about.name} ({run}), at {uri}"
    return Sink(where, run, log, close)


def _wandb(project: str, about: About, mode: str = "offline") -> Sink:
    import wandb  # type: ignore[import-not-found]

    run = wandb.init(
        project=project,
        name=about.name,
        id=about.known,
        resume=None if about.known is None else "allow",
        mode=mode,
        config=dict(about.options),
    )

    def log(rows: Sequence[Row]) -> None:
        for row in rows:
            run.log(_numbers(row), step=int(row["round"]))

    if mode == "offline":
        where = f"the numbers go to {run.dir}; nothing is uploaded until you run: wandb sync {Path(run.dir).parent}"
    else:
        where = f"the numbers go to {run.url}"
    return Sink(where, str(run.id), log, lambda done: run.finish(exit_code=0 if done else 1))


SINKS: Mapping[str, Callable[[str, About], Sink]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "wandb+online": lambda project, about: _wandb(project, about, "online"),
}
PACKAGES = {
    "tensorboard": ("tensorboardX", "'fedbraid[track]'"),
    "mlflow": ("mlflow", "'fedbraid[track]'"),
    "wandb": ("wandb", "wandb"),
    "wandb+online": ("wandb", "wandb"),
}
