"""TensorFlow Federated's own files: HDF5 (``/examples/<client>/<field>``) and SQLite (one ``tf.train.Example`` a row).

The four published sets are recognised by their fields: EMNIST (``pixels``, ``label``), CIFAR-100 (``image``, ``label``,
``coarse_label``), Shakespeare (``snippets``), StackOverflow (``tokens`` ...). Other sets are stored unchanged.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from fedbraid.data import text
from fedbraid.data.formats import hdf5
from fedbraid.data.formats.archive import open_binary, read_bytes, unpacked
from fedbraid.data.formats.columns import as_labels, as_pixels, twice_in
from fedbraid.data.names import check_client, safe_name
from fedbraid.data.preprocess import Pipeline, scaling_of
from fedbraid.data.store import StoreWriter

__all__ = ["parse_example", "read_tff"]

Fields = dict[str, Any]
Client = tuple[str, Fields]
SQLITE_MAGIC = b"SQLite format 3\0"
_TABLES = {
    "examples": ("split_name", "client_id", "serialized_example_proto"),
    "client_metadata": ("split_name", "client_id", "num_examples"),
}
# HDF5 stores shapes; a tf.train.Example is flat
SHAPES = {"pixels": (28, 28), "image": (32, 32, 3)}


class Source(NamedTuple):
    """One split of one file. ``clients(fields)`` can be called several times, and yields clients with these fields."""

    split: str
    file: Path
    clients: Callable[[set[str] | None], Iterator[Client]]


def read_tff(
    writer: StoreWriter,
    paths: Sequence[Path],
    *,
    words: int = 10_000,
    length: int = 20,
    vocabulary: Path | None = None,
    pixels: str = "uint8",
) -> None:
    """Read TFF files (HDF5, SQLite, also packed as tar or xz) into a store.

    The import turns StackOverflow into next-word examples, because it is too large to store as text. The vocabulary is
    the ``words`` most frequent words of the train split, or those of a ``vocabulary`` file with one word per line.
    Sentences have ``length`` words.
    """
    if pixels not in ("uint8", "keep"):
        raise ValueError(f'pixels must be "uint8" or "keep", got {pixels!r}')
    with contextlib.ExitStack() as stack:
        sources = [s for path in paths for s in _sources(Path(path), stack)]
        if not any(s.split == "train" for s in sources):
            raise ValueError(
                f"{', '.join(map(str, paths))}: no train split among the files (their names should say train)"
            )
        sources.sort(key=lambda s: s.split != "train")
        first = next(sources[0].clients(None), None)
        if first is None:
            raise ValueError(f"{sources[0].file}: holds no clients")
        convert = _recipe(writer, set(first[1]), sources, words, length, vocabulary, pixels)
        wanted = {"tokens"} if "tokens" in first[1] else set(first[1])  # StackOverflow's titles and tags are not read
        for source in sources:
            for client, fields in source.clients(wanted if "tokens" in wanted else None):
                if set(fields) != wanted:
                    missing = sorted(wanted ^ set(fields))
                    raise ValueError(
                        f"{source.file}: client {client}: field {missing[0]}: not the fields of the first client"
                    )
                name = f"test_{client}" if writer.name == "cifar100" and source.split != "train" else client
                writer.add(source.split, name, convert(fields, f"{source.file}: client {client}"), source=source.file)


def _recipe(
    writer: StoreWriter,
    names: set[str],
    sources: list[Source],
    words: int,
    length: int,
    vocabulary: Path | None,
    pixels: str,
) -> Callable[[Fields, str], Fields]:
    """The function that converts a client's fields. Also writes name, source and preprocessing of the store."""
    if names == {"pixels", "label"}:
        digits_only = any("digitsonly" in s.file.name for s in sources)
        classes = 10 if digits_only else 62
        writer.name = "emnist10" if digits_only else "emnist62"
        writer.info |= {"classes": classes, "source": "TFF federated EMNIST (LEAF writers)", "licence": "NIST SD 19"}
        keep = pixels == "keep"
        writer.preprocess = Pipeline.of(*([] if keep else [{"name": "scale"}]), {"name": "invert"})

        def emnist(fields: Fields, at: str) -> Fields:
            x = fields["pixels"]
            x = np.asarray(x, np.float32) if keep else as_pixels(x, f"{at}: field pixels", (28, 28))
            return {"x": x, "y": as_labels(fields["label"], f"{at}: field label", classes)}

        return emnist
    if names == {"image", "label", "coarse_label"}:
        writer.name = "cifar100"  # its test clients 0 to 99 are not the train clients 0 to 99: read_tff renames them
        writer.info |= {"classes": 100, "source": "TFF federated CIFAR-100 (Pachinko allocation)"}
        writer.preprocess = Pipeline.of({"name": "scale"}, {"name": "crop-flip"}, {"name": "standardize"})
        return lambda fields, at: {
            "x": as_pixels(fields["image"], f"{at}: field image", (32, 32, 3)),
            "y": as_labels(fields["label"], f"{at}: field label", 100),
            "coarse": as_labels(fields["coarse_label"], f"{at}: field coarse_label", 20),
        }
    if names == {"snippets"}:
        writer.name = "shakespeare"
        writer.info |= {"classes": text.VOCABULARY_SIZE, "source": "TFF federated Shakespeare (play and role)"}
        return lambda fields, at: {"snippets": fields["snippets"]}
    if "tokens" in names:
        return _stackoverflow(writer, next(s for s in sources if s.split == "train"), words, length, vocabulary)

    def other(fields: Fields, at: str) -> Fields:
        renamed = {safe_name(field): values for field, values in fields.items()}
        if len(renamed) != len(fields):
            twice = twice_in([safe_name(field) for field in fields])
            raise ValueError(f"{at}: several fields would be named {twice[0]!r}; rename them in the file")
        writer.preprocess = scaling_of(renamed)
        return renamed

    return other


def _stackoverflow(
    writer: StoreWriter, train: Source, words: int, length: int, vocabulary: Path | None
) -> Callable[[Fields, str], Fields]:
    """Next-word examples in the vocabulary of a file, or of the most frequent words of the train split."""
    writer.name = "stackoverflow"
    if vocabulary is not None:
        listed = read_bytes(vocabulary).decode().splitlines()
        chosen = tuple(line.split()[0] for line in listed if line.strip())[:words]
    else:
        chosen = text.frequent_words(_count_words(train), words)
    index = text.word_index(chosen)
    writer.info |= {
        "classes": len(index) + 4,
        "source": "TFF federated StackOverflow",
        "licence": "CC BY-SA 3.0",
        "vocabulary": list(chosen),
    }
    writer.preprocess = Pipeline.of({"name": "integers", "fields": "x,y"})
    return lambda fields, at: text.word_windows(_strings(fields["tokens"], f"{at}: field tokens"), index, length=length)


def _count_words(source: Source) -> Counter[str]:
    counts: Counter[str] = Counter()
    for client, fields in source.clients({"tokens"}):
        for sentence in _strings(fields["tokens"], f"{source.file}: client {client}: field tokens"):
            counts.update(sentence.split())
    return counts


def _strings(values: Iterable[Any], at: str) -> list[str]:
    try:
        return [v.decode() if isinstance(v, bytes) else str(v) for v in values]
    except UnicodeDecodeError as error:
        raise ValueError(f"{at}: text is not UTF-8") from error


def _sources(path: Path, stack: contextlib.ExitStack) -> list[Source]:
    path = stack.enter_context(unpacked(path))
    if path.is_dir():
        files = sorted(
            p for p in path.rglob("*") if p.is_file() and p.name.endswith((".h5", ".hdf5", ".sqlite", ".lzma"))
        )
        if not files:
            raise ValueError(f"{path}: no .h5 or .sqlite files in this folder")
        return [s for file in files for s in _sources(file, stack)]
    with open_binary(path) as file:
        magic = file.read(16)
    if magic == SQLITE_MAGIC:
        return _sqlite(path, stack)
    return [Source(_split_of(path), path, lambda wanted: hdf5.read_clients(path, wanted))]


def _split_of(path: Path) -> str:
    name = path.name.lower()
    if "held" in name or "valid" in name:
        return "validation"
    return "test" if "test" in name else "train"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


# ---------------------------------------------------------------- SQLite


def _sqlite(path: Path, stack: contextlib.ExitStack) -> list[Source]:
    if path.suffix in (".xz", ".lzma", ".gz", ".bz2"):  # SQLite cannot read compressed files
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedbraid-")))
        plain = folder / path.stem
        with open_binary(path) as packed, plain.open("wb") as out:
            shutil.copyfileobj(packed, out)
        path = plain
    with _query(path) as run:
        splits = [row[0] for row in run("SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name")]
    names = {"train": "train", "test": "test", "held_out": "validation", "validation": "validation"}
    if unknown := [s for s in splits if s not in names]:
        raise ValueError(f"{path}: unknown split {unknown[0]!r} in client_metadata; known: {', '.join(names)}")

    def clients_of(split: str) -> Callable[[set[str] | None], Iterator[Client]]:
        return lambda wanted: _sqlite_clients(path, split, wanted)

    return [Source(names[s], path, clients_of(s)) for s in splits]


def _sqlite_clients(path: Path, split: str, wanted: set[str] | None) -> Iterator[Client]:
    with _query(path) as run:
        due = dict(run("SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?", split))
        rows = run(
            "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid",
            split,
        )
        for client, group in groupby(rows, key=lambda row: row[0]):
            check_client(client, f"{path}: table examples")
            examples = [parse_example(blob, f"{path}: client {client}") for _, blob in group]
            if len(examples) != due.pop(client, None):
                raise ValueError(f"{path}: client {client}: {len(examples)} examples, but client_metadata differs")
            fields = _stack(examples, f"{path}: client {client}")
            yield client, fields if wanted is None else {k: v for k, v in fields.items() if k in wanted}
        if due:
            raise ValueError(f"{path}: client {min(due)}: {due[min(due)]} examples are missing from the table")


@contextlib.contextmanager
def _query(path: Path) -> Iterator[Callable[..., Iterator[tuple]]]:
    address = f"file:{quote(path.resolve().as_posix())}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        try:
            _plain_tables(connection, path)
            yield lambda sql, *values: connection.execute(sql, values)
        except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
            raise ValueError(f"{path}: not a readable TFF SQLite file ({_line(error)})") from error


def _plain_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose tables compute their rows (views, virtual tables, generated columns): they may never end."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    limit = min(path.stat().st_size + 1024, 1 << 30)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limit)  # no value is longer than its file
    for table, columns in _TABLES.items():
        found = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (table,)).fetchall()
        if len(found) != 1 or found[0][0] != "table" or not str(found[0][1]).upper().startswith("CREATE TABLE"):
            raise ValueError(f"{path}: not a readable TFF SQLite file (no plain table {table!r})")
        hidden = {row[1]: row[6] for row in connection.execute(f"PRAGMA table_xinfo({table})")}
        if missing := [c for c in columns if hidden.get(c) != 0]:
            raise ValueError(f"{path}: not a readable TFF SQLite file (no stored column {missing[0]!r} in {table!r})")


def _stack(examples: Sequence[Mapping[str, Any]], at: str) -> Fields:
    fields: Fields = {}
    for field in examples[0]:
        try:
            column = [e[field] for e in examples]
        except KeyError as error:
            raise ValueError(f"{at}: field {field}: missing from an example") from error
        if len({type(c) for c in column}) > 1 or len({getattr(c, "dtype", None) for c in column}) > 1:
            raise ValueError(f"{at}: field {field}: examples differ in type")
        if isinstance(column[0], list):
            fields[field] = [c[0] for c in column] if all(len(c) == 1 for c in column) else column
            continue
        if len({len(c) for c in column}) > 1:
            raise ValueError(f"{at}: field {field}: examples differ in shape")
        table = np.stack(column)
        shape = SHAPES.get(field, table.shape[1:])
        if table.shape[1] == 1 and field not in SHAPES:
            table = table[:, 0]
        elif table.shape[1] == np.prod(shape):
            table = table.reshape(len(table), *shape)
        fields[field] = table
    return fields


def parse_example(blob: bytes, at: str = "example") -> Fields:
    """A serialized ``tf.train.Example``: bytes lists as lists, number lists as arrays.

    The message is three nested maps of the protobuf wire format: Example.features (1) -> Features.feature (1, a map of
    key 1 to value 2) -> Feature: bytes_list (1), float_list (2) or int64_list (3), each a repeated field 1.

    >>> parse_example(bytes.fromhex("0a0b0a090a01791204 1a020a00".replace(" ", "")))
    {'y': array([], dtype=int64)}
    """
    try:
        if not isinstance(blob, bytes):
            raise TypeError(f"{type(blob).__name__} instead of bytes")
        fields: Fields = {}
        for number, features in _wire(blob):
            for _, entry in _wire(features) if number == 1 else ():
                parts = dict(_wire(entry))
                fields[parts[1].decode()] = _feature(parts.get(2, b""))
        return fields
    except (IndexError, KeyError, TypeError, struct.error, ValueError, OverflowError) as error:
        raise ValueError(f"{at}: not a tf.train.Example, damaged or cut short ({error})") from error


def _feature(blob: bytes) -> Any:
    for kind, body in _wire(blob):
        values = [v for number, v in _wire(body) if number == 1]
        if kind == 1:
            return values
        if kind == 2:
            return np.frombuffer(b"".join(values), "<f4")
        out: list[int] = []
        for value in values:
            if isinstance(value, int):
                out.append(value)
                continue
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                out.append(number)
        return np.array(out, np.uint64).view(np.int64)
    return []


def _wire(blob: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(blob):
        tag, at = _varint(blob, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(blob, at)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _varint(blob, at)
            if at + size > len(blob):
                raise ValueError("the message ends early")
            value, at = blob[at : at + size], at + size
        else:
            raise ValueError(f"unknown wire type {kind}")
        yield tag >> 3, value


def _varint(blob: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = blob[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
