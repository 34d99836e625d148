"""Baselines of a comparison: what federation adds to training alone, and what it loses to collecting all data.

    local     *local only*: each client trains its own model on its own examples and sends nothing. All clients
              together take the local steps that they take in the federation: each trains in rounds * cohort / clients
              rounds.
    pooled    *pooled data*: one machine has all training examples. Its number of steps is that of a
              client in every round; its batch size is the cohort size times the batch size of a client.

Both have the model, the local optimizer and the local options of the first FedAvg (else of the first method that has a
client learning rate). Their learning rate is tuned as that of the methods: on the same validation split and the same
seeds, over the largest number of points that a method has. Neither computes more gradients than one method. They
have no transforms, no dropouts and no attackers.

The score of *pooled data* is that of a method: one model on the test examples of all clients. In the score of *local
only* each test example is judged by the model of its own client. ``everywhere`` is the mean score of a client's model
on the test examples of all clients.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.algorithms import NAMES, fedavg
from fedbraid.core import Algorithm, Down, Exchange, Report
from fedbraid.costs import nbytes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment import search
from fedbraid.experiment.assembly import Experiment, assemble
from fedbraid.experiment.comparison import Comparison
from fedbraid.experiment.config import Arrival, Attack, Config, parse
from fedbraid.experiment.lab import TRIES, hold_out_validation
from fedbraid.experiment.points import points_program, with_values
from fedbraid.experiment.trials import Criterion
from fedbraid.local import ClientData, LocalWork, batches_of
from fedbraid.lowering import LoweringOptions, captured, lower_metrics
from fedbraid.names import options_of
from fedbraid.notices import notice
from fedbraid.simulation.evaluate import client_values, in_batches, score, summarize
from fedbraid.simulation.points import PointsResult

__all__ = ["BASELINES", "alone", "pool", "run_baseline"]

Baseline = Literal["local", "pooled"]
BASELINES: dict[str, str] = {"local": "local only", "pooled": "pooled data"}  # by the name in a configuration: labels
RATE = "algorithm.client_lr"
MOST_CLIENTS = 200  # local models; with more clients, this many are drawn at random
MOST_BYTES = 1e9  # of all local models of a tuning; fewer clients are drawn for a large model
LEAST_CLIENTS = 10
MOST_EXAMPLES = 1000  # on which every local model is tested for `everywhere`
Scores = dict[str, Any]


def alone(alg: Algorithm) -> Algorithm:
    """FedAvg without a federation: each client keeps its own model, trains it, and sends nothing.

    alg: an algorithm with one exchange whose clients end with the model that they send, such as `fedavg`.
    """
    (exchange,) = alg.exchanges
    work = exchange.client
    if not isinstance(work, LocalWork) or len(work.folds) != 1:
        raise ValueError("alone needs an algorithm whose clients go over their batches once in a round, such as fedavg")
    fold = work.folds[0]

    def start(down: Down, state: Any, key: Any) -> Any:
        return fold.start(Down(state[0]), state[1], key)

    def finish(carry: Any, down: Down, state: Any, n: Any) -> Report:
        report = fold.finish(carry, Down(state[0]), state[1], n)
        moved = jax.tree.map(jnp.subtract, state[0], report.up.pseudograd)
        return Report((), report.weight, (moved, report.state), report.metrics)

    own = replace(work, folds=(fold._replace(start=start, finish=finish),))
    return Algorithm(
        init=lambda params: params,
        init_client=lambda params: (params, alg.init_client(params)),
        exchanges=(Exchange(exchange.name, lambda server: Down(()), own, lambda server, aggregate, key: server),),
        params=lambda server: server,
    )


def pool(data: FederatedData) -> FederatedData:
    """The data with all training examples on one client. Nothing is copied; the other splits stay as they are."""
    train = data.train
    return replace(data, train=Split(train.arrays, np.array([0, train.num_examples], np.int64)))


class _Plan(NamedTuple):
    """One baseline, ready to be tuned and run."""

    kind: Baseline
    config: Config
    rates: tuple[float, ...]
    tuning: FederatedData
    final: FederatedData
    declared: Sequence[Any]

    @property
    def swap(self) -> Callable | None:
        return (lambda loss, options: alone(fedavg(loss, **options))) if self.kind == "local" else None


def run_baseline(
    kind: Baseline,
    comparison: Comparison,
    data: FederatedData,
    criterion: Criterion,
    on_doing: Callable[[float, str], Any] | None = None,
) -> dict[str, Any] | None:
    """Tune, run and test a baseline; returns its row of the summary. None if it is not defined for this data.

    ``scores`` and ``columns`` (each client's own value, for every seed) are for the statistics of the row.
    """
    if kind == "local" and not data.aligned:
        notice("no row 'local only': the test clients are not the training clients, so none has an own model")
        return None
    began = time.perf_counter()
    tell = on_doing or (lambda done, doing: None)
    plan = _plan(kind, comparison, data)
    tell(0.0, f"tuning, {len(plan.rates)} rates")
    scores = _tune(plan, comparison, criterion)
    sound = [i for i, score in enumerate(scores) if math.isfinite(score)]
    row: dict[str, Any] = {
        "label": BASELINES[kind],
        "kind": kind,
        "about": _about(plan, data),
        "trials": len(scores) * comparison.tuning.seeds,
        "trials_diverged": (len(scores) - len(sound)) * comparison.tuning.seeds,
        "best": None,
        "at_edge": [],
        "bytes": 0,
    }
    if sound:
        best = max(sound, key=lambda i: (criterion.metric.sign * scores[i], -i))
        row["best"] = {RATE: plan.rates[best]}
        row["at_edge"] = [RATE] if len(scores) > 2 and best in (0, len(scores) - 1) else []
        row |= _final(plan, comparison, criterion, plan.rates[best], tell)
    return row | {"seconds": time.perf_counter() - began}


# --- settings --------------------------------------------------------------------------------------------------------


def _plan(kind: Baseline, comparison: Comparison, data: FederatedData) -> _Plan:
    base = comparison.base
    options, rates = _reference(comparison)
    held, _ = hold_out_validation(data, comparison.tuning.validation, comparison.tuning.seed)
    cohort = data.train.num_clients if base.cohort == "all" else base.cohort
    batches = batches_of(**{k: v for k, v in options.items() if k in ("batch_size", "epochs", "steps", "shuffle")})
    if kind == "local":
        rounds, many = max(1, math.ceil(base.rounds * cohort / data.train.num_clients)), "all"
        if held.validation is None or held.validation.num_clients != held.train.num_clients:
            held, _ = hold_out_validation(data, comparison.tuning.validation or 0.2, comparison.tuning.seed)
    else:
        sizes = data.train.sizes
        steps = max(1, round(float(np.mean(batches.count(sizes)))))
        batch = cohort * (batches.size or round(float(np.mean(sizes))))
        options = {k: v for k, v in options.items() if k != "epochs"}
        options |= {"steps": steps, "batch_size": min(batch, data.train.num_examples)}
        rounds, many = base.rounds, 1
        held, data = pool(held), pool(data)
    tree = base.model_dump() | {"transforms": (), "arrival": Arrival().model_dump(), "attack": Attack().model_dump()}
    tree |= {"clock": {}, "asynchrony": {}}
    tree |= {"algorithm": {"name": "fedavg", **options, "client_lr": rates[0]}, "rounds": rounds, "cohort": many}
    config = parse(tree)
    experiment = assemble(config, data)
    if kind == "local":
        held, data = _some_clients(held, data, experiment, len(rates), base.seed)
    return _Plan(kind, config, rates, held, data, experiment.metrics.declared)


def _reference(comparison: Comparison) -> tuple[dict[str, Any], tuple[float, ...]]:
    """FedAvg's options for the baselines, and the learning rates to try."""
    tunings = [comparison.tuning_of(i) for i in range(len(comparison.methods))]
    order = sorted(range(len(tunings)), key=lambda i: comparison.methods[i].name != "fedavg")
    grids = {i: one.over[RATE] for i in order if (one := tunings[i]) is not None and RATE in one.over}
    first = (list(grids) or [i for i in order if "client_lr" in comparison.config(i).algorithm.options] or order)[0]
    given = comparison.config(first).algorithm.options
    options = {key: value for key, value in given.items() if key in _local_options()}
    most = max((_number_of_points(one) for one in tunings if one is not None), default=1)
    if grids:
        return options, _rates(search.over(RATE, grids[first]), most)
    rate = float(given.get("client_lr", 0.1))
    return options, (rate,) if most == 1 else tuple(float(r) for r in np.geomspace(rate / 10, rate * 10, most))


def _local_options() -> tuple[str, ...]:
    own = options_of(NAMES.find("fedavg").thing, skip=("loss",))
    return tuple(name for name in own if name not in ("client_lr", "server_lr", "weighting"))


def _number_of_points(settings: Any) -> int:
    if settings.search != "grid":
        return settings.trials or TRIES
    return math.prod(len(search.values_of(one)) for one in settings.space.values())


def _rates(space: search.Choice | search.Range, most: int) -> tuple[float, ...]:
    """``most`` learning rates in the range of ``space``; its own values if it has that many."""
    values = sorted(float(value) for value in search.values_of(space))
    if isinstance(space, search.Choice) and len(values) in (1, most):
        return tuple(values)
    return tuple(float(f"{rate:.6g}") for rate in np.geomspace(values[0], values[-1], most))


def _some_clients(
    held: FederatedData, data: FederatedData, experiment: Experiment, points: int, seed: int
) -> tuple[FederatedData, FederatedData]:
    """Both data sets with at most MOST_CLIENTS clients, fewer if their models need more than MOST_BYTES."""
    room = int(MOST_BYTES // (nbytes(experiment.shapes) * points))
    most = min(MOST_CLIENTS, max(LEAST_CLIENTS, room))
    if data.train.num_clients <= most:
        return held, data
    chosen = np.sort(np.random.default_rng(seed).choice(data.train.num_clients, most, replace=False))

    def some(split: Split | None) -> Split | None:
        if split is None:
            return None
        rows = [np.arange(int(split.offsets[i]), int(split.offsets[i + 1])) for i in chosen]
        ids = tuple(split.ids[int(i)] for i in chosen) if len(split.ids) else ()
        return Split.from_assignment(split.arrays, rows, ids)

    tuning = replace(held, train=some(held.train), validation=some(held.validation))  # type: ignore[arg-type]
    return tuning, replace(data, train=some(data.train), test=some(data.test), validation=None, unseen=None)  # type: ignore[arg-type]


def _about(plan: _Plan, data: FederatedData) -> str:
    options, rounds = plan.config.algorithm.options, plan.config.rounds
    if plan.kind == "pooled":
        return (
            f"one machine trains on all training examples: {rounds * options['steps']:,} steps on batches of "
            f"{options['batch_size']:,}"
        )
    models = plan.final.train.num_clients
    some = (
        f" ({models} of {data.train.num_clients:,} clients, drawn at random)" if models < data.train.num_clients else ""
    )
    return f"each client{some} trains alone, for {rounds:,} rounds of local steps, and is tested on its own examples"


# --- runs ------------------------------------------------------------------------------------------------------------


def _tune(plan: _Plan, comparison: Comparison, criterion: Criterion) -> list[float]:
    """The score of every rate on the validation split, averaged over the tuning seeds; nan if it diverged."""
    seeds, prefix = comparison.tuning.seed_list, "validation_"
    validation = plan.tuning.validation
    metric = replace(criterion.metric, name=re.sub("^test_", prefix, criterion.metric.name))
    judged = criterion._replace(metric=metric, target=None)
    program = points_program(
        plan.config,
        plan.tuning,
        (RATE,),
        points=len(plan.rates),
        seeds=seeds,
        test=validation if plan.kind == "pooled" else None,
        prefix=prefix,
        swap=plan.swap,
    )
    own = _own_scores(program.base.metrics, validation)
    found = np.zeros((len(seeds), len(plan.rates)))
    for s, seed in enumerate(seeds):
        for chunk in program.chunks(range(len(plan.rates))):
            points = [{RATE: plan.rates[i]} for i in chunk]
            outcome = program.run(points, seed=seed, rounds=plan.config.rounds, keep=plan.kind == "local")
            for j, i in enumerate(chunk):
                found[s, i] = _judge(plan, judged, outcome, j, own, prefix)[0]
    return found.mean(0).tolist()


def _judge(
    plan: _Plan, criterion: Criterion, outcome: PointsResult, j: int, own: Callable[[Any], Scores], prefix: str
) -> tuple[float, Scores]:
    """The score of point ``j``, nan if it diverged, and each client's own metrics."""
    logged = criterion.metric.name in outcome.history
    of_history = (
        math.nan if outcome.diverged[j] or (plan.kind == "local" and not logged) else criterion.score(outcome, j)
    )
    if plan.kind == "pooled":
        return of_history, {name: column[j] for name, column in outcome.clients.items()}
    scores = own(_models(outcome, j))
    clients = {prefix + name: np.asarray(v) for name, v in client_values(scores, plan.declared).items()}
    return (of_history if logged else float(summarize(scores, prefix, plan.declared)[criterion.metric.name])), clients


def _models(outcome: PointsResult, j: int) -> Any:
    """The models of all clients of point ``j``, from the clients' states (see `alone`)."""
    return jax.tree.map(lambda leaf: leaf[j], outcome.carry[1][0])


def _own_scores(metrics: Any, split: Split | None) -> Callable[[Any], Scores]:
    """A function of the clients' models: sums and weights of every metric over each client's own examples."""
    assert split is not None
    cap = max(int(split.sizes.max()), 1)
    places = jnp.asarray(split.offsets[:-1], jnp.int32), jnp.asarray(split.sizes, jnp.int32)
    measure = lower_metrics(metrics, LoweringOptions())

    @captured.jit
    def evaluate(models: Any, arrays: Any) -> Scores:
        def one(client: Any) -> Scores:
            params, start, size = client
            batch = ClientData(arrays, start, size, cap, split.preprocess).everything()
            pairs = measure(params, batch)
            return {name: jnp.stack([jnp.sum(s, 0), jnp.sum(w, 0)]) for name, (s, w) in pairs.items()}

        scores = jax.lax.map(one, (models, *places))
        return {name: jnp.moveaxis(score, 0, 1) for name, score in scores.items()}

    arrays = {name: jnp.asarray(a) for name, a in split.arrays.items()}
    return lambda models: evaluate(models, arrays)


def _everywhere(metrics: Any, split: Split, declared: Sequence[Any], name: str, seed: int) -> Callable[[Any], float]:
    """A function of the clients' models: their mean score on MOST_EXAMPLES examples of all clients."""
    rows = np.random.default_rng(seed).permutation(split.num_examples)[:MOST_EXAMPLES]
    some = Split.from_assignment(split.arrays, [np.sort(rows)])
    batches, owners = in_batches(some)
    measure = lower_metrics(metrics, LoweringOptions())

    @captured.jit
    def values(models: Any, batches: Any, owners: Any) -> Any:
        def one(params: Any) -> Any:
            found = score(measure, params, batches, owners, clients=1, preprocess=split.preprocess)
            return summarize(found, "test_", declared)[name]

        return jax.lax.map(one, models)

    return lambda models: float(np.mean(values(models, batches, owners)))


def _final(
    plan: _Plan, comparison: Comparison, criterion: Criterion, rate: float, tell: Callable[[float, str], Any]
) -> dict[str, Any]:
    """Run the tuned baseline with every seed on all training data and test it."""
    seeds = range(comparison.base.seed, comparison.base.seed + comparison.settings.seeds)
    config, test, name = with_values(plan.config, {RATE: rate}), plan.final.test, criterion.metric.name
    assert test is not None
    program = points_program(
        config,
        plan.final,
        (),
        points=1,
        seeds=seeds,
        test=test if plan.kind == "pooled" else None,
        swap=plan.swap,
    )
    own = _own_scores(program.base.metrics, test)
    abroad = None
    if plan.kind == "local" and name.startswith("test_"):
        abroad = _everywhere(program.base.metrics, test, plan.declared, name, comparison.base.seed)
    scores, columns, everywhere = [], [], []
    for i, seed in enumerate(seeds):
        tell(i / len(seeds), f"testing, seed {seed}")
        outcome = program.run([{}], seed=seed, rounds=config.rounds, keep=plan.kind == "local")
        judged, clients = _judge(plan, criterion, outcome, 0, own, "test_")
        scores.append(judged)
        columns.append(clients.get(name))
        if abroad is not None:
            everywhere.append(abroad(_models(outcome, 0)))
    found: dict[str, Any] = {"scores": scores, "columns": columns}
    return found | ({"everywhere": float(np.mean(everywhere))} if everywhere else {})
