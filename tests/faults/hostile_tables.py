"""Tables and stores made to do harm; see `hostile_files`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import valid_files
from hostile_files import Hostile, Rng, hostile_name

# ---------------------------------------------------------------- tables


def parquet_rows(folder: Path, rng: Rng, secret: Path) -> Hostile:
    """A value repeated: a few bytes in the file, gigabytes in memory."""
    rows = int(rng.integers(10_000_000, 20_000_000))
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"x": pa.array(np.broadcast_to(np.float64(1), rows))}), path, row_group_size=rows)
    return Hostile("parquet", path)


def parquet_text(folder: Path, rng: Rng, secret: Path) -> Hostile:
    """Rows that share one long text."""
    path = folder / "rows.parquet"
    text = "".join(map(str, rng.integers(0, 10, 300_000).tolist()))
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array([text]))
    arrow = bool(rng.integers(2))
    table = pa.table({"x": column, "user": ["a"] * 100_000})
    if arrow:
        path = folder / "rows.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path, store_schema=bool(rng.integers(2)))
    return Hostile("parquet", path, {"client": "user"})


def table_values(folder: Path, rng: Rng, secret: Path) -> Hostile:
    columns: dict[str, Any] = {"user": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "label": [0, 1, 2]}
    way = int(rng.integers(7))
    if way == 0:
        columns["label"] = [0.0, float("nan"), 1.0]
    elif way == 1:
        columns["x"] = [1.0, float("inf"), 2.0]
    elif way == 2:
        columns["label"] = [0, -1, 2]
    elif way == 3:
        columns["x"] = [1.0, None, 2.0]
    elif way == 4:
        columns["user"] = ["a", None, "b"]
    elif way == 5:
        columns["user"] = pa.array([b"a", b"\xff\xfe", b"b"]).view(pa.string())
    else:
        kind: Any = pa.int8()
        for _ in range(60):
            kind = pa.list_(kind)
        columns["x"] = pa.nulls(3, kind)
    path = folder / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return Hostile("parquet", path, {"client": "user", "label": "label", "features": ["x"]})


def table_names(folder: Path, rng: Rng, secret: Path) -> Hostile:
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"user": ["a", "b"], hostile_name(rng): [1.0, 2.0]}), path)
    return Hostile("parquet", path, {"client": "user"}, refused=False)


def arrow_offsets(folder: Path, rng: Rng, secret: Path) -> Hostile:
    """Offsets of text and lists that point outside of the file's own bytes."""
    offsets = pa.py_buffer(np.array([0, 5, int(rng.choice([10**6, 2**31 - 1])), 15], np.int32).tobytes())
    if rng.integers(2):
        column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdefghijklmno")])
    else:
        column = pa.Array.from_buffers(
            pa.list_(pa.int8()), 3, [None, offsets], children=[pa.array([1] * 15, pa.int8())]
        )
    path = folder / "rows.arrow"
    batch = pa.RecordBatch.from_arrays([column, pa.array(["a", "a", "b"])], ["x", "user"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    return Hostile("parquet", path, {"client": "user"})


# ---------------------------------------------------------------- stores


def _store(folder: Path, rng: Rng, change: Callable[[dict[str, Any], Path], None]) -> Hostile:
    valid_files.store(folder, rng)
    path = folder / "store"
    header = json.loads((path / "header.json").read_text())
    change(header, path)
    if header:
        (path / "header.json").write_text(json.dumps(header))
    return Hostile("store", path)


def store_names(folder: Path, rng: Rng, secret: Path) -> Hostile:
    name, way = hostile_name(rng), int(rng.integers(2))

    def change(header: dict[str, Any], path: Path) -> None:
        if way:
            header["name"] = name
        else:
            for split in header["splits"].values():
                split["fields"][name] = split["fields"].pop("x")

    return _store(folder, rng, change)


def store_files(folder: Path, rng: Rng, secret: Path) -> Hostile:
    way = int(rng.integers(4))

    def change(header: dict[str, Any], path: Path) -> None:
        record = header["splits"]["train"]["fields"]["y"]
        if way == 0:
            record["file"] = str(rng.choice([str(secret), os.path.relpath(secret, path), "../other", ".hidden"]))
        elif way == 1:  # 64 bytes, as the header says
            (path / record["file"]).unlink()
            (path / record["file"]).symlink_to(secret)
        elif way == 2:
            (path / record["file"]).unlink()
            os.mkfifo(path / record["file"])
        else:
            (path / "header.json").write_text("[" * int(10 ** rng.uniform(3, 6)))
            header.clear()

    return _store(folder, rng, change)


def store_values(folder: Path, rng: Rng, secret: Path) -> Hostile:
    ways: tuple[tuple[tuple[str, ...], Any], ...] = (
        (("info", "classes"), "ten"),
        (("info", "classes"), -1),
        (("info",), [1]),
        (("splits", "train", "examples"), 10**15),
        (("splits", "train", "clients"), -1),
        (("splits", "train", "fields", "x", "shape"), [-2]),
        (("splits", "train", "fields", "x", "shape"), [0]),
        (("splits", "train", "fields", "x", "dtype"), "|O"),
        (("preprocess",), [{"name": "scale", "factor": "9" * 99}]),
        (("preprocess",), [{"name": "random-features", "features": 1e18}]),
        (("preprocess",), {"name": "os:system"}),
        (("version",), 99),
    )
    path, value = ways[int(rng.integers(len(ways)))]

    def change(header: dict[str, Any], _: Path) -> None:
        node = header
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return _store(folder, rng, change)
