"""APFL: a client's model is a mixture of a local model and the global one; the mixing weight may adapt.

Y. Deng, M. M. Kamani, M. Mahdavi. Adaptive Personalized Federated Learning. arXiv:2003.13461, 2020. Algorithm 1.

The global model w is trained by FedAvg. Client i keeps v_i and uses the mixture alpha_i v_i + (1 - alpha_i) w. On every
batch of its local steps it moves both models, from the same point:

    w_i <- w_i - client_lr grad f_i(w_i),      m = alpha_i v_i + (1 - alpha_i) w_i  with the w_i before that step,
    v_i <- v_i - client_lr alpha_i grad f_i(m)          the gradient of v -> f_i(alpha_i v + (1 - alpha_i) w_i)

alpha_i = 1 is local training, and alpha_i = 0 is FedAvg. With ``adapt`` the mixing weight takes gradient steps too
(equation 10 of the paper), and stays in [0, 1]:

    alpha_i <- alpha_i - alpha_lr <grad f_i(m), v_i - w_i>.

v_i starts at the initial model. v_i and alpha_i have no effect on what the client sends: the global part is FedAvg.

Sends, in models: 1 down, 1 up. Keeps: one model and a number per client. A client's model is the mixture with the
newest global model.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm, Down, Report, check_number
from fedbraid.local import Fold, LocalWork, Weighting, value_and_grad

__all__ = ["ApflState", "apfl"]

PyTree = Any


class ApflState(NamedTuple):
    """What a client keeps: its local model, its mixing weight, and the state of the optimizer of w_i."""

    v: PyTree
    alpha: Any
    opt: PyTree


class Pair(NamedTuple):
    """A client's carry: that of FedAvg, the local model and the mixing weight."""

    walk: Any
    v: PyTree
    alpha: Any


def mixture(alpha: Any, v: PyTree, w: PyTree) -> PyTree:
    """alpha v + (1 - alpha) w."""
    return jax.tree.map(lambda v, w: alpha.astype(v.dtype) * v + (1 - alpha).astype(w.dtype) * w, v, w)


def apfl(
    loss: Loss,
    *,
    alpha: Any = 0.5,
    adapt: bool = False,
    alpha_lr: Any = None,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """APFL: FedAvg, and a local model on every client that is mixed with the global one.

    Y. Deng, M. M. Kamani, M. Mahdavi. Adaptive Personalized Federated Learning. arXiv:2003.13461, 2020.

    alpha: weight of the local model in the mixture; with ``adapt`` its first value, which must be above 0 (with
        alpha = 0 the local model is never trained).
    adapt: whether clients learn alpha by gradient steps.
    alpha_lr: learning rate of alpha; default: ``client_lr``.

    >>> alg = apfl(lambda params, batch, key: jnp.sum(params**2), alpha=0.25, client_lr=0.1)
    """
    check_number("alpha", alpha, low=0, high=1, open_low=adapt)
    if alpha_lr is not None:
        check_number("alpha_lr", alpha_lr, low=0)
    alpha_rate = client_lr if alpha_lr is None else alpha_lr
    train = fedavg(loss, client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)
    exchange = train.exchanges[0]
    work = exchange.client
    assert isinstance(work, LocalWork)
    [average] = work.folds

    def start(down: Down, state: ApflState, key: Any) -> Pair:
        return Pair(average.start(down, state.opt, key), state.v, state.alpha)

    def step(pair: Pair, batch: dict, key: Any, down: Down) -> Pair:
        w, v, a = pair.walk.params, pair.v, pair.alpha
        _, g = value_and_grad(loss)(mixture(a, v, w), batch, key)
        after = jax.tree.map(lambda v, g: v - client_lr * a.astype(v.dtype) * g, v, g)
        if adapt:
            parts = zip(*map(jax.tree.leaves, (g, v, w)), strict=True)
            slope = sum(jnp.sum((g * (v - w)).astype(a.dtype)) for g, v, w in parts)
            a = jnp.clip(a - alpha_rate * slope, 0, 1)
        return Pair(average.step(pair.walk, batch, key, down), after, a)

    def finish(pair: Pair, down: Down, state: ApflState, n: Any) -> Report:
        report = average.finish(pair.walk, down, state.opt, n)
        metrics = {**report.metrics, "alpha": pair.alpha} if adapt else report.metrics
        return report._replace(state=ApflState(pair.v, pair.alpha, report.state), metrics=metrics)

    def init_client(params: PyTree) -> ApflState:
        return ApflState(params, jnp.asarray(alpha, jnp.result_type(float)), train.init_client(params))

    client = LocalWork((Fold(start, step, finish, average.batches),))
    return train._replace(
        init_client=init_client,
        exchanges=(exchange._replace(client=client),),
        personal=lambda server, state: mixture(state.alpha, state.v, server.params),
    )
