"""Tables with a client column: Parquet, Arrow files, and Hugging Face data sets (which are Arrow on disk).

Columns become fields. Numbers stay numbers, lists of equal length become arrays, and strings become text. Images in
Hugging Face's form (a struct of encoded bytes) are decoded. A table larger than memory is read in several scans; the
clients of one scan fit into ``memory`` bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.formats.arrays import array_column
from fedbraid.data.formats.columns import as_labels, need, twice_in
from fedbraid.data.formats.csv import add_data
from fedbraid.data.formats.plain_sets import add_grouped, add_plain
from fedbraid.data.limits import block_rows, check_size, regular
from fedbraid.data.names import safe_name
from fedbraid.data.preprocess import scaling_of
from fedbraid.data.store import StoreWriter
from fedbraid.data.tabular import ANY, Columns, is_text, tabulate

__all__ = ["arrow_columns", "read_table", "whole_table"]


def read_table(
    writer: StoreWriter,
    paths: Sequence[Path],
    *,
    columns: Columns = ANY,
    test: Sequence[Path] = (),
    classes: int | None = None,
    memory: int = 1 << 30,
) -> None:
    """Read Parquet or Arrow files (or folders of them), grouped by the column ``columns.client``.

    Without ``columns.features``, all other columns keep their names. Files in ``test``, and files whose path contains
    ``test``, are the test split. Without a client column the set is plain and can be partitioned later. Rules that
    change columns (categories, missing values, standardisation, labels of text) need the table in memory.
    """
    client, label, features = columns.client, columns.label, columns.features
    sources: dict[str, list[Path]] = {}
    for path in paths:
        for split, file in _files(Path(path), "train"):
            sources.setdefault(split, []).append(file)
    for path in test:
        sources.setdefault("test", []).extend(file for _, file in _files(Path(path), "test"))
    if "train" not in sources:
        raise ValueError(f"{', '.join(map(str, paths))}: no train file (.parquet or .arrow) among them")
    wanted = [c for c in (client, label, *features) if c is not None]
    first = _dataset(sources["train"], wanted)
    if not columns.plain or (label is not None and is_text(first.schema.field(label).type)):
        held = _dataset(sources["test"], wanted) if "test" in sources else None
        tables = [None if d is None else _read(d, sources[s], None) for d, s in ((first, "train"), (held, "test"))]
        seed, test_source = writer.shuffle or 0, sources.get("test", [""])[0]
        data = tabulate(*tables, columns=columns, seed=seed, source=sources["train"][0], test_source=test_source)
        return add_data(writer, data)
    options = {"client": client, "label": label, "features": features, "classes": classes}
    plain: dict[str, dict[str, Any]] = {}
    for split in sorted(sources, key=lambda s: s != "train"):
        files = sources[split]
        shown = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        data = _dataset(files, [c for c in (client, label, *features) if c is not None])
        wanted = None if not features else [c for c in (client, label, *features) if c is not None]
        if client is None:
            plain[split], _ = arrow_columns(_read(data, files, wanted), shown, **options)
            continue
        for chunk in _chunks(data, files, client, memory):
            # no filter matches a null, so a chunked scan would silently drop its row; _chunks has refused nulls before
            keep = None if chunk is None else need("pyarrow.compute").field(client).isin(chunk)
            fields, ids = arrow_columns(_read(data, files, wanted, keep), shown, **options)
            assert ids is not None
            _describe(writer, fields, classes)
            add_grouped(writer, split, fields, ids, shown)
    for fields in plain.values():
        _describe(writer, fields, classes)
    if plain:
        add_plain(writer, plain["train"], plain.get("test"), sources["train"][0])


def whole_table(paths: Sequence[Path]) -> Any:
    """All rows of Parquet or Arrow files, or of folders of them, as one pyarrow table."""
    files = [file for path in paths for _, file in _files(Path(path), "train")]
    return _read(_dataset(files, []), files, None)


def _describe(writer: StoreWriter, fields: dict[str, Any], classes: int | None) -> None:
    """Write the number of labels and, for uint8 images, the preprocessing ``scale`` into the store's header."""
    writer.preprocess = scaling_of({name: field for name, field in fields.items() if isinstance(field, np.ndarray)})
    y = fields.get("y")
    if isinstance(y, np.ndarray) and y.dtype == np.int32 and len(y):
        writer.info["classes"] = classes or max(writer.info.get("classes", 0), int(y.max()) + 1)


def _dataset(files: list[Path], wanted: list[str]) -> Any:
    """All files of a split as one Arrow data set. Checks the columns of each file."""
    pa, dataset = need("pyarrow"), need("pyarrow.dataset")
    names: list[str] = []
    tables = []
    file = files[0]
    try:
        for file in files:
            regular(file)
            if file.suffix == ".parquet":
                found = _declared(file)
            else:
                tables.append(_open_arrow(file))
                found = tables[-1].column_names
            if missing := [c for c in wanted if c not in found]:
                raise ValueError(f"{file}: no column {missing[0]!r}; it has {', '.join(found)}")
            names = names or found
            if found != names:
                raise ValueError(
                    f"{file}: columns {', '.join(found)} differ from {', '.join(names)} of {files[0].name}"
                )
        if tables and len(tables) != len(files):
            raise ValueError(f"{files[0]}: Parquet and Arrow files are mixed; import one kind at a time")
        return dataset.dataset(pa.concat_tables(tables) if tables else [str(f) for f in files])
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file}: not readable, damaged or cut short ({' '.join(str(error).split())})") from error


def _open_arrow(file: Path) -> Any:
    pa, ipc = need("pyarrow"), need("pyarrow.ipc")
    source = pa.memory_map(str(file))
    magic = source.read(6)
    source.seek(0)  # Hugging Face writes streams, Arrow and Feather write files
    packed, total, batches = regular(file).stat().st_size, 0, []
    if magic == b"ARROW1":
        reader = ipc.open_file(source)
        found: Iterator[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        reader = found = ipc.open_stream(source)
    for batch in found:
        batch.validate(full=True)  # Arrow trusts offsets and lengths in a file unless it is told not to
        total += batch.nbytes
        check_size(file, total, packed)
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


def _declared(file: Path) -> list[str]:
    """The columns of a Parquet file, after a check of its declared numbers of rows and values."""
    metadata = need("pyarrow.parquet").read_metadata(file)
    packed, total = file.stat().st_size, 0
    widths = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        for j in range(group.num_columns):
            column = group.column(j)
            values = max(column.num_values, group.num_rows)
            if min(values, column.total_uncompressed_size, group.num_rows) < 0:
                raise ValueError(f"{file}: a column declares a negative size: damaged")
            total += max(values * widths.get(column.physical_type, 8), column.total_uncompressed_size)
            check_size(file, total, packed)
    return metadata.schema.to_arrow_schema().names


def _read(data: Any, files: list[Path], columns: list[str] | None, keep: Any = None) -> Any:
    """The rows of a data set as one table. Bytes are counted while they are read: values may share them in a file."""
    pa = need("pyarrow")
    packed, total, batches = sum(f.stat().st_size for f in files), 0, []
    names = data.schema.names if columns is None else columns
    flat = all(_fixed(data.schema.field(name).type) for name in names)
    rows = 1 << 17 if flat else block_rows(packed)
    try:
        for batch in data.to_batches(columns=columns, filter=keep, batch_size=rows, batch_readahead=2):
            total += batch.nbytes
            check_size(files[0], total, packed)
            batches.append(batch)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{files[0]}: not readable, damaged or cut short ({' '.join(str(error).split())})") from error
    schema = batches[0].schema if batches else pa.schema([data.schema.field(name) for name in names])
    return pa.Table.from_batches(batches, schema)


def _fixed(kind: Any) -> bool:
    types = need("pyarrow").types
    return types.is_primitive(kind) or types.is_boolean(kind)


def _chunks(data: Any, files: list[Path], client: str, memory: int) -> Iterator[list | None]:
    """Groups of clients whose rows fit into ``memory`` bytes; a single None if all clients fit."""
    try:
        column = _read(data, files, [client]).column(client)
    except ValueError as error:
        raise ValueError(f"{files[0]}: field {client}: {str(error).removeprefix(f'{files[0]}: ')}") from error
    if column.null_count:
        row = next(i for i, v in enumerate(column) if not v.is_valid)
        for file in files:  # row numbers continue from file to file
            rows = _rows(file)
            if row < rows or file == files[-1]:
                raise ValueError(f"{file}: field {client}: the client column has a null in row {row}; drop or name it")
            row -= rows
    total = sum(f.stat().st_size for f in files) * 4  # unpacked columns are about this much larger
    if total <= memory:
        yield None
        return
    counts = Counter(column.to_pylist())
    per_row, chunk, rows = total / max(1, len(column)), [], 0
    for name, count in sorted(counts.items()):
        if chunk and (rows + count) * per_row > memory:
            yield chunk
            chunk, rows = [], 0
        chunk.append(name)
        rows += count
    yield chunk


def _rows(file: Path) -> int:
    if file.suffix == ".parquet":
        return need("pyarrow.parquet").read_metadata(file).num_rows
    return len(_open_arrow(file))


def arrow_columns(
    table: Any,
    source: object = "table",
    *,
    client: str | None = None,
    label: str | None = None,
    features: Sequence[str] = (),
    classes: int | None = None,
) -> tuple[dict[str, Any], np.ndarray | None]:
    """The fields of a pyarrow table, and its client ids.

    >>> import pyarrow as pa
    >>> fields, ids = arrow_columns(pa.table({"who": ["a", "b"], "x": [[1.0, 2.0], [3.0, 4.0]]}), client="who")
    >>> fields["x"].tolist(), ids.tolist()
    ([[1.0, 2.0], [3.0, 4.0]], ['a', 'b'])
    """
    ids = None
    if client is not None:
        column = table.column(client)
        if column.null_count:
            row = next(i for i, v in enumerate(column) if not v.is_valid)
            raise ValueError(
                f"{source}: field {client}: the client column has {column.null_count} nulls, first in row {row}"
            )
        ids = np.array([str(v) for v in column.to_pylist()])
    who = (lambda row: f"{source}: client {ids[row]}") if ids is not None else (lambda row: f"{source}: row {row}")
    rest = [n for n in table.column_names if n not in (client, label, *features)]
    fields: dict[str, Any] = {}
    if features:
        parts = [array_column(table.column(n), n, source, who) for n in features]
        if len(parts) == 1:
            fields["x"] = parts[0]
        else:
            flat = [np.asarray(p, np.float32).reshape(len(p), -1) for p in parts]
            fields["x"] = np.concatenate(flat, axis=1)
    else:
        if twice := twice_in([safe_name(n) for n in rest]):
            raise ValueError(f"{source}: several columns would be named {twice[0]!r}; rename them")
        fields |= {safe_name(n): array_column(table.column(n), n, source, who) for n in rest}
    if label is not None:
        y = array_column(table.column(label), label, source, who)
        numeric = isinstance(y, np.ndarray) and y.dtype.kind in "iub"
        fields["y"] = as_labels(y, f"{source}: field {label}", classes) if numeric else y
    return fields, ids


def _files(path: Path, split: str) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".arrow", ".feather") and not p.is_dir())
        if not files:
            raise ValueError(f"{path}: no .parquet or .arrow files in this folder")
        for file in files:  # Hugging Face names the split in the folder or in the file name
            inside = file.relative_to(path).as_posix().lower()
            yield ("test" if "test" in inside else split), file
        return
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    yield ("test" if "test" in path.name.lower() else split), path
