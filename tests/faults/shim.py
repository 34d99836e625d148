"""A layer over this process's file operations that ends it at the k-th one, tears a write, or reports a full disk.

It sees every operation of Python code below one folder: open, write, truncate, sync, rename, delete, mkdir. It does not
see what tensorstore (under orbax) and Arrow write in C++; random kills and a limit on file sizes cover these.

A crash is honest: the process ends by ``os._exit``, without any handler. A torn write leaves the first half of its
bytes. After a power cut, also what was never synced is lost: files that were written but not synced since are cut.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

CRASHED = 99  # exit status of a process that the shim ended
Kind = Literal["count", "crash", "torn", "power", "full"]


class Fault(NamedTuple):
    """What happens at operation ``at`` (from 1) below ``root``.

    crash: the process ends before the operation. torn: half of a write is done, then the process ends (other
    operations: as crash). power: as torn, and what was not synced is lost. full: this and every later write fails with
    ENOSPC. count: nothing; the number of operations is written to ``report``.
    """

    kind: Kind
    root: str
    at: int = 0
    report: str = ""


class _Shim:
    def __init__(self, fault: Fault) -> None:
        self.fault, self.done = fault, 0
        self.names: dict[int, str] = {}  # paths of open descriptors
        self.synced: dict[int, int] = {}  # by inode: size at the last sync
        self.real = {name: getattr(os, name) for name in ("write", "pwrite", "fsync", "open", "close", "rename")}

    def below(self, path: Any, dir_fd: Any = None) -> bool:
        if isinstance(path, int):
            return path in self.names
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        return text == self.fault.root or text.startswith(self.fault.root + os.sep)

    def step(self, *, tear: Any = None, grows: bool = False) -> None:
        """Count an operation; ``tear`` does half of it."""
        self.done += 1
        kind = self.fault.kind
        if kind == "full":
            if self.done >= self.fault.at and grows:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif kind != "count" and self.done == self.fault.at:
            if kind != "crash" and tear is not None:
                tear()
            if kind == "power":
                self.lose_unsynced()
            os._exit(CRASHED)

    def lose_unsynced(self) -> None:
        for path in Path(self.fault.root).rglob("*"):
            if path.is_file() and not path.is_symlink():
                stat = path.stat()
                kept = self.synced.get(stat.st_ino, stat.st_size // 2)
                if kept < stat.st_size:
                    os.truncate(path, kept)

    # -- operations

    def plain(self, name: str, *, grows: bool = False, pair: bool = False) -> None:
        """Patch an operation that takes a path, or a pair of paths."""
        real = getattr(os, name)

        def patched(path: Any, *rest: Any, **options: Any) -> Any:
            where = options.get("dir_fd", options.get("src_dir_fd"))
            if self.below(path, where) or (pair and self.below(rest[0], options.get("dst_dir_fd"))):
                self.step(grows=grows)
            return real(path, *rest, **options)

        setattr(os, name, patched)

    def install(self) -> None:
        for name in ("unlink", "remove", "rmdir", "truncate"):
            self.plain(name)
        self.plain("mkdir", grows=True)
        for name in ("rename", "replace", "link"):
            self.plain(name, pair=True)
        self._descriptors()
        builtins.open = io.open = self._opened  # type: ignore[assignment]

    def _descriptors(self) -> None:
        write, pwrite, fsync, open_, close = (self.real[n] for n in ("write", "pwrite", "fsync", "open", "close"))

        def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            mine = self.below(path, options.get("dir_fd"))
            if mine and flags & (os.O_CREAT | os.O_TRUNC):
                self.step(grows=True)
            descriptor = open_(path, flags, *rest, **options)
            if mine:
                self.names[descriptor] = os.fsdecode(path) if not isinstance(path, int) else ""
            return descriptor

        def closed(descriptor: int) -> None:
            self.names.pop(descriptor, None)
            close(descriptor)

        def wrote(descriptor: int, data: Any) -> int:
            if descriptor in self.names:
                self.step(tear=lambda: write(descriptor, bytes(data)[: len(data) // 2]), grows=True)
            return write(descriptor, data)

        def placed(descriptor: int, data: Any, at: int) -> int:
            if descriptor in self.names:
                self.step(tear=lambda: pwrite(descriptor, bytes(data)[: len(data) // 2], at), grows=True)
            return pwrite(descriptor, data, at)

        def sync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            if number in self.names:
                self.step()
            fsync(number)
            stat = os.fstat(number)
            self.synced[stat.st_ino] = stat.st_size

        os.open, os.close, os.write, os.pwrite, os.fsync = opened, closed, wrote, placed, sync  # type: ignore[assignment]

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        """``open``: files that are written go through `_Torn`."""
        if isinstance(file, int) or not set(mode) & set("wax+") or not self.below(file):
            return _OPEN(file, mode, buffering, *rest, **options)
        self.step(grows=True)
        raw = _Torn(file, mode.replace("b", "").replace("t", ""), self)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        names = dict(zip(("encoding", "errors", "newline"), rest, strict=False)) | options
        names = {name: names[name] for name in ("encoding", "errors", "newline") if name in names}
        return io.TextIOWrapper(buffered, **names)


class _Torn(io.FileIO):
    """A file whose writes are counted and may be torn."""

    def __init__(self, file: Any, mode: str, shim: _Shim) -> None:
        super().__init__(file, mode)
        self.shim = shim

    def write(self, data: Any) -> int:  # type: ignore[override]
        self.shim.step(tear=lambda: super(_Torn, self).write(bytes(data)[: len(data) // 2]), grows=True)
        written = super().write(data)
        assert written is not None
        return written


_OPEN = io.open


def install(fault: Fault) -> _Shim:
    """Patch this process; it must be a child that ends soon, since nothing is restored."""
    shim = _Shim(fault._replace(root=os.path.abspath(fault.root)))
    shim.install()
    return shim
