"""Shamir's secret sharing (1979): any ``threshold`` shares give the secret, fewer give nothing.

A secret is the value at 0 of a random polynomial of degree threshold - 1 over a prime field. A share is its value at a
point that is not 0. Any threshold - 1 shares fit every secret with exactly one polynomial each, so they say nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["PRIME", "SHARE", "combine", "from_bytes", "recover", "split", "to_bytes"]

PRIME = 2**256 + 297  # the smallest prime above 2^256: the field holds any 32 bytes
SHARE = 33  # bytes of an element of the field
SUBSETS = 64  # largest number of sets of shares that are tried when some shares are wrong


def split(secret: int, points: Sequence[int], threshold: int, *, prime: int = PRIME) -> dict[int, int]:
    """One share of the secret for each point.

    >>> shares = split(1234, [1, 2, 3, 4], 3)
    >>> combine({point: shares[point] for point in (4, 1, 3)})
    1234
    """
    if not 0 <= secret < prime:
        raise ValueError(f"the secret must be from 0 to {prime - 1}")
    if len(set(points)) < len(points) or any(not 0 < point < prime for point in points):
        raise ValueError(f"points must differ and lie between 0 and the prime, got {list(points)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold must be from 1 to the number of points, {len(points)}, got {threshold}")
    coefficients = [secret, *(secrets.randbelow(prime) for _ in range(threshold - 1))]
    return {point: _value(coefficients, point, prime) for point in points}


def _value(coefficients: Sequence[int], point: int, prime: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % prime
    return total


@functools.lru_cache(maxsize=64)
def weights_at_zero(points: tuple[int, ...], *, prime: int = PRIME) -> list[int]:
    """Lagrange's weights: the value at 0 of a polynomial is the weighted sum of its values at the points."""
    out = []
    for i in points:
        above, below = 1, 1
        for j in points:
            if j != i:
                above, below = above * j % prime, below * (j - i) % prime
        out.append(above * pow(below, -1, prime) % prime)
    return out


def combine(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """The secret, from at least ``threshold`` shares. From fewer shares, or with a wrong one, it is another number."""
    weights = weights_at_zero(tuple(shares), prime=prime)
    return sum(weight * share for weight, share in zip(weights, shares.values(), strict=True)) % prime


def recover(shares: Mapping[int, int], threshold: int, right: Callable[[int], bool]) -> int | None:
    """The secret that passes the check ``right``, from sets of ``threshold`` shares; None if none does.

    If some shares are wrong, other sets are tried, up to a fixed number.
    """
    if len(shares) < threshold:
        return None
    for points in _subsets(sorted(shares), threshold):
        secret = combine({point: shares[point] for point in points})
        if right(secret):
            return secret
    return None


def _subsets(points: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Sets of points: all, if they are few; else the first one and random ones, which leave out each point often."""
    if math.comb(len(points), size) <= SUBSETS:
        yield from itertools.combinations(points, size)
        return
    yield tuple(points[:size])
    for _ in range(SUBSETS - 1):
        yield tuple(random.sample(points, size))


def to_bytes(share: int) -> bytes:
    """The share as bytes; `from_bytes` reads them."""
    return share.to_bytes(SHARE, "big")


def from_bytes(data: bytes) -> int | None:
    """The share in 33 bytes; None if they are no element of the field."""
    share = int.from_bytes(data, "big")
    return share if len(data) == SHARE and share < PRIME else None
