"""Every bound against exact values of the bounded quantity (expectations of linear recursions, not samples)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.theory import (
    MIME_TABLE,
    aggregation_bound,
    aggregation_lower_bound,
    aggregation_rate,
    crossing_pair,
    drift_bound,
    excess_loss_bound,
    fedavg_bound,
    federation,
    federation_point,
    lower_bound_pair,
    mime_rounds,
    random_federation,
    round_progress_bound,
    server_optimizer,
    suboptimality_bound,
    surrogate_loss,
    theta_last,
    theta_sum,
    trajectory_bound,
)

small = {"clients": st.integers(1, 5), "dim": st.integers(1, 4), "seed": st.integers(0, 10_000)}


# --- Charles and Konecny --------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    ratio=st.floats(1.1, 1e4),
    share=st.floats(0.01, 0.99),
    steps=st.integers(1, 5000),
    last=st.booleans(),
    alpha=st.floats(0.0, 3.0),
    **small,
)
def test_excess_loss_and_the_general_distance_hold_on_random_federations(
    ratio, share, steps, last, alpha, clients, dim, seed
):
    fed = random_federation(clients, dim + 1, mu=1.0, smoothness=ratio, radius=2.0, seed=seed)
    gamma = share / (ratio * steps + alpha) if last else share / (ratio + alpha)
    setting = {"gamma": gamma, "theta": theta_last(steps) if last else theta_sum(steps), "alpha": alpha}
    at = surrogate_loss(fed, **setting).minimizer
    apart = np.linalg.norm(at - fed.minimizer)
    e = excess_loss_bound(fed, **setting)
    assert e.proven
    assert fed.loss(at) - fed.loss(fed.minimizer) <= e.value + 1e-9
    assert apart <= e.terms["distance at most"] + 1e-6
    general = suboptimality_bound(**setting, constant="general", evidence=fed)
    assert general.proven
    assert apart <= general.value + 1e-9
    published = suboptimality_bound(**setting, evidence=fed)
    assert not published.proven
    if ratio <= 10:
        assert apart <= published.value + 1e-9


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1.0, 50.0), st.floats(-3.0, 3.0)), min_size=2, max_size=5),
    st.floats(0.05, 0.95),
    st.integers(1, 300),
)
def test_in_one_dimension_2c_is_proven_and_holds(members, share, steps):
    fed = federation([[[a]] for a, _ in members], [[c] for _, c in members])
    gamma = share / fed.smoothness
    b = suboptimality_bound(gamma=gamma, theta=theta_sum(steps), evidence=fed)
    assert b.proven
    assert b.terms["constant"] == 2.0
    at = surrogate_loss(fed, gamma=gamma, theta=theta_sum(steps)).minimizer
    assert abs(at - fed.minimizer)[0] <= b.value + 1e-9


def test_2c_is_tight_in_one_dimension():
    """Appendix C.2: A = 4 and 1, c = 1 and -1, gamma = 1/8, weight of client 1 close to 1, K large."""
    fed = federation([[[4.0]], [[1.0]]], [[1.0], [-1.0]], weights=[0.9999, 0.0001])
    at = surrogate_loss(fed, gamma=0.125, theta=theta_last(60)).minimizer
    b = suboptimality_bound(gamma=0.125, theta=theta_last(60), evidence=fed)
    assert abs(at - fed.minimizer)[0] > 0.99 * b.value


@pytest.mark.parametrize(("kappa0", "angle", "least"), [(3.0, 0.399, 2.45), (43.0, 0.0951, 8.02), (60.0, 0.0803, 9.44)])
def test_two_local_steps_exceed_2c_at_kappa0_3_and_8c_at_43(kappa0, angle, least):
    """Theta_{1:2}, gamma = 1/(2L). The distance by hand: both minimizers on the second axis (docs/theory)."""
    fed = crossing_pair(kappa0, half_angle=angle)
    setting = {"gamma": 0.5 / kappa0, "theta": theta_sum(2)}
    shrunk = 1 + (1 - 0.5 / kappa0)  # Q of the eigenvalue 1; that of L is 1 + 1/2
    kappa = kappa0 * 1.5 / shrunk
    s, c = math.sin(angle), math.cos(angle)
    x, y = ((k - 1) * s * c / (1 + (k - 1) * s**2) for k in (kappa0, kappa))
    root = math.sqrt(shrunk / 1.5)
    by_hand = abs(x - y) * (root + 1) / (root - 1)
    assert by_hand > least
    at = surrogate_loss(fed, **setting).minimizer
    published = suboptimality_bound(**setting, evidence=fed)
    assert fed.radius == pytest.approx(1.0)
    assert np.linalg.norm(at - fed.minimizer) / (published.value / 8) == pytest.approx(by_hand, rel=1e-9)
    assert (
        np.linalg.norm(at - fed.minimizer) > suboptimality_bound(**setting, constant="conjectured", evidence=fed).value
    )
    assert np.linalg.norm(at - fed.minimizer) <= suboptimality_bound(**setting, constant="general", evidence=fed).value


def test_8c_fails_in_the_plane_and_the_bound_does_not_call_itself_proven():
    fed = crossing_pair(1e4)
    setting = {"gamma": 0.5 / 1e4, "theta": theta_sum(10_000_000)}
    at = surrogate_loss(fed, **setting).minimizer
    np.testing.assert_allclose(at, [0.0, 1 / math.sqrt(10_001)], atol=1e-9)  # the mean of the clients' minimizers
    np.testing.assert_allclose(fed.minimizer, [0.0, math.sqrt(10_001) / 2], atol=1e-6)
    apart = np.linalg.norm(at - fed.minimizer)
    b = suboptimality_bound(**setting, evidence=fed)
    assert fed.radius == pytest.approx(1.0)
    assert apart > 6 * b.value  # more than six times the published bound
    assert not b.proven
    assert "crossing_pair" in str(b)
    e = excess_loss_bound(fed, **setting)
    assert fed.loss(at) - fed.loss(fed.minimizer) <= e.value
    assert apart <= e.terms["distance at most"]
    general = suboptimality_bound(**setting, constant="general", evidence=fed)
    assert general.proven
    assert apart <= general.value


def test_excess_loss_bound_is_attained_up_to_a_small_factor():
    """Two clients in one dimension: the bound must not be vacuous."""
    best = 0.0
    for w in np.linspace(0.01, 0.99, 99):
        fed = federation([[[1.0]], [[1.2]]], [[1.0], [-1.0]], weights=[w, 1 - w])
        e = excess_loss_bound(fed, gamma=0.5, theta=theta_sum(3))
        at = surrogate_loss(fed, gamma=0.5, theta=theta_sum(3)).minimizer
        best = max(best, (fed.loss(at) - fed.loss(fed.minimizer)) / e.value)
    assert 0.2 < best <= 1.0


def test_corollary_1_along_a_run():
    fed = random_federation(4, 3, mu=1.0, smoothness=10.0, seed=0)
    gamma, theta = 0.05, theta_sum(10)
    sur, p = surrogate_loss(fed, gamma=gamma, theta=theta), federation_point(fed, gamma=gamma, theta=theta)
    x = np.array([5.0, -4.0, 3.0])
    start = np.linalg.norm(x - sur.minimizer)
    step = server_optimizer(p.smoothness, p.strong_convexity).step
    for t in range(12):
        b = trajectory_bound(rounds=t, start=start, gamma=gamma, theta=theta, evidence=fed)
        assert np.linalg.norm(x - sur.minimizer) <= b.terms["convergence"] + 1e-12
        assert np.linalg.norm(x - fed.minimizer) <= b.value
        x = x - step * sur.gradient(x)
    assert [a.status for a in b.assumptions][:3] == ["checked"] * 3
    conjectured = suboptimality_bound(gamma=gamma, theta=theta, evidence=fed, constant="conjectured")
    assert conjectured.value == pytest.approx(b.terms["suboptimality"] / 4)
    assert "conjectured" in conjectured.name


# --- Renard ---------------------------------------------------------------------------------------------------------


def fedavg_moments(H, b, x0, eta, tau, rounds, sigma2):
    """Exact means and covariances of FedAvg on F_i = x'Hx/2 - b_i'x with noise of covariance (sigma^2 / d) I.

    In the eigenbasis of the shared H everything is scalar. Yields, per (t, k): E F(mean) - F*, the mean drift over
    clients, the largest, and E ||mean - x*||^2.
    """
    lam, U = np.linalg.eigh(H)
    b, x0 = b @ U, x0 @ U
    M, d = b.shape
    best = b.mean(0) / lam
    r, q = 1 - eta * lam, eta**2 * sigma2 / d
    mean, var_server = x0, np.zeros(d)
    for t in range(rounds):
        x, var = np.tile(mean, (M, 1)), np.zeros(d)  # var: variance of one client around the (random) server point
        shared = var_server
        for k in range(tau + 1):
            centre = x.mean(0)
            var_centre = shared + var / M
            gap = 0.5 * np.sum(lam * ((centre - best) ** 2 + var_centre))
            drift = np.sum((x - centre) ** 2, axis=1) + (1 - 1 / M) * var.sum()
            yield t, k, gap, drift, np.sum((centre - best) ** 2 + var_centre)
            if k < tau:
                x = x - eta * (lam * x - b)
                var, shared = r**2 * var + q, r**2 * shared
        mean, var_server = x.mean(0), shared + var / M


@settings(max_examples=80, deadline=None)
@given(
    share=st.floats(0.01, 1.0),
    tau=st.integers(1, 12),
    rounds=st.integers(1, 6),
    sigma2=st.floats(0.0, 10.0),
    spread=st.floats(0.0, 5.0),
    flat=st.booleans(),
    **small,
)
def test_lemmas_and_theorem_of_the_notes_hold_exactly_in_expectation(
    share, tau, rounds, sigma2, spread, flat, clients, dim, seed
):
    rng = np.random.default_rng(seed)
    lam = np.exp(rng.uniform(-6 if flat else -1, 1, dim))
    U = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    H, L = (U * lam) @ U.T, lam.max()
    b = spread * rng.standard_normal((clients, dim))
    x0, eta = 3 * rng.standard_normal(dim), share / (4 * L)
    fed = federation(np.tile((H + H.T) / 2, (clients, 1, 1)), np.linalg.solve(H, b.T).T)
    best = fed.minimizer
    drift_says = drift_bound(eta=eta, tau=tau, sigma2=sigma2, evidence=fed)
    zeta = np.linalg.norm(b - b.mean(0), axis=1).max()
    assert drift_says.terms["heterogeneity"] == pytest.approx(18 * (tau * eta * zeta) ** 2, rel=1e-6, abs=1e-12)
    if sigma2 == 0:
        assert drift_says.proven
    history = list(fedavg_moments(H, b, x0, eta, tau, rounds, sigma2))
    for _, _, _, drift, _ in history:
        assert drift.max() <= drift_says.value + 1e-12
    total = 0.0
    for t in range(rounds):
        steps = [h for h in history if h[0] == t]
        mean_gap = np.mean([h[2] for h in steps[1:]])
        total += mean_gap / rounds
        progress = round_progress_bound(
            eta=eta,
            tau=tau,
            clients=clients,
            distance_before=math.sqrt(steps[0][4]),
            distance_after=math.sqrt(steps[-1][4]),
            drift=float(np.mean([h[3].mean() for h in steps[:-1]])),
            sigma2=sigma2,
            evidence=fed,
        )
        assert mean_gap <= progress.value + 1e-9
    b_all = fedavg_bound(
        eta=eta,
        tau=tau,
        rounds=rounds,
        clients=clients,
        distance=np.linalg.norm(x0 - best),
        sigma2=sigma2,
        evidence=fed,
    )
    assert total <= b_all.value + 1e-9
    text = str(b_all)
    assert all(term in text for term in ("initial distance", "noise", "drift by noise", "drift by heterogeneity"))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 1.0), st.integers(1, 10), st.integers(1, 5), st.integers(2, 5), st.integers(0, 10_000))
def test_the_theorem_holds_on_convex_losses_that_are_not_quadratic(share, tau, rounds, clients, seed):
    """F_i = sum softplus(a_n . x) + b_i . x with one shared set of rows: convex, smooth, zeta = max ||b_i - mean
    b||."""
    rng = np.random.default_rng(seed)
    rows, b = rng.standard_normal((8, 3)), 0.3 * rng.standard_normal((clients, 3))
    b -= b.mean(0) + rows.sum(0) / 2  # the mean loss is sum softplus - half its rows: minimized at 0
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    grad = lambda x, i: rows.T @ sigmoid(rows @ x) + b[i]  # noqa: E731
    F = lambda x: np.sum(np.logaddexp(0, rows @ x)) + b.mean(0) @ x  # noqa: E731
    L = np.linalg.eigvalsh(rows.T @ rows / 4)[-1]
    zeta = np.linalg.norm(b - b.mean(0), axis=1).max()
    assert np.linalg.norm(np.mean([grad(np.zeros(3), i) for i in range(clients)], axis=0)) < 1e-12
    eta, x0 = share / (4 * L), 2 * rng.standard_normal(3)
    says = {"eta": eta, "tau": tau, "smoothness": L, "zeta": zeta, "sigma2": 0.0}
    drift_says, total, x = drift_bound(**says).value, 0.0, x0
    for _ in range(rounds):
        ys = np.tile(x, (clients, 1))
        for _ in range(tau):
            ys = np.stack([y - eta * grad(y, i) for i, y in enumerate(ys)])
            assert np.sum((ys - ys.mean(0)) ** 2, axis=1).max() <= drift_says + 1e-12
            total += (F(ys.mean(0)) - F(np.zeros(3))) / (tau * rounds)
        x = ys.mean(0)
    bound = fedavg_bound(rounds=rounds, clients=clients, distance=np.linalg.norm(x0), **says)
    assert total <= bound.value + 1e-9
    assert not bound.proven  # no evidence was given


def test_lemma_2_2_needs_the_factor_l():
    """For a scaled loss the printed lemma, without the factor L of the drift, fails; with the factor it holds."""
    H, b = np.array([[100.0]]), np.array([[50.0], [-50.0]])
    eta, tau = 1 / 400, 10
    steps = list(fedavg_moments(H, b, np.array([0.0]), eta, tau, 1, 0.0))
    fed = federation(np.tile(H, (2, 1, 1)), b / 100)
    drift = float(np.mean([h[3].mean() for h in steps[:-1]]))
    p = round_progress_bound(
        eta=eta,
        tau=tau,
        clients=2,
        distance_before=0.0,
        distance_after=math.sqrt(steps[-1][4]),
        drift=drift,
        evidence=fed,
    )
    assert p.terms["drift"] == pytest.approx(100 * drift)


# --- aggregation ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.floats(1.0, 100.0),
    steps=st.integers(1, 6),
    rounds=st.integers(1, 40),
    share=st.floats(0.05, 1.0),
    strongly=st.booleans(),
    server_step=st.floats(1.0, 3.0),
    clients=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_theorem_1_of_aggregation_holds_with_explicit_constants(
    ratio, steps, rounds, share, strongly, server_step, clients, seed
):
    """Full participation, exact gradients: the weighted mean of f(x^(r-1)) - f* is below the bound."""
    fed = random_federation(clients, 2, mu=1.0, smoothness=ratio, radius=2.0, seed=seed) if ratio > 1 else None
    if fed is None:
        return
    x = 4 * np.random.default_rng(seed).standard_normal(2)
    mu = 1.0 if strongly else 0.0
    local = share / (8 * 3 * ratio * steps * server_step)
    b = aggregation_bound(
        rounds=rounds,
        steps=steps,
        sampled=clients,
        clients=clients,
        local_step=local,
        distance=np.linalg.norm(x - fed.minimizer),
        mu=mu,
        server_step=server_step,
        evidence=fed,
    )
    assert b.proven
    a = mu * server_step * steps * local / 2
    total = weight = 0.0
    for r in range(1, rounds + 2):
        w = (1 - a) ** (1 - r)
        total, weight = total + w * (fed.loss(x) - fed.loss(fed.minimizer)), weight + w
        ys = np.tile(x, (clients, 1))
        for _ in range(steps):
            ys = ys - local * fed.client_gradients(ys)
        x = x + server_step * (ys.mean(0) - x)
    assert total / weight <= b.value + 1e-9


@settings(max_examples=100, deadline=None)
@given(
    mu=st.floats(0.1, 10.0),
    G=st.floats(0.1, 100.0),
    x0=st.floats(0.01, 10.0),
    K=st.integers(2, 8),
    etas=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=20),
)
def test_theorem_2_no_step_sizes_beat_the_lower_bound(mu, G, x0, K, etas):
    pair = lower_bound_pair(mu, G)
    x = np.array([x0])
    for share in etas:
        ys = np.tile(x, (2, 1))
        for _ in range(K):
            ys = ys - share / mu * pair.client_gradients(ys)
        x = ys.mean(0)
    b = aggregation_lower_bound(rounds=len(etas), mu=mu, G=G, start=x0)
    assert pair.loss(x) >= b.value * (1 - 1e-9)
    # Constant step sizes tuned for the horizon come within a factor of it: the bound has the right order in R.


def test_the_lower_bound_has_the_right_order():
    """With the best constant step size, found by search, the loss after R rounds is 1 / R^2 up to logarithms."""
    pair, best = lower_bound_pair(1.0, 1.0), []
    for R in (10, 100, 1000):
        errors = []
        for eta in np.geomspace(1e-5, 0.5, 200):
            r = (1 - 2 * eta) ** 5
            drift = eta / 2 * sum(1 - (1 - 2 * eta) ** k for k in range(5))
            x, factor = 1.0, (r + 1) / 2
            x = factor**R * x + drift * (1 - factor**R) / (1 - factor)
            errors.append(pair.loss([x]))
        best.append(min(errors))
    slopes = np.diff(np.log10(best))
    assert (slopes < -1.2).all()  # 1 / R^2 up to logarithms
    assert (slopes > -2.3).all()


def test_aggregation_rate_terms_by_hand():
    M2 = 2.0 * (1 + 10) + 5 * (1 - 10 / 50) * 3.0
    base = {"rounds": 400, "steps": 5, "sampled": 10, "clients": 50, "beta": 2.0, "G2": 3.0, "B2": 1.5, "sigma2": 2.0}
    strong = aggregation_rate(**base, mu=0.1, distance=2.0)
    assert strong.terms["statistics"] == pytest.approx(M2 / (0.1 * 400 * 50))
    assert strong.terms["drift"] == pytest.approx(6.0 / (0.01 * 400**2))
    assert strong.terms["optimization"] == pytest.approx(0.4 * math.exp(-0.1 * 400 / (16 * 2.5 * 2)))
    convex = aggregation_rate(**base, distance=2.0)
    assert convex.value == pytest.approx(
        math.sqrt(M2) * 2 / math.sqrt(400 * 50) + 2 ** (4 / 3) * 6 ** (1 / 3) / 401 ** (2 / 3) + 1.5 * 2 * 4 / 400
    )
    free = aggregation_rate(**base, gap=3.0, convex=False, constant=2.0)
    assert free.value == pytest.approx(
        2
        * (
            2 * math.sqrt(M2 * 3) / math.sqrt(400 * 50)
            + 3 ** (2 / 3) * 6 ** (1 / 3) / 401 ** (2 / 3)
            + 1.5 * 2 * 3 / 400
        )
    )
    assert not strong.proven
    with pytest.raises(ValueError, match=r"R >= 8 \(1 \+ B\^2\) beta / mu = 400"):
        aggregation_rate(**{**base, "rounds": 399}, mu=0.1, distance=2.0)


# --- Mime -----------------------------------------------------------------------------------------------------------


def test_table_1_by_hand():
    L, g2, S, N, e, d, s2, mu = 3.0, 4.0, 5, 50, 0.1, 0.5, 0.25, 0.2
    known = {"smoothness": L, "G2": g2, "sampled": S}
    table = {
        "scaffold": 10 ** (2 / 3) * L / e,
        "server_sgd": L * g2 / (S * e**2) + L / e,
        "fedavg_sgd": L * g2 / (S * e**2) + L**2 * 2 / e**1.5 + L / e,
        "mimelite_sgd": L * g2 / (S * e**2) + L**2 * 2 / e**1.5 + L / e,
        "mime_sgd": L * g2 / (S * e**2) + L / e,
        "server_mvr": L * 2 / (math.sqrt(S) * e**1.5) + g2 / (S * e) + L / e,
        "mimelite_mvr": d * (2 + 0.5) / e**1.5 + (g2 + s2) / e + d / e,
        "mime_mvr": d * 2 / (math.sqrt(S) * e**1.5) + g2 / (S * e) + d / e,
        "server_lower_bound": L * 2 / (math.sqrt(S) * e**1.5) + g2 / (S * e) + L / e,
    }
    for name, value in table.items():
        got = mime_rounds(name, e, **known, clients=N, delta=d, sigma2=s2, local_steps=8)
        assert got.value == pytest.approx(value), name
        assert not got.proven
    assert mime_rounds("mime_adam", 1.0, **known).value == pytest.approx(L / (1 - 0.8))
    assert mime_rounds("server_adam", 1.0, **known).value == pytest.approx(L / (1 - 0.8))
    assert mime_rounds("mimelite_adam", 1.0, **known).value == pytest.approx(L * math.sqrt(S) / (1 - 0.8))
    pl = {
        "scaffold": N / S + L / mu,
        "server_sgd": g2 / (mu * S * e) + L / mu,
        "fedavg_sgd": g2 / (mu * S * e) + L * 2 / (mu * math.sqrt(e)) + L / mu,
        "mime_sgd": g2 / (mu * S * e) + L / mu,
        "server_lower_bound": g2 / (S * e),
    }
    for name, value in pl.items():
        assert mime_rounds(name, e, **known, clients=N, mu=mu).value == pytest.approx(value), name
    assert set(table) | {"mime_adam", "server_adam", "mimelite_adam"} == set(MIME_TABLE)


def test_table_1_checks_the_local_steps_it_needs():
    known = {"smoothness": 3.0, "G2": 4.0, "sampled": 5, "delta": 0.5}
    status = lambda K: {a.name: a for a in mime_rounds("mime_mvr", 0.1, **known, local_steps=K).assumptions}  # noqa: E731
    assert status(6)["K >= L / delta"].status == "checked"
    assert status(5)["K >= L / delta"].status == "assumed"
    assert "does not hold" in status(5)["K >= L / delta"].detail


# --- when a bound is marked proven ----------------------------------------------------------------------------------


class Estimated:
    """The fields of estimated constants that bounds read."""

    class _E:
        def __init__(self, value):
            self.value = value

    def __init__(self, curvature):
        self.mu_client_min, self.L_client_max = self._E(curvature), self._E(2.0)
        self.zeta, self.sigma2, self.G2 = self._E(0.5), self._E(0.1), self._E(0.2)


def test_nonconvex_data_never_gives_a_proven_convex_bound():
    bent, straight = Estimated(-0.3), Estimated(0.1)
    for data in (bent, straight):
        for b in (
            drift_bound(eta=0.1, tau=2, evidence=data),
            fedavg_bound(eta=0.1, tau=2, rounds=3, clients=4, distance=1.0, evidence=data),
            aggregation_bound(rounds=3, steps=2, sampled=4, clients=4, local_step=0.001, distance=1.0, evidence=data),
        ):
            convex = next(a for a in b.assumptions if "convex" in a.name)
            assert convex.status == "assumed"
            assert not b.proven
            assert "NOT PROVEN HERE" in str(b)
            assert b.as_dict()["proven"] is False
            assert ("contradicts it" in convex.detail) == (data is bent)


def test_a_federation_whose_hessians_differ_has_no_zeta():
    fed = random_federation(2, 2, mu=1.0, smoothness=2.0)
    with pytest.raises(ValueError, match="zeta is infinite"):
        drift_bound(eta=0.01, tau=2, evidence=fed)
    b = drift_bound(eta=0.01, tau=2, zeta=5.0, evidence=fed)
    assert not b.proven


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: drift_bound(eta=0.3, tau=2, smoothness=1.0, zeta=1.0, sigma2=0.0), r"eta <= 1 / \(4 L\) = 0\.25"),
        (lambda: drift_bound(eta=0.1, tau=0, smoothness=1.0, zeta=1.0, sigma2=0.0), "tau"),
        (lambda: drift_bound(eta=0.1, tau=2, smoothness=1.0), "give sigma2, zeta"),
        (lambda: drift_bound(eta=0.1, tau=2, smoothness=1.0, zeta=-1.0, sigma2=0.0), "negative"),
        (lambda: suboptimality_bound(mu=1.0, smoothness=2.0, gamma=0.1, theta=theta_sum(2)), "radius"),
        (
            lambda: suboptimality_bound(
                radius=0.01, gamma=0.1, theta=theta_sum(2), evidence=random_federation(2, 2, mu=1.0, smoothness=2.0)
            ),
            "radius C = 0.01 is too small",
        ),
        (
            lambda: suboptimality_bound(
                radius=1.0, mu=1.0, smoothness=2.0, gamma=0.1, theta=theta_sum(2), constant="best"
            ),
            "constant must be",
        ),
        (
            lambda: aggregation_bound(
                rounds=3, steps=2, sampled=4, clients=4, local_step=1.0, distance=1.0, beta=1.0, G2=1.0
            ),
            "local_step <= ",
        ),
        (
            lambda: aggregation_bound(
                rounds=3, steps=2, sampled=5, clients=4, local_step=0.001, distance=1.0, beta=1.0, G2=1.0
            ),
            "must not exceed clients",
        ),
        (lambda: mime_rounds("fedmom", 0.1), "algorithm must be one of"),
        (lambda: mime_rounds("mime_mvr", 0.1, G2=1.0), "needs delta"),
        (lambda: mime_rounds("mime_adam", 0.1, smoothness=1.0, G2=1.0), r"epsilon > G\^2 / S = 1"),
        (lambda: mime_rounds("mime_mvr", 0.1, G2=1.0, delta=1.0, mu=1.0), "no PL rate"),
        (lambda: mime_rounds("mime_sgd", -0.1, smoothness=1.0, G2=1.0), "epsilon must be positive"),
        (lambda: lower_bound_pair(0.0, 1.0), "positive"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
