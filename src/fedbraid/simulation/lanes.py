"""The plan of lanes: clients run in parallel lanes. When a client ends, the next client starts in its lane.

The number of steps of every client is known before the round, so the host makes a timetable of when clients end
(:class:`fedbraid.simulation.plan.Timetable`). The compiled loop goes from one end to the next. Each tick of the inner
loop is one local step on all lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.local import Fold, LocalWork
from fedbraid.lowering import extent_of, grow
from fedbraid.simulation.packing import Packing
from fedbraid.simulation.plan import Plan, Timetable
from fedbraid.simulation.tally import ClientResult, SharedInputs, Tally, add_clients, gather_clients, zero_tally

__all__ = ["run_on_lanes"]

PyTree = Any
FEW = 1 << 24  # bytes of a leaf on all lanes that is written whole when clients start


def run_on_lanes(shared: SharedInputs, plan: Plan, matrices: Any, states: PyTree) -> tuple[Tally, PyTree]:
    """All clients of an exchange on one device: their tally and their next states.

    Folds run one after the other over the whole cohort. The results of all folds but the last are kept, one per
    client. The results of the last fold are summed at once, so a single fold needs memory for its lanes only.
    """
    work = cast(LocalWork, shared.exchange.client)
    kept: tuple = ()
    for index in range(len(work.folds) - 1):
        kept = (*kept, _LaneFold(shared, plan, matrices, index, kept).run(states)[0])
    return _LaneFold(shared, plan, matrices, len(work.folds) - 1, kept).run(states)


def _at(tree: PyTree, i: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[i], tree)


def _put(tree: PyTree, i: Any, new: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, value: leaf.at[i].set(value, mode="drop"), tree, new)


def _replace(lanes: PyTree, lane: Any, new: PyTree) -> PyTree:
    """The lanes with new values on some of them. Small leaves are written whole, which is one kernel for each.

    Writing some rows in place takes two: XLA copies the array that the loop over steps returns, because it changes.
    """
    width = len(jax.tree.leaves(lanes)[0])
    same = lane[None, :] == jnp.arange(width, dtype=lane.dtype)[:, None]
    starts, source = same.any(1), same.argmax(1)

    def one(leaf: Any, values: Any) -> Any:
        if leaf.size * leaf.dtype.itemsize > FEW or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf.at[lane].set(values, mode="drop")
        return jnp.where(starts.reshape(-1, *[1] * (leaf.ndim - 1)), values[source], leaf)

    return jax.tree.map(one, lanes, new)


@dataclass(frozen=True, eq=False)
class _LaneFold:
    """One fold of all clients of a device; ``kept`` holds the results of the folds before it."""

    shared: SharedInputs
    plan: Plan
    matrices: Any
    index: int
    kept: tuple

    @property
    def work(self) -> LocalWork:
        return cast(LocalWork, self.shared.exchange.client)

    @property
    def fold(self) -> Fold:
        return self.work.folds[self.index]

    @property
    def table(self) -> Timetable:
        return self.shared.slots.lanes[self.index]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.work.folds) - 1

    @property
    def gather(self) -> bool:
        return self.shared.exchange.reducer.kind == "gather"

    # -- one client, by its slot

    def fold_key(self, slot: Any) -> Any:
        return self.work.fold_key(self.shared.client_key(slot), self.index)

    def begin(self, down: PyTree, states: PyTree, slot: Any) -> PyTree:
        return self.fold.begin(down, _at(states, slot), self.fold_key(slot))

    def advance(self, slot: Any, k: Any, carry: PyTree) -> PyTree:
        return self.fold.advance(carry, k, self.shared.down, self.shared.data(slot), self.fold_key(slot))

    def result(self, states: PyTree, slot: Any, carry: PyTree) -> Any:
        return self.fold.end(carry, self.shared.down, _at(states, slot), self.shared.data(slot))

    def report(self, states: PyTree, slot: Any, carry: PyTree) -> ClientResult:
        results = (*(_at(each, slot) for each in self.kept), self.result(states, slot, carry))
        state, key = _at(states, slot), self.shared.client_key(slot)
        return self.shared.judge(slot, state, self.work.report(results, self.shared.down, state, key))

    # -- all clients

    def run(self, states: PyTree) -> tuple[PyTree, PyTree]:
        """The results by slot, or for the last fold the tally; and the clients' states."""
        table, many = self.table, len(self.shared.slots.ids)
        width, slot = len(table.first), table.first[0]
        # With a static number of ticks the device does not synchronise with the host after each tick.
        ticks = int(self.fold.batches.count(np.int64(self.plan.alike))) if self.plan.alike else None
        extent = extent_of(self.fold, self.plan.alike or self.shared.cap, self.plan.usual, width)
        # Clients start from this copy of the shared model. Without the barrier XLA repeats the shared model for all
        # clients once, for their start and for their end, where it is subtracted. It then keeps the repeated models
        # during the round, and reads them instead of the shared one.
        down = jax.lax.optimization_barrier(self.shared.down)
        growth = grow(partial(self.begin, down, states), self.advance, (slot, jnp.int32(0)), extent, self.matrices)

        def start(states: PyTree, slot: Any) -> Any:
            return growth.rest(self.begin(down, states, slot))

        def tick(_: Any, lanes: tuple) -> tuple:
            slot, k, rest, rows = lanes
            return slot, k + 1, *jax.vmap(growth.step)(slot, k, rest, rows)

        def ending(e: Any, everything: tuple) -> tuple:
            lanes, states, gained = everything
            lane, slot, following = table.lane[e], table.slot[e], table.next[e]
            running, k, rest, rows = jax.lax.fori_loop(0, table.wait[e] if ticks is None else ticks, tick, lanes)
            fresh = jax.vmap(partial(start, states))(following), jnp.zeros_like(lane)
            if ticks is None:
                where = jnp.minimum(lane, len(running) - 1)  # padding reads the last lane again, after no step
                ended = _at(rest, where), growth.matrices_on(rows, where, jnp.where(lane == where, k[where], 0))
                lanes = *_replace((running, k, rest), lane, (following, fresh[1], fresh[0])), rows
            else:  # all lanes end at once, in order
                ended, lanes = (rest, growth.matrices(rows)), (following, fresh[1], fresh[0], rows)
            return lanes, *self.take(states, gained, slot, jax.vmap(growth.carry)(*ended), packing)

        lanes = (
            table.first,
            jnp.zeros_like(table.first),
            jax.vmap(partial(start, states))(table.first),
            growth.empty(width),
        )
        nothing, packing = self.nothing(states, slot, many)
        if ticks is not None and many <= width:  # one event: no client waits, so no model is copied for a next one
            _, _, rest, rows = jax.lax.fori_loop(0, ticks, tick, lanes)
            ended = jax.vmap(growth.carry)(rest, growth.matrices(rows))
            states, gained = self.take(states, nothing, table.slot[0], ended, packing)
        else:
            _, states, gained = jax.lax.fori_loop(0, table.events[0], ending, (lanes, states, nothing))
        return gained if packing is None else packing.unpack(gained), states

    def take(
        self, states: PyTree, gained: PyTree, slot: Any, ended: PyTree, packing: Packing | None
    ) -> tuple[PyTree, PyTree]:
        """Add the states and results of the clients that ended. Slots past the last one are padding and dropped."""
        many = len(self.shared.slots.ids)
        real, known = slot < many, jnp.minimum(slot, many - 1)
        if not self.is_last:
            return states, _put(gained, slot, jax.vmap(partial(self.result, states))(known, ended))
        few = jax.vmap(partial(self.report, states))(known, ended)
        if packing is None:
            gained = gather_clients(gained, few.tally, slot, real)
        else:
            gained = add_clients(gained, packing.pack(few.tally), real)
        return _put(states, slot, few.state), gained

    def nothing(self, states: PyTree, slot: Any, many: int) -> tuple[PyTree, Packing | None]:
        """The initial results, before any client has ended, and how they are packed."""
        example = (states, slot, jax.eval_shape(self.begin, self.shared.down, states, slot))
        if self.is_last:
            zero = zero_tally(jax.eval_shape(self.report, *example).tally, self.gather, many)
            packing = None if self.gather else Packing(zero)
            return (zero if packing is None else packing.pack(zero)), packing
        shapes = jax.eval_shape(self.result, *example)
        return jax.tree.map(lambda s: jnp.zeros((many, *s.shape), s.dtype), shapes), None
