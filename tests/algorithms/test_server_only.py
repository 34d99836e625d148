"""The centralized reference: full gradients for any batch size, and any base optimizer on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbraid as fb
from fedbraid.algorithms.base_optimizers import base_optimizer, from_optax
from fedbraid.simulation import simulate
from quadratic_clients import flat, quadratics
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
Q = quadratics(clients())


def centralized(base, weighting, rounds, lr):
    """The base optimizer on the exact gradient of the weighted objective, in plain Python."""
    weights = Q.weights(weighting)
    x = jnp.asarray(flat(start()))
    s = base.init(x)
    for _ in range(rounds):
        g = jnp.asarray(sum(w * Q.gradient(i, np.asarray(x)) for i, w in enumerate(weights)))
        x, s = x - lr * base.update(g, s, x), base.track(g, s, x)
    return np.asarray(x)


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_full_participation_is_the_centralized_method(batch_size, weighting):
    alg = fb.server_only(loss, base="adam", lr=0.05, weighting=weighting, batch_size=batch_size)
    result = simulate(alg, start(), clients(), rounds=5, devices=1)
    expected = centralized(base_optimizer("adam"), weighting, 5, 0.05)
    np.testing.assert_allclose(flat(result.params), expected, 1e-10)


def test_an_optax_optimizer_serves_without_a_warning():
    alg = fb.server_only(loss, base=from_optax(optax.adam(0.05)), weighting="uniform")
    result = simulate(alg, start(), clients(), rounds=4, devices=1)
    tx, x = optax.adam(0.05), jnp.asarray(flat(start()))
    state = tx.init(x)
    for _ in range(4):
        g = jnp.asarray(np.mean([Q.gradient(i, np.asarray(x)) for i in range(5)], 0))
        updates, state = tx.update(g, state, x)
        x = optax.apply_updates(x, updates)
    np.testing.assert_allclose(flat(result.params), x, 1e-10)


def test_reported_loss_is_the_loss_at_the_model_sent():
    result = simulate(fb.server_only(loss, batch_size=2), start(), clients(), rounds=1, devices=1)
    pooled = {k: jnp.asarray(v) for k, v in clients().arrays.items()}
    pooled["mask"] = jnp.ones(len(pooled["y"]))
    np.testing.assert_allclose(result.history["train/loss"][0], loss(start(), pooled, jax.random.key(0)), 1e-6)


def test_it_costs_as_much_as_fedavg():
    assert fb.cost(fb.server_only(loss, base="adam"), start(), clients()).multiple == 2
