"""Two processes on one folder: one works, the other ends with a line that names the first, and the result is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from amount import cases
from tiny import arguments, finish, result

from fedbraid import files
from fedbraid.experiment.comparison import COMPARE, load_comparison, write_comparison
from fedbraid.experiment.sweep import SWEEP, load_sweep, write_sweep

HOLD = """
import sys, time
from pathlib import Path
from fedbraid import files
with files.holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def one_won(ended) -> bool:
    """One finished; the other was refused, or came after it and found everything done."""
    return sorted(one.status for one in ended) in ([0, 0], [0, 2]) and all(
        one.clear and (one.status == 0 or "is in use by process" in one.err) for one in ended
    )


def test_two_resumes_at_the_same_time(forks, undisturbed, tmp_path, tally):
    want, operations, _, _ = undisturbed
    for i in range(cases(1, 10)):
        out = tmp_path / str(i)
        forks.run(*arguments(out), fault={"kind": "crash", "root": str(out), "at": operations // 2})
        job = {"argv": ["run", "--resume", out, "--quiet"]}
        ended = forks.together(job, job)
        tally.case(one_won(ended) and result(out) == want, f"{[(one.status, one.err[-300:]) for one in ended]}")
    tally.check()


def test_two_runs_into_one_new_folder(forks, undisturbed, tmp_path, tally):
    for i in range(cases(1, 10)):
        out = tmp_path / str(i)
        job = {"argv": arguments(out)}
        ended = forks.together(job, job)
        statuses = sorted(one.status for one in ended)
        said = any("in use by process" in one.err or "exists and is not empty" in one.err for one in ended)
        held = statuses == [0, 2] and said and all(one.clear for one in ended) and result(out) == undisturbed[0]
        tally.case(held, f"{[(one.status, one.err[-300:]) for one in ended]}")
    tally.check()


def test_a_lock_of_a_killed_process_stops_nobody(forks, undisturbed, tmp_path):
    out = tmp_path / "run"
    killed = {"signal": signal.SIGKILL, "wait": str(out / "states" / "states.bin")}
    forks.run(*arguments(out), **killed)
    assert (out / ".lock").exists()
    assert finish(forks, out).status == 0
    assert result(out) == undisturbed[0]
    assert not (out / ".lock").exists()


def test_sweeps_and_comparisons_hold_their_folders(forks, tmp_path):
    small = ["rounds=1", "data.clients=4", "cohort=2", "model.hidden=[4]"]
    config, settings = load_sweep(None, small, {"over": {"algorithm.client_lr": "0.1,0.2"}})
    write_sweep(tmp_path / SWEEP, config, settings)
    write_comparison(tmp_path / COMPARE, load_comparison(None, small))
    with files.holding(tmp_path / ".lock"):
        for what in ("sweep", "compare"):
            refused = forks.run(what, "--resume", tmp_path, "--quiet")
            assert refused.status == 2
            assert f"{tmp_path} is in use by process {os.getpid()} on " in refused.err
            assert len(refused.err.splitlines()) == 1


def test_a_process_that_has_just_taken_a_lock_is_named(tmp_path):
    """Between taking the lock and writing its name, the file is empty or has half a name."""
    lock = tmp_path / "lock"
    with files.holding(lock):
        name = lock.read_text()
        lock.write_text(name[:10])
        late = threading.Timer(0.2, lock.write_text, [name])
        late.start()
        with pytest.raises(files.InUse, match=f"process {os.getpid()} on"), files.holding(lock):
            pass
        late.join()


def test_a_lock_is_released_at_the_end_and_by_a_kill(tmp_path):
    lock = tmp_path / "lock"
    with files.holding(lock), pytest.raises(files.InUse, match=f"process {os.getpid()} on"), files.holding(lock):
        pass
    with files.holding(lock):
        pass
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(files.InUse, match=f"process {other.pid} on .*, since 20"), files.holding(lock):
            pass
        other.kill()
    with files.holding(lock):
        pass
