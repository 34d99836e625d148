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
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    allowed = f"a finite number in {left}{low:g}, {high:g}{right}"
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
