"""GPU programs without single rewrites, and the rounding of mixed precision on a CPU.

`without` switches rewrites off, to measure what each of them saves and to check what it computes. `emulated` computes
on a CPU with the rounding of `engine.precision = "bfloat16"`, which a CPU ignores otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from fedbraid.lowering import epilogues, grown, kernels, mixed, operations, programs, updates
from fedbraid.simulation import plan

__all__ = ["REWRITES", "emulated", "without"]


def _everywhere(home: ModuleType, name: str, function: Callable) -> list[tuple[Any, str, Any]]:
    """A function of a module, also where it was imported by name."""
    old, modules = getattr(home, name), [m for key, m in sys.modules.items() if key.startswith("fedbraid")]
    return [(module, name, function) for module in modules if getattr(module, name, None) is old]


def _no_kernels() -> list[tuple[Any, str, Any]]:
    """Values between layers stay bfloat16 where they are, but everything is computed by XLA's own operations."""
    still = SimpleNamespace(available=kernels.available)
    return [(programs, "kernels", still), *_everywhere(kernels, "available", lambda: False)]


def _parts_but(*names: str) -> list[tuple[Any, str, Any]]:
    return [(mixed, "FINDERS", tuple(find for find in mixed.FINDERS if find.__name__ not in names))]


EXCESS = "--xla_allow_excess_precision=false"
REWRITES: dict[str, Callable[[], list[tuple[Any, str, Any]]]] = {  # (object, attribute, what replaces it)
    "kernels": _no_kernels,
    "epilogues": lambda: [(grown, "find_epilogues", lambda step: epilogues.Epilogues())],
    "updates": lambda: [(grown, "find_updates", lambda *args: updates.Updates())],
    "halves": lambda: [(grown, "rounded_leaves", lambda *args: [])],
    "rows": lambda: [(grown, "_shared", lambda opening: {})],
    "attention": lambda: _parts_but("attention"),
    "norms": lambda: _parts_but("normalised_rows"),
    "activations": lambda: _parts_but("activation"),
    "graphs": lambda: [(plan, "graph_options", dict)],
}


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Programs that are traced in this context are made without these rewrites."""
    with replaced(change for name in names for change in REWRITES[name]()):
        yield


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for thing, attribute, instead in changes:
            stack.enter_context(mock.patch.object(thing, attribute, instead))
        yield


@contextmanager
def emulated() -> Iterator[None]:
    """Programs that are traced in this context round as on a GPU with `engine.precision = "bfloat16"`.

    Values between layers, their gradients and the factors of products are bfloat16. Convolutions and products add in
    float32, as a GPU does, and round once. XLA leaves such roundings out unless the flag EXCESS is in XLA_FLAGS.
    """
    if EXCESS not in os.environ.get("XLA_FLAGS", ""):
        raise RuntimeError(f"set XLA_FLAGS={EXCESS} before jax starts: without it XLA computes in float32")
    plain, last = operations.conv2d, mixed._product

    def conv2d(x: jax.Array, kernel: jax.Array, **how: Any) -> jax.Array:
        return plain(*(_wide(a) for a in (x, kernel)), **how).astype(jnp.result_type(x, kernel))

    def product(equation: Any, values: list[mixed.Value], ahead: bool) -> list[mixed.Value]:
        return last(equation, [value._replace(array=_rounded(value.array)) for value in values], ahead)

    still = SimpleNamespace(available=lambda: True)
    changes = [(programs, "kernels", still), (mixed, "_product", product), *_everywhere(operations, "conv2d", conv2d)]
    with replaced(changes):
        yield


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def _rounded(array: jax.Array) -> jax.Array:
    return array.astype(jnp.bfloat16).astype(jnp.float32) if array.dtype == jnp.float32 else array
