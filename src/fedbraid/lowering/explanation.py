"""Explains what lowering does to the clients of an algorithm, and reports options that have no effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedbraid.core import Algorithm, Exchange
from fedbraid.local import ClientData, Fold, LocalWork
from fedbraid.lowering import kernels
from fedbraid.lowering.grown import Growth, extent_of, grow
from fedbraid.lowering.microbatch import HIDDEN, WHOLE, recording_microbatches
from fedbraid.lowering.options import LoweringOptions
from fedbraid.lowering.programs import lower
from fedbraid.lowering.rewrite import recording
from fedbraid.lowering.smooth import activation_back_p, activation_p
from fedbraid.lowering.transposable import linear_p
from fedbraid.notices import notice

__all__ = ["Explanation", "Lanes", "explain", "notice_unmet"]

PyTree = Any


class Lanes(NamedTuple):
    """The settings of the plan "lanes" on which a program depends: matrices are stored as rows only on lanes."""

    lanes: int = 0  # clients that run at a time; 0 means another plan
    most: int = 0  # examples of the largest client; 0 means the cap of the client's data
    usual: int = 0  # examples of a typical client; 0 means those of the largest


NO_LANES = Lanes()


class Explanation(NamedTuple):
    """For each exchange, by name, lines about the program that its clients run."""

    convolutions: dict[str, list[str]]  # one line per convolution and max pool: how it runs, or why XLA runs it
    matrices: dict[str, list[str]]  # one line per matrix that is, or could be, stored as rows
    kernels: dict[str, list[str]]  # the GPU kernels of this library that the program calls
    gradients: dict[str, list[str]]  # how gradients are divided into microbatches; empty without `microbatch`

    def grown(self) -> list[str]:
        """The lines about matrices that are stored as rows."""
        return [line for lines in self.matrices.values() for line in lines if GROWN in line]


GROWN = "the shared matrix plus"


def explain(
    alg: Algorithm, params: PyTree, data: ClientData, options: LoweringOptions, on: Lanes = NO_LANES
) -> Explanation:
    """How clients of ``alg`` run. ``params`` and ``data`` may be shapes; nothing is computed.

    >>> from fedbraid.algorithms import fedavg
    >>> def loss(params, batch, key):
    ...     return jnp.sum(jax.lax.conv(batch["x"], params, (1, 1), "SAME") ** 2)
    >>> data = ClientData.of({"x": jnp.ones((5, 1, 8, 8))})
    >>> explain(fedavg(loss, batch_size=5), jnp.ones((2, 1, 3, 3)), data, LoweringOptions()).convolutions["train"]
    ['convolution of (5, 1, 8, 8) with (2, 1, 3, 3): matrix products (patches)']
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    found = Explanation({}, {}, {}, _gradients(alg, params, data, options))
    # with convolutions="native" the explanation rewrites a copy, to find the convolutions
    rewritten, lowered = lower(alg, LoweringOptions(precision=options.precision)), lower(alg, options)
    for exchange, other in zip(lowered.exchanges, rewritten.exchanges, strict=True):
        down = jax.eval_shape(exchange.send, server)
        with recording() as record:
            jax.eval_shape(other.client, down, state, data, key)
        lines = [line for part in record.values() for line in part]
        if options.convolutions == "native":
            lines = [f"{line.split(': ')[0]}: left to XLA, as asked" for line in lines]
        found.convolutions[exchange.name] = lines
        names: Counter[str] = Counter()
        found.matrices[exchange.name] = _matrices(exchange, down, state, data, key, options, on, names)
        if not (on.lanes and isinstance(exchange.client, LocalWork)):
            names.update(_kernel_names(jax.make_jaxpr(exchange.client)(down, state, data, key).jaxpr))
        found.kernels[exchange.name] = [f"{name} x {count}" for name, count in sorted(names.items())]
    return found


def _gradients(alg: Algorithm, params: PyTree, data: ClientData, options: LoweringOptions) -> dict[str, list[str]]:
    """For each exchange, lines about the gradients of its clients, if `microbatch` is set."""
    found: dict[str, list[str]] = {exchange.name: [] for exchange in alg.exchanges}
    if options.microbatch is None:
        return found
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    for exchange in lower(alg, options).exchanges:
        with recording_microbatches() as lines:
            jax.eval_shape(exchange.client, jax.eval_shape(exchange.send, server), state, data, key)
        found[exchange.name] = lines
    return found


def _matrices(
    exchange: Exchange, down, state, data, key, options: LoweringOptions, on: Lanes, names: Counter
) -> list[str]:
    """Lines about matrices. Adds the kernels of the steps that run on lanes to ``names``."""
    lines: list[str] = []
    if not (on.lanes and isinstance(exchange.client, LocalWork)):
        return lines

    def look(fold: Fold, down: PyTree, state: PyTree, data: ClientData, key: Any) -> None:
        slot = k = jnp.int32(0)
        growth = grow(
            lambda _: fold.begin(down, state, key),
            lambda _, k, carry: fold.advance(carry, k, down, data, key),
            (slot, k),
            extent_of(fold, on.most or data.cap, on.usual, on.lanes),
            options.matrices,
        )
        carry = fold.begin(down, state, key)
        lines.extend(_lines(growth, carry))
        rows = jax.tree.map(lambda a: a[0], growth.empty(1))
        names.update(_kernel_names(jax.make_jaxpr(growth.step)(slot, k, growth.rest(carry), rows).jaxpr))

    for fold in exchange.client.folds:
        jax.eval_shape(partial(look, fold), down, state, data, key)
    return lines


def _lines(growth: Growth, carry: PyTree) -> Iterator[str]:
    leaves = jax.tree_util.tree_leaves_with_path(carry)

    def named(leaf: int) -> str:
        path, value = leaves[leaf]
        return f"carry{jax.tree_util.keystr(path)} {value.shape}"

    for site in growth.sites:
        yield f"{named(site.leaf)}: {GROWN} {site.rows} rows a step, {site.most} at most"
    for leaf, reason in sorted(growth.whole.items()):
        yield f"{named(leaf)}: whole, {reason}"


def _kernel_names(jaxpr: Jaxpr) -> Iterator[str]:
    """Names of the Pallas kernels that a program calls, one for each call."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation.params["name"])
            continue
        if equation.primitive in (linear_p, activation_p, activation_back_p):
            avals: list[Any] = [atom.aval for atom in equation.invars]
            shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            yield from _kernel_names(jax.make_jaxpr(partial(equation.primitive.impl, **equation.params))(*shapes).jaxpr)
        for value in equation.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from _kernel_names(part.jaxpr if isinstance(part, ClosedJaxpr) else part)


def notice_unmet(
    alg: Algorithm, params: PyTree, data: ClientData, options: LoweringOptions, on: Lanes = NO_LANES
) -> None:
    """Tell the user about options that were set but have no effect in this run."""
    if options.precision in ("tf32", "bfloat16") and kernels.platform() == "cpu":
        notice(f"precision={options.precision!r} has no effect on a CPU, which computes all products in float32")
    _notice_microbatch(alg, params, data, options)
    if options.matrices != "grown":
        return
    if not on.lanes:
        notice("matrices='grown' has no effect: it needs the plan 'lanes', and this run has another plan")
        return
    found = explain(alg, params, data, options, on)
    if not found.grown():
        reasons = _reasons(line for lines in found.matrices.values() for line in lines)
        reasons = reasons or "clients have no matrix that starts with the same values on all of them"
        notice(f"matrices='grown' has no effect, no matrix can be stored as rows: {reasons}")


def _reasons(lines: Iterable[str]) -> str:
    """Why matrices are whole, each reason once, with the first of its matrices and their number.

    >>> _reasons(["a (2, 2): whole, too small", "b (3, 3): whole, too small"])
    'a (2, 2) and 1 more: whole, too small'
    """
    matrices: dict[str, list[str]] = {}
    for line in sorted(set(lines)):
        matrix, _, reason = line.partition(": ")
        matrices.setdefault(reason, []).append(matrix)
    return "; ".join(
        f"{first}{f' and {len(more)} more' if more else ''}: {reason}" for reason, (first, *more) in matrices.items()
    )


def _notice_microbatch(alg: Algorithm, params: PyTree, data: ClientData, options: LoweringOptions) -> None:
    """Tell the user about gradients that `microbatch` does not divide."""
    if options.microbatch is None:
        return
    lines = {line for lines in _gradients(alg, params, data, options).values() for line in lines}
    whole = sorted(line.removeprefix(WHOLE) for line in lines if line.startswith(WHOLE))
    if len(whole) == len(lines):
        reasons = "; ".join(whole) or "clients compute no gradient with fedbraid.local.grad or value_and_grad"
        notice(f"microbatch={options.microbatch} has no effect: {reasons}")
    elif HIDDEN in whole:
        notice(f"microbatch={options.microbatch} has no effect on some gradients: {HIDDEN}")
