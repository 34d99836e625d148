"""Attention on a GPU as one kernel forwards and one backwards, for sequences that fit into one program.

Compiled by XLA, attention transposes queries, keys and values and writes the scores [heads, T, S] to memory several
times. Here a program takes one head of one sequence: it keeps its scores in registers, and reads and writes queries,
keys, values and results where they are, [B, T, heads, size].

With P the softmax of the scores and dO the gradient of the result O = P V,

    dV = P' dO,    dP = dO V',    dZ = P (dP - rowsum(P dP)),    dQ = scale dZ K,    dK = scale dZ' Q.

With dropout, P in the first three is P D, where the entries of D are 0 or a factor: dP is multiplied by D before dZ.
A mask replaces scores by a number, so dZ is 0 where it does. There P is 0, except for a query that sees no key at all.
P is computed again for the gradient. Sums and scores are float32, the factors of products have the dtype of the input.
Biases of queries, keys and values are added here, and their gradients are summed here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.attention import Given, Heads, plainly
from fedbraid.lowering.kernels import interpreted
from fedbraid.lowering.kernels.tiles import power
from fedbraid.lowering.transposable import computed_by, linear

__all__ = ["attend", "fits"]

Array = jax.Array
LONGEST = 256  # tokens of a sequence
WIDEST = 128  # values of a head
SCORES = 128 * 128  # of queries and keys that a program takes at a time
FORWARDS, BACKWARDS = 8, 4  # warps of a program


def fits(queries: int, keys: int, size: int) -> bool:
    """Whether one program can hold a head of a sequence."""
    return max(queries, keys) <= LONGEST and size <= WIDEST and power(keys) * power(size) <= LONGEST * 64


@partial(jax.custom_jvp[Array], nondiff_argnums=(2,))
def attend(sources: tuple[Array, ...], given: Given, heads: Heads) -> Array:
    """`fedbraid.lowering.attention.plainly`, as a kernel: forwards one, backwards one."""
    return _forward(sources, given, heads=heads)


@attend.defjvp
def _attend_jvp(heads: Heads, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    value = computed_by(partial(_forward, heads=heads), partial(plainly, heads=heads))(*primals)

    def along(primals: tuple, changes: tuple) -> Array:
        return jax.jvp(partial(_of_floats, primals[1], heads), (primals[0], primals[1].bias), changes)[1]

    def back(primals: tuple, dy: Array) -> tuple:
        return computed_by(partial(_backward, heads=heads), partial(_slowly_back, heads=heads))(*primals, dy)

    return value, linear(along, back, primals, (tangents[0], tangents[1].bias))


def _of_floats(given: Given, heads: Heads, sources: tuple, bias: Array | None) -> Array:
    return plainly(sources, given._replace(bias=bias), heads)


def _slowly_back(sources: tuple, given: Given, dy: Array, *, heads: Heads) -> tuple:
    return jax.vjp(partial(_of_floats, given, heads), sources, given.bias)[1](dy)


def _call(kernel: Any, grid: tuple, outputs: Any, name: str, warps: int, *inputs: Any) -> Any:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=outputs,
        compiler_params=gpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpreted(),
        name=name,
    )(*inputs)


def _forward(sources: tuple[Array, ...], given: Given, *, heads: Heads) -> Array:
    b, t, s, d = _sizes(sources, heads)
    rows = _rows(t, s)
    like = jax.ShapeDtypeStruct((b, t, heads.queries, d), sources[0].dtype)
    kernel = partial(_forward_kernel, heads=heads, sizes=(t, s, d), rows=rows, there=_there(given))
    grid = b, heads.queries, -(-t // rows)
    return _call(kernel, grid, like, _name("attention", given), FORWARDS, *sources, *_arrays(given))


def _name(kernel: str, given: Given) -> str:
    """Kernels with a bias or dropout have another name, so that `explain` and tests see whether one does."""
    return kernel + "_with_bias" * (given.bias is not None) + "_with_dropout" * (given.kept is not None)


def _there(given: Given) -> tuple[bool, ...]:
    return tuple(array is not None for array in given)


def _arrays(given: Given) -> list[Array]:
    return [array for array in given if array is not None]


def _rows(queries: int, keys: int) -> int:
    """Queries that a program takes at a time."""
    return power(queries, most=SCORES // power(keys))


def _sizes(sources: tuple[Array, ...], heads: Heads) -> tuple[int, int, int, int]:
    b, t, _, d = sources[heads.places[0][0]].shape
    return b, t, sources[heads.places[1][0]].shape[1], d


def _at(ref: Any, sequence: Any, rows: Array, head: Any, columns: Array, height: int, width: int) -> tuple[Any, Array]:
    shape = (rows.shape[0], columns.shape[0])
    inside = jnp.broadcast_to((rows < height)[:, None] & (columns < width)[None, :], shape)
    where = [jnp.broadcast_to(index, shape) for index in (sequence, rows[:, None], head, columns[None, :])]
    return ref.at[tuple(where)], inside


def _whole(ref: Any, rows: Array) -> bool:
    """Whether blocks of as many rows fill an array, so that no mask is needed."""
    return ref.shape[1] % rows.shape[0] == 0 and power(ref.shape[3]) == ref.shape[3]


def _load(ref: Any, sequence: Any, rows: Array, head: Any, width: int) -> Array:
    where, inside = _at(ref, sequence, rows, head, jnp.arange(power(width)), ref.shape[1], width)
    return gpu.load(where) if _whole(ref, rows) else gpu.load(where, mask=inside, other=0.0)


def _biased(place: tuple, sequence: Any, rows: Array, head: Any, width: int, bias_ref: Any) -> Array:
    """Queries, keys or values of a head, with their bias."""
    ref, first = place
    values, columns = _load(ref, sequence, rows, first + head, width), jnp.arange(power(width))
    if bias_ref is not None:
        at = jnp.full(columns.shape, first + head), columns
        added = gpu.load(bias_ref.at[at], mask=columns < width, other=0.0)
        values = (values.astype(jnp.float32) + added[None, :]).astype(values.dtype)
    return values


def _store(ref: Any, sequence: Any, rows: Array, head: Any, values: Array) -> None:
    where, inside = _at(ref, sequence, rows, head, jnp.arange(values.shape[1]), ref.shape[1], ref.shape[3])
    gpu.store(where, values.astype(ref.dtype), mask=None if _whole(ref, rows) else inside)


def _weights(
    q: Array, k: Array, rows: Array, place: tuple, mask_ref: Any, heads: Heads, sizes: tuple
) -> tuple[Array, Array]:
    """The softmax of the scores of some queries with all keys, [rows, keys], and the largest score of each query."""
    _, s, _ = sizes
    keys = jnp.arange(k.shape[0])
    scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * np.float32(heads.scale)
    shape = scores.shape
    if heads.causal:
        seen = jnp.broadcast_to(rows[:, None] >= keys[None, :], shape)
        scores = jnp.where(seen, scores, np.float32(heads.filler))
    if mask_ref is not None:
        masked = np.float32(heads.filler) + (scores if heads.added else jnp.zeros(shape, jnp.float32))
        scores = jnp.where(_flags(mask_ref, place, rows, keys, sizes), scores, masked)
    if s != k.shape[0]:
        scores = jnp.where(jnp.broadcast_to((keys < s)[None, :], shape), scores, -jnp.inf)
    largest = jnp.max(scores, 1)
    powers = jnp.exp(scores - largest[:, None])
    return powers * (1 / jnp.sum(powers, 1))[:, None], largest


def _flags(ref: Any, place: tuple, rows: Array, keys: Array, sizes: tuple) -> Array:
    """Where an array [B or 1, heads or 1, T or 1, S or 1] is not 0, for some queries and all keys."""
    shape = rows.shape[0], keys.shape[0]
    indices = (place[0], place[1], rows[:, None], keys[None, :])
    where = [
        jnp.broadcast_to(i if n > 1 else jnp.zeros_like(i), shape) for i, n in zip(indices, ref.shape, strict=True)
    ]
    edge = jnp.broadcast_to((rows < sizes[0])[:, None] & (keys < sizes[1])[None, :], shape)
    return gpu.load(ref.at[tuple(where)], mask=edge, other=0) != 0


def _dropped(values: Array, kept_ref: Any, rows: Array, place: tuple, heads: Heads, sizes: tuple) -> Array:
    """Weights, or their gradients, [rows, keys]: those that dropout keeps, times its factor."""
    values = values * np.float32(heads.factor)
    if kept_ref is None:
        return values
    return jnp.where(_flags(kept_ref, place, rows, jnp.arange(values.shape[1]), sizes), values, 0.0)


def _places(refs: tuple, heads: Heads, there: tuple[bool, ...]) -> tuple[list, Given]:
    """The references of queries, keys and values with the number of their first head, and of what is given besides."""
    count = len({place for place, _ in heads.places})
    rest = iter(refs[count:])
    return [(refs[place], first) for place, first in heads.places], Given(
        *(next(rest) if yes else None for yes in there)
    )


def _forward_kernel(*refs, heads: Heads, sizes: tuple, rows: int, there: tuple[bool, ...]):
    *refs, out_ref = refs
    (query, key, value), given = _places(tuple(refs), heads, there)
    sequence, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, s, d = sizes
    shared = lax.div(head, heads.group)
    here, keys = block * rows + jnp.arange(rows), jnp.arange(power(s))
    q = _biased(query, sequence, here, head, d, given.bias)
    k = _biased(key, sequence, keys, shared, d, given.bias)
    v = _biased(value, sequence, keys, shared, d, given.bias)
    p, _ = _weights(q, k, here, (sequence, head), given.mask, heads, sizes)
    p = _dropped(p, given.kept, here, (sequence, head), heads, sizes)
    _store(out_ref, sequence, here, head, jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32))


def _backward(sources: tuple[Array, ...], given: Given, dy: Array, *, heads: Heads) -> tuple:
    bias = given.bias
    b, t, s, d = _sizes(sources, heads)
    outputs = [jax.ShapeDtypeStruct(source.shape, source.dtype) for source in sources]
    if bias is not None:
        outputs.append(jax.ShapeDtypeStruct((b, *bias.shape), jnp.float32))
    kernel = partial(_backward_kernel, heads=heads, sizes=(t, s, d), rows=_rows(t, s), there=_there(given))
    inputs = [*sources, *_arrays(given), dy]
    found = _call(kernel, (b, heads.keys), outputs, _name("attention_back", given), BACKWARDS, *inputs)
    if bias is None:
        return tuple(found), None
    return tuple(found[:-1]), found[-1].sum(0).astype(bias.dtype)


def _backward_kernel(*refs, heads: Heads, sizes: tuple, rows: int, there: tuple[bool, ...]):
    count = len({place for place, _ in heads.places}) + there[0]
    inputs, outputs = refs[:-count], refs[-count:]
    (query, key, value), given = _places(inputs[:-1], heads, there)
    dq, dk, dv = ((outputs[place], first) for place, first in heads.places)
    sequence, shared = pl.program_id(0), pl.program_id(1)
    t, s, d = sizes
    keys = jnp.arange(power(s))
    k = _biased(key, sequence, keys, shared, d, given.bias)
    v = _biased(value, sequence, keys, shared, d, given.bias)

    def step(i, sums):
        head = shared * heads.group + lax.rem(i, heads.group)
        here = lax.div(i, heads.group) * rows + jnp.arange(rows)
        q = _biased(query, sequence, here, head, d, given.bias)
        slopes = _load(inputs[-1], sequence, here, head, d)
        drop = partial(_dropped, kept_ref=given.kept, rows=here, place=(sequence, head), heads=heads, sizes=sizes)
        p, largest = _weights(q, k, here, (sequence, head), given.mask, heads, sizes)
        dp = drop(jnp.dot(slopes, v.T, preferred_element_type=jnp.float32))
        scale = np.float32(heads.scale)
        if given.mask is not None and not heads.added:
            scale = jnp.where(largest == np.float32(heads.filler), 0.0, scale)[:, None]
        dz = (p * (dp - jnp.sum(p * dp, 1)[:, None]) * scale).astype(q.dtype)
        change = jnp.dot(dz, k, preferred_element_type=jnp.float32)
        _store(dq[0], sequence, here, dq[1] + head, change)
        more = (dz.T, q), (drop(p).astype(q.dtype).T, slopes)
        totals = [
            total + jnp.dot(*pair, preferred_element_type=jnp.float32) for total, pair in zip(sums, more, strict=False)
        ]
        return (*totals, sums[2] + jnp.sum(change, 0))

    zero = jnp.zeros((keys.shape[0], power(d)), jnp.float32)
    sums = lax.fori_loop(0, heads.group * -(-t // rows), step, (zero, zero, jnp.zeros(power(d), jnp.float32)))
    _store(dk[0], sequence, keys, dk[1] + shared, sums[0])
    _store(dv[0], sequence, keys, dv[1] + shared, sums[1])
    columns = jnp.arange(power(d))
    for ref in outputs[-1:] if there[0] else ():
        for first, total in ((dq[1], sums[2]), (dk[1], jnp.sum(sums[0], 0)), (dv[1], jnp.sum(sums[1], 0))):
            at = jnp.full(columns.shape, sequence), jnp.full(columns.shape, first + shared), columns
            gpu.store(ref.at[at], total, mask=columns < d)
