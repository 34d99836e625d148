"""Asks `fedbraid advise` for a federation's settings: the function that the benchmark calls by default."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def advise(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The advised algorithm and options, with the local steps of all clients and the seconds that the pilot took.

    Without advice (``problem`` says why) the configured algorithm is measured.
    """
    from fedbraid.experiment.config import parse

    advising: Any = importlib.import_module("fedbraid.experiment.advice.advising")
    _leave_out_files(advising)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        summary = advising.run_advice(parse(tree), advising.AdviceSettings(), Path(folder) / "advice")
        advised = dict(tree["algorithm"])
        if summary["advised"] is not None:
            advised = tomllib.loads((Path(folder) / "advice" / "advised.toml").read_text())["algorithm"]
    return {
        "algorithm": advised.pop("name"),
        "options": advised,
        "client_work": summary["pilot"]["local_steps"],
        "seconds": time.perf_counter() - began,
        "sure": summary["sure"],
        "problem": summary["problem"],
    }


def _leave_out_files(advising: Any) -> None:
    """No file of trials without Arrow, and no picture without matplotlib: the advice needs neither."""
    from fedbraid.experiment import trials

    if importlib.util.find_spec("pyarrow") is None:
        trials.write_trials = lambda path, rows, about: None
    if importlib.util.find_spec("matplotlib") is None:
        advising.draw_advice = lambda *_: None
        advising.save = lambda *_: []
