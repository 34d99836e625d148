"""A local step, run on matrices that are stored as rows.

The jaxpr of a step is interpreted equation by equation. A matrix of the carry is a symbolic sum, W0 + X' D (see
:mod:`fedbraid.lowering.rows`). Products over a batch that have the shape of such a matrix stay symbolic, too, and so do
linear operations on both. Products *with* such a matrix are computed from W0, X and D:

    x W = x W0 + (x X') D        and        dy W' = dy W0' + (dy D') X.

Any other operation on a sum first computes its value and marks its matrices and products as seen. Rows then save
nothing, and :mod:`fedbraid.lowering.grown` stores that matrix whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedbraid.lowering import kernels
from fedbraid.lowering.rows import Rows, Site, filled

__all__ = ["Leaf", "Pair", "Sum", "follow_step", "run_step", "value_of"]

Array = Any


@dataclass
class Pair:
    """One product over a batch, ``a' b``, that is kept symbolic."""

    a: Array
    b: Array
    precision: Any  # of the product when it was traced
    seen: list[bool]  # one entry for each time that its value was needed

    def converted(self, dtype: Any) -> Pair:
        """The product in another dtype. The smaller factor is converted: it is then scaled without rounding."""
        if self.a.size < self.b.size:
            return replace(self, a=self.a.astype(dtype))
        return replace(self, b=self.b.astype(dtype))

    def scaled(self, by: Any) -> Pair:
        """The product times a scalar: scales the factor of the wider dtype, or the smaller factor if both are equal."""
        same, wide = self.a.dtype == self.b.dtype, jnp.promote_types(self.a.dtype, self.b.dtype)
        into_a = self.a.size < self.b.size if same else self.a.dtype == wide
        return replace(self, a=self.a * by) if into_a else replace(self, b=self.b * by)


@dataclass
class Leaf:
    """A matrix of the carry while a step is interpreted."""

    site: Site
    rows: Rows
    count: Array
    seen: bool = False
    read: list[Array] = field(default_factory=list)  # values that were computed from its rows
    written: Array = None  # the rows that were already appended to left


@dataclass
class Sum:
    """The symbolic sum ``base W0 + old X' D + new products``. ``turned``: W0 and X' D are transposed."""

    shape: tuple[int, ...]
    leaf: Leaf | None
    base: int  # 0 or 1
    old: Any  # the factor of the rows so far; None if they are not part of the sum
    new: list[Pair]
    turned: bool = False
    dtype: Any = None  # of the value if it was converted

    @property
    def itself(self) -> bool:
        """Whether the sum is an unchanged matrix of the carry."""
        return self.base == 1 and self.unscaled and not self.new

    @property
    def unscaled(self) -> bool:
        """Whether the rows so far have the factor 1."""
        return isinstance(self.old, float) and self.old == 1

    def transposed(self) -> Sum:
        new = [replace(pair, a=pair.b, b=pair.a) for pair in self.new]
        return replace(self, shape=self.shape[::-1], new=new, turned=not self.turned)

    def scaled(self, by: Any) -> Sum | None:
        if self.base:
            return None
        return replace(
            self, old=None if self.old is None else by * self.old, new=[pair.scaled(by) for pair in self.new]
        )

    def plus(self, other: Sum, sign: int) -> Sum | None:
        base = self.base + sign * other.base
        apart = self.leaf and other.leaf and (self.leaf is not other.leaf or self.turned != other.turned)
        rounded = any(each.leaf and each.dtype is not None for each in (self, other))
        if apart or rounded or base not in (0, 1):
            return None
        owner = self if self.leaf else other
        old = [by for by in (self.old, other.old if other.old is None else sign * other.old) if by is not None]
        new = [*self.new, *(pair.scaled(sign) for pair in other.new)]
        return Sum(self.shape, owner.leaf, base, sum(old) if old else None, new, owner.turned)

    def converted(self, dtype: Any) -> Sum | None:
        """The sum in another dtype: of an unchanged matrix, or of products, one of whose factors is converted."""
        if self.itself and self.dtype is None:
            return replace(self, dtype=dtype)
        return None if self.leaf else replace(self, dtype=dtype, new=[pair.converted(dtype) for pair in self.new])

    def value(self) -> Array:
        """Computes the sum and marks all its terms as seen."""
        total = self._total()
        return total if self.dtype is None else total.astype(self.dtype)

    def _total(self) -> Array:
        total: Any = 0
        for pair in self.new:
            pair.seen.append(True)
            total = total + jnp.matmul(pair.a.T, pair.b, precision=pair.precision)
        if self.leaf is None:
            return total
        self.leaf.seen = True
        site = self.leaf.site
        part = site.start * self.base
        if self.old is not None:
            part = part + self.old * site.added(filled(self.leaf.rows, self.leaf.count))
        return total + (part.T if self.turned else part)


def value_of(value: Any) -> Array:
    """The array itself, or the computed value of a sum."""
    return value.value() if isinstance(value, Sum) else value


# --- one step --------------------------------------------------------------------------------------------------------


def run_step(
    step: ClosedJaxpr, sites: tuple[Site, ...], slot: Array, k: Array, rest: list[Array], rows: tuple[Rows, ...]
) -> tuple[list[Array], tuple[Rows, ...]]:
    """One step of one client. Returns the carry's other leaves, and the rows, those of this step included."""
    # A lane whose queue is empty keeps stepping a client that has ended. Its results are discarded.
    leaves = [Leaf(s, each, jnp.minimum(k * s.rows, s.most)) for s, each in zip(sites, rows, strict=True)]
    outputs = follow_step(step, slot, k, rest, leaves)
    after = tuple(_appended(leaf, outputs.pop(leaf.site.leaf - i)) for i, leaf in enumerate(leaves))
    return [value_of(value) for value in outputs], after


def follow_step(step: ClosedJaxpr, slot: Array, k: Array, rest: Iterable[Array], leaves: list[Leaf]) -> list[Any]:
    """The outputs of a step, arrays or sums, in the order of the carry's leaves."""
    inputs = list(rest)
    for leaf in leaves:
        inputs.insert(leaf.site.leaf, Sum(leaf.site.start.shape, leaf, 1, 1.0, []))
    shapes = {value.shape for value in inputs if isinstance(value, Sum)}
    return _follow(step.jaxpr, step.consts, [slot, k, *inputs], shapes | {s[::-1] for s in shapes}, leaves)


def _appended(leaf: Leaf, value: Sum) -> Rows:
    """The rows after a step that returns ``value`` for this matrix."""
    site = leaf.site
    left, right = leaf.rows
    if not value.unscaled:
        right = right * value.old
    pairs = [(pair.b, pair.a) if site.turned else (pair.a, pair.b) for pair in value.new]
    new = [jnp.concatenate([pair[i].astype(a.dtype) for pair in pairs]) for i, a in enumerate((left, right))]
    if not kernels.available():
        at = (leaf.count, jnp.zeros_like(leaf.count))
        return Rows(lax.dynamic_update_slice(left, new[0], at), lax.dynamic_update_slice(right, new[1], at))
    from fedbraid.lowering.kernels.grown import added

    if len(pairs) > 1 or pairs[0][0] is not leaf.written:
        left = added(left, new[0], leaf.count, tuple(leaf.read))
    return Rows(left, added(right, new[1], leaf.count, tuple(leaf.read)))


# --- the interpreter -------------------------------------------------------------------------------------------------


def _follow(jaxpr: Jaxpr, consts: Iterable[Any], inputs: Iterable[Any], shapes: set, leaves: list[Leaf]) -> list[Any]:
    """Interpret a jaxpr; sums of products of the given shapes stay symbolic where possible."""
    environment = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))
    scalars: dict[Any, Any] = {}  # for each variable that is a broadcast scalar: the scalar

    def known(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    def number(atom: Any) -> Any:
        """A scalar factor, or None."""
        if not isinstance(atom, Literal) and atom in scalars:
            return scalars[atom]
        value = known(atom)
        return value if not isinstance(value, Sum) and jnp.ndim(value) == 0 else None

    def summand(atom: Any) -> Any:
        value = known(atom)
        for leaf in leaves:
            if value is leaf.site.start:
                return Sum(value.shape, leaf, 1, None, [])
        return value

    for equation in jaxpr.eqns:
        name, params, atoms = equation.primitive.name, equation.params, equation.invars
        values = [known(atom) for atom in atoms]
        sums = [isinstance(value, Sum) for value in values]
        result: Any = None
        if name in ("jit", "pjit") and (any(sums) or _has_products(params["jaxpr"].jaxpr, shapes)):
            inside = params["jaxpr"]
            outputs = _follow(inside.jaxpr, inside.consts, values, shapes, leaves)
            environment.update(zip(equation.outvars, outputs, strict=True))
            continue
        if name == "dot_general":
            result = (_product if any(sums) else partial(_pair, shapes))(equation, *values)
        elif any(sums):
            result = _linear(name, params, values, [number(a) for a in atoms], [summand(a) for a in atoms])
        if result is not None:
            environment[equation.outvars[0]] = result
            continue
        outputs = equation.primitive.bind(
            *(value_of(value) for value in values), **equation.primitive.get_bind_params(params)
        )
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        environment.update(zip(equation.outvars, outputs, strict=True))
        if name == "broadcast_in_dim" and len(values) == 1 and jnp.ndim(values[0]) == 0:
            scalars[equation.outvars[0]] = values[0]
    return [known(atom) for atom in jaxpr.outvars]


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _has_products(jaxpr: Jaxpr, shapes: set) -> bool:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and _shape(equation.outvars[0]) in shapes:
            return True
        if equation.primitive.name in ("jit", "pjit") and _has_products(equation.params["jaxpr"].jaxpr, shapes):
            return True
    return False


def _linear(name: str, params: dict[str, Any], values: list, numbers: list, summands: list) -> Sum | None:
    """The symbolic result of a linear operation on sums, or None if it must be computed."""
    if name == "transpose" and tuple(params["permutation"]) == (1, 0):
        return values[0].transposed()
    if name == "neg":
        return values[0].scaled(-1.0)
    if name in ("mul", "div"):
        value, by = (values[0], numbers[1]) if isinstance(values[0], Sum) else (values[1], numbers[0])
        if by is None or (name == "div" and value is not values[0]):
            return None
        return value.scaled(1 / by if name == "div" else by)
    if name in ("add", "sub", "add_any"):
        a, b = summands
        if isinstance(a, Sum) and isinstance(b, Sum) and a.shape == b.shape:
            return a.plus(b, -1 if name == "sub" else 1)
    if name in ("copy", "copy_p"):
        return values[0]
    if name == "convert_element_type":
        return values[0].converted(params["new_dtype"])
    return None


def _exact(precision: Any) -> bool:
    return kernels.available() and ("HIGHEST" in str(precision) or "F32_F32_F32" in str(precision))


def _pair(shapes: set, equation, a, b) -> Sum | None:
    """The symbolic form of a product over a batch with the shape of a matrix, or None if it must be computed."""
    (contracting, batch), shape = equation.params["dimension_numbers"], _shape(equation.outvars[0])
    (first, second), precision = contracting, equation.params["precision"]
    if any(batch) or len(first) != 1 or a.ndim != 2 or b.ndim != 2 or shape not in shapes or _exact(precision):
        return None
    # Sum.value computes this product with jnp.matmul, whose result has the promoted dtype. On a GPU with bfloat16 the
    # inputs of a layer are bfloat16 and the gradients of its outputs float32, so the result is float32. Two bfloat16
    # factors with a float32 result would be another operation.
    if jnp.promote_types(a.dtype, b.dtype) != equation.outvars[0].aval.dtype:
        return None
    a, b = (m if axis == 0 else m.T for m, axis in zip((a, b), (first[0], second[0]), strict=True))
    return Sum(shape, None, 0, None, [Pair(a, b, precision, [])])


def _product(equation, a, b) -> Array | None:
    """The product of an array with an unchanged matrix of the carry, or None for other products."""
    (contracting, batch), precision = equation.params["dimension_numbers"], equation.params["precision"]
    (first, second) = contracting
    if any(batch) or len(first) != 1 or (isinstance(a, Sum) and isinstance(b, Sum)) or _exact(precision):
        return None
    matrix, other = (a, b) if isinstance(a, Sum) else (b, a)
    axis, along = (first[0], second[0]) if matrix is a else (second[0], first[0])
    if not matrix.itself or other.ndim != 2:
        return None
    leaf = matrix.leaf
    assert leaf is not None
    x = other if along == 1 else other.T
    long = 1 if leaf.site.turned else 0
    y = (_over_long if axis == (1 - long if matrix.turned else long) else _over_short)(leaf, x, precision)
    leaf.read.append(y)
    y = y.astype(equation.outvars[0].aval.dtype)
    return y.T if matrix is a else y


def _over_long(leaf: Leaf, x: Array, precision: Any) -> Array:
    """``x W`` of x [b, the longer axis]."""
    base, (left, right) = leaf.site.base, leaf.rows
    given, x = x, x.astype(left.dtype)
    start = jnp.matmul(x, base, precision=precision, preferred_element_type=right.dtype)
    if kernels.available():
        from fedbraid.lowering.kernels.grown import inner, spread

        leaf.written, (shares, left) = given, inner(x, left, leaf.count)
        leaf.rows = Rows(left, right)
        return start + spread(shares, right, leaf.count)
    there = filled(leaf.rows, leaf.count)
    return start + jnp.matmul(jnp.matmul(x, there.left.T, precision=precision), there.right, precision=precision)


def _over_short(leaf: Leaf, dy: Array, precision: Any) -> Array:
    """``dy W'`` of dy [b, the shorter axis]."""
    base, (left, right) = leaf.site.base, leaf.rows
    start = jnp.matmul(dy.astype(left.dtype), base.T, precision=precision, preferred_element_type=right.dtype)
    if kernels.available():
        from fedbraid.lowering.kernels.grown import meets, outer

        return outer(start, meets(dy, right, leaf.count, left.dtype), left, leaf.count)
    there = filled(leaf.rows, leaf.count)
    return start + jnp.matmul(jnp.matmul(dy, there.right.T, precision=precision), there.left, precision=precision)
