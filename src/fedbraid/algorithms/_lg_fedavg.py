"""LG-FedAvg: every client has its own body; the head is FedAvg's. The mirror image of FedPer.

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. Think Locally,
Act Globally: Federated Learning with Local and Global Representations. arXiv:2001.01523, 2020.

Client i has a local representation l_i (the body) and gets the global model g (the head). It takes local SGD steps on
both at once; only the head is sent and averaged (Algorithm 1):

    (l_i, g_i) <- SGD(l_i, g) on the examples of client i;      g <- sum_i n_i g_i / sum_i n_i.

The auxiliary losses of the paper (fair representations) are not here: add them to the loss. The paper's experiments
start from a model that FedAvg trained: give its parameters as the first ones.

Sends: the head down and up. Keeps: the body on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm
from fedbraid.local import Weighting
from fedbraid.transforms.private_leaves import head_of, not_all
from fedbraid.transforms.statistics import keep_own

__all__ = ["lg_fedavg"]


def lg_fedavg(
    loss: Loss,
    *,
    head: str | Sequence[str] | Callable | None = None,
    client_lr: Any = 0.1,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """LG-FedAvg: the body stays on the clients, the head is averaged.

    head: the leaves that are shared, as patterns of their names (see `fedbraid.transforms.private`); by default those
        that the model declares as its head.

    >>> import jax.numpy as jnp
    >>> alg = lg_fedavg(lambda params, batch, key: jnp.sum(params["w"] ** 2) + params["b"] ** 2, head="b")
    """
    alg = fedavg(loss, client_lr=client_lr, weighting=weighting, **local)
    shared = not_all(head_of(loss, head), "head")
    return keep_own(alg, loss, lambda params: jax.tree.map(lambda head: not head, shared(params)))
