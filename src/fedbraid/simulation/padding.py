"""A check before training: padded rows of a batch must not change the loss.

A batch has a fixed number of rows, and a client's last batch is filled with padding. A loss that ignores
``batch["mask"]`` trains on the padding, without an error. So every loss that is differentiated is computed once on a
batch with padding, and once more with other padding: the two values must agree.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedbraid.core import Algorithm, is_traced
from fedbraid.data.federated import Split
from fedbraid.local import APPLIES_MASK, MASK, LocalWork, rewriting

__all__ = ["CHEAP", "Loss", "check_padding", "filled", "recorded_losses", "shape_of"]

PyTree = Any
TOLERANCE = 1e-3
CHEAP = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # the loss runs only twice
_checked: set[str] = set()  # programs of losses that passed, so that a process checks each only once


class Loss(NamedTuple):
    """A loss as it was traced: its program, and the shapes of its arguments."""

    program: Any  # a closed jaxpr
    arguments: tuple[PyTree, ...]  # (params, batch, ...), as shapes


@contextlib.contextmanager
def recorded_losses() -> Iterator[list[Loss]]:
    """The losses that are differentiated while this context is open; see `fedbraid.local.value_and_grad`."""
    found: list[Loss] = []

    def record(function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            takes_batch = len(args) > 1 and isinstance(args[1], Mapping) and MASK in args[1]
            if takes_batch and not getattr(function, APPLIES_MASK, False):
                found.append(Loss(jax.make_jaxpr(function)(*args), jax.tree.map(shape_of, args)))
            return function(*args)

        return run

    with rewriting(record):
        yield found


def check_padding(losses: list[Loss], alg: Algorithm, params: PyTree, split: Split) -> None:
    """Refuse an algorithm whose loss depends on padding, if any batch of these clients has padding."""
    padded = _padded_client(alg, split)
    if padded is None:
        return
    for loss in losses:
        name = hashlib.sha256(str(loss.program).encode()).hexdigest()
        if name in _checked:
            continue
        values = _values(loss, params, split)
        if values is None:
            continue
        one, other = values
        scale = TOLERANCE * (np.abs(one) + np.abs(other)) + 1e-6
        if np.all(np.isfinite(one)) and np.any(~(np.abs(one - other) <= scale)):
            raise ValueError(
                f"the loss depends on padding: it changes from {float(np.ravel(one)[0]):.4g} to "
                f"{float(np.ravel(other)[0]):.4g} when rows of the batch whose mask is 0 change. {padded}. Let the "
                'loss apply batch["mask"], for example with fedbraid.local.masked_mean(values, batch["mask"]), and do '
                "not normalise over the batch"
            )
        _checked.add(name)


def _padded_client(alg: Algorithm, split: Split) -> str | None:
    """A sentence on a client whose batches have padding; None if there is no such client."""
    sizes = np.asarray(split.sizes)
    for exchange in alg.exchanges:
        if not isinstance(exchange.client, LocalWork):
            found = np.flatnonzero(sizes < sizes.max())
            if len(found):
                i = int(found[0])
                return f"{split.name_of(i)} has {sizes[i]} examples, and they are padded to {sizes.max()}"
            continue
        for fold in exchange.client.folds:
            used = np.asarray(fold.batches.bounds(sizes)[1])
            size = fold.batches.size or int(used.max())
            found = np.flatnonzero(used % size)
            if len(found):
                i = int(found[0])
                return (
                    f"{split.name_of(i)} has {used[i]} examples, so its last batch of {size} rows has "
                    f"{-used[i] % size} padded rows"
                )
    return None


def _values(loss: Loss, params: PyTree, split: Split) -> tuple[np.ndarray, np.ndarray] | None:
    """The loss with two kinds of padding; None if its arguments cannot be made from the data."""
    wanted = loss.arguments[1]
    rows = wanted[MASK].shape[0] if wanted[MASK].ndim == 1 else 0
    if rows < 2:
        return None
    at = np.arange(rows) % min(rows, split.num_examples)
    batch: dict[str, Any] = {name: jnp.asarray(np.asarray(a[:rows])[at]) for name, a in split.arrays.items()}
    batch[MASK] = (jnp.arange(rows) < (rows + 1) // 2).astype(wanted[MASK].dtype)
    if split.preprocess is not None:
        batch = dict(split.preprocess(batch, None, False))
    if jax.tree.map(shape_of, batch) != dict(wanted):
        return None
    other = {name: field if name == MASK else _other(field, batch[MASK]) for name, field in batch.items()}
    rng = np.random.default_rng(0)
    start = filled(params, loss.arguments[0], rng)
    rest = tuple(filled(None, argument, rng) for argument in loss.arguments[2:])
    consts = [filled(None if is_traced(const) else const, shape_of(const), rng) for const in loss.program.consts]
    options = CHEAP if jax.default_backend() == "cpu" else None

    def run(consts: list[Any], arguments: tuple[PyTree, ...]) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(loss.program.jaxpr, consts))(*jax.tree.leaves(arguments))

    compiled = jax.jit(run).lower(consts, (start, batch, *rest)).compile(compiler_options=options)
    one, two = (np.asarray(compiled(consts, (start, rows, *rest))[0]) for rows in (batch, other))
    return one, two


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _other(field: Any, mask: Any) -> Any:
    """``field`` with other values in padded rows: those of the row before, and 1 added to real numbers."""
    moved = jnp.roll(field, 1, axis=0)
    if jnp.issubdtype(field.dtype, jnp.floating):
        moved = moved + 1
    return jnp.where((mask > 0).reshape(-1, *[1] * (field.ndim - 1)), field, moved)


def filled(known: PyTree, like: PyTree, rng: np.random.Generator) -> PyTree:
    """Arrays shaped like ``like``: the known ones moved at random, so that no gradient is zero, or random ones."""

    def random(leaf: Any, value: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype) if value is None else value
        base = 0.0 if value is None else np.asarray(value)
        return jnp.asarray(base + 0.1 * rng.standard_normal(leaf.shape), leaf.dtype)

    leaves, tree = jax.tree.flatten(like)
    values = jax.tree.leaves(known)
    concrete = not any(is_traced(value) or isinstance(value, jax.ShapeDtypeStruct) for value in values)
    same = concrete and [jnp.shape(value) for value in values] == [leaf.shape for leaf in leaves]
    values = values if same else [None] * len(leaves)
    return jax.tree.unflatten(tree, [random(leaf, value) for leaf, value in zip(leaves, values, strict=True)])
