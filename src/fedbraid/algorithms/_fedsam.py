"""FedSAM and MoFedSAM: sharpness-aware local steps, which look for flat minima; without and with momentum.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu. Generalized Federated Learning via Sharpness Aware Minimization. ICML
2022. Algorithms 1 and 2.

A sharpness-aware step (SAM, Foret et al. 2021) uses the gradient at the worst point near the iterate, to first order:

    g = grad f_i(y; batch),    y' = y + rho g / |g|,    y <- y - client_lr grad f_i(y'; batch).

The point y' is a constant of the gradient, so no second derivatives occur. FedSAM is FedAvg with such steps. MoFedSAM
mixes them with the last round's mean step, as FedCM does: y <- y - client_lr (alpha grad f_i(y') + (1 - alpha) Delta).
rho = 0 is FedAvg, or FedCM. The reported training loss is that at y'.

Sends, in models: 1 down, 1 up; MoFedSAM 2 down. Keeps: nothing on the clients, except the state of an optimizer with
``client_opt_state="kept"``. A local step costs two gradients.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._fedcm import fedcm
from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm, check_number, is_zero
from fedbraid.local import LocalOptions, Weighting, grad

__all__ = ["fedsam", "mofedsam", "sharp"]

TINY = 1e-12  # a gradient of norm 0 has no direction: the point stays where it is


def sharp(loss: Loss, rho: Any) -> Loss:
    """The loss at the worst point at distance ``rho``, to first order; its gradient is that of SAM.

    >>> flat = sharp(lambda params, batch, key: jnp.sum(params**2), 0.5)
    >>> float(flat(jnp.array([2.0]), {}, None)), float(jax.grad(flat)(jnp.array([2.0]), {}, None)[0])
    (6.25, 5.0)
    """
    check_number("rho", rho, low=0)
    if is_zero(rho):
        return loss

    def at_the_worst_point(params: Any, batch: dict, key: Any) -> Any:
        g = grad(loss)(jax.lax.stop_gradient(params), batch, key)
        squared = sum(jnp.sum(leaf.astype(jnp.result_type(float)) ** 2) for leaf in jax.tree.leaves(g))
        scale = rho / jnp.maximum(jnp.sqrt(squared), TINY)
        worst = jax.tree.map(lambda y, g: y + scale.astype(y.dtype) * jax.lax.stop_gradient(g), params, g)
        return loss(worst, batch, key)

    return at_the_worst_point


def fedsam(
    loss: Loss,
    *,
    rho: Any = 0.05,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedSAM: FedAvg with sharpness-aware local steps.

    rho: distance from the model at which the gradient is taken; 0 is FedAvg.

    >>> alg = fedsam(lambda params, batch, key: jnp.sum(params**2), rho=0.1, client_lr=0.05)
    """
    return fedavg(sharp(loss, rho), client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)


def mofedsam(
    loss: Loss,
    *,
    rho: Any = 0.05,
    alpha: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "uniform",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """MoFedSAM: FedCM with sharpness-aware local steps.

    rho: distance from the model at which the gradient is taken; 0 is FedCM.
    alpha: weight of the client's own gradient; the last mean step has the weight 1 - alpha.

    >>> alg = mofedsam(lambda params, batch, key: jnp.sum(params**2), rho=0.1, alpha=0.2)
    """
    return fedcm(sharp(loss, rho), alpha=alpha, client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)
