"""SCAFFOLD: every client corrects its drift by a control variate that it keeps.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020. Algorithm 1.

The server has x and c, and client i keeps c_i. c and all c_i start at 0. Client i starts from y = x, repeats K times

    y <- y - client_lr (grad f_i(y; zeta) - c_i + c),

updates its control variate by

    option I:    c_i+ = grad f_i(x), its full gradient at the server's model (one more pass over its data)
    option II:   c_i+ = c_i - c + (x - y) / (K client_lr), the mean of its local gradients

and sends x - y and c_i+ - c_i. With another optimizer than SGD (``client_opt``), its direction is the corrected
gradient, and option II is the mean of the local gradients itself. With S the clients whose uploads arrived, out of N,

    x <- x - server_lr mean(x - y_i),    c <- c + |S|/N mean(c_i+ - c_i).

The second mean is over clients, unweighted: only then is c = (1/N) sum_i c_i after every round. Hence SCAFFOLD
converges to the optimum of the unweighted mean of the client losses. ``weighting="examples"`` changes the path, not
the limit.

Sends, in models: 2 down, 2 up. Keeps: one model per client, so the same clients must take part again (cross-silo).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._server_only import Gradients, Loss, full_gradients
from fedbraid.algorithms.client_optimizers import OptimizerSpec, client_optimizer
from fedbraid.core import (
    MEAN,
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Reducer,
    Report,
    Up,
    check_choice,
    check_number,
)
from fedbraid.local import WEIGHTINGS, Fold, LocalOptions, LocalWork, Weighting, batches_of, value_and_grad, weight_of

__all__ = ["ScaffoldState", "scaffold", "share_heard"]

PyTree = Any


class ScaffoldState(NamedTuple):
    """The server: its model and the mean c of all clients' control variates."""

    params: PyTree
    c: PyTree


class Kept(NamedTuple):
    """What a client keeps if it also keeps the state of its optimizer; else it keeps c_i alone."""

    c: PyTree
    opt: PyTree


class Walk(NamedTuple):
    """A client's carry: model y, optimizer's state, correction c - c_i, sum of gradients, step number, losses."""

    params: PyTree
    opt: PyTree
    shift: PyTree
    gradients: PyTree  # () with SGD, whose path holds their sum
    k: Any
    loss: Any


def _lift(up: Up, weight: Any) -> Up:
    return Up(MEAN.lift(up.pseudograd, weight), MEAN.lift(up.aux, weight > 0))


def _finish(total: Up, weight: Any, count: Any) -> Up:
    return Up(MEAN.finish(total.pseudograd, weight, count), MEAN.finish(total.aux, count, count))


UNIFORM_AUX = Reducer(_lift, _finish, mean="uniform-aux")
"""The weighted mean of the pseudogradients, and the unweighted mean of the aux."""


def share_heard(aggregate: Aggregate) -> Any:
    """|S|/N in the widest available float: int32 / int32 would be float32, too inexact for the invariant of c."""
    wide = jnp.result_type(float)
    return jnp.asarray(aggregate.count, wide) / jnp.asarray(aggregate.population, wide)


def scaffold(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    option: Literal["I", "II"] = "II",
    weighting: Weighting = "uniform",
    client_opt: OptimizerSpec = "sgd",
    client_opt_state: Literal["reset", "kept"] = "reset",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """SCAFFOLD: local SGD whose gradients are corrected by control variates, which removes client drift.

    S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic Controlled
    Averaging for Federated Learning. ICML 2020. Algorithm 1.

    option: how a client computes its control variate: "II" is the mean of its local gradients, "I" the full gradient
        at the server's model, which takes one more pass over its data.
    weighting: weights of the updates: "uniform" or "examples". The control variates always have equal weights.
    client_lr, server_lr, client_opt, local: as in `fedbraid.fedavg`.

    >>> alg = scaffold(lambda params, batch, key: jnp.sum(params**2), client_lr=0.05, steps=10)
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_number("server_lr", server_lr, low=0)
    check_choice("option", option, ("I", "II"))
    check_choice("weighting", weighting, WEIGHTINGS)
    batches = batches_of(**local)

    opt = client_optimizer(client_lr, client_opt, client_opt_state)
    counts = option == "II" and not opt.plain  # with SGD, the sum of the gradients is (x - y) / client_lr

    def control(state: PyTree) -> PyTree:
        return state.c if opt.kept else state

    def kept(c_i: PyTree, opt_state: PyTree) -> PyTree:
        return Kept(c_i, opt_state) if opt.kept else c_i

    def start(down: Down, state: PyTree, key: Any) -> Walk:
        shift = jax.tree.map(jnp.subtract, down.aux, control(state))
        gradients = jax.tree.map(jnp.zeros_like, down.params) if counts else ()
        opt_state = opt.start(down.params, state.opt if opt.kept else ())
        return Walk(down.params, opt_state, shift, gradients, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, g = value_and_grad(loss)(walk.params, batch, key)
        y, opt_state = opt.step(walk.params, jax.tree.map(jnp.add, g, walk.shift), walk.opt)
        gradients = jax.tree.map(jnp.add, walk.gradients, g) if counts else ()
        return Walk(y, opt_state, walk.shift, gradients, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: Down, state: PyTree, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        change = ()
        if counts:
            change = jax.tree.map(lambda g, c: g / walk.k.astype(g.dtype) - c, walk.gradients, control(state))
        elif option == "II":
            change = jax.tree.map(lambda d, c: d / (walk.k.astype(d.dtype) * client_lr) - c, sent, down.aux)
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        state = kept(control(state), walk.opt)
        return Report(Up(sent, change), weight_of(weighting, n), state, {"loss": mean_loss})

    def renew(results: tuple, down: Down, state: PyTree, key: Any) -> Report:
        report, c_i = results[0], control(state)
        change = report.up.aux
        if option == "I":
            gradients: Gradients = results[1]
            change = jax.tree.map(jnp.subtract, gradients.at[0], c_i)
        after = kept(jax.tree.map(jnp.add, c_i, change), report.state.opt if opt.kept else ())
        return report._replace(up=Up(report.up.pseudograd, change), state=after)

    def reconcile(state: PyTree, meant: Up, decoded: Up) -> PyTree:
        """Update c_i with the decoded change, as the server does, so that c stays the mean of the c_i."""
        c_i = jax.tree.map(lambda c, m, d: c + (d - m), control(state), meant.aux, decoded.aux)
        return kept(c_i, state.opt if opt.kept else ())

    def receive(server: ScaffoldState, aggregate: Aggregate, key: Any) -> ScaffoldState:
        heard = share_heard(aggregate)
        return ScaffoldState(
            jax.tree.map(lambda x, g: x - server_lr * g, server.params, aggregate.up.pseudograd),
            jax.tree.map(lambda c, d: c + heard.astype(c.dtype) * d, server.c, aggregate.up.aux),
        )

    folds = (Fold(start, step, finish, batches),)
    if option == "I":
        folds = (*folds, full_gradients(loss, lambda down: (down.params,), batches.size))
    exchange = Exchange(
        "train",
        lambda server: Down(server.params, server.c),
        LocalWork(folds, renew),
        receive,
        reducer=UNIFORM_AUX,
        reconcile=reconcile,
        keeps=("aux",),
        lockstep="c must be the mean of the clients' c_i when a client uses it, and an older c is not",
    )
    return Algorithm(
        init=lambda params: ScaffoldState(params, jax.tree.map(jnp.zeros_like, params)),
        init_client=lambda params: kept(jax.tree.map(jnp.zeros_like, params), opt.of_client(params)),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
