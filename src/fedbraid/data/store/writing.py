"""Write a store in one streaming pass.

Files are written to a temporary folder next to the target, which is renamed at the end. So an import that fails leaves
no incomplete store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from fedbraid.data.federated import MASK, FederatedData
from fedbraid.data.names import check_client, check_name
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store.layout import (
    DTYPES,
    FORMAT,
    HEADER,
    INDEX,
    SPLITS,
    TEXT,
    VERSION,
    TextRows,
    bytes_of,
    files_of,
)
from fedbraid.data.store.opening import is_store, open_split, open_store

__all__ = ["StoreWriter", "write_store"]


class _Column:
    """One raw file of a split; its SHA-256 is computed while it is written."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / name
        self.file: BinaryIO = self.path.open("xb", buffering=1 << 20)
        self.hash = hashlib.sha256()
        self.bytes = 0

    def append(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.bytes += len(data)

    def close(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())  # the data must be on disk before the folder is renamed
        self.file.close()
        return {"file": self.path.name, "bytes": self.bytes, "sha256": self.hash.hexdigest()}


class _SplitFiles:
    """The files of one split while they are written."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.columns: dict[str, tuple[_Column, _Column | None]] = {}
        self.schema: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.index: dict[str, int] = {}
        self.offsets = [0]

    def append(self, client: str, arrays: Mapping[str, Any], schema: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        if not self.columns:
            self.schema = dict(schema)
            for field, (dtype, _) in schema.items():
                # Names with a dot, and these two, would be the names of other files of the split.
                stem = f"{field}.field" if field in ("ids", "offsets") or "." in field else field
                main = _Column(self.folder, f"{self.name}.{stem}.bin")
                rows = _Column(self.folder, f"{self.name}.{stem}.rows.bin") if dtype == TEXT else None
                if rows is not None:
                    rows.append(np.zeros(1, INDEX).tobytes())
                self.columns[field] = (main, rows)
        length = 0
        for field, (main, rows) in self.columns.items():
            values = arrays[field]
            length = len(values)
            if rows is None:
                main.append(bytes_of(np.ascontiguousarray(values)))
            else:
                encoded = [s.encode() for s in values]
                ends = main.bytes + np.cumsum([len(e) for e in encoded], dtype=INDEX)
                main.append(b"".join(encoded))
                rows.append(ends.tobytes())
        self.index[client] = len(self.index)
        self.offsets.append(self.offsets[-1] + length)

    def close(self, same_ids: bool) -> dict[str, Any]:
        fields = {}
        for field, (main, rows) in self.columns.items():
            dtype, shape = self.schema[field]
            fields[field] = {"dtype": dtype, "shape": list(shape), **main.close()}
            if rows is not None:
                fields[field]["rows"] = rows.close()
        entry: dict[str, Any] = {"clients": len(self.index), "examples": self.offsets[-1], "fields": fields}
        entry["offsets"] = self._whole("offsets", np.asarray(self.offsets, INDEX).tobytes())
        if same_ids:
            entry["ids"] = "train"
        else:
            ids = TextRows.of(list(self.index))
            entry["ids"] = {
                **self._whole("ids", ids.blob.tobytes()),
                "rows": self._whole("ids.rows", ids.rows.astype(INDEX).tobytes()),
            }
        return entry

    def _whole(self, kind: str, data: bytes) -> dict[str, Any]:
        column = _Column(self.folder, f"{self.name}.{kind}.bin")
        column.append(data)
        return column.close()

    def abort(self) -> None:
        for main, rows in self.columns.values():
            main.file.close()
            if rows is not None:
                rows.file.close()


class StoreWriter:
    """Write a store client by client, in any order and in one pass: ``add(split, client id, fields)``.

    On a clean exit the clients of test and validation are put into the order of the train clients, so that client
    ``i`` is the same in each split. Clients without train rows move to the split ``unseen``; if no test client has
    train rows, the test split stays as it is. On an error all files are removed.

    shuffle: seed that shuffles the rows within each client, because some algorithms hold out a slice by position.
        None keeps the order of the source. Clients with a text field are never shuffled.
    drop_empty: leave out clients without examples, instead of an error.
    """

    path: Path
    name: str
    info: dict[str, Any]
    preprocess: Pipeline | None
    shuffle: int | None
    drop_empty: bool
    overwrite: bool
    dropped: int  # number of clients that were left out

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "data",
        info: Mapping[str, Any] | None = None,
        preprocess: Pipeline | None = None,
        shuffle: int | None = 0,
        drop_empty: bool = False,
        overwrite: bool = False,
    ):
        self.path = Path(path)
        self.name, self.info, self.preprocess = name, dict(info or {}), preprocess
        self.shuffle, self.drop_empty, self.overwrite = shuffle, drop_empty, overwrite
        self.dropped = 0
        if self.path.exists() and not overwrite:
            raise ValueError(f"{self.path} exists; choose another --out, or remove it first")
        if self.path.exists() and not is_store(self.path):
            raise ValueError(f"{self.path} exists and is not a store: it is not overwritten")
        check_name(name, "name of the data")
        self._parents = [p for p in self.path.parents if not p.exists()]  # made here, removed after an error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
        self._splits: dict[str, _SplitFiles] = {}
        self._schema: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._first = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None:
            try:
                self._finish()
            except BaseException:
                self._abort()
                raise
        else:
            self._abort()

    def add(self, split: str, client: str, fields: Mapping[str, Any], *, source: object = "") -> None:
        """Add one client's examples. Error messages about them begin with ``source`` (a file name)."""
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; a store has {', '.join(SPLITS)}")
        files = self._splits.setdefault(split, _SplitFiles(self._folder, split))
        check_client(client, str(source) if source else f"{split} split")
        at = f"{source}: client {client}" if source else f"client {client}"
        if not fields:
            raise ValueError(f"{at}: has no fields")
        if client in files.index:
            raise ValueError(f"{at}: appears twice in the {split} split; client ids must be unique")
        arrays = {field: _as_column(values, f"{at}: field {field}") for field, values in fields.items()}
        lengths = {field: len(values) for field, values in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{at}: fields differ in length: {lengths}")
        length = next(iter(lengths.values()))
        if not length:
            if self.drop_empty:
                self.dropped += 1
                return
            field = next(iter(arrays))
            raise ValueError(
                f"{at}: field {field}: no examples in the {split} split; drop empty clients (--drop-empty)"
            )
        arrays = self._conform(arrays, at)
        if self.shuffle is not None and length > 1 and all(isinstance(a, np.ndarray) for a in arrays.values()):
            order = np.random.default_rng([self.shuffle, SPLITS.index(split), len(files.index)]).permutation(length)
            arrays = {field: a[order] for field, a in arrays.items()}
        files.append(client, arrays, self._schema)

    def _conform(self, arrays: dict[str, Any], at: str) -> dict[str, Any]:
        if not self._schema:
            for field in arrays:
                if check_name(field, f"{at}: field") == MASK:
                    raise ValueError(f"{at}: field {field!r}: not a usable name, it is the mask of batches; rename it")
            self._schema, self._first = {f: _schema_of(a) for f, a in arrays.items()}, at
            return arrays
        if set(arrays) != set(self._schema):
            raise ValueError(f"{at}: has fields {sorted(arrays)}, the first client has {sorted(self._schema)}")
        out = {}
        for field, (dtype, shape) in self._schema.items():
            found, found_shape = _schema_of(arrays[field])
            if found_shape != shape:
                raise ValueError(
                    f"{at}: field {field}: shape {list(found_shape)} differs from {list(shape)} of {self._first}"
                )
            values = arrays[field]
            if found != dtype:
                if TEXT in (found, dtype) or not np.can_cast(np.dtype(found), np.dtype(dtype), "safe"):
                    raise ValueError(f"{at}: field {field}: type {found} differs from {dtype} of {self._first}")
                values = values.astype(dtype)
            out[field] = values
        return out

    def _finish(self) -> None:
        train = self._splits.get("train")
        if train is None or not train.index:
            raise ValueError(f"{self.path}: no train examples were given; a store needs a train split")
        for split in ("test", "validation"):
            if split in self._splits and self._splits[split].index:
                self._align(split)
        ids = list(train.index)
        entries = {}
        for split in SPLITS:
            if split in self._splits and self._splits[split].index:
                files = self._splits[split]
                same = split != "train" and list(files.index) == ids
                entries[split] = files.close(same)
        check_name(self.name, "name of the data")
        header = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "info": self.info,
            "preprocess": self.preprocess.spec() if self.preprocess else [],
            "splits": entries,
        }
        with (self._folder / HEADER).open("x", encoding="utf-8") as file:
            json.dump(header, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        open_store(self._folder)  # what cannot be opened again is not kept
        os.chmod(self._folder, 0o755)  # only the owner can read folders of mkdtemp
        if self.path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".old", dir=self.path.parent))
            os.replace(self.path, old / "store")
            try:
                os.replace(self._folder, self.path)
            except BaseException:
                os.replace(old / "store", self.path)
                raise
            finally:
                shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(self._folder, self.path)

    def _align(self, split: str) -> None:
        """Put the clients of a split into train order; clients without train rows become ``unseen``."""
        train, old = self._splits["train"].index, self._splits[split]
        known = [c for c in old.index if c in train]
        if not known or list(old.index) == list(train):
            return
        entry = old.close(same_ids=False)
        source = open_split(self._folder, entry)
        renamed = {c: self._folder / f"old.{c}" for c in files_of(entry)}
        for name, target in renamed.items():
            os.replace(self._folder / name, target)
        empty = {f: np.zeros((0, *s), d) if d != TEXT else TextRows.of([]) for f, (d, s) in self._schema.items()}
        aligned = self._splits[split] = _SplitFiles(self._folder, split)
        for client in train:
            rows = source.client(old.index[client]) if client in old.index else empty
            aligned.append(client, rows, self._schema)
        unknown = [c for c in old.index if c not in train]
        if unknown:
            unseen = self._splits.setdefault("unseen", _SplitFiles(self._folder, "unseen"))
            for client in unknown:
                if client in unseen.index:
                    raise ValueError(f"client {client} has no train rows and is in two of the other splits")
                unseen.append(client, source.client(old.index[client]), self._schema)
        del source
        for target in renamed.values():
            target.unlink()

    def _abort(self) -> None:
        for files in self._splits.values():
            files.abort()
        shutil.rmtree(self._folder, ignore_errors=True)
        for parent in self._parents:
            with contextlib.suppress(OSError):  # another process has put something into it
                parent.rmdir()


def write_store(path: str | os.PathLike[str], data: FederatedData, *, overwrite: bool = False) -> None:
    """Write data to a store: all splits, client ids and the preprocessing.

    >>> import tempfile, pathlib
    >>> from fedbraid.data import Split, open_store
    >>> split = Split.from_clients([{"x": np.arange(3)}])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "store"
    >>> write_store(path, FederatedData(split))
    >>> open_store(path).train.arrays["x"].tolist()
    [0, 1, 2]
    """
    preprocess = data.preprocess
    if preprocess is not None and not isinstance(preprocess, Pipeline):
        raise ValueError(
            "preprocess of the data is a plain function, which a store cannot save; use fedbraid.data.Pipeline"
        )
    with StoreWriter(
        path, name=data.name, info=data.info, preprocess=preprocess, shuffle=None, overwrite=overwrite
    ) as writer:
        for name, split in data.splits.items():
            # Without ids: a split with as many clients as train has the same clients, any other has new ones.
            prefix = "" if split.num_clients == data.train.num_clients and name != "unseen" else f"{name}-"
            for i in range(split.num_clients):
                if split.offsets[i + 1] > split.offsets[i] or name == "train":
                    client = str(split.ids[i]) if len(split.ids) else f"{prefix}{i:06d}"
                    writer.add(name, client, split.client(i))


def _as_column(values: Any, at: str) -> Any:
    """A NumPy array in one of the stored types, or a list of strings."""
    if isinstance(values, TextRows):
        return values
    try:
        array = np.asarray(values)
    except ValueError as error:  # NumPy: inhomogeneous shape
        raise ValueError(f"{at}: examples differ in shape") from error
    if array.dtype.kind in "US" or (array.dtype == object and all(isinstance(v, (str, bytes)) for v in array.flat)):
        if array.ndim != 1:
            raise ValueError(f"{at}: text must be one string per example, got shape {list(array.shape)}")
        if array.dtype.kind == "U" and (np.ascontiguousarray(array).view(np.uint32) > 0x10FFFF).any():
            raise ValueError(f"{at}: text is not valid Unicode")
        try:
            return [v.decode() if isinstance(v, bytes) else str(v) for v in array.tolist()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{at}: text is not UTF-8") from error
    if array.ndim == 0:
        raise ValueError(f"{at}: needs one row per example, got a single value")
    if 0 in array.shape[1:]:
        raise ValueError(f"{at}: examples of shape {list(array.shape[1:])} hold no values")
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in DTYPES:
        raise ValueError(f"{at}: type {array.dtype} cannot be stored; use numbers, booleans or text")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argmax(~np.isfinite(array).reshape(len(array), -1).all(1)))
        raise ValueError(f"{at}: not finite in row {row}; clean the source first")
    return array.astype(dtype, copy=False)


def _schema_of(values: Any) -> tuple[str, tuple[int, ...]]:
    return (values.dtype.str, values.shape[1:]) if isinstance(values, np.ndarray) else (TEXT, ())
