"""Does bfloat16 cost accuracy? The same runs in float32 and in bfloat16, over seeds.

    python benchmarks/precision.py [--femnist DATA] [--shakespeare DATA] [--cifar10 DATA] [--seeds 0 1 2] [--out FILE]
    python benchmarks/precision.py --emulate ...
    python benchmarks/precision.py --table FILE

- femnist: the EMNIST CNN, 10 writers a round, 500 rounds (DATA: what `fedbraid import` reads)
- shakespeare: the character LSTM, 20 roles a round, 300 rounds
- cifar10: ResNet-18 with group norm, FedAvg in FL-Simulator's setting (fl_simulator.py) but one epoch, 200 rounds

The score is the mean of the last five evaluations, because single evaluations move by more than the two precisions
differ. `--table` prints the mean difference over seeds and its standard error, in points of accuracy.

A CPU computes in float32 whatever the option says. With `--emulate` it rounds values, gradients and factors where a GPU
does (`rewrites.emulated`). The kernels of a GPU add in another order, and do not run.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np

import fedbraid as fb
from fedbraid import models
from fedbraid.data.catalog import load
from rewrites import EXCESS, emulated

ROUNDS = {"femnist": 500, "shakespeare": 300, "cifar10": 200}


def characters(name: str, path: Path, precision: str, seed: int, rounds: int) -> dict:
    """The accuracy of FedAvg on FEMNIST or Shakespeare."""
    data = load(name, path=str(path))
    compute = "bfloat16" if precision == "bfloat16" else "float32"
    model = models.emnist_cnn(62) if name == "femnist" else models.char_lstm(90, compute=compute)
    rate, batch, cohort = (0.1, 20, 10) if name == "femnist" else (1.0, 10, 20)
    result = fb.simulate(
        fb.fedavg(model.loss, client_lr=rate, batch_size=batch, epochs=1),
        model.init(jax.random.key(seed)),
        data,
        rounds=rounds,
        cohort=cohort,
        seed=seed,
        metrics=model.metrics,
        eval_every=max(1, rounds // 20),
        precision=precision,
        on_progress=lambda now: print(f"\r{name} {precision} {seed}: {now.round}", end="", file=sys.stderr, flush=True),
    )
    rounds_and_scores = zip(result.evaluations["round"], result.evaluations["test_accuracy"], strict=True)
    return {int(at): 100 * float(value) for at, value in rounds_and_scores}


def resnet(path: Path, precision: str, seed: int, rounds: int) -> dict:
    import fl_simulator

    data = fl_simulator.federation(*fl_simulator.read(path), seed)
    every = max(1, rounds // 20)
    how = {"rounds": rounds, "seed": seed, "precision": precision, "every": every, "epochs": 1}
    return fl_simulator.run("fedavg", data, **how)["accuracy"]


def compared(rows: list[dict]) -> dict[str, dict]:
    """For each task: both mean scores, the mean difference over the seeds that have both, and its standard error.

    >>> scores = {"float32": (50.0, 52.0), "bfloat16": (51.0, 52.0)}
    >>> rows = [{"precision": how, "seed": i, "score": scores[how][i]} for how in scores for i in range(2)]
    >>> compared([row | {"task": "a"} for row in rows])
    {'a': {'float32': 51.0, 'bfloat16': 51.5, 'difference': 0.5, 'error': 0.5, 'seeds': 2}}
    """
    scores, about, found = collections.defaultdict(dict), {}, {}
    for row in rows:
        scores[row["task"]][row["precision"], row["seed"]] = row["score"]
        about[row["task"]] = {key: row[key] for key in ("rounds", "device") if key in row}
    for task, of in scores.items():
        seeds = sorted(seed for how, seed in of if how == "float32" and ("bfloat16", seed) in of)
        pairs = [[of[how, seed] for how in ("float32", "bfloat16")] for seed in seeds]
        if len(pairs) < 2:
            continue
        gain = np.diff(pairs, axis=1)[:, 0]
        exact, narrow = (float(score) for score in np.mean(pairs, axis=0))
        error = float(np.std(gain, ddof=1) / np.sqrt(len(gain)))
        difference = float(np.mean(gain))
        found[task] = {"float32": exact, "bfloat16": narrow, "difference": difference, "error": error}
        found[task] |= {"seeds": len(seeds)} | about[task]
    return found


def table(file: Path) -> None:
    for task, one in compared(list(map(json.loads, file.read_text().splitlines()))).items():
        means = f"float32 {one['float32']:.2f}, bfloat16 {one['bfloat16']:.2f}"
        print(f"{task:12} {means}, difference {one['difference']:+.2f} ({one['error']:.2f}), {one['seeds']} seeds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ROUNDS:
        parser.add_argument(f"--{name}", type=Path, metavar="DATA")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, help="instead of the rounds above")
    parser.add_argument("--emulate", action="store_true", help="on a CPU: round as a GPU does")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="of an earlier --out")
    given = parser.parse_args()
    if given.table:
        return table(given.table)
    if given.emulate:  # before jax starts
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {EXCESS}"
    fb.use_cores()
    device = jax.devices()[0].device_kind
    if device == "cpu" and "bfloat16" in given.precision and not given.emulate:
        parser.error("a CPU computes in float32: add --emulate to round as a GPU does")
    for task in ROUNDS:
        path = getattr(given, task)
        for precision in given.precision if path else []:
            for seed in given.seeds:
                options = {"precision": precision, "seed": seed, "rounds": given.rounds or ROUNDS[task]}
                with emulated() if given.emulate and precision == "bfloat16" else nullcontext():
                    curve = resnet(path, **options) if task == "cifar10" else characters(task, path, **options)
                row = {"task": task, **options, "device": device}
                row |= {"score": float(np.mean(list(curve.values())[-5:])), "curve": curve}
                print("\r" + json.dumps(row), flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return None


if __name__ == "__main__":
    main()
