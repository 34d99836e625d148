"""Files made to do harm: to read other files, to use up memory or time, to run code, to write outside of a folder.

Each builder gets a folder, a seeded generator that varies it, and the path of a secret file, and returns a `Hostile`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
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
import valid_files
from PIL import Image

Rng = np.random.Generator


class Hostile(NamedTuple):
    """What to import; ``refused`` if only an error is right, else a store without harm is right, too."""

    kind: str
    path: Path
    options: Mapping[str, Any] = MappingProxyType({})
    refused: bool = True


NAMES = (
    "x']; import os; os.system('true') #",
    'a"\n[data]\nname = "evil',
    "../../escape",
    "{{7*7}}",
    "x" * 300,
    "mask\0",
    "größe",
    "<script>alert(1)</script>",
    "a b",
    "$(touch harm)",
)


def hostile_name(rng: Rng) -> str:
    return NAMES[int(rng.integers(len(NAMES)))]


# ---------------------------------------------------------------- HDF5


def _h5(folder: Path, add: Callable[[h5py.File, h5py.Group], None]) -> Path:
    path = folder / "mine_train.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/a")
        group["y"] = np.arange(4)
        add(file, group)
    return path


def h5_external_values(folder: Path, rng: Rng, secret: Path) -> Hostile:
    size = int(rng.integers(4, 30))
    shape, dtype = ((4,), "S7") if rng.integers(2) else ((size,), np.uint8)
    external = [(str(secret) if rng.integers(2) else os.path.relpath(secret, folder), 0, h5py.h5f.UNLIMITED)]
    return Hostile("tff", _h5(folder, lambda _, g: g.create_dataset("x", shape, dtype, external=external)))


def h5_external_link(folder: Path, rng: Rng, secret: Path) -> Hostile:
    other = folder / "other.bin"
    with h5py.File(other, "w") as file:
        file["x"] = np.frombuffer(secret.read_bytes()[:4], np.uint8)
        file.create_group("a")["x"] = np.arange(4)
    link = h5py.ExternalLink(str(other), "/x")

    def add(file: h5py.File, group: h5py.Group) -> None:
        if rng.integers(2):
            group["x"] = link
        else:
            file["examples/b"] = h5py.ExternalLink(str(other), "/a")

    return Hostile("tff", _h5(folder, add))


def h5_virtual(folder: Path, rng: Rng, secret: Path) -> Hostile:
    other = folder / "other.bin"
    with h5py.File(other, "w") as file:
        file["x"] = np.frombuffer(secret.read_bytes()[:4], np.uint8)
    layout = h5py.VirtualLayout((4,), np.uint8)
    layout[:] = h5py.VirtualSource(str(other), "x", shape=(4,))
    return Hostile("tff", _h5(folder, lambda _, g: g.create_virtual_dataset("x", layout)))


def h5_soft_link(folder: Path, rng: Rng, secret: Path) -> Hostile:
    target = str(rng.choice(["/examples/a/y", "/nowhere", "/examples", "/examples/a/x"]))
    return Hostile("tff", _h5(folder, lambda _, g: g.__setitem__("x", h5py.SoftLink(target))))


def h5_group_in_itself(folder: Path, rng: Rng, secret: Path) -> Hostile:
    return Hostile("tff", _h5(folder, lambda f, g: f["examples"].__setitem__("loop", f["examples"])))


def h5_never_written(folder: Path, rng: Rng, secret: Path) -> Hostile:
    shape = (4, int(10 ** rng.integers(6, 12)))
    chunks = (1, 1000) if rng.integers(2) else None
    return Hostile("tff", _h5(folder, lambda _, g: g.create_dataset("x", shape, "f8", chunks=chunks)))


def h5_zeros(folder: Path, rng: Rng, secret: Path) -> Hostile:
    rows = int(rng.integers(3_000_000, 6_000_000))

    def add(_: h5py.File, group: h5py.Group) -> None:
        data = group.create_dataset("x", (4, rows), "f8", chunks=(4, rows), compression="gzip", compression_opts=1)
        data[:] = 0

    return Hostile("tff", _h5(folder, add))


def h5_shared_text(folder: Path, rng: Rng, secret: Path) -> Hostile:
    """All clients are one data set of one megabyte, by hard links."""

    def add(file: h5py.File, group: h5py.Group) -> None:
        group["x"] = rng.normal(size=(4, 30_000))
        for i in range(400):
            file[f"examples/c{i:04d}"] = group

    return Hostile("tff", _h5(folder, add))


def h5_strange_type(folder: Path, rng: Rng, secret: Path) -> Hostile:
    way = int(rng.integers(4))

    def add(file: h5py.File, group: h5py.Group) -> None:
        if way == 0:
            group.create_dataset("x", (4,), h5py.ref_dtype)[:] = [group.ref] * 4
        elif way == 1:
            group["x"] = np.zeros(4, [("a", "f4"), ("b", "i8")])
        elif way == 2:
            group.create_dataset("x", (4,), h5py.vlen_dtype(np.int32))[:] = [np.arange(i) for i in range(4)]
        else:
            group["x"] = 5

    return Hostile("tff", _h5(folder, add))


def h5_names(folder: Path, rng: Rng, secret: Path) -> Hostile:
    name = hostile_name(rng).replace("\0", "").replace("..", "dots") or "x"

    def add(file: h5py.File, group: h5py.Group) -> None:
        group[name.replace("/", "|")] = np.arange(4.0)
        if rng.integers(2):
            file[f"examples/{name.replace('/', '|')}/y"] = np.arange(4)

    return Hostile("tff", _h5(folder, add), refused=False)


# ---------------------------------------------------------------- SQLite


def sqlite_that_computes(folder: Path, rng: Rng, secret: Path) -> Hostile:
    path = folder / "all.sqlite"
    connection = sqlite3.connect(path)
    way = int(rng.integers(3))
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'train' split_name, i client_id"
    connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
    connection.execute("INSERT INTO client_metadata VALUES ('a', 'train', 1)")
    if way == 0:
        connection.execute(f"CREATE VIEW examples AS {endless}, x'00' serialized_example_proto FROM n")
    elif way == 1:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT,"
            " serialized_example_proto BLOB AS (zeroblob(900000000)))"
        )
        connection.execute("INSERT INTO examples VALUES ('train', 'a')")
    else:
        connection.execute("DROP TABLE client_metadata")
        connection.execute(f"CREATE VIEW client_metadata AS {endless}, 1 num_examples FROM n")
        connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    connection.commit()
    connection.close()
    return Hostile("tff", path)


# ---------------------------------------------------------------- archives


def _tar(folder: Path, member: tarfile.TarInfo, content: bytes = b"") -> Hostile:
    path = folder / "set.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(member, io.BytesIO(content))
    return Hostile("idx", path)


def tar_member(folder: Path, rng: Rng, secret: Path) -> Hostile:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)
    member = tarfile.TarInfo("train-images-idx3-ubyte")
    member.type = kinds[int(rng.integers(len(kinds)))]
    member.linkname = str(secret)
    return _tar(folder, member)


def tar_outside(folder: Path, rng: Rng, secret: Path) -> Hostile:
    names = ("../../harm", "/tmp/harm-of-fedbraid", "a/../../harm", "..\\harm", "C:/harm", "./../harm")
    member = tarfile.TarInfo(names[int(rng.integers(len(names)))])
    member.size = 4
    return _tar(folder, member, b"harm")


def tar_bomb(folder: Path, rng: Rng, secret: Path) -> Hostile:
    member = tarfile.TarInfo("train-images-idx3-ubyte")
    member.size = int(rng.integers(80, 120)) << 20
    path = folder / "set.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(member.tobuf())
        for _ in range(member.size >> 20):
            file.write(bytes(1 << 20))
    return Hostile("idx", path)


def tar_sparse(folder: Path, rng: Rng, secret: Path) -> Hostile:
    member = tarfile.TarInfo("train-images-idx3-ubyte")
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": member.name,
        "GNU.sparse.realsize": str(10 ** int(rng.integers(12, 18))),
    }
    member.size = 512
    return _tar(folder, member, b"0\n".ljust(512, b"\0"))


def zip_outside(folder: Path, rng: Rng, secret: Path) -> Hostile:
    names = ("../../harm.png", "/tmp/harm-of-fedbraid.png", "a/../../harm.png", "..\\harm.png", "C:/harm.png")
    path = folder / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(names[int(rng.integers(len(names)))], b"harm")
    return Hostile("folder", path)


def zip_link(folder: Path, rng: Rng, secret: Path) -> Hostile:
    path = folder / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("train/cat/0.png")
        kinds = (0o120777, 0o010666, 0o020666, 0o060666)
        info.external_attr = kinds[int(rng.integers(len(kinds)))] << 16
        archive.writestr(info, str(secret))
    return Hostile("folder", path)


def zip_bomb(folder: Path, rng: Rng, secret: Path) -> Hostile:
    path = folder / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("train/cat/0.png", bytes(int(rng.integers(80, 120)) << 20))
    return Hostile("folder", path)


def zip_lies(folder: Path, rng: Rng, secret: Path) -> Hostile:
    """Declared sizes that are not the real ones."""
    path = folder / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/cat/0.png", bytes(100_000))
    blob = bytearray(path.read_bytes())
    central = blob.rindex(b"PK\1\2")
    blob[central + 24 : central + 28] = struct.pack("<I", int(rng.choice([1, 10, 2**31, 2**32 - 2])))
    path.write_bytes(blob)
    return Hostile("folder", path)


# ---------------------------------------------------------------- compressed files, JSON


def gz_bomb(folder: Path, rng: Rng, secret: Path) -> Hostile:
    size = int(rng.integers(80, 120)) << 20
    if rng.integers(2):
        (folder / "train").mkdir()
        with gzip.open(folder / "train" / "a.json.gz", "wb", compresslevel=1) as file:
            for _ in range(size >> 20):
                file.write(b" " * (1 << 20))
        return Hostile("leaf", folder)
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(struct.pack(">BBBBIII", 0, 0, 8, 3, size >> 20, 1024, 1024))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    (folder / "train-labels-idx1-ubyte").write_bytes(valid_files.idx_bytes(np.zeros(4, np.uint8)))
    return Hostile("idx", folder)


def idx_sizes(folder: Path, rng: Rng, secret: Path) -> Hostile:
    dims = int(rng.integers(1, 9))
    shape = rng.choice(np.array([0, 2**16, 2**31, 2**32 - 1]), dims)
    head = struct.pack(">BBBB", 0, 0, int(rng.choice([8, 14])), dims) + struct.pack(f">{dims}I", *shape.tolist())
    (folder / "train-images-idx3-ubyte").write_bytes(head + bytes(64))
    (folder / "train-labels-idx1-ubyte").write_bytes(valid_files.idx_bytes(np.zeros(4, np.uint8)))
    return Hostile("idx", folder)


def leaf_json(folder: Path, rng: Rng, secret: Path) -> Hostile:
    (folder / "train").mkdir()
    good = valid_files.leaf_content(rng)
    text = json.dumps(good)
    depth = int(10 ** rng.uniform(3, 6))
    ways = (
        "[" * depth,
        '{"users":' * depth,
        text.replace("[0, 1, 2]", "[" * depth + "]" * depth, 1),
        text.replace("[0, 1, 2]", "[0, NaN, 2]", 1),
        text.replace("[0, 1, 2]", "[0, -1, 2]", 1),
        text.replace("[0, 1, 2]", '["0", {}, null]', 1),
        text.replace("[0, 1, 2]", f"[0, {10**400}, 2]", 1),
        text.replace('"u1"', '"\\ud800"'),
        text.replace('"u1"', '""'),
        text.replace('"u1"', '"a\\u0000b"'),
        json.dumps({**good, "users": [["u1"], "u2"]}),
        json.dumps({**good, "users": {"u1": 1, "u2": 2}}),
        json.dumps({**good, "user_data": [1, 2]}),
        json.dumps({**good, "user_data": {"u1": {"x": [float("inf")] * 3, "y": [1] * 3}, "u2": 4}}),
    )
    way = int(rng.integers(len(ways) + 1))
    content = ways[way].encode() if way < len(ways) else text.encode().replace(b"u1", b"\xff\xfe")
    (folder / "train" / "a.json").write_bytes(content)
    return Hostile("leaf", folder)


# ---------------------------------------------------------------- NumPy


def _npz(folder: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Hostile:
    path = folder / "d.npz"
    with zipfile.ZipFile(path, "w", compression, compresslevel=1 if compression else None) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return Hostile("npz", path)


def _npy(array: np.ndarray, *, allow: bool = False) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=allow)
    return out.getvalue()


class Harm:
    def __reduce__(self):
        return (os.mkdir, ("harm-was-done",))


def npz_objects(folder: Path, rng: Rng, secret: Path) -> Hostile:
    objects = np.array([Harm(), 1, 2, None], object)
    field = str(rng.choice(["x", "y", "client", "other"]))
    good = {"x": _npy(np.zeros((4, 2))), "y": _npy(np.arange(4)), "client": _npy(np.array(list("aabb")))}
    return _npz(folder, {f"{k}.npy": v for k, v in {**good, field: _npy(objects, allow=True)}.items()})


def npz_shapes(folder: Path, rng: Rng, secret: Path) -> Hostile:
    good = _npy(np.zeros((4, 2)))
    shapes = ("(4, 9999999999)", "(4000000000000,)", "(4, -2)", "(-1,)", "(99999999999999, 0)", "()", "(4, 2, 0)")
    shape = shapes[int(rng.integers(len(shapes)))].ljust(20).encode()
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': " + shape + b", }"
    head = head.ljust(117) + b"\n"
    body = b"" if b", 0)" in shape else good[-64:]
    bad = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body
    return _npz(folder, {"x.npy": bad, "y.npy": _npy(np.arange(4))})


def npz_zeros(folder: Path, rng: Rng, secret: Path) -> Hostile:
    width = int(rng.integers(2_500_000, 3_500_000))
    return _npz(
        folder, {"x.npy": _npy(np.zeros((4, width))), "y.npy": _npy(np.arange(4))}, compression=zipfile.ZIP_DEFLATED
    )


def npz_values(folder: Path, rng: Rng, secret: Path) -> Hostile:
    x, y, client = np.ones((4, 2)), np.arange(4.0), np.array(["a", "a", "b", "b"])
    way = int(rng.integers(7))
    if way == 0:
        y[int(rng.integers(4))] = rng.choice([np.nan, np.inf])
    elif way == 1:
        x[int(rng.integers(4)), 0] = rng.choice([np.nan, -np.inf])
    elif way == 2:
        y = np.array([0, 1, 2, -5])
    elif way == 3:
        client = np.array(["a", "", "b", "b"])
    elif way == 4:
        client = np.array(["a", "a\nb", "b", "b"])
    elif way == 5:
        x = x.astype(np.complex128)
    else:
        x = np.zeros(4, [("a", "f4")])
    return _npz(folder, {"x.npy": _npy(x), "y.npy": _npy(y), "client.npy": _npy(client)})


# ---------------------------------------------------------------- pickles, images


def cifar_pickle(folder: Path, rng: Rng, secret: Path) -> Hostile:
    good = {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2], "coarse_labels": [0, 0]}
    (folder / "test").write_bytes(pickle.dumps(good, protocol=2))
    nested: list[Any] = [1]
    for _ in range(60):
        nested = [nested, nested]
    ways = (
        pickle.dumps({**good, "more": Harm()}, protocol=2),
        pickle.dumps(Harm()),
        pickle.dumps({**good, "fine_labels": nested}, protocol=2),
        pickle.dumps({**good, "data": nested}, protocol=2),
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of 2 billion places
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",  # bytes of 4 exabytes
        b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",
        b"cos\nsystem\n(S'mkdir harm-was-done'\ntR.",
    )
    (folder / "train").write_bytes(ways[int(rng.integers(len(ways)))])
    return Hostile("cifar", folder)


def image_sizes(folder: Path, rng: Rng, secret: Path) -> Hostile:
    (folder / "cat").mkdir()
    target = folder / "cat" / "0.png"
    way = int(rng.integers(3))
    if way == 0:
        Image.new("L", (1, 1)).save(target)
        blob = bytearray(target.read_bytes())
        blob[16:24] = struct.pack(">II", *rng.choice(np.array([9_000, 60_000, 2**31 - 1]), 2).tolist())
        import zlib

        blob[29:33] = struct.pack(">I", zlib.crc32(bytes(blob[12:29])))
        target.write_bytes(blob)
    elif way == 1:  # a page description, which would start another program
        target.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(harm) print\n%%EOF\n")
    else:
        for i in range(40):
            Image.new("RGB", (1600, 1600)).save(folder / "cat" / f"{i}.png", compress_level=9)
    return Hostile("folder", folder)


# ---------------------------------------------------------------- pipes and devices


def not_a_file(folder: Path, rng: Rng, secret: Path) -> Hostile:
    kind, name = (
        ("tff", "a_train.h5"),
        ("tff", "a.sqlite"),
        ("leaf", "train/a.json"),
        ("idx", "train-images-idx3-ubyte"),
        ("cifar", "train.bin"),
        ("folder", "cat/0.png"),
        ("parquet", "a.parquet"),
        ("parquet", "a.arrow"),
        ("npz", "d.npz"),
    )[int(rng.integers(9))]
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if rng.integers(2):
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    named = kind == "npz" or (kind in ("tff", "parquet") and rng.integers(2))
    return Hostile(kind, path if named else folder)
