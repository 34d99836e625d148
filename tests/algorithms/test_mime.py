"""Mime and its variants against rounds written out by hand, and the identities of the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.algorithms._mime import PROTOCOLS
from fedbraid.algorithms.base_optimizers import BASES, base_optimizer, from_optax
from fedbraid.core import message_shapes
from fedbraid.costs import data_shapes
from fedbraid.simulation import simulate
from quadratic_clients import flat, quadratics
from told import told
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
Q = quadratics(clients())
LR = {"sgd": 0.05, "momentum": 0.05, "adam": 0.02, "adagrad": 0.05}


def by_hand(base, *, kind, protocol, rounds, cohort, K, lr, server_lr, weighting):
    """Algorithm 1 with full batches, client by client; the base's (U, V) have their own tests."""
    x = flat(start())
    s, c = base.init(jnp.asarray(x)), np.zeros(4)
    U = lambda g, s: np.asarray(base.update(jnp.asarray(g), s, None))  # noqa: E731
    V = lambda g, s: base.track(jnp.asarray(g), s, None)  # noqa: E731
    for t in range(rounds):
        first = address.cohort(0, t, 0, 5, cohort)
        second = address.cohort(0, t, 1, 5, cohort) if protocol == "split-cohort" else first
        w = Q.weights(weighting, first)
        gradient = sum(w_i * Q.gradient(i, x) for i, w_i in zip(first, w, strict=True))
        used = c if protocol == "lagged" else gradient
        moves = []
        for i in second:
            y, local = x, s
            for _ in range(K):
                g = Q.gradient(i, y) if kind == "mimelite" else Q.gradient(i, y) - Q.gradient(i, x) + used
                y = y - lr * U(g, local)
                if kind == "locmime":
                    local = V(g, local)
            moves.append(x - y)
        x = x - server_lr * Q.weights(weighting, second) @ np.array(moves)
        s, c = V(gradient, s), gradient
    return x


CASES = [
    ("mime", "momentum", "two-phase", "examples"),
    ("mime", "adam", "lagged", "uniform"),
    ("mime", "adagrad", "split-cohort", "examples"),
    ("mimelite", "adam", "split-cohort", "uniform"),
    ("mimelite", "momentum", "lagged", "examples"),
    ("locmime", "adam", "two-phase", "examples"),
    ("locmime", "momentum", "lagged", "uniform"),
]


@pytest.mark.parametrize(("kind", "base", "protocol", "weighting"), CASES)
def test_rounds_by_hand(kind, base, protocol, weighting):
    alg = getattr(fb, kind)(
        loss,
        base=base,
        client_lr=LR[base],
        server_lr=0.8,
        protocol=protocol,
        weighting=weighting,
        batch_size=None,
        steps=3,
    )
    result = simulate(alg, start(), clients(), rounds=4, cohort=3, devices=1)
    expected = by_hand(
        base_optimizer(base),
        kind=kind,
        protocol=protocol,
        rounds=4,
        cohort=3,
        K=3,
        lr=LR[base],
        server_lr=0.8,
        weighting=weighting,
    )
    np.testing.assert_allclose(flat(result.params), expected, 1e-9)


@pytest.mark.parametrize("base", list(BASES))
def test_one_full_batch_step_is_the_centralized_base_optimizer(base):
    """With all clients and K = 1, Mime is the base optimizer, step for step."""
    one = {"batch_size": None, "steps": 1}
    alg = fb.mime(loss, base=base, client_lr=LR[base], **one)
    result = simulate(alg, start(), clients(), rounds=6, devices=1)
    chosen, w = base_optimizer(base), Q.weights("examples")
    x = jnp.asarray(flat(start()))
    s = chosen.init(x)
    for _ in range(6):
        g = jnp.asarray(np.tensordot(w, Q.A, 1) @ np.asarray(x) - w @ Q.b)
        x, s = x - LR[base] * chosen.update(g, s, x), chosen.track(g, s, x)
    np.testing.assert_allclose(flat(result.params), x, 1e-10)


def test_mimelite_over_sgd_is_fedavg():
    """Bit for bit, with partial cohorts and ragged batches: clients send no gradient under any protocol."""
    ragged = {"batch_size": 2, "epochs": 2}
    for protocol in PROTOCOLS:
        lite = fb.mimelite(loss, base="sgd", client_lr=0.05, server_lr=0.7, protocol=protocol, **ragged)
        assert [exchange.name for exchange in lite.exchanges] == ["train"]
    average = fb.fedavg(loss, client_lr=0.05, server_lr=0.7, **ragged)
    a, b = (simulate(alg, start(), clients(), rounds=3, cohort=3, devices=1) for alg in (lite, average))
    np.testing.assert_array_equal(flat(a.params), flat(b.params))
    assert fb.cost(lite, start(), clients()).multiple == 2


def test_mimelite_does_not_care_whether_gradients_come_first():
    ragged = {"base": "momentum", "client_lr": 0.05, "batch_size": None, "steps": 2}
    one, two = (fb.mimelite(loss, protocol=p, **ragged) for p in ("lagged", "two-phase"))
    a, b = (simulate(alg, start(), clients(), rounds=3, cohort=3, devices=1) for alg in (one, two))
    np.testing.assert_allclose(flat(a.params), flat(b.params), 1e-12)
    assert fb.cost(one, start(), clients()).multiple < fb.cost(two, start(), clients()).multiple


@pytest.mark.parametrize(("base", "weighting"), [("sgd", "examples"), ("momentum", "uniform")])
def test_full_participation_arrives_at_the_optimum(base, weighting):
    """Exactly, on heterogeneous clients with mini-batches: at the optimum c = 0 and the correction has no noise."""
    ragged = {"batch_size": 2, "epochs": 1, "shuffle": False, "client_lr": 0.05, "weighting": weighting}
    result = simulate(fb.mime(loss, base=base, **ragged), start(), clients(), rounds=1500, devices=1)
    assert np.abs(flat(result.params) - Q.optimum(Q.weights(weighting))).max() < 1e-8


def test_a_round_whose_gradients_are_all_lost_leaves_the_statistics_alone():
    """The pass for the gradient is one step here and training three, so an arrival model can drop only one of them."""
    options = {"base": "adam", "client_lr": 0.02, "batch_size": None, "steps": 3}
    for protocol in ("two-phase", "split-cohort"):
        alg = fb.mime(loss, protocol=protocol, **options)
        first = alg.init(start())
        lost = simulate(alg, start(), clients(), rounds=3, devices=1, arrival=lambda key, steps: steps > 1)
        np.testing.assert_array_equal(flat(lost.server.s.m), flat(first.s.m))
        np.testing.assert_array_equal(flat(lost.server.s.v), flat(first.s.v))
        np.testing.assert_array_equal(flat(lost.params), flat(start()))  # c = 0: the model stays


def models(alg):
    return fb.cost(alg, start(), clients()).multiple


def test_table_4():
    """Communication of a pair of the split cohort, in models."""
    split = {"protocol": "split-cohort"}
    table = {
        ("mimelite", "momentum"): 5,
        ("mimelite", "adagrad"): 5,
        ("mimelite", "adam"): 6,
        ("mime", "momentum"): 6,
        ("mime", "adagrad"): 6,
        ("mime", "adam"): 7,
    }
    assert {(k, b): models(getattr(fb, k)(loss, base=b, **split)) for k, b in table} == table
    assert models(fb.fedavg(loss)) == 2
    pair = fb.cost(fb.mime(loss, base="adam", **split), start(), clients())
    model = pair.model
    assert [(e.name, e.down // model, e.up // model) for e in pair.exchanges] == [("gradient", 1, 1), ("train", 4, 1)]


def test_lagged_sends_once():
    """Algorithms 3 and 4: x, s, c down, y and a gradient up."""
    alg = fb.mime(loss, base="momentum", protocol="lagged")
    [message] = message_shapes(alg, start(), data_shapes(clients()))
    assert message.name == "train"
    assert models(alg) == 5
    assert models(fb.mimelite(loss, base="adam", protocol="lagged")) == 5


def test_split_cohort_asks_two_groups():
    alg = fb.mime(loss, protocol="split-cohort")
    assert [exchange.cohort for exchange in alg.exchanges] == ["fresh", "fresh"]
    assert any(set(address.cohort(0, t, 0, 5, 2)) != set(address.cohort(0, t, 1, 5, 2)) for t in range(5))


def test_rates_may_be_traced():
    def run(lr, beta):
        alg = fb.mime(loss, client_lr=lr, beta=beta, server_lr=lr * 10, batch_size=None, steps=2)
        return flat_traced(simulate(alg, start(), clients(), rounds=2).params)

    def flat_traced(params):
        return jnp.append(params["w"], params["b"])

    lrs, betas = jnp.array([0.01, 0.05]), jnp.array([0.9, 0.5])
    together = jax.vmap(run)(lrs, betas)
    np.testing.assert_allclose(together[1], run(float(lrs[1]), float(betas[1])), 1e-9)
    assert np.abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.parametrize("factory", [fb.mime, fb.mimelite, fb.locmime])
def test_a_base_that_is_not_linear_is_named_in_a_warning(factory):
    with told(match=f"{factory.__name__}.*'optax-adam'"):
        factory(loss, base=from_optax(optax.adam(0.01), name="optax-adam"))


@pytest.mark.parametrize("factory", [fb.mime, fb.mimelite, fb.locmime])
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"client_lr": 0}, "client_lr"),
        ({"client_lr": "fast"}, "client_lr"),
        ({"server_lr": -1}, "server_lr"),
        ({"protocol": "three-phase"}, "protocol"),
        ({"weighting": "rows"}, "weighting"),
        ({"base": "rmsprop"}, "base"),
        ({"base": "momentum", "beta": 1.5}, "beta"),
        ({"base": "momentum", "eps": 1e-3}, "eps"),
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 1, "steps": 1}, "epochs"),
    ],
)
def test_refusals(factory, options, word):
    with pytest.raises(ValueError, match=word):
        factory(loss, **options)
