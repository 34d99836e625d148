"""Comparisons of methods under equal conditions.

All methods have the same data and the same model. For each seed they have the same initial parameters and the same
cohorts in every round. Each is tuned over its own grid, by the same criterion, on a validation split and on tuning
seeds. Then each runs with the same seeds on all training data and is tested. The protocol says what is equal:

    rounds                  the same rounds with the same number of clients
    client-communication    the same bytes from the clients to the server in every round
    total-communication     the same bytes both ways in every round

The last two are those of Karimireddy et al. (2021, Sections 5.1 and 5.3, Table 4): the cheapest method has the cohort
of the configuration, and a method that sends more per client has fewer clients. Bytes are those of the messages.

    compare.toml          the whole comparison; `fedbraid compare compare.toml` repeats it
    trials.parquet        every trial of every tuning, with the column ``method``
    METHOD/seed-N/        a run folder for every method and seed
    summary.json          what `fedbraid compare --json` prints
    baselines.json        the rows "local only" and "pooled data" (see `fedbraid.experiment.baselines`)
    compare.png           the curves, and the spread over clients
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid import files
from fedbraid.costs import Cost, cost
from fedbraid.data.federated import FederatedData
from fedbraid.experiment import runfolder
from fedbraid.experiment.assembly import Experiment, assemble, load_named
from fedbraid.experiment.baselines import BASELINES, run_baseline
from fedbraid.experiment.comparison import (
    COMPARE,
    Comparison,
    cohorts_of,
    folder_name,
    own_models,
    write_comparison,
)
from fedbraid.experiment.config import Config, ConfigError
from fedbraid.experiment.drift import trace_drift
from fedbraid.experiment.feasibility import check_experiment_timing
from fedbraid.experiment.figures import draw_curves, save, series
from fedbraid.experiment.judging import notice_unused
from fedbraid.experiment.lab import Lab, hold_out_validation
from fedbraid.experiment.points import measured, points_program, with_values
from fedbraid.experiment.summary import summarize_run
from fedbraid.experiment.sweep import check_folder
from fedbraid.experiment.trials import Criterion, Trials, pick_metric
from fedbraid.experiment.tuning import News, tune
from fedbraid.metric import Metric, declared_by, global_column, is_personal_column, personal_column
from fedbraid.notices import notice
from fedbraid.sealed import Damaged, read_sealed, seal_json
from fedbraid.simulation.history import SIMULATED
from fedbraid.simulation.points import Points, PointsResult
from fedbraid.version import __version__

__all__ = ["Final", "measure_method", "run_comparison"]

TRIALS, SUMMARY, PICTURE, DRIFT = "trials.parquet", "summary.json", "compare.png", "drift.json"
BASELINE_ROWS = "baselines.json"
PREFIX = "test_"
UNTUNED: dict[str, Any] = {"best": {}, "at_edge": [], "criterion": None, "diverged": 0, "trials": 0, "tuned_on": None}


class _Setup(NamedTuple):
    """The common part of all methods and the parts of each method, checked before anything runs."""

    data: FederatedData
    criterion: Criterion
    costs: list[Cost]
    configs: list[Config]  # before tuning, with the cohort that the protocol gives
    labs: list[Lab | None]  # None: nothing to tune


def run_comparison(
    comparison: Comparison,
    out: Path,
    *,
    resume: bool = False,
    on_news: Callable[[str, News], Any] | None = None,
) -> dict[str, Any]:
    """Tune, run and test every method, write the folder and return its summary.

    The folder must be new, or with ``resume`` that of a comparison that was stopped. ``on_news(label, news)`` is called
    with the progress. While it runs, no other process can write to the folder.
    """
    with contextlib.ExitStack() as stack:
        if resume:
            stack.enter_context(runfolder.held(out))
            runfolder.drop_partial(out)
        else:
            check_folder(out)
        setup = _set_up(comparison)
        notice_unused(comparison.base, "comparisons")
        if not resume:
            stack.enter_context(runfolder.held(out))
            check_folder(out)  # another process may have started since
            write_comparison(out / COMPARE, comparison)
        return _compare_in(comparison, setup, out, on_news)


def _compare_in(comparison: Comparison, setup: _Setup, out: Path, on_news: Callable | None) -> dict[str, Any]:
    """Run what is missing in a folder that this process holds, and write the results."""
    trials = Trials(out / TRIALS, {"version": __version__, "kind": "compare"})
    table, tuned_on = [], None
    for i, method in enumerate(comparison.methods):
        tell = None if on_news is None else (lambda news, label=method.label: on_news(label, news))
        lab = setup.labs[i]
        tuned = UNTUNED if lab is None else tune(lab, trials, label={"method": method.label}, on_news=tell)
        tuned_on = tuned["tuned_on"] or tuned_on
        table.append(_method_row(comparison, setup, i, tuned, out / folder_name(method.label), tell))
    base, settings, criterion = comparison.base, comparison.settings, setup.criterion
    baselines = _baselines(comparison, setup, out, on_news)
    summary = {
        "kind": "compare",
        "version": __version__,
        "data": base.data.name,
        "model": base.model.name,
        "rounds": base.rounds,
        "protocol": settings.protocol,
        "seeds": list(range(base.seed, base.seed + settings.seeds)),
        "criterion": str(criterion._replace(target=None)),
        "metric": criterion.metric.name,
        "better": criterion.metric.better,
        "target": settings.target,
        "tuned_on": tuned_on,
        "methods": table,
        "baselines": baselines,
        "out": str(out),
    }
    files.write_text(out / SUMMARY, seal_json(summary))
    _draw(out, summary, criterion.metric)
    return summary


def _baselines(comparison: Comparison, setup: _Setup, out: Path, on_news: Callable | None) -> list[dict[str, Any]]:
    """The rows of the baselines; those that are in the folder are not run again."""
    metric = setup.criterion.metric
    try:
        rows = read_sealed(out / BASELINE_ROWS)["rows"] if (out / BASELINE_ROWS).is_file() else []
    except Damaged as error:
        notice(f"{error}. The baselines run again")
        rows = []
    for kind in comparison.settings.baselines:
        if any(row["kind"] == kind for row in rows):
            continue

        def tell(done: float, doing: str, label: str = BASELINES[kind]) -> None:
            if on_news is not None:
                on_news(label, News(done, 0, 0, None, None, doing))

        row = run_baseline(kind, comparison, setup.data, setup.criterion, tell)
        if row is None:
            continue
        scores, columns = row.pop("scores", []), row.pop("columns", [])
        sound = bool(scores) and bool(np.isfinite(scores).all())
        row["scores"] = [float(score) if np.isfinite(score) else None for score in scores]
        row["score"] = _mean(scores) if sound else None
        row["deviation"] = float(np.std(scores, ddof=1)) if sound and len(scores) > 1 else None
        row["clients"] = _over_clients(columns, metric) if sound else None
        rows.append(row)
        files.write_text(out / BASELINE_ROWS, seal_json({"rows": rows}))
    return rows


def _set_up(comparison: Comparison) -> _Setup:
    base, settings = comparison.base, comparison.settings
    data = load_named(comparison.config(0))
    cohort = data.train.num_clients if base.cohort == "all" else base.cohort
    built = [assemble(comparison.config(i), data) for i in range(len(comparison.methods))]
    for experiment in built:
        check_experiment_timing(experiment)
    if data.test is None:
        raise ConfigError(f"the data {base.data.name!r} has no test split to compare on; set data.test_fraction")
    criteria = [_criterion(comparison, one, data) for one in built]  # all, so that each method is checked
    costs = [cost(one.algorithm, one.params, data.train) for one in built]
    cohorts = cohorts_of(settings.protocol, cohort, costs)
    configs = [comparison.config(i, cohorts[i]) for i in range(len(built))]
    held = hold_out_validation(data, comparison.tuning.validation, comparison.tuning.seed)
    labs = [_lab(comparison, i, config, data, held) for i, config in enumerate(configs)]
    return _Setup(data, criteria[0], costs, configs, labs)


def _criterion(comparison: Comparison, experiment: Experiment, data: FederatedData) -> Criterion:
    """The criterion for the methods, on the test set."""
    settings = comparison.settings
    evaluated, logged = measured(experiment, data, PREFIX)
    declared = experiment.metrics.declared
    evaluated = [name for name in evaluated if not is_personal_column(name)]  # own models have rows of their own
    wanted = None if settings.metric is None else global_column(settings.metric)
    metric = pick_metric(wanted, evaluated, logged, prefix=PREFIX, declared=declared, better=settings.better)
    return Criterion(metric, settings.last, settings.target)


def _lab(
    comparison: Comparison, i: int, config: Config, data: FederatedData, held: tuple[FederatedData, str]
) -> Lab | None:
    tuning = comparison.tuning_of(i)
    if tuning is not None and tuning.metric is not None:  # a method is tuned for the model that its clients use
        evaluated, _ = measured(assemble(config, held[0]), held[0], "validation_")
        own = any(map(is_personal_column, evaluated))
        plain = global_column(tuning.metric)
        logged = "/" in plain
        tuning = tuning.model_copy(update={"metric": personal_column(plain) if own and not logged else plain})
    try:
        return None if tuning is None else Lab(config, tuning, data, held)
    except ValueError as error:
        raise ConfigError(f"method {comparison.methods[i].label!r}: {error}") from None


def measure_method(comparison: Comparison, i: int = 0) -> tuple[dict[str, Any], list[Final], Config | None]:
    """Tune, run and test method ``i`` without a folder: nothing is written.

    Returns the method's row of the summary, its runs, and its tuned configuration. If every point diverged, there are
    no runs and no configuration.
    """
    setup = _set_up(comparison)
    lab, seeds = setup.labs[i], range(comparison.base.seed, comparison.base.seed + comparison.settings.seeds)
    tuned = UNTUNED if lab is None else tune(lab, Trials(None))
    row = _tuned_row(comparison, setup, i, tuned)
    if tuned["best"] is None:
        return row, [], None
    config = with_values(setup.configs[i], tuned["best"])
    program = points_program(config, setup.data, (), points=1, seeds=seeds, test=setup.data.test)
    finals = []
    for seed in seeds:
        outcome = program.run([{}], seed=seed, rounds=config.rounds)
        clients = {name: column[0] for name, column in outcome.clients.items()}
        finals.append(Final(seed, _table_of(outcome), clients, bool(outcome.diverged[0])))
    return row | _statistics(finals, setup.criterion), finals, config


def _tuned_row(comparison: Comparison, setup: _Setup, i: int, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """What the row of method ``i`` says before its runs."""
    method, lab, costs, config = comparison.methods[i], setup.labs[i], setup.costs[i], setup.configs[i]
    return {
        "label": method.label,
        "algorithm": method.name,
        "cohort": setup.data.train.num_clients if config.cohort == "all" else config.cohort,
        "bytes_per_client": {"down": costs.down, "up": costs.up, "models": costs.multiple},
        "tuned_over": [] if lab is None else list(lab.space),
        "tuned_by": tuned["criterion"],
        "best": tuned["best"],
        "at_edge": tuned["at_edge"],
        "trials": tuned["trials"],
        "trials_diverged": tuned["diverged"],
    }


def _method_row(
    comparison: Comparison, setup: _Setup, i: int, tuned: Mapping[str, Any], folder: Path, tell: Callable | None
) -> dict[str, Any]:
    """Run and test method ``i`` with its tuned values; returns its row of the summary."""
    row = _tuned_row(comparison, setup, i, tuned) | {"folder": folder.name}
    if tuned["best"] is None:
        return row
    best = with_values(setup.configs[i], tuned["best"])
    finals, criterion = _finals(best, setup.data, comparison, folder, tell), setup.criterion
    row |= _statistics(finals, criterion)
    own = Metric(personal_column(criterion.metric.name), criterion.metric.better)
    if all(own.name in final.table for final in finals):
        row["personal"] = _statistics(finals, criterion._replace(metric=own))
    if comparison.settings.drift and read_drift(folder) is None:
        traced = trace_drift(best, setup.data, comparison.settings.drift)
        files.write_text(folder / DRIFT, seal_json(traced))
    return row


def read_drift(folder: Path) -> dict[str, Any] | None:
    """The drift of a method; None if it was not traced, or if the file is damaged."""
    try:
        return read_sealed(folder / DRIFT)
    except FileNotFoundError:
        return None
    except Damaged as error:
        notice(f"{error}. It is not used")
        return None


def _draw(out: Path, summary: Mapping[str, Any], metric: Metric) -> None:
    lines = []
    for row in summary["methods"]:
        tables = [runfolder.read_metrics(place) for place in sorted((out / row["folder"]).glob("seed-*"))]
        for label, name in ((row["label"], metric.name), (own_models(row["label"]), personal_column(metric.name))):
            if tables and all(name in table for table in tables):
                lines.append({"label": label, **series(tables, name, "rounds")})
    if lines:
        title = f"{metric.name}: {summary['model']} on {summary['data']}, equal {summary['protocol']}"
        save(draw_curves(lines, metric, "rounds", title), out / PICTURE)


class Final(NamedTuple):
    """One method at one seed, read back from its run folder."""

    seed: int
    table: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    diverged: bool


def _finals(
    config: Config, data: FederatedData, comparison: Comparison, folder: Path, tell: Callable | None
) -> list[Final]:
    """Run a tuned method with every seed on all training data; runs that are already in the folder are only read."""
    seeds = range(config.seed, config.seed + comparison.settings.seeds)
    program: Points | None = None
    finals = []
    for seed in seeds:
        place = folder / f"seed-{seed}"
        if runfolder.finished(place, config.rounds) is None:
            if program is None:
                program = points_program(config, data, (), points=1, seeds=seeds, test=data.test)
            if tell is not None:
                tell(News((seed - seeds[0]) / len(seeds), 0, 0, None, None, f"testing, seed {seed}"))
            outcome = program.run([{}], seed=seed, rounds=config.rounds)
            declared = declared_by(program.base.metrics)
            _write_run(place, with_values(config, {"seed": seed}), outcome, declared, data)
        summary = runfolder.read_summary(place)
        table, clients = runfolder.read_metrics(place), runfolder.read_clients(place)
        finals.append(Final(seed, table, clients, summary.diverged))
    return finals


def _write_run(
    place: Path, config: Config, outcome: PointsResult, declared: Sequence[Metric], data: FederatedData
) -> None:
    """Write the run folder of an outcome with one point."""
    place.mkdir(parents=True, exist_ok=True)
    runfolder.write_config(place, config)
    table, evaluations = _table_of(outcome), _evaluations_of(outcome)
    runfolder.write_metrics(place, table)
    runfolder.write_clients(place, {name: column[0] for name, column in outcome.clients.items()}, data.test)
    summary = summarize_run(
        config,
        table,
        evaluations,
        seconds=float(outcome.seconds[-1]),
        declared=declared,
        clients=data.train.num_clients,
        partition=data.info.get("partition"),
        diverged=bool(outcome.diverged[0]),
        out=str(place),
    )
    runfolder.write_summary(place, summary)


def _evaluations_of(outcome: PointsResult) -> dict[str, np.ndarray]:
    return {n: c if n == "round" else c[0] for n, c in outcome.evaluations.items()}


def _table_of(outcome: PointsResult) -> dict[str, np.ndarray]:
    """The columns of an outcome with one point, one row per round."""
    history = {name: column[0] for name, column in outcome.history.items()}
    table = runfolder.columns(history, _evaluations_of(outcome), outcome.rounds)
    table["seconds"] = np.interp(table["round"], [0, *outcome.evaluations["round"]], [0.0, *outcome.seconds])
    return table


def _statistics(finals: Sequence[Final], criterion: Criterion) -> dict[str, Any]:
    """The statistics of a method's runs, for its row."""
    scores, rounds_to, bytes_to, times_to = [], [], [], []
    clocks = [final.table.get(SIMULATED) for final in finals]
    for final, clock in zip(finals, clocks, strict=True):
        seen = np.isfinite(final.table[criterion.metric.name])
        at, values = final.table["round"][seen], final.table[criterion.metric.name][seen]
        scores.append(criterion.score_of(at, values, int(final.table["round"][-1])))
        reached = criterion.first_round(at, values)
        rounds_to.append(reached)
        sent = final.table["bytes_down"] + final.table["bytes_up"]
        bytes_to.append(None if reached is None else float(sent[reached - 1]))
        times_to.append(None if reached is None or clock is None else float(clock[reached - 1]))
    times = [clock[-1] for clock in clocks if clock is not None]
    sound = not any(final.diverged for final in finals)
    return {
        "diverged": sum(final.diverged for final in finals),
        "score": _mean(scores) if sound else None,
        "deviation": float(np.std(scores, ddof=1)) if sound and len(scores) > 1 else None,
        "scores": scores,
        "rounds_to_target": None if None in rounds_to else _mean(rounds_to),
        "bytes_to_target": None if None in bytes_to else _mean(bytes_to),
        "simulated_seconds_to_target": None if None in times_to else _mean(times_to),
        "simulated_seconds": _mean(times) if times else None,
        "reached": sum(r is not None for r in rounds_to),
        "clients": _over_clients([final.clients.get(criterion.metric.name) for final in finals], criterion.metric),
        "seconds": _mean([final.table["seconds"][-1] for final in finals]),
        "bytes": _mean([final.table["bytes_down"][-1] + final.table["bytes_up"][-1] for final in finals]),
    }


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))


def _over_clients(columns: Sequence[np.ndarray | None], metric: Metric) -> dict[str, float] | None:
    """Quantiles over clients, from worst to best; means over the seeds. columns: each client's value, by seed."""
    if any(column is None for column in columns):
        return None
    sign, found = metric.sign, {}
    for name, q in (("worst", 0), ("worst_tenth", 10), ("median", 50), ("best_tenth", 90)):
        found[name] = _mean([sign * np.nanpercentile(sign * np.asarray(column, float), q) for column in columns])
    found["deviation"] = _mean([np.nanstd(np.asarray(column, float)) for column in columns])
    return found
