"""LoRA: laws of the adapters, against the definition and against PEFT; the federated methods."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models, transforms
from fedbraid.experiment.tensors import named_arrays, write_npz, write_tensors
from fedbraid.lowering.adapted import Adapted, with_adapted
from fedbraid.models import lora
from gpt2 import gpt2_weights
from told import told

RNG = np.random.default_rng(0)
SIZES = {"layers": 2, "width": 8, "heads": 2, "hidden": 12, "length": 6}
BASE = models.gpt(7, **SIZES)
TOKENS = RNG.integers(1, 7, (5, 7)).astype(np.int32)
BATCH = {"x": TOKENS[:, :-1], "y": TOKENS[:, 1:], "mask": np.ones(5, np.float32)}
ALL = ("qkv", "out", "up", "down")


def drawn(tree, scale=0.3):
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(0, scale, leaf.shape), jnp.float32), tree)


WEIGHTS = drawn(BASE.init(jax.random.key(0)))
BASE_LOSS = float(jax.jit(BASE.loss)(WEIGHTS, BATCH, None))


def close(a, b, rtol=1e-4, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("rank", [1, 8])
def test_at_the_start_it_is_the_base_model(rank):
    model = lora(BASE, WEIGHTS, rank=rank, targets=ALL)
    params = model.init(jax.random.key(1))
    assert float(jax.jit(model.loss)(params, BATCH, None)) == pytest.approx(BASE_LOSS, rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, model.merge(params), WEIGHTS)
    assert all(np.any(pair["lora_a"] != 0) for pair in params.values())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 2 * rank * (8 + 24 + 8 + 8 + 8 + 12 + 12 + 8)


def test_values_and_gradients_are_those_of_the_sum():
    """d/dA = s x' dW B' and d/dB = s A' dW, for the gradient dW of the base model at W + s A B."""
    model = lora(BASE, WEIGHTS, rank=3, alpha=6.0, targets=ALL)
    params = drawn(model.init(jax.random.key(1)))
    merged = jax.tree.map(lambda leaf: leaf, WEIGHTS)
    for i, block in enumerate(merged["blocks"]):
        for name in ALL:
            pair = params[f"blocks.{i}.{name}.w"]
            block[name]["w"] = block[name]["w"] + 2.0 * np.asarray(pair["lora_a"]) @ np.asarray(pair["lora_b"])
    close(model.merge(params), merged)
    loss, gradient = jax.jit(jax.value_and_grad(model.loss))(params, BATCH, None)
    expected, whole = jax.jit(jax.value_and_grad(BASE.loss))(merged, BATCH, None)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for i, block in enumerate(whole["blocks"]):
        for name in ALL:
            pair, found = params[f"blocks.{i}.{name}.w"], gradient[f"blocks.{i}.{name}.w"]
            close(found["lora_a"], 2.0 * block[name]["w"] @ pair["lora_b"].T)
            close(found["lora_b"], 2.0 * pair["lora_a"].T @ block[name]["w"])
    close(jax.jit(model.predict)(params, BATCH["x"]), jax.jit(BASE.predict)(merged, BATCH["x"]), rtol=2e-4, atol=1e-5)
    sums = jax.jit(model.metrics)(params, BATCH)
    close(models.total(sums["loss"]), expected)


def test_products_of_frozen_weights_over_clients_are_one_product():
    """Under vmap no product has a matrix of the base per client, and the sum W + A B is never computed."""
    model = lora(BASE, WEIGHTS, rank=2, targets=ALL)
    clients = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 3))
    program = str(jax.make_jaxpr(jax.vmap(jax.grad(model.loss), (0, None, None)))(clients, BATCH, None))
    assert "f32[3,8,24]" not in program  # a matrix qkv for each of the three clients
    whole = jax.vmap(lambda p: BASE.loss(model.merge(p), BATCH, None))
    assert "f32[3,8,24]" in str(jax.make_jaxpr(whole)(clients))


class Network(eqx.Module):
    layers: list

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(4, 6, key=first), eqx.nn.Linear(6, 3, key=second)]

    def __call__(self, x):
        return self.layers[1](jax.nn.relu(self.layers[0](x)))


def test_a_users_equinox_module():
    model = models.from_equinox(Network(jax.random.key(0)))
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    batch = {"x": x, "y": np.array([0, 1, 2, 1, 0]), "mask": np.ones(5, np.float32)}
    adapted = lora(model, rank=2, alpha=2.0, targets="weight", train="layers.1.bias", inputs="last")
    params = drawn(adapted.init(jax.random.key(1)))
    assert {name: jax.tree.map(jnp.shape, leaf) for name, leaf in params.items()} == {
        "layers.0.weight": {"lora_a": (4, 2), "lora_b": (2, 6)},
        "layers.1.weight": {"lora_a": (6, 2), "lora_b": (2, 3)},
        "layers.1.bias": (3,),
    }
    w = [np.asarray(layer.weight) for layer in model.init(jax.random.key(0)).layers]
    b = np.asarray(model.init(jax.random.key(0)).layers[0].bias)
    ab = [np.asarray(params[f"layers.{i}.weight"]["lora_a"] @ params[f"layers.{i}.weight"]["lora_b"]) for i in (0, 1)]
    logits = np.maximum(x @ (w[0].T + ab[0]) + b, 0) @ (w[1].T + ab[1]) + np.asarray(params["layers.1.bias"])
    close(adapted.predict(params, x), logits, rtol=1e-4, atol=1e-5)
    assert np.any(np.asarray(jax.jit(jax.grad(adapted.loss))(params, batch, None)["layers.1.bias"]) != 0)
    wrong = lora(model, targets="weight")
    start = jax.eval_shape(wrong.init, jax.random.key(0))
    with pytest.raises(ValueError, match="set inputs='last', got 'first'"):
        jax.eval_shape(wrong.loss, start, batch, None)


def test_matrices_inside_loops_checkpoints_and_other_operations():
    stacked = {"w": jnp.asarray(RNG.normal(0, 0.4, (3, 4, 4)), jnp.float32), "t": jnp.ones((4, 4))}

    def network(p, x):
        layer = jax.checkpoint(lambda w, x: jnp.tanh(jax.jit(lambda w: x @ w.astype(jnp.float32))(w)))
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["w"])
        return x + p["t"][0] + (p["t"].T @ x.T).T

    seen = []
    pairs = {name: (RNG.normal(size=(*w.shape[:-1], 2)), RNG.normal(size=(*w.shape[:-2], 2, 4)))
             for name, w in stacked.items()}  # fmt: skip
    pairs = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), pairs)
    tree = {name: Adapted(w, *pairs[name], lambda axis, name=name: seen.append((name, axis)))
            for name, w in stacked.items()}  # fmt: skip
    x = jnp.asarray(RNG.normal(size=(2, 4)), jnp.float32)
    whole = {name: w + pairs[name][0] @ pairs[name][1] for name, w in stacked.items()}
    close(with_adapted(network, tree, x), network(whole, x), atol=1e-5)
    assert set(seen) == {("w", 0), ("t", 0), ("t", None)}  # t is also indexed, which needs its value
    gradient = jax.grad(lambda x: jnp.sum(with_adapted(network, tree, x)))(x)
    close(gradient, jax.grad(lambda x: jnp.sum(network(whole, x)))(x), atol=1e-5)


@jax.custom_vjp
def twice_the_gradient(w, x):
    return x @ w


twice_the_gradient.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (2 * saved[1].T @ g, 2 * g @ saved[0].T))


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(lambda w, x: twice_the_gradient(w, x), id="a gradient of its own"),
        pytest.param(lambda w, x: jax.lax.scan(lambda c, row: (jnp.sin(c + row), c), x[0], w)[0], id="rows"),
        pytest.param(lambda w, x: x @ w.astype(jnp.int32).astype(jnp.float32), id="whole numbers"),
        pytest.param(lambda w, x: jax.lax.scan(lambda w, _: (jnp.tanh(w), None), w, length=2)[0], id="carried"),
    ],
)
@pytest.mark.parametrize("rank", [2, 4])  # 4: a row of A has as many entries as one of B
def test_operations_that_need_the_value_of_the_sum(network, rank):
    w, a, b = (jnp.asarray(3 * RNG.normal(size=shape), jnp.float32) for shape in ((4, 4), (4, rank), (rank, 4)))
    x, asked = jnp.asarray(RNG.normal(size=(2, 4)), jnp.float32), []

    def run(a, b, adapted):
        y = with_adapted(network, Adapted(w, a, b, asked.append), x) if adapted else network(w + a @ b, x)
        return jnp.sum(jnp.sin(y)), y

    found, expected = (jax.grad(run, (0, 1), has_aux=True)(a, b, adapted) for adapted in (True, False))
    close(found, expected, rtol=1e-4, atol=1e-4)
    assert asked
    assert set(asked) == {None}


def test_dense_layers_of_the_library_are_products_of_adapters():
    """In a batch of a few examples, too, where they have a rule for their gradient."""
    model = lora(models.mlp(4, 3, hidden=[5]), targets="w")
    params = model.init(jax.random.key(0))
    batch = {"x": np.ones((2, 4), np.float32), "y": np.array([0, 1]), "mask": np.ones(2, np.float32)}
    assert "4,5] = add" not in str(jax.make_jaxpr(jax.grad(model.loss))(params, batch))  # W + A B


def test_parts_of_the_base_are_still_known():
    """The head that is trained, and the features."""
    base = models.mlp(4, 3, hidden=[5])
    weights = drawn(base.init(jax.random.key(0)))
    model = lora(base, weights, targets="0.w", train="1")
    params = model.init(jax.random.key(1))
    assert set(params) == {"0.w", "1.b", "1.w"}
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    close(model.features(params, x), np.maximum(x @ np.asarray(weights[0]["w"]) + np.asarray(weights[0]["b"]), 0))
    data = fb.Split({"x": np.repeat(x, 3, 0), "y": np.array([0, 1, 2, 0, 1, 2])}, np.array([0, 2, 6]))
    alg = fb.fedper(model.loss, client_lr=0.1, batch_size=2)
    assert fb.simulate(alg, params, data, rounds=1).info.cost.up == 4 * 8 * (4 + 5)  # the adapters of layer 0 only
    with pytest.raises(ValueError, match="does not say which leaves are its head"):
        fb.fedper(lora(base, weights, targets="0.w").loss)


def test_factors_have_one_dtype(x64):
    base = models.gpt(7, **SIZES)
    assert {leaf.dtype for leaf in jax.tree.leaves(base.init(jax.random.key(0)))} == {jnp.dtype("float64")}
    params = lora(base).init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}


def test_a_sum_that_must_be_computed_is_said():
    model = lora(models.gpt(7, **SIZES, tied=False), targets="embedding")
    with told("'embedding' is used by another operation than a product"):
        jax.eval_shape(model.loss, model.init(jax.random.key(0)), BATCH, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: lora(BASE, targets="q"),
            r"'q' matches no matrix of the model; its matrices are blocks\.\*\.down\.w, ",
        ),
        (lambda: lora(BASE, targets=["qvk"]), r"'qvk' matches no matrix of the model \(did you mean 'qkv'\?\); its"),
        (lambda: lora(BASE, targets=[]), r"nothing is trained: .*, got targets = \[\] and train = \[\]; the model has"),
        (lambda: lora(BASE, targets=[], train="head"), "train: 'head' matches no leaf"),
        (lambda: lora(models.softmax_regression(4, 3)), "'qkv' matches no matrix of the model; its matrices are w$"),
        (lambda: lora(BASE, targets=3), "targets must be names of leaves .* got 3"),
        (lambda: lora(BASE, train=[1]), "train must be names of leaves"),
        (lambda: lora(BASE, targets=("qkv", "ups")), "'ups' matches no matrix"),
        (
            lambda: lora(BASE, targets="qkv", train="*.qkv.w"),
            r"targets must name a matrix that train does not train whole, .* train = \['\*.qkv.w'\]",
        ),
        (lambda: lora(models.mlp(4, 3, hidden=[5], norm="batch"), targets="w"), "has running statistics"),
        (lambda: lora(BASE, train="head"), "train: 'head' matches no leaf"),
        (lambda: lora(BASE, rank=0), "rank must be"),
        (lambda: lora(BASE, alpha=0.0), "alpha must be"),
        (lambda: lora(BASE, factors="a"), "factors must be"),
        (lambda: lora(BASE, WEIGHTS | {"embedding": jnp.ones((3, 8))}), "'embedding' has shape"),
        (lambda: lora(BASE, {}), "another structure"),
        (lambda: lora(BASE, "base.npz"), "base must be weights, got the path 'base.npz'"),  # pyright: ignore
        (lambda: lora(BASE).merge(WEIGHTS), r"merge takes the parameters of this model, .* \(blocks.\*.qkv.w\)"),
    ],
)
def test_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- federated -------------------------------------------------------------------------------------------------------


def federation():
    text = RNG.integers(1, 7, (12, 7)).astype(np.int32)
    return fb.Split({"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}, np.array([0, 4, 8, 12]))


LOCAL = {"client_lr": 0.05, "batch_size": 4, "client_opt": "adamw"}


def test_fedit_sends_the_adapters_and_learns():
    model = lora(BASE, WEIGHTS, rank=2, targets=ALL)
    params, data = model.init(jax.random.key(0)), federation()
    result = fb.simulate(fb.fedavg(model.loss, **LOCAL), params, data, rounds=4)
    assert result.info.cost.up == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    batch = dict(data.arrays) | {"mask": np.ones(12, np.float32)}
    before, after = (float(jax.jit(model.loss)(p, batch, None)) for p in (params, result.params))
    assert after < before - 0.05


def network(key):
    first, second = jax.random.split(key)
    layers = [eqx.nn.Linear(6, 5, key=first), eqx.nn.Lambda(jax.nn.tanh), eqx.nn.Linear(5, 3, key=second)]
    return eqx.nn.Sequential(layers)


@pytest.mark.parametrize(
    ("whole", "head", "x"),
    [
        (models.gpt(7, **SIZES, tied=False), "head", TOKENS[:, :-1]),
        (models.from_equinox(network), "layers.2.*", np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)),
    ],
    ids=["gpt", "equinox"],
)
def test_parts_without_adapters_are_frozen(whole, head, x):
    """A round of FedAvg moves the trained leaves as that of the whole model does, and sends nothing else."""
    base, y = whole.init(jax.random.key(3)), TOKENS[:, 1:] if x.ndim == 2 and x.dtype == np.int32 else np.arange(5) % 3
    model = lora(whole, base, targets=(), train=head)
    split = fb.Split({"x": x, "y": np.asarray(y)}, np.array([0, 2, 5]))
    local = {"client_lr": 0.5, "batch_size": None, "steps": 1}
    params = model.init(jax.random.key(0))
    found = fb.simulate(fb.fedavg(model.loss, **local), params, split, rounds=1)
    wanted = fb.simulate(fb.fedavg(whole.loss, **local), base, split, rounds=1).params
    sizes = {name: leaf.size for name, leaf in params.items()}
    assert found.info.cost.up == 4 * sum(sizes.values()) < 4 * sum(leaf.size for leaf in jax.tree.leaves(base))
    merged = named_arrays(model.merge(found.params))
    for name, moved in named_arrays(wanted).items():
        np.testing.assert_allclose(merged[name], moved if name in sizes else named_arrays(base)[name], atol=1e-6)
        assert name not in sizes or np.abs(moved - named_arrays(base)[name]).max() > 1e-3


def test_ffa_lora_trains_and_sends_b_only_and_its_mean_is_exact():
    model = lora(BASE, WEIGHTS, rank=2, targets=ALL, factors="b")
    first, second = (model.init(jax.random.key(seed)) for seed in (0, 1))
    assert all(set(pair) == {"lora_b"} for pair in first.values())
    close(model.merge(drawn(first, 0.0)), WEIGHTS)
    ones = jax.tree.map(jnp.ones_like, first)
    jax.tree.map(np.testing.assert_array_equal, model.merge(ones), model.merge(jax.tree.map(jnp.ones_like, second)))
    clients = [drawn(first) for _ in range(3)]
    mean = lambda *leaves: sum(leaves) / 3  # noqa: E731
    close(model.merge(jax.tree.map(mean, *clients)), jax.tree.map(mean, *map(model.merge, clients)), atol=1e-5)


def test_fedsa_lora_keeps_b_on_its_client():
    model = lora(BASE, WEIGHTS, rank=2)
    params = model.init(jax.random.key(0))
    alg = transforms.private(fb.fedavg(model.loss, **LOCAL), "*.lora_b")
    result = fb.simulate(alg, params, federation(), rounds=2)
    assert result.info.cost.up == 4 * sum(pair["lora_a"].size for pair in params.values())
    own = [alg.personal(result.server, jax.tree.map(lambda leaf, i=i: leaf[i], result.states)) for i in (0, 1)]
    name = "blocks.0.qkv.w"
    np.testing.assert_array_equal(own[0][name]["lora_a"], own[1][name]["lora_a"])
    assert np.any(own[0][name]["lora_b"] != own[1][name]["lora_b"])


def test_it_is_built_from_a_table_and_its_base_from_a_file(tmp_path):
    write_npz(tmp_path / "base.npz", named_arrays(WEIGHTS))
    table = {"rank": 3, "targets": ["qkv"], "weights": str(tmp_path / "base.npz")}
    sizes = {name: size for name, size in SIZES.items() if name != "length"}
    model = models.build("gpt", {"x": (6,), "y": (6,)}, 7, **sizes, lora=table)
    params = model.init(jax.random.key(0))
    assert params["blocks.1.qkv.w"]["lora_a"].shape == (8, 3)
    assert float(jax.jit(model.loss)(params, BATCH, None)) == pytest.approx(BASE_LOSS, rel=1e-6)
    with pytest.raises(ValueError, match="lora has no option 'ranks'; it takes rank, alpha"):
        models.build("gpt", {"x": (6,), "y": (6,)}, 7, **sizes, lora={"ranks": 3})
    with pytest.raises(ValueError, match=r"lora must be a table of options, such as \[model.lora\]"):
        models.build("gpt", {"x": (6,), "y": (6,)}, 7, **sizes, lora=3)
    with pytest.raises(ValueError, match=r"there is no file nowhere\.npz"):
        models.build("gpt", {"x": (6,)}, 7, **sizes, lora={"weights": "nowhere.npz"})
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "base.safetensors").write_bytes(b"not npz")
    with pytest.raises(ValueError, match=r"base\.safetensors is not a NumPy archive: .* `fedbraid export"):
        models.build("gpt", {"x": (6,)}, 7, **sizes, lora={"weights": str(tmp_path / "base.safetensors")})
    with pytest.raises(ValueError, match="holds one array"):
        models.build("gpt", {"x": (6,)}, 7, **sizes, lora={"weights": str(tmp_path / "one.npy")})
    write_npz(tmp_path / "other.npz", {"w": np.ones(3)})
    with pytest.raises(ValueError, match="does not hold the weights of this model"):
        models.build("gpt", {"x": (6,)}, 7, **sizes, lora={"weights": str(tmp_path / "other.npz")})
    write_npz(tmp_path / "adapters.npz", named_arrays(params))
    with pytest.raises(ValueError, match="It holds adapters: `fedbraid export --merged` writes all weights"):
        models.build("gpt", {"x": (6,)}, 7, **sizes, lora={"weights": str(tmp_path / "adapters.npz")})
    write_tensors(tmp_path / "base.safetensors", named_arrays(WEIGHTS))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "base.npz").read_bytes()[:100])
    for name in ("base.safetensors", "cut.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a NumPy archive: a file NAME.npz is needed"):
            models.build("gpt", {"x": (6,)}, 7, **sizes, lora={"weights": str(tmp_path / name)})


# peft asks transformers for a name that it deprecates
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapter_gradients_are_those_of_peft():
    torch = pytest.importorskip("torch")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()
    gpt2.transformer.load_state_dict({k: torch.tensor(np.asarray(v)) for k, v in gpt2_weights(WEIGHTS).items()})
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    theirs = peft.get_peft_model(gpt2, peft.LoraConfig(**options, lora_dropout=0.0))
    model = lora(BASE, WEIGHTS, rank=3, alpha=6.0, targets=("qkv", "up"))
    params = drawn(model.init(jax.random.key(0)))
    found = {}
    for i in (0, 1):
        layers = theirs.base_model.model.transformer.h[i]
        for name, layer in (("qkv", layers.attn.c_attn), ("up", layers.mlp.c_fc)):
            pair = params[f"blocks.{i}.{name}.w"]
            factors = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            for theirs_, ours in zip(factors, (pair["lora_a"], pair["lora_b"]), strict=True):
                theirs_.data = torch.tensor(np.asarray(ours).T.copy())
            found[f"blocks.{i}.{name}.w"] = factors
    logits = theirs(torch.tensor(BATCH["x"], dtype=torch.long)).logits
    y = torch.tensor(BATCH["y"], dtype=torch.long).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y)
    loss.backward()
    ours, gradient = jax.jit(jax.value_and_grad(model.loss))(params, BATCH, None)
    assert float(ours) == pytest.approx(loss.item(), rel=1e-5)
    for name, (a, b) in found.items():
        close(gradient[name]["lora_a"], a.grad.numpy().T, rtol=1e-4, atol=1e-6)
        close(gradient[name]["lora_b"], b.grad.numpy().T, rtol=1e-4, atol=1e-6)


def test_a_layer_of_pytorch_with_more_outputs_than_inputs_is_a_product():
    """Its matrix is transposed for the gradient of the weights, which adapters do not need; no sum is computed."""
    torch = pytest.importorskip("torch")
    base = models.from_torch(torch.nn.Linear(4, 9))
    model = lora(base, rank=2, targets="weight", inputs="last")
    params, x = drawn(model.init(jax.random.key(0))), RNG.standard_normal((5, 4)).astype(np.float32)
    close(model.predict(params, x), base.predict(model.merge(params), x), rtol=1e-4, atol=1e-5)
