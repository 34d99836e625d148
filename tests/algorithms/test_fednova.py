"""FedNova and FedAvg: their limits in closed form when clients take unequal numbers of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.data.federated import Split
from fedbraid.local import masked_mean
from fedbraid.simulation import simulate

pytestmark = pytest.mark.usefixtures("x64")

# every example of a client is the same quadratic 0.5 (x - e)' diag(a) (x - e): batches have no noise. With one example
# per batch, a client of n examples takes n steps
STEPS = np.array([1, 6, 2])
A = np.array([[1.0, 2.0], [2.0, 0.5], [0.6, 1.5]])
E = np.array([[0.0, 1.0], [3.0, -2.0], [-1.0, 4.0]])
DATA = Split.from_clients(
    [{"a": np.tile(a, (n, 1)), "e": np.tile(e, (n, 1))} for a, e, n in zip(A, E, STEPS, strict=True)]
)
SINGLE = {"batch_size": 1, "epochs": 1, "shuffle": False}
START = np.array([0.5, 0.5])


def loss(params, batch, key):
    return masked_mean(0.5 * jnp.sum(batch["a"] * (params - batch["e"]) ** 2, -1), batch["mask"])


def run(alg, rounds, **options):
    return np.asarray(simulate(alg, jnp.asarray(START), DATA, rounds=rounds, devices=1, **options).params)


def stop(pull, weights):
    """Where sum_i w_i pull_i (x - e_i) = 0, coordinate by coordinate."""
    return (weights @ (pull * E)) / (weights @ pull)


def weights_of(weighting):
    return STEPS / STEPS.sum() if weighting == "examples" else np.full(3, 1 / 3)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_stops_in_closed_form(weighting):
    lr, w = 0.1, weights_of(weighting)
    moves = 1 - (1 - lr * A) ** STEPS[:, None]  # a client's update, as a share of the way to its own optimum
    average = run(fb.fedavg(loss, client_lr=lr, weighting=weighting, **SINGLE), 600)
    nova = run(fb.fednova(loss, client_lr=lr, weighting=weighting, **SINGLE), 600)
    np.testing.assert_allclose(average, stop(moves, w), atol=1e-9)
    np.testing.assert_allclose(nova, stop(moves / STEPS[:, None], w), atol=1e-9)


def test_the_objective_is_consistent_as_the_rate_goes_to_zero():
    """FedNova's error goes to 0 with the learning rate; FedAvg's goes to that of the objective weighted by steps."""
    w = weights_of("uniform")
    optimum, by_steps = stop(A, w), stop(A, w * STEPS)
    assert np.abs(optimum - by_steps).max() > 0.5
    rates = jnp.array([0.02, 0.002])

    def stops(make):
        def one(lr):
            alg = make(loss, client_lr=lr, weighting="uniform", **SINGLE)
            return simulate(alg, jnp.asarray(START), DATA, rounds=6000, devices=1).params

        return np.asarray(jax.vmap(one)(rates))

    nova, average = stops(fb.fednova), stops(fb.fedavg)
    error = np.abs(nova - optimum).max(1)
    assert error[1] < 0.01
    assert 8 < error[0] / error[1] < 12  # first order in the learning rate
    drift = np.abs(average - by_steps).max(1)
    assert 8 < drift[0] / drift[1] < 12
    assert np.abs(average - optimum).max(1).min() > 0.5


def test_equal_steps_are_fedavg():
    local = {"client_lr": 0.1, "server_lr": 0.9, "batch_size": None, "steps": 3}
    np.testing.assert_allclose(run(fb.fednova(loss, **local), 3), run(fb.fedavg(loss, **local), 3), 1e-12)


def coefficients(steps, *, rho, pull):
    """The weights a_k of the local gradients in a client's update: the recursion with symbols instead of gradients."""
    total, u = np.zeros(steps), np.zeros(steps)
    for k in range(steps):
        g = np.eye(steps)[k] - pull * total  # y - x = -lr * total
        u = rho * u + g
        total = total + u
    return total


@pytest.mark.parametrize(("rho", "alpha"), [(0.9, 0.0), (0.0, 2.0), (0.5, 1.0)])
def test_rounds_by_hand(rho, alpha):
    """Momentum and a proximal term: ||a||_1 is the sum of the gradients' weights in the update."""
    lr, x = 0.05, START.copy()
    for t in range(3):
        ids = address.cohort(0, t, 0, 3, 2)
        moves, lengths = [], []
        for i in ids:
            y, u = x.copy(), np.zeros(2)
            for _ in range(STEPS[i]):
                u = rho * u + A[i] * (y - E[i]) + alpha * (y - x)
                y = y - lr * u
            length = coefficients(STEPS[i], rho=rho, pull=alpha * lr).sum()
            moves.append((x - y) / length)
            lengths.append(length)
        w = STEPS[ids] / STEPS[ids].sum()
        x = x - 0.7 * (w @ np.array(lengths)) * (w @ np.array(moves))
    alg = fb.fednova(loss, client_lr=lr, server_lr=0.7, rho=rho, alpha=alpha, **SINGLE)
    np.testing.assert_allclose(run(alg, 3, cohort=2), x, 1e-10)


def test_lengths_are_those_of_the_paper():
    """Section 4: momentum (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho); proximal (1 - (1 - q)^tau) / q."""
    tau, rho, q = 6, 0.8, 0.3
    momentum = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(coefficients(tau, rho=rho, pull=0.0).sum(), momentum, 1e-12)
    np.testing.assert_allclose(coefficients(tau, rho=0.0, pull=q).sum(), (1 - (1 - q) ** tau) / q, 1e-12)


def test_cost_is_that_of_fedavg_and_one_number():
    cost = fb.cost(fb.fednova(loss), jnp.zeros(2), DATA)
    assert cost.down == cost.model
    assert cost.up == cost.model + 8  # float64 here


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"client_lr": 0}, "client_lr"),
        ({"server_lr": -1}, "server_lr"),
        ({"rho": 1.0}, "rho"),
        ({"alpha": -1}, "alpha"),
        ({"weighting": "rows"}, "weighting"),
    ],
)
def test_refusals(options, word):
    with pytest.raises(ValueError, match=word):
        fb.fednova(loss, **options)
