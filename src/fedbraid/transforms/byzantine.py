"""Clients that lie: an attack for experiments with robust reductions.

L. Lamport, R. Shostak, M. Pease. The Byzantine Generals Problem. ACM TOPLAS 1982; for federated learning see the papers
named in :mod:`fedbraid.transforms.robust`.

Who lies is a fact about the client, so it is written into its data: :func:`mark` adds a field ``byzantine`` of 0 and 1,
one value per client repeated over its rows. The attacked client trains as it should and sends ``factor`` times its
upload: -1 flips the sign, 100 scales. Its weight and its state stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, Exchange, Report, StructureError, check_number
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import Batches, Fold
from fedbraid.transforms.clients import with_fold
from fedbraid.transforms.codes import scaled
from fedbraid.transforms.uploads import change_exchanges

__all__ = ["attack", "mark"]

PyTree = Any
FIELD = "byzantine"
Data = TypeVar("Data", FederatedData, Split)


def mark(data: Data, clients: Sequence[int] | float, *, seed: int = 0) -> Data:
    """The data with some clients marked as Byzantine: those listed, or a share of them drawn at random.

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
            raise ValueError(f"a share of {clients} of {population} clients is nobody; give at least {1 / population}")
        return np.random.default_rng(seed).choice(population, many, replace=False)
    ids = np.asarray(clients, dtype=int)
    if ids.size and (ids.min() < 0 or ids.max() >= population):
        raise ValueError(f"clients must be numbers from 0 to {population - 1}, or a share of them, got {clients}")
    return ids


def _flagged(split: Split, flags: np.ndarray) -> Split:
    return replace(split, arrays={**split.arrays, FIELD: np.repeat(flags, split.sizes)})


def attack(alg: Algorithm, *, factor: Any = -1.0, exchanges: Sequence[str] | None = None) -> Algorithm:
    """Clients marked in the data (see :func:`mark`) send ``factor`` times their upload.

    Put it over everything that honest clients do, ``attack(clip(algorithm))``: an attacker leaves out what it likes.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = attack(fedavg(lambda params, batch, key: jnp.sum(params**2)), factor=100.0)
    """
    check_number("factor", factor)

    def lie(report: Report, flag: Any) -> Report:
        return report._replace(up=scaled(report.up, jnp.where(flag > 0, factor, 1)))

    def change(exchange: Exchange) -> Exchange:
        return exchange._replace(client=with_fold(exchange.client, _LOOK, lie))

    return change_exchanges(alg, exchanges, change)


# Steps see batches, so a pass of one step reads the flag off a row.
_LOOK = Fold(
    start=lambda down, state, key: jnp.zeros((), jnp.uint8),
    step=lambda flag, batch, key, down: _flag_of(batch),
    finish=lambda flag, down, state, n: flag,
    batches=Batches(1, steps=1, shuffle=False),
)


def _flag_of(batch: dict) -> Any:
    if FIELD not in batch:
        raise StructureError(f"the data does not say who lies: add the field {FIELD!r} with fedbraid.transforms.mark")
    return batch[FIELD][0].astype(jnp.uint8)
