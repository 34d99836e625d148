"""FedDyn: a dynamic regularizer makes the clients' local optima agree with the global optimum.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama. Federated Learning Based on Dynamic
Regularization. ICLR 2021. Algorithm 1.

The server has x and h, and client i keeps g_i. All g_i and h start at 0. Client i looks for the minimizer y of

    f_i(y) - <g_i, y> + (alpha/2) ||y - x||^2

by local steps with learning rate client_lr from y = x. It sets g_i <- g_i + alpha (x - y), which at the minimizer is
grad f_i(y), and sends x - y. With S the clients whose uploads arrived, out of N,

    h <- h + alpha |S|/N mean(x - y_i),    x <- x - mean(x - y_i) - h / alpha.

So h = (1/N) sum_i g_i after every round. At a fixed point y_i = x, g_i = grad f_i(x) and h = 0. So x is then the
optimum of the unweighted mean of the client losses, also if the local problems are solved inexactly. For that reason
uploads have equal weights, and there is no option ``weighting``.

Sends, in models: 1 down, 1 up. Keeps: one model per client, so the same clients must take part again (cross-silo).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._scaffold import share_heard
from fedbraid.algorithms._server_only import Loss
from fedbraid.algorithms.client_optimizers import OptimizerSpec, client_optimizer
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_number
from fedbraid.local import LocalOptions, batches_of, local_work, value_and_grad, weight_of

__all__ = ["FedDynState", "feddyn"]

PyTree = Any


class FedDynState(NamedTuple):
    """The server: its model and the mean h of all clients' g_i."""

    params: PyTree
    h: PyTree


class Kept(NamedTuple):
    """What a client keeps if it also keeps the state of its optimizer; else it keeps g_i alone."""

    g_i: PyTree
    opt: PyTree


class Walk(NamedTuple):
    """A client's carry: model y, optimizer's state, its g_i, the step number and the sum of its batch losses."""

    params: PyTree
    opt: PyTree
    g_i: PyTree
    k: Any
    loss: Any


def feddyn(
    loss: Loss,
    *,
    alpha: Any = 0.1,
    client_lr: Any = 0.1,
    client_opt: OptimizerSpec = "sgd",
    client_opt_state: Literal["reset", "kept"] = "reset",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedDyn: local steps on a loss with a linear and a proximal term, which removes client drift.

    D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama. Federated Learning Based on
    Dynamic Regularization. ICLR 2021. Algorithm 1.

    alpha: weight of the proximal term. Small values converge fast, large values are stable.
    client_lr, client_opt, local: as in `fedbraid.fedavg`.

    >>> alg = feddyn(lambda params, batch, key: jnp.sum(params**2), alpha=0.1, client_lr=0.05, epochs=5)
    """
    check_number("alpha", alpha, low=0, open_low=True)
    check_number("client_lr", client_lr, low=0, open_low=True)

    opt = client_optimizer(client_lr, client_opt, client_opt_state)

    def own(state: PyTree) -> PyTree:
        return state.g_i if opt.kept else state

    def kept(g_i: PyTree, opt_state: PyTree) -> PyTree:
        return Kept(g_i, opt_state) if opt.kept else g_i

    def start(down: Down, state: PyTree, key: Any) -> Walk:
        opt_state = opt.start(down.params, state.opt if opt.kept else ())
        return Walk(down.params, opt_state, own(state), jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, g = value_and_grad(loss)(walk.params, batch, key)
        direction = jax.tree.map(lambda y, g, g_i, x: g - g_i + alpha * (y - x), walk.params, g, walk.g_i, down.params)
        y, opt_state = opt.step(walk.params, direction, walk.opt)
        return Walk(y, opt_state, walk.g_i, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: Down, state: PyTree, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        after = kept(jax.tree.map(lambda g, d: g + alpha * d, own(state), sent), walk.opt)
        return Report(Up(sent), weight_of("uniform", n), after, {"loss": walk.loss / walk.k.astype(walk.loss.dtype)})

    def reconcile(state: PyTree, meant: Up, decoded: Up) -> PyTree:
        """Update g_i with the decoded update, as the server does, so that h stays the mean of the g_i."""
        g_i = jax.tree.map(lambda g, m, d: g + alpha * (d - m), own(state), meant.pseudograd, decoded.pseudograd)
        return kept(g_i, state.opt if opt.kept else ())

    def receive(server: FedDynState, aggregate: Aggregate, key: Any) -> FedDynState:
        move, heard = aggregate.up.pseudograd, share_heard(aggregate)
        h = jax.tree.map(lambda h, d: h + alpha * heard.astype(h.dtype) * d, server.h, move)
        return FedDynState(jax.tree.map(lambda x, d, h: x - d - h / alpha, server.params, move, h), h)

    exchange = Exchange(
        "train",
        lambda server: Down(server.params),
        local_work(start, step, finish, batches_of(**local)),
        receive,
        reconcile=reconcile,
        keeps=("pseudograd",),
        lockstep="h must be the mean of the clients' g_i, which staleness weights would break",
    )
    return Algorithm(
        init=lambda params: FedDynState(params, jax.tree.map(jnp.zeros_like, params)),
        init_client=lambda params: kept(jax.tree.map(jnp.zeros_like, params), opt.of_client(params)),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
