"""The fastest plan of a job, found by the clock once and remembered for this machine.

Which plan is fastest depends on the model, the batch size, how unequal clients are and the machine, in ways that no
rule foresees; a few rounds of the run itself tell. Plans change no results beyond rounding, and rehearsed rounds are
thrown away, so that tuning changes nothing but the time that a run takes.

What was found is kept by machine and job in ``plans.json`` in the user's cache folder: ``$FEDBRAID_CACHE``, else
``$XDG_CACHE_HOME/fedbraid``, else ``~/.cache/fedbraid``. A job is known by two hashes: of how it *looks* (shapes,
cohort, local steps), which costs nothing, and of its *program*, which has to be traced; the second is made only for
jobs that look like a remembered one.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh

from fedbraid.core import Algorithm, is_traced
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import LocalWork
from fedbraid.lowering.options import Convolutions, Matrices, Precision
from fedbraid.notices import notice
from fedbraid.simulation import hosts
from fedbraid.simulation.arrival import Arrival
from fedbraid.simulation.devices import cores
from fedbraid.simulation.engine import make_engine
from fedbraid.simulation.plan import Plan, Slots, client_bytes, most_clients, steps_of

__all__ = ["Job", "Record", "Tuning", "cache_folder", "decide", "exhausted", "foresee", "machine", "words"]

FILE, FORMAT = "plans.json", 1
MOST = 500  # remembered jobs; the oldest go
SPAN = 0.1  # seconds that a timing should take at least
LONG = 1.0  # seconds of a timing that need not be repeated
REPEATS = 4  # timings of a candidate; the shortest counts, because whatever else the machine does only adds
PATIENCE = 2  # candidates in a row that are no faster end the search: two clients at a time may lose where four win
STREAMED = 8  # rounds of streamed data in a timing at most
EXHAUSTED = "RESOURCE_EXHAUSTED"  # in every message of a device that is out of memory
KINDS = ("sequential", "chunks", "lanes")


class Tuning(NamedTuple):
    """How a run came to a plan that no rule and no user gave it, and the seconds of a round under each candidate."""

    how: Literal["measured", "remembered", "resumed"]
    seconds: dict[str, float | None] = {}  # noqa: RUF012  (read only)  None: out of memory


class Record(NamedTuple):
    """What is remembered of a job."""

    kind: Literal["sequential", "chunks", "lanes"]
    chunk: int
    seconds: dict[str, float | None]  # a round, by candidate
    client_bytes: int | None  # what one more client takes: another time there may be less room
    when: str


def words(plan: Plan) -> str:
    """A plan in a notice."""
    return {"sequential": "sequential", "chunks": f"chunks of {plan.chunk}", "lanes": f"{plan.chunk} lanes"}[plan.kind]


def exhausted(error: BaseException) -> bool:
    """Whether a device said that it is out of memory."""
    return EXHAUSTED in str(error)


# --- what is the same job --------------------------------------------------------------------------------------------


def machine(mesh: Mesh) -> dict[str, Any]:
    """What a measurement holds for: these devices under these versions."""
    from fedbraid import __version__

    device = mesh.local_devices[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    total = (stats or {}).get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "devices": mesh.devices.size,
        "hosts": jax.process_count(),
        "cores": cores(),
        "memory": f"{round(total / 2**30)} GiB",
        "jax": jax.__version__,
        "fedbraid": __version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    """jax calls every CPU "cpu", and one cache folder may serve many machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Job:
    """A run, as far as its speed depends on it: not its seed, its rates or its number of rounds."""

    alg: Algorithm
    params: Any
    split: Split
    mesh: Mesh
    kind: str  # the plan that was asked for, "auto" or one of its kinds
    cohort: int
    stream: bool
    on_host: bool  # client states are
    arrival: Arrival
    convolutions: Convolutions
    precision: Precision
    matrices: Matrices = "auto"

    @cached_property
    def look(self) -> str:
        """What can be known of it without tracing a client."""
        server, state = (jax.eval_shape(make, self.params) for make in (self.alg.init, self.alg.init_client))
        shapes = {"params": self.params, "server": server, "state": state, "data": data_shapes(self.split).arrays}
        exchanges = [
            {"name": e.name, "cohort": e.cohort, "gather": e.reducer.kind == "gather", "steps": self._steps(e.client)}
            for e in self.alg.exchanges
        ]
        asked = [self.kind, self.cohort, self.split.num_clients, self.stream, self.on_host]
        how = [self.convolutions, self.precision, self.matrices]
        return _digest([machine(self.mesh), _leaves(shapes), int(self.split.sizes.max()), exchanges, asked, how])

    def _steps(self, client: Callable) -> list[list[int]]:
        """Deciles of the clients' local steps in each fold; of their sizes, where steps are not ours to count."""
        sizes = np.asarray(self.split.sizes)
        counts = steps_of(client, sizes) if isinstance(client, LocalWork) else [sizes]
        return [np.quantile(c, np.linspace(0, 1, 11), method="nearest").astype(int).tolist() for c in counts]

    @cached_property
    def program(self) -> str | None:
        """A hash of one round in the plan that every job has, one client after the other; None if it is traced.

        Rates and other real numbers are left out, because the time of a step does not depend on them; unless a loop
        asks one of them whether to go on.
        """
        rounds, shapes = self._rounds()
        if self._traced(rounds, shapes):
            return None
        text = rounds.lower(*shapes).as_text()
        if not re.search(r"cond \{(?:(?!\} do).)*FLOAT", text, re.DOTALL):
            text = re.sub(r"dense<[^>]*>( : tensor<(?:\d+x)*b?f\d+>)", r"\1", text)
        return _digest(text)

    def _rounds(self) -> tuple[Any, tuple]:
        plan, cap = Plan("sequential", self.mesh.devices.size, self.cohort, 1), int(self.split.sizes.max())
        options = {"arrival": self.arrival, "convolutions": self.convolutions, "precision": self.precision}
        population = self.split.num_clients
        engine = make_engine(
            self.alg, plan, self.mesh, cap=cap, population=population, local=self.stream, **cast(Any, options)
        )

        def numbers(many: int) -> Any:
            return jax.ShapeDtypeStruct((1, many), np.int32)

        many = numbers(plan.devices * plan.slots)
        slots = Slots(many, many, many, numbers(plan.devices))
        arrays = data_shapes(self.split).arrays
        if self.stream:  # blocks are as long as the cohorts that come; one client's do here
            rows = plan.devices * cap
            arrays = {n: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for n, a in arrays.items()}
        wide = lambda leaf: jax.ShapeDtypeStruct((population, *leaf.shape), leaf.dtype)  # noqa: E731
        states = jax.tree.map(wide, jax.eval_shape(self.alg.init_client, self.params))
        server, key = jax.eval_shape(self.alg.init, self.params), jax.eval_shape(lambda: jax.random.key(0))
        exchanges = len(self.alg.exchanges)
        return engine.rounds, (server, states, (arrays,) * exchanges, (slots,) * exchanges, 0, 1, key)

    def _traced(self, rounds: Callable, shapes: tuple) -> bool:
        """Whether a transformation of jax is at work around this run: it cannot be timed before it is done."""
        begun = (self.params, self.alg.init(self.params), self.alg.init_client(self.params), jax.random.key(0))
        inside = jax.make_jaxpr(rounds)(*shapes).consts  # what the algorithm's functions hold
        return any(map(is_traced, jax.tree.leaves((begun, inside))))


def _leaves(tree: Any) -> dict[str, str]:
    # not the structure's own words: they may hold a function's address
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{np.shape(x)} {jax.numpy.result_type(x)}" for path, x in leaves}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


# --- what is remembered ----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where measurements are kept between runs; ``FEDBRAID_CACHE`` moves it."""
    if given := os.environ.get("FEDBRAID_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbraid"


def _read(path: Path, *, tell: bool) -> dict[str, dict[str, Any]]:
    """Records by look and program; a file that is none of ours counts as empty."""
    try:
        tree = json.loads(path.read_text())
        plans = tree["plans"] if isinstance(tree, dict) and tree.get("format") == FORMAT else None
        if isinstance(plans, dict) and all(isinstance(same, dict) for same in plans.values()):
            return plans
        problem = f"is not of format {FORMAT}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError) as error:
        problem = f"cannot be read ({type(error).__name__})"
    if tell:
        notice(f"{path} {problem}: it is ignored, and written anew by the next tuning")
    return {}


def _parse(given: Any) -> Record | None:
    """A record out of a file that anybody may have edited."""
    try:
        record = Record(**given)
        seconds = {str(name): None if s is None else float(s) for name, s in record.seconds.items()}
        need = record.client_bytes if record.client_bytes is None else int(record.client_bytes)
    except (TypeError, ValueError, AttributeError):
        return None
    good = record.kind in KINDS and type(record.chunk) is int and record.chunk >= 1
    return Record(record.kind, record.chunk, seconds, need, str(record.when)) if good else None


def recall(job: Job) -> Record | None:
    """What is remembered of a job on this machine. Nothing is traced for a job that looks like no remembered one."""
    with contextlib.suppress(RuntimeError):  # a user without a home
        path = cache_folder() / FILE
        if not path.exists():
            return None
        same = _read(path, tell=True).get(job.look)
        if same and job.program in same:
            return _parse(same[job.program])
    return None


def remember(job: Job, record: Record) -> str:
    """Keep a record for the next run; says where, or why not."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{FILE}.lock"):
            plans = _read(folder / FILE, tell=False)
            plans.setdefault(job.look, {})[str(job.program)] = record._asdict()
            _write(folder / FILE, {"format": FORMAT, "plans": _newest(plans)})
    except (OSError, RuntimeError) as error:
        return f"not remembered: {error}"
    return f"remembered in {folder / FILE}"


def _newest(plans: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest records, those that are none left out."""
    every = [(r.when, look, program) for look, same in plans.items() for program, g in same.items() if (r := _parse(g))]
    out: dict[str, dict[str, Any]] = {}
    for _, look, program in sorted(every)[-MOST:]:
        out.setdefault(look, {})[program] = plans[look][program]
    return out


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Runs that end their tuning together take turns: each reads what the one before wrote."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, tree: Any) -> None:
    """In one piece: a reader sees the old file or the new one."""
    file, name = tempfile.mkstemp(prefix=f"{FILE}.", dir=path.parent)
    try:
        with os.fdopen(file, "w") as text:
            json.dump(tree, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- what is tried ---------------------------------------------------------------------------------------------------


def candidates(kind: str, base: Plan, *, cpu: bool, most: int | None) -> tuple[list[Plan], int]:
    """Plans by the clients they take at a time, and where the search begins.

    Twice as many each time, as even as may be: of 25 clients seven at a time, not eight, which would leave slots empty.
    base: the plan by rule, which is among them. On a CPU that is one client at a time, and the search goes up from
    there; on a GPU it begins at what fills a large one.
    """
    share = -(-base.cohort // base.devices)
    most = share if most is None else min(share, most)
    doubled = [1 << i for i in range(most.bit_length())] + [most]
    even = {-(-share // -(-share // chunk)) for chunk in doubled}
    if kind == "auto" and cpu:
        return [base] + [base._replace(kind="chunks", chunk=chunk) for chunk in sorted(even - {1})], 0
    plans = [base._replace(chunk=chunk) for chunk in sorted(even | {base.chunk})]
    return plans, 0 if cpu else plans.index(base)


def search(plans: Sequence[Plan], start: int, measure: Callable[[Plan], float | None]) -> dict[Plan, float | None]:
    """Seconds of a round by plan: from ``start`` up until plans get slower or too large; if none was faster, down.

    The two fastest are measured again, in turn: what disturbed one of them before has gone, or disturbs both.
    """
    times: dict[Plan, float | None] = {}

    def walk(some: Sequence[Plan]) -> None:
        slower = 0
        for plan in some:
            before = [t for t in times.values() if t is not None]
            times[plan] = seconds = measure(plan)
            if seconds is None:
                if plan.chunk >= plans[start].chunk:  # the next one up needs more; the next one down, less
                    return
                continue
            slower = slower + 1 if before and seconds >= min(before) else 0
            if slower == PATIENCE:
                return

    walk(plans[start:])
    if fastest(times) in (None, plans[start]):
        walk(plans[:start][::-1])
    finalists = sorted((p for p, t in times.items() if t is not None), key=lambda p: cast(float, times[p]))[:2]
    for plan in finalists * 2 if len(finalists) > 1 else []:
        again = measure(plan)
        times[plan] = min(t for t in (times[plan], again) if t is not None)
    return times


def fastest(times: Mapping[Plan, float | None]) -> Plan | None:
    """Of plans that take equally long, the one of the fewest clients at a time."""
    fit = [(seconds, plan.chunk, plan) for plan, seconds in times.items() if seconds is not None]
    return min(fit)[2] if fit else None


class Meter:
    """Seconds of a round under a plan: the same first rounds for every plan, compiled before the clock starts.

    stage: makes a run that is rehearsed under a plan, a function of the number of rounds; most: rounds at most.
    """

    def __init__(self, stage: Callable[[Plan], Callable[[int], None]], most: int) -> None:
        self.stage, self.most = stage, most
        self.number: int | None = None  # rounds in a timing, by the first candidate's pace
        self.best = float("inf")

    def __call__(self, plan: Plan) -> float | None:
        try:
            return self._seconds(self.stage(plan))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not exhausted(error):
                raise
            if hosts.several():  # the others wait in the middle of a round
                raise MemoryError(
                    f"out of device memory with {words(plan)} while plans were timed: several hosts cannot go back "
                    f"together; set engine.chunk to less than {plan.chunk}"
                ) from None
        return None

    def _seconds(self, rehearse: Callable[[int], None]) -> float:
        rehearse(1)
        if self.number is None:
            self.number = max(1, min(self.most, int(SPAN / self._clock(rehearse, 1)) + 1))
        shortest = float("inf")
        for _ in range(REPEATS):
            spent = self._clock(rehearse, self.number)
            shortest = min(shortest, spent / self.number)
            if spent > LONG or shortest > 2 * self.best:
                break
        self.best = min(self.best, shortest)
        return shortest

    def _clock(self, rehearse: Callable[[int], None], number: int) -> float:
        began = time.perf_counter()
        rehearse(number)
        return float(hosts.agreed(np.float32(time.perf_counter() - began)))  # the first host's, or they would part


# --- what is taken ---------------------------------------------------------------------------------------------------


def decide(
    chunk: Literal["auto", "tuned"], base: Plan, job: Job, stage: Callable[[Plan], Callable[[int], None]], most: int
) -> tuple[Plan, Tuning | None]:
    """The plan of a run that leaves it to the machine.

    What is remembered of this very job is taken; else "auto" takes ``base``, the plan by rule, and "tuned" measures.
    """
    record = _agreed(job)
    if record is not None:
        plan = _fitting(record, base, job.mesh)
        if chunk == "tuned":
            _say(f"chunk = 'tuned': {words(plan)}, remembered from {record.when}{_listed(record.seconds)}")
        return plan, Tuning("remembered", record.seconds)
    if chunk == "auto":
        return base, None
    if job.program is None:
        _say("chunk = 'tuned' is taken as 'auto': inside jax.vmap or jax.jit rounds cannot be timed")
        return base, None
    need, cpu = client_bytes(job.alg, job.params, job.split), job.mesh.local_devices[0].platform == "cpu"
    plans, start = candidates(job.kind, base, cpu=cpu, most=most_clients(need, job.mesh))
    if len(plans) == 1:
        _say(f"chunk = 'tuned': {words(plans[0])}, the only plan for {base.cohort} clients on {base.devices} devices")
        return plans[0], None
    _say(f"chunk = 'tuned': timing the first rounds under {_names(plans)}; the fastest is remembered")
    times = search(plans, start, Meter(stage, most))
    plan = fastest(times) or base
    seconds = {words(p): t for p, t in times.items()}
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if hosts.is_first() and fastest(times):
        where = remember(job, Record(plan.kind, plan.chunk, seconds, need, when))
        _say(f"chunk = 'tuned': {words(plan)}, the fastest{_listed(seconds)}; {where}")
    return plan, Tuning("measured", seconds)


def foresee(chunk: int | Literal["auto", "tuned"], base: Plan, job: Job) -> tuple[Plan, str]:
    """The plan that a run would take, and why; nothing is measured."""
    if job.kind == "sequential":
        return base, "as asked"
    if not isinstance(chunk, str):
        return base, "as asked" if base.kind != "sequential" else f"by rule; chunk = {chunk} needs another plan"
    record = recall(job)
    if record is not None:
        return _fitting(record, base, job.mesh), f"remembered from {record.when}{_listed(record.seconds)}"
    if chunk == "tuned":
        return base, "by rule, until chunk = 'tuned' is measured before the first round"
    return base, "by rule: nothing is remembered of this job"


def _agreed(job: Job) -> Record | None:
    """What the first host remembers, for all."""
    record = recall(job) if hosts.is_first() else None
    if not hosts.several():
        return record
    told = [-1, 0, 0] if record is None else [KINDS.index(record.kind), record.chunk, (record.client_bytes or 0) >> 10]
    kind, chunk, need = (int(number) for number in hosts.agreed(np.array(told, np.int32)))
    if kind < 0:
        return None
    seconds, when = ({}, "") if record is None else (record.seconds, record.when)
    return Record(KINDS[kind], chunk, seconds, need << 10, when)


def _fitting(record: Record, base: Plan, mesh: Mesh) -> Plan:
    """A remembered plan, halved as often as what is free today asks for."""
    room, chunk = most_clients(record.client_bytes, mesh), record.chunk
    while room is not None and room < chunk > 1:
        chunk //= 2
    return base._replace(kind=record.kind, chunk=min(chunk, -(-base.cohort // base.devices)))


def _names(plans: Sequence[Plan]) -> str:
    return ", ".join(words(plan) for plan in plans)


def _listed(seconds: Mapping[str, float | None]) -> str:
    """What every candidate took, for a sentence."""
    each = [f"{name} {'out of memory' if t is None else _span(t)}" for name, t in seconds.items()]
    return f" (a round: {', '.join(each)})" if each else ""


def _span(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _say(sentence: str) -> None:
    if hosts.is_first():
        notice(sentence)
