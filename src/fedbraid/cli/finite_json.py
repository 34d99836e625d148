"""JSON on stdout for results that may contain infinity or NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["print_json"]


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object. JSON has no infinity and no NaN: both become null.

    >>> print_json({"rho": 0.5, "kappa": float("inf")})
    {"rho": 0.5, "kappa": null}
    """
    print(json.dumps(_finite(result), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
