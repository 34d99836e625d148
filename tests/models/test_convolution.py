"""Convolutions as matrix products against XLA's own, over random shapes, with both gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedbraid.lowering.rewrite import explain_function, fast_convolutions


@st.composite
def convolutions(draw):
    """(x, kernel, options) of a convolution in one to three dimensions."""
    space = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(space))  # noqa: E731
    feature, batch = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]))
    sizes, window = each(1, 7 if space < 3 else 4), each(1, 4 if space < 3 else 2)
    channels, out = feature * draw(st.integers(1, 3)), feature * batch * draw(st.integers(1, 3))
    options = {
        "window_strides": each(1, 3),
        "padding": tuple((draw(st.integers(-1, 2)), draw(st.integers(-1, 2))) for _ in range(space)),
        "lhs_dilation": each(1, 2),
        "rhs_dilation": each(1, 2),
        "feature_group_count": feature,
        "batch_group_count": batch,
        "dimension_numbers": draw(
            st.sampled_from([("NCX", "OIX", "NCX"), ("NXC", "XIO", "NXC"), ("CNX", "IXO", "XNC")])
        ),
    }
    names = "DHW"[:space]
    options["dimension_numbers"] = tuple(text.replace("X", names) for text in options["dimension_numbers"])
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    lhs, rhs, _ = options["dimension_numbers"]
    lengths = dict(zip(names, sizes, strict=True)) | {"N": batch * draw(st.integers(1, 2)), "C": channels}
    windows = dict(zip(names, window, strict=True)) | {"I": channels // feature, "O": out}
    x = rng.standard_normal([lengths[name] for name in lhs])
    kernel = rng.standard_normal([windows[name] for name in rhs])
    for size, pads, dilated, q, d in zip(
        sizes, options["padding"], options["lhs_dilation"], window, options["rhs_dilation"], strict=True
    ):
        assume((size - 1) * dilated + 1 + sum(pads) >= (q - 1) * d + 1)
    return x, kernel, options


@settings(max_examples=12, deadline=None)
@given(convolutions())
def test_values_and_gradients_are_xlas(drawn):
    x, kernel, options = drawn

    def plain(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, **options)

    def gradients(function):
        y = function(x, kernel)
        weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return y, *jax.grad(lambda *args: jnp.sum(function(*args) ** 2 * weights), (0, 1))(x, kernel)

    with jax.enable_x64(True):
        x, kernel = jnp.asarray(x), jnp.asarray(kernel)
        (line,) = explain_function(plain, x, kernel)
        assert line.startswith(f"convolution of {x.shape} with {kernel.shape}: matrix products")
        # before differentiation, as the models' adapters rewrite; and after it, as the engine does
        ways = (lambda: gradients(plain), lambda: gradients(fast_convolutions(plain)))
        expected, before, after = jax.jit(lambda: (ways[0](), ways[1](), fast_convolutions(ways[0])()))()
        for ours in (before, after):
            for a, b in zip(ours, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_training_step_has_no_convolution_left():
    x, w = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))

    def loss(w, x):
        y = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.tanh(y) ** 2)

    step = jax.grad(loss, (0, 1))
    assert str(jax.make_jaxpr(step)(w, x)).count("conv_general_dilated[") == 3
    assert "conv_general_dilated[" not in str(jax.make_jaxpr(fast_convolutions(step))(w, x))


@pytest.mark.parametrize(
    ("x", "kernel", "reason"),
    [
        (jnp.ones((1, 1, 9), jnp.int32), jnp.ones((1, 1, 3), jnp.int32), "only floats of one dtype are rewritten"),
        (jnp.ones((1, 1, 900)), jnp.ones((1, 1, 300)), "it needs 300 slices, more than 128"),
    ],
)
def test_what_does_not_fit_stays_and_says_why(x, kernel, reason):
    def plain(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID")

    assert "left to XLA: " in explain_function(plain, x, kernel)[0]
    assert explain_function(plain, x, kernel)[0].endswith(reason)
    assert "conv_general_dilated[" in str(jax.make_jaxpr(fast_convolutions(plain))(x, kernel))
    np.testing.assert_array_equal(fast_convolutions(plain)(x, kernel), plain(x, kernel))


@pytest.mark.parametrize(
    ("images", "channels", "window", "strides", "how"),
    [
        ((20, 24, 24), 64, 3, (1, 1), "Winograd's tiles of 4 x 4"),
        ((20, 6, 6), 256, 3, (1, 1), "Winograd's tiles of 3 x 3"),
        ((20, 3, 3), 512, 3, (1, 1), "one for each position of the window"),
        ((20, 24, 24), 3, 5, (2, 2), "patches"),
    ],
)
def test_explain_says_of_which_products(images, channels, window, strides, how):
    x = jax.ShapeDtypeStruct((*images, channels), jnp.float32)
    kernel = jax.ShapeDtypeStruct((window, window, channels, 2 * channels), jnp.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=layout)  # noqa: E731
    (line,) = explain_function(convolve, x, kernel)
    assert line.endswith(f": matrix products ({how})")
