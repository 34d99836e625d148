"""Published convergence bounds as objects: value, terms, assumptions, citation.

A bound says what it needs. Each assumption is *checked* (this code verified it for the numbers or the federation
given) or *assumed* (nothing here could verify it, or the evidence speaks against it, which its detail then says). A
bound is `proven` only where nothing is assumed. A condition that is plainly broken (a step size outside its range) is
refused instead, with the range.

Evidence is given as ``evidence=``: a `QuadraticFederation`, on which everything can be checked, or a `Constants`
estimated from data (`fedbraid.theory.constants`), on which convexity can be refuted but never proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbraid.theory.frontier import Momentum, Point, federation_point, point, rate
from fedbraid.theory.quadratics import QuadraticFederation
from fedbraid.theory.surrogate import Theta, surrogate_loss

__all__ = [
    "MIME_TABLE",
    "Assumption",
    "Bound",
    "aggregation_bound",
    "aggregation_lower_bound",
    "aggregation_rate",
    "drift_bound",
    "excess_loss_bound",
    "fedavg_bound",
    "mime_rounds",
    "round_progress_bound",
    "suboptimality_bound",
    "trajectory_bound",
]

TRADE_OFFS = "Charles and Konecny, Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning"
NOTES = "Renard, Notes on Federated Optimization"
ELASTIC = "Elastic Aggregation for Federated Optimization, supplement"
MIME = "Karimireddy et al., Breaking the centralized barrier for cross-device federated learning"


class Assumption(NamedTuple):
    name: str
    status: Literal["checked", "assumed"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Bound:
    """A bound with its parts. ``str(bound)`` prints all of it.

    >>> b = drift_bound(eta=0.1, tau=5, smoothness=1.0, zeta=1.0, sigma2=0.0)
    >>> round(b.value, 9), list(b.terms), b.proven
    (4.5, ['heterogeneity', 'noise'], False)
    """

    name: str
    statement: str
    value: float
    terms: Mapping[str, float]
    assumptions: tuple[Assumption, ...]
    citation: str
    notes: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """True only where every assumption was checked."""
        return all(a.status == "checked" for a in self.assumptions)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.statement}", f"  value = {self.value:.6g}"]
        lines += [f"    {name:<24} {value:.6g}" for name, value in self.terms.items()]
        lines += [f"  {'proven here' if self.proven else 'NOT PROVEN HERE: some assumptions are not checked'}"]
        lines += [f"    {a}" for a in self.assumptions]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, f"  {self.citation}"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "statement": self.statement,
            "value": self.value,
            "terms": dict(self.terms),
            "proven": self.proven,
            "assumptions": [a._asdict() for a in self.assumptions],
            "notes": list(self.notes),
            "citation": self.citation,
        }


# --- Charles and Konecny: distance to the true minimizer ------------------------------------------------------------


def suboptimality_bound(
    *,
    radius: float | None = None,
    mu: float | None = None,
    smoothness: float | None = None,
    gamma: float,
    theta: Theta,
    alpha: float = 0.0,
    constant: Literal["published", "conjectured", "general"] = "published",
    evidence: QuadraticFederation | None = None,
) -> Bound:
    """Theorem 4: ``||x*(alpha, gamma, Theta) - x*|| <= 8 C Delta``, or with another constant.

    - ``"published"``: 8 C Delta; in one dimension 2 C Delta, which is proven there (Lemma 12).
    - ``"conjectured"``: 2 C Delta, the paper's conjecture for every dimension.
    - ``"general"``: ``sqrt(kappa0) C 2 Delta / (1 - Delta)``, proven in docs/theory/suboptimality.md.

    In two dimensions and more the published proof has a gap, and `quadratics.crossing_pair` exceeds 8 C Delta from
    kappa0 of about 200 on; so the first two are never marked proven there.

    >>> from fedbraid.theory import surrogate as s
    >>> b = suboptimality_bound(radius=1.0, mu=1.0, smoothness=10.0, gamma=0.05, theta=s.theta_sum(10))
    >>> round(b.value, 6), b.proven
    (2.674006, False)
    """
    p, C, checks = _operating_point(evidence, radius, mu, smoothness, gamma, theta, alpha)
    one = evidence is not None and evidence.dim == 1
    name, form = "Theorem 4", "constant C Delta"
    if constant == "general":
        name, form = "Theorem 4, general form", "sqrt(kappa0) C 2 Delta / (1 - Delta)"
        factor = 2.0 * math.sqrt(p.kappa0) / (1.0 - p.delta) if p.delta < 1 else math.inf
    elif constant == "published":
        factor = 2.0 if one else 8.0
    elif constant == "conjectured":
        factor = 2.0
        name += "" if one else " (conjectured constant 2 C)"
    else:
        raise ValueError(f"constant must be published (8 C), conjectured (2 C) or general, got {constant!r}")
    if one and constant != "general":
        checks.append(Assumption("one dimension, where 2 C holds (Lemma 12)", "checked"))
    elif constant == "published":
        gap = "its proof lets a sum of norms shrink when matrices are merged; crossing_pair exceeds 8 C Delta"
        checks.append(Assumption("Theorem 6 of the paper", "assumed", gap))
    elif constant == "conjectured":
        checks.append(Assumption("2 C suffices in every dimension", "assumed", "crossing_pair exceeds it"))
    return Bound(
        name,
        f"||x*(alpha, gamma, Theta) - x*|| <= {form}",
        factor * C * p.delta,
        {"constant": factor, "radius C": C, "Delta": p.delta},
        tuple(checks),
        f"{TRADE_OFFS}, Theorem 4, Lemma 12" if constant != "general" else "fedbraid, docs/theory/suboptimality.md",
        p.notes,
    )


def trajectory_bound(
    *,
    rounds: int,
    start: float,
    momentum: Momentum = "none",
    radius: float | None = None,
    mu: float | None = None,
    smoothness: float | None = None,
    gamma: float,
    theta: Theta,
    alpha: float = 0.0,
    constant: Literal["published", "conjectured", "general"] = "published",
    evidence: QuadraticFederation | None = None,
) -> Bound:
    """Corollary 1: ``||x_T - x*|| <= rho^T ||x_0 - x*(alpha, gamma, Theta)|| + 8 C Delta``, both terms apart.

    ``start`` is ``||x_0 - x*(alpha, gamma, Theta)||``. The first term holds as it stands without momentum; with
    momentum rho is the asymptotic rate, and early rounds may exceed rho^T by a factor that grows like T.

    >>> from fedbraid.theory import surrogate as s
    >>> setting = dict(radius=1.0, mu=1.0, smoothness=10.0, gamma=0.05, theta=s.theta_sum(10))
    >>> b = trajectory_bound(rounds=10, start=1.0, **setting)
    >>> {k: round(v, 6) for k, v in b.terms.items()}
    {'convergence': 0.000201, 'suboptimality': 2.674006}
    """
    if rounds < 0 or start < 0:
        raise ValueError(f"rounds and start must not be negative, got {rounds} and {start}")
    base = suboptimality_bound(
        radius=radius,
        mu=mu,
        smoothness=smoothness,
        gamma=gamma,
        theta=theta,
        alpha=alpha,
        constant=constant,
        evidence=evidence,
    )
    p, _, _ = _operating_point(evidence, radius, mu, smoothness, gamma, theta, alpha)
    rho = float(rate(p.kappa, momentum)) if math.isfinite(p.kappa) else 1.0
    terms = {"convergence": rho**rounds * start, "suboptimality": base.value}
    checks = [
        *base.assumptions,
        Assumption(f"server optimizer tuned as `server_optimizer` says ({momentum})", "assumed"),
    ]
    if momentum != "none":
        checks.append(
            Assumption("rho^T holds from the first round on", "assumed", "with momentum it holds up to a factor")
        )
    return Bound(
        "Corollary 1" + base.name.removeprefix("Theorem 4"),
        "||x_T - x*|| <= rho^T ||x_0 - x*(alpha, gamma, Theta)|| + constant C Delta",
        sum(terms.values()),
        terms,
        tuple(checks),
        f"{TRADE_OFFS}, Corollary 1",
        p.notes,
    )


def excess_loss_bound(federation: QuadraticFederation, *, gamma: float, theta: Theta, alpha: float = 0.0) -> Bound:
    """What the distortion costs in loss, in any dimension: ``f(x*(alpha, gamma, Theta)) - f* <= (sqrt(b/a) - 1)^2 f*``.

    a and b are the extreme eigenvalues of all Q_i, and ``f* = min f`` with ``f_i(c_i) = 0``; ``sqrt(b/a) = (1 +
    Delta) / (1 - Delta)``. Proven in docs/theory/suboptimality.md; the distance follows by strong convexity.

    >>> from fedbraid.theory import surrogate as s
    >>> from fedbraid.theory.quadratics import random_federation
    >>> fed = random_federation(5, 4, mu=1.0, smoothness=10.0)
    >>> b = excess_loss_bound(fed, gamma=0.05, theta=s.theta_sum(10))
    >>> at = s.surrogate_loss(fed, gamma=0.05, theta=s.theta_sum(10)).minimizer
    >>> b.proven, bool(fed.loss(at) - fed.loss(fed.minimizer) <= b.value)
    (True, True)
    """
    sur = surrogate_loss(federation, gamma=gamma, theta=theta, alpha=alpha)
    spread = math.expm1((sur.log_q.max() - sur.log_q.min()) / 2.0)
    best = federation.loss(federation.minimizer)
    low = float(np.linalg.eigvalsh(federation.hessian)[0])
    value = spread**2 * best
    return Bound(
        "Excess loss of the surrogate's minimizer",
        "f(x*(alpha, gamma, Theta)) - f* <= (sqrt(b/a) - 1)^2 f*",
        value,
        {"sqrt(b/a) - 1": spread, "f*": best, "distance at most": math.sqrt(2.0 * value / low)},
        (Assumption("every A_i and Q_i is positive definite", "checked"),),
        f"fedbraid, docs/theory/suboptimality.md (after {TRADE_OFFS}, Lemma 5)",
    )


# --- Renard: FedAvg on convex losses --------------------------------------------------------------------------------


def drift_bound(
    *,
    eta: float,
    tau: int,
    smoothness: float | None = None,
    zeta: float | None = None,
    sigma2: float | None = None,
    evidence: Any = None,
) -> Bound:
    """Lemma 2.3: ``E ||x_i^(t,k) - mean||^2 <= 18 tau^2 eta^2 zeta^2 + 4 tau eta^2 sigma^2`` for eta <= 1 / (4 L).

    >>> round(drift_bound(eta=0.01, tau=10, smoothness=5.0, zeta=2.0, sigma2=1.0).value, 6)
    0.724
    """
    _, zeta, sigma2, checks = _fedavg_setting(eta, tau, smoothness, zeta, sigma2, evidence)
    terms = {"heterogeneity": 18.0 * tau**2 * eta**2 * zeta**2, "noise": 4.0 * tau * eta**2 * sigma2}
    return Bound(
        "Lemma 2.3 (client drift)",
        "E ||x_i^(t,k) - xbar^(t,k)||^2 <= 18 tau^2 eta^2 zeta^2 + 4 tau eta^2 sigma^2",
        sum(terms.values()),
        terms,
        checks,
        f"{NOTES}, Lemma 2.3",
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
    evidence: Any = None,
) -> Bound:
    """Lemma 2.2: the mean loss gap over one round, from the distances to x* before and after it and the drift in it.

    ``drift`` is ``(1 / (M tau)) sum_i sum_k E ||x_i^(t,k) - xbar^(t,k)||^2``. The printed lemma lost the factor L in
    front of it, which the theorem has.

    >>> b = round_progress_bound(
    ...     eta=0.1, tau=2, clients=4, distance_before=1.0, distance_after=0.8, drift=0.01, smoothness=1.0, sigma2=0.4
    ... )
    >>> {k: round(v, 6) for k, v in b.terms.items()}
    {'progress': 0.9, 'noise': 0.01, 'drift': 0.01}
    """
    L, _, sigma2, checks = _fedavg_setting(eta, tau, smoothness, 0.0, sigma2, evidence, needs_zeta=False)
    _positive(clients=clients)
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
        f"{NOTES}, Lemma 2.2 with the factor L of Theorem 2.1",
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
    evidence: Any = None,
) -> Bound:
    """Theorem 2.1: the mean loss gap of FedAvg's average iterate over T rounds of tau steps; four terms.

    Only the first vanishes with T; the other three are what the step size leaves.

    >>> b = fedavg_bound(eta=0.01, tau=10, rounds=100, clients=10, distance=1.0, smoothness=5.0, zeta=2.0, sigma2=1.0)
    >>> {k: round(v, 6) for k, v in b.terms.items()}
    {'initial distance': 0.05, 'noise': 0.001, 'drift by noise': 0.02, 'drift by heterogeneity': 3.6}
    """
    L, zeta, sigma2, checks = _fedavg_setting(eta, tau, smoothness, zeta, sigma2, evidence)
    _positive(rounds=rounds, clients=clients)
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
        f"{NOTES}, Theorem 2.1",
        ("only the first term vanishes as T grows",),
    )


# --- Elastic aggregation (its analysis is FedAvg's, after SCAFFOLD) -------------------------------------------------


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
    evidence: Any = None,
) -> Bound:
    """Theorem I, convex cases, with every constant: the recursion of its proof summed without rounding up.

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
    beta, G2, B2, mu, checks = _aggregation_setting(evidence, beta, G2, B2, mu)
    _positive(rounds=rounds, steps=steps, sampled=sampled, clients=clients, local_step=local_step, beta=beta)
    _check_sampling(sampled, clients, server_step)
    e = server_step * steps * local_step
    limit = 1.0 / (8.0 * (1.0 + B2) * beta)
    if e > limit * (1 + 1e-12):
        raise ValueError(
            f"local_step = {local_step} is outside Theorem I, which needs "
            f"local_step <= 1 / (8 (1 + B^2) beta K server_step) = {limit / (server_step * steps):.6g}"
        )
    a = mu * e / 2.0
    weight = (
        rounds + 1.0 if a == 0 else -math.expm1((rounds + 1) * math.log1p(-a)) * math.exp(-rounds * math.log1p(-a)) / a
    )
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
        f"{ELASTIC}, Section 9, Theorem I (after Karimireddy et al., SCAFFOLD)",
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
    evidence: Any = None,
) -> Bound:
    """Theorem I as printed, eq. (15) to (17): the rate with the best step size, up to the stated constant.

    ``convex`` cases bound ``E f - f*`` from ``distance`` = ||x_0 - x*||; the non-convex case bounds ``E ||grad
    f||^2`` from ``gap`` = f(x_0) - f*.

    >>> b = aggregation_rate(
    ...     rounds=100, steps=5, sampled=10, clients=100, beta=1.0, G2=0.1, distance=1.0
    ... )
    >>> {k: round(v, 4) for k, v in b.terms.items()}
    {'statistics': 0.0095, 'drift': 0.0214, 'optimization': 0.01}
    """
    _positive(rounds=rounds, steps=steps, sampled=sampled, clients=clients, beta=beta, constant=constant)
    _check_sampling(sampled, clients, server_step)
    R, K, S = rounds, steps, sampled
    M2 = sigma2 * (1.0 + S / server_step**2) + K * (1.0 - S / clients) * G2
    if convex:
        if distance is None:
            raise ValueError("the convex cases need distance = ||x_0 - x*||")
        D = distance
        if mu > 0:
            if 8.0 * (1.0 + B2) * beta / mu > R:
                need = math.ceil(8.0 * (1.0 + B2) * beta / mu)
                raise ValueError(f"rounds = {R} is outside eq. (15): it needs R >= 8 (1 + B^2) beta / mu = {need}")
            terms = {
                "statistics": M2 / (mu * R * K * S),
                "drift": beta * G2 / (mu**2 * R**2),
                "optimization": mu * D**2 * math.exp(-mu * R / (16.0 * (1.0 + B2) * beta)),
            }
            name = "Theorem I, eq. (15), strongly convex"
        else:
            terms = {
                "statistics": math.sqrt(M2) * D / math.sqrt(R * K * S),
                "drift": D ** (4 / 3) * (beta * G2) ** (1 / 3) / (R + 1) ** (2 / 3),
                "optimization": B2 * beta * D**2 / R,
            }
            name = "Theorem I, eq. (16), general convex"
    else:
        if gap is None:
            raise ValueError("the non-convex case needs gap = f(x_0) - f*")
        terms = {
            "statistics": beta * math.sqrt(M2) * math.sqrt(gap) / math.sqrt(R * K * S),
            "drift": gap ** (2 / 3) * (beta * G2) ** (1 / 3) / (R + 1) ** (2 / 3),
            "optimization": B2 * beta * gap / R,
        }
        name = "Theorem I, eq. (17), non-convex"
    terms = {k: constant * v for k, v in terms.items()}
    checks = [_convexity(evidence)] if convex else []
    checks += [
        Assumption("A1 (gradient dissimilarity), A3 (noise) and A4 (smoothness) hold everywhere", "assumed"),
        Assumption(f"the hidden constant is {constant:g} and logarithms are dropped", "assumed"),
    ]
    return Bound(
        name, "up to a constant and logarithms", sum(terms.values()), terms, tuple(checks), f"{ELASTIC}, {name.lower()}"
    )


def aggregation_lower_bound(*, rounds: int, mu: float, G: float, start: float) -> Bound:
    """Theorem II: on `lower_bound_pair` no step sizes bring averaging below this after R rounds of K > 1 local steps.

    ``x_R >= min(x_0 / 2, G / (512 mu R))`` and ``f = mu x^2 / 2``. The proof has 1/256 in one of its two cases and,
    with its own numbers, a little less in the other when R = 1; 1/512 covers both.

    >>> round(aggregation_lower_bound(rounds=10, mu=1.0, G=512.0, start=1.0).value, 6)
    0.005
    """
    _positive(rounds=rounds, mu=mu, G=G, start=start)
    x = min(start / 2.0, G / (512.0 * mu * rounds))
    return Bound(
        "Theorem II (lower bound)",
        "f(x_R) - f* >= (mu / 2) min(x_0 / 2, G / (512 mu R))^2 for every choice of step sizes <= 1 / mu",
        0.5 * mu * x**2,
        {"start": 0.5 * mu * (start / 2.0) ** 2, "heterogeneity": 0.5 * mu * (G / (512.0 * mu * rounds)) ** 2},
        (Assumption("server step 1, more than one local step, server weights fixed in advance (A6)", "assumed"),),
        f"{ELASTIC}, Section 9.5, Theorem II (after Karimireddy et al., SCAFFOLD)",
    )


# --- Mime: rounds to epsilon ----------------------------------------------------------------------------------------

MIME_TABLE = (
    "scaffold",
    "server_sgd",
    "fedavg_sgd",
    "mimelite_sgd",
    "mime_sgd",
    "server_adam",
    "mimelite_adam",
    "mime_adam",
    "server_mvr",
    "mimelite_mvr",
    "mime_mvr",
    "server_lower_bound",
)


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
    if algorithm not in MIME_TABLE:
        raise ValueError(f"algorithm must be one of {', '.join(MIME_TABLE)}, got {algorithm!r}")
    _positive(epsilon=epsilon, sampled=sampled, constant=constant)

    def need(name: str, value: float | None) -> float:
        if value is None or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{algorithm} needs {name} (finite, not negative), got {value}")
        return float(value)

    e, S = epsilon, sampled
    pl = mu is not None
    checks: list[Assumption] = []
    family = algorithm.split("_")[-1]
    if pl and (family in ("adam", "mvr")):
        raise ValueError(f"Table 1 has no PL rate for {algorithm}; leave mu out for the non-convex rate")
    if pl:
        _positive(mu=mu)
        assert mu is not None
    if algorithm == "scaffold":
        L, N = need("smoothness", smoothness), need("clients", clients)
        terms = {"participation": N / S, "optimization": L / mu} if pl else {"optimization": (N / S) ** (2 / 3) * L / e}
        checks.append(Assumption("clients keep state and return", "assumed"))
    elif algorithm == "server_lower_bound":
        g2 = need("G2", G2)
        if pl:
            terms = {"statistics": g2 / (S * e)}
        else:
            L = need("smoothness", smoothness)
            terms = {"statistics": L * math.sqrt(g2 / S) / e**1.5, "variance": g2 / (S * e), "optimization": L / e}
    elif family == "sgd":
        L, g2 = need("smoothness", smoothness), need("G2", G2)
        terms = {"statistics": g2 / (mu * S * e)} if pl else {"statistics": L * g2 / (S * e**2)}
        if algorithm in ("fedavg_sgd", "mimelite_sgd"):
            terms["drift"] = L * math.sqrt(g2) / (mu * math.sqrt(e)) if pl else L**2 * math.sqrt(g2) / e**1.5
            checks.append(_local_steps_check("K >= sigma^2 / G^2", local_steps, sigma2 / g2 if g2 > 0 else math.inf))
        terms["optimization"] = L / mu if pl else L / e
    elif family == "adam":
        L, g2 = need("smoothness", smoothness), need("G2", G2)
        if e <= g2 / S:
            raise ValueError(
                f"{algorithm} needs epsilon > G^2 / S = {g2 / S:.6g}: sample more clients, got epsilon = {e}"
            )
        terms = {"optimization": L * (math.sqrt(S) if algorithm == "mimelite_adam" else 1.0) / (e - g2 / S)}
        if algorithm == "mimelite_adam":
            checks.append(_local_steps_check("K >= sigma^2 / G^2", local_steps, sigma2 / g2 if g2 > 0 else math.inf))
    elif algorithm == "server_mvr":
        L, g2 = need("smoothness", smoothness), need("G2", G2)
        terms = {"statistics": L * math.sqrt(g2 / S) / e**1.5, "variance": g2 / (S * e), "optimization": L / e}
    else:  # Mime and MimeLite with MVR: delta in the place of L
        d, g2 = need("delta", delta), need("G2", G2)
        if algorithm == "mime_mvr":
            terms = {"statistics": d * math.sqrt(g2 / S) / e**1.5, "variance": g2 / (S * e), "optimization": d / e}
        else:
            root = math.sqrt(g2) + math.sqrt(sigma2)
            terms = {"statistics": d * root / e**1.5, "variance": (g2 + sigma2) / e, "optimization": d / e}
        ratio = math.inf if smoothness is None or d == 0 else smoothness / d
        checks.append(_local_steps_check("K >= L / delta", local_steps, ratio))
        checks.append(Assumption("A2: Hessians of all clients within delta of the mean's, everywhere", "assumed"))
    if algorithm not in ("scaffold",):
        checks.append(Assumption("A1: gradient dissimilarity at most G^2 everywhere", "assumed"))
    if pl:
        checks.append(Assumption("the Polyak-Lojasiewicz inequality with mu", "assumed"))
    checks.append(
        Assumption(f"the hidden constant is {constant:g}, logarithms are dropped, f(x_0) - f* = 1", "assumed")
    )
    terms = {k: constant * v for k, v in terms.items()}
    return Bound(
        f"Rounds to epsilon, {algorithm}" + (" (PL)" if pl else " (non-convex)"),
        f"rounds until E ||grad f||^2 <= {e:g}, up to the constant {constant:g}"
        + (" (a lower bound for every server-only method)" if algorithm == "server_lower_bound" else ""),
        sum(terms.values()),
        terms,
        tuple(checks),
        f"{MIME}, Table 1",
    )


# --- evidence -------------------------------------------------------------------------------------------------------


def _operating_point(
    evidence: QuadraticFederation | None,
    radius: float | None,
    mu: float | None,
    smoothness: float | None,
    gamma: float,
    theta: Theta,
    alpha: float,
) -> tuple[Point, float, list[Assumption]]:
    if evidence is not None:
        p = federation_point(evidence, gamma=gamma, theta=theta, alpha=alpha)
        C = evidence.radius if radius is None else radius
        inside = evidence.radius <= C * (1 + 1e-12)
        if not inside:
            raise ValueError(f"radius C = {C} is too small: a client's minimizer has norm {evidence.radius:.6g}")
        return (
            p,
            C,
            [
                Assumption(
                    "Assumption 1: mu I <= A_i <= L I", "checked", f"{evidence.mu:.6g} .. {evidence.smoothness:.6g}"
                ),
                Assumption("Assumption 2: ||c_i|| <= C", "checked", f"{evidence.radius:.6g} <= {C:.6g}"),
                Assumption("every Q_i positive definite", "checked"),
            ],
        )
    if radius is None or mu is None or smoothness is None:
        raise ValueError("give evidence (a quadratic federation), or all of radius (C), mu and smoothness (L)")
    if radius < 0:
        raise ValueError(f"radius (C) must not be negative, got {radius}")
    p = point(mu=mu, smoothness=smoothness, gamma=gamma, theta=theta, alpha=alpha)
    return (
        p,
        radius,
        [
            Assumption("Assumption 1: quadratic clients with mu I <= A_i <= L I", "assumed"),
            Assumption("Assumption 2: ||c_i|| <= C", "assumed"),
        ],
    )


def _fedavg_setting(
    eta: float,
    tau: int,
    smoothness: float | None,
    zeta: float | None,
    sigma2: float | None,
    evidence: Any,
    needs_zeta: bool = True,
) -> tuple[float, float, float, tuple[Assumption, ...]]:
    """L, zeta, sigma^2, and what of the seven assumptions of the notes could be checked."""
    checks = [_convexity(evidence)]
    if isinstance(evidence, QuadraticFederation):
        L = evidence.smoothness if smoothness is None else smoothness
        ok = evidence.smoothness <= L * (1 + 1e-12)
        checks.append(
            Assumption("every F_i is L-smooth", "checked" if ok else "assumed", f"L = {evidence.smoothness:.6g}")
        )
        exact = _zeta(evidence)
        zeta = exact if zeta is None else zeta
        if needs_zeta:
            ok = exact <= zeta * (1 + 1e-12)
            detail = (
                "the clients' Hessians differ, so gradients differ without bound"
                if math.isinf(exact)
                else f"sup ||grad F_i - grad F|| = {exact:.6g}"
            )
            checks.append(
                Assumption("gradients within zeta of the mean's, everywhere", "checked" if ok else "assumed", detail)
            )
            if math.isinf(zeta):
                raise ValueError(
                    "zeta is infinite: these clients have different Hessians; give a zeta that holds where you run"
                )
        sigma2 = 0.0 if sigma2 is None else sigma2
        checks.append(
            Assumption(
                "gradient noise at most sigma^2",
                "checked" if sigma2 == 0 else "assumed",
                "exact gradients" * (sigma2 == 0),
            )
        )
        uniform = np.allclose(evidence.weights, 1.0 / evidence.num_clients)
        checks.append(Assumption("uniform weights", "checked" if uniform else "assumed"))
    else:
        if evidence is not None:
            smoothness = evidence.L_client_max.value if smoothness is None else smoothness
            zeta = evidence.zeta.value if zeta is None else zeta
            sigma2 = evidence.sigma2.value if sigma2 is None else sigma2
        missing = [n for n, v in (("smoothness", smoothness), ("sigma2", sigma2)) if v is None]
        if needs_zeta and zeta is None:
            missing.append("zeta")
        if missing:
            raise ValueError(f"give {', '.join(missing)}, or evidence from which they can be read")
        L = float(smoothness)  # type: ignore[arg-type]
        at = "estimated at single points of the parameter space" if evidence is not None else ""
        checks.append(Assumption("every F_i is L-smooth", "assumed", at))
        if needs_zeta:
            checks.append(Assumption("gradients within zeta of the mean's, everywhere", "assumed", at))
        checks.append(Assumption("gradient noise at most sigma^2", "assumed", at))
        checks.append(Assumption("uniform weights, every client in every round", "assumed"))
    zeta, sigma2 = float(zeta or 0.0), float(sigma2)  # type: ignore[arg-type]
    _positive(eta=eta, smoothness=L)
    if isinstance(tau, bool) or tau != int(tau) or tau < 1:
        raise ValueError(f"tau (local steps) must be a whole number of at least 1, got {tau}")
    if zeta < 0 or sigma2 < 0:
        raise ValueError(f"zeta and sigma2 must not be negative, got {zeta} and {sigma2}")
    limit = 1.0 / (4.0 * L)
    if eta > limit * (1 + 1e-12):
        raise ValueError(f"eta = {eta} is outside the theorem: it needs eta <= 1 / (4 L) = {limit:.6g}")
    checks.append(Assumption("eta <= 1 / (4 L)", "checked", f"{eta:.6g} <= {limit:.6g}"))
    return L, zeta, sigma2, tuple(checks)


def _zeta(federation: QuadraticFederation) -> float:
    """``sup_x max_i ||grad F_i(x) - grad F(x)||``: finite only where all Hessians agree."""
    apart = np.abs(federation.A - federation.hessian).max()
    if apart > 1e-12 * federation.smoothness:
        return math.inf
    return float(np.linalg.norm(federation.b - federation.linear, axis=1).max())


def _convexity(evidence: Any) -> Assumption:
    name = "every client's loss is convex"
    if isinstance(evidence, QuadraticFederation):
        return Assumption(name, "checked", f"smallest eigenvalue {evidence.mu:.3g}")
    if evidence is None:
        return Assumption(name, "assumed")
    low = evidence.mu_client_min.value
    if low < 0:
        return Assumption(name, "assumed", f"but the data speaks against it: curvature {low:.3g} was found")
    return Assumption(
        name, "assumed", "no negative curvature found at the points looked at, which proves nothing elsewhere"
    )


def _aggregation_setting(
    evidence: Any, beta: float | None, G2: float | None, B2: float | None, mu: float
) -> tuple[float, float, float, float, list[Assumption]]:
    checks = [_convexity(evidence)]
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
        return beta, G2, B2, mu, checks
    if evidence is not None:
        beta = evidence.L_client_max.value if beta is None else beta
        G2 = evidence.G2.value if G2 is None else G2
    missing = [n for n, v in (("beta", beta), ("G2", G2)) if v is None]
    if missing:
        raise ValueError(f"give {', '.join(missing)}, or evidence from which they can be read")
    checks.append(Assumption("A1 (convex form), A2, A3 and A4 hold everywhere", "assumed"))
    return float(beta), float(G2), 2.0 if B2 is None else B2, mu, checks  # type: ignore[arg-type]


def _local_steps_check(name: str, steps: int | None, least: float) -> Assumption:
    if steps is None or not math.isfinite(least):
        return Assumption(name, "assumed")
    if steps + 1e-9 >= least:
        return Assumption(name, "checked", f"{steps} >= {least:.4g}")
    return Assumption(name, "assumed", f"but it does not hold here: {steps} < {least:.4g}")


def _check_sampling(sampled: int, clients: int, server_step: float) -> None:
    if sampled > clients:
        raise ValueError(f"sampled ({sampled}) must not exceed clients ({clients})")
    if server_step < 1:
        raise ValueError(f"server_step (phi eta_g) must be at least 1 for Theorem I, got {server_step}")


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is None or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
