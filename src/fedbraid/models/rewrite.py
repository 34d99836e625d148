"""Anyone's convolutions made fast: a program rewritten before it is differentiated.

A model written with equinox, flax or ``jax.lax`` calls XLA's convolution. Traced to a jaxpr, each such call is one
equation, and can be replaced by the same convolution made of matrix products (``layers.conv2d``). What the engine then
differentiates, loops over and batches over clients contains no convolution any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedbraid.models.layers import conv2d, window_max


def fast_convolutions(function: Callable) -> Callable:
    """``function`` with its convolutions and max pools as matrix products and reshapes: same values and derivatives.

    Replaced are 1-D and 2-D convolutions without groups and dilation, in any axis order, and max pools whose windows
    lie side by side; also inside ``jit``, ``scan``, ``while_loop``, ``cond`` and ``checkpoint``. Everything else stays
    as it is, and so do functions with their own derivative rules. Values agree to rounding.

    Args:
        function: takes and returns pytrees of arrays.

    >>> import jax, jax.numpy as jnp
    >>> convolve = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")
    >>> x, w = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))
    >>> bool(jnp.allclose(fast_convolutions(convolve)(x, w), convolve(x, w)))
    True
    >>> "conv_general" in str(jax.make_jaxpr(fast_convolutions(convolve))(x, w))
    False
    """

    def rewritten(*args):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _has_targets(closed.jaxpr):
            return function(*args)
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return rewritten


def _has_targets(jaxpr: Jaxpr) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive.name in _REPLACEMENTS:
            return True
        if any(_has_targets(inner) for value in equation.params.values() for inner in _jaxprs(value)):
            return True
    return False


def _jaxprs(value: Any) -> list[Jaxpr]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values if isinstance(v, ClosedJaxpr | Jaxpr)]


def _evaluate(jaxpr: Jaxpr, consts, args) -> list[Any]:
    """Run a jaxpr equation by equation, with replacements."""
    environment = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else environment[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        outputs = _apply(equation, inputs)
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation, inputs) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _REPLACEMENTS:
        output = _REPLACEMENTS[name](params, *inputs)
        if output is not None:
            return [output]
    elif name.startswith("custom_"):
        pass  # its derivative rule belongs to the whole: do not look inside
    elif any(_has_targets(inner) for value in params.values() for inner in _jaxprs(value)):
        if name in ("jit", "pjit"):
            return _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs)
        if name in ("checkpoint", "remat", "remat2"):
            body, policy = params["jaxpr"], params["policy"]
            run = jax.checkpoint(
                lambda *args: _evaluate(body, (), args), prevent_cse=params["prevent_cse"], policy=policy
            )
            return run(*inputs)
        params = {key: _rewritten_parameter(value) for key, value in params.items()}
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
    return outputs if equation.primitive.multiple_results else [outputs]


def _rewritten_parameter(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rewritten_parameter, value))
    if not isinstance(value, ClosedJaxpr):
        return value
    return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args))(*value.in_avals)


def _convolution(params: dict[str, Any], x, kernel):
    """``conv_general_dilated`` as ``conv2d``, or None where it does not fit."""
    spec = params["dimension_numbers"]
    spatial = len(params["window_strides"])
    plain = (
        params["feature_group_count"] == params["batch_group_count"] == 1
        and set(params["lhs_dilation"]) | set(params["rhs_dilation"]) == {1}
        and params["preferred_element_type"] in (None, x.dtype)
        and x.dtype == kernel.dtype
        and jnp.issubdtype(x.dtype, jnp.floating)
        and min(min(pair) for pair in params["padding"]) >= 0
    )
    if spatial not in (1, 2) or not plain:
        return None
    (n, c, *xs), (o, i, *ks), (out_n, out_c, *outs) = spec.lhs_spec, spec.rhs_spec, spec.out_spec
    x, kernel = x.transpose(n, *xs, c), kernel.transpose(*ks, i, o)
    strides, padding = params["window_strides"], params["padding"]
    if spatial == 1:
        x, kernel = x[:, None], kernel[None]
        strides, padding = (1, *strides), ((0, 0), *padding)
    precision = params["precision"]
    y = conv2d(x, kernel, stride=(strides[0], strides[1]), padding=padding, precision=precision)
    if spatial == 1:
        y = y[:, 0]
    order = [0] * y.ndim
    for axis, place in enumerate((out_n, *outs, out_c)):
        order[place] = axis
    return y.transpose(order)


def _max_pool(params: dict[str, Any], x):
    """``reduce_window_max`` with windows side by side as a reshape and a maximum, or None."""
    window = params["window_dimensions"]
    plain = (
        tuple(window) == tuple(params["window_strides"])
        and set(params["base_dilation"]) | set(params["window_dilation"]) == {1}
        and not any(map(any, params["padding"]))
        and jnp.issubdtype(x.dtype, jnp.floating)
    )
    if not plain:
        return None
    x = x[tuple(slice(size - size % k) for size, k in zip(x.shape, window, strict=True))]
    shape, axes = [], []
    for size, k in zip(x.shape, window, strict=True):
        shape.append(size // k)
        if k > 1:
            axes.append(len(shape))
            shape.append(k)
    return window_max(x.reshape(shape), tuple(axes))


_REPLACEMENTS: dict[str, Callable] = {"conv_general_dilated": _convolution, "reduce_window_max": _max_pool}
