"""Two wrappers: a linear function with a given transpose, and a function with a faster implementation.

`jax.custom_derivatives.linear_call` gives a transpose too, but it supports neither `vmap` nor derivatives with respect
to the arguments in which the function is not linear. `linear` does: `vmap` maps both functions, and derivatives are
those of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["computed_by", "linear"]

PyTree = Any


def linear(forward: Callable, backward: Callable, residuals: PyTree, x: PyTree) -> Any:
    """``forward(residuals, x)``, linear in x, with ``backward(residuals, cotangent)`` as its transpose.

    >>> scale = lambda a, x: a * x
    >>> jax.grad(lambda x: linear(scale, scale, jnp.float32(3), x).sum())(jnp.ones(2))
    Array([3., 3.], dtype=float32)
    """
    leaves, tree = jax.tree.flatten(residuals)
    given, domain = jax.tree.flatten(x)
    image = jax.tree.structure(jax.eval_shape(forward, residuals, x))

    def flat(function: Callable, inputs: Any) -> Callable:
        def run(*args: Any) -> list[Any]:
            first, rest = args[: len(leaves)], args[len(leaves) :]
            return jax.tree.leaves(function(jax.tree.unflatten(tree, first), jax.tree.unflatten(inputs, rest)))

        return run

    functions = {"forward": flat(forward, domain), "backward": flat(backward, image)}
    return jax.tree.unflatten(image, linear_p.bind(*leaves, *given, **functions, kept=len(leaves)))


def computed_by(fast: Callable, plain: Callable) -> Callable:
    """A function with the values of ``fast`` and the derivatives of ``plain``. Both must have the same values.

    >>> double = computed_by(lambda x: x + x, lambda x: 2 * x)
    >>> [float(value) for value in jax.jvp(double, (1.0,), (3.0,))]
    [2.0, 6.0]
    """
    function = jax.custom_jvp(lambda *args: fast(*args))
    function.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return function


linear_p: Primitive = Primitive("linear")  # kept: the number of arguments in which it is not linear
linear_p.multiple_results = True


@linear_p.def_impl
def _impl(*args, forward, backward, kept):
    return forward(*args)


@linear_p.def_abstract_eval
def _abstract(*args, forward, backward, kept):
    shapes = jax.eval_shape(forward, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args))
    return [ShapedArray(shape.shape, shape.dtype) for shape in shapes]


mlir.register_lowering(linear_p, mlir.lower_fun(_impl, multiple_results=True))


def _jvp(primals, tangents, *, kept, **functions):
    out = linear_p.bind(*primals, **functions, kept=kept)
    residuals, x = primals[:kept], primals[kept:]
    changes = [ad.instantiate_zeros(d) for d in tangents[kept:]]
    tangent = linear_p.bind(*residuals, *changes, **functions, kept=kept)
    if any(type(d) is not ad.Zero for d in tangents[:kept]):
        turned = tuple(ad.instantiate_zeros(d) for d in tangents[:kept])
        more = jax.jvp(lambda *residuals: functions["forward"](*residuals, *x), tuple(residuals), turned)[1]
        tangent = [a + b for a, b in zip(tangent, more, strict=True)]
    return out, tangent


def _transpose(cotangents, *args, forward, backward, kept):
    residuals, x = args[:kept], args[kept:]
    asked = [ad.is_undefined_primal(each) for each in x]  # the others are zeros
    assert not any(map(ad.is_undefined_primal, residuals))
    if all(type(c) is ad.Zero for c in cotangents):
        return [None] * kept + [ad.Zero(each.aval) if yes else None for each, yes in zip(x, asked, strict=True)]
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    found = linear_p.bind(*residuals, *cotangents, forward=backward, backward=forward, kept=kept)
    return [None] * kept + [each if yes else None for each, yes in zip(found, asked, strict=True)]


def _batch(args, dims, *, forward, backward, kept):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    # the linear arguments are always mapped, because their cotangents are mapped
    mapped = [
        jnp.broadcast_to(a, (size, *a.shape)) if at is None else jnp.moveaxis(a, at, 0)
        for a, at in zip(args[kept:], dims[kept:], strict=True)
    ]

    def over(function: Callable) -> Callable:
        """``function`` mapped over residuals as given, and over the first axis of all other arguments."""
        return lambda *args: jax.vmap(function, in_axes=(*dims[:kept], *(0 for _ in args[kept:])))(*args)

    out = linear_p.bind(*args[:kept], *mapped, forward=over(forward), backward=over(backward), kept=kept)
    return out, [0] * len(out)


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
