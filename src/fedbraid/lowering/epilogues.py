"""A bias and an activation, in the kernel of the matrix product before them.

A dense layer computes ``h = x w`` and ``a = f(h + bias)``. Its gradient needs h, so both are stored. The kernel that
computes the product writes both: it does not read h again. Backwards, the gradient of a is a product, too. The kernel
that computes it multiplies it by f' and writes the gradient of h and its sums over rows, the gradient of the bias. The
gradient of a is not stored.

The values are those of separate kernels, up to the order of sums.

Products of factors that are not bfloat16, of small matrices, and those that are read before the activation are computed
as they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from fedbraid.lowering.equations import Equations
from fedbraid.lowering.smooth import activation_back_p, activation_p

__all__ = ["Epilogues", "find_epilogues"]

LEAST = 64  # rows, columns and terms of a product that is worth a kernel
MOST = 1024  # terms: in longer sums, the time of the product matters more than that of reading it again (an estimate)


class Epilogue(NamedTuple):
    """A product ``x w`` (turned: ``x w'``) that an activation, or the gradient of one, takes."""

    equation: Any  # of the activation
    x: Any
    w: Any
    turned: bool
    passed: tuple[Any, ...]  # the product, and the same numbers in other shapes

    def run(self, read: Callable[[Any], Any]) -> dict[Any, Any]:
        """The values of the variables that are needed of the product and of the activation."""
        from fedbraid.lowering.kernels import dense

        x, w = read(self.x), read(self.w)
        x, function = x.reshape(-1, x.shape[-1]), self.equation.params["function"]
        if self.equation.primitive is activation_back_p:
            h, bias = map(read, self.equation.invars[:2])
            return dict(zip(self.equation.outvars, dense.gradient(function, x, w, h, bias, self.turned), strict=True))
        h, a = dense.activated(function, x, w, read(self.equation.invars[1]), self.turned)
        return {self.equation.outvars[0]: a} | {v: h.reshape(v.aval.shape) for v in self.passed}


class Epilogues(NamedTuple):
    """The activations that are computed with the product before them, by their first result."""

    at: Mapping[Any, Epilogue] = MappingProxyType({})
    replaced: frozenset[Any] = frozenset()  # results of equations that are not needed


def find_epilogues(step: ClosedJaxpr) -> Epilogues:
    """The activations of a step that can be computed with the product before them.

    >>> import jax
    >>> from fedbraid.lowering.smooth import activation
    >>> half, bias = jnp.ones((64, 64), jnp.bfloat16), jnp.ones(64)
    >>> step = jax.make_jaxpr(lambda x, w, b: activation(jnp.tanh, x @ w, b))(half, half, bias)
    >>> len(find_epilogues(step).at)
    1
    """
    program = Equations(step.jaxpr)
    smooth = [equation for equation in step.jaxpr.eqns if equation.primitive in (activation_p, activation_back_p)]
    found = [epilogue for equation in smooth if (epilogue := _epilogue(program, equation)) is not None]
    return Epilogues(
        {each.equation.outvars[0]: each for each in found}, frozenset(v for each in found for v in each.passed)
    )


def _epilogue(program: Equations, equation: Any) -> Epilogue | None:
    backwards = equation.primitive is activation_back_p
    source, passed = equation.invars[2 if backwards else 0], []
    while (reshape := program.maker(source, "reshape")) is not None:
        passed.append(source)
        source = reshape.invars[0]
    product = program.maker(source, "dot_general")
    if product is None or not _fits(product):
        return None
    passed.append(source)
    if any(v.aval.shape[-1] != source.aval.shape[-1] for v in passed):
        return None
    if any(program.uses[v] > 1 for v in passed) if backwards else _read_before(program, equation, passed):
        return None
    (x, w), turned = product.invars, tuple(product.params["dimension_numbers"][0][1]) == (1,)
    while (transpose := program.maker(w, "transpose")) is not None:  # the kernel needs no transposed copy
        turned ^= tuple(transpose.params["permutation"]) == (1, 0)
        w = transpose.invars[0]
    return Epilogue(equation, x, w, turned, tuple(passed))


def _fits(product: Any) -> bool:
    """Whether it is a product over the last axis of its first factor, with a matrix, of a size that pays."""
    (x, w), (over, batch) = (atom.aval for atom in product.invars), product.params["dimension_numbers"]
    if any(batch) or w.ndim != 2 or tuple(over[0]) != (x.ndim - 1,):
        return False
    narrow = all(aval.dtype == jnp.bfloat16 for aval in (x, w, product.outvars[0].aval))
    terms = x.shape[-1]
    return narrow and min(math.prod(x.shape[:-1]), *w.shape) >= LEAST and terms <= MOST


def _read_before(program: Equations, equation: Any, passed: list[Any]) -> bool:
    """Whether another equation reads one of the variables before the activation, where they are computed."""
    between = takewhile(lambda each: each is not equation, program.jaxpr.eqns)
    others = (other for other in between if set(passed).isdisjoint(other.outvars))
    return any(atom in passed for other in others for atom in other.invars if not isinstance(atom, Literal))
