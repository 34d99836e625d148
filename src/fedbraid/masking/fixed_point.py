"""Fixed-point numbers modulo a power of two: floats become integers whose sums are exact and order-free.

An entry x becomes round(x * scale) modulo 2^bits. ``scale`` is the largest power of two with

    clients * (bound * scale + 1/2) <= 2^(bits - 1) - 1,

so a sum of ``clients`` entries within the bound never wraps, and the sum's sign can be read off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["Codec", "RangeError", "check_leaves", "decode", "decode_tree", "encode", "encode_tree"]

PyTree = Any
LEVELS = 1 << 16  # the least number of levels that every client must have for an entry


class RangeError(ValueError):
    """A number that cannot be encoded: it is not finite or larger than the bound. The message has no values."""


class Codec(NamedTuple):
    """A fixed-point code for entries up to ``bound``, for sums over ``clients`` of them."""

    bits: int
    bound: float
    clients: int
    scale: float

    @staticmethod
    def of(bits: int, bound: float, clients: int) -> Codec:
        """The code with the largest scale for which sums cannot wrap."""
        room = (2 ** (bits - 1) - 1) / clients - 0.5
        if room < LEVELS:
            raise ValueError(
                f"secure.bits = {bits} leaves fewer than {LEVELS} levels for each of {clients} clients: use 64 bits"
            )
        exponent = math.floor(math.log2(room / bound))
        if not -1000 < exponent < 1000:
            raise ValueError(f"secure.bound must be a usual number, got {bound!r}")
        half, limit = Fraction(1, 2), 2 ** (bits - 1) - 1
        while clients * (Fraction(bound) * Fraction(2) ** exponent + half) > limit:  # log2 is rounded
            exponent -= 1
        return Codec(bits, float(bound), clients, 2.0**exponent)

    @property
    def unit(self) -> float:
        """The distance of two neighbouring numbers. An encoded entry is wrong by at most half of it."""
        return 1 / self.scale

    @property
    def dtype(self) -> np.dtype:
        """The unsigned dtype of encoded entries; its arithmetic is modulo 2^bits."""
        return np.dtype(f"uint{self.bits}")

    @property
    def largest(self) -> int:
        """The largest absolute value of an entry that is an integer; integers are not scaled."""
        return (2 ** (self.bits - 1) - 1) // self.clients


def encode(codec: Codec, numbers: Any) -> np.ndarray:
    """Numbers as integers modulo 2^bits. Raises `RangeError` instead of clipping.

    >>> codec = Codec.of(32, 4.0, 3)
    >>> words = encode(codec, np.array([1.5, -2.0])) + encode(codec, np.array([0.25, 0.5]))
    >>> decode(codec, words).tolist()
    [1.75, -1.5]
    """
    array = np.asarray(numbers)
    if array.dtype.kind in "iu":
        if array.size and max(-int(array.min()), int(array.max())) > codec.largest:
            raise RangeError(f"an integer is larger than {codec.largest}, the largest for {codec.bits} bits")
        return array.astype(np.int64).astype(codec.dtype)
    wide = array.astype(np.float64)
    if not np.all(np.abs(wide) <= codec.bound):  # False for NaN
        raise RangeError(f"a number is not finite or larger than the bound {codec.bound:g}")
    # exact before rint, because the scale is a power of two
    return np.rint(wide * codec.scale).astype(np.int64).astype(codec.dtype)


def decode(codec: Codec, words: np.ndarray, dtype: Any = np.float64) -> np.ndarray:
    """The numbers of encoded entries, or of their sums modulo 2^bits."""
    signed = words.view(f"int{codec.bits}")
    if np.dtype(dtype).kind in "iu":
        return signed.astype(dtype)
    return (signed.astype(np.float64) / codec.scale).astype(dtype)


def check_leaves(tree: PyTree, where: str) -> None:
    """Refuse leaves that have no fixed-point code, from arrays or shapes."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = leaf.dtype
        if not (jax.numpy.issubdtype(dtype, np.floating) or jax.numpy.issubdtype(dtype, np.integer)):
            name = jax.tree_util.keystr(path) or "the value"
            raise ValueError(
                f"secure aggregation adds floats and integers, but {where} sends leaf {name} as {dtype}: convert it"
            )


def encode_tree(codec: Codec, tree: PyTree) -> np.ndarray:
    """All leaves of a tree, encoded and concatenated."""
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            out.append(encode(codec, _plain(leaf)).reshape(-1))
        except RangeError as error:
            raise RangeError(f"leaf {jax.tree_util.keystr(path) or 'of the upload'}: {error}") from None
    return np.concatenate(out) if out else np.zeros(0, codec.dtype)


def decode_tree(codec: Codec, words: np.ndarray, shapes: PyTree) -> PyTree:
    """The inverse of `encode_tree` for a tree of these shapes and dtypes."""
    leaves, tree = jax.tree.flatten(shapes)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
    parts: Sequence[np.ndarray] = np.split(words, ends[:-1]) if leaves else []
    numbers = []
    for leaf, part in zip(leaves, parts, strict=True):
        kind = leaf.dtype if np.dtype(leaf.dtype).kind in "iu" else np.float64
        numbers.append(decode(codec, part, kind).reshape(leaf.shape).astype(leaf.dtype))
    return jax.tree.unflatten(tree, numbers)


def _plain(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array if array.dtype.kind in "iuf" else array.astype(np.float64)  # bfloat16 and others like it
