"""Open compressed files and archives (gzip, bzip2, xz, tar, zip); paths inside an archive are checked."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

__all__ = ["is_archive", "open_binary", "read_bytes", "unpacked"]

_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def is_archive(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith((*_TAR, ".zip"))


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it if its name ends in .gz, .bz2, .xz or .lzma. A damaged file is a ValueError."""
    opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open}.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            yield cast(BinaryIO, file)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path}: cannot be read, damaged or cut short ({error})") from error


def read_bytes(path: Path) -> bytes:
    with open_binary(path) as file:
        return file.read()


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder itself, or a temporary folder with the unpacked archive, which is removed afterwards.

    Links, devices and members whose path is outside the folder are refused before any file is written.
    """
    if not is_archive(path):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        yield path
        return
    target = Path(tempfile.mkdtemp(prefix="fedbraid-"))
    try:
        try:
            if path.name.lower().endswith(".zip"):
                with zipfile.ZipFile(path) as archive:
                    for member in archive.infolist():
                        _refuse_escape(path, member.filename)
                        if stat.S_ISLNK(member.external_attr >> 16):
                            raise ValueError(f"{path}: the member {member.filename!r} is a link; refused")
                    archive.extractall(target)
            else:
                with tarfile.open(path) as archive:
                    members = archive.getmembers()
                    for member in members:
                        _refuse_escape(path, member.name)
                        if not (member.isfile() or member.isdir()):
                            raise ValueError(f"{path}: the member {member.name!r} is a link or a device; refused")
                    archive.extractall(target, members=members, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, lzma.LZMAError) as error:
            raise ValueError(f"{path}: cannot be unpacked, damaged or cut short ({error})") from error
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _refuse_escape(archive: Path, name: str) -> None:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in name.split("/")[0]:
        raise ValueError(f"{archive}: the member {name!r} would be written outside its folder; refused")
