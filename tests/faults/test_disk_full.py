"""A full disk ends a run with one line that says so; what was saved before is kept, and the run can be resumed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from amount import cases
from tiny import arguments, finish, result

from fedbraid.simulation.checkpoint import PARTIAL


def test_a_full_disk_is_one_line_and_loses_nothing(forks, undisturbed, tmp_path, tally):
    want, operations, _, _ = undisturbed
    draw = random.Random(5)
    for at in sorted(draw.sample(range(1, operations + 1), cases(2, 60))):
        out = tmp_path / str(at)
        full = forks.run(*arguments(out), fault={"kind": "full", "root": str(out), "at": at})
        said = full.status == 0 or ("No space left on device" in full.err and str(out) in full.err and full.status == 1)
        ended = finish(forks, out)
        held = full.clear and said and ended.status == 0 and result(out) == want
        tally.case(held, f"full at {at}: {full.status} {full.err[-400:]}, then {ended.status} {ended.err[-300:]}")
    tally.check()


def test_a_limit_on_file_sizes_is_one_line_and_loses_nothing(forks, undisturbed, tmp_path, tally):
    """The kernel refuses larger files, also those that orbax and Arrow write in C++."""
    want = undisturbed[0]
    draw = random.Random(6)
    sizes = [700, *(int(10 ** draw.uniform(2.5, 4.8)) for _ in range(cases(1, 30) - 1))]
    for size in sizes:
        out = tmp_path / str(size)
        limited = forks.run(*arguments(out), limit=size)
        said = limited.status == 0 or ("File too large" in limited.err and limited.status == 1)
        ended = finish(forks, out)
        held = limited.clear and said and ended.status == 0 and result(out) == want
        tally.case(held, f"{size} bytes: {limited.status} {limited.err[-400:]}, then {ended.status} {ended.err[-300:]}")
    tally.check()


def test_a_full_disk_at_a_checkpoint_names_the_last_good_one(forks, undisturbed, tmp_path):
    """Round 3's checkpoint does not fit: that of round 2 is kept and named, and the run can go on."""
    out = tmp_path / "run"
    third = out / "checkpoints" / f"{PARTIAL}00000003"
    full = forks.run(*arguments(out), fault={"kind": "full", "root": str(third), "at": 1})
    assert "the checkpoint after round 3 could not be written" in full.err
    assert "the last good one, after round 2, is kept" in full.err
    assert full.err.count("\n") == 1
    assert finish(forks, out).status == 0
    assert result(out) == undisturbed[0]


@pytest.mark.parametrize("mistake", ["a file", "a long name", "states", "read-only"])
def test_a_bad_place_is_one_line(forks, tmp_path, mistake):
    (tmp_path / "file").write_text("")
    out = {"a file": tmp_path / "file" / "run", "a long name": tmp_path / ("x" * 300), "read-only": Path("/proc/run")}
    extra = [f"engine.states_in={tmp_path / 'file'}"] if mistake == "states" else []
    ended = forks.run(*arguments(out.get(mistake, tmp_path / "run")), *(p for one in extra for p in ("--set", one)))
    assert ended.clear, ended.err
    assert ended.status in (1, 2)
    assert len(ended.err.splitlines()) == 1
    words = {"a file": "file", "a long name": "File name too long", "states": "file: ", "read-only": "/proc/run"}
    assert words[mistake] in ended.err
