"""The laws that hold for every algorithm: one function each, which raises `LawError` with what to look at.

The tests of this library call them on every algorithm and transform. `fedbraid.testing.check` calls them on yours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid import address
from fedbraid.core import Aggregate, Algorithm, Exchange, StructureError, message_shapes, reduce_reports
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import MASK, ClientData
from fedbraid.testing.reference import client_data, strong

__all__ = [
    "LawError",
    "agrees",
    "draws",
    "dtypes_stay",
    "is_pure",
    "keeps_invariant",
    "messages_fit_every_site",
    "moves_downhill",
    "numbered",
    "order_changes_nothing",
    "own_examples_only",
    "rates_may_be_traced",
    "same_bits",
    "weight_zero_counts_for_nothing",
]

PyTree = Any


class LawError(AssertionError):
    """An algorithm that breaks a law. The message names the law, what was seen, and the usual causes."""


def _break(law: str, seen: str, causes: str) -> LawError:
    return LawError(f"law {law!r}: {seen}. {causes}")


def _difference(a: PyTree, b: PyTree, tolerance: float) -> str | None:
    """The first leaf in which two trees differ by more than rounding; None if there is none."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return f"the trees are {jax.tree.structure(a)} and {jax.tree.structure(b)}"
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"leaf {jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
        if not np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=False):
            largest = np.max(np.abs(x.astype(float) - y.astype(float)))
            return f"leaf {jax.tree_util.keystr(path) or '(the whole)'} differs by {largest:.3g}"
    return None


def agrees(law: str, what: str, a: PyTree, b: PyTree, *, causes: str, tolerance: float = 1e-9) -> None:
    """Two results are the same to rounding."""
    if (seen := _difference(a, b, tolerance)) is not None:
        raise _break(law, f"{what}: {seen}", causes)


def same_bits(law: str, what: str, a: PyTree, b: PyTree, *, causes: str) -> None:
    """Two results are the same bit for bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if np.asarray(x).tobytes() != np.asarray(y).tobytes():
            raise _break(law, what, causes)


# --- the causes: what to look at --------------------------------------------------------------------------------------

ENGINE = (
    "The compiled engine runs clients together, pads the cohort with empty slots of weight 0, and loses some uploads. "
    'Usual causes: a reducer with kind="gather" counts rows of weight 0; `lift` ignores its weight; `receive` uses a '
    "fixed number of clients instead of aggregate.count; a client function has side effects"
)
ORDER = (
    "The number of a client, its position in the data and the order of uploads carry no meaning. Usual causes: a "
    "client reads data.offset; a reducer takes the first row, or weights rows by their position"
)
RESUME = (
    "Everything that a run needs must be in the server's state or the clients' states. Usual cause: `receive` or a "
    "client function keeps something in a Python variable"
)
DEPLOYED = (
    "A site has only its own examples, and every message is serialised. Usual causes: the client reads more of `data` "
    "than its own batches; the algorithm keeps something in a Python variable"
)


# --- laws of the parts ------------------------------------------------------------------------------------------------


def dtypes_stay(alg: Algorithm, params: PyTree, split: Split) -> None:
    """With float32 parameters and data, states and messages fit together also where JAX allows float64."""

    def single(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        return leaf.astype(np.float32) if np.issubdtype(leaf.dtype, np.floating) else leaf

    arrays = {name: single(array) for name, array in split.arrays.items()}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        try:
            message_shapes(alg, jax.tree.map(single, params), data_shapes(Split(arrays, split.offsets)))
        except StructureError as error:
            causes = "Usual cause: a NumPy float64 array in the arithmetic; use Python numbers, or .astype(leaf.dtype)"
            raise _break("dtype", f"float32 parameters do not stay float32: {error}", causes) from error


def is_pure(makes: Sequence[Algorithm], params: PyTree, split: Split) -> None:
    """Traced twice (of a factory: made twice), an algorithm's functions compute the same bits."""
    causes = "Random numbers come from the key, never from NumPy or `random`; nothing is kept in a Python variable"
    key, data = jax.random.key(0), client_data(split, 0)
    for pair in zip(*(alg.exchanges for alg in makes), strict=True):
        server, state = strong(makes[0].init(params)), strong(makes[0].init_client(params))
        down = strong(pair[0].send(server))
        report, weight = jax.eval_shape(pair[0].client, down, state, data, key), jnp.ones(())
        reduced = jax.eval_shape(lambda up, e=pair[0]: e.reducer.finish(*_one(e, up)), report.up)
        aggregate = Aggregate(
            jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), reduced), weight, weight, weight
        )
        for what, given in (("client", (down, state, data, key)), ("receive", (server, aggregate, key))):
            # new functions, because JAX keeps what it traced by the function's identity
            functions = [getattr(exchange, what) for exchange in pair]
            anew = [lambda *args, f=function: f(*args) for function in functions]
            traced = [jax.make_jaxpr(function)(*given) for function in anew]
            if _text(traced[0]) == _text(traced[1]):
                continue
            first, second = (jax.jit(function)(*given) for function in anew)
            seen = f"`{what}` of {pair[0].name!r}, traced twice, gives different results"
            same_bits("purity", seen, first, second, causes=causes)


def _one(exchange: Exchange, up: PyTree) -> tuple:
    lifted, one = exchange.reducer.lift(up, jnp.ones(())), jnp.ones(())
    if exchange.reducer.kind == "gather":
        return jax.tree.map(lambda leaf: leaf[None], lifted), one[None], one
    return lifted, one, one


def _text(traced: Any) -> str:
    """A traced function as text, with its constants, without addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(traced)) + "".join(repr(np.asarray(c).tobytes()) for c in _consts(traced))


def _consts(traced: Any) -> list:
    return [c for c in traced.consts if not jnp.issubdtype(jnp.result_type(c), jax.dtypes.prng_key)]


def own_examples_only(alg: Algorithm, params: PyTree, split: Split, *, tolerance: float = 1e-9) -> None:
    """A client's report does not depend on padding or on the examples of other clients."""
    causes = (
        "A batch has padded rows, whose values mean nothing. Usual causes: a loss or a mean over a batch without "
        'batch["mask"] (use masked_mean); reading data.arrays instead of batches'
    )
    server, state, rows = strong(alg.init(params)), strong(alg.init_client(params)), np.arange(split.num_examples)
    for exchange in alg.exchanges:
        down = strong(exchange.send(server))

        def work(shift: Any, data: ClientData, e: Exchange = exchange, down: PyTree = down) -> PyTree:
            def poison(batch: dict, key: Any, train: bool) -> dict:
                batch = batch if split.preprocess is None else split.preprocess(batch, key, train)
                return {name: a if name == MASK else _poisoned(a, batch[MASK] > 0, shift) for name, a in batch.items()}

            return e.client(down, state, replace(data, preprocess=poison), jax.random.key(0))

        compiled = jax.jit(work)
        for client in range(split.num_clients):
            data = client_data(split, client)
            own = jnp.asarray((rows >= split.offsets[client]) & (rows < split.offsets[client + 1]))
            other = {name: _poisoned(array, own, 1000) for name, array in data.arrays.items()}
            what = f"the report of {exchange.name!r} changes with padded rows or with examples of other clients"
            pair = compiled(jnp.int32(0), data), compiled(jnp.int32(1000), replace(data, arrays=other))
            agrees("mask", what, *pair, causes=causes, tolerance=tolerance)


def _poisoned(array: Any, real: Any, shift: Any) -> Any:
    """Other values in the rows that are not real: floats moved by ``shift``, others 0. A shift of 0 changes nothing."""
    wide = real.reshape(-1, *[1] * (array.ndim - 1))
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    other = array + jnp.asarray(shift, array.dtype) if floats else jnp.where(shift == 0, array, jnp.zeros_like(array))
    return jnp.where(wide, array, other)


def draws(alg: Algorithm, params: PyTree, split: Split) -> bool:
    """Whether a client's report depends on its random key."""
    server, state, data = strong(alg.init(params)), strong(alg.init_client(params)), client_data(split, 0)
    for exchange in alg.exchanges:
        down, work = strong(exchange.send(server)), jax.jit(exchange.client)
        a, b = (work(down, state, data, jax.random.key(seed)).up for seed in (0, 1))
        if _difference(a, b, 1e-9) is not None:
            return True
    return False


def messages_fit_every_site(alg: Algorithm, params: PyTree, split: Split) -> None:
    """Messages have the same shapes for every amount of data."""
    causes = "The shapes of messages may depend on the parameters only, so that the server can reduce all uploads"
    shapes = [
        message_shapes(alg, params, data_shapes({name: array[:rows] for name, array in split.arrays.items()}))
        for rows in (2, split.num_examples)
    ]
    for small, large in zip(*shapes, strict=True):
        if jax.tree.leaves(small) != jax.tree.leaves(large):
            raise _break("messages", f"the messages of {small.name!r} depend on the number of examples", causes)


def weight_zero_counts_for_nothing(alg: Algorithm, params: PyTree, split: Split) -> None:
    """For the reduction itself, on uploads with the algorithm's structure and random numbers."""
    rng = np.random.default_rng(0)

    def some(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=(4, *leaf.shape)), leaf.dtype)
        return jnp.asarray(rng.integers(0, 2, (4, *leaf.shape)), leaf.dtype)

    causes = "Uploads that did not arrive have weight 0. Usual cause: the reducer's `lift` or `finish` ignores weights"
    for exchange, shapes in zip(alg.exchanges, message_shapes(alg, params, data_shapes(split)), strict=True):
        four = jax.tree.map(some, shapes.up)
        three = jax.tree.map(lambda leaf: leaf[:3], four)
        reduce = jax.jit(partial(reduce_reports, exchange.reducer))
        plain = reduce(three, jnp.array([1.0, 2.0, 1.5]))
        padded = reduce(four, jnp.array([1.0, 2.0, 1.5, 0.0]))
        agrees("weight", f"exchange {exchange.name!r}: an upload of weight 0 counts", plain, padded, causes=causes)


# --- laws of runs -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def numbered(order: Sequence[int]) -> Iterator[None]:
    """Client ``i`` has the random keys of client ``order[i]``, on which nothing else may depend."""
    key, noise, rows = address.client_key, address.client_noise, address.rows_key
    old = jnp.asarray(np.asarray(order))
    with (
        mock.patch.object(address, "client_key", lambda exchange, i: key(exchange, old[i])),
        mock.patch.object(address, "client_noise", lambda exchange, i: noise(exchange, old[i])),
        mock.patch.object(address, "rows_key", lambda seed_key, i: rows(seed_key, old[i])),
    ):
        yield


def order_changes_nothing(plain: Any, moved: Any, order: Sequence[int], *, tolerance: float = 1e-9) -> None:
    """``moved`` is the run in which client ``order[i]`` of the data is client ``i``."""
    there = (plain.params, plain.server, jax.tree.map(lambda leaf: leaf[np.asarray(order)], plain.states))
    here = (moved.params, moved.server, moved.states)
    what = "with the clients in another order the result is another one"
    agrees("order", what, here, there, causes=ORDER, tolerance=tolerance)


def moves_downhill(before: PyTree, after: PyTree, gradient: PyTree) -> None:
    """A round with all clients moves the model against the gradient of the mean loss."""
    parts = zip(*map(jax.tree.leaves, (before, after, gradient)), strict=True)
    along = float(sum(jnp.vdot(a - b, g) for a, b, g in parts))
    if not along > 0:
        causes = "The server moves along -pseudograd: an upload is `start - end`, and `receive` subtracts it"
        raise _break("sign", f"the model moved up the gradient (inner product {-along:.3g})", causes)


def keeps_invariant(invariant: Callable[[PyTree, PyTree], Any], *runs: Any, tolerance: float = 1e-9) -> None:
    """``invariant(server, states)`` is the largest violation; it is 0 with all clients and with lost uploads."""
    for run in runs:
        if not (worst := float(invariant(run.server, run.states))) < tolerance:
            causes = (
                "A client's state is kept only if its upload arrived. Usual causes: a step for the cohort instead of "
                "aggregate.count of aggregate.population clients; a client state that the server cannot know"
            )
            raise _break("invariant", f"violated by {worst:.3g}", causes)


def rates_may_be_traced(
    run: Callable[[Mapping[str, Any]], PyTree],
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    alone: Sequence[PyTree] = (),
) -> None:
    """Two values of all rates at once, traced in one program, give what two runs with plain numbers give.

    run: (rates) -> result. alone: the results with the first and the second values, where they are known.
    """
    causes = (
        "A sweep traces all its points in one program. Usual causes: float(), int() or `if` on a rate; check rates "
        "with fedbraid.core.check_number, which lets traced values through"
    )
    known = [alone[i] if i < len(alone) else run(dict(rates)) for i, rates in enumerate((first, second))]
    if _difference(known[0], known[1], 0.0) is None:
        raise _break("rates", f"the rates {sorted(second)} have no effect", "Give a second value that has one")
    try:
        together = jax.vmap(run)({name: jnp.array([first[name], second[name]]) for name in second})
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, TypeError) as error:
        raise _break("rates", f"the rates {sorted(second)} cannot be traced: {error}".split("\n")[0], causes) from error
    for i, one in enumerate(known):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        agrees("rates", "a sweep differs from a single run", own, one, causes=causes)
