"""Property tests (laws) that every algorithm of this library passes, for your own algorithms: one call in a test.

from fedbraid.testing import check

def test_laws():
    check(fedexp, options={"client_lr": 0.05}, rates={"client_lr": 0.02})
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbraid.core import Algorithm, check_structure
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.names import options_of
from fedbraid.simulation import Checkpoints, bernoulli, simulate
from fedbraid.testing import laws, problem
from fedbraid.testing.laws import LawError
from fedbraid.testing.reference import interpret

__all__ = ["LAWS", "Checked", "LawError", "check"]

RAGGED = {"batch_size": 2, "epochs": 1}  # batches that do not divide any client's examples evenly
WHOLE = {"batch_size": None, "steps": 2}  # full batches, which need no shuffling
LOSSY = bernoulli(0.5)
ROUNDS = 4


class Checked(NamedTuple):
    """The laws that an algorithm was found to obey, and those that were not checked, with the reason."""

    held: tuple[str, ...]
    skipped: dict[str, str]


@dataclass(frozen=True)
class Subject:
    """An algorithm to check, with runs that several laws look at: each is computed once.

    make: (local options) -> Algorithm; local options that the algorithm does not have are left out.
    rated: (rates) -> Algorithm, or None if the algorithm is not made by a factory.
    """

    make: Callable[[Mapping[str, Any]], Algorithm]
    params: Any
    split: Split
    tolerance: float
    rated: Callable[[Mapping[str, Any]], Algorithm] | None = None
    first: Mapping[str, Any] | None = None
    rates: Mapping[str, float] | None = None
    invariant: Callable[[Any, Any], Any] | None = None
    gradient: Any = None

    @cached_property
    def ragged(self) -> Algorithm:
        return self.make(RAGGED)

    @cached_property
    def whole(self) -> Algorithm:
        return self.make(WHOLE)

    @property
    def cohort(self) -> int:
        return min(3, self.split.num_clients)

    def lossy_run(self, **options: Any) -> Any:
        """Rounds of partial cohorts with lost uploads."""
        given = {"rounds": ROUNDS, "cohort": self.cohort, "arrival": LOSSY, "devices": 1} | options
        return simulate(self.ragged, self.params, self.split, **given)

    @cached_property
    def lossy(self) -> Any:
        return self.lossy_run()

    def all_clients(self, split: Split) -> Any:
        """Two rounds with all clients and full batches."""
        return simulate(self.whole, self.params, split, rounds=2, devices=1)

    @cached_property
    def everyone(self) -> Any:
        return self.all_clients(self.split)


def check(
    algorithm: Callable[..., Algorithm] | Algorithm,
    *,
    options: Mapping[str, Any] | None = None,
    rates: Mapping[str, float] | None = None,
    invariant: Callable[[Any, Any], Any] | None = None,
    params: Any = None,
    data: Split | None = None,
    skip: Sequence[str] = (),
) -> Checked:
    """Check the laws that hold for every algorithm; raises `LawError` for the first that does not hold.

    algorithm: a factory ``(loss, **options) -> Algorithm``, which is checked on a small least-squares problem in
        float64. Or an ``Algorithm`` with the ``params`` and the ``data`` (a ``Split``) that it is for. A transform is
        checked as a factory: ``lambda loss, **options: my_transform(fedavg(loss, **options))``.
    options: options of the factory, such as rates that suit the problem (0.05 is a good step size).
    rates: a second value of each option that may be traced in a sweep. Without it the law ``rates`` is skipped.
    invariant: ``(server, states) -> largest violation`` of what the algorithm keeps, such as ``c = mean c_i``.
    skip: names of laws that cannot hold for this algorithm.

    >>> import fedbraid
    >>> check(fedbraid.fedavg, options={"client_lr": 0.05}, skip=["deployed", "resume"]).held[:3]
    ('structure', 'dtype', 'purity')
    """
    for name in skip:
        if name not in LAWS:
            raise ValueError(f"skip: no law is called {name!r}; there are {', '.join(LAWS)}")
    if isinstance(algorithm, Algorithm):
        if params is None or data is None:
            raise ValueError("an Algorithm is checked with its own params and data: give both, or give its factory")
        if options or rates:
            raise ValueError("options and rates belong to a factory; an Algorithm has none")
        floats = [np.asarray(leaf).dtype for leaf in jax.tree.leaves(params)]
        rounding = 1e-9 if all(dtype == np.float64 for dtype in floats) else 2e-4
        subject = Subject(lambda _: algorithm, params, data, rounding, invariant=invariant)
        return _check(subject, skip)
    if params is not None or data is not None:
        raise ValueError("params and data belong to an Algorithm; a factory is checked on a problem of its own")
    with jax.enable_x64(True):
        return _check(_of_factory(algorithm, dict(options or {}), rates, invariant), skip)


def _of_factory(factory: Callable, options: dict[str, Any], rates: Any, invariant: Any) -> Subject:
    declared, split, params = options_of(factory), problem.clients(), problem.start()

    def make(local: Mapping[str, Any], changes: Mapping[str, Any] = {}) -> Algorithm:
        own = {name: value for name, value in local.items() if name in declared and name not in options}
        made = factory(problem.loss, **{**own, **options, **changes})
        if not isinstance(made, Algorithm):
            raise LawError(f"law 'structure': the factory returned a {type(made).__name__}, not a fedbraid.Algorithm")
        return made

    return Subject(
        make,
        params,
        split,
        1e-9,
        rated=lambda changes: make(WHOLE, changes),
        first={**declared, **options},
        rates=rates,
        invariant=invariant,
        gradient=problem.gradient(params, split),
    )


def _check(subject: Subject, skip: Sequence[str]) -> Checked:
    held, skipped = [], {}
    for name, law in LAWS.items():
        why = "you asked to skip it" if name in skip else law(subject)
        if why is None:
            held.append(name)
        else:
            skipped[name] = why
    return Checked(tuple(held), skipped)


# --- the laws, in the order in which they are checked; each returns why it cannot be checked, or None -----------------


def _structure(of: Subject) -> None:
    try:
        check_structure(of.ragged, of.params, data_shapes(of.split))
    except ValueError as error:
        raise LawError(f"law 'structure': {error}") from error


def _dtype(of: Subject) -> None:
    laws.dtypes_stay(of.ragged, of.params, of.split)


def _purity(of: Subject) -> None:
    laws.is_pure((of.ragged, of.make(RAGGED)), of.params, of.split)


def _mask(of: Subject) -> None:
    laws.own_examples_only(of.ragged, of.params, of.split, tolerance=of.tolerance)


def _messages(of: Subject) -> None:
    laws.messages_fit_every_site(of.ragged, of.params, of.split)


def _weight(of: Subject) -> None:
    laws.weight_zero_counts_for_nothing(of.ragged, of.params, of.split)


def _engine(of: Subject) -> None:
    params, states = interpret(of.ragged, of.params, of.split, rounds=ROUNDS, cohort=of.cohort, arrival=LOSSY)
    what = "the engine differs from a plain reading, client by client, under lost uploads"
    here = (of.lossy.params, of.lossy.states)
    laws.agrees("engine", what, here, (params, states), causes=laws.ENGINE, tolerance=of.tolerance)


def _plan(of: Subject) -> None:
    spread = of.lossy_run(plan="lanes", chunk=2)
    what = "two clients at a time give another result than one after the other"
    pair = [(run.params, run.states) for run in (spread, of.lossy)]
    laws.agrees("plan", what, *pair, causes=laws.ENGINE, tolerance=of.tolerance)


def _order(of: Subject) -> None:
    order = np.random.default_rng(0).permutation(of.split.num_clients).tolist()
    with laws.numbered(order):
        moved = of.all_clients(Split.from_clients([of.split.client(i) for i in order]))
    laws.order_changes_nothing(of.everyone, moved, order, tolerance=of.tolerance)


def _sign(of: Subject) -> str | None:
    if of.gradient is None:
        return "the loss of an Algorithm is not known; check its factory"
    laws.moves_downhill(of.params, of.everyone.params, of.gradient)
    return None


def _resume(of: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Checkpoints(Path(folder) / "checkpoints", every=1)
        of.lossy_run(checkpoints=place, on_progress=lambda progress: True)
        again = of.lossy_run(checkpoints=place._replace(resume=True))
        states = jax.tree.map(np.asarray, again.states)
    what = "a run that was stopped and resumed ends with other numbers than one that was not"
    here = (again.params, again.server, states)
    laws.same_bits("resume", what, here, (of.lossy.params, of.lossy.server, of.lossy.states), causes=laws.RESUME)


def _rates(of: Subject) -> str | None:
    if of.rates is None or of.rated is None or of.first is None:
        return "give rates, a second value of each option that may be traced"
    rated = of.rated

    def run(rates: Mapping[str, Any]) -> Any:
        result = simulate(rated(rates), of.params, of.split, rounds=2, devices=1)
        return result.params, result.server, result.states

    first = {name: of.first[name] for name in of.rates}
    alone = [(of.everyone.params, of.everyone.server, of.everyone.states)]
    laws.rates_may_be_traced(run, first, of.rates, alone=alone)
    return None


def _invariant(of: Subject) -> str | None:
    if of.invariant is None:
        return "give invariant, if the algorithm keeps one"
    laws.keeps_invariant(of.invariant, of.everyone, of.lossy, tolerance=of.tolerance)
    return None


def _deployed(of: Subject) -> str | None:
    if importlib.util.find_spec("flwr") is None:
        return "flwr is not installed (pip install 'fedbraid[flower]')"
    from fedbraid.testing.deployed import deployed_is_simulated

    deployed_is_simulated(of.whole, of.params, of.split, of.everyone, tolerance=of.tolerance)
    return None


LAWS: dict[str, Callable[[Subject], str | None]] = {
    "structure": _structure,
    "dtype": _dtype,
    "purity": _purity,
    "mask": _mask,
    "messages": _messages,
    "weight": _weight,
    "engine": _engine,
    "plan": _plan,
    "order": _order,
    "sign": _sign,
    "resume": _resume,
    "rates": _rates,
    "invariant": _invariant,
    "deployed": _deployed,
}
"""Every law by its name."""
