"""Ditto, APFL and pFedMe against their papers' recursions in NumPy, and their limits."""

import jax
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.simulation import simulate
from quadratic_clients import flat, quadratics
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
Q = quadratics(clients())
WHOLE = {"batch_size": None, "steps": 3}
RAGGED = {"batch_size": 2, "epochs": 2}


def run(alg, rounds=4, **options):
    return simulate(alg, start(), clients(), rounds=rounds, devices=1, **{"cohort": 3, **options})


def personal(alg, result):
    """The model of every client, as vectors."""
    states = [jax.tree.map(lambda leaf, i=i: leaf[i], result.states) for i in range(5)]
    return np.array([flat(alg.personal(result.server, state)) for state in states])


def alone(lr, steps_of):
    """Local training of every client with full batches, in the rounds in which it takes part."""
    models = np.tile(flat(start()), (5, 1))
    for t in range(4):
        for i in address.cohort(0, t, 0, 5, 3):
            for _ in range(steps_of):
                models[i] -= lr * Q.gradient(i, models[i])
    return models


def averaged(x, ids, moved, weighting="examples"):
    return x - Q.weights(weighting, ids) @ np.array([moved[i] for i in ids])


# --- Ditto -----------------------------------------------------------------------------------------------------------


def test_ditto_is_the_papers_recursion():
    lr, slow, lam, x, v = 0.05, 0.03, 0.7, flat(start()), np.tile(flat(start()), (5, 1))
    for t in range(4):
        ids, moved = address.cohort(0, t, 0, 5, 3), {}
        for i in ids:
            y = x.copy()
            for _ in range(3):
                y -= lr * Q.gradient(i, y)
            moved[i] = x - y
            for _ in range(2):
                v[i] -= slow * (Q.gradient(i, v[i]) + lam * (v[i] - x))
        x = averaged(x, ids, moved)
    alg = fb.ditto(loss, lam=lam, client_lr=lr, personal_lr=slow, personal_steps=2, **WHOLE)
    result = run(alg)
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(personal(alg, result), v, 1e-9)


def test_the_global_part_of_ditto_is_fedavg_bit_for_bit():
    for options in ({}, {"client_opt": "adam", "client_opt_state": "kept"}):
        a = run(fb.ditto(loss, lam=0.5, client_lr=0.05, **options, **RAGGED))
        b = run(fb.fedavg(loss, client_lr=0.05, **options, **RAGGED))
        for one, other in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_ditto_without_pull_is_local_training_and_with_a_strong_one_the_global_model():
    alg = fb.ditto(loss, lam=0.0, client_lr=0.05, **WHOLE)
    np.testing.assert_allclose(personal(alg, run(alg)), alone(0.05, 3), 1e-9)
    strong = fb.ditto(loss, lam=1e4, client_lr=0.05, personal_lr=1e-4, batch_size=None, steps=3)
    result = run(strong, rounds=300, cohort=5)
    assert np.abs(personal(strong, result) - flat(result.params)).max() < 1e-2


def test_dittos_limit_solves_the_personal_problem():
    """With all clients, v_k minimizes F_k + (lam/2)|v - w*|^2 at the limit w* of FedAvg, by a linear solve."""
    alg = fb.ditto(loss, lam=2.0, client_lr=0.05, **WHOLE)
    result = run(alg, rounds=1500, cohort=5)
    w = flat(result.params)
    best = [np.linalg.solve(Q.A[i] + 2.0 * np.eye(4), Q.b[i] + 2.0 * w) for i in range(5)]
    np.testing.assert_allclose(personal(alg, result), best, atol=1e-7)


# --- APFL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapt", [False, True])
def test_apfl_is_the_papers_recursion(adapt):
    lr, rate, x = 0.05, 0.02, flat(start())
    v, alpha = np.tile(x, (5, 1)), np.full(5, 0.4)
    for t in range(4):
        ids, moved = address.cohort(0, t, 0, 5, 3), {}
        for i in ids:
            w = x.copy()
            for _ in range(3):
                a, g = alpha[i], Q.gradient(i, alpha[i] * v[i] + (1 - alpha[i]) * w)
                if adapt:
                    alpha[i] = np.clip(a - rate * g @ (v[i] - w), 0, 1)
                w, v[i] = w - lr * Q.gradient(i, w), v[i] - lr * a * g
            moved[i] = x - w
        x = averaged(x, ids, moved)
    alg = fb.apfl(loss, alpha=0.4, adapt=adapt, alpha_lr=rate, client_lr=lr, **WHOLE)
    result = run(alg)
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(result.states.alpha, alpha, 1e-9)
    assert adapt == (np.ptp(alpha) > 1e-3)
    np.testing.assert_allclose(personal(alg, result), alpha[:, None] * v + (1 - alpha[:, None]) * x, 1e-9)


def test_apfl_with_alpha_one_is_local_and_with_alpha_zero_fedavg():
    own, shared = (fb.apfl(loss, alpha=alpha, client_lr=0.05, **WHOLE) for alpha in (1.0, 0.0))
    np.testing.assert_allclose(personal(own, run(own)), alone(0.05, 3), 1e-9)
    result, plain = run(shared), run(fb.fedavg(loss, client_lr=0.05, **WHOLE))
    np.testing.assert_allclose(flat(result.params), flat(plain.params), 1e-12)
    np.testing.assert_allclose(personal(shared, result), np.tile(flat(plain.params), (5, 1)), 1e-12)


# --- pFedMe ----------------------------------------------------------------------------------------------------------


def test_pfedme_is_the_papers_recursion():
    lam, lr, own, beta, x, theta = 4.0, 0.05, 0.1, 0.8, flat(start()), np.tile(flat(start()), (5, 1))
    for t in range(4):
        ids, moved = address.cohort(0, t, 0, 5, 3), {}
        for i in ids:
            w = theta[i] = x.copy()
            for _ in range(3):
                for _ in range(2):
                    theta[i] = theta[i] - own * (Q.gradient(i, theta[i]) + lam * (theta[i] - w))
                w = w - lr * lam * (w - theta[i])
            moved[i] = beta * (x - w)
        x = averaged(x, ids, moved, "uniform")
    alg = fb.pfedme(loss, lam=lam, client_lr=lr, personal_lr=own, inner_steps=2, server_lr=beta, **WHOLE)
    result = run(alg)
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(personal(alg, result), theta, 1e-9)


def test_with_many_inner_steps_a_pfedme_step_is_a_gradient_of_the_moreau_envelope():
    """One local step with all clients is gradient descent on the mean envelope, in closed form; and its limit."""
    lam, lr = 3.0, 0.2
    alg = fb.pfedme(loss, lam=lam, client_lr=lr, personal_lr=0.1, inner_steps=300, batch_size=None, steps=1)
    eye = np.eye(4)
    proximal = [lambda x, i=i: np.linalg.solve(Q.A[i] + lam * eye, Q.b[i] + lam * x) for i in range(5)]
    x = flat(start())
    for _ in range(3):
        x = x - lr * np.mean([lam * (x - p(x)) for p in proximal], 0)
    np.testing.assert_allclose(flat(run(alg, rounds=3, cohort=5).params), x, 1e-8)
    # the mean of the envelopes 0.5 (x - c)'M(x - c) with M = lam A (A + lam)^-1 has its minimum where
    M = [lam * Q.A[i] @ np.linalg.inv(Q.A[i] + lam * eye) for i in range(5)]
    c = [np.linalg.lstsq(Q.A[i], Q.b[i], rcond=None)[0] for i in range(5)]
    best = np.linalg.solve(sum(M), sum(m @ e for m, e in zip(M, c, strict=True)))
    limit = run(alg, rounds=600, cohort=5)
    np.testing.assert_allclose(flat(limit.params), best, atol=1e-6)


@pytest.mark.parametrize("make", [fb.ditto, fb.apfl, fb.pfedme])
def test_they_cost_what_fedavg_costs(make):
    assert fb.cost(make(loss), start(), clients()).multiple == 2


def test_adapting_from_alpha_zero_is_refused():
    with pytest.raises(ValueError, match="alpha"):
        fb.apfl(loss, alpha=0.0, adapt=True)


# --- IFCA ------------------------------------------------------------------------------------------------------------


def test_ifca_is_the_papers_recursion():
    alg = fb.ifca(loss, clusters=2, client_lr=0.05, server_lr=0.8, spread=3.0, **WHOLE)
    x = flat(alg.init(start()).models)
    chosen = np.full(5, -1)
    for t in range(4):
        ids = address.cohort(0, t, 0, 5, 3)
        total, weight = np.zeros((2, 4)), np.zeros(2)
        for i in ids:
            chosen[i] = j = np.argmin([0.5 * m @ Q.A[i] @ m - Q.b[i] @ m for m in x])
            y = x[j].copy()
            for _ in range(3):
                y -= 0.05 * Q.gradient(i, y)
            total[j] += Q.sizes[i] * (x[j] - y)
            weight[j] += Q.sizes[i]
        x = x - 0.8 * total / np.maximum(weight, 1)[:, None]
    result = run(alg)
    np.testing.assert_allclose(flat(result.server.models), x, 1e-9)
    np.testing.assert_array_equal(result.states.chosen, chosen)
    np.testing.assert_allclose(result.server.share, weight / weight.sum())
    largest = x[np.argmax(weight)]
    np.testing.assert_allclose(flat(result.params), largest, 1e-9)
    np.testing.assert_allclose(personal(alg, result), [largest if j < 0 else x[j] for j in chosen], 1e-9)
    assert set(chosen) >= {0, 1}


def test_ifca_finds_planted_clusters():
    """Clients of two kinds: every client ends in the cluster of its kind, at the optimum of that kind."""
    rng, solutions = np.random.default_rng(0), np.array([[2.0, -1.0, 1.0, 0.5], [-2.0, 1.0, 0.0, -0.5]])
    kinds = np.array([0, 1, 1, 0, 1, 0])
    x = [rng.normal(size=(6, 3)) for _ in kinds]
    y = [np.column_stack([a, np.ones(6)]) @ solutions[kind] for a, kind in zip(x, kinds, strict=True)]
    data = fb.Split.from_clients([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    alg = fb.ifca(loss, clusters=2, client_lr=0.1, spread=3.0, **WHOLE)
    result = simulate(alg, start(), data, rounds=400, devices=1)
    chosen = np.asarray(result.states.chosen)
    assert len(set(zip(kinds, chosen, strict=True))) == 2
    np.testing.assert_allclose(flat(result.server.models)[chosen], solutions[kinds], atol=1e-5)


def test_one_cluster_is_fedavg():
    a = run(fb.ifca(loss, clusters=1, client_lr=0.05, **RAGGED))
    np.testing.assert_allclose(flat(a.params), flat(run(fb.fedavg(loss, client_lr=0.05, **RAGGED)).params), 1e-12)


def test_ifca_sends_k_models_down_and_one_up():
    counted = fb.cost(fb.ifca(loss, clusters=3), start(), clients()).exchanges[0]
    one = fb.cost(fb.fedavg(loss), start(), clients()).exchanges[0]
    assert counted.down == 3 * one.down
    assert counted.up - one.up == 3 * 8  # which model it chose


# --- FedALA ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(), "w"])
def test_fedala_is_the_papers_recursion(layers):
    lr, rate, x = 0.05, 0.3, flat(start())
    theta, weights = np.tile(x, (5, 1)), np.ones((5, 4))
    learned = np.array([True, True, True, not layers])
    for t in range(5):
        ids, moved = address.cohort(0, t, 0, 5, 3), {}
        for i in ids:
            for _ in range(2):
                g = Q.gradient(i, theta[i] + (x - theta[i]) * weights[i])
                weights[i] = np.where(learned, np.clip(weights[i] - rate * g * (x - theta[i]), 0, 1), 1)
            y = theta[i] + (x - theta[i]) * weights[i]
            for _ in range(3):
                y -= lr * Q.gradient(i, y)
            theta[i], moved[i] = y, x - y
        x = averaged(x, ids, moved)
    alg = fb.fedala(loss, layers=layers, weight_lr=rate, share=1.0, weight_epochs=2, client_lr=lr, **WHOLE)
    result = run(alg, rounds=5)
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(result.states.weights["w"], weights[:, :3], 1e-9, 1e-12)
    np.testing.assert_allclose(personal(alg, result), theta + (x - theta) * weights, 1e-9)
    assert weights.min() < 0.5


def test_fedala_with_constant_weights_is_fedavg():
    alg, plain = fb.fedala(loss, weight_lr=0.0, client_lr=0.05, **RAGGED), fb.fedavg(loss, client_lr=0.05, **RAGGED)
    result, other = run(alg), run(plain)
    np.testing.assert_allclose(flat(result.params), flat(other.params), 1e-10)
    np.testing.assert_allclose(personal(alg, result), np.tile(flat(other.params), (5, 1)), 1e-10)


def test_layers_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="layers: no leaf matches 'head'"):
        fb.fedala(loss, layers="head").init_client(start())
