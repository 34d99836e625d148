"""A check before training with microbatches: the loss must be a mean over the examples of a batch.

``engine.microbatch`` computes the gradient of a batch as a weighted mean of the gradients of its parts. This is wrong
for a loss that sums over the batch, normalises over it or compares its examples. So every gradient that would be
divided is computed once on a few examples, whole and in parts: the two must agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedbraid.core import Algorithm, is_traced
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import MASK, dividing
from fedbraid.lowering.microbatch import has_batch, in_microbatches
from fedbraid.lowering.options import LoweringOptions
from fedbraid.notices import notice
from fedbraid.simulation.padding import CHEAP, filled, shape_of

__all__ = ["check_means"]

PyTree = Any
ROWS, PART = 5, 2  # examples of the check: microbatches of 2, 1 and 0 real ones
REAL = 3
TOLERANCE = 2e-3
_checked: set[str] = set()  # programs that passed, so that a process checks each only once

# A loss with random numbers gives different draws whole and in parts. Here every draw has the same bits, so that it
# can be compared.
_SAME_BITS = jax.extend.random.define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros(1, jnp.uint32),
    split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
    random_bits=lambda key, width, shape: jnp.full(shape, 0x5A5A5A5A >> max(0, 32 - width), jnp.dtype(f"uint{width}")),
    fold_in=lambda key, data: key,
    name="same_bits",
    tag="same",
)


def _same_bits(shape: tuple[int, ...]) -> Any:
    return jnp.broadcast_to(jax.random.key(0, impl=_SAME_BITS), shape)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class _Both(NamedTuple):
    """A gradient as it was traced on a few examples, whole and in parts."""

    program: Any  # a closed jaxpr with both results, one after the other
    arguments: tuple[PyTree, ...]  # (params, batch, ...), as shapes


def check_means(alg: Algorithm, params: PyTree, split: Split, options: LoweringOptions) -> None:
    """Refuse ``microbatch`` for an algorithm whose losses are not means over examples."""
    if options.microbatch is None:
        return
    with jax.default_matmul_precision("float32"):
        found = _gradients(alg, params, split, options.microbatch)
    for both in found:
        name = hashlib.sha256(str(both.program).encode()).hexdigest()
        if name in _checked:
            continue
        error = _difference(both, params, split)
        if error is None:
            notice(
                f"microbatch={options.microbatch}: it could not be checked with the examples of this run whether the "
                "loss is a mean over the examples of a batch. If it is not, gradients are wrong"
            )
        elif not error <= TOLERANCE:
            raise ValueError(
                f"microbatch = {options.microbatch}: the gradient of the loss over a batch is not the mean of those "
                f"over its parts; they differ by {error:.2g} of their norm. The loss must be a mean over the examples "
                'whose batch["mask"] is 1, such as fedbraid.local.masked_mean(values, batch["mask"]). A loss that '
                "sums, normalises over the batch or compares its examples (SAM, contrastive losses) needs microbatch = "
                "None. If examples have other weights than the mask, set loss.example_weights = (params, batch) -> "
                "weights"
            )
        _checked.add(name)


def _gradients(alg: Algorithm, params: PyTree, split: Split, size: int) -> list[_Both]:
    """The gradients that the clients of an algorithm compute in microbatches."""
    found: list[_Both] = []

    def record(loss: Callable, function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            if has_batch(args) and args[1][MASK].shape[0] > size:
                shapes = _few(args)

                def both(*args: Any) -> tuple[PyTree, PyTree]:
                    return function(*args), in_microbatches(loss, function, PART)(*args)

                with dividing(None):
                    found.append(_Both(jax.make_jaxpr(both)(*shapes), shapes))
            return function(*args)

        return run

    key, data = jax.eval_shape(lambda: jax.random.key(0)), data_shapes(split)
    server, state = jax.eval_shape(alg.init, params), jax.eval_shape(alg.init_client, params)
    for exchange in alg.exchanges:
        down = jax.eval_shape(exchange.send, server)

        def client(*args: Any, exchange: Any = exchange) -> Any:
            with dividing(record):
                return exchange.client(*args)

        jax.eval_shape(client, down, state, data, key)
    return found


def _few(args: tuple) -> tuple[PyTree, ...]:
    """The shapes of a loss's arguments with a batch of a few examples, and keys that always give the same bits."""

    def rows(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(leaf)
        return jax.ShapeDtypeStruct((ROWS, *shape[1:]) if shape else (), jnp.result_type(leaf))

    def rest(leaf: Any) -> jax.ShapeDtypeStruct:
        found = shape_of(leaf)
        return jax.eval_shape(lambda: _same_bits(found.shape)) if _is_key(found) else found

    params, batch, *others = args
    return jax.tree.map(shape_of, params), jax.tree.map(rows, dict(batch)), *jax.tree.map(rest, others)


def _difference(both: _Both, params: PyTree, split: Split) -> float | None:
    """How much the two results differ, as a part of their norm; None if it cannot be computed from the data."""
    batch = _batch(both.arguments[1], split)
    if batch is None:
        return None
    rng = np.random.default_rng(0)
    start = filled(params, both.arguments[0], rng)
    rest = jax.tree.map(
        lambda leaf: _same_bits(leaf.shape) if _is_key(leaf) else filled(None, leaf, rng), both.arguments[2:]
    )
    # known constants keep their values: a constant may be there twice, in the whole and in the parts
    consts = [filled(None, shape_of(const), rng) if is_traced(const) else const for const in both.program.consts]

    def run(consts: list[Any], arguments: tuple[PyTree, ...]) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(both.program.jaxpr, consts))(*jax.tree.leaves(arguments))

    options = CHEAP if jax.default_backend() == "cpu" else None
    compiled = jax.jit(run).lower(consts, (start, batch, *rest)).compile(compiler_options=options)
    results = [np.asarray(leaf, np.float64) for leaf in compiled(consts, (start, batch, *rest))]
    whole, parts = results[: len(results) // 2], results[len(results) // 2 :]
    if not all(np.all(np.isfinite(leaf)) for leaf in whole):
        return None
    size = float(np.sqrt(sum(np.sum(leaf**2) for leaf in whole)))
    # 0.01: a leaf whose gradient is 0 up to rounding has no direction of its own
    ratios = [
        np.linalg.norm(np.ravel(a - b)) / (np.linalg.norm(np.ravel(a)) + 0.01 * size + 1e-6)
        for a, b in zip(whole, parts, strict=True)
    ]
    return float(np.max(ratios))  # NaN stays NaN


def _batch(wanted: dict[str, Any], split: Split) -> dict[str, Any] | None:
    """A few examples of the data with padding; None if a batch of the run cannot be made from them."""
    at = np.linspace(0, split.num_examples - 1, ROWS).astype(int)
    fields = {name: np.array(array[at]) for name, array in split.arrays.items()}
    for name, field in fields.items():
        if field.ndim > 1 and np.issubdtype(field.dtype, np.integer):  # tokens: examples with different numbers of them
            flat = field.reshape(ROWS, -1)
            flat[1, flat.shape[1] // 2 :] = 0
            fields[name] = flat.reshape(field.shape)
    batch: dict[str, Any] = {name: jnp.asarray(field) for name, field in fields.items()}
    batch[MASK] = (jnp.arange(ROWS) < REAL).astype(wanted[MASK].dtype)
    if split.preprocess is not None:
        batch = dict(split.preprocess(batch, None, False))
    batch |= {n: jnp.zeros((), s.dtype) for n, s in wanted.items() if s.shape == () and n not in batch}
    return batch if jax.tree.map(shape_of, batch) == wanted else None
