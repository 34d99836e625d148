"""The lemmas inside the papers' proofs, on random instances: where one fails, a test has the counterexample.

Named by paper: Charles and Konecny (LocalUpdate), Karimireddy et al. (Mime), Renard (Notes), the
supplement of Elastic Aggregation.
"""

import itertools
import math

import numpy as np
import pytest

from fedbraid import recipes, theory

SEEDS = range(20)


def symmetric(rng, dim, low, high):
    q = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    return q @ np.diag(rng.uniform(low, high, dim)) @ q.T


# --- LocalUpdate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_local_update_lemma_8_mean_eigenvalues_bound_the_mean(seed):
    rng = np.random.default_rng(seed)
    parts = [symmetric(rng, 4, -2, 5) for _ in range(5)]
    weights = rng.dirichlet(np.ones(5))
    mean = np.linalg.eigvalsh(sum(w * b for w, b in zip(weights, parts, strict=True)))
    ends = np.array([np.linalg.eigvalsh(b)[[0, -1]] for b in parts])
    low, high = weights @ ends
    assert low - 1e-12 <= mean[0] <= mean[-1] <= high + 1e-12


def test_local_update_theorem_5_and_corollary_2_mean_absolute_deviation():
    """D(X) <= 2 (b - v) (v - a) / (b - a) <= (b - a) / 2, with equality for a and b with probability 1/2."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = np.sort(rng.normal(size=2))
        values, p = rng.uniform(a, b, 4), rng.dirichlet(np.ones(4))
        v = p @ values
        deviation = p @ np.abs(values - v)
        assert deviation <= 2 * (b - v) * (v - a) / (b - a) + 1e-12 <= (b - a) / 2 + 2e-12
    v = 0.3 * 2.0 + 0.7 * 5.0  # only the values a and b: Theorem 5 is attained
    assert 0.3 * (v - 2.0) + 0.7 * (5.0 - v) == pytest.approx(2 * (5.0 - v) * (v - 2.0) / 3.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_local_update_lemma_13_a_matrix_weighted_mean_keeps_its_eigenvalues_in_range(seed):
    rng = np.random.default_rng(seed)
    X, Y = [], []
    for _ in range(3):  # X_i and Y_i commute
        q = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        X.append(q @ np.diag(rng.uniform(1, 2, 3)) @ q.T)
        Y.append(q @ np.diag(rng.uniform(0.01, 5, 3)) @ q.T)
    mean = sum(x @ y for x, y in zip(X, Y, strict=True)) @ np.linalg.inv(sum(Y))
    found = np.linalg.eigvals(mean)
    assert np.abs(found.imag).max() < 1e-9
    assert 1 - 1e-9 <= found.real.min() <= found.real.max() <= 2 + 1e-9


def test_local_update_lemma_14_and_theorem_6_fail_for_matrices_that_do_not_commute():
    """Lemma 14 has the eigenvalues of P_1 (P_1 + P_2)^-1 at most 1, not its norm; Theorem 6 then fails, too."""
    fed = theory.crossing_pair(60.0, half_angle=0.0803)
    P = fed.A[0] @ np.linalg.inv(fed.A.sum(0))
    assert np.abs(np.linalg.eigvals(P)).max() <= 1
    assert np.linalg.norm(P, 2) > 1.8
    X = np.array([np.eye(2) + (np.eye(2) - a / 120) for a in fed.A])  # Q of Theta_{1:2}, gamma = 1 / (2 L)
    Y = fed.A / 2
    low, high = 1.5, 2 - 1 / 120
    assert np.linalg.eigvalsh(X) == pytest.approx(np.array([[low, high]] * 2))
    mean = np.einsum("iab,ibc->ac", X, Y) @ np.linalg.inv(Y.sum(0))
    inverse = np.linalg.inv(Y.sum(0)) @ np.linalg.inv(mean)
    discrepancy = sum(np.linalg.norm(inverse @ (x - mean) @ y, 2) for x, y in zip(X, Y, strict=True))
    assert discrepancy > 2 * (high - low) / high * 1.2


# --- Mime -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_mime_lemmas_1_to_4_on_vectors_hessians_and_weak_convexity(seed):
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(5, 3))
    squares = np.sum(v**2, -1)
    for c in (0.1, 1.0, 7.0):
        assert np.sum((v[0] + v[1]) ** 2) <= (1 + c) * squares[0] + (1 + 1 / c) * squares[1] + 1e-12
    assert np.sum(v.sum(0) ** 2) <= 5 * squares.sum() + 1e-12
    # Lemma 2: dependent variables, here one coin for all
    means, spread = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    both = np.mean([np.sum((means + sign * spread).sum(0) ** 2) for sign in (1, -1)])
    assert both <= np.sum(means.sum(0) ** 2) + 25 * np.sum(spread**2, -1).max() + 1e-12
    # Lemma 2, second claim: a martingale, one coin per step
    signs = itertools.product((1, -1), repeat=5)
    walk = np.mean([np.sum((means + np.array(s)[:, None] * spread).sum(0) ** 2) for s in signs])
    assert walk <= 2 * np.sum(means.sum(0) ** 2) + 2 * 5 * np.sum(spread**2, -1).max() + 1e-12
    # Lemma 3: quadratics whose Hessians differ by at most delta
    hessians = np.array([symmetric(rng, 3, -1, 2) for _ in range(4)])
    delta = max(np.linalg.norm(h - hessians.mean(0), 2) for h in hessians)
    x, y = v[0], v[1]
    for h in hessians:
        assert np.sum(((h - hessians.mean(0)) @ (y - x)) ** 2) <= delta**2 * np.sum((y - x) ** 2) + 1e-12
    # Lemma 4: f is delta-weakly convex, gamma >= delta
    f = hessians[0] - (np.linalg.eigvalsh(hessians[0])[0] + 0.7) * np.eye(3)  # smallest curvature -0.7
    phi = lambda z: z @ f @ z / 2 + 0.35 * np.sum((z - x) ** 2)  # noqa: E731
    assert np.mean([phi(z) for z in v]) >= phi(v.mean(0)) - 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_mime_lemmas_17_and_18_bias_of_local_gradients(seed):
    """y_i may depend on i; S = 2 clients with replacement, all pairs; sigma^2 = 0."""
    rng = np.random.default_rng(seed)
    hessians = np.array([symmetric(rng, 3, -1, 2) for _ in range(4)])
    shifts, x = rng.normal(size=(4, 3)), rng.normal(size=3)
    ys = x + rng.normal(size=(4, 3))
    gradient = lambda i, z: hessians[i] @ z + shifts[i]  # noqa: E731
    mean = lambda z: np.mean([gradient(i, z) for i in range(4)], axis=0)  # noqa: E731
    delta = max(np.linalg.norm(h - hessians.mean(0), 2) for h in hessians)
    G2 = np.mean([np.sum((gradient(i, x) - mean(x)) ** 2) for i in range(4)])
    for i in range(4):
        found = [
            np.sum((gradient(i, ys[i]) + (gradient(j, x) + gradient(k, x)) / 2 - gradient(i, x) - mean(ys[i])) ** 2)
            for j, k in itertools.product(range(4), repeat=2)
        ]
        assert np.mean(found) <= 2 * delta**2 * np.sum((ys[i] - x) ** 2) + 2 * G2 / 2 + 1e-12
    lite = np.mean([np.sum((gradient(i, ys[i]) - mean(ys[i])) ** 2) for i in range(4)])
    assert lite <= 2 * delta**2 * np.mean(np.sum((ys - x) ** 2, -1)) + 2 * G2 + 1e-12


def test_mime_lemma_13_effective_step_sizes_of_adam():
    rng = np.random.default_rng(0)
    H, eps, v = 1.5, 0.2, np.zeros(4)
    for _ in range(50):
        g = rng.normal(size=4)
        update = g / (np.sqrt(v) + eps)
        assert np.all(np.abs(g) / (H + eps) <= np.abs(update) + 1e-15)
        assert np.all(np.abs(update) <= np.abs(g) / eps + 1e-15)
        v = 0.9 * v + 0.1 * rng.uniform(-H, H, 4) ** 2


@pytest.mark.parametrize("lite", [False, True])
def test_mime_theorems_5_and_6_along_a_run(lite):
    """MVR by equations (13) to (16) in NumPy, all clients, the recipe's rate and momentum, m_0 = grad f(x_0)."""
    rng = np.random.default_rng(2)
    base = symmetric(rng, 3, 0.2, 1.0)
    hessians = np.array([base + 0.02 * symmetric(rng, 3, -1, 1) for _ in range(4)])
    shifts = 0.3 * rng.normal(size=(4, 3))
    smooth = max(np.linalg.norm(h, 2) for h in hessians)
    delta = max(np.linalg.norm(h - hessians.mean(0), 2) for h in hessians)
    best = np.linalg.solve(hessians.mean(0), -shifts.mean(0))
    x = older = best + np.array([3.0, -2.0, 1.0])
    gap = (x - best) @ hessians.mean(0) @ (x - best) / 2
    K, T, G2 = math.ceil(smooth / delta), 60, 1.0
    known = {"smoothness": smooth, "delta": delta, "G2": G2, "gap": gap, "steps": K, "sampled": 4, "rounds": T}
    found = recipes.mvr_steps(**known, lite=lite)
    eta, a = found.client_lr, found.a
    at = lambda z: np.einsum("iab,b->ia", hessians, z) + shifts  # noqa: E731
    m, squares = at(x).mean(0), []
    c = m
    for _ in range(T):
        assert np.mean(np.sum((at(x) - at(x).mean(0)) ** 2, -1)) <= G2
        ys, here = np.repeat(x[None], 4, 0), at(x)
        for _ in range(K):
            squares.append(np.mean(np.sum((ys @ hessians.mean(0) + shifts.mean(0)) ** 2, -1)))
            g = np.einsum("iab,ib->ia", hessians, ys) + shifts
            fresh = g if lite else g - here + c
            ys = ys - eta * (a * fresh + (1 - a) * m + (1 - a) * (g - here))
        c = here.mean(0)
        m = a * c + (1 - a) * m + (1 - a) * (c - at(older).mean(0))
        x, older = ys.mean(0), x
    bound = theory.mime_mvr_bound("mimelite" if lite else "mime", **known)
    assert squares[-1] < squares[0]
    assert np.mean(squares) <= bound.value


# --- Notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_notes_properties_of_convex_smooth_functions(seed):
    """f = sum of log(1 + exp(a . x)): Properties 2.1 to 2.5 and Observation 2.1, with the slips put right."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(6, 3))
    x, y, z = rng.normal(size=(3, 3))
    f = lambda w: np.logaddexp(0, a @ w).sum()  # noqa: E731
    slope = a.T @ (1 / (1 + np.exp(-a @ x)))
    smooth = np.linalg.eigvalsh(a.T @ a)[-1] / 4
    share = rng.random()
    assert f(share * x + (1 - share) * y) <= share * f(x) + (1 - share) * f(y) + 1e-12
    assert f(y) >= f(x) + slope @ (y - x) - 1e-12
    assert f(z) + slope @ (y - z) >= f(x) + slope @ (y - x) - 1e-12  # the parallel plane through z lies above; the
    # printed inequality says below, against its own text
    assert f(y) <= f(x) + slope @ (y - x) + smooth / 2 * np.sum((y - x) ** 2) + 1e-12
    assert x @ y == pytest.approx((np.sum((x + y) ** 2) - x @ x - y @ y) / 2)
    for weight in (0.1, 1.0, 5.0):
        assert 2 * x @ y <= weight * x @ x + y @ y / weight + 1e-12


# --- Elastic aggregation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_lemmas_1_and_2_step_sizes_that_unroll_a_recursion(seed):
    """Lemma 2's bound at the step size of its proof; Lemma 1's before its step size is tuned."""
    rng = np.random.default_rng(seed)
    R, most, c1, c2 = int(rng.integers(1, 500)), *10 ** rng.uniform(-3, 1, 3)
    d = np.append(10 ** rng.uniform(-2, 2), rng.uniform(0, 5, R + 1))
    eta = min(most, math.sqrt(d[0] / (c1 * (R + 1))), (d[0] / (c2 * (R + 1))) ** (1 / 3))
    psi = np.mean((d[:-1] - d[1:]) / eta + c1 * eta + c2 * eta**2)
    right = 2 * math.sqrt(c1 * d[0] / (R + 1)) + 2 * (d[0] / (R + 1)) ** (2 / 3) * c2 ** (1 / 3)
    assert psi <= d[0] / (most * (R + 1)) + right + 1e-9
    mu = rng.uniform(0.1, 0.9) / most
    R = int(rng.integers(math.ceil(1 / (2 * mu * most)), 30))
    d = np.append(d[0], rng.uniform(0, 5, R + 1))
    weights = (1 - mu * most) ** -np.arange(0.0, R + 1)
    terms = weights / most * ((1 - mu * most) * d[:-1] - d[1:]) + c1 * most * weights
    left = terms.sum() / weights.sum()
    assert left <= 3 * mu * d[0] * math.exp(-mu * most * R) + c1 * most + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_lemmas_5_and_6_on_strongly_convex_quadratics(seed):
    rng = np.random.default_rng(seed)
    h = symmetric(rng, 4, 0.3, 5.0)
    mu, beta = np.linalg.eigvalsh(h)[[0, -1]]
    x, y, z = rng.normal(size=(3, 4))
    value = lambda w: w @ h @ w / 2  # noqa: E731
    right = value(z) - value(y) + mu / 4 * np.sum((y - z) ** 2) - beta * np.sum((z - x) ** 2)
    assert (h @ x) @ (z - y) >= right - 1e-12
    eta = rng.uniform(0.01, 1) / beta
    assert np.sum((x - y - eta * h @ (x - y)) ** 2) <= (1 - mu * eta) * np.sum((x - y) ** 2) + 1e-12
