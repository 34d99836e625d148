"""SCAFFOLD against its Algorithm 1 written out, its invariant, and its limit."""

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
RAGGED = {"batch_size": 2, "epochs": 1, "shuffle": False, "client_lr": 0.05}


def algorithm_1(*, option, K, lr, server_lr, rounds, cohort, weighting):
    """With full batches, in the paper's form."""
    x, c, own = flat(start()), np.zeros(4), np.zeros((5, 4))
    for t in range(rounds):
        ids = address.cohort(0, t, 0, 5, cohort)
        models, renewed = [], []
        for i in ids:
            y = x
            for _ in range(K):
                y = y - lr * (Q.gradient(i, y) - own[i] + c)
            models.append(y)
            renewed.append(Q.gradient(i, x) if option == "I" else own[i] - c + (x - y) / (K * lr))
        x = x + server_lr * Q.weights(weighting, ids) @ (np.array(models) - x)
        c = c + len(ids) / 5 * np.mean(np.array(renewed) - own[ids], 0)
        own[ids] = renewed
    return x, c, own


@pytest.mark.parametrize(("option", "weighting"), [("I", "examples"), ("II", "uniform")])
def test_algorithm_1(option, weighting):
    settings = {"option": option, "server_lr": 0.8, "weighting": weighting}
    alg = fb.scaffold(loss, client_lr=0.05, batch_size=None, steps=3, **settings)
    result = simulate(alg, start(), clients(), rounds=5, cohort=3, devices=1)
    x, c, own = algorithm_1(K=3, lr=0.05, rounds=5, cohort=3, **settings)
    np.testing.assert_allclose(flat(result.params), x, 1e-9)
    np.testing.assert_allclose(flat(result.server.c), c, 1e-9)
    np.testing.assert_allclose(flat(result.states), own, 1e-9, 1e-12)


def gap(result):
    """The distance of c from the mean of all clients' c_i."""
    return np.abs(flat(result.server.c) - flat(result.states).mean(0)).max()


@pytest.mark.parametrize("option", ["I", "II"])
def test_c_is_the_mean_of_the_c_i_under_dropouts(option):
    """Also with updates weighted by examples: a client whose upload is lost keeps its c_i; |S| counts the others."""
    alg = fb.scaffold(loss, option=option, weighting="examples", **RAGGED)
    result = simulate(alg, start(), clients(), rounds=12, cohort=3, devices=1, arrival=bernoulli(0.3))
    heard = np.asarray(result.history["train/arrived"])
    assert heard.min() < 3
    assert np.abs(flat(result.states)).max() > 0.1
    assert gap(result) < 1e-12


def rounded(alg, *, reconciled):
    """The algorithm with uploads rounded to a coarse grid."""

    def change(exchange):
        def coarse(report, down, state, key):
            got = jax.tree.map(lambda leaf: jnp.round(leaf * 4) / 4, report.up)
            state = exchange.reconcile(report.state, report.up, got) if reconciled else report.state
            return report._replace(up=got, state=state)

        return exchange._replace(client=map_report(exchange.client, coarse))

    return change_exchanges(alg, ["train"], change)


def test_reconcile_keeps_the_invariant_when_uploads_are_changed():
    alg = fb.scaffold(loss, **RAGGED)
    with_, without = (
        simulate(rounded(alg, reconciled=r), start(), clients(), rounds=6, cohort=3, devices=1) for r in (True, False)
    )
    assert gap(with_) < 1e-12
    assert gap(without) > 1e-3


@pytest.mark.parametrize(("option", "weighting"), [("I", "uniform"), ("II", "examples")])
def test_it_arrives_at_the_optimum_of_the_unweighted_mean(option, weighting):
    """For any weighting of the updates, because c = 0 at a fixed point. FedAvg has another limit."""
    local = {"batch_size": None, "steps": 4, "client_lr": 0.05, "weighting": weighting}
    result = simulate(fb.scaffold(loss, option=option, **local), start(), clients(), rounds=1500, devices=1)
    optimum = Q.optimum(Q.weights("uniform"))
    assert np.abs(flat(result.params) - optimum).max() < 1e-8
    for i in range(5):
        np.testing.assert_allclose(flat(result.states)[i], Q.gradient(i, optimum), atol=1e-7)
    S = [np.eye(4) - np.linalg.matrix_power(np.eye(4) - 0.05 * A, 4) for A in Q.A]  # FedAvg's step towards each optimum
    w = Q.weights(weighting)
    own = [np.linalg.lstsq(A, b, rcond=None)[0] for A, b in zip(Q.A, Q.b, strict=True)]
    stop = np.linalg.solve(np.tensordot(w, S, 1), sum(w_i * S_i @ o for w_i, S_i, o in zip(w, S, own, strict=True)))
    assert np.abs(stop - optimum).max() > 1e-2


def test_partial_cohorts_still_arrive():
    local = {"batch_size": None, "steps": 2, "client_lr": 0.05}
    result = simulate(fb.scaffold(loss, **local), start(), clients(), rounds=3000, cohort=3, devices=1)
    assert np.abs(flat(result.params) - Q.optimum(Q.weights("uniform"))).max() < 1e-8


def test_cost_is_four_models():
    for option in ("I", "II"):
        assert fb.cost(fb.scaffold(loss, option=option), start(), clients()).multiple == 4


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"client_lr": 0}, "client_lr"),
        ({"server_lr": -1}, "server_lr"),
        ({"option": "III"}, "option"),
        ({"option": 2}, "option"),
        ({"weighting": "rows"}, "weighting"),
        ({"steps": 0}, "steps"),
    ],
)
def test_refusals(options, word):
    with pytest.raises(ValueError, match=word):
        fb.scaffold(loss, **options)
