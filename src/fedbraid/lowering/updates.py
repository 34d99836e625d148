"""The end of a step of gradient descent, ``w - rate * gradient``, in fewer passes over a GPU's memory.

- A matrix whose gradient is a product over the batch, ``x' y``: one kernel computes the product and writes the new
  weights and their copy in bfloat16. The gradient is not stored.
- An embedding, whose gradient adds some rows to an array of zeros: the rows are added to the weights themselves.
- Small leaves, such as biases and the scales of norms: one kernel updates all of them, instead of one each.

The values differ from those of the plain step by rounding errors only: the gradient of a matrix is not rounded to
bfloat16, and sums are in another order. Leaves that a step changes in any other way are computed as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedbraid.lowering.equations import Equations
from fedbraid.lowering.transposable import linear_p

__all__ = ["Updates", "find_updates", "opened"]

Array = Any
SMALL = 4096  # entries of a leaf that is updated together with others
TOGETHER = 32  # leaves that one kernel updates
LEAST = 64  # rows, columns and batch of a product that is worth a kernel
ROUNDED = (jnp.float32, jnp.bfloat16)  # dtypes of a gradient whose rounding is left out


class Product(NamedTuple):
    """The gradient of a matrix is ``x' y``, or its transpose ``y' x``: then the two are exchanged."""

    leaf: int
    scale: Any
    x: Any
    y: Any


class Scatter(NamedTuple):
    """The gradient of an embedding: the equation that adds rows to zeros."""

    leaf: int
    scale: Any
    equation: Any


class Small(NamedTuple):
    """A small leaf and its gradient: as many entries of an array as the leaf has, from ``first`` on."""

    leaf: int
    scale: Any
    array: Any
    first: int


@dataclass(frozen=True)
class Updates:
    """How the leaves of a step's carry are updated, and the equations that are then not needed."""

    products: tuple[Product, ...] = ()
    scatters: tuple[Scatter, ...] = ()
    small: tuple[Small, ...] = ()
    replaced: frozenset[Any] = frozenset()  # results of the equations that are not needed

    def run(self, read: Callable[[Any], Any], leaves: Sequence[Array]) -> tuple[dict[int, Array], dict[int, Array]]:
        """New leaves and their copies in bfloat16, by index. ``read``: the value of a variable of the step."""
        new: dict[int, Array] = {}
        halves: dict[int, Array] = {}
        if self.products:
            from fedbraid.lowering.kernels.updates import add_product

            for leaf, scale, *factors in self.products:
                x, y = (read(atom).reshape(-1, atom.aval.shape[-1]) for atom in factors)
                new[leaf], halves[leaf] = add_product(leaves[leaf], x, y, _number(scale, read))
        for leaf, scale, equation in self.scatters:
            _, places, rows = equation.invars
            primitive, params = equation.primitive, equation.primitive.get_bind_params(equation.params)
            new[leaf] = primitive.bind(leaves[leaf], read(places), read(rows) * _number(scale, read), **params)
        for start in range(0, len(self.small), TOGETHER):
            from fedbraid.lowering.kernels.updates import add_scaled

            some = self.small[start : start + TOGETHER]
            changes = [(read(one.array), one.first, _number(one.scale, read)) for one in some]
            found = add_scaled([leaves[one.leaf] for one in some], changes)
            new.update(zip((one.leaf for one in some), found, strict=True))
        return new, halves


def opened(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program that will not be differentiated, with the contents of its calls in place of them.

    Equations whose results are not needed are left out.

    >>> program = jax.make_jaxpr(jax.jit(jax.nn.relu))(1.0)
    >>> [equation.primitive.name for equation in opened(program).jaxpr.eqns]
    ['max']
    """
    whole = jax.make_jaxpr(lambda *args: _run(program.jaxpr, program.consts, args))(*program.in_avals)
    needed = Equations(whole.jaxpr).needed
    return ClosedJaxpr(whole.jaxpr.replace(eqns=[e for e in whole.jaxpr.eqns if needed(e)]), whole.consts)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values, inner = [read(atom) for atom in equation.invars], _contents(equation)
        if inner is None:
            found = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
            found = found if equation.primitive.multiple_results else [found]
        else:
            found = _run(inner.jaxpr, inner.consts, values)
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _contents(equation: Any) -> ClosedJaxpr | None:
    """The program that an equation calls, if nothing else is to be known about it."""
    if equation.primitive is linear_p:
        return jax.make_jaxpr(equation.params["forward"])(*(atom.aval for atom in equation.invars))
    return equation.params.get(
        {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}.get(equation.primitive.name)
    )


def find_updates(step: ClosedJaxpr, before: int, halves: Sequence[int]) -> Updates:
    """The updates of a step ``(..., *leaves) -> leaves``; ``before`` inputs come before the leaves.

    halves: leaves that also have a copy in bfloat16.

    >>> import jax
    >>> step = jax.make_jaxpr(lambda w, b, g: [w - 0.1 * g, b * 0.9, g])(*[jnp.ones(3)] * 3)
    >>> find_updates(step, 0, ()).small  # a single one has no others to be updated with
    ()
    """
    return _Finder(step, before, halves).updates()


class _Finder(Equations):
    def __init__(self, step: ClosedJaxpr, before: int, halves: Sequence[int]) -> None:
        super().__init__(step.jaxpr)
        self.leaves, self.halves = self.jaxpr.invars[before:], set(halves)

    def updates(self) -> Updates:
        products, scatters, small, replaced = [], [], [], set()
        few: list[tuple[Small, list[Any]]] = []
        for i, out in enumerate(self.jaxpr.outvars):
            found = self.descent(i, out)
            if found is None:
                continue
            scale, gradient, ends = found
            product, scatter = self.product(i, gradient), self.scatter(gradient)
            if product is not None:
                products.append(Product(i, scale, *product[0]))
                replaced.update(ends, product[1])
            elif scatter is not None:
                scatters.append(Scatter(i, scale, scatter))
                replaced.update(ends, scatter.outvars)
            elif 0 < self.leaves[i].aval.size <= SMALL:
                few.append((Small(i, scale, *self.entries(gradient)), ends))
        if len(few) > 1:
            small = [one for one, _ in few]
            replaced.update(v for _, ends in few for v in ends)
        return Updates(tuple(products), tuple(scatters), tuple(small), frozenset(replaced))

    def descent(self, i: int, out: Any) -> tuple[Any, Any, list[Any]] | None:
        """(-rate, gradient, results of the equations) of an output that is ``leaf - rate * gradient``."""
        if i >= len(self.leaves) or self.leaves[i].aval.dtype != jnp.float32:
            return None
        last = self.only(out, "sub")
        if last is None or last.invars[0] is not self.leaves[i]:
            return None
        product = self.only(last.invars[1], "mul")
        if product is None:
            return None
        for rate, gradient in (product.invars, product.invars[::-1]):
            scalar = self.scalar(rate)
            if scalar is not None and not isinstance(gradient, Literal) and gradient.aval.shape == out.aval.shape:
                return scalar, gradient, [out, *product.outvars]
        return None

    def scalar(self, atom: Any) -> Any:
        """The number that an array repeats: a literal or a variable, or None."""
        if isinstance(atom, Literal):
            return atom if np.ndim(atom.val) == 0 else None
        if atom.aval.shape == () and atom.aval.dtype == jnp.float32:
            return atom
        equation = self.made_by.get(atom)
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return None
        return self.scalar(equation.invars[0]) if np.ndim(equation.invars[0].aval) == 0 else None

    def product(self, i: int, gradient: Any) -> tuple[tuple[Any, Any], list[Any]] | None:
        """The factors of a gradient that is a product over the batch, and the results of its equations."""
        passed, turned = [], False
        while (equation := self.only(gradient, "convert_element_type", "transpose")) is not None:
            turned ^= equation.primitive.name == "transpose" and tuple(equation.params["permutation"]) == (1, 0)
            passed.append(gradient)
            gradient = equation.invars[0]
        equation = self.only(gradient, "dot_general")
        rounded = all(v.aval.dtype in ROUNDED for v in (*passed, gradient))
        if equation is None or i not in self.halves or len(gradient.aval.shape) != 2 or not rounded:
            return None
        (over, batch), (x, y) = equation.params["dimension_numbers"], equation.invars
        leading = all(
            tuple(axes) == tuple(range(len(atom.aval.shape) - 1)) for axes, atom in zip(over, (x, y), strict=True)
        )
        narrow = all(atom.aval.dtype == jnp.bfloat16 for atom in (x, y))
        sizes = (*gradient.aval.shape, x.aval.size // x.aval.shape[-1])
        if any(batch) or not leading or not narrow or min(sizes) < LEAST:
            return None
        return ((y, x) if turned else (x, y)), [*passed, gradient]

    def entries(self, gradient: Any) -> tuple[Any, int]:
        """The array that holds a small gradient, and where it starts there."""
        array, whole = gradient, gradient.aval.size
        while (equation := self.only(array, "reshape", "squeeze", "slice")) is not None:
            if equation.primitive.name == "slice":
                if equation.invars[0].aval.dtype != jnp.float32 or (first := _first(equation)) is None:
                    break
                return equation.invars[0], first
            array = equation.invars[0]
        return (array if array.aval.size == whole else gradient), 0

    def scatter(self, gradient: Any) -> Any:
        """The equation of a gradient that adds rows to zeros, or None."""
        equation = self.only(gradient, "scatter-add")
        zeros = None if equation is None else self.made_by.get(equation.invars[0])
        if zeros is None or zeros.primitive.name != "broadcast_in_dim":
            return None
        number = zeros.invars[0]
        return equation if isinstance(number, Literal) and number.val == 0 else None


def _first(equation: Any) -> int | None:
    """Where the entries of a slice start in the flat array, if they are next to each other there."""
    (source,), start, limit = equation.invars, equation.params["start_indices"], equation.params["limit_indices"]
    if equation.params["strides"] is not None:
        return None
    sizes = np.subtract(limit, start)
    parts = [axis for axis, n in enumerate(source.aval.shape) if sizes[axis] != n]
    if parts and any(sizes[axis] != 1 for axis in range(parts[-1])):
        return None
    return int(np.ravel_multi_index(start, source.aval.shape))


def _number(scale: Any, read: Callable[[Any], Any]) -> Any:
    """Minus the rate."""
    return -scale.val if isinstance(scale, Literal) else -read(scale)
