"""Rates, frontiers and their laws. Numbers come from the formulas of the papers, written out here."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.theory import (
    MOMENTA,
    federation_point,
    heavy_ball_delta,
    kappa,
    pareto_frontier,
    point,
    random_federation,
    random_spectrum,
    rate,
    rounds_to,
    server_optimizer,
    simulated_frontier,
    surrogate_loss,
    theta_last,
    theta_maml,
    theta_sum,
    theta_weights,
)


def test_the_documented_point():
    p = point(mu=1.0, smoothness=10.0, gamma=0.05, theta=theta_sum(10))
    k = (1 - 0.5**10) / (1 - 0.95**10)
    assert p.kappa == pytest.approx(k, rel=1e-12)
    assert p.kappa == pytest.approx(2.489697, abs=1e-6)
    assert p.kappa0 == 10.0
    assert p.delta == pytest.approx((math.sqrt(10) - math.sqrt(k)) / (math.sqrt(10) + math.sqrt(k)), rel=1e-12)
    assert p.delta == pytest.approx(0.334251, abs=1e-6)
    assert p.rho["none"] == pytest.approx(0.426884, abs=1e-6)
    assert p.rho["nesterov"] == pytest.approx(0.312755, abs=1e-6)
    assert p.rho["heavy_ball"] == pytest.approx(0.224168, abs=1e-6)
    assert p.method == "Lemma 3"
    assert p.notes == ()


def test_table_2_with_the_heavy_ball_rate_put_right():
    k = 7.3
    assert rate(k, "none") == pytest.approx((k - 1) / (k + 1), rel=1e-14)
    assert rate(k, "nesterov") == pytest.approx(1 - 2 / math.sqrt(3 * k + 1), rel=1e-14)
    assert rate(k, "heavy_ball") == pytest.approx((math.sqrt(k) - 1) / (math.sqrt(k) + 1), rel=1e-14)
    assert [float(rate(1.0, m)) for m in MOMENTA] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("k", [1.5, 20.0, 400.0])
def test_tuned_server_reaches_the_rate_as_spectral_radius(momentum, k):
    """The iteration x+ = y - s g(y), heavy ball or Nesterov, on every curvature in [mu, L]: its worst root is rho."""
    mu, L = 0.7, 0.7 * k
    opt = server_optimizer(L, mu, momentum)
    worst = 0.0
    for lam in np.linspace(mu, L, 401):
        s, b = opt.step * lam, opt.momentum
        # m+ = b m + g(x), x+ = x - step (m+ if not nesterov else b m+ + g): as a map of (x, step m)
        M = np.array([[1 - s - b * s, -b * b], [s, b]] if opt.nesterov else [[1 - s, -b], [s, b]])
        worst = max(worst, np.abs(np.linalg.eigvals(M)).max())
    assert worst == pytest.approx(float(rate(k, momentum)), rel=1e-6, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 10.0), st.floats(1.01, 1e4), st.floats(0.01, 0.99), st.integers(1, 10_000), st.floats(0.0, 20.0))
def test_lemma_3_is_eigenvalues_of_the_tight_instance(mu, ratio, share, steps, alpha):
    """diag(L, mu) makes Lemma 3 an equality (Appendix B.3): compare with the direct sum."""
    L = mu * ratio
    gamma = share / (L + alpha)
    p = point(mu=mu, smoothness=L, gamma=gamma, theta=theta_sum(steps), alpha=alpha)
    powers = [(1 - gamma * (lam + alpha)) ** np.arange(steps) for lam in (L, mu)]
    direct = L * powers[0].sum() / (mu * powers[1].sum())
    assert p.kappa == pytest.approx(direct, rel=1e-9)
    assert p.delta == pytest.approx(
        (math.sqrt(p.kappa0) - math.sqrt(direct)) / (math.sqrt(p.kappa0) + math.sqrt(direct)), abs=1e-9
    )


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 10.0), st.floats(1.01, 1e4), st.floats(0.001, 0.999), st.integers(1, 100_000))
def test_heavy_ball_frontier_is_symmetric_and_obeys_its_law(mu, ratio, share, steps):
    L = mu * ratio
    p = point(mu=mu, smoothness=L, gamma=share / L, theta=theta_sum(steps))
    rho = (math.sqrt(p.kappa) - 1) / (math.sqrt(p.kappa) + 1)
    assert p.rho["heavy_ball"] == pytest.approx(rho, abs=1e-12)
    assert math.atanh(rho) + math.atanh(p.delta) == pytest.approx(math.log(ratio) / 4, rel=1e-7, abs=1e-9)
    # The mirrored point lies on the same frontier: the curve through (rho, Delta) also goes through (Delta, rho).
    assert heavy_ball_delta(p.delta, ratio) == pytest.approx(rho, abs=1e-9)
    assert heavy_ball_delta(rho, ratio) == pytest.approx(p.delta, abs=1e-9)


def test_a_frontier_over_k_really_holds_both_a_point_and_its_mirror():
    """By search instead of by the law: for a point (rho, Delta) some other K gives (Delta, rho)."""
    f = pareto_frontier(mu=1.0, smoothness=25.0, gamma=1e-3, values=np.arange(1, 8000), momentum="heavy_ball")
    for i in (50, 300, 900):
        gap = np.hypot(f.rho - f.delta[i], f.delta - f.rho[i]).min()
        assert gap < 2e-3
        assert abs(f.rho[i] - f.delta[i]) > 0.02  # and it is not its own mirror


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1.1, 500.0),
    st.floats(0.05, 20.0),
    st.floats(0.05, 0.95),
    st.integers(1, 100_000),
    st.sampled_from(MOMENTA),
)
def test_fedprox_frontier_is_a_subset_of_fedavgs(L, alpha, share, steps, momentum):
    """Every (rho, Delta) of FedProx is reached by FedAvg: find the K and gamma that do."""
    p = point(mu=1.0, smoothness=L, gamma=share / (L + alpha), theta=theta_sum(steps), alpha=alpha)
    # With alpha = 0 kappa falls from kappa0 (K = 1) through every value as gamma K grows: solve for kappa.
    low, high, many = 0.0, 1.0, 10_000_000
    for _ in range(200):
        mid = (low + high) / 2
        k = point(mu=1.0, smoothness=L, gamma=mid * 0.5 / L, theta=theta_sum(many)).kappa
        low, high = (mid, high) if k > p.kappa else (low, mid)
    q = point(mu=1.0, smoothness=L, gamma=mid * 0.5 / L, theta=theta_sum(many))
    assert q.rho[momentum] == pytest.approx(p.rho[momentum], abs=1e-6)
    assert q.delta == pytest.approx(p.delta, abs=1e-6)


def test_fedprox_cannot_reach_one_shot_averaging():
    far = point(mu=1.0, smoothness=10.0, gamma=0.5 / 15.0, theta=theta_sum(1_000_000), alpha=5.0)
    assert far.kappa == pytest.approx((10 / 15) / (1 / 6), rel=1e-9)  # lambda / (lambda + alpha): not 1
    near = point(mu=1.0, smoothness=10.0, gamma=0.05, theta=theta_sum(1_000_000))
    assert near.kappa == pytest.approx(1.0, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.floats(1.05, 100.0), st.floats(0.02, 0.98), st.integers(2, 2000), st.sampled_from(MOMENTA))
def test_maml_frontier_equals_fedavgs_for_small_k(L, share, steps, momentum):
    """In Lemma 4's range, every (rho, Delta) of MAML-style messages is on FedAvg's curve: both obey the same law."""
    p = point(mu=1.0, smoothness=L, gamma=share / (steps * L), theta=theta_last(steps))
    assert p.method == "Lemma 4"
    ratio = (1 - share / steps) / (1 - share / steps / L)
    assert p.kappa == pytest.approx(ratio ** (steps - 1) * L, rel=1e-9)
    low, high = 0.0, 1.0
    for _ in range(200):
        mid = (low + high) / 2
        k = point(mu=1.0, smoothness=L, gamma=mid * 0.999 / L, theta=theta_sum(10_000_000)).kappa
        low, high = (mid, high) if k > p.kappa else (low, mid)
    q = point(mu=1.0, smoothness=L, gamma=mid * 0.999 / L, theta=theta_sum(10_000_000))
    assert q.rho[momentum] == pytest.approx(p.rho[momentum], abs=1e-6)
    assert q.delta == pytest.approx(p.delta, abs=1e-6)


def test_maml_leaves_fedavgs_frontier_once_k_is_large():
    law = math.log(10.0) / 4
    f = simulated_frontier(mu=1.0, smoothness=10.0, dim=100, gamma=0.001, values=[10, 90, 2000], momentum="heavy_ball")
    sums = np.arctanh(f.rho) + np.arctanh(f.delta)
    assert sums[:2] == pytest.approx(law, rel=1e-6)  # gamma < 1 / (K L): on the curve
    assert sums[2] > 1.5 * law  # beyond: farther from the origin


@pytest.mark.parametrize("L", [5.0, 10.0, 100.0])
def test_the_cusp_of_maml_lies_at_the_suboptimality_of_one_shot_averaging(L):
    """Where psi(mu) = psi(L) the smallest eigenvalue changes ends, b / a = kappa0, and the frontier turns."""
    f = simulated_frontier(mu=1.0, smoothness=L, dim=100, values=np.unique(np.geomspace(10, 5000, 300).astype(int)))
    turn = int(np.argmin(f.rho))
    assert f.delta[turn] == pytest.approx((math.sqrt(L) - 1) / (math.sqrt(L) + 1), abs=0.02)


def test_kappa_of_a_federation_is_equation_9():
    fed = random_federation(5, 4, mu=0.5, smoothness=6.0, seed=4, weights=[1, 1, 2, 3, 3])
    fed = type(fed)(fed.A * np.linspace(0.4, 1.0, 5)[:, None, None], fed.b, fed.weights)  # clients of different scale
    gamma, alpha, steps = 0.1, 0.3, 6
    top = bottom = 0.0
    for w, A in zip(fed.weights, fed.A, strict=True):
        R = np.eye(4) - gamma * (A + alpha * np.eye(4))
        Q = sum(np.linalg.matrix_power(R, k) for k in range(steps))
        values = np.linalg.eigvalsh(Q @ A)
        top, bottom = top + w * values[-1], bottom + w * values[0]
    assert kappa(fed, gamma=gamma, theta=theta_sum(steps), alpha=alpha) == pytest.approx(top / bottom, rel=1e-10)
    p = federation_point(fed, gamma=gamma, theta=theta_sum(steps), alpha=alpha)
    assert (p.smoothness, p.strong_convexity) == pytest.approx((top, bottom), rel=1e-10)
    cond = surrogate_loss(fed, gamma=gamma, theta=theta_sum(steps), alpha=alpha).condition_number
    assert cond <= p.kappa * (1 + 1e-12)  # Lemma 2
    bound = point(mu=fed.mu, smoothness=fed.smoothness, gamma=gamma, theta=theta_sum(steps), alpha=alpha)
    assert p.kappa <= bound.kappa * (1 + 1e-12)  # Lemma 3


@pytest.mark.parametrize("theta", [theta_last(40), theta_maml(20), theta_weights([0.1, 0, 0, 1, 0, 0, 2])])
def test_outside_the_lemmas_the_worst_case_over_spectra_is_found_and_said(theta):
    p = point(mu=1.0, smoothness=10.0, gamma=0.08, theta=theta)
    assert p.method.startswith("worst case")
    assert p.notes
    rng = np.random.default_rng(0)
    best = 0.0
    for _ in range(200):
        lam = np.concatenate([[1.0, 10.0], np.exp(rng.uniform(0, math.log(10), 60))])
        q = point(mu=1.0, smoothness=10.0, gamma=0.08, theta=theta, eigenvalues=lam)
        assert q.kappa <= p.kappa * (1 + 1e-9)
        assert q.delta <= p.delta + 1e-12
        assert "eigenvalues" in q.method
        best = max(best, q.kappa)
    assert best > 0.9 * p.kappa  # almost attained, so the upper bound is tight


def test_a_million_steps_stay_finite():
    for family in ("sum", "last", "maml"):
        f = pareto_frontier(mu=1.0, smoothness=100.0, gamma=0.001, family=family, values=[1, 1000, 1_000_000])
        assert np.isfinite(f.rho).all()
        assert np.isfinite(f.delta).all()
        assert (f.rho <= 1).all()
        assert (f.delta <= 1).all()


def test_frontier_over_gamma_starts_at_the_true_loss():
    f = pareto_frontier(mu=1.0, smoothness=50.0, over="gamma", steps=100)
    assert f.rho[0] == pytest.approx(49 / 51, rel=1e-9)
    assert f.delta[0] == pytest.approx(0.0, abs=1e-12)
    assert (np.diff(f.rho) < 0).all()
    assert (np.diff(f.delta) > 0).all()
    limit = 1 / (1 - (1 - 1 / 50) ** 100)  # gamma -> 1/L: kappa does not reach 1, unlike K -> infinity
    assert f.kappa[-1] == pytest.approx(limit, rel=0.01)
    assert f.rho[-1] > (limit - 1) / (limit + 1)


def test_random_spectrum_has_the_law_of_a_gaussian_gram_matrix():
    """Means of the inner eigenvalues, scaled the same way, agree with dense draws within their sampling error."""
    rng = np.random.default_rng(0)
    ours = np.stack([random_spectrum(6, 1.0, 10.0, rng) for _ in range(3000)])
    dense = np.linalg.eigvalsh([b.T @ b for b in rng.standard_normal((3000, 6, 6))])
    dense = 1 + 9 * (dense - dense[:, :1]) / (dense[:, -1:] - dense[:, :1])
    error = np.sqrt((ours.var(0) + dense.var(0)) / 3000)[1:-1]
    assert (np.abs(ours.mean(0) - dense.mean(0))[1:-1] < 4 * error).all()


def test_random_spectrum_ends_exactly():
    s = random_spectrum(30, 2.0, 7.0, np.random.default_rng(1))
    assert (s[0], s[-1]) == (2.0, 7.0)
    assert ((s >= 2) & (s <= 7)).all()


def test_rounds_to():
    assert rounds_to(1e-3, 0.9) == math.ceil(math.log(1e-3) / math.log(0.9))
    assert rounds_to(1e-3, 0.0) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: point(mu=11.0, smoothness=10.0, gamma=0.05, theta=theta_sum(2)), r"mu \(11.0\) must not exceed"),
        (lambda: point(mu=0.0, smoothness=10.0, gamma=0.05, theta=theta_sum(2)), "mu must be positive"),
        (lambda: point(mu=1.0, smoothness=math.inf, gamma=0.05, theta=theta_sum(2)), "finite"),
        (lambda: point(mu=1.0, smoothness=10.0, gamma=0.2, theta=theta_last(2)), r"gamma < 1 / \(L \+ alpha\) = 0.1"),
        (lambda: point(mu=1.0, smoothness=10.0, gamma=0.25, theta=theta_sum(2)), "no convex surrogate"),
        (
            lambda: point(mu=1.0, smoothness=10.0, gamma=0.05, theta=theta_sum(2), eigenvalues=[11.0]),
            "eigenvalues must",
        ),
        (lambda: rate(0.5), "at least 1"),
        (lambda: rate(2.0, "adam"), "momentum must be one of"),
        (lambda: server_optimizer(2.0, 1.0, "adam"), "momentum must be one of"),
        (lambda: pareto_frontier(mu=1.0, smoothness=2.0), "needs gamma"),
        (lambda: pareto_frontier(mu=1.0, smoothness=2.0, over="gamma"), "needs steps"),
        (lambda: pareto_frontier(mu=1.0, smoothness=2.0, gamma=0.1, family="fedavg"), "family must be"),
        (lambda: pareto_frontier(mu=1.0, smoothness=2.0, gamma=0.1, over="alpha"), "over must be"),
        (lambda: heavy_ball_delta(0.9, 10.0), "rho must lie in"),
        (lambda: rounds_to(2.0, 0.5), "epsilon"),
        (lambda: rounds_to(0.1, 1.0), "rho"),
        (lambda: random_federation(0, 2, mu=1.0, smoothness=2.0), "clients must be at least 1"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_gamma_outside_lemma_1_is_answered_where_q_is_definite_and_says_so():
    p = point(mu=1.0, smoothness=10.0, gamma=0.12, theta=theta_sum(3))
    assert any("outside Lemma 1" in note for note in p.notes)
    with_spectrum = point(mu=1.0, smoothness=10.0, gamma=0.12, theta=theta_sum(3), eigenvalues=[1.0, 4.0, 10.0])
    r = 1 - 0.12 * np.array([1.0, 4.0, 10.0])
    qa = (1 + r + r**2) * np.array([1.0, 4.0, 10.0])
    assert with_spectrum.kappa == pytest.approx(qa.max() / qa.min(), rel=1e-12)
