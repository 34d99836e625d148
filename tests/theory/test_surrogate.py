"""Surrogates against the algorithms themselves, written out with explicit loops over matrices."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.theory import (
    distortion,
    federation,
    is_positive_definite,
    linear_federation,
    log_distortion,
    parse_theta,
    phi,
    psi,
    random_federation,
    surrogate_loss,
    theta_last,
    theta_maml,
    theta_sum,
    theta_weights,
)


def client_update(A, c, x, gamma, alpha, weights):
    """Algorithm 2, full gradients: the proximal term is part of g_k and of the message."""
    y, message = x.copy(), np.zeros_like(x)
    for w in weights:
        g = A @ (y - c) + alpha * (y - x)
        message += w * g
        y = y - gamma * g
    return message


def maml_gradient(A, c, x, gamma, alpha, steps):
    """grad of f(X_K(x)) by central differences, exact for a quadratic up to rounding."""

    def value(x0):
        y = x0.copy()
        for _ in range(steps):
            y = y - gamma * (A @ (y - c) + alpha * (y - x0))
        return 0.5 * (y - c) @ A @ (y - c)

    h = 1e-3
    return np.array([(value(x + h * e) - value(x - h * e)) / (2 * h) for e in np.eye(len(x))])


THETAS = {
    "sum": (theta_sum(7), [1.0] * 7),
    "last": (theta_last(4), [0.0, 0.0, 0.0, 1.0]),
    "weights": (theta_weights([0.5, 0.0, 2.0]), [0.5, 0.0, 2.0]),
}


@pytest.mark.parametrize("name", THETAS)
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_theorem_1_surrogate_gradient_is_the_mean_message(name, alpha):
    theta, weights = THETAS[name]
    fed = random_federation(4, 3, mu=0.5, smoothness=5.0, radius=2.0, seed=3, weights=[1, 2, 3, 4])
    sur = surrogate_loss(fed, gamma=0.12, theta=theta, alpha=alpha)
    x = np.array([0.3, -1.2, 2.0])
    messages = [client_update(A, c, x, 0.12, alpha, weights) for A, c in zip(fed.A, fed.centers, strict=True)]
    np.testing.assert_allclose(sur.gradient(x), fed.weights @ np.array(messages), rtol=1e-12)
    at_rest = [
        client_update(A, c, sur.minimizer, 0.12, alpha, weights) for A, c in zip(fed.A, fed.centers, strict=True)
    ]
    np.testing.assert_allclose(fed.weights @ np.array(at_rest), 0.0, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_theorem_2_maml_differentiates_through_its_steps(alpha):
    fed = random_federation(3, 3, mu=0.5, smoothness=5.0, seed=5)
    sur = surrogate_loss(fed, gamma=0.1, theta=theta_maml(3), alpha=alpha)
    x = np.array([0.3, -1.2, 2.0])
    exact = [maml_gradient(A, c, x, 0.1, alpha, 3) for A, c in zip(fed.A, fed.centers, strict=True)]
    np.testing.assert_allclose(sur.gradient(x), fed.weights @ np.array(exact), rtol=1e-8)
    if alpha == 0.0:
        same = surrogate_loss(fed, gamma=0.1, theta=theta_last(7))
        np.testing.assert_allclose(sur.minimizer, same.minimizer, rtol=1e-12)


def test_surrogate_loss_integrates_its_gradient_and_is_zero_for_one_client_at_home():
    fed = random_federation(3, 3, mu=0.5, smoothness=5.0, seed=1)
    sur = surrogate_loss(fed, gamma=0.1, theta=theta_sum(5), alpha=0.2)
    x, h = np.array([1.0, -0.5, 0.25]), 1e-4
    slopes = [(sur.loss(x + h * e) - sur.loss(x - h * e)) / (2 * h) for e in np.eye(3)]
    np.testing.assert_allclose(slopes, sur.gradient(x), rtol=1e-7)
    alone = federation(fed.A[:1], fed.centers[:1])
    assert surrogate_loss(alone, gamma=0.1, theta=theta_sum(5)).loss(alone.centers[0]) == pytest.approx(0.0, abs=1e-14)
    assert fed.loss(x) == pytest.approx(
        sum(0.5 * (x - c) @ A @ (x - c) for A, c in zip(fed.A, fed.centers, strict=True)) / 3, rel=1e-12
    )


def test_distortion_matrices_are_the_matrix_polynomial():
    fed = random_federation(2, 3, mu=0.5, smoothness=5.0, seed=2)
    sur = surrogate_loss(fed, gamma=0.15, theta=theta_weights([1.0, 0.5, 0.25]), alpha=0.1)
    for A, Q in zip(fed.A, sur.distortions(), strict=True):
        R = np.eye(3) - 0.15 * (A + 0.1 * np.eye(3))
        np.testing.assert_allclose(Q, np.eye(3) + 0.5 * R + 0.25 * R @ R, atol=1e-13)


def test_gamma_zero_is_the_true_loss_times_the_weight():
    fed = random_federation(3, 2, mu=1.0, smoothness=4.0, seed=0)
    for theta, w in ((theta_sum(1_000_000), 1e6), (theta_last(1_000_000), 1.0), (theta_weights([2.0, 3.0]), 5.0)):
        sur = surrogate_loss(fed, gamma=0.0, theta=theta)
        np.testing.assert_allclose(sur.minimizer, fed.minimizer, rtol=1e-12)
        np.testing.assert_allclose(sur.gradient([1.0, 1.0]), w * fed.gradient([1.0, 1.0]), rtol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 17, 1000])
@pytest.mark.parametrize("gamma", [0.0, 1e-18, 1e-9, 1e-3, 0.09, 0.1, 0.13, 0.19])
def test_closed_forms_equal_the_loop(steps, gamma):
    lam, alpha = np.array([0.01, 1.0, 9.5]), 0.5
    r = 1.0 - gamma * (lam + alpha)
    loop = np.zeros(3)
    for _ in range(steps):
        loop = loop * r + 1.0
    np.testing.assert_allclose(distortion(lam, gamma=gamma, theta=theta_sum(steps), alpha=alpha), loop, rtol=1e-11)
    np.testing.assert_allclose(phi(lam, gamma=gamma, steps=steps, alpha=alpha), lam * loop, rtol=1e-11)
    np.testing.assert_allclose(
        psi(lam, gamma=gamma, steps=steps, alpha=alpha), lam * r ** (steps - 1), rtol=1e-9, atol=1e-300
    )


def test_a_million_steps_keep_their_digits():
    """Against exact powers in Python integers and fractions."""
    from decimal import Decimal, getcontext

    getcontext().prec = 50
    for gamma, lam in ((1e-7, 3.0), (1e-12, 1.0), (0.05, 10.0)):
        r = Decimal(1) - Decimal(gamma) * Decimal(lam)
        exact = float((1 - r**1_000_000) / (1 - r))
        assert distortion([lam], gamma=gamma, theta=theta_sum(1_000_000))[0] == pytest.approx(exact, rel=1e-12)
        sign, log = log_distortion([lam], gamma=gamma, theta=theta_last(1_000_000))
        assert sign[0] == 1.0
        assert log[0] == pytest.approx(float((r**999_999).ln()), rel=1e-12)


def test_long_theta_k_does_not_lose_its_minimizer():
    """At K = 10^6 every eigenvalue of Q underflows; the client with the slowest local steps determines the result."""
    fed = federation([[[1.0]], [[2.0]]], [[5.0], [-1.0]])
    assert surrogate_loss(fed, gamma=0.1, theta=theta_last(1_000_000)).minimizer == pytest.approx([5.0], rel=1e-12)
    apart = federation([np.diag([1.0, 4.0]), np.diag([2.0, 3.0])], [[5.0, 5.0], [-1.0, -2.0]])
    with pytest.raises(ValueError, match="the surrogate has no minimizer that float64 can resolve"):
        _ = surrogate_loss(apart, gamma=0.1, theta=theta_last(1_000)).minimizer


@settings(max_examples=150, deadline=None)
@given(
    gamma_times=st.floats(0.01, 2.5),
    L=st.floats(0.1, 100.0),
    ratio=st.floats(1.0, 50.0),
    alpha=st.floats(0.0, 5.0),
    steps=st.integers(1, 9),
)
def test_lemma_1_positive_definite_exactly(gamma_times, L, ratio, alpha, steps):
    """Lemma 1's range is the largest: below 1 / (L + alpha) every Theta is definite, from there on Theta_2 is not."""
    if abs(gamma_times - 1.0) < 1e-6 or abs(gamma_times - 2.0) < 1e-6:
        return
    mu, gamma = L / ratio, gamma_times / (L + alpha)
    rng = np.random.default_rng(0)
    for theta in (theta_sum(steps), theta_last(steps), theta_maml(steps), theta_weights(rng.uniform(size=steps))):
        q = distortion(np.linspace(mu, L, 50), gamma=gamma, theta=theta, alpha=alpha)
        if gamma_times < 1:
            assert (q > 0).all()
            assert is_positive_definite(L, gamma=gamma, theta=theta, alpha=alpha, mu=mu)
        elif not is_positive_definite(L, gamma=gamma, theta=theta, alpha=alpha, mu=mu):
            fine = distortion(np.linspace(mu, L, 20001), gamma=gamma, theta=theta, alpha=alpha)
            assert fine.min() <= 1e-3 * np.abs(fine).max() + 1e-12
        else:
            assert q.min() >= -1e-12 * np.abs(q).max()  # an eigenvalue may be exactly at the zero
    if gamma_times > 1:
        assert distortion([L], gamma=gamma, theta=theta_last(2), alpha=alpha)[0] < 0
        assert not is_positive_definite(L, gamma=gamma, theta=theta_last(2), alpha=alpha, mu=mu)


def test_a_linear_client_is_allowed_and_a_singular_one_named():
    pair = linear_federation([[[2.0]], [[0.0]]], [[-1.0], [1.0]])
    sur = surrogate_loss(pair, gamma=0.1, theta=theta_sum(3))
    x = np.array([0.5])
    y, g1 = x.copy(), 0.0
    for _ in range(3):
        g = 2.0 * y + 1.0
        g1 += g
        y = y - 0.1 * g
    np.testing.assert_allclose(sur.gradient(x), (g1 - 3.0) / 2, rtol=1e-12)
    with pytest.raises(ValueError, match="client 1 is singular"):
        _ = pair.centers
    with pytest.raises(ValueError, match="client 0 is singular"):
        federation([np.diag([1.0, 0.0])], [[0.0, 0.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theta_sum(0), "steps .* at least 1, got 0"),
        (lambda: theta_last(1.5), "whole number"),
        (lambda: theta_weights([]), "theta is empty"),
        (lambda: theta_weights([0.0, 0.0]), "theta is empty"),
        (lambda: theta_weights([-1.0, 2.0]), "non-negative"),
        (lambda: parse_theta("1:K"), "--steps"),
        (lambda: parse_theta("fedavg", 3), "not understood"),
        (lambda: parse_theta("", 3), "empty"),
        (lambda: distortion([1.0], gamma=-0.1, theta=theta_sum(2)), "gamma .* got -0.1"),
        (lambda: distortion([1.0], gamma=0.1, theta=theta_sum(2), alpha=-1.0), "alpha .* got -1.0"),
        (lambda: distortion([1.0], gamma=math.nan, theta=theta_sum(2)), "gamma"),
        (
            lambda: surrogate_loss(random_federation(2, 2, mu=1.0, smoothness=10.0), gamma=0.15, theta=theta_last(2)),
            r"indefinite.*gamma < 1 / \(L \+ alpha\) = 0\.1",
        ),
        (lambda: federation([[[1.0, 2.0], [0.0, 1.0]]], [[0.0, 0.0]]), "symmetric"),
        (lambda: federation([[[-1.0]]], [[0.0]]), "negative eigenvalue"),
        (lambda: federation([[[1.0]]], [[0.0, 1.0]]), r"c must be \[m, d\]"),
        (lambda: federation([[[1.0]]], [[0.0]], weights=[-1.0]), "weights"),
        (lambda: federation([[[math.nan]]], [[0.0]]), "finite"),
        (lambda: federation(np.zeros((0, 2, 2)), np.zeros((0, 2))), "at least one client"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
