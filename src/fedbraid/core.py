"""The one abstraction: a federated algorithm is a short, fixed tuple of exchanges.

In an exchange the server sends one message to a cohort, each client computes an upload from it, its own state and its
own data, the uploads are reduced, and the server updates its state with the result. Everything is a pure function over
pytrees, so the simulator, a deployment and the cost of a round are three interpreters of the same object.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Var

__all__ = [
    "MEAN",
    "Aggregate",
    "Algorithm",
    "Down",
    "Exchange",
    "Guarantee",
    "Logged",
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
    "logged",
    "message_shapes",
    "noised",
    "numbers_drawn",
    "receive_noised",
    "reduce_reports",
    "replay",
    "same",
]

PyTree = Any
Scalar = Any
RESERVED = ("arrived", "refused", "bytes_down", "bytes_up")  # columns that the engine adds for every exchange


class Down(NamedTuple):
    """Downlink: exactly what is sent to a client."""

    params: PyTree
    aux: PyTree = ()


class Up(NamedTuple):
    """Uplink: exactly what is sent to the server, which moves along ``-pseudograd``."""

    pseudograd: PyTree
    aux: PyTree = ()


class Report(NamedTuple):
    """What a client function returns: the upload, its weight, the client's new state, and metrics."""

    up: PyTree
    weight: Scalar
    state: PyTree = ()
    metrics: dict[str, Scalar] = {}  # noqa: RUF012  (read only: NamedTuple defaults cannot be factories)


class Aggregate(NamedTuple):
    """What ``receive`` is given: the reduced uploads, their total weight and number, and the number of clients."""

    up: PyTree
    weight: Scalar  # total weight of the uploads that arrived
    count: Scalar  # number of uploads that arrived
    population: Scalar  # number of all clients: SCAFFOLD's N


class Logged(NamedTuple):
    """What ``receive`` may return instead of the server's state: the state, and numbers for the round's history.

    The history has them as the columns ``EXCHANGE/NAME``. In a round without uploads they are NaN.
    """

    server: PyTree
    logs: dict[str, Scalar] = {}  # noqa: RUF012


def logged(returned: PyTree) -> Logged:
    """The result of a ``receive``, with its logs; no logs if it returned the server's state alone."""
    return returned if isinstance(returned, Logged) else Logged(returned)


def same(up: PyTree) -> PyTree:
    """The identity: decodes uploads that are not encoded."""
    return up


class Reducer(NamedTuple):
    """How uploads are reduced to one: ``finish(sum of lift(up, weight), total weight, count)``.

    kind: "sum" adds the lifted uploads. "gather" stacks them, because rank rules (median, Krum) need all of them. Then
        ``weight`` is the vector of their weights, 0 for uploads that did not arrive.
    mean: which mean of the decoded uploads the result is: "weighted"; "uniform-aux" (the mean of the aux has no
        weights); "none" if it is not a mean.
    """

    lift: Callable  # (up, weight) -> summand; it decodes the upload first
    finish: Callable  # (combined, weight, count) -> reduced up
    kind: Literal["sum", "gather"] = "sum"
    mean: Literal["weighted", "uniform-aux", "none"] = "none"
    decode: Callable = same  # (up) -> up without the encoding of transforms


def _weighted(up: PyTree, weight: Scalar) -> PyTree:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(weight, leaf.dtype), up)


def _divide(total: PyTree, weight: Scalar, count: Scalar) -> PyTree:
    del count
    safe = jnp.where(weight > 0, weight, 1)
    return jax.tree.map(lambda leaf: leaf / safe.astype(leaf.dtype), total)


MEAN = Reducer(_weighted, _divide, mean="weighted")
"""The weighted mean of the uploads that arrived, divided by the total weight of those."""


def keep(state: PyTree, meant: PyTree, decoded: PyTree) -> PyTree:
    """The ``reconcile`` of clients whose state does not depend on how the server decodes their uploads."""
    del meant, decoded
    return state


def finite(up: PyTree, scale: Scalar | None = None) -> Scalar:
    """Whether every number of an upload is finite: the default ``admit`` of an exchange.

    scale: also times this number, in the dtype of each leaf. The largest numbers are found once for both tests.
    """
    floats = [leaf for leaf in jax.tree.leaves(up) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    # Reduce the last axis first. A GPU gives the rest of the reduction to one block per client, which is slow for a
    # large upload. On a CPU a maximum, which propagates NaN, is twice as fast as testing each number.
    largest = [jnp.max(jnp.abs(leaf), axis=-1 if leaf.ndim else None, initial=0) for leaf in floats]
    if scale is not None:
        largest = [rows * jnp.asarray(scale, rows.dtype) for rows in largest]
    return jnp.all(jnp.stack([jnp.all(rows < jnp.inf) for rows in largest])) if floats else jnp.array(True)


class Guarantee(NamedTuple):
    """Differential privacy of an exchange: how noise is added, and what the accountant needs to know.

    ``draw(tree)`` returns independent standard normal numbers in the shape of ``tree``. It is the only source of noise
    here: these functions get no key. The engine provides it. A simulation draws the numbers from its seed, a deployment
    from the operating system's entropy. So no mechanism can use noise that others can compute.
    """

    client: Callable  # (up, down, draw) -> up as it is sent
    server: Callable  # (aggregate, expected number of uploads, down, draw) -> Aggregate that ``receive`` gets
    noise: Any  # standard deviation on the sum of the uploads, in units of the largest norm of an upload
    shares: int | None  # number of clients whose noise adds up to that; None if the server adds the noise
    delta: float


class Exchange(NamedTuple):
    """One message from the server to a cohort, and the uploads that come back.

    keeps: the parts of its upload on which a client's next state depends. If the server decodes other values than the
        client encoded, ``reconcile`` corrects the state, so that both sides agree (as in c = mean c_i).
    sealed: a guarantee about the uploads exactly as clients send them (see ``transforms.dp``), with its noise.
        Transforms that would change such uploads are refused.
    guards: names of the rules by which the server judges or changes single uploads, because it does not trust clients
        (``norm_bound``, ``admit_if``). Secure aggregation refuses them: the server sees only sums.
    """

    name: str
    send: Callable  # (server) -> Down
    client: Callable  # (down, client_state, data, key) -> Report; often a LocalWork
    receive: Callable  # (server, Aggregate, key) -> server, or Logged(server, {name: number})
    reducer: Reducer = MEAN
    reconcile: Callable = keep  # (client_state, Up before encoding, Up as decoded by the server) -> client_state
    cohort: Literal["fresh", "same"] = "fresh"
    admit: Callable = finite  # (up) -> bool: False means that the upload counts as not arrived
    keeps: tuple[Literal["pseudograd", "aux"], ...] = ()
    sealed: Guarantee | None = None
    guards: tuple[str, ...] = ()
    at_most: int | None = None  # clients per round that the method is defined for; engines say it if there are more
    lockstep: str = ""  # why the server cannot use uploads of an older model; asynchronous runs refuse it with this


class Algorithm(NamedTuple):
    """A federated algorithm. Build one with a factory such as :func:`fedbraid.algorithms.fedavg`."""

    init: Callable  # (params) -> server
    init_client: Callable  # (params) -> client_state, () when stateless
    exchanges: tuple[Exchange, ...]
    params: Callable  # (server) -> the global model's params
    personal: Callable | None = None  # (server, client_state) -> params this client uses; None: the global ones

    def __repr__(self) -> str:
        """The exchanges of a round, by name; nothing is computed."""
        return f"Algorithm: {' -> '.join(map(_in_words, self.exchanges))}"

    def _repr_html_(self) -> str:
        """A picture of a round: the server above, the clients below, and the exchanges between them."""
        wide = 150
        parts = [
            f'<text x="{wide * i + 75}" y="62" text-anchor="middle">{html.escape(_in_words(exchange))}</text>'
            f'<path d="M{wide * i + 45} 30V86m-4-8l4 8 4-8M{wide * i + 105} 90V34m-4 8l4-8 4 8" fill="none" '
            'stroke="#0072B2" stroke-width="1.6"/>'
            for i, exchange in enumerate(self.exchanges)
        ]
        across = wide * max(len(parts), 1)
        bars = "".join(
            f'<rect x="1" y="{y}" width="{across - 2}" height="26" rx="5" fill="none" stroke="currentColor"/>'
            f'<text x="{across / 2}" y="{y + 17}" text-anchor="middle">{name}</text>'
            for y, name in ((2, "server"), (92, "clients"))
        )
        return (
            f'<svg viewBox="0 0 {across} 120" width="{across}" height="120" font-size="12" fill="currentColor" '
            f'font-family="sans-serif" role="img">{bars}{"".join(parts)}</svg>'
        )


def _in_words(exchange: Exchange) -> str:
    return exchange.name + (" (private)" if exchange.sealed is not None else "")


def reduce_reports(reducer: Reducer, ups: PyTree, weights: Any) -> tuple[PyTree, Any, Any]:
    """Reduce stacked uploads ``[n, ...]`` to (reduced up, total weight, count). Absent uploads have weight 0.

    >>> up, weight, count = reduce_reports(MEAN, {"w": jnp.array([1.0, 5.0, 9.0])}, jnp.array([1.0, 3.0, 0.0]))
    >>> float(up["w"]), float(weight), int(count)
    (4.0, 4.0, 2)
    """
    lifted = jax.vmap(reducer.lift)(ups, weights)
    count = jnp.sum(weights > 0)
    if reducer.kind == "gather":
        return reducer.finish(lifted, weights, count), jnp.sum(weights), count
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), lifted)
    return reducer.finish(total, jnp.sum(weights), count), jnp.sum(weights), count


# --- noise of private exchanges: engines call these ------------------------------------------------------------------


def noised(exchange: Exchange, report: Report, down: Down, draw: Callable) -> Report:
    """The report of a client as it is sent: with the noise that the exchange's guarantee asks of clients."""
    if exchange.sealed is None:
        return report
    sent = exchange.sealed.client(report.up, down, draw)
    return report._replace(up=sent, state=exchange.reconcile(report.state, report.up, sent))


def receive_noised(
    exchange: Exchange, server: PyTree, aggregate: Aggregate, expected: Scalar, key: Any, draw: Callable
) -> Logged:
    """The server after an exchange, and its logs. ``expected``: the public number that divides a private mean."""
    if exchange.sealed is not None:
        aggregate = exchange.sealed.server(aggregate, expected, exchange.send(server), draw)
    return logged(exchange.receive(server, aggregate, key))


def numbers_drawn(function: Callable, *args: Any) -> tuple[PyTree, ...]:
    """The shapes of the numbers that ``function(*args, draw)`` draws, in order."""
    shapes: list[PyTree] = []

    def draw(like: PyTree) -> PyTree:
        shapes.append(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like))
        return jax.tree.map(jnp.zeros_like, like)

    jax.eval_shape(lambda *given: function(*given, draw), *args)
    return tuple(shapes)


def replay(numbers: tuple[PyTree, ...]) -> Callable:
    """A ``draw`` that returns the given numbers in order."""
    following = iter(numbers)
    return lambda like: next(following)


# --- checks of arguments: concrete values are checked, tracers pass (a sweep is a vmap) -------------------------------


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer: known only when the program runs."""
    return isinstance(value, Tracer)


def check_number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low=False, open_high=False
) -> Any:
    """``value`` if it is a number in the range; else raise a ValueError with the argument, the value and the range."""
    if is_traced(value):
        return value
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    allowed = f"a finite number in {left}{low:g}, {high:g}{right}"
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    if isinstance(value, bool | str):  # NumPy would take True for 1 and "1" for 1
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    above = array > low if open_low else array >= low
    below = array < high if open_high else array <= high
    if array.ndim or not np.isfinite(array) or not (above and below):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return value


class StaticValueError(ValueError):
    """A traced value in a place whose value must be known before the program is compiled."""


def _refuse_tracer(name: str, value: Any) -> None:
    if is_traced(value):
        raise StaticValueError(f"{name} decides the program's shape: it cannot be traced, pass a Python value")


def check_count(name: str, value: Any, *, low: int = 1) -> int:
    """``value`` as an int if it is a whole number of at least ``low``. Counts and shapes are static: tracers fail."""
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
        raise StructureError(f"{where} failed on the shapes it is given: {error}") from error


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
