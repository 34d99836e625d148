"""Clients' large matrices as the shared one plus what their own steps added.

A step of gradient descent on a dense layer adds ``x' (-rate dy)`` to its weights: a product of the batch's inputs and
of its outputs' gradients, of as many rows as the batch has examples. A client of ten steps of twenty examples has moved
its 9,216 x 128 weights by 200 such rows. Kept as these rows, the weights W of each client need never be written: with X
and D the rows so far, W = W0 + X' D, and what a step asks of W is

    x W = x W0 + (x X') D        and        dy W' = dy W0' + (dy D') X,

in which W0 is the same for all clients, so that their products with it are one. On a GPU, where reading and writing
every client's own weights is what a dense layer costs, this is a fraction of the traffic as long as steps are few.

Nothing here knows of gradient descent. The program of a client's step is followed equation by equation: a matrix that
starts as the same one for all, that is used in products alone, and of which the step returns a linear combination of
itself and of products over a batch, qualifies. So do FedAvg's, FedProx's and anybody's own plain local steps; a
matrix that is seen in any other way, by momentum, a norm or a cast, is kept whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as Constant

from fedbraid.core import Algorithm
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import ClientData, Fold, LocalWork
from fedbraid.lowering import kernels
from fedbraid.simulation.plan import Plan

__all__ = ["MATRICES", "Extent", "Growth", "Matrices", "explain_growth", "extent_of", "grow"]

PyTree = Any
Array = Any
Matrices = Literal["auto", "grown", "whole"]
MATRICES = ("auto", "grown", "whole")
WORTH = 2e8  # bytes of traffic a step that are worth the launch of some more kernels


class Rows(NamedTuple):
    """What one client's steps added to a matrix, ``left' right``; rows beyond those so far hold anything."""

    left: Array  # [R, the longer axis]
    right: Array  # [R, the other]


@dataclass(frozen=True)
class Site:
    """One matrix of a carry that grows by rows."""

    leaf: int  # its place among the carry's leaves
    rows: int  # that a step adds
    most: int  # rows of the longest client
    dtype: Any  # of left
    start: Array  # what all clients start with
    base: Array  # the same with its longer axis first, as products take it

    @property
    def turned(self) -> bool:
        """Whether the longer axis is the second."""
        return self.start.shape[0] < self.start.shape[1]

    def empty(self, lanes: int) -> Rows:
        """Room for the rows of as many clients."""
        long, short = self.base.shape
        room = jnp.zeros
        if kernels.available():
            from fedbraid.lowering.kernels.grown import empty as room
        return Rows(room((lanes, self.most, long), self.dtype), room((lanes, self.most, short), self.start.dtype))

    def added(self, rows: Rows) -> Array:
        """What all of some rows add to the start."""
        first, second = self._factors(rows)
        total = jnp.matmul(first.T, second, preferred_element_type=self.start.dtype)
        return lax.optimization_barrier(total)  # several read it, and the compiler would compute it for each

    def added_on(self, rows: Rows, lane: Array, count: Array) -> Array:
        """What the first rows on one of several lanes add to the start."""
        if not kernels.available():
            return self.added(_known(Rows(*(a[lane] for a in rows)), count))
        from fedbraid.lowering.kernels.grown import total

        return total(*self._factors(rows), lane, count)

    def _factors(self, rows: Rows) -> tuple[Array, Array]:
        """Rows of the first axis and of the second."""
        left, right = rows.left, rows.right.astype(rows.left.dtype)
        return (right, left) if self.turned else (left, right)


def _known(rows: Rows, count: Array) -> Rows:
    """Zeros in the place of rows that are not there: what was there before may not be a number."""
    return Rows(*(jnp.where(jnp.arange(len(a))[:, None] < count, a, 0) for a in rows))


@dataclass(frozen=True)
class Growth:
    """How the carry of a fold is kept on lanes: its leaves, less those that grow by rows, and these rows."""

    tree: Any
    sites: tuple[Site, ...]  # in the order of leaves
    step: Callable  # (slot, k, leaves, rows) -> (leaves, rows)

    def empty(self, lanes: int) -> tuple[Rows, ...]:
        """Room for the rows of as many clients."""
        return tuple(site.empty(lanes) for site in self.sites)

    def rest(self, carry: PyTree) -> list[Array]:
        """The leaves of a carry that are kept as they are."""
        grown = {site.leaf for site in self.sites}
        return [leaf for i, leaf in enumerate(jax.tree.leaves(carry)) if i not in grown]

    def matrices(self, rows: tuple[Rows, ...]) -> list[Array]:
        """The matrices on all lanes, which have no room for more rows."""
        return [site.start + jax.vmap(site.added)(each) for site, each in zip(self.sites, rows, strict=True)]

    def matrices_on(self, rows: tuple[Rows, ...], lane: Array, k: Array) -> list[Array]:
        """The matrices on some lanes, after ``k`` steps."""
        return [
            site.start + jax.vmap(partial(site.added_on, each))(lane, k * site.rows)
            for site, each in zip(self.sites, rows, strict=True)
        ]

    def carry(self, rest: list[Array], matrices: list[Array]) -> PyTree:
        """One client's carry, whole."""
        leaves = list(rest)
        for site, matrix in zip(self.sites, matrices, strict=True):
            leaves.insert(site.leaf, matrix)
        return jax.tree.unflatten(self.tree, leaves)


class Extent(NamedTuple):
    """How far matrices grow."""

    most: int  # steps of the longest client
    usual: int  # of the client that a step belongs to, on average
    lanes: int  # clients at a time


def extent_of(fold: Fold, most: int, usual: int, lanes: int) -> Extent:
    """Of a fold, by the examples of the longest client and of a usual one (0: as many)."""
    longest, middle = (int(fold.batches.count(np.int64(n))) for n in (most, usual or most))
    return Extent(longest, middle, lanes)


def grow(begin: Callable, advance: Callable, example: tuple, extent: Extent, how: Matrices = "auto") -> Growth:
    """Which matrices of a fold's carry grow by rows, and its step with these.

    Args:
        begin: (slot) -> carry.
        advance: (slot, k, carry) -> carry, one step of one client.
        example: slot and k, of the right types.
        extent: how many steps clients take, and how many clients do at a time.
        how: "auto" by what memory traffic it spares on a GPU, "grown" wherever it can be done, "whole" nowhere.
    """
    opening, carry = jax.make_jaxpr(begin, return_shape=True)(example[0])
    avals, tree = jax.tree.flatten(carry)

    def plainly(slot: Array, k: Array, leaves: list[Array], rows: tuple = ()) -> tuple[list[Array], tuple]:
        return jax.tree.leaves(advance(slot, k, jax.tree.unflatten(tree, leaves))), rows

    wanted = how == "grown" or (how == "auto" and kernels.available())
    candidates = {i: start for i, start in _shared(opening).items() if wanted and _may(avals[i], extent, how)}
    if not candidates:
        return Growth(tree, (), plainly)
    step = jax.make_jaxpr(lambda slot, k, *leaves: plainly(slot, k, list(leaves))[0])(*example, *avals)
    while True:
        found = _rehearse(step, example, avals, candidates, extent, how)
        if found.keys() == candidates.keys():
            break
        candidates = {i: candidates[i] for i in found}  # those left may have been looked at by the others
    sites = tuple(found[i] for i in sorted(found))
    return Growth(tree, sites, partial(_step, step, sites) if sites else plainly)


def explain_growth(alg: Algorithm, params: PyTree, split: Split, plan: Plan, how: Matrices) -> dict[str, list[str]]:
    """For each exchange, one line for every matrix of a client that is kept as rows."""
    data, key = data_shapes(split), jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    found: dict[str, list[str]] = {exchange.name: [] for exchange in alg.exchanges}

    def look(name: str, fold: Fold, down: PyTree, state: PyTree, data: ClientData, key: Any) -> None:
        growth = grow(
            lambda _: fold.begin(down, state, key),
            lambda _, k, carry: fold.advance(carry, k, down, data, key),
            (jnp.int32(0), jnp.int32(0)),
            extent_of(fold, plan.alike or data.cap, plan.usual, plan.chunk),
            how,
        )
        paths = jax.tree_util.tree_leaves_with_path(jax.eval_shape(fold.begin, down, state, key))
        for site in growth.sites:
            path, (rows, columns) = jax.tree_util.keystr(paths[site.leaf][0]), site.start.shape
            grows = f"{site.rows} rows a step, {site.most} at most"
            found[name].append(f"carry{path} ({rows}, {columns}): the shared matrix plus {grows}")

    for exchange in alg.exchanges:
        if plan.kind == "lanes" and isinstance(exchange.client, LocalWork):
            down = jax.eval_shape(exchange.send, server)
            for fold in exchange.client.folds:
                jax.eval_shape(partial(look, exchange.name, fold), down, state, data, key)
    return found


def _shared(opening: ClosedJaxpr) -> dict[int, Array]:
    """Leaves of the first carry that are the same for all clients, and their values."""
    known = dict(zip(opening.jaxpr.constvars, opening.consts, strict=True))
    outputs = enumerate(opening.jaxpr.outvars)
    return {i: known[v] for i, v in outputs if not isinstance(v, Constant) and v in known}


def _may(aval: Any, extent: Extent, how: Matrices) -> bool:
    """Whether a leaf can be worth it, however few its rows."""
    matrix = aval.ndim == 2 and jnp.issubdtype(aval.dtype, jnp.floating)
    return matrix and (how == "grown" or (aval.dtype == jnp.float32 and extent.lanes * aval.size * 16 > WORTH))


def _pays(site: Site, extent: Extent) -> bool:
    """Whether rows are less to move than the matrix: read twice and rewritten once a step, by every client.

    Rows are read twice too, half of a client's on average. For the sake of a few long clients the room for rows may be
    larger than the matrix, but not by much.
    """
    matrix = site.start.size * site.start.dtype.itemsize
    row = max(site.start.shape) * jnp.dtype(site.dtype).itemsize
    moved = site.rows * (extent.usual + 4) * row
    return extent.lanes * (4 * matrix - moved) > WORTH and moved < 2 / 3 * 4 * matrix and site.most * row <= 8 * matrix


# --- following a step ------------------------------------------------------------------------------------------------


@dataclass
class _Pair:
    """One product over a batch, ``a' b``, that was not computed."""

    a: Array
    b: Array
    precision: Any  # that its product was asked for
    seen: list[bool]  # of this product, whether it had to be computed after all

    def scaled(self, by: Any) -> _Pair:
        if self.a.size < self.b.size:
            return replace(self, a=self.a * by)
        return replace(self, b=self.b * by)


@dataclass
class _Leaf:
    """A matrix of the carry while its step is followed."""

    site: Site
    rows: Rows
    count: Array
    seen: bool = False
    read: list[Array] = field(default_factory=list)  # what was computed from its rows
    written: Array = None  # what was put behind the rows of left already


@dataclass
class _Sum:
    """``base W0 + old X' D + new products``, not computed; what belongs to a leaf is transposed if ``turned``."""

    shape: tuple[int, ...]
    leaf: _Leaf | None
    base: int  # 0 or 1
    old: Any  # what the rows so far are multiplied with; None: they are no part of it
    new: list[_Pair]
    turned: bool = False

    @property
    def itself(self) -> bool:
        """Whether it is a matrix of the carry as it was."""
        return self.base == 1 and self.unscaled and not self.new

    @property
    def unscaled(self) -> bool:
        """Whether the rows so far are part of it as they are."""
        return isinstance(self.old, float) and self.old == 1

    def transposed(self) -> _Sum:
        new = [replace(pair, a=pair.b, b=pair.a) for pair in self.new]
        return replace(self, shape=self.shape[::-1], new=new, turned=not self.turned)

    def scaled(self, by: Any) -> _Sum | None:
        if self.base:
            return None
        return replace(
            self, old=None if self.old is None else by * self.old, new=[pair.scaled(by) for pair in self.new]
        )

    def plus(self, other: _Sum, sign: int) -> _Sum | None:
        base = self.base + sign * other.base
        apart = self.leaf and other.leaf and (self.leaf is not other.leaf or self.turned != other.turned)
        if apart or base not in (0, 1):
            return None
        owner = self if self.leaf else other
        old = [by for by in (self.old, other.old if other.old is None else sign * other.old) if by is not None]
        new = [*self.new, *(pair.scaled(sign) for pair in other.new)]
        return _Sum(self.shape, owner.leaf, base, sum(old) if old else None, new, owner.turned)

    def value(self) -> Array:
        """Computed after all."""
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
            part = part + self.old * site.added(_known(self.leaf.rows, self.leaf.count))
        return total + (part.T if self.turned else part)


def _whole(value: Any) -> Array:
    return value.value() if isinstance(value, _Sum) else value


def _step(step: ClosedJaxpr, sites: tuple[Site, ...], slot, k, rest, rows):
    """One step of one client, with rows added to its matrices."""
    # a lane whose queue is empty goes on with a client that has ended, and nobody asks for the result
    leaves = [_Leaf(s, each, jnp.minimum(k * s.rows, s.most)) for s, each in zip(sites, rows, strict=True)]
    outputs = _follow_step(step, slot, k, rest, leaves)
    after = tuple(_added(leaf, outputs.pop(leaf.site.leaf - i)) for i, leaf in enumerate(leaves))
    return [_whole(value) for value in outputs], after


def _follow_step(step: ClosedJaxpr, slot, k, rest, leaves: list[_Leaf]) -> list[Any]:
    inputs = list(rest)
    for leaf in leaves:
        inputs.insert(leaf.site.leaf, _Sum(leaf.site.start.shape, leaf, 1, 1.0, []))
    shapes = {value.shape for value in inputs if isinstance(value, _Sum)}
    return _follow(step.jaxpr, step.consts, [slot, k, *inputs], shapes | {s[::-1] for s in shapes}, leaves)


def _added(leaf: _Leaf, value: _Sum) -> Rows:
    """The rows after a step that returns ``value``."""
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


def _rehearse(
    step: ClosedJaxpr, example: tuple, avals: list, candidates: dict[int, Array], extent: Extent, how: Matrices
) -> dict[int, Site]:
    """Those of the candidates that a step leaves as sums, with what it adds to them; nothing is computed."""
    found: dict[int, Site] = {}

    def run(slot, k, *rest):
        trials = [Site(i, 0, 1, start.dtype, start, _upright(start)) for i, start in candidates.items()]
        leaves = [_Leaf(t, Rows(*(a[0] for a in t.empty(1))), jnp.int32(0)) for t in trials]
        outputs = _follow_step(step, slot, k, rest, leaves)
        for i, value in enumerate(outputs):
            if i not in candidates:
                _whole(value)
        for leaf in leaves:
            site, value = leaf.site, outputs[leaf.site.leaf]
            if leaf.seen or not isinstance(value, _Sum) or value.leaf is not leaf or value.turned or value.base != 1:
                continue
            if value.old is None or not value.new or any(any(pair.seen) for pair in value.new):
                continue
            rows = sum(pair.a.shape[0] for pair in value.new)
            half = all(_half(pair.precision) for pair in value.new) and kernels.available()
            site = replace(site, rows=rows, most=rows * extent.most, dtype=jnp.bfloat16 if half else site.dtype)
            if how == "grown" or _pays(site, extent):
                found[site.leaf] = site

    jax.eval_shape(run, *example, *(aval for i, aval in enumerate(avals) if i not in candidates))
    return {i: replace(site, base=_upright(site.start).astype(site.dtype)) for i, site in found.items()}


def _upright(matrix: Array) -> Array:
    return matrix.T if matrix.shape[0] < matrix.shape[1] else matrix


def _follow(jaxpr: Jaxpr, consts: Iterable[Any], inputs: Iterable[Any], shapes: set, leaves: list[_Leaf]) -> list[Any]:
    """Run a jaxpr equation by equation, and leave sums and products of the given shapes uncomputed where that goes."""
    environment = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))
    scalars: dict[Any, Any] = {}  # what was repeated to a matrix

    def known(atom: Any) -> Any:
        return atom.val if isinstance(atom, Constant) else environment[atom]

    def number(atom: Any) -> Any:
        """A scalar factor, or None."""
        if not isinstance(atom, Constant) and atom in scalars:
            return scalars[atom]
        value = known(atom)
        return value if not isinstance(value, _Sum) and jnp.ndim(value) == 0 else None

    def summand(atom: Any) -> Any:
        value = known(atom)
        for leaf in leaves:
            if value is leaf.site.start:
                return _Sum(value.shape, leaf, 1, None, [])
        return value

    for equation in jaxpr.eqns:
        name, params, atoms = equation.primitive.name, equation.params, equation.invars
        values = [known(atom) for atom in atoms]
        sums = [isinstance(value, _Sum) for value in values]
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
            *(_whole(value) for value in values), **equation.primitive.get_bind_params(params)
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


def _linear(name: str, params: dict[str, Any], values: list, numbers: list, summands: list) -> _Sum | None:
    """A linear operation on sums, or None."""
    if name == "transpose" and tuple(params["permutation"]) == (1, 0):
        return values[0].transposed()
    if name == "neg":
        return values[0].scaled(-1.0)
    if name in ("mul", "div"):
        value, by = (values[0], numbers[1]) if isinstance(values[0], _Sum) else (values[1], numbers[0])
        if by is None or (name == "div" and value is not values[0]):
            return None
        return value.scaled(1 / by if name == "div" else by)
    if name in ("add", "sub", "add_any"):
        a, b = summands
        if isinstance(a, _Sum) and isinstance(b, _Sum) and a.shape == b.shape:
            return a.plus(b, -1 if name == "sub" else 1)
    if name in ("copy", "copy_p"):
        return values[0]
    return None


def _half(precision: Any) -> bool:
    return "BF16_BF16_F32" in str(precision)


def _exact(precision: Any) -> bool:
    return kernels.available() and ("HIGHEST" in str(precision) or "F32_F32_F32" in str(precision))


def _pair(shapes: set, equation, a, b) -> _Sum | None:
    """A product over a batch that has the shape of one of the matrices."""
    (contracting, batch), shape = equation.params["dimension_numbers"], _shape(equation.outvars[0])
    (first, second), precision = contracting, equation.params["precision"]
    if any(batch) or len(first) != 1 or a.ndim != 2 or b.ndim != 2 or shape not in shapes or _exact(precision):
        return None
    if not a.dtype == b.dtype == equation.outvars[0].aval.dtype:
        return None
    a, b = (m if axis == 0 else m.T for m, axis in zip((a, b), (first[0], second[0]), strict=True))
    return _Sum(shape, None, 0, None, [_Pair(a, b, precision, [])])


def _product(equation, a, b) -> Array | None:
    """A product of an array with a matrix of the carry as it was, or None."""
    (contracting, batch), precision = equation.params["dimension_numbers"], equation.params["precision"]
    (first, second) = contracting
    if any(batch) or len(first) != 1 or (isinstance(a, _Sum) and isinstance(b, _Sum)) or _exact(precision):
        return None
    matrix, other = (a, b) if isinstance(a, _Sum) else (b, a)
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


def _over_long(leaf: _Leaf, x: Array, precision: Any) -> Array:
    """``x W`` of x [b, the longer axis]."""
    base, (left, right), known = leaf.site.base, leaf.rows, _known(leaf.rows, leaf.count)
    given, x = x, x.astype(left.dtype)
    start = jnp.matmul(x, base, precision=precision, preferred_element_type=right.dtype)
    if kernels.available():
        from fedbraid.lowering.kernels.grown import inner

        leaf.written, (meets, left) = given, inner(x, left, leaf.count)
        leaf.rows = Rows(left, right)
    else:
        meets = jnp.matmul(x, known.left.T, precision=precision)
    return start + jnp.matmul(meets, known.right, precision=precision)


def _over_short(leaf: _Leaf, dy: Array, precision: Any) -> Array:
    """``dy W'`` of dy [b, the shorter axis]."""
    base, (left, right), known = leaf.site.base, leaf.rows, _known(leaf.rows, leaf.count)
    start = jnp.matmul(dy.astype(left.dtype), base.T, precision=precision, preferred_element_type=right.dtype)
    meets = jnp.matmul(dy, known.right.T, precision=precision)
    if kernels.available():
        from fedbraid.lowering.kernels.grown import outer

        return outer(start, meets, left, leaf.count)
    return start + jnp.matmul(meets, known.left, precision=precision)
