"""Numbers with units, for people."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(count: float) -> str:
    """A number of bytes in decimal units, three digits.

    >>> format_bytes(12_345_678), format_bytes(999), format_bytes(4e15)
    ('12.3 MB', '999 B', '4e+03 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
