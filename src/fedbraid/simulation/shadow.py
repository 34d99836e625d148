"""The shadow sequence: every client's model at every local step, and their mean.

T. Renard, Notes on Federated Optimization, 2022, Notation 2.1: xbar^(t,k) = (1/M) sum_i x_i^(t,k). No client ever holds
the shadow; the analysis of FedAvg follows it, because FedAvg's server model is its end, x^(t+1) = xbar^(t,tau), and
because its distance from the clients is their drift (Lemma 2.3).

This is for small problems: a trace holds every iterate. It reads the same algorithm with the same addresses of
randomness as `simulate`, so it shows what a run did, not another run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbraid import address
from fedbraid.core import Aggregate, Algorithm, Exchange, Report, check_count, check_structure, reduce_reports
from fedbraid.costs import data_shapes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.drawing import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, YELLOW
from fedbraid.local import ClientData, Fold, LocalWork
from fedbraid.simulation.plan import cohorts_of

__all__ = ["ShadowTrace", "draw_shadow", "trace_shadow"]

PyTree = Any


class ShadowTrace(NamedTuple):
    """T rounds of M clients with at most K local steps, models flattened to d numbers (``unravel`` undoes that).

    A client with fewer than K steps stays where its last step left it. The shadow weighs clients as their uploads do.
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


class _Recording(NamedTuple):
    """A fold's own carry, the models seen so far, and how many steps that were."""

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

    For algorithms whose clients are made of local steps with the model in their carry (FedAvg and its kin, SCAFFOLD,
    Mime ...). ``exchange`` names the one to record; by default the one that has such steps.

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
    split = data.train if isinstance(data, FederatedData) else data
    split.check()
    asked = split.num_clients if cohort is None else check_count("cohort", cohort)
    if asked > split.num_clients:
        raise ValueError(f"cohort must be at most the population of {split.num_clients} clients, got {asked}")
    check_structure(alg, params, data_shapes(split))
    index, which = _recorded_fold(alg, params, exchange)
    flat, unravel = ravel_pytree(params)
    clients = [jax.jit(e.client) for e in alg.exchanges]
    clients[index] = jax.jit(_recorder(cast(LocalWork, alg.exchanges[index].client), which, split, flat))
    receive = [jax.jit(e.receive) for e in alg.exchanges]

    arrays = {name: jnp.asarray(a) for name, a in split.arrays.items()}
    cap = int(split.sizes.max())
    server = alg.init(params)
    states = [alg.init_client(params) for _ in range(split.num_clients)]
    path, rows = [np.asarray(flat)], []
    for round_ in range(rounds):
        cohorts = cohorts_of(alg, seed, round_, split.num_clients, asked)
        for i, (step, ids) in enumerate(zip(alg.exchanges, cohorts, strict=True)):
            key = address.exchange_key(jax.random.key(seed), round_, i)
            down, reports, seen = step.send(server), [], []
            for client in map(int, ids):
                own = ClientData(arrays, jnp.int32(split.offsets[client]), jnp.int32(split.sizes[client]), cap)
                result = clients[i](down, states[client], own, address.client_key(key, client))
                if i == index:
                    result, *recorded = result
                    seen.append(recorded)
                states[client] = result.state
                reports.append(result)
            server = receive[i](server, _reduced(step, reports, split.num_clients), address.server_key(key))
            if i == index:
                rows.append((np.asarray(ids), *_held(seen), np.array([float(r.weight) for r in reports])))
        path.append(np.asarray(ravel_pytree(alg.params(server))[0]))
    ids, iterates, steps, weights = (np.stack(column) for column in zip(*rows, strict=True))
    weights = weights / weights.sum(1, keepdims=True)
    shadow = np.einsum("tm,tmkd->tkd", weights, iterates)
    return ShadowTrace(np.stack(path), iterates, shadow, ids, steps, weights, unravel)


def _reduced(step: Exchange, reports: list[Report], population: int) -> Aggregate:
    ups = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(r.up for r in reports))
    up, weight, count = reduce_reports(step.reducer, ups, jnp.stack([jnp.asarray(r.weight) for r in reports]))
    return Aggregate(up, weight, count, jnp.asarray(population))


def _held(seen: list) -> tuple[np.ndarray, np.ndarray]:
    """Iterates ``[M, K + 1, d]``, each client's last one repeated to the end, and numbers of steps ``[M]``."""
    steps = np.array([int(k) for _, k in seen])
    paths = np.stack([np.asarray(models) for models, _ in seen])
    for path, k in zip(paths, steps, strict=True):
        path[k + 1 :] = path[k]
    return paths, steps


def _model_fold(alg: Algorithm, params: PyTree, step: Exchange) -> int | None:
    """Which fold of an exchange's client carries the model: the last one that has it."""
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
    """A client's model on its way: ``params`` of the carry, or ``y`` where an algorithm keeps the papers' letter."""
    return getattr(carry, "params", getattr(carry, "y", None))


def _recorded_fold(alg: Algorithm, params: PyTree, name: str | None) -> tuple[int, int]:
    """Which exchange to record, and which of its client's folds."""
    folds = [_model_fold(alg, params, e) for e in alg.exchanges]
    able = [(i, fold) for i, fold in enumerate(folds) if fold is not None]
    names = [alg.exchanges[i].name for i, _ in able]
    if name is not None and name not in names:
        raise ValueError(f"exchange must be one whose clients take local steps, {names} here, got {name!r}")
    if not able:
        raise ValueError(
            "this algorithm has no shadow: no exchange's client is made of local steps with the model in their "
            f"carry, as params or y (exchanges: {[e.name for e in alg.exchanges]})"
        )
    if name is None:
        name = "train" if "train" in names else names[-1]
    return able[names.index(name)]


def _recorder(work: LocalWork, which: int, split: Split, like: Any) -> Callable:
    """The client, returning (report, models seen in fold ``which``, number of its steps)."""
    fold = work.folds[which]
    most = int(np.max(fold.batches.count(split.sizes)))

    def model(carry: Any) -> Any:
        return ravel_pytree(_local_model(carry))[0]

    def start(down: PyTree, state: PyTree, key: Any) -> _Recording:
        carry = fold.start(down, state, key)
        seen = jnp.zeros((most + 1, like.size), like.dtype).at[0].set(model(carry))
        return _Recording(carry, seen, jnp.int32(0))

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
