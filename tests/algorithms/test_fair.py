"""q-FedAvg against the paper's recursion, and AFL against the minimax point."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize, root

import fedbraid as fb
from fedbraid import address
from fedbraid.algorithms._fair import threshold_of
from fedbraid.data.federated import Split
from fedbraid.local import masked_mean

pytestmark = pytest.mark.usefixtures("x64")

# client k has n_k copies of one quadratic: 0.5 sum a (x - e)^2 + c
SIZES = np.array([2, 5, 3])
A = np.array([[1.0, 2.0], [2.0, 0.5], [0.6, 1.5]])
E = np.array([[0.0, 1.0], [2.0, -1.0], [-1.0, 2.0]])
C = np.array([0.2, 0.5, 1.0])
DATA = Split.from_clients(
    [
        {"a": np.tile(a, (n, 1)), "e": np.tile(e, (n, 1)), "c": np.full(n, c)}
        for a, e, c, n in zip(A, E, C, SIZES, strict=True)
    ]
)
START = np.array([0.5, 0.5])


def loss(params, batch, key):
    each = 0.5 * jnp.sum(batch["a"] * (params - batch["e"]) ** 2, -1) + batch["c"]
    return masked_mean(each, batch["mask"])


def value(k, x):
    return 0.5 * (A[k] * (x - E[k]) ** 2).sum() + C[k]


def run(alg, rounds, **options):
    return fb.simulate(alg, jnp.asarray(START), DATA, rounds=rounds, devices=1, **options)


# --- q-FedAvg --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "smoothness"), [(0.0, None), (1.0, None), (2.5, 7.0)])
def test_q_fedavg_is_the_papers_recursion(q, smoothness):
    lr, x = 0.1, START.copy()
    big = 1 / lr if smoothness is None else smoothness
    for t in range(4):
        total, h = np.zeros(2), 0.0
        for k in address.cohort(0, t, 0, 3, 2):
            y = x.copy()
            for _ in range(3):
                y = y - lr * A[k] * (y - E[k])
            d, f = big * (x - y), value(k, x)
            total = total + SIZES[k] * f**q * d
            h += SIZES[k] * (q * f ** (q - 1) * d @ d + big * f**q)
        x = x - total / h
    alg = fb.q_fedavg(loss, q=q, client_lr=lr, smoothness=smoothness, batch_size=None, steps=3)
    np.testing.assert_allclose(run(alg, 4, cohort=2).params, x, rtol=1e-8)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_q_of_zero_is_fedavg(weighting):
    local = {"client_lr": 0.1, "weighting": weighting, "batch_size": 2, "epochs": 2}
    a, b = run(fb.q_fedavg(loss, q=0.0, **local), 3), run(fb.fedavg(loss, **local), 3)
    np.testing.assert_allclose(a.params, b.params, rtol=1e-9)


@pytest.mark.parametrize("q", [1.0, 5.0])
def test_it_minimizes_the_q_fair_objective(q):
    """One local step on all examples (q-FedSGD) ends at SciPy's minimizer of sum_k p_k F_k^(q+1)."""
    p = SIZES / SIZES.sum()

    def objective(x):
        return sum(p[k] * value(k, x) ** (q + 1) for k in range(3)) ** (1 / (q + 1))

    best = minimize(objective, START, method="BFGS", options={"gtol": 1e-11}).x
    alg = fb.q_fedavg(loss, q=q, client_lr=0.3, batch_size=None, steps=1)
    np.testing.assert_allclose(run(alg, 3000).params, best, atol=1e-6)
    plain = minimize(lambda x: sum(p[k] * value(k, x) for k in range(3)), START, method="BFGS").x
    assert max(value(k, best) for k in range(3)) < max(value(k, plain) for k in range(3)) - 0.05  # and is fairer


# --- AFL -------------------------------------------------------------------------------------------------------------


def minimax():
    """The point with the smallest largest loss: solves the optimality conditions for each set of clients that reach it.

    The losses are convex, so a solution with mixture weights >= 0 and no larger loss is the minimum. The value of the
    dual at these weights, a closed form, proves it.
    """
    for active in [list(some) for count in (1, 2, 3) for some in combinations(range(3), count)]:

        def conditions(z, active=active):
            x, level, mixture = z[:2], z[2], z[3:]
            slope = sum(weight * A[k] * (x - E[k]) for weight, k in zip(mixture, active, strict=True))
            return [*slope, *(value(k, x) - level for k in active), mixture.sum() - 1]

        found = root(conditions, [*START, 2.0, *np.full(len(active), 1 / len(active))], tol=1e-14)
        x, level, mixture = found.x[:2], found.x[2], found.x[3:]
        solved = np.abs(conditions(found.x)).max() < 1e-12
        if solved and (mixture >= 0).all() and max(value(k, x) for k in range(3)) < level + 1e-12:
            curvature = mixture @ A[active]
            lowest = mixture @ (A[active] * E[active]) / curvature  # minimizes the mixture of the losses
            dual = sum(weight * value(k, lowest) for weight, k in zip(mixture, active, strict=True))
            assert abs(dual - level) < 1e-12
            return x, level
    raise AssertionError("no set of clients fulfils the optimality conditions")


def projection(y):
    """Onto the simplex, by bisection on the threshold."""
    low, high = y.min() - 1, y.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(y - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(y - low, 0)


def test_afl_is_the_papers_recursion_with_all_clients():
    lr, rate = 0.1, 0.3
    x, lam, path = START.copy(), np.full(3, 1 / 3), []
    for _ in range(12):
        losses = np.array([value(k, x) for k in range(3)])
        step = sum(lam[k] * A[k] * (x - E[k]) for k in range(3))
        lam = projection(lam + rate / 3 * losses)
        x = x - lr * step
        path.append(x)
    result = run(fb.afl(loss, lr=lr, lambda_lr=rate), 12)
    np.testing.assert_allclose(result.params, np.mean(path, axis=0), rtol=1e-9)
    np.testing.assert_allclose(result.server.params, x, rtol=1e-9)
    np.testing.assert_allclose(result.states.share / 3, lam, atol=1e-9)
    assert lam.min() < 0.2  # the mixture moved


@pytest.mark.parametrize("cohort", ["all", 2])
def test_afl_reaches_the_minimax_point(cohort):
    best, level = minimax()
    alg = fb.afl(loss, lr=0.02, lambda_lr=0.05, output="mean")
    result = run(alg, 8000, **({} if cohort == "all" else {"cohort": cohort}))
    tolerance = 1e-2 if cohort == "all" else 5e-2
    if cohort == "all":
        np.testing.assert_allclose(result.server.params, best, atol=1e-6)  # the last iterate
    np.testing.assert_allclose(result.params, best, atol=tolerance)
    worst = max(value(k, np.asarray(result.params)) for k in range(3))
    assert worst < level + min(tolerance, 0.04)
    mean = (A * E).sum(0) / A.sum(0)
    assert max(value(k, mean) for k in range(3)) > level + 0.05  # the minimizer of the mean is worse
    np.testing.assert_allclose(np.sum(result.states.share), 3, rtol=1e-9)


def test_a_lost_upload_keeps_its_share():
    """With lost uploads shares stay valid, and the server's step stays along a mixture."""
    result = run(fb.afl(loss, lr=0.05, lambda_lr=0.1), 50, arrival=fb.simulation.bernoulli(0.5))
    assert (np.asarray(result.states.share) >= 0).all()
    assert np.isfinite(np.asarray(result.params)).all()
    assert np.linalg.norm(np.asarray(result.server.params) - START) > 0.05


def test_the_threshold_projects():
    rng = np.random.default_rng(0)
    for _ in range(20):
        y = rng.normal(size=6)
        there = rng.random(6) > 0.2
        there[0] = True
        t = float(threshold_of(jnp.asarray(y), jnp.array(1.0), jnp.asarray(there)))
        np.testing.assert_allclose(np.maximum(y[there] - t, 0), projection(y[there]), atol=1e-9)


def test_afl_sends_few_numbers_beside_gradients():
    cost = fb.cost(fb.afl(loss), jnp.zeros(2), DATA)
    assert cost.up == cost.model + 3 * 8
    assert jax.tree.leaves(cost.down)[0] == 2 * cost.model + 3 * 8
