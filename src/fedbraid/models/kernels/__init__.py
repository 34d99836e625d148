"""Kernels for NVIDIA GPUs, written in Pallas: what XLA does in several passes over memory, in one.

Import the modules where they are used: Pallas takes a while to load, and most machines have no use for it.
"""

from __future__ import annotations

from functools import cache

import jax

__all__ = ["available", "interpreted"]

OLDEST = 8.0  # compute capability: tensor cores that take float32 as TF32
DEVICE = "jax_default_device"


def available() -> bool:
    """Whether what is traced now runs where these kernels do."""
    device = getattr(jax.config, DEVICE)
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return platform in ("gpu", "cuda") and _recent()


@cache
def _recent() -> bool:
    """Whether the GPUs here are NVIDIA's, and not too old."""
    gpu = jax.devices("gpu")[0]
    if "rocm" in gpu.client.platform_version.lower():
        return False
    return float(getattr(gpu, "compute_capability", 0)) >= OLDEST


def interpreted() -> bool:
    """Whether kernels are played rather than run: on a CPU, for tests."""
    return jax.default_backend() == "cpu"
