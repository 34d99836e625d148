"""Assembles a run from a configuration and a description of data: model, loss, metrics, algorithm, arrival.

Only `assemble` makes these from a configuration. Simulated runs, sweeps, comparisons, diagnoses and deployed
federations all call it, so the same configuration gives the same program everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid import address, algorithms, models, transforms
from fedbraid.algorithms.schedules import over_rounds, schedule
from fedbraid.core import Algorithm, failure, is_traced, place_of
from fedbraid.data import catalog, partition
from fedbraid.data.byzantine import mark
from fedbraid.data.catalog import load as load_data
from fedbraid.data.description import DataDescription
from fedbraid.data.federated import FederatedData
from fedbraid.data.preprocess import Pipeline, unscaled_bytes
from fedbraid.experiment.config import Config, ConfigError, Named
from fedbraid.experiment.feasibility import check_feasible
from fedbraid.metric import Metrics, as_metrics
from fedbraid.models import Model, check_targets, with_metrics
from fedbraid.models import build as build_model
from fedbraid.names import Found, Names, options_of, unknown
from fedbraid.notices import notice
from fedbraid.simulation import arrival
from fedbraid.simulation.timeline import Timing
from fedbraid.simulation.timing import timing_of
from fedbraid.version import __version__

__all__ = ["Experiment", "assemble", "build", "find_parts", "from_elsewhere", "load_named", "lora_weights"]

PyTree = Any


@dataclass(frozen=True)
class Experiment:
    """An assembled configuration, ready to run.

    examples: the data itself; None in a deployed federation, which has only its description.
    """

    config: Config
    description: DataDescription
    model: Model
    algorithm: Algorithm
    arrival: Callable
    examples: FederatedData | None = None

    @property
    def data(self) -> FederatedData:
        """The data that the experiment was assembled on."""
        if self.examples is None:
            raise ValueError("this experiment was assembled from a description of its data, without the data")
        return self.examples

    @property
    def loss(self) -> Callable:
        """The model's ``(params, batch, key) -> scalar``, on preprocessed batches."""
        return self.model.loss

    @property
    def metrics(self) -> Metrics:
        """The model's ``(params, batch) -> {name: (sums, weights)}``, on preprocessed batches, as declared."""
        return as_metrics(self.model.metrics)

    @property
    def timing(self) -> Timing | None:
        """Simulated time and asynchronous steps; None if the configuration has neither."""
        cohort, population = self.config.cohort, self.description.population
        return timing_of(self.config.clock, self.config.asynchrony, population if cohort == "all" else cohort)

    @functools.cached_property
    def params(self) -> PyTree:
        """The parameters that a run starts from, drawn from the configuration's seed."""
        return self.model.init(address.init_key(self.config.seed))

    @functools.cached_property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the parameters, without computing them."""
        try:
            return jax.eval_shape(self.model.init, address.init_key(self.config.seed))
        except Exception as error:
            if not place_of(error):  # not in the user's code
                raise
            raise ConfigError(f"model.name = {self.config.model.name!r}: {failure('its init', error)}") from error

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything that determines what clients compute: the configuration and the data description.

        It needs no tracing. Two machines with the same digest run the same client programs, if the modules that a
        configuration names by ``module:attribute`` are the same on both. The file of LoRA's frozen weights is a part of
        what clients compute.
        """
        told = self.description
        decides = self.config.model_dump(mode="json", include={"model", "algorithm", "transforms"})
        if (weights := lora_weights(self.config)) is not None:
            decides["weights"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        decides["metrics"] = self.config.evaluation.metrics
        decides["fields"] = {name: [list(f.shape), str(f.dtype)] for name, f in told.fields.items()}
        decides |= {"classes": told.classes, "population": told.population, "preprocess": steps_of(told)}
        decides["version"] = __version__
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def lora_weights(config: Config) -> Path | None:
    """The file of the frozen weights under LoRA's adapters, if the configuration names one."""
    table = config.model.options.get("lora")
    given = table.get("weights") if isinstance(table, Mapping) else None
    return None if given is None else Path(given)


def steps_of(description: DataDescription) -> list[dict[str, Any]]:
    """The preprocessing as plain values, to be written into a file."""
    prepare = description.preprocess
    if prepare is not None and not isinstance(prepare, Pipeline):
        raise ConfigError(
            f"data {description.name!r}: its preprocessing is a Python function and cannot be written to a file; sites "
            "need a Pipeline of named functions (fedbraid.data.preprocess)"
        )
    return [] if prepare is None else prepare.spec()


def build(config: Config) -> Experiment:
    """Load the data that ``config`` names and assemble the experiment on it; raises ConfigError for a wrong config."""
    experiment = assemble(config, load_named(config))
    check_feasible(experiment)
    return experiment


def load_named(config: Config) -> FederatedData:
    """Load and check the data that ``config`` names, after checking the names of the model and the algorithm."""
    find_parts(config)
    data = _named("data", config.data, lambda **options: load_data(config.data.name, **options))
    data.check()
    if field := unscaled_bytes(data.train):
        notice(
            f"data {data.name!r}: the field {field!r} stores bytes and there is no preprocessing, so models read "
            'numbers from 0 to 255. If these are images, write preprocess = [{name = "scale"}] under [data] of the '
            "configuration (or --set 'data.preprocess=[{name=\"scale\"}]'), which divides them by 255. If they are "
            'tokens, write [{name = "integers"}]. To keep them as they are, write [{name = "scale", factor = 1.0}]'
        )
    if not config.attack.share:
        return data
    try:
        return mark(data, config.attack.share, seed=config.attack.seed)
    except ValueError as error:
        raise ConfigError(f"attack.share: {error}") from error


def assemble(config: Config, about: DataDescription | FederatedData) -> Experiment:
    """The model, algorithm and arrival that ``config`` names, for the data or for its description.

    Options that are rates may be traced. An algorithm whose factory has an argument ``data`` needs the data itself: a
    description alone is an error.

    >>> from fedbraid.data.catalog import load
    >>> tiny = Config(model={"name": "softmax_regression"}, cohort="all")
    >>> assemble(tiny, load("digits", clients=3).description).shapes["w"].shape
    (64, 10)
    """
    parts = find_parts(config)
    data = about if isinstance(about, FederatedData) else None
    description = about.description if isinstance(about, FederatedData) else about
    population = description.population
    if config.cohort != "all" and config.cohort > population:
        raise ConfigError(
            f'cohort = {config.cohort}: the data has {population} clients; set cohort to at most that, or to "all"'
        )
    shapes = _named("data", config.data, lambda **_: description.shapes)
    model = _named(
        "model",
        config.model,
        lambda **options: build_model(config.model.name, shapes, description.classes, **options),
    )
    model = _with_metrics(config, model, data)
    if data is not None:
        _named("data", config.data, lambda **_: check_targets(model, data))
        model = model._replace(metrics=replace(as_metrics(model.metrics), check=None))  # done
    context: dict[str, Callable[[], Any]] = {
        "loss": lambda: model.loss,
        "outputs": lambda: lambda params, batch: model.predict(params, batch["x"]),
        "features": lambda: _features(config, model),
        "num_classes": lambda: _num_classes(config, description),
        "num_features": lambda: _num_features(config, model, description),
        "population": lambda: population,
        "params": lambda: model.init(address.init_key(config.seed)),
    }
    if data is not None:
        context["data"] = lambda: data.train
    else:
        _refuse_without_data(config, parts)
    algorithm = _build_algorithm(config, parts, context)
    if config.attack.share:  # outermost: it replaces the whole upload of an honest client
        algorithm = transforms.attack(algorithm, factor=config.attack.factor)
    return Experiment(config, description, model, algorithm, _arrival(config), data)


def _features(config: Config, model: Model) -> Callable[[PyTree, Mapping[str, Any]], Any]:
    """``(params, batch) -> activations before the last layer``, for algorithms that compare representations."""
    features = model.features
    if features is None:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} compares the features of examples, but model {config.model.name!r} "
            "does not say what they are: give it features=(params, x) -> activations, for example by "
            "model._replace(features=...), or choose one of the library's models"
        )
    return lambda params, batch: features(params, batch["x"])


def _num_classes(config: Config, description: DataDescription) -> int:
    if description.classes is None:
        raise ConfigError(f"algorithm {config.algorithm.name!r} is for data with classes; this data has none")
    return description.classes


def _num_features(config: Config, model: Model, description: DataDescription) -> int:
    """The number of features of one example."""
    params = jax.eval_shape(model.init, address.init_key(config.seed))
    return jax.eval_shape(_features(config, model), params, dict(description.prepared)).size


def _with_metrics(config: Config, model: Model, data: FederatedData | None) -> Model:
    """The model with the metrics that the configuration adds, and R2 for every regression."""
    values = model.targets is not None and model.targets.kind == "values"
    names: list[str] = sorted({*config.evaluation.metrics, "r2"} if values else config.evaluation.metrics)
    labels = data.train.arrays.get("y") if data is not None else None
    centre = 0.0 if labels is None or not values else float(np.mean(labels))
    try:
        return with_metrics(model, names, centre=centre)
    except ValueError as error:
        raise ConfigError(f"evaluation.metrics: {error}") from None


def _build_algorithm(config: Config, parts: Parts, context: Mapping[str, Callable[[], Any]]) -> Algorithm:
    """The algorithm with its transforms. ``context`` provides the factory arguments that are not options, by name."""
    _refuse_bounds(config)
    algorithm = _scheduled(parts["algorithm"], config.algorithm, context)
    for i, named in enumerate(config.transforms):
        inner = {**context, "alg": lambda inside=algorithm: inside}
        algorithm = _call(f"transforms[{i}]", transforms.NAMES, parts[f"transforms[{i}]"], named, inner)
    return algorithm


MEASURING = ("fedauto", "fedauto_ahead")  # they send measured curvatures beside the update
BOUNDING = ("clip", "norm_bound", "dp")  # they bound the norm of the whole upload


def _refuse_bounds(config: Config) -> None:
    """Refuse a bound on uploads whose numbers are larger than the update: nothing would be left of the update."""
    bounds = [named.name for named in config.transforms if named.name in BOUNDING]
    if config.algorithm.name in MEASURING and bounds:
        raise ConfigError(
            f"{config.algorithm.name} sends measured curvatures beside its update, and {bounds[0]} bounds the norm of "
            "both together, so the update would be lost. Name another method, such as algorithm.name=fedavg"
        )


RATES = ("client_lr", "server_lr", "lr", "gamma")  # options of algorithms that may change over rounds


def _scheduled(found: Found, named: Named, context: Mapping[str, Callable[[], Any]]) -> Algorithm:
    """The algorithm, whose rates may be tables such as ``{value = 0.1, schedule = "cosine", over = 200}``."""

    def make(**rates: Any) -> Algorithm:
        return _call("algorithm", algorithms.NAMES, found, named.model_copy(update=rates), context)

    tables = {key: named.options[key] for key in RATES if isinstance(named.options.get(key), Mapping)}
    if not tables:
        return make()
    values: dict[str, Callable[[Any], Any]] = {}
    for key, table in tables.items():
        shape = {"name" if name == "schedule" else name: value for name, value in table.items() if name != "value"}
        base = table.get("value")
        if isinstance(base, bool) or not (isinstance(base, int | float) or is_traced(base)):
            raise ConfigError(f"algorithm.{key}: a rate over rounds needs a number as its value, got {base!r}")
        try:
            factor = schedule(shape, f"algorithm.{key}")
        except ValueError as error:
            raise ConfigError(str(error).replace(".name", ".schedule")) from error
        assert factor is not None
        values[key] = lambda round_, base=base, factor=factor: base * factor(round_)
    make(**{key: table["value"] for key, table in tables.items()})  # checks the rates at their full value
    return over_rounds(make, values)


def _refuse_without_data(config: Config, parts: Parts) -> None:
    if config.attack.share:
        raise ConfigError("[attack] is for simulations: it makes some clients Byzantine; leave the section out")
    for section, found in parts.items():
        if section not in ("data", "model", "partition") and "data" in inspect.signature(found.thing).parameters:
            raise ConfigError(
                f"{found.name!r} reads the data of all clients together; no machine of a federation has them"
            )


def _call(
    section: str, names: Names, found: Found, named: Named, context: Mapping[str, Callable[[], Any]]
) -> Algorithm:
    offered = {key: make for key, make in context.items() if key in inspect.signature(found.thing).parameters}
    options = options_of(found.thing, skip=tuple(offered))
    for key in named.options:
        if key not in options:
            if (
                section == "algorithm"
                and named.name == Config().algorithm.name
                and key in options_of(algorithms.fedavg)
            ):
                raise ConfigError(
                    f"algorithm.{key}: {named.name}, which runs if no method is named, measures its client rates and "
                    f"has no {key}. To set it, name a method as well, such as algorithm.name=fedavg"
                )
            raise ConfigError(unknown(f"option of {section} {named.name!r}:", key, [*options, "name"]))
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in named.options.items()}
    return _named(section, named, lambda **_: names.call(found, given, offered))


def _named(section: str, named: Named, make: Callable) -> Any:
    try:
        return make(**named.options)
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"[{section}] name = {named.name!r}: {error}") from error


Parts = Mapping[str, Found]  # by section: data, partition, model, algorithm, transforms[0] ...


def find_parts(config: Config) -> Parts:
    """The parts that a configuration names, with where they come from; raises ConfigError for a wrong name."""
    named: list[tuple[str, str, Names, str]] = [
        ("data", "data.name", catalog.NAMES, config.data.name),
        ("model", "model.name", models.NAMES, config.model.name),
        ("algorithm", "algorithm.name", algorithms.NAMES, config.algorithm.name),
    ]
    if (split := config.data.options.get("partition")) not in (None, "natural"):
        named.append(("partition", "data.partition", partition.NAMES, str(split)))
    for i, transform in enumerate(config.transforms):
        named.append((f"transforms[{i}]", f"transforms[{i}].name", transforms.NAMES, transform.name))
    folder = None if config.modules is None else Path(config.modules)
    parts = {}
    for section, key, names, name in named:
        try:
            if section != "data" or name in names.own or not Path(name).exists():  # a store, or raw files
                parts[section] = names.find(name, folder)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{key} = {name!r}: {error}") from error
    return parts


def from_elsewhere(config: Config) -> list[str]:
    """The parts of a configuration that are not the library's own, with where their code comes from."""
    parts = find_parts(config)
    return [f"{section} {found.name} from {found.source}" for section, found in parts.items() if not found.own]


def _arrival(config: Config) -> Callable:
    given = config.arrival
    if given.deadline is None:
        return arrival.bernoulli(given.drop) if given.drop else arrival.everyone
    late = arrival.deadline(
        given.deadline,
        seconds_per_step=given.seconds_per_step,
        median=given.latency_median,
        sigma=given.latency_sigma,
    )
    if not given.drop:
        return late
    lost = arrival.bernoulli(given.drop)
    return arrival.both(lost, late)
