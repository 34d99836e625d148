"""Padding of a site's arrays to a few sizes, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["padded", "room_for"]


def room_for(rows: int) -> int:
    """Number of rows after padding: at least ``rows``, at most an eighth more (at least 16).

    A site with a little more data, or another site of similar size on the same machine, needs no new compilation.

    >>> [room_for(n) for n in (3, 16, 17, 1000, 1030)]
    [16, 16, 18, 1024, 1152]
    """
    if rows <= 16:
        return 16
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def padded(arrays: Mapping[str, Any], rows: int, room: int) -> dict[str, np.ndarray]:
    """``rows`` rows of every field, padded with zeros to ``room`` rows, in jax's dtypes."""
    out = {}
    for name, field in arrays.items():
        field = np.asarray(field)
        out[name] = np.zeros((room, *field.shape[1:]), jax.dtypes.canonicalize_dtype(field.dtype))
        out[name][:rows] = field
    return out
