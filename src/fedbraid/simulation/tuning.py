"""The fastest plan of a run on this machine, found by timing its first rounds.

Which plan is fastest depends on the model, the batch size, the sizes of the clients and the machine, so it is measured.
Plans do not change results beyond rounding. The fastest plan is not stored: ``fedbraid tune-engine`` prints it or
writes it into a configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fedbraid.core import Algorithm
from fedbraid.costs import cost
from fedbraid.data.federated import FederatedData, Split
from fedbraid.simulation import hosts
from fedbraid.simulation.arrival import Arrival, everyone
from fedbraid.simulation.options import EngineOptions, engine_options
from fedbraid.simulation.placement import place_run
from fedbraid.simulation.plan import Plan, client_bytes, most_clients
from fedbraid.simulation.program import Task
from fedbraid.simulation.rounds import WINDOW, CompiledRounds, exhausted
from fedbraid.simulation.run import check_cohort, compiled_rounds, federated_data

__all__ = ["Meter", "Timings", "candidates", "fastest", "search", "time_plans"]

SPAN = 0.1  # shortest duration of a timing, in seconds
LONG = 1.0  # a timing of more seconds is not repeated
REPEATS = 4  # timings of a candidate; the shortest is used, because other work on the machine only adds time
PATIENCE = 2  # the search ends after this many slower candidates in a row; four clients may be faster where two are not
STREAMED = 8  # largest number of rounds in a timing with streamed data


class Timings(NamedTuple):
    """The fastest plan as engine options, and the seconds per round of each plan that was timed."""

    options: EngineOptions
    seconds: dict[str, float | None]  # by plan; None if it ran out of memory


def time_plans(
    alg: Algorithm,
    params: Any,
    data: FederatedData | Split,
    *,
    rounds: int = WINDOW,
    cohort: int | None = None,
    seed: int = 0,
    arrival: Arrival = everyone,
    engine: EngineOptions | None = None,
    tell: Callable[[str], Any] = lambda line: None,
    **options: Any,
) -> Timings:
    """Time the first rounds of a run under several plans; their results are discarded.

    rounds: number of rounds of the run, an upper limit for a timing. tell: called with a line about each plan.
    """
    how = engine_options(engine, options)
    task = Task(alg, federated_data(data), arrival)
    size = check_cohort(task.data.train, cohort)
    traffic = cost(alg, params, task.data)
    placement = place_run(alg, params, task.data, how, size)
    rounds_at_most = min(rounds, STREAMED if placement.stream else WINDOW)

    def stage(plan: Plan) -> CompiledRounds:
        at = placement._replace(plan=plan)
        driver = compiled_rounds(task, params, at, how, traffic, rounds=rounds_at_most, seed=seed)
        driver.feed.reserve(range(rounds_at_most))
        return driver

    cpu = placement.mesh.local_devices[0].platform == "cpu"
    need = client_bytes(alg, params, task.data, how)
    plans, first = candidates(how.plan, placement.plan, cpu=cpu, most=most_clients(need, placement.mesh))
    meter = Meter(stage, rounds_at_most)

    def measure(plan: Plan) -> float | None:
        seconds = meter(plan)
        tell(f"{plan.words()}: {'out of memory' if seconds is None else f'{1e3 * seconds:.4g} ms a round'}")
        return seconds

    times = search(plans, first, measure) if len(plans) > 1 else {plans[0]: measure(plans[0])}
    best = fastest(times) or placement.plan
    chosen = engine_options(how, {"plan": best.kind, "chunk": best.chunk})
    return Timings(chosen, {plan.words(): seconds for plan, seconds in times.items()})


def candidates(kind: str, base: Plan, *, cpu: bool, most: int | None) -> tuple[list[Plan], int]:
    """Plans in order of their chunk (clients at a time), and the index where the search begins.

    Each chunk is about twice the one before, adjusted to leave few slots empty: for 25 clients seven, not eight.
    ``base`` is the default plan and one of them. On a CPU it is one client at a time, and the search goes up from
    there. On a GPU the search begins at the chunk of ``base``, which fills a large GPU.
    """
    share = -(-base.cohort // base.devices)
    most = share if most is None else min(share, most)
    doubled = [1 << i for i in range(most.bit_length())] + [most]
    even = {-(-share // -(-share // chunk)) for chunk in doubled}
    if kind == "auto" and cpu:
        return [base] + [base._replace(kind="chunks", chunk=chunk) for chunk in sorted(even - {1})], 0
    if base.kind == "sequential":
        return [base], 0
    plans = [base._replace(chunk=chunk) for chunk in sorted(even | {base.chunk})]
    return plans, 0 if cpu else plans.index(base)


def search(plans: Sequence[Plan], start: int, measure: Callable[[Plan], float | None]) -> dict[Plan, float | None]:
    """Seconds per round by plan.

    The search goes up from ``start`` until plans get slower or too large. If none was faster than ``start``, it goes
    down. The two fastest plans are measured again, in turn, so that other work on the machine does not decide.
    """
    times: dict[Plan, float | None] = {}

    def walk(some: Sequence[Plan]) -> None:
        slower = 0
        for plan in some:
            before = [t for t in times.values() if t is not None]
            times[plan] = seconds = measure(plan)
            if seconds is None:
                if plan.chunk >= plans[start].chunk:  # going up, the next plan needs even more memory; going down, less
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
    """The fastest plan; if several are equally fast, the one with the smallest chunk."""
    fit = [(seconds, plan.chunk, plan) for plan, seconds in times.items() if seconds is not None]
    return min(fit)[2] if fit else None


class Meter:
    """Measures the seconds per round of a plan: the same first rounds for every plan, without compilation.

    stage: makes the driver of a run under a plan; most: largest number of rounds in a timing.
    """

    stage: Callable[[Plan], CompiledRounds]
    most: int

    def __init__(self, stage: Callable[[Plan], CompiledRounds], most: int) -> None:
        self.stage, self.most = stage, most
        self.number: int | None = None  # rounds in a timing, chosen by the speed of the first candidate
        self.best: float = float("inf")

    def __call__(self, plan: Plan) -> float | None:
        try:
            return self._seconds(self.stage(plan))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not exhausted(error):
                raise
            if hosts.several():  # the other hosts wait in the middle of a round
                raise MemoryError(
                    f"out of device memory with {plan.words()} while plans were timed: with several hosts the search "
                    f"cannot continue; set engine.chunk to less than {plan.chunk}"
                ) from None
        return None

    def _seconds(self, driver: CompiledRounds) -> float:
        self._clock(driver, 1)
        if self.number is None:
            self.number = max(1, min(self.most, int(SPAN / self._clock(driver, 1)) + 1))
        shortest = float("inf")
        for _ in range(REPEATS):
            spent = self._clock(driver, self.number)
            shortest = min(shortest, spent / self.number)
            if spent > LONG or shortest > 2 * self.best:
                break
        self.best = min(self.best, shortest)
        return shortest

    def _clock(self, driver: CompiledRounds, number: int) -> float:
        """Seconds of the first ``number`` rounds; their results are discarded."""
        began = time.perf_counter()
        driver.time_rounds(number)
        return float(hosts.agreed(np.float32(time.perf_counter() - began)))  # all hosts use the first host's time
