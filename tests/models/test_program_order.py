"""The programs of a kernel run in any order on a GPU, and results may lie in the memory of inputs.

In the interpreter programs run one after the other, and inputs keep their values. So a program that reads what another
one writes is not seen. Here inputs and results share their memory, as on a GPU, and programs also run from the last to
the first. If two programs touch the same place, one of the two orders changes the result.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from fedbraid.lowering.attention import Given, Heads
from fedbraid.lowering.kernels import activated, attention, dense, grown, normalisation, recurrence, rows, updates
from fedbraid.lowering.kernels.convolution import Geometry
from fedbraid.lowering.normalisation import Norm
from fedbraid.lowering.row_norm import RowNorm

HALF = jnp.bfloat16
COUNTS = jnp.array([40, 3], jnp.int32)


def drawn(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


def as_on_a_gpu(monkeypatch, *, backwards):
    """Results lie in the memory of inputs. backwards: the last program of a grid runs first."""
    call, program_id = pl.pallas_call, pl.program_id

    def in_place(kernel, *, out_shape, input_output_aliases=(), **how):
        results, aliases = len(jax.tree.leaves(out_shape)), dict(input_output_aliases)

        def shared(*refs):
            first = len(refs) - results
            kernel(*(refs[first + aliases[i]] if i in aliases else ref for i, ref in enumerate(refs)))

        return call(shared, out_shape=out_shape, input_output_aliases=aliases, **how)

    monkeypatch.setattr(pl, "pallas_call", in_place)
    if backwards:
        monkeypatch.setattr(pl, "program_id", lambda axis: pl.num_programs(axis) - 1 - program_id(axis))


def with_gradient(function, *args):
    """The values of a function for two clients, and the gradient of a number that they determine."""
    values, back = jax.vjp(jax.vmap(function), *args)
    return values, back(jax.tree.map(jnp.cos, values))


def products_with_rows():
    """Rows are appended while other programs read those before them. The rest of the shares is not initialised."""
    x, left, right = drawn(2, 20, 300), drawn(2, 70, 300), drawn(2, 70, 90)
    shares, new = jax.vmap(grown.inner)(x, left, COUNTS)
    shares = jnp.where((jnp.arange(70) < COUNTS[:, None])[:, None, None], shares, 0)
    h = jax.vmap(partial(grown.meets, dtype=jnp.float32))(drawn(2, 20, 90), right, COUNTS)
    spread, outer = jax.vmap(grown.spread)(shares, right, COUNTS), jax.vmap(grown.outer)(x, h, left, COUNTS)
    return shares, new, h, spread, outer, jax.vmap(grown.added)(left, drawn(2, 5, 300), COUNTS)


def attend(*args):
    *sources, mask = args
    heads = Heads(((0, 0), (1, 0), (2, 0)), 4, 2, 0.3)
    return attention.attend(tuple(sources), Given(mask=(mask > 0).astype(jnp.int8)), heads)


CALLS = {
    "add_product": lambda: jax.vmap(updates.add_product)(
        drawn(2, 100, 130), drawn(2, 70, 100, dtype=HALF), drawn(2, 70, 130, dtype=HALF), drawn(2)
    ),
    "add_product, one matrix": lambda: jax.vmap(updates.add_product, (None, 0, None, None))(
        drawn(100, 130), drawn(2, 70, 100, dtype=HALF), drawn(70, 130, dtype=HALF), 0.5
    ),
    "add_scaled": lambda: jax.vmap(lambda a, b, c: updates.add_scaled([a, b], [(c, 3, 0.5), (a, 1, -1.0)]))(
        drawn(2, 7), drawn(2, 2, 3), drawn(2, 10)
    ),
    "dense_activation": lambda: jax.vmap(partial(dense.activated, jnp.tanh))(
        drawn(2, 100, 70, dtype=HALF), drawn(2, 70, 130, dtype=HALF), drawn(2, 130)
    ),
    "dense_activation_back": lambda: jax.vmap(partial(dense.gradient, jnp.tanh))(
        drawn(2, 100, 70, dtype=HALF), drawn(2, 70, 130, dtype=HALF), drawn(2, 100, 130, dtype=HALF), drawn(2, 130)
    ),
    "grown": products_with_rows,
    "lstm": lambda: jax.vmap(recurrence.states)(drawn(2, 3, 3, 800), 0.1 * drawn(2, 200, 800)),
    "lstm_back": lambda: jax.vmap(recurrence.cotangent)(
        0.1 * drawn(2, 200, 800), drawn(2, 3, 3, 200), drawn(2, 3, 3, 800), drawn(2, 3, 3, 200)
    ),
    "attention": lambda: with_gradient(
        attend, drawn(2, 2, 20, 4, 24), drawn(2, 2, 20, 2, 24), drawn(2, 2, 20, 2, 24), drawn(2, 2, 4, 20, 20)
    ),
    "row_norm": lambda: with_gradient(
        lambda r, a, *vectors: rows.add_normalise_rows(r, a, vectors[0], vectors[1:], RowNorm()),
        *(drawn(2, 300, 60), drawn(2, 300, 60), drawn(2, 60), drawn(2, 60), drawn(2, 60)),
    ),
    "group_norm": lambda: with_gradient(
        lambda x, *weights: normalisation.normalise(x, weights, None, Norm(2, relu=True)),
        *(drawn(2, 3, 30, 80), drawn(2, 80), drawn(2, 80)),
    ),
    "convolution": lambda: with_gradient(
        lambda x, w: activated.convolve_relu_pool(x, w, Geometry((3, 3), out=(8, 7))),
        *(drawn(2, 3, 10, 9, 20), drawn(2, 9 * 20 + 1, 70)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_order_of_programs(name, monkeypatch):
    found = []
    for backwards in (False, True):
        with monkeypatch.context() as patches:
            as_on_a_gpu(patches, backwards=backwards)
            found.append(jax.tree.leaves(CALLS[name]()))
    for first, second, plain in zip(*found, jax.tree.leaves(CALLS[name]()), strict=True):
        assert np.isfinite(np.asarray(first, float)).all()
        np.testing.assert_array_equal(first, plain)
        np.testing.assert_array_equal(second, plain)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_program_that_reads_what_another_writes_is_found(backwards, monkeypatch):
    """A kernel that moves every value to the next place, in place."""

    def move(before, after):
        at = pl.program_id(0)
        after[at] = before[(at + (1 if backwards else 3)) % 4]

    as_on_a_gpu(monkeypatch, backwards=backwards)
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    moved = pl.pallas_call(move, grid=(4,), out_shape=like, input_output_aliases={0: 0}, interpret=True)
    assert (moved(jnp.arange(4.0)) != jnp.roll(jnp.arange(4.0), -1 if backwards else 1)).any()
