"""Many runs as one program: points that share every shape are mapped over together.

A *point* gives values to some keys of a configuration. Rates may be traced, so points that differ in rates alone are
one program with the points as its leading axis; counts, names and shapes are static, so points that differ in them
need programs of their own.

All points at a seed see the same initial model, the same cohorts and the same batches: they are compared alike, and
shuffling and gathering are done once for all of them. Another seed has other cohorts, which the host lays out: seeds
run one after the other through the same compiled program.

With at least as many points as devices every device takes points of its own and exchanges nothing with the others;
with fewer, clients are spread over the devices as in a single run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbraid import address
from fedbraid.core import Algorithm, finite, message_shapes
from fedbraid.costs import cost, data_shapes, nbytes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment.assembly import Experiment, assemble
from fedbraid.experiment.config import Config, ConfigError, parse
from fedbraid.local import MASK
from fedbraid.metric import declared_by, is_client_column
from fedbraid.simulation.devices import client_mesh, free_memory, replicated, sharded
from fedbraid.simulation.engine import make_engine
from fedbraid.simulation.evaluate import client_values, in_batches, score, summarize
from fedbraid.simulation.feed import Feed, Portion
from fedbraid.simulation.plan import Plan, steps_of
from fedbraid.simulation.run import CALL, WINDOW, choose_plan, streams

__all__ = ["Outcome", "Point", "Together", "measured", "traceable", "with_values"]

Point = Mapping[str, Any]
AXIS = "points"
SHARE = 0.6  # of the free memory that one program may take
WIDE = 16_000  # bytes of a model below which one product for all points is faster than one for each


class Outcome(NamedTuple):
    """Several points at one seed, after ``rounds`` rounds; arrays have the points in front.

    A point has *diverged* if its model or a pooled score was not finite, or if in some round every upload was refused
    for not being finite. The engine refuses such uploads so that one bad client does no harm; where all are bad the run
    stands still, and its last good score would pass for a result.
    """

    rounds: int
    history: dict[str, np.ndarray]  # [points, rounds]
    evaluations: dict[str, np.ndarray]  # [points, evaluations]; "round" is [evaluations]
    clients: dict[str, np.ndarray]  # [points, clients]: each client's own metric at the end
    diverged: np.ndarray  # [points]
    seconds: np.ndarray  # [evaluations]: on the clock since the start, for all points together
    carry: Any = None  # (server, states) to go on from, if they were to be kept

    def take(self, index: Any) -> Outcome:
        """The outcome of some of the points."""

        def some(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: column if name == "round" else column[index] for name, column in columns.items()}

        return Outcome(
            self.rounds,
            some(self.history),
            some(self.evaluations),
            some(self.clients),
            self.diverged[index],
            self.seconds,
            jax.tree.map(lambda leaf: leaf[index], self.carry),
        )


def with_values(config: Config, values: Point) -> Config:
    """The configuration with other values at some keys, checked; keys are dotted, transforms are counted from 0.

    >>> with_values(Config(), {"algorithm.client_lr": 0.5, "rounds": 7}).algorithm.options
    {'client_lr': 0.5}
    """
    tree = config.model_dump()
    for key, value in values.items():
        *parents, last = key.split(".")
        here: Any = tree
        for part in parents:
            here = _child(here, part, key)
        if isinstance(here, list):
            raise ConfigError(f"{key!r} names a whole transform; name one of its options, such as {key}.OPTION")
        if not isinstance(here, dict):
            raise ConfigError(f"{key!r}: {parents[-1]!r} is a value, not a section")
        here[last] = value
    return parse(tree)


def _child(here: Any, part: str, key: str) -> Any:
    if isinstance(here, tuple | list):
        if not part.isdigit() or int(part) >= len(here):
            raise ConfigError(f"{key!r}: there are {len(here)} transforms, counted from 0; there is no {part!r}")
        return here[int(part)]
    if not isinstance(here, dict):
        raise ConfigError(f"{key!r}: a value lies where {part!r} should be a section")
    return here.setdefault(part, {})


def traceable(config: Config, data: FederatedData, values: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Those keys whose values are numbers that may be traced: rates are, counts are not.

    It is tried, not guessed: a key may be traced if everything that the configuration names can be built and its
    messages laid out without knowing the key's value.
    """
    numbers = [
        key
        for key, all_ in values.items()
        if key.split(".")[0] in ("algorithm", "model", "transforms")
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in all_)
    ]
    found: list[str] = []
    for key in numbers:  # one by one on top of those found: two that may be traced alone may not be together
        if _builds(config, data, [*found, key]):
            found.append(key)
    return tuple(found)


def _builds(config: Config, data: FederatedData, keys: Sequence[str]) -> bool:
    def attempt(values: Any) -> Any:
        experiment = assemble(with_values(config, dict(zip(keys, values, strict=True))), data)
        message_shapes(experiment.algorithm, experiment.params, data_shapes(data.train))
        return values

    try:
        jax.eval_shape(attempt, [jnp.zeros(()) for _ in keys])
    except Exception:  # whatever it is: this value is needed before the program runs
        return False
    return True


def measured(experiment: Experiment, data: FederatedData, prefix: str) -> tuple[list[str], list[str]]:
    """Names of what will be evaluated and of what the clients will report, without running anything.

    >>> from fedbraid.experiment import build
    >>> experiment = build(Config())
    >>> measured(experiment, experiment.data, "test_")
    (['test_accuracy', 'test_loss'], ['train/loss'])
    """
    alg, params, clients = experiment.algorithm, experiment.params, data_shapes(data.train)
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    logged = []
    for exchange in alg.exchanges:
        report = jax.eval_shape(exchange.client, jax.eval_shape(exchange.send, server), state, clients, key)
        logged += [f"{exchange.name}/{name}" for name in report.metrics]
    batch = {name: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for name, a in clients.arrays.items()}
    batch[MASK] = jax.ShapeDtypeStruct((1,), jnp.float32)
    return [prefix + name for name in jax.eval_shape(experiment.metrics, params, batch)], logged


@jax.custom_batching.custom_vmap
def _each_its_own(field: Any, values: Any) -> Any:
    """``field``, and mapped over points a copy of it for each.

    All points see the same batch. Multiplied as one array with the weights of all points it makes one wide product, for
    which the weights are transposed at every step; with a copy for each point the products are as many small ones, in
    place. On a CPU that took 0.7 of the time with softmax regression (784 -> 62) and 0.8 with an MLP of 300-100 units.
    """
    del values
    return field


@_each_its_own.def_vmap
def _copies(points: int, mapped: Sequence[bool], field: Any, values: Any) -> tuple[Any, bool]:
    if not mapped[1]:  # over clients, not over points: those come later
        return _each_its_own(field, values), mapped[0]
    return (field if mapped[0] else jnp.broadcast_to(field, (points, *field.shape))), True


class Together:
    """The programs of points that differ in the values of ``keys`` alone, compiled once for all chunks and seeds.

    config: a configuration with valid values for all keys (the first point's).
    test: what is evaluated, under names that begin with ``prefix``; never looked at when None.
    points: how many there will be; ``size`` is how many of them run at a time, as many as fit into memory or ``most``.
    seeds: those that will be run; streamed cohorts get room for the largest of theirs.
    """

    def __init__(
        self,
        config: Config,
        data: FederatedData,
        keys: Sequence[str],
        *,
        points: int,
        seeds: Sequence[int],
        test: Split | None = None,
        prefix: str = "test_",
        most: int | None = None,
    ) -> None:
        self.config, self.data, self.keys, self.prefix = config, data, tuple(keys), prefix
        self.base: Experiment = assemble(config, data)
        split, engine = data.train, config.engine
        devices = client_mesh(engine.devices)
        stream = streams(engine.data_in, split, devices)
        self.own_points = devices.devices.size > 1 and not stream and points >= devices.devices.size
        self.mesh = Mesh(devices.devices, (AXIS,)) if self.own_points else devices
        self._place = NamedSharding(self.mesh, PartitionSpec(AXIS) if self.own_points else PartitionSpec())
        cohort = split.num_clients if config.cohort == "all" else config.cohort
        inner = Mesh(devices.devices[:1], devices.axis_names) if self.own_points else devices
        alg, params = self.base.algorithm, self.base.params
        self.traffic = cost(alg, params, split)
        self.plan = choose_plan(alg, params, split, inner, engine.plan, engine.chunk, cohort)
        if self.plan.kind == "lanes" and isinstance(engine.chunk, str) and points > 1:
            self.plan = self.plan._replace(chunk=min(self.plan.chunk, _useful_lanes(self.plan, alg, split)))
        self.every = config.evaluation.every
        window = min(WINDOW, config.rounds, self.every)
        self.feed = Feed(alg, self.plan, self.mesh, split, seed=config.seed, window=window, stream=stream)
        self.seeds = tuple(seeds)
        for seed in self.seeds:
            self.feed.seed = seed
            self.feed.reserve(range(config.rounds))
        self.test = None
        self.clients = 0 if test is None else test.num_clients
        if test is not None:
            self.test = jax.device_put(in_batches(test), replicated(self.mesh))
        self._programs(inner, stream)
        self._fit(points if most is None else min(points, most))

    # -- programs

    def _experiment(self, values: Any) -> Experiment:
        """What the point of (traced) ``values`` names."""
        if not self.keys:
            return self.base
        point = {key: values[i] for i, key in enumerate(self.keys)}
        if nbytes(self.base.params) < WIDE:
            return assemble(with_values(self.config, point), self.data)
        prepare = self.data.preprocess or (lambda batch, key, train: dict(batch))

        def spread(batch: Mapping[str, Any], key: Any, train: bool) -> dict[str, Any]:
            return {name: _each_its_own(field, values) for name, field in prepare(batch, key, train).items()}

        return assemble(with_values(self.config, point), replace(self.data, preprocess=spread))

    def _programs(self, inner: Mesh, stream: bool) -> None:
        split = self.data.train

        def start(values: Any, params: Any) -> Any:
            alg = self._experiment(values).algorithm
            strong = lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype)  # noqa: E731
            wide = lambda leaf: jnp.broadcast_to(leaf, (split.num_clients, *leaf.shape))  # noqa: E731
            states = jax.tree.map(lambda leaf: wide(strong(leaf)), alg.init_client(params))
            return jax.tree.map(strong, alg.init(params)), states

        def rounds(values: Any, carry: Any, arrays: Any, slots: Any, first: Any, number: Any, key: Any) -> Any:
            experiment = self._experiment(values)
            engine = make_engine(
                experiment.algorithm,
                self.plan,
                inner,
                cap=int(split.sizes.max()),
                population=split.num_clients,
                arrival=experiment.arrival,
                local=stream,
                convolutions=self.config.engine.convolutions,
                precision=self.config.engine.precision,
                matrices=self.config.engine.matrices,
            )
            server, states, log = engine.rounds(*carry, arrays, slots, first, number, key)
            return (server, states), log

        def look(values: Any, carry: Any, test: Any) -> Any:
            experiment = self._experiment(values)
            params = experiment.algorithm.params(carry[0])
            row, clients = {}, {}
            if test is not None:
                scores = score(experiment.metrics, params, *test, clients=self.clients)
                row = summarize(scores, self.prefix, declared_by(experiment.metrics))
                clients = {self.prefix + name: client_values(sums) for name, sums in scores.items()}
            return row, clients, finite(params)

        self._start = self._mapped(start, (0, None))
        self._rounds = self._mapped(rounds, (0, 0, None, None, None, None, None), donate=(1,))
        self._look = self._mapped(look, (0, 0, None))

    def _mapped(self, function: Callable, axes: tuple[int | None, ...], donate: tuple[int, ...] = ()) -> Any:
        mapped = jax.vmap(function, in_axes=axes)
        if self.own_points:
            many, one = PartitionSpec(AXIS), PartitionSpec()
            specs = tuple(many if axis == 0 else one for axis in axes)
            mapped = jax.shard_map(mapped, mesh=self.mesh, in_specs=specs, out_specs=many, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    def _whole(self, points: int) -> int:
        """Points of one program: every device takes equally many."""
        devices = self.mesh.devices.size if self.own_points else 1
        return -(-points // devices) * devices

    def _compile(self, size: int) -> int:
        """Compile for ``size`` points; returns the bytes that the fullest device then needs."""
        values, params = self._values(np.zeros((size, len(self.keys)))), self._put(self.base.params)
        shapes = jax.eval_shape(self._start, values, params)
        carry = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self._place), shapes)
        portion = self.feed.portion(0, 1)
        arrays = jax.device_put(portion.arrays, sharded(self.mesh)) if self.feed.stream else portion.arrays
        number, key = np.int32(0), self._put(jax.random.key(0))
        self.rounds = self._rounds.lower(values, carry, arrays, portion.slots, number, number, key).compile()
        self.look = self._look.lower(values, carry, self.test).compile()
        self.size = size
        used = [program.memory_analysis() for program in (self.rounds, self.look)]
        sizes = [u.temp_size_in_bytes + u.output_size_in_bytes + u.argument_size_in_bytes for u in used if u]
        return max(sizes, default=0)

    def _fit(self, points: int) -> None:
        """Compile for as many of the points at a time as fit into memory."""
        device, devices = self.mesh.devices.flat[0], self.mesh.devices.size
        room = SHARE * free_memory(device) / (devices if device.platform == "cpu" else 1)  # host devices share
        least = self._whole(1)
        shapes = jax.eval_shape(self._start, self._values(np.zeros((least, len(self.keys)))), self.base.params)
        # what a round begins with and what it ends with: a lower bound that spares compiling what cannot fit
        size = max(least, min(points, int(room * least // max(2 * nbytes(shapes) // least, 1))))
        need = self._compile(self._whole(size))
        while need > room:
            if self.size == least:
                raise ConfigError(
                    f"one point of this sweep needs {need / 1e9:.3g} GB and there are {room / 1e9:.3g} GB to use; take "
                    "a smaller model, cohort or engine.chunk, or engine.data_in = 'host'"
                )
            need = self._compile(self._whole(max(1, min(self.size - least, int(self.size * room / need)))))
        even = self._whole(-(-points // -(-points // self.size)))  # chunks of about the same size: the last is padded
        if even < self.size:
            self._compile(even)

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, replicated(self.mesh))

    def _values(self, values: np.ndarray) -> Any:
        typed = np.asarray(values, jnp.result_type(float)).reshape(len(values), len(self.keys))
        return jax.device_put(typed, self._place)

    # -- runs

    def chunks(self, points: Sequence[Any]) -> list[Sequence[Any]]:
        """The points, as many at a time as one program takes."""
        return [points[i : i + self.size] for i in range(0, len(points), self.size)]

    def run(
        self,
        points: Sequence[Point],
        *,
        seed: int,
        rounds: int,
        start: Outcome | None = None,
        keep: bool = False,
        marks: Collection[int] = (),
        on_progress: Callable[[int], Any] | None = None,
    ) -> Outcome:
        """Run at most ``size`` points at one seed up to round ``rounds``, from the beginning or on from ``start``.

        It is evaluated as often as the configuration says, and after the rounds in ``marks``. ``keep`` keeps models and
        states, so that the outcome can be gone on from. ``on_progress`` is told the round.
        """
        real = len(points)
        if not 1 <= real <= self.size:
            raise ValueError(f"this program takes 1 to {self.size} points, got {real}")
        if seed not in self.seeds:
            raise ValueError(f"this program was made for the seeds {list(self.seeds)}, got {seed}")
        rows = np.minimum(np.arange(self.size), real - 1)  # the last point again where there are too few: dropped below
        numbers = np.array([[float(point[key]) for key in self.keys] for point in points])
        values = self._values(numbers.reshape(real, -1)[rows])
        key = self._put(jax.random.key(seed))
        self.feed.seed = seed
        if start is None:
            carry = self._start(values, self._put(self.base.model.init(address.init_key(seed))))
        else:
            carry = jax.device_put(jax.tree.map(lambda leaf: leaf[rows], start.carry), self._place)
        done = 0 if start is None else start.rounds
        logs: list[dict[str, Any]] = []
        looks: list[_Look] = []
        jax.block_until_ready(carry)
        began = time.perf_counter()
        looked_at = sorted({*range(self.every, rounds, self.every), *marks, rounds})
        for portion in self._portions(done, rounds, looked_at):
            first, number = np.int32(done), np.int32(portion.number)
            carry, log = self.rounds(values, carry, portion.arrays, portion.slots, first, number, key)
            logs.append({name: column[:, : portion.number] for name, column in log.items()})
            done += portion.number
            if self.mesh.devices.flat[0].platform == "cpu":  # else calls queue up, which is fine
                jax.block_until_ready(carry)
            if done in looked_at:
                seen = jax.block_until_ready(self.look(values, carry, self.test))
                looks.append(_Look(done, time.perf_counter() - began, *seen))
                if on_progress is not None:
                    on_progress(done)
        new = self._outcome(logs, looks).take(np.arange(real))
        new = new._replace(carry=jax.tree.map(lambda leaf: np.asarray(leaf)[:real], carry) if keep else None)
        return new if start is None else _joined(start, new)

    def _portions(self, done: int, rounds: int, stops: Sequence[int]) -> Iterator[Portion]:
        if self.feed.stream:
            yield from self.feed.portions(done, rounds)
            return
        number = 1
        while done < rounds:
            number = min(number, self.feed.window, next(stop for stop in stops if stop > done) - done)
            began = time.perf_counter()
            yield self.feed.portion(done, number)
            done += number
            number = max(1, int(CALL * number / (time.perf_counter() - began)))

    def _outcome(self, logs: list[dict[str, Any]], looks: list[_Look]) -> Outcome:
        history = {name: np.concatenate([np.asarray(log[name]) for log in logs], 1) for name in logs[0]}
        stuck = np.zeros(self.size, bool)
        for exchange in self.traffic.exchanges:
            arrived, refused = history[f"{exchange.name}/arrived"], history[f"{exchange.name}/refused"]
            history[f"{exchange.name}/bytes_down"] = np.full(arrived.shape, self.plan.cohort * float(exchange.down))
            history[f"{exchange.name}/bytes_up"] = arrived * float(exchange.up)
            stuck |= ((refused > 0) & (arrived == 0)).any(1)
        evaluations = {name: np.stack([np.asarray(look.row[name]) for look in looks], 1) for name in looks[0].row}
        # statistics over clients are nan where no client has examples, which is no fault of the model
        pooled = [column for name, column in evaluations.items() if not is_client_column(name)]
        return Outcome(
            looks[-1].round,
            history,
            evaluations | {"round": np.array([look.round for look in looks])},
            {name: np.asarray(column) for name, column in looks[-1].clients.items()},
            stuck | ~np.asarray(looks[-1].finite) | ~np.all([np.isfinite(c).all(1) for c in pooled], 0),
            np.array([look.seconds for look in looks]),
        )


def _useful_lanes(plan: Plan, alg: Algorithm, split: Split) -> int:
    """Lanes beyond which a round gets no shorter, because its longest client takes as long as all others on theirs.

    In a single run spare lanes cost little, since they fill an idle card. Points fill it too, and then every spare lane
    is paid for: nine rates of an LSTM on an H200 took 203 ms a round on 20 lanes, 85 on 6 and 78 on 4.
    """
    share = -(-plan.cohort // plan.devices)
    lanes = 1.0
    for exchange in alg.exchanges:
        steps = np.sum(steps_of(exchange.client, split.sizes), axis=0)
        drawn = [steps[address.cohort(0, r, 0, len(steps), plan.cohort)] for r in range(16)]
        lanes = max(lanes, float(np.mean([one.sum() / one.max() for one in drawn])) / plan.devices)
    return min(share, int(np.ceil(lanes)))


class _Look(NamedTuple):
    """What the host sees at an evaluation."""

    round: int
    seconds: float
    row: dict[str, Any]
    clients: dict[str, Any]
    finite: Any


def _joined(before: Outcome, after: Outcome) -> Outcome:
    """A run and what it went on to."""

    def along(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([a[name], b[name]], -1) for name in b}

    return after._replace(
        history=along(before.history, after.history),
        evaluations=along(before.evaluations, after.evaluations),
        diverged=before.diverged | after.diverged,
        seconds=np.concatenate([before.seconds, before.seconds[-1] + after.seconds]),
    )
