"""Values that are computed again for the gradient instead of being stored: less memory, more time.

T. Chen, B. Xu, C. Zhang, C. Guestrin. Training Deep Nets with Sublinear Memory Cost. 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun

from fedbraid.lowering.patterns import inlined
from fedbraid.notices import notice

__all__ = ["quietly", "remat_layers"]

_quiet: ContextVar[bool] = ContextVar("fedbraid_remat_quiet", default=False)


@contextmanager
def quietly() -> Iterator[None]:
    """A context without notices about models that have no loop: for those who only ask what `remat_layers` saves."""
    before = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(before)


@cache
def _say_no_loop() -> None:
    notice(
        "remat='layers' has no effect: the model has no loop over layers (lax.scan), as llama and smollm2 have. gpt "
        "and encoder have an option remat of their own; in your model, put jax.checkpoint around each layer. "
        "engine.microbatch saves memory with any model"
    )


def remat_layers(loss: Callable) -> Callable:
    """``loss`` whose gradient stores what loops carry, and computes the inside of each step again.

    A loop over layers (``lax.scan`` over their weights) then needs the memory of one layer. A notice says if there is
    no loop.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(loss, return_shape=True)(*args)
        closed = inlined(closed)
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        if not _quiet.get() and not any(equation.primitive.name == "scan" for equation in closed.jaxpr.eqns):
            _say_no_loop()
        for equation in closed.jaxpr.eqns:
            primitive, params = equation.primitive, dict(equation.params)
            if primitive.name == "scan":
                body = params["jaxpr"]
                params["jaxpr"] = jax.make_jaxpr(jax.checkpoint(jaxpr_as_fun(body), prevent_cse=False))(*body.in_avals)
            results = primitive.bind(*map(read, equation.invars), **primitive.get_bind_params(params))
            known.update(zip(equation.outvars, results if primitive.multiple_results else [results], strict=True))
        return jax.tree.unflatten(jax.tree.structure(shapes), [read(atom) for atom in closed.jaxpr.outvars])

    return run
