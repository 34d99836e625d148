"""Simulated time: how fast devices are, how long messages take, and when clients are available.

A `Clock` describes the devices of a federation. Everything random is drawn by address from the seed of the run: a
device from (client), one piece of work from (round, client). So the times do not depend on the order of clients, and a
resumed run has the same ones. The number of steps and of examples comes from the algorithm's batches, the number of
bytes from its messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import ndtri

from fedbraid import address
from fedbraid.core import Exchange, check_number
from fedbraid.costs import Cost
from fedbraid.data.federated import Split
from fedbraid.local import Batches, LocalWork
from fedbraid.simulation.availability import Always, Availability, DayAndNight, read_trace

__all__ = ["Clock", "Devices", "devices_of"]

_SPEED, _LATENCY, _BANDWIDTH, _PHASE, _WORK, _LOST = range(6)  # purposes of random numbers


@dataclass(frozen=True)
class Clock:
    """The devices of a federation. By default nothing takes time.

    A client that receives a message, works and sends its upload takes
    ``latency + bytes down / bandwidth_down + (steps * seconds_per_step + examples * seconds_per_example) * slowness *
    jitter + bytes up / bandwidth_up`` seconds. Random values are log-normal: a median times ``exp(sigma * normal)``.

    seconds_per_step [seconds]: time of a typical client for one local step; from 0.
    seconds_per_example [seconds]: time of a typical client for one example of a batch; from 0.
    speed_sigma [sigma]: spread of the slowness of clients, which is drawn once per client; from 0.
    jitter_sigma [sigma]: spread of the duration of the same work on the same client, drawn for every piece of work.
    latency [seconds]: latency of an exchange, both ways together; it does not depend on the size of messages.
    latency_sigma [sigma]: spread of the latency.
    bandwidth_down [bytes per second]: bandwidth from the server to a client, above 0; None: sending takes no time.
    bandwidth_up [bytes per second]: bandwidth from a client to the server, above 0; None: sending takes no time.
    bandwidth_sigma [sigma]: spread of the bandwidths of clients.
    availability: "always", "day-night", or the path of a CSV file with the columns client, start and end (seconds).
    day [seconds]: length of a day, for "day-night".
    awake [share]: part of a day in which a client is available; above 0, to 1.
    lost [probability]: the probability that a client fails, so that its upload never arrives.

    >>> Clock(seconds_per_step=0.1, speed_sigma=1.0).is_running
    True
    """

    seconds_per_step: float = 0.0
    seconds_per_example: float = 0.0
    speed_sigma: float = 0.0
    jitter_sigma: float = 0.0
    latency: float = 0.0
    latency_sigma: float = 0.0
    bandwidth_down: float | None = None
    bandwidth_up: float | None = None
    bandwidth_sigma: float = 0.0
    availability: str = "always"
    day: float = 86400.0
    awake: float = 0.5
    lost: float = 0.0

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # configurations refuse unknown keys

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "seconds_per_example", "latency"):
            check_number(name, getattr(self, name), low=0)
        for name in ("speed_sigma", "jitter_sigma", "latency_sigma", "bandwidth_sigma"):
            check_number(name, getattr(self, name), low=0)
        for name in ("bandwidth_down", "bandwidth_up"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), low=0, open_low=True)
        check_number("day", self.day, low=0, open_low=True)
        check_number("awake", self.awake, low=0, high=1, open_low=True)
        check_number("lost", self.lost, low=0, high=1, open_high=True)

    @property
    def is_running(self) -> bool:
        """Whether anything takes time, or clients are lost or unavailable."""
        return self != Clock()


class Devices(NamedTuple):
    """The devices of a run: what its clock drew for every client.

    seconds: by exchange and client, without jitter. until, following: see `Availability`.
    """

    clock: Clock
    seed: int
    fixed: tuple[np.ndarray, ...]  # by exchange: seconds of messages
    work: tuple[np.ndarray, ...]  # by exchange: seconds of local work, before jitter
    available: Availability

    def seconds(self, exchange: int, round_: int, ids: Any) -> Any:
        """How long clients take in an exchange that began in ``round_``."""
        fixed, work = self.fixed[exchange][ids], self.work[exchange][ids]
        if self.clock.jitter_sigma:
            drawn = ndtri(address.uniforms(self.seed, _WORK, round_, exchange, ids))
            work = work * np.exp(self.clock.jitter_sigma * drawn)
        return fixed + work

    def fails(self, exchange: int, round_: int, ids: Any) -> Any:
        """Whether clients fail in an exchange that began in ``round_``."""
        if not self.clock.lost:
            return np.zeros(np.shape(ids), bool)
        return address.uniforms(self.seed, _LOST, round_, exchange, ids) < self.clock.lost

    def end(self, exchange: int, round_: int, ids: Any, time: float) -> tuple[Any, Any]:
        """When clients that start at ``time`` end, and whether their uploads arrive.

        A client that becomes unavailable before it ends is lost, and the server notices it at that time. A client that
        fails is noticed when its upload would have arrived.
        """
        ends = time + self.seconds(exchange, round_, ids)
        leaves = self.available.until(ids, time)
        fails = self.fails(exchange, round_, ids)
        return np.minimum(ends, leaves), (ends <= leaves) & np.logical_not(fails)


def devices_of(clock: Clock, seed: int, exchanges: tuple[Exchange, ...], split: Split, traffic: Cost) -> Devices:
    """Draw the devices of all clients."""
    population = split.num_clients
    ids, sizes = np.arange(population), np.asarray(split.sizes)

    def spread(sigma: float, purpose: int) -> Any:
        return np.exp(sigma * ndtri(address.uniforms(seed, purpose, ids))) if sigma else np.ones(population)

    slowness = spread(clock.speed_sigma, _SPEED)
    latency = clock.latency * spread(clock.latency_sigma, _LATENCY)
    width = spread(clock.bandwidth_sigma, _BANDWIDTH)
    fixed, work = [], []
    for exchange, sent in zip(exchanges, traffic.exchanges, strict=True):
        steps, examples = work_of(exchange, sizes)
        work.append(slowness * (steps * clock.seconds_per_step + examples * clock.seconds_per_example))
        pairs = ((sent.down, clock.bandwidth_down), (sent.up, clock.bandwidth_up))
        fixed.append(latency + sum(size / (rate * width) for size, rate in pairs if rate is not None))
    return Devices(clock, seed, tuple(fixed), tuple(work), _availability(clock, seed, split))


def work_of(exchange: Exchange, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Local steps of clients with ``sizes`` examples, and examples in their batches; an opaque client has one step."""
    if not isinstance(exchange.client, LocalWork):
        return np.ones_like(sizes), sizes
    folds = [fold.batches for fold in exchange.client.folds]
    steps = np.sum([np.broadcast_to(one.count(sizes), sizes.shape) for one in folds], axis=0)
    return steps, np.sum([_examples(one, sizes) for one in folds], axis=0)


def _examples(batches: Batches, sizes: np.ndarray) -> np.ndarray:
    """Examples in all batches of a client; the last batch of an epoch may be smaller than the others."""
    used, steps = np.asarray(batches.bounds(sizes)[1]), np.broadcast_to(batches.count(sizes), sizes.shape)
    if batches.size is None:
        return steps * used
    epochs, rest = np.divmod(steps, -(-used // batches.size))
    return epochs * used + np.minimum(rest * batches.size, used)


def _availability(clock: Clock, seed: int, split: Split) -> Availability:
    if clock.availability == "always":
        return Always()
    if clock.availability == "day-night":
        phase = address.uniforms(seed, _PHASE, np.arange(split.num_clients))
        return DayAndNight(phase, clock.day, clock.awake)
    return read_trace(Path(clock.availability), split.num_clients, [str(name) for name in split.ids])
