"""FedGD(s, e), exact-prox FedProx, and FedSplit: the first two converge near the optimum, FedSplit to the optimum.

R. Pathak, M. Wainwright. FedSplit: an algorithmic framework for fast federated optimization. NeurIPS 2020.

The problem is to minimize sum_j f_j(x), with equal weights. f_j is client j's mean loss. With ``objective="sum"`` it is
the sum of its losses, and the problem is the loss pooled over all examples.

    fedgd          x_j = G_j^e(x),  G_j(u) = u - s grad f_j(u)          x <- mean_j x_j                    (eq. 4)
    fedprox_exact  x_j = prox_{s f_j}(x)                                x <- mean_j x_j                    (eq. 6)
    fedsplit       u_j = prox_{s f_j}(2 x - z_j)                        z_j <- z_j + 2 (u_j - x)
                                                                        x <- mean_j z_j                    (Algorithm 1)

FedGD with e > 1 converges to the point where the gradients along the local steps sum to 0 (Prop. 1). Exact FedProx
converges to the point where the gradients of the Moreau envelopes do (Prop. 2). A fixed point of FedSplit is x* with
z_j = x* - s grad f_j(x*) (Prop. 3; the prox in eq. 13 must read 2 zbar - z_j). With s = 1 / sqrt(l L) each round
multiplies the error by 1 - 2 / (sqrt(kappa) + 1). If each prox has an error of at most b, the final error is at most
(sqrt(kappa) + 1) b (Theorem 1). That error floor is for solvers that start at the prox's argument. Solvers that start
at x have b = 0 at the fixed point, so they have no error floor.

With ``prox="stochastic"`` a client solves its prox by stochastic gradient steps on batches,

    u <- u - a (s grad f_j(u; batch) + u - v_j).

This is another inexact prox: b is the error that the noise of the batches leaves, of order sqrt(a) s times the standard
deviation of their gradients. So Theorem 1 holds with that b, and the floor falls with a smaller rate a (and more steps)
or with larger batches. With all examples in one batch it is ``prox="gradient"``.

FedSplit's z_j are client state, and the server keeps x = mean_j z_j over *all* clients. The uploads that arrived give
the change of that mean, (1 / N) sum_j (z_j+ - z_j), so the server must know N. Absent clients keep their z_j. A round
with all clients is a contraction, so a round with a uniformly drawn cohort is a contraction in mean square: partial
participation also converges.
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
from fedbraid.local import WEIGHTINGS, Batches, ClientData, Clients, Weighting, weight_of

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
    """FedGD(s, e): e local gradient steps of size s on all of a client's examples; the server averages the models.

    It is FedAvg with full batches. With ``local_steps=1`` it is gradient descent and converges to the optimum. With
    more it converges to the zero of ``sum_j sum_i grad f_j(G_j^{i-1}(x))`` (Prop. 1).

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

    ``step`` is s: the proximal term has weight 1 / s. LocalUpdate with alpha, and local gradient steps with a proximal
    term (``fedprox``), are two other methods with other fixed points. Options of the solver as in `fedsplit`.

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
    """The state of a FedSplit client: z_j, and with a regularization the initial model."""

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
    data: Clients | None = None,
    params: Any = None,
    prox_lr: Any = None,
    batch_size: int | None = None,
) -> Algorithm:
    """FedSplit: operator splitting over the clients, ``z_j <- z_j + 2 relaxation (u_j - x)``.

    step: s; by default 1 / sqrt(l L) when ``strong_convexity`` and ``smoothness`` are given (``prox.curvature``
        estimates them from data), else 3, which suits mean losses of classifiers.
    prox: "closed-form" (quadratic losses), "newton" or "accelerated" (to ``tolerance`` in at most ``max_steps``),
        "gradient" (``local_steps`` of Corollary 1's size, from l and L), "backtracking" (``local_steps`` with line
        search), "stochastic" (``local_steps`` on batches of ``batch_size`` examples), or a solver of
        :mod:`fedbraid.algorithms.prox`.
    prox_lr, batch_size: of prox="stochastic": the rate, by default that of Corollary 1, 1 / (1 + s (l + L) / 2), and
        the examples per batch, by default all.
    start: where a solver starts. "server" starts at x, which is the prox at the fixed point, so a few steps per round
        are enough for exact convergence. "point" starts at 2 x - z_j, as in eq. (17), and has the error floor of
        Theorem 1.
    regularization: lambda of Theorem 2: every client adds (lambda / 2) ||x - x_1||^2, for losses that are not strongly
        convex; l and L are those of the loss without it, and l may then be left out.
    relaxation: 1 is the paper's Algorithm 1 (Peaceman-Rachford), whose theorems need strongly convex losses. 1/2 is
        Douglas-Rachford, which is slower on those but converges for any convex losses.
    objective: f_j is the client's "mean" loss, or the "sum" over its examples.
    estimate: compute l and L from the clients of ``data`` at ``params``, with full Hessians or with Lanczos' method
        (``prox.curvature``); exact for least squares, an estimate at one point for other losses.

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
    low, high = _regularized(low, high, regularization)
    s = _split_step(step, low, high)
    noisy = prox == "stochastic"
    if not noisy and (prox_lr is not None or batch_size is not None):
        raise ValueError(f"prox_lr and batch_size are options of prox='stochastic', got prox={prox!r}: leave them out")
    rate = _stochastic_rate(prox_lr, s, low, high) if noisy else None
    solve = named_solver(
        "backtracking" if noisy else prox,  # not used with stochastic steps
        local_steps=local_steps,
        tolerance=tolerance,
        max_steps=max_steps,
        strong_convexity=low,
        smoothness=high,
    )
    batches = Batches(batch_size, steps=local_steps)

    def init_client(params: Any) -> SplitClient:
        return SplitClient(params, params if pulled else ())

    def client(down: Down, state: SplitClient, data: ClientData, key: Any) -> Report:
        x = down.params

        def f_on(batch: dict, key: Any) -> Callable[[Any], Any]:
            # "sum" is the mean times the number of examples: all of the client's, also for a batch
            scale = jnp.asarray(data.size).astype(jnp.result_type(float)) if noisy and objective == "sum" else 1
            own = client_objective(loss, "mean" if noisy else objective, batch, key)
            if not pulled:
                return lambda u: scale * own(u)
            return lambda u: scale * own(u) + 0.5 * regularization * _squared_distance(u, state.anchor)

        v = jax.tree.map(lambda x, z: 2 * x - z, x, state.z)
        begin = x if start == "server" else v
        if noisy:
            u, metrics = _stochastic_prox(f_on, v, s, begin, rate, Draws(batches, data, key))
        else:
            batch = data.everything(key)
            u, metrics = _prox(solve, f_on(batch, key), v, s, batch, begin)
        change = jax.tree.map(lambda u, x: 2 * relaxation * (u - x), u, x)
        up = Up(jax.tree.map(jnp.negative, change))
        return Report(up, weight_of("uniform", data.size), state._replace(z=_add(state.z, change)), metrics)

    def receive(server: SplitServer, aggregate: Aggregate, key: Any) -> SplitServer:
        if aggregate.population is None:
            raise ValueError(
                "fedsplit keeps x = the mean of all clients' z_j; since some clients are absent, it must know their "
                "total number: give the population"
            )
        # computed in the model's dtype: a ratio of integers would be float32
        moved = jax.tree.map(
            lambda x, p: x - jnp.asarray(aggregate.count, x.dtype) / jnp.asarray(aggregate.population, x.dtype) * p,
            server.params,
            aggregate.up.pseudograd,
        )
        return SplitServer(moved)

    def reconcile(state: SplitClient, meant: Up, decoded: Up) -> SplitClient:
        # the server changed x by the decoded upload, so z_j must change by the same amount
        z = jax.tree.map(lambda z, m, d: z + m - d, state.z, meant.pseudograd, decoded.pseudograd)
        return state._replace(z=z)

    exchange = Exchange(
        "prox",
        lambda server: Down(server.params),
        client,
        receive,
        reconcile=reconcile,
        keeps=("pseudograd",),
        lockstep="a step reflects every client's z_j at the same average x, so all clients must have the newest x",
    )
    return Algorithm(SplitServer, init_client, (exchange,), lambda server: server.params)


class SplitServer(NamedTuple):
    params: Any


def _estimated(found: Curvature) -> tuple[float | None, float]:
    """l and L; l is None if it cannot be distinguished from 0, because 1 / sqrt(l L) would be noise."""
    known = found.strong_convexity > 1e-6 * found.smoothness
    return (found.strong_convexity if known else None), found.smoothness


def _regularized(low: Any, high: Any, regularization: Any) -> tuple[Any, Any]:
    """l and L, None where unknown, of the loss with (lambda / 2) ||x - x_1||^2 added."""
    if low is not None and high is not None:
        check_constants(low, high)
    if is_zero(regularization):
        return low, high
    return regularization + (0 if low is None else low), None if high is None else high + regularization


def _split_step(step: Any, low: Any, high: Any) -> Any:
    if step is not None:
        return check_number("step", step, low=0, open_low=True)
    if low is None or high is None:
        return 3.0
    check_number("strong_convexity", low, low=0, open_low=True)
    return 1 / (low * high) ** 0.5


def _stochastic_rate(prox_lr: Any, s: Any, low: Any, high: Any) -> Any:
    """The rate that was given, or that of Corollary 1."""
    if prox_lr is not None:
        return check_number("prox_lr", prox_lr, low=0, open_low=True)
    if low is None or high is None:
        raise ValueError(
            f"prox='stochastic' takes its rate from strong_convexity (l) and smoothness (L), got {low!r} and {high!r}: "
            "give both, or prox_lr"
        )
    check_constants(low, high)
    return 1 / (1 + s * (low + high) / 2)


def _prox(solve: ProxSolver, f: Callable, v: Any, s: Any, batch: dict, start: Any) -> tuple[Any, dict[str, Any]]:
    """prox_{s f}(v) and its metrics: f there, the norm of grad h, the number of steps."""
    u, steps = solve(f, v, s, batch, start)
    value, g = prox_gradient(f, u, v, s)
    residual = jnp.sqrt(_squared_norm(g))
    return u, {"loss": value, "residual": residual, "steps": jnp.asarray(steps, residual.dtype)}


class Draws(NamedTuple):
    """The batches of a client in a round."""

    batches: Batches
    data: ClientData
    key: Any

    def take(self, k: Any) -> tuple[dict, Any]:
        """Batch number ``k`` and its key, as in the folds of `fedbraid.local`."""
        key = jax.random.fold_in(jax.random.fold_in(self.key, 2), k)
        return self.batches.take(self.data, k, jax.random.fold_in(self.key, 1), key), key


def _stochastic_prox(f_on: Callable, v: Any, s: Any, begin: Any, size: Any, draws: Draws) -> tuple[Any, dict[str, Any]]:
    """prox_{s f}(v) by stochastic gradient steps of this size, and its metrics: the mean loss of the batches."""

    def body(k: Any, carry: tuple) -> tuple:
        u, total = carry
        value, g = prox_gradient(f_on(*draws.take(k)), u, v, s)
        return jax.tree.map(lambda u, g: u - size * g, u, g), total + value.astype(total.dtype)

    steps = draws.batches.steps or 1
    u, total = jax.lax.fori_loop(0, steps, body, (begin, jnp.zeros((), jnp.result_type(float))))
    return u, {"loss": total / steps, "steps": jnp.asarray(steps, total.dtype)}


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _squared_norm(tree: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def _squared_distance(a: Any, b: Any) -> Any:
    return _squared_norm(jax.tree.map(jnp.subtract, a, b))
