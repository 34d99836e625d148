"""Runs a function whose matrices are W + A B without computing these sums.

LoRA adds a product of two thin matrices to a matrix W that is not trained. With this sum computed, every client has a
matrix of the size of W of its own, and products with it are one product per client. Here the jaxpr of the function is
interpreted, and a product with the sum is computed from its parts:

    x (W + A B) = x W + (x A) B.

W is the same for all clients, so ``vmap`` over clients makes one product of all x W. This works for any function:
library models, equinox, flax and PyTorch modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedbraid.lowering.operations import plain_products
from fedbraid.lowering.patterns import loop_counts

__all__ = ["Adapted", "with_adapted"]

Array = Any


@dataclass(frozen=True)
class Adapted:
    """The matrix ``w + a @ b``, for w [.., m, n], a [.., m, r] and b [.., r, n]; axes before the last two are stacked.

    used: called with the axis over which a product sums, 0 for ``x @ w`` and 1 for ``x @ w.T``, and with None if an
        operation needs the value of the sum.
    """

    w: Array
    a: Array
    b: Array
    used: Callable[[int | None], None]

    def value(self) -> Array:
        self.used(None)
        return self.w + (self.a @ self.b).astype(self.w.dtype)

    def transposed(self) -> Adapted:
        a, b = self.b.swapaxes(-1, -2), self.a.swapaxes(-1, -2)
        return Adapted(self.w.swapaxes(-1, -2), a, b, lambda axis: self.used(None if axis is None else 1 - axis))

    def astype(self, dtype: Any) -> Adapted:
        return Adapted(self.w.astype(dtype), self.a.astype(dtype), self.b.astype(dtype), self.used)


def with_adapted(function: Callable, tree: Any, *args: Any) -> Any:
    """``function(tree, *args)`` for a tree whose leaves may be `Adapted`: they stand for the arrays ``w + a @ b``.

    >>> import jax.numpy as jnp
    >>> x, w, a, b = jnp.ones((5, 4)), jnp.ones((4, 3)), jnp.ones((4, 1)), jnp.ones((1, 3))
    >>> y = with_adapted(lambda tree, x: x @ tree["w"], {"w": Adapted(w, a, b, lambda axis: None)}, x)
    >>> float(y[0, 0])
    8.0
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Adapted))
    whole = jax.tree.unflatten(structure, [leaf.w if isinstance(leaf, Adapted) else leaf for leaf in leaves])
    with plain_products(True):  # a product with a derivative rule of its own would need the value of the sum
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(whole, *args)
    results = _follow(closed.jaxpr, closed.consts, [*leaves, *jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(shapes), [_value(result) for result in results])


def _value(value: Any) -> Any:
    return value.value() if isinstance(value, Adapted) else value


def _follow(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr equation by equation; inputs and results may be `Adapted`."""
    environment = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        results = None
        if any(isinstance(value, Adapted) for value in inputs):
            results = _symbolic(equation, inputs)
        if results is None:
            results = _computed(equation, [_value(value) for value in inputs])
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _computed(equation: Any, inputs: list[Any]) -> list[Any]:
    primitive = equation.primitive
    results = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]


def _symbolic(equation: Any, inputs: list[Any]) -> list[Any] | None:
    """The results of an equation that has an `Adapted` input; None if it needs the values.

    A function with a derivative rule of its own needs them: its rule need not be the derivative of the product inside.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product(params, *inputs)
    if name == "transpose" and tuple(params["permutation"]) == (1, 0):
        return [inputs[0].transposed()]
    if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.floating):
        return [inputs[0].astype(params["new_dtype"])]
    if name == "scan":
        return _scan(params, inputs)
    if name in ("checkpoint", "remat", "remat2"):
        return _checkpoint(params, inputs)
    inside = next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)
    if name in ("jit", "pjit", "closed_call") and inside is not None:
        if isinstance(inside, Jaxpr):
            return _follow(inside, (), inputs)
        return _follow(inside.jaxpr, inside.consts, inputs)
    return None


def _product(params: dict[str, Any], left: Any, right: Any) -> list[Any] | None:
    """A product with one `Adapted` factor, contracted over one axis; None for other products."""
    (contract, other), batch = params["dimension_numbers"]
    both = isinstance(left, Adapted) and isinstance(right, Adapted)
    matrix = left if isinstance(left, Adapted) else right
    if both or any(batch) or matrix.w.ndim != 2 or len(contract) != 1:
        return None
    how = {key: params[key] for key in ("precision", "preferred_element_type")}

    def dot(x: Array, x_axis: int, y: Array, y_axis: int) -> Array:
        return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), **how)

    if matrix is right:
        x, axis, at = left, contract[0], other[0]
        near, far = (right.a, right.b) if at == 0 else (right.b, right.a)
        right.used(at)
        # the last axis of x near is the rank; far has it where `at` is
        thin = dot(x, axis, near, at).astype(far.dtype)
        return [dot(x, axis, right.w, at) + dot(thin, thin.ndim - 1, far, at)]
    y, axis, at = right, other[0], contract[0]
    near, far = (left.a, left.b) if at == 0 else (left.b, left.a)
    left.used(at)
    thin = dot(near, at, y, axis).astype(far.dtype)  # the rank is its first axis
    return [dot(left.w, at, y, axis) + dot(far, at, thin, 0)]


def _pieces(value: Any) -> Any:
    return (value.w, value.a, value.b) if isinstance(value, Adapted) else value


def _rebuilt(like: Any, pieces: Any) -> Any:
    if not isinstance(like, Adapted):
        return pieces
    w, a, b = pieces
    return Adapted(w, a, b, like.used)


def _checkpoint(params: dict[str, Any], inputs: list[Any]) -> list[Any]:
    body = params["jaxpr"]

    def run(pieces: list[Any]) -> list[Any]:
        rebuilt = [_rebuilt(like, part) for like, part in zip(inputs, pieces, strict=True)]
        return [_value(result) for result in _follow(body, (), rebuilt)]

    run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return run([_pieces(value) for value in inputs])


def _scan(params: dict[str, Any], inputs: list[Any]) -> list[Any] | None:
    """A loop over stacked matrices, such as the layers of a model: each step gets its slices of w, a and b.

    A loop over the rows of one matrix gets the rows of the sum.
    """
    body: ClosedJaxpr = params["jaxpr"]
    consts, carried = loop_counts(params)
    first = consts + carried
    fixed, carry = inputs[:consts], [_value(v) for v in inputs[consts:first]]
    slices = [v if isinstance(v, Adapted) and v.w.ndim > 2 else _value(v) for v in inputs[first:]]

    def step(carry: list[Any], pieces: list[Any]) -> tuple[list[Any], list[Any]]:
        rebuilt = [_rebuilt(like, part) for like, part in zip(slices, pieces, strict=True)]
        results = [_value(v) for v in _follow(body.jaxpr, body.consts, [*fixed, *carry, *rebuilt])]
        return results[: len(carry)], results[len(carry) :]

    last, stacked = lax.scan(
        step,
        carry,
        [_pieces(value) for value in slices],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *stacked]
