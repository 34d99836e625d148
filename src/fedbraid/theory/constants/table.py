"""The estimated constants as one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["CURVATURES", "Constants", "Estimate", "envelope"]

CURVATURES = ("L", "mu", "L_client_max", "L_client_mean", "mu_client_min", "delta", "delta_mean")


class Estimate(NamedTuple):
    """A value and its standard error from sampling clients (0 when all clients were used)."""

    value: float
    stderr: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" +- {self.stderr:.2g}" if self.stderr > 0 else "")


@dataclass(frozen=True)
class Constants:
    """The result of `estimate`. ``str(constants)`` is a table; ``notes`` are the limitations of the estimates."""

    L: Estimate
    mu: Estimate
    L_client_max: Estimate
    L_client_mean: Estimate
    mu_client_min: Estimate
    sigma2: Estimate
    G2: Estimate
    B2: Estimate
    zeta: Estimate
    delta: Estimate
    delta_mean: Estimate
    grad_norm2: Estimate
    loss: Estimate
    clients: int
    population: int
    batch_size: int | None
    notes: tuple[str, ...] = ()

    @property
    def convex_here(self) -> bool:
        """No negative curvature was found in f or in a sampled client, up to rounding."""
        return self.mu_client_min.value >= -1e-4 * max(self.L_client_max.value, 1e-30)

    def rows(self) -> list[tuple[str, Estimate, str]]:
        """The estimates as rows of a table: name, estimate and meaning."""
        size = "a client's whole data" if self.batch_size is None else f"batches of {self.batch_size}"
        return [
            ("loss", self.loss, "mean loss"),
            ("|grad f|^2", self.grad_norm2, "squared gradient norm"),
            ("L", self.L, "largest curvature of the mean loss"),
            ("mu", self.mu, "smallest curvature of the mean loss"),
            ("L_i mean", self.L_client_mean, "largest curvature of a client, on average"),
            ("L_i max", self.L_client_max, "largest curvature of any sampled client"),
            ("mu_i min", self.mu_client_min, "smallest curvature of any sampled client"),
            ("sigma^2", self.sigma2, f"gradient noise within clients, {size}"),
            ("G^2", self.G2, "gradient variance between clients"),
            ("B^2", self.B2, "mean squared client gradient over squared mean gradient"),
            ("zeta", self.zeta, "largest distance of a client gradient from the mean"),
            ("delta", self.delta, "largest distance of a client Hessian from the mean"),
            ("delta mean", self.delta_mean, "the same on average"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        table = {
            name: self.__dict__[name]._asdict() for name in self.__dict__ if isinstance(self.__dict__[name], Estimate)
        }
        return {**table, "clients": self.clients, "population": self.population, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{name:<12} {estimate!s:<22} {meaning}" for name, estimate, meaning in self.rows()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def envelope(points: Sequence[Constants]) -> Constants:
    """The worst value of each constant over several points: a bound over a whole run has to assume at least these.

    >>> a = Estimate(1.0); b = Estimate(2.0)
    >>> base = dict.fromkeys(list(CURVATURES) + ["sigma2", "G2", "B2", "zeta", "grad_norm2", "loss"], a)
    >>> one = Constants(**base, clients=1, population=1, batch_size=1)
    >>> two = Constants(**{**base, "L": b, "mu": b}, clients=1, population=1, batch_size=1)
    >>> envelope([one, two]).L.value, envelope([one, two]).mu.value
    (2.0, 1.0)
    """
    if not points:
        raise ValueError("envelope needs at least one point")
    worst = {}
    for name, value in points[0].__dict__.items():
        if isinstance(value, Estimate):
            pick = min if name in ("mu", "mu_client_min") else max
            finite = [getattr(p, name) for p in points if not math.isnan(getattr(p, name).value)]
            worst[name] = pick(finite, key=lambda e: e.value) if finite else value
    notes = tuple(dict.fromkeys(note for p in points for note in p.notes))
    first = points[0]
    return Constants(
        **worst, clients=first.clients, population=first.population, batch_size=first.batch_size, notes=notes
    )
