"""Surrogate losses: the losses that local update methods minimize on quadratics.

Charles and Konecny, "Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning", Theorems 1 and 2.
A client runs local steps with learning rate gamma and proximal strength alpha, and sends ``sum_k theta_k g_k``. The
expectation of that is the gradient of ``1/2 ||(Q_i A_i)^(1/2) (x - c_i)||^2`` with the distortion

    Q_i = sum_k theta_k (I - gamma (A_i + alpha I))^(k - 1).                                            (eq. 6)

``Q_i`` is a function of ``A_i``, so everything is arithmetic on eigenvalues. With many steps (K up to 10^6) the
eigenvalues of ``Q_i`` underflow or, outside the safe range, overflow. So they are stored as sign and logarithm, in
closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedbraid.theory.quadratics import QuadraticFederation, solve_positive

__all__ = [
    "Surrogate",
    "Theta",
    "distortion",
    "is_positive_definite",
    "log_distortion",
    "parse_theta",
    "phi",
    "psi",
    "surrogate_loss",
    "theta_last",
    "theta_maml",
    "theta_sum",
    "theta_weights",
]


class Theta(NamedTuple):
    """Which local gradients the client sends. Build one with `theta_sum`, `theta_last`, `theta_maml`,
    `theta_weights`."""

    kind: Literal["sum", "last", "maml", "weights"]
    steps: int  # K
    weights: tuple[float, ...] = ()

    def __str__(self) -> str:
        return {
            "sum": f"Theta_1:{self.steps}",
            "last": f"Theta_{self.steps}",
            "maml": f"MAML, {self.steps} steps (Theta_{2 * self.steps + 1} where alpha = 0)",
            "weights": f"Theta = {self.weights}",
        }[self.kind]


def theta_sum(steps: int) -> Theta:
    """Theta_{1:K}: the sum of all K local gradients (FedAvg, FedProx, Reptile).

    >>> str(theta_sum(10))
    'Theta_1:10'
    """
    return Theta("sum", _steps(steps))


def theta_last(steps: int) -> Theta:
    """Theta_K: the last of K local gradients (FOMAML).

    >>> str(theta_last(3))
    'Theta_3'
    """
    return Theta("last", _steps(steps))


def theta_maml(steps: int) -> Theta:
    """Exact MAML with K inner steps: Theta_{2K+1} on quadratics (Theorem 2).

    With a proximal term the inner steps end at ``c + J (x - c)``, ``J = (alpha + lambda r^K) / (lambda + alpha)``, so
    the distortion is ``J^2``. For alpha = 0 that is ``r^(2K)``, which is Theta_{2K+1}. For alpha > 0 it differs from
    Theta_{2K+1}.

    >>> distortion([2.0], gamma=0.1, theta=theta_maml(3)) == distortion([2.0], gamma=0.1, theta=theta_last(7))
    array([ True])
    """
    return Theta("maml", _steps(steps))


def theta_weights(weights: Sequence[float]) -> Theta:
    """Any Theta: non-negative weights, at least one positive.

    >>> theta_weights([0.0, 1.0, 1.0]).steps
    3
    """
    w = tuple(float(v) for v in weights)
    if not any(w):
        raise ValueError(f"theta is empty: it needs at least one positive weight, got {list(weights)}")
    if any(not math.isfinite(v) or v < 0 for v in w):
        raise ValueError(f"theta must hold finite non-negative weights, got {list(weights)}")
    while w[-1] == 0.0:
        w = w[:-1]
    return Theta("weights", len(w), w)


def parse_theta(text: str, steps: int | None = None) -> Theta:
    """Read ``"1:K"``, ``"K"``, ``"maml"`` or a comma-separated list of weights, as the command line gives it.

    >>> parse_theta("1:K", 5), parse_theta("0,0.5,1").weights
    (Theta(kind='sum', steps=5, weights=()), (0.0, 0.5, 1.0))
    """
    kinds = {"1:K": theta_sum, "K": theta_last, "MAML": theta_maml}
    key = text.strip().upper()
    if key in kinds:
        if steps is None:
            raise ValueError(f"theta {text!r} needs the number of local steps K; give --steps")
        return kinds[key](steps)
    try:
        weights = [float(v) for v in text.split(",") if v.strip()]
    except ValueError:
        raise ValueError(
            f"theta {text!r} is not understood; give 1:K (FedAvg), K (FOMAML), maml, or weights such as 0,0.5,1"
        ) from None
    if not weights:
        raise ValueError("theta is empty; give 1:K (FedAvg), K (FOMAML), maml, or weights such as 0,0.5,1")
    return theta_weights(weights)


def log_distortion(
    eigenvalues: ArrayLike, *, gamma: float, theta: Theta, alpha: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Sign and logarithm of the eigenvalues of Q, for the given eigenvalues of A (eq. 29).

    >>> sign, log = log_distortion([1.0, 10.0], gamma=0.05, theta=theta_last(1_000_000))
    >>> sign.tolist(), log.round(1).tolist()
    ([1.0, 1.0], [-51293.2, -693146.5])
    """
    check_local(gamma, alpha)
    lam = np.asarray(eigenvalues, float)
    x = gamma * (lam + alpha)  # the local contraction is r = 1 - x
    if theta.kind == "sum":
        return _log_geometric(x, theta.steps)
    if theta.kind == "last":
        return _log_power(x, theta.steps - 1)
    if theta.kind == "maml":
        sign, log = _log_power(x, theta.steps)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if alpha == 0.0:
                return np.abs(sign), 2.0 * log
            J = (alpha + lam * sign * np.exp(log)) / (lam + alpha)
            return np.abs(np.sign(J)), 2.0 * np.log(np.abs(J))
    return _log_polynomial(x, theta.weights)


def distortion(eigenvalues: ArrayLike, *, gamma: float, theta: Theta, alpha: float = 0.0) -> np.ndarray:
    """Eigenvalues of Q for these eigenvalues of A. May underflow to 0 for long Theta_K: see `log_distortion`.

    >>> distortion([1.0, 10.0], gamma=0.05, theta=theta_sum(2)).tolist()
    [1.95, 1.5]
    >>> distortion([1.0, 10.0], gamma=0.0, theta=theta_sum(1_000_000)).round(6).tolist()
    [1000000.0, 1000000.0]
    """
    sign, log = log_distortion(eigenvalues, gamma=gamma, theta=theta, alpha=alpha)
    with np.errstate(over="ignore"):
        return sign * np.exp(log)


def phi(lam: ArrayLike, *, gamma: float, steps: int, alpha: float = 0.0) -> np.ndarray:
    """Eq. (10): eigenvalues of ``Q A`` for Theta_{1:K}.

    >>> float(phi(10.0, gamma=0.05, steps=2))
    15.0
    """
    return np.asarray(lam, float) * distortion(lam, gamma=gamma, theta=theta_sum(steps), alpha=alpha)


def psi(lam: ArrayLike, *, gamma: float, steps: int, alpha: float = 0.0) -> np.ndarray:
    """Eq. (12): eigenvalues of ``Q A`` for Theta_K.

    >>> float(psi(10.0, gamma=0.05, steps=2))
    5.0
    """
    return np.asarray(lam, float) * distortion(lam, gamma=gamma, theta=theta_last(steps), alpha=alpha)


def is_positive_definite(smoothness: float, *, gamma: float, theta: Theta, alpha: float = 0.0, mu: float = 0.0) -> bool:
    """Whether Q is positive definite for every spectrum in ``[mu, smoothness]``; exact.

    Lemma 1 (gamma < 1 / (L + alpha)) is sufficient for every Theta, and necessary for Theta_K with even K. Theta_{1:K}
    allows more: any gamma if K is odd, gamma < 2 / (L + alpha) if K is even.

    >>> [is_positive_definite(10.0, gamma=0.15, theta=make(4)) for make in (theta_sum, theta_last)]
    [True, False]
    """
    x = gamma * (smoothness + alpha)
    if x < 1:
        return True
    low = gamma * (mu + alpha)
    if theta.kind == "sum":
        return theta.steps % 2 == 1 or x < 2
    if theta.kind == "last":
        inside = low <= 1.0  # some spectrum has 1 - gamma (lambda + alpha) = 0
        return theta.steps == 1 or (theta.steps % 2 == 1 and not inside)
    if theta.kind == "maml" and alpha == 0.0:
        return low > 1.0
    sign, log = log_distortion(np.linspace(mu, smoothness, 4001), gamma=gamma, theta=theta, alpha=alpha)
    return bool(np.all((sign > 0) & np.isfinite(log)))


@dataclass(frozen=True)
class Surrogate:
    """The loss that the server's optimizer minimizes. Build one with `surrogate_loss`.

    ``hessian`` and ``linear`` are scaled by ``exp(-log_scale)``, so that they do not underflow for Theta_K with
    many steps. `loss` and `gradient` include the scale; the minimizer and the condition number do not depend on it.
    """

    federation: QuadraticFederation
    gamma: float
    theta: Theta
    alpha: float
    log_q: np.ndarray  # [m, d], log of the eigenvalues of Q_i
    log_scale: float
    hessian: np.ndarray  # [d, d], E_i[Q_i A_i] exp(-log_scale)
    linear: np.ndarray  # [d], E_i[Q_i b_i] exp(-log_scale)

    @cached_property
    def minimizer(self) -> np.ndarray:
        """``x*(alpha, gamma, Theta)`` (Lemma 11)."""
        return solve_positive(self.hessian, self.linear, "the surrogate")

    @property
    def smoothness(self) -> float:
        """Largest eigenvalue of the surrogate's Hessian."""
        return float(np.linalg.eigvalsh(self.hessian)[-1] * math.exp(self.log_scale))

    @property
    def strong_convexity(self) -> float:
        """Smallest eigenvalue of the surrogate's Hessian."""
        return float(np.linalg.eigvalsh(self.hessian)[0] * math.exp(self.log_scale))

    @property
    def condition_number(self) -> float:
        """cond of the surrogate itself; `frontier.kappa` (eq. 9) bounds it from above (Lemma 2)."""
        values = np.linalg.eigvalsh(self.hessian)
        return float(values[-1] / values[0])

    def distortions(self) -> np.ndarray:
        """``Q_i`` as matrices ``[m, d, d]``."""
        vectors = self.federation.eigh[1]
        return np.einsum("iak,ik,ibk->iab", vectors, np.exp(self.log_q), vectors)

    def loss(self, x: ArrayLike) -> float:
        """The value of the surrogate. If every client has a minimizer, its part is 0 there."""
        x = np.asarray(x, float)
        value = 0.5 * x @ self.hessian @ x - self.linear @ x
        if self.federation.mu > 0:
            lam, vectors = self.federation.eigh
            local = np.einsum("iak,ia->ik", vectors, self.federation.centers)
            scaled = np.exp(self.log_q - self.log_scale)
            value += 0.5 * float(self.federation.weights @ np.einsum("ik,ik,ik->i", scaled, lam, local**2))
        return float(value * math.exp(self.log_scale))

    def gradient(self, x: ArrayLike) -> np.ndarray:
        """The expectation of what the server receives: ``E_i Q_i A_i (x - c_i)`` (Theorem 1)."""
        return (self.hessian @ np.asarray(x, float) - self.linear) * math.exp(self.log_scale)


def surrogate_loss(federation: QuadraticFederation, *, gamma: float, theta: Theta, alpha: float = 0.0) -> Surrogate:
    """The surrogate of LocalUpdate(alpha, gamma, Theta) on a quadratic federation.

    >>> from fedbraid.theory.quadratics import federation
    >>> fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]])
    >>> surrogate_loss(fed, gamma=0.0, theta=theta_sum(5)).minimizer.round(6).tolist()
    [0.6]
    >>> surrogate_loss(fed, gamma=0.125, theta=theta_sum(1_000_000)).minimizer.round(6).tolist()  # one-shot averaging
    [0.0]
    """
    lam, vectors = federation.eigh
    lam = np.maximum(lam, 0.0)  # rounding may turn a zero eigenvalue into -1e-17
    sign, log_q = log_distortion(lam, gamma=gamma, theta=theta, alpha=alpha)
    if not np.all((sign > 0) & np.isfinite(log_q)):
        i = int(np.argwhere(~((sign > 0) & np.isfinite(log_q)))[0][0])
        limit = 1.0 / (federation.smoothness + alpha)
        raise ValueError(
            f"gamma = {gamma} makes Q of client {i} indefinite (or overflow) for {theta}; "
            f"Lemma 1 guarantees a convex surrogate for gamma < 1 / (L + alpha) = {limit:.6g}"
        )
    log_scale = float(log_q.max())
    scaled = np.exp(log_q - log_scale)
    w = federation.weights
    hessian = np.einsum("i,iak,ik,ibk->ab", w, vectors, scaled * lam, vectors, optimize=True)
    local_b = np.einsum("iak,ia->ik", vectors, federation.b)
    linear = np.einsum("i,iak,ik->a", w, vectors, scaled * local_b, optimize=True)
    return Surrogate(federation, gamma, theta, alpha, log_q, log_scale, (hessian + hessian.T) / 2, linear)


def check_local(gamma: float, alpha: float) -> None:
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma (the client learning rate) must be finite and not negative, got {gamma}")
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha (the proximal strength) must be finite and not negative, got {alpha}")


def _steps(steps: int) -> int:
    if isinstance(steps, bool) or int(steps) != steps or steps < 1:
        raise ValueError(f"steps (K, the number of local steps) must be a whole number of at least 1, got {steps}")
    return int(steps)


def _log_power(x: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sign and log of ``(1 - x)^n``."""
    if n == 0:
        return np.ones_like(x), np.zeros_like(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        log = n * np.where(x < 0.5, np.log1p(-np.minimum(x, 0.5)), np.log(np.abs(1.0 - x)))
    sign = np.sign(1.0 - x) ** n
    return sign, log


def _log_geometric(x: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sign and log of ``sum_{k<n} (1 - x)^k = (1 - (1 - x)^n) / x``."""
    sign_power, log_power = _log_power(x, n)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # For 0 <= x < 1, expm1 is accurate where 1 - exp(..) cancels. For x > 1 the power may have either sign.
        small = -np.expm1(log_power) / x
        large = (1.0 - sign_power * np.exp(log_power)) / x
        # For x n below rounding the sum equals n (and the formula is 0 / 0 at x = 0).
        value = np.where(x * n < 1e-17, float(n), np.where(x < 1.0, small, large))
        # (x - 1)^n may overflow; its logarithm does not.
        huge = log_power > 700.0
        log = np.where(huge, log_power - np.log(x), np.log(np.abs(value)))
        sign = np.where(huge, -sign_power, np.sign(value))
    return sign, log


def _log_polynomial(x: np.ndarray, weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    r = 1.0 - x
    value = np.zeros_like(r)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for w in reversed(weights):  # Horner's method; |r| <= 1 in the safe range, so no term grows
            value = value * r + w
        return np.sign(value), np.log(np.abs(value))
