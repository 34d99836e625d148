"""CSV files with a header line: columns separated by commas, semicolons or tabs, also gzipped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbraid.data.formats.archive import read_bytes
from fedbraid.data.formats.columns import need, twice_in
from fedbraid.data.store import StoreWriter
from fedbraid.data.tabular import ANY, Columns, tabulate

__all__ = ["add_data", "csv_table", "read_csv"]

_DELIMITERS = (",", ";", "\t")
_BLOCK = 1 << 26  # bytes that are parsed together: a row may be that long, and the first block sets the types


def read_csv(
    writer: StoreWriter,
    paths: Sequence[Path],
    *,
    columns: Columns = ANY,
    test: Sequence[Path] = (),
    delimiter: str | None = None,
) -> None:
    """Read CSV files, all with the same columns, as one table; ``columns`` says what its columns are."""
    train = _tables(paths, delimiter)
    held = _tables(test, delimiter) if test else None
    seed = writer.shuffle or 0
    add_data(writer, tabulate(train, held, columns=columns, seed=seed, source=paths[0], test_source=(*test, "")[0]))


def add_data(writer: StoreWriter, data: Any) -> None:
    """Write all clients of in-memory data, whose rows are already in their final order."""
    writer.shuffle = None
    writer.info |= data.info
    for name, split in data.splits.items():
        for i in range(split.num_clients):
            if split.offsets[i + 1] > split.offsets[i] or name == "train":
                writer.add(name, split.ids[i], split.client(i))


def _tables(paths: Sequence[Path], delimiter: str | None) -> Any:
    tables = [csv_table(Path(path), delimiter) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if table.column_names != tables[0].column_names:
            found, first = ", ".join(table.column_names), ", ".join(tables[0].column_names)
            raise ValueError(f"{path}: columns {found} differ from {first} of {Path(paths[0]).name}")
    pa = need("pyarrow")
    return pa.concat_tables(tables, promote_options="permissive") if len(tables) > 1 else tables[0]


def csv_table(path: Path, delimiter: str | None = None) -> Any:
    """One file as a pyarrow table. Empty cells, NA, NaN and null are missing values."""
    pa, csv = need("pyarrow"), need("pyarrow.csv")
    blob = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    header = blob.partition(b"\n")[0].decode("utf-8", "replace")
    if not header.strip():
        raise ValueError(f"{path}: no header line with the names of the columns")
    if delimiter is None:
        delimiter = max(_DELIMITERS, key=header.count)
    elif len(delimiter) != 1:
        raise ValueError(f"delimiter must be one character, got {delimiter!r}")
    try:
        table = csv.read_csv(
            io.BytesIO(blob),
            read_options=csv.ReadOptions(block_size=_BLOCK),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(strings_can_be_null=True),
        )
    except (pa.ArrowException, OSError, UnicodeError) as error:
        text = " ".join(str(error).split())
        advice = "; save the file as UTF-8" if "UTF8" in text else ""
        raise ValueError(f"{path}: not a readable CSV file ({text[:200]}){advice}") from error
    if twice := twice_in(table.column_names):
        raise ValueError(f"{path}: the column {str(twice[0])!r} appears twice; rename one")
    if not len(table):
        raise ValueError(f"{path}: no rows below the header line")
    return table
