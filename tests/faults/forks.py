"""Commands of fedbraid in child processes that start fast: a server imports everything once, then forks.

A fresh ``python -m fedbraid`` imports for three seconds. The server does this before jax starts a backend, so that its
children can still be forked safely. As a program this module is the server: it reads one JSON request per line (a list
of jobs that start together) and answers with one line.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
CACHE = str(Path(".pytest_cache/jax").absolute())
SLOW = 120  # seconds after which a command counts as hanging


class Ended(NamedTuple):
    """How a command ended: its exit status (negative: the signal), what it printed, its seconds and its CPU seconds."""

    status: int
    out: str
    err: str
    seconds: float
    work: float

    @property
    def clear(self) -> bool:
        """Whether it succeeded, or failed with exactly one line of error and no traceback."""
        if "Traceback" in self.err or self.status < 0:
            return False
        return self.status == 0 or sum(line.startswith("error:") for line in self.err.splitlines()) == 1


class Forks:
    """The client of the server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        own = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        own |= {
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("FEDBRAID_TEST_CACHE", CACHE),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "COLUMNS": "500",
        }
        self.server = subprocess.Popen(
            [sys.executable, str(HERE / "forks.py")], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def together(self, *jobs: dict[str, Any]) -> list[Ended]:
        """Run jobs at the same time. A job has ``argv``, and may have ``fault``, ``limit``, ``signal`` and ``after``.

        fault: fields of a `shim.Fault`. limit: the largest size of a file, in bytes. signal, after: the signal to send
        after this many seconds. wait: a path; ``after`` counts from the time that it exists.
        """
        asked = []
        for job in jobs:
            self.count += 1
            places = {name: str(self.folder / f"{self.count}.{name}") for name in ("out", "err")}
            asked.append({**job, **places, "argv": [str(one) for one in job["argv"]]})
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return [
            Ended(status, Path(one["out"]).read_text(), Path(one["err"]).read_text(errors="replace"), *times)
            for one, (status, *times) in zip(asked, answer, strict=True)
        ]

    def run(self, *argv: Any, **more: Any) -> Ended:
        return self.together({"argv": argv, **more})[0]

    def close(self) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait(timeout=30)


def _child(job: dict[str, Any]) -> None:
    """Run one command in this process and end it."""
    from fedbraid.cli.app import main

    status = 1
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    seen = None
    if job.get("fault"):
        import shim

        seen = shim.install(shim.Fault(**job["fault"]))
    if job.get("limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
    sys.argv = ["fedbraid", *job["argv"]]
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if seen is not None and seen.fault.report:
        Path(seen.fault.report).write_text(str(seen.done))
    os._exit(status)


def _wait(job: dict[str, Any], child: int, began: float) -> tuple[int, float, float]:
    """Wait for a child; send it its signal at its time, and kill one that hangs."""
    since = began if not job.get("wait") else None
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        now = time.monotonic()
        if ended:
            return os.waitstatus_to_exitcode(status), now - began, used.ru_utime + used.ru_stime
        if since is None and any(Path(job["wait"]).parent.glob(Path(job["wait"]).name)):
            since = now
        if job.get("signal") and since is not None and now - since >= job.get("after", 0):
            os.kill(child, job.pop("signal"))
        if now - began > SLOW:
            os.kill(child, signal.SIGKILL)
        select.select([], [], [], 0.002)


def serve() -> None:
    """The server: imports, then forks a child for each job."""
    sys.path.insert(0, str(HERE))
    import sklearn.datasets  # noqa: F401

    from fedbraid.cli.app import make_app

    make_app()
    for line in sys.stdin:
        began = time.monotonic()
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                _child(job)
            children.append((job, child))
        answer = [_wait(job, child, began) for job, child in children]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
