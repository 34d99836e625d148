"""Local training: every client trains its own model and sends nothing. The baseline of personal methods.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. (FedAvg, whose local steps these are; here the whole model is private.)

A client that takes part takes local SGD steps from its own model. A client that never took part has the first model.

Sends: nothing. Keeps: the model on every client.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm
from fedbraid.transforms.statistics import keep_own

__all__ = ["local_only"]


def local_only(loss: Loss, *, client_lr: Any = 0.1, **local: Unpack[ClientOptions]) -> Algorithm:
    """Every client trains alone: the whole model is private.

    >>> import jax.numpy as jnp
    >>> alg = local_only(lambda params, batch, key: jnp.sum(params**2), client_lr=0.1, epochs=1)
    """
    alg = fedavg(loss, client_lr=client_lr, **local)
    return keep_own(alg, loss, lambda params: jax.tree.map(lambda leaf: True, params))
