"""The end of a local step on a GPU: weights that are updated where their gradient is computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.lowering import grown, kernels, updates
from fedbraid.lowering.grown import Extent, grow
from fedbraid.lowering.kernels.updates import add_product, add_scaled
from fedbraid.lowering.updates import find_updates, opened

RATE = 0.25
HALF = jnp.bfloat16


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    monkeypatch.setattr(grown, "HEAVY", 0)


def drawn(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@settings(deadline=None, max_examples=6)
@given(k=st.integers(1, 150), m=st.integers(1, 150), n=st.integers(1, 150))
def test_a_product_is_added_to_a_matrix(k, m, n):
    w, x, y = drawn(2, m, n), drawn(2, k, m, seed=1, dtype=HALF), drawn(2, k, n, seed=2, dtype=HALF)
    new, half = jax.vmap(add_product, (0, 0, 0, None))(w, x, y, -RATE)
    wide = [np.asarray(a, np.float64) for a in (w, x, y)]
    expected = wide[0] - RATE * np.einsum("ckm,ckn->cmn", *wide[1:])
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(half, new.astype(HALF))


def test_large_matrices_have_other_tiles():
    w, x, y = drawn(300, 500), drawn(70, 300, seed=1, dtype=HALF), drawn(70, 500, seed=2, dtype=HALF)
    new, _ = add_product(w, x, y, 3.0)
    expected = np.asarray(w, np.float64) + 3 * np.asarray(x, np.float64).T @ np.asarray(y, np.float64)
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-4)


def test_many_small_arrays_are_changed_at_once():
    arrays, source = [drawn(5), drawn(2, 3, seed=1), drawn(1, seed=2)], drawn(4, 5, seed=3)
    changes = [(source, 10, -RATE), (source, 1, jnp.float32(2)), (drawn(1, seed=4), 0, 1.0)]
    new = add_scaled(arrays, changes)
    flat = np.asarray(source).ravel()
    np.testing.assert_allclose(new[0], arrays[0] - RATE * flat[10:15], rtol=1e-6)
    np.testing.assert_allclose(new[1], arrays[1] + 2 * flat[1:7].reshape(2, 3), rtol=1e-6)
    np.testing.assert_allclose(new[2], arrays[2] + drawn(1, seed=4), rtol=1e-6)


# --- whole steps -----------------------------------------------------------------------------------------------------

WORDS, WIDTH, OUT, TOKENS = 70, 64, 96, 128
AT = np.random.default_rng(9).integers(0, WORDS, (2, TOKENS // 2))


def weights():
    sizes = {"words": (WORDS, WIDTH), "w": (WIDTH, OUT), "v": (OUT, WIDTH), "b": (OUT,), "c": (WIDTH,)}
    return {name: drawn(*shape, seed=i) / 8 for i, (name, shape) in enumerate(sizes.items())}


def loss(p):
    """A network with narrow products."""
    x = p["words"][AT].astype(HALF)  # [2, 64, 64]
    h = (x @ p["w"].astype(HALF)).astype(jnp.float32) + p["b"]
    y = jnp.dot(h.astype(HALF).reshape(TOKENS, OUT), p["v"].astype(HALF)).astype(jnp.float32)
    return jnp.mean((y * (1 + p["c"])) ** 2)


def descend(p, rate):
    return jax.tree.map(lambda w, g: w - rate * g, p, jax.grad(loss)(p))


def one_step(advance, lanes=3):
    """The new weights of clients whose weights differ, and how they were found."""
    start = weights()
    growth = grow(
        lambda slot: start, lambda slot, k, p: advance(p), (jnp.int32(0), jnp.int32(0)), Extent(1, 1, lanes), "whole"
    )
    clients = [jax.tree.map(lambda a, i=i: a * (1 + i), start) for i in range(lanes)]
    many = jax.tree.map(lambda *a: jnp.stack(a), *map(growth.rest, clients))
    slots = jnp.arange(lanes)
    new, _ = jax.vmap(growth.step)(slots, slots * 0, many, ())
    found = jax.vmap(partial(growth.carry, matrices=[]))(new)
    return growth, clients, new, found


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_is_the_plain_one(as_if_on_a_gpu, traced, monkeypatch):
    rate = jax.jit(lambda: jnp.float32(RATE))() if traced else RATE
    seen, find = [], find_updates

    def watched(*args):
        seen.append(find(*args))
        return seen[-1]

    monkeypatch.setattr(grown, "find_updates", watched)
    growth, clients, new, found = one_step(lambda p: descend(p, rate))
    (how,) = seen
    names = sorted(weights())
    assert sorted(names[each.leaf] for each in how.products) == ["v", "w"]
    assert [names[each.leaf] for each in how.scatters] == ["words"]
    assert sorted(names[each.leaf] for each in how.small) == ["b", "c"]
    for i, client in enumerate(clients):
        expected = descend(client, RATE)
        for name, value in expected.items():
            change = np.abs(np.asarray(value - client[name])).max()
            assert change > 1e-4
            np.testing.assert_allclose(found[name][i], value, atol=0.01 * change)  # gradients were rounded to bfloat16
    leaves = jax.tree.leaves(found)
    for leaf, half in zip(growth.halves, new[len(leaves) :], strict=True):
        np.testing.assert_array_equal(half, leaves[leaf].astype(HALF))


def decayed(p):
    slopes = jax.grad(loss)(p)
    return jax.tree.map(lambda w, g: w - RATE * (g + 0.1 * w), p, slopes)


def clipped(p):
    slopes = jax.grad(loss)(p)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(slopes)))
    return jax.tree.map(lambda w, g: w - RATE * (g / norm), p, slopes)


def ascent(p):
    return jax.tree.map(lambda w, g: RATE * g - w, p, jax.grad(loss)(p))


def unused(p):
    slopes = jax.grad(loss)(p)
    jax.tree.map(jnp.sum, slopes)  # read by an equation whose result is not needed
    return jax.tree.map(lambda w, g: w - RATE * g, p, slopes)


@pytest.mark.parametrize("advance", [decayed, clipped, ascent, unused])
def test_other_steps_are_computed_as_they_are_written(as_if_on_a_gpu, advance):
    _, clients, _, found = one_step(advance)
    for i, client in enumerate(clients):
        expected = advance(client)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-2, atol=1e-4), found, expected)


def test_equations_without_results_run(as_if_on_a_gpu):
    seen = []

    def told(p):
        new = descend(p, RATE)
        jax.debug.callback(lambda value: seen.append(float(value)), p["b"][0])
        return new

    _, clients, _, _ = one_step(told)
    jax.effects_barrier()
    assert {float(client["b"][0]) for client in clients} <= set(seen)


def test_a_gradient_that_something_else_reads_is_computed():
    def step(w, x, y):
        gradient = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))).astype(jnp.float32)
        return w - RATE * gradient, jnp.sum(gradient)

    shapes = [jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.float32, HALF, HALF)]
    only = jax.make_jaxpr(lambda *a: step(*a)[0])(*shapes)
    assert len(find_updates(opened(only), 0, (0,)).products) == 1
    assert find_updates(opened(only), 0, ()).products == ()  # no copy in bfloat16 is wanted
    assert find_updates(opened(jax.make_jaxpr(step)(*shapes)), 0, (0,)) == updates.Updates()


@pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn, jnp.float16])
def test_a_gradient_of_fewer_digits_is_computed(kind):
    """Only the rounding to bfloat16 is left out: another dtype is part of what the client computes."""

    def step(w, x, y):
        return w - RATE * jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))).astype(kind).astype(jnp.float32)

    def narrow(w, x, y):
        gradient = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=kind)
        return w - RATE * gradient.astype(jnp.float32)

    shapes = [jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.float32, HALF, HALF)]
    for each in (step, narrow):
        assert find_updates(opened(jax.make_jaxpr(each)(*shapes)), 0, (0,)).products == ()


def test_leaves_without_entries_are_left_alone():
    def step(a, b, c, *slopes):
        return [w - RATE * g for w, g in zip((a, b, c), slopes, strict=True)]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((0,), (3,), (), (0,), (3,), ())]
    assert [each.leaf for each in find_updates(opened(jax.make_jaxpr(step)(*shapes)), 0, ()).small] == [1, 2]


def test_slices_that_are_next_to_each_other():
    def step(a, b, source):
        return a - source[1, 2], b - 2.0 * source[0, :, 1], source

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3,), (4,), (2, 4, 3))]
    found = find_updates(opened(jax.make_jaxpr(step)(*shapes)), 0, ()).small
    assert found == ()  # the first has no rate

    def scaled(a, b, source):
        return a - 0.5 * source[1, 2], b - 2.0 * source[0, :, 1], source

    found = find_updates(opened(jax.make_jaxpr(scaled)(*shapes)), 0, ()).small
    assert [each.first for each in found] == [18, 0]
    assert [each.array.aval.shape for each in found] == [(2, 4, 3), (1, 4, 1)]  # the second is not in one piece
