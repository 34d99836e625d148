"""Runs of one federation: the tuned reference methods, and candidates against the best of them.

All points of a method with one seed run as one compiled program (`fedbraid.simulation.points`). Results go into one
JSON file per federation, written after every method, so that a killed process continues where it stopped.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import curves
import jax
import numpy as np
from federations import BY_NAME, config_tree, load, small_cnn

from fedbraid import address, algorithms, files, models
from fedbraid.names import options_of
from fedbraid.simulation.evaluate import evaluator
from fedbraid.simulation.loop import Schedule
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.plan import steps_of
from fedbraid.simulation.points import Points, PointTask, Study
from fedbraid.simulation.program import Task

TUNING_SEEDS = (101, 102)  # the second one only for the best ``TOGETHER`` points of each method
TOGETHER = 9  # points that run as one program
PASSES = 4  # repetitions of tuning and testing, until the share of the target stays
TEST_SEEDS = (1, 2, 3, 4, 5)
RATES = tuple(float(f"{10**e:.3g}") for e in np.arange(-3, 1.25, 0.5))
"""Nine client rates from 0.001 to 10; the library's default of 0.1 is one of them."""

REFERENCES: dict[str, dict[str, Sequence[float]]] = {
    "fedavg": {"client_lr": RATES},
    "fedavgm": {"client_lr": RATES, "server_lr": (1.0, 3.0, 10.0)},
    "fedadam": {"client_lr": RATES, "server_lr": (0.01, 0.03, 0.1, 0.3, 1.0)},
    "fedprox": {"client_lr": RATES, "alpha": (0.01, 0.1, 1.0)},
    "scaffold": {"client_lr": RATES},
    "mimelite": {"client_lr": RATES},
}
OTHERS: dict[str, dict[str, Sequence[float]]] = {
    "fedyogi": {"client_lr": RATES, "server_lr": (0.01, 0.03, 0.1, 0.3, 1.0)},
    "fedadagrad": {"client_lr": RATES, "server_lr": (0.01, 0.03, 0.1, 0.3, 1.0)},
    "mime": {"client_lr": RATES},
    "feddyn": {"client_lr": RATES, "alpha": (0.01, 0.1, 1.0)},
    "fednova": {"client_lr": RATES},
}
"""Further methods whose defaults are judged. They are no references."""


TRACED = ("client_lr", "server_lr", "alpha")


class Lab:
    """One federation with its data, its model, and the file of its results."""

    def __init__(
        self, name: str, data: Path, out: Path, *, rounds: int | None = None, reference: Path | None = None
    ) -> None:
        self.federation = BY_NAME[name]
        self.tree = config_tree(name, data)
        self.data = load(which=name, folder=str(data))
        self.rounds = rounds or self.federation.rounds
        shapes, classes = self.data.shapes, self.data.description.classes
        if self.federation.model == "federations:small_cnn":
            self.model = small_cnn(shapes, classes)
        else:
            self.model = models.build(self.federation.model, shapes, classes, **self.federation.options)
        self.path = out / f"{name}.json"
        self.results: dict[str, Any] = {"federation": name, "rounds": self.rounds}
        if self.path.exists():
            self.results = json.loads(self.path.read_text())
        elif reference is not None and (reference / self.path.name).exists():
            self.results = json.loads((reference / self.path.name).read_text())

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self.path, json.dumps(self.results))

    # -- programs

    def algorithm(self, name: str, options: Mapping[str, Any]) -> Any:
        """The algorithm with the federation's local work, unless ``options`` change it."""
        given = {**self._local_for(name), **options}
        context = {
            "loss": lambda: self.model.loss,
            "outputs": lambda: lambda params, batch: self.model.predict(params, batch["x"]),
            "population": lambda: self.data.train.num_clients,
            "params": lambda: self.model.init(address.init_key(0)),
            "data": lambda: self.data.train,
        }
        found = algorithms.NAMES.find(name)
        taken = inspect.signature(found.thing).parameters
        offered = {key: make for key, make in context.items() if key in taken}
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return algorithms.NAMES.call(found, given, offered)

    def _local_for(self, name: str) -> dict[str, Any]:
        known = options_of(algorithms.NAMES.find(name).thing)
        return {key: value for key, value in self.federation.local.items() if key in known}

    def program(self, make: Callable, keys: Sequence[str], *, points: int, seeds: Sequence[int], split: str) -> Points:
        """The compiled program of points that differ in ``keys``; ``make(values)`` gives the algorithm."""

        def build(values: Mapping[str, Any], data: Any) -> PointTask:
            task = Task(make(values), data)
            return PointTask(task, self.model.metrics, lambda seed: self.model.init(address.init_key(seed)))

        cohort = self.data.train.num_clients if self.federation.cohort == "all" else int(self.federation.cohort)
        test = getattr(self.data, split)
        study = Study(build, tuple(keys), {}, self.data, test)
        options = EngineOptions(devices=1)
        schedule = Schedule(self.limit, 1)
        return Points(study, options, schedule, cohort=cohort, points=points, seeds=seeds, most=TOGETHER)

    limit = 0

    def start_loss(self, split: str, seeds: Sequence[int]) -> float:
        """The loss of the initial models, averaged over seeds."""
        scores = evaluator(self.model.metrics, getattr(self.data, split))
        found = [scores.summary(self.model.init(address.init_key(seed)))["test_loss"] for seed in seeds]
        return float(np.mean(found))

    def work(self, algorithm: Any, runs: int, rounds: int) -> float:
        """Client work of some runs: local steps of all clients, extra gradient passes included."""
        sizes = self.data.train.sizes
        steps = [np.sum(steps_of(exchange.client, sizes), axis=0) for exchange in algorithm.exchanges]
        cohort = len(sizes) if self.federation.cohort == "all" else int(self.federation.cohort)
        return runs * rounds * cohort * float(np.sum(steps, axis=0).mean())

    # -- tuning

    def tune(self, methods: Mapping[str, Mapping[str, Sequence[float]]], section: str) -> None:
        """Validation curves of all points of the methods: with the first seed all, with the second the best nine."""
        found = self.results.setdefault(section, {})
        self.limit, start = self.rounds, self.start_loss("validation", TUNING_SEEDS)
        for method, grid in methods.items():
            if method in found:
                continue
            began, clock = time.perf_counter(), time.process_time()
            keys = list(grid)
            points = [dict(zip(keys, values, strict=True)) for values in itertools.product(*grid.values())]

            def make(values: Mapping[str, Any], method: str = method, keys: list[str] = keys) -> Any:
                return self.algorithm(method, {key: values.get(key, 0.1) for key in keys})

            program = self.program(make, keys, points=len(points), seeds=TUNING_SEEDS, split="validation")
            compiled = time.perf_counter() - began
            first = self._losses(program, points, TUNING_SEEDS[0])
            goal = curves.set_target(start, [_short(curve) for curve in first], least=curves.LEAST + 4)
            order = sorted(range(len(points)), key=lambda i: _rank(_short(first[i]), goal))
            again = order[:TOGETHER]
            second = self._losses(program, [points[i] for i in again], TUNING_SEEDS[1])
            rows = [{"values": p, "curves": [_short(c)]} for p, c in zip(points, first, strict=True)]
            for i, curve in zip(again, second, strict=True):
                rows[i]["curves"].append(_short(curve))
            spent, busy = time.perf_counter() - began, time.process_time() - clock
            runs = len(points) + len(again)
            found[method] = {
                "points": rows,
                "seconds": round(spent, 2),
                "cpu_seconds": round(busy, 2),
                "compile_seconds": round(compiled, 2),
                "client_work": self.work(program.base.task.algorithm, runs, self.rounds),
            }
            self.save()
            print(f"{self.federation.name}: {method}: {spent:.1f} s ({compiled:.1f} s compiling)", flush=True)

    def _losses(self, program: Points, points: Sequence[Mapping[str, float]], seed: int) -> np.ndarray:
        chunks = [program.run(some, seed=seed, rounds=self.rounds) for some in program.chunks(points)]
        return np.concatenate([chunk.evaluations["test_loss"] for chunk in chunks])

    def choose(self, share: float | None) -> float:
        """Choose a point of each method by its rounds on validation data to a share's target; return the share.

        Without ``share`` it is the first with which the fastest point needs enough rounds on validation data.
        """
        tuned = self.results["tuning"]
        start = self.start_loss("validation", TUNING_SEEDS)
        every = [row["curves"][0] for method in REFERENCES for row in tuned[method]["points"]]
        goal = curves.set_target(start, every) if share is None else curves.target_of(start, every, share)
        chosen = {}
        for method, grid in REFERENCES.items():
            twice = [row for row in tuned[method]["points"] if len(row["curves"]) == len(TUNING_SEEDS)]
            best = min(twice, key=lambda row: _rank(curves.mean_curve(row["curves"]), goal))
            reached = curves.rounds_to(curves.mean_curve(best["curves"]), goal["target"])
            values = best["values"]
            edges = [key for key, value in values.items() if value in (min(grid[key]), max(grid[key]))]
            chosen[method] = {"values": values, "validation_rounds": reached, "on_edge": edges}
        self.results |= {"validation_target": goal, "chosen": chosen}
        return goal["share"]

    # -- tests

    def reference(self) -> None:
        """Tune all reference methods, test the chosen points with the test seeds, and set the test target.

        Points are tuned for the share of the test target, and this share depends on the tested points. So both are
        repeated until the share stays. If a method then has several tested points, its best one counts.
        """
        if "best" in self.results:
            return
        self.tune(REFERENCES, "tuning")
        start, share = self.start_loss("test", TEST_SEEDS), self.choose(None)
        for _ in range(PASSES):
            for method, one in self.results["chosen"].items():
                self._tested(method, one["values"])
            tests = self.results["tests"]
            goal = curves.set_target(start, [found["curve"] for found in tests.values()])
            if goal["share"] == share:
                break
            share = self.choose(goal["share"])
        tested: dict[str, Any] = {}
        for key, found in tests.items():
            rounds, method = curves.rounds_to(found["curve"], goal["target"]), key.partition(" ")[0]
            if method not in tested or (rounds or math.inf) < (tested[method]["rounds"] or math.inf):
                tested[method] = {"values": found["values"], "rounds": rounds}
        best = min(tested, key=lambda method: tested[method]["rounds"] or math.inf)
        self.results |= {"tested": tested, "target": goal, "best": {"method": best, **tested[best]}}
        self.save()
        line = ", ".join(f"{m} {found['rounds']}" for m, found in tested.items())
        print(f"{self.federation.name}: best {best} in {tested[best]['rounds']} rounds ({line})", flush=True)

    def _tested(self, method: str, values: Mapping[str, float]) -> None:
        """Measure the test curve of a point, unless the results have it."""
        tests = self.results.setdefault("tests", {})
        key = f"{method} {json.dumps(values)}"
        if key not in tests:
            curve, spent = self._test(method, values, lambda curve: False, [self.rounds])
            tests[key] = {"values": dict(values), "curve": _short(curve), "seconds": round(spent, 2)}
            self.save()

    def _test(
        self, method: str, options: Mapping[str, Any], done: Callable[[np.ndarray], bool], stops: Sequence[int]
    ) -> tuple[np.ndarray, float]:
        """The mean test curve over the test seeds, run up to each of ``stops`` until ``done``; and the seconds."""
        began = time.perf_counter()
        # traced also where they are defaults: then all settings of a method share one compiled program
        known = {**options_of(algorithms.NAMES.find(method).thing), **options}
        rates = {key: known[key] for key in TRACED if isinstance(known.get(key), int | float)}
        fixed = {key: value for key, value in options.items() if key not in rates}

        def make(values: Mapping[str, Any]) -> Any:
            return self.algorithm(method, {**fixed, **{key: values.get(key, rates[key]) for key in rates}})

        self.limit = max(stops)
        program = self.program(make, list(rates), points=1, seeds=TEST_SEEDS, split="test")
        runs: list[Any] = [None] * len(TEST_SEEDS)
        curve = np.zeros(0)
        for stop in stops:
            runs = [
                program.run([rates], seed=seed, rounds=stop, start=run, keep=stop != stops[-1])
                for seed, run in zip(TEST_SEEDS, runs, strict=True)
            ]
            curve = curves.mean_curve([run.evaluations["test_loss"][0] for run in runs])
            if done(curve):
                break
        return curve, time.perf_counter() - began

    def score(self, label: str, method: str, options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Measure a candidate: its rounds to the test target, at most ``MOST`` times the best method's."""
        candidates = self.results.setdefault("candidates", {})
        best, target = self.results["best"]["rounds"], self.results["target"]["target"]
        most = math.ceil(curves.MOST * best) + curves.KEEP
        stops = sorted({min(most, math.ceil(part * best) + curves.KEEP) for part in (1.2, 2.5, 5, curves.MOST)})
        curve, spent = self._test(method, options, lambda c: curves.rounds_to(c, target) is not None, stops)
        rounds = curves.rounds_to(curve, target)
        found = {
            "method": method,
            "options": dict(options),
            "rounds": rounds,
            "ratio": curves.ratio(rounds, best),
            "test_seconds": round(spent, 2),
            **more,
        }
        candidates[label] = found
        self.save()
        return found


def _short(curve: Any) -> list[float]:
    """Six digits are enough, and JSON has no infinity."""
    return [float(f"{value:.6g}") if math.isfinite(value) else 1e30 for value in np.asarray(curve, float)]


def _rank(curve: Any, goal: dict[str, float]) -> tuple[float, float]:
    """Sorts by the rounds to the targets, then by the best level."""
    return curves.effort(curve, goal), curves.best_level([curve])


def clear() -> None:
    """Free compiled programs between federations."""
    jax.clear_caches()
