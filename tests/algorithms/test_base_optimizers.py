"""Base optimizers against Table 5 of the Mime paper, written out in NumPy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbraid.algorithms.base_optimizers import (
    BASES,
    adagrad,
    adam,
    base_optimizer,
    from_optax,
    momentum,
    sgd,
    warn_if_not_linear,
)
from told import collecting, told

pytestmark = pytest.mark.usefixtures("x64")


def table5(name, gradients, x, lr, *, beta=0.9, b1=0.9, b2=0.99, eps=1e-3, initial=None):
    """The trajectory of one vector, one gradient after the other."""
    m, v = 0.0, {"adam": 0.0, "adagrad": 0.1}.get(name, 0.0) if initial is None else initial
    out = []
    for g in gradients:
        if name == "sgd":
            x = x - lr * g
        elif name == "momentum":
            x = x - lr * ((1 - beta) * g + beta * m)
            m = (1 - beta) * g + beta * m
        elif name == "adagrad":
            x = x - lr / (eps + np.sqrt(v)) * g
            v = v + g**2
        else:
            x = x - lr / (eps + np.sqrt(v)) * ((1 - b1) * g + b1 * m)
            m, v = (1 - b1) * g + b1 * m, (1 - b2) * g**2 + b2 * v
        out.append(x)
    return np.array(out)


def walk(base, gradients, x, lr):
    x, out = jnp.asarray(x), []
    s = base.init(x)
    for g in jnp.asarray(gradients):
        x, s = x - lr * base.update(g, s, x), base.track(g, s, x)
        out.append(np.asarray(x))
    return np.array(out)


GRADIENTS = np.random.default_rng(1).normal(size=(6, 3))
X = np.array([1.0, -2.0, 0.5])


@pytest.mark.parametrize("name", list(BASES))
def test_table_5(name):
    np.testing.assert_allclose(walk(base_optimizer(name), GRADIENTS, X, 0.1), table5(name, GRADIENTS, X, 0.1), 1e-12)


def test_options_reach_the_base():
    other = {"b1": 0.5, "b2": 0.8, "eps": 0.1, "initial": 0.3}
    for name, options in (("momentum", {"beta": 0.3}), ("adam", other), ("adagrad", {"eps": 0.2, "initial": 0.7})):
        np.testing.assert_allclose(
            walk(base_optimizer(name, **options), GRADIENTS, X, 0.1), table5(name, GRADIENTS, X, 0.1, **options), 1e-12
        )


def state_after(base, gradients):
    s, x = base.init(jnp.zeros(3)), jnp.zeros(3)
    for g in gradients:
        s = base.track(jnp.asarray(g), s, x)
    return s


def bend(base):
    """U(g + h) + U(0) - U(g) - U(h) for a fixed s; 0 if U is affine in g."""
    s, x = state_after(base, GRADIENTS[:3]), jnp.zeros(3)
    g, h = jnp.asarray(GRADIENTS[4]), jnp.asarray(GRADIENTS[5])
    U = lambda g: np.asarray(base.update(g, s, x))  # noqa: E731
    return np.abs(U(g + h) + U(0 * g) - U(g) - U(h)).max()


@pytest.mark.parametrize("name", list(BASES))
def test_update_is_linear_in_the_gradient(name):
    assert bend(base_optimizer(name)) < 1e-12
    assert base_optimizer(name).linear


def test_optax_adam_is_not_linear_and_optax_sgd_is():
    assert bend(from_optax(optax.adam(0.1))) > 1e-2
    assert bend(from_optax(optax.sgd(0.1, momentum=0.9), linear=True)) < 1e-12


def test_bias_correction_is_applied_when_used_and_never_stored():
    plain, corrected = adam(b2=0.9), adam(b2=0.9, bias_correction=True)
    b1, b2, eps = 0.9, 0.9, 1e-3
    s = state_after(corrected, GRADIENTS[:4])
    np.testing.assert_array_equal(s.m, state_after(plain, GRADIENTS[:4]).m)
    np.testing.assert_array_equal(s.v, state_after(plain, GRADIENTS[:4]).v)
    weights = (1 - b1) * b1 ** np.arange(4, -1, -1.0)  # weights of five gradients, the newest last; sum 1 - b1^5
    squares = (1 - b2) * b2 ** np.arange(3, -1, -1.0)
    mean = weights @ GRADIENTS[:5] / weights.sum()
    square = squares @ GRADIENTS[:4] ** 2 / squares.sum()
    got = corrected.update(jnp.asarray(GRADIENTS[4]), s, None)
    np.testing.assert_allclose(got, mean / (eps + np.sqrt(square)), 1e-12)


def test_constant_gradients_give_steps_of_one_under_bias_correction():
    g = np.full((5, 3), 7.0)
    x = walk(adam(bias_correction=True, eps=1e-9), g, np.zeros(3), 1.0)
    np.testing.assert_allclose(np.diff(x, axis=0), -1.0, 1e-8)


def test_no_count_is_carried_without_bias_correction():
    assert adam().init(jnp.zeros(2)).count == ()
    assert adam(bias_correction=True).init(jnp.zeros(2)).count.shape == ()


def test_from_optax_walks_as_optax_does():
    tx = optax.adamw(0.1, weight_decay=0.2)
    x, state, expected = jnp.asarray(X), tx.init(jnp.asarray(X)), []
    for g in jnp.asarray(GRADIENTS):
        updates, state = tx.update(g, state, x)
        x = optax.apply_updates(x, updates)
        expected.append(np.asarray(x))
    np.testing.assert_allclose(walk(from_optax(tx), GRADIENTS, X, 1.0), expected, 1e-12)


def test_only_what_is_not_linear_warns_and_the_warning_names_it():
    with told(match=r"mymethod.*'clever'.*approximately linear"):
        warn_if_not_linear("mymethod", from_optax(optax.adam(0.1), name="clever"))
    with collecting() as texts:
        for base in (sgd(), momentum(), adam(), adagrad(), from_optax(optax.sgd(0.1), linear=True)):
            warn_if_not_linear("mymethod", base)
    assert not texts


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: momentum(beta=1.0), "beta"),
        (lambda: momentum(beta=-0.1), "beta"),
        (lambda: adam(b1=1.0), "b1"),
        (lambda: adam(b2=-1), "b2"),
        (lambda: adam(eps=0), "eps"),
        (lambda: adam(initial=-1), "initial"),
        (lambda: adam(initial=0.1, bias_correction=True), "initial"),
        (lambda: adagrad(eps=float("nan")), "eps"),
        (lambda: base_optimizer("lion"), "base"),
        (lambda: base_optimizer("momentum", b1=0.9), "b1 is not an option of base='momentum'.*beta"),
        (lambda: base_optimizer("sgd", beta=0.9), "beta"),
        (lambda: base_optimizer(sgd(), beta=0.9), "beta"),
    ],
)
def test_refusals(call, word):
    with pytest.raises(ValueError, match=word):
        call()
