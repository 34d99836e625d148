"""Compiled engines that runs share: a second run of the same algorithm under the same plan traces and compiles nothing.

``simulate`` makes a new engine for every run. Tests run one algorithm many times (other data, other seeds, fewer
rounds), and almost all of their time goes into tracing and compiling; so engines are kept here, by all that they were
made of.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest

from fedbraid.core import Algorithm
from fedbraid.simulation import Result, bernoulli, run, simulate
from zoo import ROWS, clients, start

RAGGED = {"batch_size": 2, "epochs": 1}  # batches that do not divide any client's examples evenly
LOSSY = bernoulli(0.5)
COHORT = 3
KEPT = 16  # engines, at most: the newest
_engines: OrderedDict[Any, Kept] = OrderedDict()
_make = run.make_engine


class Kept(NamedTuple):
    """An engine, the one that runs are given (it records its arguments), and those arguments."""

    engine: Any
    handed: Any
    arguments: list[tuple]


def _shared(*args: Any, **options: Any) -> Any:
    key = (args, tuple(sorted(options.items(), key=lambda item: item[0])), jax.config.jax_enable_x64)
    if key not in _engines:
        engine, arguments = _make(*args, **options), []

        def rounds(*given: Any) -> Any:
            arguments[:] = [given]
            return engine.rounds(*given)

        _engines[key] = Kept(engine, engine._replace(rounds=rounds), arguments)
        while len(_engines) > KEPT:
            _engines.popitem(last=False)
    _engines.move_to_end(key)
    return _engines[key].handed


@contextlib.contextmanager
def sharing(window: int | None = None) -> Iterator[None]:
    """Runs within share engines. ``window``: rounds in one compiled call at most, which is part of the program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_engine", _shared)
        if window is not None:
            patch.setattr(run, "WINDOW", window)
        yield


def compiled(alg: Any) -> list[int]:
    """How often the rounds of each kept engine of this algorithm were compiled in the present precision."""
    mine = [kept for key, kept in _engines.items() if key[0][0] is alg and key[2] == jax.config.jax_enable_x64]
    return [kept.engine.rounds._cache_size() for kept in mine]


def program(alg: Any, **options: Any) -> str:
    """The rounds of this algorithm, as compiled for an engine with these options, as text."""
    for key, kept in reversed(_engines.items()):
        if key[0][0] is alg and options.items() <= dict(key[1]).items():
            return kept.engine.rounds.lower(*kept.arguments[0]).as_text()
    raise KeyError(f"no engine of this algorithm with {options} is kept")


# --- the run that most laws look at ----------------------------------------------------------------------------------


@functools.cache
def ragged(name: str) -> Algorithm:
    """A row's algorithm on ragged batches, always the same object."""
    return ROWS[name].make(**RAGGED)


def lossy(name: str, **options: Any) -> Result:
    """A run of partial, lossy cohorts in portions of two rounds, on one device: one program for any rounds and seed."""
    split = clients(dtype=jax.dtypes.canonicalize_dtype(float))
    with sharing(window=2):
        return simulate(ragged(name), start(), split, cohort=COHORT, arrival=LOSSY, devices=1, **options)
