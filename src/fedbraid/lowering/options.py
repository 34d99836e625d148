"""How clients' programs are compiled: one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbraid.core import check_choice

__all__ = ["LoweringOptions"]

Convolutions = Literal["fast", "native"]
Precision = Literal["default", "float32", "tf32", "bfloat16"]
Matrices = Literal["auto", "grown", "whole"]


@dataclass(frozen=True)
class LoweringOptions:
    convolutions: Convolutions = "fast"
    precision: Precision = "default"
    matrices: Matrices = "auto"

    def __post_init__(self) -> None:
        check_choice("convolutions", self.convolutions, ("fast", "native"))
        check_choice("precision", self.precision, ("default", "float32", "tf32", "bfloat16"))
        check_choice("matrices", self.matrices, ("auto", "grown", "whole"))
