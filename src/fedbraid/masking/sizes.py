"""The arrays in the messages of a secure exchange, as shapes: for packing them, and for counting bytes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbraid.core import Exchange
from fedbraid.masking.settings import Secure

__all__ = ["Summand", "deal_down", "deal_up", "keys_up", "mask_down", "mask_up", "open_down", "open_up", "summand_of"]

PyTree = Any
KEYS, COMMITMENT, SHARE = 64, 32, 33
SEALED = 12 + 2 * SHARE + 16  # nonce, share of the key and share of the seed, authentication


class Summand(NamedTuple):
    """What a client adds to the sum in one exchange: the lifted upload, its weight, and its metrics."""

    lifted: PyTree  # shapes
    metrics: tuple[str, ...]

    @property
    def body(self) -> int:
        """Entries of the lifted upload."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.lifted))

    @property
    def head(self) -> int:
        """The weight, and for each metric its product with the weight, and the weight again if it is finite."""
        return 1 + 2 * len(self.metrics)


def summand_of(exchange: Exchange, up: PyTree, metrics: tuple[str, ...]) -> Summand:
    """The summand of an exchange whose uploads have these shapes."""
    weight = jax.ShapeDtypeStruct((), jax.numpy.result_type(float))
    return Summand(jax.eval_shape(exchange.reducer.lift, up, weight), tuple(sorted(metrics)))


def _bytes(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.uint8)


def _numbers(many: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((many,), np.int32)


def keys_up() -> dict[str, Any]:
    """A client's two public keys."""
    return {"keys": _bytes(KEYS)}


def deal_down(many: int) -> dict[str, Any]:
    """The keys of all clients."""
    return {"clients": _numbers(many), "keys": _bytes(many, KEYS)}


def deal_up(many: int) -> dict[str, Any]:
    """A client's sealed shares for the others."""
    return {"commitment": _bytes(COMMITMENT), "shares": _bytes(many - 1, SEALED)}


def mask_down(many: int) -> dict[str, Any]:
    """The others' sealed shares for a client; sent together with the exchange's own message."""
    return {"clients": _numbers(many - 1), "shares": _bytes(many - 1, SEALED)}


def mask_up(secure: Secure, summand: Summand) -> dict[str, Any]:
    """A client's masked upload."""
    body = jax.ShapeDtypeStruct((summand.body,), secure.codec.dtype)
    return {"body": body, "head": jax.ShapeDtypeStruct((summand.head,), secure.weights.dtype)}


def open_down(many: int) -> dict[str, Any]:
    """The clients whose uploads count."""
    return {"clients": _numbers(many)}


def open_up(many: int) -> dict[str, Any]:
    """A share of each client that dealt."""
    return {"shares": _bytes(many, SHARE)}
