"""Rounds by compiled programs: the driver of a simulated run, with or without an axis of points."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import is_traced
from fedbraid.notices import notice
from fedbraid.simulation import checkpoint, hosts
from fedbraid.simulation.devices import place, replicated
from fedbraid.simulation.feed import Feed, Portion
from fedbraid.simulation.history import History, on_host
from fedbraid.simulation.plan import Plan
from fedbraid.simulation.program import Program
from fedbraid.simulation.states import HostStates

__all__ = ["CALL", "LOOK", "WINDOW", "CompiledRounds", "Start", "exhausted", "strong"]

PyTree = Any
WINDOW = 64  # rounds in one compiled call at most
LOOK = 0.25  # seconds between two progress reports
# Seconds of one compiled call, about. On several host devices XLA keeps some 200 bytes for every operation that was
# executed until the call returns: tens of megabytes a second.
CALL = 2.0
EXHAUSTED = "RESOURCE_EXHAUSTED"  # in every message of a device that is out of memory


def exhausted(error: BaseException) -> bool:
    """Whether a device said that it is out of memory."""
    return EXHAUSTED in str(error)


def strong(tree: PyTree) -> PyTree:
    """Arrays of their own, without the weak types of Python's numbers."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype), tree)


class Start(NamedTuple):
    """What a run starts from.

    server: the server's first state; client: the state of every client before it is first asked. With an axis of
    points both have the points in front.
    on_host, folder: whether the host keeps the client states, and in which folder (None: in memory).
    """

    server: PyTree
    client: PyTree
    on_host: bool = False
    folder: Path | None = None


class CompiledRounds:
    """The host's side of a run: portions of rounds in, history out.

    programs: makes the program of a plan; called again with a smaller chunk when a device runs out of memory.
    points: how many points run together; None if there is no axis of points. sharding: of the server and the states.
    scorer, checkpoints, seconds: attributes to set: (server) -> scores; the folder of checkpoints; how long one
        compiled call should take.
    """

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
        self.checkpoints: Path | None = None
        self.seconds = CALL
        self.program = programs(feed.plan)
        self.sharding = replicated(feed.mesh) if sharding is None else sharding
        self.done = 0
        self._pace: float | None = None  # seconds of a round, by the last call; None until two calls were timed
        self._calls = 0
        self._stream: Iterator[Portion] | None = None
        self._end = 0  # the last round of the stream
        key = jax.random.key(feed.seed)
        self.seed_key = place(key, replicated(feed.mesh)) if hosts.several() else key
        self._begin(start)

    def _begin(self, start: Start) -> None:
        population, axis = self.feed.split.num_clients, 0 if self.points is None else 1
        self.server = self._placed(strong(start.server))
        self.first = strong(start.client)
        self.host_states = HostStates(self.first, population, start.folder) if start.on_host else None
        self.states: PyTree = ()
        if not start.on_host:

            def wide(leaf: Any) -> Any:
                shape = (*leaf.shape[:axis], population, *leaf.shape[axis:])
                return jnp.broadcast_to(jnp.expand_dims(leaf, axis), shape) + jnp.zeros((), leaf.dtype)

            self.states = self._placed(jax.tree.map(wide, self.first))

    def _placed(self, tree: PyTree) -> PyTree:
        """On the devices of the run; traced values stay where they are."""
        return tree if _traced(tree) else place(tree, self.sharding)

    # -- rounds

    def advance(self, until: int) -> None:
        """Complete some rounds, at most up to ``until``: as many as take about ``seconds``."""
        portion = self._portion(until)
        began = time.perf_counter()
        try:
            self._run(portion)
            said = None
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of them depends on how jax dispatched
            if not exhausted(error):
                raise hosts.lost(error) if hosts.several() else error from error
            said = str(error)
        # outside of the handler: there the error would still hold the arrays of the failed call
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
        # by the first host's clock, or hosts would run different numbers of rounds
        number = int(hosts.agreed(np.int32(min(number, self.feed.window))))
        return self.feed.portion(self.done, min(number, until - self.done))

    def time_rounds(self, number: int) -> None:
        """Compute the first ``number`` rounds and discard them; an error of the device is raised as it is."""
        server, states, history, self.done = self.server, self.states, self.history, 0
        self.history = History(history.traffic, history.cohort)
        self._end = number
        try:
            while self.done < number:
                portion = self.feed.portion(self.done, number) if not self.feed.stream else self._portion(number)
                self._run(portion)
        finally:
            self.close()
            self.server, self.states, self.history, self.done = server, states, history, 0

    def reserve(self, rounds: int) -> None:
        """Say how many rounds there will be: streamed data is laid out for all of them before the first."""
        self._end = rounds
        self.feed.reserve(range(self.done, rounds))

    def close(self) -> None:
        """End the thread that prefetches streamed data."""
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
            self._stream = None

    def _run(self, portion: Portion) -> None:
        """Run a portion. A call that fails leaves the run as it was after the last recorded round."""
        if self.host_states is not None:
            for i in range(portion.number):
                row = self._round_on_host(portion, i)
                log = {name: on_host(value)[..., None] for name, value in row.items()}
                self._record(portion.loads[i : i + 1], log)
            return
        # not donated: a call that runs out of memory must leave the server and the states as they were
        server, states, log = self.program.rounds(
            self.server, self.states, portion.arrays, portion.slots, portion.first, portion.number, self.seed_key
        )
        log = {name: on_host(column)[..., : portion.number] for name, column in log.items()}
        _wait((server, states))
        self.server, self.states = server, states
        self._record(portion.loads, log)

    def _record(self, loads: list, log: dict[str, Any]) -> None:
        self.history.add_rounds(loads, log)
        self.done += len(loads)

    def _round_on_host(self, portion: Portion, i: int) -> dict[str, Any]:
        """Round ``i`` of a portion with the states on the host. If one exchange fails, the whole round is undone."""
        assert self.host_states is not None
        row: dict[str, Any] = {}
        server, undo = self.server, []
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
        self.server = server
        return row

    def _keep(self, ids: np.ndarray, states: PyTree) -> None:
        """Write client states to the host; of several hosts, the first one has them all."""
        if self.host_states is not None and hosts.is_first():
            self.host_states.write(ids, hosts.local(states))

    def _shrink(self, said: str) -> None:
        """After a call that ran out of device memory: half as many clients at a time."""
        plan = self.feed.plan
        if plan.chunk == 1:
            raise MemoryError(
                f"out of device memory in round {self.done + 1} with one client at a time: a smaller model or batch "
                "size, data_in = 'host' or states_in = 'host' needs less, more devices have more; the device said: "
                + next(line for line in said.splitlines() if EXHAUSTED in line).strip()
            )
        if hosts.several():  # the others wait in the middle of this round: they cannot change their plan with us
            raise MemoryError(
                f"out of device memory with {plan.chunk} clients at a time in round {self.done + 1}: with several "
                f"hosts all must take fewer from the start; resume with --set engine.chunk={max(1, plan.chunk // 2)}"
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
        """Evaluate the server's model and keep the scores."""
        if self.scorer is not None:
            self.history.add_evaluation(self.done, self.scorer(hosts.local(self.server)))

    def save(self) -> None:
        """Write a checkpoint; of several hosts, the first one does."""
        if self.checkpoints is None or not hosts.is_first():
            return
        states = self.host_states.export() if self.host_states else checkpoint.pack(hosts.local(self.states))
        tree = {
            "server": checkpoint.pack(hosts.local(self.server)),
            "states": states,
            "plan": np.frombuffer(json.dumps(self.feed.plan.record()).encode(), np.uint8),
            **self.history.export(),
        }
        checkpoint.save(self.checkpoints, self.done, tree)

    def restore(self, done: int, tree: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.done = done
        self.server = self._placed(checkpoint.unpack(self.server, tree["server"] or {}, "server state"))
        saved = tree["states"] or {}
        if self.host_states:
            if hosts.is_first():  # the others ask it for states
                self.host_states.restore(saved)
        else:
            self.states = self._placed(self._device_states(saved))
        self.history.restore(tree)

    def _device_states(self, saved: dict[str, Any]) -> PyTree:
        """Saved states as a device keeps them; the run that saved them may have kept them on its host."""
        if "ids" not in saved:
            return checkpoint.unpack(self.states, saved, "client states")
        dense = HostStates(self.first, self.feed.split.num_clients).dense(saved)
        return dense if self.points is None else jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 1), dense)


def _traced(tree: PyTree) -> bool:
    return any(is_traced(leaf) for leaf in jax.tree.leaves(tree))


def _wait(tree: PyTree) -> None:
    """Until it is computed or has failed: a dispatched call may fail later. Traced values cannot be waited for."""
    if not _traced(tree):
        jax.block_until_ready(tree)
