"""Mistakes that would give wrong numbers are refused before training starts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.local import masked_mean
from fedbraid.simulation.padding import _checked
from told import told

RNG = np.random.default_rng(0)


def clients(*sizes: int) -> fb.Split:
    return fb.Split.from_clients(
        [{"x": RNG.normal(size=(n, 3)).astype(np.float32), "y": np.ones(n, np.float32)} for n in sizes]
    )


def errors(params, batch):
    return (batch["x"] @ params - batch["y"]) ** 2


def masked(params, batch, key):
    return masked_mean(errors(params, batch), batch["mask"])


def unmasked(params, batch, key):
    return jnp.mean(errors(params, batch))


@pytest.fixture(autouse=True)
def _fresh():
    _checked.clear()


# --- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [fb.fedavg, fb.fedprox, fb.scaffold, fb.mimelite], ids=lambda m: m.__name__)
def test_a_loss_that_ignores_the_mask_is_refused(method):
    options = {"alpha": 0.1} if method is fb.fedprox else {}
    with pytest.raises(
        ValueError, match=r"loss depends on padding.*client 1 has 5 examples, so its last batch of 4 rows has 3"
    ):
        fb.simulate(method(unmasked, batch_size=4, **options), jnp.zeros(3), clients(8, 5), rounds=1)
    fb.simulate(method(masked, batch_size=4, **options), jnp.zeros(3), clients(8, 5), rounds=1)


def test_without_padding_a_plain_mean_is_right_and_accepted():
    fb.simulate(fb.fedavg(unmasked, batch_size=4), jnp.zeros(3), clients(8, 4), rounds=1)


def test_whole_clients_of_different_sizes_are_padded():
    with pytest.raises(ValueError, match="loss depends on padding"):
        fb.simulate(fb.fedavg(unmasked, batch_size=None), jnp.zeros(3), clients(8, 5), rounds=1)


def test_batch_statistics_depend_on_padding():
    def normalised(params, batch, key):
        x = (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)
        return masked_mean((x @ params - batch["y"]) ** 2, batch["mask"])

    with pytest.raises(ValueError, match="do not normalise over the batch"):
        fb.simulate(fb.fedavg(normalised, batch_size=4), jnp.zeros(3), clients(8, 5), rounds=1)


def test_losses_under_traced_rates_are_checked_too():
    def run(rate):
        return fb.simulate(
            fb.fedavg(unmasked, client_lr=rate, batch_size=4), jnp.zeros(3), clients(8, 5), rounds=1
        ).params

    with pytest.raises(ValueError, match="loss depends on padding"):
        jax.vmap(run)(jnp.array([0.1, 0.2]))


def test_losses_see_preprocessed_batches():
    data = fb.FederatedData(clients(8, 5), preprocess=fb.data.Pipeline.of({"name": "scale", "factor": 2.0}))
    fb.simulate(fb.fedavg(masked, batch_size=4), jnp.zeros(3), data, rounds=1)
    with pytest.raises(ValueError, match="loss depends on padding"):
        fb.simulate(fb.fedavg(unmasked, batch_size=4), jnp.zeros(3), data, rounds=1)


# --- metrics ---------------------------------------------------------------------------------------------------------

WRONG = {
    "a mean": (
        lambda p, b: {"accuracy": (errors(p, b).mean(), b["mask"].mean())},
        r"sums of metric 'accuracy' have shape \(\)",
    ),
    "one number per example": (
        lambda p, b: {"loss": errors(p, b)},
        r"'loss' is an array of shape \(B,\) instead of a pair",
    ),
    "weights of another shape": (
        lambda p, b: {"loss": (errors(p, b), b["mask"].sum())},
        r"weights of metric 'loss' have shape \(\)",
    ),
    "a matrix": (lambda p, b: {"loss": (b["x"], b["x"])}, r"have shape \(B, 3\)"),
    "a number": (lambda p, b: errors(p, b).mean(), "metrics returned a"),
}


@pytest.mark.parametrize("what", WRONG)
def test_metrics_of_the_wrong_shape_are_refused_before_training(what):
    metrics, message = WRONG[what]
    data = fb.FederatedData(clients(8, 5), test=clients(3, 4))
    with pytest.raises(ValueError, match=message) as refused:
        fb.simulate(fb.fedavg(masked, batch_size=4), jnp.zeros(3), data, rounds=1, metrics=metrics)
    assert "must return {name: (sums, weights)}" in str(refused.value)


def test_use_cores_after_jax_has_started_is_said():
    there = jax.local_device_count()
    with told(rf"use_cores\({there + 4}\) has no effect: jax has already started with {there} devices"):
        assert fb.use_cores(there + 4) == there


# --- columns of a result ---------------------------------------------------------------------------------------------


def test_a_missing_column_is_an_error_with_the_columns_and_the_nearest_one():
    def metrics(params, batch):
        return {"squared_error": (errors(params, batch), batch["mask"])}

    data = fb.FederatedData(clients(4, 4), clients(2, 2), name="two")

    def run(rate):
        algorithm = fb.fedavg(masked, client_lr=rate, batch_size=None)
        return fb.simulate(algorithm, jnp.zeros(3), data, rounds=2, metrics=metrics)

    for result in (run(0.1), jax.vmap(run)(jnp.array([0.01, 0.1]))):
        with pytest.raises(
            KeyError, match=r"no column 'squared_error'; did you mean 'test_squared_error'\?.*: round, "
        ):
            result.evaluations["squared_error"]
        with pytest.raises(KeyError, match="no column 'loss'; did you mean 'train/loss'"):
            result.history["loss"]
        assert result.evaluations.get("squared_error") is None
        assert "squared_error" not in result.evaluations
    one, both = run(0.1), jax.vmap(run)(jnp.array([0.01, 0.1]))
    np.testing.assert_allclose(both.evaluations["test_squared_error"][1], one.evaluations["test_squared_error"], 1e-6)
    plain = fb.simulate(fb.fedavg(masked, batch_size=None), jnp.zeros(3), data, rounds=1)
    with pytest.raises(KeyError, match="there are no columns: the run was not evaluated"):
        plain.evaluations["test_loss"]
