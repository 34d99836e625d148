"""Fixed points and rates of FedGD, FedProx and FedSplit on quadratics.

Pathak and Wainwright, "FedSplit: an algorithmic framework for fast federated optimization". Three methods with
exact gradients and full participation; each round maps the server's point (FedSplit: also the clients' points):

- FedGD(s, e): average of ``e`` gradient steps of size ``s`` on every client (Prop. 1, eq. 10);
- FedProx: average of the exact ``prox_{s f_j}`` (Prop. 2);
- FedSplit: ``z_j <- z_j + 2 (prox_{s f_j}(2 x - z_j) - x)``, ``x <- mean z_j`` (Algorithm 1, Prop. 3).

Only FedSplit has the minimizer as its fixed point. Sums over clients in the paper are weighted means here; with
uniform weights (which FedSplit and the paper assume) the fixed points are the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedbraid.theory.quadratics import QuadraticFederation, solve_positive
from fedbraid.theory.surrogate import surrogate_loss, theta_sum

__all__ = [
    "Regularized",
    "SplitPoint",
    "contraction",
    "error_floor",
    "fedgd_fixed_point",
    "fedgd_gap",
    "fedprox_fixed_point",
    "fedprox_gap",
    "fedsplit_fixed_point",
    "fedsplit_gap",
    "fedsplit_spectral_radius",
    "inexact_prox_error",
    "prox_gradient_step",
    "regularized_choice",
    "rounds_bound",
    "rounds_until",
    "split_step",
]


class SplitPoint(NamedTuple):
    """The fixed point of FedSplit: the server's ``x``, the minimizer; the clients' ``z`` ``[m, d]`` with mean ``x``."""

    x: np.ndarray
    z: np.ndarray


class Regularized(NamedTuple):
    """Theorem 2's choice for losses that are convex but not strongly convex."""

    lam: float  # lambda: each client adds (lambda / 2) ||x - x_1||^2
    step: float  # s = 1 / sqrt(lambda (L + lambda))
    kappa: float  # (L + lambda) / lambda
    rounds: int  # enough for F(x) - F* <= epsilon


def fedgd_fixed_point(federation: QuadraticFederation, *, step: float, local_steps: int) -> np.ndarray:
    """The fixed point of FedGD(s, e), eq. (10): the surrogate minimizer of FedAvg with ``gamma = s`` and ``K = e``.

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> fedgd_fixed_point(fed, step=0.1, local_steps=1).round(6).tolist()  # one step: the minimizer
    [0.6]
    >>> fedgd_fixed_point(fed, step=0.1, local_steps=100).round(3).tolist()  # many: near the mean of the minimizers
    [0.0]
    """
    _check_step(step)
    limit = 2.0 / federation.smoothness
    if step >= limit:
        raise ValueError(f"step = {step} makes local gradient descent diverge; it needs s < 2 / L = {limit:.6g}")
    return surrogate_loss(federation, gamma=step, theta=theta_sum(local_steps)).minimizer


def fedprox_fixed_point(federation: QuadraticFederation, *, step: float) -> np.ndarray:
    """The fixed point of exact FedProx: the zero of the mean gradient of the Moreau envelopes (eq. 7).

    ``grad M_{s f_j}(x) = (I + s A_j)^-1 (A_j x - b_j)``.

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> fedprox_fixed_point(fed, step=1.0).round(6).tolist()
    [0.230769]
    """
    _check_step(step)
    lam, V = federation.eigh
    shrink = 1.0 / (1.0 + step * lam)
    H = np.einsum("i,iak,ik,ibk->ab", federation.weights, V, shrink * lam, V, optimize=True)
    local_b = np.einsum("iak,ia->ik", V, federation.b)
    rhs = np.einsum("i,iak,ik->a", federation.weights, V, shrink * local_b, optimize=True)
    return solve_positive((H + H.T) / 2, rhs, "the mean Moreau envelope")


def fedsplit_fixed_point(federation: QuadraticFederation, *, step: float | None = None) -> SplitPoint:
    """The fixed point of FedSplit (Prop. 3): ``x*`` and ``z_j = x* - s grad f_j(x*)``.

    >>> from fedbraid.theory.quadratics import federation
    >>> at = fedsplit_fixed_point(federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]]), step=1.0)
    >>> at.x.round(6).tolist(), at.z.round(6).tolist()
    ([0.6], [[2.2], [-1.0]])
    """
    _uniform(federation)
    s = split_step(federation.mu, federation.smoothness) if step is None else step
    _check_step(s)
    x = federation.minimizer
    return SplitPoint(x, x - s * federation.client_gradients(x))


def split_step(strong_convexity: float, smoothness: float) -> float:
    """Theorem 1's prox step ``s = 1 / sqrt(l L)``.

    >>> split_step(1.0, 4.0)
    0.5
    """
    if not 0 < strong_convexity <= smoothness:
        raise ValueError(
            f"need 0 < l <= L, got l = {strong_convexity}, L = {smoothness}; for l = 0 see regularized_choice"
        )
    return 1.0 / math.sqrt(strong_convexity * smoothness)


def contraction(strong_convexity: float, smoothness: float, step: float | None = None) -> float:
    """The worst-case factor by which one round of FedSplit shrinks the distance to its fixed point.

    ``max |1 - s lambda| / (1 + s lambda)`` over [l, L]; with the best step it is ``1 - 2 / (sqrt(kappa) + 1)``.

    >>> round(contraction(1.0, 9.0), 9)
    0.5
    """
    s = split_step(strong_convexity, smoothness) if step is None else step
    _check_step(s)
    return max(abs(1.0 - s * lam) / (1.0 + s * lam) for lam in (strong_convexity, smoothness))


def error_floor(kappa: float, prox_error: float) -> float:
    """Theorem 1: if every prox has an error of at most ``b``, the iterates end within ``(sqrt(kappa) + 1) b`` of x*.

    >>> error_floor(9.0, 0.01)
    0.04
    """
    if kappa < 1 or prox_error < 0:
        raise ValueError(f"need kappa >= 1 and prox_error >= 0, got {kappa} and {prox_error}")
    return (math.sqrt(kappa) + 1.0) * prox_error


def prox_gradient_step(strong_convexity: float, smoothness: float) -> float:
    """Corollary 1's step for solving the prox by gradient descent: ``(1 + s (l + L) / 2)^-1``.

    >>> prox_gradient_step(1.0, 4.0)
    0.4444444444444444
    """
    s = split_step(strong_convexity, smoothness)
    return 1.0 / (1.0 + s * (strong_convexity + smoothness) / 2.0)


def inexact_prox_error(kappa: float, local_steps: int, start: float) -> float:
    """Corollary 1, eq. (18): the prox error after ``e`` gradient steps from a point at distance ``start`` to the prox.

    >>> round(inexact_prox_error(9.0, 2, 1.0), 6)
    0.5625
    """
    if kappa < 1 or local_steps < 0 or start < 0:
        raise ValueError(f"need kappa >= 1, local_steps >= 0, start >= 0, got {kappa}, {local_steps}, {start}")
    return (1.0 - 1.0 / (math.sqrt(kappa) + 1.0)) ** local_steps * start


def rounds_bound(epsilon: float, kappa: float, start: float, prox_error: float = 0.0) -> int:
    """Rounds after which Theorem 1 guarantees ``||x - x*|| <= epsilon``; ``start`` is ``||z_1 - z*|| / sqrt(m)``.

    >>> rounds_bound(1e-3, 1e4, 1.0)
    347
    """
    floor = error_floor(kappa, prox_error)
    if epsilon <= floor:
        raise ValueError(
            f"epsilon = {epsilon} is at or below the error floor (sqrt(kappa) + 1) b = {floor:.6g}: "
            "solve the prox more exactly (more local steps)"
        )
    if start <= epsilon - floor:
        return 1
    rho = 1.0 - 2.0 / (math.sqrt(kappa) + 1.0)
    return 2 if rho <= 0 else 1 + math.ceil(math.log((epsilon - floor) / start) / math.log(rho))


def regularized_choice(
    epsilon: float, *, clients: int, smoothness: float, distance: float, start_gradient: float
) -> Regularized:
    """Theorem 2, without strong convexity: regularization, step and number of rounds for ``F(x) - F* <= epsilon``.

    ``distance`` bounds ``||x_1 - x*||``; ``start_gradient`` is the root mean square of the client gradients at
    ``x_1``. Each client adds (lambda / 2) ||x - x_1||^2 (the proof's form; eq. 19 divides by m once more). The
    number of rounds follows from eq. (36). The printed formula lacks epsilon in its logarithm and does not bound
    ``||z_1 - z*||``. Here that is bounded by ``sqrt(m) (D + s (start_gradient + (L + lambda) D))``, because
    ``z_j* = x_lambda* - s grad f_j(x_lambda*)`` and ``||x_1 - x_lambda*|| <= ||x_1 - x*|| = D``.

    >>> choice = regularized_choice(0.1, clients=10, smoothness=4.0, distance=1.0, start_gradient=2.0)
    >>> choice.lam, round(choice.kappa, 3), choice.rounds
    (0.01, 401.0, 69)
    """
    values = (epsilon, clients, smoothness, distance)
    if min(values) <= 0 or start_gradient < 0:
        raise ValueError(
            "epsilon, clients, smoothness and distance must be positive and start_gradient not negative, "
            f"got {values} and {start_gradient}"
        )
    lam = epsilon / (clients * distance**2)
    top = smoothness + lam
    kappa, s = top / lam, 1.0 / math.sqrt(lam * top)
    start = distance + s * (start_gradient + top * distance)
    inside = clients * top * start**2 / epsilon
    rounds = 1 if inside <= 1 else 1 + math.ceil((math.sqrt(kappa) + 1.0) / 4.0 * math.log(inside))
    return Regularized(lam, s, kappa, rounds)


def fedgd_gap(
    federation: QuadraticFederation,
    rounds: ArrayLike,
    *,
    step: float,
    local_steps: int = 1,
    start: ArrayLike | None = None,
) -> np.ndarray:
    """``F(x_t) - F*`` with ``F = sum_j f_j`` at the given rounds of FedGD(s, e): closed form, any number of rounds.

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> fedgd_gap(fed, [0, 1], step=0.1).round(6).tolist()
    [0.9, 0.50625]
    """
    fixed = fedgd_fixed_point(federation, step=step, local_steps=local_steps)
    s = surrogate_loss(federation, gamma=step, theta=theta_sum(local_steps))
    return _linear_gap(federation, step * s.hessian * math.exp(s.log_scale), fixed, rounds, start)


def fedprox_gap(
    federation: QuadraticFederation, rounds: ArrayLike, *, step: float, start: ArrayLike | None = None
) -> np.ndarray:
    """``F(x_t) - F*`` at the given rounds of exact FedProx.

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> bool(fedprox_gap(fed, 1000, step=1.0) > 0.3)  # it converges, but not to the minimizer
    True
    """
    fixed = fedprox_fixed_point(federation, step=step)
    lam, V = federation.eigh
    H = np.einsum("i,iak,ik,ibk->ab", federation.weights, V, step * lam / (1.0 + step * lam), V, optimize=True)
    return _linear_gap(federation, H, fixed, rounds, start)


def fedsplit_gap(
    federation: QuadraticFederation,
    rounds: int,
    *,
    step: float | None = None,
    local_steps: int | None = None,
    start: ArrayLike | None = None,
) -> np.ndarray:
    """``F(x_t) - F*`` for t = 0 .. rounds of FedSplit, with exact prox or with ``local_steps`` gradient steps (eq. 17).

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> bool(fedsplit_gap(fed, 60)[-1] < 1e-15)
    True
    """
    _uniform(federation)
    mu, L = federation.mu, federation.smoothness
    s = split_step(mu, L) if step is None else step
    _check_step(s)
    lam, V = federation.eigh
    if local_steps is None:
        shrink, push = 1.0 / (1.0 + s * lam), s / (1.0 + s * lam)  # prox(v) = shrink v + push b, in A_j's eigenbasis
    else:
        # e steps u <- u - a (s grad f(u) + u - v) from u = v: each multiplies the distance to the prox by
        # r = 1 - a (1 + s lambda).
        a = 1.0 / (1.0 + s * (mu + L) / 2.0)
        left = (1.0 - a * (1.0 + s * lam)) ** local_steps
        shrink, push = left + (1.0 - left) / (1.0 + s * lam), (1.0 - left) * s / (1.0 + s * lam)
    P = np.einsum("iak,ik,ibk->iab", V, shrink, V, optimize=True)
    q = np.einsum("iak,ik,ick,ic->ia", V, push, V, federation.b, optimize=True)
    x = np.zeros(federation.dim) if start is None else np.asarray(start, float)
    z = np.tile(x, (federation.num_clients, 1))
    best, H = federation.minimizer, federation.hessian * federation.num_clients
    gaps = np.empty(rounds + 1)
    for t in range(rounds + 1):
        x = z.mean(0)
        gaps[t] = 0.5 * (x - best) @ H @ (x - best)
        half = np.einsum("iab,ib->ia", P, 2.0 * x - z) + q
        z = z + 2.0 * (half - x)
    return gaps


def fedsplit_spectral_radius(federation: QuadraticFederation, step: float | None = None) -> float:
    """The exact rate of FedSplit on this instance (at most `contraction`): an (m d) x (m d) eigenproblem.

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> fedsplit_spectral_radius(fed) <= contraction(1.0, 4.0) + 1e-12
    True
    """
    _uniform(federation)
    s = split_step(federation.mu, federation.smoothness) if step is None else step
    m, d = federation.num_clients, federation.dim
    lam, V = federation.eigh
    reflect = np.einsum("iak,ik,ibk->iab", V, (1.0 - s * lam) / (1.0 + s * lam), V, optimize=True)
    swap = 2.0 * np.kron(np.full((m, m), 1.0 / m), np.eye(d)) - np.eye(m * d)  # z -> 2 mean(z) - z
    full = np.einsum("iab,ibc->iac", reflect, swap.reshape(m, d, m * d)).reshape(m * d, m * d)
    return float(np.abs(np.linalg.eigvals(full)).max())


def rounds_until(gaps: np.ndarray, epsilon: float, *, stay: bool = False) -> int | None:
    """The first round with gap at most epsilon, or None. ``stay``: the gap must also stay there until the end.

    >>> gaps = np.array([1.0, 0.05, 0.2, 0.01])
    >>> rounds_until(gaps, 0.1), rounds_until(gaps, 0.1, stay=True)
    (1, 3)
    """
    below = np.asarray(gaps) <= epsilon
    if not below.any() or (stay and not below[-1]):
        return None
    return int(np.argmax(below)) if not stay else int(len(below) - np.argmin(below[::-1])) if not below.all() else 0


def _linear_gap(
    federation: QuadraticFederation,
    step_hessian: np.ndarray,
    fixed: np.ndarray,
    rounds: ArrayLike,
    start: ArrayLike | None,
) -> np.ndarray:
    """``x_t - fixed = (I - step_hessian)^t (x_0 - fixed)``, hence the gap, for whole arrays of t."""
    x0 = np.zeros(federation.dim) if start is None else np.asarray(start, float)
    t = np.asarray(rounds, float)
    values, U = np.linalg.eigh((step_hessian + step_hessian.T) / 2)
    if values[-1] >= 2:
        raise ValueError(
            f"the method diverges: an error component grows by {abs(1 - values[-1]):.4g} per round; take a smaller step"
        )
    e0 = U.T @ (x0 - fixed)
    bias = U.T @ (fixed - federation.minimizer)
    H = U.T @ federation.hessian @ U * federation.num_clients
    factor = 1.0 - values
    with np.errstate(divide="ignore"):
        log_factor = np.log(np.abs(factor))
    flat = t.ravel()
    out = np.empty(flat.size)
    for i in range(0, flat.size, 4096):  # bounded memory for long histories
        tt = flat[i : i + 4096, None]
        power = np.where(tt == 0, 1.0, np.sign(factor) ** tt * np.exp(tt * log_factor))
        d = bias + power * e0
        out[i : i + 4096] = 0.5 * np.einsum("ta,ab,tb->t", d, H, d, optimize=True)
    return out.reshape(t.shape)


def _uniform(federation: QuadraticFederation) -> None:
    if not np.allclose(federation.weights, 1.0 / federation.num_clients):
        raise ValueError("FedSplit needs equal client weights; scale A_i and b_i instead of giving weights")


def _check_step(step: float) -> None:
    if not (math.isfinite(step) and step > 0):
        raise ValueError(f"step (s) must be positive and finite, got {step}")
