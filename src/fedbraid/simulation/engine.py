"""The engine: whole rounds of a federated algorithm as one compiled program.

The program runs a dynamic number of rounds between two looks of the host, so it compiles once whatever the evaluation
and checkpoint intervals are, and its results do not depend on them. Clients are spread over the devices of a mesh by
``shard_map``; on each device a plan (see :mod:`fedbraid.simulation.plan`) runs them in sequence, in vmapped chunks or
on
lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedbraid import address
from fedbraid.core import Aggregate, Algorithm, Exchange, Report
from fedbraid.local import ClientData, LocalWork
from fedbraid.lowering.convolutions import Convolutions, with_convolutions
from fedbraid.lowering.grown import Matrices, extent_of, grow
from fedbraid.lowering.precision import Precision, with_precision
from fedbraid.simulation.arrival import Arrival, everyone
from fedbraid.simulation.devices import AXIS, replicated
from fedbraid.simulation.plan import Plan, Slots

__all__ = ["Engine", "make_engine"]

PyTree = Any


class Tally(NamedTuple):
    """What the clients of an exchange leave behind; sums over clients, except ``combined`` of a gather reducer."""

    combined: PyTree
    weight: Any
    count: Any
    refused: Any  # uploads that came but were not admitted (not finite)
    metrics: dict[str, Any]


class Outcome(NamedTuple):
    """One client's part in a tally, and its next state."""

    tally: Tally
    state: PyTree


def _select(condition: Any, a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(partial(jnp.where, condition), a, b)


def _add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, a, b)


def _settle(
    exchange: Exchange, arrival: Arrival, key: Any, data: ClientData, state: PyTree, client: Any, report: Report
) -> Outcome:
    """What becomes of a report: it counts, and the state commits, only if the upload arrived and was admitted."""
    steps = exchange.client.count(data.size) if isinstance(exchange.client, LocalWork) else jnp.int32(1)
    arrived = arrival(address.arrival_key(key, client), steps)
    taken = arrived & exchange.admit(report.up)
    weight = jnp.where(taken, report.weight, 0).astype(jnp.result_type(float))
    lifted = exchange.reducer.lift(report.up, weight)
    tally = Tally(
        # a refused upload may hold NaN, and NaN times weight 0 is NaN
        _select(taken, lifted, jax.tree.map(jnp.zeros_like, lifted)),
        weight,
        taken.astype(jnp.int32),
        (arrived & ~taken).astype(jnp.int32),
        {name: jnp.where(taken, value * weight, 0) for name, value in report.metrics.items()},
    )
    return Outcome(tally, _select(taken, report.state, state))


def _nothing(shapes: Tally, gather: bool, many: int) -> Tally:
    """The tally before the first client; a gather reducer keeps a row for each of ``many`` slots."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    if not gather:
        return zeros
    wide = partial(jax.tree.map, lambda leaf: jnp.zeros((many, *leaf.shape), leaf.dtype))
    return zeros._replace(combined=wide(zeros.combined), weight=wide(zeros.weight))


def _gain(total: Tally, one: Tally, slot: Any, gather: bool) -> Tally:
    """The tally with one more client."""
    if not gather:
        return _add(total, one)
    put = partial(jax.tree.map, lambda all_, new: all_.at[slot].set(new))
    return Tally(put(total.combined, one.combined), put(total.weight, one.weight), *_add(total[2:], one[2:]))


def _gain_many(total: Tally, few: Tally, slot: Any, real: Any, gather: bool) -> Tally:
    """The tally with some more clients, those that are ``real``; slots beyond the last are nobody's."""
    if gather:
        put = partial(jax.tree.map, lambda all_, new: all_.at[slot].set(new, mode="drop"))
        kept = put(total.combined, few.combined), put(total.weight, few.weight)
        return Tally(*kept, *_add(total[2:], _total(_only(real, few[2:]))))
    return _add(total, _total(_only(real, few)))


def _only(real: Any, tree: PyTree) -> PyTree:
    """Rows that are real, and zeros in the place of others."""
    return jax.tree.map(lambda leaf: jnp.where(real.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0), tree)


FEW = 16  # rows that a GPU sums at the speed of its memory; of many more it makes another, slower kernel


def _total(tree: PyTree) -> PyTree:
    """Sums over rows; counts stay the integers that they are."""

    def total(leaf: Any) -> Any:
        if len(leaf) < 2 * FEW:
            return leaf.sum(0, dtype=leaf.dtype)
        whole = len(leaf) // FEW * FEW
        groups = leaf[:whole].reshape(-1, FEW, *leaf.shape[1:]).sum(1, dtype=leaf.dtype)
        # without the barrier the compiler makes one sum of both again
        return total(jnp.concatenate([jax.lax.optimization_barrier(groups), leaf[whole:]]))

    return jax.tree.map(total, tree)


def _sequential(run: Callable, gather: bool, slots: Slots, states: PyTree) -> tuple[Tally, PyTree]:
    """One client after the other; the number of clients and of each client's steps are dynamic."""
    shapes = jax.eval_shape(run, 0, jax.tree.map(lambda leaf: leaf[0], states))

    def body(j: Any, carry: tuple[Tally, PyTree]) -> tuple[Tally, PyTree]:
        total, states = carry
        outcome = run(j, jax.tree.map(lambda leaf: leaf[j], states))
        states = jax.tree.map(lambda all_, new: all_.at[j].set(new), states, outcome.state)
        return _gain(total, outcome.tally, j, gather), states

    return jax.lax.fori_loop(0, slots.live[0], body, (_nothing(shapes.tally, gather, len(slots.ids)), states))


def _chunks(run: Callable, gather: bool, chunk: int, slots: Slots, states: PyTree) -> tuple[Tally, PyTree]:
    """Vmapped chunks, one after the other. Empty slots run a client of one example whose outcome is thrown away."""
    many = len(slots.ids)
    cut = partial(jax.tree.map, lambda leaf: leaf.reshape(many // chunk, chunk, *leaf.shape[1:]))
    live = (jnp.arange(many, dtype=slots.live.dtype) < slots.live[0]).reshape(many // chunk, chunk)

    def one_chunk(carry: None, xs: Any) -> tuple[None, Any]:
        slot, state, used = xs
        outcome = jax.vmap(run)(slot, state)

        tally = _only(used, outcome.tally)
        if gather:
            return carry, (Tally(tally.combined, tally.weight, *map(_total, tally[2:])), outcome.state)
        return carry, (_total(tally), outcome.state)

    _, (tallies, states) = jax.lax.scan(one_chunk, None, (cut(jnp.arange(many)), cut(states), live))
    flat = partial(jax.tree.map, lambda leaf: leaf.reshape(many, *leaf.shape[2:]))
    if gather:
        return Tally(flat(tallies.combined), flat(tallies.weight), *map(_total, tallies[2:])), flat(states)
    return _total(tallies), flat(states)


class _Bench(NamedTuple):
    """What every client of an exchange works with on one device."""

    exchange: Exchange
    arrival: Arrival
    down: PyTree
    key: Any
    arrays: PyTree
    cap: int
    alike: int = 0  # these two as in a plan
    usual: int = 0
    matrices: Matrices = "auto"

    def data(self, slots: Slots, slot: Any) -> ClientData:
        return ClientData(self.arrays, slots.offset[slot], slots.size[slot], self.cap)

    def settle(self, slots: Slots, slot: Any, state: PyTree, report: Report) -> Outcome:
        data = self.data(slots, slot)
        return _settle(self.exchange, self.arrival, self.key, data, state, slots.ids[slot], report)


def _lanes(bench: _Bench, work: LocalWork, gather: bool, slots: Slots, states: PyTree) -> tuple[Tally, PyTree]:
    """Lanes of clients in step: from one ending of the timetable to the next, every tick a step on all lanes.

    Folds run one after the other over the whole cohort. The results of all but the last are kept, one per client; the
    last one's are reduced as they come, so a single fold needs the memory of its lanes, not of the cohort.
    """
    kept: tuple = ()
    for index in range(len(work.folds) - 1):
        kept = (*kept, _fold_on_lanes(bench, work, index, kept, gather, slots, states)[0])
    return _fold_on_lanes(bench, work, len(work.folds) - 1, kept, gather, slots, states)


def _fold_on_lanes(
    bench: _Bench, work: LocalWork, index: int, kept: tuple, gather: bool, slots: Slots, states: PyTree
) -> tuple[PyTree, PyTree]:
    """One fold of the cohort: its results by slot, or for the last fold the tally; and the states."""
    fold, table, last = work.folds[index], slots.lanes[index], index == len(work.folds) - 1
    # A number of ticks that the compiler knows spares the host a look after each.
    ticks = int(fold.batches.count(np.int64(bench.alike))) if bench.alike else None

    def at(tree: PyTree, i: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[i], tree)

    def put(tree: PyTree, i: Any, new: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, value: leaf.at[i].set(value, mode="drop"), tree, new)

    def work_key(slot: Any) -> Any:
        return address.client_key(bench.key, slots.ids[slot])

    def begin(states: PyTree, slot: Any) -> PyTree:
        return fold.begin(bench.down, at(states, slot), work.fold_key(work_key(slot), index))

    def advance(slot: Any, k: Any, carry: PyTree) -> PyTree:
        key = work.fold_key(work_key(slot), index)
        return fold.advance(carry, k, bench.down, bench.data(slots, slot), key)

    def result(states: PyTree, slot: Any, carry: PyTree) -> Any:
        return fold.end(carry, bench.down, at(states, slot), bench.data(slots, slot))

    def outcome(states: PyTree, slot: Any, carry: PyTree) -> Outcome:
        results = (*(at(each, slot) for each in kept), result(states, slot, carry))
        report = work.report(results, bench.down, at(states, slot), work_key(slot))
        return bench.settle(slots, slot, at(states, slot), report)

    def tick(_: Any, lanes: tuple) -> tuple:
        slot, k, rest, rows = lanes
        return slot, k + 1, *jax.vmap(growth.step)(slot, k, rest, rows)

    def start(states: PyTree, slot: Any) -> Any:
        return growth.rest(begin(states, slot))

    def ending(e: Any, everything: tuple) -> tuple:
        lanes, states, gained = everything
        lane, slot, following = table.lane[e], table.slot[e], table.next[e]
        running, k, rest, rows = jax.lax.fori_loop(0, table.wait[e] if ticks is None else ticks, tick, lanes)
        fresh = jax.vmap(partial(start, states))(following), jnp.zeros_like(lane)
        if ticks is None:
            where = jnp.minimum(lane, len(running) - 1)  # where fewer end together, some are read twice
            ended = at(rest, where), growth.matrices_on(rows, where, k[where])
            lanes = put(running, lane, following), put(k, lane, fresh[1]), put(rest, lane, fresh[0]), rows
        else:  # all lanes, in order
            ended, lanes = (rest, growth.matrices(rows)), (following, fresh[1], fresh[0], rows)
        ended = jax.vmap(growth.carry)(*ended)
        real, known = slot < many, jnp.minimum(slot, many - 1)
        if last:
            few = jax.vmap(partial(outcome, states))(known, ended)
            states, gained = put(states, slot, few.state), _gain_many(gained, few.tally, slot, real, gather)
        else:
            gained = put(gained, slot, jax.vmap(partial(result, states))(known, ended))
        return lanes, states, gained

    many, width = len(slots.ids), len(table.first)
    slot, k = table.first[0], jnp.int32(0)
    extent = extent_of(fold, bench.alike or bench.cap, bench.usual, width)
    growth = grow(partial(begin, states), advance, (slot, k), extent, bench.matrices)
    lanes = (
        table.first,
        jnp.zeros_like(table.first),
        jax.vmap(partial(start, states))(table.first),
        growth.empty(width),
    )
    example = (states, slot, jax.eval_shape(begin, states, slot))
    if last:
        nothing = _nothing(jax.eval_shape(outcome, *example).tally, gather, many)
    else:
        shapes = jax.eval_shape(result, *example)
        nothing = jax.tree.map(lambda s: jnp.zeros((many, *s.shape), s.dtype), shapes)
    _, states, gained = jax.lax.fori_loop(0, table.events[0], ending, (lanes, states, nothing))
    return gained, states


class Engine(NamedTuple):
    """Compiled programs of one algorithm on one mesh under one plan."""

    rounds: (
        Callable  # (server, states, arrays, slots, first round, number of rounds, seed key) -> (server, states, log)
    )
    exchange: Callable  # (index, server, cohort states, arrays, slots, round, seed key) -> (server, states, row)


def make_engine(
    alg: Algorithm,
    plan: Plan,
    mesh: Mesh,
    *,
    cap: int,
    population: int,
    arrival: Arrival = everyone,
    local: bool,
    convolutions: Convolutions = "fast",
    precision: Precision = "default",
    matrices: Matrices = "auto",
) -> Engine:
    """Programs for ``alg``.

    ``local`` says that each device holds its own cohort's arrays (streamed data); else all hold all examples.
    """
    alg = with_convolutions(with_precision(alg, precision), convolutions)

    def run_exchange(
        index: int, server: PyTree, states: PyTree, arrays: PyTree, slots: Slots, round_: Any, seed_key: Any
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        exchange = alg.exchanges[index]
        key = address.exchange_key(seed_key, round_, index)
        gather = exchange.reducer.gather

        def on_device(down: PyTree, arrays: PyTree, slots: Slots, states: PyTree, key: Any) -> tuple[Tally, PyTree]:
            bench = _Bench(exchange, arrival, down, key, arrays, cap, plan.alike, plan.usual, matrices)

            def run(slot: Any, state: PyTree) -> Outcome:
                work_key = address.client_key(key, slots.ids[slot])
                report = exchange.client(down, state, bench.data(slots, slot), work_key)
                return bench.settle(slots, slot, state, report)

            if plan.kind == "sequential":
                tally, states = _sequential(run, gather, slots, states)
            elif plan.kind == "lanes" and isinstance(exchange.client, LocalWork):
                tally, states = _lanes(bench, exchange.client, gather, slots, states)
            else:
                tally, states = _chunks(run, gather, plan.chunk, slots, states)
            if plan.devices > 1:
                summed = tally[2:] if gather else tally
                summed = jax.lax.psum(summed, AXIS)
                tally = Tally(tally.combined, tally.weight, *summed) if gather else Tally(*summed)
            return tally, states

        spread = on_device
        if plan.devices > 1:
            one, many = P(), P(AXIS)
            each: Any = many if gather else one
            tally_spec = Tally(each, each, one, one, cast(Any, one))
            spread = jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=(one, many if local else one, many, many, one),
                out_specs=(tally_spec, many),
                check_vma=False,
            )
        tally, states = spread(exchange.send(server), arrays, slots, states, key)
        up = exchange.reducer.finish(tally.combined, tally.weight, tally.count)
        weight = jnp.sum(tally.weight)
        # as floats: int32 over int32 would be float32, and with it every invariant kept by |S|/N
        count, all_clients = (jnp.asarray(n, jnp.result_type(float)) for n in (tally.count, population))
        received = exchange.receive(server, Aggregate(up, weight, count, all_clients), address.server_key(key))
        # with no upload at all there is nothing to take in: momentum must not move the model either
        server = _select(tally.count > 0, received, server)
        row = {f"{exchange.name}/{k}": v / jnp.where(weight > 0, weight, jnp.nan) for k, v in tally.metrics.items()}
        row |= {f"{exchange.name}/arrived": tally.count, f"{exchange.name}/refused": tally.refused}
        return server, states, row

    def one_round(server: PyTree, states: PyTree, arrays: PyTree, slots: tuple, round_: Any, seed_key: Any):
        row: dict[str, Any] = {}
        for index in range(len(alg.exchanges)):
            ids = slots[index].ids
            cohort = jax.tree.map(lambda leaf, ids=ids: leaf.at[ids].get(mode="clip"), states)
            server, cohort, new = run_exchange(index, server, cohort, arrays[index], slots[index], round_, seed_key)
            states = jax.tree.map(lambda leaf, new, ids=ids: leaf.at[ids].set(new, mode="drop"), states, cohort)
            row |= new
        return server, states, row

    # every host must be able to read what comes out; on one host the compiler may leave it where it is
    everywhere = {"out_shardings": replicated(mesh)} if mesh.is_multi_process else {}

    @partial(jax.jit, **everywhere)
    def rounds(server, states, arrays, slots, first, number, seed_key):
        def at(i: Any) -> tuple:
            return jax.tree.map(lambda leaf: leaf[i], slots)

        length = len(slots[0].ids)
        shapes = jax.eval_shape(one_round, server, states, arrays, at(0), first, seed_key)[2]
        log = {name: jnp.zeros((length, *s.shape), s.dtype) for name, s in shapes.items()}

        def body(i: Any, carry: tuple) -> tuple:
            server, states, log = carry
            server, states, row = one_round(server, states, arrays, at(i), first + i, seed_key)
            return server, states, {name: log[name].at[i].set(value) for name, value in row.items()}

        return jax.lax.fori_loop(0, number, body, (server, states, log))

    exchange = partial(jax.jit, static_argnums=(0,), **everywhere)(run_exchange)
    return Engine(rounds, exchange)
