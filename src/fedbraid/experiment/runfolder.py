"""A run folder: the resolved configuration, the metrics, the checkpoints, a picture and a summary.

config.toml       every key; `fedbraid run config.toml` repeats the run
metrics.parquet   one row per round; evaluated columns are empty in rounds that were not evaluated
clients.parquet   one row per client of the test split: its id, number of examples, and metrics under the last model
checkpoints/      see fedbraid.simulation.checkpoint
params.safetensors  the parameters after the last round, see fedbraid.experiment.params
best.safetensors  the parameters of the best evaluation
curves.png        loss and accuracy
summary.json      a `RunSummary`, as `fedbraid run --json` prints it
.lock             while a process writes to the folder

Every file is replaced as a whole and holds its own checksum. One process at a time writes to a folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid import files
from fedbraid.data import Split
from fedbraid.experiment.config import Config, ConfigError, Stop, dump, load_config
from fedbraid.experiment.differences import flat
from fedbraid.experiment.params import PARAMS, params_sha256, read_params
from fedbraid.experiment.summary import RunSummary, current_name
from fedbraid.notices import notice
from fedbraid.sealed import Damaged, Unsealed, read_sealed, seal_json, seal_lines, table_sha256, unseal_lines
from fedbraid.simulation import hosts
from fedbraid.simulation.checkpoint import differing

__all__ = [
    "about_of",
    "check_free",
    "columns",
    "continue_with",
    "create",
    "determining",
    "discard_unused",
    "drop_partial",
    "finished",
    "held",
    "read_clients",
    "read_config",
    "read_metrics",
    "read_sealed_toml",
    "read_summary",
    "read_table",
    "reopen",
    "write_clients",
    "write_config",
    "write_metrics",
    "write_summary",
    "write_table",
]

CONFIG, METRICS, CLIENTS, CHECKPOINTS, CURVES, SUMMARY, LOCK = (
    "config.toml",
    "metrics.parquet",
    "clients.parquet",
    "checkpoints",
    "curves.png",
    "summary.json",
    ".lock",
)
CHECKSUM = b"fedbraid_sha256"  # key in the metadata of a Parquet file
MAY_CHANGE = ("engine", "checkpoint", "rounds", "stop", "track")  # by a resumed run; its rounds may only grow


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist. With several hosts, the first one holds it."""
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder} is a file: name a folder")
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.holding(folder / LOCK))

        hosts.first_alone(hold)
        yield


def check_free(folder: Path) -> None:
    """Refuse a folder that is not empty. What a process leaves that is killed before its first file does not count."""
    there = folder.iterdir() if folder.is_dir() else ()
    if any(path.name != LOCK and not path.name.startswith(files.PARTIAL) for path in there):
        raise ConfigError(
            f"{folder} exists and is not empty: choose another --out, or continue it with --resume {folder}"
        )


def create(folder: Path, config: Config) -> None:
    """Make a new run folder. A folder that is not empty is refused: nothing is overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    check_free(folder)
    drop_partial(folder)
    write_config(folder, config)


def discard_unused(folder: Path) -> None:
    """Delete the configuration of a run that ended before its first checkpoint, so that the name can be used again."""
    here = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    if all(path == folder / CONFIG or path.name.startswith(files.PARTIAL) for path in here):
        for path in here:
            path.unlink(missing_ok=True)


def write_config(folder: Path, config: Config) -> None:
    """Write the configuration of a run, with a checksum."""
    files.write_text(folder / CONFIG, seal_lines(dump(config)))


def read_config(folder: Path, settings: Sequence[str] = ()) -> Config:
    """The configuration of a run folder, changed by settings of keys that may change; a damaged one is refused."""
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist: name the folder of a run")
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has no {CONFIG}. If the run was stopped before it wrote this file, "
            f"start it again with --out {folder}"
        )
    read_sealed_toml(folder / CONFIG, lambda: dump(load_config(folder / CONFIG)))
    for setting in settings:
        if setting.partition("=")[0].strip().split(".")[0] not in MAY_CHANGE:
            raise ConfigError(
                f"--set {setting}: a run that is resumed keeps its configuration. Only rounds and the keys of "
                "[engine], [checkpoint], [stop] and [track] may change; start a new run for other values"
            )
    return load_config(folder / CONFIG, settings)


def read_sealed_toml(path: Path, again: Callable[[], str]) -> None:
    """Refuse a file of a folder that was changed or cut. ``again``: writes its content once more, without checksum."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        text = ""
    try:
        unseal_lines(text)
        return
    except Unsealed:
        # an older version wrote no checksum. It wrote every key, so that a part of a file is not what we would write
        with contextlib.suppress(ValueError):
            if text == again():
                return
        problem = "it is incomplete, or was changed"
    except Damaged as error:
        problem = str(error)
    raise ConfigError(
        f"{path} cannot be resumed from: {problem}. Restore the file, or start again in another folder; keys that may "
        "change are given with --set, not in this file"
    )


def determining(config: Config) -> dict[str, Any]:
    """The keys that determine the result of a run and differ from their defaults, flat."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    return flat({key: value for key, value in tree.items() if key not in MAY_CHANGE})


def drop_partial(folder: Path) -> None:
    """Delete what a process left that ended while it wrote a file. Only for the process that holds the folder."""
    for leftover in folder.rglob(f"{files.PARTIAL}*"):
        leftover.unlink(missing_ok=True)


def continue_with(folder: Path, config: Config) -> None:
    """Prepare a folder to be resumed with ``config``: only keys that may change differ from its own configuration."""
    drop_partial(folder)
    stored = read_config(folder)
    if apart := differing(determining(stored), determining(config)):
        raise ConfigError(f"the run in {folder} has another configuration: {apart}; start a new run for other values")
    if config.rounds < stored.rounds:
        raise ConfigError(f"rounds = {config.rounds}: the run in {folder} has {stored.rounds}; they may only grow")
    kept = stored.model_copy(update={"rounds": config.rounds, "stop": config.stop, "track": config.track})
    if kept != stored:
        write_config(folder, kept)


def finished(folder: Path, rounds: int, stop: Stop | None = None) -> RunSummary | None:
    """The summary of a run that has finished at least ``rounds`` rounds, with all its files intact; else None.

    A run that its [stop] ended earlier is finished, unless ``stop`` differs from that section of its configuration.
    """
    if not (folder / SUMMARY).is_file():
        return None
    try:
        summary = read_summary(folder)
        read_metrics(folder)
        tested = any(name.startswith("test_") for name in summary.final)
        if tested and not summary.deployed and not read_clients(folder):
            raise ConfigError(f"{folder} has no {CLIENTS}")
        if summary.params_sha256 is not None:
            stored = params_sha256(list(read_params(folder / PARAMS).arrays.values()))
            if stored != summary.params_sha256:
                raise ConfigError(f"{folder / PARAMS} is of another round than {SUMMARY}")
    except ConfigError as error:
        notice(f"{error}. The files of this run are written again")
        return None
    early = bool(summary.stopped) and (stop is None or stop == read_config(folder).stop)
    return summary if summary.finished and (summary.rounds >= rounds or early) else None


def reopen(folder: Path) -> Config:
    """The configuration of a run to resume; a finished run is refused."""
    config = read_config(folder)
    if finished(folder, config.rounds) is not None:
        raise ConfigError(f"the run in {folder} is finished; there is nothing to resume")
    return config


def columns(history: Mapping[str, Any], evaluations: Mapping[str, Any], rounds: int) -> dict[str, np.ndarray]:
    """One row per round: the history, bytes summed since the start, and the evaluations (nan in other rounds)."""
    table: dict[str, np.ndarray] = {"round": np.arange(1, rounds + 1)}
    table |= {name: np.asarray(column) for name, column in history.items()}
    for way in ("down", "up"):
        per_round = sum(v for name, v in table.items() if name.endswith(f"/bytes_{way}"))
        table[f"bytes_{way}"] = np.cumsum(np.asarray(per_round, np.float64))
    if evaluations:
        at = np.asarray(evaluations["round"]) - 1
        for name, values in evaluations.items():
            if name != "round":
                table[name] = np.full(rounds, np.nan)
                table[name][at] = np.asarray(values)
    return table


def write_metrics(folder: Path, table: Mapping[str, np.ndarray]) -> None:
    """Write the table of metrics."""
    _write_table(folder / METRICS, table)


def write_clients(folder: Path, values: Mapping[str, Any], split: Split | None = None) -> None:
    """Each test client's own metrics, nan for a client without test examples; with its id and examples in ``split``."""
    table = {name: np.asarray(column) for name, column in values.items()}
    clients = len(next(iter(table.values())))
    about: dict[str, np.ndarray] = {"client": np.arange(clients)}
    if split is not None:
        about |= {"id": np.array(list(split.ids), str)} if len(split.ids) else {}
        about["examples"] = split.sizes
    _write_table(folder / CLIENTS, {**about, **table})


def _write_table(path: Path, table: Mapping[str, np.ndarray]) -> None:
    import pyarrow as pa

    arrays = {n: pa.array(c, from_pandas=np.issubdtype(c.dtype, np.floating)) for n, c in table.items()}
    write_table(path, pa.table(arrays))


def write_table(path: Path, table: Any) -> None:
    """Replace a Parquet file; the checksum of its values is part of its metadata."""
    import pyarrow.parquet as pq

    known = {**(table.schema.metadata or {}), CHECKSUM: table_sha256(table)}
    with files.replacing(path) as partial:
        pq.write_table(table.replace_schema_metadata(known), partial)


def read_table(path: Path) -> Any:
    """A Parquet file as an Arrow table. A damaged one is refused."""
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
        checksum = (table.schema.metadata or {}).get(CHECKSUM)
        if checksum is not None and checksum.decode() != table_sha256(table):
            raise Damaged("it does not match its checksum")
    except Exception as error:  # of a damaged file, pyarrow raises errors of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"cannot read {path}, it is damaged: {reason}") from None
    return table


def about_of(path: Path, table: Any, key: bytes) -> dict[str, Any]:
    """What a Parquet file says about itself: a JSON object in the metadata of its schema, which no checksum covers."""
    try:
        found = json.loads((table.schema.metadata or {}).get(key, b"{}"))
    except ValueError as error:
        raise ConfigError(f"cannot read {path}, it is damaged: its description is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"cannot read {path}, it is damaged: its description is no JSON object")
    return found


def read_metrics(folder: Path) -> dict[str, np.ndarray]:
    """The columns of a run's metrics, nan in rounds that were not evaluated."""
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder} has no {METRICS}: the run is incomplete; resume it with --resume {folder}")
    return {current_name(name): column for name, column in _read_table(folder / METRICS).items()}


def read_clients(folder: Path) -> dict[str, np.ndarray]:
    """Each test client's own metrics; empty if nothing was evaluated."""
    return _read_table(folder / CLIENTS) if (folder / CLIENTS).is_file() else {}


def _read_table(path: Path) -> dict[str, np.ndarray]:
    table = read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def read_summary(folder: Path) -> RunSummary:
    """The summary of a run; a folder of another format is refused."""
    if not (folder / SUMMARY).is_file():
        raise ConfigError(f"{folder} has no {SUMMARY}: the run is incomplete; resume it with --resume {folder}")
    try:
        tree = read_sealed(folder / SUMMARY)
    except Damaged as error:
        raise ConfigError(f"{error}; write it again with --resume {folder}") from None
    return RunSummary.from_json(tree, str(folder))


def write_summary(folder: Path, summary: RunSummary) -> None:
    """Write the summary of a run as JSON, with a checksum."""
    files.write_text(folder / SUMMARY, seal_json(summary.to_json()))
