"""Points of a configuration: values for some of its keys, and the programs that run several points together.

Rates may be traced, so points that differ only in rates are one program (see :mod:`fedbraid.simulation.points`).
Counts, names and shapes are static: points that differ in them need separate programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedbraid import address
from fedbraid.core import Algorithm, StaticValueError, message_shapes
from fedbraid.costs import data_shapes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment.assembly import Experiment, assemble
from fedbraid.experiment.config import Config, ConfigError, Named, parse
from fedbraid.lowering import captured
from fedbraid.lowering.compiler import BRIEF, brief_options
from fedbraid.metric import PERSONAL
from fedbraid.simulation.loop import Schedule
from fedbraid.simulation.personal import has_own_models
from fedbraid.simulation.points import Points, PointsError, PointTask, Study
from fedbraid.simulation.program import Task

__all__ = ["Point", "brief_init", "measured", "points_program", "traceable", "with_traced", "with_values"]

Point = Mapping[str, Any]
TRACED_SECTIONS = ("algorithm", "model", "transforms")
STATIC = (  # errors raised when a traced value must be static
    StaticValueError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def with_values(config: Config, values: Point) -> Config:
    """The configuration with other values at some keys, checked; keys are dotted, transforms are counted from 0.

    >>> with_values(Config(), {"algorithm.epochs": 5, "rounds": 7}).algorithm.options
    {'epochs': 5}
    """
    tree = config.model_dump()
    for key, value in values.items():
        *parents, last = key.split(".")
        here: Any = tree
        for part in parents:
            here = _child(here, part, key)
        if isinstance(here, list):
            raise ConfigError(f"{key!r} names a whole transform; name one of its options, such as {key}.OPTION")
        if not isinstance(here, dict):
            raise ConfigError(f"{key!r}: {parents[-1]!r} is a value, not a section")
        here[last] = value
    return parse(tree)


def _child(here: Any, part: str, key: str) -> Any:
    if isinstance(here, tuple | list):
        if not part.isdigit() or int(part) >= len(here):
            raise ConfigError(f"{key!r}: there are {len(here)} transforms, counted from 0; there is no {part!r}")
        return here[int(part)]
    if not isinstance(here, dict):
        raise ConfigError(f"{key!r}: {part!r} is a key of a section, but there is a value instead of that section")
    return here.setdefault(part, {})


def with_traced(config: Config, values: Point) -> Config:
    """The configuration with traced numbers at options of its algorithm, model or transforms.

    It is not parsed again: the configuration was checked with plain values, and traced values cannot be checked.
    """
    for key, value in values.items():
        section, *rest = key.split(".")
        if section == "transforms":
            index = int(rest[0])
            changed = _with_option(config.transforms[index], rest[1:], value)
            transforms = (*config.transforms[:index], changed, *config.transforms[index + 1 :])
            config = config.model_copy(update={"transforms": transforms})
        else:
            config = config.model_copy(update={section: _with_option(getattr(config, section), rest, value)})
    return config


def _with_option(named: Named, path: Sequence[str], value: Any) -> Named:
    """A part with another value at an option, or inside a table such as ``client_lr = {value = .., schedule = ..}``."""

    def changed(table: Mapping[str, Any], path: Sequence[str]) -> Any:
        first, *rest = path
        return {**table, first: changed(table[first], rest) if rest else value}

    return named.model_copy(update={path[0]: changed(named.options, path)[path[0]]})


def traceable(config: Config, data: FederatedData, values: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """The keys whose values are numbers that may be traced: rates may, counts may not.

    A key may be traced if the experiment can be assembled, and the shapes of its messages computed, without the key's
    value. Errors that have another cause than the traced value are raised.
    """
    numbers = [
        key
        for key, all_ in values.items()
        if key.split(".")[0] in TRACED_SECTIONS
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in all_)
    ]
    if numbers and _builds(config, data, numbers):  # the usual case
        return tuple(numbers)
    found: list[str] = []
    for key in numbers:  # added one by one: two keys that can each be traced alone may fail together
        if _builds(config, data, [*found, key]):
            found.append(key)
    return tuple(found)


def _builds(config: Config, data: FederatedData, keys: Sequence[str]) -> bool:
    def attempt(values: Any) -> Any:
        experiment = assemble(with_traced(config, dict(zip(keys, values, strict=True))), data)
        message_shapes(experiment.algorithm, experiment.params, data_shapes(data))
        return values

    try:
        jax.eval_shape(attempt, [jnp.zeros(()) for _ in keys])
    except Exception as error:
        if _needs_value(error):
            return False
        raise
    return True


def _needs_value(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that a traced value must be static."""
    while error is not None:
        if isinstance(error, STATIC):
            return True
        error = error.__cause__
    return False


def measured(experiment: Experiment, data: FederatedData, prefix: str) -> tuple[list[str], list[str]]:
    """The names of the evaluated metrics and of the metrics that clients report, without running anything.

    >>> from fedbraid.experiment import build
    >>> experiment = build(Config())
    >>> measured(experiment, experiment.data, "test_")
    (['test_accuracy', 'test_loss'], ['train/loss'])

    Columns of the clients' own models, such as ``test_personal_accuracy``, are among them if the method has any.
    """
    alg, params, clients = experiment.algorithm, experiment.shapes, data_shapes(data)
    key = jax.eval_shape(lambda: jax.random.key(0))
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    logged = []
    for exchange in alg.exchanges:
        report = jax.eval_shape(exchange.client, jax.eval_shape(exchange.send, server), state, clients, key)
        logged += [f"{exchange.name}/{name}" for name in report.metrics]
    batch = jax.eval_shape(lambda data: data.rows(jnp.zeros(1, jnp.int32), jnp.ones(1, bool)), clients)
    names = list(jax.eval_shape(experiment.metrics, params, batch))
    split = data.validation if prefix == "validation_" else data.test
    if has_own_models(alg, data, split):
        names += [PERSONAL + name for name in names]
    return [prefix + name for name in names], logged


def brief_init(experiment: Experiment, options: Mapping[str, Any] = BRIEF) -> Callable[[Any], Any]:
    """The model's ``key -> params`` as one program that compiles fast; with `BRIEF` it gives the same parameters."""
    return captured.jit(experiment.model.init, compiler_options=brief_options(options))


def points_program(
    config: Config,
    data: FederatedData,
    keys: Sequence[str],
    *,
    points: int,
    seeds: Sequence[int],
    test: Split | None = None,
    prefix: str = "test_",
    most: int | None = None,
    swap: Callable[[Callable, Mapping[str, Any]], Algorithm] | None = None,
    statistics: bool = True,
    brief: bool = False,
) -> Points:
    """The programs of points that differ only in the values of ``keys``.

    config: a configuration with valid values for all keys (those of the first point).
    points: the number of points; at most ``most`` run at a time, fewer if they do not fit into memory.
    test: the split that is evaluated, under names that begin with ``prefix``.
    swap: makes an algorithm from the loss and the (traced) options, for an algorithm that a configuration cannot name.
        It replaces the one that the configuration names, and must have the same exchanges and messages.
    statistics: evaluate the statistics over clients too.
    brief: the programs run for a short time (see `fedbraid.lowering.compiler`).
    """

    def build(values: Mapping[str, Any], data: FederatedData) -> PointTask:
        experiment = assemble(with_traced(config, values), data)
        algorithm = experiment.algorithm
        if swap is not None:
            algorithm = swap(experiment.loss, experiment.config.algorithm.options)
        task = Task(algorithm, data, experiment.arrival, experiment.timing)
        init = brief_init(experiment) if brief else experiment.model.init
        return PointTask(task, experiment.metrics, lambda seed: init(address.init_key(seed)))

    cohort = data.train.num_clients if config.cohort == "all" else config.cohort
    study = Study(build, tuple(keys), {}, data, test, prefix, statistics)
    schedule = Schedule(config.rounds, config.evaluation.every)
    try:
        return Points(study, config.engine, schedule, cohort=cohort, points=points, seeds=seeds, most=most, brief=brief)
    except PointsError as error:
        raise ConfigError(str(error)) from None
