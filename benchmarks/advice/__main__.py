"""Defaults, advice and self-tuning methods against tuned methods, on 65 federations.

    python benchmarks/advice prepare   [NAME ...] --data DATA [--files FILES]
    python benchmarks/advice reference NAME ... --data DATA --out OUT
    python benchmarks/advice defaults  NAME ... --data DATA --out OUT
    python benchmarks/advice grids     NAME ... --data DATA --out OUT
    python benchmarks/advice score     NAME ... --data DATA --out OUT --candidate 'LABEL=METHOD {"client_lr": 0.3}' ...
    python benchmarks/advice advise    NAME ... --data DATA --out OUT --hook MODULE:FUNCTION [--label advice]
    python benchmarks/advice seconds   NAME ... --data DATA --out OUT [--pairs 1]
    python benchmarks/advice config    NAME --data DATA
    python benchmarks/advice pack      [NAME ...] --out OUT --results FILE
    python benchmarks/advice table     [NAME ...] --out OUT [--results FILE] [--page docs/advice-benchmark.md]

- prepare writes the federations as NPZ files; FILES is a folder with femnist/ and tff-shakespeare/
- reference tunes and tests the reference methods, and sets the target
- defaults measures every method's defaults; grids tunes further methods, to find better default constants
- score measures candidates: a method and its options; METHOD alone runs it as it is
- advise calls a function of (configuration as nested mappings) that returns a mapping with algorithm, options,
  client_work and seconds, and measures what it advises. By default the configuration names no method, so the advice
  starts from the default method; with --hook library_advice:advise it starts from FedAvg's
- seconds measures the processor time of the sweep and of the advice again, in turn; the page then uses these times
- config prints a federation as a configuration (TOML)
- pack writes the figures of the results, without curves, into one file; table writes the page

NAME may be design, second, third, fourth, held-out or all. A process uses one core. Results are one JSON file per
federation; a command that was killed continues where it stopped. JAX_COMPILATION_CACHE_DIR saves compilations between
commands.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DEFAULTS = (
    *("fedavg", "fedacg", "fedcm", "fedavgm", "fedadam", "fedprox", "scaffold", "mimelite"),
    *("fedyogi", "fedadagrad", "mime", "feddyn", "fednova", "fedsgd", "minibatch_sgd", "diloco"),
)


def one_core(core: int | None) -> None:
    """Use a single core; call it before JAX is imported. ``core`` chooses one of those that the process may use."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # some sandboxes refuse it
            os.sched_setaffinity(0, {allowed[core % len(allowed)]})
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def names_of(given: list[str]) -> list[str]:
    """Names of federations; design, second, third, fourth, held-out and all stand for several."""
    from federations import BY_NAME, of_half

    groups = {half.replace(" ", "-"): of_half(half) for half in ("design", "second", "third", "fourth", "held out")}
    groups["all"] = list(BY_NAME)
    names = [name for one in given for name in groups.get(one, [one])]
    for name in names:
        if name not in BY_NAME:
            sys.exit(f"there is no federation {name!r}; there are {', '.join([*BY_NAME, *groups])}")
    return list(dict.fromkeys(names))


def candidate(text: str) -> tuple[str, str, dict[str, Any]]:
    """Label, method and options of ``LABEL=METHOD {OPTIONS}``.

    >>> candidate('slow=fedavg {"client_lr": 0.01}')
    ('slow', 'fedavg', {'client_lr': 0.01})
    """
    label, _, rest = text.partition("=")
    method, _, options = rest.strip().partition(" ")
    if not label or not method:
        sys.exit(f'--candidate {text!r}: write LABEL=METHOD or LABEL=METHOD {{"client_lr": 0.1}}')
    return label.strip(), method, json.loads(options) if options.strip() else {}


def show(lab: Any, label: str, found: dict[str, Any]) -> None:
    best = lab.results["best"]
    reached = found["rounds"] if found["rounds"] is not None else "not reached"
    print(f"{lab.federation.name:18} {label:24} {reached!s:>12} of {best['rounds']:3} ({best['method']}) "
          f"ratio {found['ratio']:.2f}  {found['test_seconds']:.1f} s", flush=True)  # fmt: skip


def measure_defaults(lab: Any, again: bool) -> None:
    known = lab.results.setdefault("candidates", {})
    for method in DEFAULTS:
        label = f"defaults: {method}"
        if again or label not in known:
            show(lab, label, lab.score(label, method, {}))


def measure_advice(lab: Any, hook: str, label: str, again: bool) -> None:
    if not again and label in lab.results.setdefault("candidates", {}):
        return
    module, _, name = hook.partition(":")
    ask = getattr(importlib.import_module(module), name)
    began, clock = time.perf_counter(), time.process_time()
    advice = ask(lab.tree)
    spent, busy = time.perf_counter() - began, time.process_time() - clock
    cost = {"advice_seconds": round(spent, 2), "advice_cpu_seconds": round(busy, 2)}
    cost |= {"client_work": float(advice["client_work"])}
    cost |= {key: advice[key] for key in ("sure", "problem") if key in advice}
    show(lab, label, lab.score(label, advice["algorithm"], advice.get("options", {}), **cost))


def measure_seconds(lab: Any, given: argparse.Namespace) -> None:
    from seconds import pairs

    lab.results["pairs"] = pairs(lab.federation.name, given.data, given.hook, given.pairs)
    lab.save()


def print_config(name: str, data: Path) -> None:
    import tomli_w
    from federations import config_tree

    print(tomli_w.dumps(config_tree(name, data)), end="")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ("prepare", "reference", "defaults", "grids", "score", "advise", "seconds", "config", "pack", "table")
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", default=["all"])
    parser.add_argument("--data", type=Path, default=Path("advice-data"), help="folder of the NPZ files")
    parser.add_argument("--out", type=Path, default=Path("advice-results"), help="folder of the JSON files")
    parser.add_argument("--reference", type=Path, help="read references from here if OUT has none")
    parser.add_argument("--files", type=Path, help="folder with femnist/ and tff-shakespeare/, for prepare")
    parser.add_argument("--candidate", action="append", default=[], help='LABEL=METHOD {"option": value}')
    parser.add_argument("--hook", default="library_advice:advise_unnamed", help="MODULE:FUNCTION that advises")
    parser.add_argument("--label", default="advice", help="the name of the advice in the results")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of a sweep and an advice that seconds measures")
    parser.add_argument("--again", action="store_true", help="measure again what is in the results")
    parser.add_argument("--rounds", type=int, help="rounds of the reference runs, for a quick trial")
    parser.add_argument("--core", type=int, help="pin the process to this core")
    parser.add_argument("--results", type=Path, help="the file of figures that pack writes and table reads")
    parser.add_argument("--page", type=Path, help="where table writes the page")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    one_core(given.core)
    if given.command == "table":
        from page import tables

        sys.exit(tables(names_of(given.names), given.out, given.page, given.results))
    if given.command == "pack":
        from page import pack

        if given.results is None:
            sys.exit("pack needs --results FILE")
        sys.exit(pack(names_of(given.names), given.out, given.results))
    for name in names_of(given.names):
        if given.command == "prepare":
            from prepare import write

            print(write(name, given.data, given.files))
        elif given.command == "config":
            print_config(name, given.data)
        else:
            work_on(name, given)


def work_on(name: str, given: argparse.Namespace) -> None:
    """One command on one federation."""
    from measure import OTHERS, Lab, clear

    lab = Lab(name, given.data, given.out, rounds=given.rounds, reference=given.reference)
    if given.command == "reference":
        lab.reference()
    elif given.command == "grids":
        lab.tune(OTHERS, "grids")
    elif "best" not in lab.results:
        sys.exit(f"{name} has no target yet: run first: python benchmarks/advice reference {name}")
    elif given.command == "defaults":
        measure_defaults(lab, given.again)
    elif given.command == "advise":
        measure_advice(lab, given.hook, given.label, given.again)
    elif given.command == "seconds":
        measure_seconds(lab, given)
    else:
        for text in given.candidate:
            label, method, options = candidate(text)
            if given.again or label not in lab.results.get("candidates", {}):
                show(lab, label, lab.score(label, method, options))
    clear()


if __name__ == "__main__":
    main()
