"""Compiled programs that runs share: a second run of the same algorithm under the same plan compiles nothing.

``simulate`` makes a new program for every run. Tests run one algorithm many times (other data, other seeds, fewer
rounds), and almost all of their time is spent on tracing and compiling. So programs are cached here. The key contains
everything on which a program depends.
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
from fedbraid.costs import Cost, data_shapes
from fedbraid.simulation import Result, bernoulli, run, simulate
from zoo import ROWS, clients, start

RAGGED = {"batch_size": 2, "epochs": 1}  # batches that do not divide any client's examples evenly
LOSSY = bernoulli(0.5)
COHORT = 3
KEPT = 16  # size of the cache, in programs; the oldest are dropped
_programs: OrderedDict[Key, Kept] = OrderedDict()
_make = run.compile_rounds
_costs: OrderedDict[tuple, Cost] = OrderedDict()
_count = run.cost


class Key(NamedTuple):
    """Everything on which a program depends: the key of the cache."""

    algorithm: Any
    arrival: Any
    preprocess: Any
    sizes: tuple[int, int]  # of the population and of its largest client
    plan: Any
    mesh: Any
    options: Any
    local: bool
    x64: bool
    timing: Any


class Kept(NamedTuple):
    """A program, its wrapper that runs use and that records its arguments, and those arguments."""

    program: Any
    handed: Any
    arguments: list[tuple]


def _shared(task: Any, plan: Any, mesh: Any, options: Any, *, local: bool) -> Any:
    split = task.data.train
    sizes = (split.num_clients, int(split.sizes.max()))
    x64 = bool(jax.config.jax_enable_x64)
    key = Key(task.algorithm, task.arrival, task.data.preprocess, sizes, plan, mesh, options, local, x64, task.timing)
    if key not in _programs:
        program, arguments = _make(task, plan, mesh, options, local=local), []

        def rounds(*given: Any) -> Any:
            arguments[:] = [given]
            return program.rounds(*given)

        _programs[key] = Kept(program, program._replace(rounds=rounds), arguments)
        while len(_programs) > KEPT:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key].handed


def _counted(alg: Any, params: Any, data: Any) -> Cost:
    """The bytes of a round. ``simulate`` traces all clients for them; here once per algorithm and shapes."""
    leaves, tree = jax.tree.flatten((params, data_shapes(data)))
    key = (alg, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), bool(jax.config.jax_enable_x64))
    if key not in _costs:
        _costs[key] = _count(alg, params, data)
        while len(_costs) > KEPT:
            _costs.popitem(last=False)
    return _costs[key]


@contextlib.contextmanager
def sharing(window: int | None = None) -> Iterator[None]:
    """Runs inside this context share programs. ``window``: most rounds in one compiled call; part of the program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "compile_rounds", _shared)
        patch.setattr(run, "cost", _counted)
        if window is not None:
            patch.setattr(run, "WINDOW", window)
        yield


def compiled(alg: Any) -> list[int]:
    """How often the rounds of each cached program of this algorithm were compiled in the current precision."""
    x64 = bool(jax.config.jax_enable_x64)
    mine = [kept for key, kept in _programs.items() if key.algorithm is alg and key.x64 == x64]
    return [kept.program.rounds.compilations for kept in mine]


def program(alg: Any, **options: Any) -> str:
    """The rounds of this algorithm, as compiled with these options of the engine, as text."""
    for key, kept in reversed(_programs.items()):
        if key.algorithm is alg and all(getattr(key.options, name) == value for name, value in options.items()):
            return kept.program.rounds.lower(*kept.arguments[0]).as_text()
    raise KeyError(f"no program of this algorithm with {options} is kept")


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
