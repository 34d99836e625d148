"""Tallies: the results of an exchange's clients, and their sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid import address
from fedbraid.core import Aggregate, Exchange, Reducer, Report, finite, noised, receive_noised
from fedbraid.local import ClientData, LocalWork
from fedbraid.simulation.arrival import Arrival
from fedbraid.simulation.asynchrony import Asynchrony, stale_lift
from fedbraid.simulation.plan import Slots

__all__ = [
    "ClientResult",
    "SharedInputs",
    "Sizes",
    "Tally",
    "add_client",
    "add_clients",
    "can_add",
    "gather_clients",
    "only",
    "select",
    "server_step",
    "total",
    "zero_tally",
]

PyTree = Any


class Tally(NamedTuple):
    """Sums over the clients of an exchange. For a gather reducer ``combined`` and ``weight`` have a row per client."""

    combined: PyTree
    weight: Any
    count: Any
    refused: Any  # number of uploads that arrived but were not admitted (not finite)
    metrics: dict[str, Any]


class ClientResult(NamedTuple):
    """One client's contribution to the tally, and its next state."""

    tally: Tally
    state: PyTree


class SharedInputs(NamedTuple):
    """The inputs that all clients of an exchange share on one device."""

    exchange: Exchange
    arrival: Arrival
    down: PyTree
    key: Any  # of the exchange
    seed_key: Any
    arrays: PyTree
    cap: int  # examples of the largest client
    preprocess: Callable | None
    slots: Slots
    past: PyTree = None  # of an asynchronous run: the models that clients were sent, by place
    asynchrony: Asynchrony = Asynchrony()

    def sent(self, slot: Any) -> PyTree:
        """The message that the client in a slot was sent."""
        if self.past is None:
            return self.down
        return jax.tree.map(lambda leaf: leaf[self.slots.jobs.place[slot]], self.past)

    def exchange_key(self, slot: Any) -> Any:
        """The key of the exchange in which the client in a slot was sent its message."""
        if self.past is None:
            return self.key
        return address.exchange_key(self.seed_key, self.slots.jobs.version[slot], 0)

    def data(self, slot: Any) -> ClientData:
        """The examples of the client in a slot."""
        slots, key = self.slots, address.rows_key(self.seed_key, self.slots.ids[slot])
        return ClientData(self.arrays, slots.offset[slot], slots.size[slot], self.cap, self.preprocess, key)

    def client_key(self, slot: Any) -> Any:
        """The random key of the client's local work."""
        return address.client_key(self.exchange_key(slot), self.slots.ids[slot])

    def run(self, slot: Any, state: PyTree) -> ClientResult:
        """Run the client in a slot."""
        report = self.exchange.client(self.sent(slot), state, self.data(slot), self.client_key(slot))
        return self.judge(slot, state, report)

    def judge(self, slot: Any, state: PyTree, report: Report) -> ClientResult:
        """The client's tally and next state: the report counts only if the upload arrived and was admitted."""
        exchange, client, key = self.exchange, self.slots.ids[slot], self.exchange_key(slot)
        report = noised(exchange, report, self.down, address.client_noise(key, client))
        size = self.slots.size[slot]
        steps = exchange.client.count(size) if isinstance(exchange.client, LocalWork) else jnp.int32(1)
        arrived = self.arrival(address.arrival_key(key, client), steps)
        given = jnp.asarray(report.weight).astype(jnp.result_type(float))
        taken = arrived & exchange.admit(report.up) & can_add(exchange.reducer, report.up, given)
        weight = jnp.where(taken, given, 0)
        lifted = exchange.reducer.lift(report.up, weight)
        if self.past is not None:
            total = 1.0 if exchange.reducer.kind == "gather" else weight
            stale = self.slots.jobs.weight[slot]
            lifted = stale_lift(self.asynchrony, lifted, total, stale, self.down, self.sent(slot))
        tally = Tally(
            # a refused upload may contain NaN, and NaN times weight 0 is NaN
            select(taken, lifted, jax.tree.map(jnp.zeros_like, lifted)),
            weight,
            taken.astype(jnp.int32),
            (arrived & ~taken).astype(jnp.int32),
            {name: jnp.where(taken, value * weight, 0) for name, value in report.metrics.items()},
        )
        return ClientResult(tally, select(taken, report.state, state))


def can_add(reducer: Reducer, up: PyTree, weight: Any) -> Any:
    """Whether an upload stays finite when it is weighted for the sum: finite numbers can have an infinite product."""
    if reducer.kind == "gather":  # its uploads are stacked as they are
        return jnp.isfinite(weight)
    if reducer.mean == "none":
        return jnp.isfinite(weight) & finite(reducer.lift(up, weight))
    return jnp.isfinite(weight) & finite(reducer.decode(up), weight)  # the lifted upload needs no pass of its own


def select(condition: Any, a: PyTree, b: PyTree) -> PyTree:
    """``a`` where the condition holds, else ``b``."""
    return jax.tree.map(partial(jnp.where, condition), a, b)


def _add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


class Sizes(NamedTuple):
    """Two public numbers of clients: of all of them, and of those that are asked in a round."""

    population: int
    cohort: int


def server_step(
    exchange: Exchange, server: PyTree, sums: tuple[PyTree, Any, Any], sizes: Sizes, key: Any, draw: Callable
) -> tuple[PyTree, dict[str, Any]]:
    """The server's state after an exchange, and what ``receive`` logged: it receives the reducer's result.

    sums: combined uploads, weight and count; for a gather reducer the first two have one row per upload. key: the
    exchange's key. draw: the source of the noise of a private exchange.
    Without any upload the server keeps its state, so that momentum does not move the model, and logs are NaN.
    """
    combined, weight, count = sums
    up = exchange.reducer.finish(combined, weight, count)
    # in the default float dtype: int32 / int32 would be float32, and |S|/N would have only its precision
    number, clients, expected = (jnp.asarray(n, jnp.result_type(float)) for n in (count, *sizes))
    aggregate = Aggregate(up, jnp.sum(weight), number, clients)
    received = receive_noised(exchange, server, aggregate, expected, address.server_key(key), draw)
    logs = {
        name: jnp.where(count > 0, jnp.asarray(value).astype(jnp.result_type(float)), jnp.nan)
        for name, value in received.logs.items()
    }
    return select(count > 0, received.server, server), logs


def zero_tally(shapes: Tally, gather: bool, slots: int) -> Tally:
    """The tally before the first client; for a gather reducer with a row for each slot."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    if not gather:
        return zeros
    wide = partial(jax.tree.map, lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype))
    return zeros._replace(combined=wide(zeros.combined), weight=wide(zeros.weight))


def add_client(tally: Tally, one: Tally, slot: Any, gather: bool) -> Tally:
    """The tally with one more client."""
    if not gather:
        return _add(tally, one)
    put = partial(jax.tree.map, lambda all_, new: all_.at[slot].set(new))
    return Tally(put(tally.combined, one.combined), put(tally.weight, one.weight), *_add(tally[2:], one[2:]))


def gather_clients(tally: Tally, few: Tally, slot: Any, real: Any) -> Tally:
    """The tally of a gather reducer with several more clients. Those that are not ``real`` (padding) do not count."""
    put = partial(jax.tree.map, lambda all_, new: all_.at[slot].set(new, mode="drop"))
    rows = put(tally.combined, few.combined), put(tally.weight, few.weight)
    return Tally(*rows, *add_clients(tally[2:], few[2:], real))


def add_clients(sums: PyTree, few: PyTree, real: Any) -> PyTree:
    """The sums with several more clients, one in each row of ``few``. Those that are not ``real`` do not count."""
    return _add(sums, total(only(real, few)))


def only(real: Any, tree: PyTree) -> PyTree:
    """The tree with zeros in the rows that are not real."""
    return jax.tree.map(lambda leaf: jnp.where(real.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0), tree)


GROUP = 16  # a GPU sums this many rows at memory speed; for many more rows XLA uses a slower kernel


def total(tree: PyTree) -> PyTree:
    """Sums over rows, in the dtype of each leaf."""

    def sum_rows(leaf: Any) -> Any:
        if len(leaf) < 2 * GROUP:
            return leaf.sum(0, dtype=leaf.dtype)
        whole = len(leaf) // GROUP * GROUP
        groups = leaf[:whole].reshape(-1, GROUP, *leaf.shape[1:]).sum(1, dtype=leaf.dtype)
        # without the barrier XLA merges both sums into one
        return sum_rows(jnp.concatenate([jax.lax.optimization_barrier(groups), leaf[whole:]]))

    return jax.tree.map(sum_rows, tree)
