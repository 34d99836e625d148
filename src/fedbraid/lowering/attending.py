"""Finds attention in a jaxpr: a product of queries and keys, a softmax, and a product with values.

The axes of the scores are followed from the first product to the second by labels, so the order in which a network has
its axes does not matter. Between the two products there may be a factor, a mask (that chooses scores, or is added to
them), dropout of the weights, casts and transposes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbraid.lowering.patterns import Graph, Node, bare, constant

__all__ = ["Attention", "Layout", "attention"]

Labels = tuple[Any, ...]  # of the axes of an array; None is an axis of size 1
MOVES = ("transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims")
LOW = -1e4  # masked scores are at most this
SWITCHED: dict[str, Callable[..., Any]] = {  # operations that may be between a boolean and two numbers
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": np.maximum,
    "min": np.minimum,
}


class Layout(NamedTuple):
    """A factor of attention: its node and the labels of its axes."""

    node: Node
    labels: Labels


class Attention(NamedTuple):
    """Attention over axes with labels. ``batch`` are those of sequences and heads, in the order of the queries."""

    query: Layout
    key: Layout
    value: Layout
    batch: Labels
    rows: Any  # of the queries
    shared: Any  # of queries that share keys and values; None if each has its own
    columns: Any  # of the keys
    inner: Any  # over which scores are summed, in queries
    scale: float
    mask: Layout | None
    causal: bool
    filler: float
    added: bool  # the filler is added to masked scores
    kept: Layout | None  # of the weights, by dropout
    factor: float  # of the weights that are kept
    result: Labels

    @property
    def inputs(self) -> tuple[Node, ...]:
        layouts = (self.query, self.key, self.value, self.mask, self.kept)
        return tuple(layout.node for layout in layouts if layout is not None)


class _Scores(NamedTuple):
    """What happened to the scores: before the softmax (no ``columns`` yet), then to the weights."""

    labels: Labels
    scale: float = 1.0
    mask: Layout | None = None
    filler: float = -1e30
    added: bool = False
    columns: Any = None
    kept: Layout | None = None
    factor: float = 1.0


def attention(node: Node, _: Graph) -> Attention | None:
    """The attention whose second product is this node."""
    if node.name != "dot_general":
        return None
    for side in (0, 1):
        path = _path(node.args[side])
        found = None if path is None else _attention(node, side, path)
        if found is not None:
            return found
    return None


def _path(node: Node) -> list[Node] | None:
    """The nodes from the product of queries and keys to the weights, if there is one softmax between them."""
    path, softmaxes = [node], 0
    while node.name != "dot_general":
        if node.name in (*MOVES, "convert_element_type", "copy"):
            node = node.args[0]
        elif (scores := _softmax(node)) is not None:
            node, softmaxes = scores[0], softmaxes + 1
        elif (step := _step(node)) is not None:
            node = step.before
        else:
            return None
        path.append(node)
        if not node.args:
            return None
    return path[::-1] if softmaxes == 1 else None


class _Step(NamedTuple):
    """An operation on scores or weights: ``factor * before``, and ``other`` where a switch is false.

    added: there ``before + other``.
    """

    before: Node
    factor: float = 1.0
    switch: Layout | None = None  # its labels are numbers of axes
    other: float = 0.0
    added: bool = False


def _step(node: Node) -> _Step | None:
    """The operation of a node that multiplies by a number, or replaces some of its input by a number."""
    if node.name == "div" and (number := node.args[1].number()):
        return _Step(node.args[0], 1 / number)
    for before, beside in (node.args, node.args[::-1]) if node.name in ("mul", "add") else ():
        number = beside.number()
        if node.name == "mul" and number is not None:
            return _Step(before, number)
        repeated = _unrepeated(beside)
        two = _two_values(repeated.node) if number is None and before.shape == node.shape else None
        if two is None:
            continue
        switch, (_, low, high) = repeated._replace(node=two[0]), two
        if node.name == "add" and high == 0 and low <= LOW:
            return _Step(before, 1.0, switch, low, added=True)
        if node.name == "mul" and low == 0 and high > 0:
            return _Step(before, high, switch)
    if node.name == "select_n" and (node.args[0].aval.dtype, node.args[0].shape) == (bool, node.shape):
        switch = _unrepeated(node.args[0])
        for kept in (2, 1):  # where the switch is true, and where it is false
            number = node.args[3 - kept].number()
            if number is not None:
                seen = switch if kept == 2 else switch._replace(node=_not(switch.node))
                return _Step(node.args[kept], 1.0, seen, number)
    return None


def _unrepeated(node: Node) -> Layout:
    """A node without the axes along which it is repeated, and the numbers of its axes."""
    axes: Labels = tuple(None if n == 1 else i for i, n in enumerate(node.shape))
    while node.name == "broadcast_in_dim" and node.args:
        where, (node,) = node.params["broadcast_dimensions"], node.args
        axes = tuple(None if n == 1 else axes[i] for i, n in zip(where, node.shape, strict=True))
    return Layout(node, axes)


def _not(node: Node) -> Node:
    values = constant(node)
    return Node("not", node.aval, None, (node,)) if values is None else _held(~values)


def _held(values: np.ndarray) -> Node:
    return Node("constant", jax.ShapeDtypeStruct(values.shape, values.dtype), None, value=values)


def _two_values(node: Node) -> tuple[Node, float, float] | None:
    """(boolean, low, high) of an array that is ``high`` where the boolean is true and ``low`` elsewhere."""
    values = constant(node)
    if values is not None:
        low, *more = np.unique(values).tolist() or [0.0]
        return (_held(values == more[0]), float(low), float(more[0])) if len(more) == 1 else None
    sources: list[Node] = []
    false, true = (_evaluated(node, flag, sources) for flag in (False, True))
    if false is None or true is None or false == true or any(source is not sources[0] for source in sources):
        return None
    if sources[0].shape != node.shape:  # one boolean for all entries
        return None
    return (sources[0] if true > false else _not(sources[0])), min(false, true), max(false, true)


def _evaluated(node: Node, flag: bool, sources: list[Node]) -> float | None:
    """The value of a node, computed entry by entry from a boolean that is ``flag``. The boolean is added to sources."""
    number = node.number()
    if number is not None:
        return number
    if node.aval.dtype == bool:
        sources.append(node)
        return float(flag)
    if node.name not in SWITCHED or constant(node) is not None:
        return None
    args = []
    for arg in node.args:
        value = _evaluated(arg, flag, sources)
        if value is None:
            return None
        args.append(np.float32(value))
    with np.errstate(all="ignore"):
        return float(np.asarray(SWITCHED[node.name](*args)).astype(node.aval.dtype))


def _softmax(node: Node) -> tuple[Node, int] | None:
    """(x, axis) of a softmax."""
    if node.name != "div":
        return None
    powers, total = node.args[0], bare(node.args[1])
    if total.name != "reduce_sum" or total.args[0] is not powers or len(total.params["axes"]) != 1:
        return None
    if powers.name != "exp" or powers.args[0].name != "sub":
        return None
    axis = int(total.params["axes"][0])
    x, largest = powers.args[0].args
    if axis != len(x.shape) - 1:
        return None
    largest = bare(largest, stopped=True)
    return (x, axis) if largest.name == "reduce_max" and largest.args[0] is x else None


def _product_labels(node: Node) -> tuple[Labels, Labels, Labels, Any]:
    """Labels of both factors and of the result of a product, and the label over which it sums."""
    (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
    sides: list[list[Any]] = [[("l", i) for i in range(len(node.args[0].shape))],
                              [("r", i) for i in range(len(node.args[1].shape))]]  # fmt: skip
    for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        sides[0][a] = sides[1][b] = ("b", i)
    for a, b in zip(left, right, strict=True):
        sides[0][a] = sides[1][b] = ("sum", a)
    free = [x for side in sides for x in side if x[0] in "lr"]
    named = [
        tuple(None if node.args[s].shape[i] == 1 else label for i, label in enumerate(side))
        for s, side in enumerate(sides)
    ]
    out = [("b", i) for i in range(len(left_batch))] + free
    result = tuple(None if size == 1 else label for size, label in zip(node.shape, out, strict=True))
    return named[0], named[1], result, ("sum", left[0]) if len(left) == 1 else None


def _moved(node: Node, labels: Labels) -> Labels | None:
    """The labels after a node that moves axes or adds some of size 1."""
    if node.name == "transpose":
        return tuple(labels[i] for i in node.params["permutation"])
    kept = [label for label in labels if label is not None]
    before = [size for size in node.args[0].shape if size != 1]
    after = [size for size in node.shape if size != 1]
    if node.name == "broadcast_in_dim":
        where = list(node.params["broadcast_dimensions"])
        if where != sorted(where) or before != after:
            return None
    if before != after:
        return None
    left = iter(kept)
    return tuple(None if size == 1 else next(left) for size in node.shape)


def _follow(path: list[Node], scores: _Scores) -> _Scores | None:
    for before, node in pairwise(path):
        if node.name in ("convert_element_type", "copy"):
            continue
        if node.name in MOVES:
            labels = _moved(node, scores.labels)
            if labels is None:
                return None
            scores = scores._replace(labels=labels)
        elif (softmax := _softmax(node)) is not None and softmax[0] is before:
            scores = scores._replace(columns=scores.labels[softmax[1]])
        else:
            step = _step(node)
            found = None if step is None else _after(step, scores)
            if found is None:
                return None
            scores = found
    return scores


def _after(step: _Step, scores: _Scores) -> _Scores | None:
    """The scores, or the weights, after one operation."""
    switch = None
    if step.switch is not None:
        labels = tuple(None if axis is None else scores.labels[axis] for axis in step.switch.labels)
        switch = Layout(step.switch.node, labels)
    if scores.columns is not None:  # dropout
        if switch is not None and (step.other != 0 or scores.kept is not None):
            return None
        return scores._replace(kept=switch or scores.kept, factor=scores.factor * step.factor)
    if scores.mask is not None or (switch is not None and not step.other <= LOW):
        return None
    if switch is None:
        return scores._replace(scale=scores.scale * step.factor)
    return scores._replace(mask=switch, filler=max(step.other, -1e38), added=step.added)


def _attention(node: Node, side: int, path: list[Node]) -> Attention | None:
    scored = path[0]
    left, right, out, inner = _product_labels(scored)
    scores = _follow(path, _Scores(out))
    if scores is None or inner is None or scores.columns is None or scores.columns[0] not in "lr":
        return None
    key_side = 0 if scores.columns[0] == "l" else 1
    layouts = (Layout(scored.args[0], left), Layout(scored.args[1], right))
    key, query = layouts[key_side], layouts[1 - key_side]
    batch = tuple(x for x in query.labels if x is not None and x[0] == "b")
    free = [x for x in query.labels if x is not None and x[0] in "lr"]
    if [x for x in key.labels if x is not None and x[0] in "lr"] != [scores.columns] or len(batch) > 2:
        return None
    value, result = _value_labels(node, side, scores)
    if value is None or set(batch) != {x for x in value.labels if x is not None and x[0] == "b"}:
        return None
    (query, first), (key, second) = _unscaled(query), _unscaled(key)
    scale = scores.scale * first * second
    mask = _known_mask(scores)
    chosen = _rows(free, None if mask is None else mask[0], query)
    if chosen is None:
        return None
    rows, shared = chosen
    pattern, causal = (None, False) if mask is None else mask
    if causal and pattern is not None and rows not in pattern.labels:
        return None
    if causal:
        size = dict(zip(query.labels, query.node.shape, strict=True))[rows]
        if size != dict(zip(key.labels, key.node.shape, strict=True))[scores.columns]:
            return None
        pattern = None
    return Attention(query, key, value, batch, rows, shared, scores.columns, inner, scale, pattern, causal,
                     scores.filler, scores.added, scores.kept, scores.factor, result)  # fmt: skip


def _unscaled(factor: Layout) -> tuple[Layout, float]:
    """Queries or keys without a number that they are multiplied by, and without transposes; and the number."""
    (node, labels), number = factor, 1.0
    while True:
        step = _step(node)
        if step is not None and step.switch is None and step.before.shape == node.shape:
            node, number = step.before, number * step.factor
        elif node.name == "transpose":
            order = node.params["permutation"]
            node, labels = node.args[0], tuple(labels[order.index(axis)] for axis in range(len(labels)))
        else:
            return Layout(node, labels), number


def _rows(free: list[Any], mask: Layout | None, query: Layout) -> tuple[Any, Any] | None:
    """Which of the queries' free labels is the position, and which counts queries that share keys."""
    if len(free) == 1:
        return free[0], None
    if len(free) != 2:
        return None
    sizes = dict(zip(query.labels, query.node.shape, strict=True))
    inside = [x for x in free if mask is not None and x in mask.labels]
    if len(inside) == 2:
        return None
    rows = inside[0] if inside else max(free, key=lambda x: sizes[x])
    return rows, next(x for x in free if x != rows)


def _value_labels(node: Node, side: int, scores: _Scores) -> tuple[Layout | None, Labels]:
    """The layout of the values in terms of the scores' labels, and the labels of the second product's result."""
    named = _product_labels(node)
    weights, values, out, inner = named[side], named[1 - side], named[2], named[3]
    meaning = {theirs: ours for theirs, ours in zip(weights, scores.labels, strict=True) if theirs is not None}
    if inner is None or meaning.get(inner) != scores.columns:
        return None, ()
    node_value = node.args[1 - side]
    labels = tuple(meaning.get(x, "value") if x is not None else None for x in values)
    if labels.count("value") != 1 or labels.count(scores.columns) != 1:
        return None, ()
    return Layout(node_value, labels), tuple(meaning.get(x, "value") if x is not None else None for x in out)


def _known_mask(scores: _Scores) -> tuple[Layout, bool] | None:
    """The mask, and whether it is the causal one. A constant mask becomes an array over the axes it depends on."""
    if scores.mask is None:
        return None
    values = constant(scores.mask.node)
    if values is None:
        return scores.mask, False
    labels = list(scores.mask.labels)
    for axis in reversed(range(len(labels))):  # axes along which it is the same
        first = values.take([0], axis)
        if (values == first).all():
            values = first.squeeze(axis)
            labels.pop(axis)
    causal = values.ndim == 2 and labels[1] == scores.columns and values.shape[0] == values.shape[1]
    turned = values.ndim == 2 and labels[0] == scores.columns
    values, labels = (values.T, labels[::-1]) if turned else (values, labels)
    causal = (causal or turned) and np.array_equal(values, np.tri(*values.shape, dtype=bool))
    return Layout(
        _held(values), tuple(None if n == 1 else x for n, x in zip(values.shape, labels, strict=True))
    ), causal
