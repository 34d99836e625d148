"""The federations of the benchmark: 16 for design, 35 that were held out for earlier versions, 14 held out.

The split is fixed here. Methods, defaults and rules are designed on the design federations only; the held-out ones are
measured once, at the end. (Of those for design, 8, 12, 12 and 11 were held out for earlier versions of `fedbraid
advise`.)

`prepare.py` writes one NPZ file per federation; `load` reads it. A configuration can name `load` and `small_cnn` as
``federations:load`` and ``federations:small_cnn`` (see `config_tree`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedbraid as fb
from fedbraid.lowering.operations import conv_relu, dense
from fedbraid.models.layers import as_floats, conv_init, dense_init
from fedbraid.models.model import Model, head, supervised

HERE = Path(__file__).resolve().parent
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Federation:
    """One federation and the run that is configured for it.

    half: "design"; "second", "third" or "fourth" (held out for earlier versions, now for design); or "held out".
    kind: source and heterogeneity, for the table.
    local: options of the local work, which every reference method uses as they are.
    rounds: rounds of the reference runs. Evaluations are after every round.
    """

    name: str
    half: str
    kind: str
    model: str
    cohort: int | str
    rounds: int = 200
    options: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=lambda: {"batch_size": 10, "epochs": 1})


LINE = {"intercept": True}
SCORE = {"score": "values"}
CNN = "federations:small_cnn"
TWO = {"batch_size": 10, "epochs": 2}
TWENTY = {"batch_size": 20, "epochs": 1}

FEDERATIONS = (
    Federation("chem97", "design", "natural: schools", "least_squares", 10, options=LINE),
    Federation("nafld2", "design", "natural: patients", "logistic", 10, options=LINE),
    Federation("synthetic-weak", "design", "weak heterogeneity, size skew", "softmax_regression", 6),
    Federation("skewed-squares", "design", "strong heterogeneity, feature skew", "least_squares", 5, local=TWO),
    Federation("breast-cancer", "design", "label skew, all clients", "logistic", "all", options=LINE),
    Federation("digits-mlp", "design", "label skew", "mlp", 6, 150, {"hidden": [32]}, TWO),
    Federation("femnist-cnn", "design", "natural: writers", CNN, 5, 120),
    Federation("shakespeare-a", "design", "natural: roles", "char_lstm", 5, 120, {"hidden": 24}),
    Federation("insteval", "design", "natural: students", "least_squares", 10, options=LINE),
    Federation("movielens", "design", "natural: users", "logistic", 8, options=LINE),
    Federation("synthetic-strong", "design", "strong heterogeneity, size skew", "softmax_regression", 6),
    Federation("size-skew", "design", "weak heterogeneity, size skew", "logistic", 8, options=LINE),
    Federation("diamonds", "design", "feature skew, all clients", "least_squares", "all", options=LINE),
    Federation("flights-mlp", "design", "natural: carriers, all clients", "mlp", "all", 150, {"hidden": [16]}),
    Federation("digits-cnn", "design", "feature skew", CNN, 5, 120),
    Federation("shakespeare-b", "design", "natural: roles", "char_lstm", 8, 120, {"hidden": 16}, TWO),
    Federation("exam", "second", "natural: schools", "least_squares", 6, options=LINE, local=TWENTY),
    Federation("gapminder", "second", "natural: countries", "least_squares", 10, options=LINE, local=TWENTY),
    Federation("ames", "second", "natural: neighbourhoods, all clients", "least_squares", "all", options=LINE),
    Federation("verbagg", "second", "natural: persons", "logistic", 8, options=LINE),
    Federation("cells", "second", "label skew", "logistic", 5, options=LINE, local=TWO),
    Federation("storms", "second", "natural: storms", "softmax_regression", 8),
    Federation("digits-softmax", "second", "strong label and size skew", "softmax_regression", 8),
    Federation("leaves-mlp", "second", "label skew", "mlp", 6, 150, {"hidden": [24]}),
    Federation("jobs-mlp", "second", "natural: protocols", "mlp", 8, 150, {"hidden": [16]}),
    Federation("patterns-cnn", "second", "feature and label skew", CNN, 6, 120),
    Federation("letters-cnn", "second", "natural: writers", CNN, 6, 120),
    Federation("tweets-lstm", "second", "natural: months", "char_lstm", 6, 120, {"hidden": 16}),
    Federation("star", "third", "natural: schools", "least_squares", 8, options=LINE, local=TWENTY),
    Federation("wages", "third", "natural: persons", "least_squares", 10, options=LINE),
    Federation("houses", "third", "natural: cities", "least_squares", 8, options=LINE, local=TWENTY),
    Federation("credit", "third", "label skew", "logistic", 5, options=LINE, local=TWO),
    Federation("spam", "third", "size skew", "logistic", 6, options=LINE),
    Federation("rodents", "third", "natural: plots, all clients", "softmax_regression", "all", local=TWENTY),
    Federation("pitches", "third", "natural: games", "softmax_regression", 6),
    Federation("films-mlp", "third", "natural: years", "mlp", 6, 150, {"hidden": [24]}),
    Federation("deliveries-mlp", "third", "natural: hours", "mlp", 6, 150, {**SCORE, "hidden": [16]}),
    Federation("fashion-cnn", "third", "label skew", CNN, 6, 120),
    Federation("mnist-cnn", "third", "natural: writers", CNN, 6, 120),
    Federation("courses-lstm", "third", "natural: subjects", "char_lstm", 6, 120, {"hidden": 16}),
    Federation("pupils", "fourth", "natural: schools", "least_squares", 6, options=LINE, local=TWENTY),
    Federation("hotels", "fourth", "natural: agents", "least_squares", 8, options=LINE),
    Federation("churn", "fourth", "natural: states", "logistic", 6, options=LINE),
    Federation("stops", "fourth", "natural: neighbourhoods, size skew", "logistic", 8, options=LINE),
    Federation("birds", "fourth", "natural: states", "softmax_regression", 8),
    Federation("synthetic-medium", "fourth", "medium heterogeneity", "softmax_regression", 6, local=TWO),
    Federation("weather-mlp", "fourth", "natural: months, all clients", "mlp", "all", 150, {**SCORE, "hidden": [16]}),
    Federation("software-mlp", "fourth", "size skew", "mlp", 6, 150, {"hidden": [24]}),
    Federation("small-letters-cnn", "fourth", "natural: writers", CNN, 6, 120),
    Federation("strokes-cnn", "fourth", "feature and label skew", CNN, 5, 120, local=TWO),
    Federation("addresses-lstm", "fourth", "natural: addresses", "char_lstm", 6, 120, {"hidden": 16}),
    Federation("crime", "held out", "natural: states", "least_squares", 6, options=LINE),
    Federation("households", "held out", "natural: communes", "least_squares", 10, options=LINE, local=TWENTY),
    Federation("fares", "held out", "feature skew", "least_squares", 8, options=LINE, local=TWO),
    Federation("staff", "held out", "label skew", "logistic", 5, options=LINE, local=TWO),
    Federation("votes", "held out", "natural: states, size skew", "logistic", 8, options=LINE),
    Federation("villages", "held out", "natural: villages", "logistic", 10, options=LINE),
    Federation("crackers", "held out", "natural: households", "softmax_regression", 8),
    Federation("players", "held out", "natural: teams, all clients", "softmax_regression", "all", local=TWENTY),
    Federation("clouds", "held out", "feature and label skew", "softmax_regression", 6, local=TWO),
    Federation("infusions-mlp", "held out", "natural: patients", "mlp", 6, 150, {**SCORE, "hidden": [16]}),
    Federation("loans-mlp", "held out", "natural: states", "mlp", 8, 150, {"hidden": [24]}, TWENTY),
    Federation("characters-cnn", "held out", "natural: writers", CNN, 8, 120),
    Federation("shapes-cnn", "held out", "feature skew", CNN, 5, 120),
    Federation("titles-lstm", "held out", "natural: artists", "char_lstm", 6, 120, {"hidden": 20}),
)
BY_NAME = {federation.name: federation for federation in FEDERATIONS}


def of_half(half: str) -> list[str]:
    """Names of the federations of a half."""
    return [federation.name for federation in FEDERATIONS if federation.half == half]


@fb.factory("model")
def small_cnn(example_shapes: Any, num_classes: int, *, channels: tuple[int, int] = (8, 16)) -> Model:
    """Conv 3x3, ReLU, pool 2, conv 3x3, ReLU, pool 2 where it fits, dense: small enough for one core."""
    height, width = example_shapes["x"]
    last, again = head("classes", num_classes), min(height, width) >= 10
    rows, cols = ((side - 2) // 2 - 2 for side in (height, width))
    rows, cols = (rows // 2, cols // 2) if again else (rows, cols)

    def init(key: Any) -> Any:
        first, second, third = jax.random.split(key, 3)
        return {
            "conv1": conv_init(first, (3, 3), 1, channels[0]),
            "conv2": conv_init(second, (3, 3), channels[0], channels[1]),
            "dense": dense_init(third, rows * cols * channels[1], num_classes),
        }

    def apply(params: Any, x: Any, key: Any) -> Any:
        x = as_floats(x, (height, width, 1))
        x = conv_relu(params["conv2"], conv_relu(params["conv1"], x, pool=True), pool=again)
        return last.shape(dense(params["dense"], x.reshape(x.shape[0], -1)))

    return supervised(init, apply, last.score, targets=last.targets)


@fb.factory("dataset")
def load(*, which: str, folder: str) -> fb.FederatedData:
    """A federation that `prepare.py` wrote, with a train, a validation and a test split of the same clients."""
    from fedbraid.data.preprocess import Pipeline

    path = Path(folder) / f"{which}.npz"
    if not path.exists():
        raise ValueError(f"there is no {path}; write it with: python benchmarks/advice prepare --data {folder}")
    with np.load(path, allow_pickle=False) as stored:
        info = json.loads(str(stored["info"]))
        splits = {
            split: fb.Split({f: stored[f"{split}_{f}"] for f in ("x", "y")}, stored[f"{split}_offsets"])
            for split in SPLITS
        }
    steps = info.pop("preprocess", None)
    prepare = Pipeline.of(*steps) if steps else None
    return fb.FederatedData(splits["train"], splits["test"], which, info, prepare, validation=splits["validation"])


def config_tree(name: str, folder: Path) -> dict[str, Any]:
    """The federation as a configuration of fedbraid: default FedAvg with the federation's local work."""
    federation = BY_NAME[name]
    return {
        "rounds": federation.rounds,
        "cohort": federation.cohort,
        "data": {"name": "federations:load", "which": name, "folder": str(folder.resolve())},
        "model": {"name": federation.model, **federation.options},
        "algorithm": {"name": "fedavg", **federation.local},
        "evaluation": {"every": 1},
        "modules": str(HERE),
    }
