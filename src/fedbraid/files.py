"""Files that are either the old ones or the new ones, never a part: written beside their place, synced and renamed.

A folder that one process writes at a time has a lock file, see `holding`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from fedbraid.notices import notice

__all__ = ["PARTIAL", "InUse", "holding", "replacing", "sync", "sync_folder", "write_bytes", "write_text"]

PARTIAL = ".partial-"  # the start of the names of files that are still being written
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks says one of these
BYTE = 1 << 30  # on Windows a lock covers bytes and prevents reading them: this one is after the content
UNSIGNED = 2.0  # seconds to wait for the name of a process that has just taken a lock


class InUse(ValueError):
    """Another process holds the lock; the message names the process."""


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
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name[-100:]}")
    try:
        if mode is not None:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield partial
        sync(partial)
        os.replace(partial, path)
    except OSError as error:
        _drop(partial)
        if error.errno is None:  # of a library; its text has the reason
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except BaseException:
        _drop(partial)
        raise
    sync_folder(path.parent)


def _drop(partial: Path) -> None:
    with contextlib.suppress(OSError):  # the error that made the writing fail is the one to report
        partial.unlink(missing_ok=True)


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
        sync(folder)


def sync(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def holding(lock: Path) -> Iterator[None]:
    """Hold the lock file ``lock``, which must be in an existing folder. If another process holds it, `InUse` names it.

    The operating system releases the lock of a process that ends, also of one that was killed. A lock file that is left
    behind therefore stops nobody.
    """
    descriptor = _acquire(lock)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # Windows does not delete a file that is open: it stays, without a lock
        os.close(descriptor)


def _acquire(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock(descriptor, lock):
                raise InUse(_owner(lock))
            # the process that held the lock before may have deleted the file after it was opened here
            if _is_at(descriptor, lock):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, path: Path) -> bool:
    """Lock an open file; False if another process has it."""
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt

            os.lseek(descriptor, BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            notice(
                f"{path.parent}: this file system has no locks, so nothing prevents a second process from writing to "
                "this folder. Start only one"
            )
            return True
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    return True


def _sign(descriptor: int) -> None:
    """Write into the lock file who holds it."""
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text.encode())


def _owner(lock: Path) -> str:
    """The sentence that names the process that holds a lock."""
    who = "another process"
    until = time.monotonic() + UNSIGNED
    while True:
        try:
            held = json.loads(lock.read_text())
            who = f"process {held['pid']} on {held['host']}, since {held['since']}"
            break
        except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and has not written its name yet
            if time.monotonic() > until:
                break
            time.sleep(0.01)
    return f"{lock.parent} is in use by {who}: wait until that process ends, or end it"
