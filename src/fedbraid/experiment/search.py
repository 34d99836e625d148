"""Search spaces: the values that keys may take, and which points to try.

A space is a mapping from keys of a configuration to a `Choice` (a list of values) or a `Range` (an interval). Grids
take only choices; random and adaptive search take both. Adaptive search is optuna's tree-structured Parzen estimator
(J. Bergstra et al., Algorithms for Hyper-Parameter Optimization, NIPS 2011), asked for a batch of points at a time
because a batch is one program. Successive halving (K. Jamieson, A. Talwalkar, Non-stochastic Best Arm Identification
and Hyperparameter Optimization, AISTATS 2016) can be added to each of them; `rungs` computes its schedule.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = ["Choice", "Range", "Space", "adapt", "grid", "over", "rungs", "sample", "values_of"]


class Choice(NamedTuple):
    """One value of a list."""

    values: tuple[Any, ...]


class Range(NamedTuple):
    """A number between two others."""

    low: float
    high: float
    kind: Literal["uniform", "loguniform", "integers"]


Space = Mapping[str, Choice | Range]


def _spaced(make: Callable, low: float, high: float, count: float) -> Choice:
    if count != int(count) or count < 1:
        raise ValueError(f"the number of points must be a whole number of at least 1, got {count:g}")
    # rounded to twelve digits, because 10 ** x has rounding errors
    return Choice(tuple(float(f"{value:.12g}") for value in make(low, high, int(count))))


def _range(kind: Literal["uniform", "loguniform", "integers"], low: float, high: float) -> Range:
    if not low < high or (kind == "loguniform" and low <= 0):
        raise ValueError(
            f"{kind} needs low < high{' and low > 0' if kind == 'loguniform' else ''}, got {low:g}, {high:g}"
        )
    if kind == "integers" and (low != int(low) or high != int(high)):
        raise ValueError(f"integers needs whole numbers, got {low:g}, {high:g}")
    return Range(low, high, kind)


_FORMS: dict[str, tuple[int, Callable[..., Choice | Range]]] = {
    "logspace": (3, lambda *a: _spaced(np.logspace, *a)),
    "linspace": (3, lambda *a: _spaced(np.linspace, *a)),
    "geomspace": (3, lambda *a: _spaced(np.geomspace, *a)),
    "uniform": (2, lambda *a: _range("uniform", *a)),
    "loguniform": (2, lambda *a: _range("loguniform", *a)),
    "integers": (2, lambda *a: _range("integers", *a)),
}
_HELP = (
    "write logspace(-4,0,9) (powers of ten), linspace(0,1,5), geomspace(0.1,10,3), values such as 0.1,0.3,1, or, to "
    "search at random or adaptively, uniform(0,1), loguniform(1e-4,1), integers(1,20)"
)


def over(key: str, given: Any) -> Choice | Range:
    """The values of a key, as a user may write them: ``logspace(-4,0,9)``, ``0.1,0.3,1``, a list, a single value.

    >>> over("algorithm.client_lr", "logspace(-2,0,3)")
    Choice(values=(0.01, 0.1, 1.0))
    >>> over("algorithm.weighting", "examples,uniform").values
    ('examples', 'uniform')
    >>> over("algorithm.client_lr", "loguniform(1e-4,1)")
    Range(low=0.0001, high=1.0, kind='loguniform')
    """
    if isinstance(given, Choice | Range):
        return given
    if isinstance(given, list | tuple):
        values = tuple(given)
    elif not isinstance(given, str):
        values = (given,)
    elif form := re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", given):
        return _form(key, given, form[1], form[2])
    elif given.strip().startswith(tuple(f"{name}(" for name in _FORMS)):
        raise ValueError(f"{key}: {given!r} has no closing bracket; {_HELP}")
    else:
        values = _listed(given)
    if not values:
        raise ValueError(f"{key}: no values in {given!r}; {_HELP}")
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}: values must be finite, got {value!r} in {given!r}")
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f"{key}: values must differ, got {given!r}")
    return Choice(values)


def _form(key: str, given: str, name: str, inside: str) -> Choice | Range:
    if name not in _FORMS:
        raise ValueError(f"{key}: there is no function {name}(...), got {given!r}; {_HELP}")
    number, make = _FORMS[name]
    try:
        numbers = [float(part) for part in inside.split(",")]
    except ValueError:
        raise ValueError(f"{key}: {given!r} has an argument that is not a number; {_HELP}") from None
    if len(numbers) != number or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{key}: {name} takes {number} finite numbers, got {given!r}; {_HELP}")
    try:
        return make(*numbers)
    except ValueError as error:
        raise ValueError(f"{key}: {given!r}: {error}") from None


def _listed(text: str) -> tuple[Any, ...]:
    for attempt in (text, f"[{text}]"):
        try:
            value = tomllib.loads(f"value = {attempt}")["value"]
        except tomllib.TOMLDecodeError:
            continue
        return tuple(value) if isinstance(value, list) else (value,)
    return tuple(part.strip() for part in text.split(",") if part.strip())  # bare words are strings


def values_of(space: Choice | Range) -> tuple[Any, ...]:
    """The values of a choice; for a range, its two ends."""
    if isinstance(space, Choice):
        return space.values
    ends = (space.low, space.high)
    return tuple(map(int, ends)) if space.kind == "integers" else ends


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination; the last key changes fastest.

    >>> grid({"a": Choice((1, 2)), "b": Choice(("x", "y"))})[1]
    {'a': 1, 'b': 'y'}
    """
    for key, one in space.items():
        if isinstance(one, Range):
            raise ValueError(
                f"{key}: a grid needs a number of points, such as logspace(-4,0,9); "
                f"{one.kind}({one.low:g},{one.high:g}) is for search = random or adaptive"
            )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*map(values_of, space.values()))]


def sample(space: Space, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` random points; the first points do not depend on ``count``.

    >>> sample({"a": Range(0, 1, "uniform")}, 2, seed=0) == sample({"a": Range(0, 1, "uniform")}, 9, seed=0)[:2]
    True
    """
    rng = np.random.default_rng([seed, 0x5EA2C4])
    return [{key: _draw(one, rng) for key, one in space.items()} for _ in range(count)]


def _draw(one: Choice | Range, rng: np.random.Generator) -> Any:
    if isinstance(one, Choice):
        return one.values[int(rng.integers(len(one.values)))]
    if one.kind == "integers":
        return int(rng.integers(int(one.low), int(one.high) + 1))
    if one.kind == "uniform":
        return float(rng.uniform(one.low, one.high))
    return float(np.exp(rng.uniform(np.log(one.low), np.log(one.high))))


def adapt(
    space: Space, seen: Sequence[tuple[Mapping[str, Any], float]], count: int, *, seed: int
) -> list[dict[str, Any]]:
    """The next ``count`` points to try, chosen by optuna from the ``seen`` points and their losses (inf: diverged).

    The result depends only on the arguments, so a search that was stopped continues with the same points.
    """
    try:
        import optuna
    except ImportError:
        raise ValueError("adaptive search needs optuna: pip install 'fedbraid[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {key: _distribution(optuna, one) for key, one in space.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # constant_liar makes the points of one batch differ: each is chosen as if the others had scored badly
        sampler = optuna.samplers.TPESampler(seed=seed + len(seen), constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    for point, loss in seen:
        params = {key: _encode(one, point[key]) for key, one in space.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=float(loss)))
    asked = [study.ask(spaces).params for _ in range(count)]
    return [{key: _decode(one, params[key]) for key, one in space.items()} for params in asked]


def _ordered(one: Choice) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in one.values)


def _distribution(optuna: Any, one: Choice | Range) -> Any:
    made = optuna.distributions
    if isinstance(one, Choice):  # a number is encoded by its position in the sorted list, which keeps the order
        places = len(one.values)
        return made.IntDistribution(0, places - 1) if _ordered(one) else made.CategoricalDistribution(range(places))
    if one.kind == "integers":
        return made.IntDistribution(int(one.low), int(one.high))
    return made.FloatDistribution(one.low, one.high, log=one.kind == "loguniform")


def _sorted(one: Choice) -> list[Any]:
    return sorted(one.values) if _ordered(one) else list(one.values)


def _encode(one: Choice | Range, value: Any) -> Any:
    return _sorted(one).index(value) if isinstance(one, Choice) else value


def _decode(one: Choice | Range, value: Any) -> Any:
    return _sorted(one)[value] if isinstance(one, Choice) else value


def rungs(rounds: int, points: int, eta: int) -> list[tuple[int, int]]:
    """Successive halving: for each rung its rounds and how many points continue; the last rung has all rounds.

    A rung keeps the best 1/eta of its points and gives them eta times the rounds, until one is left.

    >>> rungs(900, points=9, eta=3)
    [(100, 3), (300, 1), (900, 0)]
    """
    if eta < 2:
        raise ValueError(f"halving (keep one point in N) must be at least 2, got {eta}")
    left, kept = points, []
    while left > 1:
        left = max(1, left // eta)
        kept.append(left)
    marks = [max(1, rounds // eta ** (len(kept) - i)) for i in range(len(kept))]
    ladder: dict[int, int] = {}
    for mark, go_on in zip(marks, kept, strict=True):  # rungs at the same round are merged
        if mark < rounds:
            ladder[mark] = go_on
    return [*ladder.items(), (rounds, 0)]
