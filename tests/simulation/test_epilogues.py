"""Activations in the kernels of the products before them."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.lowering import fused, grown, kernels
from fedbraid.lowering.epilogues import MOST, find_epilogues
from fedbraid.lowering.explanation import _kernel_names
from fedbraid.lowering.grown import Extent, grow
from fedbraid.lowering.kernels import dense
from fedbraid.lowering.smooth import activation, activation_back
from fedbraid.lowering.updates import opened

HALF = jnp.bfloat16
ROUNDED = 2**-8  # relative error of a value in bfloat16


def drawn(*shape, seed=0, dtype=HALF):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(a):
    return np.asarray(a, np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


def slope(x):
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


def check_kernels(n, k, m, turned):
    """Both kernels for two clients, against NumPy."""
    x, bias, before = drawn(2, n, k), drawn(2, m, seed=2, dtype=jnp.float32), drawn(2, n, m, seed=3)
    w = drawn(2, *((m, k) if turned else (k, m)), seed=1) / k**0.5
    product = np.einsum("cnk,cmk->cnm" if turned else "cnk,ckm->cnm", exact(x), exact(w))

    h, a = jax.vmap(partial(dense.activated, jax.nn.silu, turned=turned))(x, w, bias)
    assert (h.dtype, a.dtype) == (HALF, HALF)
    np.testing.assert_allclose(exact(h), product, rtol=ROUNDED, atol=1e-5)
    np.testing.assert_allclose(exact(a), silu(exact(h) + exact(bias)[:, None]), rtol=ROUNDED, atol=1e-5)

    dh, dbias = jax.vmap(partial(dense.gradient, jax.nn.silu, turned=turned))(x, w, before, bias)
    wanted = product * slope(exact(before) + exact(bias)[:, None])
    assert (dh.dtype, dbias.dtype) == (HALF, jnp.float32)
    np.testing.assert_allclose(exact(dh), wanted, rtol=2 * ROUNDED, atol=1e-5)
    np.testing.assert_allclose(dbias, wanted.sum(1), atol=ROUNDED * np.abs(wanted).sum(1).max())


@settings(deadline=None, max_examples=6)
@given(n=st.integers(1, 150), k=st.integers(1, 150), m=st.integers(1, 150), turned=st.booleans())
def test_an_activation_and_its_gradient_are_computed_with_the_product(n, k, m, turned):
    check_kernels(n, k, m, turned)


@pytest.mark.parametrize(("n", "k", "m"), [(300, 70, 500), (512, 128, 256)])
def test_large_products_have_other_tiles(n, k, m):
    check_kernels(n, k, m, turned=n == 300)


# --- whole steps -----------------------------------------------------------------------------------------------------

RATE, CLIENTS, WIDTH, INNER, TOKENS = 0.25, 3, 64, 96, 80
INPUTS = drawn(2, TOKENS // 2, WIDTH, seed=7)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    monkeypatch.setattr(grown, "HEAVY", 0)


def weights():
    sizes = {"up": (WIDTH, INNER), "down": (INNER, WIDTH), "b": (INNER,), "v": (INNER, WIDTH), "c": (INNER,)}
    return {name: drawn(*shape, seed=i, dtype=jnp.float32) / 4 for i, (name, shape) in enumerate(sizes.items())}


def loss(p):
    """Two dense layers with activations, the first of an array with three axes, and a product back to its width."""
    h = jnp.dot(INPUTS, p["up"].astype(HALF))
    y = jnp.dot(fused.elementwise(jax.nn.gelu, h, p["b"], kernel=jax.nn.gelu), p["down"].astype(HALF))
    h = jnp.dot(y.reshape(TOKENS, WIDTH), p["v"].astype(HALF).T)
    a = fused.elementwise(jnp.tanh, h, p["c"], kernel=jnp.tanh)
    return jnp.mean((a.astype(jnp.float32) - 1) ** 2) * INNER


def descend(loss, p):
    return jax.tree.map(lambda w, g: w - RATE * g, p, jax.grad(loss)(p))


def one_step(loss):
    """The kernels of a step, after a check that the new weights of all clients are those of the plain step."""
    start, slot = weights(), jnp.int32(0)
    growth = grow(lambda slot: start, lambda slot, k, p: descend(loss, p), (slot, slot), Extent(1, 1, CLIENTS), "whole")
    clients = [jax.tree.map(lambda a, i=i: a * (1 + i / 2), start) for i in range(CLIENTS)]
    many = jax.tree.map(lambda *a: jnp.stack(a), *map(growth.rest, clients))
    new, _ = jax.vmap(growth.step)(jnp.arange(CLIENTS), jnp.zeros(CLIENTS, int), many, ())
    found = jax.vmap(partial(growth.carry, matrices=[]))(new)
    for i, client in enumerate(clients):
        for name, value in descend(loss, client).items():
            change, error = (float(jnp.linalg.norm(a)) for a in (value - client[name], found[name][i] - value))
            assert change > 0.05
            assert error < 0.01 * change
    return Counter(_kernel_names(jax.make_jaxpr(growth.step)(slot, slot, growth.rest(start), ()).jaxpr))


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_step_is_the_plain_one():
    names = one_step(loss)
    assert {name: names[name] for name in names if "activation" in name} == {
        "dense_activation": 2,
        "dense_activation_back": 1,  # the gradient of the last activation is no product
        "activation_back": 1,
    }


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_product_that_something_else_reads_is_computed():
    def seen(p):
        """Reads a product before its activation, and adds to the gradient of an activation."""
        h = jnp.dot(INPUTS, p["up"].astype(HALF))
        more = jnp.mean(h.astype(jnp.float32) ** 2)
        a = fused.elementwise(jax.nn.gelu, h, p["b"], kernel=jax.nn.gelu)
        y = jnp.dot(a, p["down"].astype(HALF)).astype(jnp.float32)
        v = jnp.mean(p["v"].astype(HALF).astype(jnp.float32) ** 2) + jnp.mean(p["c"] ** 2)
        return 10 * (jnp.mean((y - 1) ** 2) + jnp.mean(a.astype(jnp.float32) ** 2) + more + 100 * v)

    names = one_step(seen)
    assert (names["activation"], names["activation_back"]) == (1, 1)
    assert names["dense_activation"] == names["dense_activation_back"] == 0


def traced(step, *shapes, dtype=HALF):
    return opened(jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)))


def found_in(step, *shapes, dtype=HALF):
    """How many activations of a step of matrices are computed with a product."""
    return len(find_epilogues(traced(step, *shapes, dtype=dtype)).at)


def forward(x, w):
    return activation(jnp.tanh, x @ w, jnp.ones(w.shape[1]))


def backward(x, w):
    return activation_back(jnp.tanh, jnp.ones((len(x), w.shape[1]), HALF), jnp.ones(w.shape[1]), x @ w)


@pytest.mark.parametrize("step", [forward, backward])
def test_products_that_fit(step):
    assert found_in(step, (64, MOST), (MOST, 64)) == 1
    assert found_in(step, (64, 80), (80, 72), dtype=jnp.float32) == 0
    assert found_in(step, (64, MOST + 1), (MOST + 1, 64)) == 0
    for sizes in ((63, 64, 64), (64, 63, 64), (64, 64, 63)):
        n, k, m = sizes
        assert found_in(step, (n, k), (k, m)) == 0


@pytest.mark.parametrize("turned", [False, True])
def test_no_copy_of_a_transposed_matrix_is_needed(turned):
    def step(x, w):
        h = jax.lax.dot_general(x, w.T, (((1,), (0 if turned else 1,)), ((), ())))
        return activation(jnp.tanh, h, jnp.ones(64))

    program = traced(step, (64, 64), (64, 64))
    (found,) = find_epilogues(program).at.values()
    assert found.w is program.jaxpr.invars[1]
    assert found.turned == turned


def test_products_of_another_form():
    def of(dimensions, reshaped=(64, 64)):
        def step(x, w):
            h = jax.lax.dot_general(x, w, dimensions).reshape(reshaped)
            return activation(jnp.tanh, h, jnp.ones(reshaped[1]))

        return step

    two, none = [(64, 64), (64, 64)], ((), ())
    assert found_in(of((((1,), (0,)), none)), *two) == found_in(of((((1,), (1,)), none)), *two) == 1
    assert found_in(of((((0,), (0,)), none)), *two) == 0
    assert found_in(of((((1,), (0,)), none), (32, 128)), *two) == 0  # its columns become others
    assert found_in(of((((2,), (0,)), none), (128, 64)), (2, 64, 64), (64, 64)) == 1
    assert found_in(of((((2,), (1,)), ((0,), (0,))), (128, 64)), (2, 64, 64), (2, 64, 64)) == 0


def test_products_are_also_read_after_the_activation_but_not_before():
    def after(x, w):
        h = x @ w
        return activation(jnp.tanh, h, jnp.ones(64)), h + 1, h

    def before(x, w):
        h = x @ w
        return activation(jnp.tanh, h, jnp.sum(h, 0, dtype=jnp.float32))

    def wide(x, w):
        return activation(jnp.tanh, jnp.dot(x, w, preferred_element_type=jnp.float32), jnp.ones(64))

    def twice(x, w):
        da = x @ w
        return activation_back(jnp.tanh, jnp.ones((64, 64), HALF), jnp.ones(64), da), da

    for step, count in ((after, 1), (before, 0), (wide, 0), (twice, 0)):
        assert found_in(step, (64, 64), (64, 64)) == count
