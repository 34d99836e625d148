"""A run that ends at any moment ends, resumed, with the same bytes: at every file operation, and at random times."""

from __future__ import annotations

import random
import signal

import pytest
from amount import WHOLE, cases
from shim import CRASHED
from tiny import arguments, clean, finish, result

from fedbraid.experiment.runfolder import read_summary

KINDS = ("crash", "torn", "power")


def test_a_crash_at_any_file_operation_is_made_good(forks, undisturbed, tmp_path, tally):
    """Orbax' and Arrow's own writes in C++ are not seen here; random kills cover them."""
    want, operations, _, _ = undisturbed
    assert operations > 100
    count = cases(4, operations)
    draw = random.Random(1)
    points = sorted(draw.sample(range(1, operations + 1), count))
    for i, at in enumerate(points):
        out = tmp_path / str(at)
        kind = KINDS[i % len(KINDS)]
        crashed = forks.run(*arguments(out), fault={"kind": kind, "root": str(out), "at": at})
        ended = finish(forks, out)
        held = crashed.status in (CRASHED, 0) and ended.status == 0 and result(out) == want and clean(out)
        tally.case(held, f"{kind} at {at}: {crashed.status}, then {ended.status} {ended.err[-300:]}")
    tally.check()


@pytest.mark.skipif(not WHOLE, reason="make faults")
def test_two_crashes_in_a_row_are_made_good(forks, undisturbed, tmp_path, tally):
    """The second crash is in the resumed run."""
    want, operations, _, _ = undisturbed
    draw = random.Random(2)
    for i in range(20):
        out = tmp_path / str(i)
        first, second = draw.randrange(operations // 4, operations), draw.randrange(1, operations // 2)
        forks.run(*arguments(out), fault={"kind": "power", "root": str(out), "at": first})
        forks.run("run", "--resume", out, fault={"kind": "torn", "root": str(out), "at": second})
        ended = finish(forks, out)
        tally.case(ended.status == 0 and result(out) == want, f"{first} then {second}: {ended.err[-300:]}")
    tally.check()


def test_a_run_that_is_killed_at_any_time_is_made_good(forks, undisturbed, tmp_path, tally):
    want, _, _, seconds = undisturbed
    draw = random.Random(3)
    for i in range(cases(2, 100)):
        out = tmp_path / str(i)
        after = draw.uniform(0.1, 1.1) * seconds
        killed = forks.run(*arguments(out), signal=signal.SIGKILL, after=after)
        ended = finish(forks, out)
        held = killed.status in (-signal.SIGKILL, 0) and ended.status == 0 and result(out) == want
        tally.case(held, f"after {after:.2f} s: {ended.status} {ended.err[-300:]}")
    tally.check()


def test_sigterm_and_ctrl_c_save_and_say_how_to_go_on(forks, undisturbed, tmp_path, tally):
    """Schedulers send SIGTERM. Whenever it comes, no traceback is printed; after the first round the run is saved."""
    want, _, _, seconds = undisturbed
    draw = random.Random(4)
    for i in range(cases(1, 20)):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]
        out = tmp_path / str(i)
        after = draw.uniform(0.1, 0.8) * seconds if i > 1 else 0.3
        stopped = forks.run(*arguments(out), signal=number, after=after)
        said = f"continue with: fedbraid run --resume {out}" in stopped.err
        held = stopped.status in (0, 128 + number) and "Traceback" not in stopped.err and "Aborted" not in stopped.err
        if stopped.status and (out / "summary.json").exists():
            held &= said and 1 <= read_summary(out).rounds < 3
        ended = finish(forks, out)
        held &= ended.status == 0 and result(out) == want
        tally.case(
            held, f"{number} after {after:.2f} s: {stopped.status} {stopped.err[-300:]}, then {ended.err[-300:]}"
        )
    tally.check()


def test_sigterm_ends_a_long_run_after_a_checkpoint(forks, tmp_path):
    out = tmp_path / "run"
    arrived = {"signal": signal.SIGTERM, "wait": str(out / "states" / "states.bin"), "after": 0.3}
    stopped = forks.run(*arguments(out, "rounds=100000", "checkpoint.every=100000"), **arrived)
    assert stopped.status == 143
    assert f"fedbraid run --resume {out}" in stopped.err
    assert len(list((out / "checkpoints").iterdir())) == 1
    assert not read_summary(out).finished
