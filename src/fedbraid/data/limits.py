"""Limits on files of others: which files are opened, how much memory they may ask for, and what an error looks like.

A small file can declare an enormous size: a compressed archive, an HDF5 data set that was never written, an image. So
every reader compares declared sizes with the size of the file before it allocates. Up to ``FREE`` bytes need no
justification; above that a file may grow by at most ``RATIO``, and to at most ``SIZE`` bytes.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

__all__ = ["FREE", "RATIO", "SIZE", "block_rows", "check_size", "one_line_errors", "regular", "unlimited"]

FREE = 64 << 20
RATIO = 200
SIZE = 256 << 30

_LIMITED: ContextVar[bool] = ContextVar("limited", default=True)


@contextlib.contextmanager
def unlimited(lifted: bool = True) -> Iterator[None]:
    """Lift the limits on sizes in this context, for files that one trusts."""
    token = _LIMITED.set(not lifted)
    try:
        yield
    finally:
        _LIMITED.reset(token)


def check_size(source: object, unpacked: int, packed: int) -> None:
    """Refuse ``unpacked`` bytes that ``packed`` bytes of a file declare or have produced so far.

    >>> check_size("a.npz", 10 << 20, 1000)
    >>> check_size("a.npz", 1 << 30, 1000)
    Traceback (most recent call last):
    ValueError: a.npz: 1,000 bytes declare 1,073,741,824 bytes of data, a ratio above 200; if you trust the \
file, lift the limits (--no-limits)
    """
    if not _LIMITED.get() or unpacked <= FREE:
        return
    advice = "if you trust the file, lift the limits (--no-limits)"
    if unpacked > RATIO * packed:
        raise ValueError(
            f"{source}: {packed:,} bytes declare {unpacked:,} bytes of data, a ratio above {RATIO}; {advice}"
        )
    if unpacked > SIZE:
        raise ValueError(f"{source}: {unpacked:,} bytes of data, the limit is {SIZE:,}; {advice}")


def block_rows(packed: int) -> int:
    """Rows to read at once if each may be as large as the whole file: values of variable length can share bytes."""
    return max(64, min(1 << 16, FREE // max(1, packed)))


def regular(path: Path) -> Path:
    """The path itself if it is a file with content on disk. Pipes, sockets and devices are refused: they may never end.

    >>> regular(Path("/dev/null"))
    Traceback (most recent call last):
    ValueError: /dev/null: not a regular file (a device, a pipe or a socket); refused
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!a}: cannot be opened ({_line(error)})") from error
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path}: a folder, where a file is expected")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: not a regular file (a device, a pipe or a socket); refused")
    return path


@contextlib.contextmanager
def one_line_errors(sources: Sequence[object], kind: str) -> Iterator[None]:
    """Errors of the libraries that parse files, as one ValueError of one line that names the file.

    The readers raise ValueErrors of their own for what they check. The parsers below them raise many other types on
    damaged files.
    """
    try:
        yield
    except ValueError as error:
        text = _line(error)
        if type(error) is ValueError and text == str(error) and any(str(s) in text for s in sources):
            raise
        raise ValueError(
            f"{sources[0]}: {text}" if type(error) is ValueError else _damaged(sources, kind, error)
        ) from error
    except MemoryError as error:
        raise ValueError(f"{sources[0]}: reading it needs more memory than there is") from error
    except OSError as error:
        raise ValueError(f"{sources[0]}: cannot be read or stored ({_line(error)})") from error
    except Exception as error:
        raise ValueError(_damaged(sources, kind, error)) from error


def _damaged(sources: Sequence[object], kind: str, error: Exception) -> str:
    return f"{sources[0]}: not readable as {kind}, damaged or cut short ({type(error).__name__}: {_line(error)})"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:397]}..."
