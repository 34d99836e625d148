"""Our methods beside those of PFLlib: the same split, the same initial models, the same settings.

    python benchmarks/pfllib.py split SPLIT_FOLDER
    python benchmarks/peers/pfllib_runner.py PFLLIB_CHECKOUT SPLIT_FOLDER --out theirs.json   # in PFLlib's environment
    python benchmarks/pfllib.py compare SPLIT_FOLDER theirs.json [--only NAME ...]

The split is the embedded digits over 20 clients with Dirichlet labels, in PFLlib's npz format. PFLlib drops the last,
smaller batch of an epoch, so the number of a client's training examples is a multiple of the batch size. Accuracy is
that of the models which PFLlib evaluates (each client's own, or the global one), over all clients' test examples.
Times are processor seconds, which do not depend on other load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbraid as fb
from fedbraid.algorithms._fedproto import closest_class
from fedbraid.data import digits, partition
from fedbraid.data.federated import Split
from fedbraid.models import Model, mlp

SETTINGS = {
    **{"clients": 20, "alpha": 0.3, "classes": 10, "d": 64, "hidden": 100, "batch_size": 10, "epochs": 1, "lr": 0.1},
    **{"rounds": 30, "seeds": 3},
    "methods": {  # PFLlib's options; the others have no effect or are equal for all
        "FedAvg": {},
        "FedPer": {},
        "Ditto": {"mu": 0.5, "plocal_epochs": 1},
        "FedRep": {"plocal_epochs": 1},
        "MOON": {"mu": 1.0, "tau": 0.5},
        "FedProto": {"lamda": 1.0},
        "SCAFFOLD": {},
        "FedProx": {"mu": 0.1},
        "Local": {},
        "LG_FedAvg": {},
        "FedALA": {"eta": 1.0, "rand_percent": 80, "layer_idx": 2},
    },
}

GLOBAL = ("FedAvg", "FedProx", "SCAFFOLD", "MOON")  # PFLlib scores the global model


def ours(name: str, settings: dict, model: Model) -> fb.Algorithm:
    """The same method with the same settings."""
    loss = model.loss
    local = {"client_lr": settings["lr"], "epochs": settings["epochs"], "batch_size": settings["batch_size"]}

    def features(params: Any, batch: dict) -> Any:
        assert model.features is not None
        return model.features(params, batch["x"])

    of = settings["methods"][name]
    methods: dict[str, Callable[[], fb.Algorithm]] = {
        "FedAvg": lambda: fb.fedavg(loss, **local),
        "FedProx": lambda: fb.fedprox(loss, alpha=of["mu"], **local),
        "SCAFFOLD": lambda: fb.scaffold(loss, **local),
        "MOON": lambda: fb.moon(loss, features, mu=of["mu"], tau=of["tau"], **local),
        "Local": lambda: fb.local_only(loss, **local),
        "FedPer": lambda: fb.fedper(loss, **local),
        "FedRep": lambda: fb.fedrep(loss, head_epochs=of["plocal_epochs"], **local),
        "LG_FedAvg": lambda: fb.lg_fedavg(loss, **local),
        "Ditto": lambda: fb.ditto(loss, lam=of["mu"], **local),
        "FedALA": lambda: fb.fedala(loss, layers="1", weight_lr=of["eta"], share=of["rand_percent"] / 100, **local),
        "FedProto": lambda: fb.fedproto(
            loss,
            features,
            settings["classes"],
            settings["hidden"],
            lam=of["lamda"],
            weighting="uniform",  # as PFLlib; the paper weighs by examples
            **local,
        ),
    }
    return methods[name]()


def write_split(folder: Path) -> None:
    """The digits in PFLlib's format: a quarter of every client's examples is its test data."""
    fields = digits.arrays()
    x, y = (fields["x"] / 16).astype(np.float32), fields["y"]
    rng = np.random.default_rng(0)
    size = SETTINGS["batch_size"]
    parts = partition.dirichlet(y, clients=SETTINGS["clients"], alpha=SETTINGS["alpha"], min_size=3 * size, seed=0)
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for i, rows in enumerate(parts):
        rows = rng.permutation(rows)
        train = int(0.75 * len(rows)) // size * size
        for part, some in (("train", rows[:train]), ("test", rows[train:])):
            own = {"x": x[some], "y": y[some]}
            np.savez_compressed(folder / part / f"{i}.npz", data=own, **own)  # PFLlib reads data, a pickle; we do not
    (folder / "settings.json").write_text(json.dumps(SETTINGS, indent=1))


def read_split(folder: Path, part: str, clients: int) -> Split:
    """A split that `write_split` wrote, from its plain arrays."""
    files = [np.load(folder / part / f"{i}.npz") for i in range(clients)]
    return Split.from_clients([{name: file[name] for name in ("x", "y")} for file in files])


def accuracy(name: str, alg: fb.Algorithm, model: Model, result: fb.simulation.Result, test: Split) -> float:
    """The share of all clients' test examples that the evaluated models classify correctly."""

    @jax.jit
    def classes(state: Any, x: Any) -> Any:
        params = alg.params(result.server)
        if name not in GLOBAL and alg.personal is not None:
            params = alg.personal(result.server, state)
        if name == "FedProto":
            assert model.features is not None
            return closest_class(result.server, model.features(params, x))
        return jnp.argmax(model.predict(params, x), -1)

    right = 0
    for i in range(test.num_clients):
        own = test.client(i)
        state = jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), result.states)
        right += int(np.sum(np.asarray(classes(state, own["x"])) == own["y"]))
    return right / test.num_examples


def run(name: str, settings: dict, folder: Path) -> tuple[list[float], float]:
    """Accuracies by seed, and the median processor seconds of a round."""
    model = mlp(settings["d"], settings["classes"], hidden=(settings["hidden"],))
    train, test = (read_split(folder, part, settings["clients"]) for part in ("train", "test"))
    alg, found, seconds = ours(name, settings, model), [], []
    for seed in range(settings["seeds"]):
        first = np.load(folder / f"initial-{seed}.npz")
        params = [
            {"w": jnp.asarray(first[f"{n}.weight"].T), "b": jnp.asarray(first[f"{n}.bias"])} for n in ("fc1", "fc")
        ]
        times: list[float] = []
        result = fb.simulate(
            alg,
            params,
            train,
            rounds=settings["rounds"],
            seed=seed,
            devices=1,
            on_progress=lambda progress, times=times: times.append(time.process_time()),
        )
        seconds.append(statistics.median(np.diff(times)))
        found.append(accuracy(name, alg, model, result, test))
    return found, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["split", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("theirs", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    if options.do == "split":
        write_split(options.folder)
        return
    if options.theirs is None:
        parser.error("compare needs the JSON file of benchmarks/peers/pfllib_runner.py")
    report = json.loads(options.theirs.read_text())
    settings = report["settings"]
    print("| method | PFLlib | fedbraid | difference | PFLlib, CPU ms a round | fedbraid, CPU ms a round |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.only or report["methods"]:
        theirs = report["methods"][name]
        mine, seconds = run(name, settings, options.folder)
        a, b = (100 * np.array(values) for values in (theirs["accuracy"], mine))
        more = int(len(b) > 1)  # one seed has no deviation
        print(
            f"| {name} | {a.mean():.2f} ({a.std(ddof=more):.2f}) | {b.mean():.2f} ({b.std(ddof=more):.2f}) | "
            f"{b.mean() - a.mean():+.2f} | {1000 * statistics.median(theirs['seconds']):.0f} | {1000 * seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
