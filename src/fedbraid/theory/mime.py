"""Mime's theorems with explicit constants: the drift of Theorem I, Corollaries II and III, Theorems IV to VI.

S. P. Karimireddy et al. Breaking the centralized barrier for cross-device federated learning. NeurIPS 2021, Appendices
G and H. The main text hides constants; the appendix has them, and the functions below use those of its lemmas. Where a
printed constant does not follow from the lemma before it, the derived one is used (docs/theory/mime.md lists them).
The step sizes that reach the bounds are in `fedbraid.recipes`, which also says what the constants mean.

    method       "mime" or "mimelite"
    client_lr    eta, the rate of one local step; eta~ = K eta
    lipschitz    B of Theorem I: ||U(g; s)|| <= B ||g||; 1 for sgd, 1 / eps for adam with b1 = 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from fedbraid.recipes import LEMMA_23, adam_steps, mvr_steps, sgd_steps
from fedbraid.theory.bounds.bound import Assumption, Bound, check_positive
from fedbraid.theory.bounds.mime import PAPER

__all__ = [
    "mime_adam_bound",
    "mime_adam_rounds",
    "mime_drift_bound",
    "mime_mvr_bound",
    "mime_mvr_rounds",
    "mime_noise_bound",
    "mime_sgd_bound",
    "mime_sgd_rounds",
]

Method = Literal["mime", "mimelite"]
A1 = Assumption("A1: gradient dissimilarity at most G^2 everywhere", "assumed")
A2 = Assumption("A2: Hessians of all clients within delta of the mean's, everywhere", "assumed")
SMOOTH = Assumption("A2*: every client's loss on every batch is L-smooth", "assumed")
A3 = Assumption("A3: a client's batch gradients have variance at most sigma^2 everywhere", "assumed")
PL = Assumption("A4: the Polyak-Lojasiewicz inequality with mu", "assumed")
OUTPUT = "the gradient is that of a model chosen at random among those of the run"


def _lite(method: Method) -> bool:
    if method not in ("mime", "mimelite"):
        raise ValueError(f"method must be mime or mimelite, got {method!r}")
    return method == "mimelite"


def _refuse(what: str, value: float, limit: float, named: str) -> None:
    if value > limit * (1 + 1e-12):
        raise ValueError(f"{what} must be at most {named} = {limit:.6g}, got {value:.6g}")


def mime_noise_bound(method: Method, *, G2: float, sampled: int, steps: int = 1, sigma2: float = 0.0) -> Bound:
    """Theorem I: the variance of the gradient g_t that a round of Mime or MimeLite uses.

    >>> mime_noise_bound("mimelite", G2=4.0, sampled=2, steps=10, sigma2=5.0).terms
    {'clients': 2.0, 'batches': 0.25}
    """
    check_positive(sampled=sampled, steps=steps)
    terms = {"clients": G2 / sampled}
    if _lite(method):
        terms["batches"] = sigma2 / (steps * sampled)
    return Bound(
        f"Theorem I, variance ({method})",
        "E ||g_t - grad f(x)||^2 <= G^2 / S" + (" + sigma^2 / (K S)" if _lite(method) else ""),
        sum(terms.values()),
        terms,
        (A1, *((A3,) if _lite(method) else ())),
        f"{PAPER}, Theorem I",
    )


def mime_drift_bound(
    method: Method,
    *,
    client_lr: float,
    steps: int,
    smoothness: float,
    gradient2: float,
    G2: float = 0.0,
    sigma2: float = 0.0,
    lipschitz: float = 1.0,
    constant: Literal["lemma", "theorem"] = "lemma",
) -> Bound:
    """Theorem I: the error e_t by which a round of local steps differs from one step of the base optimizer.

    ``e_t = 1/(K S) sum (grad f_i(y_{i,k-1}; zeta) - grad f_i(x; zeta))``, and the round is ``x - K eta U(g_t + e_t)``.

    gradient2: ``||c||^2`` of the cohort's mean gradient for Mime, ``||grad f(x)||^2`` for MimeLite.
    constant: ``"lemma"`` has the 18 of Lemma 9. ``"theorem"`` has the 1 that the main text prints; for Mime
        docs/theory/mime.md proves it. The theorem has sigma^2 / K where the lemma has sigma^2 / (2 K).

    >>> setting = dict(client_lr=0.05, steps=5, smoothness=2.0, gradient2=4.0)
    >>> b = mime_drift_bound("mime", **setting)
    >>> b.value, mime_drift_bound("mime", **setting, constant="theorem").value
    (18.0, 1.0)
    """
    check_positive(client_lr=client_lr, steps=steps, smoothness=smoothness, lipschitz=lipschitz)
    _refuse("steps * client_lr", steps * client_lr, 1 / (2 * smoothness * lipschitz), "1 / (2 L B)")
    if constant not in ("lemma", "theorem"):
        raise ValueError(f"constant must be lemma (18) or theorem (1), got {constant!r}")
    factor = (18.0 if constant == "lemma" else 1.0) * (lipschitz * smoothness * steps * client_lr) ** 2
    parts = {"gradient": gradient2}
    checks = [SMOOTH, Assumption("U is linear in g and at most B times as long", "assumed")]
    if _lite(method):
        parts |= {"clients": G2, "batches": sigma2 / (2 * steps if constant == "lemma" else steps)}
        checks += [A1, A3]
    if constant == "theorem" and _lite(method):
        checks.append(Assumption("the factor 1 of the main text", "assumed", "the appendix proves 18"))
    terms = {name: factor * part for name, part in parts.items()}
    return Bound(
        f"Theorem I, drift ({method})",
        f"E ||e_t||^2 <= {18 if constant == 'lemma' else 1} (B L K eta)^2 ({' + '.join(parts)})",
        sum(terms.values()),
        terms,
        tuple(checks),
        f"{PAPER}, {'Lemmas 7 to 9' if constant == 'lemma' else 'Theorem I'}",
    )


def mime_sgd_bound(
    method: Method,
    *,
    smoothness: float,
    G2: float,
    gap: float,
    steps: int,
    sampled: int,
    rounds: int,
    sigma2: float = 0.0,
    mu: float | None = None,
    client_lr: float | None = None,
) -> Bound:
    """Corollary II: ``E ||grad f(x_out)||^2`` after T rounds with the base sgd; by default at the recipe's step size.

    With ``eta~ = K eta``: ``16 F / (eta~ T) + 48 L eta~ G^2 / S`` for Mime, and ``16 F / (eta~ T) + 16 L eta~ G^2 / S +
    288 L^2 eta~^2 (G^2 + sigma^2 / K)`` for MimeLite. With ``mu`` the first term has ``(1 - mu eta~ / 8)^T`` for 1 / T.

    >>> setting = dict(smoothness=1.0, G2=4.0, gap=2.0, steps=10, sampled=5, rounds=1000)
    >>> {k: round(v, 4) for k, v in mime_sgd_bound("mime", **setting).terms.items()}
    {'optimization': 1.1085, 'statistics': 1.1085}
    """
    lite = _lite(method)
    known = {"smoothness": smoothness, "G2": G2, "gap": gap, "steps": steps, "sampled": sampled, "rounds": rounds}
    if client_lr is None:
        client_lr = sgd_steps(**known, sigma2=sigma2, lite=lite, mu=mu).client_lr
    check_positive(client_lr=client_lr, smoothness=smoothness, gap=gap, steps=steps, sampled=sampled, rounds=rounds)
    eta, L = steps * client_lr, smoothness
    _refuse("steps * client_lr", eta, 1 / (12 * L), "1 / (12 L)")
    left = 1 / rounds if mu is None else (1 - mu * eta / 8) ** rounds
    terms = {
        "optimization": 16 * gap / eta * left,
        "statistics": (16 if lite else 48) * L * eta * G2 / sampled,
    }
    if lite:
        terms["drift"] = 288 * (L * eta) ** 2 * (G2 + sigma2 / steps)
    return Bound(
        f"Corollary II ({method}, sgd{', PL' if mu is not None else ''})",
        f"E ||grad f(x_out)||^2 after {rounds} rounds; {OUTPUT}",
        sum(terms.values()),
        terms,
        (A1, SMOOTH, *((A3,) if lite else ()), *((PL,) if mu is not None else ())),
        f"{PAPER}, Corollary II, Lemmas 10 to 12",
    )


def mime_adam_bound(
    method: Method,
    *,
    smoothness: float,
    G2: float,
    gap: float,
    largest_gradient: float,
    eps: float,
    sampled: int,
    rounds: int,
    steps: int = 1,
    sigma2: float = 0.0,
) -> Bound:
    """Corollary III: the mean of ``E ||grad f||^2`` over T rounds with the base adam, b1 = 0, at the recipe's rate.

    ``96 L (H + eps)^2 F / (eps^2 T) + 2 G^2 / S``; for MimeLite ``sqrt(S)`` times the first term, and ``2 (G^2 +
    sigma^2 / K) / S``. The second term does not vanish: Adam needs ``S > 2 G^2 / epsilon``.

    >>> setting = dict(smoothness=1.0, G2=1.0, gap=1.0, largest_gradient=0.9, eps=0.1, sampled=100, rounds=10**6)
    >>> {k: round(v, 4) for k, v in mime_adam_bound("mime", **setting).terms.items()}
    {'optimization': 0.0096, 'statistics': 0.02}
    """
    lite = _lite(method)
    found = adam_steps(
        smoothness=smoothness, largest_gradient=largest_gradient, eps=eps, steps=steps, sampled=sampled, lite=lite
    )
    check_positive(gap=gap, rounds=rounds)
    H = max(largest_gradient, math.sqrt(eps) - eps)
    noise = G2 + sigma2 / steps if lite else G2
    terms = {
        "optimization": 8 * (H + eps) * gap / (steps * found.client_lr * rounds),
        "statistics": 2 * noise / sampled,
    }
    return Bound(
        f"Corollary III ({method}, adam)",
        f"E ||grad f(x_out)||^2 after {rounds} rounds; {OUTPUT}",
        sum(terms.values()),
        terms,
        (A1, SMOOTH, Assumption("every coordinate of every client's gradient is at most H", "assumed"), A3),
        f"{PAPER}, Corollary III, Lemmas 13 to 16",
    )


def mime_mvr_bound(
    method: Method,
    *,
    smoothness: float,
    delta: float,
    G2: float,
    gap: float,
    steps: int,
    sampled: int,
    rounds: int,
    sigma2: float = 0.0,
    client_lr: float | None = None,
    a: float | None = None,
) -> Bound:
    """Theorems V and VI: the mean of ``E ||grad f||^2`` over all local models of T rounds, after T rounds of warm-up.

    ``24 F / (eta K T) + (2304 / 23) G^2 / (a S T^2) + 408 a G^2 / S``; MimeLiteMVR has ``G^2 + sigma^2`` for ``G^2 /
    S``. By default at the recipe's step size and momentum. Theorem IV is this with K >= L / delta.

    >>> setting = dict(smoothness=1.0, delta=0.01, G2=1.0, gap=1.0, steps=100, sampled=10, rounds=10**6)
    >>> {k: round(v, 6) for k, v in mime_mvr_bound("mime", **setting).terms.items()}
    {'optimization': 0.000986, 'warm-up': 0.0, 'momentum': 0.006265}
    """
    lite = _lite(method)
    known = {"smoothness": smoothness, "delta": delta, "G2": G2, "gap": gap, "steps": steps, "sampled": sampled}
    found = mvr_steps(**known, rounds=rounds, sigma2=sigma2, lite=lite)
    eta = found.client_lr if client_lr is None else client_lr
    a = found.a if a is None and client_lr is None else a
    least = LEMMA_23 * (eta * delta * steps) ** 2
    a = max(least, 1 / rounds) if a is None else a
    _refuse("client_lr", eta, min(found.limits["1 / L"], found.limits["1 / (864 delta K)"]), "1 / max(L, 864 delta K)")
    if not least * (1 - 1e-12) <= a <= 1 or a <= 0:
        raise ValueError(f"a must lie between 2592 (eta delta K)^2 = {least:.6g} and 1, and above 0, got {a}")
    noise = G2 + sigma2 if lite else G2 / sampled
    terms = {
        "optimization": 24 * gap / (eta * steps * rounds),
        "warm-up": 24 * 96 / 23 * noise / (a * rounds**2),
        "momentum": 408 * a * noise,
    }
    enough = steps * delta >= smoothness * (1 - 1e-12)
    few = "" if enough else f"but it does not hold here: {steps} < {smoothness / delta if delta else math.inf:.4g}"
    checks = [
        A1,
        A2,
        Assumption("f is delta-weakly convex, so that averaging models does not raise it", "assumed"),
        Assumption("m_0 is the mean gradient of T cohorts at x_0", "assumed"),
        Assumption("K >= L / delta (only Theorem IV)", "checked" if enough else "assumed", few),
    ]
    return Bound(
        f"Theorem {'VI' if lite else 'V'} ({method}, MVR)",
        f"mean of E ||grad f(y)||^2 over the local models of {rounds} rounds",
        sum(terms.values()),
        terms,
        (*checks, *((A3,) if lite else ())),
        f"{PAPER}, Theorems IV to VI, Lemmas 17 to 24",
    )


def mime_sgd_rounds(method: Method, epsilon: float, **constants: float) -> int:
    """Corollary II: the fewest rounds T for which `mime_sgd_bound` is at most epsilon.

    >>> mime_sgd_rounds("mime", 0.5, smoothness=1.0, G2=4.0, gap=2.0, steps=10, sampled=5)
    19661
    """
    return _fewest(mime_sgd_bound, method, epsilon, constants)


def mime_adam_rounds(method: Method, epsilon: float, **constants: float) -> int:
    """Corollary III: the fewest rounds T for which `mime_adam_bound` is at most epsilon.

    >>> setting = dict(smoothness=1.0, G2=1.0, gap=1.0, largest_gradient=0.9, eps=0.1, sampled=100)
    >>> mime_adam_rounds("mime", 0.03, **setting), mime_adam_rounds("mimelite", 0.03, **setting)
    (960000, 9600000)
    """
    return _fewest(mime_adam_bound, method, epsilon, constants)


def mime_mvr_rounds(method: Method, epsilon: float, **constants: float) -> int:
    """Theorem IV: the fewest rounds T for which `mime_mvr_bound` is at most epsilon; the warm-up needs T more.

    >>> setting = dict(smoothness=1.0, delta=0.01, G2=1.0, gap=1.0, steps=100, sampled=10)
    >>> mime_mvr_rounds("mime", 0.1, **setting) < mime_mvr_rounds("mimelite", 0.1, **setting)
    True
    """
    return _fewest(mime_mvr_bound, method, epsilon, constants)


def _fewest(bound: Callable[..., Bound], method: Method, epsilon: float, constants: Mapping[str, float]) -> int:
    """All bounds fall with T at their recipes, so doubling and bisection find the smallest T."""
    check_positive(epsilon=epsilon)

    def reached(rounds: int) -> bool:
        return bound(method, **constants, rounds=rounds).value <= epsilon * (1 + 1e-12)

    high = 1
    while not reached(high):
        high *= 2
        if high > 2**80:
            raise ValueError(f"{bound.__name__} does not reach epsilon = {epsilon}: sample more clients per round")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
