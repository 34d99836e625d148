"""TensorFlow Federated's HDF5 files: ``/examples/<client>/<field>``.

HDF5 can do much more than such files need: links and data sets that live in other files, filters from plug-ins, data
sets that are declared and never written. All of that is refused before anything is read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.formats.columns import need
from fedbraid.data.limits import block_rows, check_size, regular

__all__ = ["read_clients"]

_FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})  # those of HDF5 itself, and h5py's own lzf
_HEAP = b"GCOL\1\0\0\0"
_DAMAGED = (OSError, RuntimeError, KeyError, AttributeError, TypeError, ValueError, UnicodeError, OverflowError)


def read_clients(path: Path, wanted: set[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each client of a file with its fields, all of them or those ``wanted``."""
    h5py = need("h5py")
    packed, total, heaps = regular(path).stat().st_size, 0, False
    try:
        file = h5py.File(path, "r")
    except _DAMAGED as error:
        raise ValueError(f"{path}: not a readable HDF5 file, damaged or cut short ({_line(error)})") from error
    with file:
        group = _member(file, "examples", h5py.Group, str(path))
        if group is None:
            raise ValueError(f"{path}: no group 'examples', so not a file of TensorFlow Federated")
        for client in _names(group, str(path)):
            fields: dict[str, Any] = {}
            at = f"{path}: client {client}"
            members = _member(group, client, h5py.Group, at)
            for field in _names(members, at):
                if wanted is not None and field not in wanted:
                    continue
                at_field = f"{at}: field {field}"
                data = _member(members, field, h5py.Dataset, at_field)
                total += _declared(data, packed, at_field)
                check_size(path, total, packed)
                if data.dtype.hasobject and not heaps:
                    _check_heaps(path)
                    heaps = True
                fields[field] = _values(data, packed, at_field)
            yield client, fields


def _names(group: Any, at: str) -> list[str]:
    try:
        return [name if isinstance(name, str) else name.decode() for name in group]
    except _DAMAGED as error:
        raise ValueError(f"{at}: damaged or cut short ({_line(error)})") from error


def _member(group: Any, name: str, kind: type, at: str) -> Any:
    """A member of a group that lies in the same place of the same file, or None if it is not there."""
    h5py = need("h5py")
    try:
        link = group.get(name, getlink=True)
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            where = f" to {link.filename!r}" if isinstance(link, h5py.ExternalLink) else ""
            raise PermissionError(f"{name!r} is a link{where}, and links are refused")
        found = group[name]
        if not isinstance(found, kind):
            raise KeyError(f"{name!r} is not a {kind.__name__.lower()}")
        return found
    except PermissionError as error:
        raise ValueError(f"{at}: {error}") from None
    except _DAMAGED as error:
        raise ValueError(f"{at}: cannot be read, damaged or cut short ({_line(error)})") from error


def _declared(data: Any, packed: int, at: str) -> int:
    """The bytes that a data set asks for, after checks of where and how they are stored."""
    h5py = need("h5py")
    try:
        properties = data.id.get_create_plist()
        if properties.get_external_count() or data.is_virtual:
            raise PermissionError("its values are in other files; refused")
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        if unknown := [f for f in filters if f not in _FILTERS]:
            raise PermissionError(f"its filter {unknown[0]} is not one of HDF5's own; refused")
        text = h5py.check_string_dtype(data.dtype) is not None
        if (data.dtype.hasobject and not text) or data.dtype.kind not in "biufSUO":
            raise PermissionError(f"values of type {data.dtype} are not supported; only numbers and text are")
        shape, stored = data.shape, data.id.get_storage_size()
        if not shape:
            raise PermissionError("a single value, where one row per example is expected")
        size = data.dtype.itemsize * math.prod(map(int, shape))
        chunk = data.dtype.itemsize * math.prod(data.chunks or ())
    except PermissionError as error:
        raise ValueError(f"{at}: {error}") from None
    except _DAMAGED as error:
        raise ValueError(f"{at}: cannot be read, damaged or cut short ({_line(error)})") from error
    if stored > packed:
        raise ValueError(f"{at}: declares {stored:,} stored bytes, the file has {packed:,}: damaged or cut short")
    if size and not stored:
        raise ValueError(f"{at}: declares {size:,} bytes and stores none: it was never written")
    check_size(at, max(size, chunk), stored)
    return size


def _check_heaps(path: Path) -> None:
    """Refuse damaged heaps, which hold the text of a file: in one with wrong sizes HDF5 can loop for ever.

    A heap is "GCOL", version 1, its size, and objects: index (0 for the free space at the end), size, padded bytes.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        at = blob.find(_HEAP)
        while at >= 0:
            (size,) = struct.unpack_from("<Q", blob, at + 8) if at + 16 <= len(blob) else (0,)
            end, place, index = at + size, at + 16, 1
            if not 16 <= size <= len(blob) - at:
                raise ValueError(f"{path}: a heap of text is damaged or cut short")
            while index and place + 16 <= end:
                index, _, _, length = struct.unpack_from("<HHIQ", blob, place)
                place += length if not index else 16 + (length + 7) // 8 * 8
                if place > end or (not index and length < 16):
                    raise ValueError(f"{path}: a heap of text is damaged or cut short")
            at = blob.find(_HEAP, at + 8)


def _values(data: Any, packed: int, at: str) -> Any:
    try:
        if not data.dtype.hasobject:
            return data[()]
        # Rows of text may share their bytes: read some rows at a time, and count.
        rows, step, total = [], block_rows(packed), 0
        for start in range(0, len(data), step):
            block = data[start : start + step]
            total += sum(len(value) for value in block.flat)
            check_size(at, total, packed)
            rows.append(block)
        return np.concatenate(rows) if rows else data[()]
    except _DAMAGED as error:
        if type(error) is ValueError and str(error).startswith(at):
            raise
        raise ValueError(f"{at}: cannot be read, damaged or cut short ({_line(error)})") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
