"""The loop over rounds: when to run, evaluate, save and report.

A run, a sweep, a comparison, a trace and a deployment all use :class:`RoundLoop`. They differ in the *driver*: the
object that computes rounds, by compiled programs (:mod:`fedbraid.simulation.rounds`) or by messages to a federation
(:mod:`fedbraid.flower.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Driver", "RoundLoop", "Schedule"]


@dataclass(frozen=True)
class Schedule:
    """After which rounds the model is evaluated and saved.

    rounds: the total number of rounds.
    evaluate_every: evaluate after every ``evaluate_every`` rounds and after the last; None never evaluates.
    checkpoint_every: save after every ``checkpoint_every`` rounds and after the last; None never saves.
    marks: further rounds after which to evaluate.

    >>> schedule = Schedule(rounds=10, evaluate_every=4, checkpoint_every=5)
    >>> [schedule.next_stop(done) for done in (0, 4, 5, 8)]
    [4, 5, 8, 10]
    >>> schedule.evaluates(8), schedule.saves(8), schedule.evaluates(10)
    (True, False, True)
    """

    rounds: int
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    marks: frozenset[int] = frozenset()

    def next_stop(self, done: int) -> int:
        """The next round after ``done`` at which the model is evaluated or saved, or the last round."""
        every = [period for period in (self.evaluate_every, self.checkpoint_every) if period is not None]
        later = [mark for mark in self.marks if mark > done]
        return min([self.rounds, *((done // period + 1) * period for period in every), *later])

    def evaluates(self, done: int) -> bool:
        """Whether the model is evaluated after ``done`` rounds."""
        if self.evaluate_every is None:
            return done in self.marks
        return done == self.rounds or done % self.evaluate_every == 0 or done in self.marks

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after ``done`` rounds."""
        return self.checkpoint_every is not None and (done == self.rounds or done % self.checkpoint_every == 0)


class Driver(Protocol):
    """The object that computes the rounds of a loop."""

    done: int  # rounds completed

    def advance(self, until: int) -> None:
        """Complete at least one round, but none after round ``until``."""
        ...

    def evaluate(self) -> None:
        """Evaluate the current model and keep the scores."""
        ...

    def save(self) -> None:
        """Write a checkpoint of everything that the remaining rounds need."""
        ...

    def close(self) -> None:
        """Release what the driver holds, such as a thread that prefetches data."""
        ...


class RoundLoop:
    """Runs a driver to the end of its schedule.

    tell: called after each step of the loop. If it returns True, the run stops, after a checkpoint if the schedule has
        checkpoints.
    evaluating: called before each evaluation, which may take longer than a round.
    """

    driver: Driver
    schedule: Schedule
    tell: Callable[[], Any] | None
    evaluating: Callable[[], Any] | None

    def __init__(
        self,
        driver: Driver,
        schedule: Schedule,
        tell: Callable[[], Any] | None = None,
        evaluating: Callable[[], Any] | None = None,
    ) -> None:
        self.driver, self.schedule, self.tell, self.evaluating = driver, schedule, tell, evaluating

    def run(self) -> bool:
        """Run the remaining rounds. Returns False if ``tell`` stopped the run before the last round."""
        driver, schedule = self.driver, self.schedule
        try:
            while driver.done < schedule.rounds:
                driver.advance(schedule.next_stop(driver.done))
                if schedule.evaluates(driver.done):
                    if self.evaluating is not None:
                        self.evaluating()
                    driver.evaluate()
                saved = schedule.saves(driver.done)
                if saved:
                    driver.save()
                if self.tell is not None and self.tell():
                    if schedule.checkpoint_every is not None and not saved:
                        driver.save()
                    return driver.done == schedule.rounds
        finally:
            driver.close()
        return True
