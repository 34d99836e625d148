"""The result of several points that ran together."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["PointsResult", "joined"]


class PointsResult(NamedTuple):
    """Several points with one seed, after ``rounds`` rounds. The first axis of arrays is the points.

    A point has *diverged* if its model or a score over all examples was not finite, or if in some round all uploads
    that arrived were refused because they were not finite. The engine refuses such uploads, so that one bad client does
    no harm. If all are bad, the model does not change, and its last good score would look like a valid result.
    """

    rounds: int
    history: dict[str, np.ndarray]  # [points, rounds]
    evaluations: dict[str, np.ndarray]  # [points, evaluations]; "round" is [evaluations]
    clients: dict[str, np.ndarray]  # [points, clients]: each client's own metric at the end
    diverged: np.ndarray  # [points]
    seconds: np.ndarray  # [evaluations]: seconds since the start, for all points together
    carry: Any = None  # (server, states) to continue from, if ``keep`` was set

    def take(self, index: Any) -> PointsResult:
        """The result of some of the points."""

        def some(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: column if name == "round" else column[index] for name, column in columns.items()}

        return PointsResult(
            self.rounds,
            some(self.history),
            some(self.evaluations),
            some(self.clients),
            self.diverged[index],
            self.seconds,
            jax.tree.map(lambda leaf: leaf[index], self.carry),
        )


def joined(before: PointsResult, after: PointsResult) -> PointsResult:
    """The results of a run and of its continuation as one."""

    def along(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([a[name], b[name]], -1) for name in b}

    return after._replace(
        history=along(before.history, after.history),
        evaluations=along(before.evaluations, after.evaluations),
        diverged=before.diverged | after.diverged,
        seconds=np.concatenate([before.seconds, before.seconds[-1] + after.seconds]),
    )
