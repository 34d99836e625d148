"""Switches single rewrites of GPU programs off, to measure what each of them saves and to check what it computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fedbraid.lowering import epilogues, grown, kernels, mixed, programs, updates
from fedbraid.simulation import plan

__all__ = ["REWRITES", "without"]


def _everywhere(name: str, function: Callable) -> list[tuple[Any, str, Any]]:
    """A function of `fedbraid.lowering.kernels`, also where it was imported by name."""
    old, modules = getattr(kernels, name), [m for key, m in sys.modules.items() if key.startswith("fedbraid")]
    return [(module, name, function) for module in modules if getattr(module, name, None) is old]


def _no_kernels() -> list[tuple[Any, str, Any]]:
    """Values between layers stay bfloat16 where they are, but everything is computed by XLA's own operations."""
    still = SimpleNamespace(available=kernels.available)
    return [(programs, "kernels", still), *_everywhere("available", lambda: False)]


def _parts_but(*names: str) -> list[tuple[Any, str, Any]]:
    return [(mixed, "FINDERS", tuple(find for find in mixed.FINDERS if find.__name__ not in names))]


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
    with ExitStack() as stack:
        for name in names:
            for thing, attribute, instead in REWRITES[name]():
                stack.enter_context(mock.patch.object(thing, attribute, instead))
        yield
