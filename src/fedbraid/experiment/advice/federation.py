"""Advice for a federation that cannot be simulated: a plan of real runs, and a decision from finished runs.

A real federation cannot try fifty settings. `write_plan` writes a few configurations with few rounds each, which
``fedbraid deploy`` can run, and states their bytes before anything starts. `decide` reads the run folders, ranks the
runs as a race does (see `ranking`), writes the advised configuration, and says which neighbours of the best run are
still untried. Runs are judged by the evaluations that they have, on the test examples of the server or of the clients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid import files
from fedbraid.costs import cost
from fedbraid.experiment.advice.advising import ADVISED, SUMMARY, AdviceSettings
from fedbraid.experiment.advice.candidates import (
    CLIENT_RATES,
    Method,
    Setting,
    base_of,
    configured,
    methods_of,
    neighbour,
    rate_names,
    with_setting,
)
from fedbraid.experiment.advice.race import beyond
from fedbraid.experiment.advice.ranking import Curves, rank
from fedbraid.experiment.assembly import assemble, load_named
from fedbraid.experiment.config import Config, ConfigError, dump
from fedbraid.experiment.differences import config_difference
from fedbraid.experiment.runfolder import CONFIG, read_config, read_metrics, read_summary
from fedbraid.experiment.sweep import check_folder
from fedbraid.metric import Metric
from fedbraid.sealed import seal_json
from fedbraid.units import format_bytes
from fedbraid.version import __version__

__all__ = ["decide", "plan_lines", "write_plan"]

PLAN = "plan.json"
OFFSETS: Mapping[str, Sequence[int]] = {"fedavg": (-1, 0, 1, 2)}  # client rates of a plan; one rate for other methods
LEAST = 5  # rounds of a planned run
PART = 10  # without a limit of bytes, a planned run has this part of the configured rounds
UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def bytes_of(text: str) -> float:
    """A number of bytes as a user writes it.

    >>> bytes_of("2GB"), bytes_of("1500")
    (2000000000.0, 1500.0)
    """
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or float(found[1]) <= 0:
        raise ValueError(f"--bytes must be a number with B, kB, MB, GB or TB, such as 2GB; got {text!r}")
    return float(found[1]) * unit


def write_plan(config: Config, settings: AdviceSettings, folder: Path, *, most: str | None = None) -> dict[str, Any]:
    """Write the configurations of a pilot on a real federation, and return what they send. Nothing runs.

    most: bytes that all runs together may send; the rounds of each run follow from it.
    """
    check_folder(folder)
    methods = methods_of(config, settings.methods)
    chosen = [one for method in methods for one in _starts(config, method)]
    data = load_named(config)
    cohort = data.train.num_clients if config.cohort == "all" else int(config.cohort)
    each = []
    for one in chosen:
        experiment = assemble(with_setting(config, methods, one), data)
        traffic = cost(experiment.algorithm, experiment.params, data)
        each.append(cohort * (traffic.down + traffic.up))
    rounds = max(LEAST, config.rounds // PART)
    if most is not None:
        rounds = min(config.rounds, int(bytes_of(most) // sum(each)))
        if rounds < LEAST:
            raise ConfigError(
                f"--bytes {most}: one round of each of the {len(chosen)} runs sends {format_bytes(sum(each))}, and a "
                f"run needs at least {LEAST} rounds: allow {format_bytes(LEAST * sum(each))}, or name fewer --methods"
            )
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for i, (one, sent) in enumerate(zip(chosen, each, strict=True), 1):
        made = with_setting(config, methods, one)
        short = made.model_copy(
            update={"rounds": rounds, "evaluation": made.evaluation.model_copy(update={"every": 1})}
        )
        name = f"{i:02}-{one.method}.toml"
        files.write_text(folder / name, dump(short))
        runs.append({"file": name, "setting": str(one), "bytes": rounds * sent})
    plan = {
        "kind": "advise plan",
        "version": __version__,
        "rounds": rounds,
        "configured_rounds": config.rounds,
        "bytes": rounds * sum(each),
        "runs": runs,
        "out": str(folder),
    }
    files.write_text(folder / PLAN, seal_json(plan))
    return plan


def _starts(config: Config, method: Method) -> list[Setting]:
    """The settings of a method that a plan runs: around the configured client rate, with the middle server rate."""
    own = dict(configured(config).rates)
    centre = next((own[name] for name in CLIENT_RATES if name in own), 0.1)
    names = rate_names(base_of(config, method))
    if not names:
        return [Setting(method.name, 1, ())]
    server = method.server[len(method.server) // 2]
    return [
        Setting(
            method.name,
            1,
            tuple((name, neighbour(centre, offset) if name in CLIENT_RATES else server) for name in names),
        )
        for offset in OFFSETS.get(method.name, (0,))
    ]


def plan_lines(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A plan in words."""
    first = plan["runs"][0]["file"]
    lines = [
        (
            "plan",
            f"{len(plan['runs'])} runs of {plan['rounds']} rounds; together they send {format_bytes(plan['bytes'])}",
        )
    ]
    lines += [("run", f"{one['file']}: {one['setting']}, {format_bytes(one['bytes'])}") for one in plan["runs"]]
    return [
        *lines,
        ("for each", f"fedbraid deploy init APP {plan['out']}/{first}, then fedbraid deploy run APP --out RUNS/01"),
        ("then", "fedbraid advise --from-runs RUNS"),
    ]


class _Done(NamedTuple):
    """A finished run."""

    folder: Path
    config: Config
    rounds: np.ndarray
    values: np.ndarray
    diverged: bool
    sent: int
    seconds: float


def decide(
    runs: Sequence[Path],
    out: Path,
    *,
    rounds: int | None = None,
    metric: str | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    """Rank finished runs, write ``advised.toml`` and a summary into ``out``, and return the summary.

    runs: run folders, or folders of run folders; simulated or deployed. They may differ in the algorithm, the seed and
    the rounds. rounds: of the advised configuration; default those of the longest run.
    """
    check_folder(out)
    done, judged = _finished(runs, metric)
    _check_comparable(done)
    shared = min(int(one.rounds[-1]) for one in done if not one.diverged or len(one.rounds))
    groups: dict[str, list[_Done]] = {}
    for one in done:
        groups.setdefault(_label(one.config), []).append(one)
    sound = {label: own for label, own in groups.items() if not any(one.diverged for one in own)}
    summary = _summary(done, groups, judged, shared)
    if not sound:
        return summary | {"problem": f"no advice: all {len(done)} runs diverged; run the plan again with lower rates"}
    curves = {label: _curves(own, judged, shared) for label, own in sound.items()}
    start = min(float(curve.values[:, 0].min()) for curve in curves.values())
    ranking = rank(curves, start, target=None if target is None else judged.sign * target)
    best = groups[str(ranking.order[0])][0].config
    advised = best.model_copy(update={"rounds": rounds or max(one.config.rounds for one in done)})
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / ADVISED, dump(advised))
    summary |= {
        "advised": _values(best),
        "advised_toml": str(out / ADVISED),
        "runners_up": [_values(groups[str(one)][0].config) for one in ranking.close_to_best()],
        "regret": {str(one): ranking.regret[one] for one in ranking.order},
        "sure": not ranking.close_to_best() and min(len(own) for own in sound.values()) > 1,
        "doubts": _doubts(ranking.close_to_best(), sound, shared, best, done),
        "out": str(out),
    }
    files.write_text(out / SUMMARY, seal_json(summary))
    return summary


def _finished(runs: Sequence[Path], metric: str | None) -> tuple[list[_Done], Metric]:
    places: list[Path] = []
    for place in runs:
        inside = [path.parent for path in sorted(place.glob(f"*/{CONFIG}"))] if place.is_dir() else []
        places += [place] if (place / CONFIG).is_file() or not inside else inside
    done, judged = [], None
    for place in places:
        summary, table = read_summary(place), read_metrics(place)
        name = f"test_{(metric or 'loss').removeprefix('test_')}"
        if name not in table:
            raise ConfigError(f"{place} has no {name}: it was not evaluated; choose another --metric")
        judged = judged or summary.metric(name)
        seen = np.isfinite(table[name])
        diverged = summary.diverged or not seen.any()
        sent = int(sum(summary.bytes.values()))
        done.append(
            _Done(place, read_config(place), table["round"][seen], table[name][seen], diverged, sent, summary.seconds)
        )
    if judged is None or len(done) < 2:
        raise ConfigError(f"--from-runs needs at least two finished runs, got {len(done)}")
    return done, judged


def _label(config: Config) -> str:
    return str(configured(config)) + f" {sorted(config.algorithm.options.items())}"


def _check_comparable(done: Sequence[_Done]) -> None:
    """Runs that differ in data, model or cohort cannot be ranked."""
    apart = config_difference({str(one.folder): one.config for one in done})
    free = ("algorithm", "rounds", "evaluation", "engine", "checkpoint", "stop", "track", "modules")
    other = [key for key, _ in apart if key.split(".")[0] not in free]
    if other:
        raise ConfigError(
            f"the runs differ in {', '.join(other)}: only runs with the same data and model can be ranked"
        )


def _curves(own: Sequence[_Done], metric: Metric, shared: int) -> Curves:
    """The curves of the runs that differ in the seed only, cut at the round that all runs have."""
    rounds = own[0].rounds[own[0].rounds <= shared]
    values = [np.interp(rounds, one.rounds, one.values) for one in own]
    return Curves(rounds, metric.sign * np.array(values))


def _values(config: Config) -> dict[str, Any]:
    setting = configured(config)
    return {"method": setting.method, "local_work": 1, **dict(setting.rates)}


def _summary(done: Sequence[_Done], groups: Mapping[str, Any], metric: Metric, shared: int) -> dict[str, Any]:
    rounds = sum(int(one.rounds[-1]) if len(one.rounds) else 0 for one in done)
    return {
        "kind": "advise",
        "version": __version__,
        "metric": metric.name,
        "better": metric.better,
        "judged_on": f"the evaluations of {len(done)} finished runs up to round {shared}",
        "problem": "",
        "settings": len(groups),
        "methods": sorted({one.config.algorithm.name for one in done}),
        "rounds": shared,
        "pilot": {
            "trials": len(done),
            "rounds": rounds,
            "configured_runs": rounds / max(one.config.rounds for one in done),
            "bytes": sum(one.sent for one in done),
            "seconds": sum(one.seconds for one in done),
        },
        "advised": None,
        "levels": [],
        "runners_up": [],
        "doubts": [],
        "sure": False,
    }


def _doubts(
    close: Sequence[Any], sound: Mapping[str, Sequence[_Done]], shared: int, best: Config, done: Sequence[_Done]
) -> list[str]:
    said = []
    if close:
        said.append(f"Not certain: these may be as good: {'; '.join(str(one) for one in close)}.")
    if min(len(own) for own in sound.values()) < 2:
        said.append("Some settings ran with one seed, so the noise of the seeds is not known.")
    said.append(f"The runs have {shared} rounds in common; what happens later is not known.")
    tried = [configured(one.config) for one in done]
    untried = [one for one in beyond(configured(best), tried) if one not in tried]
    if untried:
        said.append(f"Untried neighbours of the best run: {'; '.join(map(str, untried))}.")
    return said
