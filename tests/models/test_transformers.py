"""The transformers against their definition in NumPy, in double precision, and against PyTorch's and GPT-2's layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from scipy.special import log_softmax, softmax

from fedbraid import models
from gpt2 import gpt2_weights

RNG = np.random.default_rng(1)
TOKENS = np.array([[3, 1, 4, 1, 5, 2], [5, 6, 2, 0, 0, 0], [2, 6, 1, 3, 0, 0]], np.int32)
NEXT = np.array([[1, 4, 1, 5, 2, 6], [6, 2, 3, 0, 0, 0], [6, 1, 3, 4, 0, 0]], np.int32)
SIZES = {"layers": 2, "width": 8, "heads": 2, "hidden": 12, "length": 6}


def drawn(model):
    """Parameters in double precision, none of them zero or one."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: RNG.normal(0, 0.4, leaf.shape), shapes)


def singles(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def norm(p, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def linear(p, x):
    return x @ p["w"] + p["b"]


def turned(x):
    """Rotary positions by complex numbers: the pair (i, i + half) of position t is turned by t / 10000^(i / half)."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * np.arange(len(x))[:, None] / 10000 ** (np.arange(half) / half))
    z = (x[:, :half] + 1j * x[:, half:]) * turns
    return np.concatenate([z.real, z.imag], -1)


def trunk(p, tokens, *, causal, heads=2):
    """One sequence, head by head: the blocks of GPT-2 with ``positions`` added or turned."""
    x = p["embedding"][tokens] + p.get("positions", 0)
    n, size = len(tokens), x.shape[-1] // heads
    for block in p["blocks"]:
        q, k, v = np.split(linear(block["qkv"], norm(block["norm1"], x)), 3, -1)
        results = []
        for h in range(heads):
            qh, kh, vh = (part[:, h * size : (h + 1) * size] for part in (q, k, v))
            if "positions" not in p:
                qh, kh = turned(qh), turned(kh)
            allowed = np.tri(n, dtype=bool) if causal else np.broadcast_to(tokens != 0, (n, n))
            results.append(softmax(np.where(allowed, qh @ kh.T / np.sqrt(size), -np.inf), -1) @ vh)
        x = x + linear(block["out"], np.concatenate(results, -1))
        z = linear(block["up"], norm(block["norm2"], x))
        z = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        x = x + linear(block["down"], z)
    return norm(p["norm"], x)


def language_loss(p, x, y):
    total, count = 0.0, 0
    for tokens, following in zip(x, y, strict=True):
        logits = trunk(p, tokens, causal=True) @ (p["head"]["w"] if "head" in p else p["embedding"].T)
        real = following != 0
        total -= log_softmax(logits, -1)[np.arange(len(tokens)), following][real].sum()
        count += real.sum()
    return total / count


def sequence_logits(p, x):
    return np.stack([linear(p["head"], trunk(p, t, causal=False)[t != 0].mean(0)) for t in x])


def slopes(loss, p, directions, step=1e-5):
    move = lambda v, t: jax.tree.map(lambda a, b: a + t * b, p, v)  # noqa: E731
    return [(loss(move(v, step)) - loss(move(v, -step))) / (2 * step) for v in directions]


def one_per_leaf(tree):
    """A direction for each leaf, zero in all others."""
    leaves, structure = jax.tree.flatten(tree)
    for i in range(len(leaves)):
        yield structure.unflatten([RNG.normal(size=other.shape) * (j == i) for j, other in enumerate(leaves)])


CASES = {
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary"},
    "untied": {"positions": "learned", "tied": False},
}


@pytest.mark.parametrize("case", CASES)
def test_gpt_and_its_gradient_are_those_of_the_definition(case):
    model = models.gpt(7, **SIZES, **CASES[case])
    p = drawn(model)
    batch = {"x": TOKENS, "y": NEXT, "mask": np.ones(3, np.float32)}
    loss, gradient = jax.jit(jax.value_and_grad(model.loss))(singles(p), batch, None)
    assert float(loss) == pytest.approx(language_loss(p, TOKENS, NEXT), rel=1e-5)
    directions = list(one_per_leaf(p))
    expected = slopes(lambda q: language_loss(q, TOKENS, NEXT), p, directions)
    for direction, slope in zip(directions, expected, strict=True):
        found = sum(float(np.sum(g * v)) for g, v in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
        assert found == pytest.approx(slope, rel=2e-4, abs=2e-6)
    logits = trunk(p, TOKENS[0], causal=True) @ (p["head"]["w"] if "head" in p else p["embedding"].T)
    np.testing.assert_allclose(jax.jit(model.predict)(singles(p), TOKENS)[0], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_encoder_is_that_of_the_definition(positions):
    model = models.encoder(7, 3, **SIZES, positions=positions)
    p = drawn(model)
    np.testing.assert_allclose(
        jax.jit(model.predict)(singles(p), TOKENS), sequence_logits(p, TOKENS), rtol=1e-5, atol=1e-5
    )
    y = np.array([2, 0, 1])
    loss = lambda q: -log_softmax(sequence_logits(q, TOKENS), -1)[np.arange(3), y].mean()  # noqa: E731
    gradient = jax.jit(jax.grad(model.loss))(singles(p), {"x": TOKENS, "y": y, "mask": np.ones(3, np.float32)}, None)
    directions = list(one_per_leaf(p))
    for direction, slope in zip(directions, slopes(loss, p, directions), strict=True):
        found = sum(float(np.sum(g * v)) for g, v in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
        assert found == pytest.approx(slope, rel=2e-4, abs=2e-6)


def test_tokens_do_not_see_the_future_and_padding_is_not_seen():
    language = models.gpt(7, **SIZES)
    changed = TOKENS.copy()
    changed[:, 4] = 6
    before, after = (jax.jit(language.predict)(singles(drawn_once(language)), x) for x in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4], after[:, 4])
    classify = models.encoder(7, 3, **SIZES)
    p, predict = singles(drawn_once(classify)), jax.jit(classify.predict)
    np.testing.assert_allclose(predict(p, TOKENS[1:2]), predict(p, TOKENS[1:2, :3]), rtol=1e-5, atol=1e-6)
    assert np.all(np.isfinite(predict(p, np.zeros((1, 6), np.int32))))


def drawn_once(model):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.4, leaf.shape), jax.eval_shape(model.init, jax.random.key(0)))


def test_clients_with_weights_of_their_own_run_together():
    model = models.gpt(7, **SIZES)
    p = singles(drawn_once(model))
    batch = {"x": TOKENS, "y": NEXT, "mask": np.ones(3, np.float32)}
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), p)
    both = jax.jit(jax.vmap(jax.grad(model.loss), in_axes=(0, None, None)))(stacked, batch, None)
    for i, scale in enumerate((1.0, 0.5)):
        alone = jax.jit(jax.grad(model.loss))(jax.tree.map(lambda leaf, s=scale: s * leaf, p), batch, None)
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=2e-4, atol=1e-6),
            both,
            alone,
        )


@pytest.mark.parametrize("make", [models.gpt, lambda vocab, **options: models.encoder(vocab, 3, **options)])
def test_remat_gives_the_same_gradient_and_stores_less_for_it(make, capsys):
    sizes = {"layers": 3, "width": 8, "heads": 2, "length": 6, "dropout": 0.25}
    plain, less = make(7, **sizes), make(7, **sizes, remat=True)
    batch = {"x": TOKENS, "y": NEXT if make is models.gpt else TOKENS[:, 0] % 3, "mask": np.ones(3, np.float32)}
    p, key = singles(drawn_once(plain)), jax.random.key(3)
    wanted, found = (jax.jit(jax.grad(model.loss))(p, batch, key) for model in (plain, less))  # the same dropout, too
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found, wanted)
    stored = []
    for model in (plain, less):
        print_saved_residuals(lambda p, model=model: model.loss(p, batch, key), p)
        stored.append(sum("from the argument" not in line for line in capsys.readouterr().out.splitlines()))
    assert stored[1] < 0.4 * stored[0]


def test_dropout_needs_a_key_and_keeps_the_mean():
    model = models.gpt(7, **SIZES, dropout=0.25)
    plain, batch = models.gpt(7, **SIZES), {"x": TOKENS, "y": NEXT, "mask": np.ones(3, np.float32)}
    p = jax.tree.map(lambda leaf: 0.1 * leaf, singles(drawn_once(model)))
    assert float(model.loss(p, batch, None)) == float(plain.loss(p, batch, None))
    losses = jax.jit(jax.vmap(lambda key: model.loss(p, batch, key)))(jax.random.split(jax.random.key(0), 400))
    assert np.std(losses) > 1e-4
    assert np.mean(losses) == pytest.approx(float(plain.loss(p, batch, None)), rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.gpt(7, width=6, heads=4), "width must be a multiple of heads"),
        (lambda: models.gpt(7, width=6, heads=2, positions="rotary"), "even number of values per head"),
        (lambda: models.gpt(7, positions="none"), "positions must be"),
        (lambda: models.gpt(7, dropout=1.0), "dropout must be"),
        (lambda: models.encoder(7, 1), "classes must be at least 2"),
        (lambda: jax.eval_shape(lambda k: (m := models.gpt(7, **SIZES)).predict(m.init(k), jnp.ones((1, 9), int)),
                                jax.random.key(0)), "sequences of 9 tokens.*set length = 9"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gpt_is_gpt2_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()
    model = models.gpt(7, **SIZES)
    p = drawn_once(model)
    theirs.transformer.load_state_dict({k: torch.tensor(v, dtype=torch.float32) for k, v in gpt2_weights(p).items()})
    logits = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits
    np.testing.assert_allclose(
        jax.jit(model.predict)(singles(p), TOKENS), logits.detach().numpy(), rtol=1e-5, atol=1e-5
    )
    y = torch.tensor(NEXT, dtype=torch.long)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0).backward()
    gradient = jax.jit(jax.grad(model.loss))(singles(p), {"x": TOKENS, "y": NEXT, "mask": np.ones(3, np.float32)}, None)
    found = theirs.transformer.h[1].attn.c_attn.weight.grad
    np.testing.assert_allclose(gradient["blocks"][1]["qkv"]["w"], found.numpy(), rtol=1e-4, atol=1e-6)
    tied = theirs.transformer.wte.weight.grad
    np.testing.assert_allclose(gradient["embedding"], tied.numpy(), rtol=1e-4, atol=1e-6)
