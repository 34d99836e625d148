"""Charles and Konecny: the distance between the limit of local update methods and the true minimizer."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from fedbraid.theory.bounds.bound import Assumption, Bound
from fedbraid.theory.frontier import Momentum, Point, federation_point, point, rate
from fedbraid.theory.quadratics import QuadraticFederation
from fedbraid.theory.surrogate import Theta, surrogate_loss

__all__ = ["excess_loss_bound", "suboptimality_bound", "trajectory_bound"]

PAPER = "Charles and Konecny, Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning"


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

    In two and more dimensions the published proof has a gap, and `quadratics.crossing_pair` exceeds both values: with
    two local steps (Theta_{1:2}), ``gamma = 1 / (2 L)`` and the right angle it exceeds 2 C Delta at kappa0 = 3 and
    8 C Delta at kappa0 = 43 (9.4 C Delta at kappa0 = 60). So the first two are never marked proven there.

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
        gap = "its proof has an error (merging matrices can reduce a sum of norms); crossing_pair exceeds 8 C Delta"
        checks.append(Assumption("Theorem 6 of the paper", "assumed", gap))
    elif constant == "conjectured":
        checks.append(Assumption("2 C suffices in every dimension", "assumed", "crossing_pair exceeds it"))
    return Bound(
        name,
        f"||x*(alpha, gamma, Theta) - x*|| <= {form}",
        factor * C * p.delta,
        {"constant": factor, "radius C": C, "Delta": p.delta},
        tuple(checks),
        f"{PAPER}, Theorem 4, Lemma 12" if constant != "general" else "fedbraid, docs/theory/suboptimality.md",
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
    """Corollary 1: ``||x_T - x*|| <= rho^T ||x_0 - x*(alpha, gamma, Theta)|| + 8 C Delta``, as two terms.

    ``start`` is ``||x_0 - x*(alpha, gamma, Theta)||``. Without momentum the first term holds in every round. With
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
        f"{PAPER}, Corollary 1",
        p.notes,
    )


def excess_loss_bound(federation: QuadraticFederation, *, gamma: float, theta: Theta, alpha: float = 0.0) -> Bound:
    """The excess loss of the surrogate's minimizer: ``f(x*(alpha, gamma, Theta)) - f* <= (sqrt(b/a) - 1)^2 f*``.

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
        f"fedbraid, docs/theory/suboptimality.md (after {PAPER}, Lemma 5)",
    )


def _operating_point(
    evidence: QuadraticFederation | None,
    radius: float | None,
    mu: float | None,
    smoothness: float | None,
    gamma: float,
    theta: Theta,
    alpha: float,
) -> tuple[Point, float, list[Assumption]]:
    """The operating point, the radius C, and the assumptions on both."""
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
