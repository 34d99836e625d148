"""Which equation of a program computes a variable, and how often its value is used."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend.core import Jaxpr, Literal

__all__ = ["Equations"]


class Equations:
    """The equations of a program, found by their results.

    >>> import jax
    >>> program = Equations(jax.make_jaxpr(lambda x: 2 * jax.numpy.exp(x))(1.0).jaxpr)
    >>> (result,) = program.jaxpr.outvars
    >>> program.only(result, "mul").primitive.name, program.only(result, "exp")
    ('mul', None)
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr: Any = jaxpr
        self.made_by: dict[Any, Any] = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
        self.uses: Counter[Any] = Counter(v for v in jaxpr.outvars if not isinstance(v, Literal))
        for equation in reversed(jaxpr.eqns):
            if self.needed(equation):
                self.uses.update(v for v in equation.invars if not isinstance(v, Literal))

    def needed(self, equation: Any) -> bool:
        """Whether a result of the equation is used, or it does something else, such as printing."""
        return bool(equation.effects) or any(self.uses[v] for v in equation.outvars)

    def maker(self, atom: Any, *names: str) -> Any:
        """The equation that computes a value, if its operation has one of these names, or None."""
        equation = None if isinstance(atom, Literal) else self.made_by.get(atom)
        return equation if equation is not None and equation.primitive.name in names else None

    def only(self, atom: Any, *names: str) -> Any:
        """As `maker`, if the value is used here only."""
        equation = self.maker(atom, *names)
        return equation if equation is not None and self.uses[atom] == 1 else None
