"""The best evaluation of a run, and whether the run ends early: its ``[stop]`` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.experiment.assembly import Experiment
from fedbraid.experiment.config import Config, ConfigError, Stop
from fedbraid.experiment.params import BEST, write_params
from fedbraid.experiment.trials import pick_metric
from fedbraid.metric import CLIENT_SUFFIXES, Metric, personal_column
from fedbraid.notices import notice
from fedbraid.simulation import hosts
from fedbraid.simulation.evaluate import metrics_of
from fedbraid.simulation.personal import has_own_models

__all__ = ["best_evaluation", "judge_of", "metric_of", "notice_unused", "why_stopped"]


def notice_unused(config: Config, what: str) -> None:
    """Say that [stop] and [track] have no effect in ``what``, such as "sweeps", if the configuration has them."""
    for section, given in (("stop", config.stop != Stop()), ("track", bool(config.track.to))):
        if given:
            notice(f"[{section}] of the configuration is for simulated runs: {what} ignore it")


def metric_of(experiment: Experiment) -> Metric | None:
    """The metric by which a run is judged: by default of the model that clients use; None if nothing is evaluated."""
    stop = experiment.config.stop
    if experiment.data.test is None:
        for key in ("target", "patience", "metric"):
            if getattr(stop, key) is not None:
                raise ConfigError(f"stop.{key}: the data has no test split, so nothing is evaluated; leave [stop] out")
        return None
    found = metrics_of(experiment.metrics, experiment.shapes, experiment.data.test)
    evaluated = [f"test_{metric.name}" for metric in found]
    if has_own_models(experiment.algorithm, experiment.data, experiment.data.test):
        evaluated += map(personal_column, evaluated[:])
    evaluated += [name + suffix for name in evaluated for suffix in CLIENT_SUFFIXES]
    try:
        return pick_metric(stop.metric, evaluated, (), prefix="test_", declared=experiment.metrics.declared)
    except ConfigError as error:
        raise ConfigError(f"stop.metric: {error}") from None


def best_evaluation(metric: Metric, evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """``metric``, ``round`` and ``value`` of the first best evaluation; empty without a finite value.

    >>> best_evaluation(Metric("test_loss", "lower"), {"round": [2, 4, 6], "test_loss": [3.0, 1.0, float("nan")]})
    {'metric': 'test_loss', 'round': 4, 'value': 1.0}
    """
    values = metric.sign * np.asarray(evaluations.get(metric.name, ()), float)
    if not np.isfinite(values).any():
        return {}
    at = int(np.nanargmax(np.where(np.isfinite(values), values, np.nan)))
    return {
        "metric": metric.name,
        "round": int(np.asarray(evaluations["round"])[at]),
        "value": float(metric.sign * values[at]),
    }


def why_stopped(stop: Stop, metric: Metric, evaluations: Mapping[str, Any]) -> str:
    """Why a run ends after one of its evaluations, as a sentence; empty if it does not.

    It depends on the evaluations only, so a run that was resumed ends in the same round.

    >>> seen = {"round": [1, 2, 3, 4], "test_accuracy": [0.5, 0.9, 0.85, 0.8]}
    >>> accuracy = Metric("test_accuracy", "higher")
    >>> why_stopped(Stop(target=0.85, keep=2), accuracy, seen)
    'the target was reached: test_accuracy was 0.9 after round 2 and 0.875 on average to round 3 (target 0.85)'
    >>> why_stopped(Stop(patience=2), accuracy, seen)
    'no improvement: the best test_accuracy, 0.9 after round 2, was 2 evaluations old after round 4'
    """
    if not evaluations:
        return ""
    rounds, values = np.asarray(evaluations["round"]), np.asarray(evaluations[metric.name], float)
    best = -1
    for i, value in enumerate(values):
        if np.isfinite(value) and (best < 0 or metric.is_better(value, than=values[best])):
            best = i
        window = values[max(i - stop.keep + 1, 0) : i + 1]
        if stop.target is not None and len(window) == stop.keep:
            mean = float(np.mean(window))
            if metric.reached(window[0], stop.target) and metric.reached(mean, stop.target):
                first = rounds[i - stop.keep + 1]
                kept = f" and {mean:.4g} on average to round {rounds[i]}" if stop.keep > 1 else ""
                return (
                    f"the target was reached: {metric.name} was {window[0]:.4g} after round {first}{kept} "
                    f"(target {stop.target:g})"
                )
        if stop.patience is not None and i - max(best, 0) >= stop.patience:
            if best < 0:
                return f"no improvement: {metric.name} was not finite in {i + 1} evaluations, to round {rounds[i]}"
            return (
                f"no improvement: the best {metric.name}, {values[best]:.4g} after round {rounds[best]}, was "
                f"{stop.patience} evaluations old after round {rounds[i]}"
            )
    return ""


def judge_of(
    experiment: Experiment, metric: Metric, folder: Path
) -> Callable[[int, Mapping[str, Any], Callable], bool]:
    """The judge of a run (see `fedbraid.simulation.Checkpoints`): keeps the best parameters, says when to end."""
    config = experiment.config

    def judge(done: int, evaluations: Mapping[str, Any], params: Callable[[], Any]) -> bool:
        best = best_evaluation(metric, evaluations)
        if config.checkpoint.best and best.get("round") == done and hosts.is_first():
            about = {"metric": best["metric"], "value": best["value"]}
            write_params(folder / BEST, params(), round=done, description=experiment.description, **about)
        return bool(why_stopped(config.stop, metric, evaluations))

    return judge
