"""``simulate``: a federated run on this machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedbraid.core import Algorithm, check_choice, check_count, is_traced
from fedbraid.costs import Cost, cost
from fedbraid.data.federated import FederatedData, Split
from fedbraid.lowering.convolutions import CONVOLUTIONS, Convolutions
from fedbraid.lowering.grown import MATRICES, Matrices
from fedbraid.lowering.precision import PRECISIONS, Precision
from fedbraid.lowering.rewrite import fast_convolutions
from fedbraid.notices import notice
from fedbraid.simulation import checkpoint, hosts, tune
from fedbraid.simulation.arrival import Arrival, everyone
from fedbraid.simulation.devices import client_mesh, free_memory, host_memory, place, replicated
from fedbraid.simulation.engine import Engine, make_engine
from fedbraid.simulation.evaluate import evaluator, summarize
from fedbraid.simulation.feed import Feed, Portion
from fedbraid.simulation.plan import Load, Plan, check_chunk, choose_plan
from fedbraid.simulation.states import HostStates

__all__ = ["Checkpoints", "Progress", "Result", "simulate"]

PyTree = Any
WINDOW = 64  # rounds in one compiled call at most
LOOK = 0.25  # seconds between two looks at a run that shows its progress
# Seconds in one compiled call, about: on several host devices XLA keeps some 200 bytes for every operation that was
# executed until the call returns, which are tens of megabytes a second.
CALL = 2.0


class Checkpoints(NamedTuple):
    """Where and how often a run is saved; ``resume`` goes on from the newest one there."""

    folder: Path
    every: int = 50
    resume: bool = False


class Progress(NamedTuple):
    """What a run tells while it runs: rounds done, the newest row of its history, and its bytes so far."""

    round: int
    row: dict[str, float]
    seconds: float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "server", "states", "history", "evaluations"],
    meta_fields=["info"],
)
@dataclass(frozen=True)
class Result:
    """A finished run. Under ``jax.vmap`` every array has the mapped axis in front.

    history: one entry per round; evaluations: one per evaluated round, with ``round`` among its columns.
    """

    params: PyTree
    server: PyTree
    states: PyTree
    history: dict[str, Any]
    evaluations: dict[str, Any]
    info: Info = field(compare=False)


@dataclass(frozen=True, eq=False)
class Info:
    """What the engine did, beside the results."""

    plan: Plan
    cost: Cost
    streamed: bool
    steps: int  # local steps done
    masked_share: float  # of all steps computed, those thrown away
    imbalance: float  # steps of the busiest device over the mean, averaged over rounds
    stopped_at: int  # rounds done; fewer than asked if the run was told to stop
    tuning: tune.Tuning | None = None  # how the plan was found, if neither by rule nor as asked


def simulate(
    alg: Algorithm,
    params: PyTree,
    data: FederatedData | Split,
    *,
    rounds: int,
    cohort: int | None = None,
    seed: int = 0,
    metrics: Callable | None = None,
    eval_every: int | None = None,
    arrival: Arrival = everyone,
    plan: Literal["auto", "sequential", "chunks", "lanes"] = "auto",
    chunk: int | Literal["auto", "tuned"] = "auto",
    devices: int | None = None,
    data_in: Literal["auto", "device", "host"] = "auto",
    states_in: Literal["auto", "device", "host"] | Path = "auto",
    convolutions: Convolutions = "fast",
    precision: Precision = "default",
    matrices: Matrices = "auto",
    checkpoints: Checkpoints | None = None,
    on_progress: Callable[[Progress], bool | None] | None = None,
) -> Result:
    """Run ``alg`` for ``rounds`` rounds with ``cohort`` clients each (default: all of them).

    metrics: ``(params, batch) -> {name: (sums, weights)}``, evaluated on ``data.test`` every ``eval_every`` rounds
        (default: at the end only) and after the last.
    plan, chunk, devices, data_in, states_in: how it is computed; the defaults fit the machine, the results do not
        depend on them (beyond rounding). ``states_in`` may be a folder. Where a device runs out of memory, the chunk
        is halved and the round run again. ``chunk="tuned"`` times candidates on the first rounds, once for a job on a
        machine, and remembers the fastest (see `fedbraid.simulation.tune`); "auto" takes what is remembered, else the
        plan by rule.
    convolutions: "fast" runs those of anyone's model as matrix products, "native" leaves them to XLA.
    precision: of the clients' matrix products on a GPU: "float32", "tf32" or "bfloat16" factors, summed in float32.
    matrices: "grown" keeps clients' weight matrices as the shared ones plus what their steps added, where the plan is
        lanes and their program allows it; "whole" never does; "auto" does where it is less memory traffic, on a GPU.
    on_progress: called now and then; returning True ends the run after a checkpoint.

    Hyper-parameters inside ``alg`` may be traced, so a sweep is a ``vmap``:

    >>> import jax, numpy as np, jax.numpy as jnp
    >>> from fedbraid import Split, fedavg, simulate
    >>> data = Split.from_clients([{"x": np.full((4, 1), c, np.float32)} for c in (1.0, 3.0)])
    >>> loss = lambda params, batch, key: 0.5 * jnp.mean((params - batch["x"]) ** 2)
    >>> run = lambda lr: simulate(fedavg(loss, client_lr=lr, batch_size=4), jnp.zeros(1), data, rounds=50).params
    >>> [round(float(x), 3) for x in jax.vmap(run)(jnp.array([0.1, 0.5]))[:, 0]]
    [1.99, 2.0]
    """
    federated = data if isinstance(data, FederatedData) else FederatedData(data)
    federated.check()
    split = federated.train
    check_count("rounds", rounds)
    size = split.num_clients if cohort is None else check_count("cohort", cohort)
    if size > split.num_clients:
        raise ValueError(f"cohort must be at most the population of {split.num_clients} clients, got {size}")
    if eval_every is not None:
        check_count("eval_every", eval_every)
    check_choice("plan", plan, ("auto", "sequential", "chunks", "lanes"))
    check_chunk(chunk)
    check_choice("data_in", data_in, ("auto", "device", "host"))
    check_choice("convolutions", convolutions, CONVOLUTIONS)
    check_choice("precision", precision, tuple(PRECISIONS))
    check_choice("matrices", matrices, MATRICES)
    traffic = cost(alg, params, split)  # checks the structure too, before anything compiles
    if jax.tree.leaves(jax.eval_shape(alg.init_client, params)) and rounds * size < split.num_clients:
        notice(
            f"clients keep state here, but {rounds} rounds of {size} reach a client of {split.num_clients} less than "
            "once: their state is hardly ever used; more rounds, a larger cohort or a stateless method fits better"
        )

    mesh = client_mesh(devices)
    base = choose_plan(alg, params, split, mesh, plan, "auto" if chunk == "tuned" else chunk, size)
    stream = streams(data_in, split, mesh)
    on_host, folder = states_on_host(alg, params, split.num_clients, states_in, mesh, checkpoints)
    feed = Feed(alg, base, mesh, split, seed=seed, window=min(WINDOW, rounds), stream=stream)
    cap, population = int(split.sizes.max()), split.num_clients
    engines: dict[Plan, Engine] = {}

    def program(plan: Plan) -> Engine:
        if plan in engines:
            return engines.pop(plan)
        return make_engine(
            alg,
            plan,
            mesh,
            cap=cap,
            population=population,
            arrival=arrival,
            local=stream,
            convolutions=convolutions,
            precision=precision,
            matrices=matrices,
        )

    most = min(rounds, tune.STREAMED if stream else WINDOW)

    def stage(plan: Plan) -> Callable[[int], None]:
        if not stream:
            feed.resident_arrays()  # once for all plans
        run = _Run(alg, feed.with_plan(plan), program, traffic, rounds, seed, None, None)
        engines[plan] = run.engine  # compiled once, for whoever runs it next
        run.start(params, on_host, None)
        run.feed.reserve(range(most))  # so that every rehearsal is one program
        return run.rehearse

    saved = _saved(checkpoints)
    tuning = None
    if isinstance(chunk, str) and plan != "sequential":
        kept = _kept_plan(saved, base, plan, chunk, mesh)
        job = tune.Job(
            alg, params, split, mesh, plan, size, stream, on_host, arrival, convolutions, precision, matrices
        )
        chosen, tuning = kept or tune.decide(chunk, base, job, stage, most)
        feed = feed.with_plan(chosen)
        for other in engines.keys() - {chosen}:
            del engines[other]
    run = _Run(alg, feed, program, traffic, rounds, seed, checkpoints, on_progress, tuning)
    if metrics is not None:
        if federated.test is None:
            raise ValueError("metrics were given, but the data has no test split to evaluate them on")
        run.evaluate = evaluator(fast_convolutions(metrics) if convolutions == "fast" else metrics, federated.test)
        run.eval_every = rounds if eval_every is None else eval_every
    run.start(params, on_host, folder, saved)
    del saved  # a copy of all states: not for the length of the run
    return run.go()


def streams(data_in: Literal["auto", "device", "host"], split: Split, mesh: Mesh) -> bool:
    """Whether examples stay with the host and travel round by round."""
    return data_in == "host" or (data_in == "auto" and not fits(split.nbytes, mesh))


def fits(wanted: int, mesh: Mesh) -> bool:
    device = mesh.local_devices[0]
    copies = len(mesh.local_devices) if device.platform == "cpu" else 1
    return wanted * copies <= 0.4 * hosts.least(free_memory(device))


def states_on_host(
    alg: Algorithm, params: PyTree, population: int, states_in: Any, mesh: Mesh, checkpoints: Checkpoints | None
) -> tuple[bool, Path | None]:
    """Whether client states are kept by the host, and in which folder (None: in its memory)."""
    state = jax.eval_shape(alg.init_client, params)
    bytes_each = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if isinstance(states_in, Path):
        return bytes_each > 0, states_in
    check_choice("states_in", states_in, ("auto", "device", "host"))
    if states_in != "auto":
        return states_in == "host" and bytes_each > 0, None
    if fits(bytes_each * population, mesh):
        return False, None
    too_many = bytes_each * population > 0.4 * hosts.least(host_memory())
    return True, checkpoints.folder.with_name("states") if too_many and checkpoints is not None else None


def _saved(checkpoints: Checkpoints | None) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint of a run that is to go on."""
    if checkpoints is None or not checkpoints.resume:
        return None
    saved = checkpoint.load(checkpoint.latest(checkpoints.folder))
    hosts.same(str(saved[0]), "checkpoints: they do not see the same run folder")
    return saved


def _kept_plan(
    saved: tuple[int, dict[str, Any]] | None, base: Plan, kind: str, chunk: str, mesh: Mesh
) -> tuple[Plan, tune.Tuning | None] | None:
    """The plan that a resumed run had, on the machine that it ran on: it ends with the same bits then."""
    if saved is None or saved[1].get("plan") is None:
        return None
    had = json.loads(bytes(np.asarray(saved[1]["plan"], np.uint8)))
    plan = base._replace(kind=had["kind"], chunk=had["chunk"])
    same = had["machine"] == tune.machine(mesh) and had["cohort"] == base.cohort and kind in ("auto", plan.kind)
    keep = same and (chunk == "auto" or had["tuned"])
    tuning = tune.Tuning("resumed") if had["tuned"] else None
    return (plan, tuning) if bool(hosts.agreed(np.array(keep))) else None


def _place(tree: PyTree, mesh: Mesh) -> PyTree:
    """On every device of the mesh; traced values stay where they are."""
    if any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        return tree
    return place(tree, replicated(mesh))


def _host(value: Any) -> Any:
    """A NumPy array, unless it is traced: history is kept by the host, where a new length compiles nothing."""
    return value if is_traced(value) else np.asarray(value)


def _wait(tree: PyTree) -> None:
    """Until it is computed, or has failed: what is dispatched may fail later. Traced values cannot be waited for."""
    if not any(is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        jax.block_until_ready(tree)


def _module(values: list[Any]) -> Any:
    return jnp if any(map(is_traced, values)) else np


def _join(logs: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: [log[name] for log in logs] for name in logs[0]} if logs else {}
    return {name: _module(parts).concatenate(parts) for name, parts in columns.items()}


def _stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: [_host(row[name]) for row in rows] for name in rows[0]} if rows else {}
    return {name: _module(parts).stack(parts) for name, parts in columns.items()}


class _Run:
    """The host's side of a run: portions in, history out, checkpoints on the way."""

    def __init__(
        self,
        alg: Algorithm,
        feed: Feed,
        program: Callable[[Plan], Engine],
        traffic: Cost,
        rounds: int,
        seed: int,
        checkpoints: Checkpoints | None,
        on_progress: Callable | None,
        tuning: tune.Tuning | None = None,
    ) -> None:
        self.alg, self.feed, self.program, self.traffic = alg, feed, program, traffic
        self.tuning = tuning
        self.engine = program(feed.plan)
        self.rounds, self.checkpoints, self.on_progress = rounds, checkpoints, on_progress
        key = jax.random.key(seed)
        self.seed_key = _place(key, feed.mesh) if hosts.several() else key
        self.evaluate: Callable | None = None
        self.eval_every: int | None = None
        self.done = 0
        self.logs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.steps = self.masked = 0
        self.imbalance = 0.0

    def start(
        self,
        params: PyTree,
        on_host: bool,
        path: Path | None,
        saved: tuple[int, dict[str, Any]] | None = None,
    ) -> None:
        alg, population = self.alg, self.feed.split.num_clients
        strong = partial(jax.tree.map, lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype))
        self.server = _place(strong(alg.init(params)), self.feed.mesh)
        first = strong(alg.init_client(params))  # everybody's, before a client is asked
        self.first = first
        self.host_states = HostStates(first, population, path) if on_host else None
        self.states: PyTree = ()
        if not on_host:
            wide = partial(jax.tree.map, lambda leaf: jnp.broadcast_to(leaf, (population, *leaf.shape)) + 0)
            self.states = _place(wide(first), self.feed.mesh)
        if saved is not None:
            self._restore(*saved)

    # -- checkpoints

    def _save(self) -> None:
        assert self.checkpoints is not None
        if not hosts.is_first():
            return
        states = self.host_states.export() if self.host_states else checkpoint.pack(hosts.local(self.states))
        tree = {
            "server": checkpoint.pack(hosts.local(self.server)),
            "states": states,
            "log": _join(self.logs),
            "evaluations": _stack(self.evaluations),
            "load": {"steps": self.steps, "masked": self.masked, "imbalance": self.imbalance},
            "plan": np.frombuffer(json.dumps(self._plan_record()).encode(), np.uint8),
        }
        checkpoint.save(self.checkpoints.folder, self.done, tree)

    def _plan_record(self) -> dict[str, Any]:
        plan = self.feed.plan
        tuned = self.tuning is not None
        about = {"kind": plan.kind, "chunk": plan.chunk, "cohort": plan.cohort, "tuned": tuned}
        return about | {"machine": tune.machine(self.feed.mesh)}

    def _restore(self, done: int, tree: dict[str, Any]) -> None:
        self.done = done
        self.server = _place(checkpoint.unpack(self.server, tree["server"] or {}, "server state"), self.feed.mesh)
        saved = tree["states"] or {}
        if self.host_states:
            if hosts.is_first():  # the others ask it for states
                self.host_states.restore(saved)
        else:  # where they were kept may have been another place, on another machine
            if "ids" in saved:
                states = HostStates(self.first, self.feed.split.num_clients).dense(saved)
            else:
                states = checkpoint.unpack(self.states, saved, "client states")
            self.states = _place(states, self.feed.mesh)
        self.logs = [tree["log"]] if tree["log"] else []
        rows = tree["evaluations"] or {}
        count = len(next(iter(rows.values()))) if rows else 0
        self.evaluations = [{name: column[i] for name, column in rows.items()} for i in range(count)]
        load = tree["load"]
        self.steps, self.masked, self.imbalance = int(load["steps"]), int(load["masked"]), float(load["imbalance"])

    # -- rounds

    def rehearse(self, number: int) -> None:
        """The first ``number`` rounds as they will be run, for the clock alone: what comes out is nobody's."""
        self.done, self.rounds, self.logs = 0, number, []
        with contextlib.closing(self._portions()) as portions:
            for portion in portions:
                self._advance(portion)

    def _until(self, round_: int) -> int:
        """The next round at which the host has something to do."""
        marks = [self.rounds]
        if self.eval_every:
            marks.append((round_ // self.eval_every + 1) * self.eval_every)
        if self.checkpoints is not None:
            marks.append((round_ // self.checkpoints.every + 1) * self.checkpoints.every)
        return min(marks)

    def _portions(self):
        if self.feed.stream:
            self.feed.reserve(range(self.done, self.rounds))
            yield from self.feed.portions(self.done, self.rounds)
            return
        pace, number = 0.0, 1
        while self.done < self.rounds:
            # by the first host's clock, or the hosts would run different numbers of rounds
            number = int(hosts.agreed(np.int32(min(number, self.feed.window))))
            number = min(number, self._until(self.done) - self.done)
            began, before = time.perf_counter(), self.done
            yield self.feed.portion(self.done, number)
            taken = (time.perf_counter() - began) / (self.done - before)
            # the first portion compiles, so its pace says nothing
            number = max(1, int((LOOK if self.on_progress else CALL) / taken)) if pace else 1
            pace = taken

    def _advance(self, portion: Portion) -> None:
        """Run a portion. What fails leaves the run as it was after the last round recorded."""
        if self.host_states is not None:
            for i in range(portion.number):
                self._record(portion.loads[i : i + 1], _stack([self._round_on_host(portion, i)]))
            return
        # not donated: a call that runs out of memory must leave the server and the states as they were
        server, states, log = self.engine.rounds(
            self.server, self.states, portion.arrays, portion.slots, portion.first, portion.number, self.seed_key
        )
        log = {name: _host(column)[: portion.number] for name, column in log.items()}
        _wait((server, states))
        self.server, self.states = server, states
        self._record(portion.loads, log)

    def _record(self, loads: list[list[Load]], log: dict[str, Any]) -> None:
        """Rounds that are done, with what they cost and what their clients reported."""
        number = len(loads)
        for exchange in self.traffic.exchanges:
            log[f"{exchange.name}/bytes_down"] = np.full(number, self.feed.plan.cohort * float(exchange.down))
            arrived = log[f"{exchange.name}/arrived"]
            arrived = arrived.astype(jnp.result_type(float)) if is_traced(arrived) else arrived
            log[f"{exchange.name}/bytes_up"] = arrived * float(exchange.up)
        self.logs.append(log)
        self.done += number
        flat = [load for row in loads for load in row]
        self.steps += sum(load.steps for load in flat)
        self.masked += sum(load.masked for load in flat)
        self.imbalance += sum(load.imbalance for load in flat) / len(flat) * number

    def _round_on_host(self, portion: Portion, i: int) -> dict[str, Any]:
        """Round ``i`` of a portion with the states on the host; if one of its exchanges fails, none has happened."""
        assert self.host_states is not None
        row: dict[str, Any] = {}
        server, undo = self.server, []
        try:
            for index, slots in enumerate(portion.slots):
                here = jax.tree.map(lambda leaf: leaf[i], slots)
                before = hosts.agreed(self.host_states.read(here.ids))
                server, states, new = self.engine.exchange(
                    index, server, before, portion.arrays[index], here, portion.first + i, self.seed_key
                )
                _wait((server, states, new))
                undo.append((here.ids, before))
                self._keep(here.ids, states)
                row |= new
        except BaseException:
            for ids, before in reversed(undo):
                self._keep(ids, before)
            raise
        self.server = server
        return row

    def _keep(self, ids: np.ndarray, states: PyTree) -> None:
        """Client states onto the host; of several, the first one has them all."""
        if self.host_states is not None and hosts.is_first():
            self.host_states.write(ids, hosts.local(states))

    def _shrink(self, said: str) -> None:
        """After a call that ran out of device memory: the same run, with half as many clients at a time."""
        plan = self.feed.plan
        if plan.chunk == 1:
            raise MemoryError(
                f"out of device memory in round {self.done + 1} with one client at a time: a smaller model or batch "
                "size, data_in = 'host' or states_in = 'host' needs less, more devices have more; the device said: "
                + next(line for line in said.splitlines() if tune.EXHAUSTED in line).strip()
            )
        if hosts.several():  # the others wait in the middle of this round: they cannot change their plan with us
            raise MemoryError(
                f"out of device memory with {plan.chunk} clients at a time in round {self.done + 1}: with several "
                f"hosts all must take fewer from the start; resume with --set engine.chunk={max(1, plan.chunk // 2)}"
            )
        smaller = plan._replace(chunk=plan.chunk // 2)
        what = "lanes" if plan.kind == "lanes" else "clients at a time"
        notice(
            f"out of device memory with {plan.chunk} {what}: round {self.done + 1} is run again with {smaller.chunk}"
        )
        self.feed = self.feed.with_plan(smaller)
        self.engine = self.program(smaller)

    def _look(self, began: float) -> bool:
        """Evaluate, save and tell, whatever is due after ``self.done`` rounds. True: stop."""
        last = self.done == self.rounds
        if self.evaluate is not None and self.eval_every and (last or self.done % self.eval_every == 0):
            scores = summarize(self.evaluate(self.alg.params(hosts.local(self.server))))
            self.evaluations.append({"round": jnp.asarray(self.done)} | scores)
        stop = False
        if self.on_progress is not None:
            row = {name: float(column[-1]) for name, column in self.logs[-1].items()}
            if self.evaluations:
                row |= {name: float(value) for name, value in self.evaluations[-1].items() if name != "round"}
            stop = hosts.any_of(bool(self.on_progress(Progress(self.done, row, time.perf_counter() - began))))
        due = self.checkpoints is not None and (stop or last or self.done % self.checkpoints.every == 0)
        if due:
            self._save()
        return stop

    def _run_rounds(self, began: float) -> bool:
        """Rounds to the end (True if it was told to stop), or until the plan had to be changed."""
        portions = self._portions()
        try:
            for portion in portions:
                try:
                    self._advance(portion)
                    said = None
                except (jax.errors.JaxRuntimeError, ValueError) as error:  # which one depends on the way of dispatch
                    if not tune.exhausted(error):
                        raise hosts.lost(error) if hosts.several() else error from error
                    said = str(error)
                # out of the handler, where the error no longer holds the arrays of the failed call
                if said is not None:
                    self._shrink(said)
                    return False
                if self._look(began):
                    return True
        finally:
            portions.close()
        return False

    def go(self) -> Result:
        began = time.perf_counter()
        while self.done < self.rounds and not self._run_rounds(began):
            pass
        states = self.states if self.host_states is None else self.host_states
        info = Info(
            self.feed.plan,
            self.traffic,
            self.feed.stream,
            self.steps,
            self.masked / max(self.steps + self.masked, 1),
            self.imbalance / max(self.done, 1),
            self.done,
            self.tuning,
        )
        server, states = hosts.local(self.server), states if self.host_states else hosts.local(states)
        return Result(self.alg.params(server), server, states, _join(self.logs), _stack(self.evaluations), info)
