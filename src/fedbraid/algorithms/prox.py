"""Proximal steps, exact and inexact, for FedSplit and exact FedProx clients.

    prox_{s f}(v) = argmin_u h(u),   h(u) = s f(u) + 1/2 ||u - v||^2,   grad h(u) = s grad f(u) + u - v

R. Pathak, M. Wainwright. FedSplit: an algorithmic framework for fast federated optimization. NeurIPS 2020.

If f is convex, h is 1-strongly convex for any s. If l <= hess f <= L, the curvature of h lies in [1 + s l, 1 + s L].

    solver            how                                                  exact for          needs
    closed_form       one linear solve with I + s hess f                   quadratic f        memory for d x d
    newton            Newton steps with line search, to a tolerance        convex f           memory for d x d, or CG
    accelerated       Nesterov's method, to a tolerance (App. B.2.2)       convex f           nothing; l and L help
    gradient_steps    e steps of size 1 / (1 + s (l + L) / 2)  (Cor. 1)    no: error floor    l and L
    backtracking      e steps, each found by a line search                 no: error floor    nothing
    given             your own function                                    up to you

A solver is a function ``solve(f, v, s, batch, start) -> Solution``. ``start`` is the point where iterations start (in
the paper v). ``batch`` holds the examples of f, for solvers that use them directly. All solvers are traced, do not
raise while running, and stop after at most a fixed number of steps. The client's metric ``residual``, the norm of
grad h, bounds the distance to the prox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbraid.core import check_choice, check_count, check_number, is_traced
from fedbraid.local import MASK, ClientData, Clients, rewritten

__all__ = [
    "OBJECTIVES",
    "SOLVERS",
    "Curvature",
    "Objective",
    "ProxSolver",
    "Solution",
    "accelerated",
    "backtracking",
    "check_constants",
    "client_objective",
    "closed_form",
    "curvature",
    "given",
    "gradient_steps",
    "named_solver",
    "newton",
    "prox_gradient",
]

PyTree = Any
Loss = Callable[[Any, dict, Any], Any]
Objective = Literal["mean", "sum"]
OBJECTIVES = ("mean", "sum")
DENSE = 4096  # the largest number of parameters for which a d x d Hessian is formed


class Solution(NamedTuple):
    """What a solver returns: the point it stopped at, and how many steps it took."""

    point: PyTree
    steps: Any


ProxSolver = Callable[[Callable[[PyTree], Any], PyTree, Any, dict, PyTree], Solution]


def client_objective(loss: Loss, objective: Objective, batch: dict[str, Any], key: Any) -> Callable[[PyTree], Any]:
    """A client's f as in the paper: the mean of its losses, or their sum ("sum": mean times number of examples).

    With "mean" the problem is the mean over clients with equal weights. With "sum" it is the loss pooled over all
    examples, and a client of n examples has l, L and 1/s n times larger.
    """
    own = rewritten(loss)
    count = jnp.sum(batch[MASK]) if objective == "sum" else 1.0
    return lambda params: count * own(params, batch, key)


def prox_gradient(f: Callable[[PyTree], Any], u: PyTree, v: PyTree, s: Any) -> tuple[Any, PyTree]:
    """f(u) and grad h(u) = s grad f(u) + u - v, whose norm bounds the distance to the prox of a convex f.

    >>> value, g = prox_gradient(lambda u: jnp.sum(u**2), jnp.array([1.0]), jnp.array([3.0]), 1.0)
    >>> float(value), g.tolist()  # the prox of x^2 at 3 is 1
    (1.0, [0.0])
    """
    value, g = jax.value_and_grad(f)(u)
    return value, jax.tree.map(lambda g, u, v: s * g + u - v, g, u, v)


# --- solvers ---------------------------------------------------------------------------------------------------------


def given(function: Callable[[PyTree, Any, dict], PyTree]) -> ProxSolver:
    """Your own prox: ``function(v, s, batch) -> u``.

    >>> shrink = given(lambda v, s, batch: v / (1 + s))  # of 1/2 ||u||^2
    >>> shrink(lambda u: 0.5 * jnp.sum(u**2), jnp.array([3.0]), 2.0, {}, None).point.tolist()
    [1.0]
    """
    return lambda f, v, s, batch, start: Solution(function(v, s, batch), jnp.int32(1))


def closed_form() -> ProxSolver:
    """The prox of a quadratic f, ``v - s (I + s H)^-1 grad f(v)``: exact for least squares, with or without l2.

    For any other loss it is a single Newton step and not the prox: check the ``residual`` that clients report.

    >>> f = lambda u: 0.5 * jnp.sum(jnp.array([1.0, 3.0]) * (u - 1.0) ** 2)
    >>> closed_form()(f, jnp.zeros(2), 1.0, {}, jnp.zeros(2)).point.round(5).tolist()
    [0.5, 0.75]
    """

    def solve(f: Callable, v: PyTree, s: Any, batch: dict, start: PyTree) -> Solution:
        f, v, unravel = _flat(f, v)
        _refuse_dense(v.size, "closed-form")
        return Solution(unravel(v - _newton_step(f, v, s, s * jax.grad(f)(v))), jnp.int32(1))

    return solve


def newton(*, tolerance: Any = 1e-8, max_steps: int = 50, linear: Literal["cholesky", "cg"] = "cholesky") -> ProxSolver:
    """Newton's method with backtracking, until ``||grad h|| <= tolerance``: for smooth convex f.

    ``linear="cg"`` solves for the direction by conjugate gradients on Hessian-vector products: no d x d matrix.

    >>> u = newton()(lambda u: jnp.sum(jnp.exp(u)), jnp.ones(1), 1.0, {}, jnp.ones(1)).point  # u + exp(u) = 1
    >>> bool(jnp.abs(u[0]) < 1e-6)
    True
    """
    check_number("tolerance", tolerance, low=0)
    check_count("max_steps", max_steps)
    check_choice("linear", linear, ("cholesky", "cg"))

    def solve(f: Callable, v: PyTree, s: Any, batch: dict, start: PyTree) -> Solution:
        f, v, unravel = _flat(f, v)
        u0 = ravel_pytree(start)[0]
        if linear == "cholesky":
            _refuse_dense(v.size, "newton")
        h = _envelope(f, v, s)
        slack = _slack(v.dtype)

        def body(carry: tuple) -> tuple:
            u, value, g, k = carry
            d = _newton_step(f, u, s, g) if linear == "cholesky" else _newton_cg(f, u, s, g)

            def too_long(t: Any) -> Any:
                return ~(h(u - t * d) <= value - 0.25 * t * (g @ d) + slack * jnp.abs(value)) & (t > 1e-6)

            t = jax.lax.while_loop(too_long, lambda t: t / 2, jnp.ones((), u.dtype))
            u = u - t * d
            return (u, *jax.value_and_grad(h)(u), k + 1)

        def goes_on(carry: tuple) -> Any:
            _, _, g, k = carry
            return (k < max_steps) & (jnp.linalg.norm(g) > enough)

        value, g = jax.value_and_grad(h)(u0)
        enough = _finest(v, jax.grad(h)(v), tolerance)
        u, _, _, k = jax.lax.while_loop(goes_on, body, (u0, value, g, jnp.int32(0)))
        return Solution(unravel(u), k)

    return solve


def accelerated(
    *, tolerance: Any = 1e-8, max_steps: int = 500, strong_convexity: Any = 0.0, smoothness: Any = None
) -> ProxSolver:
    """Nesterov's accelerated gradient method on h, until ``||grad h|| <= tolerance``: for convex f of any size.

    h is (1 + s l)-strongly convex, so the momentum is known; without L the step is found by doubling.

    >>> f = lambda u: 0.5 * jnp.sum(jnp.array([1.0, 3.0]) * (u - 1.0) ** 2)
    >>> accelerated(tolerance=1e-6)(f, jnp.zeros(2), 1.0, {}, jnp.zeros(2)).point.round(4).tolist()
    [0.5, 0.75]
    """
    check_number("tolerance", tolerance, low=0)
    check_count("max_steps", max_steps)
    check_number("strong_convexity", strong_convexity, low=0)
    if smoothness is not None:
        check_number("smoothness", smoothness, low=0, open_low=True)

    def solve(f: Callable, v: PyTree, s: Any, batch: dict, start: PyTree) -> Solution:
        f, v, unravel = _flat(f, v)
        u0 = ravel_pytree(start)[0]
        h = _envelope(f, v, s)
        slack = _slack(v.dtype)
        m = jnp.asarray(1 + s * strong_convexity, v.dtype)
        first = 2 * m if smoothness is None else jnp.asarray(1 + s * smoothness, v.dtype)

        # Nesterov, Introductory Lectures on Convex Optimization, scheme (2.2.8) with gamma_0 = m: the estimate sequence
        # keeps gamma = m for any curvature bounds M, so M may change from step to step.
        def body(carry: tuple) -> tuple:
            x, w, M, _, k = carry
            a = jnp.sqrt(m / M)
            y = (x + a * w) / (1 + a)
            value, g = jax.value_and_grad(h)(y)
            nearer = y - g / M
            ahead = (1 - a) * w + a * y - (a / m) * g
            if smoothness is not None:
                return nearer, ahead, M, jnp.linalg.norm(g), k + 1
            ok = h(nearer) <= value - 0.5 * (g @ g) / M + slack * jnp.abs(value)
            return (
                jnp.where(ok, nearer, x),
                jnp.where(ok, ahead, w),
                jnp.where(ok, M, 2 * M),
                jnp.where(ok, jnp.linalg.norm(g), jnp.inf),  # a rejected step must not end the loop
                k + 1,
            )

        def goes_on(carry: tuple) -> Any:
            *_, norm, k = carry
            return (k < max_steps) & (norm > enough)

        enough = _finest(v, jax.grad(h)(v), tolerance)
        begin = (u0, u0, first, jnp.full_like(m, jnp.inf), jnp.int32(0))
        # the last x is one gradient step after the y whose gradient met the tolerance, so its gradient is no larger
        x, *_, k = jax.lax.while_loop(goes_on, body, begin)
        return Solution(unravel(x), k)

    return solve


def gradient_steps(
    steps: int = 10, *, strong_convexity: Any = None, smoothness: Any = None, alpha: Any = None
) -> ProxSolver:
    """e gradient steps on h (eq. 17), each of size alpha = 1 / (1 + s (l + L) / 2) unless given (Corollary 1).

    From v, the error after e steps is at most ``(1 - 1 / (sqrt(kappa) + 1))^e ||v - prox(v)||`` (eq. 18, for the step
    s = 1 / sqrt(l L)).

    >>> half = gradient_steps(1, strong_convexity=1.0, smoothness=1.0)  # alpha = 1/2 is exact where l = L
    >>> half(lambda u: 0.5 * jnp.sum((u - 1.0) ** 2), jnp.zeros(1), 1.0, {}, jnp.zeros(1)).point.tolist()
    [0.5]
    """
    check_count("local_steps", steps)
    if alpha is not None:
        check_number("alpha", alpha, low=0, open_low=True)
    elif strong_convexity is None or smoothness is None:
        raise ValueError(
            f"prox='gradient' takes its step from strong_convexity (l) and smoothness (L), got {strong_convexity!r} "
            f"and {smoothness!r}: give both (prox.curvature estimates them from data), or use prox='backtracking'"
        )
    else:
        check_constants(strong_convexity, smoothness)

    def solve(f: Callable, v: PyTree, s: Any, batch: dict, start: PyTree) -> Solution:
        size = 1 / (1 + s * (strong_convexity + smoothness) / 2) if alpha is None else alpha

        def body(_: Any, u: PyTree) -> PyTree:
            return jax.tree.map(lambda u, g: u - size * g, u, prox_gradient(f, u, v, s)[1])

        return Solution(jax.lax.fori_loop(0, steps, body, start), jnp.int32(steps))

    return solve


def backtracking(steps: int = 10, *, tolerance: Any = 0.0) -> ProxSolver:
    """At most e gradient steps on h, each the longest of 1, 1/2, 1/4 ... that decreases h enough.

    A step is at most 1 (the curvature of h is at least 1) and at most twice the previous step. No constants are needed.
    The value of h never increases, also if f is not convex.

    >>> f = lambda u: 0.5 * jnp.sum(jnp.array([1.0, 3.0]) * (u - 1.0) ** 2)
    >>> backtracking(30)(f, jnp.zeros(2), 1.0, {}, jnp.zeros(2)).point.round(4).tolist()
    [0.5, 0.75]
    """
    check_count("local_steps", steps)
    check_number("tolerance", tolerance, low=0)
    trials = 3 * steps + 60  # a rejected trial halves the step: enough for any curvature up to 2^60

    def solve(f: Callable, v: PyTree, s: Any, batch: dict, start: PyTree) -> Solution:
        f, v, unravel = _flat(f, v)
        u0 = ravel_pytree(start)[0]
        both = jax.value_and_grad(_envelope(f, v, s))
        slack = _slack(v.dtype)

        def body(carry: tuple) -> tuple:
            u, value, g, t, k, tried = carry
            trial = u - t * g
            new_value, new_g = both(trial)
            # near convergence rounding hides the decrease of h but not its slope; for a convex h both tests agree
            hidden = jnp.abs(new_value - value) <= slack * jnp.abs(value)
            ok = jnp.where(hidden, new_g @ g >= 0, new_value <= value - 0.5 * t * (g @ g))
            return (
                jnp.where(ok, trial, u),
                jnp.where(ok, new_value, value),
                jnp.where(ok, new_g, g),
                jnp.where(ok, jnp.minimum(2 * t, 1), t / 2),
                k + ok.astype(jnp.int32),
                tried + 1,
            )

        def goes_on(carry: tuple) -> Any:
            _, _, g, _, k, tried = carry
            return (k < steps) & (tried < trials) & (jnp.linalg.norm(g) > enough)

        value, g = both(u0)
        enough = _finest(v, both(v)[1], tolerance)
        begin = (u0, value, g, jnp.ones((), v.dtype), jnp.int32(0), jnp.int32(0))
        u, *_, k, _ = jax.lax.while_loop(goes_on, body, begin)
        return Solution(unravel(u), k)

    return solve


SOLVERS = ("closed-form", "newton", "accelerated", "gradient", "backtracking")


def named_solver(
    prox: str | ProxSolver,
    *,
    local_steps: int,
    tolerance: Any,
    max_steps: int,
    strong_convexity: Any,
    smoothness: Any,
) -> ProxSolver:
    """The solver that a config names, or the one that was passed."""
    check_count("local_steps", local_steps)
    check_number("tolerance", tolerance, low=0)
    check_count("max_steps", max_steps)
    if callable(prox):
        return prox
    if check_choice("prox", prox, SOLVERS) == "closed-form":
        return closed_form()
    if prox == "newton":
        return newton(tolerance=tolerance, max_steps=max_steps)
    if prox == "accelerated":
        low = 0.0 if strong_convexity is None else strong_convexity
        return accelerated(tolerance=tolerance, max_steps=max_steps, strong_convexity=low, smoothness=smoothness)
    if prox == "gradient":
        return gradient_steps(local_steps, strong_convexity=strong_convexity, smoothness=smoothness)
    return backtracking(local_steps)


# --- the constants l and L of given data -----------------------------------------------------------------------------


class Curvature(NamedTuple):
    """l_* = min_j l_j and L^* = max_j L_j (eq. 14), with every client's own extremes."""

    strong_convexity: float
    smoothness: float
    lows: np.ndarray
    highs: np.ndarray

    @property
    def kappa(self) -> float:
        return self.smoothness / self.strong_convexity

    @property
    def step(self) -> float:
        """FedSplit's s = 1 / sqrt(l L)."""
        if self.strong_convexity <= 0:
            raise ValueError(
                f"the smallest curvature is l = {self.strong_convexity:g}: 1 / sqrt(l L) needs l > 0; "
                "give fedsplit a regularization (Theorem 2) and the smoothness"
            )
        return float(1 / np.sqrt(self.strong_convexity * self.smoothness))


def curvature(
    loss: Loss,
    params: PyTree,
    split: Clients,
    *,
    method: Literal["dense", "lanczos"] = "dense",
    steps: int = 30,
    objective: Objective = "mean",
    seed: int = 0,
) -> Curvature:
    """The extreme eigenvalues of every client's Hessian at ``params``.

    "dense" forms each Hessian: exact for quadratics at any point. "lanczos" uses only Hessian-vector products. Its
    values lie inside the true range (L too small, l too large) and are exact once ``steps`` reaches the number of
    distinct eigenvalues. For a loss that is not quadratic the curvature depends on ``params``: that of logistic losses
    is largest at 0.

    >>> from fedbraid.data import Split
    >>> split = Split.from_clients([{"x": np.eye(2) * [1.0, 2.0], "y": np.zeros(2)}])
    >>> square = lambda w, batch, key: 0.5 * jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> c = curvature(square, jnp.zeros(2), split)
    >>> round(c.strong_convexity, 6), round(c.smoothness, 6), round(c.step, 6)
    (0.5, 2.0, 1.0)
    """
    check_choice("method", method, ("dense", "lanczos"))
    check_count("steps", steps)
    check_choice("objective", objective, OBJECTIVES)
    flat, unravel = ravel_pytree(params)
    if method == "dense":
        _refuse_dense(flat.size, "method='dense'", "method='lanczos'")
    arrays = {name: jnp.asarray(a) for name, a in split.arrays.items()}
    cap, key = int(split.sizes.max()), jax.random.key(seed)

    def extremes(place: tuple) -> Any:
        offset, size = place
        batch = ClientData(arrays, offset, size, cap, split.preprocess).everything()
        f = client_objective(loss, objective, batch, None)

        def of_flat(u: Any) -> Any:
            return f(unravel(u))

        if method == "dense":
            values = jnp.linalg.eigvalsh(jax.hessian(of_flat)(flat))
        else:
            values = _ritz(lambda d: _hvp(of_flat, flat, d), flat, min(steps, flat.size), key)
        return jnp.stack([values[0], values[-1]])

    places = (jnp.asarray(split.offsets[:-1], jnp.int32), jnp.asarray(split.sizes, jnp.int32))
    lows, highs = np.asarray(jax.jit(lambda p: jax.lax.map(extremes, p))(places), float).T
    return Curvature(float(lows.min()), float(highs.max()), lows, highs)


def _ritz(hvp: Callable, like: Any, steps: int, key: Any) -> Any:
    """Eigenvalues of the Krylov projection, ascending: Lanczos' method with full orthogonalisation, done twice."""

    def body(carry: tuple, k: Any) -> tuple:
        basis, q, alive = carry
        basis = basis.at[k].set(q)
        w = hvp(q)
        alpha = q @ w
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        beta = jnp.linalg.norm(w)
        # once the Krylov space is exhausted, w is rounding noise: the rest of T must not add new eigenvalues
        on = alive & (beta > 1e3 * jnp.finfo(w.dtype).eps * jnp.abs(alpha))
        return (basis, jnp.where(on, w / jnp.where(beta > 0, beta, 1), 0), on), (alpha, jnp.where(on, beta, 0), alive)

    q = jax.random.normal(key, like.shape, like.dtype)
    begin = (jnp.zeros((steps, like.size), like.dtype), q / jnp.linalg.norm(q), jnp.array(True))
    _, (alpha, beta, alive) = jax.lax.scan(body, begin, jnp.arange(steps))
    alpha = jnp.where(alive, alpha, alpha[0])  # alpha[0] is a Rayleigh quotient: inside the range
    off = beta[:-1]
    return jnp.linalg.eigvalsh(jnp.diag(alpha) + jnp.diag(off, 1) + jnp.diag(off, -1))


# --- pieces ----------------------------------------------------------------------------------------------------------


def _flat(f: Callable, v: PyTree) -> tuple[Callable, Any, Callable]:
    flat, unravel = ravel_pytree(v)
    return (lambda u: f(unravel(u))), flat, unravel


def _envelope(f: Callable, v: Any, s: Any) -> Callable:
    """h, on flat vectors."""
    return lambda u: s * f(u) + 0.5 * jnp.sum((u - v) ** 2)


def _hvp(f: Callable, at: Any, direction: Any) -> Any:
    return jax.jvp(jax.grad(f), (at,), (direction,))[1]


def _newton_step(f: Callable, u: Any, s: Any, g: Any) -> Any:
    matrix = jnp.eye(u.size, dtype=u.dtype) + s * jax.hessian(f)(u)
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), g)


def _newton_cg(f: Callable, u: Any, s: Any, g: Any) -> Any:
    tol = 1e-10 if u.dtype == jnp.float64 else 1e-5
    return jax.scipy.sparse.linalg.cg(lambda d: d + s * _hvp(f, u, d), g, tol=tol, maxiter=2 * u.size)[0]


def _slack(dtype: Any) -> float:
    """Relative rounding error of h: near convergence a decrease below it cannot be measured."""
    return 8 * float(jnp.finfo(dtype).eps)


def _finest(v: Any, g: Any, tolerance: Any) -> Any:
    """The tolerance plus the rounding error of the gradient; g is the gradient of h at v."""
    return tolerance + 4 * float(jnp.finfo(g.dtype).eps) * (jnp.linalg.norm(v) + jnp.linalg.norm(g))


def _refuse_dense(size: int, what: str, instead: str = "prox='accelerated'") -> None:
    if size > DENSE:
        raise ValueError(f"{what} forms a {size} x {size} Hessian, over the limit of {DENSE} parameters; use {instead}")


def check_constants(low: Any, high: Any) -> None:
    """Refuse values of l and L that are impossible for a convex smooth loss."""
    check_number("strong_convexity", low, low=0)
    check_number("smoothness", high, low=0, open_low=True)
    if not is_traced(low) and not is_traced(high) and low > high:
        raise ValueError(f"strong_convexity (l) must not exceed smoothness (L), got {low!r} > {high!r}")
