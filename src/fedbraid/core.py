"""The one abstraction: a federated algorithm is a short, fixed tuple of exchanges.

In an exchange the server sends one message to a cohort, each client computes an upload from it, its own state and its
own data, the uploads are reduced, and the server takes the result in. Everything is a pure function over pytrees, so
the simulator, a deployment and the cost of a round are three interpreters of the same object.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = [
    "MEAN",
    "UNIFORM_AUX",
    "Aggregate",
    "Algorithm",
    "Down",
    "Exchange",
    "Reducer",
    "Report",
    "StaticValueError",
    "StructureError",
    "Up",
    "check_choice",
    "check_count",
    "check_number",
    "check_structure",
    "finite",
    "is_traced",
    "is_zero",
    "keep",
    "message_shapes",
    "reduce_reports",
    "replace_exchange",
]

PyTree = Any
Scalar = Any


class Down(NamedTuple):
    """Downlink: exactly what is sent to a client."""

    params: PyTree
    aux: PyTree = ()


class Up(NamedTuple):
    """Uplink: exactly what is sent to the server, which moves along ``-pseudograd``."""

    pseudograd: PyTree
    aux: PyTree = ()


class Report(NamedTuple):
    """What a client function returns: the upload, how much it counts, and what stays on the client."""

    up: PyTree
    weight: Scalar
    state: PyTree = ()
    metrics: dict[str, Scalar] = {}  # noqa: RUF012  (read only: NamedTuple defaults cannot be factories)


class Aggregate(NamedTuple):
    """What ``receive`` is given: the reduced uploads, and who they came from."""

    up: PyTree
    weight: Scalar  # total weight of the uploads that arrived
    count: Scalar  # number of uploads that arrived
    population: Scalar  # number of clients there are: SCAFFOLD's N


class Reducer(NamedTuple):
    """How uploads become one: ``finish(sum of lift(up, weight), total weight, count)``.

    With ``gather=True`` the lifted uploads are stacked instead of summed and ``weight`` is the vector of their weights,
    0 for those that did not arrive: rank rules (median, Krum) need to see them all.
    """

    lift: Callable  # (up, weight) -> summand
    finish: Callable  # (combined, weight, count) -> reduced up
    gather: bool = False


def _weighted(up: PyTree, weight: Scalar) -> PyTree:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(weight, leaf.dtype), up)


def _divide(total: PyTree, weight: Scalar, count: Scalar) -> PyTree:
    del count
    safe = jnp.where(weight > 0, weight, 1)
    return jax.tree.map(lambda leaf: leaf / safe.astype(leaf.dtype), total)


MEAN = Reducer(_weighted, _divide)
"""The weighted mean of the uploads that arrived; weights re-normalise by themselves."""


def _lift_apart(up: Up, weight: Scalar) -> Up:
    return Up(MEAN.lift(up.pseudograd, weight), MEAN.lift(up.aux, weight > 0))


def _finish_apart(total: Up, weight: Scalar, count: Scalar) -> Up:
    return Up(MEAN.finish(total.pseudograd, weight, count), MEAN.finish(total.aux, count, count))


UNIFORM_AUX = Reducer(_lift_apart, _finish_apart)
"""The weighted mean of the pseudogradients, and the unweighted mean of what comes beside them."""


def keep(state: PyTree, meant: PyTree, decoded: PyTree) -> PyTree:
    """The reconciliation of a client whose state does not depend on how its upload was decoded."""
    del meant, decoded
    return state


def finite(up: PyTree) -> Scalar:
    """Whether every number of an upload is finite: the default admission to the reduction."""
    floats = [leaf for leaf in jax.tree.leaves(up) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    # By the largest along the last axis first: a GPU gives what is left of a client to one block, slow for a large
    # upload; and on a CPU a maximum, which sees what is not a number, is twice as fast as asking each of them.
    largest = [jnp.max(jnp.abs(leaf), axis=-1 if leaf.ndim else None, initial=0) for leaf in floats]
    return jnp.all(jnp.stack([jnp.all(rows < jnp.inf) for rows in largest])) if floats else jnp.array(True)


class Exchange(NamedTuple):
    """One there and back between the server and a cohort."""

    name: str
    send: Callable  # (server) -> Down
    client: Callable  # (down, client_state, data, key) -> Report; often a LocalWork
    receive: Callable  # (server, Aggregate, key) -> server
    reducer: Reducer = MEAN
    reconcile: Callable = keep  # (client_state, meant Up, Up as decoded by the server) -> client_state
    cohort: Literal["fresh", "same"] = "fresh"
    admit: Callable = finite  # (up) -> bool: an upload refused here counts as not arrived


class Algorithm(NamedTuple):
    """A federated algorithm. Build one with a factory such as :func:`fedbraid.algorithms.fedavg`."""

    init: Callable  # (params) -> server
    init_client: Callable  # (params) -> client_state, () when stateless
    exchanges: tuple[Exchange, ...]
    params: Callable  # (server) -> params to evaluate


def replace_exchange(alg: Algorithm, name: str, change: Callable[[Exchange], Exchange]) -> Algorithm:
    """The same algorithm with one exchange changed: what most transforms do."""
    if name not in [e.name for e in alg.exchanges]:
        raise ValueError(f"no exchange named {name!r} here; this algorithm has {[e.name for e in alg.exchanges]}")
    return alg._replace(exchanges=tuple(change(e) if e.name == name else e for e in alg.exchanges))


def reduce_reports(reducer: Reducer, ups: PyTree, weights: Any) -> tuple[PyTree, Any, Any]:
    """Reduce stacked uploads ``[n, ...]``: (reduced up, total weight, count). Absent ones have weight 0.

    >>> up, weight, count = reduce_reports(MEAN, {"w": jnp.array([1.0, 5.0, 9.0])}, jnp.array([1.0, 3.0, 0.0]))
    >>> float(up["w"]), float(weight), int(count)
    (4.0, 4.0, 2)
    """
    lifted = jax.vmap(reducer.lift)(ups, weights)
    count = jnp.sum(weights > 0)
    if reducer.gather:
        return reducer.finish(lifted, weights, count), jnp.sum(weights), count
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), lifted)
    return reducer.finish(total, jnp.sum(weights), count), jnp.sum(weights), count


# --- checks of arguments: concrete values are judged here, tracers pass (a sweep is a vmap) ---------------------------


def is_traced(value: Any) -> bool:
    """Whether a value is known only when the program runs."""
    return isinstance(value, Tracer)


def check_number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low=False, open_high=False
) -> Any:
    """``value`` if it is a number in the range, else a ValueError that names the argument, the value and the range."""
    if is_traced(value):
        return value
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    allowed = f"a finite number in {left}{low:g}, {high:g}{right}"
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    above = array > low if open_low else array >= low
    below = array < high if open_high else array <= high
    if array.ndim or not np.isfinite(array) or not (above and below):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return value


class StaticValueError(ValueError):
    """A traced value in a place whose value must be known before the program is compiled."""


def _refuse_tracer(name: str, value: Any) -> None:
    if is_traced(value):
        raise StaticValueError(f"{name} decides the program's shape: it cannot be traced, give a plain value")


def check_count(name: str, value: Any, *, low: int = 1) -> int:
    """``value`` as an int if it is a whole number of at least ``low``: counts and shapes are static, never traced."""
    _refuse_tracer(name, value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, allowed: tuple) -> Any:
    """``value`` if it is one of ``allowed``."""
    _refuse_tracer(name, value)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def is_zero(value: Any) -> bool:
    """Whether a hyper-parameter is known to be 0, so that the term it multiplies need not be computed."""
    return not is_traced(value) and bool(np.all(np.asarray(value) == 0))


# --- checks of structure: before anything compiles -------------------------------------------------------------------


class StructureError(ValueError):
    """An algorithm whose parts do not fit together; names the exchange and the leaf."""


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
                "For a module that holds more than arrays take fedbraid.models.from_equinox(module), its init and loss"
            )


def _shapes(where: str, function: Callable, *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except StructureError:
        raise
    except Exception as error:
        raise StructureError(f"{where} failed on the shapes it is given: {error}") from error


class MessageShapes(NamedTuple):
    """What one exchange sends, as shapes and dtypes."""

    name: str
    down: Down
    up: PyTree


def message_shapes(alg: Algorithm, params: PyTree, data: PyTree) -> tuple[MessageShapes, ...]:
    """The messages of every exchange by ``jax.eval_shape``, having checked that all parts fit.

    ``data`` is a client's data as a client function is given it: a ``ClientData`` of arrays or of shapes.
    """
    _check_arrays(params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    server = _shapes("init", alg.init, params)
    state = _shapes("init_client", alg.init_client, params)
    _must_match("params(server)", jax.eval_shape(lambda p: p, params), _shapes("params", alg.params, server))
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
        _must_match(f"{where}, client state", state, report.state)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), report.up)
        reduced = _shapes(
            f"{where}, reducer",
            lambda ups, w, r=exchange.reducer: reduce_reports(r, ups, w),
            one,
            jax.ShapeDtypeStruct((1,), jnp.float32),
        )
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        aggregate = Aggregate(reduced[0], scalar, scalar, scalar)
        _must_match(f"{where}, server", server, _shapes(f"{where}, receive", exchange.receive, server, aggregate, key))
        messages.append(MessageShapes(exchange.name, down, report.up))
    return tuple(messages)


def check_structure(alg: Algorithm, params: PyTree, data: PyTree) -> None:
    """Refuse an algorithm whose parts do not fit together, before anything compiles."""
    message_shapes(alg, params, data)
