"""LEAF's JSON files (Caldas et al., *LEAF: A Benchmark for Federated Settings*), also gzipped.

Each file holds ``users``, ``num_samples`` and ``user_data[user] = {"x": [...], "y": [...]}``. LEAF writes them to the
folders ``train`` and ``test``. FEMNIST (784 values, 62 classes) and Shakespeare (80 characters and the next one) are
recognised. In other sets numbers are stored as float32, strings as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid.data import text
from fedbraid.data.formats.archive import read_bytes, unpacked
from fedbraid.data.formats.columns import as_labels, as_pixels, twice_in
from fedbraid.data.names import check_client
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store import StoreWriter
from fedbraid.limited_json import read_json

__all__ = ["read_leaf"]


def read_leaf(writer: StoreWriter, path: Path, *, pixels: str = "uint8", classes: int | None = None) -> None:
    """Read a LEAF folder (or archive) with ``train`` and ``test`` files, one file at a time."""
    with unpacked(Path(path)) as root:
        files = list(_files(root))
        if not any(split == "train" for split, _ in files):
            raise ValueError(f"{path}: no LEAF files (*.json, *.json.gz) in a folder named train")
        kind = ""
        for split, file in files:
            for user, x, y in _users(file):
                at = f"{file}: client {user}"
                if not kind and len(x):
                    kind = _kind(x[0], y[0], pixels, f"{at}: field x")
                    _describe(writer, kind, classes)
                writer.add(split, user, _convert(kind, x, y, writer.info.get("classes"), at), source=file)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for split in ("train", "test"):
        folders = [p for p in (root, *sorted(root.rglob("*"))) if p.is_dir() and p.name == split]
        for folder in folders:
            for file in sorted(folder.iterdir()):
                if file.name.endswith((".json", ".json.gz")) and not file.is_dir():
                    yield split, file


def _users(file: Path) -> Iterator[tuple[str, list, list]]:
    encoded = read_bytes(file)
    try:
        content = read_json(encoded)
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON, maybe cut short ({error})") from error
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= set(content):
        raise ValueError(f"{file}: not a LEAF file: it must hold users, num_samples and user_data")
    users, counts, data = content["users"], content["num_samples"], content["user_data"]
    if not isinstance(users, list) or not isinstance(counts, list) or not isinstance(data, dict):
        raise ValueError(f"{file}: users and num_samples must be lists, and user_data an object")
    if len(users) != len(counts):
        raise ValueError(f"{file}: {len(users)} users but {len(counts)} numbers of samples")
    for user in users:
        check_client(user, str(file))
    if twice := twice_in(users):
        raise ValueError(f"{file}: client {twice[0]}: appears twice in the list of users; client ids must be unique")
    for user, count in zip(users, counts, strict=True):
        for field in ("x", "y"):
            if not isinstance(data.get(user), dict) or not isinstance(data[user].get(field), list):
                raise ValueError(f"{file}: client {user}: field {field}: missing, or not a list")
            if len(data[user][field]) != count:
                found = len(data[user][field])
                raise ValueError(
                    f"{file}: client {user}: field {field}: {found} examples where num_samples says {count}"
                )
        yield user, data[user]["x"], data[user]["y"]


def _kind(x: Any, y: Any, pixels: str, at: str) -> str:
    if isinstance(x, str):
        return "characters" if isinstance(y, str) and len(y) == 1 else "text"
    if isinstance(x, list) and x and isinstance(x[0], (int, float)):
        return "images" if len(x) == 784 and pixels == "uint8" else "numbers"
    raise ValueError(f"{at}: examples of type {type(x).__name__} are not supported; only numbers and strings are")


def _describe(writer: StoreWriter, kind: str, classes: int | None) -> None:
    if kind == "images":
        writer.name = "femnist"
        writer.info |= {"classes": classes or 62, "source": "LEAF FEMNIST (NIST writers)", "licence": "NIST SD 19"}
        writer.preprocess = Pipeline.of({"name": "scale"}, {"name": "invert"})
    elif kind == "characters":
        writer.name = "leaf-shakespeare"
        writer.info |= {"classes": text.VOCABULARY_SIZE, "source": "LEAF Shakespeare (play and role)"}
        writer.preprocess = Pipeline.of({"name": "integers"})
    else:
        writer.info |= {"source": "LEAF", **({"classes": classes} if classes else {})}


def _convert(kind: str, x: list, y: list, classes: int | None, at: str) -> dict[str, Any]:
    if kind == "images":
        return {
            "x": as_pixels(x, f"{at}: field x", (28, 28)),
            "y": as_labels(y, f"{at}: field y", classes),
        }
    if kind == "characters":
        if not all(isinstance(s, str) and s for s in (*x, *y)):
            raise ValueError(f"{at}: field x or y: an example is not text, the first one is")
        lengths = {len(s) for s in x}
        if len(lengths) > 1:
            raise ValueError(f"{at}: field x: examples differ in shape: strings of {sorted(lengths)[:2]} characters")
        ids = [text.character_ids(s) for s in x]
        target = [int(text.character_ids(s)[0]) for s in y]
        return {"x": np.stack(ids) if ids else np.zeros((0, 80), np.uint8), "y": np.asarray(target, np.int32)}
    if kind == "text":
        if not all(isinstance(s, str) for s in x):
            raise ValueError(f"{at}: field x: an example is not text, the first one is")
        return {"x": np.asarray(x, object), "y": as_labels(y, f"{at}: field y", classes)}
    try:
        numbers = np.asarray(x, np.float32)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{at}: field x: examples differ in shape, or are not numbers") from error
    labels = np.asarray(y)
    if labels.dtype.kind == "f":
        return {"x": numbers, "y": labels.astype(np.float32)}
    return {"x": numbers, "y": as_labels(y, f"{at}: field y", classes)}
