"""Ditto: every client also trains a personal model, which is pulled towards the global one.

T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
Algorithm 1.

The global model w is trained by FedAvg. Client k keeps a personal model v_k, at first the initial model. It solves

    min over v of  F_k(v) + (lam/2) |v - w*|^2,    w* the global model,

by local steps from its last v_k, in every round in which it takes part:

    v_k <- v_k - personal_lr (grad F_k(v_k; batch) + lam (v_k - w)),    w the global model that it received.

With lam = 0 this is local training. For a large lam, v_k follows the global model. The personal model has no effect on
what the client sends: the global part is FedAvg, with the same random numbers.

Sends, in models: 1 down, 1 up. Keeps: one model per client. A client's model is its v_k; a client that has not yet
taken part has the initial model.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Algorithm, Down, Report, check_number
from fedbraid.local import Fold, LocalWork, Weighting, batches_of, value_and_grad

__all__ = ["DittoState", "ditto", "personal_work"]

PyTree = Any


class DittoState(NamedTuple):
    """What a client keeps: its personal model, and the state of the optimizer of its global steps."""

    v: PyTree
    opt: PyTree


def personal_work(personal_epochs: int | None, personal_steps: int | None, local: Any) -> Any:
    """The local options of a second pass: its own epochs or steps, otherwise those of the first."""
    own = {name: local[name] for name in ("batch_size", "shuffle") if name in local}
    if personal_epochs is None and personal_steps is None:
        return own | {name: local[name] for name in ("epochs", "steps") if name in local}
    return own | {"epochs": personal_epochs, "steps": personal_steps}


def ditto(
    loss: Loss,
    *,
    lam: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    personal_lr: Any = None,
    personal_epochs: int | None = None,
    personal_steps: int | None = None,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """Ditto: FedAvg, and a personal model on every client that is pulled towards the global one.

    T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.

    lam: weight of the proximal term that keeps the personal model close to the global one.
    personal_lr: learning rate of the personal model; default: ``client_lr``.
    personal_epochs or personal_steps: local work on the personal model; default: that on the global model.

    >>> alg = ditto(lambda params, batch, key: jnp.sum(params**2), lam=0.5, client_lr=0.1)
    """
    check_number("lam", lam, low=0)
    if personal_lr is not None:
        check_number("personal_lr", personal_lr, low=0, open_low=True)
    rate = client_lr if personal_lr is None else personal_lr
    train = fedavg(loss, client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)
    exchange = train.exchanges[0]
    work = exchange.client
    assert isinstance(work, LocalWork)

    def step(v: PyTree, batch: dict, key: Any, down: Down) -> PyTree:
        _, g = value_and_grad(loss)(v, batch, key)
        return jax.tree.map(lambda v, g, w: v - rate * (g + lam * (v - w)), v, g, down.params)

    personal = Fold(
        lambda down, state, key: state.v,
        step,
        lambda v, down, state, n: v,
        batches_of(**personal_work(personal_epochs, personal_steps, local)),
    )
    [average] = work.folds
    average = average._replace(
        start=lambda down, state, key: work.folds[0].start(down, state.opt, key),
        finish=lambda walk, down, state, n: work.folds[0].finish(walk, down, state.opt, n),
    )

    def combine(results: tuple, down: Down, state: DittoState, key: Any) -> Report:
        report, v = results
        return report._replace(state=DittoState(v, report.state))

    return train._replace(
        init_client=lambda params: DittoState(params, train.init_client(params)),
        exchanges=(exchange._replace(client=LocalWork((average, personal), combine)),),
        personal=lambda server, state: state.v,
    )
