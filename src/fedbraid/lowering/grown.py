"""Which matrices of a client are stored as rows, and the local step on them.

A step of gradient descent on a dense layer adds ``x' (-rate dy)`` to its weights: a product of the batch's inputs and
of the gradients of its outputs, with one row for each example of the batch. After ten steps of twenty examples a client
has changed its 9,216 x 128 weights by 200 such rows. If these rows are stored, the weights of each client need not be
written: every product with them is computed from the shared matrix and the rows (:mod:`fedbraid.lowering.symbolic`).
On a GPU, most of the time of a dense layer is reading and writing each client's own weights. Rows need a fraction of
this memory traffic if clients take few steps.

This module does not depend on gradient descent. A matrix qualifies if all clients start with the same one, if a step
uses it in products only, and if the step returns a linear combination of it and of products over a batch. The local
steps of FedAvg, of FedProx and of a user's own plain algorithm do so. A matrix that is used in any other way, by
momentum, a norm or a cast, is stored whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from fedbraid.local import Fold
from fedbraid.lowering import kernels
from fedbraid.lowering.epilogues import find_epilogues
from fedbraid.lowering.halves import rounded_leaves, run_rounded
from fedbraid.lowering.options import Matrices
from fedbraid.lowering.rows import Rows, Site, upright
from fedbraid.lowering.symbolic import Leaf, Pair, Sum, follow_step, run_step, value_of
from fedbraid.lowering.updates import find_updates, opened

__all__ = ["Extent", "Growth", "extent_of", "grow"]

PyTree = Any
Array = Any
HEAVY = 4e6  # bytes of all clients, a microsecond of a GPU's memory
WORTH = 2e8  # bytes of memory traffic per step that must be saved to pay for the launches of more kernels


@dataclass(frozen=True)
class Growth:
    """How the carry of a fold is stored on lanes: some of its matrices as rows, all other leaves as they are."""

    tree: Any
    sites: tuple[Site, ...]  # in the order of leaves
    step: Callable  # (slot, k, leaves, rows) -> (leaves, rows)
    whole: dict[int, str] = field(default_factory=dict)  # other matrices, and why they are not stored as rows
    halves: tuple[int, ...] = ()  # leaves of which a copy in bfloat16 is stored, too: after all others

    def empty(self, lanes: int) -> tuple[Rows, ...]:
        """Buffers for the rows of ``lanes`` clients."""
        return tuple(site.empty(lanes) for site in self.sites)

    def rest(self, carry: PyTree) -> list[Array]:
        """The leaves of a carry that are not stored as rows."""
        grown, leaves = {site.leaf for site in self.sites}, jax.tree.leaves(carry)
        whole = [leaf for i, leaf in enumerate(leaves) if i not in grown]
        return whole + [leaves[i].astype(jnp.bfloat16) for i in self.halves]

    def matrices(self, rows: tuple[Rows, ...]) -> list[Array]:
        """The matrices on all lanes; every row of the buffers must be filled."""
        return [site.start + jax.vmap(site.added)(each) for site, each in zip(self.sites, rows, strict=True)]

    def matrices_on(self, rows: tuple[Rows, ...], lane: Array, k: Array) -> list[Array]:
        """The matrices on some lanes, after ``k`` steps."""
        return [
            site.start + jax.vmap(partial(site.added_on, each))(lane, k * site.rows)
            for site, each in zip(self.sites, rows, strict=True)
        ]

    def carry(self, rest: list[Array], matrices: list[Array]) -> PyTree:
        """One client's whole carry."""
        leaves = list(rest[: len(rest) - len(self.halves)])
        for site, matrix in zip(self.sites, matrices, strict=True):
            leaves.insert(site.leaf, matrix)
        return jax.tree.unflatten(self.tree, leaves)


class Extent(NamedTuple):
    """Numbers of steps and of clients, from which the number of rows follows."""

    most: int  # steps of the largest client
    usual: int  # steps of a typical client
    lanes: int  # clients that run at a time


def extent_of(fold: Fold, most: int, usual: int, lanes: int) -> Extent:
    """The extent of a fold over clients of at most ``most`` examples, typically ``usual`` (0 means ``most``)."""
    longest, middle = (int(fold.batches.count(np.int64(n))) for n in (most, usual or most))
    return Extent(longest, middle, lanes)


def grow(
    begin: Callable, advance: Callable, example: tuple[Array, Array], extent: Extent, how: Matrices = "auto"
) -> Growth:
    """Which matrices of a fold's carry are stored as rows, and the fold's step on them.

    Args:
        begin: (slot) -> carry.
        advance: (slot, k, carry) -> carry, one step of one client.
        example: slot and k, of the right types.
        extent: how many steps clients take, and how many clients run at a time.
        how: "auto" stores a matrix as rows if it saves memory traffic on a GPU, "grown" wherever possible, "whole"
            never.
    """
    opening, carry = jax.make_jaxpr(begin, return_shape=True)(example[0])
    avals, tree = jax.tree.flatten(carry)

    def plainly(slot: Array, k: Array, leaves: list[Array], rows: tuple = ()) -> tuple[list[Array], tuple]:
        return jax.tree.leaves(advance(slot, k, jax.tree.unflatten(tree, leaves))), rows

    wanted = how == "grown" or (how == "auto" and kernels.available())
    shared = {i: start for i, start in _shared(opening).items() if wanted and _is_matrix(avals[i])}
    whole = {i: TOO_SMALL for i in shared if how == "auto" and not _large(avals[i], extent)}
    candidates = {i: start for i, start in shared.items() if i not in whole}
    if not candidates and not (kernels.available() and any(_is_heavy(aval, extent) for aval in avals)):
        return Growth(tree, (), plainly, whole)
    step = jax.make_jaxpr(lambda slot, k, *leaves: plainly(slot, k, list(leaves))[0])(*example, *avals)
    while candidates:
        found, refused = _rehearse(step, example, avals, candidates, extent, how)
        whole |= refused
        if not refused:
            sites = tuple(found[i] for i in sorted(found))
            return Growth(tree, sites, partial(run_step, step, sites), whole)
        candidates = {i: candidates[i] for i in found}  # rejected matrices are now whole, and may use one of these
    halves = tuple(i for i in rounded_leaves(step, 2) if _is_heavy(avals[i], extent))
    if not halves:
        return Growth(tree, (), plainly, whole)
    step = opened(step)
    run = partial(run_rounded, step, halves, find_updates(step, 2, halves), find_epilogues(step))
    return Growth(tree, (), run, whole, halves)


def _shared(opening: ClosedJaxpr) -> dict[int, Array]:
    """Leaves of the first carry that are the same for all clients, and their values."""
    known = dict(zip(opening.jaxpr.constvars, opening.consts, strict=True))
    outputs = enumerate(opening.jaxpr.outvars)
    return {i: known[v] for i, v in outputs if not isinstance(v, Literal) and v in known}


def _is_matrix(aval: Any) -> bool:
    return aval.ndim == 2 and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_heavy(aval: Any, extent: Extent) -> bool:
    """Whether it is worth storing a leaf in bfloat16, too: reading it in float32 takes longer than a launch."""
    return aval.dtype == jnp.float32 and extent.lanes * aval.size * 4 > HEAVY


def _is_half(pair: Pair) -> bool:
    """Whether the factors of a product are rounded to bfloat16."""
    return "BF16_BF16_F32" in str(pair.precision) or jnp.bfloat16 in (pair.a.dtype, pair.b.dtype)


def _large(aval: Any, extent: Extent) -> bool:
    """Whether rows can save enough memory traffic at all."""
    return aval.dtype == jnp.float32 and extent.lanes * aval.size * 16 > WORTH


def _pays(site: Site, extent: Extent) -> bool:
    """Whether rows move less memory than the matrix, which every client reads twice and writes once a step.

    A client's rows are read twice a step, too: on average half of them are filled. A few clients may take many steps,
    so the buffers may be larger than the matrix, but not by much.
    """
    matrix = site.start.size * site.start.dtype.itemsize
    row = max(site.start.shape) * jnp.dtype(site.dtype).itemsize
    moved = site.rows * (extent.usual + 4) * row
    return extent.lanes * (4 * matrix - moved) > WORTH and moved < 2 / 3 * 4 * matrix and site.most * row <= 8 * matrix


TOO_SMALL = "too small for rows to save much memory traffic"
OTHERWISE = "a step does more than multiply it and add products over the batch to it"
GRADIENT_SEEN = "a step uses its gradient elsewhere too"
TOO_LONG = "clients take too many steps for rows to save memory traffic"


def _rehearse(
    step: ClosedJaxpr, example: tuple, avals: list, candidates: dict[int, Array], extent: Extent, how: Matrices
) -> tuple[dict[int, Site], dict[int, str]]:
    """Traces a step: the candidates that can be stored as rows, and for each other the reason why not."""
    found: dict[int, Site] = {}
    refused: dict[int, str] = {}

    def judge(leaf: Leaf, value: Any) -> str | None:
        """Why a matrix cannot be stored as rows, or None."""
        if leaf.seen or not isinstance(value, Sum) or value.leaf is not leaf or value.turned or value.base != 1:
            return OTHERWISE
        if value.old is None or not value.new:
            return OTHERWISE
        return GRADIENT_SEEN if any(any(pair.seen) for pair in value.new) else None

    def run(slot, k, *rest):
        trials = [Site(i, 0, 1, start.dtype, start, upright(start)) for i, start in candidates.items()]
        leaves = [Leaf(t, Rows(*(a[0] for a in t.empty(1))), jnp.int32(0)) for t in trials]
        outputs = follow_step(step, slot, k, rest, leaves)
        for i, value in enumerate(outputs):
            if i not in candidates:
                value_of(value)
        for leaf in leaves:
            site, value = leaf.site, outputs[leaf.site.leaf]
            reason = judge(leaf, value)
            if reason is None:
                rows = sum(pair.a.shape[0] for pair in value.new)
                half = all(map(_is_half, value.new)) and kernels.available()
                site = replace(site, rows=rows, most=rows * extent.most, dtype=jnp.bfloat16 if half else site.dtype)
                reason = None if how == "grown" or _pays(site, extent) else TOO_LONG
            if reason is None:
                found[site.leaf] = site
            else:
                refused[site.leaf] = reason

    jax.eval_shape(run, *example, *(aval for i, aval in enumerate(avals) if i not in candidates))
    return {i: replace(site, base=upright(site.start).astype(site.dtype)) for i, site in found.items()}, refused
