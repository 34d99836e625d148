"""Scores after adaptation are compared with fine-tuning in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from closed_forms import loss, problem
from fedbraid import FederatedData, Split
from fedbraid.simulation.evaluate import client_values, summarize
from fedbraid.simulation.fine_tuning import FEDAVG_ROW, adaptation, compare_adapted, divide

pytestmark = pytest.mark.usefixtures("x64")

P = problem()
X = np.array([0.3, -1.2, 0.8])


def metrics(params, batch):
    error = (batch["x"] @ params - batch["y"]) ** 2
    return {"error": (error * batch["mask"], batch["mask"])}


def tuned(own, steps, lr, w=X):
    for _ in range(steps):
        w = w - lr * own["x"].T @ (own["x"] @ w - own["y"]) / len(own["y"])
    return w


def by_hand(support, query, steps, lr):
    """Summed squared errors of each client on its query set, before and after."""
    before, after = [], []
    for j in range(support.num_clients):
        test = query.client(j)
        w = tuned(support.client(j), steps, lr)
        before.append(np.sum((test["x"] @ X - test["y"]) ** 2))
        after.append(np.sum((test["x"] @ w - test["y"]) ** 2))
    return np.array(before), np.array(after)


def test_scores_are_fine_tuning_by_hand():
    scores = adaptation(loss, metrics, P.split, steps=4, lr=0.1, batch_size=None, support=0.6, seed=3)(jnp.asarray(X))
    support, query = divide(P.split, 0.6, seed=3)
    before, after = by_hand(support, query, 4, 0.1)
    np.testing.assert_allclose(scores["error"], [before, query.sizes], rtol=1e-10)
    np.testing.assert_allclose(scores["adapted_error"], [after, query.sizes], rtol=1e-10)
    row = summarize(scores, "")  # over all examples, and over clients
    np.testing.assert_allclose(row["adapted_error"], after.sum() / query.num_examples, rtol=1e-10)
    np.testing.assert_allclose(row["adapted_error_client_mean"], np.mean(after / query.sizes), rtol=1e-10)
    np.testing.assert_allclose(row["adapted_error_client_worst"], np.max(after / query.sizes), rtol=1e-10)


def test_training_clients_adapt_on_their_training_examples():
    other = problem(sizes=(3, 5, 4, 6), seed=0)
    test = Split.from_clients(
        [other.split.client(j) if j != 2 else {k: v[:0] for k, v in other.split.client(2).items()} for j in range(4)]
    )  # client 2 has no query examples
    data = FederatedData(P.split, test)
    scores = adaptation(loss, metrics, data, steps=3, lr=0.05, batch_size=None)(jnp.asarray(X))
    before, after = by_hand(P.split, test, 3, 0.05)
    np.testing.assert_allclose(scores["error"], [before, test.sizes], rtol=1e-10)
    np.testing.assert_allclose(scores["adapted_error"], [after, test.sizes], rtol=1e-10)
    assert np.isnan(client_values(scores)["adapted_error"]).tolist() == [False, False, True, False]
    assert np.isfinite(summarize(scores)["test_adapted_error_client_mean"])


def test_batches_are_of_the_support_set_alone_and_the_same_for_every_model():
    """The query examples have extreme values: one training step on any of them would move the model far away."""
    rows = Split({**P.split.arrays, "row": np.arange(P.split.num_examples)}, P.split.offsets)
    _, query = divide(rows, 0.5, seed=1)
    y = np.array(rows.arrays["y"])
    y[query.arrays["row"]] = 1e8
    poisoned = Split({**rows.arrays, "y": y}, rows.offsets)

    def size(params, batch):
        return {"size": (jnp.linalg.norm(params) * batch["mask"], batch["mask"])}

    adapt = adaptation(loss, size, poisoned, steps=20, lr=0.02, batch_size=2, support=0.5, seed=1)
    sums, weights = adapt(jnp.asarray(X))["adapted_size"]
    assert np.all(sums / weights < 1e3)
    assert np.all(sums / weights != np.linalg.norm(X))
    np.testing.assert_array_equal(adapt(jnp.asarray(X))["adapted_size"][0], sums)


def test_division():
    split = Split.from_clients([{"row": np.arange(n) + 100 * n} for n in (1, 2, 7)], ids=("a", "b", "c"))
    support, query = divide(split, 0.3, seed=0)
    assert support.sizes.tolist() == [1, 1, 2]
    assert query.sizes.tolist() == [0, 1, 5]
    for j in range(3):
        both = np.concatenate([support.client(j)["row"], query.client(j)["row"]])
        assert sorted(both) == sorted(split.client(j)["row"])
    assert support.ids == query.ids == ("a", "b", "c")
    assert divide(split, 0.3, seed=0)[0].arrays["row"].tolist() == support.arrays["row"].tolist()
    assert any(
        divide(split, 0.3, seed=s)[0].arrays["row"].tolist() != support.arrays["row"].tolist() for s in (1, 2, 3)
    )


def test_a_comparison_always_has_fedavg():
    adapt = adaptation(loss, metrics, P.split, steps=4, batch_size=None)
    table = compare_adapted(adapt, jnp.zeros(3), {"maml": jnp.asarray(X)})
    assert list(table) == [FEDAVG_ROW, "maml"]
    expected = summarize(adapt(jnp.asarray(X)), "")
    assert table["maml"]["adapted_error"] == pytest.approx(float(expected["adapted_error"]))
    with pytest.raises(ValueError, match="FedAvg"):
        compare_adapted(adapt, jnp.zeros(3), {FEDAVG_ROW: jnp.zeros(3)})


def test_refusals():
    for options, word in (({"steps": 0}, "steps"), ({"lr": -1.0}, "lr"), ({"support": 1.0}, "support")):
        with pytest.raises(ValueError, match=word):
            adaptation(loss, metrics, P.split, **options)
    with pytest.raises(ValueError, match="unseen"):
        adaptation(loss, metrics, FederatedData(P.split))
    strangers = FederatedData(P.split, problem(sizes=(3, 3)).split)
    with pytest.raises(ValueError, match="unseen"):
        adaptation(loss, metrics, strangers)
    with pytest.raises(ValueError, match="query"):
        adaptation(loss, metrics, Split.from_clients([{"x": np.ones((1, 3)), "y": np.ones(1)}]))
