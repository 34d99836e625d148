"""Variance-reduced momentum: Algorithm 5 as printed, and the simpler methods that it contains."""

import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.algorithms._mime import PROTOCOLS
from fedbraid.data.federated import Split
from fedbraid.simulation import simulate
from quadratic_clients import flat, quadratics
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
Q = quadratics(clients())
RAGGED = {"batch_size": 2, "epochs": 2, "shuffle": False, "client_lr": 0.05}


def mean_gradient(ids, weighting, x):
    w = Q.weights(weighting, ids)
    return sum(w_i * Q.gradient(i, x) for i, w_i in zip(ids, w, strict=True))


def algorithm_5(*, lite, a, lr, server_lr, K, rounds, cohort, weighting, anchor):
    """With full batches, in the paper's form: d is not simplified, m and c are not merged."""
    x, older = flat(start()), flat(start())
    m, c = np.zeros(4), np.zeros(4)
    for t in range(rounds):
        ids = address.cohort(0, t, 0, 5, cohort)
        point = older if anchor == "previous" else x
        models = []
        for i in ids:
            y = x
            for _ in range(K):
                svrg = Q.gradient(i, y) - Q.gradient(i, point) + c
                fresh = Q.gradient(i, y) if lite else svrg
                d = a * fresh + (1 - a) * m + (1 - a) * (Q.gradient(i, y) - Q.gradient(i, point))
                y = y - lr * d
            models.append(y)
        new, old = mean_gradient(ids, weighting, x), mean_gradient(ids, weighting, older)
        m = a * new + (1 - a) * m + (1 - a) * (new - old)
        c = new
        x, older = x - server_lr * Q.weights(weighting, ids) @ (x - np.array(models)), x
    return x


@pytest.mark.parametrize(
    ("lite", "anchor", "weighting"),
    [(False, "current", "uniform"), (False, "previous", "examples"), (True, "current", "examples")],
)
def test_algorithm_5(lite, anchor, weighting):
    factory = fb.mimelite_mvr if lite else fb.mime_mvr
    options = {"a": 0.3, "server_lr": 0.9, "weighting": weighting, "anchor": anchor}
    alg = factory(loss, client_lr=0.05, batch_size=None, steps=3, **options)
    result = simulate(alg, start(), clients(), rounds=5, cohort=3, devices=1)
    expected = algorithm_5(lite=lite, lr=0.05, K=3, rounds=5, cohort=3, **options)
    assert np.abs(expected - flat(start())).max() > 1e-2
    np.testing.assert_allclose(flat(result.params), expected, 1e-9)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_of_one_is_mime_over_sgd(protocol):
    """With every protocol, partial cohorts and ragged batches; without c it is FedAvg."""
    mvr = fb.mime_mvr(loss, a=1.0, protocol=protocol, **RAGGED)
    mime = fb.mime(loss, base="sgd", protocol=protocol, **RAGGED)
    a, b = (simulate(alg, start(), clients(), rounds=3, cohort=3, devices=1) for alg in (mvr, mime))
    assert np.abs(flat(b.params) - flat(start())).max() > 1e-3
    np.testing.assert_allclose(flat(a.params), flat(b.params), 1e-10)


def test_a_of_one_without_c_is_fedavg():
    a, b = (
        simulate(alg, start(), clients(), rounds=3, cohort=3, devices=1)
        for alg in (fb.mimelite_mvr(loss, a=1.0, **RAGGED), fb.fedavg(loss, **RAGGED))
    )
    np.testing.assert_allclose(flat(a.params), flat(b.params), 1e-10)


def test_fresh_pair_by_hand():
    """Two cohorts: c and m from this round's gradient cohort give the direction of this round's update cohort."""
    a, lr = 0.4, 0.05
    alg = fb.mime_mvr(loss, a=a, client_lr=lr, protocol="split-cohort", batch_size=None, steps=2)
    result = simulate(alg, start(), clients(), rounds=4, cohort=3, devices=1)
    x, older, m = flat(start()), flat(start()), np.zeros(4)
    for t in range(4):
        first, second = (address.cohort(0, t, e, 5, 3) for e in (0, 1))
        c, old = mean_gradient(first, "examples", x), mean_gradient(first, "examples", older)
        m = a * c + (1 - a) * (m + c - old)
        models = []
        for i in second:
            y = x
            for _ in range(2):
                y = y - lr * (Q.gradient(i, y) - Q.gradient(i, x) + a * c + (1 - a) * m)
            models.append(y)
        x, older = Q.weights("examples", second) @ np.array(models), x
    np.testing.assert_allclose(flat(result.params), x, 1e-9)


@pytest.mark.parametrize(
    ("factory", "protocol"),
    [
        (fb.mime_mvr, "lagged"),
        (fb.mime_mvr, "two-phase"),
        (fb.mimelite_mvr, "lagged"),
        (fb.mimelite_mvr, "split-cohort"),
    ],
)
def test_the_warm_up_computes_the_mean_gradient_at_the_start(factory, protocol):
    """m_0 = 1 / (T_0 S) sum of the cohorts' gradients at x_0 (proof of Theorem V); the model does not move."""
    options = {"a": 0.3, "client_lr": 0.05, "batch_size": None, "steps": 2, "protocol": protocol}
    alg = factory(loss, warmup=4, weighting="uniform", **options)
    result = simulate(alg, start(), clients(), rounds=4, cohort=3, devices=1)
    cohorts = [address.cohort(0, t, 0, 5, 3) for t in range(4)]
    expected = np.mean([Q.gradient(i, flat(start())) for ids in cohorts for i in ids], axis=0)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_array_equal(flat(result.params), flat(start()))
    np.testing.assert_allclose(flat(result.server.m), expected, 1e-12, 1e-14)


@pytest.mark.parametrize("lite", [False, True])
def test_after_the_warm_up_algorithm_5_goes_on_from_m_0(lite):
    """Two rounds of warm-up, three of training, with the equations as printed."""
    a, lr, K, warmup = 0.3, 0.05, 3, 2
    factory = fb.mimelite_mvr if lite else fb.mime_mvr
    alg = factory(loss, a=a, client_lr=lr, batch_size=None, steps=K, warmup=warmup)
    result = simulate(alg, start(), clients(), rounds=warmup + 3, cohort=3, devices=1)
    x, older = flat(start()), flat(start())
    cohorts = [address.cohort(0, t, 0, 5, 3) for t in range(warmup + 3)]
    means = [mean_gradient(ids, "examples", x) for ids in cohorts[:warmup]]
    m, c = np.mean(means, axis=0), means[-1]
    for ids in cohorts[warmup:]:
        models = []
        for i in ids:
            y = x
            for _ in range(K):
                svrg = Q.gradient(i, y) - Q.gradient(i, x) + c
                fresh = Q.gradient(i, y) if lite else svrg
                y = y - lr * (a * fresh + (1 - a) * m + (1 - a) * (Q.gradient(i, y) - Q.gradient(i, x)))
            models.append(y)
        new, old = mean_gradient(ids, "examples", x), mean_gradient(ids, "examples", older)
        m, c = a * new + (1 - a) * m + (1 - a) * (new - old), new
        x, older = Q.weights("examples", ids) @ np.array(models), x
    np.testing.assert_allclose(flat(result.params), x, 1e-9)


CONSTANTS = {"smoothness": 3.0, "delta": 0.5, "G2": 2.0, "gap": 1.5, "sampled": 3, "rounds": 2}


@pytest.mark.parametrize("lite", [False, True])
def test_a_recipe_is_the_rate_the_momentum_and_the_warm_up_of_the_theorems(lite):
    factory = fb.mimelite_mvr if lite else fb.mime_mvr
    local = {"batch_size": None, "steps": 4}
    by_recipe = factory(loss, recipe=CONSTANTS | ({"sigma2": 0.7} if lite else {}), **local)
    noise = 2.0 + 0.7 if lite else 2.0 / 3
    eta = min(1 / 3, 1 / (864 * 0.5 * 4), (1.5 / (6936 * 4**3 * 2 * 0.5**2 * noise)) ** (1 / 3))
    by_hand = factory(loss, client_lr=eta, a=max(2592 * (eta * 0.5 * 4) ** 2, 1 / 2), warmup=2, **local)
    one, other = (simulate(alg, start(), clients(), rounds=5, cohort=3, devices=1) for alg in (by_recipe, by_hand))
    assert np.abs(flat(one.params) - flat(start())).max() > 1e-4
    np.testing.assert_allclose(flat(one.params), flat(other.params), 1e-12)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"recipe": CONSTANTS}, "steps"),
        ({"recipe": CONSTANTS, "steps": 4, "client_lr": 0.1 + 0}, "leave"),
        ({"recipe": CONSTANTS, "steps": 4, "a": 0.5}, "leave"),
        ({"recipe": {"smoothness": 1.0}, "steps": 4}, "'delta'"),
        ({"recipe": CONSTANTS | {"L": 1.0}, "steps": 4}, "'L'"),
        ({"recipe": CONSTANTS | {"gap": -1.0}, "steps": 4}, "gap"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_recipes_and_warm_ups_are_checked(options, word):
    for factory in (fb.mime_mvr, fb.mimelite_mvr):
        with pytest.raises(ValueError, match=word):
            factory(loss, **options)


def test_server_only_error_decays_when_clients_are_alike():
    """Then m_t - grad f(x_{t-1}) = (1 - a)^t (0 - grad f(x_0)): (16) averages only the noise."""
    one = clients().client(1)
    alike, a, rounds = Split.from_clients([one, one, one]), 0.3, 6
    result = simulate(fb.server_only_mvr(loss, a=a, lr=0.1), start(), alike, rounds=rounds, cohort=2, devices=1)
    q = quadratics(alike)
    error = flat(result.server.m) - q.gradient(0, flat(result.server.previous))
    np.testing.assert_allclose(error, -((1 - a) ** rounds) * q.gradient(0, flat(start())), 1e-9)


def test_server_only_by_hand():
    a, lr = 0.3, 0.1
    result = simulate(fb.server_only_mvr(loss, a=a, lr=lr), start(), clients(), rounds=5, cohort=3, devices=1)
    x, older, m = flat(start()), flat(start()), np.zeros(4)
    for t in range(5):
        ids = address.cohort(0, t, 0, 5, 3)
        new, old = mean_gradient(ids, "examples", x), mean_gradient(ids, "examples", older)
        m = new + (1 - a) * (m - old)
        x, older = x - lr * m, x
    np.testing.assert_allclose(flat(result.params), x, 1e-10)


def test_messages_carry_nothing_twice():
    cost = {
        name: [(e.down // c.model, e.up // c.model) for e in c.exchanges]
        for name, c in {
            "mime": fb.cost(fb.mime_mvr(loss), start(), clients()),
            "lite": fb.cost(fb.mimelite_mvr(loss), start(), clients()),
            "split": fb.cost(fb.mime_mvr(loss, protocol="split-cohort"), start(), clients()),
            "server": fb.cost(fb.server_only_mvr(loss), start(), clients()),
        }.items()
    }
    assert cost == {"mime": [(3, 3)], "lite": [(3, 2)], "split": [(2, 2), (2, 1)], "server": [(2, 1)]}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"a": 1.1}, "a must"),
        ({"a": -0.1}, "a must"),
        ({"client_lr": 0}, "client_lr"),
        ({"server_lr": -1}, "server_lr"),
        ({"protocol": "eager"}, "protocol"),
        ({"anchor": "next"}, "anchor"),
        ({"anchor": "previous", "protocol": "two-phase"}, "anchor"),
        ({"weighting": "rows"}, "weighting"),
    ],
)
def test_refusals(options, word):
    for factory in (fb.mime_mvr, fb.mimelite_mvr):
        with pytest.raises(ValueError, match=word):
            factory(loss, **options)


def test_server_only_refusals():
    for options, word in (({"a": 2}, "a must"), ({"lr": -1}, "lr"), ({"batch_size": 0}, "batch_size")):
        with pytest.raises(ValueError, match=word):
            fb.server_only_mvr(loss, **options)
