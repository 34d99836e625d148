"""The stability maps of Figures 4 and 5: accuracy over server rates, tuned over client rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedbraid.data.federated import FederatedData
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.mime._table2 import run_method
from fedbraid.reproduce.training import score

LAST = 50


def run_grid(
    name: str, data: FederatedData, job: Job, *, grid: Mapping[str, Sequence[float]], rounds: int, **options: Any
) -> dict[str, Any]:
    """One method at every point of a grid over options of its algorithm."""
    points = [
        {f"algorithm.{key}": value for key, value in zip(grid, values, strict=True)}
        for values in itertools.product(*grid.values())
    ]
    settings = {"model": {"name": "softmax_regression"}, "every": rounds} | options
    settings.setdefault("marks", range(max(rounds - LAST + 10, 1), rounds, 10))
    return run_method(name, data, work=job.work, rounds=rounds, points=points, tell=job.tell, **settings)


def tuned(result: Mapping[str, Any], keys: Sequence[str]) -> dict[tuple[float, ...], float]:
    """The best accuracy in percent for each value of some keys; 0 if every point diverged.

    >>> points = [{"algorithm.a": 1.0, "algorithm.b": b} for b in (1.0, 2.0)]
    >>> result = {"points": points, "rounds": [1], "test_accuracy": [[0.25], [0.5]], "diverged": [False, False]}
    >>> tuned(result, ["a"])
    {(1.0,): 50.0}
    """
    found: dict[tuple[float, ...], float] = {}
    for i, point in enumerate(result["points"]):
        at = tuple(point[f"algorithm.{key}"] for key in keys)
        own = score(result, i, last=LAST)
        found[at] = max(found.get(at, 0.0), 0.0 if math.isnan(own) else 100 * own)
    return found
