"""What the leaderboard measures: the federations, the methods with their grids, and the rules that are equal for all.

Every method gets the same budget: `POINTS` settings, all run with one tuning seed on validation data. The best setting
is tested with `TEST_SEEDS` other seeds. Data and models are those of `benchmarks/advice`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "advice")]  # record.py; federations.py and prepare.py

POINTS = 18  # settings that each method may try
TEST_SEEDS = 3
EVERY = 2  # rounds between evaluations
LAST = 20  # rounds at the end over which the score is averaged


@dataclass(frozen=True)
class Federation:
    """A federation of `benchmarks/advice` on the leaderboard.

    metric: on the test split. clients: number and origin of the clients, for the page. target: of the metric, for the
    rounds to it. It was set before the methods were compared, a little below what tuned FedAvg reaches.
    """

    name: str
    metric: str
    task: str
    clients: str
    target: float
    rounds: int = 100


FEDERATIONS = (
    Federation("digits-mlp", "accuracy", "10 digits, MLP", "50, labels by Dirichlet 0.1", 0.9),
    Federation("chem97", "squared_error", "chemistry marks, least squares", "200 schools", 0.55, 150),
    Federation("femnist-cnn", "accuracy", "10 handwritten digits, CNN", "60 writers", 0.75, 150),
    Federation("synthetic-strong", "accuracy", "Synthetic(1, 1), softmax regression", "40, each its own model", 0.72),
    Federation("nafld2", "accuracy", "cholesterol, logistic regression", "200 patients", 0.83, 150),
    Federation("breast-cancer", "accuracy", "tumours, logistic regression", "12 (all), labels by Dirichlet 0.3", 0.97),
    Federation("shakespeare-b", "accuracy", "next character, LSTM", "60 roles", 0.33),
    Federation("diamonds", "squared_error", "prices, least squares", "15 (all), sorted by depth", 0.066),
)
"""In the order in which cells run, so that a run that is cut off has whole rows of different kinds."""


@dataclass(frozen=True)
class Method:
    """An algorithm with fixed options and the grid of `POINTS` settings that it is tuned over.

    local: how its clients work: "batches" (the federation's batch size and epochs); "steps" and "solver" (its batch
    size, and the local steps of a client of mean size, for methods that need the same number on all clients); "full"
    (that number of steps, with all examples); or "own" (the method's defaults).
    """

    name: str
    over: dict[str, str | list[float]]
    options: dict[str, Any] = field(default_factory=dict)
    local: str = "batches"


RATES, WIDE = "logspace(-2.4, 1, 18)", "logspace(-1.4, 2, 18)"  # of local steps; of one step a round
SIX, SIX_WIDE = "logspace(-1.5, 1, 6)", "logspace(-0.5, 2, 6)"
ONE_RATE = {"client_lr": RATES}
MOMENTUM = {"base": "momentum"}


def _two(name: str, values: list[float], rates: str = SIX, rate: str = "client_lr") -> dict[str, str | list[float]]:
    return {rate: rates, name: values}


METHODS = (
    Method("fedavg", ONE_RATE),
    Method("scaffold", ONE_RATE),
    Method("fedavgm", _two("server_lr", [0.1, 0.3, 1.0])),
    Method("fedadam", _two("server_lr", [0.01, 0.05, 0.25])),
    Method("fedprox", _two("alpha", [0.01, 0.1, 1.0])),
    Method("mimelite", ONE_RATE, MOMENTUM),
    Method("mime", ONE_RATE, MOMENTUM),
    Method("feddyn", _two("alpha", [0.01, 0.1, 1.0])),
    Method("fednova", ONE_RATE),
    Method("fedyogi", _two("server_lr", [0.01, 0.05, 0.25])),
    Method("fedadagrad", _two("server_lr", [0.05, 0.25, 1.0])),
    Method("fedauto", {"caution": [0.1, 0.2, 0.35, 0.5, 0.75, 1.0], "server_lr": [1.0, 2.5, 5.0]}),
    Method("fedauto_ahead", {"caution": [0.1, 0.2, 0.35, 0.5, 0.75, 1.0], "server_lr": [0.5, 1.0, 2.0]}),
    Method("fedexp", ONE_RATE),
    Method("fedcm", _two("alpha", [0.05, 0.1, 0.3])),
    Method("fedsam", _two("rho", [0.01, 0.05, 0.2])),
    Method("mofedsam", _two("rho", [0.01, 0.05, 0.2])),
    Method("fedacg", _two("lam", [0.5, 0.7, 0.85])),
    Method("feddc", _two("alpha", [0.01, 0.1, 1.0])),
    Method("fedspeed", _two("lam", [1.0, 10.0, 100.0])),
    Method("diloco", _two("server_lr", [0.3, 0.7, 1.0], "logspace(-3.5, -1, 6)")),
    Method("minibatch_sgd", {"lr": WIDE}),
    Method("fedsgd", {"server_lr": RATES}),
    Method("fedac", _two("strong_convexity", [0.01, 0.03, 0.1], "logspace(-2, 0.5, 6)"), local="steps"),
    Method(
        "fedsplit", _two("prox_lr", [0.03, 0.1, 0.3], SIX, "step"), {"prox": "stochastic", "prox_lr": 0.1}, "solver"
    ),
    Method("q_fedavg", _two("q", [0.1, 1.0, 5.0])),
    Method("feddog", {"initial": "logspace(-6, -0.9, 18)"}),
    Method("delta_sgd", _two("delta", [0.01, 0.1, 1.0])),
    Method("fedhyper", ONE_RATE),
    Method("locmime", ONE_RATE, MOMENTUM),
    Method("mime_mvr", _two("a", [0.03, 0.1, 0.3])),
    Method("mimelite_mvr", _two("a", [0.03, 0.1, 0.3])),
    Method("server_only", {"lr": WIDE}, MOMENTUM, "own"),
    Method("server_only_mvr", _two("a", [0.03, 0.1, 0.3], SIX_WIDE, "lr"), local="own"),
    Method("fedgd", {"step": RATES}, local="full"),
    Method("fedprox_exact", {"step": "logspace(-2, 1.4, 18)"}, {"prox": "backtracking", "local_steps": 4}, "own"),
    Method("afl", _two("lambda_lr", [0.01, 0.1, 1.0], SIX_WIDE, "lr"), local="own"),
)
"""In the order in which cells run: the most used first."""

LEFT_OUT = {
    "fedopt": "fedavg with any optimizers: fedavgm, fedadam, fedyogi, fedadagrad and diloco are its usual choices",
    "local_update": "the family of which fedavg, fedprox, fedsgd and others are members",
    "lookahead": "for a single client",
    "reptile": "fedavg with equal weights, for models that clients adapt",
    "meta_minibatch_prox": "fedprox with equal weights, for models that clients adapt",
    "fomaml": "its model is meant to be adapted by each client",
    "maml": "its model is meant to be adapted by each client",
    "flexlora": "for adapters of frozen models",
    "fedbn": "keeps batch normalisation on the clients",
    "fedrod": "has a personal head on every client",
    "fedproto": "personal models",
    "local_only": "no global model",
    "moon": "needs a network with a layer of features",
    "pfnm": "for networks with one hidden layer and few rounds",
}
"""Algorithms of the library that the leaderboard does not measure, with the reason."""

BY_FEDERATION = {federation.name: federation for federation in FEDERATIONS}
BY_METHOD = {method.name: method for method in METHODS}


def cells() -> list[tuple[str, str]]:
    """All cells, in the order in which they run: for every method of the installed library all federations."""
    from fedbraid.algorithms import ALGORITHMS

    methods = [method.name for method in METHODS if method.name in ALGORITHMS]
    return [(federation.name, name) for name in methods for federation in FEDERATIONS]


def comparison_tree(federation: str, method: str, data: Path, *, rounds: int | None = None) -> dict[str, Any]:
    """The cell as a comparison of one method, as `fedbraid compare` reads it from a TOML file."""
    from federations import config_tree

    how, settings = BY_METHOD[method], BY_FEDERATION[federation]
    tree = config_tree(federation, data)
    return tree | {
        "rounds": rounds or settings.rounds,
        "algorithm": {},
        "engine": {"devices": 1},
        "evaluation": {"every": EVERY},
        "methods": [{"name": method, **how.options, **_local(federation, how, data), "over": how.over}],
        "compare": {
            "metric": settings.metric,
            "target": settings.target,
            "seeds": TEST_SEEDS,
            "last": LAST,
            "drift": 0,
            "baselines": [],
        },
        "sweep": {"seeds": 1},
    }


def _local(federation: str, method: Method, data: Path) -> dict[str, Any]:
    """The options of the clients' work."""
    from federations import BY_NAME, load

    epochs, batch = (BY_NAME[federation].local[key] for key in ("epochs", "batch_size"))
    if method.local == "own":
        return {}
    if method.local == "batches":
        return {"batch_size": batch} if method.name == "minibatch_sgd" else {"batch_size": batch, "epochs": epochs}
    mean = float(load(which=federation, folder=str(data)).train.sizes.mean())
    steps = max(1, round(mean * epochs / batch))
    if method.local == "steps":
        return {"batch_size": batch, "steps": steps}
    return {"local_steps": steps} | ({} if method.local == "full" else {"batch_size": batch})
