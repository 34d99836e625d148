"""The result of a run, its progress reports and its checkpoint settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbraid.core import is_traced
from fedbraid.costs import Cost
from fedbraid.drawing import lines_svg, table_html
from fedbraid.metric import is_client_column
from fedbraid.simulation.plan import Plan

__all__ = ["Checkpoints", "Info", "Progress", "Result"]

PyTree = Any


class Checkpoints(NamedTuple):
    """Where and how often a run is saved; ``resume`` continues from the newest good checkpoint in ``folder``.

    run: what determines the results, by key, such as the keys of a configuration. A checkpoint with other values is
        refused. The seed, the cohort and the size of the data are always compared.
    judge: ``(rounds completed, evaluations so far, function that returns the parameters) -> bool``, called after each
        evaluation and before the checkpoint of that round. True ends the run there. A resumed run calls it first with
        the evaluations of its checkpoint.
    """

    folder: Path
    every: int = 50
    resume: bool = False
    run: Mapping[str, Any] | None = None
    judge: Callable[[int, dict[str, Any], Callable[[], PyTree]], bool] | None = None


class Progress(NamedTuple):
    """A progress report of a run: rounds completed, the newest entry of every column, seconds since the start.

    since: ``since(n)`` is a list with a row for every round after round ``n``: its number as ``round``, its entries,
        and its scores if it was evaluated.
    evaluating: the model after ``round`` is being evaluated now; the next report has its scores.
    """

    round: int
    row: dict[str, float]
    seconds: float
    since: Callable[[int], list[dict[str, float]]] = lambda rounds: []
    evaluating: bool = False


@dataclass(frozen=True, eq=False)
class Info:
    """How a run was computed."""

    plan: Plan
    cost: Cost
    streamed: bool
    steps: int  # local steps
    masked_share: float  # share of computed steps that were masked
    imbalance: float  # steps of the busiest device divided by the mean, averaged over rounds
    stopped_at: int  # rounds completed; fewer than asked for if the run was stopped


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "server", "states", "history", "evaluations"],
    meta_fields=["info"],
)
@dataclass(frozen=True, repr=False)
class Result:
    """A finished run. Under ``jax.vmap`` the first axis of every array is the mapped one.

    history: columns with one entry per round.
    evaluations: columns with one entry per evaluation; the column ``round`` has the number of the round.
    """

    params: PyTree
    server: PyTree
    states: PyTree
    history: dict[str, Any]
    evaluations: dict[str, Any]
    info: Info = field(compare=False)

    def __repr__(self) -> str:
        """Three lines: the run, its last scores, and how it was computed."""
        leaves = jax.tree.leaves(self.params)
        size = sum(int(np.size(leaf)) for leaf in leaves)
        scores = {n: c for n, c in self.evaluations.items() if n != "round" and not is_client_column(n)}
        if not scores:
            scores = {n: c for n, c in self.history.items() if n.endswith("/loss")}
        last = ", ".join(f"{name} {_last(column)}" for name, column in scores.items())
        plan = self.info.plan
        return (
            f"Result: {self.info.stopped_at} rounds of {plan.cohort} clients, {size:,} parameters\n"
            f"  last: {last or 'nothing was evaluated'}\n"
            f"  plan: {plan.words()} on {plan.devices} device{'s' if plan.devices != 1 else ''}, "
            f"{self.info.steps:,} local steps"
        )

    def _repr_html_(self) -> str:
        """The same as a table, and the curves of the losses and scores. A traced result has no picture."""
        head, *rest = repr(self).splitlines()
        rows = [("run", head.removeprefix("Result: ")), *(tuple(line.strip().split(": ", 1)) for line in rest)]
        if any(is_traced(column) or np.ndim(column) != 1 for column in self.history.values()):
            return table_html(rows)
        losses = {n: (range(1, len(c) + 1), c) for n, c in self.history.items() if n.endswith("/loss")}
        at = self.evaluations.get("round", ())
        scores = {n: (at, c) for n, c in self.evaluations.items() if n != "round" and not is_client_column(n)}
        of_loss = losses | {n: line for n, line in scores.items() if n.endswith("loss")}
        others = {n: line for n, line in scores.items() if n not in of_loss}
        return table_html(rows) + lines_svg(of_loss, x="round", y="loss") + lines_svg(others, x="round")


def _last(column: Any) -> str:
    if is_traced(column):
        return "(traced)"
    values = np.asarray(column)[..., -1]
    return f"{float(values):.4g}" if values.ndim == 0 else f"{values.min():.4g} to {values.max():.4g}"
