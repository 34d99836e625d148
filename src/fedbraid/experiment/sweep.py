"""Sweeps: many points of a configuration, tried by a rule that is fixed before anything runs.

Tuning has a seed and a validation split of its own, held out of the training examples of every client; the test set is
kept from it. A point's score is the average of one metric over the last rounds (Charles & Konecny, App. E: the last
100), then over the seeds. Every trial, which is a point at a seed, is one row of ``trials.parquet``, diverged ones too,
with its curve; the file is replaced after every program, so that a sweep that was stopped goes on from there.

    sweep.toml        the configuration and a [sweep] section: `fedbraid sweep sweep.toml` repeats it
    trials.parquet    one row per trial
    best.toml         the configuration with the best point: `fedbraid run best.toml` trains it and tests it
    summary.json      what `fedbraid sweep --json` prints
    sweep.png         the scores over the points
"""

from __future__ import annotations

import itertools
import json
import math
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fedbraid
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.partition import hold_out
from fedbraid.experiment import search
from fedbraid.experiment.assembly import assemble, load_named
from fedbraid.experiment.config import Config, ConfigError, dump, parse, read_tree, sentences
from fedbraid.experiment.points import Point, measured, points_program, traceable, with_values
from fedbraid.experiment.trials import Criterion, Row, Trials, best_point, pick_metric
from fedbraid.simulation.points import Points, PointsResult

__all__ = [
    "Lab",
    "News",
    "Tuning",
    "all_points",
    "hold_out_validation",
    "load_sweep",
    "reopen_sweep",
    "run_sweep",
    "tune",
]

SWEEP, TRIALS, BEST, SUMMARY, PICTURE = "sweep.toml", "trials.parquet", "best.toml", "summary.json", "sweep.png"
MOST_TRIALS, TRIES = 100_000, 32  # at most; and the points of a search that says nothing
PREFIX = "validation_"
FIXED = {
    "seed": "use seeds to try several",
    "rounds": "all points run for as many rounds, or they could not be compared",
    "engine": "it does not change results",
    "checkpoint": "it does not change results",
    "evaluation": "it does not change results",
}


class Tuning(BaseModel):
    """How points are found and judged: the ``[sweep]`` section."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    over: dict[str, Any] = {}
    search: Literal["grid", "random", "adaptive"] = "grid"
    trials: Annotated[int, Field(ge=1)] | None = None  # points of a random or adaptive search
    batch: Annotated[int, Field(ge=1)] = 8  # points that an adaptive search asks for at a time
    halving: Annotated[int, Field(ge=2)] | None = None  # eta: each rung keeps one point in eta
    seeds: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0)] = 1000  # the first of the tuning seeds
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None  # default: the data's own split, or 0.2
    metric: str | None = None  # default: accuracy if there is one, else loss
    last: Annotated[int, Field(ge=1)] = 100  # rounds averaged over
    target: float | None = None  # judge by rounds to this value of the metric instead
    at_once: Annotated[int, Field(ge=1)] | None = None  # points in one program at most; default: what fits

    @property
    def space(self) -> dict[str, search.Choice | search.Range]:
        return {key: search.over(key, given) for key, given in self.over.items()}

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))


# --- data ------------------------------------------------------------------------------------------------------------


def hold_out_validation(data: FederatedData, fraction: float | None, seed: int) -> tuple[FederatedData, str]:
    """The data to tune on: a train split and, as its only other one, a validation split; and a sentence on it.

    Without a fraction the data's own validation split is used if it has one, else 0.2 of every client's training
    examples. A client keeps at least one training example. The test split is left out: tuning cannot see it.

    >>> clients = [{"x": np.arange(10.0)}, {"x": np.zeros(1)}]
    >>> tuning, _ = hold_out_validation(FederatedData(Split.from_clients(clients)), 0.2, seed=1)
    >>> tuning.train.sizes.tolist(), tuning.validation.sizes.tolist(), tuning.test
    ([8, 1], [2, 0], None)
    """
    if fraction is None and data.validation is not None:
        return replace(data, test=None, unseen=None), "the data's own validation split"
    fraction = 0.2 if fraction is None else fraction
    rows = [np.arange(a, b) for a, b in itertools.pairwise(data.train.offsets)]
    kept, held = hold_out(rows, fraction=fraction, seed=seed)
    if not sum(map(len, held)):
        raise ConfigError(
            f"validation = {fraction:g}: no client has enough training examples to hold any out; take a larger share"
        )
    train = Split.from_assignment(data.train.arrays, [np.sort(part) for part in kept], data.train.ids)
    validation = Split.from_assignment(data.train.arrays, [np.sort(part) for part in held], data.train.ids)
    tuning = replace(data, train=train, validation=validation, test=None, unseen=None)
    return tuning, f"{fraction:.0%} of every client's training examples"


# --- tuning ----------------------------------------------------------------------------------------------------------


class News(NamedTuple):
    """What a sweep tells while it runs."""

    done: float  # of the trials' rounds, the share behind us
    trials: int
    diverged: int
    best: Point | None
    score: float | None
    doing: str


class Lab:
    """The data, the programs and the criterion of one tuning, checked.

    data: what ``config`` names, if it is loaded already; held: what `hold_out_validation` made of it, if it did.
    """

    def __init__(
        self,
        config: Config,
        tuning: Tuning,
        data: FederatedData | None = None,
        held: tuple[FederatedData, str] | None = None,
    ) -> None:
        self.config, self.tuning, self.space = config, tuning, tuning.space
        self.raw = {} if data is None else {_data_key(config): data}
        self.data, self.split_by = ({}, "") if held is None else ({_data_key(config): held[0]}, held[1])
        self.check()
        values = {key: search.values_of(one) for key, one in self.space.items()}
        first = with_values(config, {key: every[0] for key, every in values.items()})
        tuned_on = self.data_of(first)
        metric = pick_metric(tuning.metric, *measured(assemble(first, tuned_on), tuned_on, PREFIX), PREFIX)
        self.criterion = Criterion(metric, tuning.last, tuning.target)
        self.traced = traceable(first, tuned_on, values)
        self.programs: dict[Any, Points] = {}
        self.compiled = 0

    def check(self) -> None:
        """Build every value of every key once, so that what is wrong is said before anything runs."""
        number = math.prod(len(search.values_of(one)) for one in self.space.values())
        number = number if self.tuning.search == "grid" else self.tuning.trials or TRIES
        if number * self.tuning.seeds > MOST_TRIALS:
            raise ConfigError(
                f"{number:,} points x {self.tuning.seeds} seeds are more than {MOST_TRIALS:,} trials; take fewer "
                "values, or search = random with trials = ..."
            )
        if self.config.seed in self.tuning.seed_list:
            raise ConfigError(
                f"seed = {self.config.seed} is one of the tuning seeds {self.tuning.seed_list}: tune on others than "
                "those you report on"
            )
        if self.tuning.search == "grid":
            search.grid(self.space)
            if self.tuning.trials is not None:
                raise ConfigError("trials = ... is for search = random or adaptive; a grid has the points it has")
        if not self.space:
            raise ConfigError("nothing to sweep over: give --over KEY=VALUES, or over = { KEY = VALUES } in [sweep]")
        first = {key: search.values_of(one)[0] for key, one in self.space.items()}
        for key, one in self.space.items():
            if (section := key.split(".")[0]) in FIXED:
                raise ConfigError(f"{key!r} is not swept over: {FIXED[section]}")
            for value in search.values_of(one):
                config = with_values(self.config, first | {key: value})
                assemble(config, self._raw(config))

    def data_of(self, config: Config) -> FederatedData:
        key = _data_key(config)
        if key not in self.data:
            held = hold_out_validation(self._raw(config), self.tuning.validation, self.tuning.seed)
            self.data[key], self.split_by = held
        return self.data[key]

    def _raw(self, config: Config) -> FederatedData:
        key = _data_key(config)
        if key not in self.raw:
            self.raw[key] = load_named(config)
        return self.raw[key]

    def groups(self, points: Mapping[int, Point]) -> list[list[int]]:
        """Ids of points that are one program: alike in everything that is not traced."""
        found: dict[str, list[int]] = {}
        for i, point in points.items():
            found.setdefault(self._static(point), []).append(i)
        return list(found.values())

    def _static(self, point: Point) -> str:
        return json.dumps({key: value for key, value in point.items() if key not in self.traced}, default=str)

    def program(self, points: Sequence[Point]) -> Points:
        """A program for these points: one that is there already if it takes about as many at a time."""
        static = self._static(points[0])
        for (known, _), program in self.programs.items():
            if known == static and len(points) <= 2 * program.size <= 4 * len(points):
                return program
        while len(self.programs) >= 4:  # programs hold device memory
            self.programs.pop(next(iter(self.programs)))
        config = with_values(self.config, points[0])
        data, most = self.data_of(config), self.tuning.at_once
        made = points_program(
            config,
            data,
            self.traced,
            points=len(points),
            seeds=self.tuning.seed_list,
            test=data.validation,
            prefix=PREFIX,
            most=most,
        )
        self.programs[static, made.size] = made
        self.compiled += 1
        return made

    def row(self, i: int, point: Point, seed: int, outcome: PointsResult, j: int, status: str, together: int) -> Row:
        criterion = self.criterion
        diverged = bool(outcome.diverged[j])
        sums = {
            way: float(sum(c[j].sum() for n, c in outcome.history.items() if n.endswith(f"/bytes_{way}")))
            for way in ("down", "up")
        }
        refused = sum(int(c[j].sum()) for n, c in outcome.history.items() if n.endswith("/refused"))
        rounds = outcome.evaluations["round"]
        trained = {n: _between(c[j], rounds) for n, c in outcome.history.items() if n.endswith("/loss")}
        evaluated = {n: c[j] for n, c in outcome.evaluations.items() if n != "round"}
        final = {n: _number(c[-1]) for n, c in (evaluated | trained).items()}
        return {
            "point": i,
            "seed": seed,
            **point,
            "status": "diverged" if diverged else status,
            "rounds": outcome.rounds,
            "metric": criterion.metric,
            "score": None if diverged else _number(criterion.score(outcome, j)),
            "rounds_to_target": criterion.rounds_to_target(outcome, j),
            **final,
            "refused": refused,
            "bytes_down": sums["down"],
            "bytes_up": sums["up"],
            "seconds": float(outcome.seconds[-1]),
            "together": together,  # trials that those seconds were for
            "curve/round": [int(r) for r in rounds],
            **{f"curve/{n}": [_number(v) for v in c] for n, c in (evaluated | trained).items() if "_client_" not in n},
        }


def _data_key(config: Config) -> str:
    liars = config.attack.share, config.attack.seed  # the data says who they are
    return json.dumps([config.data.model_dump(), liars], sort_keys=True, default=str)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _between(column: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """The mean of a per-round column between two evaluations: a curve as long as the evaluated ones, and calmer."""
    cuts = np.split(column, rounds[:-1])
    with np.errstate(invalid="ignore"):
        return np.array([np.mean(part) for part in cuts])


def tune(
    lab: Lab,
    trials: Trials | None = None,
    *,
    label: Mapping[str, Any] | None = None,
    only: Collection[int] | None = None,
    on_news: Callable[[News], Any] | None = None,
) -> dict[str, Any]:
    """Try points as the tuning says and return the best one with what it was chosen by; rows go to ``trials``.

    ``label``: columns that mark the rows of this tuning among others in the same file. Trials that are in the file
    already are not run again. ``only``: some of `all_points`, where others try the rest.
    """
    trials, label = Trials(None) if trials is None else trials, dict(label or {})
    tuning = lab.tuning
    work = _Work(lab, trials, label, on_news)
    began = time.perf_counter()
    if tuning.search != "adaptive":
        points = {i: point for i, point in all_points(lab).items() if only is None or i in only}
        work.plan([len(points)])
        work.bracket(points)
    else:
        total = tuning.trials or TRIES
        counts = [min(tuning.batch, total - start) for start in range(0, total, tuning.batch)]
        work.plan(counts)
        for b, count in enumerate(counts):
            first = b * tuning.batch
            asked = search.adapt(lab.space, work.seen(first), count, seed=tuning.seed)
            work.bracket({first + i: point for i, point in enumerate(asked)})
    rows = trials.of(**label)
    best = best_point(rows, list(lab.space), lab.criterion, lab.config.rounds)
    return best | {
        "points": len({row["point"] for row in rows}),
        "trials": len(rows),
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "stopped": sum(row["status"] == "stopped" for row in rows),
        "programs": lab.compiled,
        "traced": list(lab.traced),
        "seconds": time.perf_counter() - began,
        "tuned_on": f"{lab.split_by}, seed{'s' if tuning.seeds > 1 else ''} {', '.join(map(str, tuning.seed_list))}",
        "at_edge": _at_edge(lab.space, best["best"]),
    }


def all_points(lab: Lab) -> dict[int, Point]:
    """The points of a grid or of a random search by their ids."""
    random = lab.tuning.search == "random"
    points = search.sample(lab.space, lab.tuning.trials or TRIES, lab.tuning.seed) if random else search.grid(lab.space)
    return dict(enumerate(points))


class _Work:
    """One tuning on its way."""

    def __init__(self, lab: Lab, trials: Trials, label: dict[str, Any], on_news: Callable | None) -> None:
        self.lab, self.trials, self.label, self.on_news = lab, trials, label, on_news
        self.seeds, self.rounds = lab.tuning.seed_list, lab.config.rounds
        self.spent = self.planned = 0  # rounds times points
        self.known: tuple[int, dict[str, Any]] = (-1, {})  # number of rows, and the best of them

    def seen(self, before: int) -> list[tuple[Point, float]]:
        """The points with smaller ids and their losses."""
        by_id: dict[int, list[Row]] = {}
        for row in self.trials.of(**self.label):
            if row["point"] < before:
                by_id.setdefault(row["point"], []).append(row)
        loss, keys = self.lab.criterion.loss, list(self.lab.space)
        return [({key: rows[0][key] for key in keys}, loss(rows, self.rounds)) for _, rows in sorted(by_id.items())]

    def ladder(self, points: int) -> list[tuple[int, int]]:
        """The rungs that so many points climb, each with how many of them go on."""
        eta = self.lab.tuning.halving
        return search.rungs(self.rounds, points, eta) if eta and points > 1 else [(self.rounds, 0)]

    def plan(self, brackets: Sequence[int]) -> None:
        """Brackets of so many points are to come; what is in the file already counts as done."""
        for points in brackets:
            before, alive = 0, points
            for rounds, go_on in self.ladder(points):
                self.planned += (rounds - before) * alive * len(self.seeds)
                before, alive = rounds, go_on
        self.spent = sum(row["rounds"] for row in self.trials.of(**self.label))

    def bracket(self, points: dict[int, Point]) -> None:
        """Run points to the end, or up the rungs of successive halving."""
        ladder = self.ladder(len(points))
        have = {(row["point"], row["seed"]): row for row in self.trials.of(**self.label) if row["point"] in points}
        decided = max((row["rounds"] for row in have.values() if row["rounds"] < self.rounds), default=0)
        alive = [
            i for i in points if not all((i, s) in have and have[i, s]["rounds"] < self.rounds for s in self.seeds)
        ]
        kept: dict[tuple[int, int], PointsResult] = {}
        marks = [rounds for rounds, _ in ladder]
        for rounds, go_on in ladder:
            if rounds <= decided:
                continue
            alive = self._rung(points, alive, rounds, go_on, have, kept, marks)

    def _rung(
        self,
        points: dict[int, Point],
        alive: list[int],
        rounds: int,
        go_on: int,
        have: dict[tuple[int, int], Row],
        kept: dict[tuple[int, int], PointsResult],
        marks: Sequence[int],
    ) -> list[int]:
        rows: dict[int, list[Row]] = {}
        for group in self.lab.groups({i: points[i] for i in alive}):
            todo = [i for i in group if not all((i, s) in have for s in self.seeds)]
            if not todo:
                continue
            program = self.lab.program([points[i] for i in todo])
            for chunk in program.chunks(todo):
                for seed in self.seeds:
                    ids = [i for i in chunk if (i, seed) not in have]
                    made = self._chunk(program, points, ids, seed, rounds, kept, bool(go_on), marks) if ids else []
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
                kept.pop((i, seed), None)
        self._tell(f"{len(on)} of {len(alive)} points go on from round {rounds}")
        return on

    def _chunk(
        self,
        program: Points,
        points: dict[int, Point],
        ids: list[int],
        seed: int,
        rounds: int,
        kept: dict[tuple[int, int], PointsResult],
        keep: bool,
        marks: Sequence[int],
    ) -> list[Row]:
        start = [kept[i, seed] for i in ids] if all((i, seed) in kept for i in ids) else None
        done_before = start[0].rounds if start else 0
        spent, what = self.spent, f"{len(ids)} points together, seed {seed}"

        def progress(done: int) -> None:
            self.spent = spent + (done - done_before) * len(ids)
            self._tell(f"{what}, round {done} of {rounds}")

        self._tell(what)
        outcome = program.run(
            [points[i] for i in ids],
            seed=seed,
            rounds=rounds,
            start=_together(start) if start else None,
            keep=keep,
            marks=[mark for mark in marks if mark <= rounds],
            on_progress=progress,
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


def _together(outcomes: Sequence[PointsResult]) -> PointsResult:
    """Outcomes of single points as one."""
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
    """Keys whose best value is the first or last of its sorted values: the true best may lie beyond."""
    if best is None:
        return []
    edges = []
    for key, one in space.items():
        values = search.values_of(one)
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if numeric and isinstance(one, search.Choice) and len(values) > 2 and best[key] in (min(values), max(values)):
            edges.append(key)
    return edges


# --- a sweep and its folder ------------------------------------------------------------------------------------------


def load_sweep(
    path: Path | None, settings: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> tuple[Config, Tuning]:
    """A configuration and its tuning, from a TOML file with a ``[sweep]`` section; ``changes`` override the section."""
    tree = read_tree(path, settings)
    section = tree.pop("sweep", {})
    if not isinstance(section, Mapping):
        raise ConfigError("sweep must be a section: [sweep]")
    return parse(tree), parse_tuning({**section, **(changes or {})})


def parse_tuning(section: Mapping[str, Any], name: str = "sweep") -> Tuning:
    """A checked ``[sweep]`` section."""
    try:
        tuning = Tuning.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError(sentences(error, Tuning, name)) from None
    for key, given in tuning.over.items():
        search.over(key, given)
    return tuning


def write_sweep(path: Path, config: Config, tuning: Tuning) -> None:
    import tomli_w

    tree = tomllib.loads(dump(config)) | {"sweep": tuning.model_dump(mode="json", exclude_none=True)}
    path.write_text(tomli_w.dumps(tree))


def about(tuning: Tuning) -> dict[str, Any]:
    """What a file of trials says of itself."""
    return {"version": fedbraid.__version__, "kind": "sweep", "keys": list(tuning.over)}


def check_folder(out: Path) -> None:
    """A sweep's folder that holds anything is never overwritten."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: choose another --out, or continue it with --resume {out}")


def run_sweep(
    config: Config,
    tuning: Tuning,
    out: Path,
    *,
    resume: bool = False,
    on_news: Callable[[News], Any] | None = None,
) -> dict[str, Any]:
    """Tune what ``config`` says, write the sweep's folder and return its summary.

    The folder must be new, or with ``resume`` that of a sweep that was stopped: its trials are kept.
    """
    if not resume:
        check_folder(out)
    lab = Lab(config, tuning)  # whatever is wrong is said before a folder is made
    if not resume:
        out.mkdir(parents=True, exist_ok=True)
        write_sweep(out / SWEEP, config, tuning)
    trials = Trials(out / TRIALS, about(tuning))
    found = tune(lab, trials, on_news=on_news)
    summary = {
        "kind": "sweep",
        "version": fedbraid.__version__,
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "model": config.model.name,
        "rounds": config.rounds,
        "keys": list(tuning.over),
        "search": tuning.search,
        "seeds": tuning.seeds,
        **found,
        "out": str(out),
    }
    if found["best"] is not None:
        (out / BEST).write_text(dump(with_values(config, found["best"])))
    from fedbraid.experiment.figures import draw_tuning, save

    save(draw_tuning(trials.rows, list(tuning.over), found), out / PICTURE)
    (out / SUMMARY).write_text(json.dumps(summary, indent=1))
    return summary


def reopen_sweep(folder: Path) -> tuple[Config, Tuning]:
    """The configuration and the tuning of a sweep to go on with."""
    if not (folder / SWEEP).is_file():
        raise ConfigError(f"{folder} is not the folder of a sweep: it has no {SWEEP}")
    return load_sweep(folder / SWEEP)
