"""Who measured what, when, where and with which versions: the head of every file of results."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("jax", "jaxlib", "numpy", "optax")


def about() -> dict[str, Any]:
    """Commit, date, versions and machine."""
    from fedbraid.version import __version__

    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "fedbraid": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONS},
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
    }


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """The commit of the working tree, with a plus sign if files differ from it; "unknown" outside of a repository.

    The variable BENCHMARK_COMMIT names it where a copy of the files is measured.
    """
    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def between(text: str, name: str, new: str) -> str:
    """A page with the part between the markers of ``name`` replaced.

    >>> between("a <!-- speed --> old <!-- end of speed --> b", "speed", "new")
    'a <!-- speed -->\\nnew\\n<!-- end of speed --> b'
    """
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"the page needs {first} and {last}, each once")
    head, rest = text.split(first)
    return f"{head}{first}\n{new}\n{last}{rest.split(last)[1]}"


def markdown(heads: list[str], rows: list[list[Any]]) -> str:
    """A table of Markdown; without rows, a sentence."""
    if not rows:
        return "Not measured yet."
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
