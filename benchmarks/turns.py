"""Measure several programs on one GPU: they compile at the same time, and are timed one after the other.

A program calls `await_turn` after it has compiled and before it is timed, and may call `end_turn` after it was timed.
`measure_in_turn` starts all programs. As soon as one is ready, all others are paused while it is timed. A program that
is not ready in time is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TURN = "FEDBRAID_BENCHMARK_TURN"  # a file of which this program writes .ready and .done, and awaits .go
QUIET = 0.3  # seconds until a GPU has done what paused programs gave it
_turns: list[str] = []  # of this process


def await_turn() -> None:
    """Say that the program has compiled, and wait for the GPU. Returns at once if the program runs alone."""
    name = os.environ.pop(TURN, None)
    if name is None:
        return
    _turns.append(name)
    Path(f"{name}.ready").touch()
    while not Path(f"{name}.go").exists():
        time.sleep(0.02)


def end_turn() -> None:
    """Say that the rest of the program is not timed. Without it, a turn ends with its program."""
    for name in _turns:
        Path(f"{name}.done").touch()


class Program:
    """A process in a group of its own, so that it is paused with the processes that it starts."""

    def __init__(self, command: list[str], place: Path) -> None:
        environment = os.environ | {TURN: str(place), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with place.with_suffix(".out").open("w") as out, place.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        self.place, self.timed = place, False

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        return self.runs and not self.timed and self.place.with_suffix(".ready").exists()

    @property
    def compiles(self) -> bool:
        return self.runs and not self.place.with_suffix(".ready").exists()

    def tell(self, what: signal.Signals) -> None:
        if self.runs:
            os.killpg(self.process.pid, what)

    def end(self) -> None:
        self.tell(signal.SIGKILL)
        self.process.wait()

    def take_turn(self, seconds: float) -> None:
        self.timed = True
        self.place.with_suffix(".go").touch()
        ends, done = time.monotonic() + seconds, self.place.with_suffix(".done")
        while self.runs and not done.exists():
            if time.monotonic() > ends:
                return self.end()
            time.sleep(0.02)

    def said(self) -> str:
        """Its standard output; if it failed, how."""
        code, error = self.process.returncode, self.place.with_suffix(".err").read_text()[-400:]
        return self.place.with_suffix(".out").read_text() if code == 0 else f"failed ({code}): {error}"


@contextmanager
def paused(programs: Iterable[Program]) -> Iterator[None]:
    """The programs do not run inside of this context."""
    stopped = list(programs)
    for program in stopped:
        program.tell(signal.SIGSTOP)
    try:
        yield
    finally:
        for program in stopped:
            program.tell(signal.SIGCONT)


def measure_in_turn(
    programs: dict[str, list[str]], *, together: int = 16, compiling: float = 400, measuring: float = 60
) -> Iterator[tuple[str, str]]:
    """Name and standard output of one program after the other, or its error, in the order in which they end.

    together: how many compile at a time, in the order of ``programs``. compiling: seconds until all must be ready.
    measuring: seconds that a turn may take.
    """
    waiting, running = list(programs), dict[str, Program]()
    ends = time.monotonic() + compiling
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and sum(program.compiles for program in running.values()) < together:
                    name = waiting.pop(0)
                    running[name] = Program(programs[name], Path(folder) / str(len(programs) - len(waiting)))
                for name in [name for name, program in running.items() if not program.runs]:
                    yield name, running.pop(name).said()
                ready = next((program for program in running.values() if program.is_ready), None)
                if ready is not None:
                    with paused(program for program in running.values() if program is not ready):
                        time.sleep(QUIET)
                        ready.take_turn(measuring)
                elif time.monotonic() > ends:
                    late = list(running)
                    for name in late:
                        running[name].end()
                    waiting.clear()
                time.sleep(0.05)
        finally:
            for program in running.values():
                program.end()
