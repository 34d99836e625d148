"""All benchmarks of this machine with one command: tables, one JSON file, one picture.

    python benchmarks/everything.py [--out runs/benchmarks] [--peers DIR] [--scripts DIR] [--repeats 3] [--skip scale]

Runs `speed.py` (seconds a round, compared with peers), `sweep.py` (nine learning rates, compared with one) and
`scale.py` (growth with cohort and population), one after the other. Writes ``benchmarks.json``, ``benchmarks.md`` and
``benchmarks.png`` into the folder. Parts whose file exists are skipped: delete a file to repeat its part. On a GPU run
`gpu.py`, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    print(f"{script} {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def part(out: Path, name: str, make) -> dict:
    path = out / f"{name}.json"
    if not path.exists():
        path.write_text(make(), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def tables(report: dict) -> str:
    """The tables as Markdown."""
    lines = [f"Machine: {report['speed']['machine']}.", ""]
    names = sorted({name for found in report["speed"]["workloads"].values() for name in found["median"]} - {"fedbraid"})
    lines += [f"| seconds a round (ratio) | fedbraid | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 2)}"]
    for workload, found in report["speed"]["workloads"].items():
        cells = [
            f"{found['median'][name]:.4g} ({found['times_ours'][name]:.2f}x)" if name in found["median"] else ""
            for name in names
        ]
        lines.append(f"| {workload} | **{found['median']['fedbraid']:.4g}** | {' | '.join(cells)} |")
    lines += ["", "| fedbraid | compile, s | peak memory, MB | share of products | share of bandwidth | imbalance |"]
    lines.append(f"|{' --- |' * 6}")
    for workload, found in report["speed"]["workloads"].items():
        one = found["ours"]
        lines.append(
            f"| {workload} | {one['compile_seconds']:.2g} | {one['peak_memory_mb']:.0f} | "
            f"{one['share_of_products']:.2f} | {one['share_of_bandwidth']:.2f} | {one['imbalance']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def draw(report: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    from fedbraid.drawing import BLUE

    workloads = report["speed"]["workloads"]
    figure = Figure(
        figsize=(8, 0.5 + 0.33 * sum(len(f["median"]) + 1 for f in workloads.values())), layout="constrained"
    )
    axis = figure.add_subplot()
    place, ticks, labels = 0.0, [], []
    for workload, found in workloads.items():
        for name, ratio in sorted(found["times_ours"].items(), key=lambda item: item[1]):
            axis.barh(place, ratio, color=BLUE if name == "fedbraid" else "0.75")
            axis.text(ratio, place, f" {found['median'][name]:.3g} s", va="center", fontsize=8)
            ticks.append(place)
            labels.append(f"{workload}: {name}" if name == "fedbraid" else name)
            place += 1
        place += 0.7
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.axvline(1, color="0.4", lw=0.8)
    axis.set_xlabel(f"time of a round, relative to fedbraid; {report['speed']['machine']}")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--peers", default=".peers", help="folder of the peers' environments")
    parser.add_argument("--scripts", help="folder of the peers' scripts for W1 and W2")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--skip", nargs="+", default=[], choices=("sweep", "scale"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    scripts = ["--scripts", options.scripts] if options.scripts else []
    speed = ("--json", "--peers", options.peers, "--repeats", options.repeats, *scripts)
    report = {"speed": part(options.out, "speed", lambda: run("speed.py", *speed))}
    if "sweep" not in options.skip:
        report["sweep"] = part(options.out, "sweep", lambda: run("sweep.py", "--json"))
    if "scale" not in options.skip:
        if not (options.out / "scale.json").exists():
            run("scale.py", "--out", str(options.out))
        report["scale"] = json.loads((options.out / "scale.json").read_text(encoding="utf-8"))
    (options.out / "benchmarks.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (options.out / "benchmarks.md").write_text(tables(report), encoding="utf-8")
    draw(report, options.out / "benchmarks.png")
    print(tables(report))


if __name__ == "__main__":
    main()
