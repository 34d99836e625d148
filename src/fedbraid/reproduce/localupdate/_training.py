"""Training with LocalUpdate as the paper's appendices do: ten clients a round, K local steps, batches of 20."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedbraid.algorithms import local_update
from fedbraid.algorithms.server_optimizers import momentum
from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData
from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.training import Swap, train

PAPER = "Charles and Konecny, Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning"
BETA = 0.9


def server_momentum(kind: str) -> Swap | None:
    """LocalUpdate under a server optimizer that a configuration cannot name; "none" is gradient descent."""
    if kind == "none":
        return None

    def swap(loss: Callable, options: Mapping[str, Any]) -> Algorithm:
        rest = {k: v for k, v in options.items() if k != "server_lr"}
        opt = momentum(options["server_lr"], BETA, kind="nesterov" if kind == "nesterov" else "heavy-ball")
        return local_update(loss, server_opt=opt, **rest)

    return swap


def femnist(job: Job, *, on_train: bool = False) -> FederatedData:
    """The writers that have training images; ``on_train`` evaluates on those instead of the test images."""
    from fedbraid.data.catalog import load

    data = replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)
    return replace(data, test=data.train) if on_train else data


def run_grid(
    name: str,
    data: FederatedData,
    job: Job,
    *,
    gammas: Sequence[float],
    rates: Sequence[float],
    steps: int,
    rounds: int,
    every: int,
    alpha: float = 0.0,
    server: str = "none",
    **changes: Any,
) -> dict[str, Any]:
    """LocalUpdate with Theta_{1:K} at every client rate gamma and server rate eta, as one program."""
    config = parse(
        {
            "rounds": rounds,
            "cohort": 10,
            "model": {"name": "mlp", "hidden": [100]},
            "evaluation": {"every": every},
            **changes,
            "algorithm": {"name": "local_update", "alpha": alpha, "steps": steps, "batch_size": 20},
        }
    )
    points = [{"algorithm.gamma": gamma, "algorithm.server_lr": eta} for gamma, eta in itertools.product(gammas, rates)]
    return train(name, config, data, points, work=job.work, swap=server_momentum(server), tell=job.tell)


def chosen(result: Mapping[str, Any], point: int) -> str:
    """A point's rates in words."""
    values = result["points"][point]
    return f"gamma {values['algorithm.gamma']:.3g}, eta {values['algorithm.server_lr']:.3g}"
