"""Programs that share a GPU compile together and are timed one after the other."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys, time
sys.path.insert(0, {folder!r})
from turns import await_turn, end_turn
await_turn()
began = time.monotonic()
time.sleep(0.3)
await_turn()  # a second call returns at once
ended = time.monotonic()
end_turn()
print(began, ended)
"""
BUSY = """
import time
seen = []
for _ in range(150):
    seen.append(time.monotonic())
    time.sleep(0.02)
print(*seen)
"""


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import turns

    return turns


@pytest.fixture
def program():
    return [sys.executable, "-c", PROGRAM.format(folder=str(BENCHMARKS))]


def spans(said):
    return sorted(tuple(map(float, text.split())) for text in said)


@pytest.mark.parametrize("together", [1, 3])
def test_programs_are_never_timed_together(turns, program, together):
    said = dict(turns.measure_in_turn({"a": program, "b": program, "c": program}, together=together))
    assert set(said) == set("abc")
    assert all(ended <= following for (_, ended), (following, _) in pairwise(spans(said.values())))


def test_others_are_paused_while_a_program_is_timed(turns, program):
    said = dict(turns.measure_in_turn({"busy": [sys.executable, "-c", BUSY], "a": program}))
    ((began, ended),) = spans([said["a"]])
    moments = list(map(float, said["busy"].split()))
    assert moments[0] < began
    assert moments[-1] > ended  # it went on afterwards
    assert not [at for at in moments if began < at < ended]


def test_a_program_that_fails_does_not_stop_the_others(turns, program):
    bad = [sys.executable, "-c", "raise SystemExit('no card')"]
    said = dict(turns.measure_in_turn({"bad": bad, "good": program}))
    assert "no card" in said["bad"]
    assert said["bad"].startswith("failed (1)")
    assert len(said["good"].split()) == 2


def test_alone_a_program_does_not_wait(turns, monkeypatch):
    monkeypatch.delenv(turns.TURN, raising=False)
    turns.await_turn()
    turns.end_turn()


def test_a_program_that_is_not_ready_in_time_is_ended_and_the_others_are_measured(turns, program):
    slow = [sys.executable, "-c", "import time; time.sleep(99)"]
    said = dict(turns.measure_in_turn({"slow": slow, "good": program}, compiling=4))
    assert said["slow"].startswith("failed")
    assert len(said["good"].split()) == 2


def test_a_turn_that_takes_too_long_is_ended(turns):
    endless = (
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r}); import turns; turns.await_turn(); time.sleep(99)"
    )
    said = dict(turns.measure_in_turn({"endless": [sys.executable, "-c", endless]}, measuring=1))
    assert said["endless"].startswith("failed")
