"""Federated data on disk: flat arrays sorted by client, offsets, client ids, and a small JSON header.

A store is a folder. ``header.json`` lists the splits and, for every file, its size and SHA-256; each field of a split
is one raw little-endian file that opens as a memory map, so opening takes milliseconds whatever the size, and a set
larger than memory has the same interface as one in memory. Nothing is pickled. A store is written in one streaming pass
into a temporary folder beside its target and renamed at the end: a half-written import leaves nothing that opens.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "store"
>>> with StoreWriter(path, name="tiny") as writer:
...     writer.add("train", "ann", {"x": np.zeros((2, 3), np.uint8), "y": np.array([0, 1])})
...     writer.add("train", "bob", {"x": np.ones((1, 3), np.uint8), "y": np.array([1])})
>>> data = open_store(path)
>>> data.train.sizes.tolist(), list(data.train.ids)
([2, 1], ['ann', 'bob'])
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, overload

import numpy as np

from fedbraid.data.federated import MASK, FederatedData, Split
from fedbraid.data.preprocess import Pipeline

__all__ = [
    "Cohort",
    "StoreWriter",
    "TextRows",
    "gather",
    "is_store",
    "open_store",
    "prefetch",
    "read_header",
    "verify",
    "write_store",
]

FORMAT, VERSION, HEADER = "fedbraid-store", 1, "header.json"
SPLITS = ("train", "test", "validation", "unseen")
TEXT = "text"
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
_INDEX = np.dtype("<i8")


class TextRows(Sequence[str]):
    """Strings of any length in one UTF-8 blob with row offsets: client ids, and text fields.

    >>> rows = TextRows.of(["to be", "or", "not"])
    >>> len(rows), rows[1], list(rows[1:])
    (3, 'or', ['or', 'not'])
    """

    dtype = np.dtype(object)

    def __init__(self, blob: np.ndarray, rows: np.ndarray):
        self.blob, self.rows = blob, rows

    @classmethod
    def of(cls, strings: Sequence[str]) -> TextRows:
        encoded = [s.encode() for s in strings]
        lengths = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), lengths)

    def __len__(self) -> int:
        return len(self.rows) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> TextRows: ...
    def __getitem__(self, index: int | slice) -> str | TextRows:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("text rows slice in steps of one")
            return TextRows(self.blob, self.rows[start : max(start, stop) + 1])
        i = range(len(self))[index]
        return bytes(self.blob[int(self.rows[i]) : int(self.rows[i + 1])]).decode()

    def __repr__(self) -> str:
        return f"TextRows({len(self)} strings)"

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    @property
    def nbytes(self) -> int:
        return int(self.rows[-1] - self.rows[0]) + self.rows.nbytes


# ---------------------------------------------------------------- writing


class _Column:
    """One raw file of a split, appended to and hashed as it is written."""

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
        os.fsync(self.file.fileno())  # the rename at the end must not become visible before the bytes
        self.file.close()
        return {"file": self.path.name, "bytes": self.bytes, "sha256": self.hash.hexdigest()}


class _SplitFiles:
    """The files of one split while they grow."""

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
                main = _Column(self.folder, f"{self.name}.{field}.bin")
                rows = _Column(self.folder, f"{self.name}.{field}.rows.bin") if dtype == TEXT else None
                if rows is not None:
                    rows.append(np.zeros(1, _INDEX).tobytes())
                self.columns[field] = (main, rows)
        length = 0
        for field, (main, rows) in self.columns.items():
            values = arrays[field]
            length = len(values)
            if rows is None:
                main.append(_bytes_of(np.ascontiguousarray(values)))
            else:
                encoded = [s.encode() for s in values]
                ends = main.bytes + np.cumsum([len(e) for e in encoded], dtype=_INDEX)
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
        entry["offsets"] = self._whole("offsets", np.asarray(self.offsets, _INDEX).tobytes())
        if same_ids:
            entry["ids"] = "train"
        else:
            ids = TextRows.of(list(self.index))
            entry["ids"] = {
                **self._whole("ids", ids.blob.tobytes()),
                "rows": self._whole("ids.rows", ids.rows.astype(_INDEX).tobytes()),
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
    """Write a store client by client: ``add(split, client id, fields)``, in any order, one pass.

    On a clean exit the test (and validation) clients are put into the train clients' order, so that client ``i`` is the
    same in both; those that never train move to the split ``unseen``, unless none of them trains (then the test is by
    other clients, and stays). On an error nothing is left. ``shuffle`` is the seed that shuffles rows within each
    client, because some algorithms hold out a slice by position; None keeps the source's order, as do text fields.
    """

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
            raise ValueError(f"{self.path} exists and is not a store: it will not be overwritten")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
        self._splits: dict[str, _SplitFiles] = {}
        self._schema: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._first = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            try:
                self._finish()
            except BaseException:
                self._abort()
                raise
        else:
            self._abort()

    def add(self, split: str, client: str, fields: Mapping[str, Any], *, source: object = "") -> None:
        """One client's examples. ``source`` (a file) begins the error message when something is wrong with them."""
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; a store has {', '.join(SPLITS)}")
        files = self._splits.setdefault(split, _SplitFiles(self._folder, split))
        at = f"{source}: client {client}" if source else f"client {client}"
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
                if not field or field == MASK or not all(c.isalnum() or c in "_-" for c in field):
                    raise ValueError(
                        f"{at}: field {field!r}: not a usable name (letters, digits, _ and -; not {MASK!r})"
                    )
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
        os.chmod(self._folder, 0o755)  # mkdtemp's folders are private; a store is shared like any file
        if self.path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".old", dir=self.path.parent))
            os.replace(self.path, old / "store")
            os.replace(self._folder, self.path)
            shutil.rmtree(old)
        else:
            os.replace(self._folder, self.path)

    def _align(self, split: str) -> None:
        """Put a split's clients in the train clients' order; those that never train become ``unseen``."""
        train, old = self._splits["train"].index, self._splits[split]
        known = [c for c in old.index if c in train]
        if not known or list(old.index) == list(train):
            return
        entry = old.close(same_ids=False)
        source = _open_split(self._folder, entry)
        renamed = {c: self._folder / f"old.{c}" for c in _files_of(entry)}
        for name, target in renamed.items():
            os.replace(self._folder / name, target)
        empty = {f: np.zeros((0, *s), d) if d != TEXT else TextRows.of([]) for f, (d, s) in self._schema.items()}
        aligned = self._splits[split] = _SplitFiles(self._folder, split)
        for client in train:
            rows = source.client(old.index[client]) if client in old.index else empty
            aligned.append(client, rows, self._schema)
        strangers = [c for c in old.index if c not in train]
        if strangers:
            unseen = self._splits.setdefault("unseen", _SplitFiles(self._folder, "unseen"))
            for client in strangers:
                if client in unseen.index:
                    raise ValueError(f"client {client} never trains and is in two of the other splits")
                unseen.append(client, source.client(old.index[client]), self._schema)
        del source
        for target in renamed.values():
            target.unlink()

    def _abort(self) -> None:
        for files in self._splits.values():
            files.abort()
        shutil.rmtree(self._folder, ignore_errors=True)


def write_store(path: str | os.PathLike[str], data: FederatedData, *, overwrite: bool = False) -> None:
    """Write data from memory to a store, splits, ids and preprocessing included.

    >>> import tempfile, pathlib
    >>> split = Split.from_clients([{"x": np.arange(3)}])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "store"
    >>> write_store(path, FederatedData(split))
    >>> open_store(path).train.arrays["x"].tolist()
    [0, 1, 2]
    """
    preprocess = data.preprocess
    if preprocess is not None and not isinstance(preprocess, Pipeline):
        raise ValueError(
            "the data's preprocess is a plain function, which a store cannot name; use a preprocess.Pipeline"
        )
    with StoreWriter(
        path, name=data.name, info=data.info, preprocess=preprocess, shuffle=None, overwrite=overwrite
    ) as writer:
        for name, split in data.splits.items():
            # without ids, a split with as many clients as train is by the same ones; another is by others
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
    except ValueError as error:  # NumPy's "inhomogeneous shape"
        raise ValueError(f"{at}: examples differ in shape") from error
    if array.dtype.kind in "US" or (array.dtype == object and all(isinstance(v, (str, bytes)) for v in array.flat)):
        if array.ndim != 1:
            raise ValueError(f"{at}: text must be one string an example, got shape {list(array.shape)}")
        try:
            return [v.decode() if isinstance(v, bytes) else str(v) for v in array.tolist()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{at}: text is not UTF-8") from error
    if array.ndim == 0:
        raise ValueError(f"{at}: needs one row an example, got a single value")
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in DTYPES:
        raise ValueError(f"{at}: type {array.dtype} cannot be stored; use numbers, booleans or text of one shape")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argmax(~np.isfinite(array).reshape(len(array), -1).all(1)))
        raise ValueError(f"{at}: not finite in row {row}; clean the source first")
    return array.astype(dtype, copy=False)


def _bytes_of(array: np.ndarray) -> memoryview:
    """A contiguous array's own memory, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _schema_of(values: Any) -> tuple[str, tuple[int, ...]]:
    return (values.dtype.str, values.shape[1:]) if isinstance(values, np.ndarray) else (TEXT, ())


# ---------------------------------------------------------------- opening


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a finished store."""
    return (Path(path) / HEADER).is_file()


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a store, checked for its format and for file names that would leave the folder."""
    file = Path(path) / HEADER
    if not file.is_file():
        raise ValueError(f"{path} is not a store (no {HEADER}); import raw files with `fedbraid data import`")
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: the header is damaged ({error}); import the data again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{file}: not a header of a {FORMAT}")
    if header.get("version") != VERSION:
        raise ValueError(f"{file}: store version {header.get('version')!r}, this release reads {VERSION}")
    try:
        for entry in header["splits"].values():
            for name in _files_of(entry):
                if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
                    raise ValueError(f"{file}: the file name {name!r} leaves the store; refused")
        if "train" not in header["splits"]:
            raise KeyError("train")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: the header lacks {error}; import the data again") from error
    return header


def open_store(path: str | os.PathLike[str], *, in_memory: bool = False) -> FederatedData:
    """Open a store as memory maps (or read it whole); sizes are checked here, checksums by ``verify``."""
    folder = Path(path)
    header = read_header(folder)
    entries = header["splits"]
    try:
        splits = {"train": _open_split(folder, entries["train"], in_memory=in_memory)}
        for name in SPLITS[1:]:
            if name in entries:
                splits[name] = _open_split(folder, entries[name], in_memory=in_memory, train_ids=splits["train"].ids)
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
    """Compare every file with the header's SHA-256; returns the bytes read, raises naming the first that differs."""
    folder, total = Path(path), 0
    for entry in read_header(folder)["splits"].values():
        for name, record in _files_of(entry).items():
            digest = hashlib.sha256()
            with (folder / name).open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
                    total += len(block)
            if digest.hexdigest() != record["sha256"]:
                raise ValueError(
                    f"{folder / name}: wrong checksum: the file has changed since it was written; import again"
                )
    return total


def _files_of(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    records = [
        entry["offsets"],
        *entry["fields"].values(),
        *(f["rows"] for f in entry["fields"].values() if "rows" in f),
    ]
    if entry["ids"] != "train":
        records += [entry["ids"], entry["ids"]["rows"]]
    return {record["file"]: record for record in records}


def _open_split(
    folder: Path, entry: Mapping[str, Any], *, in_memory: bool = False, train_ids: Sequence[str] = ()
) -> Split:
    clients, examples = entry["clients"], entry["examples"]

    def column(record: Mapping[str, Any], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        file = folder / record["file"]
        if not file.is_file():
            raise ValueError(f"{file}: missing; the store is incomplete, import the data again")
        size, expected = file.stat().st_size, dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size != expected or size != record["bytes"]:
            raise ValueError(f"{file}: {size} bytes where {expected} are due; the file is cut or damaged, import again")
        if not size:
            return np.zeros(shape, dtype)
        if in_memory:
            return np.fromfile(file, dtype).reshape(shape)
        return np.memmap(file, dtype, "r", shape=shape)

    def text(record: Mapping[str, Any], count: int) -> TextRows:
        rows = column(record["rows"], _INDEX, (count + 1,))
        return TextRows(column(record, np.dtype(np.uint8), (record["bytes"],)), rows)

    arrays: dict[str, Any] = {}
    for field, record in entry["fields"].items():
        if record["dtype"] == TEXT:
            arrays[field] = text(record, examples)
        elif record["dtype"] in DTYPES:
            arrays[field] = column(record, np.dtype(record["dtype"]), (examples, *record["shape"]))
        else:
            raise ValueError(f"{folder / HEADER}: field {field}: unknown type {record['dtype']!r}")
    offsets = np.array(column(entry["offsets"], _INDEX, (clients + 1,)))
    if offsets[0] != 0 or offsets[-1] != examples or np.any(np.diff(offsets) < 0):
        raise ValueError(f"{folder / entry['offsets']['file']}: the offsets are damaged; import the data again")
    ids = train_ids if entry["ids"] == "train" else text(entry["ids"], clients)
    return Split(arrays, offsets, ids)


# ---------------------------------------------------------------- cohorts


class Cohort(NamedTuple):
    """Some clients' rows, one after the other: client ``j`` of the cohort owns rows offsets[j] to offsets[j + 1]."""

    clients: np.ndarray
    arrays: dict[str, np.ndarray]
    offsets: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


def gather(split: Split, clients: Sequence[int] | np.ndarray) -> Cohort:
    """Copy the rows of some clients into flat arrays with their own offsets.

    Memory-mapped fields are read with ``pread`` rather than through the map: one request a client instead of a page
    fault every 4 KiB, and the pages do not count as this process's memory.

    >>> split = Split.from_clients([{"x": np.array([1, 2])}, {"x": np.array([3])}])
    >>> cohort = gather(split, [1, 0])
    >>> cohort.arrays["x"].tolist(), cohort.offsets.tolist()
    ([3, 1, 2], [0, 1, 3])
    """
    clients = np.asarray(clients, np.int64)
    if clients.ndim != 1 or (len(clients) and (clients.min() < 0 or clients.max() >= split.num_clients)):
        raise ValueError(f"clients must be a 1-d array of indices from 0 to {split.num_clients - 1}")
    starts, stops = split.offsets[clients], split.offsets[clients + 1]
    offsets = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
    arrays = {}
    for field, array in split.arrays.items():
        if isinstance(array, TextRows):
            raise ValueError(f"field {field!r} is text: turn it into tokens first (load the set by its catalog name)")
        out = np.empty((int(offsets[-1]), *array.shape[1:]), array.dtype)
        # a slice of a memory map still carries its parent's file offset: only a whole map may be read by position
        if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and hasattr(os, "preadv"):
            _read_rows(array, starts, stops, offsets, out)
        else:
            for j in range(len(clients)):
                out[offsets[j] : offsets[j + 1]] = array[starts[j] : stops[j]]
        arrays[field] = out
    return Cohort(clients, arrays, offsets)


def _read_rows(array: np.memmap, starts: np.ndarray, stops: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    row = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    flat = _bytes_of(out)
    handle = os.open(array.filename, os.O_RDONLY)  # type: ignore[arg-type]
    try:
        for start, stop, at in zip(starts.tolist(), stops.tolist(), offsets.tolist(), strict=False):
            wanted, done = (stop - start) * row, 0
            while done < wanted:
                piece = flat[at * row + done : at * row + wanted]
                count = os.preadv(handle, [piece], array.offset + start * row + done)
                if not count:
                    raise ValueError(f"{array.filename}: ends early; the file was cut while it was open")
                done += count
    finally:
        os.close(handle)


def prefetch(split: Split, cohorts: Iterable[Sequence[int] | np.ndarray], *, depth: int = 2) -> Iterator[Cohort]:
    """Gather cohorts in a thread, at most ``depth`` ahead of the one in use; closing the iterator stops the thread.

    >>> split = Split.from_clients([{"x": np.array([1, 2])}, {"x": np.array([3])}])
    >>> [c.arrays["x"].tolist() for c in prefetch(split, [[0], [1]])]
    [[1, 2], [3]]
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    ready: queue.Queue[Cohort | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Cohort | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for clients in cohorts:
                if not put(gather(split, clients)):
                    return
            put(None)
        except BaseException as error:  # handed to the reader, where it can be seen
            put(error)

    thread = threading.Thread(target=work, name="fedbraid-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
