"""Attention, norms, activations and cross entropies in one piece: where they are found, their values and gradients."""

from collections import Counter

import equinox as eqx
import jax
import jax.extend
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from fedbraid import models
from fedbraid.lowering import attention, fused, kernels, row_norm
from fedbraid.lowering.attention import Given, Heads
from fedbraid.lowering.explanation import _kernel_names
from fedbraid.lowering.kernels import attention as attention_kernel
from fedbraid.lowering.kernels import dense
from fedbraid.lowering.kernels import rows as rows_kernel
from fedbraid.lowering.kernels import smooth as smooth_kernel
from fedbraid.lowering.mixed import narrow_activations
from fedbraid.lowering.patterns import inlined
from fedbraid.lowering.row_norm import RowNorm

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
T, WIDTH, HEADS, VOCAB = 16, 64, 4, 300


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def assert_same(fast, plain, *args):
    """Values and gradients of two functions."""
    (y, back), (z, plain_back) = jax.vjp(fast, *args), jax.vjp(plain, *args)
    slopes = jax.tree.map(lambda leaf: draw(*leaf.shape), y)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)  # noqa: E731
    jax.tree.map(close, (y, back(slopes)), (z, plain_back(slopes)))


def softmax_attention(q, k, v, scale, mask):
    """In NumPy, one query at a time."""
    q, k, v = (np.asarray(x, float) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        scores = scale * k[b, :, h // group] @ q[b, t, h]
        powers = np.where(mask[b, t], np.exp(scores - scores.max()), 0)
        out[b, t, h] = powers / powers.sum() @ v[b, :, h // group]
    return out


@pytest.mark.parametrize(
    ("t", "s", "heads", "keys", "causal"), [(32, 32, 4, 4, True), (20, 20, 6, 2, True), (7, 13, 4, 2, False)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_kernel_of_attention(t, s, heads, keys, causal, padded):
    args = draw(2, t, heads, 24), draw(2, s, keys, 24), draw(2, s, keys, 24)
    real = np.arange(s) < np.array([[s], [s - 3 if padded else s]])
    mask = jnp.asarray(real[:, None, None, :], jnp.int8) if padded else None
    how = Heads(((0, 0), (1, 0), (2, 0)), heads, keys, 0.3, causal)
    seen = np.broadcast_to(real[:, None, :], (2, t, s)) & (np.tri(t, s, dtype=bool) if causal else True)
    np.testing.assert_allclose(
        attention_kernel.attend(args, Given(mask=mask), how), softmax_attention(*args, 0.3, seen), atol=1e-5
    )
    assert_same(
        lambda *a: attention_kernel.attend(a, Given(mask=mask), how),
        lambda *a: attention.plainly(a, Given(mask=mask), how),
        *args,
    )


@pytest.mark.parametrize(("added", "filler"), [(False, -1e30), (False, -1e4), (True, -1e4), (True, -1e38)])
def test_queries_that_see_nothing(added, filler):
    """Replaced scores have no gradient. Scores to which a number is added keep theirs."""
    seen = np.ones((2, 1, 20, 20), np.int8)
    seen[0, 0, 3] = seen[1, 0, :, 15:] = seen[1, 0, 7:9] = 0
    args, how = [draw(2, 20, 4, 24) for _ in range(3)], Heads(((0, 0), (1, 0), (2, 0)), 4, 4, 0.3)
    how = how._replace(filler=filler, added=added)

    def wanted(q, k, v):
        scores = 0.3 * jnp.einsum("bthd,bshd->bhts", q, k)
        scores = scores + jnp.where(seen, 0, filler) if added else jnp.where(seen, scores, filler)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    given = Given(mask=jnp.asarray(seen))
    for function in (attention_kernel.attend, attention.plainly):
        assert_same(lambda *a, function=function: function(a, given, how), wanted, *args)


def test_queries_keys_and_values_in_one_array_with_a_bias():
    how = Heads(((0, 0), (0, 4), (0, 8)), 4, 4, 0.3, True)
    assert_same(
        lambda x, bias: attention_kernel.attend((x,), Given(bias), how),
        lambda x, bias: attention.plainly((x,), Given(bias), how),
        draw(2, 20, 12, 24),
        draw(12, 24),
    )


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (6, 2)])
def test_dropout_in_the_kernel_of_attention(heads, keys):
    t, rate = 20, 0.25
    args = draw(2, t, heads, 24), draw(2, t, keys, 24), draw(2, t, keys, 24)
    kept = jnp.asarray(RNG.random((2, heads, t, t)) >= rate)
    given = Given(kept=kept.astype(jnp.int8))
    how = Heads(((0, 0), (1, 0), (2, 0)), heads, keys, 0.3, True, factor=1 / (1 - rate))

    def wanted(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        k, v = (jnp.repeat(x, heads // keys, axis=1) for x in (k, v))
        scores = jnp.where(jnp.tri(t, dtype=bool), 0.3 * q @ k.swapaxes(2, 3), -jnp.inf)
        return (jax.nn.softmax(scores) * kept / (1 - rate) @ v).swapaxes(1, 2)

    np.testing.assert_allclose(attention_kernel.attend(args, given, how), wanted(*args), atol=1e-5)
    assert_same(lambda *a: attention_kernel.attend(a, given, how), wanted, *args)
    assert_same(lambda *a: attention.plainly(a, given, how), wanted, *args)


@pytest.mark.parametrize("norm", [RowNorm(), RowNorm(1e-3, centred=False)])
@pytest.mark.parametrize(("n", "c"), [(7, 5), (300, 48), (64, 64)])
def test_the_kernels_of_norms(n, c, norm):
    args = draw(n, c) + 3, draw(c), draw(c)
    x = np.asarray(args[0], float)
    x = x - x.mean(1, keepdims=True) if norm.centred else x
    wanted = x / np.sqrt((x**2).mean(1, keepdims=True) + norm.epsilon) * args[1] + args[2]
    np.testing.assert_allclose(rows_kernel.normalise_rows(args[0], args[1:], norm), wanted, atol=1e-4)
    assert_same(lambda x, *w: rows_kernel.normalise_rows(x, w, norm), lambda x, *w: row_norm.plainly(x, w, norm), *args)

    def plainly(r, a, bias, *weights):
        return r + a + bias, row_norm.plainly(r + a + bias, weights, norm)

    more = draw(n, c), draw(n, c), draw(c), *args[1:]
    assert_same(lambda r, a, bias, *w: rows_kernel.add_normalise_rows(r, a, bias, w, norm), plainly, *more)


def test_the_kernels_of_activations_and_cross_entropies(monkeypatch):
    monkeypatch.setattr(smooth_kernel, "LOGITS", (4, 16))
    assert_same(
        lambda x, b: fused.elementwise(jax.nn.gelu, x, b, kernel=jax.nn.gelu),
        lambda x, b: jax.nn.gelu(x + b),
        draw(70, 20),
        draw(20),
    )
    x = 20 * draw(5, 50)
    wanted = np.log(np.exp(np.asarray(x, float) - 60).sum(1)) + 60
    np.testing.assert_allclose(fused.log_sum_exp(x, True), wanted, rtol=1e-6)
    assert_same(lambda x: fused.log_sum_exp(x, True), lambda x: jax.nn.logsumexp(x, axis=-1), x)
    assert fused.log_sum_exp(jnp.full((1, 20), -jnp.inf), True) == -jnp.inf


def test_erf_of_operations_that_kernels_have():
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    for name, wanted, sign in (("erf", scipy.special.erf, 1), ("erfc", scipy.special.erfc, -1)):
        function = fused.IN_KERNELS[name]
        np.testing.assert_allclose(function(x), wanted(x.astype(float)), atol=4e-7)
        slope = sign * 2 / np.sqrt(np.pi) * np.exp(-(x.astype(float) ** 2))
        np.testing.assert_allclose(jax.vmap(jax.grad(function))(x), slope, atol=1e-6)


def test_operations_that_change_nothing_are_left_out():
    def names(function, x):
        return [e.primitive.name for e in inlined(jax.make_jaxpr(function)(x)).jaxpr.eqns]

    x, number = draw(3), jnp.float32(2)
    for same in (lambda x: x * 1.0, lambda x: 1.0 * x, lambda x: x / 1.0, lambda x: x + 0.0, lambda x: x - 0.0):
        assert names(lambda x, same=same: jnp.exp(same(x)), x) == ["exp"]
    for other in (lambda x: 1.0 / x, lambda x: 0.0 - x, lambda x: x * 0.0, lambda x: x + 1.0):
        assert len(names(lambda x, other=other: jnp.exp(other(x)), x)) == 2
    assert "add" in names(lambda n: jax.lax.add(jnp.zeros(3), n), number)  # a sum that repeats the number
    for power in (2.0, 3.0, 8.0):
        program = inlined(jax.make_jaxpr(lambda x, power=power: jax.lax.pow(x, power))(x))
        np.testing.assert_allclose(
            jax.extend.core.jaxpr_as_fun(program)(x)[0], np.asarray(x, float) ** power, rtol=1e-5
        )
        assert [e.primitive.name for e in program.jaxpr.eqns] == ["integer_pow"]
    assert names(lambda x: jax.lax.pow(x, 2.5), x) == ["pow"]


def batch(count=8):
    text = RNG.integers(1, VOCAB, (count, T + 1))
    return {"x": jnp.asarray(text[:, :-1]), "y": jnp.asarray(text[:, 1:]), "mask": jnp.ones(count)}


def plain_norm(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * scale + shift


def plain_attention(qkv, key):
    """Packed queries, keys and values, and a mask of -1e9."""
    b = len(qkv) // T
    qkv = qkv.reshape(b, T, 3, HEADS, -1)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(-1, WIDTH)


def flax_norm(x, scale, shift):
    """As flax has it: the mean of squares minus the square of the mean, and the scale multiplied first."""
    mean = x.mean(-1)
    variance = jnp.maximum(0.0, jnp.square(x).mean(-1) - jnp.square(mean))
    factor = jax.lax.rsqrt(variance[..., None] + 1e-5) * scale.reshape(1, 1, -1)
    return (x - mean[..., None]) * factor + shift.reshape(1, 1, -1)


def torch_attention(qkv, key, *, dropped=lambda weights, kept: jnp.where(kept, weights / 0.9, 0)):
    """As PyTorch has it: a mask that is added, dropout of the weights, heads before positions."""
    q, k, v = jnp.split(qkv.reshape(-1, T, 3 * WIDTH), 3, axis=-1)
    q, k, v = (x.reshape(-1, T, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = (q * 0.5) @ (k * 0.5).swapaxes(-1, -2)
    scores = scores + jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, -jnp.inf)
    kept = jax.random.bernoulli(key, 0.9, scores.shape)
    return (dropped(jax.nn.softmax(scores), kept) @ v).transpose(0, 2, 1, 3).reshape(-1, WIDTH)


def flax_attention(qkv, key):
    """As flax has it: the weights are multiplied by zeros and a factor, which heads share."""
    return torch_attention(qkv, key, dropped=lambda weights, kept: weights * (kept[:, :1].astype(jnp.float32) / 0.9))


def written_by_hand(norm=plain_norm, attention=plain_attention, activation=jax.nn.gelu):
    """A GPT of plain jax.numpy, with log_softmax."""

    def loss(p, batch, key):
        b = len(batch["x"])
        x = p["e"][batch["x"]]
        for w in p["blocks"]:
            a = attention(norm(x, w["s1"], w["b1"]).reshape(-1, WIDTH) @ w["qkv"] + w["qb"], key)
            x = x + (a @ w["o"] + w["ob"]).reshape(b, T, WIDTH)
            hidden = activation(norm(x, w["s2"], w["b2"]).reshape(-1, WIDTH) @ w["up"] + w["ub"])
            x = x + (hidden @ w["down"] + w["db"]).reshape(b, T, WIDTH)
        scored = jax.nn.log_softmax(x.reshape(-1, WIDTH) @ p["head"] + p["hb"])
        return -jnp.take_along_axis(scored, batch["y"].reshape(-1, 1), 1).mean()

    def block():
        big = {"qkv": draw(WIDTH, 3 * WIDTH), "o": draw(WIDTH, WIDTH), "up": draw(WIDTH, 128), "down": draw(128, WIDTH)}
        zero = {"qb": jnp.zeros(3 * WIDTH), "ob": jnp.zeros(WIDTH), "ub": jnp.zeros(128), "db": jnp.zeros(WIDTH)}
        norms = {"s1": jnp.ones(WIDTH), "b1": jnp.zeros(WIDTH), "s2": jnp.ones(WIDTH), "b2": jnp.zeros(WIDTH)}
        return jax.tree.map(lambda w: 0.06 * w, big) | zero | norms

    ends = {"e": 0.06 * draw(VOCAB, WIDTH), "head": 0.06 * draw(WIDTH, VOCAB), "hb": jnp.zeros(VOCAB)}
    return loss, spread(ends | {"blocks": [block(), block()]}), batch()


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def spread(params):
    """Larger matrices, and biases that are not zero."""
    return jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w + 0.2 * jnp.cos(jnp.arange(w.size)), params)


def of_the_library(**options):
    model = models.gpt(VOCAB, layers=2, width=WIDTH, heads=HEADS, length=T, **options)
    return model.loss, spread(model.init(KEY)), batch()


class Block(eqx.Module):
    """A block of equinox' own layers."""

    attention: eqx.nn.MultiheadAttention
    norms: list
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    embedding: eqx.nn.Embedding
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.up, self.down = eqx.nn.Linear(WIDTH, 128, key=keys[1]), eqx.nn.Linear(128, WIDTH, key=keys[2])
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[3])
        self.last = eqx.nn.Linear(WIDTH, VOCAB, key=keys[4])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((T, T), bool)))
        y = jax.vmap(self.norms[1])(x)
        x = x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(row))))(y)
        return jax.vmap(self.last)(x)


def of_equinox():
    params, rest = eqx.partition(Block(KEY), eqx.is_inexact_array)

    def loss(params, batch, key):
        scores = jax.vmap(eqx.combine(params, rest))(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    return loss, params, batch()


def of_llama():
    model = models.llama(VOCAB, layers=2, width=WIDTH, heads=HEADS, kv_heads=2)
    return model.loss, spread(model.init(KEY)), batch()


def encoder():
    model = models.encoder(VOCAB, classes=300, layers=1, width=WIDTH, heads=HEADS, length=T)
    examples = batch() | {"y": jnp.arange(8)}
    examples["x"] = examples["x"].at[:, 12:].set(0)
    return model.loss, spread(model.init(KEY)), examples


def with_bias(kernels, more=""):
    """The same kernels, of which those for attention add a bias, and have more in their name."""
    return {name + f"_with_bias{more}" * name.startswith("attention"): count for name, count in kernels.items()}


BLOCKS = {
    "attention": 2,
    "attention_back": 2,
    "row_norm": 1,
    "row_norm_back": 1,
    "log_sum_exp": 1,
    "activation": 2,
    "activation_back": 2,
}
ONE = {"attention": 1, "attention_back": 1, "activation": 1, "activation_back": 1, "row_norm": 1, "row_norm_back": 1}
RESIDUAL = {"add_row_norm": 3, "add_row_norm_back": 3}
FOUND = {
    "by hand": (written_by_hand, with_bias(BLOCKS) | RESIDUAL),
    "as in torch": (
        lambda: written_by_hand(attention=torch_attention, activation=gelu),
        with_bias(BLOCKS, "_with_dropout") | RESIDUAL,
    ),
    "as in flax": (
        lambda: written_by_hand(flax_norm, flax_attention, gelu),
        with_bias(BLOCKS, "_with_dropout") | RESIDUAL,
    ),
    "gpt": (of_the_library, with_bias(BLOCKS) | {"add_row_norm": 4, "add_row_norm_back": 4}),
    "rotary": (lambda: of_the_library(positions="rotary"), BLOCKS | {"add_row_norm": 4, "add_row_norm_back": 4}),
    "equinox": (of_equinox, ONE | {"add_row_norm": 1, "add_row_norm_back": 1, "log_sum_exp": 1}),
    # the first four once, in the loop over layers; the last norm is after the loop
    "llama": (
        of_llama,
        {"attention": 1, "attention_back": 1, "add_row_norm": 1, "add_row_norm_back": 1}
        | {"row_norm": 2, "row_norm_back": 2, "log_sum_exp": 1},
    ),
    "encoder": (encoder, with_bias(ONE) | {"add_row_norm": 2, "add_row_norm_back": 2}),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", FOUND)
def test_parts_are_found_in_any_transformer_and_gradients_are_close(name):
    make, wanted = FOUND[name]
    loss, params, examples = make()
    narrow = narrow_activations(loss)
    program = jax.make_jaxpr(jax.grad(lambda p: narrow(p, examples, KEY)))(params)
    assert Counter(_kernel_names(program.jaxpr)) == wanted
    scattered = [e.outvars[0].aval.shape for e in program.jaxpr.eqns if e.primitive.name == "scatter-add"]
    assert scattered
    assert not [shape for shape in scattered if shape[-1] == VOCAB]  # rows of embeddings, but no logits

    def gradient(loss):
        value, tree = jax.jit(jax.value_and_grad(lambda p: loss(p, examples, KEY)))(params)
        return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])

    (exact, a), (half, b) = gradient(loss), gradient(narrow)
    assert abs(exact - half) < 2e-3 * exact
    assert jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b) > 0.999
    assert 0.99 < jnp.linalg.norm(b) / jnp.linalg.norm(a) < 1.01


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("added", [False, True])
def test_queries_that_see_nothing_are_found_with_the_right_gradient(added):
    rng = np.random.default_rng(2)
    w, x = {name: jnp.asarray(0.3 * rng.standard_normal((32, 32)), jnp.float32) for name in "abc"}, rng.random((40, 32))
    rows, columns = np.arange(40)[:, None], np.arange(40)

    def loss(w, x):
        y = x @ w["a"]
        scores, seen = y @ (x @ w["b"]).T, (rows > 20) & (columns % 3 > 0) & (x[0, 0] < 2)
        scores = scores + jnp.where(seen, 0.0, -1e4) if added else jnp.where(seen, scores, -1e9)
        return jnp.sum((jax.nn.softmax(scores) @ y @ w["c"]) ** 2 * rows * jnp.arange(32))

    x = jnp.asarray(x - 0.5, jnp.float32)
    program = jax.make_jaxpr(jax.grad(narrow_activations(loss)))(w, x)
    assert Counter(_kernel_names(program.jaxpr)) == {"attention": 1, "attention_back": 1}
    exact, found = (jax.grad(function)(w, x)["b"] for function in (loss, narrow_activations(loss)))
    assert jnp.linalg.norm(found - exact) < 0.05 * jnp.linalg.norm(exact)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_not_attention_is_left_alone():
    """A softmax over the queries, and a mask that depends on the scores' values through another factor."""

    def across(w, x):
        y = x @ w
        return jnp.sum((jax.nn.softmax(y @ y.T, axis=0) @ y @ w) ** 2)

    def scaled_after(w, x):
        y = x @ w
        return jnp.sum((jax.nn.softmax(2 * jnp.where(y @ y.T > 0, y @ y.T, -1e9)) @ y @ w) ** 2)

    def added(w, x):  # a bias of the scores that is no mask
        y = x @ w
        bias = jnp.where(jnp.tril(jnp.ones((20, 20), bool)), 0.0, -5.0)
        return jnp.sum((jax.nn.softmax(y @ y.T + bias) @ y @ w) ** 2)

    def weighted(w, x):  # no weight is removed
        y = x @ w
        return jnp.sum((jax.nn.softmax(y @ y.T) * jnp.where(x[:, :1] > 0, 2.0, 1.0) @ y @ w) ** 2)

    rng = np.random.default_rng(1)  # not RNG: other tests that run before must not change the numbers
    w, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((16, 16), (20, 16)))
    w = 0.3 * w

    def infinite(w, x):  # a score of 0 / 0 is NaN, which is no reason to fail while tracing
        y = x @ w
        return jnp.sum(jax.nn.softmax((y @ y.T) / 0.0) @ y @ w)

    assert jax.make_jaxpr(narrow_activations(infinite))(w, x)
    for function in (across, scaled_after, added, weighted):
        program = jax.make_jaxpr(jax.grad(narrow_activations(function)))(w, x)
        assert list(_kernel_names(program.jaxpr)) == []
        exact = jax.grad(function)(w, x)
        assert jnp.vdot(exact, jax.grad(narrow_activations(function))(w, x)) > 0.98 * jnp.vdot(exact, exact)


def kernels_of(loss, *args):
    return Counter(_kernel_names(jax.make_jaxpr(jax.grad(narrow_activations(loss)))(*args).jaxpr))


def assert_close(loss, *args, most=0.02):
    """The gradient in mixed precision is close to that of float32."""
    exact, found = (jax.flatten_util.ravel_pytree(jax.grad(f)(*args))[0] for f in (loss, narrow_activations(loss)))
    assert jnp.linalg.norm(found - exact) < most * jnp.linalg.norm(exact)


def small(classes=32):
    rng = np.random.default_rng(3)
    shapes = {"a": (32, 32), "b": (32, classes), "c": (32, 32), "bias": (32,)}
    params = {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.standard_normal((40, 32)), jnp.float32)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_statistics_through_which_no_gradient_flows():
    def norm(p, x):
        h = x @ p["a"]
        centred = h - h.mean(-1, keepdims=True)
        h = centred * jax.lax.stop_gradient(jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5))
        return jnp.mean((h @ p["b"]) ** 2 * jnp.arange(32))

    def total(p, x):
        scores = (x @ p["a"])[:32]
        total = jax.lax.stop_gradient(jnp.exp(scores - 1).sum(-1, keepdims=True))
        return jnp.mean((jnp.log(total) - scores @ p["c"]) ** 2)

    for loss in (norm, total):
        assert not kernels_of(loss, *small())
        assert_close(loss, *small())


@pytest.mark.usefixtures("as_on_a_gpu")
def test_powers_that_are_divided_by_the_sums_of_other_rows():
    def loss(p, x):
        y = (x @ p["a"])[:32]
        scores = 0.1 * y @ (x @ p["b"])[:32].T
        powers = jnp.exp(scores - scores.max(-1, keepdims=True))
        return jnp.mean((powers / powers.sum(-1) @ y @ p["c"]) ** 2)

    assert not kernels_of(loss, *small())
    assert_close(loss, *small())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("shape", [(40, 32), (4, 10, 32)])
def test_activations_with_arrays_of_one_number(shape):
    def loss(p, x):
        h = (x @ p["a"] + p["bias"]).reshape(shape)
        h = h * jnp.full(shape, 0.5) * jax.lax.add(jax.lax.full(shape, 1.0), jnp.tanh(h))
        return jnp.mean((h @ p["b"]) ** 2)

    assert kernels_of(loss, *small()) == {"activation": 1, "activation_back": 1}
    assert_close(loss, *small())


def test_an_infinite_slope_beyond_the_array():
    """Of rows that fill no tile: the slope at 0 is infinite, and no entry is 0."""
    x, dy, bias, w = jnp.ones((40, 48)), draw(40, 48), jnp.zeros(48), jnp.eye(48)
    slopes = 0.5 * np.asarray(dy, float)
    for dx, dbias in (
        smooth_kernel.activation_back(jnp.sqrt, x, bias, dy),
        dense.gradient(jnp.sqrt, dy, w, x, bias),
    ):
        np.testing.assert_allclose(dx, slopes, rtol=1e-6)
        np.testing.assert_allclose(dbias, slopes.sum(0), atol=1e-4)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_queries_keys_and_values_with_one_bias():
    def loss(p, x):
        qkv = jnp.einsum("btc,ckn->btkn", x.reshape(2, 20, 32), jnp.stack([p["a"], p["b"], p["c"]], 1)) + p["bias"]
        q, k, v = jnp.moveaxis(qkv.reshape(2, 20, 3, 2, 16), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 4)
        return jnp.mean((jnp.einsum("bhts,bshd->bthd", weights, v).reshape(40, 32) @ p["a"]) ** 2)

    def sliced(p, x):
        qkv = jnp.einsum("btc,ckn->btkn", x.reshape(2, 20, 32), jnp.stack([p["a"], p["b"], p["c"]], 1)) + p["bias"]
        qkv = qkv.reshape(2, 20, 3, 2, 16)
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", qkv[:, :, 0], qkv[:, :, 1]) / 4)
        return jnp.mean((jnp.einsum("bhts,bshd->bthd", weights, qkv[:, :, 2]).reshape(40, 32) @ p["a"]) ** 2)

    for each in (loss, sliced):
        assert kernels_of(each, *small()) == {"attention": 1, "attention_back": 1}
        assert_close(each, *small())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("mode", ["clip", "fill", None])
def test_places_outside_of_a_row(mode):
    def loss(p, x):
        scored = jax.nn.log_softmax(x @ p["a"] @ p["b"])
        found = jnp.take_along_axis(scored, 20 * jnp.arange(40)[:, None] - 380, 1, mode=mode)
        return -jnp.where(jnp.isfinite(found), found, 0).mean()

    assert kernels_of(loss, *small(300)) == {"log_sum_exp": 1}
    assert_close(loss, *small(300))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_switches_of_scores():
    """One boolean for all scores, and a factor that becomes another number in a narrower dtype."""

    def whole(p, x):
        y = x @ p["a"]
        mask = jax.lax.select(x[0, 0] > 9, jnp.zeros((40, 40)), jnp.full((40, 40), -1e9))
        return jnp.mean((jax.nn.softmax(0.1 * y @ (x @ p["b"]).T + mask) @ y @ p["c"]) ** 2)

    def rounded(p, x):
        y, kept = x @ p["a"], (x @ jnp.ones(32) > 0) / 0.6
        weights = jax.nn.softmax(0.1 * y @ (x @ p["b"]).T) * kept.astype(jnp.int32).astype(jnp.float32)[:, None]
        return jnp.mean((weights @ y @ p["c"]) ** 2)

    assert not kernels_of(whole, *small())
    for loss in (whole, rounded):
        assert_close(loss, *small(), most=0.05)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_programs_are_lowered_for_a_gpu(monkeypatch):
    for module in (attention_kernel, rows_kernel, smooth_kernel):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    for name, kernel in (
        ("gpt", "attention_back_with_bias"),
        ("encoder", "attention_back_with_bias"),
        ("as in torch", "attention_back_with_bias_with_dropout"),
    ):
        loss, params, examples = FOUND[name][0]()
        narrow = narrow_activations(loss)
        program = jax.jit(jax.grad(lambda p, narrow=narrow, examples=examples: narrow(p, examples, KEY)))
        with kernels.lowered_for():
            text = program.trace(params).lower(lowering_platforms=("cuda",)).as_text()
        assert all(f'"{one}"' in text for one in (kernel, "activation_back", "add_row_norm_back"))


def test_the_logits_of_a_language_model_are_stored_narrow_and_those_of_few_classes_are_not():
    def last(w, x):
        return -jax.nn.log_softmax(x @ w[0] @ w[1])[:, 0].mean()

    for classes, dtype in ((300, "bf16"), (5, "f32")):
        program = str(jax.make_jaxpr(narrow_activations(last))((jnp.ones((8, 8)), jnp.ones((8, classes))), draw(40, 8)))
        assert f"{dtype}[40,{classes}] = dot_general" in program
