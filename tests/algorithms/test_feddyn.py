"""FedDyn against exact local solutions, its invariant, and its limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.simulation import bernoulli, simulate
from fedbraid.transforms.clients import map_report
from fedbraid.transforms.uploads import change_exchanges
from quadratic_clients import flat, quadratics
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
Q = quadratics(clients())


def test_enough_local_steps_are_the_exact_method():
    """Algorithm 1 with y the minimizer of f_i(y) - <g_i, y> + (alpha/2)||y - x||^2, by a linear solve."""
    alpha, x, h, g = 2.0, flat(start()), np.zeros(4), np.zeros((5, 4))
    for t in range(5):
        ids = address.cohort(0, t, 0, 5, 3)
        y = {i: np.linalg.solve(Q.A[i] + alpha * np.eye(4), Q.b[i] + g[i] + alpha * x) for i in ids}
        for i in ids:
            g[i] = g[i] - alpha * (y[i] - x)
            np.testing.assert_allclose(g[i], Q.gradient(i, y[i]), 1e-6, 1e-9)
        h = h - alpha / 5 * sum(y[i] - x for i in ids)
        x = np.mean(list(y.values()), 0) - h / alpha
    alg = fb.feddyn(loss, alpha=alpha, client_lr=0.1, batch_size=None, steps=300)
    result = simulate(alg, start(), clients(), rounds=5, cohort=3, devices=1)
    np.testing.assert_allclose(flat(result.params), x, 1e-8)
    np.testing.assert_allclose(flat(result.server.h), h, 1e-8, 1e-10)
    np.testing.assert_allclose(flat(result.states), g, 1e-8, 1e-10)


@pytest.mark.parametrize(("steps", "cohort"), [(3, 5), (20, 3)])
def test_it_arrives_at_the_optimum(steps, cohort):
    """With few inexact local steps, and with partial cohorts."""
    alg = fb.feddyn(loss, alpha=2.0, client_lr=0.05, batch_size=None, steps=steps)
    result = simulate(alg, start(), clients(), rounds=2000, cohort=cohort, devices=1)
    optimum = Q.optimum(Q.weights("uniform"))
    assert np.abs(flat(result.params) - optimum).max() < 1e-8
    np.testing.assert_allclose(flat(result.states), [Q.gradient(i, optimum) for i in range(5)], atol=1e-7)


def gap(result):
    """The distance of h from the mean of all clients' g_i."""
    return np.abs(flat(result.server.h) - flat(result.states).mean(0)).max()


@pytest.mark.parametrize("grid", [None, 4.0])
def test_h_is_the_mean_of_the_g_i_under_dropouts_and_coarse_uploads(grid):
    alg = fb.feddyn(loss, alpha=0.5, client_lr=0.05, batch_size=2, shuffle=False)
    if grid is not None:

        def change(exchange):
            def coarse(report, down, state, key):
                got = jax.tree.map(lambda leaf: jnp.round(leaf * grid) / grid, report.up)
                return report._replace(up=got, state=exchange.reconcile(report.state, report.up, got))

            return exchange._replace(client=map_report(exchange.client, coarse))

        alg = change_exchanges(alg, ["train"], change)
    result = simulate(alg, start(), clients(), rounds=12, cohort=3, devices=1, arrival=bernoulli(0.3))
    assert np.asarray(result.history["train/arrived"]).min() < 3
    assert np.abs(flat(result.states)).max() > 0.1
    assert gap(result) < 1e-12


def test_cost_is_that_of_fedavg():
    assert fb.cost(fb.feddyn(loss), start(), clients()).multiple == 2


@pytest.mark.parametrize(
    ("options", "word"),
    [({"alpha": 0}, "alpha"), ({"alpha": -1}, "alpha"), ({"client_lr": 0}, "client_lr"), ({"epochs": 0}, "epochs")],
)
def test_refusals(options, word):
    with pytest.raises(ValueError, match=word):
        fb.feddyn(loss, **options)
