"""A run folder: the resolved configuration, the metrics, the checkpoints, a picture and a summary.

config.toml       every key; `fedbraid run config.toml` repeats the run
metrics.parquet   one row per round; evaluation columns are empty in rounds without one
checkpoints/      see fedbraid.simulate.checkpoint
curves.png        loss and accuracy
summary.json      what `fedbraid run --json` prints
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.experiment.config import Config, ConfigError, dump, load_config
from fedbraid.simulate.run import Result

__all__ = ["create", "params_sha256", "read_metrics", "reopen", "write_metrics", "write_summary"]

CONFIG, METRICS, CHECKPOINTS, CURVES, SUMMARY = (
    "config.toml",
    "metrics.parquet",
    "checkpoints",
    "curves.png",
    "summary.json",
)


def create(folder: Path, config: Config) -> None:
    """A new run folder. One that holds anything is never overwritten."""
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


def columns(result: Result) -> dict[str, np.ndarray]:
    """The history as columns of one row per round, evaluations merged in."""
    rounds = result.info.stopped_at
    table: dict[str, np.ndarray] = {"round": np.arange(1, rounds + 1)}
    table |= {name: np.asarray(column) for name, column in result.history.items()}
    for way in ("down", "up"):
        per_round = sum(v for name, v in table.items() if name.endswith(f"/bytes_{way}"))
        table[f"bytes_{way}"] = np.cumsum(np.asarray(per_round, np.float64))
    if result.evaluations:
        at = np.asarray(result.evaluations["round"]) - 1
        for name, values in result.evaluations.items():
            if name != "round":
                table[name] = np.full(rounds, np.nan)
                table[name][at] = np.asarray(values)
    return table


def write_metrics(folder: Path, result: Result) -> dict[str, np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = columns(result)
    arrays = {n: pa.array(c, from_pandas=np.issubdtype(c.dtype, np.floating)) for n, c in table.items()}
    pq.write_table(pa.table(arrays), folder / METRICS)
    return table


def read_metrics(folder: Path) -> dict[str, np.ndarray]:
    """The columns of a run's metrics, nan where a round was not evaluated."""
    import pyarrow.parquet as pq

    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder} has no {METRICS}: the run is incomplete; resume it with --resume {folder}")
    table = pq.read_table(folder / METRICS)
    return {name: table[name].to_numpy() for name in table.column_names}


def params_sha256(params: Any) -> str:
    """Over the bytes of the parameters in tree order: equal hashes, equal models."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.hexdigest()


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1))
