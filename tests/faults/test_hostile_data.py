"""Data files of strangers: each import ends in correct data or in one clear error, within limits, and leaves nothing.

The files are generated (`valid_files`, `damage`, `hostile_files`) and imported by a process of its own
(`import_child`), whose memory and time are limited. A crash of that process is a case that did not hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from amount import cases

HERE = Path(__file__).parent
SECONDS = 60  # that one case may take, with the start of the process


def run(what: str, count: int, folder: Path, tally) -> None:
    """All cases; after a crash or a hang the next process continues behind that case."""
    first = 0
    while first < count:
        command = [sys.executable, str(HERE / "import_child.py"), what, str(first), str(count), str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            errors: list[str] = []
            reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
            reader.start()
            open_case = first
            watch = threading.Timer(SECONDS, process.kill)
            watch.start()
            for line in process.stdout:
                watch.cancel()
                watch = threading.Timer(SECONDS, process.kill)
                watch.start()
                message = json.loads(line)
                if "start" in message:
                    open_case = message["start"]
                    continue
                tally.case(not message["verdict"], f"{message['name']}: {message['verdict']}")
                first = message["case"] + 1
            watch.cancel()
            code = process.wait()
            reader.join()
        if first < count:
            tally.case(False, f"{what} {open_case}: the process ended with {code}: {''.join(errors)[-800:]}")
            first = open_case + 1


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, reads /proc")
@pytest.mark.parametrize(("what", "sample", "whole"), [("damaged", 100, 1_600), ("hostile", 37, 185)])
def test_files_of_strangers(what, sample, whole, tmp_path, tally):
    run(what, cases(sample, whole), tmp_path, tally)
    tally.check()
