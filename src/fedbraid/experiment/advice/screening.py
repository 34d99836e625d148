"""What the constants of the data say before a pilot: where to look for rates, and which methods cannot pay.

The constants hold at the initial model only. Tuned rates were up to 160 times 1 / L there, so they give a centre for
the search and reasons, and the race decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedbraid import address
from fedbraid.experiment.advice.candidates import CLIENT_RATES, Method, configured, on_lattice
from fedbraid.experiment.assembly import Experiment
from fedbraid.experiment.diagnosis.advice import error_terms
from fedbraid.experiment.diagnosis.measurement import evaluation_loss, settings_of
from fedbraid.experiment.points import brief_init
from fedbraid.lowering.compiler import ONCE, brief_options
from fedbraid.theory.constants import Constants, Hessians, estimate

__all__ = ["Screening", "screen"]

CLIENTS = 8
CHEAP = Hessians(clients=2, compared=1, examples=100)
LARGE = 200_000  # parameters; for larger models curvatures take too long, and only gradients are computed
VISITS = 2.0  # SCAFFOLD needs each client at least this often
SHARE = 0.05  # of the way to the minimum along the steepest direction; a rate that cannot go so far is hopeless


class Screening(NamedTuple):
    """The centre and the smallest of the client rates, the methods that stay, and sentences that say why."""

    centre: float
    least: float
    methods: tuple[Method, ...]
    sentences: tuple[str, ...]


def screen(experiment: Experiment, methods: Sequence[Method]) -> Screening:
    """Look at the data of an assembled experiment and choose where a pilot starts."""
    config, split = experiment.config, experiment.data.train
    settings = settings_of(config, split)
    rates = dict(configured(config).rates)
    own = next((rates[name] for name in CLIENT_RATES if name in rates), 0.1)
    found, said = _constants(experiment, settings.batch_size)
    centre, least = on_lattice(own), 0.0
    if found is not None and math.isfinite(found.L_client_mean.value) and found.L_client_mean.value > 0:
        curvature = found.L_client_mean.value
        centre = on_lattice(1 / curvature)
        least = SHARE / (curvature * max(settings.steps, 1.0) * config.rounds)
        said.append(
            f"Clients have a curvature of L = {curvature:.3g} at the initial model. The search for client rates starts "
            f"around 1 / L = {centre:.3g}; rates below {least:.2g} hardly move the model in {config.rounds} rounds."
        )
    if found is not None:
        terms = error_terms(found, settings._replace(client_lr=centre))
        dominant = max(terms, key=lambda name: terms[name])
        if terms[dominant] > 0:
            said.append(
                f"At that rate {dominant} is the largest error of a round "
                f"({', '.join(f'{name} {value:.2g}' for name, value in terms.items())})."
            )
    kept, why = _can_pay(methods, experiment, settings.steps)
    return Screening(centre, least, kept, (*said, *why))


def _constants(experiment: Experiment, batch_size: int | None) -> tuple[Constants | None, list[str]]:
    """The constants at the initial model; None with the reason if they cannot be computed there."""
    size = sum(int(np.prod(leaf.shape)) for leaf in _leaves(experiment.shapes))
    try:
        found = estimate(
            evaluation_loss(experiment),
            brief_init(experiment, ONCE)(address.init_key(experiment.config.seed)),
            experiment.data.train,
            clients=CLIENTS,
            batch_size=batch_size,
            hessians=CHEAP if size <= LARGE else None,
            seed=experiment.config.seed,
            compiler_options=brief_options(ONCE),
        )
    except ValueError as error:
        return None, [f"The constants of the data were not computed: {error}."]
    return found, []


def _leaves(tree: object) -> list:
    import jax

    return jax.tree.leaves(tree)


def _can_pay(methods: Sequence[Method], experiment: Experiment, steps: float) -> tuple[tuple[Method, ...], list[str]]:
    """The methods that can differ from FedAvg here; the configured one stays in any case."""
    config, clients = experiment.config, experiment.data.train.num_clients
    cohort = clients if config.cohort == "all" else config.cohort
    visits = config.rounds * cohort / clients
    kept, why = [], []
    for method in methods:
        reason = ""
        if method.against == "drift" and clients == 1:
            reason = "there is one client, so there is no drift between clients"
        elif method.name == "fedprox" and steps <= 1:
            reason = "with one local step the proximal term is zero, so it is FedAvg"
        elif method.name == "scaffold" and visits < VISITS:
            reason = f"a client takes part about {visits:.2g} times, too rarely for its control variates"
        if reason and method.name != config.algorithm.name:
            why.append(f"{method.name} is left out: {reason}.")
        else:
            kept.append(method)
    return tuple(kept), why
