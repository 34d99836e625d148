"""Rewrites the jaxpr of any program so that its convolutions are fast; best before it is differentiated.

A model written with equinox, flax or ``jax.lax`` calls XLA's convolution. In a jaxpr each such call is one equation. It
is replaced by the same convolution made of matrix products (:mod:`fedbraid.lowering.operations`). The program that the
engine then differentiates, loops over and batches over clients contains no convolution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from fedbraid.lowering import kernels
from fedbraid.lowering.convolution import MOST_SLICES, convolve, outputs
from fedbraid.lowering.deferred import COLUMNS, IMAGES, OUT, ROWS, Deferred, follow
from fedbraid.lowering.operations import conv2d, has_kernel, paddings, products_for, window_max

__all__ = ["explain_function", "fast_convolutions", "has_convolutions", "recording"]

Record = dict[Any, list[str]]  # lines about each rewritten program, by function and argument shapes
_record: ContextVar[Record | None] = ContextVar("record", default=None)
_notes: ContextVar[dict[int, str] | None] = ContextVar("notes", default=None)  # by the id of an equation: how it runs
# Argument shapes for which a function has nothing to replace. A cache: a loss is traced many times before it runs.
_unchanged: WeakKeyDictionary[Callable, set[Any]] = WeakKeyDictionary()


def fast_convolutions(function: Callable) -> Callable:
    """``function`` with its convolutions and max pools as matrix products and reshapes.

    Values and derivatives stay the same, up to rounding. It replaces convolutions of floats (any strides, padding,
    dilation, groups and axis order, gradients of other convolutions included) and max pools whose windows do not
    overlap, also inside ``jit``, ``scan``, ``while_loop``, ``cond`` and ``checkpoint``. Other operations, and functions
    with their own derivative rules, stay unchanged. `explain_function` lists what is replaced, and why the rest is not.

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
        leaves, tree = jax.tree.flatten(args)
        signature = (tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))
        unchanged = _unchanged.setdefault(function, set()) if isinstance(function, FunctionType) else set()
        if signature in unchanged:
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if not has_convolutions(closed.jaxpr):
            unchanged.add(signature)
            return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)(*leaves))
        with _noting() as notes:
            results = _evaluate(closed.jaxpr, closed.consts, *leaves)
        record = _record.get()
        if record is not None:
            record[id(function), signature] = _explained(closed.jaxpr, notes)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rewritten


@contextmanager
def recording() -> Iterator[Record]:
    """Collects what `fast_convolutions` does to the programs that are traced in this context."""
    found: Record = {}
    before = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(before)


def explain_function(function: Callable, *args: Any) -> list[str]:
    """One line for each convolution and max pool of ``function(*args)``: how it runs, or why XLA runs it.

    >>> convolve = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")
    >>> explain_function(convolve, jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3)))
    ['convolution of (1, 1, 4, 4) with (1, 1, 3, 3): matrix products (patches)']
    """
    with recording() as found:
        jax.eval_shape(fast_convolutions(function), *args)
    return [line for lines in found.values() for line in lines]


@contextmanager
def _noting() -> Iterator[dict[int, str]]:
    notes: dict[int, str] = {}
    before = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(before)


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
        elif name.startswith("custom_") and any(
            has_convolutions(i) for v in equation.params.values() for i in _jaxprs(v)
        ):
            lines.append(f"{name}: left to XLA: it has a derivative rule of its own")
        else:
            inside = [inner for value in equation.params.values() for inner in _jaxprs(value)]
            lines += [line for inner in inside for line in _explained(inner, notes)]
    return lines


def has_convolutions(jaxpr: Jaxpr) -> bool:
    """Whether a program has an equation that may be replaced, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _REPLACEMENTS:
            return True
        if any(has_convolutions(inner) for value in equation.params.values() for inner in _jaxprs(value)):
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
    spread: dict[Any, Any] = {}  # results of broadcast_in_dim: its parameters and its input

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
        if name == "conv_general_dilated" and waiting(equation.invars[0]):  # may take the value without a transpose
            inputs = [known(equation.invars[0]), read(equation.invars[1])]
        else:
            inputs = [read(atom) for atom in equation.invars]
        outputs = _apply(equation, inputs)
        environment.update(zip(equation.outvars, outputs, strict=True))
        if name == "broadcast_in_dim" and len(inputs) == 1:
            spread[equation.outvars[0]] = (equation.params, inputs[0])
    return [read(atom) for atom in jaxpr.outvars]


def _narrow(params: dict[str, Any], x) -> Any:
    """x with the axes that ``broadcast_in_dim`` gives it, but of size 1 where it would repeat x."""
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
        pass  # its derivative rule is valid for the whole function: leave it unchanged
    elif any(has_convolutions(inner) for value in params.values() for inner in _jaxprs(value)):
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
    """Why a convolution is not replaced, or None if it is."""
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype == kernel.dtype):
        return f"its factors are {x.dtype} and {kernel.dtype}; only floats of one dtype are rewritten"
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
    """``conv_general_dilated`` as matrix products, deferred if operations may follow; None if it is not replaced."""
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
        pads = paddings(x.shape[1:3], (kernel.shape[0], kernel.shape[1]), strides, padding)
        _note(equation, f"matrix products ({products_for(x, kernel, strides, pads)})")
        # Deferred on a CPU, too: bias, ReLU and pool then run channels last, and the next convolution takes their
        # value without a transpose. Networks with channels first (PyTorch, equinox) are a quarter faster.
        if has_kernel(x, kernel, precision) or (precision is None and kernels.platform() == "cpu"):
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
    """The precision in the jaxpr of a convolution without a precision, if the default precision is ``how``."""
    with jax.default_matmul_precision(None if how == "None" else how):
        closed = jax.make_jaxpr(lambda x: lax.conv(x, x, (1, 1), "VALID"))(jnp.ones((1, 1, 1, 1)))
    return closed.jaxpr.eqns[0].params["precision"]


def _is_conv2d(params: dict[str, Any], kernel) -> bool:
    """Whether `conv2d` can compute this convolution: 2-D, a small window, no groups, no dilation."""
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
    """``reduce_window_max`` as a reshape and a maximum, or None if its windows overlap."""
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
