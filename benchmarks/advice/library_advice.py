"""Asks `fedbraid advise` for a federation's settings: the function that the benchmark calls by default.

The picture and the file of trials are left out, because the sweep of the benchmark writes none either.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# imported here, before time is measured: the seconds of the sweep have no imports either
import scipy.sparse.linalg

from fedbraid.experiment import trials
from fedbraid.experiment.advice import advising
from fedbraid.experiment.config import parse

__all__ = ["advise", "advise_unnamed"]
assert scipy.sparse.linalg


def advise(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The advised algorithm and options, and the local steps of all clients in the pilot.

    Without advice (``problem`` says why) the configured algorithm is measured.
    """
    _leave_out_files()
    with tempfile.TemporaryDirectory() as folder:
        summary = advising.run_advice(parse(tree), advising.AdviceSettings(), Path(folder) / "advice")
        advised = dict(tree["algorithm"])
        if summary["advised"] is not None:
            advised = tomllib.loads((Path(folder) / "advice" / "advised.toml").read_text())["algorithm"]
    return {
        "algorithm": advised.pop("name"),
        "options": advised,
        "client_work": summary["pilot"]["local_steps"],
        "sure": summary["sure"],
        "problem": summary["problem"],
    }


def advise_unnamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The advice for the same configuration without a name of the method: it starts from the library's default one."""
    named = parse({**tree, "algorithm": {k: v for k, v in tree["algorithm"].items() if k != "name"}}).algorithm.name
    return advise({**tree, "algorithm": {**tree["algorithm"], "name": named}})


def _leave_out_files() -> None:
    changed: Any = advising
    trials.write_trials = lambda path, rows, about: None
    changed.draw_advice = lambda *_: None
    changed.save = lambda *_: []
