"""Training with LocalUpdate as in the paper's appendices: ten clients per round, K local steps each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fedbraid.algorithms import local_update
from fedbraid.algorithms.server_optimizers import momentum
from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData
from fedbraid.experiment.config import parse
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.training import Swap, train

PAPER = "Charles and Konecny, Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning"
BETA = 0.9
RATES = tuple(10.0 ** (k / 2) for k in range(-6, 3))  # appendices E.3 and F: 1e-3 to 10


def server_momentum(kind: str) -> Swap | None:
    """LocalUpdate with a server optimizer that a configuration cannot name; "none" is gradient descent."""
    if kind == "none":
        return None

    def swap(loss: Callable, options: Mapping[str, Any]) -> Algorithm:
        rest = {k: v for k, v in options.items() if k != "server_lr"}
        opt = momentum(options["server_lr"], BETA, kind="nesterov" if kind == "nesterov" else "heavy-ball")
        return local_update(loss, server_opt=opt, **rest)

    return swap


class Task(NamedTuple):
    """A data set, the model, and options of LocalUpdate for both; ``words`` describe them for the page."""

    data: str
    model: Mapping[str, Any]
    local: Mapping[str, Any]
    words: str = ""

    def load(self, job: Job, *, on_train: bool = False) -> FederatedData:
        """The clients that have training data; ``on_train`` evaluates on those data instead of the test data."""
        from fedbraid.data.catalog import load

        data = replace(load(self.data, path=str(job.path_of(self.data))), unseen=None)
        return replace(data, test=data.train) if on_train else data


MLP = Task("femnist", {"name": "mlp", "hidden": [100]}, {"batch_size": 20})
EQUAL_WEIGHTS = {"weighting": "uniform"}  # the server takes the unweighted mean of the messages: Algorithm 1
CNN = Task(
    "femnist",
    {"name": "emnist_cnn"},
    {"batch_size": 20, **EQUAL_WEIGHTS},
    "FEMNIST, 300 writers; convolutional network with dropout, 1,206,590 weights; batches of 20, 10 clients per round "
    "with equal weights",
)
LSTM = Task(
    "shakespeare",
    {"name": "char_lstm", "layers": 2, "compute": "bfloat16"},
    {"batch_size": 4, **EQUAL_WEIGHTS},
    "The complete federated Shakespeare of TFF: 715 roles, 16,068 snippets in 37,784 windows of 80 characters; two "
    "LSTM layers of 256 units, embedding 8, 820,522 weights; batches of 4, 10 clients per round with equal weights",
)


def run_grid(
    name: str,
    data: FederatedData,
    job: Job,
    *,
    task: Task,
    gammas: Sequence[float],
    rates: Sequence[float],
    steps: int,
    rounds: int,
    every: int,
    alpha: float = 0.0,
    server: str = "none",
    cohort: int | str = 10,
    marks: Collection[int] = (),
    piece: int | None = None,
) -> dict[str, Any]:
    """LocalUpdate with Theta_{1:K} at every client rate gamma and server rate eta, as one program.

    ``marks`` are rounds after which to evaluate, in addition to every ``every``-th round. Unfinished runs are saved
    every ``piece`` rounds.
    """
    config = parse(
        {
            "rounds": rounds,
            "cohort": cohort,
            "model": dict(task.model),
            "evaluation": {"every": every},
            "algorithm": {"name": "local_update", "alpha": alpha, "steps": steps, **task.local},
        }
    )
    points = [{"algorithm.gamma": gamma, "algorithm.server_lr": eta} for gamma, eta in itertools.product(gammas, rates)]
    kept = {"work": job.work, "piece": piece, "tell": job.tell}
    return train(name, config, data, points, marks=marks, swap=server_momentum(server), **kept)


def chosen(result: Mapping[str, Any], point: int) -> str:
    """A point's rates in words."""
    values = result["points"][point]
    return f"gamma {values['algorithm.gamma']:.3g}, eta {values['algorithm.server_lr']:.3g}"
