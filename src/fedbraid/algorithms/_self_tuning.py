"""FedAvg with a part that tunes itself: the server's rate (fedexp, fedhyper) or the clients' rates (delta_sgd).

The mathematics is in one file each: `fedbraid.transforms.extrapolation`, `fedbraid.transforms.hypergradients` and
`fedbraid.algorithms.local_smoothness`. As transforms, and as ``client_opt="delta_sgd"``, the same parts work over other
algorithms, for example FedExP over SCAFFOLD.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

from fedbraid import transforms
from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.algorithms.local_smoothness import delta_sgd_steps
from fedbraid.core import Algorithm, check_number
from fedbraid.local import LocalOptions, Weighting

__all__ = ["delta_sgd", "fedexp", "fedhyper"]


def fedexp(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    eps: Any = 1e-3,
    limit: Any = None,
    average: bool = False,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedExP: FedAvg whose server rate grows with the disagreement of the clients' updates.

    D. Jhunjhunwala, S. Wang, G. Joshi. FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023.

    The options are those of `fedbraid.transforms.fedexp`, which also works over FedProx, SCAFFOLD and others.

    >>> alg = fedexp(lambda params, batch, key: (params**2).sum(), client_lr=0.05)
    """
    inner = fedavg(loss, client_lr=client_lr, weighting=weighting, **local)
    return transforms.fedexp(inner, eps=eps, limit=limit, average=average)


def fedhyper(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    beta: Any = 0.2,
    rule: Literal["multiplicative", "additive"] = "multiplicative",
    limit: Any = 100.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedHyper: FedAvg whose server rate is moved by the inner products of successive mean updates.

    Z. Wang, J. Wang, A. Li. FedHyper: A Universal and Robust Learning Rate Scheduler for Federated Learning with
    Hypergradient Descent. ICLR 2024.

    The options are those of `fedbraid.transforms.hypergradient`.

    >>> alg = fedhyper(lambda params, batch, key: (params**2).sum(), client_lr=0.05)
    """
    inner = fedavg(loss, client_lr=client_lr, weighting=weighting, **local)
    return transforms.hypergradient(inner, beta=beta, rule=rule, limit=limit)


def delta_sgd(
    loss: Loss,
    *,
    client_lr: Any = 0.2,
    gamma: Any = 2.0,
    delta: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """Delta-SGD: FedAvg whose clients take their step sizes from the smoothness along their own path.

    J. L. Kim, M. T. Toghani, C. A. Uribe, A. Kyrillidis. Adaptive Federated Learning with Auto-Tuned Clients. ICLR
    2024.

    client_lr: the rate of the first step of every round.
    gamma, delta: limits of the rate and of its growth; see `fedbraid.algorithms.local_smoothness`.

    >>> alg = delta_sgd(lambda params, batch, key: (params**2).sum())
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("gamma", gamma, low=0, open_low=True)
    check_number("delta", delta, low=0)

    def steps(learning_rate: Any) -> Any:
        return delta_sgd_steps(learning_rate, gamma, delta)

    return fedavg(loss, client_lr=client_lr, server_lr=server_lr, weighting=weighting, client_opt=steps, **local)
