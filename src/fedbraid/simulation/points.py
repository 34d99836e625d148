"""Several points of one task as one program: a sweep over values that can be traced is a ``vmap``.

A *point* gives values to some hyper-parameters. Points that differ only in traced values have the same shapes, so one
program runs them together. The points are the first axis of the server, the client states and the columns.

All points with one seed get the same initial model, cohorts and batches. So they are compared under equal conditions,
and batches are shuffled and gathered once for all points. Another seed has other cohorts, which the host lays out, so
seeds run one after the other with the same compiled program.

If there are at least as many points as devices, every device runs its own points and sends nothing to the others. With
fewer points, the clients are spread over the devices as in a single run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbraid import address
from fedbraid.core import Algorithm
from fedbraid.costs import Cost, cost, data_shapes, nbytes
from fedbraid.data.federated import Split
from fedbraid.lowering import captured, notice_unmet
from fedbraid.lowering.compiler import BRIEF, ONCE, brief_options
from fedbraid.metric import declared_by, is_client_column
from fedbraid.simulation import checkpoint
from fedbraid.simulation.asynchrony import Versions, no_past
from fedbraid.simulation.devices import client_mesh, replicated, sharded, total_memory
from fedbraid.simulation.evaluate import in_batches
from fedbraid.simulation.feed import Feed
from fedbraid.simulation.history import History
from fedbraid.simulation.loop import RoundLoop, Schedule
from fedbraid.simulation.means import check_means
from fedbraid.simulation.one_point import OnePoint, PointTask, Study
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.padding import check_padding, recorded_losses
from fedbraid.simulation.personal import Layout, PersonalEvaluator, has_own_models, layout_of
from fedbraid.simulation.placement import states_on_host, streams, without_lanes
from fedbraid.simulation.plan import Plan, choose_plan, steps_of, steps_per_client
from fedbraid.simulation.points_result import PointsResult, joined
from fedbraid.simulation.program import Program
from fedbraid.simulation.result import Checkpoints
from fedbraid.simulation.rounds import WINDOW, CompiledRounds, Start
from fedbraid.simulation.timing import check_timing, timelines

__all__ = ["PointTask", "Points", "PointsResult", "Study"]

PyTree = Any
AXIS = "points"
SECONDS = "seconds"  # column of evaluations: seconds since the start
SHARE = 0.6  # share of a device's memory that one program may use
LITTLE = 1_000_000  # parameters times local steps of a whole run; for less work optimizing a program does not pay
WIDE = 16_000  # for models of fewer bytes, one matrix product for all points is faster than one per point


class PointsError(ValueError):
    """The points cannot run on this machine; the message says what to change."""


class Points:
    """The programs of points with the same shapes, compiled once for all chunks of points and all seeds.

    points: total number of points; ``size`` of them run at a time: all that fit into memory, but at most ``most``.
    seeds: the seeds that will be run. Blocks of streamed data are large enough for the cohorts of all of them.
    brief: the programs run for a short time, so they compile with the options of `fedbraid.lowering.compiler`.
    """

    study: Study
    options: EngineOptions
    schedule: Schedule
    seeds: tuple[int, ...]
    on_host: bool
    folder: Path | None
    sharding: NamedSharding
    program: Callable[..., Any]
    look: Callable[..., Any]
    size: int

    def __init__(
        self,
        study: Study,
        options: EngineOptions,
        schedule: Schedule,
        *,
        cohort: int,
        points: int,
        seeds: Sequence[int],
        most: int | None = None,
        brief: bool = False,
    ) -> None:
        self.study, self.options, self.schedule, self.seeds = study, options, schedule, tuple(seeds)
        split = study.data.train
        self.base: PointTask = study.build(study.first, study.data)
        alg = self.base.task.algorithm
        params = jax.eval_shape(lambda: self.base.init(self.seeds[0]))
        self.compiler: dict[str, Any] = {}
        if brief:
            size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
            work = size * steps_per_client(alg, split.sizes) * cohort * schedule.rounds
            little = points == 1 and work < LITTLE
            self.compiler = {"compiler_options": brief_options(ONCE if little else BRIEF)}
        if options.model_devices > 1:
            raise ValueError(
                f"model_devices = {options.model_devices}: points that run together keep many models, and they are not "
                "divided over devices; use model_devices = 1"
            )
        devices = client_mesh(options.devices)
        self.stream: bool = streams(options, split, devices)
        # with states on the host, each exchange is one call that uses all devices, so points are not spread over them
        self.on_host, self.folder = states_on_host(alg, params, split.num_clients, options, devices, points=points)
        many = devices.devices.size
        self.own_points: bool = many > 1 and not self.stream and not self.on_host and points >= many
        self.mesh: Mesh = Mesh(devices.devices, (AXIS,)) if self.own_points else devices
        self.inner: Mesh = Mesh(devices.devices[:1], devices.axis_names) if self.own_points else devices
        self.sharding = NamedSharding(self.mesh, PartitionSpec(AXIS) if self.own_points else PartitionSpec())
        with recorded_losses() as losses:
            self.traffic: Cost = cost(alg, params, study.data)
        check_padding(losses, alg, params, split)
        check_means(alg, params, split, options)
        task = self.base.task
        check_timing(task, params)
        if task.timing is not None:
            cohort = task.timing.uploads
        options = without_lanes(options, self.inner) if task.is_asynchronous else options
        self.plan: Plan = choose_plan(alg, params, study.data, self.inner, options, cohort)
        if self.plan.kind == "lanes" and options.chunk == "auto" and points > 1:
            self.plan = self.plan._replace(chunk=min(self.plan.chunk, _useful_lanes(self.plan, alg, split)))
        notice_unmet(alg, params, data_shapes(study.data), options, self.plan.lanes)
        window = min(WINDOW, schedule.rounds, schedule.evaluate_every or schedule.rounds)
        timeline = timelines(task, self.traffic)
        sizes: dict[str, Any] = {"seed": self.seeds[0], "window": window, "stream": self.stream}
        self.feed: Feed = Feed(task, self.plan, self.mesh, options, **sizes, timeline=timeline)
        self.places: int = 0
        if task.is_asynchronous and timeline is not None:
            self.places = max(timeline(seed).places(schedule.rounds) for seed in self.seeds)
        for seed in self.seeds:
            self.feed.seed = seed
            self.feed.reserve(range(schedule.rounds))
        test = study.test
        self.test: Any = None if test is None else jax.device_put(in_batches(test), replicated(self.mesh))
        self.own: Layout | None = None
        if test is not None and has_own_models(alg, study.data, test):
            self.own = layout_of(test, alg, params)
        spread = nbytes(params) >= WIDE
        self.point: OnePoint = OnePoint(study, self.base, self.options, self.inner, self.stream, spread, self.own)
        self._fit(points if most is None else min(points, most))

    # -- programs

    @functools.cached_property
    def _starting(self) -> Callable:
        """``start`` for all points. It is made once: a new function would be compiled again in every run."""
        return self._mapped(self.point.start, (0, None))

    def _no_past(self, server: PyTree) -> PyTree:
        """Places for the past models of all points; None if the run is not asynchronous."""
        alg = self.base.task.algorithm
        return jax.vmap(lambda one: no_past(alg, one, self.places))(server) if self.places else None

    @functools.cached_property
    def _looking_own(self) -> Callable:
        """``look_own`` for all points, made once. States that are on the host have the clients before the points."""
        return self._mapped(self.point.look_own, (0, None, 0, 1 if self.on_host else 0, None))

    def _mapped(self, function: Callable, in_axes: tuple, out_axes: Any = 0, **options: Any) -> Any:
        """``function`` mapped over points, compiled. Arguments with axis None are shared by all points."""
        mapped = jax.vmap(function, in_axes=in_axes, out_axes=out_axes)
        if self.own_points:
            many, one = PartitionSpec(AXIS), PartitionSpec()
            specs = tuple(many if axis == 0 else one for axis in in_axes)
            mapped = jax.shard_map(mapped, mesh=self.mesh, in_specs=specs, out_specs=many, check_vma=False)
        return captured.jit(mapped, sharding=replicated(self.mesh), **self.compiler | options)

    def _program(self, size: int) -> tuple[Callable, Callable, int]:
        """Compiled rounds and evaluation of ``size`` points, and the bytes that they need on a device."""
        values = self._values(np.zeros((size, len(self.study.keys))))
        params = jax.eval_shape(lambda: self.base.init(self.seeds[0]))
        start = self._starting

        def placed(tree: PyTree, population: int | None = None) -> PyTree:
            def shape(s: Any) -> Any:
                wide = s.shape if population is None else (s.shape[0], population, *s.shape[1:])
                return jax.ShapeDtypeStruct(wide, s.dtype, sharding=self.sharding)

            return jax.tree.map(shape, tree)

        server, client = jax.eval_shape(start, values, params)
        past = jax.eval_shape(self._no_past, server)
        server, states = placed(server), placed(client, self.study.data.train.num_clients)
        look = self._mapped(self.point.look, (0, 0, None)).lower(values, server, self.test).compile()
        if self.on_host:  # exchanges compile when they are first called
            return self._exchanges(self.plan), look, _memory(look)
        portion = self.feed.portion(0, 1)  # streamed blocks have the size that is reserved for all seeds and rounds
        arrays = jax.device_put(portion.arrays, sharded(self.mesh)) if self.stream else portion.arrays
        number, key = np.int32(0), self._put(jax.random.key(0))
        rounds = self._mapped_rounds(self.plan)
        carried = server if past is None else Versions(server, placed(past))
        rounds = rounds.lower(values, carried, states, arrays, portion.slots, number, number, key).compile()
        return rounds, look, max(_memory(rounds), _memory(look))

    def _mapped_rounds(self, plan: Plan) -> Any:
        axes = (0, 0, 0, None, None, None, None, None)
        return self._mapped(lambda *a: self.point.rounds(plan, *a), axes, **plan.compiler)

    def _exchanges(self, plan: Plan) -> Callable:
        axes = (0, 0, 1, None, None, None, None)
        count = len(self.base.task.algorithm.exchanges)
        return [  # type: ignore[return-value]
            self._mapped(lambda *a, i=i: self.point.exchange(plan, i, *a), axes, (0, 1, 0)) for i in range(count)
        ]

    def _bound(self, values: Any) -> Callable[[Plan], Program]:
        """A function from a plan to the program of the points ``values``. The program of ``self.plan`` is reused."""

        def make(plan: Plan) -> Program:
            program = self.program
            if plan != self.plan:  # a chunk that was halved; its program compiles when it is first called
                program = self._exchanges(plan) if self.on_host else self._mapped_rounds(plan)
            if self.on_host:
                return Program(
                    _not_here,
                    lambda index, *args: program[index](values, *args),  # type: ignore[index]
                )

            def rounds(server: Any, states: Any, arrays: Any, slots: Any, first: int, number: int, key: Any) -> Any:
                where = np.int32(first), np.int32(number)
                return program(values, server, states, arrays, slots, *where, key)

            return Program(rounds, _not_here)

        return make

    def _whole(self, points: int) -> int:
        """``points`` rounded up, so that every device has the same number of points."""
        devices = self.mesh.devices.size if self.own_points else 1
        return -(-points // devices) * devices

    def _fit(self, points: int) -> None:
        """Compile for the largest number of points, up to ``points``, that fits into memory."""
        device, devices = self.mesh.devices.flat[0], self.mesh.devices.size
        room = SHARE * total_memory(device) / (devices if device.platform == "cpu" else 1)  # CPU devices share memory
        least, population = self._whole(1), self.study.data.train.num_clients
        server, client = jax.eval_shape(
            self.point.start, jnp.zeros(len(self.study.keys)), jax.eval_shape(lambda: self.base.init(self.seeds[0]))
        )
        # server and states before and after a round: a lower bound, so that programs that cannot fit are not compiled
        each = nbytes(server) + (0 if self.on_host else population * nbytes(client))
        size = max(least, min(points, int(room * (devices if self.own_points else 1) // max(2 * each, 1))))
        need = self._compile(self._whole(size))
        while need > room:
            if self.size == least:
                raise PointsError(
                    f"one point of this sweep needs {need / 1e9:.3g} GB and there are {room / 1e9:.3g} GB to use; use "
                    "a smaller model, cohort or engine.chunk, engine.data_in = 'host' or engine.states_in = 'host'"
                )
            need = self._compile(self._whole(max(1, min(self.size - least, int(self.size * room / need)))))
        even = self._whole(-(-points // -(-points // self.size)))  # equal chunks, since the last one is padded
        if even < self.size:
            self._compile(even)

    def _compile(self, size: int) -> int:
        self.program, self.look, need = self._program(size)
        self.size = size
        return need

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, replicated(self.mesh))

    def _values(self, values: np.ndarray) -> Any:
        typed = np.asarray(values, jnp.result_type(float)).reshape(len(values), len(self.study.keys))
        return jax.device_put(typed, self.sharding)

    # -- runs

    def initial(self, point: Mapping[str, float], seed: int) -> dict[str, float]:
        """The evaluation of the initial model with a seed; it uses the compiled program."""
        values = self._values(np.array([[float(point[key]) for key in self.study.keys]] * self.size))
        server, _ = self._starting(values, self._put(self.base.init(seed)))
        row, _, _ = self.look(values, jax.device_put(server, self.sharding), self.test)
        return {name: float(column[0]) for name, column in row.items()}

    def chunks(self, points: Sequence[Any]) -> list[Sequence[Any]]:
        """The points in chunks of at most ``size``."""
        return [points[i : i + self.size] for i in range(0, len(points), self.size)]

    def run(
        self,
        points: Sequence[Mapping[str, float]],
        *,
        seed: int,
        rounds: int,
        start: PointsResult | None = None,
        keep: bool = False,
        marks: Collection[int] = (),
        checkpoints: Checkpoints | None = None,
        on_progress: Callable[[int], Any] | None = None,
    ) -> PointsResult:
        """Run at most ``size`` points with one seed up to round ``rounds``, from the beginning or from ``start``.

        start: an earlier result to continue from. keep: put models and client states into the result, for ``start``.
        marks: rounds after which to evaluate, in addition to the schedule. checkpoints: where to save; with ``resume``
        the run continues from the newest one. on_progress: called with the round after each evaluation.
        """
        real = len(points)
        if not 1 <= real <= self.size:
            raise ValueError(f"this program takes 1 to {self.size} points, got {real}")
        if seed not in self.seeds:
            raise ValueError(f"this program was made for the seeds {list(self.seeds)}, got {seed}")
        rows = np.minimum(np.arange(self.size), real - 1)  # padding repeats the last point and is dropped at the end
        numbers = np.array([[float(point[key]) for key in self.study.keys] for point in points])
        values = self._values(numbers.reshape(real, -1)[rows])
        driver, watch = self._driver(values, seed, start, rows)
        if checkpoints is not None:
            driver.checkpoints = checkpoints.folder
            driver.run = {"seed": seed, "points": numbers.tolist(), **(checkpoints.run or {})}
            watch.resume(driver, checkpoints)
        driver.reserve(rounds)
        schedule = replace(
            self.schedule,
            rounds=rounds,
            evaluate_every=self.schedule.evaluate_every or rounds,
            checkpoint_every=None if checkpoints is None else checkpoints.every,
            marks=frozenset(marks),
        )

        def tell() -> None:
            if schedule.evaluates(driver.done) and on_progress is not None:
                on_progress(driver.done)

        RoundLoop(driver, schedule, tell).run()
        if watch.finite is None and driver.scorer is not None:  # resumed after the last round: nothing was evaluated
            driver.scorer(driver.server)
            if driver.personal is not None:
                driver.personal(driver.server, driver.read_states)
        new = self._result(driver, watch).take(np.arange(real))
        if keep:
            new = new._replace(carry=self._carry(driver, real))
        return new if start is None else joined(start, new)

    def _driver(
        self, values: Any, seed: int, start: PointsResult | None, rows: np.ndarray
    ) -> tuple[CompiledRounds, _Watch]:
        self.feed.seed = seed
        params = self._put(self.base.init(seed))
        server, client = self._starting(values, params)
        folder = None if self.folder is None else self.folder / f"points-{seed}"
        begin = Start(server, client, self.on_host, folder, self._no_past(server))
        driver = CompiledRounds(
            self._bound(values),
            self.feed,
            History(self.traffic, self.plan.cohort),
            begin,
            points=self.size,
            sharding=self.sharding,
        )
        driver.seed_key = self._put(driver.seed_key)  # once, and not in every call
        if start is not None:
            server, states, past = jax.tree.map(lambda leaf: leaf[rows], start.carry)
            driver.server, driver.done = jax.device_put(server, self.sharding), start.rounds
            driver.past = None if past is None else jax.device_put(past, self.sharding)
            if driver.host_states is not None:
                everyone = np.arange(self.feed.split.num_clients)
                driver.host_states.write(everyone, jax.tree.map(lambda leaf: np.moveaxis(leaf, 1, 0), states))
            else:
                driver.states = jax.device_put(states, self.sharding)
        jax.block_until_ready((driver.server, driver.states))
        watch = _Watch(time.perf_counter())
        driver.scorer = lambda server: watch.note(jax.block_until_ready(self.look(values, server, self.test)))
        if self.own is not None:
            look = functools.partial(self._looking_own, values, self.test)
            own = PersonalEvaluator(look, self.own, declared_by(self.base.metrics))
            driver.personal = own.of_points(self.study.prefix, watch.own.update)
        return driver, watch

    def _carry(self, driver: CompiledRounds, real: int) -> Any:
        """(server, states, past models) of the first ``real`` points as NumPy arrays."""
        states = driver.states
        if driver.host_states is not None:
            read = driver.host_states.read(np.arange(self.feed.split.num_clients))
            states = jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf), 0, 1), read)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:real], (driver.server, states, driver.past))

    def _result(self, driver: CompiledRounds, watch: _Watch) -> PointsResult:
        history, evaluations = driver.history.rounds(), driver.history.evaluated()
        stuck = np.zeros(self.size, bool)
        for exchange in self.traffic.exchanges:
            arrived, refused = history[f"{exchange.name}/arrived"], history[f"{exchange.name}/refused"]
            stuck |= ((refused > 0) & (arrived == 0)).any(1)
        # statistics over clients are nan if no client has test examples; that does not mean divergence
        seconds = evaluations.pop(SECONDS)
        pooled = [c for name, c in evaluations.items() if name != "round" and not is_client_column(name)]
        return PointsResult(
            driver.done,
            {name: np.asarray(column) for name, column in history.items()},
            evaluations,
            {name: np.asarray(column) for name, column in (watch.clients | watch.own).items()},
            stuck | ~np.asarray(watch.finite) | ~np.all([np.isfinite(c).all(1) for c in pooled], 0),
            seconds,
        )


class _Watch:
    """Results of a run's last evaluation that are not columns, and the start time."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.clients: dict[str, Any] = {}
        self.own: dict[str, Any] = {}  # the same of the clients' own models
        self.finite: Any = None

    def note(self, seen: tuple) -> dict[str, Any]:
        """Keep the results of an evaluation; returns its columns."""
        row, self.clients, self.finite = seen
        return row | {SECONDS: np.float64(time.perf_counter() - self.began)}

    def resume(self, driver: CompiledRounds, checkpoints: Checkpoints) -> None:
        """Continue from the newest good checkpoint, if there is one. Time is counted on from its last evaluation."""
        place = next(checkpoint.good_ones(checkpoints.folder), None) if checkpoints.resume else None
        if place is None:
            return
        checkpoint.check_run(place, driver.run)
        driver.restore(*checkpoint.load(place))
        if driver.history.evaluations:
            self.began -= float(driver.history.evaluations[-1][SECONDS])


def _not_here(*_: Any) -> Any:
    raise AssertionError("with client states on the host a program of points has only exchanges, else only rounds")


def _memory(compiled: Any) -> int:
    """Bytes that a compiled program needs; 0 if the backend does not tell."""
    used = compiled.memory_analysis()
    return used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes if used else 0


def _useful_lanes(plan: Plan, alg: Algorithm, split: Split) -> int:
    """Number of lanes beyond which a round gets no faster: its longest client then takes as long as the other lanes.

    In a single run, spare lanes cost little because the GPU has idle capacity. Several points fill the GPU, and then
    every spare lane takes time: nine rates of an LSTM on an H200 took 203 ms a round on 20 lanes, 85 on 6 and 78 on 4.
    """
    share = -(-plan.cohort // plan.devices)
    lanes = 1.0
    for exchange in alg.exchanges:
        steps = np.sum(steps_of(exchange.client, split.sizes), axis=0)
        drawn = [steps[address.cohort(0, r, 0, len(steps), plan.cohort)] for r in range(16)]
        lanes = max(lanes, float(np.mean([one.sum() / one.max() for one in drawn])) / plan.devices)
    return min(share, int(np.ceil(lanes)))
