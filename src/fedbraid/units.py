"""Numbers with units, for people."""

from __future__ import annotations

__all__ = ["format_bytes", "format_rate", "format_seconds"]


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


def format_rate(rounds_per_second: float) -> str:
    """How fast rounds are: rounds per second, or the duration of one if it takes longer than a second.

    >>> format_rate(12.34), format_rate(0.04), format_rate(0.004)
    ('12.3 rounds/s', '25 s a round', '4.17 min a round')
    """
    if rounds_per_second >= 1:
        return f"{rounds_per_second:.1f} rounds/s"
    return f"{format_seconds(1 / rounds_per_second)} a round"


def format_seconds(seconds: float) -> str:
    """A duration in its largest unit, three digits.

    >>> format_seconds(45.0), format_seconds(5400), format_seconds(200_000)
    ('45 s', '1.5 h', '2.31 d')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
