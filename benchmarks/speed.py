"""Seconds per round of this library and of its peers, in one run on one machine.

    python benchmarks/speed.py [--workloads emnist-logistic emnist-cnn ...] [--peers DIR] [--scripts DIR] [--json]

Workloads (`workloads.py`: synthetic data in the shapes of the papers' sets, one fixed schedule, FedAvg, one epoch):

- emnist-logistic (W2): softmax regression 784 -> 62; 20 clients a round, batch 10
- emnist-cnn (W1): two 3x3 convolutions, 1,206,590 parameters; 10 clients a round, batch 20
- emnist-mlp: 784 -> 300 -> 100 -> 62; 20 clients a round, batch 10
- shakespeare-lstm: embedding 8, LSTM 256, 80 characters; 10 clients a round, batch 10
- cifar-resnet: ResNet-18 with group norm, 24 x 24 colour images; 2 clients a round, batch 20

``--peers`` is a folder with one environment per peer (torch, pfl, fedjax, flwr). Scripts for the MLP and the LSTM are
in ``peers/``. For W1 and W2, ``--scripts`` is the folder of the peers' scripts (bench_torch.py ...). The scripts that
exist run in turn with this library, each in its own process, ``--repeats`` times. So other work on a shared machine
slows all of them down equally. Compare the ratios within one run. Cohorts are different samples of the same
distribution, so times are scaled to the same number of local steps a round.

The benchmark also reports compile time, peak memory of the process, and two shares of the machine's limits, which are
measured in the same process. The first is the share of the rate of large matrix products; operations are counted in
XLA's own program of a step. The second is the share of the memory bandwidth; a step must at least read and write its
parameters and gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from workloads import CLASSES, LENGTH, RATE, VOCABULARY, WORKLOADS, clients

OWN = Path(__file__).parent / "peers"
TORCHRUN = ["torchrun", "--standalone", "--nnodes=1", "--nproc_per_node=2"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PEERS = {  # name: (environment, command in its bin folder, environment variables), for scripts in --scripts
    "pfl, 2 processes": ("pfl", [*TORCHRUN, "bench_pfl.py", "{id}", "1"], ONE_THREAD),
    "PyTorch loop": ("torch", ["python", "bench_torch.py", "{id}"], {}),
    "FedJAX jit": ("fedjax", ["python", "bench_fedjax.py", "{id}", "jit"], {}),
    "Flower on Ray": ("flwr", ["python", "bench_flwr.py", "{id}"], {}),
}
OWN_PEERS = {  # the same for the scripts in peers/
    "PyTorch, 2 processes": ("torch", [*TORCHRUN, "torch_loop.py", "{name}"], ONE_THREAD),
    "PyTorch loop": ("torch", ["python", "torch_loop.py", "{name}"], {}),
    "FedJAX jit": ("fedjax", ["python", "fedjax_jit.py", "{name}"], {}),
}
WITH_OWN = ("emnist-mlp", "shakespeare-lstm")


def model_of(workload: str):
    from fedbraid import models

    return {
        "emnist-logistic": lambda: models.softmax_regression(784, CLASSES),
        "emnist-cnn": lambda: models.emnist_cnn(CLASSES),
        "emnist-mlp": lambda: models.mlp(784, CLASSES, hidden=(300, 100)),
        "shakespeare-lstm": lambda: models.char_lstm(VOCABULARY),
        "cifar-resnet": lambda: models.resnet18_gn(CLASSES, image=(24, 24, 3)),
    }[workload]()


def ours(workload: str, devices: int | None) -> dict:
    """Seconds per round of this library: from the first progress callback, after compilation, to the last."""
    import jax

    import fedbraid as fb

    count = fb.use_cores(devices)
    spec, model = WORKLOADS[workload], model_of(workload)
    split = fb.Split.from_clients(clients(workload))
    if workload in ("emnist-logistic", "emnist-mlp"):
        split = fb.Split({"x": split.arrays["x"].reshape(-1, 784), "y": split.arrays["y"]}, split.offsets)
    algorithm = fb.fedavg(model.loss, client_lr=RATE, epochs=1, batch_size=spec["batch"])
    stamps: list[tuple[float, int]] = []

    def tick(progress) -> None:
        stamps.append((time.perf_counter(), progress.round))

    params = model.init(jax.random.key(0))
    began = time.perf_counter()
    result = fb.simulate(
        algorithm, params, split, rounds=spec["rounds"] + 1, cohort=spec["cohort"], seed=1, on_progress=tick
    )
    (first, done), (last, rounds) = stamps[0], stamps[-1]
    steps = result.info.steps / result.info.stopped_at
    seconds = (last - first) / (rounds - done) * spec["steps"] / steps
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    flops, moved = step_cost(model, params, split, spec["batch"])
    if workload == "shakespeare-lstm":  # XLA counts a loop's body once: 3 x 2 products per position
        flops = 3.0 * 2 * spec["batch"] * LENGTH * ((8 + 256) * 1024 + 256 * VOCABULARY)
    peak, bandwidth = machine()
    return {
        "seconds_per_round": seconds,
        "compile_seconds": first - began,
        "peak_memory_mb": memory,
        "devices": count,
        "steps_per_round": steps,
        "masked_share": result.info.masked_share,
        "imbalance": result.info.imbalance,
        "gflops_peak": peak / 1e9,
        "gb_per_second": bandwidth / 1e9,
        "share_of_products": flops * spec["steps"] / seconds / peak,
        "share_of_bandwidth": moved * spec["steps"] / seconds / bandwidth,
    }


def step_cost(model, params, split, batch: int) -> tuple[float, float]:
    """Operations of one local step as XLA counts them, and bytes of parameters and gradients that it must move."""
    import jax
    import numpy as np

    few = {name: array[:batch] for name, array in split.arrays.items()} | {"mask": np.ones(batch, np.float32)}
    program = jax.jit(jax.value_and_grad(model.loss)).lower(params, few, jax.random.key(0)).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return float((program.cost_analysis() or {}).get("flops", float("nan"))), 4.0 * size


def machine() -> tuple[float, float]:
    """Operations per second of large products and bytes per second of copies, on all host devices at once."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    devices = jax.devices()
    side, length = 1024, 1 << 25
    square = [jax.device_put(np.ones((side, side), np.float32), d) for d in devices]
    long = [jax.device_put(np.ones(length, np.float32), d) for d in devices]

    def rate(function, arguments, work: float) -> float:
        jax.block_until_ready([function(a) for a in arguments])
        best = 0.0
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready([function(a) for a in arguments])
            best = max(best, work * len(arguments) / (time.perf_counter() - began))
        return best

    return rate(jax.jit(lambda a: a @ a), square, 2.0 * side**3), rate(jax.jit(jnp.negative), long, 8.0 * length)


def peers_of(workload: str, scripts: Path | None) -> list[tuple[str, Path]]:
    """Names of the peers that have a script for a workload, and the folder of the script."""
    if workload in WITH_OWN:
        return [(name, OWN) for name in OWN_PEERS]
    if scripts is None or "id" not in WORKLOADS[workload]:
        return []
    return [(name, scripts) for name in PEERS]


def peer(name: str, workload: str, environments: Path, scripts: Path) -> float | None:
    """Seconds per round of a peer after its first, scaled to the same number of local steps; None if it cannot run."""
    environment, command, extra = (OWN_PEERS if workload in WITH_OWN else PEERS)[name]
    folder = environments.absolute() / environment / "bin"
    if not folder.is_dir():
        return None
    rounds = {"BENCH_ROUNDS": str(WORKLOADS[workload]["rounds"])}
    filled = [part.format(name=workload, **WORKLOADS[workload]) for part in command]
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
    parser.add_argument("--scripts", type=Path, help="folder of the peers' scripts for the other workloads")
    parser.add_argument("--against", nargs="+", help="run only peers whose name contains one of these words")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, help="host devices for fedbraid (default: one per core)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-ours", choices=list(WORKLOADS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_ours:
        print(json.dumps(ours(options.only_ours, options.devices)))
        return
    report: dict = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", "workloads": {}}
    for workload in options.workloads:
        times: dict[str, list[float]] = {}
        details, products = {}, []
        for _ in range(options.repeats):
            details = in_own_process(workload, options.devices)
            products.append(details["seconds_per_round"] * details["gflops_peak"])
            times.setdefault("fedbraid", []).append(details["seconds_per_round"])
            for name, scripts in peers_of(workload, options.scripts):
                if options.against and not any(word in name for word in options.against):
                    continue
                seconds = peer(name, workload, options.peers, scripts)
                if seconds is not None:
                    times.setdefault(name, []).append(seconds)
            print(".", end="", flush=True, file=sys.stderr)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = {name: median / medians["fedbraid"] for name, median in medians.items()}
        report["workloads"][workload] = {
            "seconds": times,
            "median": medians,
            "times_ours": ratios,
            "ours": details,
            "products": min(
                products
            ),  # GFLOP of products in the time of a round: does not depend on the machine's speed
        }
    print(file=sys.stderr)
    if options.json:
        print(json.dumps(report))
        return
    print(report["machine"])
    for workload, found in report["workloads"].items():
        print(f"\n{workload}\n{'':24}{'s / round':>12}{'ratio':>12}")
        for name, median in sorted(found["median"].items(), key=lambda item: item[1]):
            print(f"{name:24}{median:12.4f}{found['times_ours'][name]:12.2f}")


if __name__ == "__main__":
    main()
