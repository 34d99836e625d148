"""The rounding of mixed precision on a CPU: values, factors and gradients are rounded where a GPU rounds them."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fedbraid.local
from fedbraid.lowering import LoweringOptions, lower_function
from fedbraid.models import conv2d

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rewrites(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module("rewrites")
    monkeypatch.setenv("XLA_FLAGS", found.EXCESS)  # for programs that run operation by operation it changes nothing
    yield found
    sys.modules.pop("rewrites")


def rounded(array):
    return np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float64)


def two_layers(params, batch, key):
    hidden = batch["x"] @ params["first"]
    return jnp.sum(hidden @ params["last"])


def gradients(params, batch):
    both = lower_function(fedbraid.local.value_and_grad(two_layers), LoweringOptions(precision="bfloat16"))
    with jax.disable_jit():
        return both(params, batch, None)


def test_values_between_layers_and_factors_are_rounded_as_numpy_rounds_them(rewrites):
    rng = np.random.default_rng(0)
    shapes = {"first": (6, 5), "last": (5, 3)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.standard_normal((4, 6)).astype(np.float32)
    plain, _ = gradients(params, {"x": x})
    with rewrites.emulated():
        loss, slopes = gradients(params, {"x": x})
    hidden = rounded(rounded(x) @ rounded(params["first"]))
    expected = (hidden @ rounded(params["last"])).sum()
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert abs(float(plain) - expected) > 1e-4  # without rounding it is another number
    back = rounded(np.ones((4, 3)) @ rounded(params["last"]).T)
    np.testing.assert_allclose(slopes["first"], rounded(rounded(x).T @ back), rtol=1e-6)
    np.testing.assert_allclose(slopes["last"], rounded(hidden.T @ np.ones((4, 3))), rtol=1e-6)


def test_convolutions_add_in_float32_and_round_once(rewrites):
    rng = np.random.default_rng(1)
    x, kernel = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 6, 6, 8), (3, 3, 8, 4)))
    with rewrites.emulated():
        from fedbraid.lowering import operations

        found = operations.conv2d(x, kernel, padding="SAME")
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(rounded(x), ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2)
    )
    exact = np.einsum("nhwcij,ijco->nhwo", windows, rounded(kernel))
    assert found.dtype == jnp.bfloat16
    error = np.abs(rounded(found) - exact).max()
    assert error <= 2**-8 * np.abs(exact).max()  # half a unit in the last place, and a little for sums
    assert operations.conv2d is conv2d  # the patch has ended


def test_without_the_flag_of_xla_nothing_is_emulated(rewrites, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(RuntimeError, match="xla_allow_excess_precision=false"), rewrites.emulated():
        pass
