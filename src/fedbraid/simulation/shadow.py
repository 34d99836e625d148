"""The shadow sequence: every client's model at every local step, and their mean.

T. Renard, Notes on Federated Optimization, 2022, Notation 2.1: xbar^(t,k) = (1/M) sum_i x_i^(t,k). No client computes
the shadow. The analysis of FedAvg uses it, because it ends at FedAvg's server model, x^(t+1) = xbar^(t,tau), and
because the distance of the clients from it is their drift (Lemma 2.3).

This is for small problems: a trace holds every iterate of every client. It uses the same loop and the same random keys
as `simulate`, with an algorithm whose clients also keep their iterates in their state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbraid.core import Algorithm, Exchange, Report, check_count
from fedbraid.costs import cost
from fedbraid.data.federated import FederatedData, Split
from fedbraid.drawing import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW
from fedbraid.local import Fold, LocalWork
from fedbraid.simulation.loop import RoundLoop, Schedule
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.placement import place_run
from fedbraid.simulation.plan import cohorts_of
from fedbraid.simulation.program import Task
from fedbraid.simulation.run import check_cohort, compiled_rounds, federated_data
from fedbraid.transforms.clients import map_inputs, map_report

__all__ = ["ShadowTrace", "draw_shadow", "trace_shadow"]

PyTree = Any


class ShadowTrace(NamedTuple):
    """T rounds of M clients with at most K local steps, models flattened to d numbers (``unravel`` undoes that).

    A client with fewer than K steps keeps the model of its last step. The shadow is the mean with the uploads' weights.
    """

    server: np.ndarray  # [T + 1, d]: x^(t), the first and the last included
    iterates: np.ndarray  # [T, M, K + 1, d]: x_i^(t,k)
    shadow: np.ndarray  # [T, K + 1, d]: xbar^(t,k)
    clients: np.ndarray  # [T, M]: which clients
    steps: np.ndarray  # [T, M]: tau of each
    weights: np.ndarray  # [T, M]: they sum to 1 in every round
    unravel: Callable[[Any], PyTree]

    @property
    def drift(self) -> np.ndarray:
        """The clients' mean squared distance from the shadow, ``[T, K + 1]``: the left side of Lemma 2.3."""
        away = np.sum((self.iterates - self.shadow[:, None]) ** 2, -1)
        return np.einsum("tm,tmk->tk", self.weights, away)


class _Recorded(NamedTuple):
    """A client's own state, and the record of its last local training."""

    own: Any
    seen: Any  # [K + 1, d]: the models
    steps: Any
    weight: Any


class _Recording(NamedTuple):
    """A fold's own carry, the models so far, and the number of steps so far."""

    carry: Any
    seen: Any
    k: Any


def trace_shadow(
    alg: Algorithm,
    params: PyTree,
    data: FederatedData | Split,
    *,
    rounds: int,
    cohort: int | None = None,
    seed: int = 0,
    exchange: str | None = None,
) -> ShadowTrace:
    """Run ``alg`` like `simulate` and keep every client's model at every local step.

    The algorithm's clients must be made of local steps with the model in their carry (FedAvg and its variants,
    SCAFFOLD, Mime ...). ``exchange`` is the name of the exchange to record; by default the one with such steps.

    >>> from fedbraid.algorithms import fedavg
    >>> from fedbraid.data.toy import toy_loss, two_class
    >>> alg = fedavg(toy_loss, client_lr=0.1, batch_size=None, steps=4, weighting="uniform")
    >>> trace = trace_shadow(alg, jnp.zeros(2), two_class(clients=3), rounds=2)
    >>> trace.iterates.shape, trace.shadow.shape
    ((2, 3, 5, 2), (2, 5, 2))
    >>> bool(np.allclose(trace.shadow[0, -1], trace.server[1], atol=1e-6))  # the shadow ends at the server's model
    True
    """
    check_count("rounds", rounds)
    federated = federated_data(data)
    asked = check_cohort(federated.train, cohort)
    traffic = cost(alg, params, federated)  # checks the structure, before anything compiles
    index, fold = _recorded_fold(alg, params, exchange)
    flat, unravel = ravel_pytree(params)
    task = Task(_recorder(alg, index, fold, federated.train, flat), federated)
    options = EngineOptions(plan="sequential", devices=1, data_in="device", states_in="device")
    placement = place_run(task.algorithm, params, federated, options, asked)
    driver = compiled_rounds(task, params, placement, options, traffic, rounds=rounds, seed=seed)
    path, rows = [np.asarray(flat)], []

    def look(server: PyTree) -> dict[str, Any]:
        """After every round: the server's model, and what the cohort's clients recorded."""
        ids = cohorts_of(alg, seed, driver.done - 1, federated.train.num_clients, asked)[index]
        kept = jax.tree.map(lambda leaf: np.asarray(leaf[ids]), driver.states)
        path.append(np.asarray(ravel_pytree(alg.params(server))[0]))
        rows.append((ids, _held(kept.seen, kept.steps), kept.steps, kept.weight))
        return {}

    driver.scorer = look
    RoundLoop(driver, Schedule(rounds, evaluate_every=1)).run()
    ids, iterates, steps, weights = (np.stack(column) for column in zip(*rows, strict=True))
    weights = weights / weights.sum(1, keepdims=True)
    shadow = np.einsum("tm,tmkd->tkd", weights, iterates)
    return ShadowTrace(np.stack(path), iterates, shadow, ids, steps, weights, unravel)


def _held(seen: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Iterates ``[M, K + 1, d]``, each client's last one repeated to the end."""
    paths = seen.copy()
    for path, k in zip(paths, steps, strict=True):
        path[k + 1 :] = path[k]
    return paths


def _model_fold(alg: Algorithm, params: PyTree, step: Exchange) -> int | None:
    """The index of the last fold of an exchange's client whose carry has the model; None if there is none."""
    if not isinstance(step.client, LocalWork):
        return None
    key = jax.eval_shape(lambda: jax.random.key(0))
    down = jax.eval_shape(lambda p: step.send(alg.init(p)), params)
    state = jax.eval_shape(alg.init_client, params)
    for j in reversed(range(len(step.client.folds))):
        model = _local_model(jax.eval_shape(step.client.folds[j].start, down, state, key))
        if model is not None and jax.tree.structure(model) == jax.tree.structure(params):
            return j
    return None


def _local_model(carry: Any) -> PyTree | None:
    """A client's model during its local steps: the field ``params`` of the carry; None if it has no such field."""
    return getattr(carry, "params", None)


def _recorded_fold(alg: Algorithm, params: PyTree, name: str | None) -> tuple[int, int]:
    """The indices of the exchange to record and of its client's fold."""
    folds = [_model_fold(alg, params, e) for e in alg.exchanges]
    able = [(i, fold) for i, fold in enumerate(folds) if fold is not None]
    names = [alg.exchanges[i].name for i, _ in able]
    if name is not None and name not in names:
        raise ValueError(f"exchange must be one whose clients take local steps, {names} here, got {name!r}")
    if not able:
        raise ValueError(
            "this algorithm has no shadow: no exchange's client is made of local steps with the model in their "
            f"carry, as params (exchanges: {[e.name for e in alg.exchanges]})"
        )
    if name is None:
        name = "train" if "train" in names else names[-1]
    return able[names.index(name)]


def _recorder(alg: Algorithm, index: int, which: int, split: Split, like: Any) -> Algorithm:
    """``alg`` whose clients also keep, in their state, the models of fold ``which`` of exchange ``index``."""
    work = cast(LocalWork, alg.exchanges[index].client)
    most = int(np.max(work.folds[which].batches.count(split.sizes)))
    blank = jnp.zeros((most + 1, like.size), like.dtype)

    def init_client(params: PyTree) -> _Recorded:
        zero = jnp.zeros((), jnp.result_type(float))
        return _Recorded(alg.init_client(params), blank, jnp.int32(0), zero)

    def wrapped(i: int, exchange: Exchange) -> Exchange:
        client: Callable = _recording_work(work, which, blank) if i == index else exchange.client

        def keep_record(report: Any, down: PyTree, state: _Recorded, key: Any) -> Report:
            if i != index:
                return report._replace(state=state._replace(own=report.state))
            inner, seen, k = report
            weight = jnp.asarray(inner.weight, jnp.result_type(float))
            return inner._replace(state=_Recorded(inner.state, seen, k, weight))

        def reconcile(state: _Recorded, meant: PyTree, decoded: PyTree) -> _Recorded:
            return state._replace(own=exchange.reconcile(state.own, meant, decoded))

        inner = map_inputs(client, state=lambda state: state.own)
        return exchange._replace(client=map_report(inner, keep_record), reconcile=reconcile)

    exchanges = tuple(wrapped(i, exchange) for i, exchange in enumerate(alg.exchanges))
    return alg._replace(init_client=init_client, exchanges=exchanges, personal=None)  # states here are not the method's


def _recording_work(work: LocalWork, which: int, blank: Any) -> LocalWork:
    """The client's work, whose report is (report, models seen in fold ``which``, number of its steps)."""
    fold = work.folds[which]

    def model(carry: Any) -> Any:
        return ravel_pytree(_local_model(carry))[0]

    def start(down: PyTree, state: PyTree, key: Any) -> _Recording:
        carry = fold.start(down, state, key)
        return _Recording(carry, blank.at[0].set(model(carry)), jnp.int32(0))

    def advance(r: _Recording, batch: dict, key: Any, down: PyTree) -> _Recording:
        carry = fold.step(r.carry, batch, key, down)
        return _Recording(carry, r.seen.at[r.k + 1].set(model(carry)), r.k + 1)

    def finish(r: _Recording, down: PyTree, state: PyTree, n: Any) -> tuple:
        return fold.finish(r.carry, down, state, n), r.seen, r.k

    def combine(results: tuple, down: PyTree, state: PyTree, key: Any) -> tuple:
        result, seen, k = results[which]
        plain = (*results[:which], result, *results[which + 1 :])
        return work.combine(plain, down, state, key), seen, k

    recording = Fold(start, advance, finish, fold.batches)
    folds = (*work.folds[:which], recording, *work.folds[which + 1 :])
    return replace(work, folds=folds, combine=combine)


# --- the picture -----------------------------------------------------------------------------------------------------

# black and orange are kept for the server and the shadow
CLIENT_COLOURS = (BLUE, GREEN, PINK, SKY, YELLOW)
SHADOW_COLOUR, SERVER_COLOUR = ORANGE, BLACK


def draw_shadow(
    trace: ShadowTrace,
    *,
    objective: Callable[[Any], Any] | None = None,
    optimum: Any = None,
    axes: tuple[int, int] = (0, 1),
) -> Any:
    """A matplotlib figure of a trace: the paths in the plane of two coordinates, and the drift over the local steps.

    objective: a function of the flat model whose contours are drawn (models of two parameters only).
    optimum: the flat model to mark with a star.

    >>> from fedbraid.algorithms import fedavg
    >>> from fedbraid.data.toy import toy_loss, two_class
    >>> alg = fedavg(toy_loss, client_lr=0.1, batch_size=None, steps=4, weighting="uniform")
    >>> trace = trace_shadow(alg, jnp.zeros(2), two_class(), rounds=2)
    >>> len(draw_shadow(trace).axes)
    2
    """
    from matplotlib.figure import Figure

    dim = trace.server.shape[1]
    a, b = axes
    if not (0 <= a < dim and 0 <= b < dim and a != b):
        raise ValueError(f"axes must be two different coordinates of a model of {dim} parameters, got {axes}")
    if objective is not None and dim != 2:
        raise ValueError(f"contours need a model of two parameters, this one has {dim}; leave out objective")
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    plane, drift = figure.subplots(1, 2, width_ratios=(1.25, 1))
    many = trace.iterates.shape[1]
    for t in range(len(trace.shadow)):
        for j in range(many):
            colour = CLIENT_COLOURS[int(trace.clients[t, j]) % len(CLIENT_COLOURS)]
            label = f"client {trace.clients[t, j]}" if t == 0 and many <= len(CLIENT_COLOURS) else None
            path = trace.iterates[t, j, : trace.steps[t, j] + 1]
            plane.plot(path[:, a], path[:, b], "o-", color=colour, ms=3, lw=1, alpha=0.9, label=label)
        path = trace.shadow[t]
        plane.plot(
            path[:, a], path[:, b], "o-", color=SHADOW_COLOUR, ms=4, lw=1.8, label="shadow (mean)" if t == 0 else None
        )
    plane.plot(trace.server[:, a], trace.server[:, b], "s", color=SERVER_COLOUR, ms=6, label="server", zorder=3)
    if optimum is not None:
        at = np.asarray(optimum, float)
        plane.plot(at[a], at[b], "*", color="white", mec="black", ms=15, label="optimum", zorder=4)
    if objective is not None:
        _contours(plane, objective, axes, str(trace.server.dtype))
    plane.set_xlabel(f"parameter {a}")
    plane.set_ylabel(f"parameter {b}")
    plane.set_title("local steps, their mean, and the server's model")
    plane.legend(fontsize=8, framealpha=0.9)

    length = trace.shadow.shape[1] - 1
    for t, row in enumerate(trace.drift):
        drift.plot(t * length + np.arange(length + 1), row, "o-", color=SHADOW_COLOUR, ms=3, lw=1.2)
    drift.set_xlabel("local steps since the start")
    drift.set_ylabel("mean squared distance to the shadow")
    drift.set_title("client drift, reset by every round")
    drift.set_ylim(bottom=0)
    drift.grid(alpha=0.3)
    return figure


def _contours(plane: Any, objective: Callable, axes: tuple[int, int], dtype: str) -> None:
    (left, right), (low, high) = plane.get_xlim(), plane.get_ylim()
    grid = np.stack(np.meshgrid(np.linspace(left, right, 120), np.linspace(low, high, 120)), -1)
    points = grid if axes == (0, 1) else grid[..., ::-1]
    values = np.asarray(jax.vmap(objective)(jnp.asarray(points.reshape(-1, 2), dtype))).reshape(120, 120)
    bottom = values.min()
    levels = bottom + (values.max() - bottom) * np.linspace(0, 1, 14)[1:] ** 2
    plane.contour(grid[..., 0], grid[..., 1], values, levels, colors="0.75", linewidths=0.7, zorder=0)
    plane.set_xlim(left, right)
    plane.set_ylim(low, high)
