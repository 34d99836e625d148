"""The race of a pilot: settings of all methods run to growing horizons, and at each horizon the worse ones stop.

A race is a tuning over several methods (see `fedbraid.experiment.tuning`), with the same laboratory for each of them:
the same data, tuning seeds and validation split, and one compiled program per method and amount of local work. It
differs in two ways. Settings are judged by their regret (see `ranking`), so that a rate with a slow start but a good
trend continues. And the grid moves: if the best setting of a method has no neighbour on one side, that neighbour runs.

Every decision follows from the rows of ``trials.parquet``. A race that was stopped repeats its decisions from the rows
and runs only what is missing, so it ends with the same answer.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbraid.costs import cost, nbytes
from fedbraid.data.federated import FederatedData
from fedbraid.experiment.advice.candidates import (
    Method,
    Setting,
    configured,
    neighbour,
    program_of,
    with_setting,
)
from fedbraid.experiment.advice.ranking import Curves, Ranking, rank
from fedbraid.experiment.assembly import assemble
from fedbraid.experiment.config import Config
from fedbraid.experiment.lab import Lab, SweepSettings
from fedbraid.experiment.trials import Row, Trials
from fedbraid.experiment.tuning import advance
from fedbraid.metric import Metric
from fedbraid.simulation.plan import steps_per_client
from fedbraid.simulation.points import Points, PointsResult

__all__ = ["MORE_SEEDS", "Budget", "Race", "RaceNews", "Track", "horizons_of"]

TOGETHER = 4  # settings in one program
MANY = 8  # the same for the program of several methods, if the model is small
SMALL = 4_000  # bytes of a model; for larger ones, empty places in a program cost more than a further call
STATES = 2**28  # bytes of the clients' states in a program with SCAFFOLD at most; else it has a program of its own
PARTS = (6, 2, 1)  # settings are compared after these parts of the longest trials
LEAST = 6  # rounds of the first horizon at least
MOVES = 2  # times that the grid of a method may move at one horizon
HOPEFUL = math.log(3.0)  # a method whose best setting has at most this regret continues after the first horizon
NEAR = math.log(2.0)  # the same after the others; and its grid moves
EARLY = 1 / 15  # of the configured rounds: added to rounds before they are compared (see `ranking`)
MORE_SEEDS = 2  # further tuning seeds for the settings that are close to the best at the end


class Track(NamedTuple):
    """What all settings of a race share.

    config: the configured run. methods: what may be tried. settings: how trials are judged, and the tuning seeds; the
    last `MORE_SEEDS` of them are for the end. data, held: the data, and its validation split as `hold_out_validation`
    gives it.
    """

    config: Config
    methods: tuple[Method, ...]
    settings: SweepSettings
    data: FederatedData
    held: tuple[FederatedData, str]


class Budget(NamedTuple):
    """What a pilot may spend: rounds of all trials together, or seconds. None: no limit."""

    rounds: int | None = None
    seconds: float | None = None


def horizons_of(last: int) -> tuple[int, ...]:
    """The rounds after which settings are compared: a sixth and half of the last horizon, and all of it.

    >>> horizons_of(300), horizons_of(30), horizons_of(5)
    ((50, 150, 300), (15, 30), (5,))
    """
    parts = [math.ceil(last / part) for part in PARTS]
    return tuple(dict.fromkeys(rounds for rounds in parts if rounds >= min(LEAST, last)))


class RaceNews(NamedTuple):
    """Progress of a race."""

    done: float  # share of the rounds that are planned so far
    doing: str
    best: Setting | None
    settings: int
    diverged: int


class Race:
    """The settings of several methods on the same data, run to growing horizons. ``last``: the longest of them."""

    config: Config
    methods: tuple[Method, ...]
    settings: SweepSettings
    data: FederatedData
    held: tuple[FederatedData, str]
    trials: Trials
    on_news: Callable[[RaceNews], Any] | None
    budget: Budget
    metric: Metric
    elapsed: float
    compiling: float
    planned: float
    spent: float

    def __init__(
        self,
        track: Track,
        trials: Trials,
        *,
        last: int,
        budget: Budget | None = None,
        on_news: Callable[[RaceNews], Any] | None = None,
    ) -> None:
        self.config, self.methods, self.settings, self.data, self.held = track
        self.trials, self.on_news, self.budget = trials, on_news, budget or Budget()
        self.horizons: tuple[int, ...] = horizons_of(last)
        self.whole: int = max(last, self.config.rounds)  # rounds of the check at the end, see `pilot`
        self.programs: dict[tuple[str, int], tuple[Lab, Points]] = {}
        self.places: dict[Setting, tuple[str, Config, dict[str, Any]]] = {}
        self.kept: dict[tuple[Setting, int], PointsResult] = {}
        self.seeds: list[int] = self.settings.seed_list[: self.settings.seeds - MORE_SEEDS]
        self.rows: dict[tuple[Setting, int, int], Row] = {
            (setting_of(row), row["seed"], row["rounds"]): row for row in trials.rows
        }
        self.used: dict[tuple[Setting, int], int] = {}  # rounds of each trial that the race has asked for so far
        self.elapsed = self.compiling = 0.0  # seconds of these trials; of compiling since the last trial
        self.planned = self.spent = 0.0
        self.ids: dict[Setting, int] = {}
        self.best: Setting | None = None
        self.target: float | None = None
        self.reached: int = 0  # the longest horizon that was compared
        self.costs: dict[str, int] = {}
        experiment = assemble(self.config, self.held[0])
        self.model_bytes: int = nbytes(experiment.shapes)
        self.stateful: bool = MANY * self.held[0].train.num_clients * self.model_bytes <= STATES
        self.start: float = self._start()

    def _start(self) -> float:
        """The metric of the initial models with its sign, averaged over the tuning seeds."""
        lab, program, point = self.program(configured(self.config))
        self.metric = metric = lab.criterion.metric
        values = [program.initial(point, seed)[metric.name] for seed in self.seeds]
        return metric.sign * float(np.mean(values))

    # -- running

    def program(self, setting: Setting) -> tuple[Lab, Points, dict[str, Any]]:
        """The laboratory and the program of a setting, and its point there. Each program is compiled once."""
        name, config, point = self.place(setting)
        key = name, setting.work
        if key not in self.programs:
            began = time.perf_counter()
            together = MANY if name != setting.method and self.model_bytes < SMALL else TOGETHER
            together = together if setting.rates else 1  # a method without rates has one setting
            settings = self.settings.model_copy(
                update={"over": {k: [value] for k, value in point.items()}, "at_once": together}
            )
            lab = Lab(config, settings, self.data, self.held, statistics=False, brief=True)
            self.programs[key] = lab, lab.program([point] * together)
            self.compiling += time.perf_counter() - began
        return *self.programs[key], point

    def place(self, setting: Setting) -> tuple[str, Config, dict[str, Any]]:
        """The name and the configuration of the program that runs a setting, and its point there."""
        if setting not in self.places:
            self.places[setting] = program_of(self.config, self.methods, setting, stateful=self.stateful)
        return self.places[setting]

    def run(self, settings: Iterable[Setting], rounds: int, seeds: Sequence[int] | None = None) -> None:
        """Run settings to a round with every seed; trials that are in the file are not run again."""
        seeds = self.seeds if seeds is None else seeds
        groups: dict[tuple[str, int], list[Setting]] = {}
        settings = list(settings)
        for setting in settings:
            self.ids.setdefault(setting, len(self.ids))
            if any((setting, seed, rounds) not in self.rows for seed in seeds):
                groups.setdefault((self.place(setting)[0], setting.work), []).append(setting)
        self.planned += rounds * len(seeds) * sum(map(len, groups.values()))
        for group in groups.values():
            for chunk in self.program(group[0])[1].chunks(group):
                for seed in seeds:
                    self._chunk([one for one in chunk if (one, seed, rounds) not in self.rows], seed, rounds)
        for trial in itertools.product(settings, seeds):
            if self.used.get(trial, 0) < rounds:
                self.used[trial] = rounds
                self.elapsed += self.rows[*trial, rounds]["advice_seconds"]
        self.reached = max(self.reached, rounds)

    def affords(self, settings: Iterable[Setting], rounds: int, seeds: Sequence[int] | None = None) -> bool:
        """Whether the budget allows to run settings to a round. Seconds are predicted from the trials so far.

        It depends on the rows only, so a race that was stopped decides the same when it continues.
        """
        trials = itertools.product(settings, self.seeds if seeds is None else seeds)
        more = sum(max(0, rounds - self.used.get(trial, 0)) for trial in trials)
        so_far = sum(self.used.values())
        if self.budget.rounds is not None and so_far + more > self.budget.rounds:
            return False
        if self.budget.seconds is not None and so_far:
            return self.elapsed * (1 + more / so_far) <= self.budget.seconds
        return True

    def _chunk(self, chunk: Sequence[Setting], seed: int, rounds: int) -> None:
        """Run some settings of one program with one seed, and add their rows."""
        if not chunk:
            return
        began = time.perf_counter()
        lab, program, _ = self.program(chunk[0])
        points = [self.program(one)[2] for one in chunk]
        names = ", ".join(dict.fromkeys(one.method for one in chunk))
        words = f"{names}: {len(chunk)} settings together, seed {seed}"
        spent, before = self.spent, min(self._done(one, seed) for one in chunk)

        def progress(done: int) -> None:
            self.spent = spent + (done - before) * len(chunk)
            self._tell(f"{words}, round {done} of {rounds}")

        self._tell(words)
        keep = rounds < self.whole
        start = [self.kept.pop((one, seed), None) for one in chunk]
        marks = [mark for mark in (*self.horizons, self.whole) if mark <= rounds]
        outcome = advance(program, points, seed, rounds, start=start, keep=keep, marks=marks, tell=progress)
        made = []
        for j, one in enumerate(chunk):
            if keep:
                self.kept[one, seed] = outcome.take(np.array([j]))
            row = lab.row(self.ids[one], points[j], seed, outcome, j, "finished", len(chunk))
            about = {"method": one.method, "work": one.work, "rates": json.dumps(one.rates)}
            seconds = self.compiling + time.perf_counter() - began
            made.append(about | row | {"advice_seconds": seconds / len(chunk)})
            self.rows[one, seed, rounds] = made[-1]
        self.compiling = 0.0
        self.trials.add(made)

    def _done(self, setting: Setting, seed: int) -> int:
        return self.kept[setting, seed].rounds if (setting, seed) in self.kept else 0

    def _tell(self, doing: str) -> None:
        if self.on_news is not None:
            diverged = sum(row["status"] == "diverged" for row in self.rows.values())
            done = min(1.0, self.spent / max(self.planned, 1.0))
            self.on_news(RaceNews(done, doing, self.best, len(self.ids), diverged))

    # -- judging

    def alive(self, settings: Iterable[Setting], rounds: int) -> list[Setting]:
        """The settings that did not diverge with any seed until a round."""
        return [one for one in settings if all(row["status"] != "diverged" for row in self.rows_of(one, rounds))]

    def rows_of(self, setting: Setting, rounds: int) -> list[Row]:
        """The rows of a setting at a horizon, one for each seed that it ran with."""
        return [self.rows[k] for k in self.rows if k[0] == setting and k[2] == rounds]

    def longest(self, setting: Setting) -> int:
        """The longest horizon that a setting ran to with the first seeds; 0 if it did not run."""
        ran = [{rounds for one, own, rounds in self.rows if one == setting and own == seed} for seed in self.seeds]
        return max(set.intersection(*ran), default=0)

    def curves(self, setting: Setting, rounds: int, seeds: Sequence[int] | None = None) -> Curves:
        """The validation curves of a setting, with the sign of the metric."""
        rows = [self.rows[setting, seed, rounds] for seed in (self.seeds if seeds is None else seeds)]
        values = np.array([row[f"curve/{row['metric']}"] for row in rows], float)
        sign = 1.0 if rows[0]["better"] == "higher" else -1.0
        return Curves(np.array(rows[0]["curve/round"]), sign * values)

    def ranking(
        self, settings: Iterable[Setting], rounds: int, seeds: Sequence[int] | None = None
    ) -> Ranking[Setting] | None:
        """The settings that did not diverge, from best to worst; None if there is none."""
        found = {one: self.curves(one, rounds, seeds) for one in self.alive(settings, rounds)}
        return rank(found, self.start, early=EARLY * self.config.rounds, target=self.target) if found else None

    # -- the race

    def first(self, settings: Sequence[Setting], rounds: int) -> list[Setting]:
        """Run settings to the first horizon, and move the grids of good methods; returns all that were run."""
        tried = list(dict.fromkeys(settings))
        self.run(tried, rounds)
        return self.move(tried, tried, rounds, NEAR)

    def move(self, field: Sequence[Setting], tried: Sequence[Setting], rounds: int, regret: float) -> list[Setting]:
        """Add neighbours of the best setting of every method with at most this regret, until it has them all.

        field: the settings that are compared. tried: all settings that were ever run, also those that stopped.
        """
        field, tried = list(field), list(tried)
        for _ in range(MOVES):
            found = self.ranking(field, rounds)
            if found is None:
                more = [lower(one) for one in lowest(field)]  # everything diverged: try lower rates
            else:
                self.best = found.order[0]
                more = []
                for best in best_of_each(found.order):
                    if found.regret[best] - found.regret[found.order[0]] <= regret:
                        more += [one for one in beyond(best, tried) if self._may(one, tried, rounds)]
            more = [one for one in dict.fromkeys(more) if one not in tried]
            if not more or not self.affords(more, rounds):
                break
            self.run(more, rounds)
            field, tried = [*field, *more], [*tried, *more]
        return field

    def _may(self, setting: Setting, tried: Sequence[Setting], rounds: int) -> bool:
        """Whether a neighbour is worth a run: no setting with rates that are all at most as large diverged."""
        lost = [one for one in tried if one not in self.alive([one], rounds) and one[:2] == setting[:2]]
        return not any(all(a >= b for (_, a), (_, b) in zip(setting.rates, one.rates, strict=True)) for one in lost)

    def narrow(self, field: Sequence[Setting], rounds: int, keep: int, regret: float) -> list[Setting]:
        """The settings that continue after a horizon.

        The ``keep`` best ones, and the best of every method with at most this regret together with its neighbours:
        early rounds favour other rates than late ones.
        """
        found = self.ranking(field, rounds)
        if found is None:
            return []
        order = found.order
        best = [one for one in best_of_each(order) if found.regret[one] - found.regret[order[0]] <= regret]
        near = [one for one in order for own in best if one == own or are_neighbours(one, own)]
        return [one for i, one in enumerate(order) if i < keep or one in near]

    def work_of(self, setting: Setting) -> float:
        """Local steps that one client takes in a round, on average over all clients."""
        return steps_per_client(self.program(setting)[1].base.task.algorithm, self.held[0].train.sizes)

    def bytes_of(self, setting: Setting) -> int:
        """Bytes that one client receives and sends in a round."""
        if setting.method not in self.costs:  # the program of several methods sends more than each of them
            experiment = assemble(with_setting(self.config, self.methods, setting), self.held[0])
            traffic = cost(experiment.algorithm, experiment.shapes, self.held[0])
            self.costs[setting.method] = traffic.down + traffic.up
        return self.costs[setting.method]


def setting_of(row: Mapping[str, Any]) -> Setting:
    """The setting of a row of the file of trials."""
    return Setting(row["method"], row["work"], tuple((name, value) for name, value in json.loads(row["rates"])))


def best_of_each(order: Iterable[Any]) -> list[Setting]:
    """The first setting of each method and amount of local work."""
    found: dict[tuple[str, int], Setting] = {}
    for one in order:
        found.setdefault((one.method, one.work), one)
    return list(found.values())


def moved(setting: Setting, name: str, steps: int) -> Setting:
    """The setting with one rate moved along the lattice."""
    rates = tuple((key, neighbour(value, steps) if key == name else value) for key, value in setting.rates)
    return setting._replace(rates=rates)


def beyond(best: Setting, tried: Sequence[Setting]) -> list[Setting]:
    """Neighbours of a setting along each rate on the sides where nothing was tried yet.

    >>> at = lambda rate: Setting("fedavg", 1, (("client_lr", rate),))
    >>> [str(one) for one in beyond(at(1.0), [at(0.3162), at(1.0)])]
    ['fedavg (client_lr 3.16)']
    """
    found = []
    for name, value in best.rates:
        others = dict(best.rates) | {name: None}
        line = [
            dict(one.rates)[name] for one in tried if one[:2] == best[:2] and dict(one.rates) | {name: None} == others
        ]
        if max(line) <= value:
            found.append(moved(best, name, 1))
        if min(line) >= value:
            found.append(moved(best, name, -1))
    return found


def are_neighbours(one: Setting, other: Setting) -> bool:
    """Whether two settings differ in a single rate, by one step of the lattice.

    >>> at = lambda client, server: Setting("fedavg", 1, (("client_lr", client), ("server_lr", server)))
    >>> are_neighbours(at(0.1, 1.0), at(0.3162, 1.0)), are_neighbours(at(0.1, 1.0), at(0.3162, 3.162))
    (True, False)
    """
    return any(one == moved(other, name, steps) for name, _ in other.rates for steps in (-1, 1))


def lowest(settings: Sequence[Setting]) -> list[Setting]:
    """The setting of each method with the smallest client rate."""
    return best_of_each(sorted((one for one in settings if one.rates), key=lambda one: one.rates[0][1]))


def lower(setting: Setting) -> Setting:
    """A hundredth of the client rate."""
    return moved(setting, setting.rates[0][0], -4)
