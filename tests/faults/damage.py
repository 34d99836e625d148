"""Seeded damage to valid files: bytes, declared sizes, names, and the values of JSON and NumPy headers."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Rng = np.random.Generator
SIZES = (0, 1, -1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "x",
    "\ud800",
    "../../etc",
    [],
    {},
    [[[]]],
    float("nan"),
)


def truncate(blob: bytes, rng: Rng) -> bytes:
    return blob[: int(rng.integers(0, max(1, len(blob))))]


def flip(blob: bytes, rng: Rng) -> bytes:
    out = bytearray(blob)
    for at in rng.integers(0, max(1, len(out)), int(rng.integers(1, 9))) if out else ():
        out[at] ^= 1 << int(rng.integers(0, 8))
    return bytes(out)


def splice(blob: bytes, rng: Rng) -> bytes:
    a, b = sorted(int(n) for n in rng.integers(0, len(blob) + 1, 2))
    at = int(rng.integers(0, len(blob) + 1))
    return blob[:at] + blob[a:b] + (blob[at:] if rng.integers(2) else blob[at + b - a :])


def zero(blob: bytes, rng: Rng) -> bytes:
    a, b = sorted(int(n) for n in rng.integers(0, len(blob) + 1, 2))
    b = min(b, a + 200)
    return blob[:a] + bytes([int(rng.choice([0, 255]))]) * (b - a) + blob[b:]


def sizes(blob: bytes, rng: Rng) -> bytes:
    """A huge or negative number where headers have their sizes: near the start or the end."""
    width = int(rng.choice([2, 4, 8]))
    order = rng.choice(["<", ">"])
    value = int(rng.choice(np.array(SIZES, object))) & ((1 << 8 * width) - 1)
    packed = struct.pack(f"{order}{ {2: 'H', 4: 'I', 8: 'Q'}[width] }", value)
    span = min(len(blob), 600)
    at = int(rng.integers(0, max(1, span)))
    at = at if rng.integers(2) else max(0, len(blob) - at - width)
    return blob[:at] + packed + blob[at + width :]


def insert(blob: bytes, rng: Rng) -> bytes:
    at = int(rng.integers(0, len(blob) + 1))
    return blob[:at] + rng.bytes(int(rng.integers(1, 64))) + blob[at:]


def empty(blob: bytes, rng: Rng) -> bytes:
    return b""


BYTES: tuple[Callable[[bytes, Rng], bytes], ...] = (truncate, flip, flip, splice, zero, sizes, sizes, insert, empty)


def inside(blob: bytes, rng: Rng, name: str) -> bytes:
    """Damage below the compression, so that the checksums fit: in JSON values, NumPy headers, or any bytes."""
    if name.endswith(".gz") and not name.endswith(".tar.gz"):
        return gzip.compress(inside(gzip.decompress(blob), rng, name.removesuffix(".gz")))
    if name.endswith(".json"):
        return json_values(blob, rng)
    if name.endswith(".npz"):
        return numpy_members(blob, rng)
    return BYTES[int(rng.integers(len(BYTES)))](blob, rng)


def json_values(blob: bytes, rng: Rng) -> bytes:
    """One value, at any depth, becomes one of another type or size; or a key is renamed."""
    tree = json.loads(blob)
    node = tree
    for _ in range(int(rng.integers(0, 5))):
        children = list(node.values()) if isinstance(node, dict) else node
        deeper = [c for c in children if isinstance(c, (dict, list)) and c]
        if not deeper:
            break
        node = deeper[int(rng.integers(len(deeper)))]
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = keys[int(rng.integers(len(keys)))]
    if isinstance(node, dict) and rng.integers(3) == 0:
        node[str(VALUES[int(rng.integers(len(VALUES)))])] = node.pop(key)
    else:
        node[key] = VALUES[int(rng.integers(len(VALUES)))]
    return json.dumps(tree).encode()


def numpy_members(blob: bytes, rng: Rng) -> bytes:
    """A member's shape, type or name is changed; the archive itself is well formed."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = list(members)[int(rng.integers(len(members)))]
    way = int(rng.integers(4))
    if way == 0:
        renamed = str(rng.choice([f"../{name}", "other.npy", "x", "y.npy", "client_ids.npy", "is_test.npy"]))
        members[renamed] = members.pop(name)
    elif way == 1:
        old, new = (
            rng.choice([b"(12,", b"(8,", b"<f4", b"|u1", b"<i8", b"False"]),
            rng.choice(
                [b"(2000000000000,", b"(-8,", b"(0,", b"|O", b"<U9", b">f8", b"<c16", b"<M8", b"True", b"((((("]
            ),
        )
        members[name] = members[name].replace(bytes(old), bytes(new), 1)
    else:
        members[name] = BYTES[int(rng.integers(len(BYTES)))](members[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return out.getvalue()


def damage(folder: Path, rng: Rng) -> str:
    """Damage one file of a folder; returns what was done."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    file = files[int(rng.integers(len(files)))]
    way = int(rng.integers(10))
    if way == 0:  # names: rename, swap or duplicate
        other = files[int(rng.integers(len(files)))]
        target = file.with_name(
            str(rng.choice(["test", "train", "x.json", "a\udcff.h5", f"copy-{file.name}", other.name]))
        )
        content = file.read_bytes()
        if rng.integers(2):
            file.unlink()
        target.write_bytes(content)
        return f"{file.name} as {target.name!a}"
    if way <= 3:
        file.write_bytes(inside(file.read_bytes(), rng, file.name))
        return f"inside {file.name}"
    change = BYTES[int(rng.integers(len(BYTES)))]
    file.write_bytes(change(file.read_bytes(), rng))
    return f"{change.__name__} {file.name}"
