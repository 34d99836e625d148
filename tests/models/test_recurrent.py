"""The LSTM's recurrence and its derivatives against NumPy; a linear function with a given transpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid import models
from fedbraid.lowering.transposable import linear
from fedbraid.models.lstm import recurrence


def in_numpy(inputs, u):
    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    h = c = np.zeros((inputs.shape[1], u.shape[0]))
    states = []
    for gates in inputs:
        i, f, g, o = np.split(gates + h @ u, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states)


def arrays(positions, batch, hidden, seed=0, clients=()):
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((*clients, positions, batch, 4 * hidden)).astype(np.float32)
    u = (rng.standard_normal((*clients, hidden, 4 * hidden)) / np.sqrt(hidden)).astype(np.float32)
    return inputs, u, rng.standard_normal((*clients, positions, batch, hidden)).astype(np.float32)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_states_and_gradient_are_numpys(positions, batch, hidden, seed):
    inputs, u, weights = arrays(positions, batch, hidden, seed)
    gradient = jax.jit(jax.value_and_grad(lambda i, u: jnp.sum(recurrence(i, u) * weights), (0, 1)))
    value, (d_inputs, d_u) = gradient(inputs, u)
    np.testing.assert_allclose(value, np.sum(in_numpy(inputs, u) * weights), rtol=1e-4, atol=1e-4)
    # along a random direction the derivative is the difference quotient, in double precision
    rng = np.random.default_rng(seed + 1)
    at, along = (
        (inputs.astype(float), u.astype(float)),
        (rng.standard_normal(inputs.shape), rng.standard_normal(u.shape)),
    )
    moved = [[x + sign * 1e-5 * d for x, d in zip(at, along, strict=True)] for sign in (1, -1)]
    ends = [np.sum(in_numpy(*arguments) * weights) for arguments in moved]
    slope = np.sum(d_inputs * along[0]) + np.sum(d_u * along[1])
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-3, atol=5e-3)


def test_it_maps_over_clients_and_points():
    inputs, u, weights = arrays(4, 3, 8, clients=(2, 3))
    gradient = jax.grad(lambda i, u, w: jnp.sum(recurrence(i, u) * w), (0, 1))
    mapped = jax.vmap(jax.vmap(gradient))(inputs, u, weights)
    for p, q in np.ndindex(2, 3):
        one = gradient(inputs[p, q], u[p, q], weights[p, q])
        for ours, theirs in zip(mapped, one, strict=True):
            np.testing.assert_allclose(ours[p, q], theirs, rtol=1e-5, atol=1e-5)


def test_a_linear_function_takes_the_transpose_that_is_given():
    def apply(a, x):
        return a @ x

    def marked(a, y):
        return 10 * (a.T @ y)  # not the true transpose, to see that this one is used

    def f(a, x):
        return linear(apply, marked, a, x)

    a, x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones(3), jnp.array([1.0, 2.0])
    np.testing.assert_allclose(jax.vjp(lambda x: f(a, x), x)[1](y)[0], 10 * a.T @ y)
    np.testing.assert_allclose(jax.jvp(f, (a, x), (a, 2 * x))[1], 3 * a @ x)
    many = jnp.stack([x, 3 * x])
    np.testing.assert_allclose(jax.vmap(f, (None, 0))(a, many), many @ a.T)
    both = jax.vmap(lambda a: jax.vjp(lambda x: f(a, x), x)[1](y)[0])(jnp.stack([a, -a]))
    np.testing.assert_allclose(both, jnp.stack([10 * a.T @ y, -10 * a.T @ y]))


def test_haikus_start():
    keras, haiku = (models.word_lstm(300, hidden=128, embed=64, init=init) for init in ("keras", "haiku"))
    ours, theirs = haiku.init(jax.random.key(0)), keras.init(jax.random.key(0))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    cut = 0.8796  # standard deviation of a standard normal truncated at two
    for weights, deviation in (
        (ours["embedding"], 1.0),
        (ours["lstm"][0]["w"], (64 + 128) ** -0.5),
        (ours["lstm"][0]["u"], (64 + 128) ** -0.5),
        (ours["projection"]["w"], 128**-0.5),
        (ours["dense"]["w"], 64**-0.5),
    ):
        assert float(weights.std()) == pytest.approx(cut * deviation, rel=0.03)
        assert float(jnp.abs(weights).max()) <= 2 * deviation
    assert ours["lstm"][0]["b"].tolist() == theirs["lstm"][0]["b"].tolist()
    with pytest.raises(ValueError, match="init"):
        models.char_lstm(init="torch")  # pyright: ignore[reportArgumentType]


def test_tanh_follows_every_layer():
    """The network of Mime's published code: the outputs of each layer pass through a tanh, its states do not."""
    plain, squashed = (models.char_lstm(7, layers=2, hidden=5, embed=3, init="haiku", tanh=t) for t in (False, True))
    params = squashed.init(jax.random.key(1))
    tokens = jnp.array([[1, 4, 2, 6], [3, 3, 5, 1]])
    x = params["embedding"][tokens]
    for cell in params["lstm"]:
        h = c = jnp.zeros((2, 5))
        outputs = []
        for t in range(4):
            i, f, g, o = jnp.split(x[:, t] @ cell["w"] + cell["b"] + h @ cell["u"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            outputs.append(jnp.tanh(h))
        x = jnp.stack(outputs, axis=1)
    expected = x @ params["dense"]["w"] + params["dense"]["b"]
    np.testing.assert_allclose(squashed.predict(params, tokens), expected, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(plain.predict(params, tokens) - expected).max()) > 1e-3
