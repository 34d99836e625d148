"""Open compressed files and archives (gzip, bzip2, xz, tar, zip).

Paths inside an archive are checked, and so are sizes: see ``fedbraid.data.limits``.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from fedbraid.data.limits import check_size, regular

__all__ = ["is_archive", "open_binary", "read_bytes", "unpacked"]

_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open}
_RECORD = 512  # bytes that a member takes at least: its header
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,  # an encrypted zip
    NotImplementedError,  # an unknown compression
    UnicodeError,
)


def is_archive(path: Path) -> bool:
    """Whether a path is a file with the name of a tar or zip archive."""
    return path.is_file() and path.name.lower().endswith((*_TAR, ".zip"))


class _Counted:
    """A decompressing file that refuses to return more bytes than its compressed size justifies."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path, self.packed, self.total = file, path, path.stat().st_size, 0

    def read(self, size: int = -1) -> bytes:
        if size >= 0:
            return self._block(size)
        blocks = []
        while block := self._block(1 << 22):
            blocks.append(block)
        return b"".join(blocks)

    def _block(self, size: int) -> bytes:
        block = self.file.read(size)
        self.total += len(block)
        check_size(self.path, self.total, self.packed)
        return block


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it if its name ends in .gz, .bz2, .xz or .lzma. A damaged file is a ValueError.

    A decompressed file has ``read`` only.
    """
    opener = _OPENERS.get(path.suffix.lower())
    regular(path)
    try:
        if opener is None:
            with path.open("rb") as file:
                yield file
        else:
            with opener(path, "rb") as file:
                yield cast(BinaryIO, _Counted(file, path))
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read, damaged or cut short ({error})") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed if it is compressed."""
    with open_binary(path) as file:
        return file.read()


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The file or folder itself, or a temporary folder with the unpacked archive, which is removed afterwards.

    Refused before any file is written: links, devices, members whose path is outside the folder, and archives that
    declare far more bytes than they have, or more than the disk has.
    """
    if not is_archive(path):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        if not path.is_dir():
            regular(path)
        yield path
        return
    target = Path(tempfile.mkdtemp(prefix="fedbraid-"))
    try:
        try:
            if path.name.lower().endswith(".zip"):
                with zipfile.ZipFile(path) as archive:
                    total = 0
                    for member in archive.infolist():
                        total = _admit(path, member.filename, total, member.file_size)
                        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                            raise ValueError(f"{path}: the member {member.filename!r} is a link or a device; refused")
                    _room(path, total, target)
                    archive.extractall(target)
            else:
                with tarfile.open(path) as archive:
                    members, total = [], 0
                    for member in archive:
                        total = _admit(path, member.name, total, member.size)
                        if not (member.isfile() or member.isdir()):
                            raise ValueError(f"{path}: the member {member.name!r} is a link or a device; refused")
                        members.append(member)
                    _room(path, total, target)
                    archive.extractall(target, members=members, filter="data")
        except _DAMAGED as error:
            raise ValueError(f"{path}: cannot be unpacked, damaged or cut short ({error})") from error
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _admit(archive: Path, name: str, total: int, size: int) -> int:
    """The bytes of all members so far, this one included; its name and that sum are checked."""
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in name.split("/")[0] or "\0" in name:
        raise ValueError(f"{archive}: the member {name!r} would be written outside its folder; refused")
    if size < 0:
        raise ValueError(f"{archive}: the member {name!r} declares {size} bytes; damaged")
    total += size + _RECORD
    check_size(archive, total, archive.stat().st_size)
    return total


def _room(archive: Path, total: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ValueError(
            f"{archive}: unpacks to {total:,} bytes, {folder.parent} has {free:,} free; set TMPDIR to a larger disk"
        )
