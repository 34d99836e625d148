"""Measurements in a short run: constants at a few rounds, and single rounds with other numbers of local steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from fedbraid import algorithms
from fedbraid.data.federated import Split
from fedbraid.drawing import lines_svg, table_html
from fedbraid.experiment.assembly import Experiment, assemble, build, find_parts
from fedbraid.experiment.config import Config, options_of, parse
from fedbraid.experiment.diagnosis.advice import Advice, Probe, Settings, advise, round_down
from fedbraid.experiment.divergence import WORSE, diverged, lower_rate
from fedbraid.local import batches_of
from fedbraid.notices import notice
from fedbraid.simulation import evaluator, simulate
from fedbraid.theory.constants import Constants, estimate

__all__ = ["Diagnosis", "diagnose", "evaluation_loss", "settings_of"]

BACK_OFF = 8  # at most this many rates are tried, each a tenth of the one before
SERVER_STEPS = (1.0, 1.5, 2.0)  # tried with every number of local steps
COHORTS = (101, 102, 103)  # seeds of the cohorts that a probe is averaged over
DEFAULT_RATE = {"adam": 0.01}  # of Mime and MimeLite by their base; 0.1 for others


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `diagnose`: constants at ``rounds``, probes, advice, and the advised settings as ``key=value``."""

    settings: Settings
    rounds: tuple[int, ...]
    points: tuple[Constants, ...]
    probes: tuple[Probe, ...]
    advice: Advice
    changes: tuple[str, ...]

    def __repr__(self) -> str:
        """The advice, and the settings to try."""
        lines = [f"- {sentence}" for sentence in self.advice.sentences]
        return "\n".join(["Diagnosis", *lines, *(f"  --set {change}" for change in self.changes)])

    def _repr_html_(self) -> str:
        """The advice as a table, and how much single rounds with more local steps lowered the loss."""
        rows: list[tuple[str, str]] = [("advice", str(sentence)) for sentence in self.advice.sentences]
        rows += [("try", f"--set {change}") for change in self.changes]
        rows += [("not known", line) for line in self.advice.unknown]
        steps = [probe.steps for probe in self.probes]
        sizes = sorted({size for probe in self.probes for size in probe.fell})
        lines = {
            f"server step {size:g}": (steps, [probe.fell.get(size, float("nan")) for probe in self.probes])
            for size in sizes
        }
        return table_html(rows) + lines_svg(lines, x="local steps of one round", y="fell")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "settings": self.settings._asdict(),
            "rounds": list(self.rounds),
            "constants": [c.as_dict() for c in self.points],
            "probes": [
                {"steps": p.steps, "fell": {str(k): v for k, v in p.fell.items()}, "noise": p.noise}
                for p in self.probes
            ],
            "advice": self.advice.as_dict(),
            "changes": list(self.changes),
        }


def diagnose(
    config: Config,
    *,
    rounds: int = 20,
    points: int = 3,
    clients: int | None = None,
    probe_steps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    seed: int | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Diagnosis:
    """Run ``config`` for a few rounds, estimate the constants at ``points`` rounds of it, try single rounds, advise.

    clients: sampled for the constants; default 50, or 10 for models of more than 20,000 parameters.
    probe_steps: numbers of local steps to try for one round each; an empty sequence tries none.
    tell: is called with what is done next, for a terminal.

    >>> from fedbraid.experiment.config import load_config
    >>> tiny = load_config(settings=["data.clients=4", "model.hidden=[4]", "cohort=2", "algorithm.name=fedavg"])
    >>> found = diagnose(tiny, rounds=1, points=1, clients=2, probe_steps=())
    >>> found.changes[0].startswith("algorithm.client_lr=")
    True
    """
    for name, value in (("rounds", rounds), ("points", points), ("clients", clients)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
    made = build(config)
    settings = settings_of(config, made.data.train)
    weighting = _option(config, "weighting", "examples")
    loss = evaluation_loss(made)
    if clients is None:
        clients = 50 if sum(leaf.size for leaf in jax.tree.leaves(made.params)) <= 20_000 else 10
    at = sorted({round(i * rounds / max(points - 1, 1)) for i in range(points)}) if points > 1 else [rounds]
    found, params = [], made.params
    tell(f"training for {at[-1]} rounds")
    for done, params in zip(at, _trained(config, made, at, settings.cohort), strict=True):
        tell(f"estimating the constants after round {done}")
        found.append(
            estimate(
                loss,
                params,
                made.data.train,
                clients=clients,
                batch_size=settings.batch_size,
                weighting=weighting,
                seed=config.seed,
            )
        )
    probes: tuple[Probe, ...] = ()
    curvature = found[-1].L_client_mean.value
    if probe_steps and settings.client_lr is not None and curvature > 0:
        rate = round_down(1.0 / (curvature + settings.alpha))
        probes = _probe(made, params, settings, rate, probe_steps, weighting, tell)
    advice = advise(found, settings, probes)
    return Diagnosis(settings, tuple(at), tuple(found), probes, advice, _changes(config, advice))


def _trained(config: Config, made: Experiment, at: Sequence[int], cohort: int) -> list[Any]:
    """The models after the rounds ``at`` of the configured run, or of a run with a lower rate if that one diverges."""
    first = _training_loss(made, made.params)
    tried: list[float] = []
    key, lower = "", 0.0
    for _ in range(BACK_OFF):
        models, lost = [], False
        for done in at:
            if done == 0:
                models.append(made.params)
                continue
            result = simulate(
                made.algorithm, made.params, made.data.train, rounds=done, cohort=cohort, seed=config.seed
            )
            models.append(result.params)
            # if all uploads are refused, the model stays where it is, and its loss says nothing
            lost = lost or diverged(result.history, {}, result.params) is not None
        if at[-1] == 0 or (not lost and _training_loss(made, models[-1]) <= WORSE * first):
            if tried:
                notice(
                    f"with {key} = {', '.join(f'{rate:.3g}' for rate in tried)} the run diverges within {at[-1]} "
                    f"rounds: the constants are measured along a run with {lower:.3g}"
                )
            return models
        rate = lower_rate(config)
        if rate is None:
            break
        key, lower, now = rate
        tried.append(now)
        name = key.removeprefix("algorithm.")
        tree = config.model_dump(mode="json")
        config = parse({**tree, "algorithm": {**tree["algorithm"], name: lower}})
        made = assemble(config, made.data)
    raise ValueError(
        f"the run diverges within {at[-1]} rounds, also with lower rates: there is no model to measure constants at; "
        "check the loss and the data"
    )


def _training_loss(made: Experiment, params: Any) -> float:
    """The loss over the training examples of some clients; inf if it is not finite."""
    sums = np.asarray(evaluator(made.metrics, _some_clients(made.data.train))(params)["loss"])
    value = float(sums[0].sum() / sums[1].sum())
    return value if math.isfinite(value) else math.inf


def _some_clients(split: Split) -> Split:
    """Up to 200 examples of up to 40 clients, the same ones each time."""
    some = np.sort(np.random.default_rng(0).choice(split.num_clients, min(40, split.num_clients), replace=False))
    seen = Split.from_clients([{k: a[:200] for k, a in split.client(int(i)).items()} for i in some])
    return replace(seen, preprocess=split.preprocess)


def _changes(config: Config, advice: Advice) -> tuple[str, ...]:
    """The advised settings that this algorithm has, in the form of ``--set``."""
    takes = options_of(find_parts(config)["algorithm"].thing)
    return tuple(f"algorithm.{k}={v:g}" for k, v in advice.settings.items() if k in takes)


def _option(config: Config, name: str, default: Any) -> Any:
    """An option of the algorithm: configured, else the default of its factory, else ``default``."""
    options = {**options_of(find_parts(config)["algorithm"].thing), **config.algorithm.options}
    value = options.get(name, default)
    return default if value is None or value is getattr(type(value), "empty", object()) else value


def settings_of(config: Config, split: Split) -> Settings:
    """The settings of a configuration that constants are judged by."""
    cohort = split.num_clients if config.cohort == "all" else config.cohort
    given = {k: config.algorithm.options[k] for k in ("epochs", "steps", "batch_size") if k in config.algorithm.options}
    client_lr, alpha = _option(config, "client_lr", None), _option(config, "alpha", 0.0)
    if client_lr is None and "client_lr" in options_of(find_parts(config)["algorithm"].thing):
        client_lr = DEFAULT_RATE.get(str(_option(config, "base", "")), 0.1)
    client_lr = client_lr.get("value") if isinstance(client_lr, Mapping) else client_lr  # a rate over rounds
    steps = float(np.mean([batches_of(**given).count(int(n)) for n in split.sizes])) if client_lr is not None else 1.0
    return Settings(
        config.algorithm.name,
        None if client_lr is None else float(client_lr),
        steps,
        int(cohort),
        split.num_clients,
        config.rounds,
        given.get("batch_size", 20),
        float(_option(config, "server_lr", 1.0)),
        float(alpha) if isinstance(alpha, int | float) else 0.0,
    )


def evaluation_loss(made: Experiment) -> Any:
    """The model's loss of a preprocessed batch, without dropout; the constants are those of this function."""
    return lambda params, batch, key: made.model.loss(params, batch, None)


def _probe(
    made: Experiment,
    params: Any,
    settings: Settings,
    client_lr: float,
    steps: Sequence[int],
    weighting: Any,
    tell: Callable[[str], None],
) -> tuple[Probe, ...]:
    """One round of FedAvg from ``params`` with each number of local steps; mean and standard error over cohorts."""
    split = made.data.train
    scores = evaluator(made.metrics, _some_clients(split))

    def mean_loss(x: Any) -> float:
        sums = np.asarray(scores(x)["loss"])
        return float(sums[0].sum() / sums[1].sum()) if weighting == "examples" else float(np.mean(sums[0] / sums[1]))

    before, found = mean_loss(params), []
    for K in steps:
        tell(f"trying one round with {K} local step{'s' if K != 1 else ''}")
        local = {"steps": K, "batch_size": settings.batch_size, "weighting": weighting}
        method = algorithms.fedavg(made.loss, client_lr=client_lr, **local)
        fell: dict[float, list[float]] = {s: [] for s in SERVER_STEPS}
        for seed in COHORTS:
            after = simulate(method, params, split, rounds=1, cohort=settings.cohort, seed=seed).params
            for s in SERVER_STEPS:
                moved = jax.tree.map(lambda x, y, s=s: x + s * (y - x), params, after)
                value = mean_loss(moved)
                fell[s].append(before - value if math.isfinite(value) else -math.inf)
        spread = float(np.std(fell[1.0], ddof=1)) if np.isfinite(fell[1.0]).all() else 0.0
        means = {s: float(np.mean(values)) for s, values in fell.items()}
        found.append(Probe(int(K), means, spread / math.sqrt(len(COHORTS))))
    return tuple(found)
