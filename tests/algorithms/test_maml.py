"""MAML: its message is the gradient of the adapted loss, in closed form on quadratics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from closed_forms import distortion, loss, problem, rounds_of, surrogate_minimizer, uploads
from fedbraid.local import ClientData, masked_mean

pytestmark = pytest.mark.usefixtures("x64")

P = problem()
X = np.array([0.3, -1.2, 0.8])
EYE = np.eye(3)
ALL = {"support": 1.0, "batch_size": None}  # gradient descent on all examples, which are also the query set


def messages(**options):
    return np.asarray(uploads(fb.maml(loss, **options), jnp.asarray(X), P).pseudograd)


def last(k):
    """Theta_k."""
    return (0,) * (k - 1) + (1,)


@pytest.mark.parametrize("K", [1, 3])
def test_on_quadratics_it_is_theta_of_2k_plus_1(K):
    """Charles and Konecny, Theorem 2."""
    expected = [distortion(A, last(2 * K + 1), 0.15) @ (A @ X - b) for A, b in zip(P.A, P.b, strict=True)]
    np.testing.assert_allclose(messages(client_lr=0.15, steps=K, **ALL), expected, rtol=1e-10)


def test_first_order_is_theta_of_k_plus_1():
    expected = [distortion(A, last(4), 0.15) @ (A @ X - b) for A, b in zip(P.A, P.b, strict=True)]
    np.testing.assert_allclose(messages(client_lr=0.15, steps=3, order="first", **ALL), expected, rtol=1e-10)


def test_proximal_form():
    """With the proximal term x_{K+1} - c = J (x - c), and the message is J A J (x - c)."""
    K, gamma, alpha = 3, 0.15, 0.9
    expected = []
    for A, b in zip(P.A, P.b, strict=True):
        J = EYE.copy()  # by its recursion, independent of the closed form in the docs
        for _ in range(K):
            J = J - gamma * (A @ J + alpha * (J - EYE))
        expected.append(J @ A @ J @ (X - np.linalg.solve(A, b)))
        R = EYE - gamma * (A + alpha * EYE)
        closed = np.linalg.solve(A + alpha * EYE, alpha * EYE + A @ np.linalg.matrix_power(R, K))
        np.testing.assert_allclose(J, closed, rtol=1e-10)
    np.testing.assert_allclose(messages(client_lr=gamma, alpha=alpha, steps=K, **ALL), expected, rtol=1e-10)


def test_it_stops_at_the_minimizer_of_its_surrogate():
    alg = fb.maml(loss, client_lr=0.1, steps=2, server_lr=0.5, **ALL)
    server, _ = rounds_of(alg, jnp.zeros(3), P, 1500)
    np.testing.assert_allclose(server.params, surrogate_minimizer(P, last(5), 0.1), atol=1e-9)


def test_without_local_rate_it_is_gradient_descent():
    np.testing.assert_allclose(messages(client_lr=0.0, steps=4, **ALL), P.A @ X - P.b, rtol=1e-10)


def test_the_gradient_of_a_loss_that_is_not_quadratic():
    """Central differences of the loss after adaptation, both in NumPy."""
    rng = np.random.default_rng(1)
    x, y, gamma, K = rng.normal(size=(8, 3)), np.where(rng.random(8) < 0.5, 1.0, -1.0), 0.7, 3

    def logistic(params, batch, key):
        return masked_mean(jnp.logaddexp(0.0, -batch["y"] * (batch["x"] @ params)), batch["mask"])

    def adapted(w):
        for _ in range(K):
            w = w + gamma * (y / (1 + np.exp(y * (x @ w)))) @ x / len(y)
        return np.mean(np.logaddexp(0, -y * (x @ w)))

    slopes = [(adapted(X + h) - adapted(X - h)) / 2e-6 for h in 1e-6 * EYE]
    alg = fb.maml(logistic, client_lr=gamma, steps=K, **ALL)
    data = ClientData.of({"x": x, "y": y})
    report = jax.jit(alg.exchanges[0].client)(
        alg.exchanges[0].send(alg.init(jnp.asarray(X))), (), data, jax.random.key(0)
    )
    np.testing.assert_allclose(report.up.pseudograd, slopes, atol=1e-8)
    np.testing.assert_allclose(report.metrics["loss"], adapted(X), rtol=1e-10)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_support_and_query_share_no_example(batch_size):
    """Row r changes only coordinate r, so the message shows which rows were in which set, and how often."""
    n, gamma = 7, 0.5

    def loss(params, batch, key):
        return 0.5 * masked_mean(params[batch["row"]] ** 2, batch["mask"])

    alg = fb.maml(loss, client_lr=gamma, steps=1, support=0.5, batch_size=batch_size)
    data = ClientData.of({"row": np.arange(n)})
    down = alg.exchanges[0].send(alg.init(jnp.ones(n)))
    client = jax.jit(lambda key: alg.exchanges[0].client(down, (), data, key).up.pseudograd)
    size = 3 if batch_size is None else 2  # of seven examples four are support (half, rounded to even), three are query
    queried = set()
    for seed in range(25):
        g = np.asarray(client(jax.random.key(seed)))
        # a coordinate in both sets would give (1 - gamma / 4)^2 / 3
        np.testing.assert_allclose(np.sort(g), [0.0] * (n - size) + [1 / size] * size, atol=1e-12)
        queried |= set(np.flatnonzero(g))
    assert queried == set(range(n))  # a new division in every round


def test_support_batches_walk_through_the_support_set():
    """Three steps of one row each on a support set of three use each row once; the fourth step starts again."""

    def loss(params, batch, key):  # coordinate 0 counts how often row r was used, in decimal place r
        row = masked_mean(10.0 ** batch["row"], batch["mask"])
        return -params[0] * row

    data = ClientData.of({"row": np.arange(6.0)})
    adapted = {}
    for K in (3, 6):
        alg = fb.maml(loss, client_lr=1.0, steps=K, batch_size=1)
        # the query loss at the adapted model is -x_0 10^(query row): divide by its gradient to read x_0
        down = alg.exchanges[0].send(alg.init(jnp.zeros(1)))
        report = jax.jit(alg.exchanges[0].client)(down, (), data, jax.random.key(3))
        adapted[K] = f"{round(float(report.metrics['loss'] / report.up.pseudograd[0])):06d}"
    assert sorted(adapted[3]) == list("000111")
    assert sorted(adapted[6]) == list("000222")
    query = round(np.log10(-float(report.up.pseudograd[0])))
    assert adapted[3][::-1][query] == "0"


def test_a_client_of_one_example_uses_it_for_both():
    alg = fb.maml(loss, client_lr=0.1, steps=1, batch_size=None)
    data = ClientData.of({"x": np.array([[1.0, 0.0, 0.0]]), "y": np.array([2.0])})
    report = jax.jit(alg.exchanges[0].client)(
        alg.exchanges[0].send(alg.init(jnp.zeros(3))), (), data, jax.random.key(0)
    )
    np.testing.assert_allclose(report.up.pseudograd, [-2 * 0.9**2, 0, 0], rtol=1e-12)
