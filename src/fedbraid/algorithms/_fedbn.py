"""FedBN: every client has its own batch normalisation; all other layers are FedAvg's.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou. FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021.

Clients whose inputs differ (other cameras, scanners, hospitals) have other means and variances in every layer. In a
round, client i starts from the server's model, but with the scale, the shift and the running statistics of its own
normalisation layers. It takes local SGD steps on everything (Algorithm 1), and

    w^l <- sum_i n_i w_i^l / sum_i n_i     for every layer l that is not batch normalisation.

A client that never took part has the first values, which are those of a new network.

Sends: all leaves but those of the normalisation layers, down and up. Keeps: these on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm
from fedbraid.local import NORM, Weighting
from fedbraid.transforms.private_leaves import not_all
from fedbraid.transforms.statistics import keep_own

__all__ = ["fedbn"]


def fedbn(
    loss: Loss,
    *,
    norm: str | Sequence[str] | Callable | None = None,
    client_lr: Any = 0.1,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedBN: normalisation layers stay on the clients, the rest of the model is averaged.

    norm: the leaves of the normalisation layers, as patterns of their names (see `fedbraid.transforms.private`); by
        default those that the model declares. Running statistics are always private.

    >>> import jax.numpy as jnp
    >>> alg = fedbn(lambda params, batch, key: jnp.sum(params["w"] ** 2) + params["scale"] ** 2, norm="scale")
    """
    alg = fedavg(loss, client_lr=client_lr, weighting=weighting, **local)
    found: Any = getattr(loss, NORM, None) if norm is None else norm
    if not found:
        raise ValueError(
            "norm: this model does not say which leaves are its normalisation layers, or has none: give patterns of "
            'their names, such as norm = ["*.scale", "*.shift"]'
        )
    return keep_own(alg, loss, not_all(found, "norm"))
