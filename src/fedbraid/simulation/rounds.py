"""Rounds by compiled programs: the driver of a simulated run of one or several points."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, is_traced
from fedbraid.notices import notice
from fedbraid.simulation import checkpoint, hosts
from fedbraid.simulation.asynchrony import Versions
from fedbraid.simulation.devices import place, replicated
from fedbraid.simulation.feed import Feed, Portion
from fedbraid.simulation.history import History, on_host
from fedbraid.simulation.personal import read_states
from fedbraid.simulation.plan import Plan
from fedbraid.simulation.program import Program
from fedbraid.simulation.states import HostStates

__all__ = ["CALL", "LOOK", "WINDOW", "CompiledRounds", "Start", "exhausted", "strong"]

PyTree = Any
WINDOW = 64  # largest number of rounds in one compiled call
LOOK = 0.25  # seconds between two progress reports
# Approximate seconds of one compiled call. With several CPU devices XLA keeps about 200 bytes for every executed
# operation until the call returns: tens of megabytes per second.
CALL = 2.0
EXHAUSTED = "RESOURCE_EXHAUSTED"  # part of every error message of a device that is out of memory


def exhausted(error: BaseException) -> bool:
    """Whether the error says that a device is out of memory."""
    return EXHAUSTED in str(error)


def strong(tree: PyTree) -> PyTree:
    """The arrays without weak types (those of Python numbers). NumPy arrays are copied, because they can change."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.weak_type:
            return leaf
        return jnp.array(leaf, jnp.asarray(leaf).dtype)

    return jax.tree.map(one, tree)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _for_all(first: PyTree, population: int, axis: int) -> PyTree:
    """The first state of a client, repeated for the whole population along ``axis``."""

    def wide(leaf: Any) -> Any:
        shape = (*leaf.shape[:axis], population, *leaf.shape[axis:])
        return jnp.broadcast_to(jnp.expand_dims(leaf, axis), shape)

    return jax.tree.map(wide, first)


@functools.cache
def say_noise_is_seeded() -> None:
    """Say once in a process that simulated noise protects nothing."""
    notice(
        "the simulator draws the noise and the cohorts of differential privacy from the seed, so that a run can be "
        "repeated: they show what privacy costs, and protect nothing. Do not publish a simulated model as private; a "
        "deployment (fedbraid deploy) draws them from the operating system"
    )


@functools.cache
def say_fewer_clients(number: int) -> None:
    """Say once in a process that an algorithm is defined for fewer clients per round."""
    notice(
        f"this method is defined for at most {number} client(s) per round. With more it averages their updates, which "
        f"its paper excludes: set cohort = {number}, or use fedavg"
    )


def check_cohort_size(alg: Algorithm, cohort: int) -> None:
    """Say it if a cohort has more clients than the algorithm is defined for."""
    for exchange in alg.exchanges:
        if exchange.at_most is not None and cohort > exchange.at_most:
            say_fewer_clients(exchange.at_most)


class Start(NamedTuple):
    """The initial states of a run.

    server, client: the first states of the server and of every client. If several points run together, they are the
        first axis of both.
    on_host, folder: whether the host keeps the client states, and in which folder (None: in memory).
    past: of an asynchronous run: places for the models that clients work on.
    """

    server: PyTree
    client: PyTree
    on_host: bool = False
    folder: Path | None = None
    past: PyTree = None


class CompiledRounds:
    """The host's part of a run: it runs portions of rounds and records their history.

    programs: makes the program of a plan; called again with a smaller chunk when a device runs out of memory.
    points: number of points that run together; None for a single run, whose arrays have no axis of points.
    sharding: of the server and the client states, or a function from the shape of an array and its number of axes that
        are not part of the model to that.

    Attributes to set: scorer is (server) -> scores; personal is (server, function from numbers of clients to their
    states) -> scores of the clients' own models; checkpoints is the folder of checkpoints; run is what determines
    the results, for checkpoints; seconds is the time that one compiled call should take; evaluated is called after
    every evaluation.
    """

    programs: Callable[[Plan], Program]
    feed: Feed
    history: History
    points: int | None
    program: Program
    done: int
    server: PyTree
    host_states: HostStates | None

    def __init__(
        self,
        programs: Callable[[Plan], Program],
        feed: Feed,
        history: History,
        start: Start,
        *,
        points: int | None = None,
        sharding: Any = None,
    ) -> None:
        self.programs, self.feed, self.history, self.points = programs, feed, history, points
        self.scorer: Callable[[PyTree], dict[str, Any]] | None = None
        self.personal: Callable[[PyTree, Callable], dict[str, Any]] | None = None
        self.checkpoints: Path | None = None
        self.run: dict[str, Any] = {}
        self.seconds = CALL
        self.evaluated: Callable[[], None] | None = None
        self.program = programs(feed.plan)
        self.sharding: Any = replicated(feed.mesh) if sharding is None else sharding
        self.done = 0
        self._pace: float | None = None  # seconds per round in the last call; None before the second call
        self._calls = 0
        self._stream: Iterator[Portion] | None = None
        self._end = 0  # the last round of the stream
        key = jax.random.key(feed.seed)
        self.seed_key: jax.Array = place(key, replicated(feed.mesh)) if hosts.several() else key
        if any(exchange.sealed is not None for exchange in feed.alg.exchanges):
            say_noise_is_seeded()
        check_cohort_size(feed.alg, min(feed.plan.cohort, feed.split.num_clients))
        self._begin(start)

    def _begin(self, start: Start) -> None:
        population, axis = self.feed.split.num_clients, 0 if self.points is None else 1
        self.server = self._placed(strong(start.server))
        self.past = None if start.past is None else self._placed(start.past)
        self.first: PyTree = strong(start.client)
        self.host_states = HostStates(self.first, population, start.folder) if start.on_host else None
        self.states: PyTree = ()
        if not start.on_host:
            self.states = self._placed(_for_all(self.first, population, axis), 1)

    def _placed(self, tree: PyTree, leading: int = 0) -> PyTree:
        """Put a tree on the devices of the run; traced values are returned unchanged."""
        if _traced(tree):
            return tree
        where: Any = self.sharding
        if callable(where):
            return jax.device_put(tree, jax.tree.map(lambda leaf: where(jnp.shape(leaf), leading), tree))
        return place(tree, self.sharding)

    # -- rounds

    def advance(self, until: int) -> None:
        """Complete some rounds, at most up to ``until``, in about ``seconds`` seconds."""
        portion = self._portion(until)
        began = time.perf_counter()
        try:
            self._run(portion)
            said = None
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # jax raises one or the other, by kind of dispatch
            if not exhausted(error):
                raise hosts.lost(error) if hosts.several() else error from error
            said = str(error)
        # outside the handler, because there the error still keeps the arrays of the failed call alive
        if said is not None:
            self._shrink(said)
            self.advance(until)
            return
        self._calls += 1
        if self._calls > 1:  # the first call compiles
            self._pace = (time.perf_counter() - began) / portion.number

    def _portion(self, until: int) -> Portion:
        if self.feed.stream:
            if self._stream is None:
                self._stream = self.feed.portions(self.done, self._end)
            return next(self._stream)
        number = 1 if self._pace is None else max(1, int(self.seconds / self._pace))
        # all hosts use the first host's number: by their own clocks they would run different numbers of rounds
        number = int(hosts.agreed(np.int32(min(number, self.feed.window))))
        return self.feed.portion(self.done, min(number, until - self.done))

    def time_rounds(self, number: int) -> None:
        """Compute the first ``number`` rounds and discard the results. Device errors are raised, not handled."""
        server, past, states, history, self.done = self.server, self.past, self.states, self.history, 0
        self.history = History(history.traffic, history.cohort)
        self._end = number
        try:
            while self.done < number:
                portion = self.feed.portion(self.done, number) if not self.feed.stream else self._portion(number)
                self._run(portion)
        finally:
            self.close()
            self.server, self.past, self.states, self.history, self.done = server, past, states, history, 0

    def reserve(self, rounds: int) -> None:
        """Set the total number of rounds, so that blocks of streamed data are large enough for all of them."""
        self._end = rounds
        self.feed.reserve(range(self.done, rounds))

    def close(self) -> None:
        """End the thread that prefetches streamed data."""
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
            self._stream = None

    def _run(self, portion: Portion) -> None:
        """Run a portion. If a call fails, the run stays as it was after the last recorded round."""
        if self.host_states is not None:
            for i in range(portion.number):
                row = self._round_on_host(portion, i)
                log = {name: on_host(value)[..., None] for name, value in row.items()}
                self._record(portion.loads[i : i + 1], log, portion.times and portion.times[i : i + 1])
            return
        # buffers are not donated: after an out-of-memory error the server and the states are still needed
        server, states, log = self.program.rounds(
            self._carried(), self.states, portion.arrays, portion.slots, portion.first, portion.number, self.seed_key
        )
        log = {name: on_host(column)[..., : portion.number] for name, column in log.items()}
        _wait((server, states))
        self.states = states
        self._carry_on(server)
        self._record(portion.loads, log, portion.times)

    def _carried(self) -> PyTree:
        """What a program gets as the server: of an asynchronous run, also the models that clients work on."""
        return self.server if self.past is None else Versions(self.server, self.past)

    def _carry_on(self, carried: PyTree) -> None:
        """Take over what a program returned as the server."""
        self.server, self.past = (carried, None) if self.past is None else carried

    def _record(self, loads: list, log: dict[str, Any], times: list | None = None) -> None:
        self.history.add_rounds(loads, log, times)
        self.done += len(loads)

    def _round_on_host(self, portion: Portion, i: int) -> dict[str, Any]:
        """Round ``i`` of a portion with the states on the host. If one exchange fails, the whole round is undone."""
        assert self.host_states is not None
        row: dict[str, Any] = {}
        server, undo = self._carried(), []
        try:
            for index, slots in enumerate(portion.slots):
                here = jax.tree.map(lambda leaf: leaf[i], slots)
                before = hosts.agreed(self.host_states.read(here.ids))
                server, states, new = self.program.exchange(
                    index, server, before, portion.arrays[index], here, portion.first + i, self.seed_key
                )
                _wait((server, states, new))
                undo.append((here.ids, before))
                self._keep(here.ids, states)
                row |= new
        except BaseException:
            for ids, before in reversed(undo):
                self._keep(ids, before)
            raise
        self._carry_on(server)
        return row

    def _keep(self, ids: np.ndarray, states: PyTree) -> None:
        """Write client states to the host. With several hosts, the first one keeps all states."""
        if self.host_states is not None and hosts.is_first():
            self.host_states.write(ids, hosts.local(states))

    def _shrink(self, said: str) -> None:
        """After an out-of-memory error of a device: halve the number of clients at a time."""
        plan = self.feed.plan
        if plan.chunk == 1:
            raise MemoryError(
                f"out of device memory in round {self.done + 1} with one client at a time: use a smaller model or "
                "batch size, microbatch, model_devices, data_in = 'host', states_in = 'host' or more devices; the "
                "device said: " + next(line for line in said.splitlines() if EXHAUSTED in line).strip()
            )
        if hosts.several():  # the other hosts wait in the middle of this round and cannot change their plan
            raise MemoryError(
                f"out of device memory with {plan.chunk} clients at a time in round {self.done + 1}: with several "
                f"hosts a run cannot change its chunk; resume with --set engine.chunk={max(1, plan.chunk // 2)}"
            )
        smaller = plan._replace(chunk=plan.chunk // 2)
        what = "lanes" if plan.kind == "lanes" else "clients at a time"
        notice(
            f"out of device memory with {plan.chunk} {what}: round {self.done + 1} is run again with {smaller.chunk}"
        )
        self.close()
        self.feed = self.feed.with_plan(smaller)
        self.reserve(self._end)
        self.program = self.programs(smaller)

    # -- evaluation and checkpoints

    def evaluate(self) -> None:
        """Evaluate the server's model, and the clients' own ones if there are any, and keep the scores."""
        if self.scorer is not None:
            server = hosts.local(self.server)
            own = {} if self.personal is None else self.personal(server, self.read_states)
            self.history.add_evaluation(self.done, self.scorer(server) | own)
            if self.evaluated is not None:
                self.evaluated()

    def read_states(self, ids: np.ndarray) -> PyTree:
        """The states of clients ``ids``, stacked; on the devices the axis of points comes before that of clients."""
        if self.host_states is not None:
            return hosts.agreed(self.host_states.read(ids))
        return read_states(hosts.local(self.states), 0 if self.points is None else 1)(ids)

    def save(self) -> None:
        """Write a checkpoint. With several hosts, only the first one writes."""
        if self.checkpoints is None or not hosts.is_first():
            return
        states = self.host_states.export() if self.host_states else checkpoint.pack(hosts.local(self.states))
        tree = {
            "server": checkpoint.pack(hosts.local(self.server)),
            "states": states,
            "plan": np.frombuffer(json.dumps(self.feed.plan.record()).encode(), np.uint8),
            **self.history.export(),
        }
        if self.past is not None:
            tree["past"] = checkpoint.pack(hosts.local(self.past))
        checkpoint.save(self.checkpoints, self.done, tree, run=self.run)

    def restore(self, done: int, tree: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.done = done
        self.server = self._placed(checkpoint.unpack(self.server, tree["server"] or {}, "server state"))
        if self.past is not None:
            self.past = self._placed(_widened(self.past, tree["past"] or {}, 0 if self.points is None else 1))
        saved = tree["states"] or {}
        if self.host_states:
            if hosts.is_first():  # the other hosts get the states from it
                self.host_states.restore(saved)
        else:
            self.states = self._placed(self._device_states(saved), 1)
        self.history.restore(tree)

    def _device_states(self, saved: dict[str, Any]) -> PyTree:
        """Saved states in the form for devices, also if the run that saved them kept them on its host."""
        if "ids" not in saved:
            return checkpoint.unpack(self.states, saved, "client states")
        dense = HostStates(self.first, self.feed.split.num_clients).dense(saved)
        return dense if self.points is None else jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 1), dense)


def _widened(past: PyTree, saved: dict[str, Any], axis: int) -> PyTree:
    """Saved past models in the places of this run, which has more of them if it has more rounds."""
    leaves = jax.tree.leaves(past)

    def fit(raw: np.ndarray, leaf: Any) -> np.ndarray:
        missing = [(0, max(0, leaf.shape[axis] - raw.shape[axis]) if i == axis else 0) for i in range(raw.ndim)]
        return np.pad(raw, missing)[(slice(None),) * axis + (slice(leaf.shape[axis]),)]

    fitted = {name: fit(np.asarray(saved[name]), leaf) for name, leaf in zip(sorted(saved), leaves, strict=False)}
    return checkpoint.unpack(past, fitted, "past models")


def _traced(tree: PyTree) -> bool:
    return any(is_traced(leaf) for leaf in jax.tree.leaves(tree))


def _wait(tree: PyTree) -> None:
    """Wait until the tree is computed, because a dispatched call may fail later. Traced values are skipped."""
    if not _traced(tree):
        jax.block_until_ready(tree)
