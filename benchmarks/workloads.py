"""The workloads of this library and of its peers. It needs only NumPy, so that every environment can import it."""

from __future__ import annotations

import json
import os

import numpy as np

# cohort: clients per round; batch: examples per step; steps: local steps per round, to which all times are scaled
WORKLOADS = {
    "emnist-logistic": {"id": "W2", "cohort": 20, "batch": 10, "rounds": 100, "steps": 411},
    "emnist-cnn": {"id": "W1", "cohort": 10, "batch": 20, "rounds": 12, "steps": 103},
    "emnist-mlp": {"cohort": 20, "batch": 10, "rounds": 30, "steps": 411},
    "shakespeare-lstm": {"cohort": 10, "batch": 10, "rounds": 5, "steps": 33},
    "cifar-resnet": {"cohort": 2, "batch": 20, "rounds": 2, "steps": 10},
}
CLIENTS, CLASSES, RATE, VOCABULARY, LENGTH = 200, 62, 0.05, 90, 80


def clients(workload: str, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Every client's examples; images are drawn as in the scripts of the peers."""
    rng = np.random.default_rng(seed)
    if workload == "shakespeare-lstm":
        sizes = np.maximum(1, np.round(rng.lognormal(np.log(28) - 0.18, 0.6, CLIENTS))).astype(int)
        texts = [rng.integers(1, VOCABULARY, (n, LENGTH + 1)).astype(np.int32) for n in sizes]
        return [{"x": text[:, :-1].copy(), "y": text[:, 1:].copy()} for text in texts]
    if workload == "cifar-resnet":
        shape, sizes = (24, 24, 3), np.full(20, 100)
    else:
        shape, sizes = (28, 28, 1), np.round(rng.lognormal(np.log(200) - 0.3**2 / 2, 0.3, CLIENTS)).astype(int)
    return [
        {"x": rng.random((n, *shape), dtype=np.float32), "y": rng.integers(0, CLASSES, n).astype(np.int32)}
        for n in sizes
    ]


def schedule(workload: str, count: int, seed: int = 1) -> list[list[int]]:
    """The cohorts of a run: one warm-up round, then the timed rounds."""
    rng = np.random.default_rng(seed)
    spec = WORKLOADS[workload]
    rounds = int(os.environ.get("BENCH_ROUNDS", spec["rounds"])) + 1
    return [rng.choice(count, spec["cohort"], replace=False).tolist() for _ in range(rounds)]


def report(workload: str, stamps: list[float], cohorts: list[list[int]], sizes: list[int]) -> None:
    """Print the result of a peer's script: the time at the end of every round, and its number of local steps."""
    batch = WORKLOADS[workload]["batch"]
    works = [sum(-(-sizes[c] // batch) for c in cohort) for cohort in cohorts]
    print("JSON " + json.dumps({"stamps": stamps, "works": works}), flush=True)
