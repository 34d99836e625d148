"""Compiled rounds: whole rounds of a federated algorithm as one program.

The program runs a dynamic number of rounds in one call. So it compiles once for all evaluation and checkpoint
intervals, and its results do not depend on them. Clients are spread over the devices of a mesh by ``shard_map``.
On each device a plan (see :mod:`fedbraid.simulation.plan`) runs them in sequence, in vmapped chunks or on lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedbraid import address
from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData
from fedbraid.local import LocalWork
from fedbraid.lowering import captured, lower
from fedbraid.simulation.arrival import Arrival, everyone
from fedbraid.simulation.asynchrony import Versions
from fedbraid.simulation.devices import AXIS, replicated
from fedbraid.simulation.lanes import run_on_lanes
from fedbraid.simulation.model_axis import divided, has_model_axis, model_sharding, over_model
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.plan import Plan, Slots
from fedbraid.simulation.tally import SharedInputs, Sizes, Tally, add_client, only, server_step, total, zero_tally
from fedbraid.simulation.timeline import Timing

__all__ = ["Program", "Task", "compile_rounds"]

PyTree = Any


@dataclass(frozen=True, eq=False)
class Task:
    """What a program computes: an algorithm on data, with an arrival model, and simulated time if there is a clock."""

    algorithm: Algorithm
    data: FederatedData
    arrival: Arrival = everyone
    timing: Timing | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether clients may work on an older model than the server's: programs then carry `Versions`."""
        return self.timing is not None and self.timing.asynchrony.is_asynchronous


class Program(NamedTuple):
    """Compiled rounds of one task under one plan. If several points run together, they are the first axis of arrays.

    The server of an asynchronous task is a `Versions`.
    """

    rounds: Callable
    # (server, states, arrays, slots, first round, number of rounds, seed key) -> (server, states, log)
    exchange: Callable  # (index, server, cohort states, arrays, slots, round, seed key) -> (server, states, row)


def compile_rounds(task: Task, plan: Plan, mesh: Mesh, options: EngineOptions, *, local: bool) -> Program:
    """The program of a task. It compiles when it is first called.

    local: each device holds only the examples of its own clients (streamed data); else every device holds all.
    """
    alg = lower(task.algorithm, options)
    lowered = replace(task, algorithm=over_model(alg, mesh) if has_model_axis(mesh) else alg)
    rounds = _Rounds(lowered, plan, mesh, options, local)
    # with several hosts every host must be able to read the results; on one host the compiler chooses the sharding
    everywhere = {"out_shardings": replicated(mesh)} if mesh.is_multi_process else {}
    where = partial(model_sharding, mesh) if has_model_axis(mesh) else replicated(mesh)
    compiled = partial(captured.jit, sharding=where if mesh.devices.size > 1 else None, **everywhere)
    return Program(
        compiled(rounds.many, **plan.compiler), compiled(rounds.exchange, static_argnums=(0,), **plan.compiler)
    )


@dataclass(frozen=True, eq=False)
class _Rounds:
    """The functions that a program compiles."""

    task: Task
    plan: Plan
    mesh: Mesh
    options: EngineOptions
    local: bool

    def many(self, server, states, arrays, slots, first, number, seed_key):
        """``number`` rounds, starting with round ``first``; ``slots`` has at least ``number`` rounds."""

        def at(i: Any) -> tuple:
            return jax.tree.map(lambda leaf: leaf[i], slots)

        one = captured.inlined(self.one)  # for the shapes and for the loop
        length = len(slots[0].ids)
        shapes = jax.eval_shape(one, server, states, arrays, at(0), first, seed_key)[2]
        log = {name: jnp.zeros((length, *s.shape), s.dtype) for name, s in shapes.items()}

        def body(i: Any, carry: tuple) -> tuple:
            server, states, log = carry
            server, states, row = one(server, states, arrays, at(i), first + i, seed_key)
            return server, states, {name: log[name].at[i].set(value) for name, value in row.items()}

        return jax.lax.fori_loop(0, number, body, (server, states, log))

    def one(self, server: PyTree, states: PyTree, arrays: PyTree, slots: tuple, round_: Any, seed_key: Any) -> tuple:
        """One round: every exchange in turn. ``states`` are those of the whole population."""
        row: dict[str, Any] = {}
        for index in range(len(self.task.algorithm.exchanges)):
            ids = slots[index].ids
            cohort = jax.tree.map(lambda leaf, ids=ids: leaf.at[ids].get(mode="clip"), states)
            server, cohort, new = self.exchange(index, server, cohort, arrays[index], slots[index], round_, seed_key)
            states = jax.tree.map(lambda leaf, new, ids=ids: leaf.at[ids].set(new, mode="drop"), states, cohort)
            row |= new
        return server, states, row

    def exchange(
        self, index: int, server: PyTree, states: PyTree, arrays: PyTree, slots: Slots, round_: Any, seed_key: Any
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """One exchange. ``states`` are those of the cohort, by slot."""
        exchange, past = self.task.algorithm.exchanges[index], None
        key = address.exchange_key(seed_key, round_, index)
        down = exchange.send(server.server if isinstance(server, Versions) else server)
        if isinstance(server, Versions):
            place = slots.jobs.store[0]
            past = jax.tree.map(lambda all_, new: all_.at[place].set(new), server.past, down)
            server = server.server
        spread = partial(self.on_device, index)
        if has_model_axis(self.mesh):
            slots = self.in_all_blocks(slots, arrays)
        elif self.plan.devices > 1:
            one, many = P(), P(AXIS)
            each: Any = many if exchange.reducer.kind == "gather" else one
            spread = jax.shard_map(
                spread,
                mesh=self.mesh,
                in_specs=((one, one), many if self.local else one, many, many, one, one),
                out_specs=(Tally(each, each, one, one, cast(Any, one)), many),
                check_vma=False,
            )
        tally, states = spread((down, past), arrays, slots, states, key, seed_key)
        weight, sizes = jnp.sum(tally.weight), Sizes(self.task.data.train.num_clients, self.plan.cohort)
        server, logs = server_step(exchange, server, tally[:3], sizes, key, address.server_noise(key))
        if has_model_axis(self.mesh):
            server, states = divided(self.mesh, server), divided(self.mesh, states, 1)
        row = {f"{exchange.name}/{k}": v / jnp.where(weight > 0, weight, jnp.nan) for k, v in tally.metrics.items()}
        row |= {f"{exchange.name}/{name}": value for name, value in logs.items()}
        row |= {f"{exchange.name}/arrived": tally.count, f"{exchange.name}/refused": tally.refused}
        return server if past is None else Versions(server, past), states, row

    def in_all_blocks(self, slots: Slots, arrays: PyTree) -> Slots:
        """Slots for a program that sees the examples of all groups of devices: offsets count from the first block."""
        if not self.local:
            return slots
        groups, rows = self.plan.devices, len(jax.tree.leaves(arrays)[0])
        group = jnp.arange(len(slots.ids), dtype=slots.offset.dtype) // (len(slots.ids) // groups)
        return slots._replace(offset=slots.offset + group * (rows // groups))

    def on_device(
        self, index: int, downs: tuple, arrays: PyTree, slots: Slots, states: PyTree, key: Any, seed_key: Any
    ) -> tuple[Tally, PyTree]:
        """Run the clients of one device by the plan, and sum their tally over the devices.

        With models over several devices this is one program for all of them, and nothing is left to sum.

        downs: the message of the current model, and of an asynchronous task those of past models, by place.
        """
        exchange, plan = self.task.algorithm.exchanges[index], self.plan
        cap = int(self.task.data.train.sizes.max())
        preprocess = self.task.data.preprocess
        down, past = downs
        shared = SharedInputs(exchange, self.task.arrival, down, key, seed_key, arrays, cap, preprocess, slots, past)
        if self.task.timing is not None:
            shared = shared._replace(asynchrony=self.task.timing.asynchrony)
        gather = exchange.reducer.kind == "gather"
        if plan.kind == "sequential":
            tally, states = _sequential(shared, gather, states)
        elif plan.kind == "lanes" and isinstance(exchange.client, LocalWork):
            tally, states = run_on_lanes(shared, plan, self.options.matrices, states)
        else:
            groups = plan.devices if has_model_axis(self.mesh) else 1
            tally, states = _chunks(shared, gather, plan.chunk, states, groups)
        if plan.devices > 1 and not has_model_axis(self.mesh):
            summed = jax.lax.psum(tally[2:] if gather else tally, AXIS)
            tally = Tally(tally.combined, tally.weight, *summed) if gather else Tally(*summed)
        return tally, states


def _sequential(shared: SharedInputs, gather: bool, states: PyTree) -> tuple[Tally, PyTree]:
    """One client after the other. The number of clients and of each client's steps are dynamic."""
    run = captured.inlined(shared.run)  # for the shapes and for the loop
    shapes = jax.eval_shape(run, 0, jax.tree.map(lambda leaf: leaf[0], states))

    def body(j: Any, carry: tuple[Tally, PyTree]) -> tuple[Tally, PyTree]:
        tally, states = carry
        result = run(j, jax.tree.map(lambda leaf: leaf[j], states))
        states = jax.tree.map(lambda all_, new: all_.at[j].set(new), states, result.state)
        return add_client(tally, result.tally, j, gather), states

    empty = zero_tally(shapes.tally, gather, len(shared.slots.ids))
    return jax.lax.fori_loop(0, shared.slots.live[0], body, (empty, states))


def _chunks(shared: SharedInputs, gather: bool, chunk: int, states: PyTree, groups: int = 1) -> tuple[Tally, PyTree]:
    """Vmapped chunks, one after the other. An empty slot runs a client of one example; its result is masked.

    groups: number of groups of devices that this program runs on, each with slots of its own; see `model_axis`.
    """
    each = len(shared.slots.ids) // groups
    run = jax.vmap(shared.run) if groups == 1 else jax.vmap(shared.run, spmd_axis_name=AXIS)

    def cut(leaf: Any) -> Any:  # [chunks, groups * chunk, ...]
        leaf = leaf.reshape(groups, each // chunk, chunk, *leaf.shape[1:])
        return jnp.swapaxes(leaf, 0, 1).reshape(each // chunk, groups * chunk, *leaf.shape[3:])

    def flat(leaf: Any) -> Any:  # in the order of the slots
        leaf = leaf.reshape(each // chunk, groups, chunk, *leaf.shape[2:])
        return jnp.swapaxes(leaf, 0, 1).reshape(groups * each, *leaf.shape[3:])

    live = jnp.arange(each, dtype=shared.slots.live.dtype) < shared.slots.live[:groups, None]

    def one_chunk(carry: None, xs: Any) -> tuple[None, Any]:
        slot, state, used = xs
        result = run(slot, state)
        tally = only(used, result.tally)
        if gather:
            return carry, (Tally(tally.combined, tally.weight, *map(total, tally[2:])), result.state)
        return carry, (total(tally), result.state)

    inputs = cut(jnp.arange(groups * each)), jax.tree.map(cut, states), cut(live.reshape(-1))
    _, (tallies, states) = jax.lax.scan(one_chunk, None, inputs)
    states = jax.tree.map(flat, states)
    if gather:
        combined, weight = jax.tree.map(flat, (tallies.combined, tallies.weight))
        return Tally(combined, weight, *map(total, tallies[2:])), states
    return total(tallies), states
