"""Packing: a message is sent as one buffer per dtype, not as one record per leaf.

Flower wraps every array in an object (a header, a hash and a JSON body: a few hundred bytes), which is expensive for
models with many small leaves. Here all leaves of one dtype are concatenated into one flat buffer. Both sides know the
message's *layout* (path, dtype and shape of every leaf), so only a short digest of it is sent. The receiver checks the
digest and the length of every buffer before it reads the values. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord

__all__ = ["Layout", "Leaf", "MessageError", "layout_of", "pack", "records", "unpack"]

PyTree = Any
RAW = "fedbraid.raw"  # Flower's name for how an array was serialised: plain little-endian values, no header


class MessageError(ValueError):
    """A message does not have the expected layout; the message of the error names the leaf."""


class Leaf(NamedTuple):
    """One array of a message."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.path or 'the value'} {self.dtype}{list(self.shape)}"


class Layout(NamedTuple):
    """The structure of a message: its leaves in order, and their tree."""

    leaves: tuple[Leaf, ...]
    tree: Any  # jax's PyTreeDef
    keys: tuple[bool, ...]  # which leaves are random keys, sent as their key data

    @property
    def digest(self) -> str:
        """A short hash of the layout: equal if and only if paths, dtypes and shapes are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def nbytes(self) -> int:
        """Bytes of the message's arrays, as ``cost`` counts them."""
        return sum(leaf.size * _dtype(leaf.dtype).itemsize for leaf in self.leaves)

    def to_json(self) -> str:
        return json.dumps([[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in self.leaves], separators=(",", ":"))

    def buffers(self) -> dict[str, int]:
        """Number of values in each dtype's buffer."""
        sizes: dict[str, int] = {}
        for leaf in self.leaves:
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.size
        return sizes


def _dtype(name: str) -> np.dtype:
    return jnp.dtype(name)  # unlike NumPy's, also knows bfloat16 and other small floats


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def layout_of(tree: PyTree) -> Layout:
    """The layout of a message, from its arrays or from their shapes.

    >>> layout = layout_of({"b": jnp.zeros(2), "w": jnp.zeros((3, 2))})
    >>> [str(leaf) for leaf in layout.leaves], layout.buffers(), layout.nbytes
    (["['b'] float32[2]", "['w'] float32[3, 2]"], {'float32': 8}, 32)
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, keys = [], []
    for path, leaf in found:
        plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        leaves.append(Leaf(jax.tree_util.keystr(path), jnp.dtype(plain.dtype).name, tuple(plain.shape)))
        keys.append(_is_key(leaf))
    return Layout(tuple(leaves), structure, tuple(keys))


def pack(tree: PyTree) -> dict[str, np.ndarray]:
    """One flat buffer per dtype, with the leaves in order.

    >>> pack({"b": jnp.ones(2), "n": jnp.int32(7), "w": jnp.zeros((2, 2))})
    {'float32': array([1., 1., 0., 0., 0., 0.], dtype=float32), 'int32': array([7], dtype=int32)}
    """
    parts: dict[str, list[np.ndarray]] = {}
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        parts.setdefault(jnp.dtype(array.dtype).name, []).append(array.reshape(-1))
    return {name: some[0] if len(some) == 1 else np.concatenate(some) for name, some in parts.items()}


def unpack(layout: Layout, buffers: Mapping[str, np.ndarray]) -> PyTree:
    """The inverse of `pack`; the arrays are views of the buffers.

    >>> tree = {"b": np.ones(2, np.float32), "n": np.int32(7)}
    >>> jax.tree.map(np.ndarray.tolist, unpack(layout_of(tree), pack(tree)))
    {'b': [1.0, 1.0], 'n': 7}
    """
    check_buffers(layout, {name: len(buffer) for name, buffer in buffers.items()})
    read = dict.fromkeys(buffers, 0)
    out = []
    for leaf, is_key in zip(layout.leaves, layout.keys, strict=True):
        start = read[leaf.dtype]
        read[leaf.dtype] = start + leaf.size
        array = buffers[leaf.dtype][start : start + leaf.size].reshape(leaf.shape)
        out.append(jax.random.wrap_key_data(jnp.asarray(array)) if is_key else array)
    return jax.tree.unflatten(layout.tree, out)


def check_buffers(layout: Layout, lengths: Mapping[str, int]) -> None:
    """Refuse buffers whose lengths do not fit the layout; the error names the first leaf that is cut off."""
    wanted = layout.buffers()
    for name in wanted:
        have = lengths.get(name, 0)
        end = 0
        for leaf in layout.leaves:
            if leaf.dtype != name:
                continue
            end += leaf.size
            if end > have:
                raise MessageError(f"leaf {leaf} is cut off: got {have} {name} values, expected {wanted[name]}")
        if have > end:
            raise MessageError(f"got {have} {name} values, expected {wanted[name]}")
    for name in lengths:
        if name not in wanted:
            raise MessageError(f"got {lengths[name]} {name} values, expected only {_names(wanted)}")


def _names(buffers: Mapping[str, int]) -> str:
    return ", ".join(f"{size} {name}" for name, size in buffers.items()) or "nothing"


def check_layout(expected: Layout, sent: Sequence[Any], what: str) -> None:
    """Refuse a layout that differs from the expected one; the error names the first leaf that differs."""
    theirs = [Leaf(str(path), str(dtype), tuple(shape)) for path, dtype, shape in sent]
    for ours, other in zip(expected.leaves, theirs, strict=False):
        if ours.path != other.path:
            raise MessageError(f"{what}: expected leaf {ours}, got leaf {other}")
        if ours != other:
            raise MessageError(f"{what}: leaf {ours.path or 'the value'} should be {ours}, got {other}")
    if len(expected.leaves) != len(theirs):
        extra = (expected.leaves if len(expected.leaves) > len(theirs) else theirs)[
            min(len(theirs), len(expected.leaves))
        ]
        side = "is missing" if len(expected.leaves) > len(theirs) else "is not expected"
        raise MessageError(f"{what}: leaf {extra} {side}")


def records(tree: PyTree) -> ArrayRecord:
    """The arrays of a message as a Flower record."""
    arrays = {
        name: Array(dtype=name, shape=buffer.shape, stype=RAW, data=_little(buffer).tobytes())
        for name, buffer in pack(tree).items()
    }
    return ArrayRecord(arrays)


def _little(buffer: np.ndarray) -> np.ndarray:
    return buffer.astype(buffer.dtype.newbyteorder("<")) if buffer.dtype.byteorder == ">" else buffer


def read_records(layout: Layout, record: Mapping[str, Array]) -> PyTree:
    """The message in a record. The layout is checked before the values are read."""
    lengths = {}
    for name, array in record.items():
        if array.stype != RAW or array.dtype != name:
            raise MessageError(f"buffer {name!r} holds {array.stype!r} {array.dtype}, expected {RAW!r} {name}")
        if name not in layout.buffers():
            raise MessageError(f"got a {name} buffer, expected only {_names(layout.buffers())}")
        lengths[name], rest = divmod(len(array.data), _dtype(name).itemsize)
        if rest:
            raise MessageError(f"the {name} buffer ends in the middle of a value: it has {len(array.data)} bytes")
    check_buffers(layout, lengths)
    return unpack(layout, {name: np.frombuffer(array.data, _dtype(name)) for name, array in record.items()})
