"""A convolution that is computed later, together with the operations that follow it.

A network's program has convolution, bias, ReLU and pool one after the other, with changes of layout in between. The
convolution is deferred: the operations that follow are collected. The value is computed when an operation that cannot
be collected needs it. On a GPU all of them can be one kernel. On a CPU they run in the convolution's own layout,
channels last, and bias and ReLU run after the pool, on a quarter of the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from fedbraid.lowering.operations import Pads, conv2d, conv_relu, has_kernel, max_pool, window_counts

__all__ = ["COLUMNS", "IMAGES", "OUT", "ROWS", "Deferred", "follow", "is_relu"]

Array = jax.Array
IMAGES, ROWS, COLUMNS, OUT = range(4)  # axes of a value as it is computed


@dataclass(frozen=True)
class Deferred:
    """A convolution [images, rows, columns, out] and the operations collected so far.

    axes: for each axis of the value in the program's layout, its index among these four; None for an axis of size 1.
    """

    x: Array
    kernel: Array
    strides: tuple[int, int]
    pads: Pads
    axes: tuple[int | None, ...]
    note: Callable[[str], None]
    bias: Array | None = None
    relu: bool = False
    pool: bool = False

    @property
    def window(self) -> tuple[int, int]:
        return self.kernel.shape[0], self.kernel.shape[1]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        counts = window_counts(self.x, self.window, self.strides, self.pads)
        rows, columns = (n // 2 if self.pool else n for n in counts)
        return self.x.shape[0], rows, columns, self.kernel.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if axis is None else self.sizes[axis] for axis in self.axes)

    def value(self) -> Array:
        """The value in the program's own layout and dtype."""
        order = [axis for axis in self.axes if axis is not None]
        return self.computed().astype(self.kernel.dtype).transpose(order).reshape(self.shape)

    def computed(self) -> Array:
        """The value as [images, rows, columns, out], in the dtype that kernels store."""
        from fedbraid.lowering.kernels.activated import pools

        where: Any = {"stride": self.strides, "padding": self.pads}
        if not has_kernel(self.x, self.kernel):
            pass  # matrix products, as for any convolution
        elif self.relu and (not self.pool or pools(self.kernel.shape[2], self.window, self.strides)):
            self.note("one kernel, with its bias and ReLU" + (" and pool" if self.pool else ""))
        else:
            self.note("one kernel, which gathers its patches itself")
        if self.relu:
            bias = jnp.zeros(self.kernel.shape[-1], self.kernel.dtype) if self.bias is None else self.bias
            return conv_relu({"w": self.kernel, "b": bias}, self.x, pool=self.pool, **where)
        y = conv2d(self.x.astype(self.kernel.dtype), self.kernel, **where)
        y = max_pool(y) if self.pool else y
        return y if self.bias is None else y + self.bias


def follow(equation: Any, inputs: list[Any]) -> Deferred | None:
    """A deferred convolution with one more equation collected, or None if that equation cannot be."""
    step = _STEPS.get(equation.primitive.name)
    return None if step is None else step(equation.params, inputs)


def _transposed(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    return replace(inputs[0], axes=tuple(inputs[0].axes[axis] for axis in params["permutation"]))


def _reshaped(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    """A reshape that only adds or removes axes of size 1."""
    value, sizes = inputs[0], params["new_sizes"]
    own = [axis for axis in value.axes if axis is not None]
    # an axis of size 1 that belongs to the value cannot be distinguished from an added one
    if params["dimensions"] is not None or [size for size in sizes if size != 1] != [value.sizes[axis] for axis in own]:
        return None
    left = iter(own)
    return replace(value, axes=tuple(None if size == 1 else next(left) for size in sizes))


def _squeezed(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    (value,) = inputs
    gone = {axis % len(value.axes) for axis in params["dimensions"]}
    if any(value.axes[axis] is not None for axis in gone):
        return None
    return replace(value, axes=tuple(axis for i, axis in enumerate(value.axes) if i not in gone))


def _expanded(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    value, shape, where = inputs[0], params["shape"], params["broadcast_dimensions"]
    if len(inputs) > 1 or tuple(shape[axis] for axis in where) != value.shape:
        return None
    if any(size != 1 for i, size in enumerate(shape) if i not in where):
        return None
    axes: list[int | None] = [None] * len(shape)
    for axis, place in zip(value.axes, where, strict=True):
        axes[place] = axis
    return replace(value, axes=tuple(axes))


def _added(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    """One number for each output channel: the bias."""
    del params
    value, other = inputs if isinstance(inputs[0], Deferred) else inputs[::-1]
    if isinstance(other, Deferred) or value.bias is not None or value.relu:
        return None
    if OUT not in value.axes or jnp.result_type(other) != value.kernel.dtype:
        return None
    place, out = value.axes.index(OUT), value.kernel.shape[-1]
    if jnp.shape(other) != tuple(out if axis == place else 1 for axis in range(len(value.axes))):
        return None
    return replace(value, bias=other.reshape(out))


def _activated(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    return replace(inputs[0], relu=True) if len(inputs) == 1 and is_relu(params["call_jaxpr"].jaxpr) else None


def _max_pooled(params: dict[str, Any], inputs: list[Any]) -> Deferred | None:
    (value,) = inputs
    window = tuple(2 if axis in (ROWS, COLUMNS) else 1 for axis in value.axes)
    same = tuple(params["window_dimensions"]) == tuple(params["window_strides"]) == window
    plain = set(params["base_dilation"]) | set(params["window_dilation"]) == {1} and not any(
        map(any, params["padding"])
    )
    both = ROWS in value.axes and COLUMNS in value.axes
    return replace(value, pool=True) if same and plain and both and not value.pool else None


def is_relu(jaxpr: Jaxpr) -> bool:
    """Whether a program is max(x, 0) and nothing else, possibly inside jit."""
    if len(jaxpr.eqns) != 1 or len(jaxpr.invars) != 1 or jaxpr.outvars != jaxpr.eqns[0].outvars:
        return False
    (equation,) = jaxpr.eqns
    if equation.primitive.name in ("jit", "pjit"):
        return equation.invars == jaxpr.invars and is_relu(equation.params["jaxpr"].jaxpr)
    if equation.primitive.name != "max" or equation.invars[0] is not jaxpr.invars[0]:
        return False
    other = equation.invars[1]
    return isinstance(other, Literal) and other.val == 0


_STEPS: dict[str, Callable] = {
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "broadcast_in_dim": _expanded,
    "add": _added,
    "custom_jvp_call": _activated,
    "reduce_window_max": _max_pooled,
}
