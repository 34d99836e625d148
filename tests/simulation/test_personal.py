"""Evaluation of the clients' own models beside the global one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
import told
from fedbraid import transforms as tf
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import masked_mean
from fedbraid.metric import is_client_column
from fedbraid.simulation import personal, personal_evaluator, read_states

SIZES = (3, 0, 41, 7, 18, 1)


def loss(params, batch, key):
    return masked_mean(0.5 * (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2, batch["mask"])


def metrics(params, batch):
    residual = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return {
        "error": (jnp.abs(residual) * batch["mask"], batch["mask"]),
        "accuracy": ((jnp.abs(residual) < 1.0) * batch["mask"], batch["mask"]),
    }


def examples(sizes, seed):
    rng = np.random.default_rng(seed)
    draw = [rng.normal(size=(n, 2)).astype(np.float32) for n in sizes]
    return Split.from_clients([{"x": x, "y": (x.sum(1) + i).astype(np.float32)} for i, x in enumerate(draw)])


def data(ids=None):
    train, test = examples((4, 5, 3, 6, 4, 5), 0), examples(SIZES, 1)
    return FederatedData(train, test if ids is None else Split(test.arrays, test.offsets, ids))


def start():
    return {"w": jnp.zeros(2), "b": jnp.zeros(())}


def method(**options):
    return tf.private(fb.fedavg(loss, client_lr=0.1, batch_size=None, steps=3, **options), "b")


def by_hand(params_of, test):
    """Pooled error, and the error of each client, in NumPy."""
    total, number, each = 0.0, 0, []
    for i in range(test.num_clients):
        rows, params = test.client(i), params_of(i)
        errors = np.abs(rows["x"] @ np.asarray(params["w"]) + np.asarray(params["b"]) - rows["y"])
        total, number = total + errors.sum(), number + len(errors)
        each.append(errors.mean() if len(errors) else np.nan)
    return total / number, np.array(each)


def gini(values):
    values = values[np.isfinite(values)]
    return np.abs(values[:, None] - values).mean() / (2 * values.mean())


@pytest.mark.parametrize("engine", [{}, {"states_in": "host"}, {"states_in": "host", "data_in": "host"}])
def test_both_models_are_evaluated(engine, monkeypatch):
    """Chunks of two clients, blocks smaller than a client; clients that were never asked have their first state."""
    monkeypatch.setattr(personal, "MOST_CLIENTS", 4)
    federated, alg = data(), method()
    result = fb.simulate(
        alg, start(), federated, rounds=3, cohort=2, seed=3, metrics=metrics, eval_every=3, devices=1, **engine
    )
    states = read_states(result.states)(np.arange(6))
    biases = np.asarray(states.own.params["b"])
    assert (biases == 0).sum() >= 1  # a client that was never asked
    pooled, each = by_hand(lambda i: {"w": result.params["w"], "b": biases[i]}, federated.test)
    found = {name: column[-1] for name, column in result.evaluations.items()}
    assert found["test_personal_error"] == pytest.approx(pooled, rel=1e-5)
    assert found["test_personal_error_client_mean"] == pytest.approx(np.nanmean(each), rel=1e-5)
    assert found["test_personal_error_client_worst"] == pytest.approx(np.nanmax(each), rel=1e-5)
    assert found["test_personal_error_client_worst_tenth"] == pytest.approx(np.nanpercentile(each, 90), rel=1e-5)
    assert found["test_personal_error_client_deviation"] == pytest.approx(np.nanstd(each), rel=1e-5)
    assert found["test_personal_error_client_gini"] == pytest.approx(gini(each), rel=1e-5)
    pooled, each = by_hand(lambda i: {"w": result.params["w"], "b": 0.0}, federated.test)
    assert found["test_error"] == pytest.approx(pooled, rel=1e-5)
    assert found["test_error_client_gini"] == pytest.approx(gini(each), rel=1e-5)
    evaluate = personal_evaluator(metrics, alg, start(), federated.test)
    again = evaluate.by_client(result.server, read_states(result.states))
    assert again["test_personal_error"].shape == (6,)
    assert np.isnan(again["test_personal_error"][1])


def test_without_own_models_nothing_is_added():
    result = fb.simulate(fb.fedavg(loss), start(), data(), rounds=1, metrics=metrics)
    assert not any("personal" in name for name in result.evaluations)
    assert sum(is_client_column(name) for name in result.evaluations) == 10


def test_other_test_clients_are_said_once():
    personal._say_other_clients.cache_clear()
    other = data(ids=[f"other-{i}" for i in range(6)])
    with told.collecting() as notices:
        for _ in range(2):
            result = fb.simulate(method(), start(), other, rounds=1, metrics=metrics)
    assert not any("personal" in name for name in result.evaluations)
    assert "test_error" in result.evaluations
    assert len(notices) == 1
    assert "only the global model is evaluated" in notices[0]


def test_a_resumed_run_has_the_same_columns(tmp_path):
    federated, alg = data(), method()
    options = {"rounds": 4, "cohort": 2, "metrics": metrics, "eval_every": 2, "devices": 1}
    whole = fb.simulate(alg, start(), federated, **options)
    place = fb.simulation.Checkpoints(tmp_path / "checkpoints", every=1)
    fb.simulate(alg, start(), federated, checkpoints=place, on_progress=lambda now: now.round >= 3, **options)
    again = fb.simulate(alg, start(), federated, checkpoints=place._replace(resume=True), **options)
    assert list(again.evaluations["round"]) == [2, 4]
    for name, column in whole.evaluations.items():
        np.testing.assert_array_equal(again.evaluations[name], column)


def test_own_models_under_vmap():
    """A sweep is a vmap: the evaluation of own models is traced with it."""

    def run(rate):
        alg = tf.private(fb.fedavg(loss, client_lr=rate, batch_size=None, steps=3), "b")
        return fb.simulate(alg, start(), data(), rounds=2, metrics=metrics).evaluations["test_personal_error"]

    both = jax.vmap(run)(jnp.array([0.1, 0.05]))
    np.testing.assert_allclose(both[0], run(0.1), rtol=1e-5)
    assert abs(float(both[0, -1] - both[1, -1])) > 1e-3
