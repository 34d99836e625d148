"""A bound with its terms and assumptions, and the checks that several papers share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedbraid.theory.quadratics import QuadraticFederation

if TYPE_CHECKING:
    from fedbraid.theory.constants import Constants

__all__ = ["Assumption", "Bound", "check_positive", "convexity"]


class Assumption(NamedTuple):
    """One condition of a theorem, and whether it was verified here."""

    name: str
    status: Literal["checked", "assumed"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Bound:
    """The value of a bound, its terms and its assumptions. ``str(bound)`` prints all of them.

    >>> from fedbraid.theory import drift_bound
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
        """True only if every assumption was checked."""
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


def convexity(evidence: QuadraticFederation | Constants | None) -> Assumption:
    """Whether every client's loss is convex, as far as the evidence tells."""
    name = "every client's loss is convex"
    if isinstance(evidence, QuadraticFederation):
        return Assumption(name, "checked", f"smallest eigenvalue {evidence.mu:.3g}")
    if evidence is None:
        return Assumption(name, "assumed")
    low = evidence.mu_client_min.value
    if low < 0:
        return Assumption(name, "assumed", f"but the data contradicts it: curvature {low:.3g} was found")
    return Assumption(
        name, "assumed", "no negative curvature found at the sampled points, which proves nothing elsewhere"
    )


def check_positive(**values: float | None) -> None:
    """Refuse values that are not positive and finite; the error names the argument."""
    for name, value in values.items():
        if value is None or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
