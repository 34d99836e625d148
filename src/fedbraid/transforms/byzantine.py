"""Byzantine clients: an attack for experiments with robust reductions.

L. Lamport, R. Shostak, M. Pease. The Byzantine Generals Problem. ACM TOPLAS 1982; for federated learning see the papers
named in :mod:`fedbraid.transforms.robust`.

Attackers are marked in their data: :func:`fedbraid.data.mark` adds a field ``byzantine`` of 0 and 1, one value per
client repeated over its rows. An attacker trains like any client and sends ``factor`` times its upload: -1 flips the
sign, 100 scales. Its weight and its state are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fedbraid.core import Algorithm, Exchange, Report, StructureError, check_number
from fedbraid.local import BYZANTINE, Batches, Fold
from fedbraid.transforms.clients import with_fold
from fedbraid.transforms.codes import scaled
from fedbraid.transforms.uploads import change_exchanges

__all__ = ["attack"]

PyTree = Any


def attack(alg: Algorithm, *, factor: Any = -1.0, exchanges: Sequence[str] | None = None) -> Algorithm:
    """Clients marked in the data (see :func:`fedbraid.data.mark`) send ``factor`` times their upload.

    Apply it outside the other transforms of clients, ``attack(clip(algorithm))``: an attacker need not clip.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = attack(fedavg(lambda params, batch, key: jnp.sum(params**2)), factor=100.0)
    """
    check_number("factor", factor)

    def lie(report: Report, flag: Any) -> Report:
        return report._replace(up=scaled(report.up, jnp.where(flag > 0, factor, 1)))

    def change(exchange: Exchange) -> Exchange:
        return exchange._replace(client=with_fold(exchange.client, _LOOK, lie))

    return change_exchanges(alg, exchanges, change)


# A client function sees its data only as batches, so a fold of one step reads the flag from one row.
_LOOK = Fold(
    start=lambda down, state, key: jnp.zeros((), jnp.uint8),
    step=lambda flag, batch, key, down: _flag_of(batch),
    finish=lambda flag, down, state, n: flag,
    batches=Batches(1, steps=1, shuffle=False),
)


def _flag_of(batch: dict) -> Any:
    if BYZANTINE not in batch:
        raise StructureError(f"the data marks no attackers: add the field {BYZANTINE!r} with fedbraid.data.mark")
    return batch[BYZANTINE][0].astype(jnp.uint8)
