"""One cell of the leaderboard: a method on a federation, tuned by `fedbraid.experiment.compare` and tested."""

from __future__ import annotations

import inspect
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plan
from federations import load

import record
from fedbraid import algorithms
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment.assembly import assemble
from fedbraid.experiment.compare import Final, measure_method
from fedbraid.experiment.comparison import load_comparison
from fedbraid.experiment.config import Config
from fedbraid.testing.reference import interpret


def measure(federation: str, method: str, data: Path, *, rounds: int | None = None) -> dict[str, Any]:
    """The numbers of a cell. They depend on the arguments only, except ``seconds`` and ``about``."""
    import tomli_w

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compare.toml"
        path.write_text(tomli_w.dumps(plan.comparison_tree(federation, method, data, rounds=rounds)))
        comparison = load_comparison(path)
    row, finals, config = measure_method(comparison)
    cell = {"federation": federation, "method": method, "rounds": comparison.base.rounds, "trials": row["trials"]}
    if config is not None:
        cell |= _numbers(row, finals, f"test_{plan.BY_FEDERATION[federation].metric}")
        cell["passes"] = passes(config, load(which=federation, folder=str(data)))
    jax.clear_caches()
    return cell | {"seconds": round(time.perf_counter() - began, 1), "about": record.about()}


def _numbers(row: dict[str, Any], finals: list[Final], metric: str) -> dict[str, Any]:
    seen = np.isfinite(finals[0].table[metric])
    return {
        "best": {key.removeprefix("algorithm."): value for key, value in row["best"].items()},
        "at_edge": [key.removeprefix("algorithm.") for key in row["at_edge"]],
        "score": _short(row["score"]),
        "scores": [_short(score) for score in row["scores"]],
        "worst_tenth": _short((row["clients"] or {}).get("worst_tenth")),
        "rounds_to_target": _short(row["rounds_to_target"]),
        "reached": row["reached"],
        "diverged": row["diverged"],
        "bytes_per_round": row["bytes"] / len(finals[0].table["round"]),
        "curve_rounds": [int(r) for r in finals[0].table["round"][seen]],
        "curves": [[_short(value) for value in final.table[metric][seen]] for final in finals],
    }


def _short(value: Any) -> float | None:
    """Six digits; None for what is missing or not finite."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.6g}")


def passes(config: Config, data: FederatedData, *, rounds: int = 2) -> float:
    """Client work: how often a client evaluates the loss or its gradient on each of its examples, per round.

    It is counted: the loss of the algorithm reports the examples of each call, while one client of median size runs a
    few rounds. One epoch of gradient steps counts 1.
    """
    train, experiment = data.train, assemble(config, data)
    client = int(np.argsort(train.sizes, kind="stable")[len(train.sizes) // 2])
    low, high = train.offsets[client : client + 2]
    rows = {name: column[low:high] for name, column in train.arrays.items()}
    alone = Split(rows, np.array([0, high - low]), (), data.preprocess)
    counted: list[int] = []

    def loss(params: Any, batch: dict, key: Any) -> Any:
        jax.debug.callback(lambda n: counted.append(int(n)), batch["mask"].sum())
        return experiment.loss(params, batch, key)

    context = {"loss": lambda: loss, "data": lambda: alone, "params": lambda: experiment.params}
    found = algorithms.NAMES.find(config.algorithm.name)
    taken = inspect.signature(found.thing).parameters
    offered = {key: make for key, make in context.items() if key in taken}
    algorithm = algorithms.NAMES.call(found, config.algorithm.options, offered)
    interpret(algorithm, experiment.params, alone, rounds=rounds, cohort=1)
    jax.effects_barrier()
    return round(sum(counted) / rounds / int(high - low), 3)
