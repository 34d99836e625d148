"""Evaluation on the clients' own test data. A node sends only sums and counts of the metrics.

Node and server use the functions of the simulator (:mod:`fedbraid.simulation.evaluate`). On the same data and model, a
deployed run therefore has the same columns and values as a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import check_count
from fedbraid.data.description import Preprocess
from fedbraid.data.federated import Split
from fedbraid.flower.identity import Schema, check_data, shapes_of
from fedbraid.flower.rows import padded
from fedbraid.lowering import LoweringOptions, lower_metrics
from fedbraid.metric import Metric
from fedbraid.simulation.evaluate import client_values, in_batches, score, summarize

__all__ = [
    "are_sums",
    "batches_of",
    "check_evaluation",
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
    metrics: Callable, preprocess: Preprocess | None = None
) -> Callable[[PyTree, dict[str, Any], Any], dict[str, Any]]:
    """(params, *batches_of) -> the sums of the first client. Nothing else leaves a node."""
    fast = lower_metrics(metrics, LoweringOptions())

    def sums(params: PyTree, batches: dict[str, Any], owners: Any) -> dict[str, Any]:
        scores = score(fast, params, batches, owners, clients=2, preprocess=preprocess)
        return {name: both[:, 0] for name, both in scores.items()}

    return sums


def sums_shapes(
    metrics: Callable, params: PyTree, schema: Schema, preprocess: Preprocess | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a node's answer."""
    one = {name: np.zeros((1, *field.shape), field.dtype) for name, field in schema.items()}
    return jax.eval_shape(sums_program(metrics, preprocess), shapes_of(params), *batches_of(one, 1, 1))


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
    """The simulator's columns: every metric over all examples, and its mean, worst tenth and worst client."""
    row = summarize(_stacked(found, population), declared=declared)
    return {name: float(value) for name, value in row.items()}


def scores_by_client(
    found: Mapping[int, Sums], population: int, declared: Sequence[Metric] = ()
) -> dict[str, np.ndarray]:
    """Each client's own metrics; nan for a client that was not asked, has no test data, or did not answer."""
    values = client_values(_stacked(found, population), declared)
    return {f"test_{name}": np.asarray(value) for name, value in values.items()}
