"""Files that are either the old ones or the new ones, never a part: written beside their place, synced and renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL", "replacing", "sync_folder", "write_bytes", "write_text"]

PARTIAL = ".partial-"  # the start of the names of files that are still being written


@contextlib.contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[Path]:
    """A path beside ``path`` to write to. At the end it is synced to the disk and takes the place of ``path``.

    If the writing fails, ``path`` keeps its old content and the partial file is deleted. ``mode`` sets the permissions,
    for example 0o600 for a file that only its owner may read.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "notes.txt"
    >>> with replacing(place) as partial:
    ...     _ = partial.write_text("whole")
    >>> place.read_text()
    'whole'
    """
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name[:100]}")
    try:
        if mode is not None:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield partial
        _sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Replace the file at ``path`` with ``content``."""
    with replacing(path, mode=mode) as partial:
        partial.write_bytes(content)


def write_text(path: Path, content: str, *, mode: int | None = None) -> None:
    """Replace the file at ``path`` with ``content`` in UTF-8."""
    write_bytes(path, content.encode("utf-8"), mode=mode)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable. Systems that cannot open folders (Windows) need no such step."""
    if hasattr(os, "O_DIRECTORY"):
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
