"""NumPy archives. Two layouts are recognised by the names of the arrays:

- a client for each row: ``x`` (or images, features), ``y`` (or labels), ``client`` (or writer, user), and optionally
  ``is_test``. ``client`` holds ids, or indices into ``client_ids`` (or ``writer_ids`` ...);
- plain: ``x_train, y_train, x_test, y_test``, or ``x, y``.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data.formats.columns import as_labels
from fedbraid.data.formats.plain_sets import add_grouped, add_plain
from fedbraid.data.preprocess import Pipeline, scaling_of
from fedbraid.data.store import StoreWriter

__all__ = ["read_npz"]

_X, _Y = ("x", "images", "image", "features", "data"), ("y", "labels", "label", "targets")
_CLIENT = ("client", "clients", "writer", "writers", "user", "users")


def read_npz(writer: StoreWriter, path: Path, *, classes: int | None = None) -> None:
    """Read a NumPy archive. Pickled objects are refused."""
    path = Path(path)
    try:
        # opened here, because NumPy does not close the file if the archive is damaged
        with path.open("rb") as file, zipfile.ZipFile(file) as _, np.load(file, allow_pickle=False) as archive:
            arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path}: not a readable .npz without pickled objects ({error})") from error

    def find(names: tuple[str, ...], suffix: str = "") -> Any:
        return next((arrays[n + suffix] for n in names if n + suffix in arrays), None)

    def columns(suffix: str) -> dict[str, np.ndarray] | None:
        x, y = find(_X, suffix), find(_Y, suffix)
        if x is None or y is None:
            return None
        if len(x) != len(y):
            raise ValueError(f"{path}: field y: {len(y)} labels for {len(x)} examples")
        return {"x": x, "y": as_labels(y, f"{path}: field y", classes) if y.dtype.kind in "iub" else y}

    train = columns("_train")
    if train is not None:
        _describe(writer, train, classes)
        add_plain(writer, train, columns("_test"), path)
        return
    rows = columns("")
    if rows is None:
        raise ValueError(f"{path}: arrays {', '.join(sorted(arrays))}: expected x and y, or x_train and y_train ...")
    _describe(writer, rows, classes)
    ids = find(_CLIENT)
    if ids is None:
        add_plain(writer, rows, None, path)
        return
    names = find(_CLIENT, "_ids")
    if names is not None:
        if len(ids) and (ids.min() < 0 or ids.max() >= len(names)):
            raise ValueError(f"{path}: client index {ids.max()} for {len(names)} client ids")
        if len(set(names.tolist())) != len(names):
            twice = next(n for n in names.tolist() if names.tolist().count(n) > 1)
            raise ValueError(f"{path}: client {twice}: appears twice among the client ids; they must be unique")
        ids = names[ids]
    is_test = arrays.get("is_test", np.zeros(len(ids), bool)).astype(bool)
    if len(is_test) != len(ids) or len(ids) != len(rows["y"]):
        raise ValueError(
            f"{path}: {len(rows['y'])} examples, {len(ids)} clients, {len(is_test)} is_test flags: must agree"
        )
    for split, mask in (("train", ~is_test), ("test", is_test)):
        if mask.any():
            add_grouped(writer, split, {f: v[mask] for f, v in rows.items()}, ids[mask], path)


def _describe(writer: StoreWriter, rows: dict[str, np.ndarray], classes: int | None) -> None:
    if rows["y"].dtype == np.int32:
        found = int(rows["y"].max()) + 1
        writer.info.setdefault("classes", classes or found)
    writer.preprocess = scaling_of(rows)
    if writer.preprocess and rows["x"].shape[1:] == (28, 28) and writer.info.get("classes") == 62:
        writer.name = "femnist"  # paper 255, ink 0
        writer.info |= {"source": "LEAF FEMNIST (NIST writers)", "licence": "NIST SD 19"}
        writer.preprocess = Pipeline.of({"name": "scale"}, {"name": "invert"})
