"""Evaluation on the clients' own test data. A node sends only sums and counts of the metrics.

Node and server use the functions of the simulator (:mod:`fedbraid.simulation.evaluate`). On the same data and model, a
deployed run therefore has the same columns and values as a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from fedbraid.core import Algorithm, check_count
from fedbraid.data.description import Preprocess
from fedbraid.data.federated import Split
from fedbraid.flower.identity import Schema, check_data, shapes_of
from fedbraid.flower.rows import padded
from fedbraid.lowering import LoweringOptions, lower_metrics
from fedbraid.metric import PERSONAL, Metric
from fedbraid.simulation.evaluate import client_values, in_batches, score, summarize

__all__ = [
    "Models",
    "are_sums",
    "batches_of",
    "check_evaluation",
    "models_message",
    "own_model_program",
    "rows_of",
    "scores_by_client",
    "summary",
    "sums_program",
    "sums_shapes",
]

PyTree = Any
Sums = Mapping[str, Any]
"""The sums of one client: ``{metric: [sum over its test examples, sum of their weights]}``."""


def check_evaluation(metrics: Callable | None, evaluate_clients: int | None, population: int) -> None:
    """Refuse a number of evaluating clients above the population, or without metrics."""
    if evaluate_clients is None:
        return
    if metrics is None:
        raise ValueError(f"evaluate_clients={evaluate_clients!r} asks clients to evaluate: give the metrics too")
    if check_count("evaluate_clients", evaluate_clients) > population:
        raise ValueError(
            f"evaluate_clients must be at most the population of {population} clients, got {evaluate_clients}"
        )


# -- a node


def rows_of(schema: Schema, arrays: Mapping[str, Any] | None) -> int:
    """The number of a site's test examples; 0 if it has none. ValueError if they do not fit the schema."""
    if arrays is None or (isinstance(arrays, Mapping) and not any(len(a) for a in arrays.values())):
        return 0
    return check_data(schema, arrays)


def batches_of(arrays: Mapping[str, Any], rows: int, room: int) -> tuple[dict[str, Any], Any]:
    """A site's test examples in batches, padded to ``room`` rows, so that a little more data needs no new compilation.

    The padding belongs to a second client, whose sums `sums_program` drops.
    """
    return in_batches(Split(padded(arrays, rows, room), np.array([0, rows, room])))


def sums_program(
    metrics: Callable, preprocess: Preprocess | None = None, options: LoweringOptions | None = None
) -> Callable[[PyTree, dict[str, Any], Any], dict[str, Any]]:
    """(params, *batches_of) -> the sums of the first client. Nothing else leaves a node."""
    fast = lower_metrics(metrics, options or LoweringOptions())

    def sums(params: PyTree, batches: dict[str, Any], owners: Any) -> dict[str, Any]:
        scores = score(fast, params, batches, owners, clients=2, preprocess=preprocess)
        return {name: both[:, 0] for name, both in scores.items()}

    return sums


def sums_shapes(
    metrics: Callable,
    params: PyTree,
    schema: Schema,
    preprocess: Preprocess | None = None,
    *,
    personal: bool = False,
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a node's answer; ``personal``: whether it contains sums of the client's own model, too."""
    one = {name: np.zeros((1, *field.shape), field.dtype) for name, field in schema.items()}
    sums = jax.eval_shape(sums_program(metrics, preprocess), shapes_of(params), *batches_of(one, 1, 1))
    return sums | ({PERSONAL + name: both for name, both in sums.items()} if personal else {})


# -- the models in a question


class Models(NamedTuple):
    """What a question contains: the global model, and the part of the server's state that own models are made of."""

    params: PyTree
    of_server: list[Any]


def read_by_personal(alg: Algorithm, server: PyTree) -> list[int]:
    """Which leaves of the server's state ``personal`` reads, by number. A model of the client needs no others.

    The client state is that of the global model's shapes.
    """
    if alg.personal is None:
        return []
    params = jax.eval_shape(alg.params, server)
    traced = jax.make_jaxpr(alg.personal)(server, jax.eval_shape(alg.init_client, params)).jaxpr
    needed = {atom for atom in traced.outvars if isinstance(atom, Var)}
    for equation in reversed(traced.eqns):
        if needed.intersection(equation.outvars):
            needed |= {atom for atom in equation.invars if isinstance(atom, Var)}
    return [i for i, _ in enumerate(jax.tree.leaves(server)) if traced.invars[i] in needed]


def models_message(alg: Algorithm, server: PyTree) -> Models:
    """The models that a question contains."""
    leaves = jax.tree.leaves(server)
    return Models(alg.params(server), [leaves[i] for i in read_by_personal(alg, server)])


def own_model_program(alg: Algorithm, params: PyTree) -> Callable[[list[Any], PyTree], PyTree]:
    """(``of_server`` of a question, client state) -> the client's own model."""
    server = jax.eval_shape(alg.init, params)
    numbers, (shapes, tree) = read_by_personal(alg, server), jax.tree.flatten(server)

    def own(of_server: list[Any], state: PyTree) -> PyTree:
        assert alg.personal is not None
        leaves = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes]  # those that it does not read
        for i, leaf in zip(numbers, of_server, strict=True):
            leaves[i] = leaf
        return alg.personal(jax.tree.unflatten(tree, leaves), state)

    return own


# -- the server


def are_sums(found: Sums, clients: int) -> bool:
    """Whether no weight is negative, and all numbers are so small that ``clients`` such numbers have a finite sum."""
    largest = float(np.finfo(np.float32).max) / clients
    return all(np.all(np.abs(both) <= largest) and np.all(both[1] >= 0) for both in found.values())


def _stacked(found: Mapping[int, Sums], population: int) -> dict[str, Any]:
    """The scores as in the simulator, ``{metric: [2, population, ...]}``. Clients that did not answer have weight 0."""
    out: dict[str, Any] = {}
    for name, first in next(iter(found.values()), {}).items():
        table = np.zeros((2, population, *np.shape(first)[1:]))
        for client, sums in found.items():
            table[:, client] = sums[name]
        out[name] = jnp.asarray(table, jnp.result_type(float))
    return out


def summary(found: Mapping[int, Sums], population: int, declared: Sequence[Metric] = ()) -> dict[str, float]:
    """The simulator's columns: every metric over all examples, and its statistics over clients.

    Sums of the clients' own models have columns of their own, such as ``test_personal_accuracy``.
    """
    row = {}
    for prefix, scores in _by_model(_stacked(found, population)).items():
        row |= summarize(scores, prefix, declared)
    return {name: float(value) for name, value in row.items()}


def _by_model(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The scores of the global model and of own models, by the prefix of their columns."""
    own = {name.removeprefix(PERSONAL): score for name, score in scores.items() if name.startswith(PERSONAL)}
    plain = {name: score for name, score in scores.items() if not name.startswith(PERSONAL)}
    return {"test_": plain, f"test_{PERSONAL}": own} if own else {"test_": plain}


def scores_by_client(
    found: Mapping[int, Sums], population: int, declared: Sequence[Metric] = ()
) -> dict[str, np.ndarray]:
    """Each client's own metrics; nan for a client that was not asked, has no test data, or did not answer."""
    return {
        prefix + name: np.asarray(value)
        for prefix, scores in _by_model(_stacked(found, population)).items()
        for name, value in client_values(scores, declared).items()
    }
