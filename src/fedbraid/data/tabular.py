"""Tables as federated data: which columns are features, labels and clients, and what happens to text and gaps.

`as_arrow` turns frames of other libraries into a pyarrow table. `tabulate` applies the `Columns` to it. Everything that
is fitted (means for gaps, standardisation) is fitted on training rows only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fedbraid.data import partition
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.formats.arrays import array_column
from fedbraid.data.formats.columns import as_labels, need, twice_in
from fedbraid.data.names import check_client
from fedbraid.data.preprocess import scaling_of
from fedbraid.names import nearest
from fedbraid.notices import notice

__all__ = ["ANY", "Columns", "as_arrow", "is_text", "tabulate"]

Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are.

    client: the column that names the client of a row; None for a plain table, which is partitioned later.
    label: the column that becomes ``y``.
    features: the columns that become ``x``; all others if empty.
    categories: features that are encoded as one 0/1 column per value.
    task: "classes" numbers the labels from 0 and keeps their names, "values" keeps numbers (regression). "auto" takes
        text and whole numbers from 0 as classes, other numbers as values.
    missing: what to do with rows that lack a value: "error", "drop" the row, "mean" of the column's training rows, or a
        number. In a category that lacks a value, "mean" and numbers leave all its 0/1 columns 0. A row without a label
        or a client is an error unless it is dropped.
    standardise: subtract the mean of each number column and divide by its standard deviation: of all training rows
        ("federation"), or of each client's own ("client").
    test_fraction: share of each client's rows that become the test split.
    """

    client: str | None = None
    label: str | None = None
    features: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    task: Literal["auto", "classes", "values"] = "auto"
    missing: str | float = "error"
    standardise: Literal["federation", "client"] | None = None
    test_fraction: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether columns are only chosen, and no rule changes them: large tables are then read in parts."""
        return self == Columns(client=self.client, label=self.label, features=self.features)

    def __post_init__(self) -> None:
        if self.task not in ("auto", "classes", "values"):
            raise ValueError(f'task must be "auto", "classes" or "values", got {self.task!r}')
        if self.standardise not in (None, "federation", "client"):
            raise ValueError(f'standardise must be "federation" or "client", got {self.standardise!r}')
        if self.standardise == "client" and self.client is None:
            raise ValueError('standardise = "client" needs a client column')
        missing = self.missing
        if isinstance(missing, str) and missing not in ("error", "drop", "mean"):
            try:
                object.__setattr__(self, "missing", float(missing))
            except ValueError:
                raise ValueError(f'missing must be "error", "drop", "mean" or a number, got {missing!r}') from None
        if not isinstance(self.missing, str) and not np.isfinite(self.missing):
            raise ValueError(f"missing must be a finite number, got {missing!r}")


ANY = Columns()


def as_arrow(source: Any, what: str = "table") -> Any:
    """A pyarrow table from a pyarrow, pandas or polars table, a Hugging Face data set, or a dict of arrays.

    >>> as_arrow({"a": np.arange(2), "b": np.zeros((2, 3))}).schema.names
    ['a', 'b']
    """
    pa = need("pyarrow")
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    elif isinstance(source, Mapping):
        source = pa.table({str(name): _from_numpy(values, f"{what}: column {name}") for name, values in source.items()})
    elif hasattr(
        source, "with_format"
    ):  # a Hugging Face data set; its own rows, if it is a selection of a larger table
        source = source.with_format("arrow")[:]
    elif not isinstance(source, pa.Table):
        if hasattr(source, "__arrow_c_stream__"):
            source = pa.table(source)
        elif hasattr(source, "__dataframe__"):
            source = need("pyarrow.interchange").from_dataframe(source)
        else:
            raise ValueError(
                f"{what}: {type(source).__name__} is not a table; give a pyarrow, pandas or polars table, a Hugging "
                "Face data set, or a dict of arrays"
            )
    if twice := twice_in(source.column_names):
        raise ValueError(f"{what}: the column {twice[0]!r} appears twice; rename one")
    index = [n for n in source.column_names if re.fullmatch(r"__index_level_\d+__", n)]  # written by pandas
    return source.drop_columns(index) if index else source


def _from_numpy(values: Any, at: str) -> Any:
    pa = need("pyarrow")
    array = np.asarray(values)
    if array.ndim < 2:
        try:
            return pa.array(array, from_pandas=True)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"{at}: not a column of numbers or text ({' '.join(str(error).split())})") from error
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for width in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, width)
    return flat


def tabulate(
    table: Any, test: Any = None, *, columns: Columns, seed: int = 0, source: object = "table", test_source: object = ""
) -> FederatedData:
    """Federated data from a pyarrow table, and optionally one of test rows.

    >>> import pyarrow as pa
    >>> rows = pa.table({"who": [1, 2, 1], "age": [1.0, 2.0, 1.5], "kind": ["x", "y", "y"], "y": ["n", "y", "n"]})
    >>> data = tabulate(rows, columns=Columns(client="who", label="y", categories=("kind",)))
    >>> data.train.arrays["x"].tolist(), data.info["features"], data.info["labels"]
    ([[1.0, 1.0, 0.0], [1.5, 0.0, 1.0], [2.0, 0.0, 1.0]], ['age', 'kind=x', 'kind=y'], ['n', 'y'])
    """
    if test is not None and columns.test_fraction:
        raise ValueError("give a test table or test_fraction, not both")
    coding = _coding(table, columns, source)
    parts = [_encode(table, columns, coding, source)]
    if test is not None:
        parts.append(_encode(test, columns, coding, test_source or f"test {source}"))
    splits = _split(parts, columns, seed)
    info: dict[str, Any] = {}
    if not coding.whole:
        info["features"] = coding.titles()
        numbers = np.array([name not in coding.levels for name in coding.names for _ in coding.levels.get(name, [0])])
        if columns.missing not in ("error", "drop"):
            splits = _fill(splits, columns.missing)
        if columns.standardise is not None:
            splits, info["standardise"] = _standardise(splits, columns.standardise, numbers)
    splits = {name: _as_float32(s, coding, f"{source}: {name} split") for name, s in splits.items()}
    if coding.classes is not None:
        info["labels"] = coding.classes
    y = splits["train"].arrays.get("y")
    if y is not None and y.dtype == np.int32:
        found = max(int(s.arrays["y"].max()) for s in splits.values() if s.num_examples) + 1
        info["classes"] = len(coding.classes) if coding.classes is not None else found
    if columns.client is None:
        info["plain"] = True
    preprocess = scaling_of(splits["train"].arrays)
    return FederatedData(splits["train"], splits.get("test"), "data", info, preprocess, unseen=splits.get("unseen"))


class Coding(NamedTuple):
    """How columns become numbers, read off the training rows."""

    names: list[str]  # the feature columns, in order
    levels: dict[str, list[str]]  # the values of each category
    classes: list[str] | None  # the names of the labels; None if they are numbers
    whole: bool  # x is one column of lists or images, and keeps its shape and type

    def titles(self) -> list[str]:
        """The name of each column of x."""
        return [f"{n}={v}" if n in self.levels else n for n in self.names for v in self.levels.get(n, [""])]


def _coding(table: Any, columns: Columns, source: object) -> Coding:
    names = _features(table, columns, source)
    whole = len(names) == 1 and names[0] not in columns.categories and not _is_number(table.schema.field(names[0]).type)
    if whole and (columns.standardise is not None or columns.missing not in ("error", "drop")):
        raise ValueError(f"{source}: column {names[0]!r} holds lists or images; standardise and missing need numbers")
    levels = {name: _levels(table.column(name)) for name in columns.categories}
    for name, found in levels.items():
        if not 0 < len(found) <= 10_000:
            raise ValueError(f"{source}: column {name!r} has {len(found):,} values; categories need 1 to 10,000")
    return Coding(names, levels, _label_names(table, columns), whole)


def _features(table: Any, columns: Columns, source: object) -> list[str]:
    """The names of the feature columns in order, after a check of all names and types."""
    pa = need("pyarrow")
    have = table.column_names
    for name in (columns.client, columns.label, *columns.features, *columns.categories):
        if name is not None and name not in have:
            raise ValueError(f"{source}: no column {name!r}{nearest(name, have)}; it has {', '.join(have)}")
    for option, given in (("features", columns.features), ("categories", columns.categories)):
        if twice := twice_in(given):
            raise ValueError(f"{source}: column {twice[0]!r} is named twice in {option}; name it once")
    rest = [n for n in have if n not in (columns.client, columns.label)]
    names = (
        [*columns.features, *(c for c in columns.categories if c not in columns.features)] if columns.features else rest
    )
    if not names:
        raise ValueError(f"{source}: no feature columns beside the client and the label")
    for name in names:
        kind = table.schema.field(name).type
        alone = len(names) == 1 and (_is_list(kind) or pa.types.is_struct(kind))
        if name in columns.categories or _is_number(kind) or alone:
            continue
        if pa.types.is_null(kind):
            raise ValueError(f"{source}: column {name!r} is empty; leave it out of the features")
        held = "text" if is_text(kind) else str(kind)
        example = next((v.as_py() for v in table.column(name) if v.is_valid), None)
        raise ValueError(
            f"{source}: column {name!r} holds {held} (such as {str(example)[:40]!r}), but features must be numbers. "
            "Add it to categories to encode it as 0/1 columns, or list the features without it (on the command line: "
            f"--categories {name}, or --features)"
            + ("" if columns.client else "; if it says whom a row belongs to, name it as the client (--client)")
        )
    return names


def _is_number(kind: Any) -> bool:
    types = need("pyarrow").types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def is_text(kind: Any) -> bool:
    """Whether a type of pyarrow holds strings."""
    types = need("pyarrow").types
    view = getattr(types, "is_string_view", lambda kind: False)
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or view(kind)
        or (types.is_dictionary(kind) and is_text(kind.value_type))
    )


def _is_list(kind: Any) -> bool:
    types = need("pyarrow").types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _texts(column: Any) -> np.ndarray:
    """Values as text; missing ones are None."""
    return np.array([None if v is None or v != v else _text(v) for v in column.to_pylist()], object)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _levels(column: Any) -> list[str]:
    return sorted({v for v in _texts(column) if v is not None})


def _label_names(table: Any, columns: Columns) -> list[str] | None:
    """The names of the classes in the order of their numbers; None if labels are numbers already."""
    if columns.label is None or columns.task == "values":
        return None
    kind, types = table.schema.field(columns.label).type, need("pyarrow").types
    if columns.task == "auto" and not is_text(kind) and not types.is_boolean(kind):
        return None
    found = _levels(table.column(columns.label))
    numeric = types.is_integer(kind) or types.is_floating(kind)
    return sorted(found, key=float) if numeric else found


def _encode(table: Any, columns: Columns, coding: Coding, source: object) -> tuple[Fields, np.ndarray]:
    """``x`` with NaN where a value is missing, ``y``, and the client of each row. Rows are dropped where asked for."""
    for name in (columns.client, columns.label, *coding.names):
        if name is not None and name not in table.column_names:
            raise ValueError(f"{source}: no column {name!r}; it has {', '.join(table.column_names)}")
    gaps: dict[str, np.ndarray] = {}
    ids = np.full(len(table), "all", object)
    if columns.client is not None:
        ids = _texts(table.column(columns.client))
        gaps[columns.client] = np.array([v is None for v in ids], bool)
    fields: Fields = {}
    if columns.label is not None:
        at = f"{source}: column {columns.label!r}"
        fields["y"], gaps[columns.label] = _labels(table.column(columns.label), columns.task, coding.classes, at)
    parts: list[np.ndarray] = []
    for name in coding.names if not coding.whole else ():
        at = f"{source}: column {name!r}"
        if name in coding.levels:
            values, gaps[name] = _one_hot(table.column(name), coding.levels[name], at)
        else:
            values = _numbers(table.column(name), at)
            gaps[name] = np.isnan(values[:, 0])
        parts.append(values)
    keep = ~_dropped(gaps, columns, len(table), source)
    if coding.whole:
        rows = np.flatnonzero(keep)
        fields = {name: values[keep] for name, values in fields.items()}
        return {"x": array_column(table.column(coding.names[0]).take(rows), coding.names[0], source), **fields}, ids[
            keep
        ]
    fields["x"] = np.concatenate(parts, axis=1)
    return {name: values[keep] for name, values in fields.items()}, ids[keep]


def _dropped(gaps: Mapping[str, np.ndarray], columns: Columns, rows: int, source: object) -> np.ndarray:
    """Which rows are left out. A gap that no rule covers is an error with the name of the column and the count."""
    out = np.zeros(rows, bool)
    for name, missing in gaps.items():
        always = name in (columns.client, columns.label)
        if columns.missing == "drop":
            out |= missing
        elif missing.any() and (always or columns.missing == "error"):
            rule = '"drop"' if always else '"drop", "mean" or a number'
            raise ValueError(
                f"{source}: column {name!r} lacks {int(missing.sum()):,} of {rows:,} values, first in row "
                f"{int(np.argmax(missing))} (counted from 0, without the header); fill them, or set missing (on the "
                f"command line --missing) to {rule}"
            )
    if columns.missing not in ("error", "drop"):
        _tell_filled({name: int(missing.sum()) for name, missing in gaps.items()}, columns, rows, source)
    if out.all():
        raise ValueError(f"{source}: no rows are left")
    if out.any():
        notice(f"{source}: {int(out.sum()):,} of {rows:,} rows lack a value and were dropped")
    return out


def _numbers(column: Any, at: str) -> np.ndarray:
    """A column of numbers as float64 [rows, 1]; missing values are NaN."""
    pa = need("pyarrow")
    try:
        values = column.cast(pa.float64(), safe=False).to_numpy()
    except pa.ArrowException as error:
        raise ValueError(f"{at}: not numbers ({' '.join(str(error).split())})") from error
    infinite = np.isinf(values)
    if infinite.any():
        raise ValueError(
            f"{at}: {int(infinite.sum()):,} values are infinite, first in row {int(np.argmax(infinite))}; drop the rows"
        )
    return np.array(values, np.float64)[:, None]


def _one_hot(column: Any, levels: list[str], at: str) -> tuple[np.ndarray, np.ndarray]:
    values = _texts(column)
    place = {level: i for i, level in enumerate(levels)}
    out, missing = np.zeros((len(values), len(levels))), np.array([v is None for v in values], bool)
    for row, value in enumerate(values):
        if value is None:
            continue
        if value not in place:
            raise ValueError(f"{at}: the value {value[:40]!r} in row {row} is not in the training rows")
        out[row, place[value]] = 1.0
    return out, missing


def _labels(column: Any, task: str, classes: list[str] | None, at: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels and where they are missing. Classes are int32, values are float32."""
    if classes is not None:
        place = {name: i for i, name in enumerate(classes)}
        values = _texts(column)
        missing = np.array([v is None for v in values], bool)
        for row, value in enumerate(values):
            if value is not None and value not in place:
                raise ValueError(f"{at}: the label {value[:40]!r} in row {row} is not in the training rows")
        return np.array([place.get(v, 0) for v in values], np.int32), missing
    if is_text(column.type) or _is_list(column.type):
        raise ValueError(f'{at}: holds {column.type}, where task = "{task}" needs one number per row')
    values = _numbers(column, at)[:, 0]
    missing = np.isnan(values)
    known = values[~missing]
    if task == "auto" and need("pyarrow").types.is_integer(column.type) and not (known < 0).any():
        return as_labels(np.where(missing, 0, values), at), missing
    return values.astype(np.float32), missing


def _split(parts: list[tuple[Fields, np.ndarray]], columns: Columns, seed: int) -> dict[str, Split]:
    """Splits by client: train, test in the same order, and clients that have test rows only."""
    (train, ids), *rest = parts
    for name in {str(i) for _, part in parts for i in part.tolist()}:
        check_client(name, f"column {columns.client!r}")
    groups, names = partition.by_id(ids.astype(str))
    rng = np.random.default_rng(seed)
    if columns.client is not None:
        groups = [rng.permutation(g) for g in groups]
    if not rest:
        if not columns.test_fraction:
            return {"train": Split.from_assignment(train, groups, names)}
        kept, held = partition.hold_out(groups, fraction=columns.test_fraction, seed=seed)
        return {"train": Split.from_assignment(train, kept, names), "test": Split.from_assignment(train, held, names)}
    test, test_ids = rest[0]
    test_groups, test_names = partition.by_id(test_ids.astype(str))
    place = dict(zip(test_names, test_groups, strict=True))
    out = {"train": Split.from_assignment(train, groups, names)}
    if not any(name in place for name in names):
        return {**out, "test": Split.from_assignment(test, test_groups, test_names)}
    none = np.zeros(0, np.int64)
    out["test"] = Split.from_assignment(test, [place.get(name, none) for name in names], names)
    if others := [name for name in test_names if name not in set(names)]:
        out["unseen"] = Split.from_assignment(test, [place[name] for name in others], others)
    return out


def _tell_filled(gaps: Mapping[str, int], columns: Columns, rows: int, source: object) -> None:
    """Say which columns lack values, how many, and what stands in their place."""
    value = "the mean of the training rows" if columns.missing == "mean" else f"{float(columns.missing):g}"
    said = [
        f"column {name!r} lacks {count:,}, "
        + ("its 0/1 columns are all 0 there" if name in columns.categories else f"filled with {value}")
        for name, count in gaps.items()
        if count
    ]
    if said:
        notice(f"{source}: of {rows:,} rows, {'; '.join(said)}")


def _with_x(split: Split, x: np.ndarray) -> Split:
    return replace(split, arrays={**split.arrays, "x": x})


def _fill(splits: dict[str, Split], rule: str | float) -> dict[str, Split]:
    x = splits["train"].arrays["x"]
    if rule == "mean":
        known = np.isfinite(x)
        value = np.where(known, x, 0).sum(0) / np.maximum(known.sum(0), 1)
    else:
        value = np.full(x.shape[1], float(rule))
    return {n: _with_x(s, np.where(np.isnan(s.arrays["x"]), value, s.arrays["x"])) for n, s in splits.items()}


def _standardise(splits: dict[str, Split], scope: str, numbers: np.ndarray) -> tuple[dict[str, Split], dict[str, Any]]:
    """Number columns minus their mean, divided by their standard deviation, both of training rows.

    With the scope "client", a client without training rows has the mean and deviation of the federation.
    """

    def fit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        std = x.std(0)
        return np.where(numbers, x.mean(0), 0), np.where(numbers & (std > 1e-12), std, 1)

    train = splits["train"]
    overall = fit(train.arrays["x"])
    info = {"scope": scope, "mean": overall[0].tolist(), "std": overall[1].tolist()}
    own = {name: fit(train.client(i)["x"]) for i, name in enumerate(train.ids)} if scope == "client" else {}
    out = {}
    for name, split in splits.items():
        x = np.array(split.arrays["x"])
        for i, client in enumerate(split.ids):
            mean, std = own.get(client, overall)
            rows = slice(int(split.offsets[i]), int(split.offsets[i + 1]))
            x[rows] = (x[rows] - mean) / std
        out[name] = _with_x(split, x)
    return out, info


def _as_float32(split: Split, coding: Coding, at: str) -> Split:
    """The split with ``x`` in float32, unless its type is small. Values that are not finite are refused, by column."""
    x = split.arrays["x"]
    if x.dtype.kind != "f":
        return split
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    bad = ~np.isfinite(x)
    if bad.any():
        column = int(np.argmax(bad.any(0)))
        shown = coding.names[0] if coding.whole else coding.titles()[column]
        count = int(bad.sum() if coding.whole else bad[:, column].sum())
        raise ValueError(f"{at}: column {shown!r}: {count:,} values are not finite in float32")
    return _with_x(split, x)
