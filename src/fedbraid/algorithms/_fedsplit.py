"""FedGD(s, e), exact-prox FedProx, and FedSplit: two methods that stop beside the optimum, one that reaches it.

R. Pathak, M. Wainwright. FedSplit: an algorithmic framework for fast federated optimization. NeurIPS 2020.

The problem is to minimize sum_j f_j(x), every client counting alike; f_j is client j's mean loss, or the sum of its
losses (``objective="sum"``), which makes it the loss pooled over all examples.

    fedgd          x_j = G_j^e(x),  G_j(u) = u - s grad f_j(u)          x <- mean_j x_j                    (eq. 4)
    fedprox_exact  x_j = prox_{s f_j}(x)                                x <- mean_j x_j                    (eq. 6)
    fedsplit       u_j = prox_{s f_j}(2 x - z_j)                        z_j <- z_j + 2 (u_j - x)
                                                                        x <- mean_j z_j                    (Algorithm 1)

FedGD with e > 1 stops where the gradients along the local paths cancel (Prop. 1), exact FedProx where those of the
Moreau envelopes do (Prop. 2). A fixed point of FedSplit is x* with z_j = x* - s grad f_j(x*) (Prop. 3; the prox in
eq. 13 must read 2 zbar - z_j). With s = 1 / sqrt(l L) each round shrinks the error by 1 - 2 / (sqrt(kappa) + 1), and
proxes within b of exact cost an error of (sqrt(kappa) + 1) b (Theorem 1). That floor is for solvers that begin at the
prox's argument; those that begin at x have b = 0 at the fixed point, and with it no floor.

FedSplit's z_j live on the clients, and the server keeps x = mean_j z_j over *all* clients: from those whose upload
arrived it learns the change of that mean, (1 / N) sum_j (z_j+ - z_j), so it must know N, and absent clients keep their
z_j. Full rounds contract, so a uniformly drawn cohort contracts in mean square: partial participation is sound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms._local_update import local_update
from fedbraid.algorithms.prox import (
    OBJECTIVES,
    Curvature,
    Objective,
    ProxSolver,
    check_constants,
    client_objective,
    curvature,
    named_solver,
    prox_gradient,
)
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number, is_zero
from fedbraid.data.federated import Split
from fedbraid.local import WEIGHTINGS, ClientData, Weighting, weight_of

__all__ = ["fedgd", "fedprox_exact", "fedsplit"]

Loss = Callable[[Any, dict, Any], Any]


def fedgd(
    loss: Loss,
    *,
    step: Any = 0.5,
    local_steps: int = 5,
    objective: Objective = "mean",
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedGD(s, e): e local gradient steps of size s on all of a client's examples, models averaged.

    It is FedAvg without batches. With ``local_steps=1`` it is gradient descent and reaches the optimum; with more it
    stops at the zero of ``sum_j sum_i grad f_j(G_j^{i-1}(x))`` (Prop. 1).

    >>> alg = fedgd(lambda params, batch, key: jnp.sum(params**2), step=0.1, local_steps=10)
    """
    check_number("step", step, low=0, open_low=True)
    check_choice("objective", objective, OBJECTIVES)

    def f(params: Any, batch: dict, key: Any) -> Any:
        return client_objective(loss, objective, batch, key)(params)

    return local_update(
        f,
        gamma=step,
        server_opt=server_optimizers.sgd(1.0),
        message="delta",
        weighting=weighting,
        batch_size=None,
        steps=local_steps,
    )


def fedprox_exact(
    loss: Loss,
    *,
    step: Any = 1.0,
    server_lr: Any = 1.0,
    prox: str | ProxSolver = "accelerated",
    tolerance: Any = 1e-6,
    max_steps: int = 100,
    local_steps: int = 10,
    strong_convexity: Any = None,
    smoothness: Any = None,
    objective: Objective = "mean",
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedProx as Pathak & Wainwright analyse it: each client sends its proximal point, the server averages.

    ``step`` is s: the pull towards the server's model is 1 / s. This is neither LocalUpdate with alpha nor local
    gradient steps with a pull (``fedprox``): three methods, three fixed points. Options of the solver as in `fedsplit`.

    >>> alg = fedprox_exact(lambda params, batch, key: jnp.sum((params - 1.0) ** 2), step=0.5, prox="closed-form")
    """
    check_number("step", step, low=0, open_low=True)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("weighting", weighting, WEIGHTINGS)
    solve = named_solver(
        prox,
        local_steps=local_steps,
        tolerance=tolerance,
        max_steps=max_steps,
        strong_convexity=strong_convexity,
        smoothness=smoothness,
    )
    opt = server_optimizers.sgd(server_lr)

    def client(down: Down, state: Any, data: ClientData, key: Any) -> Report:
        batch = data.everything(key)
        f = client_objective(loss, objective, batch, key)
        u, metrics = _prox(solve, f, down.params, step, batch, down.params)
        moved = jax.tree.map(jnp.subtract, down.params, u)
        return Report(Up(moved), weight_of(weighting, data.size), metrics=metrics)

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        return server_step(opt, server, aggregate.up.pseudograd)

    return Algorithm(
        init=lambda params: ServerState(params, opt.init(params)),
        init_client=lambda params: (),
        exchanges=(Exchange("train", lambda server: Down(server.params), client, receive),),
        params=lambda server: server.params,
    )


class SplitClient(NamedTuple):
    """What a FedSplit client keeps: z_j, and with a regularization the model it started from."""

    z: Any
    anchor: Any = ()


def fedsplit(
    loss: Loss,
    *,
    step: Any = None,
    prox: str | ProxSolver = "backtracking",
    local_steps: int = 10,
    start: Literal["server", "point"] = "server",
    tolerance: Any = 1e-6,
    max_steps: int = 100,
    strong_convexity: Any = None,
    smoothness: Any = None,
    regularization: Any = 0.0,
    relaxation: Any = 1.0,
    objective: Objective = "mean",
    estimate: Literal["dense", "lanczos"] | None = None,
    data: Split | None = None,
    params: Any = None,
) -> Algorithm:
    """FedSplit: operator splitting over the clients, ``z_j <- z_j + 2 relaxation (u_j - x)``.

    step: s; by default 1 / sqrt(l L) when ``strong_convexity`` and ``smoothness`` are given (``prox.curvature`` reads
        them off the data), else 3, which suits mean losses of classifiers.
    prox: "closed-form" (quadratic losses), "newton" or "accelerated" (to ``tolerance`` in at most ``max_steps``),
        "gradient" (``local_steps`` of Corollary 1's size, from l and L), "backtracking" (``local_steps`` with line
        search), or a solver of :mod:`fedbraid.algorithms.prox`.
    start: where a solver begins. "server" begins at x, which is the prox at the fixed point, so that a few steps a
        round do for exact convergence; "point" begins at 2 x - z_j, as eq. (17) reads, and leaves the floor of
        Theorem 1.
    regularization: lambda of Theorem 2: every client adds (lambda / 2) ||x - x_1||^2, for losses that are not strongly
        convex; l and L are those of the loss without it, and l may then be left out.
    relaxation: 1 is the paper's Algorithm 1 (Peaceman-Rachford), whose theorems need strongly convex losses; 1/2 is
        Douglas-Rachford, slower on those but convergent for any convex losses.
    objective: f_j is the client's "mean" loss, or the "sum" over its examples.
    estimate: read l and L off the clients of ``data`` at ``params``, from whole Hessians or by Lanczos' method
        (``prox.curvature``); exact for least squares, a guess from one point for other losses.

    >>> square = lambda params, batch, key: 0.5 * jnp.mean((params - batch["x"]) ** 2)
    >>> alg = fedsplit(square, strong_convexity=1.0, smoothness=1.0, prox="closed-form")
    >>> [exchange.name for exchange in alg.exchanges]
    ['prox']
    """
    check_number("regularization", regularization, low=0)
    check_number("relaxation", relaxation, low=0, high=1, open_low=True)
    check_choice("start", start, ("server", "point"))
    check_choice("objective", objective, OBJECTIVES)
    low, high = strong_convexity, smoothness
    if estimate is not None:
        if low is not None or high is not None or data is None:
            raise ValueError(
                f"estimate={estimate!r} finds strong_convexity and smoothness itself: leave them out, and give data "
                "and params to find them from"
            )
        low, high = _estimated(curvature(loss, params, data, method=estimate, objective=objective))
    pulled = not is_zero(regularization)
    if low is not None and high is not None:
        check_constants(low, high)
    if pulled:
        low = regularization if low is None else low + regularization
        high = None if high is None else high + regularization
    s = _split_step(step, low, high)
    solve = named_solver(
        prox,
        local_steps=local_steps,
        tolerance=tolerance,
        max_steps=max_steps,
        strong_convexity=low,
        smoothness=high,
    )

    def init_client(params: Any) -> SplitClient:
        return SplitClient(params, params if pulled else ())

    def client(down: Down, state: SplitClient, data: ClientData, key: Any) -> Report:
        x, batch = down.params, data.everything(key)
        own = client_objective(loss, objective, batch, key)

        def f(u: Any) -> Any:
            return own(u) + 0.5 * regularization * _squared_distance(u, state.anchor) if pulled else own(u)

        v = jax.tree.map(lambda x, z: 2 * x - z, x, state.z)
        u, metrics = _prox(solve, f, v, s, batch, x if start == "server" else v)
        change = jax.tree.map(lambda u, x: 2 * relaxation * (u - x), u, x)
        up = Up(jax.tree.map(jnp.negative, change))
        return Report(up, weight_of("uniform", data.size), state._replace(z=_add(state.z, change)), metrics)

    def receive(server: SplitServer, aggregate: Aggregate, key: Any) -> SplitServer:
        if aggregate.population is None:
            raise ValueError(
                "fedsplit keeps x = the mean of all clients' z_j, so with some of them absent it must know how many "
                "there are: give the population"
            )
        # in the model's own precision: a ratio of integers is float32 whatever the model is
        moved = jax.tree.map(
            lambda x, p: x - jnp.asarray(aggregate.count, x.dtype) / jnp.asarray(aggregate.population, x.dtype) * p,
            server.params,
            aggregate.up.pseudograd,
        )
        return SplitServer(moved)

    def reconcile(state: SplitClient, meant: Up, decoded: Up) -> SplitClient:
        # the server moved x by what it decoded, so z_j must have moved by that too
        z = jax.tree.map(lambda z, m, d: z + m - d, state.z, meant.pseudograd, decoded.pseudograd)
        return state._replace(z=z)

    exchange = Exchange("prox", lambda server: Down(server.params), client, receive, reconcile=reconcile)
    return Algorithm(SplitServer, init_client, (exchange,), lambda server: server.params)


class SplitServer(NamedTuple):
    params: Any


def _estimated(found: Curvature) -> tuple[float | None, float]:
    """l and L; a least curvature that cannot be told from 0 is none at all, since 1 / sqrt(l L) would be noise."""
    known = found.strong_convexity > 1e-6 * found.smoothness
    return (found.strong_convexity if known else None), found.smoothness


def _split_step(step: Any, low: Any, high: Any) -> Any:
    if step is not None:
        return check_number("step", step, low=0, open_low=True)
    if low is None or high is None:
        return 3.0
    check_number("strong_convexity", low, low=0, open_low=True)
    return 1 / (low * high) ** 0.5


def _prox(solve: ProxSolver, f: Callable, v: Any, s: Any, batch: dict, start: Any) -> tuple[Any, dict[str, Any]]:
    """prox_{s f}(v), and what is told of it: f there, how far grad h is from 0, how many steps it took."""
    u, steps = solve(f, v, s, batch, start)
    value, g = prox_gradient(f, u, v, s)
    residual = jnp.sqrt(_squared_norm(g))
    return u, {"loss": value, "residual": residual, "steps": jnp.asarray(steps, residual.dtype)}


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _squared_norm(tree: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def _squared_distance(a: Any, b: Any) -> Any:
    return _squared_norm(jax.tree.map(jnp.subtract, a, b))
