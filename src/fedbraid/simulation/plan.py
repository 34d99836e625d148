"""Plans: which device trains which client of a cohort, and when. The host makes the layout before a round runs.

All three plans use one layout of *slots* (device-major), one slot per client:

- ``sequential``: every device runs its clients one after the other with a dynamic number of steps. Nothing is masked.
  Clients are assigned longest first, each to the device with the least work so far. This is the plan for CPUs: one
  client per core.
- ``chunks``: every device runs vmapped chunks of clients. Clients are sorted by their number of steps, so that those of
  a chunk end at about the same time. Steps after a client's end are masked until its chunk ends. Opaque clients (not
  made of local steps) run in chunks in the plan of lanes, too.
- ``lanes``: every device runs several lanes in parallel. Each lane has a queue of clients, and every tick is one local
  step on all lanes. When a client ends, its result is stored and the next client starts in its lane. Step counts are
  known before the round, so the whole timetable is made here. The compiled loop goes from one end to the next and needs
  no masks. This is the plan for GPUs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby, zip_longest
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedbraid import address
from fedbraid.core import Algorithm
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import ClientData, LocalWork
from fedbraid.lowering import Lanes, captured, lower
from fedbraid.lowering.captured import COMPILER
from fedbraid.lowering.compiler import graph_options
from fedbraid.simulation import hosts
from fedbraid.simulation.devices import AXIS, client_mesh, total_memory
from fedbraid.simulation.model_axis import divided_shapes, has_model_axis, model_sharding, over_model
from fedbraid.simulation.options import EngineOptions

__all__ = [
    "Plan",
    "Slots",
    "choose_plan",
    "client_bytes",
    "cohorts_of",
    "frozen_bytes",
    "lay_out",
    "most_clients",
    "steps_of",
    "steps_per_client",
]

LANES = 32  # enough to fill a large GPU; more lanes only mask more steps
TOGETHER = 5  # largest number of clients in one event of the timetable, unless all clients end together


class Plan(NamedTuple):
    """How cohorts are laid out. It is fixed for a run, so that the program compiles once."""

    kind: Literal["sequential", "chunks", "lanes"]
    devices: int
    cohort: int
    chunk: int  # clients in one vmap, or lanes; 1 in the sequential plan
    alike: int = 0  # size of a client if all clients take the same number of steps (they end together); else 0
    usual: int = 0  # size-weighted mean client size, sum n^2 / sum n; 0 unless the plan is lanes

    def words(self) -> str:
        """The plan as text: "sequential", "chunks of 4", "8 lanes"."""
        chunks, lanes = f"chunks of {self.chunk}", f"{self.chunk} lanes"
        return {"sequential": "sequential", "chunks": chunks, "lanes": lanes}[self.kind]

    @property
    def lanes(self) -> Lanes:
        """The part of the plan that lowering needs."""
        return Lanes(self.chunk if self.kind == "lanes" else 0, self.alike, self.usual)

    @property
    def compiler(self) -> dict[str, Any]:
        """How programs of the plan are compiled: options for `captured.jit`."""
        options = graph_options() if self.kind == "lanes" and not self.alike else {}
        return {COMPILER: options} if options else {}

    def record(self) -> dict[str, Any]:
        """The part of the plan that a checkpoint stores."""
        return {"kind": self.kind, "devices": self.devices, "cohort": self.cohort, "chunk": self.chunk}

    @property
    def slots(self) -> int:
        """Slots per device. Balancing by work may give one device nearly the whole cohort."""
        if self.kind == "sequential":
            return self.cohort
        return -(-self.cohort // (self.devices * self.chunk)) * self.chunk


class Timetable(NamedTuple):
    """One fold of a cohort on lanes: events in order of time, as arrays over ``devices * slots``.

    An event is the end of one or more clients at the same tick. The second axis of ``lane``, ``slot`` and ``next`` are
    these clients. Padding has lane and slot numbers past the last one. If all clients take the same number of steps,
    entry i belongs to lane i.
    """

    first: Any  # [devices * lanes] slot of the first client of each lane
    events: Any  # [devices] number of events; the entries after them are padding
    wait: Any  # [devices * slots] ticks since the event before
    lane: Any  # [devices * slots, together] lanes of the clients that end
    slot: Any  # slots of the clients that end
    next: Any  # slots of the clients that start in these lanes; the same slot again if the queue is empty


class Slots(NamedTuple):
    """One exchange of one round: arrays over ``devices * slots``, device-major."""

    ids: Any  # client, or the population's size if the slot is empty
    offset: Any
    size: Any
    live: Any  # [devices] number of used slots; empty slots come after them
    lanes: tuple[Timetable, ...] = ()  # one per fold in the plan of lanes, else empty
    jobs: Any = ()  # of an asynchronous run: Jobs, which model each client was sent


class Load(NamedTuple):
    """The cost of a layout: local steps computed and masked, and steps of the busiest device divided by the mean."""

    steps: int
    masked: int
    imbalance: float


def steps_of(client: Callable, sizes: np.ndarray) -> list[np.ndarray]:
    """Local steps per fold of clients with ``sizes`` examples; an opaque client counts as one step."""
    if not isinstance(client, LocalWork):
        return [np.ones_like(sizes)]
    return [np.broadcast_to(fold.batches.count(sizes), sizes.shape) for fold in client.folds]


def steps_per_client(alg: Algorithm, sizes: np.ndarray) -> float:
    """Local steps of all exchanges of a round, on average over clients with ``sizes`` examples."""
    steps = [np.sum(steps_of(exchange.client, sizes), axis=0) for exchange in alg.exchanges]
    return float(np.sum(steps, axis=0).mean())


def cohorts_of(alg: Algorithm, seed: int, round_: int, population: int, size: int) -> list[np.ndarray]:
    """The cohort of every exchange of a round."""
    drawn: list[np.ndarray] = []
    for i, exchange in enumerate(alg.exchanges):
        same = exchange.cohort == "same"
        drawn.append(drawn[-1] if same else address.cohort(seed, round_, i, population, size))
    return drawn


def lay_out(
    plan: Plan, ids: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, folds: list[np.ndarray], population: int
) -> tuple[Slots, Load]:
    """Assign a cohort to the devices. ``offsets``, ``sizes`` and the steps in ``folds`` are those of ``ids``."""
    steps = np.sum(folds, axis=0)
    order = np.argsort(-steps, kind="stable")
    hands = _longest_first(order, steps, plan.devices) if plan.kind == "sequential" else _striped(plan, order)
    shape = (plan.devices, plan.slots)
    slot_ids = np.full(shape, population, np.int32)
    slot_offset, slot_size = np.zeros(shape, np.int32), np.ones(shape, np.int32)
    for d, hand in enumerate(hands):
        slot_ids[d, : len(hand)] = ids[hand]
        slot_offset[d, : len(hand)] = offsets[hand]
        slot_size[d, : len(hand)] = sizes[hand]
    live = np.array([len(hand) for hand in hands], np.int32)
    slots = Slots(slot_ids.ravel(), slot_offset.ravel(), slot_size.ravel(), live)
    done = [int(steps[hand].sum()) for hand in hands]
    if plan.kind == "sequential":
        spent = done
    elif plan.kind == "chunks":
        spent = [_chunked(plan, steps[hand]) for hand in hands]
    else:
        tables = [[_timetable(plan, fold[hand]) for fold in folds] for hand in hands]
        spent = [sum(ticks for _, ticks in device) * plan.chunk for device in tables]
        stacked = tuple(
            Timetable(*(np.concatenate(parts) for parts in zip(*(device[f][0] for device in tables), strict=True)))
            for f in range(len(folds))
        )
        slots = slots._replace(lanes=stacked)
    return slots, Load(sum(done), sum(spent) - sum(done), max(spent) * len(spent) / max(sum(spent), 1))


def _longest_first(order: np.ndarray, steps: np.ndarray, many: int) -> list[list[int]]:
    """Assign clients in the given order to ``many`` lists, each to the list with the least work so far."""
    heap = [(0, d) for d in range(many)]
    hands: list[list[int]] = [[] for _ in range(many)]
    for i in order.tolist():
        work, d = heapq.heappop(heap)
        hands[d].append(i)
        heapq.heappush(heap, (work + int(steps[i]), d))
    return hands


def _striped(plan: Plan, order: np.ndarray) -> list[list[int]]:
    """Divide each block of sorted clients over the devices, so that their chunks run for about the same time."""
    stride = plan.chunk * plan.devices
    hands: list[list[int]] = [[] for _ in range(plan.devices)]
    for start in range(0, len(order), stride):
        block = order[start : start + stride]
        share = -(-len(block) // plan.devices)
        for d in range(plan.devices):
            hands[d].extend(block[d * share : (d + 1) * share].tolist())
    return hands


def _chunked(plan: Plan, steps: np.ndarray) -> int:
    """Number of steps if every chunk runs as long as its longest client, masked steps included."""
    return sum(plan.chunk * int(steps[a : a + plan.chunk].max()) for a in range(0, len(steps), plan.chunk))


def _meeting(queues: list[list[int]], steps: np.ndarray, together: int) -> list[list[int]]:
    """The clients of each lane in an order in which clients of several lanes end at the same tick.

    Clients that end together are one event, and an event costs about as much as a step. The length of a lane does not
    depend on the order of its clients.

    >>> _meeting([[0, 1], [2, 3]], np.array([5, 2, 4, 3]), 8)  # both lanes end after 7 steps
    [[0, 1], [2, 3]]
    >>> _meeting([[0, 1], [2, 3]], np.array([5, 2, 4, 5]), 8)  # clients 0 and 3 end after 5 steps
    [[0, 1], [3, 2]]
    """
    long = steps.tolist()
    ending = Counter(sum(long[i] for i in queue) for queue in queues)  # clients that end at a tick
    ordered: list[list[int]] = [[] for _ in queues]
    for lane in sorted(range(len(queues)), key=lambda lane: len(queues[lane])):
        left, time = list(queues[lane]), 0
        while len(left) > 1:
            # an event that has room, the fuller the better; else the longest client
            best = max(left, key=lambda i, time=time: ending[time + long[i]] % together)
            left.remove(best)
            ordered[lane].append(best)
            time += long[best]
            ending[time] += 1
        ordered[lane].extend(left)
    return ordered


def _timetable(plan: Plan, steps: np.ndarray) -> tuple[Timetable, int]:
    """The timetable of one device and one fold, and its total number of ticks."""
    queues = _longest_first(np.argsort(-steps, kind="stable"), steps, plan.chunk)
    together = plan.chunk if plan.alike else min(TOGETHER, plan.chunk)
    if not plan.alike:
        queues = _meeting(queues, steps, together)
    endings = []
    for lane, queue in enumerate(queues):
        time = 0
        for slot, following in zip_longest(queue, queue[1:]):
            time += int(steps[slot])
            endings.append((time, lane, slot, slot if following is None else following))
    endings.sort()
    events = [
        (time, ends[at : at + together])
        for time, group in groupby(endings, key=lambda ending: ending[0])
        for ends in [list(group)]
        for at in range(0, len(ends), together)
    ]
    wait = np.zeros(plan.slots, np.int32)
    places = np.broadcast_to([[plan.chunk], [plan.slots], [0]], (plan.slots, 3, together)).astype(np.int32)
    for e, (_, ends) in enumerate(events):
        places[e, :, : len(ends)] = np.array(ends, np.int32)[:, 1:].T
    wait[: len(events)] = np.diff([time for time, _ in events], prepend=0)
    first = np.array([queue[0] if queue else 0 for queue in queues], np.int32)
    table = Timetable(first, np.array([len(events)], np.int32), wait, *np.moveaxis(places, 1, 0))
    return table, endings[-1][0] if endings else 0


# --- which plan, by rule ---------------------------------------------------------------------------------------------


def choose_plan(alg: Algorithm, params: Any, data: Any, mesh: Mesh, options: EngineOptions, cohort: int) -> Plan:
    """The plan for the options, the program, the kind of devices and their total memory.

    Other work on the machine has no influence, so the same configuration always gets the same plan.
    """
    split: Split = data.train
    device, devices = mesh.local_devices[0], mesh.shape[AXIS]
    kind, chunk = options.plan, options.chunk
    if has_model_axis(mesh):
        return _model_plan(alg, params, data, mesh, options, cohort)
    if kind == "auto":
        kind = "sequential" if device.platform == "cpu" else "lanes"
    if kind == "sequential":
        return Plan(kind, devices, cohort, 1)
    share = -(-cohort // devices)
    alike = _alike(alg, split) if kind == "lanes" else 0
    if chunk == "auto":
        chunk = min(most_clients(client_bytes(alg, params, data, options), mesh) or share, share)
        if alike:  # no chunk size masks steps; choose one that divides the clients evenly
            chunk = -(-share // -(-share // chunk))
        elif kind == "lanes":
            chunk = min(chunk, max(LANES, share // 4))
    usual = round(float(np.sum(np.square(split.sizes, dtype=float)) / np.sum(split.sizes))) if kind == "lanes" else 0
    return Plan(kind, devices, cohort, min(int(chunk), share), alike, usual)


def _model_plan(alg: Algorithm, params: Any, data: Any, mesh: Mesh, options: EngineOptions, cohort: int) -> Plan:
    """The plan for models over several devices. All devices take the same steps, so groups need padded chunks."""
    groups, cpu = mesh.shape[AXIS], mesh.local_devices[0].platform == "cpu"
    if options.plan == "sequential" and groups > 1:
        raise ValueError(
            f'plan = "sequential": {groups} groups of {options.model_devices} devices run clients in chunks, because '
            f'all devices take the same steps; use plan = "chunks", or model_devices = {mesh.devices.size}'
        )
    if groups == 1 and (options.plan == "sequential" or (options.plan == "auto" and cpu)):
        return Plan("sequential", 1, cohort, 1)
    share, chunk = -(-cohort // groups), options.chunk
    if chunk == "auto":
        chunk = 1 if cpu else most_clients(client_bytes(alg, params, data, options), mesh) or share
    return Plan("chunks", groups, cohort, min(int(chunk), share))


def _alike(alg: Algorithm, split: Split) -> int:
    """The size of a client if all clients take the same number of steps, else 0."""
    folds = (fold for exchange in alg.exchanges for fold in steps_of(exchange.client, split.sizes))
    return int(split.sizes[0]) if all(bool(np.all(fold == fold[0])) for fold in folds) else 0


def most_clients(need: int | None, mesh: Mesh) -> int | None:
    """Number of clients of ``need`` bytes that fit in half of a device's memory; None if ``need`` is unknown."""
    return int(max(1, 0.5 * hosts.least(total_memory(mesh.local_devices[0])) // need)) if need else None


def _one_client(data: Any) -> ClientData:
    """The shapes of the largest client's examples alone."""
    whole = data_shapes(data)
    few = {n: jax.ShapeDtypeStruct((whole.cap, *s.shape[1:]), s.dtype) for n, s in whole.arrays.items()}
    return replace(whole, arrays=few)


def frozen_bytes(alg: Algorithm, params: Any, data: Any) -> int:
    """Bytes of the large arrays that clients use and do not train, such as the weights under LoRA's adapters."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    own = _one_client(data)
    return max(
        captured.captured_bytes(exchange.client, jax.eval_shape(exchange.send, server), state, own, key)
        for exchange in alg.exchanges
    )


def client_bytes(alg: Algorithm, params: Any, data: Any, options: EngineOptions) -> int | None:
    """Bytes that one more client in a chunk takes on each device, by the compiled program.

    None if hyper-parameters are traced.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    own = _one_client(data)
    largest, lowered, where = 0, lower(alg, options), None
    mesh = client_mesh(options.model_devices, options.model_devices) if options.model_devices > 1 else None
    if mesh is not None:
        lowered, where = over_model(lowered, mesh), partial(model_sharding, mesh)
    for exchange in lowered.exchanges:
        down = jax.eval_shape(exchange.send, server)
        if mesh is not None:
            down, state = divided_shapes(mesh, down), divided_shapes(mesh, state)
        try:
            compiled = captured.jit(exchange.client, sharding=where).lower(down, state, own, key).compile()
        except jax.errors.UnexpectedTracerError:
            return None
        used = compiled.memory_analysis()
        if used is None:
            return None
        largest = max(largest, used.temp_size_in_bytes + used.output_size_in_bytes)
    return max(largest, 1)
