"""The history of a run: columns with one entry per round, columns with one entry per evaluation, and the load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbraid.core import is_traced
from fedbraid.costs import Cost
from fedbraid.simulation.plan import Load
from fedbraid.simulation.timeline import RoundTime

__all__ = ["SIMULATED", "STALENESS", "History", "mean_staleness", "on_host"]

Columns = dict[str, Any]
SIMULATED = "simulated_seconds"  # column: simulated time at the end of the round, since the start
STALENESS = "staleness"  # column: mean number of server steps since the clients were sent their models


def mean_staleness(time: RoundTime) -> float:
    """The mean staleness of the uploads of an asynchronous step; 0 without uploads."""
    assert time.arrivals is not None
    gaps = time.arrivals.number - time.arrivals.versions
    return float(np.mean(gaps)) if len(gaps) else 0.0


def on_host(value: Any) -> Any:
    """A NumPy array, unless the value is traced."""
    return value if is_traced(value) else np.asarray(value)


def _join(parts: list[Any], put: str) -> Any:
    """``np.concatenate`` or ``np.stack`` along the last axis; jax's function if a part is traced."""
    module: Any = jnp if any(map(is_traced, parts)) else np
    return getattr(module, put)(parts, axis=-1)


class History:
    """The columns of a run. If several points run together, the first axis is the points and the last is the rounds."""

    traffic: Cost
    cohort: int
    steps: int
    masked: int
    imbalance: float  # summed over rounds

    def __init__(self, traffic: Cost, cohort: int) -> None:
        self.traffic, self.cohort = traffic, cohort
        self.logs: list[Columns] = []
        self.evaluations: list[Columns] = []
        self.steps = self.masked = 0
        self.imbalance = 0.0

    def add_rounds(self, loads: list[list[Load]], log: Columns, times: list[RoundTime] | None = None) -> None:
        """Add completed rounds: their load by exchange, the columns that the program returned, and simulated time."""
        number, shape = len(loads), next(iter(log.values())).shape
        for index, exchange in enumerate(self.traffic.exchanges):
            arrived = log[f"{exchange.name}/arrived"]
            asked = self.cohort if times is None else np.array([float(time.asked[index]) for time in times])
            log[f"{exchange.name}/bytes_down"] = np.zeros(arrived.shape) + asked * float(exchange.down)
            counted = arrived.astype(jnp.result_type(float)) if is_traced(arrived) else arrived
            log[f"{exchange.name}/bytes_up"] = counted * float(exchange.up)
        if times is not None:
            log[SIMULATED] = np.zeros(shape) + np.array([time.seconds for time in times])
        if times is not None and all(time.arrivals is not None for time in times):
            log[STALENESS] = np.zeros(shape) + np.array([mean_staleness(time) for time in times])
        self.logs.append(log)
        flat = [load for row in loads for load in row]
        self.steps += sum(load.steps for load in flat)
        self.masked += sum(load.masked for load in flat)
        self.imbalance += sum(load.imbalance for load in flat) / len(flat) * number

    def add_evaluation(self, round_: int, row: Columns) -> None:
        """Add the scores of the model after ``round_`` rounds."""
        self.evaluations.append({"round": round_} | {name: on_host(value) for name, value in row.items()})

    def rounds(self) -> Columns:
        """The columns with one entry per round."""
        names = self.logs[0] if self.logs else {}
        return {name: _join([log[name] for log in self.logs], "concatenate") for name in names}

    def evaluated(self) -> Columns:
        """The columns with one entry per evaluation; one of them is ``round``."""
        names = self.evaluations[0] if self.evaluations else {}
        return {name: _join([on_host(row[name]) for row in self.evaluations], "stack") for name in names}

    def newest(self) -> dict[str, float]:
        """The last entry of every column of a run without an axis of points."""
        row = {name: float(column[-1]) for name, column in self.logs[-1].items()}
        if self.evaluations:
            row |= {name: float(value) for name, value in self.evaluations[-1].items() if name != "round"}
        return row

    def since(self, done: int) -> list[dict[str, float]]:
        """A row for every round after round ``done``, of a run without an axis of points."""
        last = sum(len(next(iter(log.values()))) for log in self.logs)
        rows: list[dict[str, float]] = []
        for log in reversed(self.logs):
            if last <= done:
                break
            number = len(next(iter(log.values())))
            here = range(max(done - (last - number), 0), number)
            rows[:0] = [{"round": last - number + i + 1} | {n: float(c[i]) for n, c in log.items()} for i in here]
            last -= number
        for scores in reversed(self.evaluations):
            at = int(scores["round"]) - done - 1
            if at < 0:
                break
            rows[at] |= {name: float(value) for name, value in scores.items() if name != "round"}
        return rows

    # -- checkpoints

    def export(self) -> dict[str, Any]:
        """The history as arrays, for a checkpoint."""
        load = {"steps": self.steps, "masked": self.masked, "imbalance": self.imbalance}
        return {"log": self.rounds(), "evaluations": self.evaluated(), "load": load}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what :meth:`export` returned."""
        self.logs = [saved["log"]] if saved["log"] else []
        rows = saved["evaluations"] or {}
        count = len(rows["round"]) if rows else 0
        self.evaluations = [{name: column[..., i] for name, column in rows.items()} for i in range(count)]
        load = saved["load"]
        self.steps, self.masked, self.imbalance = int(load["steps"]), int(load["masked"]), float(load["imbalance"])

    def keep_evaluations(self, wanted: Callable[[int], bool]) -> None:
        """Drop the evaluations of rounds that are not ``wanted``."""
        self.evaluations = [row for row in self.evaluations if wanted(int(row["round"]))]
