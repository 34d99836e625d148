"""Programs that share a GPU compile together and are timed one after the other."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys, time
sys.path.insert(0, {folder!r})
from turns import await_turn
compiled = time.monotonic()
await_turn()
began = time.monotonic()
time.sleep(0.2)
await_turn()  # a second call returns at once
print(compiled, began, time.monotonic())
"""


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import turns

    return turns


def test_programs_are_timed_after_all_have_compiled_and_never_together(turns):
    program = [sys.executable, "-c", PROGRAM.format(folder=str(BENCHMARKS))]
    said = dict(turns.measure_in_turn({"a": program, "b": program, "c": program}))
    times = [tuple(map(float, line.split())) for line in said.values()]
    assert max(compiled for compiled, _, _ in times) < min(began for _, began, _ in times)
    in_order = sorted((began, ended) for _, began, ended in times)
    assert all(ended <= following for (_, ended), (following, _) in pairwise(in_order))


def test_a_program_that_fails_does_not_stop_the_others(turns):
    good = [sys.executable, "-c", PROGRAM.format(folder=str(BENCHMARKS))]
    bad = [sys.executable, "-c", "raise SystemExit('no card')"]
    said = dict(turns.measure_in_turn({"bad": bad, "good": good}))
    assert "no card" in said["bad"]
    assert said["bad"].startswith("failed (1)")
    assert len(said["good"].split()) == 3


def test_alone_a_program_does_not_wait(turns, monkeypatch):
    monkeypatch.delenv(turns.TURN, raising=False)
    turns.await_turn()


def test_a_program_that_is_not_ready_in_time_is_ended_and_the_others_are_measured(turns):
    good = [sys.executable, "-c", PROGRAM.format(folder=str(BENCHMARKS))]
    slow = [sys.executable, "-c", "import time; time.sleep(99)"]
    said = dict(turns.measure_in_turn({"slow": slow, "good": good}, compiling=3))
    assert said["slow"].startswith("failed")
    assert len(said["good"].split()) == 3
