"""Communication of a round: bytes down and up, measured on the messages themselves, not computed by a formula."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbraid.core import Algorithm, Exchange, MessageShapes, message_shapes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import ClientData
from fedbraid.masking import Secure, sizes

__all__ = ["Cost", "ExchangeCost", "cost", "data_shapes", "nbytes"]


class ExchangeCost(NamedTuple):
    """Bytes that one client receives and sends in one exchange."""

    name: str
    down: int
    up: int


class Cost(NamedTuple):
    """Bytes that one client sends and receives in one round.

    With a new cohort for each exchange it is the sum over one client per exchange. model: bytes of the parameters.
    """

    exchanges: tuple[ExchangeCost, ...]
    model: int

    @property
    def down(self) -> int:
        return sum(e.down for e in self.exchanges)

    @property
    def up(self) -> int:
        return sum(e.up for e in self.exchanges)

    @property
    def multiple(self) -> float:
        """Bytes in both directions divided by the model's size: 2 for FedAvg."""
        return (self.down + self.up) / self.model


def nbytes(tree: Any) -> int:
    """Bytes of the arrays (or shapes) in a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def data_shapes(data: Any) -> ClientData:
    """A client's data as shapes, from a federated data set, a split, or a mapping of arrays.

    Fields have their stored shapes and dtypes. Batches taken from them are preprocessed, so client functions see the
    shapes that they see in training.
    """
    split = data.train if isinstance(data, FederatedData) else data
    arrays = split.arrays if isinstance(split, Split) else split
    cap = int(split.sizes.max()) if isinstance(split, Split) else len(next(iter(arrays.values())))
    number = jax.ShapeDtypeStruct((), np.int32)
    canonical = jax.dtypes.canonicalize_dtype
    shapes = {name: jax.ShapeDtypeStruct(a.shape, canonical(a.dtype)) for name, a in arrays.items()}
    return ClientData(shapes, number, number, cap, split.preprocess if isinstance(split, Split) else None)


def cost(alg: Algorithm, params: Any, data: Any, *, secure: Secure | None = None) -> Cost:
    """Bytes down and up per exchange.

    secure: count the messages of secure aggregation, too: keys, shares, masked uploads and the shares that unmask their
        sum, for an exchange in which no client drops out.

    >>> import jax.numpy as jnp
    >>> from fedbraid.algorithms import fedavg
    >>> alg = fedavg(lambda params, batch, key: jnp.sum(params * batch["x"].mean()))
    >>> cost(alg, jnp.zeros(10), {"x": np.zeros((5, 1), np.float32)}).multiple
    2.0
    """
    messages = message_shapes(alg, params, data_shapes(data))
    both = (
        _secure_bytes(secure, e, m) if secure else (nbytes(m.down), nbytes(m.up))
        for e, m in zip(alg.exchanges, messages, strict=True)
    )
    return Cost(tuple(ExchangeCost(m.name, *pair) for m, pair in zip(messages, both, strict=True)), nbytes(params))


def _secure_bytes(secure: Secure, exchange: Exchange, message: MessageShapes) -> tuple[int, int]:
    many = secure.clients
    masked = sizes.mask_up(secure, sizes.summand_of(exchange, message.up, message.metrics))
    down = (message.down, sizes.deal_down(many), sizes.mask_down(many), sizes.open_down(many))
    up = (sizes.keys_up(), sizes.deal_up(many), masked, sizes.open_up(many))
    return nbytes(down), nbytes(up)
