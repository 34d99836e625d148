"""Methods that tune themselves: exact recursions against NumPy, invariances, and bounds from their theory."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid import transforms as tf
from fedbraid.algorithms._fedauto_ahead import noise_of_choice
from fedbraid.algorithms.client_optimizers import optimizer
from fedbraid.algorithms.local_smoothness import delta_sgd_steps
from fedbraid.core import StructureError
from fedbraid.local import masked_mean
from told import told

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(7)
SIZES = (6, 3, 5)
X = [RNG.normal(size=(n, 4)) for n in SIZES]
Y = [RNG.normal(size=n) + far for far, n in zip((0, 5, -5), SIZES, strict=True)]
START = np.full(4, 0.3)
DATA = fb.Split.from_clients([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)])
FULL = {"batch_size": None, "steps": 3}


def loss(params, batch, key):
    return masked_mean(0.5 * (batch["x"] @ params - batch["y"]) ** 2, batch["mask"])


def scaled(factor):
    return lambda params, batch, key: factor * loss(params, batch, key)


def run(alg, rounds, data=DATA, start=START):
    return fb.simulate(alg, jnp.asarray(start), data, rounds=rounds, devices=1)


def gradient(i, y):
    return X[i].T @ (X[i] @ y - Y[i]) / len(Y[i])


def gd(i, x, lr, steps=3):
    y = x.copy()
    for _ in range(steps):
        y = y - lr * gradient(i, y)
    return y


def weighted(values, weights=SIZES):
    return np.average(values, axis=0, weights=weights)


# --- FedExP ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eps", "limit"), [(1e-3, None), (0.0, 3.0)])
def test_fedexp_by_hand(eps, limit):
    x, rates, last = START.copy(), [], START
    for _ in range(4):
        moves = [x - gd(i, x, 0.05) for i in range(3)]
        mean, square = weighted(moves), weighted([m @ m for m in moves])
        rates.append(min(max(1, square / (2 * (mean @ mean + eps))), limit or np.inf))
        last, x = x, x - rates[-1] * mean
    options = {"client_lr": 0.05, "eps": eps, "limit": limit, **FULL}
    found = run(fb.fedexp(loss, **options), 4)
    np.testing.assert_allclose(found.params, x, rtol=1e-10)
    np.testing.assert_allclose(found.history["train/server_rate"], rates, rtol=1e-10)
    assert max(rates) > 1.5
    mean_of_two = run(fb.fedexp(loss, average=True, **options), 4)
    np.testing.assert_allclose(mean_of_two.params, (x + last) / 2, rtol=1e-10)


def test_fedexp_of_clients_that_agree_is_fedavg():
    """||D_i|| = ||D|| makes the rate max(1, 1/2) = 1: for one client, and for identical ones."""
    for data in (
        fb.Split.from_clients([{"x": X[0], "y": Y[0]}]),
        fb.Split.from_clients([{"x": X[0], "y": Y[0]}] * 3),
    ):
        found = run(fb.fedexp(loss, client_lr=0.05, **FULL), 3, data)
        np.testing.assert_allclose(found.params, run(fb.fedavg(loss, client_lr=0.05, **FULL), 3, data).params, 1e-12)
        assert set(np.asarray(found.history["train/server_rate"])) == {1.0}


def test_fedexp_on_orthogonal_projections_reaches_the_intersection():
    """Clients that project onto orthogonal lines a_i'x = b_i: FedExP has the rate M/2."""
    m = 6
    data = fb.Split.from_clients([{"x": np.eye(m)[i : i + 1], "y": np.array([i + 1.0])} for i in range(m)])
    # one local step of rate 1 on 0.5 (a'x - b)^2 with ||a|| = 1 is the exact projection
    options = {"client_lr": 1.0, "batch_size": None, "steps": 1}
    found = run(fb.fedexp(loss, eps=0.0, **options), 1, data, np.zeros(m))
    # D_i = -(i+1) e_i: mean ||D_i||^2 = S / M, ||mean||^2 = S / M^2, so the rate is M / 2: half of the way, for every i
    np.testing.assert_allclose(found.params, (np.arange(m) + 1) / 2, rtol=1e-12)
    average = run(fb.fedavg(loss, **options), 1, data, np.zeros(m)).params
    np.testing.assert_allclose(average, (np.arange(m) + 1) / m, rtol=1e-12)


def test_fedexp_never_moves_away_from_a_common_solution():
    """Overparametrised least squares (Lemma 1): projections onto sets with a common point x* shrink ||x - x*||."""
    rng = np.random.default_rng(3)
    rows = [rng.normal(size=(1, 8)) for _ in range(5)]
    solution = rng.normal(size=8)
    rows = [a / np.linalg.norm(a) for a in rows]
    data = fb.Split.from_clients([{"x": a, "y": a @ solution} for a in rows])
    options = {"client_lr": 1.0, "batch_size": None, "steps": 1}
    alg, x, apart = fb.fedexp(loss, eps=0.0, **options), np.zeros(8), [np.linalg.norm(solution)]
    for _ in range(6):
        x = np.asarray(run(alg, 1, data, x).params)
        apart.append(np.linalg.norm(x - solution))
    assert all(b < a for a, b in itertools.pairwise(apart))


def test_fedexp_over_scaffold_keeps_its_fixed_point():
    """Where SCAFFOLD stops, uploads are zero, so the extrapolated method stops there, too: at the joint optimum."""
    h = sum(x.T @ x / len(x) for x in X)
    optimum = np.linalg.solve(h, sum(x.T @ y / len(y) for x, y in zip(X, Y, strict=True)))
    alg = tf.fedexp(fb.scaffold(loss, client_lr=0.05, **FULL))
    found = run(alg, 400)
    np.testing.assert_allclose(found.params, optimum, atol=1e-8)
    plain = run(fb.scaffold(loss, client_lr=0.05, **FULL), 2)
    assert np.abs(np.asarray(run(alg, 2).params) - np.asarray(plain.params)).max() > 1e-4  # another path


def test_server_rates_are_refused_where_clients_keep_the_update():
    for transform in (tf.fedexp, tf.hypergradient):
        with pytest.raises(StructureError, match="SCAFFOLD"):
            transform(fb.feddyn(loss))


# --- hypergradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["multiplicative", "additive"])
def test_hypergradient_by_hand(rule):
    x, rate, last, rates = START.copy(), 1.0, np.zeros(4), []
    for _ in range(5):
        mean = weighted([x - gd(i, x, 0.1) for i in range(3)])
        if rule == "additive":
            rate += 0.3 * mean @ last
        else:
            lengths = np.linalg.norm(mean) * np.linalg.norm(last)
            rate *= np.exp(0.3 * (mean @ last / lengths if lengths else 0))
        rate = np.clip(rate, 1 / 2, 2)
        x, last = x - rate * mean, mean
        rates.append(rate)
    found = run(fb.fedhyper(loss, client_lr=0.1, beta=0.3, rule=rule, limit=2.0, **FULL), 5)
    np.testing.assert_allclose(found.params, x, rtol=1e-10)
    np.testing.assert_allclose(found.history["train/server_rate"], rates, rtol=1e-10)
    assert len(set(rates)) > 2


@pytest.mark.parametrize(("client_lr", "up"), [(0.01, True), (1.9, False)])
def test_the_hypergradient_rate_moves_to_the_right_side(client_lr, up):
    """On 0.5 x^2 the best rate of the server is 1 / client_lr: far above 1 in one case, below it in the other."""
    data = fb.Split.from_clients([{"x": np.eye(1), "y": np.zeros(1)}])
    options = {"batch_size": None, "steps": 1}
    found = run(fb.fedhyper(loss, client_lr=client_lr, **options), 8, data, np.ones(1))
    rate = found.history["train/server_rate"][-1]
    assert rate > 2 if up else rate < 0.9


# --- Delta-SGD -------------------------------------------------------------------------------------------------------


def delta_by_hand(i, x, eta, gamma, delta, steps):
    y, theta, before, rates = x.copy(), 1.0, None, []
    for _ in range(steps):
        g = gradient(i, y)
        if before is not None:
            grown = np.sqrt(1 + delta * theta) * eta
            new = min(gamma * np.linalg.norm(y - before[0]) / (2 * np.linalg.norm(g - before[1])), grown)
            theta, eta = new / eta, new
        before = (y, g)
        y = y - eta * g
        rates.append(eta)
    return y, rates


def test_delta_sgd_by_hand():
    x = START.copy()
    for _ in range(2):
        walks = [delta_by_hand(i, x, 0.8, 1.5, 0.4, 5) for i in range(3)]
        x = weighted([y for y, _ in walks])
    assert len({round(r, 6) for _, rates in walks for r in rates}) > 6
    found = run(fb.delta_sgd(loss, client_lr=0.8, gamma=1.5, delta=0.4, batch_size=None, steps=5), 2)
    np.testing.assert_allclose(found.params, x, rtol=1e-10)
    table = {"name": "delta_sgd", "gamma": 1.5, "delta": 0.4}
    same = run(fb.fedavg(loss, client_lr=0.8, client_opt=table, batch_size=None, steps=5), 2)
    np.testing.assert_allclose(same.params, found.params, rtol=1e-12)


@pytest.mark.parametrize("first", [1e-3, 0.05, 10.0])
def test_delta_sgd_stays_in_the_bounds_of_its_theory(first):
    """On a quadratic with curvatures in [mu, L], measured rates are in [min(eta_0, gamma / 2L), gamma / 2mu]."""
    curvature = np.array([0.5, 2.0, 8.0])
    opt = delta_sgd_steps(first)
    opt = opt._replace(update=jax.jit(opt.update))
    y, state, rates = jnp.ones(3), opt.init(jnp.ones(3)), []
    for _ in range(200):
        update, state = opt.update(curvature * y, state, y)
        y = y + update
        rates.append(float(state.eta))
    assert min(rates[1:]) >= min(first, 1 / 8) - 1e-12
    assert max(rates[1:]) <= 1 / 0.5 + 1e-12
    assert np.abs(y).max() < 0.2  # also from a first rate of 40 times the stable one


def test_delta_sgd_over_scaffold_stops_at_the_joint_optimum():
    h = sum(x.T @ x / len(x) for x in X)
    optimum = np.linalg.solve(h, sum(x.T @ y / len(y) for x, y in zip(X, Y, strict=True)))
    # equal rates in all steps are needed for c_i = grad f_i at the fixed point only if c_i weighs steps by their rates
    found = run(fb.scaffold(loss, client_lr=0.05, client_opt="delta_sgd", **FULL), 600)
    np.testing.assert_allclose(found.params, optimum, atol=1e-5)


# --- DoG -------------------------------------------------------------------------------------------------------------


def test_feddog_with_one_client_and_one_step_is_dog():
    data = fb.Split.from_clients([{"x": X[0], "y": Y[0]}])
    opt = optax.contrib.dog(1.0, init_step=("heuristic", 1e-2), eps=0.0)
    y, state = jnp.asarray(START), opt.init(jnp.asarray(START))
    for _ in range(7):
        update, state = opt.update(jnp.asarray(gradient(0, np.asarray(y))), state, y)
        y = y + update
    found = run(fb.feddog(loss, initial=1e-2, batch_size=None, steps=1), 7, data)
    np.testing.assert_allclose(found.params, y, rtol=1e-10)


def test_feddog_by_hand():
    x, reach, total = START.copy(), 1e-2 * (1 + np.linalg.norm(START)), 0.0
    for _ in range(4):
        moved, squares = [], []
        for i in range(3):
            y, d, own = x.copy(), reach, 0.0
            for _ in range(3):
                g = gradient(i, y)
                own, d = own + g @ g, max(d, np.linalg.norm(y - x))
                y = y - d / np.sqrt(total + own) * g
            moved.append(y)
            squares.append(own)
        x, total = weighted(moved), total + weighted(squares)
        reach = max(reach, np.linalg.norm(x - START))
    np.testing.assert_allclose(run(fb.feddog(loss, initial=1e-2, **FULL), 4).params, x, rtol=1e-10)


@pytest.mark.parametrize("name", ["dog", "dowg", "prodigy"])
def test_optimizers_without_a_rate_are_invariant_to_the_scale_of_the_loss(name):
    def one(factor):
        alg = fb.fedavg(scaled(factor), client_lr=1.0, client_opt=name, client_opt_state="kept", **FULL)
        return np.asarray(run(alg, 4).params)

    assert np.abs(one(1.0) - START).max() > 1e-6
    np.testing.assert_allclose(one(1000.0), one(1.0), rtol=1e-9)


def test_feddog_is_invariant_to_the_scale_of_the_loss():
    one = np.asarray(run(fb.feddog(loss, **FULL), 5).params)
    assert np.abs(one - START).max() > 1e-4
    np.testing.assert_allclose(run(fb.feddog(scaled(1000.0), **FULL), 5).params, one, rtol=1e-9)


def test_dog_measures_the_distance_from_the_start_of_the_run():
    """One client that keeps its state: the rounds are one DoG run of optax, distance from the first model included."""
    data = fb.Split.from_clients([{"x": X[0], "y": Y[0]}])
    opt = optax.contrib.dog(1.0, init_step=("heuristic", 1e-4), eps=1e-30)
    y, state = jnp.asarray(START), opt.init(jnp.asarray(START))
    for _ in range(6):
        update, state = opt.update(jnp.asarray(gradient(0, np.asarray(y))), state, y)
        y = y + update
    alg = fb.fedavg(loss, client_lr=1.0, client_opt="dog", client_opt_state="kept", **FULL)
    np.testing.assert_allclose(run(alg, 2, data).params, y, rtol=1e-9)


def test_states_and_rates_that_make_no_sense_are_refused_or_said():
    with pytest.raises(ValueError, match="kept"):
        fb.fedavg(loss, client_lr=1.0, client_opt="dog")
    with pytest.raises(ValueError, match="reset"):
        fb.fedavg(loss, client_opt="schedule_free", client_opt_state="kept")
    with told("finds its rate itself"):
        optimizer("prodigy", 0.1)


def test_schedule_free_by_hand():
    """x is the mean of the z; the local model is y = 0.1 z + 0.9 x."""
    data = fb.Split.from_clients([{"x": X[0], "y": Y[0]}])
    z = x = y = START.copy()
    for t in range(1, 4):
        z = z - 0.1 * gradient(0, y)
        x = (1 - 1 / t) * x + z / t
        y = 0.1 * z + 0.9 * x
    alg = fb.fedavg(loss, client_lr=0.1, client_opt="schedule_free", **FULL)
    np.testing.assert_allclose(run(alg, 1, data).params, y, rtol=1e-10)


# --- FedAuto ---------------------------------------------------------------------------------------------------------


def auto_by_hand(rounds, *, caution, server_lr, tau, beta):
    """FedAuto of full batches, from its definition."""
    x, m, v, known, factor = START.copy(), np.zeros(4), np.zeros(4), np.zeros(3), 1.0
    client_rates, server_rates = [], []
    for t in range(1, rounds + 1):
        moves, found, share = [], [], caution + (1 - caution) / (1 + (t - 1) / 15)
        for i in range(3):
            y, own = x.copy(), np.zeros(3)
            for _ in range(3):
                g, sums = gradient(i, y), 5 * known + own
                length = 1e-3 * (1 + np.linalg.norm(y)) / np.linalg.norm(g)
                new = y - (share * sums[1] / sums[2] if sums[2] > 0 else length) * g
                curvature = np.linalg.norm(gradient(i, new) - g) / np.linalg.norm(new - y)
                own, y = own + np.array([1, curvature, curvature**2]), new
            moves.append(x - y)
            found.append(own / 3)
        known = 0.7 * known + 0.3 * weighted(found) if t > 1 else weighted(found)
        mean = weighted(moves)
        if t > 1:
            factor *= np.exp(beta * mean @ m / (np.linalg.norm(mean) * np.linalg.norm(m)))
        factor = np.clip(factor, 1 / 3, 2)
        m, v = 0.8 * m + 0.2 * mean, 0.99 * v + 0.01 * mean**2
        fair_m, root = m / (1 - 0.8**t), np.sqrt(v / (1 - 0.99**t))
        p = fair_m / (root + tau * np.sqrt(np.mean(root**2)))
        rate = server_lr * factor * np.sqrt(1 - 0.8**t)
        x = x - rate * np.linalg.norm(fair_m) / np.linalg.norm(p) * p
        client_rates.append((caution + (1 - caution) / (1 + t / 15)) * known[1] / known[2])
        server_rates.append(rate)
    return x, client_rates, server_rates


@pytest.mark.parametrize("beta", [0.3, 2.0])  # 2 reaches the bounds of the server's factor
def test_fedauto_by_hand(beta):
    options = {"caution": 0.4, "server_lr": 1.5, "tau": 0.3, "beta": beta}
    x, client_rates, server_rates = auto_by_hand(4, **options)
    found = run(fb.fedauto(loss, **options, **FULL), 4)
    np.testing.assert_allclose(found.params, x, rtol=1e-9)
    np.testing.assert_allclose(found.history["train/client_rate"], client_rates, rtol=1e-9)
    np.testing.assert_allclose(found.history["train/server_rate"], server_rates, rtol=1e-9)
    top = max(np.linalg.eigvalsh(x.T @ x / len(x)).max() for x in X)
    assert 0.4 / top <= min(client_rates)  # E[L] / E[L^2] >= 1 / max L
    assert len(set(server_rates)) > 2


def test_fedauto_is_invariant_to_the_scale_of_the_loss():
    one = np.asarray(run(fb.fedauto(loss, **FULL), 5).params)
    assert np.abs(one - START).max() > 1e-2
    for factor in (1e-4, 1e4):
        np.testing.assert_allclose(run(fb.fedauto(scaled(factor), **FULL), 5).params, one, rtol=1e-8)


def test_fedauto_measures_an_isotropic_curvature_exactly():
    """On 0.5 a ||x - e_i||^2 every L is a, with any batches: the rate is caution / a, and caution = 1 is Newton's."""
    data = fb.Split.from_clients([{"x": np.full((4, 2), i), "y": np.zeros(4)} for i in (0.0, 3.0)])

    def round_loss(params, batch, key):
        return masked_mean(3.5 * jnp.sum((params - batch["x"]) ** 2, -1), batch["mask"])

    alg = fb.fedauto(round_loss, caution=1.0, server_lr=1.0, momentum=0.0, tau=1e6, beta=0.0, batch_size=2, steps=2)
    found = run(alg, 3, data, np.zeros(2))
    np.testing.assert_allclose(found.history["train/client_rate"], 1 / 7, rtol=1e-9)
    np.testing.assert_allclose(found.params, 1.5, rtol=1e-4)  # the mean of the clients' optima


def test_fedauto_survives_flat_and_zero_losses():
    """Without a gradient nothing moves; with a constant gradient (L = 0) steps keep their small length."""
    still = run(fb.fedauto(lambda params, batch, key: 0 * jnp.sum(params), **FULL), 2)
    np.testing.assert_array_equal(still.params, START)
    slope = run(fb.fedauto(lambda params, batch, key: jnp.sum(params), **FULL), 2).params
    assert np.isfinite(slope).all()
    assert 0 < np.abs(slope - START).max() < 0.1


# --- FedAuto ahead ---------------------------------------------------------------------------------------------------


def ahead_by_hand(rounds, *, caution, server_lr, tau, beta, doubt):
    """FedAuto ahead with full batches and 2 of 3 clients in every round, from its definition."""
    x, mean, u, m, v = START.copy(), START.copy(), np.zeros(4), np.zeros(4), np.zeros(4)
    known, factor, a, b, rates, factors = np.zeros(3), 1.0, 0.0, 0.0, [], []
    for t in range(1, rounds + 1):
        cohort = np.asarray(address.cohort(0, t - 1, 0, 3, 2))
        z, moves, found = x - 0.85 * u, [], []
        share = (caution + (1 - caution) / (1 + (t - 1) / 15)) * min(factor, 1)
        for i in cohort:
            y, own = z.copy(), np.zeros(3)
            for _ in range(3):
                g, sums = gradient(i, y), 5 * known + own
                length = 1e-3 * (1 + np.linalg.norm(y)) / np.linalg.norm(g)
                new = y - (share * sums[1] / sums[2] if sums[2] > 0 else length) * g
                curvature = np.linalg.norm(gradient(i, new) - g) / np.linalg.norm(new - y)
                own, y = own + np.array([1, curvature, curvature**2]), new
            moves.append(z - y)
            found.append(own / 3)
        sizes = [SIZES[i] for i in cohort]
        known = 0.7 * known + 0.3 * weighted(found, sizes) if t > 1 else weighted(found, sizes)
        d, square = weighted(moves, sizes), weighted([move @ move for move in moves], sizes)
        a, b = 0.9 * a + 0.1 * d @ d, 0.9 * b + 0.1 * (square - d @ d) * (1 - 2 / 3)
        if t > 1:
            factor = np.clip(factor * np.exp(beta * d @ m / np.linalg.norm(d) / np.linalg.norm(m)), 0.2, 5)
        m, v = 0.85 * m + d, 0.99 * v + 0.01 * d**2
        p = m / (np.sqrt(v) + tau * np.sqrt(np.mean(v)))
        factors.append(factor)
        rates.append(server_lr * max(factor, 1) * max(1 - doubt * b / a, 0.1))
        u = rates[-1] * np.linalg.norm(m) / np.linalg.norm(p) * p
        x = x - u
        mean = mean + 17 / (16 + t) * (x - mean)
    return mean, rates, factors


@pytest.mark.parametrize("doubt", [0.0, 0.2, 50.0])  # 50: the least trust
def test_fedauto_ahead_by_hand(doubt):
    options = {"caution": 0.4, "server_lr": 0.5, "tau": 0.3, "beta": 0.3, "doubt": doubt}
    params, rates, _ = ahead_by_hand(5, **options)
    alg = fb.fedauto_ahead(loss, **options, **FULL)
    found = fb.simulate(alg, jnp.asarray(START), DATA, rounds=5, cohort=2, devices=1)
    np.testing.assert_allclose(found.params, params, rtol=1e-8)
    np.testing.assert_allclose(found.history["train/server_rate"], rates, rtol=1e-8)
    assert len(set(rates)) >= 3


def test_fedauto_ahead_shortens_local_steps_if_updates_contradict_each_other():
    """A server step that overshoots is answered by updates in the other direction: s falls, and local rates with it."""
    options = {"caution": 0.9, "server_lr": 3.0, "tau": 0.3, "beta": 0.3, "doubt": 0.0}
    params, rates, factors = ahead_by_hand(6, **options)
    assert factors == sorted(factors, reverse=True)
    assert 0.2 < factors[-1] < 0.5
    found = fb.simulate(fb.fedauto_ahead(loss, **options, **FULL), jnp.asarray(START), DATA, rounds=6, cohort=2)
    np.testing.assert_allclose(found.params, params, rtol=1e-8)
    np.testing.assert_allclose(found.history["train/server_rate"], rates, rtol=1e-8)


def test_fedauto_ahead_is_invariant_to_the_scale_of_the_loss():
    one = np.asarray(run(fb.fedauto_ahead(loss, **FULL), 5).params)
    assert np.abs(one - START).max() > 1e-2
    for factor in (1e-4, 1e4):
        np.testing.assert_allclose(run(fb.fedauto_ahead(scaled(factor), **FULL), 5).params, one, rtol=1e-8)


def test_fedauto_ahead_trusts_the_mean_of_all_clients():
    """With all clients nothing is due to their choice; with a few that disagree, steps are shorter."""
    options = {"beta": 0.0, **FULL}
    all_of_them = run(fb.fedauto_ahead(loss, **options), 4).history["train/server_rate"]
    np.testing.assert_allclose(all_of_them, 1.0)
    some = fb.simulate(fb.fedauto_ahead(loss, **options), jnp.asarray(START), DATA, rounds=4, cohort=2, devices=1)
    assert np.all(np.asarray(some.history["train/server_rate"])[1:] < 1.0)


def test_the_noise_of_the_choice_of_clients_is_unbiased():
    """Over all cohorts of 2 of 5 clients, n has the mean of ||D||^2 - ||mean of all||^2."""
    updates = np.random.default_rng(1).normal(size=(5, 3))
    pairs = [updates[list(pair)] for pair in itertools.combinations(range(5), 2)]
    found = [noise_of_choice(np.mean(np.sum(own**2, 1)), np.sum(own.mean(0) ** 2), 2.0, 5.0) for own in pairs]
    true = np.mean([np.sum(own.mean(0) ** 2) for own in pairs]) - np.sum(updates.mean(0) ** 2)
    np.testing.assert_allclose(np.mean(found), true, rtol=1e-9)


def test_fedauto_ahead_survives_flat_and_zero_losses():
    still = run(fb.fedauto_ahead(lambda params, batch, key: 0 * jnp.sum(params), **FULL), 2)
    np.testing.assert_array_equal(still.params, START)
    slope = run(fb.fedauto_ahead(lambda params, batch, key: jnp.sum(params), **FULL), 2).params
    assert np.isfinite(slope).all()
    assert 0 < np.abs(slope - START).max() < 0.1
