"""FedAvg, FedAvgM, FedAdam, FedProx, FedACG, FedCM and SCAFFOLD as one algorithm: one compiled program runs them all.

They differ in numbers only. The server has the model x, the moments m and v, the mean step D of the last round and the
mean c of the control variates. It sends z = x - ahead beta server_lr m and u = control c + (1 - own) D. Client i starts
from y = z and takes local steps along

    own grad f_i(y) + alpha (y - z) + u - control c_i,

keeps c_i <- c_i + control ((z - y) / (K client_lr) - u), and sends z - y. With the mean g of the uploads the server
updates

    m <- beta m + fresh g,    v <- b2 v + (1 - b2) g^2,    x <- x - server_lr m / (sqrt(v) + tau)^adaptive.

    method     alpha    beta    fresh    adaptive    ahead    own    control    mean
    fedavg     0        0       1        0           0        1      0          by examples
    fedavgm    0        0.9     1        0           0        1      0          by examples    ("average": fresh 0.1)
    fedprox    > 0      0       1        0           0        1      0          by examples
    fedadam    0        0.9     0.1      1           0        1      0          by examples
    fedacg     0.01     0.85    1        0           1        1      0          by examples
    fedcm      0        0       1        0           0        0.1    0          uniform
    scaffold   0        0       1        0           0        1      1          uniform
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._scaffold import UNIFORM_AUX, share_heard
from fedbraid.algorithms.client_optimizers import client_optimizer
from fedbraid.algorithms.local_steps import Walk, moved, walking
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up
from fedbraid.local import LocalOptions, batches_of, local_work, value_and_grad, weight_of
from fedbraid.names import factory

__all__ = ["MEMBERS", "NAME", "averaging"]

PyTree = Any
NAME = f"{__name__}:averaging"
FEDAVG = {"alpha": 0.0, "beta": 0.0, "fresh": 1.0, "adaptive": 0.0, "ahead": 0.0, "own": 1.0, "control": 0.0}
FEDAVG |= {"uniform": 0.0}
MEMBERS: Mapping[str, Mapping[str, float]] = {
    "fedavg": FEDAVG,
    "fedavgm": {**FEDAVG, "beta": 0.9},
    "fedprox": {**FEDAVG, "alpha": 0.1},
    "fedadam": {**FEDAVG, "beta": 0.9, "fresh": 0.1, "adaptive": 1.0},
    "fedacg": {**FEDAVG, "alpha": 0.01, "beta": 0.85, "ahead": 1.0},
    "fedcm": {**FEDAVG, "own": 0.1, "uniform": 1.0},
    "scaffold": {**FEDAVG, "control": 1.0, "uniform": 1.0},
}
"""The numbers that make a method of the family, with the default options of the method."""

B2, TAU = 0.99, 1e-3


class ServerState(NamedTuple):
    """The server: its model, the moments m and v, the mean step of the last round, and the mean control variate."""

    params: PyTree
    m: PyTree
    v: PyTree
    step: PyTree
    c: PyTree


@factory("algorithm")
def averaging(
    loss: Any,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    alpha: Any = 0.0,
    beta: Any = 0.0,
    fresh: Any = 1.0,
    adaptive: Any = 0.0,
    ahead: Any = 0.0,
    own: Any = 1.0,
    control: Any = 0.0,
    uniform: Any = 0.0,
    stateful: bool = True,
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """One member of the family; every number may be traced. If it is not ``stateful``, ``control`` must be 0."""

    def direction(y: PyTree, batch: dict, key: Any, down: Down, held: PyTree) -> tuple[Any, PyTree]:
        value, g = value_and_grad(loss)(y, batch, key)
        return value, jax.tree.map(lambda g, y, z, h: own * g + alpha * (y - z) + h, g, y, down.params, held)

    def finish(walk: Walk, down: Down, state: PyTree, n: Any) -> Report:
        sent, steps = moved(walk, down), walk.k.astype(walk.loss.dtype)
        rate = steps * client_lr
        change: PyTree = ()
        if stateful:
            change = jax.tree.map(lambda d, u: control * (d / rate.astype(d.dtype) - u), sent, down.aux)
        weight = jnp.where(uniform > 0, weight_of("uniform", n), weight_of("examples", n))
        after = jax.tree.map(jnp.add, state, change) if stateful else ()
        return Report(Up(sent, (change, steps)), weight, after, {"loss": walk.mean_loss()})

    def send(server: ServerState) -> Down:
        reach = ahead * beta * server_lr
        z = jax.tree.map(lambda x, m: x - reach * m, server.params, server.m)
        shift = jax.tree.map(lambda d: (1 - own) * d, server.step)
        if stateful:
            shift = jax.tree.map(lambda d, c: d + control * c, shift, server.c)
        return Down(z, shift)

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        g, (change, steps) = aggregate.up
        m = jax.tree.map(lambda g, m: beta * m + fresh * g, g, server.m)
        v = jax.tree.map(lambda g, v: B2 * v + (1 - B2) * g * g, g, server.v)

        def moving(x: Any, m: Any, v: Any) -> Any:
            return x - server_lr * m / jnp.where(adaptive > 0, jnp.sqrt(v) + TAU, 1.0)

        rate, heard = client_lr * jnp.where(steps > 0, steps, 1), share_heard(aggregate)
        return ServerState(
            jax.tree.map(moving, server.params, m, v),
            m,
            v,
            jax.tree.map(lambda g: g / rate.astype(g.dtype), g),
            jax.tree.map(lambda c, d: c + heard.astype(c.dtype) * d, server.c, change) if stateful else (),
        )

    def init(params: PyTree) -> ServerState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ServerState(
            params, zeros, jax.tree.map(lambda p: jnp.full_like(p, TAU**2), params), zeros, zeros if stateful else ()
        )

    def hold(down: Down, state: PyTree) -> PyTree:
        return jax.tree.map(lambda u, c: u - control * c, down.aux, state) if stateful else down.aux

    start, step = walking(client_optimizer(client_lr), direction, hold=hold)
    work = local_work(start, step, finish, batches_of(**local))
    return Algorithm(
        init=init,
        init_client=lambda params: jax.tree.map(jnp.zeros_like, params) if stateful else (),
        exchanges=(Exchange("train", send, work, receive, reducer=UNIFORM_AUX),),
        params=lambda server: server.params,
    )
