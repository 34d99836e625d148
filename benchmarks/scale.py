"""Memory and time for growing populations and cohorts.

    python benchmarks/scale.py [--out FOLDER] [--only stateless stateful cohort] [--small] [--data FOLDER]

- *stateless*: FedAvg, 64 -> 10 softmax, cohorts of 100, four examples a client in a memory-mapped file (``data_in =
  host``), populations of 1,000 to 1,000,000.
- *stateful*: SCAFFOLD with a model of 100,000 weights, cohorts of 20, populations of 1,000 to 100,000. The control
  variates are stored in a folder (a dense array would take 0.4 to 40 GB), with a checkpoint every five rounds.
- *cohort*: FedAvg, 784 -> 62 softmax, 20 to 180 examples a client, batches of 10, population 2,000, cohorts of 10 to
  1,000: one client per core, and in vmapped chunks of 32.

Every row is measured in a separate process, for its peak memory. Seconds per round are those of the fastest of several
sequences of rounds after compilation, because other work on a shared machine can slow some of them down. Writes
``scale.json`` and ``scale.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

SETS = {
    "stateless": [{"population": n} for n in (1_000, 10_000, 100_000, 1_000_000)],
    "stateful": [{"population": n} for n in (1_000, 10_000, 100_000)],
    "cohort": [{"cohort": n, "plan": plan} for plan in ("sequential", "chunks") for n in (10, 30, 100, 300, 1_000)],
}
CHUNK = 32


def examples(folder: Path, population: int, sizes: np.ndarray, width: int, classes: int):
    """Synthetic examples in memory-mapped files, written once."""
    from fedbraid import Split

    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rng, arrays = np.random.default_rng(0), {}
    for name, shape, top in (("x", (int(offsets[-1]), width), 256), ("y", (int(offsets[-1]),), classes)):
        path = folder / f"{population}-{width}-{name}.bin"
        if not path.exists():
            with path.open("wb") as file:
                for start in range(0, shape[0], 1 << 16):
                    some = (min(1 << 16, shape[0] - start), *shape[1:])
                    file.write(rng.integers(0, top, some, np.uint8).tobytes())
        arrays[name] = np.memmap(path, np.uint8, "r", shape=shape)
    return Split(arrays, offsets)


def softmax(width: int, classes: int):
    import jax.numpy as jnp
    import optax

    def loss(params, batch, key):
        logits = batch["x"].astype(jnp.float32) / 255 @ params["w"] + params["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"].astype(jnp.int32))
        return jnp.sum(losses * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)

    return loss, {"w": jnp.zeros((width, classes)), "b": jnp.zeros(classes)}


def wide(params, batch, key):
    """A model with many weights and little computation, to measure the memory of client states."""
    import jax.numpy as jnp

    towards = jnp.sum(batch["x"].astype(jnp.float32) * batch["mask"][:, None]) / 255
    return 0.5 * jnp.mean((params - towards) ** 2) * 100


def one(kind: str, options: dict, data: Path) -> dict:
    """Measure one row in this process."""
    import fedbraid as fb

    devices = fb.use_cores()
    import jax.numpy as jnp

    from fedbraid.simulation import Checkpoints, simulate

    more: dict = {}
    with tempfile.TemporaryDirectory(dir=data) as folder:
        states = Path(folder) / "states"
        if kind == "stateless":
            population, cohort, rounds = options["population"], 100, 60
            split = examples(data, population, np.full(population, 4), 64, 10)
            loss, params = softmax(64, 10)
            alg, more = fb.fedavg(loss, client_lr=0.1, batch_size=4), {"data_in": "host"}
        elif kind == "stateful":
            population, cohort, rounds = options["population"], 20, 30
            split = examples(data, population, np.full(population, 1), 1, 2)
            alg, params = fb.scaffold(wide, client_lr=0.1, batch_size=1), jnp.zeros(100_000)
            more = {"states_in": states, "checkpoints": Checkpoints(Path(folder) / "checkpoints", every=5)}
        else:
            population, cohort = 2_000, options["cohort"]
            rounds = max(8, 3_000 // cohort)
            sizes = np.random.default_rng(1).integers(20, 181, population)
            split = examples(data, population, sizes, 784, 62)
            loss, params = softmax(784, 62)
            alg, more = fb.fedavg(loss, client_lr=0.1, batch_size=10), {"plan": options["plan"], "chunk": CHUNK}
        stamps: list[tuple[int, float]] = []
        warnings.simplefilter("ignore", UserWarning)  # the warning that few states are used
        run = simulate(
            alg,
            params,
            split,
            rounds=rounds,
            cohort=cohort,
            on_progress=lambda now: stamps.append((now.round, time.perf_counter())) and None,
            **more,
        )
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        row = {"kind": kind, **options, "cohort": cohort, "population": population, "devices": devices}
        row |= {"peak_memory": rss, "seconds_per_round": fastest(stamps), "data_bytes": split.nbytes}
        if kind == "cohort":
            row["steps_per_round"] = run.info.steps / rounds
        if kind == "stateful":
            file = states / "states.bin"
            row |= {
                "dense_bytes": population * 400_000,
                "state_file_bytes": file.stat().st_blocks * 512,
                "clients_asked": len(run.states.touched),
                "checkpoint_bytes": sum(p.stat().st_blocks * 512 for p in Path(folder).glob("checkpoints/**/*")) // 2,
            }
    return row


def fastest(stamps: list[tuple[int, float]], stretches: int = 4) -> float:
    """Seconds per round of the fastest sequence of rounds; the first two time stamps include compilation."""
    rounds, seconds = np.array(stamps[1:]).T
    cuts = np.unique(np.linspace(0, len(rounds) - 1, min(stretches, len(rounds) - 1) + 1).round().astype(int))
    return float(np.min(np.diff(seconds[cuts]) / np.diff(rounds[cuts])))


def report(rows: list[dict]) -> dict:
    """How memory grows with the population, and how far time is from linear growth."""
    found = {}
    for kind in ("stateless", "stateful"):
        own = [row for row in rows if row["kind"] == kind]
        if own:
            found[f"{kind}_memory_growth_bytes"] = own[-1]["peak_memory"] - own[0]["peak_memory"]
    for plan in ("sequential", "chunks"):
        own = [row for row in rows if row["kind"] == "cohort" and row["plan"] == plan]
        if plan == "chunks":  # a smaller cohort has smaller chunks: another program
            own = [row for row in own if row["cohort"] >= CHUNK * row["devices"]]
        if len(own) > 1:
            # per local step, because cohorts have different clients and so different amounts of work
            steps, seconds = np.array([[row["steps_per_round"], row["seconds_per_round"]] for row in own]).T
            a, b = np.linalg.lstsq(np.stack([steps, np.ones_like(steps)], 1) / seconds[:, None], np.ones(len(own)))[0]
            beyond = [row["peak_memory"] for row in own if row["cohort"] > CHUNK]
            found[plan] = {
                "seconds_per_step": a,
                "seconds_beside": b,
                "largest_deviation_from_line": float(np.max(np.abs((a * steps + b) / seconds - 1))),
                "memory_beyond_chunk": [min(beyond, default=0), max(beyond, default=0)],
            }
    return found


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from fedbraid.drawing import COLOURS

    kinds = [kind for kind in SETS if any(row["kind"] == kind for row in rows)]
    figure, axes = plt.subplots(2, len(kinds), figsize=(4.6 * len(kinds), 6.4), layout="constrained", squeeze=False)
    titles = {
        "stateless": "FedAvg, 4 examples a client",
        "stateful": "SCAFFOLD, 100,000 weights",
        "cohort": "FedAvg, 784 to 62 softmax",
    }
    for column, kind in enumerate(kinds):
        over = "cohort" if kind == "cohort" else "population"
        own = [row for row in rows if row["kind"] == kind]
        lines = {plan: [r for r in own if r.get("plan") == plan] for plan in dict.fromkeys(r.get("plan") for r in own)}
        for i, (plan, line) in enumerate(lines.items()):
            x = [row[over] for row in line]
            label = {"sequential": "one client per core", "chunks": f"chunks of {CHUNK}"}.get(
                plan or "", "this process, at its peak"
            )
            look = {"color": COLOURS[i], "marker": "os"[i], "label": label}
            axes[0, column].plot(x, [row["peak_memory"] / 1e9 for row in line], **look)
            axes[1, column].plot(x, [row["seconds_per_round"] for row in line], **look)
        if kind != "cohort":
            held = "dense_bytes" if kind == "stateful" else "data_bytes"
            word = "all states, dense" if kind == "stateful" else "all examples"
            x, y = [row["population"] for row in own], [row[held] / 1e9 for row in own]
            axes[0, column].plot(x, y, color=COLOURS[6], ls="--", label=word)
        else:
            steps = np.array([row["cohort"] for row in lines["sequential"]])
            first = lines["sequential"][-1]
            line = steps * first["seconds_per_round"] / first["cohort"]
            axes[1, column].plot(steps, line, color=COLOURS[6], ls="--", label="proportional")
            axes[1, column].set_yscale("log")
        for axis, what in zip(axes[:, column], ("peak memory, GB", "seconds per round"), strict=True):
            axis.set_xscale("log")
            axis.set_xlabel("clients in a round" if kind == "cohort" else "clients in all")
            axis.set_ylabel(what)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(titles[kind], fontsize=11)
        memory, time_ = axes[:, column]
        if kind == "cohort":
            memory.set_ylim(0, 2 * max(row["peak_memory"] for row in own) / 1e9)
        else:  # the stored bytes span several decades, the peak memory does not
            memory.set_yscale("log")
            memory.set_ylim(top=20 * memory.get_ylim()[1])
            time_.set_ylim(0, 1.6 * max(row["seconds_per_round"] for row in own))
        memory.legend(frameon=False, loc="upper left", fontsize=9)
        if kind == "cohort":
            time_.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"))
    parser.add_argument("--data", type=Path, help="folder for synthetic data and states (default: a temporary one)")
    parser.add_argument("--only", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--small", action="store_true", help="only the two smallest sizes of each")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        asked = json.loads(args.one)
        print(json.dumps(one(asked["kind"], asked["options"], args.data)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        data = args.data or Path(temporary)
        data.mkdir(parents=True, exist_ok=True)
        rows = []
        for kind in args.only:
            for options in SETS[kind]:
                if args.small and options.get("population", options.get("cohort", 0)) > (
                    30 if kind == "cohort" else 10_000
                ):
                    continue
                asked = json.dumps({"kind": kind, "options": options})
                command = [sys.executable, __file__, "--one", asked, "--data", str(data)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                row = rows[-1]
                memory = f"peak {row['peak_memory'] / 1e6:6.0f} MB"
                print(
                    f"{kind:10} {options.get('plan', ''):10} population {row['population']:>9,}  cohort "
                    f"{row['cohort']:>5,}  {row['seconds_per_round']:8.4f} s/round  {memory}",
                    flush=True,
                )
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    found = report(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scale.json").write_text(json.dumps({"machine": machine, "found": found, "rows": rows}, indent=1))
    draw(rows, args.out / "scale.png")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
