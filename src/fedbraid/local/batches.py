"""A client's examples and the batches that it goes over.

Shuffling, epochs or steps, the last partial batch, masks and held-out slices are here. The same code serves the
simulator's flat arrays and a deployed client's own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import check_count, check_number, is_traced

__all__ = [
    "BYZANTINE",
    "LEADING",
    "MASK",
    "WEIGHTINGS",
    "Batches",
    "ClientData",
    "Clients",
    "LocalOptions",
    "Weighting",
    "batches_of",
    "masked_mean",
    "shuffled",
    "weight_of",
]

MASK = "mask"
LEADING = "leading"  # the field of a batch that says whether it belongs to the leading phase; see `Batches`
BYZANTINE = "byzantine"  # the field that marks attackers; see fedbraid.data.mark


class Clients(Protocol):
    """The examples of all clients as flat arrays: client ``i`` has rows ``offsets[i]`` to ``offsets[i + 1]``.

    ``fedbraid.data.Split`` is one.
    """

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The examples of all clients, by field."""
        ...

    @property
    def offsets(self) -> Any:
        """The first row of every client, and the number of rows."""
        ...

    @property
    def sizes(self) -> Any:
        """The number of examples of every client."""
        ...

    @property
    def preprocess(self) -> Callable | None:
        """``(batch, key, train) -> batch``, applied where batches are taken, or None."""
        ...


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "offset", "size", "key", "order"],
    meta_fields=["cap", "preprocess"],
)
@dataclass(frozen=True)
class ClientData:
    """One client's examples: rows ``offset`` to ``offset + size`` of flat arrays.

    cap: a static bound on ``size``. A batch of all of a client's examples is padded to it.
    preprocess: ``(batch, key, train) -> batch``, applied to every batch; hashable. None changes nothing.
    key: the client's key for divisions of its rows, the same in every round (`fedbraid.address.rows_key`); None is
        ``jax.random.key(0)``.
    order: None for the stored order of the rows, or (key, number of rows) of a random order; see `in_random_order`.
    """

    arrays: dict[str, Any]
    offset: Any
    size: Any
    cap: int
    preprocess: Callable | None = None
    key: Any = None
    order: tuple[Any, Any] | None = None

    @classmethod
    def of(cls, arrays: dict[str, Any]) -> ClientData:
        """A client's own arrays, as a deployed client holds them."""
        n = len(next(iter(arrays.values())))
        return cls({k: jnp.asarray(v) for k, v in arrays.items()}, jnp.int32(0), jnp.int32(n), n)

    def rows(self, index: Any, valid: Any, key: Any = None) -> dict[str, Any]:
        """The preprocessed batch of rows ``index`` (0 is the client's first row); ``valid`` becomes the mask.

        key: for random augmentation; None means no augmentation, as in evaluation.
        """
        index = jnp.where(valid, index, 0)
        at = self.offset + (index if self.order is None else shuffled(self.order[0], index, self.order[1]))
        batch = {name: jnp.take(a, at, axis=0, mode="clip") for name, a in self.arrays.items()}
        batch[MASK] = valid.astype(jnp.result_type(float))
        return batch if self.preprocess is None else self.preprocess(batch, key, key is not None)

    def in_random_order(self) -> ClientData:
        """The same rows in an order drawn from ``key``: a slice is a random subset, the same in every round."""
        if self.order is not None:
            return self
        return replace(self, order=(jax.random.key(0) if self.key is None else self.key, self.size))

    def everything(self, key: Any = None) -> dict[str, Any]:
        """All of the client's examples as one preprocessed batch, padded to ``cap``. See `rows` for ``key``."""
        index = jnp.arange(self.cap, dtype=jnp.int32)
        return self.rows(index, index < self.size, key)


def masked_mean(values: Any, mask: Any) -> Any:
    """The mean of ``values`` over the real examples of a batch (0 when there are none).

    >>> float(masked_mean(jnp.array([1.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 0.0])))
    2.0
    """
    mask = mask.astype(values.dtype)
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)


def _mix(x: Any) -> Any:
    """A 32-bit hash finaliser: every input bit changes the top bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


SWAPS = 14  # enough that 240,000 permutations of 6 look uniform to a chi-squared test


def shuffled(key: Any, position: Any, n: Any) -> Any:
    """Element ``position`` of a random permutation of ``0 .. n-1``, without storing the permutation.

    The swap-or-not shuffle (Hoang, Morris, Rogaway, 2012): in each round, a hash of the pair decides whether a position
    and its mirror image about a random point are swapped. It is exact for every ``n``, traced or not, and needs no
    memory and no sort. It does not depend on padding, so the simulator and a deployed client agree.

    >>> import jax
    >>> sorted(int(i) for i in shuffled(jax.random.key(0), jnp.arange(7), 7))
    [0, 1, 2, 3, 4, 5, 6]
    """
    if not is_traced(n) and int(n) == 1:  # XLA's simplifier does not terminate on a modulus that is the constant 1
        return jnp.zeros(jnp.shape(position), jnp.int32)
    return _shuffled(key, position, n)


@jax.jit
def _shuffled(key: Any, position: Any, n: Any) -> Any:
    bits = jax.random.bits(key, (2, SWAPS), jnp.uint32)
    n = jnp.asarray(n).astype(jnp.uint32)
    x = jnp.asarray(position).astype(jnp.uint32)
    pivots = bits[0] % n
    for r in range(SWAPS):
        pivot = pivots[r]
        mirror = jnp.where(x <= pivot, pivot - x, pivot + n - x)
        swap = _mix(jnp.maximum(x, mirror) ^ bits[1, r]) >> 31
        x = jnp.where(swap.astype(bool), mirror, x)
    return x.astype(jnp.int32)


@dataclass(frozen=True)
class Batches:
    """Which batches a client goes over.

    size: examples per batch; None takes all of a client's examples as one batch.
    epochs or steps: passes over the client's data, or a fixed number of local steps.
    shuffle: a new order in every epoch, from the client's key.
    part: the slice of the client's examples to use, as fractions of its rows: (0, 0.8) and (0.8, 1) are disjoint.
    augment: whether the data's preprocessing augments these batches at random, as in training.
    drawn: take ``part`` from the rows in a random order (`ClientData.in_random_order`), not in their stored order. The
        parts are then random subsets, the same in every round.
    leading: the number of first epochs (or steps, if steps are given) that are a phase of their own: in its batches the
        field ``leading`` is True, in the others False. 0: there is no such field.
    """

    size: int | None = 20
    epochs: int | None = None
    steps: int | None = None
    shuffle: bool = True
    part: tuple[float, float] = (0.0, 1.0)
    augment: bool = True
    drawn: bool = False
    leading: int = 0

    def __post_init__(self) -> None:
        if self.size is not None:
            check_count("batch_size", self.size)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give either epochs or steps, got epochs={self.epochs!r} and steps={self.steps!r}")
        check_count("epochs" if self.steps is None else "steps", self.epochs if self.steps is None else self.steps)
        low, high = self.part
        check_number("part[0]", low, low=0, high=1)
        check_number("part[1]", high, low=low, high=1, open_low=True)

    def bounds(self, n: Any) -> tuple[Any, Any]:
        """The first row and the number of rows that are used of a client's ``n``; at least one row."""
        low, high = self.part
        if (low, high) == (0.0, 1.0):
            return n * 0, n
        xp = jnp if isinstance(n, jax.Array) else np
        start = xp.minimum(_cut(xp, low, n), n - 1)
        stop = xp.maximum(_cut(xp, high, n), start + 1)
        return start, stop - start

    def count(self, n: Any) -> Any:
        """Number of local steps of a client that has ``n`` examples."""
        if self.steps is not None:
            return n * 0 + self.steps
        assert self.epochs is not None
        return self.epochs * self._per_epoch(self.bounds(n)[1])

    def after(self, leading: int) -> Batches:
        """These batches after a leading phase of so many epochs, or steps if these batches are counted in steps.

        >>> Batches(10, epochs=1).after(2).count(25)
        9
        """
        if self.steps is not None:
            return replace(self, steps=self.steps + leading, leading=leading)
        return replace(self, epochs=(self.epochs or 0) + leading, leading=leading)

    def _per_epoch(self, n: Any) -> Any:
        return n * 0 + 1 if self.size is None else -(-n // self.size)

    def take(self, data: ClientData, k: Any, key: Any, augmentation: Any = None) -> dict[str, Any]:
        """The client's batch number ``k``, preprocessed.

        key: for the order of the examples. augmentation: key for random augmentation; None means no augmentation.
        """
        if self.leading:
            first = (
                self.leading if self.steps is not None else self.leading * self._per_epoch(self.bounds(data.size)[1])
            )
            return replace(self, leading=0).take(data, k, key, augmentation) | {LEADING: jnp.asarray(k) < first}
        start, n = self.bounds(data.size)
        data = data.in_random_order() if self.drawn else data
        augmentation = augmentation if self.augment else None
        if self.size is None:
            position = jnp.arange(data.cap, dtype=jnp.int32)
            return data.rows(start + position, position < n, augmentation)
        per_epoch = self._per_epoch(n)
        position = (k % per_epoch) * self.size + jnp.arange(self.size, dtype=jnp.int32)
        valid = position < n
        if self.shuffle:
            position = shuffled(jax.random.fold_in(key, k // per_epoch), jnp.where(valid, position, 0), n)
        return data.rows(start + position, valid, augmentation)


class LocalOptions(TypedDict, total=False):
    """The options of every algorithm with local steps: how its clients go over their data."""

    batch_size: int | None  # default 20; None takes all of a client's examples at once
    epochs: int | None  # passes over the client's data; default 1
    steps: int | None  # or: a fixed number of local steps
    shuffle: bool  # default True


Weighting = Literal["examples", "uniform"]
WEIGHTINGS = ("examples", "uniform")


def weight_of(weighting: Weighting, n: Any) -> Any:
    """The weight of a client with ``n`` examples."""
    n = jnp.asarray(n).astype(jnp.result_type(float))
    return n if weighting == "examples" else jnp.ones_like(n)


def batches_of(*, part: tuple[float, float] = (0.0, 1.0), **local: Unpack[LocalOptions]) -> Batches:
    """The batches that local options ask for.

    >>> batches_of(batch_size=10).count(25), batches_of(steps=7).count(25)
    (3, 7)
    """
    unknown = set(local) - set(LocalOptions.__annotations__)
    if unknown:
        raise ValueError(
            f"unknown option {sorted(unknown)[0]!r}; besides the algorithm's own options (such as client_lr) there are "
            f"those of local steps: {', '.join(LocalOptions.__annotations__)}"
        )
    epochs, steps = local.get("epochs"), local.get("steps")
    if epochs is None and steps is None:
        epochs = 1
    return Batches(local.get("batch_size", 20), epochs, steps, local.get("shuffle", True), part)


def _cut(xp: Any, fraction: float, n: Any) -> Any:
    """The row at a fraction of n, at least 1 for any positive fraction, so that no slice is empty."""
    n, real = xp.asarray(n), jnp.result_type(float) if xp is jnp else float
    row = xp.floor(fraction * n.astype(real) + 1e-6).astype(n.dtype)
    return xp.maximum(row, 1) if fraction > 0 else row
