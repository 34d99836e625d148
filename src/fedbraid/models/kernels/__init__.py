"""Kernels for NVIDIA GPUs, written in Pallas: what XLA does in several passes over memory, in one.

Import the modules where they are used: Pallas takes a while to load, and most machines have no use for it.
"""

from __future__ import annotations

from functools import cache

import jax
from jax.extend.backend import get_backend

__all__ = ["available", "interpreted"]

OLDEST = 8.0  # compute capability: tensor cores that take float32 as TF32


@cache
def available() -> bool:
    """Whether this machine's devices run these kernels."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in get_backend().platform_version.lower():
        return False
    return float(getattr(device, "compute_capability", 0)) >= OLDEST


def interpreted() -> bool:
    """Whether kernels are played rather than run: on a CPU, for tests."""
    return jax.default_backend() == "cpu"
