"""Seconds per round beside the peers, in one run on one machine.

    python benchmarks/speed.py [--workloads emnist-logistic emnist-cnn] [--peers DIR] [--scripts DIR] [--json]

Workloads (synthetic EMNIST-62 shapes: 200 clients, log-normal sizes of mean 200 and sigma 0.3, one fixed schedule):

- emnist-cnn (W1): two 3x3 convolutions, 1,206,590 parameters; FedAvg, 10 clients a round, one epoch, batch 20
- emnist-logistic (W2): softmax regression 784 -> 62; 20 clients a round, one epoch, batch 10

``--peers`` names a folder with one environment per peer (torch, pfl, fedjax, flwr) and ``--scripts`` the folder of
their scripts (bench_torch.py ...); those that exist are run in turn with ours, each in its own process, ``--repeats``
times over, so that a slow minute of a shared machine falls on all alike. What counts is the ratio within one run.
Cohorts are drawn alike but not the same, so times are scaled to the same number of local steps a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

WORKLOADS = {
    "emnist-logistic": {"id": "W2", "cohort": 20, "batch": 10, "rounds": 100, "steps": 411},
    "emnist-cnn": {"id": "W1", "cohort": 10, "batch": 20, "rounds": 12, "steps": 103},
}
CLIENTS, CLASSES, RATE = 200, 62, 0.05

PEERS = {  # name: (environment, command after its bin folder)
    "pfl, 2 processes": (
        "pfl",
        ["torchrun", "--standalone", "--nnodes=1", "--nproc_per_node=2", "bench_pfl.py", "{id}", "1"],
        {"OMP_NUM_THREADS": "1"},
    ),
    "PyTorch loop": ("torch", ["python", "bench_torch.py", "{id}"], {}),
    "FedJAX jit": ("fedjax", ["python", "bench_fedjax.py", "{id}", "jit"], {}),
    "Flower on Ray": ("flwr", ["python", "bench_flwr.py", "{id}"], {}),
}


def clients(seed: int = 0):
    """The common data, drawn as the peers' scripts draw it."""
    rng = np.random.default_rng(seed)
    sizes = np.round(rng.lognormal(np.log(200) - 0.3**2 / 2, 0.3, CLIENTS)).astype(int)
    return [
        {"x": rng.random((n, 28, 28, 1), dtype=np.float32), "y": rng.integers(0, CLASSES, n).astype(np.int32)}
        for n in sizes
    ]


def ours(workload: str, devices: int | None) -> dict:
    """Seconds per round of our engine, compiled before the clock starts; the host looks in now and then."""
    import jax

    import fedbraid as fb
    from fedbraid import models

    count = fb.use_cores(devices)
    spec = WORKLOADS[workload]
    model = models.emnist_cnn(CLASSES) if workload == "emnist-cnn" else models.softmax_regression(784, CLASSES)
    split = fb.Split.from_clients(clients())
    if workload == "emnist-logistic":
        split = fb.Split({"x": split.arrays["x"].reshape(-1, 784), "y": split.arrays["y"]}, split.offsets)
    algorithm = fb.fedavg(model.loss, client_lr=RATE, epochs=1, batch_size=spec["batch"])
    stamps: list[tuple[float, int]] = []

    def tick(progress) -> None:
        stamps.append((time.perf_counter(), progress.round))

    began = time.perf_counter()
    result = fb.simulate(
        algorithm,
        model.init(jax.random.key(0)),
        split,
        rounds=spec["rounds"] + 1,
        cohort=spec["cohort"],
        seed=1,
        on_progress=tick,
    )
    (first, done), (last, rounds) = stamps[0], stamps[-1]
    steps = result.info.steps / result.info.stopped_at
    return {
        "seconds_per_round": (last - first) / (rounds - done) * spec["steps"] / steps,
        "compile_seconds": first - began,
        "devices": count,
        "steps_per_round": steps,
        "masked_share": result.info.masked_share,
        "imbalance": result.info.imbalance,
    }


def peer(name: str, workload: str, environments: Path, scripts: Path) -> float | None:
    """Seconds per round of a peer after its first, for as many local steps as ours; None if it cannot run."""
    environment, command, extra = PEERS[name]
    folder = environments.absolute() / environment / "bin"
    if not folder.is_dir():
        return None
    rounds = {"BENCH_ROUNDS": str(WORKLOADS[workload]["rounds"])}
    filled = [part.format(**WORKLOADS[workload]) for part in command]
    done = subprocess.run(
        [str(folder / filled[0]), *filled[1:]],
        cwd=scripts,
        env=os.environ | extra | rounds,
        capture_output=True,
        text=True,
    )
    line = next((part for part in done.stdout.splitlines() if part.startswith("JSON ")), None)
    if line is None:
        print(f"{name} did not finish:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    found = json.loads(line[5:])
    steps = sum(found["works"][1 : len(found["stamps"])])
    return (found["stamps"][-1] - found["stamps"][0]) / steps * WORKLOADS[workload]["steps"]


def in_own_process(workload: str, devices: int | None) -> dict:
    command = [sys.executable, __file__, "--only-ours", workload, *(["--devices", str(devices)] if devices else [])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of the peers' environments")
    parser.add_argument("--scripts", type=Path, help="folder of the peers' scripts; without it only ours runs")
    parser.add_argument("--against", nargs="+", default=list(PEERS), choices=list(PEERS), help="which peers to run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, help="host devices for ours (default: one per core)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-ours", choices=list(WORKLOADS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_ours:
        print(json.dumps(ours(options.only_ours, options.devices)))
        return
    report: dict = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", "workloads": {}}
    for workload in options.workloads:
        times: dict[str, list[float]] = {}
        details = {}
        for _ in range(options.repeats):
            details = in_own_process(workload, options.devices)
            times.setdefault("fedbraid", []).append(details["seconds_per_round"])
            for name in options.against if options.scripts else ():
                seconds = peer(name, workload, options.peers, options.scripts)
                if seconds is not None:
                    times.setdefault(name, []).append(seconds)
            print(".", end="", flush=True, file=sys.stderr)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = {name: median / medians["fedbraid"] for name, median in medians.items()}
        report["workloads"][workload] = {"seconds": times, "median": medians, "times_ours": ratios, "ours": details}
    print(file=sys.stderr)
    if options.json:
        print(json.dumps(report))
        return
    print(report["machine"])
    for workload, found in report["workloads"].items():
        print(f"\n{workload}\n{'':24}{'s / round':>12}{'times ours':>12}")
        for name, median in sorted(found["median"].items(), key=lambda item: item[1]):
            print(f"{name:24}{median:12.4f}{found['times_ours'][name]:12.2f}")


if __name__ == "__main__":
    main()
