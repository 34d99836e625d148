"""The layout of a store's files: names, dtypes, the header's format, and text of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

FORMAT, VERSION, HEADER = "fedbraid-store", 1, "header.json"
SPLITS = ("train", "test", "validation", "unseen")
TEXT = "text"  # the header's dtype of text fields
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
INDEX = np.dtype("<i8")  # offsets of clients, and of the rows of text


class TextRows(Sequence[str]):
    """Strings of any length in one UTF-8 blob with row offsets: client ids, and text fields.

    >>> rows = TextRows.of(["to be", "or", "not"])
    >>> len(rows), rows[1], list(rows[1:])
    (3, 'or', ['or', 'not'])
    """

    dtype: np.dtype[Any] = np.dtype(object)
    blob: np.ndarray
    rows: np.ndarray

    def __init__(self, blob: np.ndarray, rows: np.ndarray):
        self.blob, self.rows = blob, rows

    @classmethod
    def of(cls, strings: Sequence[str]) -> TextRows:
        """The rows of some strings."""
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
                raise ValueError("slices of text rows must have step 1")
            return TextRows(self.blob, self.rows[start : max(start, stop) + 1])
        i = range(len(self))[index]
        try:
            return bytes(self.blob[int(self.rows[i]) : int(self.rows[i + 1])]).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"text row {i} is not UTF-8: the store is damaged, import the data again") from error

    def __repr__(self) -> str:
        return f"TextRows({len(self)} strings)"

    @property
    def shape(self) -> tuple[int]:
        """The number of strings, as the shape of an array."""
        return (len(self),)

    @property
    def nbytes(self) -> int:
        """The bytes of the text and of its row offsets."""
        return int(self.rows[-1] - self.rows[0]) + self.rows.nbytes


def files_of(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The header's records of all files of a split, by file name."""
    records = [
        entry["offsets"],
        *entry["fields"].values(),
        *(f["rows"] for f in entry["fields"].values() if "rows" in f),
    ]
    if entry["ids"] != "train":
        records += [entry["ids"], entry["ids"]["rows"]]
    return {record["file"]: record for record in records}


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data
