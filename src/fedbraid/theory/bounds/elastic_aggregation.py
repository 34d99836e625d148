"""Bounds of the supplement of Elastic Aggregation. It analyses FedAvg, following the SCAFFOLD paper."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedbraid.theory.bounds.bound import Assumption, Bound, check_positive, convexity
from fedbraid.theory.quadratics import QuadraticFederation

if TYPE_CHECKING:
    from fedbraid.theory.constants import Constants

__all__ = ["aggregation_bound", "aggregation_lower_bound", "aggregation_rate"]

PAPER = "Elastic Aggregation for Federated Optimization, supplement"


def aggregation_bound(
    *,
    rounds: int,
    steps: int,
    sampled: int,
    clients: int,
    local_step: float,
    distance: float,
    beta: float | None = None,
    G2: float | None = None,
    B2: float | None = None,
    sigma2: float = 0.0,
    mu: float = 0.0,
    server_step: float = 1.0,
    evidence: QuadraticFederation | Constants | None = None,
) -> Bound:
    """Theorem I, convex cases, with all constants: the recursion of its proof, summed exactly.

    Bounds ``E f(x^R) - f*`` for the output drawn with weights ``(1 - mu e / 2)^(1 - r)``, ``e = server_step K
    local_step`` (server_step stands for phi eta_g):

        3 (1 - mu e / 2) D^2 / (e W) + 54 beta e^2 G^2
            + 3 e (sigma^2 / (K S) (1 + S / server_step^2) + 4 G^2 / S (1 - S / N))

    with ``D = ||x_0 - x*||`` and W the sum of the weights (R + 1 for mu = 0). Heterogeneity is that of the convex
    case, ``mean ||grad f_i||^2 <= G^2 + 2 beta B^2 (f - f*)``; for convex clients ``B^2 = 2`` and ``G^2 = 2 mean
    ||grad f_i(x*)||^2``.

    >>> plan = dict(rounds=100, steps=5, sampled=10, clients=10, local_step=0.005)
    >>> b = aggregation_bound(**plan, distance=1.0, beta=1.0, G2=0.1, B2=2.0, mu=0.1)
    >>> {k: round(v, 4) for k, v in b.terms.items()}
    {'initial distance': 1.114, 'noise': 0.0, 'client sampling': 0.0, 'drift': 0.0034}
    """
    beta, G2, B2, checks = _setting(evidence, beta, G2, B2, mu)
    check_positive(rounds=rounds, steps=steps, sampled=sampled, clients=clients, local_step=local_step, beta=beta)
    _check_sampling(sampled, clients, server_step)
    e = server_step * steps * local_step
    limit = 1.0 / (8.0 * (1.0 + B2) * beta)
    if e > limit * (1 + 1e-12):
        raise ValueError(
            f"local_step = {local_step} is outside Theorem I, which needs "
            f"local_step <= 1 / (8 (1 + B^2) beta K server_step) = {limit / (server_step * steps):.6g}"
        )
    a = mu * e / 2.0
    weight = _total_weight(a, rounds)
    terms = {
        "initial distance": 3.0 * (1.0 - a) * distance**2 / (e * weight),
        "noise": 3.0 * e * sigma2 / (steps * sampled) * (1.0 + sampled / server_step**2),
        "client sampling": 12.0 * e * G2 / sampled * (1.0 - sampled / clients),
        "drift": 54.0 * beta * e**2 * G2,
    }
    return Bound(
        f"Theorem I ({'strongly ' if mu > 0 else ''}convex), explicit",
        "E f(x^R) - f* <= sum of the terms, for the stated step size",
        sum(terms.values()),
        terms,
        (*checks, Assumption("step size within 1 / (8 (1 + B^2) beta K server_step)", "checked")),
        f"{PAPER}, Section 9, Theorem I (after Karimireddy et al., SCAFFOLD)",
        ("constants from the displayed recursion; the printed summary has 36 beta G^2 where the recursion gives 54",),
    )


def aggregation_rate(
    *,
    rounds: int,
    steps: int,
    sampled: int,
    clients: int,
    beta: float,
    G2: float,
    B2: float = 1.0,
    sigma2: float = 0.0,
    mu: float = 0.0,
    distance: float | None = None,
    gap: float | None = None,
    server_step: float = 1.0,
    convex: bool = True,
    constant: float = 1.0,
    evidence: QuadraticFederation | Constants | None = None,
) -> Bound:
    """Theorem I as printed, eq. (15) to (17): the rate at the best step size, up to the stated constant.

    ``convex`` cases bound ``E f - f*`` from ``distance`` = ||x_0 - x*||; the non-convex case bounds ``E ||grad
    f||^2`` from ``gap`` = f(x_0) - f*.

    >>> b = aggregation_rate(
    ...     rounds=100, steps=5, sampled=10, clients=100, beta=1.0, G2=0.1, distance=1.0
    ... )
    >>> {k: round(v, 4) for k, v in b.terms.items()}
    {'statistics': 0.0095, 'drift': 0.0214, 'optimization': 0.01}
    """
    check_positive(rounds=rounds, steps=steps, sampled=sampled, clients=clients, beta=beta, constant=constant)
    _check_sampling(sampled, clients, server_step)
    M2 = sigma2 * (1.0 + sampled / server_step**2) + steps * (1.0 - sampled / clients) * G2
    s = _Rate(rounds, steps, sampled, M2, beta, G2, B2)
    if not convex:
        if gap is None:
            raise ValueError("the non-convex case needs gap = f(x_0) - f*")
        name, terms = "Theorem I, eq. (17), non-convex", _nonconvex_terms(s, gap)
    elif distance is None:
        raise ValueError("the convex cases need distance = ||x_0 - x*||")
    elif mu > 0:
        name, terms = "Theorem I, eq. (15), strongly convex", _strongly_convex_terms(s, mu, distance)
    else:
        name, terms = "Theorem I, eq. (16), general convex", _convex_terms(s, distance)
    terms = {k: constant * v for k, v in terms.items()}
    checks = [convexity(evidence)] if convex else []
    checks += [
        Assumption("A1 (gradient dissimilarity), A3 (noise) and A4 (smoothness) hold everywhere", "assumed"),
        Assumption(f"the hidden constant is {constant:g} and logarithms are dropped", "assumed"),
    ]
    return Bound(
        name, "up to a constant and logarithms", sum(terms.values()), terms, tuple(checks), f"{PAPER}, {name.lower()}"
    )


def aggregation_lower_bound(*, rounds: int, mu: float, G: float, start: float) -> Bound:
    """Theorem II: after R rounds of K > 1 steps, averaging on `lower_bound_pair` is above this for any step sizes.

    ``x_R >= min(x_0 / 2, G / (512 mu R))`` and ``f = mu x^2 / 2``. The proof has 1/256 in the first of its two
    cases and slightly less in the second when R = 1; 1/512 covers both.

    >>> round(aggregation_lower_bound(rounds=10, mu=1.0, G=512.0, start=1.0).value, 6)
    0.005
    """
    check_positive(rounds=rounds, mu=mu, G=G, start=start)
    x = min(start / 2.0, G / (512.0 * mu * rounds))
    return Bound(
        "Theorem II (lower bound)",
        "f(x_R) - f* >= (mu / 2) min(x_0 / 2, G / (512 mu R))^2 for every choice of step sizes <= 1 / mu",
        0.5 * mu * x**2,
        {"start": 0.5 * mu * (start / 2.0) ** 2, "heterogeneity": 0.5 * mu * (G / (512.0 * mu * rounds)) ** 2},
        (Assumption("server step 1, more than one local step, server weights fixed in advance (A6)", "assumed"),),
        f"{PAPER}, Section 9.5, Theorem II (after Karimireddy et al., SCAFFOLD)",
    )


def _total_weight(a: float, rounds: int) -> float:
    """``sum_{r=0}^{R} (1 - a)^(-r)``; R + 1 for a = 0."""
    if a == 0:
        return rounds + 1.0
    return -math.expm1((rounds + 1) * math.log1p(-a)) * math.exp(-rounds * math.log1p(-a)) / a


class _Rate(NamedTuple):
    """The arguments that the three cases of Theorem I share, by the paper's names."""

    R: int
    K: int
    S: int
    M2: float
    beta: float
    G2: float
    B2: float


def _strongly_convex_terms(s: _Rate, mu: float, D: float) -> dict[str, float]:
    if 8.0 * (1.0 + s.B2) * s.beta / mu > s.R:
        need = math.ceil(8.0 * (1.0 + s.B2) * s.beta / mu)
        raise ValueError(f"rounds = {s.R} is outside eq. (15): it needs R >= 8 (1 + B^2) beta / mu = {need}")
    return {
        "statistics": s.M2 / (mu * s.R * s.K * s.S),
        "drift": s.beta * s.G2 / (mu**2 * s.R**2),
        "optimization": mu * D**2 * math.exp(-mu * s.R / (16.0 * (1.0 + s.B2) * s.beta)),
    }


def _convex_terms(s: _Rate, D: float) -> dict[str, float]:
    return {
        "statistics": math.sqrt(s.M2) * D / math.sqrt(s.R * s.K * s.S),
        "drift": D ** (4 / 3) * (s.beta * s.G2) ** (1 / 3) / (s.R + 1) ** (2 / 3),
        "optimization": s.B2 * s.beta * D**2 / s.R,
    }


def _nonconvex_terms(s: _Rate, gap: float) -> dict[str, float]:
    return {
        "statistics": s.beta * math.sqrt(s.M2) * math.sqrt(gap) / math.sqrt(s.R * s.K * s.S),
        "drift": gap ** (2 / 3) * (s.beta * s.G2) ** (1 / 3) / (s.R + 1) ** (2 / 3),
        "optimization": s.B2 * s.beta * gap / s.R,
    }


def _setting(
    evidence: QuadraticFederation | Constants | None,
    beta: float | None,
    G2: float | None,
    B2: float | None,
    mu: float,
) -> tuple[float, float, float, list[Assumption]]:
    """beta, G^2 and B^2, taken from the evidence if they are not given, and the status of the assumptions."""
    checks = [convexity(evidence)]
    if isinstance(evidence, QuadraticFederation):
        exact = 2.0 * float(np.mean(np.sum(evidence.client_gradients(evidence.minimizer) ** 2, axis=1)))
        beta = evidence.smoothness if beta is None else beta
        B2, G2 = (2.0 if B2 is None else B2), (exact if G2 is None else G2)
        uniform = np.allclose(evidence.weights, 1.0 / evidence.num_clients)
        ok = beta >= evidence.smoothness * (1 - 1e-12) and exact * (1 - 1e-12) <= G2 and B2 >= 2.0 and uniform
        checks.append(Assumption("A1 (convex form) and A4", "checked" if ok else "assumed"))
        ok = mu <= evidence.mu * (1 + 1e-12)
        checks.append(
            Assumption("A2: every f_i is mu-convex", "checked" if ok else "assumed", f"mu = {evidence.mu:.6g}")
        )
        return beta, G2, B2, checks
    if evidence is not None:
        beta = evidence.L_client_max.value if beta is None else beta
        G2 = evidence.G2.value if G2 is None else G2
    missing = [n for n, v in (("beta", beta), ("G2", G2)) if v is None]
    if missing or beta is None or G2 is None:
        raise ValueError(f"give {', '.join(missing)}, or evidence from which they can be read")
    checks.append(Assumption("A1 (convex form), A2, A3 and A4 hold everywhere", "assumed"))
    return float(beta), float(G2), 2.0 if B2 is None else B2, checks


def _check_sampling(sampled: int, clients: int, server_step: float) -> None:
    if sampled > clients:
        raise ValueError(f"sampled ({sampled}) must not exceed clients ({clients})")
    if server_step < 1:
        raise ValueError(f"server_step (phi eta_g) must be at least 1 for Theorem I, got {server_step}")
