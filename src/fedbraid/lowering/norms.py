"""Finds layer norms and root mean square norms in a jaxpr, with scale, shift and the residual before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedbraid.lowering.patterns import Graph, Node, bare, beside_vector, biased, reduced, vector

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
    found = _scaled(node, of)
    if found is not None:
        following, more = of.only_use(node), "mul" if found.scale is None else "add"
        return None if following is not None and beside_vector(following, node, more) is not None else found
    for scaled in node.args if node.name == "add" else ():
        shift = beside_vector(node, scaled, "add")
        found = _scaled(scaled, of) if shift is not None and of.only_use(scaled) is node else None
        if found is not None and found.scale is not None:
            return found._replace(shift=shift)
    return None


def _scaled(node: Node, of: Graph) -> NormalisedRows | None:
    """The norm whose last product or quotient is this node. Its factors may be multiplied in any order."""
    factors = list(_factors(node, of))
    for at, (factor, below) in enumerate(factors):
        deviation = bare(factor)
        if deviation.name != ("sqrt" if below else "rsqrt"):
            continue
        found = _moments(bare(deviation.args[0]))
        if found is None:
            continue
        x, epsilon, centred = found
        others = [each for i, (each, under) in enumerate(factors) if i != at and not under]
        values = [each for each in others if (_centred(each) if centred else each) is x and each.shape == node.shape]
        scales = [vector(each, node.shape[-1:]) for each in others if each not in values[:1]]
        if values and len(factors) <= 3 and len(scales) == len(factors) - 2 and None not in scales:
            return NormalisedRows(x, scales[0] if scales else None, None, epsilon, centred)
    return None


def _factors(node: Node, of: Graph) -> Iterator[tuple[Node, bool]]:
    """The factors of a product, and whether the product is divided by them."""
    if node.name not in ("mul", "div"):
        return
    for arg, below in zip(node.args, (False, node.name == "div"), strict=True):
        if not below and arg.name in ("mul", "div") and of.only_use(arg) is node:
            yield from _factors(arg, of)
        else:
            yield arg, below


def _moments(node: Node) -> tuple[Node, float, bool] | None:
    """(x, epsilon, True) of variance + epsilon, (x, epsilon, False) of the mean of squares + epsilon."""
    for part, other in (node.args, node.args[::-1]) if node.name == "add" else ():
        epsilon = other.number()
        if epsilon is None:
            continue
        squares, spread = _mean_of(part), bare(part)
        inner = None if squares is None else _squared(squares)
        if inner is not None:
            x = _centred(inner)
            return (inner, epsilon, False) if x is None else (x, epsilon, True)
        if spread.name == "sub":  # the mean of squares minus the square of the mean
            squares, mean = _mean_of(spread.args[0]), _squared(bare(spread.args[1]))
            x = None if squares is None else _squared(squares)
            if x is not None and mean is not None and _mean_of(mean) is x:
                return x, epsilon, True
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
