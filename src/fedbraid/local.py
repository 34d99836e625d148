"""Local work: how a client goes over its own batches, and how it differentiates a loss.

Client code never slices data. Shuffling, epochs or steps, the last partial batch, masks and held-out slices are here.
The same code serves the simulator's flat arrays and a deployed client's own arrays. A client built with
:func:`local_work` can be called (it folds over its batches). An engine can also take it apart, and run the steps of
many clients together.

Client code differentiates with :func:`value_and_grad` and :func:`grad`. They are jax's functions, but an engine may
first rewrite the loss (see :func:`rewriting`), for example to replace slow operations by fast ones, or compute its
gradient in parts of the batch (see :func:`dividing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, Report, StructureError, check_count, check_number, is_traced

__all__ = [
    "APPLIES_MASK",
    "HEAD",
    "LEADING",
    "NORM",
    "STATISTICS",
    "WEIGHTINGS",
    "WEIGHTS",
    "Batches",
    "ClientData",
    "Clients",
    "Fold",
    "LocalOptions",
    "LocalWork",
    "Statistics",
    "Weighting",
    "batches_of",
    "collecting_statistics",
    "dividing",
    "grad",
    "leaf_names",
    "local_work",
    "map_work",
    "masked_mean",
    "rewriting",
    "rewritten",
    "shuffled",
    "value_and_grad",
    "weight_of",
]

PyTree = Any
MASK = "mask"
APPLIES_MASK = "applies_mask"  # attribute of a loss that is known to ignore padded rows
HEAD = "head_leaves"  # attribute of a loss: patterns of the names of the model's last layer
NORM = "norm_leaves"  # attribute of a loss: names of the leaves of the model's normalisation layers
STATISTICS = "statistics"  # attribute of a loss whose model has statistics of batches; see `Statistics`
WEIGHTS = "example_weights"  # attribute of a loss: (params, batch) -> weight of each example in its mean; else the mask
LEADING = "leading"  # the field of a batch that says whether it belongs to the leading phase; see `Batches`
BYZANTINE = "byzantine"  # the field that marks attackers; see fedbraid.data.mark


class Clients(Protocol):
    """The examples of all clients as flat arrays: client ``i`` has rows ``offsets[i]`` to ``offsets[i + 1]``.

    ``fedbraid.data.Split`` is one.
    """

    @property
    def arrays(self) -> Mapping[str, Any]: ...
    @property
    def offsets(self) -> Any: ...
    @property
    def sizes(self) -> Any: ...
    @property
    def preprocess(self) -> Callable | None: ...


# --- derivatives: the one place where an engine may change a loss ----------------------------------------------------

_rewrite = jax.make_user_context(None)  # part of the key of jax's caches: each rewrite compiles its own program


def rewriting(change: Callable[[Callable], Callable] | None) -> AbstractContextManager[Any]:
    """For engines: a context in which functions are replaced by ``change(function)`` before they are differentiated.

    The changed function must have the same values and derivatives. None changes nothing.
    """
    return _rewrite(change)


def rewritten(function: Callable) -> Callable:
    """``function`` as the engine rewrites it, for derivatives other than those below, such as Hessians."""

    def run(*args: Any) -> Any:
        change = _rewrite.value
        return function(*args) if change is None else change(function)(*args)

    return run


_divide = jax.make_user_context(None)


def dividing(divide: Callable[[Callable, Callable], Callable] | None) -> AbstractContextManager[Any]:
    """For engines: a context in which the gradient of a loss may be computed in parts of its batch.

    ``divide(loss, function)`` returns a function with the results of ``function``, which takes the arguments of the
    loss and returns its gradient, or its value and its gradient. None changes nothing.
    """
    return _divide(divide)


def _divided(loss: Callable, function: Callable) -> Callable:
    def run(*args: Any) -> Any:
        divide = _divide.value
        return function(*args) if divide is None else divide(loss, function)(*args)

    return run


def leaf_names(params: PyTree) -> list[str]:
    """The names of a model's leaves.

    >>> leaf_names({"body": [jnp.zeros(2)], "head": {"w": jnp.zeros(1)}})
    ['body.0', 'head.w']
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path in paths]


class Statistics(NamedTuple):
    """The leaves of a model that every training step updates by a rule: running means of batch normalisation.

    leaves: their names. update: ``(params, batch, key) -> (loss, new statistics)``, the latter in the structure of the
    model, with None at the other leaves. The gradient of the loss with respect to these leaves is 0.
    """

    leaves: tuple[str, ...]
    update: Callable


_collected: ContextVar[list[tuple[PyTree, PyTree]] | None] = ContextVar("statistics", default=None)


@contextmanager
def collecting_statistics() -> Iterator[list[tuple[PyTree, PyTree]]]:
    """New statistics of the losses that are differentiated in this context: pairs of a model and its statistics."""
    seen: list[tuple[PyTree, PyTree]] = []
    token = _collected.set(seen)
    try:
        yield seen
    finally:
        _collected.reset(token)


def _with_statistics(statistics: Statistics) -> Callable:
    """``value_and_grad`` of a loss whose model has statistics, which are collected."""

    def run(params: PyTree, batch: Any, key: Any = None) -> tuple[Any, PyTree]:
        seen = _collected.get()
        if seen is None:
            raise StructureError(
                f"this model has batch normalisation: its statistics ({', '.join(statistics.leaves[:3])} ...) belong "
                "to the examples of one client, and this method would average them like weights. Use a method that "
                "keeps them on the clients (fedbn; fedper, fedrep and others with private leaves; the transform "
                "private), or a model with group or layer normalisation"
            )
        if _divide.value is not None:
            raise StructureError(
                "microbatch: this model has batch normalisation, whose statistics are those of a whole batch. Set "
                "microbatch = None, or use a model with group or layer normalisation"
            )
        (value, new), g = jax.value_and_grad(rewritten(statistics.update), has_aux=True)(params, batch, key)
        seen.append((params, new))
        return value, g

    return run


def value_and_grad(loss: Callable) -> Callable:
    """``jax.value_and_grad(loss)``, with respect to the first argument, of the loss as the engine rewrites it.

    >>> value, gradient = value_and_grad(lambda params, batch, key: jnp.sum(params**2))(jnp.array([3.0]), {}, None)
    >>> float(value), gradient.tolist()
    (9.0, [6.0])
    """
    _check_loss(loss)
    statistics = getattr(loss, STATISTICS, None)
    if statistics is not None:
        return _with_statistics(statistics)
    return _divided(loss, jax.value_and_grad(rewritten(loss)))


def grad(loss: Callable) -> Callable:
    """``jax.grad(loss)``, with respect to the first argument, of the loss as the engine rewrites it."""
    _check_loss(loss)
    if getattr(loss, STATISTICS, None) is not None:
        return lambda *args: value_and_grad(loss)(*args)[1]
    return _divided(loss, jax.grad(rewritten(loss)))


def _check_loss(loss: Any) -> None:
    """Refuse a loss that is not a function, such as a whole model."""
    if not callable(loss):
        hint = "; pass model.loss instead of the model" if callable(getattr(loss, "loss", None)) else ""
        raise TypeError(f"loss must be a function (params, batch, key) -> number, got a {type(loss).__name__}{hint}")


# --- a client's examples ---------------------------------------------------------------------------------------------


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


class Fold(NamedTuple):
    """One pass over a client's batches, in three parts that an engine may run itself."""

    start: Callable  # (down, client_state, key) -> carry
    step: Callable  # (carry, batch, key, down) -> carry; down is not in the carry because all clients share it
    finish: Callable  # (carry, down, client_state, n) -> result
    batches: Batches

    def run(self, down: PyTree, state: PyTree, data: ClientData, key: Any) -> Any:
        """The result of a fold over all batches of a client's data."""
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
        """Step number ``k``. Its batch and its random numbers depend only on ``k`` and the client's key."""
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
    """A client function: folds over its batches, run one after the other, and a report made of their results."""

    folds: tuple[Fold, ...]
    combine: Callable = _only  # (results of the folds, down, client_state, key) -> Report

    def __call__(self, down: PyTree, state: PyTree, data: ClientData, key: Any) -> Report:
        results = tuple(f.run(down, state, data, self.fold_key(key, i)) for i, f in enumerate(self.folds))
        return self.report(results, down, state, key)

    def fold_key(self, key: Any, i: int) -> Any:
        """The random key of fold ``i``."""
        return jax.random.fold_in(key, i)

    def report(self, results: tuple[Any, ...], down: PyTree, state: PyTree, key: Any) -> Report:
        """The client's report, from the results of its folds."""
        return self.combine(results, down, state, jax.random.fold_in(key, len(self.folds)))

    def count(self, n: Any) -> Any:
        """The number of local steps of a client that has ``n`` examples, over all folds."""
        return sum(f.batches.count(n) for f in self.folds)


def local_work(start: Callable, step: Callable, finish: Callable, batches: Batches) -> LocalWork:
    """A client function made of local steps, like a training loop: the usual way to write an algorithm.

    start: ``(down, state, key) -> carry``: before the first step, from the server's message and the client's state.
    step: ``(carry, batch, key, down) -> carry``: one local step.
    finish: ``(carry, down, state, n) -> Report``: the upload, from the last carry; n is the number of examples.
    batches: the batches that the steps go over.
    """
    return LocalWork((Fold(start, step, finish, batches),))


def map_work(alg: Algorithm, change: Callable[[Callable], Callable]) -> Algorithm:
    """``alg`` with ``change`` applied to its clients' local steps, or to the whole client if it has no steps."""

    def changed(client: Callable) -> Callable:
        if not isinstance(client, LocalWork):
            return change(client)
        return replace(client, folds=tuple(fold._replace(step=change(fold.step)) for fold in client.folds))

    return alg._replace(exchanges=tuple(e._replace(client=changed(e.client)) for e in alg.exchanges))
