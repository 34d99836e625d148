"""`fedbraid advise`: a pilot in a folder of its own, and the configuration that it advises.

    advise.toml       the configuration and an [advise] section: `fedbraid advise advise.toml` repeats it
    trials.parquet    one row per trial and horizon, with its curve
    advised.toml      the advised configuration: `fedbraid run advised.toml` trains it and tests it
    summary.json      what `fedbraid advise --json` prints
    advise.png        the curves of the best settings, and the regret over the client rates

Trials use tuning seeds and a validation split, never the test split. A pilot that was stopped continues from its trials
and gives the same advice.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedbraid import files
from fedbraid.experiment.advice.candidates import methods_of, with_setting
from fedbraid.experiment.advice.doubts import doubts_about, problem_with
from fedbraid.experiment.advice.picture import draw_advice
from fedbraid.experiment.advice.pilot import run_pilot
from fedbraid.experiment.advice.race import MORE_SEEDS, Budget, Race, RaceNews, Track
from fedbraid.experiment.advice.screening import screen
from fedbraid.experiment.advice.summary import summarize
from fedbraid.experiment.assembly import Experiment, assemble, load_named
from fedbraid.experiment.config import Config, ConfigError, dump, parse, read_tree, sentences
from fedbraid.experiment.figures import save
from fedbraid.experiment.lab import SweepSettings, hold_out_validation
from fedbraid.experiment.runfolder import held, read_sealed_toml
from fedbraid.experiment.sweep import check_folder
from fedbraid.experiment.trials import Trials
from fedbraid.metric import Better
from fedbraid.sealed import seal_json, seal_lines
from fedbraid.version import __version__

__all__ = ["AdviceSettings", "budget_of", "load_advice", "reopen_advice", "run_advice"]

ADVISE, TRIALS, ADVISED, SUMMARY, PICTURE = (
    "advise.toml",
    "trials.parquet",
    "advised.toml",
    "summary.json",
    "advise.png",
)
SHARE = 2  # without a budget the longest trials have this part of the configured rounds
PER_ROUND = 48  # rounds of all trials together, for each round of the longest trials; measured, rounded up
WRITE_EVERY = 5.0  # seconds; a pilot that is killed repeats at most the trials of this time
EVALUATIONS = 60  # of a trial with all configured rounds
UNITS = {"": "rounds", "r": "rounds", "round": "rounds", "rounds": "rounds"} | {"s": 1, "min": 60, "h": 3600}


class AdviceSettings(BaseModel):
    """The ``[advise]`` section.

    budget: rounds of all trials together ("6000"), or a time ("90s", "10min", "1h"). methods: what is tried; default
    all of `candidates.METHODS`. local_work: multiples of the configured local work; those other than 1 are tried with
    the best setting. metric: default the loss. target: the value that matters; default several levels.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)
    budget: str | None = None
    methods: tuple[str, ...] = ()
    local_work: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    seeds: Annotated[int, Field(ge=2)] = 2
    seed: Annotated[int, Field(ge=0)] = 1000
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None
    metric: str | None = None
    better: Better | None = None
    target: float | None = None

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, given: str | None) -> str | None:
        budget_of(given)
        return given


def budget_of(given: str | None) -> Budget:
    """A budget as a user writes it.

    >>> budget_of("6000"), budget_of("2.5min")
    (Budget(rounds=6000, seconds=None), Budget(rounds=None, seconds=150.0))
    """
    if given is None:
        return Budget()
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", given)
    unit = UNITS.get(found[2]) if found else None
    number = 0.0
    with contextlib.suppress(ValueError):
        number = float(found[1]) if found else 0.0
    if unit is None or number <= 0:
        raise ValueError(
            f"budget = {given!r}: write rounds of all trials together, such as 6000, or a time: 90s, 10min, 1h"
        )
    return Budget(rounds=int(number)) if unit == "rounds" else Budget(seconds=number * float(unit))


def load_advice(
    path: Path | None, settings: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> tuple[Config, AdviceSettings]:
    """A configuration and how to advise it, from a TOML file with or without an ``[advise]`` section."""
    tree = read_tree(path, settings)
    section = tree.pop("advise", {})
    if not isinstance(section, Mapping):
        raise ConfigError("advise must be a section: [advise]")
    try:
        found = AdviceSettings.model_validate({**section, **(changes or {})})
    except ValidationError as error:
        raise ConfigError(sentences(error, AdviceSettings, "advise")) from None
    return parse(tree), found


def _text(config: Config, settings: AdviceSettings) -> str:
    import tomli_w

    section = settings.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps(tomllib.loads(dump(config)) | {"advise": section})


def reopen_advice(folder: Path) -> tuple[Config, AdviceSettings]:
    """The configuration and the settings of a pilot to continue."""
    if not (folder / ADVISE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a pilot: it has no {ADVISE}. If it was stopped before it wrote this file, "
            f"start it again with --out {folder}"
        )
    read_sealed_toml(folder / ADVISE, lambda: _text(*load_advice(folder / ADVISE)))
    return load_advice(folder / ADVISE)


def run_advice(
    config: Config,
    settings: AdviceSettings,
    out: Path,
    *,
    resume: bool = False,
    on_news: Callable[[RaceNews], Any] | None = None,
) -> dict[str, Any]:
    """Run the pilot of a configuration, write its folder and return its summary.

    The folder must be new, or with ``resume`` that of a pilot that was stopped. If there is no advice, ``advised`` of
    the summary is None and ``problem`` says why.
    """
    with contextlib.ExitStack() as stack:
        if resume:
            stack.enter_context(held(out))
        else:
            check_folder(out)
        track, experiment = _set_up(config, settings)
        if not resume:
            stack.enter_context(held(out))
            check_folder(out)  # another process may have started since
            files.write_text(out / ADVISE, seal_lines(_text(config, settings)))
        return _advise_in(track, experiment, settings, out, on_news)


def _set_up(config: Config, settings: AdviceSettings) -> tuple[Track, Experiment]:
    """Everything that can be wrong is found here, before anything runs."""
    methods = methods_of(config, settings.methods)
    data = load_named(config)
    split = hold_out_validation(data, settings.validation, settings.seed)
    experiment = assemble(config, split[0])
    judged = SweepSettings(
        seeds=settings.seeds + MORE_SEEDS,
        seed=settings.seed,
        validation=settings.validation,
        metric=settings.metric or config.stop.metric or "loss",
        better=settings.better,
    )
    every = max(1, config.rounds // EVALUATIONS)
    often = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": every})})
    return Track(often, methods, judged, data, split), experiment


def _advise_in(
    track: Track, experiment: Experiment, settings: AdviceSettings, out: Path, on_news: Callable | None
) -> dict[str, Any]:
    config, budget = experiment.config, budget_of(settings.budget)
    last = max(1, -(-config.rounds // SHARE))
    if budget.rounds is not None:
        last = min(config.rounds, max(1, budget.rounds // PER_ROUND))
    screening = screen(experiment, track.methods)
    track = track._replace(methods=screening.methods)
    trials = Trials(out / TRIALS, {"version": __version__, "kind": "advise"}, every=WRITE_EVERY)
    race = Race(track, trials, last=last, budget=budget, on_news=on_news)
    target = settings.target if settings.target is not None else config.stop.target
    if target is not None:
        race.target = race.metric.sign * target
    try:
        found = run_pilot(race, screening.centre, least=screening.least, works=settings.local_work)
    finally:
        trials.write()
    targets = experiment.model.targets
    problem = problem_with(race, found, "" if targets is None else targets.kind)
    summary = summarize(race, found, problem, [] if problem else doubts_about(race, found))
    reasons = [*screening.sentences, *(f"{name} is left out: {why}." for name, why in found.left_out.items())]
    summary |= {"reasons": reasons, "out": str(out)}
    if not problem and found.best is not None:
        files.write_text(out / ADVISED, dump(with_setting(config, track.methods, found.best)))
        summary["advised_toml"] = str(out / ADVISED)
    save(draw_advice(race, found, summary), out / PICTURE)
    files.write_text(out / SUMMARY, seal_json(summary))
    return summary
