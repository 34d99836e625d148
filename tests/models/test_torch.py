"""PyTorch modules as models: gradients, dropout, frozen parts, refusals, and weights back (`make torch-test`)."""

import copy
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.local import rewriting, value_and_grad
from fedbraid.lowering import Lanes, LoweringOptions, explain, explain_function, fast_convolutions, kernels
from fedbraid.models import build, char_lstm, emnist_cnn, from_torch, to_torch, total

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("torchax is not installed", allow_module_level=True)
from torch import nn

FOUND = torch._ops.OpOverloadPacket.__getattr__  # before torchax is imported
RNG = np.random.default_rng(0)
IMAGES = {"x": RNG.random((6, 28, 28, 1), dtype=np.float32), "y": RNG.integers(0, 5, 6).astype(np.int32)}
TEXT = RNG.integers(1, 20, (3, 13)).astype(np.int32)
TOKENS = {"x": TEXT[:, :-1].copy(), "y": TEXT[:, 1:].copy()}
FEATURES = {"x": RNG.standard_normal((6, 4)).astype(np.float32), "y": RNG.integers(0, 3, 6).astype(np.int32)}


@pytest.fixture(scope="module")
def networks():
    place = str(Path(__file__).parents[2] / "examples")
    sys.path.insert(0, place)
    yield importlib.import_module("torch_networks")
    sys.path.remove(place)


class Recurrent(nn.Module):
    """A recurrent layer from an initial state that is learned, whose last states are used as well."""

    def __init__(self, kind, start=True, **options):
        super().__init__()
        self.embedding = nn.Embedding(20, 3)
        self.layer = kind(3, 4, batch_first=True, **options)
        self.directions = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.sizes = [self.layer.proj_size or 4, 4] if kind is nn.LSTM else [4]
        self.starts = nn.ParameterList([torch.randn(self.directions, 1, n) for n in self.sizes] if start else [])
        self.out = nn.Linear(self.sizes[0] * (2 if self.layer.bidirectional else 1), 20)

    def forward(self, x):
        starts = [s.expand(-1, len(x), -1) for s in self.starts]
        state = None if not starts else tuple(starts) if len(self.sizes) == 2 else starts[0]
        y, last = self.layer(self.embedding(x), state)
        lasts = last if isinstance(last, tuple) else (last,)
        return self.out(y) + sum(part.mean() for part in lasts)


class Transformer(nn.Module):
    """A language model of PyTorch's own layers."""

    def __init__(self, vocab=20, width=8, heads=2, length=12, norm_first=True, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        options = {"activation": "gelu", "batch_first": True, "norm_first": norm_first}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, **options)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocab)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.blocks(self.embedding(x) + self.positions, mask=mask, is_causal=True))


class Attending(nn.Module):
    """``nn.MultiheadAttention`` with every kind of mask."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, bias=kind != "weights", batch_first=kind != "positions first")
        self.out = nn.Linear(8, 20)

    def forward(self, x):
        h, t = self.embedding(x), x.shape[1]
        later = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        if self.kind == "padding":  # one query sees no key
            y, _ = self.attention(h, h, h, key_padding_mask=x < 5, attn_mask=later, need_weights=False)
        elif self.kind == "weights":
            y, weights = self.attention(h, h, h, attn_mask=torch.zeros(t, t).masked_fill(later, -torch.inf))
            y = y + weights.sum(-1, keepdim=True) * weights.max()
        else:
            y = self.attention(*[h.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1)
        return self.out(h + y)


class NanoGPT(nn.Module):
    """Attention as people write it: one product for queries, keys and values, and the fused function."""

    def __init__(self, vocab, width, heads, length):
        super().__init__()
        self.heads = heads
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        b, t, width = x.shape
        split = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(b, t, self.heads, width // self.heads).transpose(1, 2) for part in split)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).contiguous().view(b, t, width))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.out(self.norm3(x))


MODULES = {
    "cnn": lambda n: (n.CNN(5), IMAGES, {"image": (28, 28, 1)}),
    "lstm": lambda n: (n.CharLSTM(20, hidden=8), TOKENS, {}),
    "gpt2": lambda n: (n.gpt2_module(20, 16, 2), TOKENS, {}),
    "llama": lambda n: (n.llama_module(20, 16, 2), TOKENS, {}),
    "lstm, both ways, last states": lambda n: (Recurrent(nn.LSTM, False, num_layers=2, bidirectional=True), TOKENS, {}),
    "lstm, start, no bias": lambda n: (Recurrent(nn.LSTM, bias=False), TOKENS, {}),
    "lstm, projection": lambda n: (Recurrent(nn.LSTM, proj_size=2), TOKENS, {}),
    "gru, both ways": lambda n: (Recurrent(nn.GRU, num_layers=2, bidirectional=True), TOKENS, {}),
    "rnn": lambda n: (Recurrent(nn.RNN, False), TOKENS, {}),
    "rnn, relu": lambda n: (Recurrent(nn.RNN, nonlinearity="relu"), TOKENS, {}),
    "encoder": lambda n: (
        nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 20)),
        TOKENS,
        {},
    ),
    "transformer": lambda n: (Transformer(), TOKENS, {}),
    "nano gpt": lambda n: (NanoGPT(20, 8, 2, 12), TOKENS, {}),
    "attention, padding": lambda n: (Attending("padding"), TOKENS, {}),
    "attention, weights": lambda n: (Attending("weights"), TOKENS, {}),
    "attention, positions first": lambda n: (Attending("positions first"), TOKENS, {}),
}


def torch_gradient(module, batch):
    """The loss and the gradients of PyTorch itself, in the module's present mode."""
    module.zero_grad()
    x = torch.from_numpy(batch["x"])
    outputs = module(x.permute(0, 3, 1, 2) if x.ndim == 4 else x)
    outputs = getattr(outputs, "logits", outputs)
    y = torch.from_numpy(batch["y"]).long().reshape(-1)
    loss = nn.functional.cross_entropy(outputs.reshape(len(y), -1), y)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in module.named_parameters() if p.requires_grad}


def assert_equal_gradients(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        # a gradient of only rounding errors, such as that of a key's bias in attention, is compared with 1e-3
        scale = max(np.abs(expected).max(), 1e-3)
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_gradients_are_those_of_pytorch(name, networks):
    torch.manual_seed(0)
    module, batch, options = MODULES[name](networks)
    score = {} if "image" in options else {"score": "tokens"}
    model = from_torch(module, **options, **score)

    def both(params):
        with rewriting(fast_convolutions):
            return value_and_grad(model.loss)(params, batch, None), model.metrics(params, batch)

    (loss, gradient), metrics = jax.jit(both)(model.init(jax.random.key(0)))
    expected_loss, expected = torch_gradient(module.eval(), batch)
    np.testing.assert_allclose([loss, total(metrics["loss"])], expected_loss, rtol=1e-5)
    assert_equal_gradients(gradient, expected)


def test_recurrent_layers_are_loops_and_convolutions_are_rewritten(networks):
    long = {name: np.tile(tokens, (1, 10)) for name, tokens in TOKENS.items()}
    model = from_torch(networks.CharLSTM(20, hidden=8), score="tokens")
    programs = [str(jax.make_jaxpr(model.loss)(model.init(None), batch, None)) for batch in (TOKENS, long)]
    assert len(programs[1]) < 1.5 * len(programs[0])  # does not grow with the number of positions
    model = from_torch(networks.EmnistCNN(5), image=(28, 28, 1))
    lines = explain_function(model.loss, model.init(None), IMAGES, jax.random.key(0))
    assert [line.rsplit(": ")[-1].partition(" (")[0] for line in lines] == 2 * ["matrix products"] + [
        "together with the convolution before it"
    ]


def test_on_a_gpu_they_run_in_the_kernels_of_our_own_models(networks, monkeypatch):
    """Nothing runs: the programs of benchmarks/torch_models.py are traced as for an NVIDIA GPU."""
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)

    def explained(model, size, batch, x, y):
        arrays = {
            name: jax.ShapeDtypeStruct((100 * size, *shape), dtype) for name, (shape, dtype) in (("x", x), ("y", y))
        }
        number = jax.ShapeDtypeStruct((), jnp.int32)
        algorithm = fb.fedavg(model.loss, client_lr=0.05, batch_size=batch, epochs=1)
        params = jax.eval_shape(model.init, jax.random.key(0))
        data = fb.ClientData(arrays, number, number, size)
        return explain(algorithm, params, data, LoweringOptions(), Lanes(100, size))

    images, label, text = ((28, 28, 1), jnp.float32), ((), jnp.int32), ((80,), jnp.int32)
    theirs = explained(networks.emnist_cnn(62), 200, 20, images, label)
    ours = explained(emnist_cnn(62), 200, 20, images, label)
    assert theirs.kernels["train"] == ours.kernels["train"]
    assert theirs.grown() == [
        "carry.params['7.weight'] (128, 9216): the shared matrix plus 20 rows a step, 200 at most"
    ]
    theirs, ours = (explained(model, 30, 10, text, text) for model in (networks.char_lstm(90), char_lstm(90)))
    assert theirs.kernels["train"] == ours.kernels["train"] == ["lstm_backwards x 1", "lstm_forwards x 1"]


def one_block(attention="", *, norms=2, biased=True):
    """The kernels of a block and the loss. ``norms``: those that follow a residual connection."""
    activation = ["activation", "activation_back"] if biased else []
    names = [f"attention{attention}", f"attention_back{attention}", "log_sum_exp", *activation]
    counts = Counter(names) + Counter({"add_row_norm": norms, "add_row_norm_back": norms})
    return counts + Counter({"row_norm": 1, "row_norm_back": 1})


TRANSFORMERS = {
    "nano gpt": (lambda n: NanoGPT(300, 64, 4, 32), one_block("_with_bias")),
    "gpt2": (lambda n: n.gpt2_module(300, 64, 1), one_block("_with_bias")),
    "llama": (lambda n: n.llama_module(300, 64, 1), one_block(biased=False)),  # no layer has a bias
    "layers": (lambda n: Transformer(300, 64, 4, 32, layers=1), one_block("_with_dropout", norms=1)),
    "layers, norm last": (
        lambda n: Transformer(300, 64, 4, 32, norm_first=False, layers=1),
        one_block("_with_dropout") - Counter(["row_norm", "row_norm_back"]),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_on_a_gpu_transformers_run_in_kernels(name, networks, monkeypatch):
    """Nothing runs: programs are traced as for an NVIDIA GPU."""
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    make, wanted = TRANSFORMERS[name]
    model = from_torch(make(networks), score="tokens")
    text = jax.ShapeDtypeStruct((800, 32), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    algorithm = fb.fedavg(model.loss, client_lr=0.05, batch_size=8, epochs=1)
    data = fb.ClientData({"x": text, "y": text}, number, number, 40)
    params = jax.eval_shape(model.init, jax.random.key(0))
    found = explain(algorithm, params, data, LoweringOptions(precision="bfloat16"), Lanes(20, 40))
    assert found.kernels["train"] == sorted(f"{name} x {count}" for name, count in wanted.items())


def test_dropout_inside_attention_is_drawn_from_the_key():
    attention = nn.MultiheadAttention(4, 2, dropout=0.25, batch_first=True)
    with torch.no_grad():  # values are 1, so the result is the sum of the weights that are kept
        attention.in_proj_weight[8:] = 0
        attention.in_proj_bias[8:] = 1
        attention.out_proj.weight.copy_(torch.eye(4))
    ones = {"x": RNG.standard_normal((50, 40, 4)).astype(np.float32), "y": np.zeros(50, np.float32)}
    model = from_torch(
        attention,
        call=lambda layer, x: layer(x, x, x, need_weights=False)[0],
        score=lambda outputs, y, mask: {"loss": (outputs.mean((1, 2)), mask)},
    )
    params = model.init(None)
    losses = jax.jit(jax.vmap(lambda key: model.loss(params, ones, key)))(jax.random.split(jax.random.key(0), 3))
    assert len(set(losses.tolist())) == 3
    np.testing.assert_allclose(losses, 1.0, atol=0.02)
    np.testing.assert_allclose(model.loss(params, ones, None), 1.0, atol=1e-6)


def test_dropout_is_drawn_from_the_key():
    class Dropping(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.scale, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout(rate)

        def forward(self, x):
            return self.scale * self.drop(x)

    ones = {"x": np.ones((200, 300), np.float32), "y": np.zeros((200, 300), np.float32)}
    for rate in (0.25, 0.1):
        model = from_torch(Dropping(rate), score=lambda outputs, y, mask: {"loss": (outputs.mean(1), mask)})
        params = model.init(jax.random.key(0))
        losses = jax.jit(jax.vmap(lambda key, m=model, p=params: m.loss(p, ones, key)))(
            jax.random.split(jax.random.key(1), 3)
        )
        assert len(set(losses.tolist())) == 3
        np.testing.assert_allclose(losses, 1.0, atol=0.01)  # 60,000 entries
        assert float(model.loss(params, ones, None)) == 1.0
        first, again = (model.loss(params, ones, jax.random.key(7)) for _ in range(2))
        assert float(first) == float(again)
        outputs = jax.grad(lambda x, m=model, p=params: m.loss(p, {**ones, "x": x}, jax.random.key(2)))(ones["x"])
        np.testing.assert_allclose(np.mean(np.asarray(outputs) == 0), rate, atol=0.005)


def test_a_step_of_fedavg_is_a_step_of_pytorch_and_weights_go_back():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = from_torch(module)
    algorithm = fb.fedavg(model.loss, client_lr=0.5, batch_size=6, epochs=1)
    split = fb.Split(FEATURES, np.array([0, 6]))
    run = fb.simulate(algorithm, model.init(jax.random.key(0)), split, rounds=1, cohort=1)
    trained = to_torch(run.params, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())  # unchanged so far
    torch_gradient(module, FEATURES)
    optimizer.step()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(trained.get_parameter(name).detach(), parameter.detach(), atol=1e-6)
    fresh = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    fresh.load_state_dict(trained.state_dict())
    again = from_torch(fresh).init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, again, dict(run.params))  # to the last bit
    np.testing.assert_allclose(
        model.predict(run.params, FEATURES["x"]), trained(torch.from_numpy(FEATURES["x"])).detach(), atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_round_trip_is_exact(dtype):
    module = nn.Linear(5, 7).to(dtype)
    params = from_torch(module).init(jax.random.key(0))
    back = to_torch(params, nn.Linear(5, 7).to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), back.parameters(), strict=True))


def test_frozen_parameters_buffers_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.middle, self.out = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20)
            self.out.weight = self.embedding.weight
            self.middle.weight.requires_grad_(False)
            self.register_buffer("shift", torch.full((6,), 0.5))
            self.plain = torch.full((6,), 2.0)  # a tensor that is neither a parameter nor a buffer
            self.listed = [torch.arange(6.0)]

        def forward(self, x):
            made = torch.tril(torch.ones(6, 6)) * torch.tensor(0.5)  # on the CPU
            y = self.middle(self.embedding(x)) @ made
            return self.out(y[..., torch.tensor([5, 4, 3, 2, 1, 0])] * self.plain + self.shift + self.listed[0])

    module = Tied()
    model = from_torch(module, score="tokens")
    params = model.init(jax.random.key(0))
    assert sorted(params) == ["embedding.weight", "middle.bias", "out.bias"]
    gradient = jax.grad(model.loss)(params, TOKENS, None)
    assert_equal_gradients(gradient, torch_gradient(module.eval(), TOKENS)[1])
    back = to_torch(jax.tree.map(lambda leaf: leaf + 1, params), module)
    assert back.out.weight is back.embedding.weight
    assert torch.equal(back.middle.weight, module.middle.weight)
    assert torch.equal(back.out.weight, module.out.weight + 1)
    assert "plain" in vars(module)  # the module itself is as before


def test_batch_normalisation_stays_on_the_clients():
    """One client with FedBN is PyTorch's own SGD, statistics included; the last batch has padding."""
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    module(torch.randn(64, 4) * 3 + 1)  # statistics other than 0 and 1
    module[1].num_batches_tracked.zero_()
    model = from_torch(module)
    params = model.init(jax.random.key(0))
    assert {"1.running_mean", "1.running_var"} < set(params)
    with pytest.raises(fb.StructureError, match="fedbn"):
        fb.cost(fb.fedavg(model.loss), params, fb.Split(FEATURES, np.array([0, 6])))
    alg = fb.fedbn(model.loss, client_lr=0.1, batch_size=4, epochs=2, shuffle=False)
    run = fb.simulate(alg, params, fb.Split(FEATURES, np.array([0, 6])), rounds=2)
    own = jax.tree.map(lambda leaf: leaf[0], jax.vmap(alg.personal, in_axes=(None, 0))(run.server, run.states))
    theirs = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, y = torch.tensor(FEATURES["x"]), torch.tensor(FEATURES["y"]).long()
    for _ in range(4):
        for rows in (slice(0, 4), slice(4, 6)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(x[rows]), y[rows]).backward()
            optimizer.step()
    expected = theirs.state_dict()
    for name, value in own.items():
        np.testing.assert_allclose(value, expected[name].numpy(), rtol=2e-4, atol=2e-5, err_msg=name)
    back = to_torch(own, module).eval()
    np.testing.assert_allclose(back(x).detach(), theirs.eval()(x).detach(), rtol=1e-3, atol=1e-4)


def test_other_running_statistics_are_refused_or_frozen():
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    module(torch.randn(64, 4) * 3 + 1)  # statistics other than 0 and 1
    statistics = module[1].running_mean.clone()
    for odd in (nn.BatchNorm1d(4, momentum=None), nn.InstanceNorm1d(4, track_running_stats=True)):
        with pytest.raises(ValueError, match=r"keeps running statistics in 0, .*freeze_statistics=True"):
            from_torch(nn.Sequential(odd, nn.Linear(4, 3)))
    model = from_torch(module, freeze_statistics=True)
    gradient = jax.grad(model.loss)(model.init(jax.random.key(0)), FEATURES, jax.random.key(0))
    assert_equal_gradients(gradient, torch_gradient(module.eval(), FEATURES)[1])
    assert torch.equal(statistics, module[1].running_mean)
    with pytest.raises(ValueError, match="no running statistics to freeze"):
        from_torch(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), freeze_statistics=True)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x - x.mean(0))


def test_refusals():
    with pytest.raises(ValueError, match="Counting changes calls when it is called"):
        jax.eval_shape(from_torch(Counting()).loss, from_torch(Counting()).init(None), FEATURES, jax.random.key(0))
    with pytest.raises(ValueError, match=r"needs a torch\.nn\.Module, got a int"):
        from_torch(3)
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        from_torch(nn.Linear(4, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="classes, values, tokens"):
        from_torch(nn.Linear(4, 3), score="logits")
    with pytest.raises(ValueError, match="call must be a function"):
        from_torch(nn.Linear(4, 3), call="forward")
    pair = from_torch(nn.LSTM(4, 3))
    with pytest.raises(ValueError, match="returned a tuple"):
        pair.predict(pair.init(None), jnp.ones((2, 5, 4)))
    packed = from_torch(
        nn.LSTM(4, 3), call=lambda m, x: m(nn.utils.rnn.PackedSequence(x[0], torch.tensor([2, 2, 1])))[0].data
    )
    with pytest.raises(ValueError, match="packed sequences"):
        packed.predict(packed.init(None), jnp.ones((1, 5, 4)))
    linear = nn.Linear(4, 3)
    params = from_torch(linear).init(None)
    with pytest.raises(ValueError, match=r"missing \['bias'\], unknown \['b'\]"):
        to_torch({"weight": params["weight"], "b": params["bias"]}, linear)
    with pytest.raises(ValueError, match=r"weight has the shape \(4, 3\), the module's is \(3, 4\)"):
        to_torch({**params, "weight": params["weight"].T}, linear)
    with pytest.raises(ValueError, match=r"to_torch needs a torch\.nn\.Module"):
        to_torch(params, params)


def test_a_module_that_mixes_examples_with_padding_is_refused():
    model = from_torch(Centred())
    algorithm = fb.fedavg(model.loss, client_lr=0.1, batch_size=4, epochs=1)
    with pytest.raises(ValueError, match="depends on padding"):
        fb.simulate(algorithm, model.init(None), fb.Split(FEATURES, np.array([0, 6])), rounds=1, cohort=1)


def test_inputs_as_images_and_calls():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.LazyLinear(4))
    x = RNG.integers(0, 255, (5, 6, 7, 2)).astype(np.uint8)
    with torch.no_grad():
        expected = module(torch.from_numpy(x).permute(0, 3, 1, 2).float()).numpy()
    model = from_torch(module, image=(6, 7, 2))
    params = model.init(None)
    for given in (x, x.reshape(5, -1)):
        np.testing.assert_allclose(model.predict(params, given), expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match=r"examples of shape \(6, 7, 2\)"):
        model.predict(params, x[:, :5])
    with pytest.raises(
        ValueError, match=r"images of shape \(6, 7, 2\), that is \(height, width, channels\), got .*\(5, 2, 6, 7\)"
    ):
        model.predict(params, x.transpose(0, 3, 1, 2))  # the same numbers in another order
    with pytest.raises(ValueError, match=r"channels before height and width: .* image=\(6, 7, 2\)\)"):
        from_torch(module).predict(params, x)
    half = from_torch(nn.Linear(4, 1), score="values", call=lambda module, x: module(x)[:, 0] / 2)
    outputs = half.predict(half.init(None), FEATURES["x"])
    assert outputs.shape == (6,)


def test_second_derivatives():
    torch.manual_seed(0)
    module = Recurrent(nn.LSTM, False)
    model = from_torch(module, score="tokens")
    params = model.init(None)
    gradient = jax.grad(model.loss)
    product = jax.jit(lambda p: jax.jvp(lambda p: gradient(p, TOKENS, None), (p,), (p,))[1])(params)
    tensors = dict(module.named_parameters())

    def loss(*values):
        outputs = torch.func.functional_call(
            module, dict(zip(tensors, values, strict=True)), torch.from_numpy(TEXT[:, :-1])
        )
        return nn.functional.cross_entropy(outputs.reshape(-1, 20), torch.from_numpy(TEXT[:, 1:]).long().reshape(-1))

    values = tuple(p.detach() for p in tensors.values())
    expected = torch.autograd.functional.hvp(loss, values, values)[1]
    assert_equal_gradients(product, dict(zip(tensors, (e.numpy() for e in expected), strict=True)), 2e-5)


def test_pytorch_and_torchax_are_as_before():
    from torchax.ops import ops_registry

    from_torch(nn.Linear(4, 3))
    assert torch._ops.OpOverloadPacket.__getattr__ is FOUND
    assert not hasattr(torch.ops.aten.prod, "no_such_names")
    assert torch.lstm not in ops_registry.all_torch_functions  # replaced in our own environment only


def test_a_configuration_names_a_network_of_pytorch(networks):
    model = build("torch_networks:cnn", {"x": (784,), "y": ()}, 5)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 582_026 - 5 * 513
    assert jax.eval_shape(model.predict, shapes, IMAGES["x"]).shape == (6, 5)
