"""Step sizes and momenta that Mime's theorems prescribe, as functions of the problem's constants.

S. P. Karimireddy et al. Breaking the centralized barrier for cross-device federated learning (Mime). NeurIPS 2021.
Corollaries II and III (Appendix G), Theorems IV to VI (Appendix H). `fedbraid.theory.mime` has the bounds that these
choices reach. The constants have the names of `fedbraid.theory`:

    smoothness   L of (A2*): every client's loss on every batch is L-smooth
    delta        of (A2): Hessians of the clients within delta of the mean's
    G2, sigma2   variance of gradients between clients (A1), and within a client (A3)
    gap          F = f(x_0) - f*
    steps, sampled, rounds    K local steps, S clients per round, T rounds

The paper's eta is the rate of one local step, and ``K eta`` its eta~.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["LEMMA_23", "StepSizes", "adam_steps", "mvr_steps", "prescribed", "sgd_steps"]

LEMMA_23 = 2592.0  # a >= 2592 (eta delta K)^2; Theorem V prints 1536 and its proof 912, which violate Lemma 23


class StepSizes(NamedTuple):
    """What a theorem prescribes.

    client_lr: eta. It is the smallest of ``limits``, which names the conditions.
    a: 1 - beta, the momentum of MVR; None if the base has no momentum.
    warmup: rounds that compute m_0 at x_0 before the first step.
    """

    client_lr: float
    limits: Mapping[str, float]
    a: float | None = None
    warmup: int = 0


def sgd_steps(
    *,
    smoothness: float,
    G2: float,
    gap: float,
    steps: int,
    sampled: int,
    rounds: int,
    sigma2: float = 0.0,
    lite: bool = False,
    mu: float | None = None,
) -> StepSizes:
    """Corollary II: Mime and MimeLite (``lite``) with the base sgd; with ``mu`` under the PL inequality.

    Mime: ``K eta = min(1 / (12 L), sqrt(S F / (3 L T G^2)))``. MimeLite: the root without the 3, and the drift term's
    ``(F / (18 L^2 (G^2 + sigma^2 / K) T))^(1/3)``, which gives the printed factor 84. PL: ``8 ln(X) / (mu T)`` with ``X
    = max(e, mu^2 S F T^2 / (192 L G^2))`` instead of the roots.

    >>> setting = dict(smoothness=1.0, G2=4.0, gap=2.0, steps=10, sampled=5, rounds=1000)
    >>> round(sgd_steps(**setting).client_lr, 6), round(sgd_steps(**setting, lite=True).client_lr, 6)
    (0.002887, 0.003029)
    """
    _check(smoothness=smoothness, gap=gap, steps=steps, sampled=sampled, rounds=rounds)
    _check_not_negative(G2=G2, sigma2=sigma2)
    L, S, T = smoothness, sampled, rounds
    limits = {"1 / (12 L)": 1 / (12 * L)}
    drift = L**2 * (G2 + sigma2 / steps)
    if mu is not None:
        _check(mu=mu)
        limits["PL"] = 8 / (mu * T) * math.log(max(math.e, mu**2 * S * gap * T**2 / (192 * L * G2) if G2 else math.e))
    else:
        limits["variance"] = math.sqrt(S * gap / ((1 if lite else 3) * L * T * G2)) if G2 else math.inf
        if lite:
            limits["drift"] = (gap / (18 * drift * T)) ** (1 / 3) if drift else math.inf
    limits = {name: limit / steps for name, limit in limits.items()}
    return StepSizes(min(limits.values()), limits)


def adam_steps(
    *, smoothness: float, largest_gradient: float, eps: float, steps: int, sampled: int = 1, lite: bool = False
) -> StepSizes:
    """Corollary III: Mime and MimeLite with the base adam, ``b1 = 0``: ``K eta = eps^2 / (12 L (H + eps))``.

    ``largest_gradient`` is H, a bound on every coordinate of every client's gradient. MimeLite divides by sqrt(S). If
    ``(H + eps)^2 < eps``, the proof needs a larger H, ``sqrt(eps) - eps``, which is used then.

    >>> round(adam_steps(smoothness=1.0, largest_gradient=0.9, eps=0.1, steps=10).client_lr, 9)
    8.3333e-05
    """
    _check(smoothness=smoothness, eps=eps, steps=steps, sampled=sampled)
    _check_not_negative(largest_gradient=largest_gradient)
    H = max(largest_gradient, math.sqrt(eps) - eps)
    limit = eps**2 / (12 * smoothness * (H + eps) * (math.sqrt(sampled) if lite else 1)) / steps
    return StepSizes(limit, {"eps^2 / (12 L (H + eps))": limit})


def mvr_steps(
    *,
    smoothness: float,
    delta: float,
    G2: float,
    gap: float,
    steps: int,
    sampled: int,
    rounds: int,
    sigma2: float = 0.0,
    lite: bool = False,
) -> StepSizes:
    """Theorems IV to VI: MimeMVR, and MimeLiteMVR (``lite``), which has ``G^2 + sigma^2`` for ``G^2 / S``.

    ``eta = min(1 / L, 1 / (864 delta K), (S F / (6936 K^3 T delta^2 G^2))^(1/3))`` and ``a = max(2592 (eta delta K)^2,
    1 / T)``, after T rounds that only compute m_0. Theorem IV's eta lacks delta^2; Theorem V has it.

    >>> setting = dict(smoothness=1.0, delta=0.01, G2=1.0, gap=1.0, steps=100, sampled=10, rounds=100)
    >>> found = mvr_steps(**setting)
    >>> round(found.client_lr, 9), round(found.a, 6), found.warmup
    (0.001157407, 0.01, 100)
    """
    _check(smoothness=smoothness, gap=gap, steps=steps, sampled=sampled, rounds=rounds)
    _check_not_negative(delta=delta, G2=G2, sigma2=sigma2)
    K, T = steps, rounds
    noise = G2 + sigma2 if lite else G2 / sampled
    limits = {
        "1 / L": 1 / smoothness,
        "1 / (864 delta K)": 1 / (864 * delta * K) if delta else math.inf,
        "variance": (gap / (6936 * K**3 * T * delta**2 * noise)) ** (1 / 3) if delta * noise else math.inf,
    }
    eta = min(limits.values())
    return StepSizes(eta, limits, max(LEMMA_23 * (eta * delta * K) ** 2, 1 / T), T)


def prescribed(recipe: Callable[..., StepSizes], constants: Mapping[str, float], **known: Any) -> StepSizes:
    """A recipe for constants that a user gave; the error names a missing or unknown constant.

    >>> prescribed(adam_steps, {"smoothness": 1.0, "largest_gradient": 0.9}, eps=0.1, steps=10).warmup
    0
    """
    parameters = inspect.signature(recipe).parameters
    theirs = [name for name in parameters if name not in (*known, "lite")]
    unknown = sorted(set(constants) - set(theirs))
    if unknown:
        raise ValueError(f"recipe has no constant {unknown[0]!r}; it takes {', '.join(theirs)}")
    missing = [name for name in theirs if name not in constants and parameters[name].default is inspect.Parameter.empty]
    if missing:
        raise ValueError(f"recipe needs the constant {missing[0]!r}; it takes {', '.join(theirs)}")
    return recipe(**constants, **known)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
