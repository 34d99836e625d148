"""Group normalisation as a kernel, in Pallas' interpret mode: values, gradients and second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid.lowering import kernels
from fedbraid.lowering.kernels import normalisation
from fedbraid.lowering.kernels.normalisation import normalise
from fedbraid.lowering.normalisation import Norm, plainly
from fedbraid.lowering.operations import group_norm

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def by_numpy(x, weights, residual, norm):
    b, n, _ = x.shape
    grouped = np.asarray(x, float).reshape(b, n, norm.groups, -1)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    y = ((grouped - mean) / np.sqrt(variance + norm.epsilon)).reshape(x.shape) * np.asarray(weights[0]) + weights[1]
    y = y if residual is None else y + residual
    return np.maximum(y, 0) if norm.relu else y


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("n", "c", "groups"), [(5, 6, 2), (36, 16, 4), (600, 24, 3), (9, 96, 6)])
def test_values_and_gradients(n, c, groups, added, relu):
    norm = Norm(groups, relu=relu)
    # a mean that is large beside the deviation: sums of squares alone would lose half of the digits
    args = draw(2, n, c) + 30, (draw(c), draw(c)), draw(2, n, c) if added else None
    y, back = jax.vjp(lambda *args: normalise(*args, norm), *args)
    plain, plain_back = jax.vjp(lambda *args: plainly(*args, norm), *args)
    np.testing.assert_allclose(y, by_numpy(*args, norm), atol=1e-4)
    np.testing.assert_allclose(plain, by_numpy(*args, norm), atol=1e-4)
    dy = draw(2, n, c)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * n**0.5), back(dy), plain_back(dy))


def test_an_image_that_does_not_fit_into_registers_is_read_again(monkeypatch):
    args, norm = (draw(2, 40, 16), (draw(16), draw(16)), draw(2, 40, 16)), Norm(4, relu=True)

    def both():
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(normalise(*args, norm))), (0, 1, 2))(*args)

    kept = both()
    for limit in ("KEPT", "KEPT_BACK"):
        monkeypatch.setattr(normalisation, limit, 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), kept, both())


def test_bfloat16_in_bfloat16_out_with_float32_between():
    args, norm = (draw(3, 50, 8), (draw(8), draw(8)), None), Norm(2, relu=True)
    half = normalise(args[0].astype(jnp.bfloat16), args[1], None, norm)
    assert half.dtype == jnp.bfloat16
    assert 0 < jnp.max(jnp.abs(half.astype(jnp.float32) - normalise(*args, norm))) < 0.05


def test_under_vmap_and_differentiated_twice():
    x, w, norm = draw(3, 2, 9, 8), (draw(3, 8), draw(3, 8)), Norm(2, relu=True)

    def derivatives(function):
        def value(w, x):
            return jnp.sum(jnp.sin(function(x, w, None, norm)))

        def products(w, x):
            return jax.jvp(jax.grad(value), (w, x), (w[::-1], x))[1]

        return jax.vmap(jax.grad(value))(w, x), jax.vmap(products)(w, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *map(derivatives, (normalise, plainly))
    )


def test_groups_of_many_channels_are_programs_of_their_own(monkeypatch):
    grids = []
    call = normalisation.pl.pallas_call
    monkeypatch.setattr(
        normalisation.pl, "pallas_call", lambda *a, grid, **o: grids.append(grid) or call(*a, grid=grid, **o)
    )
    for channels, groups, pieces in ((64, 2, 2), (96, 6, 3), (40, 2, 1), (48, 1, 1)):
        x, weights = draw(2, 5, channels), (draw(channels), draw(channels))
        y = normalise(x, weights, None, Norm(groups))
        np.testing.assert_allclose(y, by_numpy(x, weights, None, Norm(groups)), atol=1e-4)
        assert grids.pop() == (2, pieces)


def test_the_operation_uses_the_kernel_where_there_is_one(monkeypatch):
    x, past, scale, shift = draw(2, 3, 4, 6), draw(2, 3, 4, 6), draw(6), draw(6)

    def run():
        return group_norm(x, scale, shift, 3, relu=True, residual=past)

    plain = run()
    monkeypatch.setattr(kernels, "available", lambda: True)
    assert "pallas_call" in str(jax.make_jaxpr(run)())
    np.testing.assert_allclose(run(), plain, rtol=1e-5, atol=1e-5)
    with jax.default_matmul_precision("float32"):
        assert "pallas_call" not in str(jax.make_jaxpr(run)())
