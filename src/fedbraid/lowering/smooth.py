"""A bias and a smooth activation, and the gradient of both: each is one equation of a program.

So a product before it can be found, and computed in the same kernel (:mod:`fedbraid.lowering.epilogues`). Otherwise it
is a kernel of its own (:mod:`fedbraid.lowering.kernels.smooth`). Neither is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

__all__ = ["activation", "activation_back", "activation_back_p", "activation_p"]

Array = Any
activation_p: Primitive = Primitive("activation")
activation_back_p: Primitive = Primitive("activation_back")


def activation(function: Callable, x: Array, bias: Array) -> Array:
    """``function(x + bias)`` of x [N, C] and bias [C], in the dtype of x.

    function: made of operations that kernels have.

    >>> program = jax.make_jaxpr(lambda x, bias: activation(jnp.tanh, x, bias))(jnp.ones((2, 3)), jnp.ones(3))
    >>> [equation.primitive.name for equation in program.jaxpr.eqns]
    ['activation']
    """
    return activation_p.bind(x, bias, function=function)[0]


def activation_back(function: Callable, x: Array, bias: Array, dy: Array) -> tuple[Array, Array]:
    """The gradients of x [N, C] and of bias [C] of ``function(x + bias)``, for the gradient ``dy`` of the result."""
    dx, dbias = activation_back_p.bind(x, bias, dy, function=function)
    return dx, dbias


def _forward(x: Array, bias: Array, *, function: Callable) -> list[Array]:
    from fedbraid.lowering.kernels import smooth

    return [smooth.activation(function, x, bias)]


def _back(x: Array, bias: Array, dy: Array, *, function: Callable) -> list[Array]:
    from fedbraid.lowering.kernels import smooth

    return list(smooth.activation_back(function, x, bias, dy))


@activation_p.def_abstract_eval
def _shapes(x: ShapedArray, bias: ShapedArray, *, function: Callable) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype)]


@activation_back_p.def_abstract_eval
def _back_shapes(x: ShapedArray, bias: ShapedArray, dy: ShapedArray, *, function: Callable) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype), ShapedArray(bias.shape, jnp.float32)]


def _mapped(run: Callable, args: tuple, axes: tuple, **params: Any) -> tuple[list[Array], list[int]]:
    found = jax.vmap(partial(run, **params), in_axes=axes)(*args)
    return found, [0] * len(found)


for _primitive, _run in ((activation_p, _forward), (activation_back_p, _back)):
    _primitive.multiple_results = True
    _primitive.def_impl(_run)
    mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
    batching.primitive_batchers[_primitive] = partial(_mapped, _run)
