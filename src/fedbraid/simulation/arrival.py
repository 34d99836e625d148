"""Arrival models: which uploads arrive, with dropouts and stragglers.

An arrival model is a function ``(key, steps) -> bool`` of a client's random key and its number of local steps in the
exchange. The exchange itself refuses uploads that are not finite (see :func:`fedbraid.core.finite`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedbraid.core import check_number

__all__ = ["Arrival", "bernoulli", "both", "deadline", "everyone"]

Arrival = Callable[[Any, Any], Any]


def everyone(key: Any, steps: Any) -> Any:
    """Every upload arrives."""
    del key, steps
    return jnp.array(True)


def bernoulli(drop: Any) -> Arrival:
    """Each upload is lost with probability ``drop``, independently.

    >>> bool(bernoulli(0.0)(jax.random.key(0), 5))
    True
    """
    check_number("drop", drop, low=0, high=1, open_high=True)
    return lambda key, steps: ~jax.random.bernoulli(key, drop)


def deadline(limit: Any, *, seconds_per_step: Any = 1.0, median: Any = 1.0, sigma: Any = 0.5) -> Arrival:
    """An upload arrives if ``steps * seconds_per_step * speed + latency <= limit``.

    Latency is log-normal with the given median and sigma. A client's speed factor in the round is log-normal with
    median 1 and the same sigma.
    """
    check_number("limit", limit, low=0, open_low=True)
    check_number("seconds_per_step", seconds_per_step, low=0)
    check_number("median", median, low=0, open_low=True)
    check_number("sigma", sigma, low=0)

    def arrives(key: Any, steps: Any) -> Any:
        slow, late = jnp.exp(sigma * jax.random.normal(key, (2,)))
        return steps * seconds_per_step * slow + median * late <= limit

    return arrives


def both(first: Arrival, second: Arrival) -> Arrival:
    """An upload arrives if it arrives under both models. They draw independently."""

    def arrives(key: Any, steps: Any) -> Any:
        a, b = jax.random.split(key)
        return first(a, steps) & second(b, steps)

    return arrives
