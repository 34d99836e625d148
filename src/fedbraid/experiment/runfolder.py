"""A run folder: the resolved configuration, the metrics, the checkpoints, a picture and a summary.

config.toml       every key; `fedbraid run config.toml` repeats the run
metrics.parquet   one row per round; evaluated columns are empty in rounds that were not evaluated
clients.parquet   one row per client of the test split: its id, number of examples, and metrics under the last model
checkpoints/      see fedbraid.simulation.checkpoint
curves.png        loss and accuracy
summary.json      a `RunSummary`, as `fedbraid run --json` prints it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.data import Split
from fedbraid.experiment.config import Config, ConfigError, dump, load_config
from fedbraid.experiment.summary import RunSummary, current_name

__all__ = [
    "columns",
    "create",
    "params_sha256",
    "read_clients",
    "read_metrics",
    "read_summary",
    "reopen",
    "write_clients",
    "write_metrics",
    "write_summary",
]

CONFIG, METRICS, CLIENTS, CHECKPOINTS, CURVES, SUMMARY = (
    "config.toml",
    "metrics.parquet",
    "clients.parquet",
    "checkpoints",
    "curves.png",
    "summary.json",
)


def create(folder: Path, config: Config) -> None:
    """Make a new run folder. A folder that is not empty is refused: nothing is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists and is not empty: choose another --out, or continue that run with --resume {folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(dump(config))


def reopen(folder: Path) -> Config:
    """The configuration of a run to resume."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG}")
    if (folder / SUMMARY).is_file() and json.loads((folder / SUMMARY).read_text()).get("finished"):
        raise ConfigError(f"the run in {folder} is finished; there is nothing to resume")
    return load_config(folder / CONFIG)


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
    import pyarrow.parquet as pq

    arrays = {n: pa.array(c, from_pandas=np.issubdtype(c.dtype, np.floating)) for n, c in table.items()}
    pq.write_table(pa.table(arrays), path)


def read_metrics(folder: Path) -> dict[str, np.ndarray]:
    """The columns of a run's metrics, nan in rounds that were not evaluated."""
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder} has no {METRICS}: the run is incomplete; resume it with --resume {folder}")
    return {current_name(name): column for name, column in _read_table(folder / METRICS).items()}


def read_clients(folder: Path) -> dict[str, np.ndarray]:
    """Each test client's own metrics; empty if nothing was evaluated."""
    return _read_table(folder / CLIENTS) if (folder / CLIENTS).is_file() else {}


def _read_table(path: Path) -> dict[str, np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"cannot read {path}: {error}; run it again") from None
    return {name: table[name].to_numpy() for name in table.column_names}


def read_summary(folder: Path) -> RunSummary:
    """The summary of a run; a folder of another format is refused."""
    if not (folder / SUMMARY).is_file():
        raise ConfigError(f"{folder} has no {SUMMARY}: the run is incomplete; resume it with --resume {folder}")
    try:
        tree = json.loads((folder / SUMMARY).read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / SUMMARY} is not valid JSON: {error}; run it again") from None
    return RunSummary.from_json(tree, str(folder))


def write_summary(folder: Path, summary: RunSummary) -> None:
    (folder / SUMMARY).write_text(json.dumps(summary.to_json(), indent=1))


def params_sha256(params: Any) -> str:
    """A hash of the bytes of the parameters in tree order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.hexdigest()
