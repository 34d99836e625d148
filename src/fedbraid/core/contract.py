"""What an algorithm is made of: messages, reports, reducers and exchanges, and how engines apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core.picture import picture

__all__ = [
    "MEAN",
    "RESERVED",
    "Aggregate",
    "Algorithm",
    "Down",
    "Exchange",
    "Guarantee",
    "Logged",
    "Reducer",
    "Report",
    "Up",
    "finite",
    "keep",
    "logged",
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
    floats = _joined([leaf for leaf in jax.tree.leaves(up) if jnp.issubdtype(leaf.dtype, jnp.inexact)])
    # Reduce the last axis first. A GPU gives the rest of the reduction to one block per client, which is slow for a
    # large upload. On a CPU a maximum, which propagates NaN, is twice as fast as testing each number.
    largest = [jnp.max(jnp.abs(leaf), axis=-1 if leaf.ndim else None, initial=0) for leaf in floats]
    if scale is not None:
        largest = [rows * jnp.asarray(scale, rows.dtype) for rows in largest]
    return jnp.all(jnp.stack([jnp.all(rows < jnp.inf) for rows in largest])) if floats else jnp.array(True)


JOINED = 1 << 15  # bytes of a leaf that is tested together with others


def _joined(leaves: list[Any]) -> list[Any]:
    """The leaves, with small ones of the same dtype as one: on a GPU each test of a leaf is a kernel, or two."""
    small: dict[Any, list[Any]] = {}
    large = []
    for leaf in leaves:
        fits = leaf.size * leaf.dtype.itemsize <= JOINED
        (small.setdefault(leaf.dtype, []) if fits else large).append(leaf)
    return large + [jnp.concatenate([jnp.ravel(x) for x in few]) if len(few) > 1 else few[0] for few in small.values()]


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
    partial: messages have only some leaves of the model, because clients keep the others (``transforms.private``).
    guards: names of the rules by which the server judges or changes single uploads, because it does not trust clients
        (``norm_bound``, ``admit_if``). Secure aggregation refuses them: the server sees only sums.
    whole: uploads are whole models, not changes of the server's model. Transforms that bound or drop parts of changes
        refuse them: of a model nothing useful would be left.
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
    partial: bool = False
    whole: bool = False
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
        return picture(list(map(_in_words, self.exchanges)))


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
