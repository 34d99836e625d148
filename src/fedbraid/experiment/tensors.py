"""Arrays by name in one file: safetensors (a length, a JSON header, the bytes), and NumPy's npz.

The format of safetensors is that of https://github.com/huggingface/safetensors, written here without that package. A
file holds a checksum of its content in its metadata, so that later damage is recognised.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from fedbraid import files
from fedbraid.limited_json import read_json
from fedbraid.sealed import Damaged

__all__ = ["Tensors", "named_arrays", "read_tensors", "tree_of", "write_npz", "write_tensors"]

CHECKSUM = "sha256"  # key in the metadata
MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Tensors(NamedTuple):
    """The arrays of a file, and its metadata."""

    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]


def named_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their path; a tree that is a single array has the name ``params``.

    >>> sorted(named_arrays([{"w": np.ones(2), "b": np.zeros(1)}, {"w": np.ones(3)}]))
    ['0.b', '0.w', '1.w']
    """
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in flat]
    if len(set(names)) < len(names):  # keys that contain dots
        names = [jax.tree_util.keystr(path) for path, _ in flat]
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, flat, strict=True)}


def tree_of(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """The inverse of `named_arrays`: a pytree with the structure of ``like``, which may be made of shapes only."""
    expected = named_arrays(jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), like))
    if missing := sorted(set(expected) ^ set(arrays)):
        whose = "the file" if missing[0] in arrays else "the model"
        raise ValueError(f"the arrays are not those of the model: only {whose} has {missing[0]!r}")
    for name, want in expected.items():
        have = arrays[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            raise ValueError(
                f"the array {name!r} is {have.dtype}{list(have.shape)}, the model's is {want.dtype}{list(want.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Replace a safetensors file."""
    header: dict[str, Any] = {}
    at, parts = 0, []
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise ValueError(f"the array {name!r} has the dtype {array.dtype}, which safetensors files cannot hold")
        content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(content)],
        }
        at += len(content)
        parts.append(content)
    body = b"".join(parts)
    about = dict(metadata or {})
    header["__metadata__"] = {**about, CHECKSUM: _checksum(header, about, body)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    files.write_bytes(path, len(text).to_bytes(8, "little") + text + body)


def _checksum(header: Mapping[str, Any], metadata: Mapping[str, str], body: bytes) -> str:
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    digest = hashlib.sha256(json.dumps([entries, metadata], sort_keys=True).encode())
    digest.update(body)
    return digest.hexdigest()


def read_tensors(path: Path, *, sealed: bool = False) -> Tensors:
    """Read a safetensors file; `Damaged` names a file that is not one, or that does not match its checksum.

    sealed: refuse a file without a checksum, such as one of another program.
    """
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        if len(content) < 8 or length > min(len(content) - 8, MOST_HEADER):
            raise ValueError("it is cut")
        header, body = read_json(content[8 : 8 + length]), content[8 + length :]
        metadata = header.pop("__metadata__", {})
        arrays = {name: _array(name, entry, body) for name, entry in header.items()}
        checksum = metadata.pop(CHECKSUM, None)
        if checksum is None and sealed:
            raise ValueError("it has no checksum")
        if checksum is not None and checksum != _checksum(header, metadata, body):
            raise ValueError("it does not match its checksum")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None
    return Tensors(arrays, metadata)


def _array(name: str, entry: Mapping[str, Any], body: bytes) -> np.ndarray:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if (
        not 0 <= begin <= end <= len(body)
        or end - begin != math.prod(shape) * dtype.itemsize
        or min(shape, default=0) < 0
    ):
        raise ValueError(f"the place of the array {name!r} is wrong")
    return np.frombuffer(body[begin:end], dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace a NumPy archive. NumPy has no bfloat16: such arrays are written as float32, which holds their values."""
    bfloat16 = _DTYPES["BF16"]
    plain = {name: a.astype(np.float32) if a.dtype == bfloat16 else a for name, a in arrays.items()}
    with files.replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, array in plain.items():  # not by np.savez, which refuses the name "file"
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
