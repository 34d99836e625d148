"""The cost of a sweep over nine learning rates, compared with one run and with a loop over nine runs.

    python benchmarks/sweep.py [--models softmax mlp] [--rounds 200] [--repeats 3] [--no-commands] [--json]

Two costs are measured:

- *command*: `fedbraid run` and `fedbraid sweep --over algorithm.client_lr=logspace(-4,0,9)` as a user types them, from
  the start of the process to its end: imports, data, compilation, rounds, evaluation, files. A loop is nine such runs.
- *rounds*: seconds per round with everything compiled, evaluation included. A loop is nine times one run.

softmax and mlp are on the embedded digits (50 clients, cohorts of 10). lstm is next-character prediction with the LSTM
of the Shakespeare task (embedding 8, one layer of 256) on synthetic text with client sizes like those of that data. It
is meant for an accelerator, and only its rounds are measured. Runs alternate and the fastest of each counts, because
other work on a shared machine can slow some of them down.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RATES = [float(f"{10**e:.12g}") for e in np.linspace(-4, 0, 9)]
KEY = "algorithm.client_lr"
MODELS = {
    "softmax": ["algorithm.name=fedavg", "model.name=softmax_regression"],
    "mlp": ["algorithm.name=fedavg", "model.name=mlp", "model.hidden=[64]"],
    "lstm": [
        *("algorithm.name=fedavg", "algorithm.batch_size=10"),
        *("model.name=char_lstm", "cohort=20", "evaluation.every=10"),
    ],
}


def made_up_text(seed: int = 0, clients: int = 200):
    """Windows of 80 symbols out of 90 for clients of very different sizes (median 17, some of hundreds)."""
    from fedbraid import FederatedData, Split

    rng = np.random.default_rng(seed)
    sizes = np.clip(np.round(rng.lognormal(np.log(17), 1.2, clients)), 1, 600).astype(int)

    def split(counts) -> Split:
        made = [rng.integers(1, 90, (n, 81)).astype(np.int32) for n in counts]
        return Split.from_clients([{"x": rows[:, :-1], "y": rows[:, 1:]} for rows in made])

    return FederatedData(split(sizes), split(np.full(clients, 2)), "made-up text", {"classes": 90})


def rounds(model: str, number: int, repeats: int, devices: int | None) -> dict:
    """Seconds per round of one point and of nine, without compilation; both run in turn."""
    import fedbraid as fb

    shown = fb.use_cores(devices)
    from fedbraid.experiment import build, load_config
    from fedbraid.experiment.points import points_program

    config = load_config(settings=[*MODELS[model], f"rounds={number}", f"{KEY}=0.1"])
    data = made_up_text() if model == "lstm" else build(config).data
    points = [{KEY: rate} for rate in RATES]
    began = time.perf_counter()
    one = points_program(config, data, [KEY], points=1, seeds=[1], test=data.test)
    compiled_one = time.perf_counter() - began
    began = time.perf_counter()
    nine = points_program(config, data, [KEY], points=9, seeds=[1], test=data.test)
    compiled_nine = time.perf_counter() - began
    times: dict[str, list[float]] = {"one": [], "nine": []}
    for _ in range(repeats):
        times["one"].append(float(one.run(points[-3:-2], seed=1, rounds=number).seconds[-1]))
        spent = sum(float(nine.run(chunk, seed=1, rounds=number).seconds[-1]) for chunk in nine.chunks(points))
        times["nine"].append(spent)
    best = {name: min(seconds) / number for name, seconds in times.items()}
    return {
        "one": best["one"],
        "sweep": best["nine"],
        "loop": 9 * best["one"],
        "compile_one": compiled_one,
        "compile_nine": compiled_nine,
        "at_once": nine.size,
        "plan": nine.plan.kind,
        "devices": shown,
        "own_points": nine.own_points,
    }


def commands(model: str, number: int, repeats: int, whole_loop: bool) -> dict:
    """Seconds of whole commands."""
    settings = [part for s in (*MODELS[model], f"rounds={number}", "checkpoint.every=1000000") for part in ("--set", s)]

    def timed(*arguments: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "fedbraid", *arguments, *settings, "--quiet", "--out", f"{folder}/out"]
            began = time.perf_counter()
            subprocess.run(command, check=True)
            return time.perf_counter() - began

    ones, sweeps, loops = [], [], []
    for _ in range(repeats):
        ones.append(timed("run", "--set", f"{KEY}=0.1"))
        sweeps.append(timed("sweep", "--over", f"{KEY}=logspace(-4,0,9)"))
        if whole_loop:
            loops.append(sum(timed("run", "--set", f"{KEY}={rate}") for rate in RATES))
        print(".", end="", flush=True, file=sys.stderr)
    return {"one": min(ones), "sweep": min(sweeps), "loop": min(loops) if loops else 9 * min(ones)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["softmax", "mlp"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, help="host devices (default: one per core)")
    parser.add_argument("--no-commands", action="store_true", help="rounds only")
    parser.add_argument("--whole-loop", action="store_true", help="time nine commands, not 9 x one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-rounds", choices=list(MODELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_rounds:
        print(json.dumps(rounds(options.only_rounds, options.rounds, options.repeats, options.devices)))
        return
    report: dict = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "rounds": options.rounds, "models": {}}
    for model in options.models:
        command = [sys.executable, str(Path(__file__)), "--only-rounds", model]
        command += ["--rounds", str(options.rounds), "--repeats", str(max(3, options.repeats))]
        command += ["--devices", str(options.devices)] if options.devices else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        found = {"rounds": json.loads(done.stdout)}
        if not options.no_commands and model != "lstm":
            found["command"] = commands(model, options.rounds, options.repeats, options.whole_loop)
        report["models"][model] = found
    print(file=sys.stderr)
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['machine']}; {options.rounds} rounds, nine rates")
    print(f"{'':20}{'one run':>12}{'sweep of 9':>12}{'ratio':>8}{'loop of 9':>12}{'ratio':>8}")
    for model, found in report["models"].items():
        for what, unit in (("command", 1.0), ("rounds", 1000.0)):
            if what in found:
                one, sweep, loop = (found[what][name] for name in ("one", "sweep", "loop"))
                name = f"{model}, {'command s' if what == 'command' else 'ms a round'}"
                cells = f"{one * unit:12.3f}{sweep * unit:12.3f}{sweep / one:8.2f}{loop * unit:12.3f}{loop / one:8.2f}"
                print(f"{name:20}{cells}")


if __name__ == "__main__":
    main()
