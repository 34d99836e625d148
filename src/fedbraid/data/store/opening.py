"""Open a store as memory maps, read its header, and check its files."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.names import check_name
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store.layout import DTYPES, FORMAT, HEADER, INDEX, SPLITS, TEXT, VERSION, TextRows, files_of
from fedbraid.limited_json import read_json

__all__ = ["is_store", "open_store", "read_header", "verify"]

HEADER_BYTES = 256 << 20  # a vocabulary may be long


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a complete store."""
    return (Path(path) / HEADER).is_file()


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a store. Format, names and sizes are checked, and file names outside of the folder are refused."""
    file = Path(path) / HEADER
    if not file.is_file():
        raise ValueError(f"{path} is not a store (no {HEADER}); import raw files with `fedbraid data import`")
    try:
        header = read_json(file.read_bytes(), size=HEADER_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: the header is damaged ({error}); import the data again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{file}: not a header of a {FORMAT}")
    if header.get("version") != VERSION:
        raise ValueError(f"{file}: store version {header.get('version')!r}, this release reads {VERSION}")
    try:
        for entry in header["splits"].values():
            for name in files_of(entry):
                if not isinstance(name, str) or Path(name).name != name or name.startswith(".") or "\0" in name:
                    raise ValueError(f"{file}: the file name {name!r} is outside of the store; refused")
            for field in entry["fields"]:
                check_name(field, f"{file}: field")
            _check_counts(entry, file)
        if "train" not in header["splits"]:
            raise KeyError("train")
        check_name(header["name"], f"{file}: name")
        _check_info(header.get("info", {}), file)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: the header lacks {error}; import the data again") from error
    return header


def _check_counts(entry: Mapping[str, Any], file: Path) -> None:
    """Numbers of clients, examples and bytes must be integers from 0; then file sizes show whether they are true."""
    numbers = [entry["clients"], entry["examples"], *(record["bytes"] for record in files_of(entry).values())]
    shapes = [n for record in entry["fields"].values() if record["dtype"] != TEXT for n in record["shape"]]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or not all(
        type(n) is int and n > 0 for n in shapes
    ):
        raise ValueError(f"{file}: a size in the header is not a number from 0; import the data again")
    if not entry["fields"]:
        raise ValueError(f"{file}: a split has no fields; import the data again")


def _check_info(info: Any, file: Path) -> None:
    classes = info.get("classes")
    if classes is not None and (type(classes) is not int or not 0 < classes < 1 << 31):
        raise ValueError(f"{file}: info: classes = {classes!r} is not a number of labels; import the data again")


def open_store(path: str | os.PathLike[str], *, in_memory: bool = False) -> FederatedData:
    """Open a store as memory maps, or read it into memory. File sizes are checked here, checksums by `verify`."""
    folder = Path(path)
    header = read_header(folder)
    entries = header["splits"]
    try:
        splits = {"train": open_split(folder, entries["train"], in_memory=in_memory)}
        for name in SPLITS[1:]:
            if name in entries:
                splits[name] = open_split(folder, entries[name], in_memory=in_memory, train_ids=splits["train"].ids)
        spec = header.get("preprocess")
        return FederatedData(
            train=splits["train"],
            test=splits.get("test"),
            name=header["name"],
            info=header.get("info", {}),
            preprocess=Pipeline.of(*spec) if spec else None,
            validation=splits.get("validation"),
            unseen=splits.get("unseen"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / HEADER}: the header lacks {error}; import the data again") from error


def verify(path: str | os.PathLike[str]) -> int:
    """Compare every file with its SHA-256 in the header; a difference raises an error. Returns the bytes read."""
    folder, total = Path(path), 0
    for entry in read_header(folder)["splits"].values():
        for name, record in files_of(entry).items():
            digest = hashlib.sha256()
            with (folder / name).open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
                    total += len(block)
            if digest.hexdigest() != record["sha256"]:
                raise ValueError(
                    f"{folder / name}: wrong checksum: the file has changed since it was written; import the data again"
                )
    return total


def open_split(
    folder: Path, entry: Mapping[str, Any], *, in_memory: bool = False, train_ids: Sequence[str] = ()
) -> Split:
    clients, examples = entry["clients"], entry["examples"]

    def column(record: Mapping[str, Any], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        file = folder / record["file"]
        if not file.is_file():
            raise ValueError(f"{file}: missing; the store is incomplete, import the data again")
        if file.is_symlink() and file.resolve().parent != folder.resolve():
            raise ValueError(f"{file}: a link to a file outside of the store; refused")
        size, expected = file.stat().st_size, dtype.itemsize * math.prod(shape)
        if size != expected or size != record["bytes"]:
            raise ValueError(
                f"{file}: {size} bytes, expected {expected}; the file is cut short or damaged, import the data again"
            )
        if not size:
            return np.zeros(shape, dtype)
        if in_memory:
            return np.fromfile(file, dtype).reshape(shape)
        return np.memmap(file, dtype, "r", shape=shape)

    def text(record: Mapping[str, Any], count: int) -> TextRows:
        rows = column(record["rows"], INDEX, (count + 1,))
        if rows[0] != 0 or rows[-1] != record["bytes"] or np.any(np.diff(rows) < 0):
            raise ValueError(f"{folder / record['rows']['file']}: the rows of text are damaged; import the data again")
        return TextRows(column(record, np.dtype(np.uint8), (record["bytes"],)), rows)

    arrays: dict[str, Any] = {}
    for field, record in entry["fields"].items():
        if record["dtype"] == TEXT:
            arrays[field] = text(record, examples)
        elif record["dtype"] in DTYPES:
            arrays[field] = column(record, np.dtype(record["dtype"]), (examples, *record["shape"]))
        else:
            raise ValueError(f"{folder / HEADER}: field {field}: unknown type {record['dtype']!r}")
    offsets = np.array(column(entry["offsets"], INDEX, (clients + 1,)))
    if offsets[0] != 0 or offsets[-1] != examples or np.any(np.diff(offsets) < 0):
        raise ValueError(f"{folder / entry['offsets']['file']}: the offsets are damaged; import the data again")
    ids = train_ids if entry["ids"] == "train" else text(entry["ids"], clients)
    if len(ids) != clients:
        raise ValueError(f"{folder / HEADER}: {len(ids)} client ids for {clients} clients; import the data again")
    return Split(arrays, offsets, ids)
