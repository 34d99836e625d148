"""Fixed points against the iterations themselves, prox by scipy, and the counts of the paper's Figure 3."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedbraid.theory import (
    conditioned_least_squares,
    contraction,
    error_floor,
    fedgd_fixed_point,
    fedgd_gap,
    fedprox_fixed_point,
    fedprox_gap,
    fedsplit_fixed_point,
    fedsplit_gap,
    fedsplit_spectral_radius,
    gaussian_least_squares,
    inexact_prox_error,
    linear_federation,
    prox_gradient_step,
    random_federation,
    regularized_choice,
    rounds_bound,
    rounds_until,
    split_step,
)


@pytest.fixture(scope="module")
def b1():
    data = gaussian_least_squares(clients=25, dim=20, examples=60, seed=1)
    return data, data.federation()


def round_of_fedgd(data, x, s, e):
    ends = []
    for A, b in zip(data.designs, data.responses, strict=True):
        y = x.copy()
        for _ in range(e):
            y = y - s * A.T @ (A @ y - b)
        ends.append(y)
    return np.mean(ends, axis=0)


@pytest.mark.parametrize("e", [1, 10, 100])
def test_fedgd_stops_where_equation_10_says(b1, e):
    data, fed = b1
    s = 1.0 / fed.smoothness
    at = fedgd_fixed_point(fed, step=s, local_steps=e)
    np.testing.assert_allclose(round_of_fedgd(data, at, s, e), at, atol=1e-12)
    eye = np.eye(20)
    grams = [A.T @ A for A in data.designs]
    sums = [sum(np.linalg.matrix_power(eye - s * H, k) for k in range(e)) for H in grams]
    left = sum(H @ S for H, S in zip(grams, sums, strict=True))
    right = sum(S @ A.T @ b for S, A, b in zip(sums, data.designs, data.responses, strict=True))
    np.testing.assert_allclose(at, np.linalg.solve(left, right), rtol=1e-9)
    stacked = np.linalg.lstsq(np.concatenate(data.designs), np.concatenate(data.responses), rcond=None)[0]
    apart = np.linalg.norm(at - stacked)
    assert apart < 1e-12 if e == 1 else apart > 1e-4


def test_fedprox_stops_at_the_moreau_envelope_and_not_at_the_solution(b1):
    data, fed = b1
    s = 0.05
    at = fedprox_fixed_point(fed, step=s)
    ends = []
    for A, b in zip(data.designs, data.responses, strict=True):
        got = minimize(
            lambda u, A=A, b=b: 0.5 * np.sum((A @ u - b) ** 2) + np.sum((u - at) ** 2) / (2 * s),
            at,
            jac=lambda u, A=A, b=b: A.T @ (A @ u - b) + (u - at) / s,
            method="BFGS",
            options={"gtol": 1e-8},
        )
        ends.append(got.x)
    np.testing.assert_allclose(np.mean(ends, axis=0), at, atol=1e-7)
    assert np.linalg.norm(at - fed.minimizer) > 1e-3


def test_fedsplit_stops_at_the_least_squares_solution(b1):
    data, fed = b1
    at = fedsplit_fixed_point(fed)
    stacked = np.linalg.lstsq(np.concatenate(data.designs), np.concatenate(data.responses), rcond=None)[0]
    np.testing.assert_allclose(at.x, stacked, rtol=1e-10)
    np.testing.assert_allclose(at.z.mean(0), at.x, atol=1e-12)
    s = split_step(fed.mu, fed.smoothness)
    for A, b, z in zip(data.designs, data.responses, at.z, strict=True):  # z = z + 2 (prox(2 x - z) - x)
        prox = np.linalg.solve(np.eye(20) + s * A.T @ A, 2 * at.x - z + s * A.T @ b)
        np.testing.assert_allclose(prox, at.x, atol=1e-11)


def test_gap_histories_are_those_of_the_iterations(b1):
    data, fed = b1
    s = 1.0 / fed.smoothness
    F = lambda x: 0.5 * sum(np.sum((A @ x - b) ** 2) for A, b in zip(data.designs, data.responses, strict=True))  # noqa: E731
    best = F(fed.minimizer)
    x = np.zeros(20)
    got = fedgd_gap(fed, np.arange(6), step=s, local_steps=10)
    for t in range(6):
        assert got[t] == pytest.approx(F(x) - best, rel=1e-6)
        x = round_of_fedgd(data, x, s, 10)
    x, s = np.zeros(20), 0.02
    got = fedprox_gap(fed, np.arange(4), step=s)
    for t in range(4):
        assert got[t] == pytest.approx(F(x) - best, rel=1e-6)
        x = np.mean([np.linalg.solve(np.eye(20) + s * H, x + s * b) for H, b in zip(fed.A, fed.b, strict=True)], axis=0)


@pytest.mark.parametrize("e", [None, 1, 5])
def test_fedsplit_history_is_algorithm_1(e):
    fed = random_federation(4, 3, mu=0.5, smoothness=20.0, seed=2)
    s, a = split_step(0.5, 20.0), prox_gradient_step(0.5, 20.0)
    x, z = np.zeros(3), np.zeros((4, 3))
    got = fedsplit_gap(fed, 8, local_steps=e)
    for t in range(9):
        assert got[t] == pytest.approx(4 * (fed.loss(x) - fed.loss(fed.minimizer)), rel=1e-6, abs=1e-13)
        half = np.empty_like(z)
        for j in range(4):
            v = 2 * x - z[j]
            if e is None:
                half[j] = np.linalg.solve(np.eye(3) + s * fed.A[j], v + s * fed.b[j])
            else:
                u = v
                for _ in range(e):
                    u = u - a * (s * (fed.A[j] @ u - fed.b[j]) + (u - v))
                half[j] = u
        z = z + 2 * (half - x)
        x = z.mean(0)


@pytest.mark.slow
def test_figure_3_counts():
    """kappa = 10^4: about 33,000 rounds of FedGD (paper: 34,000) and about 420 of FedSplit (paper: 400) to 1e-3."""
    fed = conditioned_least_squares(1e4).federation()
    assert fed.kappa0 == pytest.approx(1e4, rel=1e-9)
    gd = rounds_until(fedgd_gap(fed, np.arange(40_000), step=2.0 / (fed.smoothness + fed.mu)), 1e-3)
    split = rounds_until(fedsplit_gap(fed, 600), 1e-3)
    assert 32_000 <= gd <= 35_000
    assert 390 <= split <= 450
    assert rounds_until(fedsplit_gap(fed, 600), 1e-3, stay=True) <= 460
    # Theorem 1 guarantees it: ||x - x*|| <= eps' gives F - F* <= m L eps'^2 / 2
    at = fedsplit_fixed_point(fed)
    start = np.linalg.norm(at.z) / math.sqrt(10)
    assert split <= rounds_bound(math.sqrt(2 * 1e-3 / (10 * 1e4)), 1e4, start)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 5.0), st.floats(1.0, 500.0), st.integers(0, 1000))
def test_contraction_bounds_the_instance_and_is_best_at_the_theorem_step(mu, ratio, seed):
    L = mu * ratio
    assert contraction(mu, L) == pytest.approx(1 - 2 / (math.sqrt(ratio) + 1), rel=1e-9, abs=1e-12)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert contraction(mu, L, factor * split_step(mu, L)) >= contraction(mu, L) - 1e-12
    fed = random_federation(3, 2, mu=mu, smoothness=L, seed=seed)
    assert fedsplit_spectral_radius(fed) <= contraction(mu, L) + 1e-9


def test_theorem_1_bound_holds_along_the_path_and_corollary_1_on_the_prox():
    fed = random_federation(5, 4, mu=1.0, smoothness=30.0, radius=3.0, seed=7)
    at = fedsplit_fixed_point(fed)
    s, a, kappa = split_step(1.0, 30.0), prox_gradient_step(1.0, 30.0), 30.0
    start = np.linalg.norm(at.z) / math.sqrt(5)
    x, z = np.zeros(4), np.zeros((5, 4))
    e, worst_b = 6, 0.0
    for t in range(40):
        for j in range(5):
            v = 2 * x - z[j]
            exact = np.linalg.solve(np.eye(4) + s * fed.A[j], v + s * fed.b[j])
            u = v
            for _ in range(e):
                u = u - a * (s * (fed.A[j] @ u - fed.b[j]) + (u - v))
            error = np.linalg.norm(u - exact)
            assert error <= inexact_prox_error(kappa, e, np.linalg.norm(v - exact)) + 1e-14
            worst_b = max(worst_b, error)
            z[j] = z[j] + 2 * (u - x)
        x = z.mean(0)
        bound = contraction(1.0, 30.0) ** (t + 1) * start + error_floor(kappa, worst_b)
        assert np.linalg.norm(x - fed.minimizer) <= bound + 1e-12


def test_theorem_2_choice_reaches_epsilon_on_a_singular_problem():
    """Rank-deficient clients: run FedSplit on the regularized losses for the stated number of rounds and check F."""
    rng = np.random.default_rng(0)
    designs = rng.standard_normal((6, 2, 4))
    designs[:, :, 3] = 0.0  # no client depends on the last coordinate: F is convex, but not strongly convex
    truth = rng.standard_normal(4)
    responses = designs @ truth + 0.1 * rng.standard_normal((6, 2))
    fed = linear_federation(np.einsum("jna,jnb->jab", designs, designs), np.einsum("jna,jn->ja", designs, responses))
    F = lambda x: 0.5 * np.sum((designs @ x - responses) ** 2)  # noqa: E731
    best = np.linalg.lstsq(designs.reshape(12, 4), responses.ravel(), rcond=None)[0]
    rms = math.sqrt(np.mean(np.sum(fed.client_gradients(np.zeros(4)) ** 2, axis=1)))
    choice = regularized_choice(
        0.05, clients=6, smoothness=fed.smoothness, distance=np.linalg.norm(best), start_gradient=rms
    )
    x, z, s = np.zeros(4), np.zeros((6, 4)), choice.step
    H = fed.A + choice.lam * np.eye(4)
    for _ in range(choice.rounds):
        half = np.stack([np.linalg.solve(np.eye(4) + s * H[j], 2 * x - z[j] + s * fed.b[j]) for j in range(6)])
        z = z + 2 * (half - x)
        x = z.mean(0)
    assert F(x) - F(best) <= 0.05
    assert F(np.zeros(4)) - F(best) > 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda fed: fedgd_fixed_point(fed, step=0.0, local_steps=1), "step .* positive"),
        (lambda fed: fedgd_fixed_point(fed, step=1.0, local_steps=2), r"s < 2 / L = 0\.2"),
        (lambda fed: fedgd_fixed_point(fed, step=0.01, local_steps=0), "at least 1"),
        (lambda fed: fedprox_fixed_point(fed, step=-1.0), "step"),
        (lambda fed: split_step(0.0, 1.0), "regularized_choice"),
        (lambda fed: rounds_bound(1e-3, 100.0, 1.0, prox_error=1e-3), "error floor"),
        (lambda fed: error_floor(0.5, 0.1), "kappa"),
        (
            lambda fed: regularized_choice(0.0, clients=2, smoothness=1.0, distance=1.0, start_gradient=1.0),
            "epsilon",
        ),
        (
            lambda fed: fedsplit_fixed_point(random_federation(2, 2, mu=1.0, smoothness=2.0, weights=[1, 3])),
            "equal client weights",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_federation(2, 2, mu=1.0, smoothness=10.0))
