"""Addressed randomness: every random number of a run has an address, not a place in a stream.

A client's key is made from (seed, round, exchange, client), so it depends neither on the order of the cohort nor on
chunks or devices, and a deployed client draws what the simulator draws.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["arrival_key", "client_key", "cohort", "exchange_key", "init_key", "server_key"]

_INIT, _ROUNDS = 0, 1  # of a seed
_SERVER, _CLIENTS = 0, 1  # of an exchange
_WORK, _ARRIVAL = 0, 1  # of a client


def init_key(seed: int) -> Any:
    """For the initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), _INIT)


def exchange_key(seed_key: Any, round_: Any, exchange: int) -> Any:
    """All randomness of one exchange of one round; ``seed_key`` is ``jax.random.key(seed)``."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(seed_key, _ROUNDS), round_), exchange)


def server_key(exchange: Any) -> Any:
    """For ``receive``."""
    return jax.random.fold_in(exchange, _SERVER)


def client_key(exchange: Any, client: Any) -> Any:
    """For the work of one client."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(exchange, _CLIENTS), client), _WORK)


def arrival_key(exchange: Any, client: Any) -> Any:
    """For whether a client's upload arrives."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(exchange, _CLIENTS), client), _ARRIVAL)


def cohort(seed: int, round_: int, exchange: int, population: int, size: int) -> np.ndarray:
    """The clients asked in an exchange: drawn without replacement, the same for every algorithm at a seed.

    >>> cohort(0, 3, 0, population=5, size=5).tolist()
    [0, 1, 2, 3, 4]
    """
    if size == population:
        return np.arange(population)
    return np.sort(np.random.default_rng([seed, round_, exchange]).choice(population, size, replace=False))
