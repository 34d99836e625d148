"""Checks that the parts of an algorithm fit together, before anything compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from fedbraid.core.arguments import is_zero
from fedbraid.core.contract import (
    RESERVED,
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Guarantee,
    Logged,
    Report,
    Up,
    noised,
    numbers_drawn,
    receive_noised,
    reduce_reports,
)
from fedbraid.core.place import failure

__all__ = [
    "MessageShapes",
    "StructureError",
    "check_structure",
    "message_shapes",
]

PyTree = Any


class StructureError(ValueError):
    """An algorithm whose parts do not fit together. The message names the exchange and the leaf."""


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _must_match(where: str, expected: PyTree, got: PyTree) -> None:
    want, have = jax.tree.structure(expected), jax.tree.structure(got)
    if want != have:
        raise StructureError(f"{where}: expected the tree {want}, got {have}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True)
    for (path, a), b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            leaf = jax.tree_util.keystr(path) or "the value"
            raise StructureError(f"{where}: leaf {leaf} should be {_describe(a)}, got {_describe(b)}")


def _check_arrays(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not (hasattr(leaf, "shape") or isinstance(leaf, int | float | complex)):
            raise StructureError(
                f"params{jax.tree_util.keystr(path)} is {leaf!r}, a {type(leaf).__name__}: parameters must be arrays. "
                "For a module that holds more than arrays, use init and loss of fedbraid.models.from_equinox(module)"
            )


def _shapes(where: str, function: Callable, *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except StructureError:
        raise
    except Exception as error:
        raise StructureError(failure(where, error)) from error


def _check_keeps(where: str, exchange: Exchange, report: Report) -> None:
    """Refuse a ``reconcile`` that reads parts of the decoded upload which ``keeps`` does not name."""
    given = (report.state, report.up, report.up)
    reconciled = _shapes(f"{where}, reconcile", exchange.reconcile, *given)
    _must_match(f"{where}, reconciled client state", report.state, reconciled)
    jaxpr, tree = jax.make_jaxpr(exchange.reconcile)(*given).jaxpr, jax.tree.structure(report.up)
    decoded = jax.tree.unflatten(tree, jaxpr.invars[len(jaxpr.invars) - tree.num_leaves :])
    for part in set(Up._fields) - set(exchange.keeps) if isinstance(report.up, Up) else ():
        reached = set(jax.tree.leaves(getattr(decoded, part)))
        for equation in jaxpr.eqns:
            if any(isinstance(atom, Var) and atom in reached for atom in equation.invars):
                reached |= set(equation.outvars)
        if any(isinstance(atom, Var) and atom in reached for atom in jaxpr.outvars):
            raise StructureError(f"{where}: reconcile reads the {part}, so keeps must name it, got {exchange.keeps}")


def _zeros(like: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, like)


def _check_noise_is_drawn(where: str, sealed: Guarantee | None, up: PyTree, aggregate: Aggregate, down: Down) -> None:
    """Refuse a guarantee of noise whose functions draw none: their noise would come from elsewhere, or not at all."""
    if sealed is None or is_zero(sealed.noise):
        return
    scalar = aggregate.count
    if not numbers_drawn(sealed.client, up, down) + numbers_drawn(sealed.server, aggregate, scalar, down):
        raise StructureError(
            f"{where} promises noise (noise={sealed.noise}), but neither function of its guarantee draws any: take "
            "the noise from draw, never from a key"
        )


def _check_logs(where: str, logs: dict[str, Any], metrics: dict[str, Any]) -> None:
    for name, value in logs.items():
        if value.shape != ():
            raise StructureError(f"{where}: log {name!r} of receive must be a scalar, got {_describe(value)}")
        if name in metrics or name in RESERVED:
            taken = "clients report a metric" if name in metrics else "the engine has a column"
            raise StructureError(f"{where}: receive logs {name!r}, but {taken} of that name: choose another name")


class MessageShapes(NamedTuple):
    """What one exchange sends, as shapes and dtypes."""

    name: str
    down: Down
    up: PyTree
    metrics: tuple[str, ...] = ()  # names of the metrics that clients report


def message_shapes(alg: Algorithm, params: PyTree, data: PyTree) -> tuple[MessageShapes, ...]:
    """Check that all parts of an algorithm fit, and return the messages of every exchange, by ``jax.eval_shape``.

    ``data`` is the argument of a client function: a ``ClientData`` of arrays or of shapes.
    """
    _check_arrays(params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    server = _shapes("init", alg.init, params)
    state = _shapes("init_client", alg.init_client, params)
    given = jax.eval_shape(lambda p: p, params)
    _must_match("params(server)", given, _shapes("params", alg.params, server))
    if alg.personal is not None:
        _must_match("personal(server, client_state)", given, _shapes("personal", alg.personal, server, state))
    if not alg.exchanges:
        raise StructureError("an algorithm needs at least one exchange")
    if alg.exchanges[0].cohort == "same":
        raise StructureError(f"exchange {alg.exchanges[0].name!r} is the first: its cohort cannot be 'same'")
    names = [e.name for e in alg.exchanges]
    if len(set(names)) < len(names):
        raise StructureError(f"exchanges need different names, got {names}")
    messages = []
    for exchange in alg.exchanges:
        where = f"exchange {exchange.name!r}"
        down = _shapes(f"{where}, send", exchange.send, server)
        if not isinstance(down, Down):
            raise StructureError(f"{where}: send must return a Down, got {type(down).__name__}")
        report = _shapes(f"{where}, client", exchange.client, down, state, data, key)
        if not isinstance(report, Report):
            raise StructureError(f"{where}: client must return a Report, got {type(report).__name__}")
        if getattr(report.weight, "shape", ()) != ():
            raise StructureError(f"{where}: weight must be a scalar, got {_describe(report.weight)}")
        for name, value in report.metrics.items():
            if value.shape != ():
                raise StructureError(f"{where}: metric {name!r} must be a scalar, got {_describe(value)}")
        if exchange.sealed is not None:
            report = _shapes(f"{where}, noise", lambda r, d, e=exchange: noised(e, r, d, _zeros), report, down)
        _must_match(f"{where}, client state", state, report.state)
        _check_keeps(where, exchange, report)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), report.up)
        reduced = _shapes(
            f"{where}, reducer",
            lambda ups, w, r=exchange.reducer: reduce_reports(r, ups, w),
            one,
            jax.ShapeDtypeStruct((1,), jnp.float32),
        )
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        aggregate = Aggregate(reduced[0], scalar, scalar, scalar)

        def receive(*given: Any, e: Exchange = exchange) -> Logged:
            return receive_noised(e, *given, draw=_zeros)

        received = _shapes(f"{where}, receive", receive, server, aggregate, scalar, key)
        _must_match(f"{where}, server", server, received.server)
        _check_logs(where, received.logs, report.metrics)
        _check_noise_is_drawn(where, exchange.sealed, report.up, aggregate, down)
        messages.append(MessageShapes(exchange.name, down, report.up, tuple(report.metrics)))
    return tuple(messages)


def check_structure(alg: Algorithm, params: PyTree, data: PyTree) -> None:
    """Refuse an algorithm whose parts do not fit together, before anything compiles."""
    message_shapes(alg, params, data)
