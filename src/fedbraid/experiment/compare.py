"""Comparisons that are fair by construction.

All methods have the same data, the same model, at a seed the same initial parameters and the same cohorts in every
round; each is tuned over the grid declared for it, by one criterion, on a validation split and seeds of its own; then
each runs at the same seeds on all training data and is tested. What is held equal is the protocol:

    rounds                  the same rounds with the same number of clients
    client-communication    the same bytes from the clients to the server in every round
    total-communication     the same bytes both ways in every round

The latter two are those of Karimireddy et al. (2021, Sections 5.1 and 5.3, Table 4): the cheapest method has the cohort
of the configuration, and a method that sends more per client asks fewer clients. Bytes are read off the messages.

    compare.toml          everything; `fedbraid compare compare.toml` repeats it
    trials.parquet        every trial of every tuning, with the column ``method``
    METHOD/seed-N/        a run folder for every method and seed
    summary.json          what `fedbraid compare --json` prints
    compare.png           the curves, and the spread over clients
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fedbraid
from fedbraid import address
from fedbraid.costs import Cost, cost
from fedbraid.data.federated import FederatedData
from fedbraid.experiment import runfolder
from fedbraid.experiment.assembly import assemble, load_named
from fedbraid.experiment.config import Config, ConfigError, dump, parse, read_tree, sentences
from fedbraid.experiment.points import points_program, with_values
from fedbraid.experiment.sweep import Lab, News, Tuning, hold_out_validation, parse_tuning, tune
from fedbraid.experiment.trials import Criterion, Trials, pick_metric
from fedbraid.simulation.points import Points, PointsResult

__all__ = ["Comparison", "Method", "Protocol", "cohorts_of", "load_comparison", "reopen_comparison", "run_comparison"]

COMPARE, TRIALS, SUMMARY, PICTURE, DRIFT = (
    "compare.toml",
    "trials.parquet",
    "summary.json",
    "compare.png",
    "drift.json",
)
Protocol = Literal["rounds", "client-communication", "total-communication"]
MOST_NUMBERS = 20_000_000  # that a trace of the shadow sequence may hold


class Method(BaseModel):
    """One entry of ``[[methods]]``: an algorithm with its options, and the grid it is tuned over."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    label: str = ""
    over: dict[str, Any] = {}
    transforms: list[dict[str, Any]] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Settings(BaseModel):
    """The ``[compare]`` section."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seeds: Annotated[int, Field(ge=1)] = 3
    protocol: Protocol = "rounds"
    metric: str | None = None
    last: Annotated[int, Field(ge=1)] = 100
    target: float | None = None
    drift: Annotated[int, Field(ge=0)] = 2  # rounds whose local steps are recorded; 0: none


class Comparison(NamedTuple):
    """What is compared, how, and how each is tuned."""

    base: Config
    methods: tuple[Method, ...]
    settings: Settings
    tuning: Tuning

    def config(self, i: int, cohort: int | None = None) -> Config:
        """The configuration of method ``i`` before it is tuned."""
        method = self.methods[i]
        common = {} if self.base.algorithm.name != COMMON else self.base.algorithm.options
        tree = self.base.model_dump()
        tree["algorithm"] = {"name": method.name, **common, **method.options}
        if method.transforms is not None:
            tree["transforms"] = method.transforms
        if cohort is not None:
            tree["cohort"] = cohort
        try:
            return parse(tree)
        except ConfigError as error:
            raise ConfigError(f"method {method.label!r}: {error}") from None

    def tuning_of(self, i: int) -> Tuning | None:
        """How method ``i`` is tuned; None if it declares no grid."""
        over = {key if "." in key else f"algorithm.{key}": values for key, values in self.methods[i].over.items()}
        if not over:
            return None
        judged = {"metric": self.settings.metric, "last": self.settings.last}
        return self.tuning.model_copy(update={"over": over, **judged})


COMMON = "common"  # the name that the [algorithm] section of a comparison has: options that all methods share


def load_comparison(path: Path | None = None, settings: Sequence[str] = ()) -> Comparison:
    """A comparison from a TOML file (default: the embedded one), changed by ``key.path=value`` settings.

    >>> [method.label for method in load_comparison().methods][:2]
    ['FedAvg', 'FedAvgM']
    """
    if path is None:
        tree = tomllib.loads(files("fedbraid.experiment").joinpath("files/compare.toml").read_text())
        tree = _merged(tree, read_tree(None, settings))
    else:
        tree = read_tree(path, settings)
    methods, section, sweep = tree.pop("methods", None), tree.pop("compare", {}), tree.pop("sweep", {})
    if not isinstance(methods, list) or not methods:
        raise ConfigError(
            'nothing to compare: add [[methods]] entries, each with name = "fedavg" or another algorithm, its options, '
            'and over = { client_lr = "logspace(-3, 0, 7)" }'
        )
    if tree.get("algorithm", {}).get("name", COMMON) != COMMON:
        raise ConfigError(
            "in a comparison [algorithm] holds the options that all methods share: move its name to a [[methods]] entry"
        )
    base = parse(tree | {"algorithm": {"name": COMMON, **tree.get("algorithm", {})}})
    try:
        chosen = Settings.model_validate(section)
    except ValidationError as error:
        raise ConfigError(sentences(error, Settings, "compare")) from None
    if "over" in sweep:
        raise ConfigError("in a comparison every method declares its own grid: move over from [sweep] to [[methods]]")
    tuning = parse_tuning(sweep)
    clash = set(tuning.seed_list) & set(range(base.seed, base.seed + chosen.seeds))
    if clash:
        raise ConfigError(f"seeds {sorted(clash)} are both tuned and reported on; set another sweep.seed")
    comparison = Comparison(base, _methods(methods), chosen, tuning)
    for i, method in enumerate(comparison.methods):
        for key in method.over:
            if "." in key and key.split(".")[0] not in ("algorithm", "transforms"):
                raise ConfigError(f"method {method.label!r}: {key!r} is the same for all methods, so it is not tuned")
        comparison.config(i)
    return comparison


def _merged(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        here = tree.get(key)
        tree[key] = _merged(dict(here), value) if isinstance(here, dict) and isinstance(value, dict) else value
    return tree


def _methods(given: Sequence[Any]) -> tuple[Method, ...]:
    methods: list[Method] = []
    for i, one in enumerate(given):
        try:
            method = Method.model_validate(one)
        except ValidationError as error:
            raise ConfigError(sentences(error, Method, f"methods[{i}]")) from None
        label = method.label or method.name
        if _folder_name(label) in [_folder_name(m.label) for m in methods]:
            if method.label:
                raise ConfigError(f"methods[{i}].label = {label!r} is there already; labels must differ")
            label = f"{label} {1 + sum(m.name == method.name for m in methods)}"
        methods.append(method.model_copy(update={"label": label}))
    return tuple(methods)


def cohorts_of(protocol: Protocol, cohort: int, costs: Sequence[Cost]) -> list[int]:
    """Clients per round of each method: the cheapest one has ``cohort``, others so many that the bytes are not more.

    >>> from fedbraid.costs import ExchangeCost
    >>> fedavg, mime_adam = (Cost((ExchangeCost("train", down, up),), 4) for down, up in ((4, 4), (20, 8)))
    >>> cohorts_of("total-communication", 20, [fedavg, mime_adam])
    [20, 5]
    """
    if protocol == "rounds":
        return [cohort] * len(costs)
    bytes_of = [one.up if protocol == "client-communication" else one.down + one.up for one in costs]
    budget = cohort * min(bytes_of)
    for i, each in enumerate(bytes_of):
        if each > budget:
            raise ConfigError(
                f"protocol = {protocol!r}: method number {i + 1} sends {each / min(bytes_of):.3g} times as much per "
                f"client as the cheapest, so that cohort = {cohort} leaves it no client; take a larger cohort"
            )
    return [budget // each for each in bytes_of]


# --- running ---------------------------------------------------------------------------------------------------------


def run_comparison(
    comparison: Comparison,
    out: Path,
    *,
    resume: bool = False,
    on_news: Callable[[str, News], Any] | None = None,
) -> dict[str, Any]:
    """Tune, run and test every method, write the folder and return its summary.

    The folder must be new, or with ``resume`` that of a comparison that was stopped. ``on_news(label, news)`` is told
    how it goes.
    """
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: choose another --out, or continue it with --resume {out}")
    base, settings = comparison.base, comparison.settings
    data = load_named(comparison.config(0))
    cohort = data.train.num_clients if base.cohort == "all" else base.cohort
    built = [assemble(comparison.config(i), data) for i in range(len(comparison.methods))]
    if data.test is None:
        raise ConfigError(f"the data {base.data.name!r} has no test split to compare on; set data.test_fraction")
    costs = [cost(one.algorithm, one.params, data.train) for one in built]
    cohorts = cohorts_of(settings.protocol, cohort, costs)
    configs = [comparison.config(i, cohorts[i]) for i in range(len(built))]
    held = hold_out_validation(data, comparison.tuning.validation, comparison.tuning.seed)
    labs = [_lab(comparison, i, config, data, held) for i, config in enumerate(configs)]
    if not resume:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / COMPARE, comparison)
    about = {"version": fedbraid.__version__, "kind": "compare"}
    trials = Trials(out / TRIALS, about)
    table, criterion, tuned_on = [], None, None
    for i, method in enumerate(comparison.methods):
        config, lab = configs[i], labs[i]
        tell = None if on_news is None else (lambda news, label=method.label: on_news(label, news))
        tuned: dict[str, Any] = {"best": {}, "at_edge": [], "criterion": None, "diverged": 0, "trials": 0}
        if lab is not None:
            tuned = tune(lab, trials, label={"method": method.label}, on_news=tell)
            tuned_on = tuned["tuned_on"]
        row: dict[str, Any] = {
            "label": method.label,
            "algorithm": method.name,
            "cohort": cohorts[i],
            "bytes_per_client": {"down": costs[i].down, "up": costs[i].up, "models": costs[i].multiple},
            "tuned_over": [] if lab is None else list(lab.space),
            "tuned_by": tuned["criterion"],
            "best": tuned["best"],
            "at_edge": tuned["at_edge"],
            "trials": tuned["trials"],
            "trials_diverged": tuned["diverged"],
            "folder": _folder_name(method.label),
        }
        if tuned["best"] is not None:
            best = with_values(config, tuned["best"])
            finals = _finals(best, data, comparison, out / row["folder"], tell)
            criterion = criterion or _criterion(settings, finals)
            row |= _statistics(finals, criterion)
            _drift(best, data, settings.drift, out / row["folder"])
        table.append(row)
    summary = {
        "kind": "compare",
        "version": fedbraid.__version__,
        "data": base.data.name,
        "model": base.model.name,
        "rounds": base.rounds,
        "protocol": settings.protocol,
        "seeds": list(range(base.seed, base.seed + settings.seeds)),
        "criterion": str(criterion._replace(target=None)) if criterion else None,
        "metric": criterion.metric if criterion else None,
        "target": settings.target,
        "tuned_on": tuned_on,
        "methods": table,
        "out": str(out),
    }
    (out / SUMMARY).write_text(json.dumps(summary, indent=1))
    _draw(out, summary)
    return summary


def _lab(
    comparison: Comparison, i: int, config: Config, data: FederatedData, held: tuple[FederatedData, str]
) -> Lab | None:
    tuning = comparison.tuning_of(i)
    try:
        return None if tuning is None else Lab(config, tuning, data, held)
    except ValueError as error:
        raise ConfigError(f"method {comparison.methods[i].label!r}: {error}") from None


def _draw(out: Path, summary: Mapping[str, Any]) -> None:
    from fedbraid.experiment.figures import draw_curves, save, series

    if summary["metric"] is None:
        return
    lines = []
    for row in summary["methods"]:
        tables = [runfolder.read_metrics(place) for place in sorted((out / row["folder"]).glob("seed-*"))]
        if tables:
            lines.append({"label": row["label"], **series(tables, summary["metric"], "rounds")})
    title = f"{summary['metric']}: {summary['model']} on {summary['data']}, equal {summary['protocol']}"
    save(draw_curves(lines, summary["metric"], "rounds", title), out / PICTURE)


def _folder_name(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "method"


class Final(NamedTuple):
    """One method at one seed, read back from its run folder."""

    seed: int
    table: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    diverged: bool


def _finals(
    config: Config, data: FederatedData, comparison: Comparison, folder: Path, tell: Callable | None
) -> list[Final]:
    """Run a tuned method at every seed on all training data; seeds that are there already are only read."""
    seeds = range(config.seed, config.seed + comparison.settings.seeds)
    program: Points | None = None
    finals = []
    for seed in seeds:
        place = folder / f"seed-{seed}"
        if not (place / runfolder.SUMMARY).is_file():
            if program is None:
                program = points_program(config, data, (), points=1, seeds=seeds, test=data.test)
            if tell is not None:
                tell(News((seed - seeds[0]) / len(seeds), 0, 0, None, None, f"testing, seed {seed}"))
            outcome = program.run([{}], seed=seed, rounds=config.rounds)
            _write_run(place, with_values(config, {"seed": seed}), outcome)
        summary = runfolder.read_summary(place)
        table, clients = runfolder.read_metrics(place), runfolder.read_clients(place)
        finals.append(Final(seed, table, clients, summary["diverged"]))
    return finals


def _write_run(place: Path, config: Config, outcome: PointsResult) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / runfolder.CONFIG).write_text(dump(config))
    history = {name: column[0] for name, column in outcome.history.items()}
    at = outcome.evaluations["round"]
    evaluations = {n: c if n == "round" else c[0] for n, c in outcome.evaluations.items()}
    table = runfolder.columns(history, evaluations, outcome.rounds)
    table["seconds"] = np.interp(table["round"], [0, *at], [0.0, *outcome.seconds])
    runfolder.write_metrics(place, table)
    runfolder.write_clients(place, {name: column[0] for name, column in outcome.clients.items()})
    seconds = float(outcome.seconds[-1])
    runfolder.write_summary(
        place,
        {
            "algorithm": config.algorithm.name,
            "data": config.data.name,
            "model": config.model.name,
            "finished": True,
            "diverged": bool(outcome.diverged[0]),
            "rounds": outcome.rounds,
            "seconds": seconds,
            "rounds_per_second": outcome.rounds / seconds,
            "final": {n: float(c[-1]) for n, c in evaluations.items() if n != "round"},
            "bytes": {way: int(table[f"bytes_{way}"][-1]) for way in ("down", "up")},
            "out": str(place),
        },
    )


def _criterion(settings: Settings, finals: Sequence[Final]) -> Criterion:
    names = list(finals[0].table)
    evaluated = [name for name in names if name.startswith("test_")]
    metric = pick_metric(settings.metric, evaluated, [n for n in names if n.endswith("/loss")], "test_")
    return Criterion(metric, settings.last, settings.target)


def _statistics(finals: Sequence[Final], criterion: Criterion) -> dict[str, Any]:
    scores, rounds_to, bytes_to = [], [], []
    for final in finals:
        seen = np.isfinite(final.table[criterion.metric])
        at, values = final.table["round"][seen], final.table[criterion.metric][seen]
        scores.append(float(np.mean(values[at > final.table["round"][-1] - criterion.last])) if len(at) else np.nan)
        reached = None
        if criterion.target is not None:
            there = values <= criterion.target if criterion.lower_is_better else values >= criterion.target
            reached = int(at[np.argmax(there)]) if there.any() else None
        rounds_to.append(reached)
        sent = final.table["bytes_down"] + final.table["bytes_up"]
        bytes_to.append(None if reached is None else float(sent[reached - 1]))
    sound = not any(final.diverged for final in finals)
    return {
        "diverged": sum(final.diverged for final in finals),
        "score": _mean(scores) if sound else None,
        "deviation": float(np.std(scores, ddof=1)) if sound and len(scores) > 1 else None,
        "scores": scores,
        "rounds_to_target": None if None in rounds_to else _mean(rounds_to),
        "bytes_to_target": None if None in bytes_to else _mean(bytes_to),
        "reached": sum(r is not None for r in rounds_to),
        "clients": _percentiles(finals, criterion),
        "seconds": _mean([final.table["seconds"][-1] for final in finals]),
        "bytes": _mean([final.table["bytes_down"][-1] + final.table["bytes_up"][-1] for final in finals]),
    }


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))


def _percentiles(finals: Sequence[Final], criterion: Criterion) -> dict[str, float] | None:
    """Percentiles over clients from the bad end (10 is what a tenth do worse than), averaged over the seeds."""
    columns = [final.clients.get(criterion.metric) for final in finals]
    if any(column is None for column in columns):
        return None
    sign = -1.0 if criterion.lower_is_better else 1.0
    found = {}
    for name, q in (("worst", 0), ("p10", 10), ("p50", 50), ("p90", 90)):
        found[name] = _mean([sign * np.nanpercentile(sign * np.asarray(column, float), q) for column in columns])
    return found


def _drift(config: Config, data: FederatedData, rounds: int, folder: Path) -> None:
    """Record the drift of the first rounds at the first seed, or why there is none."""
    place = folder / DRIFT
    if not rounds or place.is_file():
        return
    place.write_text(json.dumps(trace_drift(config, data, rounds)))


def trace_drift(config: Config, data: FederatedData, rounds: int) -> dict[str, Any]:
    """The clients' mean squared distance from the shadow sequence, round by round over local steps; or ``why`` not."""
    import jax

    from fedbraid.local import LocalWork
    from fedbraid.simulation.shadow import trace_shadow

    experiment = assemble(config, data)
    params = experiment.model.init(address.init_key(config.seed))
    cohort = data.train.num_clients if config.cohort == "all" else config.cohort
    works = [e.client for e in experiment.algorithm.exchanges if isinstance(e.client, LocalWork)]
    steps = max((int(np.max(work.count(data.train.sizes))) for work in works), default=0)
    numbers = rounds * cohort * (steps + 1) * sum(leaf.size for leaf in jax.tree.leaves(params))
    if numbers > MOST_NUMBERS:
        return {"why": f"a trace would hold {numbers:,} numbers, more than {MOST_NUMBERS:,}"}
    try:
        trace = trace_shadow(experiment.algorithm, params, data, rounds=rounds, cohort=cohort, seed=config.seed)
    except ValueError as error:
        return {"why": str(error)}
    return {"drift": trace.drift.tolist(), "rounds": rounds, "seed": config.seed}


# --- files -----------------------------------------------------------------------------------------------------------


def _write(path: Path, comparison: Comparison) -> None:
    import tomli_w

    tree = tomllib.loads(dump(comparison.base))
    tree["algorithm"].pop("name")
    tree["compare"] = comparison.settings.model_dump(mode="json", exclude_none=True)
    tree["sweep"] = comparison.tuning.model_dump(mode="json", exclude_none=True, exclude={"over"})
    tree["methods"] = [method.model_dump(mode="json", exclude_none=True) for method in comparison.methods]
    path.write_text(tomli_w.dumps(tree))


def reopen_comparison(folder: Path) -> Comparison:
    """A comparison to go on with."""
    if not (folder / COMPARE).is_file():
        raise ConfigError(f"{folder} is not the folder of a comparison: it has no {COMPARE}")
    return load_comparison(folder / COMPARE)
