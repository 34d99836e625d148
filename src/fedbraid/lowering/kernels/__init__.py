"""Kernels for NVIDIA GPUs, written in Pallas: what XLA does in several passes over memory, in one.

Import the modules where they are used: Pallas takes a while to load, and most machines have no use for it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp

__all__ = ["available", "interpreted", "platform", "precision", "stored"]

EXACT, HALF = ("float32", "highest", "F32_F32_F32"), ("bfloat16", "BF16_BF16_F32")
OLDEST = 8.0  # compute capability: tensor cores that take float32 as TF32
DEVICE = "jax_default_device"
PRECISION = "jax_default_matmul_precision"


def platform() -> str:
    """Where what is traced now runs."""
    device = getattr(jax.config, DEVICE)
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def available() -> bool:
    """Whether what is traced now runs where these kernels do."""
    return platform() in ("gpu", "cuda") and _recent()


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


def precision() -> Literal["exact", "default", "bfloat16"]:
    """How products of float32 are asked for where this is called."""
    how = str(getattr(jax.config, PRECISION))
    return "exact" if how in EXACT else "bfloat16" if how in HALF else "default"


def stored() -> Any:
    """The type in which values between two kernels are kept."""
    return jnp.bfloat16 if precision() == "bfloat16" else jnp.float32
