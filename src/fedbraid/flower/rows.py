"""A site's arrays as compiled programs take them: padded to few sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["padded", "room_for"]


def room_for(rows: int) -> int:
    """Rows that a program is compiled for: at least ``rows`` and at most an eighth more.

    A site whose data grows a little, and a site of about the same size on the same machine, compile nothing new.

    >>> [room_for(n) for n in (3, 16, 17, 1000, 1030)]
    [16, 16, 18, 1024, 1152]
    """
    if rows <= 16:
        return 16
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def padded(arrays: Mapping[str, Any], rows: int, room: int) -> dict[str, np.ndarray]:
    """``rows`` rows of every field, with zeros up to ``room``, in dtypes that programs have."""
    out = {}
    for name, field in arrays.items():
        field = np.asarray(field)
        out[name] = np.zeros((room, *field.shape[1:]), jax.dtypes.canonicalize_dtype(field.dtype))
        out[name][:rows] = field
    return out
