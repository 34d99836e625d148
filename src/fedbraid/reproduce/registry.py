"""Find the entries, and run one."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedbraid.experiment.config import ConfigError, unknown
from fedbraid.reproduce.entry import Entry, Job, Size

__all__ = ["entries", "reproduce"]


@cache
def entries() -> dict[str, Entry]:
    """Every entry by its name, ``PAPER-MODULE``.

    >>> "mime-table4" in entries()
    True
    """
    import fedbraid.reproduce as here

    found = {}
    for folder in pkgutil.iter_modules(here.__path__):
        if folder.ispkg:
            package = importlib.import_module(f"{here.__name__}.{folder.name}")
            for module in pkgutil.iter_modules(package.__path__):
                if not module.name.startswith("_"):
                    entry = importlib.import_module(f"{package.__name__}.{module.name}").ENTRY
                    found[f"{folder.name}-{module.name.replace('_', '-')}"] = entry
    return found


def reproduce(
    name: str,
    *,
    size: Size = "quick",
    out: Path,
    data: Mapping[str, Path] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run one entry and write ``out/NAME.json``, ``.md`` and ``.png``; returns the content of the JSON file."""
    from fedbraid.reproduce.page import write_page

    if name not in entries():
        raise ConfigError(unknown("reproduction", name, entries()))
    entry = entries()[name]
    job = Job(size, out / "work" / f"{name}-{size}", data or {}, tell)
    if size == "full":
        for needed in entry.needs:
            job.path_of(needed)
    job.work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    evidence = entry.run(job)
    return write_page(out, name, entry, evidence, size=size, seconds=time.perf_counter() - start, machine=_machine())


def _machine() -> str:
    import os

    import jax

    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}" if devices[0].platform != "cpu" else f"{os.cpu_count()} cores"
    return f"{kind}, {platform.machine()}, jax {jax.__version__}"
