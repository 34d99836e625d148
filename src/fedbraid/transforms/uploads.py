"""Functions that transforms share: encode and decode uploads, and add state to the server or to the clients.

A transform that changes uploads is a pair: ``encode`` at the end of the client's work and ``decode`` on the server. The
client also runs ``decode`` and corrects its state, with the algorithm's ``reconcile``, to the decoded upload. So the
states of clients and server agree for any number of stacked pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import (
    Algorithm,
    Exchange,
    Logged,
    Reducer,
    Report,
    StructureError,
    Up,
    check_number,
    logged,
    same,
)
from fedbraid.transforms.clients import map_inputs, map_report
from fedbraid.transforms.codes import decoded, is_code

__all__ = [
    "Extended",
    "averages",
    "change_exchanges",
    "check_bound",
    "extend_client",
    "extend_server",
    "norm",
    "recode",
    "refuse_partial",
    "refuse_sealed",
    "refuse_whole",
    "through",
]

PyTree = Any


# --- uploads that are encoded and decoded ----------------------------------------------------------------------------


def through(decode: Callable, exchange: Exchange, *, mixes: bool = False) -> Exchange:
    """The exchange whose server uses ``decode(upload)``: in its reducer, in ``admit`` and in ``reconcile``.

    mixes: whether each part of ``decode(upload)`` depends on all of the upload. Otherwise its pseudograd depends only
        on the upload's pseudograd, and its aux only on the upload's aux.
    """
    inner, reducer = exchange, exchange.reducer

    def reconcile(state: PyTree, meant: PyTree, got: PyTree) -> PyTree:
        return inner.reconcile(state, decode(meant), decode(got))

    return exchange._replace(
        reducer=reducer._replace(
            lift=lambda up, weight: reducer.lift(decode(up), weight), decode=lambda up: reducer.decode(decode(up))
        ),
        admit=lambda up: inner.admit(decode(up)),
        reconcile=reconcile if inner.keeps else inner.reconcile,
        keeps=Up._fields if mixes and inner.keeps else inner.keeps,
    )


def recode(exchange: Exchange, encode: Callable, decode: Callable = same, *, mixes: bool = False) -> Exchange:
    """The exchange whose client sends ``encode(up, down, key)``, which the server decodes with ``decode``."""

    def change(report: Report, down: PyTree, state: PyTree, key: Any) -> Report:
        del state
        sent = encode(report.up, down, key)
        return report._replace(up=sent, state=exchange.reconcile(report.state, report.up, decode(sent)))

    return through(decode, exchange, mixes=mixes)._replace(client=map_report(exchange.client, change))


def averages(reducer: Reducer, *, uniform: bool = False) -> bool:
    """Whether the reducer is the weighted mean of decoded uploads: then another rule may replace it.

    ``uniform``: whether all weights are equal. Then a mean of the aux without weights is allowed, too.
    """
    return reducer.mean in (("weighted", "uniform-aux") if uniform else ("weighted",))


def change_exchanges(
    alg: Algorithm, names: Sequence[str] | None, change: Callable[[Exchange], Exchange], *, argument: str = "exchanges"
) -> Algorithm:
    """The algorithm with the named exchanges (all of them by default) changed."""
    there = [e.name for e in alg.exchanges]
    if isinstance(names, str):
        names = [names]
    for name in names or ():
        if name not in there:
            raise ValueError(f"{argument}: no exchange named {name!r} here; this algorithm has {there}")
    return alg._replace(exchanges=tuple(change(e) if names is None or e.name in names else e for e in alg.exchanges))


# --- more state ------------------------------------------------------------------------------------------------------


class Extended(NamedTuple):
    """The state of the algorithm inside, and the transform's own."""

    inner: PyTree
    own: PyTree


def _inner(state: Extended) -> PyTree:
    return state.inner


def extend_server(alg: Algorithm, first: Callable[[PyTree], PyTree]) -> Algorithm:
    """The algorithm whose server state also has ``own``, at first ``first(params)``; the transform updates it."""

    def extend(exchange: Exchange) -> Exchange:
        def receive(server: Extended, aggregate: Any, key: Any) -> Logged:
            inner = logged(exchange.receive(server.inner, aggregate, key))
            return Logged(server._replace(inner=inner.server), inner.logs)

        return exchange._replace(
            send=lambda server: exchange.send(server.inner),
            receive=receive,
        )

    personal = alg.personal
    return Algorithm(
        init=lambda params: Extended(alg.init(params), first(params)),
        init_client=alg.init_client,
        exchanges=tuple(map(extend, alg.exchanges)),
        params=lambda server: alg.params(server.inner),
        personal=personal and (lambda server, state: personal(server.inner, state)),
    )


def extend_client(alg: Algorithm, first: Callable[[PyTree], PyTree]) -> Algorithm:
    """The algorithm whose client states also have ``own``, at first ``first(params)``; the transform updates it."""

    def extend(exchange: Exchange) -> Exchange:
        def change(report: Report, down: PyTree, state: Extended, key: Any) -> Report:
            return report._replace(state=state._replace(inner=report.state))

        inner = exchange.reconcile

        def reconcile(state: Extended, meant: PyTree, got: PyTree) -> Extended:
            return state._replace(inner=inner(state.inner, meant, got))

        return exchange._replace(
            client=map_report(map_inputs(exchange.client, state=_inner), change),
            reconcile=reconcile,
        )

    personal = alg.personal
    return alg._replace(
        init_client=lambda params: Extended(alg.init_client(params), first(params)),
        exchanges=tuple(map(extend, alg.exchanges)),
        personal=personal and (lambda server, state: personal(server, state.inner)),
    )


# --- no changes of an upload after dp --------------------------------------------------------------------------------


def refuse_sealed(exchange: Exchange, what: str) -> None:
    """Refuse to change uploads that privacy has already bounded and accounted for."""
    if exchange.sealed is not None:
        raise ValueError(
            f"{what} over dp would change uploads after dp has bounded their sensitivity, and epsilon would be wrong: "
            f"put dp outside, dp({what}(algorithm))"
        )


def refuse_whole(exchange: Exchange, what: str) -> None:
    """Refuse uploads that are whole models, if the transform is for changes of the model."""
    if exchange.whole:
        raise StructureError(
            f"{what}: exchange {exchange.name!r} sends whole models, and {what} is for changes of the model, which are "
            f"much smaller: it would spoil the models. Leave {what} out, or use an algorithm that sends changes, such "
            "as fedavg"
        )


def refuse_partial(exchange: Exchange, what: str, *, instead: str = "leave one of the two out") -> None:
    """Refuse uploads without private leaves, if the transform needs every leaf of the model."""
    if exchange.partial:
        raise StructureError(
            f"{what} over private leaves: it needs all leaves of the model, but exchange {exchange.name!r} sends only "
            "the shared ones, because the transform private, or a method with private leaves such as fedper, keeps the "
            f"others on the clients. These two cannot be combined: {instead}"
        )


# --- the size of an upload -------------------------------------------------------------------------------------------


def norm(up: PyTree) -> Any:
    """The Euclidean norm of everything in an upload, as the server will decode it; safe from overflow.

    >>> float(norm({"w": jnp.array([3e30, 0.0]), "b": jnp.array(4e30)}) / 1e30)
    5.0
    """
    leaves = jax.tree_util.tree_leaves_with_path(up, is_leaf=is_code)
    for path, leaf in leaves:
        if not is_code(leaf) and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise StructureError(
                f"the norm of an upload needs real numbers, but leaf {jax.tree_util.keystr(path)} is {leaf.dtype}"
            )
    arrays = [decoded(leaf) for _, leaf in leaves]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(a), initial=0) for a in arrays])) if arrays else jnp.zeros(())
    unit = jnp.where(largest > 0, largest, 1)
    # an upload with inf or NaN has the norm NaN, so that it is refused
    return largest * jnp.sqrt(sum(jnp.sum((a / unit.astype(a.dtype)) ** 2) for a in arrays))


def check_bound(name: str, value: Any) -> Any:
    """Check the bound of a norm: a positive number; infinity means no bound."""
    if isinstance(value, float) and value == float("inf"):
        return value
    return check_number(name, value, low=0, open_low=True)
