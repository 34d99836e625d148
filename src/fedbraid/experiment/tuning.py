"""Tuning: run the points of a search, score them, and find the best.

A point's score is the average of one metric over the last rounds (Charles & Konecny, App. E: the last 100), then over
the seeds. Successive halving stops the worse points early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbraid.experiment import search
from fedbraid.experiment.lab import TRIES, Lab
from fedbraid.experiment.points import Point
from fedbraid.experiment.trials import Row, Trials, best_point
from fedbraid.simulation.points import Points, PointsResult

__all__ = ["News", "advance", "all_points", "tune"]


class News(NamedTuple):
    """Progress of a sweep."""

    done: float  # share of all rounds of all trials
    trials: int
    diverged: int
    best: Point | None
    score: float | None
    doing: str


def tune(
    lab: Lab,
    trials: Trials | None = None,
    *,
    label: Mapping[str, Any] | None = None,
    only: Collection[int] | None = None,
    on_news: Callable[[News], Any] | None = None,
) -> dict[str, Any]:
    """Run the points of the search and return the best one with its criterion; rows are added to ``trials``.

    ``label``: columns that identify the rows of this tuning in a file with several tunings. Trials that are already in
    the file are not run again. ``only``: ids of `all_points` to run; other workers run the rest.
    """
    trials, label = Trials(None) if trials is None else trials, dict(label or {})
    settings = lab.settings
    work = _Work(lab, trials, label, on_news)
    began = time.perf_counter()
    if settings.search != "adaptive":
        points = {i: point for i, point in all_points(lab).items() if only is None or i in only}
        work.plan([len(points)])
        work.bracket(points)
    else:
        total = settings.trials or TRIES
        counts = [min(settings.batch, total - start) for start in range(0, total, settings.batch)]
        work.plan(counts)
        for b, count in enumerate(counts):
            first = b * settings.batch
            asked = search.adapt(lab.space, work.seen(first), count, seed=settings.seed)
            work.bracket({first + i: point for i, point in enumerate(asked)})
    rows, seeds = trials.of(**label), settings.seed_list
    best = best_point(rows, list(lab.space), lab.criterion, lab.config.rounds)
    return best | {
        "points": len({row["point"] for row in rows}),
        "trials": len(rows),
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "stopped": sum(row["status"] == "stopped" for row in rows),
        "programs": lab.compiled,
        "traced": list(lab.traced),
        "seconds": time.perf_counter() - began,
        "tuned_on": f"{lab.split_by}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        "at_edge": _at_edge(lab.space, best["best"]),
    }


def all_points(lab: Lab) -> dict[int, Point]:
    """The points of a grid or of a random search by their ids."""
    settings = lab.settings
    if settings.search == "random":
        points = search.sample(lab.space, settings.trials or TRIES, settings.seed)
    else:
        points = search.grid(lab.space)
    return dict(enumerate(points))


class _Bracket(NamedTuple):
    """Points that run together, either to the last round or through the rungs of successive halving."""

    points: dict[int, Point]
    have: dict[tuple[int, int], Row]  # by point and seed: rows that were in the file before
    kept: dict[tuple[int, int], PointsResult]  # by point and seed: the state from which the next rung continues
    marks: list[int]  # the rounds of the rungs


class _Work:
    """One tuning in progress."""

    def __init__(self, lab: Lab, trials: Trials, label: dict[str, Any], on_news: Callable | None) -> None:
        self.lab, self.trials, self.label, self.on_news = lab, trials, label, on_news
        self.seeds, self.rounds = lab.settings.seed_list, lab.config.rounds
        self.spent = self.planned = 0  # rounds times points
        self.known: tuple[int, dict[str, Any]] = (-1, {})  # number of rows, and the best of them

    def seen(self, before: int) -> list[tuple[Point, float]]:
        """The points with ids below ``before``, with their losses."""
        by_id: dict[int, list[Row]] = {}
        for row in self.trials.of(**self.label):
            if row["point"] < before:
                by_id.setdefault(row["point"], []).append(row)
        loss, keys = self.lab.criterion.loss, list(self.lab.space)
        return [({key: rows[0][key] for key in keys}, loss(rows, self.rounds)) for _, rows in sorted(by_id.items())]

    def ladder(self, points: int) -> list[tuple[int, int]]:
        """The rungs for this number of points: (rounds, how many points continue)."""
        eta = self.lab.settings.halving
        return search.rungs(self.rounds, points, eta) if eta and points > 1 else [(self.rounds, 0)]

    def plan(self, brackets: Sequence[int]) -> None:
        """Count the rounds of all brackets, given their numbers of points; rows in the file count as done."""
        for points in brackets:
            before, alive = 0, points
            for rounds, go_on in self.ladder(points):
                self.planned += (rounds - before) * alive * len(self.seeds)
                before, alive = rounds, go_on
        self.spent = sum(row["rounds"] for row in self.trials.of(**self.label))

    def bracket(self, points: dict[int, Point]) -> None:
        """Run points to the last round, or through the rungs of successive halving."""
        ladder = self.ladder(len(points))
        have = {(row["point"], row["seed"]): row for row in self.trials.of(**self.label) if row["point"] in points}
        decided = max((row["rounds"] for row in have.values() if row["rounds"] < self.rounds), default=0)
        alive = [
            i for i in points if not all((i, s) in have and have[i, s]["rounds"] < self.rounds for s in self.seeds)
        ]
        bracket = _Bracket(points, have, {}, [rounds for rounds, _ in ladder])
        for rounds, go_on in ladder:
            if rounds <= decided:
                continue
            alive = self._rung(bracket, alive, rounds, go_on)

    def _rung(self, bracket: _Bracket, alive: list[int], rounds: int, go_on: int) -> list[int]:
        """Run the remaining points up to ``rounds``; returns the ``go_on`` best of them."""
        points, have = bracket.points, bracket.have
        rows: dict[int, list[Row]] = {}
        for group in self.lab.groups({i: points[i] for i in alive}):
            todo = [i for i in group if not all((i, s) in have for s in self.seeds)]
            if not todo:
                continue
            program = self.lab.program([points[i] for i in todo])
            for chunk in program.chunks(todo):
                for seed in self.seeds:
                    ids = [i for i in chunk if (i, seed) not in have]
                    made = self._chunk(program, bracket, ids, seed, rounds, keep=bool(go_on)) if ids else []
                    for row in made:
                        rows.setdefault(row["point"], []).append(row)
                    if not go_on:
                        self.trials.add(made)
        if not go_on:
            return []
        losses = {i: self.lab.criterion.loss(rows[i], rounds) for i in alive}
        on = [i for i in sorted(alive, key=lambda i: (losses[i], i)) if losses[i] < math.inf][:go_on]
        out = [row for i in alive if i not in on for row in rows[i]]
        self.trials.add(out)
        for i in set(alive) - set(on):
            for seed in self.seeds:
                bracket.kept.pop((i, seed), None)
        self._tell(f"{len(on)} of {len(alive)} points continue from round {rounds}")
        return on

    def _chunk(
        self, program: Points, bracket: _Bracket, ids: list[int], seed: int, rounds: int, *, keep: bool
    ) -> list[Row]:
        """Run some points at one seed as one program; ``keep`` keeps their models for the next rung."""
        points, kept = bracket.points, bracket.kept
        start = [kept.get((i, seed)) for i in ids]
        done_before = start[0].rounds if start[0] is not None and None not in start else 0
        spent, what = self.spent, f"{len(ids)} points together, seed {seed}"

        def progress(done: int) -> None:
            self.spent = spent + (done - done_before) * len(ids)
            self._tell(f"{what}, round {done} of {rounds}")

        self._tell(what)
        marks = [mark for mark in bracket.marks if mark <= rounds]
        outcome = advance(
            program, [points[i] for i in ids], seed, rounds, start=start, keep=keep, marks=marks, tell=progress
        )
        rows = []
        for j, i in enumerate(ids):
            if keep:
                kept[i, seed] = outcome.take(np.array([j]))
            status = "stopped" if keep else "finished"
            rows.append(self.label | self.lab.row(i, points[i], seed, outcome, j, status, len(ids)))
        return rows

    def _tell(self, doing: str) -> None:
        if self.on_news is None:
            return
        rows = self.trials.of(**self.label)
        if len(rows) != self.known[0]:
            self.known = len(rows), best_point(rows, list(self.lab.space), self.lab.criterion, self.rounds)
        best = self.known[1]
        diverged = sum(row["status"] == "diverged" for row in rows)
        done = min(1.0, self.spent / max(self.planned, 1))
        self.on_news(News(done, len(rows), diverged, best["best"], best["score"], doing))


def advance(
    program: Points,
    points: Sequence[Point],
    seed: int,
    rounds: int,
    *,
    start: Sequence[PointsResult | None],
    keep: bool,
    marks: Sequence[int],
    tell: Callable[[int], Any] | None = None,
) -> PointsResult:
    """Run points at one seed up to round ``rounds`` as one program.

    start: where each point continues. If one of them is missing, all begin at round 0. keep: keep models and client
    states in the result, for a later ``start``. marks: rounds to evaluate after, in addition to the schedule.
    """
    before = [one for one in start if one is not None]
    whole = len(before) == len(points) and len({one.rounds for one in before}) == 1
    return program.run(
        points,
        seed=seed,
        rounds=rounds,
        start=_together(before) if whole else None,
        keep=keep,
        marks=marks,
        on_progress=tell,
    )


def _together(outcomes: Sequence[PointsResult]) -> PointsResult:
    """The outcomes of single points, joined into one."""
    import jax

    first = outcomes[0]

    def along(columns: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {n: c if n == "round" else np.concatenate([one[n] for one in columns]) for n, c in columns[0].items()}

    return first._replace(
        history=along([o.history for o in outcomes]),
        evaluations=along([o.evaluations for o in outcomes]),
        clients=along([o.clients for o in outcomes]),
        diverged=np.concatenate([o.diverged for o in outcomes]),
        carry=jax.tree.map(lambda *leaves: np.concatenate(leaves), *(o.carry for o in outcomes)),
    )


def _at_edge(space: search.Space, best: Point | None) -> list[str]:
    """Keys whose best value is the smallest or largest that was tried: a value outside may be better."""
    if best is None:
        return []
    edges = []
    for key, one in space.items():
        values = search.values_of(one)
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if numeric and isinstance(one, search.Choice) and len(values) > 2 and best[key] in (min(values), max(values)):
            edges.append(key)
    return edges
