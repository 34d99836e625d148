"""Small valid files of every format that can be imported, from which the harness makes damaged ones."""

from __future__ import annotations

import gzip
import json
import lzma
import pickle
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


class Valid(NamedTuple):
    """A format, its files (in a folder of their own), and how they are imported."""

    kind: str  # the importer's name; "store" for a store that is opened
    files: Callable[[Path, np.random.Generator], None]
    paths: tuple[str, ...] = (".",)
    options: Mapping[str, Any] = MappingProxyType({})
    sealed: bool = False  # its checksums find every change of a value


def _images(rng: np.random.Generator, n: int, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, (n, *shape), np.uint8)


def tff_emnist(folder: Path, rng: np.random.Generator) -> None:
    for split, clients in (("train", ("f1", "f2")), ("test", ("f1",))):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for client in clients:
                group = file.create_group(f"examples/{client}")
                group["pixels"] = (_images(rng, 2, 28, 28) / 255).astype(np.float32)
                group["label"] = np.array([3, 61], np.int32)


def tff_chunked(folder: Path, rng: np.random.Generator) -> None:
    with h5py.File(folder / "mine_train.h5", "w") as file:
        for client in ("a", "b", "c"):
            group = file.create_group(f"examples/{client}")
            x = rng.normal(size=(20, 4)).astype(np.float32)
            group.create_dataset("x", data=x, chunks=(8, 4), compression="gzip", shuffle=True, fletcher32=True)
            group.create_dataset("words", data=np.array([b"one", b"two"] * 10))
            group["text"] = np.array(["to be", "or not"] * 10, dtype=h5py.string_dtype())


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = b""
    while n > 0x7F:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def message(*fields: tuple[int, bytes]) -> bytes:
    return b"".join(varint(number << 3 | 2) + varint(len(body)) + body for number, body in fields)


def example(**features: np.ndarray) -> bytes:
    entries = []
    for name, values in features.items():
        if values.dtype.kind == "f":
            feature = message((2, message((1, values.astype("<f4").tobytes()))))
        else:
            feature = message((3, message((1, b"".join(varint(int(v)) for v in values)))))
        entries.append((1, message((1, name.encode()), (2, feature))))
    return message((1, message(*entries)))


def sqlite(path: Path, rng: np.random.Generator) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
    for split, client in (("train", "a"), ("train", "b"), ("test", "a")):
        connection.execute("INSERT INTO client_metadata VALUES (?, ?, 2)", (client, split))
        for label in (1, 2):
            blob = example(pixels=rng.integers(0, 256, 784) / 255, label=np.array([label]))
            connection.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, blob))
    connection.commit()
    connection.close()


def tff_sqlite(folder: Path, rng: np.random.Generator) -> None:
    sqlite(folder / "emnist_all.sqlite", rng)


def tff_packed(folder: Path, rng: np.random.Generator) -> None:
    plain = folder / "plain"
    sqlite(plain, rng)
    (folder / "emnist_all.sqlite.lzma").write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()


def leaf_content(rng: np.random.Generator) -> dict[str, Any]:
    users = {name: {"x": rng.normal(size=(3, 5)).round(3).tolist(), "y": [0, 1, 2]} for name in ("u1", "u2")}
    return {"users": list(users), "num_samples": [3, 3], "user_data": users}


def leaf(folder: Path, rng: np.random.Generator) -> None:
    for split in ("train", "test"):
        (folder / split).mkdir()
        (folder / split / "all.json").write_text(json.dumps(leaf_content(rng)))


def leaf_packed(folder: Path, rng: np.random.Generator) -> None:
    (folder / "train").mkdir()
    (folder / "train" / "all.json.gz").write_bytes(gzip.compress(json.dumps(leaf_content(rng)).encode()))


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def idx(folder: Path, rng: np.random.Generator) -> None:
    for name, n in (("train", 6), ("t10k", 3)):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx_bytes(_images(rng, n, 5, 5)))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(n, dtype=np.uint8)))


def idx_packed(folder: Path, rng: np.random.Generator) -> None:
    idx(folder, rng)
    for file in list(folder.iterdir()):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


def idx_tar(folder: Path, rng: np.random.Generator) -> None:
    (folder / "raw").mkdir()
    idx(folder / "raw", rng)
    with tarfile.open(folder / "mnist.tar.gz", "w:gz") as archive:
        archive.add(folder / "raw", "raw")
    _remove(folder / "raw")


def cifar_binary(folder: Path, rng: np.random.Generator) -> None:
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(b"\3" + rng.bytes(3072) + b"\7" + rng.bytes(3072))


def cifar_python(folder: Path, rng: np.random.Generator) -> None:
    for name in ("train", "test"):
        batch = {"data": _images(rng, 2, 3072), "fine_labels": [1, 99], "coarse_labels": [0, 19], "filenames": ["a"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def pictures(folder: Path, rng: np.random.Generator) -> None:
    for name, end in (("cat", "png"), ("dog", "jpg"), ("cow", "bmp")):
        (folder / "train" / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(_images(rng, 6, 6, 3)).save(folder / "train" / name / f"{i}.{end}")


def pictures_zip(folder: Path, rng: np.random.Generator) -> None:
    pictures(folder, rng)
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((folder / "train").rglob("*.*")):
            archive.write(file, file.relative_to(folder).as_posix())
    _remove(folder / "train")


def table(rng: np.random.Generator, rows: int = 40) -> pa.Table:
    return pa.table(
        {
            "user": pa.array([f"u{i % 4}" for i in range(rows)]).dictionary_encode(),
            "x": pa.array(rng.normal(size=(rows, 3)).astype(np.float32).tolist(), pa.list_(pa.float32())),
            "note": [f"text {i}" for i in range(rows)],
            "label": rng.integers(0, 3, rows),
        }
    )


def parquet(folder: Path, rng: np.random.Generator) -> None:
    pq.write_table(table(rng), folder / "train.parquet", row_group_size=16)
    pq.write_table(table(rng, 8), folder / "test.parquet", compression="zstd")


def arrow_file(folder: Path, rng: np.random.Generator) -> None:
    whole = table(rng)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, whole.schema, options=options) as w:
        w.write_table(whole, max_chunksize=16)


def arrow_stream(folder: Path, rng: np.random.Generator) -> None:
    whole = table(rng)
    with pa.OSFile(str(folder / "data-00000.arrow"), "wb") as file, pa.ipc.new_stream(file, whole.schema) as w:
        w.write_table(whole, max_chunksize=16)


def npz(folder: Path, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 3, 12)
    np.savez_compressed(folder / "d.npz", x=x, y=y, client=np.array([f"c{i % 3}" for i in range(12)]))


def npz_plain(folder: Path, rng: np.random.Generator) -> None:
    x, y = _images(rng, 8, 4, 4), rng.integers(0, 3, 8)
    np.savez(folder / "d.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])


def csv(folder: Path, rng: np.random.Generator) -> None:
    lines = ["user,age,kind,label"]
    lines += [f"u{i % 4},{rng.normal():.4f},{'ab'[i % 2]},{['no', 'yes'][i % 3 % 2]}" for i in range(30)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")


def csv_packed(folder: Path, rng: np.random.Generator) -> None:
    csv(folder, rng)
    (folder / "rows.csv.gz").write_bytes(gzip.compress((folder / "rows.csv").read_bytes()))
    (folder / "rows.csv").unlink()


def svmlight(folder: Path, rng: np.random.Generator) -> None:
    lines = [f"{rng.choice(['-1', '+1'])} qid:{i % 3} 1:{rng.normal():.3f} 4:1 # row {i}" for i in range(20)]
    (folder / "rows.svm").write_text("\n".join(lines) + "\n")


def store(folder: Path, rng: np.random.Generator) -> None:
    from fedbraid.data import Pipeline, StoreWriter

    with StoreWriter(folder / "store", name="mine", preprocess=Pipeline.of({"name": "scale"})) as writer:
        for client in ("ann", "bob"):
            rows = {"x": rng.normal(size=(4, 2)), "y": np.arange(4), "words": ["to", "be", "or", "not"]}
            writer.add("train", client, rows)
        writer.add("test", "bob", {"x": np.ones((1, 2)), "y": np.array([1]), "words": ["x"]})


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


TABLE = {"client": "user", "label": "label", "features": ["x"]}
ROWS = {"client": "user", "label": "label", "categories": ["kind"]}
VALID: dict[str, Valid] = {
    "tff-emnist": Valid("tff", tff_emnist),
    "tff-chunked": Valid("tff", tff_chunked),
    "tff-sqlite": Valid("tff", tff_sqlite),
    "tff-packed": Valid("tff", tff_packed, sealed=True),
    "leaf": Valid("leaf", leaf),
    "leaf-packed": Valid("leaf", leaf_packed, sealed=True),
    "idx": Valid("idx", idx),
    "idx-packed": Valid("idx", idx_packed, sealed=True),
    "idx-tar": Valid("idx", idx_tar, ("mnist.tar.gz",), sealed=True),
    "cifar-binary": Valid("cifar", cifar_binary),
    "cifar-python": Valid("cifar", cifar_python),
    "folder": Valid("folder", pictures),
    "folder-zip": Valid("folder", pictures_zip, ("images.zip",), sealed=True),
    "parquet": Valid("parquet", parquet, options=TABLE),
    "parquet-all": Valid("parquet", parquet, options={"client": "user", "label": "label"}),
    "parquet-rules": Valid("parquet", parquet, options={**TABLE, "task": "classes"}),
    "arrow-file": Valid("parquet", arrow_file, options=TABLE),
    "arrow-stream": Valid("parquet", arrow_stream, options={"client": "user"}),
    "npz": Valid("npz", npz, ("d.npz",), sealed=True),
    "npz-plain": Valid("npz", npz_plain, ("d.npz",), sealed=True),
    "csv": Valid("csv", csv, ("rows.csv",), ROWS),
    "csv-packed": Valid("csv", csv_packed, ("rows.csv.gz",), ROWS, sealed=True),
    "svmlight": Valid("svmlight", svmlight, ("rows.svm",), {"client": "qid"}),
    "store": Valid("store", store, ("store",)),
}
