"""Options for the programs that clients run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbraid.core import check_choice, check_count

__all__ = [
    "CONVOLUTIONS",
    "MATRICES",
    "PRECISIONS",
    "REMAT",
    "Convolutions",
    "LoweringOptions",
    "Matrices",
    "Precision",
    "Remat",
]

Convolutions = Literal["fast", "native"]
CONVOLUTIONS = ("fast", "native")
Precision = Literal["default", "float32", "tf32", "bfloat16"]
PRECISIONS = {"default": None, "float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}
Matrices = Literal["auto", "grown", "whole"]
MATRICES = ("auto", "grown", "whole")
Remat = Literal["none", "layers"]
REMAT = ("none", "layers")


@dataclass(frozen=True)
class LoweringOptions:
    """How the programs of clients are made fast.

    convolutions: "fast" rewrites the convolutions and max pools of any model as matrix products and reshapes;
        "native" leaves them to XLA.
    precision: number format of the factors of clients' matrix products on a GPU. "default" is jax's own: TF32 on
        NVIDIA's GPUs. A CPU computes all products in float32. Sums are always float32. "bfloat16" also stores the
        values between layers in bfloat16 on NVIDIA's GPUs.
    matrices: "grown" stores a client's weight matrix as the server's matrix plus the rows that its steps added, if the
        plan is lanes and the program of a step allows it. "whole" never does this. "auto" does it on a GPU if it saves
        memory traffic.
    remat: "layers" computes the inside of loops over layers (``lax.scan``) again for the gradient, and stores only what
        the loops carry: less memory, about a third more time. "none" stores what gradients need.
    microbatch [examples]: computes the gradient of a batch in parts of at most this many examples, one after the other,
        and adds them: less memory. The loss must be a mean over the examples of a batch. None takes whole batches.

    >>> LoweringOptions(convolutions="native").precision
    'default'
    """

    convolutions: Convolutions = "fast"
    precision: Precision = "default"
    matrices: Matrices = "auto"
    remat: Remat = "none"
    microbatch: int | None = None

    def __post_init__(self) -> None:
        check_choice("convolutions", self.convolutions, CONVOLUTIONS)
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_choice("matrices", self.matrices, MATRICES)
        check_choice("remat", self.remat, REMAT)
        if self.microbatch is not None:
            check_count("microbatch", self.microbatch)
