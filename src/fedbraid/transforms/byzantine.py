"""Clients that lie: an attack for experiments with robust reductions.

L. Lamport, R. Shostak, M. Pease. The Byzantine Generals Problem. ACM TOPLAS 1982; for federated learning see the papers
named in :mod:`fedbraid.transforms.robust`.

Who lies is a fact about the client, so it is written into its data: :func:`fedbraid.data.mark` adds a field
``byzantine`` of 0 and 1, one value per client repeated over its rows. The attacked client trains as it should and
sends ``factor`` times its upload: -1 flips the sign, 100 scales. Its weight and its state stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from fedbraid.core import Algorithm, Down, Exchange, Report, StructureError, check_number
from fedbraid.local import BYZANTINE, Batches, ClientData, Fold, LocalWork
from fedbraid.transforms.codes import scaled
from fedbraid.transforms.uploads import change_exchanges

__all__ = ["attack"]

PyTree = Any


def attack(alg: Algorithm, *, factor: Any = -1.0, exchanges: Sequence[str] | None = None) -> Algorithm:
    """Clients marked in the data (see :func:`fedbraid.data.mark`) send ``factor`` times their upload.

    Put it over everything that honest clients do, ``attack(clip(algorithm))``: an attacker leaves out what it likes.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = attack(fedavg(lambda params, batch, key: jnp.sum(params**2)), factor=100.0)
    """
    check_number("factor", factor)

    def lie(report: Report, flag: Any) -> Report:
        return report._replace(up=scaled(report.up, jnp.where(flag > 0, factor, 1)))

    def change(exchange: Exchange) -> Exchange:
        return exchange._replace(client=_with_flag(exchange.client, lie))

    return change_exchanges(alg, exchanges, change)


def _with_flag(client: Callable, change: Callable[[Report, Any], Report]) -> Callable:
    """The client whose report is changed by its flag. Steps see batches, so a walk of one step reads it off a row."""
    look = Fold(
        start=lambda down, state, key: jnp.zeros((), jnp.uint8),
        step=lambda flag, batch, key, down: _flag_of(batch),
        finish=lambda flag, down, state, n: flag,
        batches=Batches(1, steps=1, shuffle=False),
    )
    if isinstance(client, LocalWork):
        inner = client.combine

        def combine(results: tuple, down: Down, state: PyTree, key: Any) -> Report:
            return change(inner(results[:-1], down, state, key), results[-1])

        return LocalWork((*client.folds, look), combine)

    def opaque(down: Down, state: PyTree, data: ClientData, key: Any) -> Report:
        return change(client(down, state, data, key), look.run(down, state, data, key))

    return opaque


def _flag_of(batch: dict) -> Any:
    if BYZANTINE not in batch:
        raise StructureError(f"the data does not say who lies: add the field {BYZANTINE!r} with fedbraid.data.mark")
    return batch[BYZANTINE][0].astype(jnp.uint8)
