"""Local work: how a client walks over its own batches.

Client code never slices data. Shuffling, epochs against steps, the last partial batch, masks and held-out slices live
here, in one place that serves the simulator's flat arrays and a deployed client's own arrays alike. A client built
with :func:`local_work` can be called (it folds over its batches) or taken apart by an engine that runs the steps of
many clients together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, Report, check_count, check_number, is_traced

__all__ = [
    "WEIGHTINGS",
    "Batches",
    "ClientData",
    "Fold",
    "LocalOptions",
    "LocalWork",
    "Weighting",
    "batches_of",
    "local_work",
    "map_inputs",
    "map_report",
    "map_work",
    "masked_mean",
    "shuffled",
    "weight_of",
]

PyTree = Any
MASK = "mask"


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "offset", "size"], meta_fields=["cap", "preprocess"])
@dataclass(frozen=True)
class ClientData:
    """One client's examples: rows ``offset`` to ``offset + size`` of flat arrays.

    cap: a static bound on ``size``; work on all of a client's examples at once is padded to it.
    preprocess: ``(batch, key, train) -> batch``, applied to every batch that is taken; hashable. None: no change.
    """

    arrays: dict[str, Any]
    offset: Any
    size: Any
    cap: int
    preprocess: Callable | None = None

    @classmethod
    def of(cls, arrays: dict[str, Any]) -> ClientData:
        """A client's own arrays, as a deployed client holds them."""
        n = len(next(iter(arrays.values())))
        return cls({k: jnp.asarray(v) for k, v in arrays.items()}, jnp.int32(0), jnp.int32(n), n)

    def rows(self, index: Any, valid: Any, key: Any = None) -> dict[str, Any]:
        """The preprocessed batch of rows ``index`` (counted within the client); ``valid`` becomes the mask.

        key: of the preprocessing's random augmentation; None asks for none, as in evaluation.
        """
        at = self.offset + jnp.where(valid, index, 0)
        batch = {name: jnp.take(a, at, axis=0, mode="clip") for name, a in self.arrays.items()}
        batch[MASK] = valid.astype(jnp.result_type(float))
        return batch if self.preprocess is None else self.preprocess(batch, key, key is not None)

    def everything(self, key: Any = None) -> dict[str, Any]:
        """All of the client's examples as one preprocessed batch, padded to ``cap``; ``key`` as in `rows`."""
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
    """A 32-bit finaliser: every input bit reaches the top bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


SWAPS = 14  # enough that 240,000 permutations of 6 look uniform to a chi-squared test


def shuffled(key: Any, position: Any, n: Any) -> Any:
    """Element ``position`` of a random permutation of ``0 .. n-1``, without making the permutation.

    The swap-or-not shuffle (Hoang, Morris, Rogaway, 2012): in each round a position and its mirror image about a
    random point change places, or not, by a hash that both agree on. It is exact for every ``n``, traced or not, needs
    no memory and no sort, and does not depend on any padding, so the simulator and a deployed client agree.

    >>> import jax
    >>> sorted(int(i) for i in shuffled(jax.random.key(0), jnp.arange(7), 7))
    [0, 1, 2, 3, 4, 5, 6]
    """
    if not is_traced(n) and int(n) == 1:  # as a constant it sends XLA's simplifier round in circles
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
    """Which batches a client walks over.

    size: examples per batch; None takes all of a client's examples as one batch.
    epochs or steps: passes over the client's data, or a fixed number of local steps.
    shuffle: a new order in every epoch, from the client's key.
    part: the slice of the client's examples to use, as fractions of its rows: (0, 0.8) and (0.8, 1) share nothing.
    augment: whether the data's preprocessing augments these batches at random, as in training.
    """

    size: int | None = 20
    epochs: int | None = None
    steps: int | None = None
    shuffle: bool = True
    part: tuple[float, float] = (0.0, 1.0)
    augment: bool = True

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
        """First row and number of rows used of a client's ``n`` (arrays or NumPy); never less than one row."""
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

    def _per_epoch(self, n: Any) -> Any:
        return n * 0 + 1 if self.size is None else -(-n // self.size)

    def take(self, data: ClientData, k: Any, key: Any, augmentation: Any = None) -> dict[str, Any]:
        """The client's batch number ``k``, preprocessed.

        key: of the order of the examples. augmentation: key of the random augmentation; None asks for none.
        """
        start, n = self.bounds(data.size)
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
    """What every algorithm with local steps takes: how its clients walk over their data."""

    batch_size: int | None  # default 20; None takes all of a client's examples at once
    epochs: int | None  # passes over the client's data; default 1
    steps: int | None  # or: a fixed number of local steps
    shuffle: bool  # default True


Weighting = Literal["examples", "uniform"]
WEIGHTINGS = ("examples", "uniform")


def weight_of(weighting: Weighting, n: Any) -> Any:
    """How much a client with ``n`` examples counts."""
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
            f"unknown option {sorted(unknown)[0]!r}; local steps take {', '.join(LocalOptions.__annotations__)}"
        )
    epochs, steps = local.get("epochs"), local.get("steps")
    if epochs is None and steps is None:
        epochs = 1
    return Batches(local.get("batch_size", 20), epochs, steps, local.get("shuffle", True), part)


def _cut(xp: Any, fraction: float, n: Any) -> Any:
    """The row at a fraction of n, at least 1 for any positive fraction: a slice that exists is never empty."""
    row = xp.floor(fraction * n + 1e-6).astype(n.dtype) if hasattr(n, "dtype") else int(fraction * n + 1e-6)
    return xp.maximum(row, 1) if fraction > 0 else row


class Fold(NamedTuple):
    """One walk over a client's batches, in three parts that an engine may run itself."""

    start: Callable  # (down, client_state, key) -> carry
    step: (
        Callable  # (carry, batch, key, down) -> carry; the message is shared by all clients, so it is no part of carry
    )
    finish: Callable  # (carry, down, client_state, n) -> result
    batches: Batches

    def run(self, down: PyTree, state: PyTree, data: ClientData, key: Any) -> Any:
        carry = jax.lax.fori_loop(
            0,
            self.batches.count(data.size),
            lambda k, carry: self.advance(carry, k, down, data, key),
            self.begin(down, state, key),
        )
        return self.end(carry, down, state, data)

    def begin(self, down: PyTree, state: PyTree, key: Any) -> PyTree:
        """The carry before the first step."""
        return self.start(down, state, jax.random.fold_in(key, 0))

    def advance(self, carry: PyTree, k: Any, down: PyTree, data: ClientData, key: Any) -> PyTree:
        """Step number ``k``: the batch and the randomness it gets depend on ``k`` and the client's key alone."""
        step_key = jax.random.fold_in(jax.random.fold_in(key, 2), k)
        batch = self.batches.take(data, k, jax.random.fold_in(key, 1), step_key)
        return self.step(carry, batch, step_key, down)

    def end(self, carry: PyTree, down: PyTree, state: PyTree, data: ClientData) -> Any:
        """The fold's result."""
        return self.finish(carry, down, state, self.batches.bounds(data.size)[1])


def _only(results: tuple, down: PyTree, state: PyTree, key: Any) -> Report:
    del down, state, key
    return results[0]


@dataclass(frozen=True)
class LocalWork:
    """A client function made of folds over its batches, run one after the other, and what is reported of them."""

    folds: tuple[Fold, ...]
    combine: Callable = _only  # (results of the folds, down, client_state, key) -> Report

    def __call__(self, down: PyTree, state: PyTree, data: ClientData, key: Any) -> Report:
        results = tuple(f.run(down, state, data, self.fold_key(key, i)) for i, f in enumerate(self.folds))
        return self.report(results, down, state, key)

    def fold_key(self, key: Any, i: int) -> Any:
        """The randomness of fold ``i`` of a client's work."""
        return jax.random.fold_in(key, i)

    def report(self, results: tuple, down: PyTree, state: PyTree, key: Any) -> Report:
        """What the client sends, from the results of its folds."""
        return self.combine(results, down, state, jax.random.fold_in(key, len(self.folds)))

    def count(self, n: Any) -> Any:
        """Local steps of a client that has ``n`` examples, over all folds."""
        return sum(f.batches.count(n) for f in self.folds)


def local_work(start: Callable, step: Callable, finish: Callable, batches: Batches) -> LocalWork:
    """A client that folds ``step`` over its own batches: the usual way to write a client function."""
    return LocalWork((Fold(start, step, finish, batches),))


_CHANGE = 0x5EED  # the purpose of a transform's own randomness, apart from what the client draws


def map_report(client: Callable, change: Callable) -> Callable:
    """The client with its report changed by ``change(report, down, client_state, key)``, still cut into its steps.

    ``client_state`` is the state as it was before the round.
    """
    if isinstance(client, LocalWork):
        inner = client.combine

        def combine(results: tuple, down: PyTree, state: PyTree, key: Any) -> Report:
            return change(inner(results, down, state, key), down, state, jax.random.fold_in(key, _CHANGE))

        return replace(client, combine=combine)

    def changed(down: PyTree, state: PyTree, data: ClientData, key: Any) -> Report:
        return change(client(down, state, data, key), down, state, jax.random.fold_in(key, _CHANGE))

    return changed


def map_work(alg: Algorithm, change: Callable[[Callable], Callable]) -> Algorithm:
    """``alg`` with the functions that do its clients' work, the local steps where there are such, changed."""

    def changed(client: Callable) -> Callable:
        if not isinstance(client, LocalWork):
            return change(client)
        return replace(client, folds=tuple(fold._replace(step=change(fold.step)) for fold in client.folds))

    return alg._replace(exchanges=tuple(e._replace(client=changed(e.client)) for e in alg.exchanges))


def _same(value: PyTree) -> PyTree:
    return value


def map_inputs(client: Callable, *, down: Callable = _same, state: Callable = _same) -> Callable:
    """The client fed with ``down(message)`` and ``state(client_state)``: for transforms that put more into either."""
    if isinstance(client, LocalWork):

        def adapt(fold: Fold) -> Fold:
            return Fold(
                start=lambda d, s, key: fold.start(down(d), state(s), key),
                step=lambda carry, batch, key, d: fold.step(carry, batch, key, down(d)),
                finish=lambda carry, d, s, n: fold.finish(carry, down(d), state(s), n),
                batches=fold.batches,
            )

        inner = client.combine
        return LocalWork(
            tuple(adapt(fold) for fold in client.folds),
            lambda results, d, s, key: inner(results, down(d), state(s), key),
        )
    return lambda d, s, data, key: client(down(d), state(s), data, key)
