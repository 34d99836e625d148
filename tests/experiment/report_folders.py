"""Run folders that tests of reports write without a run, from formulas that the tests use."""

import json

import numpy as np

from fedbraid.experiment import load_config, runfolder
from fedbraid.experiment.config import dump
from fedbraid.experiment.lab import SweepSettings
from fedbraid.experiment.summary import summarize_run
from fedbraid.experiment.sweep import write_sweep
from fedbraid.experiment.trials import write_trials
from fedbraid.metric import Metric

RATE, SERVER = "algorithm.client_lr", "algorithm.server_lr"
ROUNDS = 40

PLOTTED = []  # the figures that the report of the fixture `page` wrote, each as PNG and as PDF


def curve(rate, seed):
    """The columns of a synthetic run, from a formula that the tests use."""
    rounds = np.arange(1, ROUNDS + 1)
    return rounds, 1 - np.exp(-rate * rounds) + 0.01 * seed


def a_run(folder, *settings, seed=0, rate=0.1, finished=True, own=None):
    """A run folder written without a run. ``own``: the direction of its additional metric "rank_error"."""
    given = ["algorithm.name=fedavg", f"rounds={ROUNDS}", f"seed={seed}", f"{RATE}={rate}", *settings]
    config = load_config(settings=given)
    folder.mkdir(parents=True)
    (folder / runfolder.CONFIG).write_text(dump(config))
    rounds, accuracy = curve(rate, seed)
    history = {"train/loss": np.exp(-rate * rounds), "train/bytes_down": np.full(ROUNDS, 500.0)}
    history["train/bytes_up"] = np.full(ROUNDS, 300.0)
    evaluations = {"round": rounds[9::10], "test_accuracy": accuracy[9::10], "test_loss": 2 - accuracy[9::10]}
    clients = {"test_accuracy": np.array([0.5, np.nan, 0.9, 0.1])}
    declared = []
    if own is not None:
        declared = [Metric("rank_error", own)]
        evaluations["test_rank_error"] = 1 + accuracy[9::10]
        clients["test_rank_error"] = np.array([0.5, np.nan, 0.9, 0.1])
    table = runfolder.columns(history, evaluations, ROUNDS) | {"seconds": 0.5 * rounds}
    runfolder.write_metrics(folder, table)
    runfolder.write_clients(folder, clients)
    split = {"name": "dirichlet", "alpha": 0.3, "clients": 50}
    about = {"declared": declared, "clients": 50, "partition": split, "finished": finished, "out": str(folder)}
    summary = summarize_run(config, table, evaluations, seconds=20.0, **about)
    runfolder.write_summary(folder, summary)
    return folder


def trial(i, rate, server, score, status="finished", seed=1000):
    own = {"point": i, "seed": seed, RATE: rate, SERVER: server, "status": status, "rounds": 40}
    return own | {"metric": "validation_accuracy", "score": score, "rounds_to_target": None}


TRIALS = [
    trial(0, 0.1, 1.0, 0.5),
    trial(0, 0.1, 1.0, 0.7, seed=1001),
    trial(1, 0.1, 3.0, 0.9),
    trial(2, 1.0, 1.0, 0.8),
    trial(3, 1.0, 3.0, None, "diverged"),
]


def a_sweep(folder):
    folder.mkdir()
    keys = {RATE: [0.1, 1.0], SERVER: [1.0, 3.0]}
    write_sweep(folder / "sweep.toml", load_config(), SweepSettings(over=keys))
    write_trials(folder / "trials.parquet", TRIALS, {"version": "0.1.0"})
    summary = {"kind": "sweep", "algorithm": "fedavg", "keys": list(keys), "best": {RATE: 0.1, SERVER: 3.0}}
    (folder / "summary.json").write_text(json.dumps(summary | {"criterion": "highest validation_accuracy"}))
    return folder
