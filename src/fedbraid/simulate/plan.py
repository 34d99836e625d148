"""Who is trained where: cohorts laid out over devices, balanced, before a round runs.

Two plans share one layout of *slots* (device-major):

- ``sequential``: every device takes its clients one after the other with a dynamic number of steps. Nothing is masked;
  clients are dealt out longest first, each to the device with the least work. The plan of a CPU: one client per core.
- ``chunks``: every device takes vmapped chunks of clients sorted by their number of steps, so that a chunk's clients
  end at about the same time. Steps of a client that has ended before its chunk are masked. The plan of a GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbraid import address
from fedbraid.core import Algorithm
from fedbraid.local import LocalWork

__all__ = ["Plan", "Slots", "cohorts_of", "lay_out", "steps_of"]


class Plan(NamedTuple):
    """How cohorts are laid out: fixed for a run, so that it compiles once."""

    kind: Literal["sequential", "chunks"]
    devices: int
    cohort: int
    chunk: int  # clients in one vmap; 1 in the sequential plan

    @property
    def slots(self) -> int:
        """Slots per device. Balancing by work may give one device nearly the whole cohort."""
        if self.kind == "sequential":
            return self.cohort
        return -(-self.cohort // (self.devices * self.chunk)) * self.chunk


class Slots(NamedTuple):
    """One exchange of one round: arrays over ``devices * slots``, device-major."""

    ids: Any  # client, or the population's size where the slot is empty
    offset: Any
    size: Any
    live: Any  # [devices] number of slots in use; they come first


class Load(NamedTuple):
    """What a layout costs: local steps done and masked, and steps of the busiest device over the mean."""

    steps: int
    masked: int
    imbalance: float


def steps_of(client: Callable, sizes: np.ndarray) -> np.ndarray:
    """Local steps of clients with ``sizes`` examples; an opaque client counts as one step."""
    return np.asarray(client.count(sizes)) if isinstance(client, LocalWork) else np.ones_like(sizes)


def cohorts_of(alg: Algorithm, seed: int, round_: int, population: int, size: int) -> list[np.ndarray]:
    """The clients asked in every exchange of a round."""
    drawn: list[np.ndarray] = []
    for i, exchange in enumerate(alg.exchanges):
        same = exchange.cohort == "same"
        drawn.append(drawn[-1] if same else address.cohort(seed, round_, i, population, size))
    return drawn


def lay_out(
    plan: Plan, ids: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, steps: np.ndarray, population: int
) -> tuple[Slots, Load]:
    """Deal a cohort out to the devices. ``offsets``, ``sizes``, ``steps`` are those of ``ids``."""
    order = np.argsort(-steps, kind="stable")
    deal = _longest_first if plan.kind == "sequential" else _striped
    hands = deal(plan, order, steps)
    shape = (plan.devices, plan.slots)
    slot_ids = np.full(shape, population, np.int32)
    slot_offset, slot_size = np.zeros(shape, np.int32), np.ones(shape, np.int32)
    for d, hand in enumerate(hands):
        slot_ids[d, : len(hand)] = ids[hand]
        slot_offset[d, : len(hand)] = offsets[hand]
        slot_size[d, : len(hand)] = sizes[hand]
    live = np.array([len(hand) for hand in hands], np.int32)
    slots = Slots(slot_ids.ravel(), slot_offset.ravel(), slot_size.ravel(), live)
    return slots, _load(plan, hands, steps)


def _longest_first(plan: Plan, order: np.ndarray, steps: np.ndarray) -> list[list[int]]:
    heap = [(0, d) for d in range(plan.devices)]
    hands: list[list[int]] = [[] for _ in range(plan.devices)]
    for i in order.tolist():
        work, d = heapq.heappop(heap)
        hands[d].append(i)
        heapq.heappush(heap, (work + int(steps[i]), d))
    return hands


def _striped(plan: Plan, order: np.ndarray, steps: np.ndarray) -> list[list[int]]:
    """Devices take sorted chunks in turn: chunk by chunk they run clients of about the same length."""
    stride = plan.chunk * plan.devices
    hands: list[list[int]] = [[] for _ in range(plan.devices)]
    for start in range(0, len(order), stride):
        block = order[start : start + stride]
        share = -(-len(block) // plan.devices)
        for d in range(plan.devices):
            hands[d].extend(block[d * share : (d + 1) * share].tolist())
    return hands


def _load(plan: Plan, hands: list[list[int]], steps: np.ndarray) -> Load:
    done = [sum(int(steps[i]) for i in hand) for hand in hands]
    spent = done
    if plan.kind == "chunks":
        spent = []
        for hand in hands:
            chunks = [hand[a : a + plan.chunk] for a in range(0, len(hand), plan.chunk)]
            spent.append(sum(plan.chunk * max(int(steps[i]) for i in chunk) for chunk in chunks))
    return Load(sum(done), sum(spent) - sum(done), max(spent) * len(spent) / max(sum(spent), 1))
