"""The leaderboard: every global-model method on federations from files and packages, tuned with equal budgets.

    python benchmarks/leaderboard --cell FEDERATION METHOD [--data DATA] [--files FILES]
    python benchmarks/leaderboard --all [--processes N] [--seconds S] [--out OUT] [--data DATA] [--files FILES]
    python benchmarks/leaderboard --collect OUT [--commit COMMIT] [--update]
    python benchmarks/leaderboard --page

- --cell measures one cell, prints it, and says whether it agrees with docs/leaderboard.json
- --all measures all cells, one JSON file each in OUT; cells that have a file are not measured again
- --collect writes docs/leaderboard.json from the cells in OUT; with --update it replaces only these cells
- --page writes docs/leaderboard.md and its picture from docs/leaderboard.json

DATA is the folder of the federations; those that are not there are made by benchmarks/advice (some need FILES).
A cell uses one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"


def one_core() -> None:
    """Use a single core; call it before JAX is imported. Results then do not depend on the number of cores."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def prepared(name: str, given: argparse.Namespace) -> Path:
    """The folder of the data, with the federation in it."""
    if not (given.data / f"{name}.npz").exists():
        import plan  # noqa: F401  (puts benchmarks/advice on the path)
        from prepare import write

        write(name, given.data, given.files)
    return given.data


def run_cell(given: argparse.Namespace) -> None:
    """Measure one cell and compare it with the published one."""
    federation, method = given.cell
    check_names(federation, method)
    from cell import measure

    found = measure(federation, method, prepared(federation, given), rounds=given.rounds)
    if given.out is not None:
        write_cell(given.out, found)
    shown = {key: value for key, value in found.items() if not key.startswith("curve")}
    print(json.dumps(shown))
    published = DOCS / "leaderboard.json"
    if given.rounds is None and published.exists():
        print(agreement(found, json.loads(published.read_text())))


def agreement(found: dict[str, Any], board: dict[str, Any]) -> str:
    """Whether a cell agrees with the published one, in words."""
    for cell in board["cells"]:
        if (cell["federation"], cell["method"]) == (found["federation"], found["method"]):
            keys = ("score", "worst_tenth", "rounds_to_target", "passes")
            differ = [f"{k} {found.get(k)} (published {cell.get(k)})" for k in keys if found.get(k) != cell.get(k)]
            return f"differs: {', '.join(differ)}" if differ else "the same numbers as published"
    return "this cell is not published"


def write_cell(out: Path, found: dict[str, Any]) -> None:
    from fedbraid import files

    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / f"{found['federation']}--{found['method']}.json", json.dumps(found))


def check_names(federation: str, method: str) -> None:
    import plan

    for name, known, what in ((federation, plan.BY_FEDERATION, "federation"), (method, plan.BY_METHOD, "method")):
        if name not in known:
            sys.exit(f"there is no {what} {name!r} on the leaderboard; there are {', '.join(known)}")


def run_all(given: argparse.Namespace) -> None:
    """Measure all cells in several processes."""
    import plan

    for federation in plan.FEDERATIONS:
        prepared(federation.name, given)
    begin = time.time()
    for leftover in given.out.glob("*.taken"):
        leftover.unlink()
    command = [sys.executable, str(HERE), "--work", "--data", str(given.data), "--out", str(given.out)]
    command += ["--until", str(begin + given.seconds)]
    command += [] if given.rounds is None else ["--rounds", str(given.rounds)]
    workers = [subprocess.Popen(command) for _ in range(given.processes)]
    for worker in workers:
        try:
            worker.wait(max(1.0, begin + given.seconds + 5 - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()
    done = len(list(given.out.glob("*.json")))
    print(f"{done} of {len(plan.cells())} cells after {time.time() - begin:.0f} s, in {given.out}")


def work(given: argparse.Namespace) -> None:
    """Measure cells that no other process has taken, until there are none or the time is over."""
    import plan
    from cell import measure

    slowest: dict[str, float] = {}
    for federation, method in plan.cells():
        place = given.out / f"{federation}--{method}.json"
        if place.exists() or time.time() + slowest.get(federation, 10.0) > given.until:
            continue
        try:
            place.with_suffix(".taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            found = measure(federation, method, given.data, rounds=given.rounds)
        except Exception as error:  # one failing cell must not stop the others
            print(f"{federation} {method}: {type(error).__name__}: {error}", flush=True)
            continue
        write_cell(given.out, found)
        slowest[federation] = max(slowest.get(federation, 0.0), found["seconds"])
        print(f"{federation} {method}: {found.get('score')} in {found['seconds']} s", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cell", nargs=2, metavar=("FEDERATION", "METHOD"))
    what.add_argument("--all", action="store_true")
    what.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    what.add_argument("--collect", type=Path, metavar="OUT")
    what.add_argument("--page", action="store_true")
    parser.add_argument("--data", type=Path, default=Path("advice-data"), help="folder of the NPZ files")
    parser.add_argument("--files", type=Path, help="folder with femnist/ and tff-shakespeare/, to make the data")
    parser.add_argument("--out", type=Path, help="folder of the cells")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e6, help="start no cell that would end later")
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="with --collect: the commit of the code that measured the cells")
    parser.add_argument("--update", action="store_true", help="with --collect: keep the other cells")
    parser.add_argument("--rounds", type=int, help="fewer rounds, for a trial")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    one_core()
    if given.all and given.out is None:
        given.out = Path("leaderboard-cells")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    if given.cell:
        run_cell(given)
    elif given.all:
        run_all(given)
    elif given.work:
        work(given)
    elif given.collect:
        from board import collect

        print(collect(given.collect, DOCS, given.commit, update=given.update))
    else:
        from board import write_page

        write_page(DOCS)


if __name__ == "__main__":
    main()
