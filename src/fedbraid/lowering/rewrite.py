"""Anyone's convolutions made fast: a program rewritten before it is differentiated.

A model written with equinox, flax or ``jax.lax`` calls XLA's convolution. Traced to a jaxpr, each such call is one
equation, and can be replaced by the same convolution made of matrix products (``layers.conv2d``). What the engine then
differentiates, loops over and batches over clients contains no convolution any more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from fedbraid.lowering import kernels
from fedbraid.lowering.convolution import MOST_SLICES, convolve, outputs
from fedbraid.lowering.deferred import COLUMNS, IMAGES, OUT, ROWS, Deferred, follow
from fedbraid.lowering.operations import conv2d, has_kernel, paddings, window_max

_native: ContextVar[bool] = ContextVar("native", default=False)
_notes: ContextVar[dict[int, str] | None] = ContextVar("notes", default=None)  # how an equation, by its id, was run
_MARK = "_convolutions_are_fast"


def fast_convolutions(function: Callable) -> Callable:
    """``function`` with its convolutions and max pools as matrix products and reshapes: same values and derivatives.

    Replaced are convolutions of floats (any strides, padding, dilation, groups and axis order, gradients of other
    convolutions included) and max pools whose windows lie side by side; also inside ``jit``, ``scan``, ``while_loop``,
    ``cond`` and ``checkpoint``. Everything else stays as it is, and so do functions with their own derivative rules.
    Values agree to rounding. `explain` says what was replaced and what was not, and why.

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

    if getattr(function, _MARK, False):
        return function

    without: set[Any] = set()  # arguments, by structure and shapes, with which there is nothing to replace

    def rewritten(*args):
        leaves, tree = jax.tree.flatten(args)
        signature = (tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))
        if _native.get() or signature in without:
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _has_targets(closed.jaxpr):
            without.add(signature)  # a loss is traced many times before it runs
            return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)(*leaves))
        outputs = _evaluate(closed.jaxpr, closed.consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    setattr(rewritten, _MARK, True)
    return rewritten


@contextmanager
def native_convolutions() -> Iterator[None]:
    """What is traced within leaves convolutions to XLA.

    >>> convolve = fast_convolutions(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))
    >>> with native_convolutions():
    ...     program = str(jax.make_jaxpr(convolve)(jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))))
    >>> "conv_general" in program
    True
    """
    before = _native.set(True)
    try:
        yield
    finally:
        _native.reset(before)


def explain(function: Callable, *args: Any) -> list[str]:
    """One line for each convolution and max pool of ``function(*args)``: how it runs, or why it is left to XLA.

    >>> convolve = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")
    >>> explain(convolve, jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3)))
    ['convolution of (1, 1, 4, 4) with (1, 1, 3, 3): matrix products']
    """
    closed = jax.make_jaxpr(function)(*args)
    notes: dict[int, str] = {}
    if kernels.available():  # what follows a convolution may become part of it, which only running it tells
        before = _notes.set(notes)
        try:
            jax.eval_shape(lambda *leaves: _evaluate(closed.jaxpr, closed.consts, *leaves), *jax.tree.leaves(args))
        finally:
            _notes.reset(before)
    return _explained(closed.jaxpr, notes)


def _note(equation: Any, how: str) -> None:
    notes = _notes.get()
    if notes is not None:
        notes[id(equation)] = how


def _explained(jaxpr: Jaxpr, notes: dict[int, str]) -> list[str]:
    lines = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        shapes: list[Any] = [atom.aval for atom in equation.invars]
        if name == "conv_general_dilated":
            x, kernel = shapes
            reason = _why_not(equation.params, x, kernel)
            how = "matrix products" if reason is None else f"left to XLA: {reason}"
            lines.append(f"convolution of {x.shape} with {kernel.shape}: {notes.get(id(equation), how)}")
        elif name == "reduce_window_max":
            how = "slices" if _side_by_side(equation.params, shapes[0]) else "left to XLA: its windows overlap"
            how = notes.get(id(equation), how)
            lines.append(f"max pool of {shapes[0].shape}: {how}")
        elif name.startswith("custom_") and any(_has_targets(i) for v in equation.params.values() for i in _jaxprs(v)):
            lines.append(f"{name}: left to XLA: it has a derivative rule of its own")
        else:
            inside = [inner for value in equation.params.values() for inner in _jaxprs(value)]
            lines += [line for inner in inside for line in _explained(inner, notes)]
    return lines


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


def _evaluate(jaxpr: Jaxpr, consts, *args) -> list[Any]:
    """Run a jaxpr equation by equation, with replacements."""
    environment = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    variables = [atom for equation in jaxpr.eqns for atom in equation.invars] + list(jaxpr.outvars)
    uses = Counter(atom for atom in variables if not isinstance(atom, Literal))
    spread: dict[Any, Any] = {}  # what was repeated to a larger shape, and how

    def known(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    def narrow(atom: Any) -> Any:
        repeated = not isinstance(atom, Literal) and atom in spread
        return _narrow(*spread[atom]) if repeated else known(atom)

    def read(atom: Any) -> Any:
        value = known(atom)
        if isinstance(value, Deferred):
            value = environment[atom] = value.value()
        return value

    def waiting(atom: Any) -> bool:
        return isinstance(known(atom), Deferred) and uses[atom] == 1

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if any(map(waiting, equation.invars)):
            longer = follow(equation, [narrow(atom) for atom in equation.invars])
            if longer is not None:
                environment[equation.outvars[0]] = longer
                if name == "reduce_window_max":
                    _note(equation, "together with the convolution before it")
                continue
        if name == "conv_general_dilated" and waiting(equation.invars[0]):  # may take the value as it was computed
            inputs = [known(equation.invars[0]), read(equation.invars[1])]
        else:
            inputs = [read(atom) for atom in equation.invars]
        outputs = _apply(equation, inputs)
        environment.update(zip(equation.outvars, outputs, strict=True))
        if name == "broadcast_in_dim" and len(inputs) == 1:
            spread[equation.outvars[0]] = (equation.params, inputs[0])
    return [read(atom) for atom in jaxpr.outvars]


def _narrow(params: dict[str, Any], x) -> Any:
    """What ``broadcast_in_dim`` makes of x, with axes of one where it repeats."""
    sizes = [1] * len(params["shape"])
    for size, place in zip(jnp.shape(x), params["broadcast_dimensions"], strict=True):
        sizes[place] = size
    return jnp.reshape(x, sizes)


def _apply(equation, inputs) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _REPLACEMENTS:
        output = _REPLACEMENTS[name](equation, *inputs)
        if output is not None:
            return [output]
        inputs = [x.value() if isinstance(x, Deferred) else x for x in inputs]
    elif name.startswith("custom_"):
        pass  # its derivative rule belongs to the whole: do not look inside
    elif any(_has_targets(inner) for value in params.values() for inner in _jaxprs(value)):
        if name in ("jit", "pjit"):
            return _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, *inputs)
        if name in ("checkpoint", "remat", "remat2"):
            body, policy = params["jaxpr"], params["policy"]
            run = jax.checkpoint(
                lambda *args: _evaluate(body, (), *args), prevent_cse=params["prevent_cse"], policy=policy
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
    return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, *args))(*value.in_avals)


def _why_not(params: dict[str, Any], x, kernel) -> str | None:
    """Why a convolution stays as it is, or None."""
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype == kernel.dtype):
        return f"its factors are {x.dtype} and {kernel.dtype}; only floats of one kind are rewritten"
    if params["preferred_element_type"] not in (None, x.dtype):
        return f"it sums {x.dtype} as {params['preferred_element_type']}"
    (_, _, *xs), (_, _, *ks) = params["dimension_numbers"].lhs_spec, params["dimension_numbers"].rhs_spec
    window, dilation = [kernel.shape[k] for k in ks], params["rhs_dilation"]
    padded = [
        (x.shape[axis] - 1) * d + 1 + sum(pads)
        for axis, d, pads in zip(xs, params["lhs_dilation"], params["padding"], strict=True)
    ]
    places = outputs(padded, window, params["window_strides"], dilation)
    if min(places) < 1 or 0 in x.shape:
        return "it has no output"
    slices = min(math.prod(places), math.prod(window))
    return f"it needs {slices} slices, more than {MOST_SLICES}" if slices > MOST_SLICES else None


def _convolution(equation, x, kernel):
    """``conv_general_dilated`` as matrix products, or None where it does not fit; deferred where it is one kernel."""
    params = equation.params
    if _why_not(params, jax.ShapeDtypeStruct(x.shape, kernel.dtype) if isinstance(x, Deferred) else x, kernel):
        return None
    spec = params["dimension_numbers"]
    (n, c, *xs), (o, i, *ks), (out_n, out_c, *outs) = spec.lhs_spec, spec.rhs_spec, spec.out_spec
    kernel = kernel.transpose(*ks, i, o)
    if isinstance(x, Deferred):
        same = [x.axes[axis] for axis in (n, *xs, c)] == [IMAGES, ROWS, COLUMNS, OUT]
        x = x.computed() if same and _is_conv2d(params, kernel) else x.value().transpose(n, *xs, c)
    else:
        x = x.transpose(n, *xs, c)
    strides, padding, precision = params["window_strides"], params["padding"], params["precision"]
    precision = None if precision == _ambient(str(getattr(jax.config, kernels.PRECISION))) else precision
    order = [0] * (2 + len(outs))
    for axis, place in enumerate((out_n, *outs, out_c)):
        order[place] = axis
    if _is_conv2d(params, kernel):
        strides = strides[0], strides[1]
        if has_kernel(x, kernel, precision):
            pads = paddings(x.shape[1:3], (kernel.shape[0], kernel.shape[1]), strides, padding)
            return Deferred(x, kernel, strides, pads, tuple(order), partial(_note, equation))
        return conv2d(x, kernel, stride=strides, padding=padding, precision=precision).transpose(order)
    return convolve(
        x,
        kernel,
        strides=strides,
        padding=padding,
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        feature_groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        precision=precision,
    ).transpose(order)


@cache
def _ambient(how: str) -> Any:
    """The precision of a convolution that was asked for none, where products are by default as ``how`` says."""
    with jax.default_matmul_precision(None if how == "None" else how):
        closed = jax.make_jaxpr(lambda x: lax.conv(x, x, (1, 1), "VALID"))(jnp.ones((1, 1, 1, 1)))
    return closed.jaxpr.eqns[0].params["precision"]


def _is_conv2d(params: dict[str, Any], kernel) -> bool:
    """Whether it is one that `conv2d` knows, and so may do by tiles: 2-D, a small window, no groups, no dilation."""
    return (
        len(params["window_strides"]) == 2
        and max(kernel.shape[:-2]) <= 7
        and params["feature_group_count"] == params["batch_group_count"] == 1
        and set(params["lhs_dilation"]) | set(params["rhs_dilation"]) == {1}
        and min(min(pair) for pair in params["padding"]) >= 0
    )


def _max_pool(equation, x):
    return _window_max(equation.params, x)


def _window_max(params: dict[str, Any], x):
    """``reduce_window_max`` with windows side by side as a reshape and a maximum, or None."""
    if not _side_by_side(params, x):
        return None
    window = params["window_dimensions"]
    x = x[tuple(slice(size - size % k) for size, k in zip(x.shape, window, strict=True))]
    shape, axes = [], []
    for size, k in zip(x.shape, window, strict=True):
        shape.append(size // k)
        if k > 1:
            axes.append(len(shape))
            shape.append(k)
    return window_max(x.reshape(shape), tuple(axes))


def _max_pool_gradient(equation, gradient, x):
    """``select_and_scatter_add``, the gradient of such a max pool."""
    params = equation.params
    window = {"window_dimensions": params["window_dimensions"], "window_strides": params["window_strides"]}
    ones = (1,) * x.ndim
    pool = {**window, "padding": params["padding"], "base_dilation": ones, "window_dilation": ones}
    if params["select_prim"].name != "ge" or not _side_by_side(pool, x):
        return None
    return jax.vjp(lambda x: _window_max(pool, x), x)[1](gradient)[0]


def _side_by_side(params: dict[str, Any], x) -> bool:
    window = params["window_dimensions"]
    return bool(
        tuple(window) == tuple(params["window_strides"])
        and set(params["base_dilation"]) | set(params["window_dilation"]) == {1}
        and not any(map(any, params["padding"]))
        and jnp.issubdtype(x.dtype, jnp.floating)
    )


_REPLACEMENTS: dict[str, Callable] = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": _max_pool,
    "select_and_scatter_add": _max_pool_gradient,
}
