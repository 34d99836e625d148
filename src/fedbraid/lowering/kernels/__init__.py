"""Kernels for NVIDIA GPUs, written in Pallas: they do in one pass over memory what XLA does in several.

Import these modules inside the functions that use them: Pallas is slow to import, and machines without a GPU do not
need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp

__all__ = ["available", "interpreted", "lowered_for", "platform", "precision", "stored"]

EXACT, HALF = ("float32", "highest", "F32_F32_F32"), ("bfloat16", "BF16_BF16_F32")
OLDEST = 8.0  # compute capability: tensor cores that take float32 as TF32
DEVICE = "jax_default_device"
PRECISION = "jax_default_matmul_precision"


def platform() -> str:
    """The platform for which programs are currently traced."""
    device = getattr(jax.config, DEVICE)
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def available() -> bool:
    """Whether programs are traced for a GPU that runs these kernels."""
    return platform() in ("gpu", "cuda") and _recent()


@cache
def _recent() -> bool:
    """Whether this machine's GPUs are NVIDIA's, and not too old."""
    gpu = jax.devices("gpu")[0]
    if "rocm" in gpu.client.platform_version.lower():
        return False
    return float(getattr(gpu, "compute_capability", 0)) >= OLDEST


def interpreted() -> bool:
    """Whether kernels run in Pallas' interpret mode: on a CPU, for tests."""
    return jax.default_backend() == "cpu"


@contextmanager
def lowered_for(kind: str = "NVIDIA H200") -> Iterator[None]:
    """Programs with kernels that are traced here can be lowered for this GPU on a machine without one.

    jax 0.11 asks for the GPU when it lowers a kernel, earlier versions do not.
    """
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def precision() -> Literal["exact", "default", "bfloat16"]:
    """The precision that is currently set for float32 products."""
    how = str(getattr(jax.config, PRECISION))
    return "exact" if how in EXACT else "bfloat16" if how in HALF else "default"


def stored() -> Any:
    """The dtype in which one kernel stores its output for the next."""
    return jnp.bfloat16 if precision() == "bfloat16" else jnp.float32
