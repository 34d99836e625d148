"""Batch normalisation of equinox modules: equinox's own arithmetic, without padding, with statistics as leaves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.data.federated import Split
from fedbraid.local import NORM, STATISTICS
from fedbraid.models import from_equinox

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 2, 4)).astype(np.float32), RNG.normal(size=(6, 3)).astype(np.float32)
BATCH = {"x": jnp.asarray(X), "y": jnp.asarray(Y), "mask": jnp.ones(6)}


class Net(eqx.Module):
    """A convolution, batch normalisation over two channels and their places, dropout, a dense layer."""

    conv: eqx.nn.Conv1d
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, mode, key):
        a, b = jax.random.split(key)
        self.conv = eqx.nn.Conv1d(2, 2, 3, padding=1, key=a)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode=mode, momentum=0.9)
        self.dropout = eqx.nn.Dropout(0.0)
        self.out = eqx.nn.Linear(8, 3, key=b)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.conv(x), state)
        return self.out(self.dropout(jax.nn.relu(x), key=key).reshape(-1)), state


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_steps_are_those_of_equinox(mode):
    """SGD with equinox's own layer and state, against the model's loss and statistics; padded rows change nothing."""
    network, state = eqx.nn.make_with_state(Net)(mode, jax.random.key(1))
    model = from_equinox(lambda key: eqx.nn.make_with_state(Net)(mode, jax.random.key(1)), score="values")
    params, statistics = model.init(jax.random.key(0)), getattr(model.loss, STATISTICS)
    assert statistics.leaves == ("norm.mean", "norm.variance", "norm.count")
    assert getattr(model.loss, NORM) == ("norm.weight", "norm.bias", *statistics.leaves)
    garbage = jnp.full((2, 2, 4), 99.0)
    padded = {
        "x": jnp.concatenate([BATCH["x"], garbage]),
        "y": jnp.concatenate([BATCH["y"], jnp.zeros((2, 3))]),
        "mask": jnp.concatenate([jnp.ones(6), jnp.zeros(2)]),
    }

    @eqx.filter_jit
    def theirs(network, state):
        def loss(network, state):
            out, after = jax.vmap(network, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(BATCH["x"], state)
            return 0.5 * jnp.mean(jnp.sum((out - BATCH["y"]) ** 2, -1)), after

        (value, after), g = eqx.filter_value_and_grad(loss, has_aux=True)(network, state)
        return value, eqx.apply_updates(network, jax.tree.map(lambda g: -0.1 * g, g)), after

    @jax.jit
    def ours(params):
        key = jax.random.key(3)
        (value, new), g = jax.value_and_grad(statistics.update, has_aux=True)(params, padded, key)
        moved = jax.tree.map(lambda y, g: y - 0.1 * g, params, g)
        return value, jax.tree.map(lambda y, s: y if s is None else s, moved, new, is_leaf=lambda x: x is None)

    for _ in range(3):
        value, network, state = theirs(network, state)
        mine, params = ours(params)
        np.testing.assert_allclose(mine, value, rtol=1e-5)
    kept = state.get(network.norm.batch_state_index if mode == "batch" else network.norm.ema_state_index)
    np.testing.assert_allclose(params.norm.mean, kept[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params.norm.variance, kept[1], rtol=1e-5)
    assert float(params.norm.count) == 3
    np.testing.assert_allclose(params.conv.weight, network.conv.weight, rtol=1e-4, atol=1e-6)
    still = eqx.nn.inference_mode(network)
    out = jax.vmap(lambda x: still(x, state)[0])(BATCH["x"])
    np.testing.assert_allclose(model.predict(params, BATCH["x"]), out, rtol=1e-4, atol=1e-5)
    again = from_equinox((network, state), score="values")  # a trained module keeps its statistics
    np.testing.assert_allclose(again.predict(again.init(jax.random.key(0)), BATCH["x"]), out, rtol=1e-4, atol=1e-5)


def test_a_federation_trains_such_a_module():
    model = from_equinox(lambda key: eqx.nn.make_with_state(Net)("batch", key), score="values")
    split = Split.from_clients([{"x": X[:4], "y": Y[:4]}, {"x": 3 * X[4:] + 1, "y": Y[4:]}])
    params = model.init(jax.random.key(0))
    alg = fb.fedbn(model.loss, client_lr=0.05, batch_size=3, epochs=2)
    result = fb.simulate(alg, params, split, rounds=3, devices=1)
    own = jax.vmap(alg.personal, in_axes=(None, 0))(result.server, result.states)
    assert float(own.norm.count[0]) == 12  # two batches an epoch, two epochs, three rounds
    assert float(own.norm.count[1]) == 6
    assert np.abs(np.asarray(own.norm.mean[0] - own.norm.mean[1])).max() > 0.1
    assert float(result.params.norm.count) == 0
