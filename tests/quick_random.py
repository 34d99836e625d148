"""Random bits by a compiled C function, for the tests: programs that draw random numbers compile in half the time.

JAX's generator is a loop of integer operations, and XLA compiles a copy of it for every key that a program derives.
Here it is one call of a C function instead, which computes the same bits (``test_quick_random.py``). Without a C
compiler, and with ``FEDBRAID_TEST_RANDOM=jax``, JAX's own loop is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

SOURCE = Path(__file__).with_name("threefry.c")
TARGET = "fedbraid_tests_threefry2x32"


def _library(folder: Path) -> Path | None:
    """The compiled function, made if it is not in the folder yet; None if there is no compiler, or if it fails."""
    digest = hashlib.sha256(SOURCE.read_bytes() + jaxlib.__version__.encode()).hexdigest()[:16]
    place = folder / f"threefry-{digest}.so"
    if place.exists():
        return place
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    made = place.with_suffix(f".{os.getpid()}")  # workers may compile at the same time
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(made)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        return None
    made.replace(place)
    return place


def install(folder: Path) -> None:
    """Programs that are compiled from now on call the C function, if it can be compiled into this folder."""
    place = None if os.environ.get("FEDBRAID_TEST_RANDOM") == "jax" else _library(folder)
    if place is None:
        return
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.CDLL(str(place)).threefry2x32), platform="cpu")
    call, spread = jax.ffi.ffi_lowering(TARGET), mlir.lower_fun(_spread)

    def lower(ctx: Any, *words: Any) -> Any:
        shape = ctx.avals_out[0].shape
        fits = all(aval.shape == shape or math.prod(aval.shape) == 1 for aval in ctx.avals_in)
        return (call if fits else spread)(ctx, *words)

    mlir.register_lowering(threefry2x32_p, lower, platform="cpu")


def _spread(*words: Any) -> Any:
    """Words of several shapes, brought to one shape."""
    shape = jnp.broadcast_shapes(*(word.shape for word in words))
    return threefry2x32_p.bind(*(jnp.broadcast_to(word, shape) for word in words))
