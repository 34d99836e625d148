"""The timing of a task: whether it has one, whether its algorithm allows it, and its timelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedbraid.costs import Cost, data_shapes
from fedbraid.simulation.arrival import everyone
from fedbraid.simulation.asynchrony import Asynchrony, check_asynchrony
from fedbraid.simulation.clock import Clock
from fedbraid.simulation.program import Task
from fedbraid.simulation.timeline import Timeline, Timing

__all__ = ["check_timing", "timelines", "timing_of"]

PyTree = Any


def timing_of(clock: Clock | None, asynchrony: Asynchrony | None, cohort: int) -> Timing | None:
    """The timing of a run; None if nothing takes time and the server waits for every cohort."""
    clock, asynchrony = clock or Clock(), asynchrony or Asynchrony()
    return Timing(clock, asynchrony, cohort) if clock.is_running or asynchrony.name != "none" else None


def check_timing(task: Task, params: PyTree) -> None:
    """Refuse an algorithm or an arrival model that does not fit the timing of a task."""
    timing = task.timing
    if timing is None:
        return
    if task.arrival is not everyone:
        raise ValueError(
            "arrival models and simulated time cannot be used together: the clock decides which uploads arrive. Give "
            "Clock(lost=...) for lost uploads ([clock] lost) and a deadline to semi_synchronous ([asynchrony])"
        )
    if timing.clock.availability != "always" and any(e.sealed is not None for e in task.algorithm.exchanges):
        raise ValueError(
            "availability with differential privacy: the accountant assumes that every client is equally likely to be "
            'in a cohort. Use availability = "always"'
        )
    check_asynchrony(task.algorithm, params, data_shapes(task.data), timing.asynchrony)
    _ = timing.uploads  # refuses a buffer that is larger than the cohort


def timelines(task: Task, traffic: Cost) -> Callable[[int], Timeline] | None:
    """A function from a seed to the timeline of a task; None without simulated time."""
    timing = task.timing
    if timing is None:
        return None
    return lambda seed: Timeline(timing, seed, task.algorithm.exchanges, task.data.train, traffic)
