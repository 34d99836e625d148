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


def linear(forward: Callable, backward: Callable, residuals: PyTree, x: jax.Array) -> jax.Array:
    """``forward(residuals, x)``, linear in x, with ``backward(residuals, cotangent)`` as its transpose.

    >>> scale = lambda a, x: a * x
    >>> jax.grad(lambda x: linear(scale, scale, jnp.float32(3), x).sum())(jnp.ones(2))
    Array([3., 3.], dtype=float32)
    """
    leaves, tree = jax.tree.flatten(residuals)

    def flat(function: Callable) -> Callable:
        return lambda *args: function(jax.tree.unflatten(tree, args[:-1]), args[-1])

    return linear_p.bind(*leaves, x, forward=flat(forward), backward=flat(backward))


def computed_by(fast: Callable, plain: Callable) -> Callable:
    """A function with the values of ``fast`` and the derivatives of ``plain``. Both must have the same values.

    >>> double = computed_by(lambda x: x + x, lambda x: 2 * x)
    >>> [float(value) for value in jax.jvp(double, (1.0,), (3.0,))]
    [2.0, 6.0]
    """
    function = jax.custom_jvp(lambda *args: fast(*args))
    function.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return function


linear_p = Primitive("linear")


@linear_p.def_impl
def _impl(*args, forward, backward):
    return forward(*args)


@linear_p.def_abstract_eval
def _abstract(*args, forward, backward):
    shape = jax.eval_shape(forward, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args))
    return ShapedArray(shape.shape, shape.dtype)


mlir.register_lowering(linear_p, mlir.lower_fun(_impl, multiple_results=False))


def _jvp(primals, tangents, *, forward, backward):
    out = linear_p.bind(*primals, forward=forward, backward=backward)
    *d_residuals, d_x = tangents
    tangent = linear_p.bind(*primals[:-1], ad.instantiate_zeros(d_x), forward=forward, backward=backward)
    if any(type(d) is not ad.Zero for d in d_residuals):
        d_residuals = [ad.instantiate_zeros(d) for d in d_residuals]
        tangent += jax.jvp(lambda *residuals: forward(*residuals, primals[-1]), primals[:-1], tuple(d_residuals))[1]
    return out, tangent


def _transpose(cotangent, *args, forward, backward):
    *residuals, x = args
    assert ad.is_undefined_primal(x)
    assert not any(ad.is_undefined_primal(r) for r in residuals)
    if type(cotangent) is ad.Zero:
        return [None] * len(residuals) + [ad.Zero(x.aval)]
    return [None] * len(residuals) + [linear_p.bind(*residuals, cotangent, forward=backward, backward=forward)]


def _batch(args, dims, *, forward, backward):
    *residuals, x = args
    *axes, at = dims
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    # x is always mapped, because its cotangent is mapped
    x = jnp.broadcast_to(x, (size, *x.shape)) if at is None else jnp.moveaxis(x, at, 0)
    mapped = {
        name: jax.vmap(function, in_axes=(*axes, 0))
        for name, function in (("forward", forward), ("backward", backward))
    }
    return linear_p.bind(*residuals, x, **mapped), 0


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
