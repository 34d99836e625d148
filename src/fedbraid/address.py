"""Random keys by address: every key is made from its place in the run, not taken from one stream.

A client's key is made from (seed, round, exchange, client). So it depends neither on the order of the cohort nor on
chunks or devices, and a deployed client draws the same numbers as a simulated one.

The noise of differential privacy has keys of its own, which only simulations use. Whoever knows the seed can compute
this noise and subtract it, so it measures the effect of privacy and protects nothing. In a deployment the noise and the
cohorts of private algorithms come from the operating system's entropy (:mod:`fedbraid.flower.entropy`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = [
    "arrival_key",
    "client_key",
    "client_noise",
    "cohort",
    "exchange_key",
    "init_key",
    "normals",
    "rows_key",
    "server_key",
    "server_noise",
    "uniforms",
]

_INIT, _ROUNDS, _ROWS = 0, 1, 2  # of a seed
_SERVER, _CLIENTS, _SERVER_NOISE = 0, 1, 2  # of an exchange
_WORK, _ARRIVAL, _NOISE = 0, 1, 2  # of a client
_MASK = (1 << 64) - 1


def init_key(seed: int) -> Any:
    """The key of the initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), _INIT)


def exchange_key(seed_key: Any, round_: Any, exchange: int) -> Any:
    """The key of one exchange of one round, from which its other keys are made; ``seed_key`` is ``key(seed)``."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(seed_key, _ROUNDS), round_), exchange)


def server_key(exchange: Any) -> Any:
    """The key that the server's ``receive`` gets."""
    return jax.random.fold_in(exchange, _SERVER)


def client_key(exchange: Any, client: Any) -> Any:
    """The key of one client's local work."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(exchange, _CLIENTS), client), _WORK)


def rows_key(seed_key: Any, client: Any) -> Any:
    """The key by which a client divides its rows, the same in every round; ``seed_key`` is ``key(seed)``."""
    return jax.random.fold_in(jax.random.fold_in(seed_key, _ROWS), client)


def arrival_key(exchange: Any, client: Any) -> Any:
    """The key that decides whether a client's upload arrives."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(exchange, _CLIENTS), client), _ARRIVAL)


def normals(key: Any) -> Callable[[Any], Any]:
    """A function that draws standard normal numbers in the shape of a tree, other ones in every call."""
    calls = 0

    def draw(like: Any) -> Any:
        nonlocal calls
        leaves, tree = jax.tree.flatten(like)
        keys = jax.random.split(jax.random.fold_in(key, calls), max(len(leaves), 1))
        calls += 1
        drawn = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=False)]
        return jax.tree.unflatten(tree, drawn)

    return draw


def client_noise(exchange: Any, client: Any) -> Callable[[Any], Any]:
    """A simulated client's source of noise: it protects nothing, because it is made from the seed."""
    return normals(jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(exchange, _CLIENTS), client), _NOISE))


def server_noise(exchange: Any) -> Callable[[Any], Any]:
    """The simulated server's source of noise: it protects nothing, because it is made from the seed."""
    return normals(jax.random.fold_in(exchange, _SERVER_NOISE))


def cohort(seed: int, round_: int, exchange: int, population: int, size: int) -> np.ndarray:
    """The clients of an exchange, drawn without replacement. With the same seed all algorithms get the same cohorts.

    >>> cohort(0, 3, 0, population=5, size=5).tolist()
    [0, 1, 2, 3, 4]
    """
    if size == population:
        return np.arange(population)
    return np.sort(np.random.default_rng([seed, round_, exchange]).choice(population, size, replace=False))


def uniforms(seed: int, purpose: int, *place: Any) -> Any:
    """Uniform numbers in (0, 1) by address, on the host: one for each entry of the (broadcast) arrays ``place``.

    The numbers of simulated time: the speed of a device has the place (client), the duration of one piece of work has
    (round, client). SplitMix64 (Steele, Lea, Flood, 2014) mixes the seed and the place into 64 bits.

    >>> both = uniforms(0, 7, np.array([3, 4]))
    >>> bool(both[1] == uniforms(0, 7, 4)), bool(both[0] == both[1])
    (True, False)
    """
    start = _mix(_mix(seed) ^ purpose)
    if all(isinstance(part, int) for part in place):  # Python's integers: ten times faster than arrays of one number
        for part in place:
            start = _mix(start ^ part)
        return ((start >> 11) + 0.5) * 2.0**-53
    mixed = np.uint64(start)
    with np.errstate(over="ignore"):
        for part in place:
            mixed = _mix_array(mixed ^ np.asarray(part).astype(np.uint64))
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
