"""NumPy archives. Two layouts are recognised by the names of the arrays:

- a client for each row: ``x`` (or images, features), ``y`` (or labels), ``client`` (or writer, user), and optionally
  ``is_test``. ``client`` holds ids, or indices into ``client_ids`` (or ``writer_ids`` ...);
- plain: ``x_train, y_train, x_test, y_test``, or ``x, y``.

``y`` has one label for each row. For a language model both ``x`` and ``y`` are token ids [rows, positions], and ``y``
is ``x`` one position later.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.formats.columns import as_labels, twice_in
from fedbraid.data.formats.plain_sets import add_grouped, add_plain
from fedbraid.data.limits import check_size, regular
from fedbraid.data.names import check_client
from fedbraid.data.preprocess import Pipeline, scaling_of
from fedbraid.data.store import StoreWriter

__all__ = ["read_npz"]

_X, _Y = ("x", "images", "image", "features", "data"), ("y", "labels", "label", "targets")
_CLIENT = ("client", "clients", "writer", "writers", "user", "users")
_DAMAGED = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, SyntaxError)


def read_npz(writer: StoreWriter, path: Path, *, classes: int | None = None) -> None:
    """Read a NumPy archive. Pickled objects are refused."""
    path = Path(path)
    try:
        arrays: dict[str, Any] = _arrays(path)
    except _DAMAGED as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise ValueError(f"{path}: not a readable .npz without pickled objects ({error})") from error

    def find(names: tuple[str, ...], suffix: str = "") -> Any:
        return next((arrays[n + suffix] for n in names if n + suffix in arrays), None)

    def columns(suffix: str) -> dict[str, np.ndarray] | None:
        x, y = find(_X, suffix), find(_Y, suffix)
        if x is None or y is None:
            return None
        if len(x) != len(y):
            raise ValueError(f"{path}: field y: {len(y)} labels for {len(x)} examples")
        if not len(x):
            raise ValueError(f"{path}: field x: no examples")
        if _are_tokens(x, y):
            return {name: _as_tokens(ids, f"{path}: field {name}", classes) for name, ids in (("x", x), ("y", y))}
        return {"x": x, "y": as_labels(y, f"{path}: field y", classes) if y.dtype.kind in "iub" else y}

    train = columns("_train")
    if train is not None:
        held = columns("_test")
        _number_labels(writer, [train] if held is None else [train, held], path)
        _describe(writer, train, classes)
        add_plain(writer, train, held, path)
        return
    rows = columns("")
    if rows is None:
        raise ValueError(f"{path}: arrays {', '.join(sorted(arrays))}: expected x and y, or x_train and y_train ...")
    _number_labels(writer, [rows], path)
    _describe(writer, rows, classes)
    ids = find(_CLIENT)
    if ids is None:
        add_plain(writer, rows, None, path)
        return
    names = find(_CLIENT, "_ids")
    if names is not None:
        if names.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path}: client indices must be integers, and client ids one text each")
        if twice := twice_in(names.tolist()):
            raise ValueError(f"{path}: client {twice[0]}: appears twice among the client ids; they must be unique")
        if len(ids) and (ids.min() < 0 or ids.max() >= len(names)):
            raise ValueError(f"{path}: client index {ids.max()} for {len(names)} client ids")
        ids = names[ids]
    is_test = arrays.get("is_test", np.zeros(len(ids), bool)).astype(bool)
    if len(is_test) != len(ids) or len(ids) != len(rows["y"]):
        raise ValueError(
            f"{path}: {len(rows['y'])} examples, {len(ids)} clients, {len(is_test)} is_test flags: must agree"
        )
    for split, mask in (("train", ~is_test), ("test", is_test)):
        if mask.any():
            add_grouped(writer, split, {f: v[mask] for f, v in rows.items()}, ids[mask], path)


def _are_tokens(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether ``y`` has a whole number for each of several positions of ``x``."""
    return x.shape == y.shape and y.ndim == 2 and y.shape[1] > 1 and {x.dtype.kind, y.dtype.kind} <= {"i", "u"}


def _as_tokens(ids: np.ndarray, at: str, classes: int | None) -> np.ndarray:
    """Token ids in a dtype of at most four bytes, each at least 0 and below ``classes``."""
    most = (classes or 2**31) - 1
    bad = np.any((ids < 0) | (ids > most), axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        worst = ids[row].max() if ids[row].max() > most else ids[row].min()
        allowed = "0 or more" if classes is None else f"0 to {most}"
        raise ValueError(f"{at}: token {worst} in row {row} is out of range ({allowed})")
    return ids if ids.dtype in (np.uint8, np.uint16, np.int32) else ids.astype(np.int32)


def _number_labels(writer: StoreWriter, parts: list[dict[str, np.ndarray]], path: Path) -> None:
    """Replace labels of text by their numbers in the sorted list of the first part's labels, which the store keeps."""
    if any(part["y"].dtype.kind != "U" or part["y"].ndim != 1 for part in parts):
        return
    names = sorted(set(parts[0]["y"].tolist()))
    for name in names:
        check_client(name, f"{path}: field y: label")
    place = {name: i for i, name in enumerate(names)}
    for part in parts:
        if unknown := [name for name in part["y"].tolist() if name not in place]:
            raise ValueError(f"{path}: field y: the test label {unknown[0]!r} is not among the train labels")
        part["y"] = np.array([place[name] for name in part["y"].tolist()], np.int32)
    writer.info |= {"labels": names, "classes": len(names)}


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an archive. Each one's declared shape is compared with the size of its member before it is read."""
    arrays: dict[str, np.ndarray] = {}
    total, packed = 0, regular(path).stat().st_size
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            total += member.file_size
            check_size(path, total, packed)
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"the array {name!r} is there twice")
            if not member.filename.endswith(".npy"):
                raise ValueError(f"the member {member.filename!r} is not a NumPy array")
            with archive.open(member) as file:
                start = np.lib.format.read_magic(file)
                read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                if start not in read_header:
                    raise ValueError(f"array {name}: format {start} is not supported")
                shape, fortran, dtype = read_header[start](file)
                if dtype.hasobject:
                    raise ValueError(f"array {name} holds Python objects, which only pickle could read")
                due, have = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
                if due != have or any(n < 0 for n in shape):
                    raise ValueError(f"array {name}: shape {list(shape)} needs {due} bytes, the member has {have}")
                blob = file.read()
                if len(blob) != due:
                    raise ValueError(f"array {name}: {len(blob)} bytes, expected {due}")
                # The order is by column if `fortran`: the same bytes in the reversed shape, transposed.
                array = np.frombuffer(blob, dtype) if due else np.zeros(shape, dtype)
                arrays[name] = array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
    return arrays


def _describe(writer: StoreWriter, rows: dict[str, np.ndarray], classes: int | None) -> None:
    if _are_tokens(rows["x"], rows["y"]):  # ids of x count, too: they set the size of the embedding
        found = int(max(rows["x"].max(), rows["y"].max())) + 1
        writer.info.setdefault("classes", classes or found)
        writer.preprocess = Pipeline.of({"name": "integers", "fields": "x,y"})
        return
    if rows["y"].dtype == np.int32:
        found = int(rows["y"].max()) + 1
        writer.info.setdefault("classes", classes or found)
    writer.preprocess = scaling_of(rows)
    if writer.preprocess and rows["x"].shape[1:] == (28, 28) and writer.info.get("classes") == 62:
        writer.name = "femnist"  # paper 255, ink 0
        writer.info |= {"source": "LEAF FEMNIST (NIST writers)", "licence": "NIST SD 19"}
        writer.preprocess = Pipeline.of({"name": "scale"}, {"name": "invert"})
