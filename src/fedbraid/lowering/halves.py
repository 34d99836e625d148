"""Weights that a step reads in bfloat16 are stored in bfloat16, too, beside float32.

With mixed precision, a step of gradient descent first rounds the weights to bfloat16: it reads every weight in float32
and writes it in bfloat16. At its end it reads and writes the float32 weights again, to update them. On a GPU a large
network spends a sixth of a step on the first pass. Here the copy in bfloat16 is a part of the carry: the update writes
it together with the new weights. The values are the same.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from fedbraid.lowering.epilogues import Epilogues
from fedbraid.lowering.updates import Updates

__all__ = ["rounded_leaves", "run_rounded"]

Array = Any


def _is_rounding(equation: Any) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    return equation.invars[0].aval.dtype == jnp.float32 and equation.params["new_dtype"] == jnp.bfloat16


def rounded_leaves(step: ClosedJaxpr, before: int) -> list[int]:
    """The leaves that a step ``(..., *leaves) -> leaves`` rounds to bfloat16; ``before`` inputs come before them.

    >>> import jax
    >>> step = jax.make_jaxpr(lambda a, b: [a + b.astype(jnp.bfloat16), b])(jnp.ones(2), jnp.ones(2))
    >>> rounded_leaves(step, 0)
    [1]
    """
    rounded = {e.invars[0] for e in step.jaxpr.eqns if _is_rounding(e) and not isinstance(e.invars[0], Literal)}
    return [i for i, leaf in enumerate(step.jaxpr.invars[before:]) if leaf in rounded]


def run_rounded(
    step: ClosedJaxpr,
    halves: tuple[int, ...],
    updates: Updates,
    epilogues: Epilogues,
    slot: Array,
    k: Array,
    leaves: list[Array],
    rows: tuple[Any, ...] = (),
) -> tuple[list[Array], tuple[Any, ...]]:
    """A step on leaves that are followed by the copies in bfloat16 of the leaves ``halves``."""
    count = len(leaves) - len(halves)
    known: dict[Any, Any] = dict(zip(step.jaxpr.constvars, step.consts, strict=True))
    known.update(zip(step.jaxpr.invars, (slot, k, *leaves[:count]), strict=True))
    copies = {step.jaxpr.invars[2 + i]: copy for i, copy in zip(halves, leaves[count:], strict=True)}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    replaced = updates.replaced | epilogues.replaced
    for equation in step.jaxpr.eqns:
        if not replaced.isdisjoint(equation.outvars):
            continue
        if equation.outvars and equation.outvars[0] in epilogues.at:
            known.update(epilogues.at[equation.outvars[0]].run(read))
            continue
        source = equation.invars[0] if equation.invars else None
        if _is_rounding(equation) and not isinstance(source, Literal) and source in copies:
            known[equation.outvars[0]] = copies[source]
            continue
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*map(read, equation.invars), **params)
        results = results if equation.primitive.multiple_results else [results]
        known.update(zip(equation.outvars, results, strict=True))
    changed, rounded = updates.run(read, leaves)
    new = [changed[i] if i in changed else read(atom) for i, atom in enumerate(step.jaxpr.outvars)]
    return new + [rounded[i] if i in rounded else new[i].astype(jnp.bfloat16) for i in halves], rows
