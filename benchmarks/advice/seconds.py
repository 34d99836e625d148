"""Processor time of the sweep and of the advice, measured in turn.

A machine that others use too is not always equally fast, so a share is reliable only if both ran one after the other.
Each runs in a process of its own, so that neither finds what the other compiled. Imports and files are left out.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

__all__ = ["pairs"]


def pairs(name: str, data: Path, hook: str, number: int) -> list[dict[str, float]]:
    """Seconds of ``number`` pairs of a sweep and an advice of a federation."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # everything is compiled, as it is for a new user
    found = []
    for _ in range(number):
        sweep, advice = _alone(sweep_seconds, name, data), _alone(advice_seconds, name, data, hook)
        found.append({"sweep": round(sweep, 2), "advice": round(advice, 2)})
        print(f"{name}: sweep {sweep:.1f} s, advice {advice:.1f} s ({advice / sweep:.0%})", flush=True)
    return found


def _alone(function: Callable[..., float], *given: object) -> float:
    """The result of a function that runs in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def sweep_seconds(name: str, data: Path) -> float:
    """Processor time of the sweep over all points of the reference methods."""
    from measure import REFERENCES, Lab

    with tempfile.TemporaryDirectory() as out:
        lab = Lab(name, data, Path(out))
        lab.tune(REFERENCES, "tuning")
    return sum(tuned["cpu_seconds"] for tuned in lab.results["tuning"].values())


def advice_seconds(name: str, data: Path, hook: str) -> float:
    """Processor time of the function that advises (see the command advise)."""
    from measure import Lab

    module, _, function = hook.partition(":")
    ask = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryDirectory() as out:
        tree = Lab(name, data, Path(out)).tree
        began = time.process_time()
        ask(tree)
        return time.process_time() - began
