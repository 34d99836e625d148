"""Layers against NumPy, SciPy and XLA's own convolution and pooling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy.signal import correlate

from fedbraid.lowering import operations
from fedbraid.lowering.operations import FEW_ROWS, conv2d, max_pool, product
from fedbraid.lowering.taps import FEWEST_CHANNELS, inner_taps
from fedbraid.lowering.winograd import POINTS, blocks_for, cook_toom, from_blocks, to_blocks
from fedbraid.models.layers import dropout, glorot_uniform


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def xla_conv(x, w, strides, padding):
    return lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=lax.Precision.HIGHEST
    )


def scipy_conv(x, w):
    """Valid convolution of [B, H, W, C] with [kh, kw, C, out]: a SciPy correlation per pair of channels, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    images = [
        sum(correlate(image[:, :, c], w[:, :, c, o], "valid") for c in range(w.shape[2]))
        for image in x
        for o in range(w.shape[3])
    ]
    return np.stack(images).reshape(len(x), w.shape[3], *images[0].shape).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("points", [*POINTS.values(), (0.0, 1.0, -1.0, 2.0, -2.0), (0.0, 1.0, -1.0)])
def test_cook_toom_is_correlation(points):
    rng = np.random.default_rng(0)
    signal, taps = rng.standard_normal(len(points) + 1), rng.standard_normal(3)
    at, g, bt = cook_toom(points)
    np.testing.assert_allclose(at @ ((g @ taps) * (bt @ signal)), np.correlate(signal, taps, "valid"), atol=1e-12)


@pytest.mark.parametrize("tile", POINTS)
@pytest.mark.parametrize(("h", "w"), [(26, 26), (9, 6), (3, 11)])
def test_blocks_and_back(h, w, tile):
    x = normal(0, 2, h, w, 3)
    blocks = to_blocks(x, tile)
    assert blocks.shape == (tile, tile, blocks_for(h, tile), blocks_for(w, tile), 2, 3)
    np.testing.assert_array_equal(from_blocks(blocks, h, w), x)
    assert blocks[h % tile - 1, 0, (h - 1) // tile, 0, 1, 2] == x[1, h - 1, 0, 2]


# Winograd's tiles take the wide 3x3 cases of stride 1, taps those with many channels, patches the others; tiles that do
# not fit exactly are cropped.
MANY = FEWEST_CHANNELS
CASES = {
    "tiles": ((2, 18, 14, 8), (3, 3, 8, 5), 1, "VALID"),
    "tiles of 3": ((20, 6, 9, 8), (3, 3, 8, 5), 1, 1),
    "tiles of 3, many channels": ((20, 6, 6, MANY), (3, 3, MANY, 4), 1, 1),
    "taps": ((3, 3, 3, MANY), (3, 3, MANY, 4), 1, "SAME"),
    "taps, stride": ((2, 6, 7, MANY), (3, 3, MANY, 4), 2, 1),
    "taps, two strides": ((2, 5, 9, MANY), (3, 2, MANY, 3), (3, 2), "VALID"),
    "taps, only some inside": ((2, 1, 2, MANY), (3, 3, MANY, 3), 1, 1),
    "taps, uneven padding": ((2, 4, 3, MANY), (2, 3, MANY, 3), (2, 3), ((1, 3), (0, 4))),
    "taps, all padding": ((1, 1, 1, MANY), (1, 2, MANY, 2), 3, ((0, 0), (2, 0))),
    "tiles cropped": ((2, 15, 13, 8), (3, 3, 8, 3), 1, "SAME"),
    "tiles padded": ((2, 14, 11, 9), (3, 3, 9, 4), 1, 1),
    "few channels": ((2, 10, 10, 2), (3, 3, 2, 4), 1, "VALID"),
    "too small for tiles": ((3, 2, 2, 8), (3, 3, 8, 4), 1, "SAME"),
    "stride": ((2, 9, 10, 8), (3, 3, 8, 4), 2, "SAME"),
    "two strides": ((2, 9, 11, 3), (2, 3, 3, 4), (3, 2), "VALID"),
    "one by one": ((2, 5, 6, 8), (1, 1, 8, 3), 2, "VALID"),
    "uneven padding": ((2, 6, 5, 3), (5, 4, 3, 2), 1, ((2, 1), (0, 3))),
}


@pytest.mark.parametrize("case", CASES)
def test_conv2d_and_both_gradients_are_xlas(case, monkeypatch):
    shape, kernel, stride, padding = CASES[case]
    x, w = normal(1, *shape), normal(2, *kernel)
    strides = (stride, stride) if isinstance(stride, int) else stride
    pads = ((padding,) * 2,) * 2 if isinstance(padding, int) else padding
    called = []
    for name in ("sum_of_taps", "conv_blocks"):
        real = getattr(operations, name)
        monkeypatch.setattr(operations, name, lambda *args, f=real, n=name: called.append((n, args[0])) or f(*args))
    expected, expected_pullback = jax.vjp(partial(xla_conv, strides=strides, padding=pads), x, w)
    actual, pullback = jax.vjp(jax.jit(partial(conv2d, stride=stride, padding=padding)), x, w)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-4)
    close(actual, expected)
    cotangent = normal(3, *expected.shape)
    for ours, theirs in zip(pullback(cotangent), expected_pullback(cotangent), strict=True):
        close(ours, theirs)
    ways = {"tiles": ["conv_blocks"], "taps": ["sum_of_taps"]}
    assert [name for name, _ in called] == ways.get(case.replace(",", "").split()[0], [])
    if case in ("tiles", "tiles of 3"):
        assert called[0][1].shape[0] == (4 if case == "tiles" else 3)


def test_taps_count_the_products_that_are_not_padding():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes, window, strides = rng.integers(1, 6, 2), rng.integers(1, 4, 2), rng.integers(1, 4, 2)
        pads = rng.integers(0, 4, (2, 2))
        if (sizes + pads.sum(1) < window).any():
            continue
        counts = (sizes + pads.sum(1) - window) // strides + 1
        inside = {
            tuple(int(k) for k in q): [
                p for p in np.ndindex(*counts) if (((at := p * strides + q - pads[:, 0]) >= 0) & (at < sizes)).all()
            ]
            for q in np.ndindex(*window)
        }
        found = {tap.at: tap for tap in inner_taps(sizes, tuple(window), tuple(strides), pads)}
        assert set(found) == {q for q, p in inside.items() if p}
        for q, tap in found.items():
            assert tap.first == inside[q][0]
            assert np.prod(tap.counts) == len(inside[q])


@pytest.mark.parametrize("size", [14, 11])  # tiles of 4 and of 3
def test_winograd_keeps_single_precision(size):
    x, w = np.abs(normal(0, 2, size, size, 32)), normal(1, 3, 3, 32, 8) * 0.1
    exact = scipy_conv(x, w)
    error = np.abs(conv2d(x, w) - exact).max() / np.abs(exact).max()
    assert error < 2e-6  # the direct sum in single precision has about 3e-7


def test_second_derivatives_in_forward_and_reverse_mode_are_xlas():
    """Second derivatives along a direction, as Hessian estimates and meta-learning need them."""
    x, w, v = normal(0, 2, 14, 14, 8), 0.2 * normal(1, 3, 3, 8, 4), normal(2, 3, 3, 8, 4)

    def loss(conv, pool, w):
        return jnp.sum(jnp.square(pool(jnp.tanh(conv(x, w)))))

    def xla_pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    ours = partial(loss, conv2d, max_pool)
    theirs = partial(loss, partial(xla_conv, strides=(1, 1), padding="VALID"), xla_pool)
    expected = jax.jit(lambda w: jax.grad(lambda w: jnp.vdot(jax.grad(theirs)(w), v))(w))(w)
    over_reverse = jax.jit(lambda w: jax.grad(lambda w: jnp.vdot(jax.grad(ours)(w), v))(w))(w)
    over_forward = jax.jit(lambda w: jax.jvp(jax.grad(ours), (w,), (v,))[1])(w)
    np.testing.assert_allclose(over_reverse, expected, rtol=2e-3, atol=5e-3)
    np.testing.assert_allclose(over_forward, expected, rtol=2e-3, atol=5e-3)


def test_conv2d_with_a_kernel_for_each_client():
    x, w = normal(0, 3, 2, 14, 14, 8), normal(1, 3, 3, 3, 8, 4)
    batched = jax.jit(jax.vmap(conv2d))
    for one, kernel, together in zip(x, w, batched(x, w), strict=True):
        np.testing.assert_allclose(together, scipy_conv(one, kernel), rtol=1e-4, atol=1e-4)
    # XLA's grouped convolution is slow: the program must have none.
    assert "conv_general" not in str(jax.make_jaxpr(jax.vmap(conv2d))(x, w))


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ((3, 3, 4, 2), {}, r"\[B, H, W, 4\]"),
        ((9, 3, 3, 2), {}, "9 x 3 does not fit"),
        ((3, 3, 3, 2), {"padding": "FULL"}, "'FULL'"),
    ],
)
def test_conv2d_refuses(kernel, options, message):
    with pytest.raises(ValueError, match=message):
        conv2d(jnp.ones((1, 8, 8, 3)), jnp.ones(kernel), **options)


@pytest.mark.parametrize(("shape", "window"), [((2, 8, 6, 3), 2), ((1, 7, 9, 2), 2), ((2, 9, 6, 1), 3)])
def test_max_pool_and_its_gradient_are_xlas(shape, window):
    x = np.round(normal(0, *shape), 0)  # rounding makes ties
    sizes = (1, window, window, 1)
    expected, expected_pullback = jax.vjp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, sizes, sizes, "VALID"), x)
    actual, pullback = jax.vjp(jax.jit(partial(max_pool, window=window)), x)
    np.testing.assert_array_equal(actual, expected)
    cotangent = normal(1, *expected.shape)
    np.testing.assert_array_equal(pullback(cotangent)[0], expected_pullback(cotangent)[0])


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.1])
def test_dropout_keeps_the_mean(rate):
    x = jnp.ones((401, 499))
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = y != 0
    exact = round(256 * rate) / 256
    np.testing.assert_allclose(kept.mean(), 1 - exact, atol=4 * np.sqrt(rate / x.size))
    np.testing.assert_allclose(y[kept], 1 / (1 - exact), rtol=1e-6)
    # Each of the four bytes of a random word drops at the same rate, and neighbours are independent.
    for byte in range(4):
        np.testing.assert_allclose(kept.reshape(-1)[byte::4].mean(), 1 - exact, atol=8 * np.sqrt(rate / x.size))
    assert abs(np.corrcoef(kept.reshape(-1)[:-1], kept.reshape(-1)[1:])[0, 1]) < 0.01
    assert dropout(x, rate, None) is x
    assert not np.array_equal(kept, np.asarray(dropout(x, rate, jax.random.key(1))) != 0)


def test_glorot_uniform_bounds_a_kernel_by_both_fans():
    kernel = glorot_uniform(jax.random.key(0), (3, 3, 32, 64))
    limit = np.sqrt(6 / (9 * 32 + 9 * 64))
    assert np.abs(kernel).max() <= limit
    np.testing.assert_allclose(np.asarray(kernel).std(), limit / np.sqrt(3), rtol=0.02)


def derivatives(multiply, x, w, along):
    """The value of a function of x @ w, its gradient and tangent, and the Hessian along a direction in two modes."""

    def f(x, w):
        return jnp.sum(jnp.tanh(multiply(x, w)) ** 2)

    gradient = jax.grad(f, (0, 1))
    forward_over_reverse = jax.jvp(gradient, (x, w), along)[1]
    reverse_over_reverse = jax.grad(
        lambda x, w: sum(jnp.vdot(g, a) for g, a in zip(gradient(x, w), along, strict=True)), 1
    )
    return f(x, w), gradient(x, w), jax.jvp(f, (x, w), along)[1], forward_over_reverse, reverse_over_reverse(x, w)


@pytest.mark.parametrize("shape", [(1, 7), (3, 7), (FEW_ROWS, 7), (FEW_ROWS + 1, 7), (3, 6, 7), (7,)])
def test_products_and_their_derivatives_are_those_of_numpy_s_operator(shape):
    keys = jax.random.split(jax.random.key(len(shape)), 4)
    shapes = [shape, (shape[-1], 5)] * 2
    x, w, *along = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(a), jnp.float64) for a in (x, w, *along)]
        want, got = (derivatives(f, exact[0], exact[1], tuple(exact[2:])) for f in (jnp.matmul, product))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, want)


def test_products_with_weights_for_each_client():
    x, w = jax.random.normal(jax.random.key(0), (3, 4, 7)), jax.random.normal(jax.random.key(1), (3, 7, 5))
    got, want = (jax.vmap(jax.grad(lambda w, x, f=f: jnp.sum(f(x, w) ** 3)))(w, x) for f in (product, jnp.matmul))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "turned"), [(FEW_ROWS, True), (FEW_ROWS + 1, False)])
def test_few_rows_are_transposed_in_memory_for_the_weights_gradient(rows, turned):
    def loss(w):
        return product(jnp.ones((rows, 3)), w).sum()

    assert ("optimization_barrier" in jax.jit(jax.grad(loss)).lower(jnp.ones((3, 2))).as_text()) == turned
