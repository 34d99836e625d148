"""Programs that compile fast because they run for a short time, such as those of a pilot.

A pilot on a CPU spends most of its time in the compiler. Options of XLA shorten that:

- ``LOOPS``: the older code generator for loops, and one part of code instead of many small ones. The rounds of a pilot
  compile in 0.55 of the time, run as fast, and give the same numbers.
- ``DRAWS``: a lower level of optimization, for programs that draw random numbers and run a few times. At the usual
  level the initial weights of a small convolutional network take 4 seconds to compile, at this one 0.3. The numbers are
  the same.
- ``ONCE``: no optimization, for programs that run so rarely that it does not pay. Numbers differ by rounding errors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

__all__ = ["DRAWS", "LOOPS", "ONCE", "compiler_options"]

LOOPS: Mapping[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
ONCE: Mapping[str, Any] = {**LOOPS, "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
DRAWS: Mapping[str, Any] = {"xla_backend_optimization_level": 1}


def compiler_options(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the wanted options that the compiler of this machine has; none if it does not compile for a CPU.

    >>> compiler_options({"xla_no_such_option": True})
    {}
    """
    if jax.default_backend() != "cpu":
        return {}
    return {name: value for name, value in wanted.items() if _knows(name, value)}


@functools.cache
def _knows(name: str, value: Any) -> bool:
    """Whether the compiler accepts an option. XLA's options change between versions of jaxlib."""
    try:
        jax.jit(lambda x: x).lower(0.0).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
