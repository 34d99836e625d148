"""From a configuration to the things it names: data, model, algorithm, arrival."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedbraid import address, algorithms, transforms
from fedbraid.core import Algorithm
from fedbraid.data.catalog import CATALOG
from fedbraid.data.catalog import load as load_data
from fedbraid.data.federated import FederatedData
from fedbraid.data.store import is_store
from fedbraid.experiment.config import Config, ConfigError, Named, options_of, unknown
from fedbraid.metric import Metrics, as_metrics
from fedbraid.models import MODELS, Model
from fedbraid.models import build as build_model
from fedbraid.simulation import arrival

__all__ = ["Experiment", "assemble", "build", "build_algorithm", "load_named"]


class Experiment(NamedTuple):
    """What a configuration names, ready to run."""

    config: Config
    data: FederatedData
    model: Model
    params: Any
    loss: Callable  # the model's, after the data's preprocessing
    metrics: Metrics
    algorithm: Algorithm
    arrival: Callable


def build(config: Config) -> Experiment:
    """Make everything that ``config`` names, or say what is wrong with it."""
    return assemble(config, load_named(config))


def load_named(config: Config) -> FederatedData:
    """The data that ``config`` names, checked; names of models and algorithms that do not exist are refused first."""
    _check_names(config)
    data = _named("data", config.data, lambda **options: load_data(config.data.name, **options))
    data.check()
    if not config.attack.share:
        return data
    try:
        return transforms.mark(data, config.attack.share, seed=config.attack.seed)
    except ValueError as error:
        raise ConfigError(f"attack.share: {error}") from error


def assemble(config: Config, data: FederatedData) -> Experiment:
    """What ``config`` names, on data that is there already; options that are rates may be traced."""
    _check_names(config)
    population = data.train.num_clients
    if config.cohort != "all" and config.cohort > population:
        raise ConfigError(
            f'cohort = {config.cohort}: the data has {population} clients; set cohort to at most that, or to "all"'
        )
    model = _named(
        "model",
        config.model,
        lambda **options: build_model(config.model.name, data.shapes, data.info.get("classes"), **options),
    )
    loss, metrics = model.loss, as_metrics(model.metrics)
    outputs: Callable = lambda params, batch: model.predict(params, batch["x"])  # noqa: E731
    if data.preprocess is not None:
        prepare = data.preprocess
        loss = lambda params, batch, key: model.loss(params, prepare(batch, key, True), key)  # noqa: E731
        metrics = metrics.through(lambda f: lambda params, batch: f(params, prepare(batch, None, False)))
        outputs = lambda params, batch: model.predict(params, prepare(batch, None, False)["x"])  # noqa: E731
    params = model.init(address.init_key(config.seed))
    context = {"loss": loss, "outputs": outputs, "data": data.train, "population": population, "params": params}
    algorithm = build_algorithm(config, context)
    if config.attack.share:  # over all that honest clients do
        algorithm = transforms.attack(algorithm, factor=config.attack.factor)
    return Experiment(config, data, model, params, loss, metrics, algorithm, _arrival(config))


def build_algorithm(config: Config, context: dict[str, Any]) -> Algorithm:
    """The algorithm under its transforms. ``context`` is what factories may ask for by name beside their options."""
    factory = algorithms.ALGORITHMS[config.algorithm.name]
    algorithm = _call("algorithm", factory, config.algorithm, context, {})
    for i, named in enumerate(config.transforms):
        transform = transforms.TRANSFORMS[named.name]
        algorithm = _call(f"transforms[{i}]", transform, named, context, {"alg": algorithm})
    return algorithm


def _call(section: str, factory: Callable, named: Named, context: dict[str, Any], fixed: dict[str, Any]) -> Any:
    parameters = inspect.signature(factory).parameters
    offered = {key: value for key, value in context.items() if key in parameters} | fixed
    options = options_of(factory, skip=tuple(offered))
    for key in named.options:
        if key not in options:
            raise ConfigError(unknown(f"option of {section} {named.name!r}:", key, options))
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in named.options.items()}
    return _named(section, named, lambda **_: factory(**offered, **given))


def _named(section: str, named: Named, make: Callable) -> Any:
    try:
        return make(**named.options)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[{section}] name = {named.name!r}: {error}") from error


def _check_names(config: Config) -> None:
    known = {"data": CATALOG, "model": MODELS, "algorithm": algorithms.ALGORITHMS}
    for section, names in known.items():
        name = getattr(config, section).name
        elsewhere = (section == "model" and ":" in name) or (section == "data" and is_store(name))
        if name not in names and not elsewhere:
            raise ConfigError(unknown(f"{section}.name", name, names))
    for i, named in enumerate(config.transforms):
        if named.name not in transforms.TRANSFORMS:
            raise ConfigError(unknown(f"transforms[{i}].name", named.name, transforms.TRANSFORMS))


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


def states_in(config: Config) -> Any:
    """Where client states are kept, as ``simulate`` takes it: a word or a folder."""
    word = config.engine.states_in
    return word if word in ("auto", "device", "host") else Path(word)
