"""Mixed precision: the values between the layers of a network in bfloat16, everything else in float32.

On a GPU most of the time of a ResNet or a transformer is memory traffic of activations and of their gradients. With
``precision="bfloat16"`` they are stored in two bytes. Parameters, their updates, reductions (sums, means, norms),
softmax and the loss stay float32.

The program of a loss is interpreted equation by equation, before it is differentiated. So the gradients between layers
have the dtype of the values. Each float32 value has one of four kinds:

- FREE: a parameter, an input or a constant. It takes the dtype of what it is combined with.
- NARROW: stored in bfloat16. Products and convolutions give such values, and so do elementwise operations on them.
- SOFT: computed in float32, but it may be rounded. An example is a value minus a mean. It becomes NARROW as an input of
  a product, at a ReLU, and where two such values are added (a residual connection).
- WIDE: stays float32. Reductions, exponentials and logarithms give such values.

What comes after the last product, the loss, is computed in float32. The result of the last product is float32 too,
except if it is larger than both factors, as the logits of a language model are.

Some parts are computed in one piece (:mod:`fedbraid.lowering.fused`) wherever they are found
(:mod:`fedbraid.lowering.patterns`): attention and norms of rows as kernels, smooth activations and cross entropies with
gradients that compute them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedbraid.lowering import fused, kernels
from fedbraid.lowering.attending import Attention, attention
from fedbraid.lowering.deferred import is_relu
from fedbraid.lowering.norms import NormalisedRows, normalised_rows
from fedbraid.lowering.operations import convolutions_later
from fedbraid.lowering.patterns import (
    Activation,
    Graph,
    LogSum,
    Node,
    Picked,
    activation,
    graph,
    inlined,
    interior,
    log_sum,
    loop_counts,
    picked,
)
from fedbraid.lowering.row_norm import RowNorm

__all__ = ["narrow_activations"]

HALF = jnp.bfloat16


class Kind(Enum):
    FREE = 0
    NARROW = 1
    SOFT = 2
    WIDE = 3


FREE, NARROW, SOFT, WIDE = Kind
PRODUCTS = ("dot_general", "conv_general_dilated")
REMAT = ("checkpoint", "remat", "remat2")
SHAPES = (  # move values without computing with them
    "reshape", "transpose", "broadcast_in_dim", "slice", "dynamic_slice", "squeeze", "expand_dims", "rev", "copy",
    "gather", "concatenate", "pad", "reduce_window_max", "reduce_max", "optimization_barrier", "split",
)  # fmt: skip
ELEMENTWISE = (
    "add", "sub", "mul", "div", "neg", "abs", "max", "min", "tanh", "logistic", "erf", "integer_pow", "square",
    "select_n", "clamp", "sign", "sin", "cos", "add_any",
)  # fmt: skip


FINDERS = (attention, normalised_rows, log_sum, picked, activation)
FEWEST = 256  # columns from which the gradient of one value of each row is no scatter
OPERATIONS = (  # that kernels can compute
    "tanh", "logistic", "exp", "exp2", "log1p", "expm1", "sin", "cos", "add", "sub", "mul", "div", "neg", "abs", "max",
    "min", "integer_pow", "square", "sqrt", "rsqrt", "log", "broadcast_in_dim", "literal",
)  # fmt: skip


class Value(NamedTuple):
    """A value of the program. ``array`` may be bfloat16 where the program has float32."""

    array: Any
    kind: Kind = FREE


def narrow_activations(function: Callable) -> Callable:
    """``function`` with the values between its products in bfloat16. It returns the same dtypes as ``function``.

    >>> matrices = jnp.ones((2, 2)), jnp.ones((2, 2))
    >>> two = lambda w, x: jnp.sum((x @ w[0]) @ w[1])
    >>> found = str(jax.make_jaxpr(narrow_activations(two))(matrices, jnp.ones((3, 2))))
    >>> found.count("bf16[3,2] = dot_general"), found.count("f32[3,2] = dot_general")  # the last product is float32
    (1, 1)
    """

    def run(*args: Any) -> Any:
        with convolutions_later():
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        closed = inlined(closed)
        leaves = [Value(leaf) for leaf in jax.tree.leaves(args)]
        found = _evaluate(closed.jaxpr, closed.consts, leaves, [False] * len(closed.jaxpr.outvars))
        return jax.tree.unflatten(jax.tree.structure(shapes), _typed(closed.jaxpr.outvars, found))

    return run


def _is_float(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == jnp.float32


def _typed(atoms: Sequence[Any], values: Sequence[Value]) -> list[Any]:
    """The arrays in the dtypes that the program has for them."""
    return [_wide(v.array) if _is_float(atom.aval) else v.array for atom, v in zip(atoms, values, strict=True)]


def _halved(atoms: Sequence[Any], values: Sequence[Value]) -> list[Any]:
    """The arrays, with bfloat16 where the program has float32."""
    return [_half(v.array) if _is_float(atom.aval) else v.array for atom, v in zip(atoms, values, strict=True)]


def _wide(array: Any) -> Any:
    return array.astype(jnp.float32) if getattr(array, "dtype", None) == HALF else array


def _half(array: Any) -> Any:
    return jnp.asarray(array).astype(HALF)


def _constant(literal: Literal) -> Any:
    """The value of a constant. In bfloat16 float32's largest numbers, as masks use them, would become infinite."""
    largest = float(jnp.finfo(HALF).max)
    if not _is_float(literal.aval) or not largest < abs(literal.val) < np.inf:
        return literal.val
    return np.float32(np.copysign(largest, literal.val))


def _inside(equation: Any) -> list[Jaxpr]:
    found = []
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, list | tuple) else [parameter]:
            if isinstance(value, ClosedJaxpr | Jaxpr):
                found.append(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
    return found


def _multiplies(equation: Any) -> bool:
    """Whether an equation is a product, or contains one."""
    if equation.primitive.name in PRODUCTS:
        return True
    return any(_multiplies(inner) for jaxpr in _inside(equation) for inner in jaxpr.eqns)


def _leading(jaxpr: Jaxpr, ahead: Sequence[bool]) -> set[Any]:
    """The variables from which a product is reached. ``ahead``: the same for the results, by what follows outside."""
    found = {v for v, yes in zip(jaxpr.outvars, ahead, strict=True) if yes and not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if _multiplies(equation) or any(v in found for v in equation.outvars):
            found |= {v for v in equation.invars if not isinstance(v, Literal)}
    return found


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], ahead: Sequence[bool]) -> list[Value]:
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    leading, of = _leading(jaxpr, ahead), graph(jaxpr, consts)
    parts = {v: found for e in jaxpr.eqns for v in e.outvars if (found := _part(of.of[v], of)) is not None}
    inside = {node.atom for v, part in parts.items() for node in interior(of.of[v], part.inputs)}
    producers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    # sums that the kernel of a norm computes too
    norms = {p.x.atom: v for v, p in parts.items() if isinstance(p, NormalisedRows) and p.added is not None}

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            return Value(_constant(atom))
        if atom not in known and atom in norms:
            evaluate(producers[norms.pop(atom)])
        if atom not in known:  # inside a part that is not computed in one piece after all
            evaluate(producers[atom])
        return known[atom]

    def evaluate(equation: Any) -> None:
        (first, *_), more = equation.outvars, [v in leading for v in equation.outvars]
        part, found = parts.get(first), None
        if isinstance(part, NormalisedRows) and part.added is not None:
            norms.pop(part.x.atom, None)
            if part.x.atom not in known:
                found = _residual_norm(part, lambda node: read(node.atom), more[0])
            if found is not None:
                known[part.x.atom], known[first] = found
                return
        if part is not None:
            found = _in_one_piece(part, of.of[first], of, lambda node: read(node.atom), more[0])
        if found is None:
            found = _apply(equation, [read(atom) for atom in equation.invars], more)
        known.update(zip(equation.outvars, found, strict=True))

    for equation in jaxpr.eqns:
        if not all(v in inside or v in known for v in equation.outvars) or equation.effects:
            evaluate(equation)
    return [read(atom) for atom in jaxpr.outvars]


def _part(node: Node, of: Graph) -> Any:
    """The part of a network that ends at a node, or None."""
    if not _is_float(node.aval):
        return None
    return next((found for find in FINDERS if (found := find(node, of)) is not None), None)


def _residual_norm(part: NormalisedRows, read: Callable[[Node], Value], ahead: bool) -> tuple[Value, Value] | None:
    """A residual connection and its norm; None if they are computed one after the other."""
    assert part.added is not None
    first, second = (read(node) for node in part.added[:2])
    if not (ahead and kernels.available() and {first.kind, second.kind} <= {NARROW, SOFT}):
        return None
    bias, scale, shift = (None if v is None else _wide(read(v).array) for v in (part.added[2], part.scale, part.shift))
    first, second = (_half(v.array) for v in (first, second))
    shaped = first if first.shape == part.x.shape else first.reshape(part.x.shape)
    x, y = fused.add_normalise_rows(shaped, second, bias, scale, shift, RowNorm(part.epsilon, part.centred))
    return Value(x, NARROW), Value(y, NARROW)


def _in_one_piece(part: Any, node: Node, of: Graph, read: Callable[[Node], Value], ahead: bool) -> list[Value] | None:
    """The value of a part; None if it is computed equation by equation."""
    if isinstance(part, Attention) and ahead and kernels.available():
        factors = [read(factor) for factor in part.inputs[:3]]
        if all(v.kind in (FREE, NARROW, SOFT) for v in factors) and any(v.kind is not FREE for v in factors):
            array = fused.attend(part, of, lambda node: read(node).array, _narrowed)
            return None if array is None else [Value(array, NARROW)]
    if isinstance(part, NormalisedRows) and ahead and kernels.available():
        x = read(part.x)
        if x.kind in (NARROW, SOFT):
            scale, shift = (None if v is None else _wide(read(v).array) for v in (part.scale, part.shift))
            norm = RowNorm(part.epsilon, part.centred)
            return [Value(fused.normalise_rows(_half(x.array), scale, shift, norm), NARROW)]
    if isinstance(part, Activation) and ahead and read(part.x).kind is NARROW:
        return [_activated(part, node, read)]
    if isinstance(part, LogSum) and read(part.x).kind is NARROW:
        total = fused.log_sum_exp(read(part.x).array, kernels.available()).reshape(node.shape)
        shift = 0 if part.shift is None else _wide(read(part.shift).array).reshape(node.shape)
        return [Value(total - shift, WIDE)]
    if isinstance(part, Picked) and part.x.shape[-1] >= FEWEST and read(part.x).kind in (NARROW, WIDE):
        gather = lambda x, at: _bind(node.equation, [x, at])[0]  # noqa: E731
        return [Value(_wide(fused.picked(read(part.x).array, read(part.at).array, gather, part.clipped)), WIDE)]
    return None


def _activated(part: Activation, node: Node, read: Callable[[Node], Value]) -> Value:
    bias = None if part.bias is None else read(part.bias)
    if bias is not None and bias.kind is not FREE:
        return Value(fused.elementwise(fused.region(node, part.source), _half(read(part.source).array)), NARROW)
    names = {inner.name for inner in (node, *interior(node, (part.source,))) if inner.number() is None}
    there = kernels.available() and names <= {*OPERATIONS, *fused.IN_KERNELS}
    function = fused.region(node, part.source)
    kernel = fused.region(node, part.source, fused.IN_KERNELS) if there else None
    x = fused.elementwise(function, read(part.x).array, None if bias is None else bias.array, kernel=kernel)
    return Value(x.reshape(node.shape), NARROW)


def _narrowed(array: Any) -> Any:
    return _half(array) if getattr(array, "dtype", None) == jnp.float32 else array


def _bind(equation: Any, arrays: Sequence[Any], **changed: Any) -> list[Any]:
    params = {**equation.params, **changed}
    outputs = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _apply(equation: Any, values: list[Value], ahead: list[bool]) -> list[Value]:
    """The results of one equation. ``ahead``: from which of them a product is reached."""
    name = equation.primitive.name
    floats = [v for atom, v in zip(equation.invars, values, strict=True) if _is_float(atom.aval)]
    if name in PRODUCTS:
        return _product(equation, values, ahead[0])
    if name in ("jit", "pjit"):
        inner = equation.params["jaxpr"]
        return _evaluate(inner.jaxpr, inner.consts, values, ahead)
    if name == "convert_element_type" and not any(v.kind is not FREE for v in floats):
        return [Value(array) for array in _bind(equation, [v.array for v in values])]
    if name in REMAT:
        return _checkpointed(equation, values, ahead)
    if name == "custom_jvp_call":
        return _with_rule(equation, values, ahead)
    if name in SHAPES and floats and all(_is_float(v.aval) for v in equation.outvars):
        return _moved(equation, values, floats, ahead)
    if name in ELEMENTWISE and floats and _is_float(equation.outvars[0].aval):
        return _elementwise(equation, values, floats, ahead[0])
    arrays = _typed(equation.invars, values)
    if _multiplies(equation) and not name.startswith("custom_"):
        carried = _narrow_carries(equation, values)
        narrow = _only_factors(equation, values) | carried
        arrays = [_half(array) if i in narrow else array for i, array in enumerate(arrays)]
        outputs = _bind(equation, arrays, **_rewritten(equation, narrow, carried))
        first = sum(loop_counts(equation.params)[:1]) if carried else 0
        return [Value(array, NARROW if first + i in carried else WIDE) for i, array in enumerate(outputs)]
    else:
        outputs = _bind(equation, arrays)
    kind = FREE if not floats else SOFT if name.startswith("custom_") else WIDE
    return [Value(array, kind) for array in outputs]


def _product(equation: Any, values: list[Value], ahead: bool) -> list[Value]:
    sizes = [atom.aval.size for atom in (*equation.invars, *equation.outvars)]
    ahead = ahead or sizes[2] > max(sizes[:2])  # logits of a language model are stored narrow
    if not (ahead and all(_is_float(atom.aval) for atom in (*equation.invars, *equation.outvars))):
        # the last product, or one that is not of float32
        return [Value(array, WIDE) for array in _bind(equation, _typed(equation.invars, values))]
    arrays = [_half(v.array) for v in values]
    wanted = HALF if equation.primitive.name == "dot_general" else None
    (array,) = _bind(equation, arrays, precision=None, preferred_element_type=wanted)
    return [Value(array, NARROW)]


def _moved(equation: Any, values: list[Value], floats: list[Value], ahead: list[bool]) -> list[Value]:
    kinds = {v.kind for v in floats}
    kind = max(kinds, key=lambda kind: kind.value)
    narrow = kinds <= {FREE, NARROW} and NARROW in kinds
    arrays = (_halved if narrow else _typed)(equation.invars, values)
    if equation.primitive.name == "gather" and kind is FREE and ahead[0]:
        return [Value(_half(array), NARROW) for array in _bind(equation, arrays)]  # rows of an embedding
    outputs = _bind(equation, arrays)
    return [Value(array, kind) for array in outputs]


def _elementwise(equation: Any, values: list[Value], floats: list[Value], ahead: bool) -> list[Value]:
    kinds = {v.kind for v in floats}
    biased = equation.primitive.name in ("add", "sub") and FREE in kinds  # logits and their bias
    if (ahead or biased) and NARROW in kinds and kinds <= {FREE, NARROW}:
        arrays = _halved(equation.invars, values)
        return [Value(array, NARROW) for array in _bind(equation, arrays)]
    (array,) = _bind(equation, _typed(equation.invars, values))
    if kinds == {FREE}:
        return [Value(array)]
    whole = [v.kind for v in floats if v.kind is not FREE and jnp.size(v.array) == array.size]
    if not ahead or WIDE in whole or not whole:
        return [Value(array, WIDE)]
    if equation.primitive.name in ("add", "add_any") and len(whole) > 1:  # a residual connection
        return [Value(_half(array), NARROW)]
    return [Value(array, SOFT)]


def _with_rule(equation: Any, values: list[Value], ahead: list[bool]) -> list[Value]:
    """A function with its own derivative rule: float32 inside. Its results are stored narrow if its inputs may be."""
    kinds = {v.kind for v in values}
    if is_relu(equation.params["call_jaxpr"].jaxpr) and ahead[0] and kinds <= {NARROW, SOFT}:
        return [Value(jax.nn.relu(_half(values[0].array)), NARROW)]
    outputs = _bind(equation, _typed(equation.invars, values))
    if not kinds & {NARROW, SOFT}:
        return [Value(array, FREE if kinds == {FREE} else WIDE) for array in outputs]
    largest = max(jnp.size(v.array) for v in values)

    def stored(array: Any, ahead: bool) -> Value:
        narrow = ahead and array.dtype == jnp.float32 and array.size == largest
        return Value(_half(array), NARROW) if narrow else Value(array, WIDE)

    return list(map(stored, outputs, ahead))


def _checkpointed(equation: Any, values: list[Value], ahead: list[bool]) -> list[Value]:
    """A function whose values are computed again for its gradient."""
    kinds: list[Kind] = []

    def run(*arrays: Any) -> list[Any]:
        given = [Value(array, v.kind) for array, v in zip(arrays, values, strict=True)]
        inner = inlined(ClosedJaxpr(equation.params["jaxpr"], ()))
        found = _evaluate(inner.jaxpr, inner.consts, given, ahead)
        kinds[:] = [v.kind for v in found]
        return [v.array for v in found]

    policy, prevent = equation.params["policy"], equation.params["prevent_cse"]
    arrays = jax.checkpoint(run, prevent_cse=prevent, policy=policy)(*(v.array for v in values))
    return [Value(array, kind) for array, kind in zip(arrays, kinds, strict=True)]


def _only_factors(equation: Any, values: list[Value]) -> set[int]:
    """Inputs of a loop over layers that are weights of products only. They are narrowed once, before the loop."""
    if equation.primitive.name != "scan":
        return set()
    first = sum(loop_counts(equation.params))
    jaxpr = inlined(equation.params["jaxpr"]).jaxpr
    uses: dict[Any, list[tuple[Any, int]]] = {}
    _collect(jaxpr, uses)
    return {
        i
        for i, atom in enumerate(equation.invars)
        if i >= first and _is_float(atom.aval) and values[i].kind is FREE and _multiplied(jaxpr.invars[i], uses)
    }


def _collect(jaxpr: Jaxpr, uses: dict[Any, list[tuple[Any, int]]]) -> None:
    for equation in jaxpr.eqns:
        for i, atom in enumerate(equation.invars):
            if not isinstance(atom, Literal):
                uses.setdefault(atom, []).append((equation, i))
        if equation.primitive.name in REMAT:
            _collect(equation.params["jaxpr"], uses)
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            uses.setdefault(atom, []).append((None, 0))


def _multiplied(variable: Any, uses: dict[Any, list[tuple[Any, int]]]) -> bool:
    """Whether all uses of a variable are products, possibly of a transpose."""

    def product(equation: Any, at: int) -> bool:
        if equation is None:  # a result
            return False
        name = equation.primitive.name
        if name in REMAT:
            return _multiplied(equation.params["jaxpr"].invars[at], uses)
        if name in ("transpose", "reshape", "squeeze"):
            return _multiplied(equation.outvars[0], uses)
        return name in PRODUCTS

    return bool(uses.get(variable)) and all(product(*use) for use in uses[variable])


def _narrow_carries(equation: Any, values: list[Value]) -> set[int]:
    """Inputs of a loop that it carries in bfloat16: they are before the loop, and after each of its steps.

    The activations between layers are such values, if the loop is over layers. A recurrent state that starts as a
    constant is not, so it stays float32.
    """
    if equation.primitive.name != "scan":
        return set()
    first, count = loop_counts(equation.params)
    inner = inlined(equation.params["jaxpr"])
    narrow = {i for i in range(first, first + count) if values[i].kind is NARROW}
    after: list[Kind] = []

    def run(*arrays: Any) -> list[Any]:
        found = _step(inner, arrays, (first, count), narrow)
        after[:] = [v.kind for v in found]
        return [v.array for v in found]

    while narrow:
        jax.eval_shape(run, *(_stored(aval, i in narrow) for i, aval in enumerate(inner.in_avals)))
        wide = {i for i in narrow if after[i - first] is not NARROW}
        if not wide:
            break
        narrow -= wide
    return narrow


def _stored(aval: Any, narrow: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, HALF if narrow else aval.dtype)


def _step(inner: ClosedJaxpr, arrays: Sequence[Any], counts: tuple[int, int], narrow: set[int]) -> list[Value]:
    """The program inside a loop or a branch. ``counts``: of its inputs that are constants, and that are carried."""
    first, carried = counts
    kinds = [NARROW if i in narrow else WIDE if first <= i < first + carried else FREE for i in range(len(arrays))]
    return _evaluate(inner.jaxpr, inner.consts, list(map(Value, arrays, kinds)), [True] * len(inner.jaxpr.outvars))


def _rewritten(equation: Any, narrow: set[int], carries: set[int]) -> dict[str, Any]:
    """The parameters of a loop or a branch, with the programs inside rewritten. Other carries stay float32.

    narrow: numbers of the inputs that are bfloat16. carries: those of them that are carried.
    """
    first, carried = 0, 0
    if equation.primitive.name == "scan":
        first, carried = loop_counts(equation.params)
    elif equation.primitive.name == "while":
        first, carried = equation.params["body_nconsts"], 10**6

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        if not isinstance(value, ClosedJaxpr) or not any(map(_multiplies, value.jaxpr.eqns)):
            return value
        inner = inlined(value)

        def run(*arrays: Any) -> list[Any]:
            found = _step(inner, arrays, (first, carried), carries)
            typed = _typed(value.jaxpr.outvars, found)
            return [v.array if first + i in carries else typed[i] for i, v in enumerate(found)]

        return jax.make_jaxpr(run)(*(_stored(aval, i in narrow) for i, aval in enumerate(value.in_avals)))

    return {name: changed(value) for name, value in equation.params.items()}
