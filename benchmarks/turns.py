"""Measure several programs on one GPU: they compile at the same time, and are timed one after the other.

A program calls `await_turn` after it has compiled and before it is timed. `measure_in_turn` starts all programs, waits
until each is ready or has ended, and then lets one at a time go on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TURN = "FEDBRAID_BENCHMARK_TURN"  # a file of which this program writes .ready and awaits .go


def await_turn() -> None:
    """Say that the program has compiled, and wait for the GPU. Returns at once if the program runs alone."""
    name = os.environ.pop(TURN, None)
    if name is None:
        return
    Path(f"{name}.ready").touch()
    while not Path(f"{name}.go").exists():
        time.sleep(0.02)


def measure_in_turn(programs: dict[str, list[str]], seconds: float = 600) -> dict[str, str]:
    """The standard output of every program, by name; those that failed or took too long have their error instead."""
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        running, places = {}, {}
        for i, (name, command) in enumerate(programs.items()):
            places[name] = Path(folder) / str(i)
            environment = os.environ | {TURN: str(places[name]), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            with Path(f"{places[name]}.out").open("w") as out, Path(f"{places[name]}.err").open("w") as err:
                running[name] = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
        ready = -1
        while time.monotonic() < ends:
            compiling = [n for n, p in running.items() if p.poll() is None and not Path(f"{places[n]}.ready").exists()]
            if not compiling:
                break
            if len(running) - len(compiling) != ready:
                ready = len(running) - len(compiling)
                print(f"\r{ready} of {len(running)} ready", end="", file=sys.stderr, flush=True)
            time.sleep(0.2)
        found = {}
        for name, process in running.items():
            Path(f"{places[name]}.go").touch()
            try:
                process.wait(max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            said = Path(f"{places[name]}.out").read_text()
            error = Path(f"{places[name]}.err").read_text()[-400:]
            found[name] = said if process.returncode == 0 else f"failed ({process.returncode}): {error}"
            print(f"\r{name} done            ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    return found
