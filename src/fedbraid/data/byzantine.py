"""Mark attackers in the data, for experiments with ``fedbraid.transforms.attack``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fedbraid.core import check_number
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import BYZANTINE

__all__ = ["mark"]

Data = TypeVar("Data", FederatedData, Split)


def mark(data: Data, clients: Sequence[int] | float, *, seed: int = 0) -> Data:
    """The data with some clients marked as Byzantine: those listed, or a random share of all clients.

    >>> split = Split.from_clients([{"x": np.zeros((2, 1))}, {"x": np.ones((1, 1))}])
    >>> mark(split, [1]).arrays["byzantine"].tolist()
    [0, 0, 1]
    """
    split = data.train if isinstance(data, FederatedData) else data
    flags = np.zeros(split.num_clients, np.uint8)
    flags[_chosen(clients, split.num_clients, seed)] = 1
    if isinstance(data, Split):
        return _flagged(data, flags)
    others = {
        name: _flagged(other, np.zeros(other.num_clients, np.uint8))
        for name, other in data.splits.items()
        if name != "train"
    }
    return replace(data, train=_flagged(split, flags), **others)


def _chosen(clients: Sequence[int] | float, population: int, seed: int) -> Any:
    if isinstance(clients, float | int):
        check_number("clients", clients, low=0, high=1)
        many = round(clients * population)
        if clients and not many:
            raise ValueError(f"a share of {clients} of {population} clients marks none; give at least {1 / population}")
        return np.random.default_rng(seed).choice(population, many, replace=False)
    ids = np.asarray(clients, dtype=int)
    if ids.size and (ids.min() < 0 or ids.max() >= population):
        raise ValueError(f"clients must be indices from 0 to {population - 1}, or a share of them, got {clients}")
    return ids


def _flagged(split: Split, flags: np.ndarray) -> Split:
    return replace(split, arrays={**split.arrays, BYZANTINE: np.repeat(flags, split.sizes)})
