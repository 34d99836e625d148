"""Options of XLA for programs that its defaults do not suit.

A pilot on a CPU spends most of its time in the compiler. Options shorten that:

- ``BRIEF``: the older code generator for loops, one part of code instead of many small ones, and a lower level of
  optimization. The rounds of a pilot compile in 0.4 of the time and run as fast. Initial weights, whose random numbers
  take long to compile at the usual level, stay the same to the last bit; other numbers differ by rounding errors.
- ``ONCE``: no optimization, for programs that run so rarely that it does not pay. Numbers differ by rounding errors.

Clients of different sizes on the lanes of a GPU are loops of unknown length:

- ``GRAPHS``: loops run as CUDA graphs, so the GPU does not wait for the host after each step. Numbers do not change.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

from fedbraid.lowering import kernels

__all__ = ["BRIEF", "GRAPHS", "ONCE", "brief_options", "graph_options"]

BRIEF: Mapping[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_backend_optimization_level": 1,
}
ONCE: Mapping[str, Any] = {**BRIEF, "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
GRAPHS: Mapping[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": 1,
}


def brief_options(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the wanted options that the compiler of this machine has; none if it does not compile for a CPU.

    >>> brief_options({"xla_no_such_option": True})
    {}
    """
    return _known(wanted) if jax.default_backend() == "cpu" else {}


def graph_options() -> dict[str, Any]:
    """The options GRAPHS on an NVIDIA GPU, else none. An option that ``XLA_FLAGS`` sets is left as it is."""
    if not kernels.available():
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    return _known({name: value for name, value in GRAPHS.items() if name not in given})


def _known(wanted: Mapping[str, Any]) -> dict[str, Any]:
    if _knows(*wanted.items()):
        return dict(wanted)
    return {name: value for name, value in wanted.items() if _knows((name, value))}


@functools.cache
def _knows(*options: tuple[str, Any]) -> bool:
    """Whether the compiler accepts options. XLA's options change between versions of jaxlib."""
    try:
        jax.jit(lambda x: x).lower(0.0).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True
