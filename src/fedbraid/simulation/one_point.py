"""What one point computes, as functions of its (traced) values; `fedbraid.simulation.points` maps them over points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedbraid.core import finite
from fedbraid.data.federated import FederatedData, Split
from fedbraid.lowering import lower_metrics
from fedbraid.metric import declared_by
from fedbraid.simulation.evaluate import client_values, score, summarize
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.personal import Layout, score_blocks
from fedbraid.simulation.plan import Plan
from fedbraid.simulation.program import Task, compile_rounds
from fedbraid.simulation.rounds import strong

__all__ = ["OnePoint", "PointTask", "Study"]

PyTree = Any


class PointTask(NamedTuple):
    """What one point runs: its task, its metrics, and a function from the seed to the initial parameters."""

    task: Task
    metrics: Callable | None
    init: Callable[[int], PyTree]


@dataclass(frozen=True, eq=False)
class Study:
    """What all points of a program share.

    build: ``(values, data) -> PointTask``; ``values`` has a (traced) number for each key.
    keys: names of the hyper-parameters that differ between points.
    first: a valid point, for shapes and communication costs.
    data: the federated data; training uses its training split.
    test: the split to evaluate on; None does not evaluate. Its columns begin with ``prefix``.
    statistics: evaluate the statistics over clients too, not only the values over all examples.
    """

    build: Callable[[Mapping[str, Any], FederatedData], PointTask]
    keys: tuple[str, ...]
    first: Mapping[str, float]
    data: FederatedData
    test: Split | None = None
    prefix: str = "test_"
    statistics: bool = True


@jax.custom_batching.custom_vmap
def _own_copy(field: Any, values: Any) -> Any:
    """``field``; under a ``vmap`` over points, a copy of it for each point.

    All points see the same batch. If it is one shared array, XLA makes one wide product with the weights of all points
    and transposes the weights at every step. A copy per point gives one small product per point and no transpose. On a
    CPU that took 0.7 of the time with softmax regression (784 -> 62) and 0.8 with an MLP of 300-100 units.
    """
    del values
    return field


@_own_copy.def_vmap
def _copies(points: int, mapped: Sequence[bool], field: Any, values: Any) -> tuple[Any, bool]:
    if not mapped[1]:  # this vmap is over clients; the one over points comes later
        return _own_copy(field, values), mapped[0]
    return (field if mapped[0] else jnp.broadcast_to(field, (points, *field.shape))), True


@dataclass(frozen=True, eq=False)
class OnePoint:
    """The functions of a point. Their argument ``values`` has the values of the study's keys.

    base: the task of a valid point. mesh: the devices that the clients of a point are spread over.
    stream: whether the host sends the examples of every round. spread: whether a batch is copied for each point.
    own: where the clients' own models are evaluated; None if there are none.
    """

    study: Study
    base: PointTask
    options: EngineOptions
    mesh: Mesh
    stream: bool
    spread: bool
    own: Layout | None

    def task(self, values: Any) -> PointTask:
        """The task of the point with the (traced) ``values``."""
        if not self.study.keys:
            return self.base
        point = {key: values[i] for i, key in enumerate(self.study.keys)}
        if not self.spread:
            return self.study.build(point, self.study.data)
        prepare = self.study.data.preprocess or (lambda batch, key, train: dict(batch))

        def spread(batch: Any, key: Any, train: bool) -> dict[str, Any]:
            return {name: _own_copy(field, values) for name, field in prepare(batch, key, train).items()}

        return self.study.build(point, replace(self.study.data, preprocess=spread))

    def start(self, values: Any, params: PyTree) -> tuple[PyTree, PyTree]:
        """The first states of the server and of a client."""
        alg = self.task(values).task.algorithm
        return strong(alg.init(params)), strong(alg.init_client(params))

    def rounds(self, plan: Plan, values: Any, server: Any, states: Any, *rest: Any) -> Any:
        """Whole rounds under a plan."""
        task = self.task(values).task
        return compile_rounds(task, plan, self.mesh, self.options, local=self.stream).rounds(server, states, *rest)

    def exchange(self, plan: Plan, index: int, values: Any, server: Any, states: Any, *rest: Any) -> Any:
        """One exchange of a round, for client states on the host."""
        task = self.task(values).task
        program = compile_rounds(task, plan, self.mesh, self.options, local=self.stream)
        return program.exchange(index, server, states, *rest)

    def look(self, values: Any, server: PyTree, test: Any) -> Any:
        """Evaluate: scores, each client's own metrics, and whether the model is finite."""
        point = self.task(values)
        params = point.task.algorithm.params(server)
        row, clients = {}, {}
        if test is not None:
            assert point.metrics is not None
            assert self.study.test is not None
            test_clients = self.study.test.num_clients
            prepare = point.task.data.preprocess
            metrics = lower_metrics(point.metrics, self.options)
            scores = score(metrics, params, *test, clients=test_clients, preprocess=prepare)
            declared = declared_by(point.metrics)
            row = summarize(scores, self.study.prefix, declared, statistics=self.study.statistics)
            clients = {self.study.prefix + n: values for n, values in client_values(scores, declared).items()}
        return row, clients, finite(params)

    def look_own(self, values: Any, test: Any, server: PyTree, states: PyTree, blocks: Any) -> Any:
        """Scores of a chunk of the clients' own models."""
        point = self.task(values)
        assert self.own is not None
        assert point.metrics is not None
        metrics, prepare = lower_metrics(point.metrics, self.options), point.task.data.preprocess
        alg = point.task.algorithm
        return score_blocks(metrics, alg, server, states, test[0], blocks, layout=self.own, preprocess=prepare)
