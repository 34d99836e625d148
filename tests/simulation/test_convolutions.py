"""Convolutions of a user's model in a run: rewritten by default, left to XLA on request, with the same results."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.cli.app import make_app
from fedbraid.costs import data_shapes
from fedbraid.local import masked_mean
from fedbraid.lowering import LoweringOptions, explain, lower
from told import told


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    last: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 4, 3, stride=1, key=first)
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.last = eqx.nn.Linear(4 * 3 * 3, 3, key=second)

    def __call__(self, x):
        return self.last(self.pool(jnp.tanh(self.conv(x))).ravel())


PARAMS, STATIC = eqx.partition(Net(jax.random.key(0)), eqx.is_array)


def loss(params, batch, key):
    logits = jax.vmap(eqx.combine(params, STATIC))(batch["x"])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
    return masked_mean(-chosen, batch["mask"])


def by_hand(loss):
    """A user's own client function, which calls ``jax.grad`` itself."""

    def client(down, state, data, key):
        g = jax.grad(loss)(down.params, data.everything(), key)
        return fb.Report(fb.Up(g), 1.0)

    alg = fb.fedavg(loss)
    return alg._replace(exchanges=(alg.exchanges[0]._replace(client=client),))


def split():
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((24, 1, 8, 8)).astype(np.float32), "y": rng.integers(0, 3, 24).astype(np.int32)}
    return fb.Split(arrays, np.array([0, 4, 11, 24]))


MADE = {"fedavg": lambda: fb.fedavg(loss, batch_size=4), "by hand": lambda: by_hand(loss)}


@pytest.mark.parametrize("name", MADE)
def test_the_same_run_with_and_without_xlas_convolution(name):
    runs = [
        fb.simulate(MADE[name](), PARAMS, split(), rounds=2, cohort=2, convolutions=how).params
        for how in ("fast", "native")
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert float(jnp.abs(jax.tree.leaves(runs[0])[0] - jax.tree.leaves(PARAMS)[0]).max()) > 1e-4


@pytest.mark.parametrize("name", MADE)
def test_what_a_client_runs(name):
    data, key = fb.ClientData.of(split().client(0)), jax.random.key(0)

    def program(how):
        alg = lower(MADE[name](), LoweringOptions(convolutions=how))
        exchange = alg.exchanges[0]
        return str(jax.make_jaxpr(exchange.client)(exchange.send(alg.init(PARAMS)), (), data, key))

    for primitive in ("conv_general_dilated", "reduce_window_max", "select_and_scatter"):
        assert primitive not in program("fast")
        assert primitive in program("native")


def test_it_is_explained():
    def lines_of(**options):
        data = data_shapes(split())
        return explain(fb.fedavg(loss, batch_size=4), PARAMS, data, LoweringOptions(**options)).convolutions["train"]

    lines = lines_of()
    assert "convolution of (4, 1, 8, 8) with (4, 1, 3, 3): matrix products (patches)" in lines
    assert any(line.startswith("max pool") for line in lines)
    asked = lines_of(convolutions="native")
    assert asked[lines.index("convolution of (4, 1, 8, 8) with (4, 1, 3, 3): matrix products (patches)")] == (
        "convolution of (4, 1, 8, 8) with (4, 1, 3, 3): left to XLA, as asked"
    )
    command = ["run", "--set", "algorithm.name=mime", "--set", "engine.data_in=host", "--explain", "--json"]
    result = CliRunner().invoke(make_app(), command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["data"] == "streamed from the host"
    assert found["convolutions"] == {"gradient": [], "train": []}  # a perceptron has no convolutions
    with pytest.raises(ValueError, match="convolutions must be one of 'fast', 'native', got 'slow'"):
        fb.simulate(fb.fedavg(loss), PARAMS, split(), rounds=1, convolutions="slow")


def test_precision_reaches_every_product_of_a_client_and_changes_nothing_on_a_cpu():
    data, key = fb.ClientData.of(split().client(0)), jax.random.key(0)

    def program(how):
        alg = lower(fb.fedavg(loss, batch_size=4), LoweringOptions(precision=how))
        exchange = alg.exchanges[0]
        return str(jax.make_jaxpr(exchange.client)(exchange.send(alg.init(PARAMS)), (), data, key))

    products = program("default").count("dot_general[")
    assert products > 3
    assert program("bfloat16").count("BF16_BF16_F32") == products
    assert program("float32").count("HIGHEST") >= products
    with told("precision='bfloat16' has no effect on a CPU"):
        runs = [
            fb.simulate(fb.fedavg(loss, batch_size=4), PARAMS, split(), rounds=1, cohort=2, precision=how).params
            for how in ("default", "float32", "bfloat16")
        ]
    for ours, exact, theirs in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="precision must be one of 'default', 'float32', 'tf32', 'bfloat16', got 'f8'"):
        fb.simulate(fb.fedavg(loss), PARAMS, split(), rounds=1, precision="f8")
