"""JSON from files and messages of others, with limits on depth and size: Python's own parser recurses."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["DEPTH", "read_json"]

DEPTH = 64  # levels of lists and objects
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def read_json(text: str | bytes, *, depth: int = DEPTH, size: int | None = None) -> Any:
    """Parse ``text``; more than ``depth`` levels or ``size`` bytes raise a ValueError that says so.

    >>> read_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> read_json("[" * 1000)
    Traceback (most recent call last):
    ValueError: JSON nested deeper than 64 levels
    """
    if size is not None and len(text) > size:
        raise ValueError(f"JSON of {len(text)} bytes, {size} at most")
    plain = text if isinstance(text, str) else text.decode("utf-8")  # an invalid byte is a ValueError, too
    level = 0
    for token in _TOKENS.finditer(plain):
        first = token[0][0]
        level += (first in "[{") - (first in "]}")
        if level > depth:
            raise ValueError(f"JSON nested deeper than {depth} levels")
    return json.loads(plain)
