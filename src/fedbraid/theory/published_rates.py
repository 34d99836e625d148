"""Published rates beside the exact worst case: how much each bound loses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedbraid.theory.bounds import fedavg_bound
from fedbraid.theory.splitting import contraction
from fedbraid.theory.worst_case import WorstCase, worst_case

__all__ = ["Comparison", "compare", "compare_rates", "published_rate"]

FEDLIN = "Mitra et al. 2021 (FedLin), Theorem 1"


@dataclass(frozen=True)
class Comparison:
    """One setting: the exact worst case, and what a theorem guarantees."""

    method: str
    measure: str
    setting: dict[str, Any]
    exact: float
    published: float | None
    theorem: str

    @property
    def lost(self) -> float | None:
        """The published value over the exact one. Rates below 1 are compared as rounds: log(exact) / log(published)."""
        if self.published is None:
            return None
        if self.measure in ("contraction", "gap factor") and max(self.published, self.exact) < 1:
            return math.log(self.exact) / math.log(self.published)
        return self.published / self.exact


def published_rate(
    method: str,
    measure: str,
    *,
    client_lr: float,
    steps: int = 1,
    clients: int = 2,
    rounds: int = 1,
    smoothness: float = 1.0,
    mu: float = 0.0,
    server_lr: float = 1.0,
    distance: float = 1.0,
    zeta: float = 0.0,
) -> tuple[float, str] | None:
    """What a theorem says of this setting, with its citation; None if no theorem here covers it.

    >>> published_rate("fedprox", "contraction", client_lr=5.0, mu=0.2)
    (0.5, 'the prox of a strongly convex loss contracts by 1 / (1 + s mu)')
    """
    if server_lr != 1.0:
        return None
    if method == "fedavg" and measure == "mean gap" and client_lr <= 1 / (4 * smoothness):
        bound = fedavg_bound(
            eta=client_lr,
            tau=steps,
            rounds=rounds,
            clients=clients,
            distance=distance,
            smoothness=smoothness,
            zeta=zeta,
            sigma2=0.0,
        )
        return bound.value, "notes on FedAvg, Theorem 2.1"
    if method == "fedavg" and measure == "contraction":
        factor = max(abs(1 - client_lr * mu), abs(1 - client_lr * smoothness))
        return factor ** (steps * rounds), "K steps of gradient descent, max |1 - gamma lambda|^K"
    if method == "fedprox" and measure == "contraction":
        return (1 / (1 + client_lr * mu)) ** rounds, "the prox of a strongly convex loss contracts by 1 / (1 + s mu)"
    if method == "fedsplit" and measure == "contraction" and mu > 0:
        return contraction(mu, smoothness, client_lr) ** rounds, "FedSplit, Theorem 1"
    covered = method == "mime" or (method == "scaffold" and rounds == 1)  # SCAFFOLD's first round is FedLin's
    if covered and measure == "gap factor" and math.isclose(client_lr, 1 / (6 * smoothness * steps)):
        return (1 - mu / (6 * smoothness)) ** rounds, FEDLIN
    return None


def compare_rates(*, mu: float = 0.1, smoothness: float = 1.0, clients: int = 2) -> list[Comparison]:
    """The exact worst case and the published one, for each method in the settings of its theorem."""
    L = smoothness
    quarter, split = 1 / (4 * L), 1 / math.sqrt(mu * L)
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("fedavg", "mean gap", {"client_lr": quarter, "steps": 1, "rounds": 2, "zeta": 0.5 * L}),
        ("fedavg", "mean gap", {"client_lr": quarter, "steps": 2, "rounds": 1, "zeta": 0.5 * L}),
        ("fedavg", "mean gap", {"client_lr": quarter, "steps": 2, "rounds": 2, "zeta": 0.5 * L}),
        ("fedavg", "mean gap", {"client_lr": quarter / 4, "steps": 2, "rounds": 2, "zeta": 0.5 * L}),
        ("fedavg", "contraction", {"client_lr": 0.5 / L, "steps": 2, "mu": mu}),
        ("fedprox", "contraction", {"client_lr": split, "mu": mu}),
        ("fedsplit", "contraction", {"client_lr": split, "mu": mu}),
        ("mime", "gap factor", {"client_lr": 1 / (6 * L), "steps": 1, "mu": mu, "zeta": math.inf}),
        ("mime", "gap factor", {"client_lr": 1 / (12 * L), "steps": 2, "mu": mu, "zeta": math.inf}),
        ("mime", "gap factor", {"client_lr": 1 / (18 * L), "steps": 3, "mu": mu, "zeta": math.inf}),
        ("scaffold", "gap factor", {"client_lr": 1 / (12 * L), "steps": 2, "mu": mu, "zeta": math.inf}),
        ("scaffold", "gap factor", {"client_lr": 1 / (12 * L), "steps": 2, "mu": mu, "zeta": math.inf, "rounds": 3}),
    ]
    return [compare(method, measure, clients=clients, smoothness=L, **setting) for method, measure, setting in rows]


def compare(method: str, measure: Any, **setting: Any) -> Comparison:
    """One row: `worst_case` and `published_rate` of the same setting."""
    exact: WorstCase = worst_case(method, measure=measure, **setting)
    known = published_rate(method, measure, **setting)
    published, theorem = known or (None, "none with explicit constants")
    return Comparison(method, measure, setting, exact.certified, published, theorem)
