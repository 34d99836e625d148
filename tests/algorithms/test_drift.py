"""FedCM, FedSAM, MoFedSAM, FedACG, FedDC and FedSpeed: the papers' recursions in NumPy, and special cases."""

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
LR, K = 0.05, 3
WHOLE = {"client_lr": LR, "batch_size": None, "steps": K}
RAGGED = {"client_lr": LR, "batch_size": 2, "epochs": 2}


def run(alg, rounds=4, **options):
    return simulate(alg, start(), clients(), rounds=rounds, devices=1, **{"cohort": 3, **options})


def same(a, b, tolerance=1e-10):
    np.testing.assert_allclose(flat(a.params), flat(b.params), tolerance, tolerance)


def rounds(client, server, state, n=4):
    """Rounds of a method in NumPy: ``client(i, state) -> upload``, ``server(state, ids, uploads) -> state``."""
    for t in range(n):
        ids = address.cohort(0, t, 0, 5, 3)
        state = server(state, ids, [client(i, state) for i in ids])
    return state


def walk(x, direction):
    y = x.copy()
    for _ in range(K):
        y = y - LR * direction(y)
    return y


# --- FedCM, FedSAM, MoFedSAM -----------------------------------------------------------------------------------------


def sharp_gradient(i, y, rho):
    g = Q.gradient(i, y)
    return Q.gradient(i, y + rho * g / np.linalg.norm(g))


def momentum_rounds(alpha, rho, server_lr):
    def client(i, state):
        x, delta = state
        return x - walk(x, lambda y: alpha * sharp_gradient(i, y, rho) + (1 - alpha) * delta)

    def server(state, ids, ups):
        return state[0] - server_lr * np.mean(ups, 0), np.mean(ups, 0) / (LR * K)

    return rounds(client, server, (flat(start()), np.zeros(4)))


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_fedcm_and_mofedsam_are_the_papers_recursion(rho):
    x, delta = momentum_rounds(0.3, rho, 0.8)
    shared = {"alpha": 0.3, "server_lr": 0.8, **WHOLE}
    result = run(fb.mofedsam(loss, rho=rho, **shared) if rho else fb.fedcm(loss, **shared))
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(flat(result.server.delta), delta, 1e-9)


def test_fedsam_is_the_papers_recursion():
    def server(x, ids, ups):
        return x - 0.8 * Q.weights("examples", ids) @ np.array(ups)

    x = rounds(lambda i, x: x - walk(x, lambda y: sharp_gradient(i, y, 0.3)), server, flat(start()))
    np.testing.assert_allclose(flat(run(fb.fedsam(loss, rho=0.3, server_lr=0.8, **WHOLE)).params), x, 1e-9)


def test_without_momentum_and_sharpness_they_are_fedavg():
    plain = run(fb.fedavg(loss, weighting="uniform", **RAGGED))
    same(run(fb.fedcm(loss, alpha=1.0, **RAGGED)), plain)
    same(run(fb.fedsam(loss, rho=0.0, weighting="uniform", **RAGGED)), plain)
    same(run(fb.mofedsam(loss, rho=0.0, alpha=0.4, **RAGGED)), run(fb.fedcm(loss, alpha=0.4, **RAGGED)))


def test_one_step_of_fedcm_with_all_clients_is_gradient_descent_with_momentum():
    one = {"client_lr": LR, "batch_size": None, "steps": 1, "weighting": "uniform"}
    a = run(fb.fedcm(loss, alpha=0.3, **one), rounds=6, cohort=5)
    same(a, run(fb.fedavgm(loss, momentum=0.7, kind="average", **one), rounds=6, cohort=5))


def test_a_gradient_of_norm_zero_is_no_direction():
    """At the optimum of a client a sharpness-aware step stays where it is, and nothing becomes NaN."""
    best = jax.tree.map(np.zeros_like, start())
    data = fb.Split.from_clients([{"x": np.ones((2, 3)), "y": np.zeros(2)}])
    result = simulate(fb.fedsam(loss, rho=0.3, **WHOLE), best, data, rounds=2, devices=1)
    np.testing.assert_array_equal(flat(result.params), np.zeros(4))


# --- FedACG ----------------------------------------------------------------------------------------------------------


def test_fedacg_is_the_papers_recursion():
    lam, beta = 0.7, 0.4

    def client(i, state):
        z = state[0] + lam * state[1]
        return z - walk(z, lambda y: Q.gradient(i, y) + beta * (y - z))

    def server(state, ids, ups):
        m = lam * state[1] - Q.weights("examples", ids) @ np.array(ups)
        return state[0] + m, m

    x, m = rounds(client, server, (flat(start()), np.zeros(4)))
    result = run(fb.fedacg(loss, lam=lam, beta=beta, **WHOLE))
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(flat(result.server.m), m, 1e-9)


def test_fedacg_without_momentum_is_fedprox_and_one_step_is_nesterovs_method():
    same(run(fb.fedacg(loss, lam=0.0, beta=0.3, **RAGGED)), run(fb.fedprox(loss, alpha=0.3, **RAGGED)))
    x, m, weights = flat(start()), np.zeros(4), Q.weights("examples")
    for _ in range(6):
        ahead = x + 0.7 * m
        m = 0.7 * m - LR * sum(w * Q.gradient(i, ahead) for i, w in enumerate(weights))
        x = x + m
    one = fb.fedacg(loss, lam=0.7, client_lr=LR, batch_size=None, steps=1)
    np.testing.assert_allclose(flat(run(one, rounds=6, cohort=5).params), x, 1e-9)


# --- FedDC -----------------------------------------------------------------------------------------------------------


def test_feddc_is_the_papers_recursion():
    alpha, h, c = 0.6, np.zeros((5, 4)), np.zeros((5, 4))

    def client(i, x):
        return x - walk(x, lambda y: Q.gradient(i, y) + alpha * (y - (x - h[i])) + mean_c - c[i])

    x = flat(start())
    for t in range(4):
        ids, mean_c = address.cohort(0, t, 0, 5, 3), c.mean(0)
        ups = {i: client(i, x) for i in ids}
        for i in ids:
            h[i] -= ups[i]
            c[i] += ups[i] / (K * LR) - mean_c
        x = x - np.mean(list(ups.values()), 0) + h.mean(0)  # the mean of the cohort's models, and of all drifts
    result = run(fb.feddc(loss, alpha=alpha, **WHOLE))
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(flat(result.states.h), h, 1e-9, 1e-12)
    np.testing.assert_allclose(flat(result.states.c), c, 1e-9, 1e-12)


def test_feddc_without_its_gradient_correction_is_feddyn():
    a, b = run(fb.feddc(loss, alpha=0.6, correction=False, **RAGGED)), run(fb.feddyn(loss, alpha=0.6, **RAGGED))
    same(a, b)
    np.testing.assert_allclose(-0.6 * flat(a.states.h), flat(b.states), 1e-8, 1e-10)
    assert np.abs(flat(run(fb.feddc(loss, alpha=0.6, **RAGGED)).params) - flat(b.params)).max() > 1e-3


# --- FedSpeed --------------------------------------------------------------------------------------------------------


def test_fedspeed_is_the_papers_recursion():
    lam, rho, alpha, own = 2.0, 0.1, 0.75, np.zeros((5, 4))

    def client(i, x):
        def direction(y):
            g = Q.gradient(i, y)
            return (1 - alpha) * g + alpha * Q.gradient(i, y + rho * g) - own[i] + (y - x) / lam

        y = walk(x, direction)
        own[i] = own[i] - (y - x) / lam
        return y - lam * own[i]

    x = rounds(client, lambda x, ids, ups: np.mean(ups, 0), flat(start()))
    result = run(fb.fedspeed(loss, lam=lam, rho=rho, alpha=alpha, **WHOLE))
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(flat(result.states), own, 1e-9, 1e-12)


def test_fedspeed_with_all_clients_and_without_a_point_ahead_is_feddyn():
    same(
        run(fb.fedspeed(loss, lam=2.0, rho=0.0, **RAGGED), cohort=5),
        run(fb.feddyn(loss, alpha=0.5, **RAGGED), cohort=5),
    )


@pytest.mark.parametrize(
    ("make", "models"),
    [(fb.fedcm, 3), (fb.fedsam, 2), (fb.mofedsam, 3), (fb.fedacg, 2), (fb.feddc, 4), (fb.fedspeed, 2)],
)
def test_what_they_send(make, models):
    assert fb.cost(make(loss), start(), clients()).multiple == pytest.approx(models, abs=0.3)  # FedCM: a number more
