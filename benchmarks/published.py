"""Published numbers: one JSON file per machine, the tables of docs/benchmarks.md made from them, and checks.

    python benchmarks/published.py --measure [FILE] [--workloads NAME ...] [--peers DIR] [--scripts DIR]
    python benchmarks/published.py --check [FILE] [--workloads NAME ...] [--new FILE]
    python benchmarks/published.py --take FILE ...
    python benchmarks/published.py --page

- --measure runs speed.py on this machine and writes its numbers into FILE, with commit, date and versions
- --check measures again and fails if a workload is more than 10% slower than in FILE, relative to a matrix product
  that is timed in the same process. So a slower machine is not a regression. --new writes what was measured
- --take FILE ... reads results of precision.py and fl_simulator.py, which ran on a GPU or with `--emulate`
- --page writes the tables of docs/benchmarks.md; `python benchmarks/gpu.py --out` and `--check` do the same on a GPU;
  `python benchmarks/eager.py --torch PYTHON --out` measures one core beside PyTorch's eager mode

FILE is by default benchmarks/results/two-cores.json. Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import record
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PICTURE = HERE.parent / "docs" / "images" / "benchmarks.svg"
CPU, GPU = HERE / "results" / "two-cores.json", HERE / "results" / "h200.json"
PROGRAMS = HERE / "results" / "h200-programs.json"
SLOWER, SLOWER_GPU = 0.10, 0.05  # shares by which a number may be worse than the published one
FAST = ("emnist-logistic", "emnist-mlp", "shakespeare-lstm", "emnist-cnn")  # what --check measures by default
LABELS = {
    "emnist-logistic": "emnist-logistic (W2), 20 clients",
    "emnist-mlp": "emnist-mlp 300-100, 20 clients",
    "emnist-cnn": "emnist-cnn (W1), 10 clients",
    "shakespeare-lstm": "shakespeare-lstm, 10 clients",
    "cifar-resnet": "cifar-resnet (ResNet-18, group norm), 2 clients",
}
PEERS = {"FedJAX jit": "FedJAX", "PyTorch, 2 processes": "PyTorch, 2 processes", "pfl, 2 processes": "pfl, 2 processes"}
EAGER_ROWS = {
    "gpt": "GPT of 4.2 million parameters, 8 sequences of 128 tokens",
    "resnet": "ResNet-18 with group norm, 20 images of 24 x 24 x 3",
}
EAGER_NAMES = {
    "fedbraid": "fedbraid",
    "torch": "PyTorch 2.13, eager",
    "torch, channels last": "PyTorch 2.13, eager, channels last",
}
GPU_ROWS = {  # row of h200.json: (name in the table, compared with); {NAME} is another row, * an older version
    "cnn, 100 lanes": (
        "emnist-cnn, 100 clients x 10 steps x 20",
        "1,706* in a sequential PyTorch loop, 97* with XLA's grouped convolution, 42.7* with patches",
    ),
    "cnn, 100 lanes, bfloat16": (
        'the same with `engine.precision = "bfloat16"`',
        '15.2* with `engine.matrices = "whole"`, see below',
    ),
    "users, cnn": (
        "the same, without dropout, as a user writes it with equinox",
        "10.4* with the library's own network (`benchmarks/users.py --clients 100 --steps 10 --precision bfloat16`: "
        "1.04x)",
    ),
    "torch, cnn": (
        "the same network in PyTorch, by `from_torch` (`benchmarks/torch_models.py --gpu`)",
        "20.6* with the library's own network (1.01x)",
    ),
    "cnn, 25 lanes, bfloat16": ("the same 100 clients on 25 lanes, bfloat16", ""),
    "cnn-ragged, 25 lanes": (
        "emnist-cnn, ragged cohort of 100, 25 lanes",
        "9.7% masked; {cnn-ragged, vmap} for one `vmap` padded to the largest client",
    ),
    "cnn-ragged, 25 lanes, bfloat16": ('the same with `engine.precision = "bfloat16"`', "22.2* before CUDA graphs"),
    "cnn-ragged, 28 lanes, bfloat16": ("the same on 28 lanes", ""),
    "resnet, bfloat16": (
        "ResNet-18 with group norm, 24 x 24 x 3, 20 clients x 5 steps x 20, bfloat16",
        "33.4* without kernels for wide convolutions, 55.7* before mixed precision",
    ),
    "resnet, tf32": ("the same, factors in TF32", ""),
    "gpt, bfloat16": (
        "GPT of 4.2 million parameters, 128 tokens, 20 clients x 5 steps x 8, bfloat16",
        "24.9* without kernels for attention and norms, 33.0* before mixed precision",
    ),
    "gpt, tf32": ("the same, factors in TF32", ""),
    "lstm, lanes": (
        "LSTM, 20 clients x 3 steps x 10 x 80 characters",
        "11.0* with XLA's loop, 17* with JAX's own transpose",
    ),
    "lstm, lanes, bfloat16": ("the same, products in bfloat16", ""),
    "lstm-sweep, 5 lanes": ("LSTM, nine client learning rates at once", "305* for one padded `vmap` (3.1x)"),
    "sweep, lstm": (
        "LSTM, nine client learning rates in a sweep of whole runs (`benchmarks/sweep.py --models lstm`)",
        "27.9* for one run (2.3x), 251* for nine",
    ),
}
AGAINST = {  # network of gpu_torch.py: name in the table, and the row of this library in bfloat16
    "cnn": ("emnist-cnn", "cnn, 100 lanes, bfloat16"),
    "resnet": ("ResNet-18", "resnet, bfloat16"),
    "gpt": ("GPT", "gpt, bfloat16"),
}
WAYS = {"graph": "CUDA graphs", "vmap": "`vmap`", "compiled": "`vmap` and `torch.compile`"}
LORA_ROWS = {
    "lora, bfloat16": "fedbraid",
    "lora, bfloat16, remat": 'fedbraid, `engine.remat = "layers"`',
    "torch lora": "PyTorch, one client after the other",
    "torch lora compiled": "the same with `torch.compile`",
}
TASKS = {
    "femnist": "FEMNIST, CNN, 10 writers a round",
    "shakespeare": "Shakespeare, LSTM, 20 roles a round",
    "cifar10": "CIFAR-10, ResNet-18, 10 of 100 clients",
}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def stamp(about: dict[str, Any]) -> dict[str, str]:
    """Commit and date, which every number carries: a file may hold numbers of different runs."""
    return {key: about[key] for key in ("commit", "date")}


# --- CPU -------------------------------------------------------------------------------------------------------------


def measured(workloads: list[str], extra: list[str]) -> dict[str, Any]:
    """The numbers of this machine by workload, with their commit and date."""
    command = [sys.executable, str(HERE / "speed.py"), "--json", "--workloads", *workloads, *extra]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    when, found = stamp(record.about()), {}
    for workload, one in report["workloads"].items():
        ours = one["ours"]
        found[workload] = {
            "seconds": one["median"]["fedbraid"],
            "products": one["products"],
            "compile_seconds": ours["compile_seconds"],
            "peak_memory_mb": ours["peak_memory_mb"],
            "share_of_products": ours["share_of_products"],
            "masked_share": ours["masked_share"],
            "imbalance": ours["imbalance"],
            **when,
        }
        peers = {PEERS[n]: [s, one["times_ours"][n]] for n, s in one["median"].items() if n in PEERS}
        if peers:
            found[workload]["peers"] = {"rows": peers, **when}
    return found


def merged(old: dict[str, Any], new: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """The file with new numbers of some workloads. Peers that were not measured again keep their numbers and date."""
    speed = dict(old.get("speed", {}))
    for workload, one in new.items():
        peers = one.get("peers") or speed.get(workload, {}).get("peers")
        speed[workload] = one | ({"peers": peers} if peers else {})
    return old | {"about": about, "speed": speed}


def take_eager(report: dict[str, Any], path: Path = CPU) -> None:
    """Write the numbers of a run of eager.py into a file; networks that were not measured keep theirs and the date."""
    old = read(path)
    new = {network: one | stamp(record.about()) for network, one in report.items()}
    write(path, old | {"eager": old.get("eager", {}) | new})


def regressions(old: dict[str, Any], new: dict[str, Any], *, allowed: float = SLOWER) -> list[str]:
    """Sentences about workloads that became slower, relative to the matrix product timed in the same process.

    >>> old = {"cnn": {"seconds": 1.0, "products": 100.0, "commit": "abc", "date": "2026-01-01"}}
    >>> regressions(old, {"cnn": {"seconds": 2.0, "products": 109.0}})  # a machine of half the speed
    []
    >>> regressions(old, {"cnn": {"seconds": 0.5, "products": 120.0}})  # a faster machine, but a slower program
    ['cnn: 120 GFLOP of products in the time of a round, 100 at abc (2026-01-01): 20% slower']
    """
    found = []
    for workload, one in new.items():
        before = old.get(workload, {}).get("products")
        if before is not None and one["products"] > (1 + allowed) * before:
            where = f"{old[workload]['commit']} ({old[workload]['date']})"
            found.append(
                f"{workload}: {one['products']:.3g} GFLOP of products in the time of a round, {before:.3g} at {where}: "
                f"{one['products'] / before - 1:.0%} slower"
            )
    return found


def check(path: Path, workloads: list[str], new: Path | None) -> int:
    """Measure and compare; returns the exit status."""
    old = read(path).get("speed", {})
    found = measured(workloads, [])
    if new is not None:
        write(new, merged(read(path), found, record.about()))
    compared = [workload for workload in found if "products" in old.get(workload, {})]
    for workload in compared:
        before, now = old[workload]["products"], found[workload]["products"]
        print(f"{workload}: {now:.4g} GFLOP, before {before:.4g} ({now / before - 1:+.1%})")
    if not compared:
        print(f"nothing to compare with: {path} has no calibrated numbers of {', '.join(workloads)}")
        return 0 if new is not None else 2
    slower = regressions(old, found)
    print("\n".join(slower) or f"no workload is more than {SLOWER:.0%} slower than in {path.name}")
    return 1 if slower else 0


# --- GPU -------------------------------------------------------------------------------------------------------------


def take_gpu(report: dict[str, Any], path: Path = GPU) -> None:
    """Write the numbers of a run of gpu.py into its file; rows that were not measured keep their numbers and date."""
    about, old = record.about() | {"machine": report["device"], "jax": report["jax"]}, read(path)
    rows = dict(old.get("rows", {}))
    for name, one in report.items():
        if isinstance(one, dict):
            rows[name] = one | stamp(about)
    write(path, old | {"about": about, "rows": rows})


def take_runs(files: list[Path], gpu: Path = GPU, cpu: Path = CPU) -> None:
    """Write the results of precision.py and fl_simulator.py, files of JSON lines, into the file of their machine."""
    from precision import compared

    when_ = stamp(record.about())
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    runs = {one["method"]: one | when_ for one in rows if "method" in one}
    for path, here in ((gpu, False), (cpu, True)):
        tasks = compared([one for one in rows if "task" in one and (one["device"] == "cpu") == here])
        new = {"precision": {task: one | when_ for task, one in tasks.items()}, "fl_simulator": {} if here else runs}
        old = read(path)
        if any(new.values()):
            write(path, old | {key: old.get(key, {}) | one for key, one in new.items() if one})


def slower_rows(old: dict[str, Any], report: dict[str, Any], *, allowed: float = SLOWER_GPU) -> list[str]:
    """Sentences about rows of gpu.py that became slower.

    >>> old = {"lstm, lanes": {"seconds": 0.0064, "commit": "abc", "date": "2026-01-01"}}
    >>> slower_rows(old, {"device": "H200", "lstm, lanes": {"seconds": 0.0068}})
    ['lstm, lanes: 6.80 ms, 6.40 at abc (2026-01-01): 6% slower']
    """
    found = []
    for name, one in report.items():
        before = old.get(name, {}).get("seconds") if isinstance(one, dict) and "torch" not in name else None
        if before is not None and one["seconds"] > (1 + allowed) * before:
            where = f"{old[name]['commit']} ({old[name]['date']})"
            share = one["seconds"] / before - 1
            found.append(f"{name}: {1e3 * one['seconds']:.2f} ms, {1e3 * before:.2f} at {where}: {share:.0%} slower")
    return found


def check_gpu(old: dict[str, Any], report: dict[str, Any], wanted: Iterable[str], path: Path) -> int:
    """Compare the rows of a run of gpu.py with those of a file. Prints what is wrong, and returns the exit status.

    wanted: names of the rows that should have been measured. Rows of PyTorch are not compared.
    """
    ours = [name for name in wanted if "torch" not in name]
    failed = [name for name in ours if name not in report]
    compared = [name for name in ours if name in report and "seconds" in old.get(name, {})]
    slower = slower_rows(old, report)
    for line in [*(f"{name}: not measured, its program failed" for name in failed), *slower]:
        print(line)
    if not compared:
        print(f"nothing to compare: {path} has no row that was measured now; write one with --out")
    elif not slower:
        print(f"none of {len(compared)} rows is more than {SLOWER_GPU:.0%} slower than in {path.name}")
    return 2 if failed or not compared else 1 if slower else 0


# --- the page --------------------------------------------------------------------------------------------------------


def cpu_tables(found: dict[str, Any]) -> str:
    """Seconds a round with peers, and what else was measured."""
    names, first, second = list(PEERS.values()), [], []
    for workload in LABELS:
        one = found["speed"].get(workload)
        if one is None:
            continue
        peers = one.get("peers", {"rows": {}, "commit": "", "date": ""})
        rows = peers["rows"]
        cells = [f"{rows[n][0]:.3g} ({rows[n][1]:.2f}x)" if n in rows else "" for n in names]
        cells = [f"**{c}**" if n in rows and rows[n][1] < 1 else c for n, c in zip(names, cells, strict=True)]
        best = all(ratio >= 1 for _, ratio in rows.values())
        own = f"**{one['seconds']:.3g}**" if best else f"{one['seconds']:.3g}"
        first.append([LABELS[workload], own, when(one), *cells, when(peers) if rows else ""])
        second.append(
            [
                workload,
                f"{one['compile_seconds']:.2g}",
                f"{one['peak_memory_mb']:.0f}",
                f"{one['share_of_products']:.2f}",
                f"{one['masked_share']:.2g}",
                f"{one['imbalance']:.3f}",
            ]
        )
    heads = ["seconds a round (ratio in that run)", "fedbraid", "measured", *names, "peers measured"]
    more = ["fedbraid", "compile, s", "peak memory, MB", "share of the product rate", "masked steps"]
    more.append("busiest core over the mean")
    return record.markdown(heads, first) + "\n\n" + record.markdown(more, second)


def picture(found: dict[str, Any]) -> str:
    """Bars of the peers' times of a round, divided by fedbraid's time in the same run, as SVG."""
    left, wide, row, gap = 190, 520, 22, 14
    bars = {label: found["speed"][name].get("peers", {"rows": {}})["rows"] for name, label in LABELS.items()}
    bars = {label: {"fedbraid": (None, 1.0), **rows} for label, rows in bars.items() if rows}
    unit = wide / max(ratio for rows in bars.values() for _, ratio in rows.values())
    lines, y = [], 10
    for label, rows in bars.items():
        y += row
        lines.append(f'<text x="0" y="{y - 6}" font-weight="bold">{label}</text>')
        for peer, (_, ratio) in sorted(rows.items(), key=lambda one: one[1][1]):
            color = "#0072b2" if peer == "fedbraid" else "#bfbfbf"
            lines.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{peer}</text>')
            lines.append(f'<rect x="{left}" y="{y}" width="{unit * ratio:.1f}" height="{row - 4}" fill="{color}"/>')
            lines.append(f'<text x="{left + unit * ratio + 6:.1f}" y="{y + 15}">{ratio:.2f}</text>')
            y += row
        y += gap
    one = left + unit
    lines.append(f'<path d="M{one:.1f} 10V{y - gap}" stroke="#404040"/>')
    lines.append(
        f'<text x="{left}" y="{y + 8}">time of a round, divided by the time of fedbraid in the same run</text>'
    )
    size = f'viewBox="-10 0 {left + wide + 70} {y + 22}" width="{left + wide + 70}" height="{y + 22}"'
    sheet = f'<rect x="-10" width="{left + wide + 70}" height="{y + 22}" fill="#ffffff"/>'
    style = 'font-family="sans-serif" font-size="13" fill="#202020"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', sheet, *lines, "</svg>", ""])


def in_short(found: dict[str, Any]) -> str:
    """The sentence of README.md about other frameworks: their lowest and highest ratios."""
    ratios: dict[str, list[float]] = {}
    for one in found["speed"].values():
        for peer, (_, ratio) in one.get("peers", {"rows": {}})["rows"].items():
            ratios.setdefault(peer.partition(",")[0], []).append(ratio)
    said = {peer: f"{min(ratios[peer]):.2f} to {max(ratios[peer]):.2f} times" for peer in ("FedJAX", "pfl", "PyTorch")}
    return f"a round takes FedJAX {said['FedJAX']} as long, pfl {said['pfl']}, PyTorch {said['PyTorch']}"


def eager_table(found: dict[str, Any]) -> str:
    """Milliseconds of a local step on one core, here and in PyTorch's eager mode."""
    rows = []
    for network, label in EAGER_ROWS.items():
        one = found.get("eager", {}).get(network)
        if one is None:
            continue
        for name, program in one["programs"].items():
            cells = [f"{1e3 * program['median']:.0f}", f"{program['share_of_products']:.2f}"]
            ratio = f"{program['ratio']:.2f}" if "ratio" in program else ""
            rows.append([label, EAGER_NAMES[name], *cells, ratio, when(one)])
    heads = ["a local step on one core", "program", "ms", "share of the product rate", "fedbraid's time over its time"]
    return record.markdown([*heads, "measured"], rows)


def gpu_table(found: dict[str, Any]) -> str:
    """Milliseconds a round on the GPU."""
    rows = []
    for name, (label, compared) in GPU_ROWS.items():
        one = found["rows"].get(name)
        if one is None:
            continue

        def other(match: re.Match[str], own: float = one["seconds"]) -> str:
            seconds = found["rows"][match[1]]["seconds"]
            return f"{1e3 * seconds:.1f} ({seconds / own:.1f}x)"

        rows.append([label, f"{1e3 * one['seconds']:.1f}", when(one), re.sub(r"\{(.*?)\}", other, compared)])
    return record.markdown(["", "ms a round", "measured", "compared with"], rows)


def against_table(found: dict[str, Any]) -> str:
    """Milliseconds a round here and in PyTorch's ways."""
    rows, lines = found["rows"], []
    for network, (label, own) in AGAINST.items():
        cells, best = [], float("inf")
        for way in WAYS:
            times = {how: rows.get(f"torch {network} {way}, {how}", {}).get("seconds") for how in ("bfloat16", "tf32")}
            known = {how: seconds for how, seconds in times.items() if seconds is not None}
            best = min([best, *known.values()])
            cells.append(", ".join(f"{1e3 * s:.1f}{' (TF32)' if how == 'tf32' else ''}" for how, s in known.items()))
        if best < float("inf"):
            ours = rows[own]["seconds"]
            lines.append([label, f"{1e3 * ours:.1f}", *cells, f"{best / ours:.1f}x", when(rows[own])])
    heads = ["ms a round, bfloat16", "fedbraid", *(f"PyTorch, {way}" for way in WAYS.values())]
    return record.markdown([*heads, "its best over fedbraid", "measured"], lines)


def lora_table(found: dict[str, Any]) -> str:
    """LoRA on the shapes of SmolLM2-135M: time and memory."""
    lines = []
    for name, label in LORA_ROWS.items():
        one = found["rows"].get(name)
        if one is None:
            continue
        cells = [f"{1e3 * one['seconds']:.0f}", f"{one['tokens_per_second']:,.0f}", f"{one['peak'] / 1e9:.2f}"]
        multiple = f"{one['peak'] / (one['base'] + one['activations']):.2f}" if "base" in one else ""
        sent = f"{one['up_per_client'] / 1e6:.2f}" if "up_per_client" in one else ""
        lines.append([label, *cells, multiple, sent, when(one)])
    heads = ["LoRA, bfloat16", "ms a round", "tokens a second", "peak memory, GB", "over base and activations"]
    return record.markdown([*heads, "MB sent up by a client", "measured"], lines)


def accuracy_table(*files: dict[str, Any]) -> str:
    """Accuracy with bfloat16 and with float32."""
    lines = [
        [
            label,
            one["rounds"],
            "CPU, emulated" if one["device"] == "cpu" else one["device"],
            f"{one['float32']:.2f}",
            f"{one['bfloat16']:.2f}",
            f"{one['difference']:+.2f} ({one['error']:.2f})",
            one["seeds"],
            when(one),
        ]
        for task, label in TASKS.items()
        for found in files
        if (one := found.get("precision", {}).get(task)) is not None
    ]
    heads = ["accuracy, %", "rounds", "computed on", "float32", "bfloat16", "difference (standard error)", "seeds"]
    return record.markdown([*heads, "measured"], lines)


def fl_simulator_table(found: dict[str, Any]) -> str:
    """Accuracies in FL-Simulator's setting."""
    lines = []
    for method, one in found.get("fl_simulator", {}).items():
        curve = {int(at): score for at, score in one["accuracy"].items()}
        some = [f"{curve[at]:.1f}" if at in curve else "" for at in (100, 200, 300, 400, 600)]
        seconds = one["seconds_per_round"]
        lines.append([method, *some, f"{one['published_after_1000']:.2f}", f"{seconds:.3f}", when(one)])
    heads = ["accuracy, % after round", "100", "200", "300", "400", "600", "published after 1,000"]
    return record.markdown([*heads, "seconds a round", "measured"], lines)


def programs_table(found: dict[str, Any]) -> str:
    """Kernels, bytes and memory of programs that were compiled for a GPU, without one."""
    rows = []
    for name, one in found["rows"].items():
        total = f"{one['total'] / 1e9:.2f} ({one['multiple']:.2f}x)" if "total" in one else ""
        numbers = [f"{one['kernels']:,}", f"{one['bytes'] / 1e9:.1f}", f"{one['memory'] / 1e9:.2f}", total]
        rows.append([f"`{name}`", *numbers, when(one)])
    heads = ["row of `gpu.py` or `lora.py`", "kernels", "GB moved", "GB of memory", "all memory, GB", "compiled"]
    return record.markdown(heads, rows)


def when(one: dict[str, Any]) -> str:
    return f"{one['commit']}, {one['date']}"


def page(text: str) -> str:
    """The page with its tables made again from the files."""
    text = record.between(text, "two cores", cpu_tables(read(CPU)))
    text = record.between(text, "one core", eager_table(read(CPU)))
    text = record.between(text, "programs", programs_table(read(PROGRAMS)))
    for name, table in (("torch", against_table), ("lora", lora_table)):
        text = record.between(text, name, table(read(GPU)))
    text = record.between(text, "accuracy", accuracy_table(read(GPU), read(CPU)))
    text = record.between(text, "fl-simulator", fl_simulator_table(read(GPU)))
    return record.between(text, "h200", gpu_table(read(GPU)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", nargs="?", const=CPU, type=Path, metavar="FILE")
    what.add_argument("--check", nargs="?", const=CPU, type=Path, metavar="FILE")
    what.add_argument("--page", action="store_true")
    what.add_argument(
        "--take", nargs="+", type=Path, metavar="FILE", help="results of precision.py and fl_simulator.py"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--new", type=Path, help="with --check: write the new numbers there")
    parser.add_argument("--peers", help="folder of the peers' environments, see speed.py")
    parser.add_argument("--scripts", help="folder of the peers' scripts, see speed.py")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        PICTURE.write_text(picture(read(CPU)), encoding="utf-8")
        return 0
    if given.take:
        take_runs(given.take)
        return 0
    if given.check:
        return check(given.check, given.workloads or list(FAST), given.new)
    extra = [part for key in ("peers", "scripts") if getattr(given, key) for part in (f"--{key}", getattr(given, key))]
    new = measured(given.workloads or list(WORKLOADS), extra)
    write(given.measure, merged(read(given.measure), new, record.about()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
