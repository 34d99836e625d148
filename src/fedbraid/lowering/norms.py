"""Finds layer norms and root mean square norms in a jaxpr, with scale, shift and the residual before them."""

from __future__ import annotations

from typing import NamedTuple

from fedbraid.lowering.patterns import Graph, Node, bare, beside_vector, biased, reduced

__all__ = ["NormalisedRows", "normalised_rows"]


class NormalisedRows(NamedTuple):
    """A layer norm or root mean square norm over the last axis, with its scale and shift, which may be None."""

    x: Node
    scale: Node | None
    shift: Node | None
    epsilon: float
    centred: bool
    added: tuple[Node, Node, Node | None] | None = None  # x is the sum of two values and a bias

    @property
    def inputs(self) -> tuple[Node, ...]:
        first = (self.x,) if self.added is None else self.added
        return tuple(node for node in (*first, self.scale, self.shift) if node is not None)


def normalised_rows(node: Node, of: Graph) -> NormalisedRows | None:
    """The norm that ends at a node, together with a residual connection before it."""
    found = _norm_at(node, of)
    return None if found is None else found._replace(added=_residual(found.x, of))


def _residual(x: Node, of: Graph) -> tuple[Node, Node, Node | None] | None:
    """(r, a, bias) of x = r + a + bias."""
    if x.name != "add" or any(arg.shape != x.shape or arg.name == "broadcast_in_dim" for arg in x.args):
        return None
    for r, branch in (x.args[::-1], x.args):
        before, bias = biased(branch, of)
        if bias is not None:
            return r, before, bias
    return x.args[0], x.args[1], None


def _norm_at(node: Node, of: Graph) -> NormalisedRows | None:
    """The norm whose last operation is this node: it may be followed by no further scale or shift."""
    found = _normalised(node)
    following = of.only_use(node)
    if found is not None:
        further = following is not None and beside_vector(following, node, "mul") is not None
        return None if further else NormalisedRows(found[0], None, None, *found[1:])
    for hat in node.args if node.name == "mul" else ():
        found = _normalised(hat) if of.only_use(hat) is node else None
        scale = None if found is None else beside_vector(node, hat, "mul")
        if found is not None and scale is not None:
            further = following is not None and beside_vector(following, node, "add") is not None
            return None if further else NormalisedRows(found[0], scale, None, *found[1:])
    for scaled in node.args if node.name == "add" else ():
        shift = beside_vector(node, scaled, "add")
        for hat in scaled.args if scaled.name == "mul" and shift is not None and of.only_use(scaled) is node else ():
            found = _normalised(hat) if of.only_use(hat) is scaled else None
            scale = None if found is None else beside_vector(scaled, hat, "mul")
            if found is not None and scale is not None:
                return NormalisedRows(found[0], scale, shift, *found[1:])
    return None


def _normalised(node: Node) -> tuple[Node, float, bool] | None:
    """(x, epsilon, whether the mean is subtracted) of (x - mean) / sqrt(variance + epsilon)."""
    pairs: tuple = ()
    if node.name == "mul":
        pairs = (node.args, node.args[::-1])
    elif node.name == "div":
        pairs = (node.args,)
    for value, factor in pairs:
        deviation = bare(factor)
        if deviation.name != ("rsqrt" if node.name == "mul" else "sqrt"):
            continue
        variance = bare(deviation.args[0])
        if variance.name != "add":
            continue
        for part, other in (variance.args, variance.args[::-1]):
            epsilon = other.number()
            squares = None if epsilon is None else _mean_of(part)
            centred = None if squares is None else _squared(squares)
            if epsilon is None or centred is None:
                continue
            x = _centred(centred)
            if x is not None and _centred(value) is x:
                return x, epsilon, True
            if centred is value and value.shape == node.shape:
                return value, epsilon, False
    return None


def _mean_of(node: Node) -> Node | None:
    """x if the node is the mean of x over its last axis."""
    node = bare(node)
    if node.name not in ("div", "mul"):
        return None
    for part, other in (node.args, node.args[::-1]) if node.name == "mul" else (node.args,):
        number, x = other.number(), reduced(bare(part), "reduce_sum")
        if number is not None and x is not None:
            count = 1 / number if node.name == "mul" and number else number
            return x if abs(count - x.shape[-1]) < 1e-3 else None
    return None


def _squared(node: Node) -> Node | None:
    if node.name == "square" or (node.name == "integer_pow" and node.params["y"] == 2):
        return node.args[0]
    return node.args[0] if node.name == "mul" and node.args[0] is node.args[1] else None


def _centred(node: Node) -> Node | None:
    """x if the node is x minus its mean over the last axis."""
    if node.name != "sub":
        return None
    x, mean = node.args
    return x if _mean_of(mean) is x else None
