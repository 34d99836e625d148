"""Mixed precision: which values are bfloat16, that the rest is float32, and how far gradients are off."""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedbraid import models
from fedbraid.lowering.mixed import narrow_activations

HALF = jnp.bfloat16
KEY = jax.random.key(0)


def equations(jaxpr):
    """All equations of a program, those inside others included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def traced(function, *args):
    return list(equations(jax.make_jaxpr(function)(*args).jaxpr))


def dtypes(found, name):
    return Counter(e.outvars[0].aval.dtype.name for e in found if e.primitive.name == name)


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return -jax.nn.log_softmax(x @ w + b)[:, 0].mean()


def layers(*sizes):
    keys = jax.random.split(KEY, len(sizes))
    pairs = zip(keys[1:], sizes, sizes[1:], strict=False)
    return [(jax.random.normal(key, (m, n)) / m**0.5, jnp.zeros(n)) for key, m, n in pairs]


def test_products_and_what_follows_are_narrow_and_the_loss_is_not():
    found = traced(narrow_activations(mlp), layers(5, 7, 7, 3), jnp.ones((4, 5)))
    assert dtypes(found, "dot_general") == {"bfloat16": 2, "float32": 1}
    # an activation is computed in float32 and stored narrow: it is a factor of the next product as it is
    assert dtypes(found, "tanh") == {"float32": 2}
    stored = [e for e in found if e.primitive.name == "custom_jvp_call" and e.outvars[0].aval.shape == (4, 7)]
    assert [e.outvars[0].aval.dtype for e in stored] == [HALF] * 2
    assert {v.aval.dtype for e in stored for v in e.invars if v.aval.shape == (4, 7)} == {jnp.dtype(HALF)}
    assert dtypes(found, "exp") == dtypes(found, "log") == {"float32": 1}
    assert "bfloat16" not in dtypes(found, "reduce_sum")


def test_gradients_between_layers_are_narrow_and_those_of_parameters_are_not():
    params, x = layers(5, 7, 7, 3), jnp.ones((4, 5))
    gradient = jax.grad(narrow_activations(mlp))
    found = traced(gradient, params, x)
    # Narrow are two products forwards and three backwards: those of the weights of both layers, and one between them.
    # The last layer's three are of its float32 result.
    assert dtypes(found, "dot_general") == {"bfloat16": 5, "float32": 3}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient(params, x))} == {"float32"}


def norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * scale


def residual(params, x):
    for w, scale in params["blocks"]:
        x = x + jax.nn.relu(norm(x, scale) @ w)
    return jnp.sum((x @ params["last"]) ** 2)


def test_norms_are_float32_and_the_residual_connection_is_stored_narrow():
    params = {"blocks": [(jnp.eye(6), jnp.ones(6))] * 3, "last": jnp.ones((6, 2))}
    found = traced(narrow_activations(residual), params, jnp.ones((4, 6)))
    assert dtypes(found, "rsqrt") == {"float32": 3}
    assert dtypes(found, "square") == {"float32": 3}
    assert dtypes(found, "reduce_sum") == {"float32": 7}
    added = [e.outvars[0].aval for e in found if e.primitive.name == "add" and e.outvars[0].aval.shape == (4, 6)]
    assert [aval.dtype for aval in added[1:]] == [HALF] * 2  # the first is the sum of the input, which is float32


def test_a_large_mean_does_not_spoil_a_norm():
    """Statistics of narrow values are computed in float32: in bfloat16 the sum of 4096 ones would stop at 256."""
    params = {"blocks": [(jnp.eye(4096), jnp.ones(4096))], "last": jnp.eye(4096)}

    def two(params, x):
        return norm(x @ params["blocks"][0][0], 1.0) @ params["last"]

    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4096)) + 4, HALF).astype(jnp.float32)
    np.testing.assert_allclose(narrow_activations(two)(params, x), two(params, x), atol=0.02)


def test_what_a_loop_carries_stays_float32():
    def loss(w, xs):
        def cell(c, x):
            return c + jnp.tanh(x @ w[0]) @ w[1], None

        return jnp.sum(lax.scan(cell, jnp.zeros((2, 3)), xs)[0] @ w[1])

    w, xs = (jnp.eye(3), jnp.eye(3)), jnp.ones((9, 2, 3))
    found = traced(narrow_activations(loss), w, xs)
    (loop,) = (e for e in found if e.primitive.name == "scan")
    assert loop.outvars[0].aval.dtype == jnp.float32
    assert dtypes(list(equations(loop.params["jaxpr"].jaxpr)), "dot_general") == {"bfloat16": 2}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(jax.grad(narrow_activations(loss))(w, xs))} == {"float32"}


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_over_layers_gives_what_the_layers_give_one_by_one(remat):
    """The activations between layers are narrow in a loop, too. What the loop also carries, a sum, stays float32."""
    rng = np.random.default_rng(0)
    w = {name: jnp.asarray(rng.standard_normal((4, 6, 6)) / 4, jnp.float32) for name in ("a", "b")}
    ends = jnp.asarray(rng.standard_normal((2, 6, 6)) / 2, jnp.float32)
    x = jnp.asarray(rng.standard_normal((5, 6)), jnp.float32)

    def layer(x, w):
        return x + jnp.tanh(x @ w["a"]) @ w["b"]

    layer = jax.checkpoint(layer) if remat else layer

    def looped(w, ends, x):
        def one(carry, w):
            x, total = carry
            x = layer(x, w)
            return (x, total + jnp.sum(jnp.exp(x))), None

        (x, total), _ = lax.scan(one, (x @ ends[0], jnp.float32(0)), w)
        return jnp.sum((x @ ends[1]) ** 2) + total

    def unrolled(w, ends, x):
        x, total = x @ ends[0], jnp.float32(0)
        for i in range(4):
            x = layer(x, {name: leaf[i] for name, leaf in w.items()})
            total = total + jnp.sum(jnp.exp(x))
        return jnp.sum((x @ ends[1]) ** 2) + total

    (loop,) = (e for e in traced(narrow_activations(looped), w, ends, x) if e.primitive.name == "scan")
    assert [v.aval.dtype.name for v in loop.outvars] == ["bfloat16", "float32"]
    ways = [jax.jit(jax.value_and_grad(narrow_activations(f), (0, 1))) for f in (looped, unrolled)]
    for mine, theirs in zip(*(jax.tree.leaves(way(w, ends, x)) for way in ways), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2 * np.abs(theirs).max())
    exact = jax.tree.leaves(jax.value_and_grad(looped, (0, 1))(w, ends, x))
    for mine, true in zip(jax.tree.leaves(ways[0](w, ends, x)), exact, strict=True):
        np.testing.assert_allclose(mine, true, rtol=3e-2, atol=3e-2 * np.abs(true).max())


def test_checkpoints_are_kept():
    def loss(params, x):
        return mlp(params[2:], jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p[0][0]) @ p[1][0]))(params[:2], x))

    params, x = layers(5, 7, 6, 4, 3), jnp.ones((2, 5))
    found = traced(jax.grad(narrow_activations(loss)), params, x)
    assert any("remat" in e.primitive.name or e.primitive.name == "checkpoint" for e in found)
    assert dtypes(found, "dot_general")["bfloat16"] > 6


def test_a_large_constant_does_not_become_infinite():
    lowest = float(jnp.finfo(jnp.float32).min)

    def loss(w, x):
        masked = jnp.where(jnp.zeros((4, 4), bool), x @ w @ x.T, lowest)  # of two infinities softmax would be NaN
        return jnp.sum(jax.nn.softmax(masked) @ x @ w)

    w, x = jnp.eye(3), jnp.ones((4, 3))
    assert jnp.isinf(jnp.asarray(lowest, HALF))
    np.testing.assert_allclose(narrow_activations(loss)(w, x), loss(w, x), rtol=0.01)


def test_a_loss_may_make_its_own_random_key():
    def loss(w, x):
        kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)  # the same mask at every call
        return jnp.sum(jnp.where(kept, x @ w, 0) @ w)

    w, x = jnp.eye(3), jnp.ones((4, 3))
    assert float(loss(w, x)) > 0
    np.testing.assert_allclose(narrow_activations(loss)(w, x), loss(w, x), rtol=0.01)


def examples(shape, classes):
    x = jax.random.normal(jax.random.key(1), (8, *shape))
    return {"x": x, "y": jnp.arange(8) % classes, "mask": jnp.ones(8)}


class Users(eqx.Module):
    """A network with channels first, an average pool and a layer norm."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 8, 3, key=keys[0])
        self.second = eqx.nn.Conv2d(8, 8, 3, stride=2, key=keys[1])
        self.norm, self.last = eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 5, key=keys[2])

    def __call__(self, x):
        x = jax.nn.silu(self.second(jax.nn.relu(self.first(x[None]))))
        return self.last(self.norm(x.mean((1, 2))))


@pytest.mark.parametrize(
    ("model", "batch", "closest"),
    [
        (models.emnist_cnn(10), examples((28, 28, 1), 10), 0.995),
        (models.resnet18_gn(5, image=(8, 8, 3), width=16), examples((8, 8, 3), 5), 0.97),
        (models.from_equinox(Users), examples((12, 12), 5), 0.999),
    ],
    ids=["cnn", "resnet", "equinox"],
)
def test_gradients_point_where_those_of_float32_do(model, batch, closest):
    params = model.init(jax.random.key(0))

    def gradient(loss):
        value, tree = jax.jit(jax.value_and_grad(lambda p: loss(p, batch, KEY)))(params)
        return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])

    (exact, a), (narrow, b) = gradient(model.loss), gradient(narrow_activations(model.loss))
    assert 0 < abs(exact - narrow) < 0.01 * exact
    assert closest < jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b) < 1 - 1e-7
