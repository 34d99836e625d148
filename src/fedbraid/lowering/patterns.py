"""Finds activations and cross entropies in the jaxpr of any program; the base of other finders.

Networks are written in many ways, but after tracing the same computation has the same few equations. A jaxpr is first
inlined (:func:`inlined`) and turned into a graph in which equal expressions are one node (:func:`graph`). Each finder
looks at a node that may be the last of its pattern and returns what the pattern computes and from which values, or
None. Attention is found by :mod:`fedbraid.lowering.attending`, norms by :mod:`fedbraid.lowering.norms`.
:mod:`fedbraid.lowering.mixed` decides whether the value is computed in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = [
    "Activation",
    "Graph",
    "LogSum",
    "Node",
    "Picked",
    "activation",
    "bare",
    "beside_vector",
    "biased",
    "constant",
    "graph",
    "inlined",
    "interior",
    "log_sum",
    "loop_counts",
    "picked",
    "reduced",
    "vector",
]

SMOOTH = ("tanh", "erf", "logistic", "exp", "exp2", "log1p", "expm1", "sin", "cos", "erfc")
ELEMENTWISE = (
    *SMOOTH, "add", "sub", "mul", "div", "neg", "abs", "max", "min", "integer_pow", "square", "sqrt", "rsqrt", "log",
    "copy",
)  # fmt: skip


@dataclass(eq=False)
class Node:
    """A value of a program: an input, a constant, or the result of an equation."""

    name: str
    aval: Any
    atom: Any
    args: tuple[Node, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    index: int = 0  # among the results of the equation
    equation: Any = None
    value: Any = None  # of a constant, once it is known
    varies: bool = False  # known to depend on an input

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def number(self) -> float | None:
        """The value of a constant that is one number, else None."""
        node = self
        while node.name in ("broadcast_in_dim", "convert_element_type", "reshape", "copy") and node.args:
            node = node.args[0]
        found = None if node.shape else constant(node)
        return None if found is None else float(found)


def constant(node: Node) -> np.ndarray | None:
    """The value of a node that depends on no input, up to a million entries; None for others."""
    if node.name == "literal":
        return np.asarray(node.atom.val)
    if node.value is not None:
        return node.value
    args, equation = [], node.equation
    node.varies |= equation is None or math.prod(node.shape) > 1 << 20 or bool(equation.effects)
    node.varies |= jnp.issubdtype(node.aval.dtype, jax.dtypes.prng_key)  # random keys are no NumPy arrays
    for arg in () if node.varies else node.args:
        args.append(constant(arg))
        node.varies |= args[-1] is None
        if node.varies:
            break
    if node.varies or equation is None:
        return None
    primitive = equation.primitive
    with jax.ensure_compile_time_eval():
        results = primitive.bind(*args, **primitive.get_bind_params(node.params))
    node.value = np.asarray(results[node.index] if primitive.multiple_results else results)
    return node.value


class Graph(NamedTuple):
    """The nodes of a jaxpr by variable, and the nodes that use each node."""

    of: dict[Any, Node]
    uses: dict[int, list[Node]]
    results: frozenset[int]  # nodes that the jaxpr returns

    def only_use(self, node: Node) -> Node | None:
        """The one node that uses this one; None if there are several, or if it is a result."""
        uses = self.uses.get(id(node), [])
        return uses[0] if len(uses) == 1 and id(node) not in self.results else None


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the contents of ``jit`` in place of its calls, and without operations that change nothing.

    A copy, a factor 1 and a summand 0 are such operations: PyTorch's programs have one beside most products. A power
    with a whole exponent becomes ``integer_pow``, as JAX writes it.

    >>> program = jax.make_jaxpr(lambda x: jax.jit(jax.numpy.exp)(1.0 * x) + 0.0)(1.0)
    >>> [equation.primitive.name for equation in inlined(program).jaxpr.eqns]
    ['exp']
    """
    if not any(e.primitive.name in CALLS or _simpler(e) is not None for e in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


CALLS = ("jit", "pjit")
WHOLE = 8  # largest exponent of a power that becomes products
NEUTRAL = {"mul": 1, "div": 1, "add": 0, "sub": 0}  # numbers that change nothing; not as the first of "div" and "sub"


def _simpler(equation: Any) -> Callable | None:
    """(inputs) -> output of an equation whose output is an input, or a power with a whole exponent; None for others."""
    name, numbers = equation.primitive.name, [_number(atom) for atom in equation.invars]
    if name == "copy":
        return itemgetter(0)
    if name in NEUTRAL:
        result = equation.outvars[0].aval
        for at in (1, 0) if name in ("mul", "add") else (1,):
            other = equation.invars[1 - at].aval
            if numbers[at] == NEUTRAL[name] and (other.shape, other.dtype) == (result.shape, result.dtype):
                return itemgetter(1 - at)
    if name == "pow" and numbers[1] is not None and numbers[1] in range(1, WHOLE + 1):
        exponent = int(numbers[1])
        return lambda values: lax.integer_pow(values[0], exponent)
    return None


def _number(atom: Any) -> float | None:
    return float(atom.val) if isinstance(atom, Literal) and np.ndim(atom.val) == 0 else None


def _run(jaxpr: Jaxpr, consts: Any, args: Any) -> list[Any]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        if equation.primitive.name in CALLS:
            inner = equation.params["jaxpr"]
            outputs = _run(inner.jaxpr, inner.consts, values)
        elif (simpler := _simpler(equation)) is not None:
            outputs = [simpler(values)]
        else:
            outputs = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def loop_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants and how many are carried; the others are scanned over."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.11 and later
    return len(consts), len(carry)


def graph(jaxpr: Jaxpr, consts: Any = ()) -> Graph:
    """The graph of a jaxpr; ``consts`` are the values of its captured arrays."""
    known: dict[Any, Node] = {}
    same: dict[Any, Node] = {}
    uses: dict[int, list[Node]] = {}

    def read(atom: Any) -> Node:
        if not isinstance(atom, Literal):
            return known[atom]
        key = ("literal", str(atom.aval), repr(atom.val))
        return same.setdefault(key, Node("literal", atom.aval, atom))

    for variable in (*jaxpr.constvars, *jaxpr.invars):
        known[variable] = Node("input", variable.aval, variable)
    for variable, value in zip(jaxpr.constvars, consts, strict=False):
        known[variable].value = value if isinstance(value, np.ndarray) else None
    for equation in jaxpr.eqns:
        args = tuple(read(atom) for atom in equation.invars)
        settings = _settings(equation)
        name = equation.primitive.name
        for index, variable in enumerate(equation.outvars):
            key = (name, settings, tuple(map(id, args)), index)
            node = Node(name, variable.aval, variable, args, equation.params, index, equation)
            if same.setdefault(key, node) is node:
                for arg in set(args):
                    uses.setdefault(id(arg), []).append(node)
            known[variable] = same[key]
    results = frozenset(id(read(atom)) for atom in jaxpr.outvars)
    return Graph(known, uses, results)


def _settings(equation: Any) -> Any:
    """The parameters of an equation in a form that can be compared; the equation's own if it has effects."""
    inside = any(isinstance(part, Jaxpr | ClosedJaxpr) or callable(part) for part in equation.params.values())
    if equation.effects or inside:
        return id(equation)
    return tuple((key, repr(value)) for key, value in sorted(equation.params.items()))


def interior(last: Node, inputs: Iterator[Node] | tuple[Node, ...]) -> Iterator[Node]:
    """The nodes between the inputs of a pattern and its last node, which is not included."""
    stop, left = {id(node) for node in inputs}, list(last.args)
    seen: set[int] = set()
    while left:
        node = left.pop()
        if id(node) in seen or id(node) in stop or node.equation is None:
            continue
        seen.add(id(node))
        yield node
        left.extend(node.args)


def _along_rows(node: Node) -> bool:
    """Whether a broadcast only adds axes at the end, or repeats along the last axis."""
    (x,), out = node.args[:1], node.shape
    where, size = tuple(node.params["broadcast_dimensions"]), len(x.shape)
    if where != tuple(range(size)):
        return False
    return out[:size] == x.shape or (size == len(out) and out[:-1] == x.shape[:-1] and x.shape[-1] == 1)


def bare(node: Node, *, stopped: bool = False) -> Node:
    """A statistic of rows without what does not change its values: axes of size 1, and guards against infinity.

    stopped: also without ``stop_gradient``, which changes derivatives.
    """
    while True:
        if (
            (node.name == "broadcast_in_dim" and _along_rows(node))
            or node.name == "copy"
            or (stopped and node.name == "stop_gradient")
            or (
                node.name in ("reshape", "squeeze", "expand_dims")
                and _trimmed(node.shape) == _trimmed(node.args[0].shape)
            )
        ):
            node = node.args[0]
        elif node.name == "max" and (found := _beside_number(node, (-math.inf, 0.0))) is not None:
            node = found
        elif node.name == "select_n" and (which := node.args[0].number()) is not None:
            node = node.args[1 + int(which)]
        elif node.name == "select_n" and len(node.args) == 3 and node.args[0].name == "is_finite":
            if node.args[0].args[0] is not node.args[2] or node.args[1].number() != 0:
                return node
            node = node.args[2]
        else:
            return node


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _beside_number(node: Node, numbers: tuple[float, ...]) -> Node | None:
    """The argument beside a constant that is one of ``numbers``."""
    for one, other in (node.args, node.args[::-1]):
        if other.number() in numbers:
            return one
    return None


def reduced(node: Node, name: str) -> Node | None:
    """x if the node is a reduction of x over its last axis."""
    if node.name != name or tuple(node.params["axes"]) != (len(node.args[0].shape) - 1,):
        return None
    return node.args[0]


class LogSum(NamedTuple):
    """log(sum(exp(x - shift))) over the last axis; log(sum(exp(x))) if there is no shift."""

    x: Node
    shift: Node | None

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.x,) if self.shift is None else (self.x, self.shift)


def log_sum(node: Node, of: Graph) -> LogSum | None:
    """The log-sum-exp that ends in this node; None if there is none.

    ``logsumexp`` subtracts the largest value and adds it again. Then the sum is the node, and it has no shift.
    """
    if node.name == "add":
        for log, largest in (node.args, node.args[::-1]):
            found = log_sum(log, of) if of.only_use(log) is node else None
            if found is not None and _shifted(largest) is found.x:
                return LogSum(found.x, None)
        return None
    if node.name != "log":
        return None
    total = bare(node.args[0])
    total = bare(total.args[0]) if total.name == "abs" else total
    powers = reduced(total, "reduce_sum")
    if powers is None or powers.name != "exp" or powers.args[0].name != "sub":
        return None
    x, shift = powers.args[0].args
    return LogSum(x, shift) if _shifted(shift) is x else None


def _shifted(node: Node) -> Node | None:
    """x if a node is the largest value of each row of x, through which no gradient flows."""
    return reduced(bare(node, stopped=True), "reduce_max") if _stopped(node) else None


def _stopped(node: Node) -> bool:
    """Whether no gradient flows through a statistic."""
    while node.args:
        if node.name == "stop_gradient":
            return True
        if node.name not in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            return False
        node = node.args[0]
    return False


class Picked(NamedTuple):
    """One value of each row of x, as ``take_along_axis`` finds it."""

    x: Node
    at: Node
    clipped: bool  # places outside of a row stand for its first and its last

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.x, self.at


def picked(node: Node, _: Graph) -> Picked | None:
    """The choice of one value per row that this node is; None if it is another operation."""
    if node.name != "gather":
        return None
    x, at = node.args
    last, how = len(x.shape) - 1, node.params["dimension_numbers"]
    others = tuple(range(last))
    rows = math.prod(x.shape[:-1])
    same = (
        tuple(how.operand_batching_dims) == tuple(how.start_indices_batching_dims) == others
        and tuple(how.start_index_map) == tuple(how.collapsed_slice_dims) == (last,)
        and not how.offset_dims
        and at.shape[:last] == x.shape[:-1]
        and math.prod(at.shape) == math.prod(node.shape) == rows
    )
    return Picked(x, at, node.params["mode"] == lax.GatherScatterMode.CLIP) if same and last else None


class Activation(NamedTuple):
    """A smooth function of one value, or of its sum with a bias, entry by entry."""

    source: Node
    x: Node
    bias: Node | None

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.x,) if self.bias is None else (self.x, self.bias)


def activation(node: Node, of: Graph) -> Activation | None:
    """The largest function of one value that ends here: GELU, SiLU, tanh and others."""
    x = _source(node, {})
    if x is None or x is node or x.name == "literal":
        return None
    uses = of.uses.get(id(node), [])
    longer = uses and id(node) not in of.results and all(_source(use, {}) is x for use in uses)
    if longer or node.shape != x.shape or x.aval.dtype != node.aval.dtype:
        return None
    if not any(inner.name in SMOOTH for inner in (node, *interior(node, (x,)))):
        return None
    elsewhere = id(x) in of.results or any(_source(use, {}) is not x for use in of.uses[id(x)])
    if elsewhere:
        return Activation(x, x, None)
    before, bias = _biased(_unshaped(x, of))
    return Activation(x, x, None) if bias is None else Activation(x, before, bias)


def biased(node: Node, of: Graph) -> tuple[Node, Node | None]:
    """(x, bias) of x + bias, with one number for each entry of the last axis; (node, None) for other nodes.

    The sum must be used only once: else it is computed anyway. x may have fewer axes than the node, if the node is the
    sum in another shape.
    """
    if of.only_use(node) is None:
        return node, None
    x, bias = _biased(_unshaped(node, of))
    return (node, None) if bias is None else (x, bias)


def _unshaped(node: Node, of: Graph) -> Node:
    """The value before reshapes that keep the last axis, if nothing else uses it."""
    while node.name == "reshape" and node.args[0].shape[-1:] == node.shape[-1:] and of.only_use(node.args[0]) is node:
        node = node.args[0]
    return node


def _biased(node: Node) -> tuple[Node, Node | None]:
    for x in node.args if node.name == "add" else ():
        bias = beside_vector(node, x, "add")
        if bias is not None and x.shape == node.shape:
            return x, bias
    return node, None


def _source(node: Node, known: dict[int, Node | None]) -> Node | None:
    """The value from which a node is computed entry by entry; the node itself if there are several."""
    if node.number() is not None:
        return None
    if node.name not in ELEMENTWISE:
        return node
    if id(node) not in known:
        found = {id(s): s for s in (_source(arg, known) for arg in node.args) if s is not None}
        known[id(node)] = next(iter(found.values())) if len(found) == 1 else node
    return known[id(node)]


def beside_vector(node: Node, value: Node, name: str) -> Node | None:
    """The vector that ``node`` multiplies or adds to every row of ``value``."""
    if node.name != name or value not in node.args:
        return None
    return vector(node.args[1] if node.args[0] is value else node.args[0], value.shape[-1:])


def vector(node: Node, size: tuple[int, ...]) -> Node | None:
    """The vector of a size that a node repeats for every row, or None."""
    while node.shape != size:
        repeats = node.name == "broadcast_in_dim" and tuple(node.params["broadcast_dimensions"]) == tuple(
            range(len(node.shape) - len(node.args[0].shape), len(node.shape))
        )
        flat = node.name in ("reshape", "expand_dims") and math.prod(node.shape) == node.shape[-1]
        if not (repeats or flat) or node.args[0].shape[-1:] != size:
            return None
        node = node.args[0]
    return node
