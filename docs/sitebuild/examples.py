"""Runs the examples of the gallery: ``PYTHONPATH=docs python -m sitebuild.examples``.

Pictures and ``examples.json``, with the time and the machine of each, are committed, because they take minutes.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from sitebuild.gallery import EXAMPLES


class Example(NamedTuple):
    """A command, the picture that it makes, what to see in it, and the page that says more."""

    name: str
    title: str
    command: str
    made: str
    see: str
    page: str


COMMANDS = (
    Example(
        "run",
        "A run",
        "fedbraid run --out runs/demo",
        "runs/demo/curves.png",
        "the loss falls and the accuracy rises over 200 rounds; a tenth of the clients stay below the dashed line.",
        "runs.md",
    ),
    Example(
        "split",
        "Data of 50 clients that differ",
        "fedbraid data plot digits --set alpha=0.1 --out split.png",
        "split.png",
        "each column on the left is a client; bright cells are its digits: most have two or three of ten.",
        "data.md",
    ),
    Example(
        "sweep",
        "A sweep over learning rates",
        'fedbraid sweep --set algorithm.name=fedavg --over "algorithm.client_lr=logspace(-2,0.5,9)" --seeds 3 '
        "--set rounds=100 --out runs/sweep",
        "runs/sweep/sweep.png",
        "client rates within a factor of two of the best one are almost as good; above 1 the training fails.",
        "sweeps.md",
    ),
    Example(
        "frontier",
        "Speed against accuracy",
        "fedbraid theory frontier --figure 2 --out frontier.png",
        "frontier.png",
        "no choice is both fast (small rho) and exact (small Delta); server momentum moves the curve towards both.",
        "theory/frontiers.md",
    ),
    Example(
        "worst-case",
        "The exact worst case of methods",
        "fedbraid theory worst-case --out worst-case.png",
        "worst-case.png",
        "for FedProx and FedSplit the theorem (dashed) equals the exact worst case; for FedAvg it is far above it.",
        "theory/worst-case.md",
    ),
    Example(
        "diagnose",
        "What limits a run",
        "fedbraid diagnose --set algorithm.name=fedavg --out diagnosis.png",
        "diagnosis.png",
        "drift is the largest error of a round (middle); more local steps still pay at server step 1 (right).",
        "theory/diagnose.md",
    ),
)


def run(example: Example) -> dict[str, object]:
    """Run one example in an empty folder, copy its picture, and return its row."""
    words = [sys.executable, "-m", "fedbraid", *shlex.split(example.command)[1:]]
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds = sum(after[2:4]) - sum(before[2:4])  # of the CPU, by the command: the machine may be busy
        shutil.copyfile(Path(folder) / example.made, EXAMPLES / f"{example.name}.png")
    machine = f"the CPU ({os.cpu_count()} cores, {platform.machine()})"
    return {"name": example.name, "seconds": round(seconds, 1), "machine": machine}


def main() -> None:
    EXAMPLES.mkdir(exist_ok=True)
    rows = []
    for example in COMMANDS:
        rows.append(run(example))
        print(example.name, rows[-1]["seconds"], flush=True)
    (EXAMPLES / "examples.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
