"""The timeline of a run: who starts when and who arrives when, round by round, computed on the host.

It depends on the seed, the clock and the sizes of clients, not on what the model learns. So it is known before the
rounds are computed, and a resumed run computes it again from the start.

Asynchronous runs follow these rules:

- The server starts a client whenever fewer than ``cohort`` clients work. It is drawn among the available clients that
  are free.
- Uploads that arrive at the same time are taken in first; the server takes a step for every full buffer and then starts
  clients with its newest model.
- A client is free again after the server step that took its upload in. So it has at most one piece of work, its state
  does not change while it works, and it gets each model at most once. A client that was lost is free again after the
  next step.
- If nobody works and nobody can start, the server takes a step with the uploads that it has.

A past model is kept until the last upload of a client that was sent it has been taken in. These are at most ``cohort``
models: after a step fewer than ``cohort`` of the clients at work have an older model than the newest, and all clients
that start until the next step share the newest.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid import address
from fedbraid.core import Exchange
from fedbraid.costs import Cost
from fedbraid.data.federated import Split
from fedbraid.simulation.asynchrony import Asynchrony
from fedbraid.simulation.availability import Always
from fedbraid.simulation.clock import Clock, Devices, devices_of

__all__ = ["Arrivals", "RoundTime", "Timeline", "Timing", "read_order"]

_CHOICE = 16  # purpose of the random numbers that choose clients
TRIES = 32  # draws before the free clients are listed
RECENT = 256  # rounds that a timeline remembers


@dataclass(frozen=True)
class Timing:
    """The clock of a run, when its server takes a step, and how many clients work at the same time."""

    clock: Clock
    asynchrony: Asynchrony
    cohort: int

    @property
    def uploads(self) -> int:
        """The largest number of uploads in a round or server step."""
        return self.asynchrony.uploads(self.cohort)


class Arrivals(NamedTuple):
    """The uploads of one asynchronous step, in order of arrival."""

    number: int  # server steps before this one
    clients: np.ndarray
    versions: np.ndarray  # number of the model that each client was sent
    places: np.ndarray  # where that model is kept
    store: int  # where the model before this step is kept


class RoundTime(NamedTuple):
    """One round (or server step), by exchange: whose uploads arrive, and how many clients were asked."""

    ids: tuple[np.ndarray, ...]
    asked: tuple[int, ...]
    seconds: float  # simulated time at the end of the round
    arrivals: Arrivals | None = None  # of an asynchronous step


class Timeline:
    """The rounds of a run with one seed. ``at`` is fast if rounds are asked for in order."""

    def __init__(self, timing: Timing, seed: int, exchanges: tuple[Exchange, ...], split: Split, traffic: Cost) -> None:
        devices = devices_of(timing.clock, seed, exchanges, split, traffic)
        how, cohort = timing.asynchrony, timing.cohort
        if how.order is not None:
            path = Path(how.order)
            self._make: Callable[[], Iterator[RoundTime]] = lambda: _replayed(path, split.num_clients)
        elif how.is_asynchronous:
            self._make = lambda: _Events(devices, how, split.num_clients, cohort).steps()
        else:
            self._make = lambda: _rounds(devices, how, exchanges, split.num_clients, cohort)
        self._restart()

    def _restart(self) -> None:
        self._rounds, self._next = self._make(), 0
        self._recent: deque[RoundTime] = deque(maxlen=RECENT)

    def at(self, round_: int) -> RoundTime:
        """Round ``round_``, counted from 0."""
        if round_ < self._next - len(self._recent):
            self._restart()
        while self._next <= round_:
            self._recent.append(next(self._rounds))
            self._next += 1
        return self._recent[round_ - self._next]

    def places(self, rounds: int) -> int:
        """The largest number of past models that ``rounds`` steps keep at the same time."""
        most = 0
        for step in itertools.islice(self._make(), rounds):
            assert step.arrivals is not None
            most = max(most, step.arrivals.store, *step.arrivals.places.tolist())
        return most + 1


# --- rounds of all clients -------------------------------------------------------------------------------------------


def _rounds(
    devices: Devices, how: Asynchrony, exchanges: tuple[Exchange, ...], population: int, cohort: int
) -> Iterator[RoundTime]:
    """Synchronous and semi-synchronous rounds: each exchange ends when the last upload that it takes is there."""
    early = how.name == "semi-synchronous"
    time, wanted = 0.0, min(population, how.asked(cohort))
    for round_ in itertools.count():
        taken: list[np.ndarray] = []
        asked: list[np.ndarray] = []
        for index, exchange in enumerate(exchanges):
            if exchange.cohort == "same":
                clients = taken[-1] if early else asked[-1]
            else:
                time, clients = _draw(devices, round_, index, population, wanted, time)
            ends, arrive = devices.end(index, round_, clients, time)
            limit = time + how.deadline if early and how.deadline is not None else math.inf
            there = arrive & (ends <= limit)
            order = np.argsort(np.where(there, ends, np.inf), kind="stable")[: min(cohort, int(there.sum()))]
            enough = early and len(order) == cohort
            last = ends[order[-1]] if enough else np.minimum(ends, limit).max(initial=time)
            asked.append(clients)
            taken.append(clients[np.sort(order)])
            time = float(max(time, last))
        yield RoundTime(tuple(taken), tuple(map(len, asked)), time)


def _draw(
    devices: Devices, round_: int, exchange: int, population: int, size: int, time: float
) -> tuple[float, np.ndarray]:
    """A cohort of clients that are available; if there is none, the server waits for the first."""
    if isinstance(devices.available, Always):
        return time, address.cohort(devices.seed, round_, exchange, population, size)
    everyone = np.arange(population)
    here = np.flatnonzero(devices.available.until(everyone, time) > time)
    if not len(here):
        time = float(np.min(devices.available.following(everyone, time)))
        here = np.flatnonzero(devices.available.until(everyone, time) > time)
    if len(here) <= size:
        return time, here
    rng = np.random.default_rng([devices.seed, round_, exchange])
    return time, np.sort(rng.choice(here, size, replace=False))


# --- asynchronous steps ----------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    end: float
    number: int  # breaks ties: jobs that started earlier arrive earlier
    client: int
    version: int
    arrives: bool


class _Events:
    """The events of an asynchronous run. See the rules at the top of this module."""

    def __init__(self, devices: Devices, how: Asynchrony, population: int, cohort: int) -> None:
        self.devices, self.population, self.cohort = devices, population, cohort
        self.buffer_size = how.uploads(cohort)
        self.time, self.version = 0.0, 0
        self.working: list[_Job] = []  # a heap
        self.buffer: list[_Job] = []
        self.lost: list[_Job] = []  # since the last step
        self.away = np.zeros(population, bool)
        self.away_count = 0
        self.started = self.asked = self.draws = 0  # jobs of the run; jobs and draws with this version
        self.asleep_until = -math.inf  # no free client is available before, unless a step frees one
        self.places = _Places()

    def steps(self) -> Iterator[RoundTime]:
        """The server's steps, in order."""
        while True:
            self._start()
            waking = self._waking()
            if not self.working and waking is None:
                yield self._step(len(self.buffer))
                continue
            ends = self.working[0].end if self.working else math.inf
            self.time = max(self.time, min(ends, math.inf if waking is None else waking))
            while self.working and self.working[0].end <= self.time:
                job = heapq.heappop(self.working)
                (self.buffer if job.arrives else self.lost).append(job)
            while len(self.buffer) >= self.buffer_size:
                yield self._step(self.buffer_size)

    def _waking(self) -> float | None:
        """When the next free client becomes available, if a client is missing; None if none is missing or free."""
        if len(self.working) == self.cohort or self.away_count == self.population:
            return None
        return self.asleep_until if self.asleep_until < math.inf else None

    def _start(self) -> None:
        clients = self._choose(self.cohort - len(self.working))
        if not len(clients):
            return
        ends, arrive = self.devices.end(0, self.version, clients, self.time)
        for client, end, arrives in zip(clients.tolist(), ends.tolist(), arrive.tolist(), strict=True):
            heapq.heappush(self.working, _Job(end, self.started, client, self.version, arrives))
            self.started += 1
            self.away[client] = True
        self.places.use(self.version, len(clients))
        self.away_count += len(clients)
        self.asked += len(clients)

    def _choose(self, number: int) -> np.ndarray:
        """At most ``number`` clients that are free and available, drawn by address."""
        always = isinstance(self.devices.available, Always)
        if not number or self.away_count == self.population or self.time < self.asleep_until:
            return np.zeros(0, int)
        if always and not self.away_count and not self.draws and number <= self.population:
            self.draws += 1
            return address.cohort(self.devices.seed, self.version, 0, self.population, number)
        chosen: list[int] = []
        for _ in range(number):
            client = self._draw_one(chosen, always)
            if client is None:
                break
            chosen.append(client)
        return np.array(chosen, int)

    def _draw_one(self, chosen: list[int], always: bool) -> int | None:
        available, seed = self.devices.available, self.devices.seed
        for _ in range(TRIES):
            client = int(address.uniforms(seed, _CHOICE, self.version, self.draws) * self.population)
            self.draws += 1
            free = not self.away[client] and client not in chosen
            if free and (always or available.until(client, self.time) > self.time):
                return client
        free = np.flatnonzero(~self.away)
        free = free[~np.isin(free, chosen)]
        here = free if always else free[available.until(free, self.time) > self.time]
        if len(here):
            drawn = address.uniforms(seed, _CHOICE, self.version, self.draws)
            self.draws += 1
            return int(here[int(drawn * len(here))])
        self.asleep_until = float(np.min(available.following(free, self.time), initial=math.inf))
        return None

    def _step(self, number: int) -> RoundTime:
        """One server step with the first ``number`` uploads of the buffer."""
        taken, self.buffer = self.buffer[:number], self.buffer[number:]
        clients = np.array([job.client for job in taken], int)
        versions = np.array([job.version for job in taken], int)
        places = np.array([self.places.of(job.version) for job in taken], int)
        arrivals = Arrivals(self.version, clients, versions, places, self.places.of(self.version))
        asked = self.asked
        for job in (*taken, *self.lost):
            self.away[job.client] = False
            self.places.release(job.version)
        self.away_count -= len(taken) + len(self.lost)
        self.lost = []
        self.version += 1
        self.places.begin(self.version)
        self.asked = self.draws = 0
        self.asleep_until = -math.inf
        return RoundTime((clients,), (asked,), self.time, arrivals)


class _Places:
    """Where models are kept: the first free place, from the step that makes a model until nobody needs it."""

    def __init__(self) -> None:
        self.free: list[int] = []  # a heap
        self.made = 0
        self.users: dict[int, list[int]] = {}  # by version: [place, clients that have it]
        self.newest = 0
        self.begin(0)

    def begin(self, version: int) -> None:
        """Keep the model ``version``; the one before it is kept only if clients have it."""
        before, self.newest = self.newest, version
        if before != version and not self.users[before][1]:
            self._drop(before)
        if not self.free:
            heapq.heappush(self.free, self.made)
            self.made += 1
        self.users[version] = [heapq.heappop(self.free), 0]

    def of(self, version: int) -> int:
        return self.users[version][0]

    def use(self, version: int, clients: int) -> None:
        self.users[version][1] += clients

    def release(self, version: int) -> None:
        self.users[version][1] -= 1
        if not self.users[version][1] and version != self.newest:
            self._drop(version)

    def _drop(self, version: int) -> None:
        heapq.heappush(self.free, self.users.pop(version)[0])


# --- arrivals of a deployed run --------------------------------------------------------------------------------------


def read_order(path: Path) -> list[dict[str, Any]]:
    """The steps of a file that a deployed run wrote, each with clients, versions, asked and seconds."""
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        for number, step in enumerate(steps):
            clients, versions = step["clients"], step["versions"]
            if len(clients) != len(versions) or not all(0 <= v <= number for v in versions):
                raise ValueError(f"step {number} has versions that do not fit")
    except OSError as error:
        raise ValueError(f"cannot read the order of arrivals {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an order of arrivals: {error}") from None
    return steps


def _replayed(path: Path, population: int) -> Iterator[RoundTime]:
    """The steps of a deployed run, in its order of arrival."""
    steps = read_order(path)
    users: dict[int, int] = {}
    for version in itertools.chain.from_iterable(step["versions"] for step in steps):
        users[version] = users.get(version, 0) + 1
    places = _Places()
    for number, step in enumerate(steps):
        places.use(number, users.get(number, 0))
        clients, versions = np.array(step["clients"], int), np.array(step["versions"], int)
        if len(clients) and not 0 <= clients.min() <= clients.max() < population:
            raise ValueError(f"{path}: step {number} names clients that this data does not have")
        at = np.array([places.of(version) for version in step["versions"]], int)
        yield RoundTime(
            (clients,),
            (int(step.get("asked", len(clients))),),
            float(step.get("seconds", 0.0)),
            Arrivals(number, clients, versions, at, places.of(number)),
        )
        for version in step["versions"]:
            places.release(version)
        places.begin(number + 1)
    raise ValueError(f"{path} has {len(steps)} steps; set rounds to at most that")
