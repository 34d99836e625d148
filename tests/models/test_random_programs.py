"""Random attentions, norms, activations and losses: in one piece they have the values and gradients of the program.

Mixed precision stores values in float32 here, so that no rounding hides a wrong number.
"""

import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedbraid.lowering import kernels, mixed
from fedbraid.lowering.explanation import _kernel_names
from fedbraid.lowering.mixed import narrow_activations

SIZE = 16  # of a head


@pytest.fixture(autouse=True)
def exactly_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    monkeypatch.setattr(mixed, "HALF", jnp.float32)
    monkeypatch.setattr(mixed, "_wide", lambda array: array)


def assert_same(loss, params):
    """The kernels of the gradient, after a check of all its values."""
    whole = jax.value_and_grad(narrow_activations(loss))
    (value, exact), (same, found) = (jax.jit(function)(params) for function in (jax.value_and_grad(loss), whole))
    np.testing.assert_allclose(same, value, rtol=1e-4)
    most = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(exact))
    for name in exact:
        np.testing.assert_allclose(found[name], exact[name], rtol=5e-3, atol=1e-4 * most, err_msg=name)
    return Counter(_kernel_names(jax.make_jaxpr(whole)(params).jaxpr))


ATTENTIONS = (1, 3, 7, 12, 14, 20, 24, 30)  # seeds: every order of axes, most masks, one that is refused


def matrices(numbers, **shapes):
    return {name: jnp.asarray(numbers.standard_normal(shape) / 4, jnp.float32) for name, shape in shapes.items()}


MASKS = {  # (scores, which keys are real [B, .., 1, S], the lower triangle, the number for other scores) -> scores
    "none": lambda s, real, tri, low: s,
    "chosen": lambda s, real, tri, low: jnp.where(real, s, low),
    "both": lambda s, real, tri, low: jnp.where(real & tri, s, low),
    "negated": lambda s, real, tri, low: jnp.where(~real, low, s),
    "triangle": lambda s, real, tri, low: jnp.where(tri, s, low),
    "strict": lambda s, real, tri, low: jnp.where(jnp.tril(tri, -1), s, low),
    "added": lambda s, real, tri, low: s + jnp.where(real, 0.0, low),
    "as in BERT": lambda s, real, tri, low: s + (1.0 - real.astype(jnp.float32)) * -1e4,
    "infinite": lambda s, real, tri, low: s + jnp.where(tri, 0.0, -jnp.inf),
    "heads": lambda s, real, tri, low: jnp.where((jnp.arange(2) > 0)[:, None, None] | tri, s, low),
    "twice": lambda s, real, tri, low: jnp.where(real, jnp.where(tri, s, low), low),
}
DROPPED = {  # (weights, booleans) -> weights
    "none": lambda weights, kept: weights,
    "chosen": lambda weights, kept: jnp.where(kept, weights / 0.8, 0.0),
    "factor": lambda weights, kept: weights * (kept / 0.8),
    "of all heads": lambda weights, kept: weights * (kept[:, :1].astype(jnp.float32) / 0.8),
    "of groups": lambda weights, kept: weights * (kept[:, :, :1].astype(jnp.float32) / 0.8),
}


def drawn_attention(seed):
    """A loss with an attention, its weights, and whether it can be computed in one piece."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    mask, drop, low = rng.choice([*MASKS]), rng.choice([*DROPPED]), rng.choice((-1e4, -1e9, float(np.finfo("f4").min)))
    order, scale = rng.choice(("btkd", "bktd", "grouped")), rng.choice((1.0, 0.3))
    b, t = rng.choice((2, 3)), rng.choice((7, 16, 20))
    s = t if rng.random() < 0.6 else t + 6
    before, after = rng.random() < 0.5, rng.random() < 0.15
    x, y = (jnp.asarray(numbers.standard_normal((b, n, 24)), jnp.float32) for n in (t, s))
    real = jnp.asarray(numbers.random((b, 1, 1, s)) < 0.7).at[0].set(rng.random() < 0.5)  # none of the first sequence
    tri = jnp.tril(jnp.ones((t, s), bool))
    group, real = (2, real[:, None]) if order == "grouped" else (1, real)
    params = matrices(numbers, q=(24, 2 * group * SIZE), k=(24, 2 * SIZE), v=(24, 2 * SIZE), o=(2 * group * SIZE, 8))

    def masked(scores):
        chosen = MASKS[mask](scores, real, tri, low) * (2.0 if after else 1.0)
        return DROPPED[drop](jax.nn.softmax(chosen), jax.random.bernoulli(jax.random.key(seed), 0.8, scores.shape))

    def loss(p):
        q, k, v = ((z @ p[name]).reshape(b, len(z[0]), -1, SIZE) for name, z in (("q", x), ("k", y), ("v", y)))
        q = q / 2.0 if before else q
        if order == "grouped":
            scores = scale * jnp.einsum("btkgd,bskd->bkgts", q.reshape(b, t, 2, group, SIZE), k)
            out = jnp.einsum("bkgts,bskd->btkgd", masked(scores), v)
        elif order == "btkd":
            out = jnp.einsum("bkts,bskd->btkd", masked(scale * jnp.einsum("btkd,bskd->bkts", q, k)), v)
        else:
            q, k, v = (z.transpose(0, 2, 1, 3) for z in (q, k, v))
            out = (masked(scale * (q @ k.swapaxes(-1, -2))) @ v).transpose(0, 2, 1, 3)
        return jnp.mean((out.reshape(b * t, -1) @ p["o"]) ** 2 * jnp.arange(8))

    refused = mask == "twice" or (after and mask != "none")  # a number before the mask is part of the scale
    return loss, params, 0 if refused else 1


@pytest.mark.parametrize("seed", ATTENTIONS)
def test_a_random_attention(seed):
    loss, params, count = drawn_attention(seed)
    found = assert_same(loss, params)
    assert sum(found[name] for name in found if name.startswith("attention_back")) == count
    assert sum(found.values()) == 2 * count


def moments(x):
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x - mean).mean(-1, keepdims=True)


def centred(x):
    return x - moments(x)[0]


def inverse(x):
    return lax.rsqrt(moments(x)[1] + 1e-5)


NORMS = {  # (x, scale, shift) -> a norm
    "layer norm": lambda x, s, b: centred(x) * inverse(x) * s + b,
    "scaled first": lambda x, s, b: centred(x) * (inverse(x) * s) + b,
    "divided": lambda x, s, b: s * (centred(x) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-3)) + b,
    "of squares": lambda x, s, b: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * s,
    "plain": lambda x, s, b: centred(x) * inverse(x),
}
OTHERS = {
    "stopped deviation": lambda x, s, b: centred(x) * lax.stop_gradient(inverse(x)) * s + b,
    "stopped mean": lambda x, s, b: (x - lax.stop_gradient(moments(x)[0])) * inverse(x) * s + b,
    "unbiased": lambda x, s, b: centred(x) / jnp.sqrt(jnp.var(x, -1, keepdims=True, ddof=1) + 1e-5) * s + b,
    "outside of the root": lambda x, s, b: centred(x) / (jnp.sqrt(moments(x)[1]) + 1e-3) * s + b,
    "over rows": lambda x, s, b: (x - x.mean(0)) * lax.rsqrt(jnp.var(x, 0) + 1e-5) * s + b,
    "of length 1": lambda x, s, b: x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-5) * s,
    "not centred": lambda x, s, b: x * inverse(x) * s + b,
}


def of_layers(functions, numbers, inner=24):
    """The mean square of every function of a dense layer, after another dense layer."""
    x = jnp.asarray(numbers.standard_normal((21, 24)), jnp.float32)
    params = matrices(numbers, w=(len(functions), 24, inner), v=(inner, 8), s=(len(functions), inner))
    params |= {"b": params["s"][::-1] + 0.1}

    def loss(p):
        layers = zip(functions, p["w"], p["s"], p["b"], strict=True)
        return sum(jnp.mean((f(x @ w, 1 + s, b) @ p["v"]) ** 2 * jnp.arange(8)) for f, w, s, b in layers)

    return loss, params


def test_norms_of_many_forms():
    both = [*NORMS.values(), *OTHERS.values()]
    found = assert_same(*of_layers(both, np.random.default_rng(1)))
    assert found == {"row_norm": len(NORMS), "row_norm_back": len(NORMS)}


ACTIVATIONS = [jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), jax.nn.silu, jnp.tanh, jax.nn.sigmoid]
ACTIVATIONS += [lambda x: x * jax.nn.sigmoid(1.702 * x), lambda x: 1 / (1 + jnp.exp(-x)), lambda x: x + jnp.sin(x) ** 2]
ACTIVATIONS += [lambda x: x * jnp.full(x.shape, 0.5) * jnp.tanh(x), lambda x: jnp.tanh(x) * jax.nn.sigmoid(x + 1)]
NOT_IN_KERNELS = [jax.nn.softplus, jax.nn.elu, jax.nn.relu, lambda x: x * lax.stop_gradient(jax.nn.sigmoid(x))]
NOT_IN_KERNELS += [lambda x: jnp.tanh(x) * jnp.roll(x, 1, -1), lambda x: jnp.tanh(x) * x.mean(-1, keepdims=True)]


def test_activations_of_many_forms():
    both = [lambda x, s, b, f=f: f(x + b) * s for f in [*ACTIVATIONS, *NOT_IN_KERNELS]]
    found = assert_same(*of_layers(both, np.random.default_rng(2)))
    assert found == {"activation": len(ACTIVATIONS), "activation_back": len(ACTIVATIONS)}


def test_losses_of_many_forms():
    numbers = np.random.default_rng(3)
    y = numbers.integers(0, 300, (31, 1))

    def chosen(scores, at=y, **options):
        return jnp.nan_to_num(jnp.take_along_axis(scores, at, 1, **options))

    functions = [
        lambda z: chosen(jax.nn.log_softmax(z)),
        lambda z: chosen(jax.nn.log_softmax(z), 3 * y - 100, mode="clip"),
        lambda z: chosen(jax.nn.log_softmax(z), 3 * y - 100, mode="fill"),
        lambda z: chosen(jax.nn.log_softmax(z), -1 - y) + 0.1 * jax.nn.logsumexp(z, -1, keepdims=True) ** 2,
        lambda z: 0.9 * chosen(jax.nn.log_softmax(z)) + 0.1 * jax.nn.log_softmax(z).mean(-1, keepdims=True),
        lambda z: lax.stop_gradient(jax.nn.logsumexp(z, -1)) * z[:, 0],
        lambda z: chosen(z)[:, 0] * jax.nn.softmax(z).max(-1),
    ]
    x = jnp.asarray(numbers.standard_normal((31, 24)), jnp.float32)
    params = matrices(numbers, w=(len(functions), 24, 24), v=(24, 300))

    def loss(p):
        return sum(jnp.mean(f(4 * x @ w @ p["v"])) for f, w in zip(functions, p["w"], strict=True))

    assert assert_same(loss, params) == {"log_sum_exp": 8}
