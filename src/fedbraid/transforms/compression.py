"""Compressed uploads: stochastic quantization and top-k, with error feedback.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic. QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding. NeurIPS 2017. S. Stich, J.-B. Cordonnier, M. Jaggi. Sparsified SGD with Memory. NeurIPS 2018. S. P.
Karimireddy, Q. Rebjock, S. Stich, M. Jaggi. Error Feedback Fixes SignSGD and other Gradient Compression Schemes. ICML
2019.

Each array of an upload is replaced by a code (:mod:`fedbraid.transforms.codes`), whose bytes are sent:

    quantize   8 or 4 bits a number: 127 or 7 steps for each sign, of max |x| / steps, and one scale per array
    qsgd       ``levels`` steps for each sign, of ||x|| / levels, per bucket of entries; base 2 levels + 1 digits
    top_k      the entries of largest magnitude, with their indices

An array that a code would not make smaller is sent unchanged. Quantization is unbiased. Top-k is not, so by default it
runs with error feedback: a client sends C(u + e) and keeps e <- u + e - C(u + e), for the pseudograd. So the error is
sent in later rounds, and ||e|| stays bounded because the error of C is a fixed share of its input. If an upload is
lost, the client's state does not change: e is kept. The aux has no residual. An algorithm whose state depends on its
aux reconciles the state with the decoded aux, which has the effect of error feedback.

Sends: the codes up, the message down unchanged. Keeps: with error feedback, one array like the model on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, Down, Exchange, Report, StructureError, Up, check_choice, check_count, check_number
from fedbraid.transforms.clients import map_report
from fedbraid.transforms.codes import Norm, Quantized, Sparse, decoded, place_dtype, quantized, quantized_bytes, sparse
from fedbraid.transforms.uploads import (
    Extended,
    change_exchanges,
    extend_client,
    recode,
    refuse_partial,
    refuse_sealed,
    refuse_whole,
    through,
)

__all__ = ["qsgd", "quantize", "top_k"]

PyTree = Any
Encode = Callable[[PyTree, Any], PyTree]  # (tree, key) -> tree with codes


def quantize(
    alg: Algorithm,
    *,
    bits: int = 8,
    bucket: int | None = None,
    error_feedback: bool = False,
    aux: bool = True,
    exchanges: Sequence[str] | None = None,
) -> Algorithm:
    """Uploads of 8 or 4 bits a number, rounded at random without bias.

    bucket: number of entries that share a scale; None means one scale per array.
    error_feedback: clients keep the rounding error, and add it to their next upload. aux: whether to compress aux, too.

    >>> from fedbraid import cost, fedavg
    >>> alg = quantize(fedavg(lambda params, batch, key: jnp.sum(params**2)), bits=4)
    >>> cost(alg, jnp.zeros(1000), {"x": np.zeros((5, 1), np.float32)}).up
    504
    """
    check_choice("bits", bits, (8, 4))
    levels = 2 ** (bits - 1) - 1
    return _quantize("quantize", alg, levels, "max", bucket, error_feedback, aux, exchanges)


def qsgd(
    alg: Algorithm,
    *,
    levels: int = 7,
    bucket: int | None = 512,
    error_feedback: bool = False,
    aux: bool = True,
    exchanges: Sequence[str] | None = None,
) -> Algorithm:
    """QSGD: ``levels`` steps for each sign, in units of the Euclidean norm of a bucket of entries.

    A byte holds five numbers with 1 level, three with 2, two with 3 to 7, one with 8 to 127.

    >>> from fedbraid import cost, fedavg
    >>> alg = qsgd(fedavg(lambda params, batch, key: jnp.sum(params**2)), levels=1, bucket=500)
    >>> cost(alg, jnp.zeros(1000), {"x": np.zeros((5, 1), np.float32)}).up
    208
    """
    if check_count("levels", levels) > 127:
        raise ValueError(f"levels must be at most 127, so that a number fits into a byte, got {levels}")
    return _quantize("qsgd", alg, levels, "l2", bucket, error_feedback, aux, exchanges)


def _quantize(
    name: str,
    alg: Algorithm,
    levels: int,
    norm: Norm,
    bucket: int | None,
    error_feedback: bool,
    aux: bool,
    exchanges: Sequence[str] | None,
) -> Algorithm:
    if bucket is not None:
        check_count("bucket", bucket)

    def encoder(shrink: bool) -> Encode:
        def one(array: Any, key: Any) -> Any:
            if quantized_bytes(array.size, array.dtype.itemsize, levels, bucket) >= array.size * array.dtype.itemsize:
                return array
            return quantized(key, array, levels=levels, norm=norm, bucket=bucket, shrink=shrink)

        return _each_float(one, (Quantized,), f"{name} over quantized uploads: quantize once")

    return _compress(name, alg, encoder(error_feedback), encoder(False), Quantized, error_feedback, aux, exchanges)


def top_k(
    alg: Algorithm,
    *,
    fraction: float = 0.05,
    error_feedback: bool = True,
    aux: bool = True,
    exchanges: Sequence[str] | None = None,
) -> Algorithm:
    """Sends the ``fraction`` of each array's entries that are largest in magnitude, at least one, and their indices.

    An index takes 1, 2 or 4 bytes, depending on the array's size. Values can be quantized: ``quantize(top_k(alg))``.

    >>> from fedbraid import cost, fedavg
    >>> alg = top_k(fedavg(lambda params, batch, key: jnp.sum(params**2)), fraction=0.01)
    >>> cost(alg, jnp.zeros(1000), {"x": np.zeros((5, 1), np.float32)}).up
    60
    """
    check_number("fraction", fraction, low=0, high=1, open_low=True)

    def one(array: Any, key: Any) -> Any:
        del key
        count = max(1, int(np.ceil(fraction * array.size - 1e-9)))
        sent = count * (array.dtype.itemsize + place_dtype(array.size).itemsize)
        return array if sent >= array.size * array.dtype.itemsize else sparse(array, count)

    encode = _each_float(one, (Quantized, Sparse), "top_k over compressed uploads: put it inside, quantize(top_k(...))")
    return _compress("top_k", alg, encode, encode, Sparse, error_feedback, aux, exchanges)


def _each_float(one: Callable[[Any, Any], Any], refused: tuple[type, ...], why: str) -> Encode:
    """Encode every array of floats; integers and booleans stay unchanged."""

    def encode(tree: PyTree, key: Any) -> PyTree:
        nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, refused))
        if any(isinstance(node, refused) for node in nodes):
            raise StructureError(why)
        leaves, structure = jax.tree.flatten(tree)
        keys = jax.random.split(key, max(len(leaves), 1))
        coded = [
            one(leaf, k) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for leaf, k in zip(leaves, keys, strict=False)
        ]
        return jax.tree.unflatten(structure, coded)

    return encode


def _compress(
    name: str,
    alg: Algorithm,
    encode: Encode,
    encode_aux: Encode,
    kind: type,
    error_feedback: bool,
    aux: bool,
    exchanges: Sequence[str] | None,
) -> Algorithm:
    def decode(up: PyTree) -> PyTree:
        return decoded(up, (kind,))

    def whole(up: Up, down: Down, key: Any) -> Up:
        main, rest = jax.random.split(key)
        return Up(encode(up.pseudograd, main), encode_aux(up.aux, rest) if aux else up.aux)

    def change(exchange: Exchange) -> Exchange:
        refuse_sealed(exchange, name)
        if error_feedback or kind is Sparse:
            refuse_whole(exchange, name)
        if not error_feedback:
            return recode(exchange, whole, decode)
        refuse_partial(
            exchange, f"{name} with error feedback", instead="set error_feedback = false, or leave one of the two out"
        )
        return _feed_back(exchange, whole, decode, name)

    if not error_feedback:
        return change_exchanges(alg, exchanges, change)
    names = [e.name for e in alg.exchanges if exchanges is None or e.name in exchanges]

    def nothing(params: PyTree) -> dict[str, PyTree]:
        return {n: jax.tree.map(jnp.zeros_like, params) for n in names}

    return change_exchanges(extend_client(alg, nothing), exchanges, change)


def _feed_back(exchange: Exchange, encode: Callable, decode: Callable, name: str) -> Exchange:
    def change(report: Report, down: Down, state: Extended, key: Any) -> Report:
        residual = state.own[exchange.name]
        if jax.tree.structure(report.up.pseudograd) != jax.tree.structure(residual):
            raise StructureError(
                f"{name}: error feedback keeps a residual like the parameters, but the pseudograd of exchange "
                f"{exchange.name!r} has another structure; use error feedback in the innermost compression only, "
                "or pass error_feedback=False"
            )
        if "pseudograd" in exchange.keeps:
            raise StructureError(
                f"{name}: clients of exchange {exchange.name!r} correct their state by the decoded pseudograd, so they "
                "send the rounding error again in later rounds; error feedback would send it twice. "
                "Pass error_feedback=False"
            )
        meant = jax.tree.map(jnp.add, report.up.pseudograd, residual)
        sent = encode(Up(meant, report.up.aux), down, key)
        got = decode(sent)
        # keep only the error of this code: what an outer transform removes (clipping) must not be sent later
        left = jax.tree.map(jnp.subtract, meant, got.pseudograd)
        state = exchange.reconcile(report.state, report.up, got)
        return report._replace(up=sent, state=state._replace(own=state.own | {exchange.name: left}))

    return through(decode, exchange)._replace(client=map_report(exchange.client, change))
