"""Whether an assembled run can work, before anything is allocated: its memory, and its deadline for uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedbraid.costs import cost, nbytes
from fedbraid.experiment.config import ConfigError
from fedbraid.local import LocalWork
from fedbraid.notices import notice
from fedbraid.simulation.devices import total_memory
from fedbraid.simulation.program import Task
from fedbraid.simulation.timeline import Timeline
from fedbraid.simulation.timing import check_timing
from fedbraid.units import format_bytes

if TYPE_CHECKING:
    from fedbraid.experiment.assembly import Experiment

__all__ = ["check_experiment_timing", "check_feasible"]

FEW = 1e-3  # a share of uploads
DRAWS = 20_000


def check_feasible(experiment: Experiment) -> None:
    """Refuse a run that cannot fit in memory, with the arithmetic; say it if a deadline loses almost every upload."""
    _check_memory(experiment)
    _check_deadline(experiment)
    check_experiment_timing(experiment)


def check_experiment_timing(experiment: Experiment) -> None:
    """Refuse an algorithm or an arrival model that does not fit [clock] and [asynchrony]."""
    task = Task(experiment.algorithm, experiment.data, experiment.arrival, experiment.timing)
    try:
        check_timing(task, experiment.shapes)
        if task.timing is not None:  # refuses a trace that cannot be read
            traffic = cost(experiment.algorithm, experiment.shapes, experiment.data)
            Timeline(task.timing, 0, task.algorithm.exchanges, experiment.data.train, traffic)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_memory(experiment: Experiment) -> None:
    config, device = experiment.config, jax.local_devices()[0]
    model, room = nbytes(experiment.shapes), total_memory(device)
    where = "this machine" if device.platform == "cpu" else f"the device {device.device_kind}"
    if 2 * model > room:  # before init_client is looked at: its states are often as large as the model
        raise ConfigError(
            f"model {config.model.name!r} has {_parameters(experiment.shapes):,} parameters, {format_bytes(model)}; "
            f"the server's model and one client's need {format_bytes(2 * model)}, and {where} has "
            f"{format_bytes(room)}: use a smaller model"
        )
    states, population = nbytes(jax.eval_shape(experiment.algorithm.init_client, experiment.shapes)), 0
    if config.engine.states_in in ("device", "host"):
        population = experiment.description.population
    room = room if config.engine.states_in == "device" else total_memory(jax.local_devices(backend="cpu")[0])
    if states * population > room:
        raise ConfigError(
            f"engine.states_in = {config.engine.states_in!r}: {population:,} clients keep {format_bytes(states)} each, "
            f"{format_bytes(states * population)}, and there are {format_bytes(room)}: name a folder on a large disk, "
            "or use a method without client states"
        )


def _parameters(shapes: Any) -> int:
    return sum(int(np.prod(leaf.shape, dtype=object)) for leaf in jax.tree.leaves(shapes))


def _check_deadline(experiment: Experiment) -> None:
    """Draw the arrival times of the client with the fewest steps."""
    given = experiment.config.arrival
    if given.deadline is None or experiment.examples is None:
        return
    smallest = int(experiment.examples.train.sizes.min())
    counts = [e.client.count(smallest) for e in experiment.algorithm.exchanges if isinstance(e.client, LocalWork)]
    steps = min((int(count) for count in counts), default=1)
    slow, late = np.exp(given.latency_sigma * np.random.default_rng(0).standard_normal((2, DRAWS)))
    seconds = steps * given.seconds_per_step * slow + given.latency_median * late
    if np.mean(seconds <= given.deadline) < FEW:
        notice(
            f"arrival.deadline = {given.deadline:g}: fewer than 1 in {1 / FEW:,.0f} uploads arrive in time, so the "
            f"model will hardly change. The smallest client has {steps} local steps of {given.seconds_per_step:g} s "
            f"and a latency of {given.latency_median:g} s, {np.median(seconds):.3g} s in the median: set a longer one"
        )
