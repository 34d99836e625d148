"""svmlight (LIBSVM) files: one example per line, ``label [qid:query] index:value ... [# comment]``, also packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.formats.archive import read_bytes
from fedbraid.data.formats.columns import need
from fedbraid.data.formats.csv import add_data
from fedbraid.data.limits import check_size
from fedbraid.data.store import StoreWriter
from fedbraid.data.tabular import ANY, Columns, as_arrow, tabulate

__all__ = ["read_svmlight", "svmlight_rows"]


def read_svmlight(
    writer: StoreWriter,
    paths: Sequence[Path],
    *,
    columns: Columns = ANY,
    test: Sequence[Path] = (),
    dimension: int | None = None,
) -> None:
    """Read svmlight files as dense rows. Queries (``qid``) become clients if the client column is "qid".

    Labels are classes if there are at most 100 different whole numbers (-1 and +1 become 0 and 1), unless
    ``columns.task`` says what they are. ``dimension`` is the number of features, if no file has an example of the last.
    """
    if columns.client not in (None, "qid"):
        raise ValueError(f"an svmlight file has no column {columns.client!r}; its queries are the client 'qid'")
    sets = [(path, *_parse(Path(path))) for path in (*paths, *test)]
    lowest = min(int(s[2][1].min()) if len(s[2][1]) else 1 for s in sets)
    first = 0 if lowest == 0 else 1  # indices start at 1, or at 0 if one is 0
    width = dimension or max(int(s[2][1].max()) if len(s[2][1]) else first for s in sets) - first + 1
    tables = [_table(*s, first=first, width=width, queries=columns.client is not None) for s in sets]
    if columns.task == "auto":
        labels = np.unique(np.concatenate([s[1] for s in sets]))
        whole = len(labels) <= 100 and np.array_equal(labels, np.rint(labels))
        columns = replace(columns, task="classes" if whole else "values")
    columns = replace(columns, label="label", features=("x",))
    train, held = _join(tables[: len(paths)]), _join(tables[len(paths) :]) if test else None
    seed = writer.shuffle or 0
    add_data(writer, tabulate(train, held, columns=columns, seed=seed, source=paths[0], test_source=(*test, "")[0]))


def svmlight_rows(path: Path, *, dimension: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Dense features and labels of one file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a9a"
    >>> _ = path.write_text("-1 1:0.5 3:1 # a comment" + chr(10) + "+1 2:2" + chr(10))
    >>> x, y = svmlight_rows(path)
    >>> x.tolist(), y.tolist()
    ([[0.5, 0.0, 1.0], [0.0, 2.0, 0.0]], [-1.0, 1.0])
    """
    labels, (rows, indices, values), _ = _parse(path)
    first = 0 if len(indices) and indices.min() == 0 else 1
    width = dimension or (int(indices.max()) - first + 1 if len(indices) else 1)
    return _dense(path, (rows, indices - first, values), len(labels), width), labels


def _join(tables: list[Any]) -> Any:
    return need("pyarrow").concat_tables(tables)


def _table(
    path: Path, labels: np.ndarray, cells: Any, queries_of: list[str], *, first: int, width: int, queries: bool
) -> Any:
    rows, indices, values = cells
    if len(indices) and indices.max() - first >= width:
        raise ValueError(f"{path}: feature {int(indices.max())}, but the dimension is {width}")
    fields: dict[str, Any] = {"label": labels, "x": _dense(path, (rows, indices - first, values), len(labels), width)}
    if queries:
        if any(q == "" for q in queries_of):
            raise ValueError(f"{path}: line {queries_of.index('') + 1} has no qid, which is the client here")
        fields["qid"] = np.array(queries_of)
    return as_arrow(fields, str(path))


def _dense(path: Path, cells: tuple[np.ndarray, np.ndarray, np.ndarray], count: int, width: int) -> np.ndarray:
    check_size(path, count * width * 4, path.stat().st_size)
    rows, indices, values = cells
    x = np.zeros((count, width), np.float32)
    x[rows, indices] = values
    return x


def _parse(path: Path) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], list[str]]:
    """Labels, cells as (row, index, value), and the query of each row ("" if it has none)."""
    try:
        text = read_bytes(path).decode("ascii", "strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not an svmlight file (byte {error.start} is not ASCII)") from error
    labels: list[float] = []
    queries: list[str] = []
    rows: list[int] = []
    indices: list[int] = []
    values: list[float] = []
    for number, line in enumerate(text.split("\n"), 1):
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        last = -1
        try:
            labels.append(_finite(tokens[0]))
            queries.append("")
            for token in tokens[1:]:
                key, colon, value = token.partition(":")
                if key == "qid" and colon:
                    queries[-1] = value
                    continue
                index = int(key) if key.isdecimal() and len(key) < 10 else -1
                if not colon or index <= last:
                    raise ValueError(f"{token[:30]!r} is not index:value with a growing index")
                last = index
                rows.append(len(labels) - 1)
                indices.append(index)
                values.append(_finite(value))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
    if not labels:
        raise ValueError(f"{path}: holds no examples")
    cells = (np.array(rows, np.int64), np.array(indices, np.int64), np.array(values, np.float64))
    return np.array(labels), cells, queries


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text[:30]!r} is not a number") from None
    if not np.isfinite(value) or abs(value) > 3e38:
        raise ValueError(f"{text[:30]!r} is not finite")
    return value
