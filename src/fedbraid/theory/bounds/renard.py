"""Renard, "Notes on Federated Optimization": FedAvg on convex losses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedbraid.theory.bounds.bound import Assumption, Bound, check_positive, convexity
from fedbraid.theory.quadratics import QuadraticFederation

if TYPE_CHECKING:
    from fedbraid.theory.constants import Constants

__all__ = ["drift_bound", "fedavg_bound", "round_progress_bound"]

PAPER = "Renard, Notes on Federated Optimization"
EVERYWHERE = "gradients within zeta of the mean's, everywhere"


def drift_bound(
    *,
    eta: float,
    tau: int,
    smoothness: float | None = None,
    zeta: float | None = None,
    sigma2: float | None = None,
    evidence: QuadraticFederation | Constants | None = None,
) -> Bound:
    """Lemma 2.3: ``E ||x_i^(t,k) - mean||^2 <= 18 tau^2 eta^2 zeta^2 + 4 tau eta^2 sigma^2`` for eta <= 1 / (4 L).

    >>> round(drift_bound(eta=0.01, tau=10, smoothness=5.0, zeta=2.0, sigma2=1.0).value, 6)
    0.724
    """
    _, zeta, sigma2, checks = _setting(eta, tau, smoothness, zeta, sigma2, evidence)
    terms = {"heterogeneity": 18.0 * tau**2 * eta**2 * zeta**2, "noise": 4.0 * tau * eta**2 * sigma2}
    return Bound(
        "Lemma 2.3 (client drift)",
        "E ||x_i^(t,k) - xbar^(t,k)||^2 <= 18 tau^2 eta^2 zeta^2 + 4 tau eta^2 sigma^2",
        sum(terms.values()),
        terms,
        checks,
        f"{PAPER}, Lemma 2.3",
    )


def round_progress_bound(
    *,
    eta: float,
    tau: int,
    clients: int,
    distance_before: float,
    distance_after: float,
    drift: float,
    smoothness: float | None = None,
    sigma2: float | None = None,
    evidence: QuadraticFederation | Constants | None = None,
) -> Bound:
    """Lemma 2.2: the mean loss gap over one round, from the distances to x* before and after it and its drift.

    ``drift`` is ``(1 / (M tau)) sum_i sum_k E ||x_i^(t,k) - xbar^(t,k)||^2``. The printed lemma lacks the factor L
    of the drift; the theorem has it.

    >>> b = round_progress_bound(
    ...     eta=0.1, tau=2, clients=4, distance_before=1.0, distance_after=0.8, drift=0.01, smoothness=1.0, sigma2=0.4
    ... )
    >>> {k: round(v, 6) for k, v in b.terms.items()}
    {'progress': 0.9, 'noise': 0.01, 'drift': 0.01}
    """
    L, _, sigma2, checks = _setting(eta, tau, smoothness, 0.0, sigma2, evidence, needs_zeta=False)
    check_positive(clients=clients)
    terms = {
        "progress": (distance_before**2 - distance_after**2) / (2.0 * eta * tau),
        "noise": eta * sigma2 / clients,
        "drift": L * drift,
    }
    return Bound(
        "Lemma 2.2 (progress in a round)",
        "E[(1/tau) sum_k F(xbar^(t,k)) - F*] <= (||xbar^(t,0) - x*||^2 - E||xbar^(t,tau) - x*||^2) / (2 eta tau) "
        "+ eta sigma^2 / M + L drift",
        sum(terms.values()),
        terms,
        checks,
        f"{PAPER}, Lemma 2.2 with the factor L of Theorem 2.1",
    )


def fedavg_bound(
    *,
    eta: float,
    tau: int,
    rounds: int,
    clients: int,
    distance: float,
    smoothness: float | None = None,
    zeta: float | None = None,
    sigma2: float | None = None,
    evidence: QuadraticFederation | Constants | None = None,
) -> Bound:
    """Theorem 2.1: the mean loss gap of FedAvg's average iterate over T rounds of tau steps; four terms.

    Only the first term vanishes as T grows; the other three depend on the step size.

    >>> b = fedavg_bound(eta=0.01, tau=10, rounds=100, clients=10, distance=1.0, smoothness=5.0, zeta=2.0, sigma2=1.0)
    >>> {k: round(v, 6) for k, v in b.terms.items()}
    {'initial distance': 0.05, 'noise': 0.001, 'drift by noise': 0.02, 'drift by heterogeneity': 3.6}
    """
    L, zeta, sigma2, checks = _setting(eta, tau, smoothness, zeta, sigma2, evidence)
    check_positive(rounds=rounds, clients=clients)
    terms = {
        "initial distance": distance**2 / (2.0 * eta * tau * rounds),
        "noise": eta * sigma2 / clients,
        "drift by noise": 4.0 * tau * eta**2 * L * sigma2,
        "drift by heterogeneity": 18.0 * tau**2 * eta**2 * L * zeta**2,
    }
    return Bound(
        "Theorem 2.1 (FedAvg, convex)",
        "E[(1/(tau T)) sum_t sum_k F(xbar^(t,k)) - F*] <= D^2/(2 eta tau T) + eta sigma^2/M + 4 tau eta^2 L sigma^2 "
        "+ 18 tau^2 eta^2 L zeta^2",
        sum(terms.values()),
        terms,
        checks,
        f"{PAPER}, Theorem 2.1",
        ("only the first term vanishes as T grows",),
    )


def _setting(
    eta: float,
    tau: int,
    smoothness: float | None,
    zeta: float | None,
    sigma2: float | None,
    evidence: QuadraticFederation | Constants | None,
    needs_zeta: bool = True,
) -> tuple[float, float, float, tuple[Assumption, ...]]:
    """L, zeta, sigma^2, and the status of the assumptions; the arguments are checked."""
    if isinstance(evidence, QuadraticFederation):
        L, zeta, sigma2, checks = _from_federation(evidence, smoothness, zeta, sigma2, needs_zeta)
    else:
        L, zeta, sigma2, checks = _from_constants(evidence, smoothness, zeta, sigma2, needs_zeta)
    check_positive(eta=eta, smoothness=L)
    if isinstance(tau, bool) or tau != int(tau) or tau < 1:
        raise ValueError(f"tau (local steps) must be a whole number of at least 1, got {tau}")
    if zeta < 0 or sigma2 < 0:
        raise ValueError(f"zeta and sigma2 must not be negative, got {zeta} and {sigma2}")
    limit = 1.0 / (4.0 * L)
    if eta > limit * (1 + 1e-12):
        raise ValueError(f"eta = {eta} is outside the theorem: it needs eta <= 1 / (4 L) = {limit:.6g}")
    checks.append(Assumption("eta <= 1 / (4 L)", "checked", f"{eta:.6g} <= {limit:.6g}"))
    return L, zeta, sigma2, (convexity(evidence), *checks)


def _from_federation(
    evidence: QuadraticFederation,
    smoothness: float | None,
    zeta: float | None,
    sigma2: float | None,
    needs_zeta: bool,
) -> tuple[float, float, float, list[Assumption]]:
    """Constants that are not given are computed from the federation, and each is checked."""
    L = evidence.smoothness if smoothness is None else smoothness
    ok = evidence.smoothness <= L * (1 + 1e-12)
    checks = [Assumption("every F_i is L-smooth", "checked" if ok else "assumed", f"L = {evidence.smoothness:.6g}")]
    exact = _zeta(evidence)
    zeta = exact if zeta is None else zeta
    if needs_zeta:
        ok = exact <= zeta * (1 + 1e-12)
        detail = (
            "the clients' Hessians differ, so gradients differ without bound"
            if math.isinf(exact)
            else f"sup ||grad F_i - grad F|| = {exact:.6g}"
        )
        checks.append(Assumption(EVERYWHERE, "checked" if ok else "assumed", detail))
        if math.isinf(zeta):
            raise ValueError(
                "zeta is infinite: these clients have different Hessians; give a zeta that holds where you run"
            )
    sigma2 = 0.0 if sigma2 is None else sigma2
    noiseless = sigma2 == 0
    checks.append(
        Assumption(
            "gradient noise at most sigma^2",
            "checked" if noiseless else "assumed",
            "exact gradients" if noiseless else "",
        )
    )
    uniform = np.allclose(evidence.weights, 1.0 / evidence.num_clients)
    checks.append(Assumption("uniform weights", "checked" if uniform else "assumed"))
    return L, float(zeta or 0.0), float(sigma2), checks


def _from_constants(
    evidence: Constants | None,
    smoothness: float | None,
    zeta: float | None,
    sigma2: float | None,
    needs_zeta: bool,
) -> tuple[float, float, float, list[Assumption]]:
    """Constants that are not given are taken from the estimates, if there are any; none of them can be checked."""
    if evidence is not None:
        smoothness = evidence.L_client_max.value if smoothness is None else smoothness
        zeta = evidence.zeta.value if zeta is None else zeta
        sigma2 = evidence.sigma2.value if sigma2 is None else sigma2
    missing = [n for n, v in (("smoothness", smoothness), ("sigma2", sigma2)) if v is None]
    if needs_zeta and zeta is None:
        missing.append("zeta")
    if missing or smoothness is None or sigma2 is None:
        raise ValueError(f"give {', '.join(missing)}, or evidence from which they can be read")
    at = "estimated at single points of the parameter space" if evidence is not None else ""
    checks = [Assumption("every F_i is L-smooth", "assumed", at)]
    if needs_zeta:
        checks.append(Assumption(EVERYWHERE, "assumed", at))
    checks.append(Assumption("gradient noise at most sigma^2", "assumed", at))
    checks.append(Assumption("uniform weights, every client in every round", "assumed"))
    return float(smoothness), float(zeta or 0.0), float(sigma2), checks


def _zeta(federation: QuadraticFederation) -> float:
    """``sup_x max_i ||grad F_i(x) - grad F(x)||``: finite only if all Hessians are equal."""
    apart = np.abs(federation.A - federation.hessian).max()
    if apart > 1e-12 * federation.smoothness:
        return math.inf
    return float(np.linalg.norm(federation.b - federation.linear, axis=1).max())
