"""Measure several programs on one GPU: they compile at the same time, and are timed one after the other.

A program calls `await_turn` after it has compiled and before it is timed. `measure_in_turn` starts all programs, waits
until each is ready or has ended, and then lets one at a time go on. A program that is not ready in time is ended, and
those which are ready are measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TURN = "FEDBRAID_BENCHMARK_TURN"  # a file of which this program writes .ready and awaits .go


def await_turn() -> None:
    """Say that the program has compiled, and wait for the GPU. Returns at once if the program runs alone."""
    name = os.environ.pop(TURN, None)
    if name is None:
        return
    Path(f"{name}.ready").touch()
    while not Path(f"{name}.go").exists():
        time.sleep(0.02)


class Program(NamedTuple):
    process: subprocess.Popen
    place: Path

    @property
    def compiles(self) -> bool:
        return self.process.poll() is None and not self.place.with_suffix(".ready").exists()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        """Its standard output; if it failed, how."""
        code, error = self.process.returncode, self.place.with_suffix(".err").read_text()[-400:]
        return self.place.with_suffix(".out").read_text() if code == 0 else f"failed ({code}): {error}"


def start(command: list[str], place: Path) -> Program:
    environment = os.environ | {TURN: str(place), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with place.with_suffix(".out").open("w") as out, place.with_suffix(".err").open("w") as err:
        return Program(subprocess.Popen(command, env=environment, stdout=out, stderr=err), place)


def measure_in_turn(
    programs: dict[str, list[str]], *, compiling: float = 400, measuring: float = 60
) -> Iterator[tuple[str, str]]:
    """Name and standard output of one program after the other, or its error.

    compiling: seconds until all must be ready. measuring: seconds that each may take after that.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = {name: start(command, Path(folder) / str(i)) for i, (name, command) in enumerate(programs.items())}
        ends, ready = time.monotonic() + compiling, -1
        while (late := [program for program in running.values() if program.compiles]) and time.monotonic() < ends:
            if len(running) - len(late) != ready:
                ready = len(running) - len(late)
                print(f"\r{ready} of {len(running)} ready", end="", file=sys.stderr, flush=True)
            time.sleep(0.2)
        for program in late:
            program.end()
        print(file=sys.stderr)
        try:
            for name, program in running.items():
                program.place.with_suffix(".go").touch()
                try:
                    program.process.wait(measuring)
                except subprocess.TimeoutExpired:
                    program.end()
                yield name, program.said()
        finally:
            for program in running.values():
                program.end()
