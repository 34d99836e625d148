"""``simulate``: a federated run on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from fedbraid.core import Algorithm, check_count
from fedbraid.costs import Cost, cost, data_shapes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.lowering import lower_metrics, notice_unmet
from fedbraid.metric import as_metrics
from fedbraid.notices import notice
from fedbraid.simulation import checkpoint, hosts
from fedbraid.simulation.arrival import Arrival, everyone
from fedbraid.simulation.asynchrony import Asynchrony, no_past
from fedbraid.simulation.bar import progress_bar
from fedbraid.simulation.clock import Clock
from fedbraid.simulation.columns import RunColumns
from fedbraid.simulation.evaluate import evaluator, metrics_of
from fedbraid.simulation.feed import Feed
from fedbraid.simulation.history import History
from fedbraid.simulation.loop import RoundLoop, Schedule
from fedbraid.simulation.means import check_means
from fedbraid.simulation.model_axis import has_model_axis, model_sharding
from fedbraid.simulation.options import EngineOptions, engine_options
from fedbraid.simulation.padding import check_padding, recorded_losses
from fedbraid.simulation.personal import has_own_models, personal_evaluator
from fedbraid.simulation.placement import Placement, place_run
from fedbraid.simulation.program import Task, compile_rounds
from fedbraid.simulation.result import Checkpoints, Info, Progress, Result
from fedbraid.simulation.rounds import CALL, LOOK, WINDOW, CompiledRounds, Start
from fedbraid.simulation.states import damage
from fedbraid.simulation.timing import check_timing, timelines, timing_of

__all__ = ["check_cohort", "federated_data", "simulate"]

PyTree = Any


def simulate(
    alg: Algorithm,
    params: PyTree,
    data: FederatedData | Split,
    *,
    rounds: int,
    cohort: int | None = None,
    seed: int = 0,
    metrics: Callable | None = None,
    eval_every: int | None = None,
    arrival: Arrival = everyone,
    clock: Clock | None = None,
    asynchrony: Asynchrony | None = None,
    checkpoints: Checkpoints | None = None,
    on_progress: Callable[[Progress], bool | None] | None = None,
    on_evaluation: Callable[[Progress], Any] | None = None,
    progress: bool = False,
    engine: EngineOptions | None = None,
    **options: Any,
) -> Result:
    """Run ``alg`` for ``rounds`` rounds with ``cohort`` clients each (default: all of them).

    metrics: ``(params, batch) -> {name: (sums, weights)}``, evaluated on ``data.test`` every ``eval_every`` rounds
        (default: at the end only) and after the last. Use :class:`fedbraid.Metrics` for names that are not well known.
        If the algorithm gives every client a model of its own (``personal``) and ``data.test`` has the same clients,
        these personal models are evaluated, too, each on its client's test examples: columns such as
        ``test_personal_accuracy``.
    arrival: which uploads arrive.
    clock: the devices of the clients; the history then has a column ``simulated_seconds``.
    asynchrony: when the server takes a step, such as ``fedbuff(10)``; default: after a round of all clients. A round
        of the history is then a server step, and ``cohort`` clients work at the same time.
    checkpoints: where and how often the run is saved.
    on_progress: called about four times per second, or after each round if rounds take longer. If it returns True, the
        run ends after a checkpoint.
    on_evaluation: called before each evaluation, which may take longer than a round.
    progress: show a bar, in a notebook or a terminal.
    engine: how the run is computed; see :class:`fedbraid.EngineOptions`. Each field may also be given by name:
        ``simulate(..., plan="lanes", chunk=8)``. Results do not depend on them beyond rounding.

    Hyper-parameters inside ``alg`` may be traced, so a sweep is a ``vmap``:

    >>> import jax, numpy as np, jax.numpy as jnp
    >>> from fedbraid import Split, fedavg, simulate
    >>> data = Split.from_clients([{"x": np.full((4, 1), c, np.float32)} for c in (1.0, 3.0)])
    >>> loss = lambda params, batch, key: 0.5 * jnp.mean((params - batch["x"]) ** 2)
    >>> run = lambda lr: simulate(fedavg(loss, client_lr=lr, batch_size=4), jnp.zeros(1), data, rounds=50).params
    >>> [round(float(x), 3) for x in jax.vmap(run)(jnp.array([0.1, 0.5]))[:, 0]]
    [1.99, 2.0]
    """
    how = engine_options(engine, options)
    task = Task(alg, federated_data(data), arrival)
    check_count("rounds", rounds)
    size = check_cohort(task.data.train, cohort)
    task = replace(task, timing=timing_of(clock, asynchrony, size))
    if eval_every is not None:
        check_count("eval_every", eval_every)
    if metrics is not None:
        if task.data.test is None:
            raise ValueError("metrics were given, but the data has no test split to evaluate them on")
        metrics_of(metrics, params, task.data.test)  # refuses a metric whose direction is unknown
        check = as_metrics(metrics).check
        if check is not None:
            check(task.data)  # refuses labels that the model does not have
    with recorded_losses() as losses:
        traffic = cost(alg, params, task.data)  # also checks the structure of the algorithm, before anything compiles
    check_padding(losses, alg, params, task.data.train)
    check_means(alg, params, task.data.train, how)
    check_timing(task, params)
    _notice_unused_state(alg, params, task.data.train.num_clients, rounds, size)

    beside = None if checkpoints is None else checkpoints.folder.with_name("states")
    split = task.data.train
    run: dict[str, Any] = {"seed": seed, "cohort": size, "clients": split.num_clients, "examples": split.num_examples}
    if task.timing is not None:
        run["timing"] = str(task.timing)
    if checkpoints is not None:
        run |= dict(checkpoints.run or {})
    saved = _saved(checkpoints, run, [p for p in (how.states_folder, beside) if p], lambda: alg.init_client(params))
    if saved is not None and saved[0] > rounds:
        raise ValueError(f"rounds = {rounds}, but the checkpoint to resume from is already after round {saved[0]}")
    taken = size if task.timing is None else task.timing.uploads
    placement = place_run(alg, params, task.data, how, taken, beside, asynchronous=task.is_asynchronous)
    if saved is not None:
        placement = placement.resumed(how, saved[1])
    notice_unmet(alg, params, data_shapes(task.data), how, placement.plan.lanes)
    driver = compiled_rounds(task, params, placement, how, traffic, rounds=rounds, seed=seed)
    driver.seconds = LOOK if progress or on_progress is not None else CALL
    if checkpoints is not None:
        driver.checkpoints, driver.run = checkpoints.folder, run
    if metrics is not None:
        driver.scorer = _scorer(metrics, task, how)
        driver.personal = _own_scorer(metrics, task, params, how)
    schedule = Schedule(
        rounds,
        None if metrics is None else eval_every or rounds,
        None if checkpoints is None else checkpoints.every,
    )
    if saved is not None:
        driver.restore(*saved)
        # a run that had fewer rounds evaluated its last one
        driver.history.keep_evaluations(schedule.evaluates)
    del saved  # frees a copy of all states
    driver.reserve(rounds)
    judged = _Judged(driver, alg, None if checkpoints is None else checkpoints.judge)
    began = time.perf_counter()

    def report(asked: Callable[[Progress], Any] | None, *, evaluating: bool = False) -> bool:
        seconds = time.perf_counter() - began
        now = Progress(driver.done, driver.history.newest(), seconds, driver.history.since, evaluating)
        if show is not None:
            show(now)
        return asked is not None and bool(asked(now))

    def tell() -> bool:
        return hosts.any_of(report(on_progress) or judged.ended)

    def evaluating() -> None:
        report(on_evaluation, evaluating=True)

    with progress_bar(rounds) if progress and hosts.is_first() else contextlib.nullcontext() as show:
        told = on_progress is not None or progress or judged.judge is not None
        if not judged.ended:
            shown = on_evaluation is not None or show is not None
            RoundLoop(driver, schedule, tell if told else None, evaluating if shown else None).run()
    return _result(driver, alg, placement, traffic)


class _Judged:
    """Calls the judge of a run after every evaluation; ``ended`` is whether it ended the run."""

    def __init__(self, driver: CompiledRounds, alg: Algorithm, judge: Callable | None) -> None:
        self.driver, self.alg, self.judge, self.ended = driver, alg, judge, False
        if judge is not None:
            driver.evaluated = self.evaluated
            if driver.history.evaluations:  # of a resumed run
                self.evaluated()

    def evaluated(self) -> None:
        assert self.judge is not None
        driver = self.driver
        params = lambda: self.alg.params(hosts.local(driver.server))  # noqa: E731
        self.ended = bool(self.judge(driver.done, driver.history.evaluated(), params))


def federated_data(data: FederatedData | Split) -> FederatedData:
    """Federated data, checked. A split becomes the training split of federated data."""
    if not (isinstance(data, FederatedData) or hasattr(data, "offsets")):  # a mapping of parameters, say
        raise ValueError(
            f"data must be a FederatedData or a Split, got a {type(data).__name__}; the order of arguments is "
            "simulate(algorithm, params, data, ...)"
        )
    federated = data if isinstance(data, FederatedData) else FederatedData(data)
    federated.check()
    return federated


def check_cohort(split: Split, cohort: int | None) -> int:
    """The checked number of clients in a round; None means all."""
    size = split.num_clients if cohort is None else check_count("cohort", cohort)
    if size > split.num_clients:
        raise ValueError(f"cohort must be at most the population of {split.num_clients} clients, got {size}")
    return size


def compiled_rounds(
    task: Task,
    params: PyTree,
    placement: Placement,
    options: EngineOptions,
    traffic: Cost,
    *,
    rounds: int,
    seed: int,
    window: int | None = None,
) -> CompiledRounds:
    """The driver of a run, before its first round."""
    alg, mesh, plan = task.algorithm, placement.mesh, placement.plan
    window = min(WINDOW, rounds) if window is None else window
    timeline = timelines(task, traffic)
    feed = Feed(task, plan, mesh, options, seed=seed, window=window, stream=placement.stream, timeline=timeline)
    start = Start(alg.init(params), alg.init_client(params), placement.on_host, placement.folder)
    if task.is_asynchronous:
        assert timeline is not None
        start = start._replace(past=no_past(alg, start.server, timeline(seed).places(rounds)))
    return CompiledRounds(
        lambda plan: compile_rounds(task, plan, mesh, options, local=placement.stream),
        feed,
        History(traffic, plan.cohort),
        start,
        sharding=partial(model_sharding, mesh) if has_model_axis(mesh) else None,
    )


def _scorer(metrics: Callable, task: Task, options: EngineOptions) -> Callable[[PyTree], dict[str, Any]]:
    """(server) -> scores of its model on the test split."""
    assert task.data.test is not None
    evaluate = evaluator(lower_metrics(metrics, options), task.data.test)
    return lambda server: evaluate.summary(task.algorithm.params(server))


def _own_scorer(metrics: Callable, task: Task, params: PyTree, options: EngineOptions) -> Callable | None:
    """(server, reader of states) -> scores of the clients' own models; None if they have none to evaluate."""
    alg, test = task.algorithm, task.data.test
    if test is None or not has_own_models(alg, task.data, test):
        return None
    return personal_evaluator(lower_metrics(metrics, options), alg, params, test).summary


def _notice_unused_state(alg: Algorithm, params: PyTree, population: int, rounds: int, cohort: int) -> None:
    if jax.tree.leaves(jax.eval_shape(alg.init_client, params)) and rounds * cohort < population:
        notice(
            f"clients keep state, but {rounds} rounds with {cohort} of {population} clients reach each client less "
            "than once on average: the state is hardly used. Use more rounds, a larger cohort or a stateless method"
        )


def _saved(
    checkpoints: Checkpoints | None, run: dict[str, Any], places: list[Path], first: Callable[[], PyTree]
) -> tuple[int, dict[str, Any]] | None:
    """The newest good checkpoint, if the run is to be resumed; None: start from the first round.

    run: what determines the results. places: folders that may hold client states. first: returns a client's first
    state.
    """
    if checkpoints is None or not checkpoints.resume:
        return None
    if hosts.is_first():
        checkpoint.drop_partial(checkpoints.folder)
    found, problem = None, None
    for place in checkpoint.good_ones(checkpoints.folder):
        checkpoint.check_run(place, run)
        found = checkpoint.load(place)
        states = found[1]["states"] or {}
        problem = damage(states, places, first()) if "records" in states else None
        if problem is None:
            break
        found = None
        notice(f"the checkpoint {place} is not used: {problem}")
    if found is None and problem is not None:
        raise checkpoint.CheckpointError(
            f"{problem}. No checkpoint has all its client states: delete {checkpoints.folder}, then resume to start "
            "the run from its first round"
        )
    if found is None:
        notice(f"there is no good checkpoint in {checkpoints.folder}: the run starts from its first round")
    hosts.same(str(0 if found is None else found[0]), "checkpoints (they do not see the same run folder)")
    return found


def _result(driver: CompiledRounds, alg: Algorithm, placement: Placement, traffic: Cost) -> Result:
    history = driver.history
    info = Info(
        driver.feed.plan,
        traffic,
        placement.stream,
        history.steps,
        history.masked / max(history.steps + history.masked, 1),
        history.imbalance / max(driver.done, 1),
        driver.done,
    )
    server = hosts.local(driver.server)
    states = driver.host_states if driver.host_states is not None else hosts.local(driver.states)
    columns = RunColumns(history.rounds()), RunColumns(history.evaluated())
    return Result(alg.params(server), server, states, *columns, info)
