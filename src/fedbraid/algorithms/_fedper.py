"""FedPer: every client has its own head; the body is FedAvg's.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. Federated Learning with Personalization Layers.
arXiv:1912.00818, 2019.

The model is a body W and a head V_i, the last layers. In a round, client i starts from the server's body and its own
head and takes local SGD steps on both at once (Algorithm 1):

    (W_i, V_i) <- SGD(W, V_i) on the examples of client i;      W <- sum_i n_i W_i / sum_i n_i.

Only the body is sent. A client that never took part has the first head.

Sends: the body down and up. Keeps: the head on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm
from fedbraid.local import Weighting
from fedbraid.transforms.private_leaves import head_of, not_all
from fedbraid.transforms.statistics import keep_own

__all__ = ["fedper"]


def fedper(
    loss: Loss,
    *,
    head: str | Sequence[str] | Callable | None = None,
    client_lr: Any = 0.1,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedPer: the head stays on the clients, the body is averaged.

    head: the leaves of the head, as patterns of their names (see `fedbraid.transforms.private`); by default those that
        the model declares. ``()`` is FedAvg.

    >>> import jax.numpy as jnp
    >>> alg = fedper(lambda params, batch, key: jnp.sum(params["w"] ** 2) + params["b"] ** 2, head="b")
    """
    alg = fedavg(loss, client_lr=client_lr, weighting=weighting, **local)
    if head == ():
        return alg
    return keep_own(alg, loss, not_all(head_of(loss, head), "head"))
