"""The skeleton in CONTRIBUTING.md, run as it stands."""

import re
import sys
import textwrap
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.lowering import LoweringOptions, lower

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"
OPTIONS = {"client_lr": 0.05, "server_lr": 0.9, "batch_size": 4, "epochs": 2}


@pytest.fixture(scope="module")
def skeleton():
    """The first block of Python on the page, as a module."""
    code = re.search(r"^( *)```python\n(.*?)^\1```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert code is not None
    module = types.ModuleType("skeleton")
    sys.modules["skeleton"] = module  # NamedTuple looks its module up
    exec(compile(textwrap.dedent(code[2]), "CONTRIBUTING.md", "exec"), module.__dict__)
    yield module
    del sys.modules["skeleton"]


def images(*shape):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((30, *shape), dtype=np.float32), "y": rng.integers(0, 3, 30).astype(np.int32)}
    return fb.Split(arrays, np.array([0, 8, 13, 30]))


def test_it_is_fedavg(skeleton):
    model = models.emnist_cnn(3, image=(8, 8, 1))
    params = model.init(jax.random.key(0))
    runs = [
        fb.simulate(make(model.loss, **OPTIONS), params, images(8, 8, 1), rounds=3, cohort=2)
        for make in (skeleton.name, fb.fedavg)
    ]
    for a, b, before in zip(*(jax.tree.leaves(run.params) for run in runs), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.abs(a - before).max() > 0
    np.testing.assert_allclose(runs[0].history["train/loss"], runs[1].history["train/loss"], rtol=1e-5)


def test_the_engine_rewrites_its_convolutions(skeleton):
    """With a user's network that calls XLA's convolution, the lowered client of the skeleton has no convolution."""

    def loss(params, batch, key):
        y = jax.lax.conv(batch["x"], params["w"], (1, 1), "SAME")
        return ((y.mean((1, 2, 3)) - batch["y"]) ** 2 * batch["mask"]).mean()

    def program(loss, params, data, options):
        alg = lower(skeleton.name(loss, **OPTIONS), options)
        client = fb.ClientData.of(data.client(0))
        return str(jax.make_jaxpr(alg.exchanges[0].client)(fb.Down(params), (), client, jax.random.key(0)))

    users = loss, {"w": jax.numpy.ones((2, 1, 3, 3))}, images(1, 8, 8)
    assert "conv_general_dilated" not in program(*users, LoweringOptions())
    assert "conv_general_dilated" in program(*users, LoweringOptions(convolutions="native"))
    model = models.emnist_cnn(3, image=(8, 8, 1))
    ours = model.loss, model.init(jax.random.key(0)), images(8, 8, 1)
    assert "conv_general_dilated" not in program(*ours, LoweringOptions())


def test_its_own_example_runs(skeleton):
    import doctest

    assert doctest.testmod(skeleton).failed == 0
    assert doctest.testmod(skeleton).attempted == 1
