"""Karimireddy et al. (Mime), Table 1: rounds to epsilon of twelve methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fedbraid.theory.bounds.bound import Assumption, Bound, check_positive

__all__ = ["MIME_TABLE", "mime_rounds"]

PAPER = "Karimireddy et al., Breaking the centralized barrier for cross-device federated learning"


class _Setting(NamedTuple):
    """The arguments of `mime_rounds`, by the paper's names; None if not given."""

    algorithm: str
    epsilon: float
    S: int
    L: float | None
    G2: float | None
    N: int | None
    sigma2: float
    delta: float | None
    mu: float | None
    K: int | None

    def need(self, name: str, value: float | None) -> float:
        if value is None or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{self.algorithm} needs {name} (finite, not negative), got {value}")
        return float(value)

    @property
    def smoothness(self) -> float:
        return self.need("smoothness", self.L)

    @property
    def g2(self) -> float:
        return self.need("G2", self.G2)


_Row = tuple[dict[str, float], list[Assumption]]


def _scaffold(s: _Setting) -> _Row:
    L, N = s.smoothness, s.need("clients", s.N)
    if s.mu is None:
        terms = {"optimization": (N / s.S) ** (2 / 3) * L / s.epsilon}
    else:
        terms = {"participation": N / s.S, "optimization": L / s.mu}
    return terms, [Assumption("clients keep state and take part again", "assumed")]


def _lower_bound(s: _Setting) -> _Row:
    g2 = s.g2
    if s.mu is not None:
        return {"statistics": g2 / (s.S * s.epsilon)}, []
    return _mvr_terms(s, s.smoothness, g2), []


def _sgd(s: _Setting) -> _Row:
    L, g2, e = s.smoothness, s.g2, s.epsilon
    terms = {"statistics": L * g2 / (s.S * e**2) if s.mu is None else g2 / (s.mu * s.S * e)}
    checks = []
    if s.algorithm in ("fedavg_sgd", "mimelite_sgd"):
        drift = L**2 * math.sqrt(g2) / e**1.5 if s.mu is None else L * math.sqrt(g2) / (s.mu * math.sqrt(e))
        terms["drift"] = drift
        checks.append(_enough_steps("K >= sigma^2 / G^2", s.K, s.sigma2 / g2 if g2 > 0 else math.inf))
    terms["optimization"] = L / e if s.mu is None else L / s.mu
    return terms, checks


def _adam(s: _Setting) -> _Row:
    L, g2 = s.smoothness, s.g2
    if s.epsilon <= g2 / s.S:
        raise ValueError(
            f"{s.algorithm} needs epsilon > G^2 / S = {g2 / s.S:.6g}: sample more clients, got epsilon = {s.epsilon}"
        )
    lite = s.algorithm == "mimelite_adam"
    terms = {"optimization": L * (math.sqrt(s.S) if lite else 1.0) / (s.epsilon - g2 / s.S)}
    return terms, [_enough_steps("K >= sigma^2 / G^2", s.K, s.sigma2 / g2 if g2 > 0 else math.inf)] if lite else []


def _server_mvr(s: _Setting) -> _Row:
    return _mvr_terms(s, s.smoothness, s.g2), []


def _client_mvr(s: _Setting) -> _Row:
    """Mime and MimeLite with MVR: delta replaces L."""
    d, g2 = s.need("delta", s.delta), s.g2
    if s.algorithm == "mime_mvr":
        terms = _mvr_terms(s, d, g2)
    else:
        e, root = s.epsilon, math.sqrt(g2) + math.sqrt(s.sigma2)
        terms = {"statistics": d * root / e**1.5, "variance": (g2 + s.sigma2) / e, "optimization": d / e}
    ratio = math.inf if s.L is None or d == 0 else s.L / d
    similar = Assumption("A2: Hessians of all clients within delta of the mean's, everywhere", "assumed")
    return terms, [_enough_steps("K >= L / delta", s.K, ratio), similar]


def _mvr_terms(s: _Setting, curvature: float, g2: float) -> dict[str, float]:
    e = s.epsilon
    return {
        "statistics": curvature * math.sqrt(g2 / s.S) / e**1.5,
        "variance": g2 / (s.S * e),
        "optimization": curvature / e,
    }


_TABLE: dict[str, Callable[[_Setting], _Row]] = {
    "scaffold": _scaffold,
    "server_sgd": _sgd,
    "fedavg_sgd": _sgd,
    "mimelite_sgd": _sgd,
    "mime_sgd": _sgd,
    "server_adam": _adam,
    "mimelite_adam": _adam,
    "mime_adam": _adam,
    "server_mvr": _server_mvr,
    "mimelite_mvr": _client_mvr,
    "mime_mvr": _client_mvr,
    "server_lower_bound": _lower_bound,
}
MIME_TABLE = tuple(_TABLE)


def mime_rounds(
    algorithm: str,
    epsilon: float,
    *,
    smoothness: float | None = None,
    G2: float | None = None,
    sampled: int = 1,
    clients: int | None = None,
    sigma2: float = 0.0,
    delta: float | None = None,
    mu: float | None = None,
    local_steps: int | None = None,
    constant: float = 1.0,
) -> Bound:
    """Table 1: rounds until ``E ||grad f||^2 <= epsilon``, up to the stated constant; with ``mu`` the PL column.

    The table measures f in units of ``f(x_0) - f*`` and drops logarithms.

    >>> b = mime_rounds("mime_mvr", 1e-2, G2=1.0, sampled=4, delta=0.1, smoothness=1.0, local_steps=10)
    >>> {k: round(v, 3) for k, v in b.terms.items()}
    {'statistics': 50.0, 'variance': 25.0, 'optimization': 10.0}
    """
    if algorithm not in _TABLE:
        raise ValueError(f"algorithm must be one of {', '.join(MIME_TABLE)}, got {algorithm!r}")
    check_positive(epsilon=epsilon, sampled=sampled, constant=constant)
    pl = mu is not None
    if pl and algorithm.split("_")[-1] in ("adam", "mvr"):
        raise ValueError(f"Table 1 has no PL rate for {algorithm}; leave mu out for the non-convex rate")
    if pl:
        check_positive(mu=mu)
    setting = _Setting(algorithm, epsilon, sampled, smoothness, G2, clients, sigma2, delta, mu, local_steps)
    terms, checks = _TABLE[algorithm](setting)
    if algorithm != "scaffold":
        checks.append(Assumption("A1: gradient dissimilarity at most G^2 everywhere", "assumed"))
    if pl:
        checks.append(Assumption("the Polyak-Lojasiewicz inequality with mu", "assumed"))
    checks.append(
        Assumption(f"the hidden constant is {constant:g}, logarithms are dropped, f(x_0) - f* = 1", "assumed")
    )
    terms = {k: constant * v for k, v in terms.items()}
    return Bound(
        f"Rounds to epsilon, {algorithm}" + (" (PL)" if pl else " (non-convex)"),
        f"rounds until E ||grad f||^2 <= {epsilon:g}, up to the constant {constant:g}"
        + (" (a lower bound for every server-only method)" if algorithm == "server_lower_bound" else ""),
        sum(terms.values()),
        terms,
        tuple(checks),
        f"{PAPER}, Table 1",
    )


def _enough_steps(name: str, steps: int | None, least: float) -> Assumption:
    if steps is None or not math.isfinite(least):
        return Assumption(name, "assumed")
    if steps + 1e-9 >= least:
        return Assumption(name, "checked", f"{steps} >= {least:.4g}")
    return Assumption(name, "assumed", f"but it does not hold here: {steps} < {least:.4g}")
