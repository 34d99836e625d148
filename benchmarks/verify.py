"""Do the kernels compute on this GPU what XLA's own operations compute? No times are measured.

    python benchmarks/verify.py [--only NAME ...] [--rounds N]

Runs the programs of gpu.py and lora.py for two rounds in several ways, from the same start:

- float32: all products in float32, by XLA alone. The others are compared with it.
- bfloat16, XLA: mixed precision, by XLA alone
- bfloat16: mixed precision with this library's kernels and rewrites, as in gpu.py
- tf32: products in TF32 with the kernels

For each parameter array it computes the error of its change, relative to the change in float32. Rounding gives both
ways in bfloat16 about the same error. A kernel that is wrong gives an error near 1 or more. An array fails if its error
is more than twice that of "bfloat16, XLA" (for tf32, too) plus 0.05. The program prints the largest errors, and ends
with status 1 if an array fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import fedbraid as fb
import gpu
from rewrites import without

PyTree = Any
ALONE = ("kernels",)  # by XLA alone
WAYS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {  # options of the engine, rewrites that are switched off
    "float32": ({"precision": "float32", "matrices": "whole"}, ALONE),
    "bfloat16, XLA": ({"precision": "bfloat16", "matrices": "whole"}, ALONE),
    "bfloat16": ({"precision": "bfloat16"}, ()),
    "tf32": ({"precision": "tf32"}, ()),
}
EXACT, PLAIN = "float32", "bfloat16, XLA"
TIMES, PLUS = 2.0, 0.05


def programs() -> dict[str, Callable[..., PyTree]]:
    """Functions of ``measure`` and of options of the engine, as those of gpu.py."""
    same, wide = np.full(200, 200), gpu.ragged(400)
    return {
        "cnn": lambda **how: gpu.cnn(same, 100, plan="lanes", chunk=100, **how),
        "cnn-ragged": lambda **how: gpu.cnn(wide, 100, plan="lanes", chunk=25, **how),
        "resnet": gpu.resnet,
        "gpt": gpu.gpt,
        "lstm": lambda **how: gpu.lstm(np.full(60, 30), 20, plan="lanes", chunk=20, **how),
        "lora": lora,
    }


def lora(*, measure: Callable[..., PyTree], **options: Any) -> PyTree:
    import lora

    given = lora.arguments().parse_args([])
    work = lora.task(given, remat=False)
    plan = {"plan": "lanes", "chunk": given.clients, "rounds": given.rounds}
    return measure(lambda _: work.algorithm, work.data, params=work.params, **plan, **options)


def change_after(many: int) -> Callable[..., PyTree]:
    """A function like `gpu.seconds_per_round` that returns how the parameters change in ``many`` rounds."""

    def change(make: Callable, split: fb.Split, *, params: PyTree, rounds: int, rates: Any = None, **options: Any):
        before = jax.tree.map(np.asarray, params)
        after = fb.simulate(make(0.05), params, split, rounds=many, **options).params
        return jax.tree.map(lambda new, old: np.asarray(new, np.float64) - old, after, before)

    return change


def errors(exact: PyTree, found: PyTree) -> dict[str, float]:
    """The relative error of each array of a tree, by its path.

    >>> errors({"a": np.array([3.0, 4.0]), "b": np.ones(2)}, {"a": np.array([3.0, 3.0]), "b": -np.ones(2)})
    {"['a']": 0.2, "['b']": 2.0}
    """
    return {
        jax.tree_util.keystr(path): float(np.linalg.norm(other - one) / max(float(np.linalg.norm(one)), 1e-30))
        for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(found), strict=True)
    }


def wrong(errors: dict[str, dict[str, float]]) -> list[str]:
    """Sentences about the arrays that fail, from the errors of each way.

    >>> wrong({"bfloat16, XLA": {"a": 0.1, "b": 0.1}, "bfloat16": {"a": 0.11, "b": 2.0}})
    ['bfloat16: b has a relative error of 2.000, 0.100 by XLA alone']
    """
    plain = errors[PLAIN]
    return [
        f"{way}: {name} has a relative error of {error:.3f}, {plain[name]:.3f} by XLA alone"
        for way, found in errors.items()
        for name, error in found.items()
        if not error <= TIMES * plain[name] + PLUS  # also if it is NaN
    ]


def verify(program: Callable[..., PyTree], rounds: int = 2) -> dict[str, dict[str, float]]:
    """The errors of a program by way and by array."""
    changes = {}
    for way, (options, off) in WAYS.items():
        jax.clear_caches()  # what was traced before had other rewrites
        with without(off):
            changes[way] = program(measure=change_after(rounds), **options)
    return {way: errors(changes[EXACT], found) for way, found in changes.items() if way != EXACT}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="only programs whose name contains one of these words")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    failed = 0
    for name, program in programs().items():
        if given.only and not any(word in name for word in given.only):
            continue
        found = verify(program, given.rounds)
        largest = ", ".join(f"{way} {max(of.values()):.3f}" for way, of in found.items())
        print(f"{name}: largest relative errors of an array: {largest}", flush=True)
        said = wrong(found)
        print("".join(f"  {line}\n" for line in said), end="", flush=True)
        failed += len(said)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
