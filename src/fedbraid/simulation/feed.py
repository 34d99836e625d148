"""Input of the engine: the layout of the cohorts, and their examples when the data does not fit on a device.

With resident data (all examples on the devices) only the slots are sent. With streamed data a thread copies the next
cohort's examples into one flat block per device while the current cohort trains.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedbraid.core import Algorithm
from fedbraid.data.federated import Split
from fedbraid.data.store import gather
from fedbraid.simulation.asynchrony import Jobs
from fedbraid.simulation.devices import AXIS, place, replicated, sharded
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.plan import Load, Plan, Slots, cohorts_of, lay_out, steps_of
from fedbraid.simulation.program import Task
from fedbraid.simulation.timeline import Arrivals, RoundTime, Timeline

__all__ = ["Feed", "Portion"]


class Portion(NamedTuple):
    """The input of some rounds: for each exchange the slots ``[rounds, ...]`` and the arrays that they index."""

    first: int
    number: int
    slots: tuple[Slots, ...]
    arrays: tuple[dict[str, Any], ...]
    loads: list[list[Load]]  # [round][exchange]
    times: list[RoundTime] | None = None  # of a run with simulated time


class Feed:
    """Lays out the cohorts of a run, round by round, for one algorithm, plan and data set."""

    task: Task
    plan: Plan
    mesh: Mesh
    options: EngineOptions
    alg: Algorithm
    split: Split
    seed: int
    stream: bool
    window: int

    def __init__(
        self,
        task: Task,
        plan: Plan,
        mesh: Mesh,
        options: EngineOptions,
        *,
        seed: int,
        window: int,
        stream: bool,
        timeline: Callable[[int], Timeline] | None = None,
    ) -> None:
        """timeline: makes the timeline of a seed, in a run with simulated time."""
        self.task, self.plan, self.mesh, self.options = task, plan, mesh, options
        self.alg, self.split = task.algorithm, task.data.train
        self.seed, self.stream = seed, stream
        self.window = 1 if stream else window  # largest number of rounds in a portion: the static length of the slots
        self.timeline = timeline
        self._timelines: dict[int, Timeline] = {}
        self._resident: dict[str, Any] | None = None
        self._rows = 0

    def with_plan(self, plan: Plan) -> Feed:
        """The same rounds under another plan. Data on the devices is reused."""
        sizes = {"seed": self.seed, "window": self.window, "stream": self.stream}
        other = Feed(self.task, plan, self.mesh, self.options, **sizes, timeline=self.timeline)
        other._resident = self._resident
        return other

    def time(self, round_: int) -> RoundTime | None:
        """What the timeline says about a round; None in a run without simulated time."""
        if self.timeline is None:
            return None
        if self.seed not in self._timelines:
            self._timelines = {self.seed: self.timeline(self.seed)}
        return self._timelines[self.seed].at(round_)

    def layout(self, round_: int) -> list[tuple[Slots, Load]]:
        """The slots of every exchange of a round, with offsets into the arrays of the whole split."""
        population, laid_out = self.split.num_clients, []
        time = self.time(round_)
        if time is None:
            cohorts = cohorts_of(self.alg, self.seed, round_, population, self.plan.cohort)
        else:
            cohorts = list(time.ids)
        for exchange, ids in zip(self.alg.exchanges, cohorts, strict=True):
            starts = np.asarray(self.split.offsets[ids])
            sizes = np.asarray(self.split.offsets[ids + 1]) - starts
            slots, load = lay_out(self.plan, ids, starts, sizes, steps_of(exchange.client, sizes), population)
            if time is not None and time.arrivals is not None:
                slots = slots._replace(jobs=self._jobs(slots, time.arrivals, round_))
            laid_out.append((slots, load))
        return laid_out

    def _jobs(self, slots: Slots, arrivals: Arrivals, round_: int) -> Jobs:
        """Which model the client of each slot was sent; empty slots have the newest."""
        assert self.task.timing is not None
        version, place = np.full(len(slots.ids), round_, np.int32), np.full(len(slots.ids), arrivals.store, np.int32)
        order = np.argsort(arrivals.clients)
        used = slots.ids < self.split.num_clients
        at = order[np.searchsorted(arrivals.clients[order], slots.ids[used])]
        version[used], place[used] = arrivals.versions[at], arrivals.places[at]
        weight = self.task.timing.asynchrony.weights(round_ - version)
        return Jobs(version, place, weight, np.full(self.plan.devices, arrivals.store, np.int32))

    def resident_arrays(self) -> dict[str, Any]:
        """All examples on the devices; they are copied there at the first call."""
        if self._resident is None:
            put = replicated(self.mesh)
            self._resident = {name: place(np.asarray(a), put) for name, a in self.split.arrays.items()}
        return self._resident

    def reserve(self, rounds: range) -> None:
        """Choose the size of streamed blocks: the largest that these rounds need, so that the program compiles once."""
        if self.stream:
            rows = [self._block_rows(slots) for r in rounds for slots, _ in self.layout(r)]
            self._rows = max([self._rows, 1, *rows])  # largest of all calls: several seeds may share a program

    def _block_rows(self, slots: Slots) -> int:
        sizes = np.where(slots.ids < self.split.num_clients, slots.size, 0)
        return int(sizes.reshape(self.plan.devices, -1).sum(1).max())

    def portion(self, first: int, number: int) -> Portion:
        """Rounds ``first`` to ``first + number``, at most ``window`` of them."""
        layouts = [self.layout(first + i) for i in range(number)]
        loads = [[load for _, load in layout] for layout in layouts]
        told = [self.time(first + i) for i in range(number)]
        times = None if self.timeline is None else [time for time in told if time is not None]
        indices = range(len(self.alg.exchanges))
        if self.stream:
            blocks = [self._block(slots) for slots, _ in layouts[0]]
            slots = tuple(jax.tree.map(lambda leaf: leaf[None], block) for block, _ in blocks)
            return Portion(first, 1, slots, tuple(arrays for _, arrays in blocks), loads, times)
        padded = layouts + [layouts[-1]] * (self.window - number)
        slots = tuple(
            jax.tree.map(lambda *leaves: np.stack(leaves), *(layout[i][0] for layout in padded)) for i in indices
        )
        return Portion(first, number, slots, tuple(self.resident_arrays() for _ in indices), loads, times)

    def _block(self, slots: Slots) -> tuple[Slots, dict[str, Any]]:
        """The examples of a cohort as one block of rows per device, and slots with offsets into the blocks.

        Each host reads only the blocks of its own devices.
        """
        devices, rows = self.plan.devices, self._rows
        ids = slots.ids.reshape(devices, -1)
        offset, sizes = np.zeros_like(ids), slots.size.reshape(devices, -1)
        mine = self._mine()
        fields = self.split.arrays.items()
        arrays = {name: np.zeros((len(mine) * rows, *a.shape[1:]), a.dtype) for name, a in fields}
        for d in range(devices):
            live = slots.live[d]
            offset[d, :live] = np.cumsum(sizes[d, :live]) - sizes[d, :live]
        for block, d in enumerate(mine):
            for name, array in gather(self.split, ids[d][: slots.live[d]]).arrays.items():
                arrays[name][block * rows : block * rows + len(array)] = array
        return slots._replace(offset=offset.ravel()), arrays

    def _mine(self) -> list[int]:
        """The indices of this process's devices in the mesh, along the axis of clients."""
        own, rows = jax.process_index(), self.mesh.devices.reshape(self.mesh.shape[AXIS], -1)
        return [i for i, group in enumerate(rows) if group[0].process_index == own]

    def _put(self, arrays: tuple[dict[str, Any], ...]) -> Any:
        """Copy this host's blocks to its devices."""
        if not self.mesh.is_multi_process:
            return jax.device_put(arrays, sharded(self.mesh))
        rows, where = self._rows * self.plan.devices, sharded(self.mesh)
        return jax.tree.map(lambda a: jax.make_array_from_process_local_data(where, a, (rows, *a.shape[1:])), arrays)

    def portions(self, first: int, stop: int) -> Iterator[Portion]:
        """Streamed portions in order. A thread reads the next ones while the current one is used."""
        ready: queue.Queue[Portion | BaseException | None] = queue.Queue(maxsize=self.options.ahead)
        done = threading.Event()

        def offer(item: Portion | BaseException | None) -> None:
            while not done.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return
                except queue.Full:
                    continue

        def gather() -> None:
            try:
                for round_ in range(first, stop):
                    if done.is_set():
                        return
                    offer(self.portion(round_, 1))
                offer(None)
            except BaseException as error:  # passed to the consumer, which raises it
                offer(error)

        thread = threading.Thread(target=gather, name="fedbraid-prefetch", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                # copied here and not in the thread, because jax's settings (such as float64) are per thread
                yield item._replace(arrays=self._put(item.arrays))
        finally:
            done.set()
            thread.join()
