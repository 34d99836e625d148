"""Runs methods of PFLlib with PFLlib's own code on a split that `benchmarks/pfllib.py split` wrote.

    python benchmarks/peers/pfllib_runner.py PFLLIB_CHECKOUT SPLIT_FOLDER --out theirs.json [--only NAME ...]

Needs an environment of its own with torch, torchvision, scikit-learn, h5py, ujson and matplotlib, not fedbraid. It
writes the accuracy after the last round and the seconds of a round without evaluation, for every method and seed, and
the initial models to SPLIT_FOLDER, so that the other side starts from the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

SPLIT_IN_TWO = ("FedAvg", "MOON", "FedProto", "FedPer", "FedRep", "LG_FedAvg", "FedROD")  # models with base and head
MODULES = {  # name of PFLlib's server class: its module
    "FedAvg": "serveravg",
    "FedProx": "serverprox",
    "SCAFFOLD": "serverscaffold",
    "Ditto": "serverditto",
    "pFedMe": "serverpFedMe",
    "MOON": "servermoon",
    "FedProto": "serverproto",
    "FedPer": "serverper",
    "FedRep": "serverrep",
    "LG_FedAvg": "serverlg",
    "FedALA": "serverala",
    "FedROD": "serverrod",
    "Local": "serverlocal",
}


class Perceptron(nn.Module):
    """One hidden layer. PFLlib's own DNN applies log_softmax to its features once it is split in two."""

    def __init__(self, d: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d, hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.fc1(torch.flatten(x, 1))))


def arguments(settings: dict, name: str) -> argparse.Namespace:
    """PFLlib's options: its defaults where they matter, and those of the settings."""
    shared = {
        "device": "cpu",
        "dataset": "compared",
        "num_classes": settings["classes"],
        "global_rounds": settings["rounds"],
        "local_epochs": settings["epochs"],
        "batch_size": settings["batch_size"],
        "local_learning_rate": settings["lr"],
        "num_clients": settings["clients"],
        "eval_gap": settings["rounds"],
        "algorithm": name,
    }
    defaults = {
        **{"join_ratio": 1.0, "random_join_ratio": False, "few_shot": 0, "time_select": False, "goal": "test"},
        **{"time_threthold": 10000, "save_folder_name": "items", "top_cnt": 100, "auto_break": False},
        **{"client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100},
        **{"batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "learning_rate_decay": False},
        **{"learning_rate_decay_gamma": 0.99, "server_learning_rate": 1.0, "feature_dim": settings["hidden"]},
    }
    return argparse.Namespace(**defaults, **shared, **settings["methods"][name])


def run(name: str, settings: dict, seed: int, model: nn.Module) -> tuple[float, float]:
    args = arguments(settings, name)
    args.model = copy.deepcopy(model)
    if name in SPLIT_IN_TWO:
        args.head = copy.deepcopy(args.model.fc)
        args.model.fc = nn.Identity()
        args.model = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit(args.model, args.head)
    server = getattr(importlib.import_module(f"flcore.servers.{MODULES[name]}"), name)(args, 0)
    server.save_results = server.save_global_model = lambda: None
    for reseed in (torch.manual_seed, np.random.seed, random.seed):  # every client of PFLlib sets torch's seed to 0
        reseed(seed)
    server.train()
    accuracies = getattr(server, "rs_test_acc_per", None) or server.rs_test_acc
    return accuracies[-1], statistics.median(server.Budget[1:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pfllib", type=Path)
    parser.add_argument("split", type=Path)
    parser.add_argument("--out", type=Path, default=Path("theirs.json"))
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    split, out = options.split.resolve(), options.out.resolve()
    settings = json.loads((split / "settings.json").read_text())
    data = options.pfllib / "dataset" / "compared"
    shutil.rmtree(data, ignore_errors=True)
    for part in ("train", "test"):
        shutil.copytree(split / part, data / part)
    commit = subprocess.run(
        ["git", "-C", options.pfllib, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    os.chdir(options.pfllib / "system")
    sys.path.insert(0, ".")
    torch.set_num_threads(1)
    report = json.loads(out.read_text()) if out.exists() else {"methods": {}}
    report |= {"torch": torch.__version__, "numpy": np.__version__, "commit": commit, "settings": settings}
    for name in options.only or settings["methods"]:
        rows = []
        for seed in range(settings["seeds"]):
            torch.manual_seed(seed)
            model = Perceptron(settings["d"], settings["hidden"], settings["classes"])
            weights = {key: value.numpy() for key, value in model.state_dict().items()}
            np.savez(split / f"initial-{seed}.npz", **weights)
            with contextlib.redirect_stdout(io.StringIO()):
                rows.append(run(name, settings, seed, model))
        accuracy, seconds = zip(*rows, strict=True)
        report["methods"][name] = {"accuracy": accuracy, "seconds": seconds}
        print(f"{name:10} {100 * statistics.mean(accuracy):.2f} {1000 * statistics.median(seconds):.0f} ms", flush=True)
        out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
