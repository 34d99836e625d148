"""Private leaves: parts of the model that stay on the clients. They are in no message.

Every client has its own private leaves. The other leaves are shared: the server has them, as in any algorithm. A
client's model is the shared leaves of the server with the private leaves of the client.

The server runs the algorithm on the shared leaves alone. The client trains the whole model. Its private leaves are
updated as if the client were the only one of a federation: it keeps the algorithm's server state of its private leaves
(with FedAvg the leaves themselves; with SCAFFOLD also their control variate) and applies to it the private part of its
own upload. So a federation of one client gives the same model with private leaves as without.

In messages and states the leaves that are elsewhere are None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import (
    Aggregate,
    Algorithm,
    Exchange,
    Report,
    StructureError,
    logged,
    reduce_reports,
    same,
)
from fedbraid.local import HEAD, ClientData, Fold, LocalWork, leaf_names
from fedbraid.transforms.uploads import Extended, averages, refuse_sealed

__all__ = ["head_of", "join", "keep_private", "leaf_names", "matching", "not_all", "private", "split"]

PyTree = Any
Leaves = str | Sequence[str] | Callable[[str, Any], bool]


# --- trees with None at the leaves that are elsewhere ----------------------------------------------------------------


def _none(leaf: Any) -> bool:
    return leaf is None


def matching(params: PyTree, leaves: Leaves, *, argument: str = "leaves") -> PyTree:
    """The tree of True and False: which leaves are chosen. A pattern that matches no leaf is an error.

    >>> matching({"body": jnp.zeros(2), "head": {"w": jnp.zeros(1)}}, "head")
    {'body': False, 'head': {'w': True}}
    """
    found, tree = jax.tree.flatten(params)
    names = leaf_names(params)
    if callable(leaves):
        chosen = [bool(leaves(name, leaf)) for name, leaf in zip(names, found, strict=True)]
        if not any(chosen):
            raise StructureError(f"{argument}: the function chooses no leaf; {_there_are(names)}")
        return jax.tree.unflatten(tree, chosen)
    patterns = [leaves] if isinstance(leaves, str) else list(leaves)
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise StructureError(f"{argument}: no leaf matches {pattern!r}; {_there_are(names)}")
    return jax.tree.unflatten(tree, [any(_matches(name, pattern) for pattern in patterns) for name in names])


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(pattern + ".")


def _there_are(names: Sequence[str]) -> str:
    return f"the model's leaves are {', '.join(names)}"


def split(params: PyTree, chosen: PyTree) -> tuple[PyTree, PyTree]:
    """(the leaves that are not chosen, those that are), both in the structure of the model, with None elsewhere.

    >>> split({"a": 1, "b": 2}, {"a": False, "b": True})
    ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    shared = jax.tree.map(lambda leaf, own: None if own else leaf, params, chosen)
    return shared, jax.tree.map(lambda leaf, own: leaf if own else None, params, chosen)


def join(shared: PyTree, own: PyTree) -> PyTree:
    """One tree of two: the leaves of ``own`` where ``shared`` has None.

    >>> join({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    try:
        return jax.tree.map(lambda a, b: b if a is None else a, shared, own, is_leaf=_none)
    except ValueError as error:
        raise StructureError(
            "private: this algorithm has other states or messages if leaves of the model are missing, so none of its "
            f"leaves can be private: {error}"
        ) from error


def _model_shaped(own: PyTree, full: bool) -> Callable[[PyTree], bool]:
    """Whether a tree has the model's structure, with all leaves (``full``) or with the shared ones only.

    own: the model's private leaves.
    """
    mine, tree = jax.tree.flatten(own, is_leaf=_none)

    def fits(node: PyTree) -> bool:
        theirs, structure = jax.tree.flatten(node, is_leaf=_none)
        if structure != tree:
            return False
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None]
        return all(getattr(b, "shape", None) == a.shape if full else b is None for a, b in pairs)

    return fits


def _split_upload(up: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
    """The shared and the private part of an upload: of every tree in it that has the model's structure.

    Other numbers, such as counts, are in both parts.
    """
    fits = _model_shaped(own, full=True)
    private_ones = jax.tree.map(lambda leaf: leaf is not None, own, is_leaf=_none)

    def part(keep_private: bool) -> PyTree:
        def of(node: PyTree) -> PyTree:
            if not fits(node):
                return node
            return jax.tree.map(
                lambda leaf, mine: leaf if mine == keep_private else None, node, private_ones, is_leaf=_none
            )

        return jax.tree.map(of, up, is_leaf=fits)

    return part(False), part(True)


def _filled_upload(up: PyTree, own: PyTree) -> PyTree:
    """The shared part of an upload with zeros for its private leaves."""
    fits, zeros = _model_shaped(own, full=False), jax.tree.map(jnp.zeros_like, own)
    return jax.tree.map(lambda node: join(node, zeros) if fits(node) else node, up, is_leaf=fits)


# --- the transform ---------------------------------------------------------------------------------------------------


def private(alg: Algorithm, leaves: Leaves = (), loss: Callable | None = None) -> Algorithm:
    """The algorithm whose clients keep the named leaves of the model: they are never sent.

    leaves: one or several patterns of leaf names, such as ``"head*"``; ``*`` and ``?`` match as in file names, and the
        name of a part of the model ("head") means all leaves in it. Or a function ``(name, leaf) -> bool``. No pattern,
        ``()``, gives the algorithm itself.
    loss: the loss of a model with batch normalisation, whose statistics are then private as well; a configuration gives
        that of its model.

    Client states contain the private leaves. ``personal`` is the server's shared leaves with the client's private
    ones. ``params``, the global model, has the initial values of the private leaves. Put other transforms outside:
    ``quantize(private(algorithm, "head"))``.

    >>> from fedbraid.algorithms import fedavg
    >>> alg = private(fedavg(lambda params, batch, key: jnp.sum(params["w"] ** 2 + params["head"] ** 2)), "head")
    >>> server = alg.init({"w": jnp.ones(3), "head": jnp.zeros(2)})
    >>> alg.exchanges[0].send(server).params["head"] is None
    True
    """
    if not callable(leaves) and not leaves:
        return alg
    from fedbraid.transforms.statistics import keep_own  # which needs the functions of this module

    return keep_own(alg, loss, not_all(leaves, "leaves"))


def not_all(leaves: Leaves, argument: str) -> Callable[[PyTree], PyTree]:
    """A function from the model to the tree that says which leaves are chosen. All of them are an error."""

    def choose(params: PyTree) -> PyTree:
        chosen = matching(params, leaves, argument=argument)
        if all(jax.tree.leaves(chosen)):
            raise StructureError(
                f"{argument}: {leaves!r} are all leaves of the model ({', '.join(leaf_names(params))}), so nothing "
                "is left for the other part: name fewer. If nothing is to be shared, use the algorithm local_only"
            )
        return chosen

    return choose


def head_of(loss: Callable, head: Leaves | None) -> Leaves:
    """The leaves of the model's head: those given, else those that the model of the loss declares."""
    found: Any = getattr(loss, HEAD, None) if head is None else head
    if found is None or (isinstance(found, Sequence) and not found):
        raise ValueError(
            "head: this model does not say which leaves are its head (its last layer): give patterns of their names, "
            'such as head = ["dense2"]'
        )
    return found


def keep_private(alg: Algorithm, choose: Callable[[PyTree], PyTree]) -> Algorithm:
    """`private` with a function from the model to the tree of True and False that says which leaves are private."""
    for i, exchange in enumerate(alg.exchanges):
        refuse_sealed(exchange, "private")
        if exchange.reducer.decode is not same:
            raise ValueError(
                "private over a transform that changes uploads: the transform would see the private leaves; put "
                "private inside, next to the algorithm (first in the list of a configuration). elastic, and transforms "
                "with error feedback such as top_k, do not work with private in either order"
            )
        if i and exchange.cohort == "fresh":
            raise ValueError(
                f"private: exchange {exchange.name!r} asks other clients than {alg.exchanges[0].name!r}, but the "
                "private part of what the first one computes is known only to the clients that it asked"
            )
    inner = alg.personal

    def init(params: PyTree) -> Extended:
        shared, own = split(params, choose(params))
        return Extended(alg.init(shared), own)

    def init_client(params: PyTree) -> Extended:
        return Extended(alg.init_client(params), alg.init(split(params, choose(params))[1]))

    def personal(server: Extended, state: Extended) -> PyTree:
        if inner is not None:
            return inner(join(server.inner, state.own), state.inner)
        return join(alg.params(server.inner), alg.params(state.own))

    return Algorithm(
        init,
        init_client,
        tuple(_keeping(alg, exchange) for exchange in alg.exchanges),
        lambda server: join(alg.params(server.inner), server.own),
        personal,
    )


def _keeping(alg: Algorithm, exchange: Exchange) -> Exchange:
    """The exchange without private leaves in its messages."""

    def receive(server: Extended, aggregate: Aggregate, key: Any) -> Any:
        after = logged(exchange.receive(server.inner, aggregate, key))
        return after._replace(server=server._replace(inner=after.server))

    def finish(report: Report, state: Extended, key: Any) -> Report:
        shared, own = _split_upload(report.up, alg.params(state.own))
        after = Extended(report.state, _alone(exchange, state.own, own, report.weight, key))
        return report._replace(up=shared, state=after)

    def reconcile(state: Extended, meant: PyTree, got: PyTree) -> Extended:
        own = alg.params(state.own)
        full = (_filled_upload(up, own) for up in (meant, got))
        return state._replace(inner=exchange.reconcile(state.inner, *full))

    return exchange._replace(
        send=lambda server: exchange.send(server.inner),
        client=_on_whole_model(exchange, finish),
        receive=receive,
        reconcile=reconcile if exchange.keeps else exchange.reconcile,
        partial=True,
    )


def _alone(exchange: Exchange, own: PyTree, up: PyTree, weight: Any, key: Any) -> PyTree:
    """The server state of the private leaves after an upload of this client alone."""
    one = jnp.ones((), jnp.result_type(float))
    weight = jnp.asarray(weight).astype(one.dtype)
    if not averages(exchange.reducer, uniform=True):  # the mean of one upload is the upload
        up = reduce_reports(exchange.reducer, jax.tree.map(lambda leaf: leaf[None], up), weight[None])[0]
    return logged(exchange.receive(own, Aggregate(up, weight, one, one), key)).server


class Walk(NamedTuple):
    """The carry of the algorithm's local steps, and the private part of the message that the client starts from."""

    inner: PyTree
    own: PyTree


_KEY = 0x0127  # folded into the client's key for the update of its private leaves


def _on_whole_model(exchange: Exchange, finish: Callable[[Report, Extended, Any], Report]) -> Callable:
    """The client that is given the whole model; ``finish(report, client_state, key)`` takes the private part out.

    A client made of local steps stays one.
    """

    def whole(down: PyTree, state: Extended) -> PyTree:
        return join(down, exchange.send(state.own))

    client = exchange.client
    if not isinstance(client, LocalWork):

        def run(down: PyTree, state: Extended, data: ClientData, key: Any) -> Report:
            report = client(whole(down, state), state.inner, data, key)
            return finish(report, state, jax.random.fold_in(key, _KEY))

        return run

    def fold(one: Fold) -> Fold:
        def start(down: PyTree, state: Extended, key: Any) -> Walk:
            return Walk(one.start(whole(down, state), state.inner, key), exchange.send(state.own))

        def step(walk: Walk, batch: dict, key: Any, down: PyTree) -> Walk:
            return Walk(one.step(walk.inner, batch, key, join(down, walk.own)), walk.own)

        def end(walk: Walk, down: PyTree, state: Extended, n: Any) -> Any:
            return one.finish(walk.inner, whole(down, state), state.inner, n)

        return Fold(start, step, end, one.batches)

    def combine(results: tuple, down: PyTree, state: Extended, key: Any) -> Report:
        report = client.combine(results, whole(down, state), state.inner, key)
        return finish(report, state, jax.random.fold_in(key, _KEY))

    return replace(client, folds=tuple(map(fold, client.folds)), combine=combine)
