"""The parts of a tuning: its settings, its data, its criterion and its programs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.partition import hold_out
from fedbraid.experiment import search
from fedbraid.experiment.assembly import assemble, load_named
from fedbraid.experiment.config import Config, ConfigError, sentences
from fedbraid.experiment.points import Point, measured, points_program, traceable, with_values
from fedbraid.experiment.trials import Criterion, Row, pick_metric
from fedbraid.metric import Better, is_client_column
from fedbraid.simulation.points import Points, PointsResult

__all__ = ["Lab", "SweepSettings", "hold_out_validation", "parse_settings"]

MOST_TRIALS = 100_000
TRIES = 32  # points of a random or adaptive search if `trials` is not given
MOST_PROGRAMS = 4  # kept at a time: each holds device memory
PREFIX = "validation_"
FIXED = {
    "seed": "use seeds to try several",
    "rounds": "all points run the same number of rounds, so that they can be compared",
    "engine": "it does not change results",
    "checkpoint": "it does not change results",
    "evaluation": "it does not change results",
    "stop": "all points run the same number of rounds, so that they can be compared",
    "track": "it does not change results",
}


class SweepSettings(BaseModel):
    """How points are found and judged: the ``[sweep]`` section.

    over: the keys that are tried, each with its values, such as "logspace(-2, 0, 5)" or a list.
    search: "grid" tries all combinations, "random" draws points, "adaptive" lets optuna choose the next ones.
    trials [points]: number of points of a random or adaptive search; default: 32.
    batch [points]: number of points that an adaptive search tries at a time.
    halving [points]: eta of successive halving; each rung keeps one point in eta. None: all points run to the end.
    seeds [seeds]: number of tuning seeds per point.
    seed [number]: the first of the tuning seeds.
    validation [share]: share of every client's training examples that is held out for the scores; default: the data's
        own validation split, or 0.2.
    metric: what points are judged by; default: the accuracy if there is one, else the loss.
    better: the direction of the metric; default: as the metric declares.
    last [rounds]: number of last rounds that the score averages over.
    target [that of the metric]: if given, the score is the number of rounds to this value of the metric.
    at_once [points]: most points in one program; default: limited by memory.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)
    over: dict[str, Any] = {}
    search: Literal["grid", "random", "adaptive"] = "grid"
    trials: Annotated[int, Field(ge=1)] | None = None
    batch: Annotated[int, Field(ge=1)] = 8
    halving: Annotated[int, Field(ge=2)] | None = None
    seeds: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0)] = 1000
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None
    metric: str | None = None
    better: Better | None = None
    last: Annotated[int, Field(ge=1)] = 100
    target: float | None = None
    at_once: Annotated[int, Field(ge=1)] | None = None

    @property
    def space(self) -> dict[str, search.Choice | search.Range]:
        return {key: search.over(key, given) for key, given in self.over.items()}

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))


def parse_settings(section: Mapping[str, Any], name: str = "sweep") -> SweepSettings:
    """A checked ``[sweep]`` section."""
    try:
        settings = SweepSettings.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError(sentences(error, SweepSettings, name)) from None
    for key, given in settings.over.items():
        search.over(key, given)
    return settings


def hold_out_validation(data: FederatedData, fraction: float | None, seed: int) -> tuple[FederatedData, str]:
    """The data to tune on, with only a train and a validation split, and a phrase that says how it was split.

    Without a fraction the data's own validation split is used if it has one, else 0.2 of every client's training
    examples. A client keeps at least one training example. The test split is left out, so tuning cannot use it.

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
            f"validation = {fraction:g}: no client has enough training examples to hold any out; use a larger fraction"
        )
    train = Split.from_assignment(data.train.arrays, [np.sort(part) for part in kept], data.train.ids)
    validation = Split.from_assignment(data.train.arrays, [np.sort(part) for part in held], data.train.ids)
    tuning = replace(data, train=train, validation=validation, test=None, unseen=None)
    return tuning, f"{fraction:.0%} of every client's training examples"


class Lab:
    """The data, the programs and the criterion of one tuning, checked.

    data: the data that ``config`` names, if it is already loaded. held: the result of `hold_out_validation`, if it is
        already computed.
    """

    config: Config
    settings: SweepSettings
    space: dict[str, search.Choice | search.Range]
    data: dict[str, FederatedData]
    split_by: str

    def __init__(
        self,
        config: Config,
        settings: SweepSettings,
        data: FederatedData | None = None,
        held: tuple[FederatedData, str] | None = None,
        *,
        statistics: bool = True,
        brief: bool = False,
    ) -> None:
        self.config, self.settings, self.space = config, settings, settings.space
        self.statistics = statistics  # evaluate statistics over clients too
        self.brief = brief  # programs run for a short time, so they must compile fast
        self.raw: dict[str, FederatedData] = {} if data is None else {_data_key(config): data}
        self.data, self.split_by = ({}, "") if held is None else ({_data_key(config): held[0]}, held[1])
        self.check()
        values = {key: search.values_of(one) for key, one in self.space.items()}
        first = with_values(config, {key: every[0] for key, every in values.items()})
        tuned_on = self.data_of(first)
        self.criterion: Criterion = self._criterion(first, tuned_on)
        self.traced: tuple[str, ...] = traceable(first, tuned_on, values)
        self.programs: dict[Any, Points] = {}
        self.compiled: int = 0

    def _criterion(self, config: Config, data: FederatedData) -> Criterion:
        experiment, settings = assemble(config, data), self.settings
        evaluated, logged = measured(experiment, data, PREFIX)
        metric = pick_metric(
            settings.metric,
            evaluated,
            logged,
            prefix=PREFIX,
            declared=experiment.metrics.declared,
            better=settings.better,
        )
        return Criterion(metric, min(settings.last, config.rounds), settings.target)

    def check(self) -> None:
        """Build every value of every key once, so that errors are found before anything runs."""
        settings = self.settings
        number = math.prod(len(search.values_of(one)) for one in self.space.values())
        number = number if settings.search == "grid" else settings.trials or TRIES
        if number * settings.seeds > MOST_TRIALS:
            raise ConfigError(
                f"{number:,} points x {settings.seeds} seeds are more than {MOST_TRIALS:,} trials; use fewer "
                "values, or search = random with trials = ..."
            )
        if self.config.seed in settings.seed_list:
            raise ConfigError(
                f"seed = {self.config.seed} is one of the tuning seeds {settings.seed_list}: tuning seeds must differ "
                "from the seeds that you report"
            )
        if settings.search == "grid":
            search.grid(self.space)
            if settings.trials is not None:
                raise ConfigError("trials = ... is for search = random or adaptive; a grid always runs all its points")
        if not self.space:
            raise ConfigError("nothing to sweep over: give --over KEY=VALUES, or over = { KEY = VALUES } in [sweep]")
        first = {key: search.values_of(one)[0] for key, one in self.space.items()}
        for key, one in self.space.items():
            if (section := key.split(".")[0]) in FIXED:
                raise ConfigError(f"{key!r} cannot be swept over: {FIXED[section]}")
            for value in search.values_of(one):
                config = with_values(self.config, first | {key: value})
                assemble(config, self._raw(config))

    def data_of(self, config: Config) -> FederatedData:
        """The data on which a configuration is tuned."""
        key = _data_key(config)
        if key not in self.data:
            held = hold_out_validation(self._raw(config), self.settings.validation, self.settings.seed)
            self.data[key], self.split_by = held
        return self.data[key]

    def _raw(self, config: Config) -> FederatedData:
        key = _data_key(config)
        if key not in self.raw:
            self.raw[key] = load_named(config)
        return self.raw[key]

    def groups(self, points: Mapping[int, Point]) -> list[list[int]]:
        """Ids of points grouped by program: the points of a group differ in traced values only."""
        found: dict[str, list[int]] = {}
        for i, point in points.items():
            found.setdefault(self._static(point), []).append(i)
        return list(found.values())

    def _static(self, point: Point) -> str:
        return json.dumps({key: value for key, value in point.items() if key not in self.traced}, default=str)

    def program(self, points: Sequence[Point]) -> Points:
        """A program for these points. A compiled one is reused if its batch is between half and twice their number."""
        static = self._static(points[0])
        for (known, _), program in self.programs.items():
            if known == static and len(points) <= 2 * program.size <= 4 * len(points):
                return program
        while len(self.programs) >= MOST_PROGRAMS:
            self.programs.pop(next(iter(self.programs)))
        config = with_values(self.config, points[0])
        data, most = self.data_of(config), self.settings.at_once
        made = points_program(
            config,
            data,
            self.traced,
            points=len(points),
            seeds=self.settings.seed_list,
            test=data.validation,
            prefix=PREFIX,
            most=most,
            statistics=self.statistics,
            brief=self.brief,
        )
        self.programs[static, made.size] = made
        self.compiled += 1
        return made

    def row(self, i: int, point: Point, seed: int, outcome: PointsResult, j: int, status: str, together: int) -> Row:
        """The row of point ``i`` with a seed; ``outcome`` has ``together`` points, and this one has the index ``j``."""
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
        curves = evaluated | trained
        return {
            "point": i,
            "seed": seed,
            **point,
            "status": "diverged" if diverged else status,
            "rounds": outcome.rounds,
            "metric": criterion.metric.name,
            "better": criterion.metric.better,
            "score": None if diverged else _number(criterion.score(outcome, j)),
            "rounds_to_target": criterion.rounds_to_target(outcome, j),
            **{n: _number(c[-1]) for n, c in curves.items()},
            "refused": refused,
            "bytes_down": sums["down"],
            "bytes_up": sums["up"],
            "seconds": float(outcome.seconds[-1]),  # of all trials that ran together
            "together": together,
            "curve/round": [int(r) for r in rounds],
            **{f"curve/{n}": [_number(v) for v in c] for n, c in curves.items() if not is_client_column(n)},
        }


def _data_key(config: Config) -> str:
    attackers = config.attack.share, config.attack.seed  # the Byzantine clients are marked in the data
    return json.dumps([config.data.model_dump(), attackers], sort_keys=True, default=str)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _between(column: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """The means of a per-round column between evaluations: one value per evaluation, with less noise."""
    cuts = np.split(column, rounds[:-1])
    with np.errstate(invalid="ignore"):
        return np.array([np.mean(part) for part in cuts])
