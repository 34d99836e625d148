"""Client drift of the first rounds, with every local step recorded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedbraid import address
from fedbraid.data.federated import FederatedData
from fedbraid.experiment.assembly import assemble
from fedbraid.experiment.config import Config
from fedbraid.local import LocalWork
from fedbraid.simulation.shadow import trace_shadow

__all__ = ["trace_drift"]

MOST_NUMBERS = 20_000_000  # largest size of a trace of the shadow sequence


def trace_drift(config: Config, data: FederatedData, rounds: int) -> dict[str, Any]:
    """The clients' mean squared distance from their mean (the shadow sequence), by round and local step.

    If it cannot be traced, the result has only the reason, ``why``.
    """
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
