"""flax.nnx modules as models; runs where flax is installed (`make torch-test`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.lowering import Lanes, LoweringOptions, explain, explain_function, kernels
from fedbraid.models import from_nnx

nnx = pytest.importorskip("flax.nnx")

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.random((5, 8, 8, 1), dtype=np.float32), "y": np.array([0, 2, 1, 1, 0], np.int32)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(256, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x)).reshape(x.shape[0], -1)
        return self.layers[1](self.drop(nnx.relu(self.layers[0](x))))


def test_an_nnx_network_keeps_its_meaning():
    net = Net(nnx.Rngs(0))
    model = from_nnx(net)
    params = model.init(jax.random.key(0))
    net.eval()
    np.testing.assert_allclose(model.predict(params, BATCH["x"]), net(BATCH["x"]), rtol=1e-5, atol=1e-6)

    def plain(net):
        scores = jax.nn.log_softmax(net(BATCH["x"]))
        return -scores[np.arange(5), BATCH["y"]].mean()

    expected = nnx.to_pure_dict(nnx.grad(plain)(net))
    gradient = jax.jit(jax.grad(model.loss))(params, BATCH, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, expected)
    assert ": matrix products" in explain_function(model.loss, params, BATCH, None)[0]


def test_dropout_is_drawn_from_the_key_and_the_module_is_not_changed():
    net = Net(nnx.Rngs(0))
    model = from_nnx(net)
    params = model.init(jax.random.key(0))
    loss = jax.jit(model.loss)
    keys = (None, jax.random.key(0), jax.random.key(1))
    first, again = ([float(loss(params, BATCH, key)) for key in keys] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    mapped = jax.vmap(lambda key: model.loss(params, BATCH, key))(jax.random.split(jax.random.key(2), 2))
    assert float(mapped[0]) != float(mapped[1])
    algorithm = fb.fedavg(model.loss, client_lr=0.1, batch_size=5, epochs=1)
    run = fb.simulate(algorithm, params, fb.Split(BATCH, np.array([0, 5])), rounds=2, cohort=1)
    assert float(np.abs(run.params["conv"]["kernel"] - params["conv"]["kernel"]).max()) > 0
    jax.tree.map(np.testing.assert_array_equal, from_nnx(net).init(None), params)


class Transformer(nnx.Module):
    """A block of flax's own layers; ``rate``: of dropout inside the attention."""

    def __init__(self, rngs, rate):
        self.embedding = nnx.Embed(300, 64, rngs=rngs)
        self.norm1, self.norm2, self.norm3 = (nnx.LayerNorm(64, rngs=rngs) for _ in range(3))
        self.attention = nnx.MultiHeadAttention(4, 64, dropout_rate=rate, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
        self.out = nnx.Linear(64, 300, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.out(self.norm3(x))


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_on_a_gpu_transformers_run_in_kernels(rate, monkeypatch):
    """Nothing runs: programs are traced as for an NVIDIA GPU."""
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    model = from_nnx(Transformer(nnx.Rngs(0), rate), score="tokens")
    text, number = jax.ShapeDtypeStruct((800, 32), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    algorithm = fb.fedavg(model.loss, client_lr=0.05, batch_size=8, epochs=1)
    data = fb.ClientData({"x": text, "y": text}, number, number, 40)
    params = jax.eval_shape(model.init, jax.random.key(0))
    found = explain(algorithm, params, data, LoweringOptions(precision="bfloat16"), Lanes(20, 40))
    attention = (
        ["attention", "attention_back"] if rate == 0 else ["attention_with_dropout", "attention_back_with_dropout"]
    )
    names = [*attention, "activation", "activation_back", "log_sum_exp", "row_norm", "row_norm_back"]
    twice = ["add_row_norm x 2", "add_row_norm_back x 2"]
    assert found.kernels["train"] == sorted([f"{name} x 1" for name in names] + twice)


def test_nnx_refusals():
    with pytest.raises(ValueError, match="keeps state in BatchStat"):
        from_nnx(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"needs a flax\.nnx module, got a int"):
        from_nnx(3)
    with pytest.raises(ValueError, match="classes, values, tokens"):
        from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), score="logits")
