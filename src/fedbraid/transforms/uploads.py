"""What transforms share: an upload changed on its way, and more state on the server or on the clients.

A transform that changes uploads is a pair: ``encode`` at the end of the client's work and ``decode`` at the server's
door. The client also runs ``decode`` and tells the algorithm inside, by its ``reconcile``, how its upload will be read;
so the states of clients and server stay in agreement however many such pairs are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import (
    MEAN,
    UNIFORM_AUX,
    Aggregate,
    Algorithm,
    Exchange,
    Reducer,
    Report,
    StructureError,
    check_number,
    keep,
)
from fedbraid.local import map_inputs, map_report
from fedbraid.transforms.codes import decoded, is_code

__all__ = [
    "Decoding",
    "Extended",
    "Sealed",
    "averages",
    "change_exchanges",
    "check_bound",
    "extend_client",
    "extend_server",
    "norm",
    "recode",
    "refuse_sealed",
    "through",
]

PyTree = Any


def same(up: PyTree) -> PyTree:
    """The decoding of uploads that arrive in the algorithm's own form."""
    return up


# --- an upload changed on its way ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Decoding:
    """A reducer's lift behind a decoding: apart, so that what lies behind can be seen (see :func:`averages`)."""

    lift: Callable
    decode: Callable

    def __call__(self, up: PyTree, weight: Any) -> PyTree:
        return self.lift(self.decode(up), weight)


def through(decode: Callable, exchange: Exchange) -> Exchange:
    """The exchange whose server reads ``decode(upload)``: in its reducer, its admission and its reconciliation."""
    if decode is same:
        return exchange
    inner = exchange.reconcile
    return exchange._replace(
        reducer=exchange.reducer._replace(lift=Decoding(exchange.reducer.lift, decode)),
        admit=lambda up: exchange.admit(decode(up)),
        reconcile=keep if inner is keep else lambda state, meant, got: inner(state, decode(meant), decode(got)),
    )


def recode(exchange: Exchange, encode: Callable, decode: Callable = same) -> Exchange:
    """The exchange whose client sends ``encode(up, down, key)``, read by the server through ``decode``."""

    def change(report: Report, down: PyTree, state: PyTree, key: Any) -> Report:
        del state
        sent = encode(report.up, down, key)
        return report._replace(up=sent, state=exchange.reconcile(report.state, report.up, decode(sent)))

    return through(decode, exchange)._replace(client=map_report(exchange.client, change))


def averages(reducer: Reducer, *, uniform: bool = False) -> bool:
    """Whether uploads, once decoded, are simply averaged: the case in which another rule may take the mean's place.

    ``uniform``: all weights are equal, so that it does not matter if the aux is averaged without them.
    """
    lift = reducer.lift
    while isinstance(lift, Decoding):
        lift = lift.lift
    means = (MEAN, UNIFORM_AUX) if uniform else (MEAN,)
    return not reducer.gather and any(lift is m.lift and reducer.finish is m.finish for m in means)


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
    """A state with a transform's own beside it."""

    inner: PyTree
    own: PyTree


def _inner(state: Extended) -> PyTree:
    return state.inner


def extend_server(alg: Algorithm, first: Callable[[PyTree], PyTree]) -> Algorithm:
    """The same algorithm whose server also keeps ``own``, at first ``first(params)``, which nothing changes yet."""

    def extend(exchange: Exchange) -> Exchange:
        return exchange._replace(
            send=lambda server: exchange.send(server.inner),
            receive=lambda server, aggregate, key: server._replace(
                inner=exchange.receive(server.inner, aggregate, key)
            ),
        )

    return Algorithm(
        init=lambda params: Extended(alg.init(params), first(params)),
        init_client=alg.init_client,
        exchanges=tuple(map(extend, alg.exchanges)),
        params=lambda server: alg.params(server.inner),
    )


def extend_client(alg: Algorithm, first: Callable[[PyTree], PyTree]) -> Algorithm:
    """The same algorithm whose clients also keep ``own``, at first ``first(params)``, which nothing changes yet."""

    def extend(exchange: Exchange) -> Exchange:
        def change(report: Report, down: PyTree, state: Extended, key: Any) -> Report:
            return report._replace(state=state._replace(inner=report.state))

        inner = exchange.reconcile

        def reconcile(state: Extended, meant: PyTree, got: PyTree) -> Extended:
            return state._replace(inner=inner(state.inner, meant, got))

        return exchange._replace(
            client=map_report(map_inputs(exchange.client, state=_inner), change),
            reconcile=keep if inner is keep else reconcile,
        )

    return alg._replace(
        init_client=lambda params: Extended(alg.init_client(params), first(params)),
        exchanges=tuple(map(extend, alg.exchanges)),
    )


# --- privacy is the last to touch an upload --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sealed:
    """A ``receive`` whose promise holds for the uploads exactly as they leave the clients below it."""

    receive: Callable
    promise: Any = None

    def __call__(self, server: PyTree, aggregate: Aggregate, key: Any) -> PyTree:
        return self.receive(server, aggregate, key)


def refuse_sealed(exchange: Exchange, what: str) -> None:
    """Refuse to change uploads that privacy has already bounded and accounted for."""
    if isinstance(exchange.receive, Sealed):
        raise ValueError(
            f"{what} over dp would change uploads after their sensitivity was bounded, and the promised epsilon would "
            f"be wrong: put dp outside, dp({what}(algorithm))"
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
    # an upload of inf or NaN has the norm NaN, so that it is refused at the door
    return largest * jnp.sqrt(sum(jnp.sum((a / unit.astype(a.dtype)) ** 2) for a in arrays))


def check_bound(name: str, value: Any) -> Any:
    """A norm's bound: a positive number, or infinity for none."""
    if isinstance(value, float) and value == float("inf"):
        return value
    return check_number(name, value, low=0, open_low=True)
