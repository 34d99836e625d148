"""How exactly the clients' matrix products are computed, on machines that have a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from fedbraid.core import Algorithm
from fedbraid.local import map_work

__all__ = ["PRECISIONS", "Precision", "with_precision"]

Precision = Literal["default", "float32", "tf32", "bfloat16"]
PRECISIONS = {"default": None, "float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}


def with_precision(alg: Algorithm, how: Precision) -> Algorithm:
    """``alg`` whose clients round the factors of their products as asked; sums and all else stay float32.

    "default" is jax's own: TF32 on NVIDIA's GPUs, float32 on a CPU, where every choice is float32. With "bfloat16",
    what one convolution hands to the next on a GPU is kept in it.
    """
    if how == "default":
        return alg

    def change(function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            with jax.default_matmul_precision(PRECISIONS[how]):
                return function(*args)

        return run

    return map_work(alg, change)
