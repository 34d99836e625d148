"""Parts of a network that mixed precision computes in one piece, with gradients that store little.

Each function takes bfloat16 and computes in float32. Its gradient keeps the bfloat16 input only and computes the rest
again: on a GPU reading a value again costs more than computing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedbraid.lowering.attending import Attention, Labels, Layout
from fedbraid.lowering.attention import Given, Heads
from fedbraid.lowering.patterns import Graph, Node, biased
from fedbraid.lowering.row_norm import RowNorm
from fedbraid.lowering.smooth import activation, activation_back
from fedbraid.lowering.transposable import computed_by, linear

__all__ = [
    "IN_KERNELS",
    "add_normalise_rows",
    "attend",
    "elementwise",
    "log_sum_exp",
    "normalise_rows",
    "picked",
    "region",
]

Array = Any


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_jvp[Array], nondiff_argnums=(1,))
def log_sum_exp(x: Array, kernel: bool = False) -> Array:
    """log(sum(exp(x))) over the last axis, in float32.

    >>> log_sum_exp(jnp.zeros((1, 4), jnp.bfloat16)).tolist() == [float(jnp.log(4.0))]
    True
    """
    return _fast_log_sum_exp(x) if kernel else _plain_log_sum_exp(x)


def _plain_log_sum_exp(x: Array) -> Array:
    return jax.nn.logsumexp(_wide(x), axis=-1)


def _fast_log_sum_exp(x: Array) -> Array:
    from fedbraid.lowering.kernels.smooth import log_sum_exp_rows

    return log_sum_exp_rows(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


@log_sum_exp.defjvp
def _log_sum_exp_jvp(kernel, primals, tangents):
    (x,), (dx,) = primals, tangents
    total = computed_by(_fast_log_sum_exp, _plain_log_sum_exp)(x) if kernel else _plain_log_sum_exp(x)

    def softmax(given: tuple) -> Array:
        x, total = given
        return jnp.exp(_wide(x) - total[..., None])

    def along(given: tuple, dx: Array) -> Array:
        return jnp.sum(softmax(given) * dx, -1)

    def back(given: tuple, dy: Array) -> Array:
        return (softmax(given) * dy[..., None]).astype(given[0].dtype)

    return total, linear(along, back, (x, total), dx)


def picked(x: Array, at: Array, gather: Callable, clipped: bool = False) -> Array:
    """``gather(x, at)``: the value of each row of x [..., C] at one place. Its gradient is no scatter, which would need
    an array of zeros of the size of x.

    clipped: places outside of a row stand for its first and its last.
    """
    at = lax.stop_gradient(at)

    def back(at: Array, dy: Array) -> Array:
        at = at.reshape(*x.shape[:-1], 1)  # places outside of a row have no gradient
        at = jnp.clip(at, 0, x.shape[-1] - 1) if clipped else at
        hit = lax.broadcasted_iota(at.dtype, x.shape, x.ndim - 1) == at
        return jnp.where(hit, dy.reshape(*x.shape[:-1], 1), 0).astype(x.dtype)

    return linear(lambda at, x: gather(x, at), back, at, x)


def elementwise(function: Callable, x: Array, bias: Array | None = None, *, kernel: Callable | None = None) -> Array:
    """``function(x + bias)`` of a smooth function of single entries, in the dtype of x and computed in float32.

    kernel: the same function of operations that kernels have. With a bias, the function and its gradient are then one
        kernel each.

    >>> elementwise(jnp.tanh, jnp.zeros(2, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    def sums(given: tuple) -> Array:
        return _wide(given[0]) + given[1] if bias is not None else _wide(given[0])

    def plainly(given: tuple) -> Array:
        return function(sums(given)).astype(x.dtype)

    def along(given: tuple, changes: tuple) -> Array:
        return jax.jvp(function, (sums(given),), (sums(changes),))[1].astype(x.dtype)

    def back(given: tuple, dy: Array) -> tuple:
        given, dy = lax.optimization_barrier((given, dy))  # else XLA would store what both passes compute
        dx = jax.jvp(function, (sums(given),), (_wide(dy),))[1]
        rest = () if bias is None else (dx.reshape(-1, dx.shape[-1]).sum(0),)
        return (dx.astype(x.dtype), *rest)

    def fast_back(given: tuple, dy: Array) -> tuple:
        assert kernel is not None
        first, second = (array.reshape(-1, array.shape[-1]) for array in (given[0], dy))
        dx, dbias = activation_back(kernel, first, given[1], second)
        return dx.reshape(dy.shape), dbias

    def fast(given: tuple) -> Array:
        assert kernel is not None
        return activation(kernel, given[0].reshape(-1, x.shape[-1]), given[1]).reshape(x.shape)

    in_kernels = kernel is not None and bias is not None
    forward = computed_by(fast, plainly) if in_kernels else plainly
    backward = computed_by(fast_back, back) if in_kernels else back
    run = jax.custom_jvp(forward)
    run.defjvp(lambda primals, tangents: (forward(*primals), linear(along, backward, primals[0], tangents[0])))
    return run((x,) if bias is None else (x, _wide(bias)))


@jax.custom_jvp
def _erf(x: Array) -> Array:
    """erf with an error of 1.5e-7 (Abramowitz and Stegun, 7.1.26), of operations that kernels have."""
    t = 1 / (1 + 0.3275911 * jnp.abs(x))
    total = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return jnp.sign(x) * (1 - total * jnp.exp(-x * x))


_erf.defjvps(lambda dx, _, x: 2 / math.sqrt(math.pi) * jnp.exp(-x * x) * dx)


@jax.custom_jvp
def _tanh(x: Array) -> Array:
    from fedbraid.lowering.kernels.smooth import tanh

    return tanh(x)


_tanh.defjvps(lambda dx, y, x: (1 - y * y) * dx)
IN_KERNELS: dict[str, Callable[..., Array]] = {"erf": _erf, "erfc": lambda x: 1 - _erf(x), "tanh": _tanh}


def region(
    last: Node, source: Node, instead: Mapping[str, Callable[..., Array]] = MappingProxyType({})
) -> Callable[[Array], Array]:
    """The function of single entries that the nodes between ``source`` and ``last`` compute.

    instead: functions for some operations, by name.
    """

    def run(x: Array) -> Array:
        known: dict[int, Array] = {id(source): x}

        def value(node: Node) -> Array:
            if node.name == "literal":
                return node.atom.val
            if id(node) not in known and (number := node.number()) is not None:
                known[id(node)] = node.aval.dtype.type(number)  # an array of it would not have the shape of x
            if id(node) not in known:
                primitive, args = node.equation.primitive, [value(arg) for arg in node.args]
                bind = partial(primitive.bind, **primitive.get_bind_params(node.params))
                known[id(node)] = instead.get(node.name, bind)(*args)
            return known[id(node)]

        return value(last)

    return run


def normalise_rows(x: Array, scale: Array | None, shift: Array | None, norm: RowNorm) -> Array:
    """A layer norm or root mean square norm over the last axis, as a kernel."""
    from fedbraid.lowering.kernels.rows import normalise_rows as kernel

    size = x.shape[-1]
    weights = jnp.ones(size) if scale is None else scale, jnp.zeros(size) if shift is None else shift
    return kernel(x.reshape(-1, size), weights, norm).reshape(x.shape)


def add_normalise_rows(
    r: Array, a: Array, bias: Array | None, scale: Array | None, shift: Array | None, norm: RowNorm
) -> tuple[Array, Array]:
    """``x = r + a + bias`` and a norm of x over the last axis, as a kernel. Both have the shape of r."""
    from fedbraid.lowering.kernels.rows import add_normalise_rows as kernel

    size = r.shape[-1]
    weights = jnp.ones(size) if scale is None else scale, jnp.zeros(size) if shift is None else shift
    bias = jnp.zeros(size) if bias is None else bias
    x, y = kernel(r.reshape(-1, size), a.reshape(-1, size), bias, weights, norm)
    return x.reshape(r.shape), y.reshape(r.shape)


def attend(
    found: Attention, of: Graph, read: Callable[[Node], Array], narrow: Callable[[Array], Array]
) -> Array | None:
    """The value of an attention as a kernel, with its axes in the order of ``found.result``; None if it is too long.

    narrow: rounds queries, keys and values. Their bias is not rounded.
    """
    from fedbraid.lowering.kernels.attention import attend as kernel
    from fedbraid.lowering.kernels.attention import fits

    sizes = _sizes(found)
    b, h = (*found.batch, None, None)[:2]
    b, h = (b, h) if h is not None else (None, b) if len(found.batch) == 1 and b is not None else (b, h)
    t, s, g, d = (sizes.get(x, 1) for x in (found.rows, found.columns, found.shared, found.inner))
    value = dict(zip(found.value.labels, found.value.node.shape, strict=True))["value"]
    if value != d or not fits(t, s, d) or d < 16:
        return None
    heads = sizes.get(h, 1)
    packed = _packed(found, (b, h))
    if packed is None:
        q = _ordered(narrow(read(found.query.node)), found.query.labels, (b, found.rows, h, found.shared, found.inner))
        inner = next(x for x in found.key.labels if x is not None and x[0] == "sum")
        k = _ordered(narrow(read(found.key.node)), found.key.labels, (b, found.columns, h, inner))
        v = _ordered(narrow(read(found.value.node)), found.value.labels, (b, found.columns, h, "value"))
        sources: tuple = (q.reshape(*q.shape[:2], heads * g, d), k, v)
        places, bias = ((0, 0), (1, 0), (2, 0)), None
    else:
        base, places = packed
        shape = (*base.shape[:2], 3 * heads, d)
        x, added = biased(base.args[0], of) if base.name == "reshape" else (base, None)
        if added is None or math.prod(added.shape) != math.prod(shape[2:]):  # a bias that heads share is none
            x, added = base, None
        sources = (narrow(read(x)).reshape(shape),)
        bias = None if added is None else _wide(read(added)).reshape(shape[2:])
    mask, kept = (_flags(found, layout, read, (b, h)) for layout in (found.mask, found.kept))
    how = Heads(places, heads * g, heads, found.scale, found.causal, found.filler, found.factor, found.added)
    out = kernel(sources, Given(bias, mask, kept), how)
    out = out.reshape(*out.shape[:2], heads, g, d)
    return _placed(out, (b, found.rows, h, found.shared, "value"), found.result)


def _sizes(found: Attention) -> dict[Any, int]:
    sizes: dict[Any, int] = {}
    for layout in (found.key, found.query):
        sizes |= {x: n for x, n in zip(layout.labels, layout.node.shape, strict=True) if x is not None}
    return sizes


def _ordered(x: Array, labels: Labels, wanted: Labels) -> Array:
    """x with its axes in the order of ``wanted``; labels that it does not have become axes of size 1."""
    there = [x for x in wanted if x is not None and x in labels]
    x = x.reshape([n for n, label in zip(x.shape, labels, strict=True) if label is not None])
    labels = tuple(label for label in labels if label is not None)
    x = x.transpose([labels.index(label) for label in there])
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if label in there else 1 for label in wanted])


def _placed(x: Array, labels: Labels, wanted: Labels) -> Array:
    """x with its axes in the order of ``wanted``, where None is an axis of size 1."""
    named = tuple(label if n > 1 else None for label, n in zip(labels, x.shape, strict=True))
    return _ordered(x, named, wanted)


def _flags(found: Attention, layout: Layout | None, read: Callable, batch: tuple) -> Array | None:
    """Booleans over the scores as int8 [B or 1, heads or 1, T or 1, S or 1]."""
    if layout is None:
        return None
    node, labels = layout
    if node.name == "constant":
        values = jnp.asarray(node.value)
    else:
        values = ~read(node.args[0]) if node.name == "not" else read(node)
    b, h = batch
    mask = _ordered(values.astype(jnp.int8), labels, (b, h, found.shared, found.rows, found.columns))
    if max(mask.shape[1:3]) > 1:  # every head of queries has its own, those that share keys as well
        sizes = _sizes(found)
        mask = jnp.broadcast_to(mask, (mask.shape[0], sizes.get(h, 1), sizes.get(found.shared, 1), *mask.shape[3:]))
    return mask.reshape(mask.shape[0], -1, *mask.shape[3:])


def _packed(found: Attention, batch: tuple) -> tuple[Node, tuple] | None:
    """One array that holds queries, keys and values, and their first heads; None if there is none.

    It has the axes [B, T, (3,) heads, size], or [B, T, 3 heads size].
    """
    pieces = [piece for layout in (found.query, found.key, found.value) if (piece := _piece(layout)) is not None]
    if found.shared is not None or len(pieces) < 3:
        return None
    b, h = batch
    inner = next(x for x in found.key.labels if x is not None and x[0] == "sum")
    orders = [(b, found.rows, h, found.inner), (b, found.columns, h, inner), (b, found.columns, h, "value")]
    if any(piece.order != order for piece, order in zip(pieces, orders, strict=True)):
        return None
    base, starts, sizes = pieces[0].base, [piece.first for piece in pieces], _sizes(found)
    whole = math.prod(base.shape[2:]) == 3 * sizes[h] * sizes[found.inner]
    if any(piece.base is not base for piece in pieces) or sorted(starts) != [0, sizes[h], 2 * sizes[h]] or not whole:
        return None
    return base, tuple((0, start) for start in starts)


class _Piece(NamedTuple):
    """Some heads of an array, from the ``first`` on, and the labels of a factor in the order that the array has."""

    base: Node
    first: int
    order: Labels


def _piece(layout: Layout) -> _Piece | None:
    """The part of an array that a factor of attention is, if it is a slice of it."""
    node, labels = layout
    while node.name in ("reshape", "squeeze", "expand_dims", "transpose"):
        before = node.args[0]
        if node.name == "transpose":
            order = node.params["permutation"]
            labels = tuple(labels[order.index(axis)] for axis in range(len(labels)))
        elif [n for n in node.shape if n != 1] == [n for n in before.shape if n != 1]:
            left = iter([label for label in labels if label is not None])
            labels = tuple(None if n == 1 else next(left) for n in before.shape)
        elif len(before.shape) == 3 and len(node.shape) == 4 and node.shape[:2] == before.shape[:2]:
            found, size = _slice(before), node.shape[-1]  # of [B, T, heads size]
            if found is None or len(found[0].shape) != 3 or found[1] % size:
                return None
            return _Piece(found[0], found[1] // size, tuple(label for label in labels if label is not None))
        else:
            return None
        node = before
    found = _slice(node)
    if found is None or len(found[0].shape) not in (4, 5) or (len(found[0].shape) == 5 and node.shape[2] != 1):
        return None
    base, first = found
    heads = base.shape[3] if len(base.shape) == 5 else 1
    return _Piece(base, first * heads, tuple(label for label in labels if label is not None))


def _slice(node: Node) -> tuple[Node, int] | None:
    """(array, start) of a slice along the third axis of an array without axes of size 1."""
    if node.name == "slice":
        (base,), (starts, limits) = node.args, (node.params["start_indices"], node.params["limit_indices"])
        if node.params["strides"] is not None and set(node.params["strides"]) != {1}:
            return None
        divided = [i for i, n in enumerate(base.shape) if (starts[i], limits[i]) != (0, n)]
        start = starts[2] if len(base.shape) > 2 else 0
    elif node.name == "split":
        (base,), divided = node.args, [node.params["axis"]]
        start = sum(node.params["sizes"][: node.index])
    else:
        return None
    return None if divided != [2] or 1 in base.shape else (base, int(start))
