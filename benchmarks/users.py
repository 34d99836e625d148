"""A convolutional network that a user writes with equinox, compared with the library's own of the same shape.

    python benchmarks/users.py [--clients N] [--steps N] [--batch N] [--rounds N] [--repeats N]
                               [--precision bfloat16] [--json]

Both are trained by ``fedavg`` without dropout. ``differs`` is the largest difference of their parameters after one
round from the same start, divided by the largest change of a parameter. Portions of rounds of both run in turn, and the
best of each counts, so compare within one run.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import fedbraid as fb
from fedbraid import models


class Network(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    dense1: eqx.nn.Linear
    dense2: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(1, 32, 3, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(32, 64, 3, key=keys[1])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.dense1 = eqx.nn.Linear(64 * 12 * 12, 128, key=keys[2])
        self.dense2 = eqx.nn.Linear(128, 62, key=keys[3])

    def __call__(self, image):
        x = jax.nn.relu(self.conv1(image[None]))
        x = self.pool(jax.nn.relu(self.conv2(x)))
        return self.dense2(jax.nn.relu(self.dense1(x.ravel())))


def as_ours(network: Network) -> dict:
    """The same weights in the layout of the library's network: channels last."""
    kernel = lambda conv: {"w": conv.weight.transpose(2, 3, 1, 0), "b": conv.bias.reshape(-1)}  # noqa: E731
    first = network.dense1.weight.reshape(128, 64, 12, 12).transpose(2, 3, 1, 0).reshape(-1, 128)
    return {
        "conv1": kernel(network.conv1),
        "conv2": kernel(network.conv2),
        "dense1": {"w": first, "b": network.dense1.bias},
        "dense2": {"w": network.dense2.weight.T, "b": network.dense2.bias},
    }


def apart(a, b) -> float:
    """The largest difference of two trees' entries."""
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    rng, n = np.random.default_rng(0), options.clients * options.steps * options.batch
    arrays = {"x": rng.random((n, 28, 28), dtype=np.float32), "y": rng.integers(0, 62, n).astype(np.int32)}
    split = fb.Split(arrays, np.arange(options.clients + 1) * options.steps * options.batch)
    ours, users = models.emnist_cnn(62, dropout=False), models.from_equinox(Network)
    start = users.init(jax.random.key(0))
    ways = {"ours": (ours.loss, as_ours(start)), "equinox": (users.loss, start)}

    def run(way: str, rounds: int, on_progress=None):
        loss, params = ways[way]
        alg = fb.fedavg(loss, client_lr=0.05, batch_size=options.batch, epochs=1)
        how = {"precision": options.precision, "on_progress": on_progress}
        return fb.simulate(alg, params, split, rounds=rounds, **how)

    a, b = run("ours", 1).params, as_ours(run("equinox", 1).params)
    report = {"device": str(jax.devices()[0]), "differs": apart(a, b) / apart(a, as_ours(start))}
    best: dict[str, float] = {}
    for _ in range(options.repeats):
        for way in ways:
            stamps: list[tuple[float, int]] = []
            run(way, options.rounds, lambda p, into=stamps: into.append((time.perf_counter(), p.round)))
            spans = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(stamps[1:])]
            best[way] = min([best.get(way, float("inf")), *spans])
    report |= {f"{way}_seconds": seconds for way, seconds in best.items()}
    report["equinox_over_ours"] = best["equinox"] / best["ours"]
    print(json.dumps(report) if options.json else "\n".join(f"{k:20} {v}" for k, v in report.items()))


if __name__ == "__main__":
    main()
