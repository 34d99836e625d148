"""FedAc against the paper's recursion in NumPy, its degenerate case FedAvg, and its rate without noise."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from closed_forms import loss, problem, rounds_of
from fedbraid.algorithms._fedac import fedac_coupling

pytestmark = pytest.mark.usefixtures("x64")

P = problem()
X = np.array([0.3, -1.2, 0.8])
ETA, MU = 0.08, 0.3


def run(alg, rounds, of=P):
    return rounds_of(alg, jnp.asarray(X), of, rounds)[0]


def coupling(variant, steps):
    """Written again from eqs. (3.1) and (3.2)."""
    gamma = max(np.sqrt(ETA / (MU * steps)), ETA)
    if variant == "I":
        return 1 / (gamma * MU), 1 / (gamma * MU) + 1, gamma
    alpha = 1.5 / (gamma * MU) - 0.5
    return alpha, (2 * alpha * alpha - 1) / (alpha - 1), gamma


def recursion(gradients, steps, rounds, numbers):
    """Algorithm 1: every worker's (w, w_ag), averaged after ``steps`` steps."""
    alpha, beta, gamma = numbers
    w, ag = X.copy(), X.copy()
    for _ in range(rounds):
        ends = []
        for grad in gradients:
            y, z = w.copy(), ag.copy()
            for _ in range(steps):
                md = y / beta + (1 - 1 / beta) * z
                g = grad(md)
                y, z = (1 - 1 / alpha) * y + md / alpha - gamma * g, md - ETA * g
            ends.append((y, z))
        w, ag = np.mean(ends, axis=0)
    return w, ag


def gradients(of=P):
    return [lambda x, A=A, b=b: A @ x - b for A, b in zip(of.A, of.b, strict=True)]


@pytest.mark.parametrize("variant", ["I", "II"])
@pytest.mark.parametrize("steps", [1, 4])
def test_it_is_the_papers_recursion(variant, steps):
    numbers = coupling(variant, steps)
    np.testing.assert_allclose(fedac_coupling(variant, eta=ETA, mu=MU, steps=steps), numbers, rtol=1e-12)
    alg = fb.fedac(loss, client_lr=ETA, strong_convexity=MU, variant=variant, batch_size=None, steps=steps)
    server = run(alg, 6)
    w, ag = recursion(gradients(), steps, 6, numbers)
    np.testing.assert_allclose(server.w, w, rtol=1e-12)
    np.testing.assert_allclose(alg.params(server), ag, rtol=1e-12)
    assert np.abs(w - ag).max() > 1e-3


def test_one_local_step_is_accelerated_descent_on_the_mean():
    numbers = coupling("I", 1)
    mean = [lambda x: P.A.mean(0) @ x - P.b.mean(0)]
    alg = fb.fedac(loss, client_lr=ETA, strong_convexity=MU, variant="I", batch_size=None, steps=1)
    np.testing.assert_allclose(alg.params(run(alg, 20)), recursion(mean, 1, 20, numbers)[1], rtol=1e-10)


def test_without_coupling_it_is_fedavg():
    local = {"client_lr": ETA, "weighting": "examples", "batch_size": 4, "epochs": 2}
    plain = fb.fedavg(loss, **local)
    alg = fb.fedac(loss, alpha=1.0, beta=1.0, gamma=ETA, **local)
    a, b = (fb.simulate(one, jnp.asarray(X), P.split, rounds=3, cohort=3, devices=1).params for one in (alg, plain))
    np.testing.assert_allclose(a, b, rtol=1e-12)
    assert np.abs(np.asarray(a) - X).max() > 1e-3


def test_its_rate_is_accelerated():
    """One step per round, eta = 1 / L and the true mu: the paper's potential shrinks by 1 - sqrt(eta mu) per round.

    Psi = F(w_ag) - F* + mu / 2 |w - x*|^2 (FedAc-I without noise). Gradient descent is slower.
    """
    A, b = P.A.mean(0), P.b.mean(0)
    mu, smooth = np.linalg.eigvalsh(A)[[0, -1]]
    best = np.linalg.solve(A, b)
    eta, rounds = 1 / smooth, 30

    def gap(x):
        return 0.5 * (x - best) @ A @ (x - best)

    alg = fb.fedac(loss, client_lr=eta, strong_convexity=mu, variant="I", batch_size=None, steps=1)
    server = run(alg, rounds)
    w, ag = np.asarray(server.w), np.asarray(server.params)
    first = gap(X) + mu / 2 * ((X - best) ** 2).sum()
    assert gap(ag) + mu / 2 * ((w - best) ** 2).sum() <= (1 - np.sqrt(eta * mu)) ** rounds * first
    plain = fb.fedavg(loss, client_lr=eta, weighting="uniform", batch_size=None, steps=1)
    assert gap(ag) < 0.1 * gap(np.asarray(run(plain, rounds).params))


def test_it_sends_two_models_each_way():
    cost = fb.cost(fb.fedac(loss), jnp.zeros(3), P.split)
    assert (cost.down, cost.up) == (2 * cost.model, 2 * cost.model)
