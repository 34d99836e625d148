"""One run from a configuration to a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.data.importing import NO_TEST
from fedbraid.experiment import live, runfolder
from fedbraid.experiment.assembly import Experiment, build
from fedbraid.experiment.config import Config, dump
from fedbraid.experiment.divergence import divergence
from fedbraid.experiment.figures import draw_run, save
from fedbraid.experiment.judging import best_evaluation, judge_of, metric_of, why_stopped
from fedbraid.experiment.params import PARAMS, params_sha256, write_params
from fedbraid.experiment.summary import RunSummary, summarize_run
from fedbraid.experiment.track import check_sinks, tracking
from fedbraid.metric import Metric, personal_column
from fedbraid.notices import notice
from fedbraid.simulation import Checkpoints, Progress, Result, hosts, simulate
from fedbraid.simulation.evaluate import evaluator
from fedbraid.simulation.personal import PersonalEvaluator, has_own_models, personal_evaluator, read_states
from fedbraid.transforms.accounting import epsilon_by_round, is_private

__all__ = ["run_config"]


def run_config(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    on_built: Callable[[Experiment], None] | None = None,
    on_progress: Callable[[Progress], bool | None] | None = None,
    on_evaluation: Callable[[Progress], Any] | None = None,
) -> RunSummary:
    """Run ``config``, write the run folder, and return its summary.

    The folder must be new, or with ``resume`` that of a run with this configuration; only rounds (which may grow) and
    the keys of engine, checkpoint, stop and track may differ. ``on_progress`` may return True to stop; the summary's
    ``finished`` is then false and the run can be resumed. ``on_evaluation`` is called before evaluations, and when the
    last one, of each client, is over. On several hosts every host calls this function with the same
    arguments, and the first one writes. While it runs, no other process can write to the folder.
    """
    experiment = build(config)  # errors in the configuration are found before a folder is made
    metric = metric_of(experiment)
    check_sinks(config.track.to)
    if experiment.data.test is None and hosts.is_first():
        notice(f"data {config.data.name!r} has {NO_TEST}")
    hosts.same(f"{dump(config)} {experiment.data.train.num_examples}", "configurations or data")
    if not resume:
        hosts.first_alone(lambda: runfolder.check_free(out))
    with runfolder.held(out):
        prepare = runfolder.continue_with if resume else runfolder.create
        hosts.first_alone(lambda: prepare(out, config))
        try:
            return _run(experiment, metric, out, resume, on_built, on_progress, on_evaluation)
        except ValueError:  # a mistake in the input that was found late, such as an error in an algorithm of one's own
            if not resume and hosts.is_first():
                runfolder.discard_unused(out)
            raise


def _run(
    experiment: Experiment,
    metric: Metric | None,
    out: Path,
    resume: bool,
    on_built: Callable | None,
    on_progress: Callable | None,
    on_evaluation: Callable | None,
) -> RunSummary:
    """Run an experiment in its folder, which this process holds. ``metric``: by which it is judged."""
    config = experiment.config
    if on_built is not None:
        on_built(experiment)
    stamps: list[tuple[int, float]] = []
    last: list[Progress] = []
    record = live.recorder(out, experiment)

    with tracking(config, out) as send:

        def watched(now: Progress) -> bool | None:
            stamps.append((now.round, now.seconds))
            record(now)
            send(now)
            last[:] = [now]
            return None if on_progress is None else on_progress(now)

        began = time.perf_counter()
        result = _simulate(experiment, metric, out, resume, watched, on_evaluation)
        seconds = time.perf_counter() - began
    stopped = "" if metric is None else why_stopped(config.stop, metric, result.evaluations)
    table = _table(experiment, result, stamps)
    tell = on_evaluation if last else None
    if tell is not None:
        tell(last[0]._replace(evaluating=True))  # the first model, and the last one for each client
    scores = None if experiment.data.test is None else evaluator(experiment.metrics, experiment.data.test)
    own = _own_evaluator(experiment)
    start = None if scores is None else scores.summary(experiment.params)
    if own is not None and start is not None:  # the global model is not what clients use: its loss may grow
        start = {personal_column(name): value for name, value in start.items()}
    problem = divergence(config, result.history, result.evaluations, result.params, start)
    summary = summarize_run(
        config,
        table,
        result.evaluations,
        seconds=seconds,
        declared=experiment.metrics.declared,
        clients=experiment.data.train.num_clients,
        partition=experiment.data.info.get("partition"),
        finished=result.info.stopped_at == config.rounds or bool(stopped),
        stopped="" if result.info.stopped_at == config.rounds else stopped,
        best={} if metric is None else best_evaluation(metric, result.evaluations),
        diverged=bool(problem),
        problem=problem,
        engine=_engine(result),
        params_sha256=params_sha256(result.params),
        out=str(out),
    )
    if hosts.is_first():
        clients = None if scores is None else scores.by_client(result.params)
        if clients is not None and own is not None:
            clients |= own.by_client(result.server, read_states(result.states))
        if tell is not None:
            tell(last[0])
        write_params(out / PARAMS, result.params, round=summary.rounds, description=experiment.description)
        _write(out, experiment, clients, table, summary)
    return summary


def _own_evaluator(experiment: Experiment) -> PersonalEvaluator | None:
    """The evaluator of the clients' own models on the test split; None if there are none to evaluate."""
    alg, data = experiment.algorithm, experiment.data
    if data.test is None or not has_own_models(alg, data, data.test):
        return None
    return personal_evaluator(experiment.metrics, alg, experiment.params, data.test)


def _simulate(
    experiment: Experiment,
    metric: Metric | None,
    out: Path,
    resume: bool,
    on_progress: Callable,
    on_evaluation: Callable | None,
) -> Result:
    config = experiment.config
    judge = None if metric is None else judge_of(experiment, metric, out)
    saved = out / runfolder.CHECKPOINTS
    result = simulate(
        experiment.algorithm,
        experiment.params,
        experiment.data,
        rounds=config.rounds,
        cohort=None if config.cohort == "all" else config.cohort,
        seed=config.seed,
        metrics=experiment.metrics if experiment.data.test is not None else None,
        eval_every=config.evaluation.every,
        arrival=experiment.arrival,
        clock=config.clock,
        asynchrony=config.asynchrony,
        engine=config.engine,
        checkpoints=Checkpoints(saved, config.checkpoint.every, resume, runfolder.determining(config), judge),
        on_progress=on_progress,
        on_evaluation=on_evaluation,
    )
    jax.block_until_ready(result.params)
    return result


def _table(experiment: Experiment, result: Result, stamps: list[tuple[int, float]]) -> dict[str, np.ndarray]:
    """The columns of ``metrics.parquet``."""
    rounds = result.info.stopped_at
    table = runfolder.columns(result.history, result.evaluations, rounds)
    table["seconds"] = _clock(table["round"], stamps)
    if is_private(experiment.algorithm):
        table["epsilon"] = epsilon_by_round(
            experiment.algorithm,
            sampling=result.info.plan.cohort / experiment.data.train.num_clients,
            rounds=rounds,
            history=result.history,
        )
    return table


def _clock(rounds: np.ndarray, stamps: list[tuple[int, float]]) -> np.ndarray:
    """Seconds since the start at the end of every round; nan for rounds done before the run was resumed."""
    if not stamps:
        return np.full(len(rounds), np.nan)
    at, seconds = np.array(stamps).T
    return np.interp(rounds, at, seconds, left=np.nan)


def _engine(result: Result) -> dict[str, Any]:
    """How the run was computed, for its summary."""
    info = result.info
    return {
        "plan": info.plan.kind,
        "devices": info.plan.devices,
        "hosts": jax.process_count(),
        "chunk": info.plan.chunk,
        "streamed": info.streamed,
        "local_steps": info.steps,
        "masked_share": info.masked_share,
        "imbalance": info.imbalance,
    }


def _write(
    out: Path,
    experiment: Experiment,
    clients: dict[str, Any] | None,
    table: dict[str, np.ndarray],
    summary: RunSummary,
) -> None:
    """Write the files that a run folder gets at the end of the run."""
    config = experiment.config
    runfolder.write_metrics(out, table)
    if clients is not None:
        runfolder.write_clients(out, clients, experiment.data.test)
    what = f"{config.algorithm.name} on {config.data.name}"
    title = f"{what}: {config.model.name}, cohort {config.cohort}, seed {config.seed}"
    save(draw_run(table, title), out / runfolder.CURVES)
    runfolder.write_summary(out, summary)
    live.forget(out)
