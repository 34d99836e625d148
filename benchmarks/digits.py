"""Every algorithm with its defaults on the embedded digits: the results that a new user gets.

    python benchmarks/digits.py [--rounds 200] [--seeds 1] [--only NAME ...] [--json]

Fifty clients, Dirichlet(0.3) labels, cohort 10, the two-layer MLP: the default configuration of `fedbraid run`, with
only `algorithm.name` set. Prints the final test accuracy, and the bytes of a client's round as a multiple of the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings

import numpy as np

import fedbraid as fb
from fedbraid.experiment import build, load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(fb.algorithms.ALGORITHMS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fb.use_cores()
    warnings.simplefilter("ignore")
    report = {}
    for name in options.only:
        accuracies, seconds, multiple = [], [], 0.0
        for seed in range(options.seeds):
            given = [f"algorithm.name={name}", f"rounds={options.rounds}", f"seed={seed}"]
            experiment = build(load_config(settings=given))
            config = experiment.config
            began = time.perf_counter()
            result = fb.simulate(
                experiment.algorithm,
                experiment.params,
                experiment.data,
                rounds=config.rounds,
                cohort=None if config.cohort == "all" else config.cohort,
                seed=config.seed,
                metrics=experiment.metrics,
            )
            accuracies.append(float(np.asarray(result.evaluations["test_accuracy"])[-1]))
            seconds.append(time.perf_counter() - began)
            multiple = result.info.cost.multiple
        report[name] = {
            "accuracy": statistics.mean(accuracies),
            "seconds": statistics.mean(seconds),
            "models_sent": multiple,
        }
        row = report[name]
        line = f"{name:22}{row['accuracy']:8.4f}{row['models_sent']:8.2f}x{row['seconds']:8.1f} s"
        print(line, flush=True, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
