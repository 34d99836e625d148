"""Checks of arguments: concrete values are checked, tracers pass (a sweep is a vmap)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.core import Tracer

__all__ = [
    "StaticValueError",
    "check_choice",
    "check_count",
    "check_number",
    "is_traced",
    "is_zero",
]


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer: known only when the program runs."""
    return isinstance(value, Tracer)


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> Any:
    """``value`` if it is a number in the range; else raise a ValueError with the argument, the value and the range."""
    if is_traced(value):
        return value
    allowed = "a finite number" + _range(low, high, open_low=open_low, open_high=open_high)
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    if isinstance(value, bool | str):  # NumPy would take True for 1 and "1" for 1
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    above = array > low if open_low else array >= low
    below = array < high if open_high else array <= high
    if array.ndim or not np.isfinite(array) or not (above and below):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return value


def _range(low: float, high: float, *, open_low: bool, open_high: bool) -> str:
    """A range in words.

    >>> _range(0, math.inf, open_low=True, open_high=False)
    ' above 0'
    >>> _range(0, 1, open_low=False, open_high=True)
    ' of at least 0 and below 1'
    """
    ends = [f"above {low:g}" if open_low else f"of at least {low:g}"] if low > -math.inf else []
    ends += [f"below {high:g}" if open_high else f"of at most {high:g}"] if high < math.inf else []
    return " " + " and ".join(ends) if ends else ""


class StaticValueError(ValueError):
    """A traced value in a place whose value must be known before the program is compiled."""


def _refuse_tracer(name: str, value: Any) -> None:
    if is_traced(value):
        raise StaticValueError(f"{name} decides the program's shape: it cannot be traced, pass a Python value")


def check_count(name: str, value: Any, *, low: int = 1) -> int:
    """``value`` as an int if it is a whole number of at least ``low``. Counts and shapes are static: tracers fail."""
    _refuse_tracer(name, value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """``value`` if it is one of ``allowed``."""
    _refuse_tracer(name, value)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def is_zero(value: Any) -> bool:
    """Whether a hyper-parameter is known to be 0, so that the term it multiplies need not be computed."""
    return not is_traced(value) and bool(np.all(np.asarray(value) == 0))
