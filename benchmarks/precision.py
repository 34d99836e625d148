"""Does bfloat16 cost accuracy? The same runs in float32 and in bfloat16, over seeds.

    python benchmarks/precision.py [--femnist DATA] [--shakespeare DATA] [--cifar10 DATA] [--seeds 0 1 2] [--out FILE]
    python benchmarks/precision.py --table FILE

- femnist: the EMNIST CNN, 10 writers a round, 500 rounds (DATA: what `fedbraid import` reads)
- shakespeare: the character LSTM, 20 roles a round, 300 rounds
- cifar10: ResNet-18 with group norm, FedAvg in FL-Simulator's setting (fl_simulator.py), 200 rounds

The score is the mean of the last five evaluations, because single evaluations move by more than the two precisions
differ. `--table` prints the mean difference over seeds and its standard error, in points of accuracy.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path

import jax
import numpy as np

import fedbraid as fb
from fedbraid import models
from fedbraid.data.catalog import load

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
    return fl_simulator.run("fedavg", data, rounds=rounds, seed=seed, precision=precision, every=every)["accuracy"]


def table(file: Path) -> None:
    scores = collections.defaultdict(dict)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        scores[row["task"]][row["precision"], row["seed"]] = row["score"]
    for task, found in scores.items():
        seeds = sorted({seed for _, seed in found})
        pairs = [[found[how, seed] for how in ("float32", "bfloat16")] for seed in seeds if ("bfloat16", seed) in found]
        gain = np.diff(pairs, axis=1)[:, 0]
        error = np.std(gain, ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
        exact, narrow = np.mean(pairs, axis=0)
        print(f"{task:12} float32 {exact:.2f}, bfloat16 {narrow:.2f}, difference {np.mean(gain):+.2f} ({error:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ROUNDS:
        parser.add_argument(f"--{name}", type=Path, metavar="DATA")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, help="instead of the rounds above, to try it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="of an earlier --out")
    given = parser.parse_args()
    if given.table:
        return table(given.table)
    for task in ROUNDS:
        path = getattr(given, task)
        for precision in given.precision if path else []:
            for seed in given.seeds:
                options = {"precision": precision, "seed": seed, "rounds": given.rounds or ROUNDS[task]}
                curve = resnet(path, **options) if task == "cifar10" else characters(task, path, **options)
                row = {"task": task, **options, "score": float(np.mean(list(curve.values())[-5:])), "curve": curve}
                print("\r" + json.dumps(row), flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return None


if __name__ == "__main__":
    main()
