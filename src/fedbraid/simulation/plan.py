"""Who is trained where: cohorts laid out over devices, balanced, before a round runs.

Three plans share one layout of *slots* (device-major):

- ``sequential``: every device takes its clients one after the other with a dynamic number of steps. Nothing is masked;
  clients are dealt out longest first, each to the device with the least work. The plan of a CPU: one client per core.
- ``chunks``: every device takes vmapped chunks of clients sorted by their number of steps, so that a chunk's clients
  end at about the same time. Steps of a client that has ended before its chunk are masked. The plan of opaque clients.
- ``lanes``: every device keeps some lanes busy; each has a queue of clients, and every tick is one local step on all
  lanes. Where a client ends, its result is taken and the next one starts in its place. Step counts are known before the
  round, so the whole timetable is made here: the compiled loop goes from one ending to the next and selects nothing.
  The plan of a GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedbraid import address
from fedbraid.core import Algorithm
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import LocalWork
from fedbraid.lowering.convolutions import with_convolutions
from fedbraid.simulation import hosts
from fedbraid.simulation.devices import total_memory
from fedbraid.simulation.options import EngineOptions

__all__ = [
    "Plan",
    "Slots",
    "choose_plan",
    "client_bytes",
    "cohorts_of",
    "lay_out",
    "most_clients",
    "steps_of",
]

LANES = 32  # fill a large GPU; more only mask more
TOGETHER = 8  # clients whose endings are taken care of at once, at most, unless all end together


class Plan(NamedTuple):
    """How cohorts are laid out: fixed for a run, so that it compiles once."""

    kind: Literal["sequential", "chunks", "lanes"]
    devices: int
    cohort: int
    chunk: int  # clients in one vmap, or lanes; 1 in the sequential plan
    alike: int = 0  # size of a client, if all clients take the same number of steps and so end together; else 0
    usual: int = 0  # size-weighted mean client size, sum n^2 / sum n; 0 unless the plan is lanes

    def words(self) -> str:
        """The plan in a sentence: "sequential", "chunks of 4", "8 lanes"."""
        chunks, lanes = f"chunks of {self.chunk}", f"{self.chunk} lanes"
        return {"sequential": "sequential", "chunks": chunks, "lanes": lanes}[self.kind]

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"kind": self.kind, "devices": self.devices, "cohort": self.cohort, "chunk": self.chunk}

    @property
    def slots(self) -> int:
        """Slots per device. Balancing by work may give one device nearly the whole cohort."""
        if self.kind == "sequential":
            return self.cohort
        return -(-self.cohort // (self.devices * self.chunk)) * self.chunk


class Timetable(NamedTuple):
    """One fold of a cohort on lanes: its endings in order of time, arrays over ``devices * slots``.

    Clients that end at the same time do so together, up to so many at once (the second axis). Where there are fewer,
    lane and slot are beyond the last one. Where all clients take as many steps, the i-th place is that of lane i.
    """

    first: Any  # [devices * lanes] slot that each lane starts with
    events: Any  # [devices] how many endings there are; they come first
    wait: Any  # [devices * slots] ticks from the ending before
    lane: Any  # [devices * slots, together] where clients end
    slot: Any  # which
    next: Any  # slots that start there then; the same ones again when the queue is empty


class Slots(NamedTuple):
    """One exchange of one round: arrays over ``devices * slots``, device-major."""

    ids: Any  # client, or the population's size where the slot is empty
    offset: Any
    size: Any
    live: Any  # [devices] number of slots in use; they come first
    lanes: tuple[Timetable, ...] = ()  # per fold, in the plan of lanes


class Load(NamedTuple):
    """What a layout costs: local steps done and masked, and steps of the busiest device over the mean."""

    steps: int
    masked: int
    imbalance: float


def steps_of(client: Callable, sizes: np.ndarray) -> list[np.ndarray]:
    """Local steps per fold of clients with ``sizes`` examples; an opaque client counts as one step."""
    if not isinstance(client, LocalWork):
        return [np.ones_like(sizes)]
    return [np.broadcast_to(fold.batches.count(sizes), sizes.shape) for fold in client.folds]


def cohorts_of(alg: Algorithm, seed: int, round_: int, population: int, size: int) -> list[np.ndarray]:
    """The clients asked in every exchange of a round."""
    drawn: list[np.ndarray] = []
    for i, exchange in enumerate(alg.exchanges):
        same = exchange.cohort == "same"
        drawn.append(drawn[-1] if same else address.cohort(seed, round_, i, population, size))
    return drawn


def lay_out(
    plan: Plan, ids: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, folds: list[np.ndarray], population: int
) -> tuple[Slots, Load]:
    """Deal a cohort out to the devices. ``offsets``, ``sizes`` and the ``folds``' steps are those of ``ids``."""
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
    """Deal out in the given order, each to the hand with the least work so far."""
    heap = [(0, d) for d in range(many)]
    hands: list[list[int]] = [[] for _ in range(many)]
    for i in order.tolist():
        work, d = heapq.heappop(heap)
        hands[d].append(i)
        heapq.heappush(heap, (work + int(steps[i]), d))
    return hands


def _striped(plan: Plan, order: np.ndarray) -> list[list[int]]:
    """Devices take sorted chunks in turn: chunk by chunk they run clients of about the same length."""
    stride = plan.chunk * plan.devices
    hands: list[list[int]] = [[] for _ in range(plan.devices)]
    for start in range(0, len(order), stride):
        block = order[start : start + stride]
        share = -(-len(block) // plan.devices)
        for d in range(plan.devices):
            hands[d].extend(block[d * share : (d + 1) * share].tolist())
    return hands


def _chunked(plan: Plan, steps: np.ndarray) -> int:
    """Steps computed when every chunk runs as long as its longest client."""
    return sum(plan.chunk * int(steps[a : a + plan.chunk].max()) for a in range(0, len(steps), plan.chunk))


def _timetable(plan: Plan, steps: np.ndarray) -> tuple[Timetable, int]:
    """When which client of one device ends on which lane, and how many ticks it takes in all."""
    queues = _longest_first(np.argsort(-steps, kind="stable"), steps, plan.chunk)
    together = plan.chunk if plan.alike else min(TOGETHER, plan.chunk)
    endings = []
    for lane, queue in enumerate(queues):
        time = 0
        for slot, following in zip_longest(queue, queue[1:]):
            time += int(steps[slot])
            endings.append((time, lane, slot, slot if following is None else following))
    endings.sort()
    events = [
        (time, alike[at : at + together])
        for time, group in groupby(endings, key=lambda ending: ending[0])
        for alike in [list(group)]
        for at in range(0, len(alike), together)
    ]
    wait = np.zeros(plan.slots, np.int32)
    places = np.broadcast_to([[plan.chunk], [plan.slots], [0]], (plan.slots, 3, together)).astype(np.int32)
    for e, (_, alike) in enumerate(events):
        places[e, :, : len(alike)] = np.array(alike, np.int32)[:, 1:].T
    wait[: len(events)] = np.diff([time for time, _ in events], prepend=0)
    first = np.array([queue[0] if queue else 0 for queue in queues], np.int32)
    table = Timetable(first, np.array([len(events)], np.int32), wait, *np.moveaxis(places, 1, 0))
    return table, endings[-1][0] if endings else 0


# --- which plan, by rule ---------------------------------------------------------------------------------------------


def choose_plan(alg: Algorithm, params: Any, data: Any, mesh: Mesh, options: EngineOptions, cohort: int) -> Plan:
    """The plan by rule, from the options, the program, the kind of devices and their total memory.

    What else the machine does has no influence, so the same configuration takes the same plan again.
    """
    split: Split = data.train
    device, devices = mesh.local_devices[0], mesh.devices.size
    kind, chunk = options.plan, options.chunk
    if kind == "auto":
        kind = "sequential" if device.platform == "cpu" else "lanes"
    if kind == "sequential":
        return Plan(kind, devices, cohort, 1)
    share = -(-cohort // devices)
    alike = _alike(alg, split) if kind == "lanes" else 0
    if chunk == "auto":
        chunk = min(most_clients(client_bytes(alg, params, data, options), mesh) or share, share)
        if alike:  # nothing is masked whatever the chunk is, but the last lanes should not be few
            chunk = -(-share // -(-share // chunk))
        elif kind == "lanes":
            chunk = min(chunk, max(LANES, share // 4))
    usual = round(float(np.sum(np.square(split.sizes, dtype=float)) / np.sum(split.sizes))) if kind == "lanes" else 0
    return Plan(kind, devices, cohort, min(int(chunk), share), alike, usual)


def _alike(alg: Algorithm, split: Split) -> int:
    """The size of a client, if all clients take the same number of steps; else 0."""
    folds = (fold for exchange in alg.exchanges for fold in steps_of(exchange.client, split.sizes))
    return int(split.sizes[0]) if all(bool(np.all(fold == fold[0])) for fold in folds) else 0


def most_clients(need: int | None, mesh: Mesh) -> int | None:
    """How many clients of ``need`` bytes a device takes at a time: half of its memory; None if ``need`` is unknown."""
    return int(max(1, 0.5 * hosts.least(total_memory(mesh.local_devices[0])) // need)) if need else None


def client_bytes(alg: Algorithm, params: Any, data: Any, options: EngineOptions) -> int | None:
    """Memory that one more client in a chunk takes, by the compiled program; None while hyper-parameters are traced."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    whole = data_shapes(data)
    few = {n: jax.ShapeDtypeStruct((whole.cap, *s.shape[1:]), s.dtype) for n, s in whole.arrays.items()}
    own = replace(whole, arrays=few)
    largest = 0
    for exchange in with_convolutions(alg, options.convolutions).exchanges:
        down = jax.eval_shape(exchange.send, server)
        try:
            compiled = jax.jit(exchange.client).lower(down, state, own, key).compile()
        except jax.errors.UnexpectedTracerError:
            return None
        used = compiled.memory_analysis()
        if used is None:
            return None
        largest = max(largest, used.temp_size_in_bytes + used.output_size_in_bytes)
    return max(largest, 1)
