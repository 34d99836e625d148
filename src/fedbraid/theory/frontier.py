"""Convergence against accuracy: kappa, rho and Delta, and the Pareto frontiers they trace.

Charles and Konecny, "Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning", Sections 4 and 5
and Appendix D; rates and server step sizes from Lessard, Recht and Packard, "Analysis and Design of Optimization
Algorithms via Integral Quadratic Constraints", Proposition 1. With ``u = sqrt(kappa)`` and ``v = sqrt(b / a)`` (a and
b the extreme eigenvalues of the distortion Q), everything is a hyperbolic tangent of a logarithm,

    rho (no momentum) = tanh(ln(kappa) / 2)    rho (heavy ball) = tanh(ln(kappa) / 4)    Delta = tanh(ln(b / a) / 4),

and in the range of Lemma 6 ``b / a = kappa0 / kappa``. This gives the law of the heavy-ball frontier,

    artanh(rho) + artanh(Delta) = ln(kappa0) / 4,

which is symmetric in rho and Delta (docs/theory/frontiers.md). Logarithms also keep K = 10^6 finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedbraid.theory.quadratics import QuadraticFederation, check_curvature, random_spectrum
from fedbraid.theory.surrogate import (
    Theta,
    check_local,
    is_positive_definite,
    log_distortion,
    theta_last,
    theta_maml,
    theta_sum,
)

__all__ = [
    "MOMENTA",
    "Frontier",
    "Point",
    "ServerOptimizer",
    "federation_point",
    "heavy_ball_delta",
    "kappa",
    "pareto_frontier",
    "point",
    "rate",
    "rounds_to",
    "server_optimizer",
    "simulated_frontier",
]

Momentum = Literal["none", "nesterov", "heavy_ball"]
MOMENTA: tuple[Momentum, ...] = ("none", "nesterov", "heavy_ball")


class Point(NamedTuple):
    """One operating point. ``method`` says how kappa was computed, ``notes`` what limits it.

    The surrogate's extreme curvatures are kept as logarithms, because with Theta_K and many steps they underflow.
    """

    kappa: float
    kappa0: float
    delta: float
    rho: dict[str, float]
    method: str
    notes: tuple[str, ...]
    log_smoothness: float  # log of the surrogate's L~
    log_strong_convexity: float  # log of the surrogate's mu~

    @property
    def smoothness(self) -> float:
        """The surrogate's largest curvature, L~."""
        return math.exp(self.log_smoothness)

    @property
    def strong_convexity(self) -> float:
        """The surrogate's smallest curvature, mu~."""
        return math.exp(self.log_strong_convexity)


class ServerOptimizer(NamedTuple):
    """Server step size and momentum that reach the rate of Table 2: ``m <- g + momentum m`` and ``x <- x - step m``."""

    step: float
    momentum: float
    nesterov: bool


class Frontier(NamedTuple):
    """``rho``, ``delta`` and ``kappa`` at the ``values`` of ``over`` ("steps" or "gamma")."""

    over: str
    values: np.ndarray
    rho: np.ndarray
    delta: np.ndarray
    kappa: np.ndarray
    label: str


def rate(kappa: ArrayLike, momentum: Momentum = "none") -> np.ndarray:
    """Table 2: the convergence rate rho at condition number kappa (heavy ball: (sqrt(kappa) - 1) / (sqrt(kappa) + 1)).

    >>> [round(float(rate(9.0, m)), 6) for m in ("none", "nesterov", "heavy_ball")]
    [0.8, 0.622036, 0.5]
    """
    k = np.asarray(kappa, float)
    if np.any(k < 1 - 1e-9):
        raise ValueError(f"kappa is a condition number and at least 1, got {kappa}")
    return _rate_from_log(np.log(np.maximum(k, 1.0)), momentum)


def server_optimizer(smoothness: float, strong_convexity: float, momentum: Momentum = "none") -> ServerOptimizer:
    """The step size and momentum that reach `rate`, for the surrogate's own L~ and mu~ (Lessard et al., Prop. 1).

    >>> server_optimizer(9.0, 1.0, "heavy_ball")
    ServerOptimizer(step=0.25, momentum=0.25, nesterov=False)
    """
    check_curvature(strong_convexity, smoothness)
    L, mu = float(smoothness), float(strong_convexity)
    k = L / mu
    if momentum == "none":
        return ServerOptimizer(2.0 / (L + mu), 0.0, False)
    if momentum == "nesterov":
        root = math.sqrt(3.0 * k + 1.0)
        return ServerOptimizer(4.0 / (3.0 * L + mu), (root - 2.0) / (root + 2.0), True)
    if momentum == "heavy_ball":
        root = math.sqrt(k)
        return ServerOptimizer(4.0 / (math.sqrt(L) + math.sqrt(mu)) ** 2, ((root - 1.0) / (root + 1.0)) ** 2, False)
    raise ValueError(f"momentum must be one of {', '.join(MOMENTA)}, got {momentum!r}")


def rounds_to(epsilon: float, rho: float) -> int:
    """Rounds until ``rho^T <= epsilon``: the first term of Corollary 1 has then shrunk by the factor epsilon.

    >>> rounds_to(1e-3, 0.5)
    10
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must lie between 0 and 1 (a relative error), got {epsilon}")
    if not 0 <= rho < 1:
        raise ValueError(f"rho must lie in [0, 1) for a method that converges, got {rho}")
    return 1 if rho == 0 else max(1, math.ceil(math.log(epsilon) / math.log(rho)))


def heavy_ball_delta(rho: ArrayLike, kappa0: float) -> np.ndarray:
    """The heavy-ball frontier in closed form: ``Delta = tanh(ln(kappa0) / 4 - artanh(rho))``.

    >>> import numpy as np
    >>> rho = 0.3
    >>> delta = heavy_ball_delta(rho, 10.0)
    >>> bool(np.isclose(heavy_ball_delta(delta, 10.0), rho))  # its own inverse, so the frontier is symmetric
    True
    """
    rho = np.asarray(rho, float)
    top = math.tanh(math.log(kappa0) / 4)
    if np.any((rho < -1e-12) | (rho > top + 1e-12)):
        raise ValueError(f"rho must lie in [0, {top:.6g}] on the heavy-ball frontier of kappa0 = {kappa0}, got {rho}")
    return np.tanh(math.log(kappa0) / 4 - np.arctanh(np.clip(rho, 0.0, top)))


def kappa(federation: QuadraticFederation, *, gamma: float, theta: Theta, alpha: float = 0.0) -> float:
    """Eq. (9), exactly: mean of the largest eigenvalue of ``Q_i A_i`` over clients, divided by mean of the smallest.

    >>> from fedbraid.theory.quadratics import random_federation
    >>> fed = random_federation(4, 3, mu=1.0, smoothness=10.0)
    >>> round(kappa(fed, gamma=0.05, theta=theta_sum(10)), 6)  # every A_i attains mu and L: Lemma 3 is tight
    2.489697
    """
    top, bottom, _ = _federation_extremes(federation, gamma, theta, alpha)
    return _exp(top - bottom)


def point(
    *,
    mu: float,
    smoothness: float,
    gamma: float,
    theta: Theta,
    alpha: float = 0.0,
    eigenvalues: ArrayLike | None = None,
) -> Point:
    """kappa, rho and Delta guaranteed for every federation with ``mu I <= A_i <= L I``, or for one spectrum.

    Inside the range of Lemma 3 (Theta_{1:K}) or Lemma 4 (Theta_K) the answer is the lemma's. Outside it, kappa
    depends on the eigenvalues between mu and L. With ``eigenvalues`` it is computed from them (Appendix D). Without
    them it is the exact worst case over all spectra in [mu, L]. ``method`` and ``notes`` say which. Delta is that of
    Lemma 5, which is eq. (17) in the range of Lemma 6.

    >>> p = point(mu=1.0, smoothness=10.0, gamma=0.05, theta=theta_sum(10))
    >>> round(p.kappa, 6), round(p.delta, 6), round(p.rho["heavy_ball"], 6), p.method
    (2.489697, 0.334251, 0.224168, 'Lemma 3')
    """
    check_curvature(mu, smoothness)
    check_local(gamma, alpha)
    notes: list[str] = []
    limit = 1.0 / (smoothness + alpha)
    safe = gamma < limit
    if eigenvalues is not None:
        lam = np.sort(np.asarray(eigenvalues, float).ravel())
        if lam.size == 0 or lam[0] < mu * (1 - 1e-9) or lam[-1] > smoothness * (1 + 1e-9):
            raise ValueError(f"eigenvalues must lie in [mu, L] = [{mu}, {smoothness}], got {_span(lam)}")
    else:
        lam = None
    if not safe:
        ok = (
            _definite(lam, gamma, theta, alpha)
            if lam is not None
            else is_positive_definite(smoothness, gamma=gamma, theta=theta, alpha=alpha, mu=mu)
        )
        if not ok:
            raise ValueError(_no_surrogate(gamma, theta, limit))
        notes.append(f"gamma is outside Lemma 1 (gamma < {limit:.6g}), but Q is positive definite here")
    lemma = _lemma(smoothness, gamma, theta, alpha) if safe and lam is None else None
    if lemma is not None:
        lam, method = np.array([mu, smoothness], float), lemma
    elif lam is not None:
        method = "eigenvalues"
        notes.append(f"kappa comes from the {lam.size} eigenvalues given (Appendix D), not from a lemma")
    else:
        lam, method = _worst_spectrum(mu, smoothness, gamma, theta, alpha), "worst case over spectra in [mu, L]"
        notes.append(_outside(smoothness, theta, alpha))
    _, log_q = log_distortion(lam, gamma=gamma, theta=theta, alpha=alpha)
    log_qa = log_q + np.log(lam)
    return _point(
        float(log_qa.max()),
        float(log_qa.min()),
        float(log_q.max() - log_q.min()),
        smoothness / mu,
        method,
        tuple(notes),
    )


def federation_point(federation: QuadraticFederation, *, gamma: float, theta: Theta, alpha: float = 0.0) -> Point:
    """kappa by eq. (9), rho by Table 2 and Delta by Lemma 5 for one federation: exact values, not bounds.

    >>> from fedbraid.theory.quadratics import random_federation
    >>> p = federation_point(random_federation(4, 3, mu=1.0, smoothness=10.0), gamma=0.05, theta=theta_sum(10))
    >>> round(p.delta, 6), p.method
    (0.334251, 'eq. (9), eigenvalues of the clients')
    """
    top, bottom, spread = _federation_extremes(federation, gamma, theta, alpha)
    notes = []
    if gamma >= 1.0 / (federation.smoothness + alpha):
        notes.append("gamma is outside Lemma 1, but every Q_i is positive definite here")
    return _point(top, bottom, spread, federation.kappa0, "eq. (9), eigenvalues of the clients", tuple(notes))


def pareto_frontier(
    *,
    mu: float,
    smoothness: float,
    family: Literal["sum", "last", "maml"] = "sum",
    over: Literal["steps", "gamma"] = "steps",
    values: Sequence[float] | np.ndarray | None = None,
    steps: int | None = None,
    gamma: float | None = None,
    gamma_of_steps: Callable[[int], float] | None = None,
    alpha: float = 0.0,
    momentum: Momentum = "none",
    eigenvalues: ArrayLike | None = None,
    label: str = "",
) -> Frontier:
    """The trade-off over K (``over="steps"``, gamma fixed) or over gamma (``over="gamma"``, K fixed).

    ``gamma_of_steps`` makes gamma a function of K, such as ``1 / (2 L K)`` in Figure 4. Default values: K from 1 to
    10^6 in logarithmic steps, gamma in [0, 1 / (L + alpha)).

    >>> f = pareto_frontier(mu=1.0, smoothness=10.0, gamma=0.05, momentum="heavy_ball", values=[1, 10, 1000])
    >>> f.rho.round(4).tolist(), f.delta.round(4).tolist()
    ([0.5195, 0.2242, 0.0], [0.0, 0.3343, 0.5195])
    """
    make = {"sum": theta_sum, "last": theta_last, "maml": theta_maml}.get(family)
    if make is None:
        raise ValueError(f"family must be sum (FedAvg), last (FOMAML) or maml, got {family!r}")
    if momentum not in MOMENTA:
        raise ValueError(f"momentum must be one of {', '.join(MOMENTA)}, got {momentum!r}")
    if over == "steps":
        if gamma is None and gamma_of_steps is None:
            raise ValueError("a frontier over steps needs gamma (or gamma_of_steps)")
        ks = log_steps() if values is None else np.asarray(values)
        pairs = [(int(k), float(gamma_of_steps(int(k))) if gamma_of_steps else float(gamma or 0.0)) for k in ks]
        xs = np.asarray(ks, float)
    elif over == "gamma":
        if steps is None:
            raise ValueError("a frontier over gamma needs steps (K)")
        limit = 1.0 / (smoothness + alpha)
        xs = np.linspace(0.0, limit, 401)[:-1] if values is None else np.asarray(values, float)
        pairs = [(steps, float(g)) for g in xs]
    else:
        raise ValueError(f"over must be 'steps' or 'gamma', got {over!r}")
    points = [
        point(mu=mu, smoothness=smoothness, gamma=g, theta=make(k), alpha=alpha, eigenvalues=eigenvalues)
        for k, g in pairs
    ]
    return Frontier(
        over,
        xs,
        np.array([p.rho[momentum] for p in points]),
        np.array([p.delta for p in points]),
        np.array([p.kappa for p in points]),
        label or f"{family}, L = {smoothness:g}, alpha = {alpha:g}, {momentum}",
    )


def simulated_frontier(
    *,
    mu: float,
    smoothness: float,
    dim: int,
    gamma: float = 0.001,
    alpha: float = 0.0,
    momentum: Momentum = "none",
    values: Sequence[int] | np.ndarray | None = None,
    seed: int = 0,
    resample: bool = True,
) -> Frontier:
    """Appendix D, Theta_K: kappa from the eigenvalues of random matrices, for parameters that no lemma covers.

    With ``resample`` every K has its own random matrix, as in the paper: noisy at dim = 5, smooth at dim = 100.

    >>> f = simulated_frontier(mu=1.0, smoothness=10.0, dim=5, values=[1, 10, 100])
    >>> bool((f.delta >= 0).all() and (f.rho < 1).all())
    True
    """
    rng = np.random.default_rng(seed)
    ks = log_steps(per_decade=25) if values is None else np.asarray(values, int)
    spectrum = random_spectrum(dim, mu, smoothness, rng)
    parts = []
    for k in ks:
        if resample and len(parts):
            spectrum = random_spectrum(dim, mu, smoothness, rng)
        parts.append(
            pareto_frontier(
                mu=mu,
                smoothness=smoothness,
                family="last",
                values=[int(k)],
                gamma=gamma,
                alpha=alpha,
                momentum=momentum,
                eigenvalues=spectrum,
            )
        )
    joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ("values", "rho", "delta", "kappa")}
    return Frontier("steps", label=f"last, simulated, d = {dim}", **joined)


def log_steps(per_decade: int = 40) -> np.ndarray:
    """Distinct whole numbers from 1 to 10^6 in logarithmic steps: the K axis of the figures."""
    return np.unique(np.round(np.logspace(0, 6, 6 * per_decade + 1)).astype(int))


def _rate_from_log(log_kappa: np.ndarray, momentum: Momentum) -> np.ndarray:
    if momentum == "none":
        return np.tanh(log_kappa / 2)
    if momentum == "heavy_ball":
        return np.tanh(log_kappa / 4)
    if momentum == "nesterov":
        with np.errstate(over="ignore"):
            return 1.0 - 2.0 / np.sqrt(3.0 * np.exp(log_kappa) + 1.0)
    raise ValueError(f"momentum must be one of {', '.join(MOMENTA)}, got {momentum!r}")


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf


def _point(top: float, bottom: float, spread: float, kappa0: float, method: str, notes: tuple[str, ...]) -> Point:
    log_kappa = np.asarray(top - bottom)
    return Point(
        kappa=_exp(float(log_kappa)),
        kappa0=kappa0,
        delta=math.tanh(spread / 4),
        rho={m: float(_rate_from_log(log_kappa, m)) for m in MOMENTA},
        method=method,
        notes=notes,
        log_smoothness=top,
        log_strong_convexity=bottom,
    )


def _lemma(L: float, gamma: float, theta: Theta, alpha: float) -> str | None:
    """The lemma by which kappa depends only on mu and L; None if no lemma applies."""
    if theta.kind == "sum" or (theta.kind == "last" and theta.steps == 1):
        return "Lemma 3"
    if theta.kind == "last" and gamma * (theta.steps * L + alpha) < 1:
        return "Lemma 4"
    if theta.kind == "maml" and alpha == 0 and gamma * (2 * theta.steps + 1) * L < 1:
        return "Theorem 2 and Lemma 4"
    return None


def _outside(L: float, theta: Theta, alpha: float) -> str:
    if theta.kind == "weights" or (theta.kind == "maml" and alpha > 0):
        return "no lemma covers this Theta: worst case over all spectra; give eigenvalues for a sharper value"
    if theta.kind == "sum":
        return f"Lemma 3 needs gamma < 1 / (L + alpha) = {1.0 / (L + alpha):.6g}: worst case over all spectra"
    steps = theta.steps if theta.kind == "last" else 2 * theta.steps + 1
    limit = 1.0 / (steps * L + alpha)
    return (
        f"Lemma 4 needs gamma < 1 / (K L + alpha) = {limit:.6g}; outside it kappa depends on the eigenvalues between "
        "mu and L, and this is the worst case over all spectra; give eigenvalues for a sharper value"
    )


def _no_surrogate(gamma: float, theta: Theta, limit: float) -> str:
    return f"gamma = {gamma} gives no convex surrogate for {theta}: Lemma 1 needs gamma < 1 / (L + alpha) = {limit:.6g}"


def _worst_spectrum(mu: float, L: float, gamma: float, theta: Theta, alpha: float) -> np.ndarray:
    """Points of [mu, L] where ``lambda q(lambda)`` or ``q(lambda)`` is extreme: both ends, and a maximum inside.

    For Theta_K the maximum is at ``(1 - gamma alpha) / (gamma K)`` (the zero of h' in the proof of Lemma 4). For other
    Theta it is found on a grid and refined by golden-section search.
    """
    from scipy.optimize import minimize_scalar

    ends = [mu, L]
    if theta.kind == "last" and theta.steps > 1:
        peak = (1.0 - gamma * alpha) / (gamma * theta.steps)
        return np.unique([*ends, min(max(peak, mu), L)])
    grid = np.geomspace(mu, L, 801)
    found = list(ends)
    for sense in (1.0, -1.0):
        for power in (1.0, 0.0):

            def height(lam: float, sense: float = sense, power: float = power) -> float:
                return sense * float(
                    log_distortion(lam, gamma=gamma, theta=theta, alpha=alpha)[1] + power * math.log(lam)
                )

            values = [height(g) for g in grid]
            i = int(np.argmin(values))
            low, high = grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]
            found.append(grid[i])
            if high > low:
                found.append(float(minimize_scalar(height, bounds=(low, high), method="bounded").x))
    return np.unique(found)


def _definite(lam: np.ndarray, gamma: float, theta: Theta, alpha: float) -> bool:
    sign, log = log_distortion(lam, gamma=gamma, theta=theta, alpha=alpha)
    return bool(np.all((sign > 0) & np.isfinite(log)))


def _federation_extremes(
    federation: QuadraticFederation, gamma: float, theta: Theta, alpha: float
) -> tuple[float, float, float]:
    """Logs of the means over clients of the extreme eigenvalues of Q_i A_i, and log(b / a) of Lemma 5."""
    lam = federation.eigenvalues
    if federation.mu <= 0:
        raise ValueError("kappa needs every A_i positive definite; a client here is singular (mu = 0)")
    if not _definite(lam.ravel(), gamma, theta, alpha):
        limit = 1.0 / (federation.smoothness + alpha)
        raise ValueError(_no_surrogate(gamma, theta, limit))
    _, log_q = log_distortion(lam, gamma=gamma, theta=theta, alpha=alpha)
    log_qa = log_q + np.log(lam)
    with np.errstate(divide="ignore"):
        log_w = np.log(federation.weights)
    keep = np.isfinite(log_w)
    top = np.logaddexp.reduce((log_w + log_qa.max(1))[keep])
    bottom = np.logaddexp.reduce((log_w + log_qa.min(1))[keep])
    return float(top), float(bottom), float(log_q.max() - log_q.min())


def _span(lam: np.ndarray) -> str:
    return f"{lam[0]:.6g} .. {lam[-1]:.6g}" if lam.size else "none"
