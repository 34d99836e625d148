"""Columns of Arrow tables as NumPy arrays: numbers, text, lists of equal shape, and encoded images."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbraid.data.formats.columns import need, open_image
from fedbraid.data.limits import check_size

__all__ = ["array_column"]


def array_column(column: Any, name: str, source: object, who: Callable[[int], str] | None = None) -> Any:
    """A column without nulls as an array, or as an object array of text. ``who(row)`` begins errors about a row."""
    pa = need("pyarrow")
    who = who or (lambda row: f"{source}: row {row}")
    if column.null_count:
        row = next(i for i, v in enumerate(column) if not v.is_valid)
        raise ValueError(f"{who(row)}: field {name}: null in row {row} ({column.null_count} in all); fill or drop them")
    kind = column.type
    if pa.types.is_dictionary(kind):
        _check_dictionary(column, f"{source}: field {name}")
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return column.to_numpy()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(column.to_pylist(), object)
    if pa.types.is_struct(kind) and "bytes" in {f.name for f in kind}:
        return _decode_images(column, name, who)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _nested(column, name, who)
    raise ValueError(f"{source}: field {name}: columns of type {kind} are not supported; leave it out with --features")


def _check_dictionary(column: Any, at: str) -> None:
    """Refuse text that takes far more memory than the column once each row has its own copy."""
    pa, compute = need("pyarrow"), need("pyarrow.compute")
    if not (pa.types.is_string(column.type.value_type) or pa.types.is_large_string(column.type.value_type)):
        return
    total = 0
    for chunk in column.chunks:
        lengths = compute.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False)
        total += int(lengths[chunk.indices.to_numpy(zero_copy_only=False)].sum()) if len(lengths) else 0
    check_size(at, total, column.nbytes)


def _nested(column: Any, name: str, who: Any) -> np.ndarray:
    """Nested lists of equal shape as an array, without a Python object per element."""
    pa = need("pyarrow")
    values = column.combine_chunks()
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    rows, shape = len(values), [len(values)]
    while (
        pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type)
    ):
        inner = values.flatten()
        if inner.null_count:
            raise ValueError(f"{who(0)}: field {name}: nulls inside its lists")
        count = len(values)
        if pa.types.is_fixed_size_list(values.type):
            width = values.type.list_size
        else:
            lengths = np.diff(values.offsets.to_numpy())
            width = int(lengths[0]) if count else 0
            if np.any(lengths != width):
                row = int(np.argmax(lengths != width)) // max(1, count // max(1, rows))
                raise ValueError(
                    f"{who(row)}: field {name}: examples differ in shape (lists of {sorted(set(lengths.tolist()))[:3]})"
                )
        shape.append(width)
        values = inner
    return values.to_numpy(zero_copy_only=False).reshape(shape)


def _decode_images(column: Any, name: str, who: Any) -> np.ndarray:
    out: list[np.ndarray] = []
    total, packed = 0, column.nbytes
    for row, value in enumerate(column):
        blob, at = value["bytes"].as_py(), f"{who(row)}: field {name}: row {row}"
        if not isinstance(blob, bytes):
            raise ValueError(f"{at} is not a readable image (it holds no bytes)")
        out.append(open_image(io.BytesIO(blob), at, like=out[0] if out else None))
        if out[-1].shape != out[0].shape:
            raise ValueError(f"{at}: shape {list(out[-1].shape)} differs from {list(out[0].shape)}")
        total += out[-1].nbytes
        check_size(at, total, packed)
    return np.stack(out)
