"""A fifth of the clients are attackers: robust reductions keep their accuracy on real digits, the mean does not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.core import StructureError, check_structure
from fedbraid.costs import data_shapes
from fedbraid.data import mark
from fedbraid.data.catalog import load
from fedbraid.models import build
from fedbraid.simulation import simulate
from fedbraid.transforms import attack, geometric_median, krum, median, multi_krum, norm_bound, trimmed_mean
from transforms.toy import holding, one_round, sending

RULES = {
    "mean": lambda alg: trimmed_mean(alg, trim=0.0),
    "median": median,
    "trimmed_mean": lambda alg: trimmed_mean(alg, trim=0.2),
    "geometric_median": lambda alg: geometric_median(alg, iterations=8),
    "krum": lambda alg: krum(alg, fraction=0.2),
    "multi_krum": lambda alg: multi_krum(alg, fraction=0.2),
    "norm_bound": lambda alg: norm_bound(alg, bound=0.7),
}
FACTORS = (100.0, -10.0, -1.0)


@pytest.fixture(scope="module")
def accuracy():
    """Test accuracy by (rule, factor). One compiled program per rule runs all factors."""
    data = mark(load("digits", alpha=10.0, clients=20), 0.2)
    model = build("mlp", {"x": (64,)}, 10, hidden=(32,))
    base = fb.fedavg(model.loss, client_lr=0.2, epochs=2)

    def run(rule, factor):
        alg = attack(RULES[rule](base), factor=factor)
        result = simulate(alg, model.init(jax.random.key(0)), data, rounds=25, metrics=model.metrics, devices=1)
        return result.evaluations["test_accuracy"][-1]

    found = {}
    for rule in RULES:
        factors = (1.0, *FACTORS) if rule == "mean" else FACTORS
        reached = jax.vmap(partial(run, rule))(jnp.array(factors)).tolist()
        found |= {(rule, factor): value for factor, value in zip(factors, reached, strict=True)}
    return found


@pytest.mark.parametrize("rule", [name for name in RULES if name != "mean"])
def test_a_robust_rule_keeps_within_five_points_of_the_clean_run(accuracy, rule):
    clean = accuracy["mean", 1.0]
    assert clean > 0.88
    for factor in FACTORS:
        assert accuracy[rule, factor] > clean - 0.05, (rule, factor)


def test_the_mean_does_not(accuracy):
    """Flipped but unscaled uploads only shorten its step by 40%, so the factor -1 is not tested here."""
    for factor in (100.0, -10.0):
        assert accuracy["mean", factor] < accuracy["mean", 1.0] - 0.05


def test_marked_clients_alone_lie():
    vectors = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    for opaque in (False, True):
        alg = attack(sending(3, aux=True, opaque=opaque), factor=-5.0)
        _, states, sent, _ = one_round(alg, {"x": jnp.zeros(3)}, mark(holding(vectors), [1, 3]))
        signs = np.array([1, -5, 1, -5])[:, None]
        np.testing.assert_array_equal(sent.pseudograd["x"], signs * vectors)
        np.testing.assert_array_equal(sent.aux["a"], -signs * vectors)
        np.testing.assert_array_equal(states, np.ones(4))


def test_marks_are_by_client_and_in_every_split():
    data = load("digits", clients=10)
    marked = mark(data, 0.3, seed=1)
    marked.check()
    by_client = [set(marked.train.client(i)["byzantine"].tolist()) for i in range(10)]
    assert sorted(map(sorted, by_client)) == [[0]] * 7 + [[1]] * 3
    assert not marked.test.arrays["byzantine"].any()
    assert "byzantine" not in data.train.arrays


def test_bad_input():
    with pytest.raises(ValueError, match="clients"):
        mark(holding(np.zeros((2, 3))), [2])
    with pytest.raises(ValueError, match="clients"):
        mark(holding(np.zeros((2, 3))), 1.5)
    with pytest.raises(StructureError, match="mark"):
        check_structure(attack(sending(3)), {"x": jnp.zeros(3)}, data_shapes(holding(np.zeros((2, 3)))))
