"""The simulator converges to the point, and at the rate, of the closed forms. In float64.

Clients are quadratics with the same eigenvectors and the same extreme eigenvalues. Their other eigenvalues and their
minimizers differ. Then kappa of eq. (9) is the surrogate's condition number, and Table 2 is its exact rate.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import curve_fit

from fedbraid import FederatedData, Split, fedgd, fedprox_exact, fedsplit, local_update, maml, simulate
from fedbraid.algorithms import server_optimizers
from fedbraid.theory import (
    federation,
    federation_point,
    fedgd_fixed_point,
    fedprox_fixed_point,
    fedsplit_fixed_point,
    gaussian_least_squares,
    server_optimizer,
    surrogate_loss,
    theta_last,
    theta_maml,
    theta_sum,
)

ROUNDS, LOOK = 300, 4
MU, L = 1.0, 30.0


def quadratics():
    rng = np.random.default_rng(0)
    U = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    spectra = np.stack([[MU, *np.sort(rng.uniform(6, 20, 2)), L] for _ in range(5)])
    A = np.einsum("ak,ik,bk->iab", U, spectra, U)
    return federation((A + A.transpose(0, 2, 1)) / 2, 2 * rng.standard_normal((5, 4)))


def quadratic_loss(x, batch, key):
    return jnp.sum(batch["mask"] * (0.5 * jnp.einsum("a,nab,b->n", x, batch["A"], x) - batch["b"] @ x))


FED = quadratics()
DATA = FederatedData(
    Split.from_clients([{"A": A[None], "b": b[None]} for A, b in zip(FED.A, FED.b, strict=True)]),
    Split.from_clients([{"A": FED.A[:1], "b": FED.b[:1]}]),
)


def local(theta):
    def make(gamma, alpha, opt):
        return local_update(
            quadratic_loss, gamma=gamma, alpha=alpha, theta=theta, server_opt=opt, batch_size=None, steps=4
        )

    return make


def meta(gamma, alpha, opt):
    return maml(quadratic_loss, client_lr=gamma, alpha=alpha, steps=2, server_opt=opt, support=1.0, batch_size=None)


# the algorithm, and its members as (Theta, gamma, alpha): one compiled sweep each
FAMILIES = {
    "fedavg and fedprox": (local("1:K"), [(theta_sum(4), 0.016, 0.0), (theta_sum(4), 0.016, 10.0)]),
    "fomaml": (local("K"), [(theta_last(4), 0.004, 0.0)]),
    "maml, plain and proximal": (meta, [(theta_maml(2), 0.004, 0.0), (theta_maml(2), 0.004, 5.0)]),
}


def fitted_rate(distances):
    """rho of ``(a + b t) rho^t``: tuned momentum has a double root, gradient descent has b = 0."""
    t = LOOK * np.arange(1, len(distances) + 1)
    end = int(np.argmax(distances < 1e-11)) or len(t)  # smaller distances are rounding errors
    t, logs = t[1:end], np.log(distances[1:end])

    def model(t, c, slope, log_rho):
        return c + np.log1p(np.abs(slope) * t) + t * log_rho

    guess = (logs[0], 0.1, (logs[-1] - logs[0]) / (t[-1] - t[0]))
    (_, _, log_rho), _ = curve_fit(model, t, logs, p0=guess, maxfev=20_000)
    return float(np.exp(log_rho))


@pytest.mark.parametrize("momenta", [("none", "heavy_ball"), ("nesterov",)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_run_ends_at_the_surrogate_minimizer_at_rate_rho(family, momenta, x64):
    make, members = FAMILIES[family]
    kind = "nesterov" if momenta == ("nesterov",) else "heavy-ball"  # heavy ball with momentum 0 is none
    cases, rows = [], []
    for theta, gamma, alpha in members:
        sur = surrogate_loss(FED, gamma=gamma, theta=theta, alpha=alpha)
        p = federation_point(FED, gamma=gamma, theta=theta, alpha=alpha)
        assert sur.condition_number == pytest.approx(p.kappa, rel=1e-9)
        assert np.linalg.norm(sur.minimizer - FED.minimizer) > 1e-3  # the surrogate's minimizer is not that of the loss
        for momentum in momenta:
            tuned = server_optimizer(p.smoothness, p.strong_convexity, momentum)
            cases.append((sur.minimizer, p.rho[momentum]))
            rows.append((gamma, alpha, tuned.step, tuned.momentum, sur.minimizer))

    def run(gamma, alpha, step, beta, target):
        def metrics(x, batch):
            return {"gap": (batch["mask"] * jnp.sum((x - target) ** 2), batch["mask"])}

        alg = make(gamma, alpha, server_optimizers.momentum(step, beta, kind=kind))
        x0 = target + jnp.array([3.0, -2.0, 4.0, 1.0])
        result = simulate(alg, x0, DATA, rounds=ROUNDS, metrics=metrics, eval_every=LOOK, devices=1)
        return result.params, result.evaluations["test_gap"]

    ends, gaps = jax.vmap(run)(*[jnp.asarray(column) for column in zip(*rows, strict=True)])
    assert ends.dtype == jnp.float64
    for end, gap, (minimizer, rho) in zip(np.asarray(ends), np.asarray(gaps), cases, strict=True):
        np.testing.assert_allclose(end, minimizer, atol=1e-10)
        assert fitted_rate(np.sqrt(gap)) == pytest.approx(rho, rel=0.01)


# --- fixed points on the least squares of FedSplit's Appendix B.1 -----------------------------------------------------


LEAST = gaussian_least_squares(seed=0)
LEAST_FED = LEAST.federation()


def residual_loss(x, batch, key):
    return 0.5 * jnp.sum(batch["mask"] * (batch["x"] @ x - batch["y"]) ** 2) / jnp.sum(batch["mask"])


def run(alg, rounds):
    """Client losses are sums over examples, as in the paper (objective="sum")."""
    clients = Split.from_clients(LEAST.clients())
    return np.asarray(simulate(alg, jnp.zeros(LEAST_FED.dim), clients, rounds=rounds, devices=1).params)


@pytest.mark.parametrize("e", [1, 10, 100])
def test_fedgd_of_the_simulator_stops_at_the_closed_form(e, x64):
    s = 1.0 / LEAST_FED.smoothness
    at = fedgd_fixed_point(LEAST_FED, step=s, local_steps=e)
    got = run(fedgd(residual_loss, step=s, local_steps=e, objective="sum"), {1: 120, 10: 20, 100: 6}[e])
    np.testing.assert_allclose(got, at, atol=1e-10)


def test_exact_fedprox_of_the_simulator_stops_at_the_closed_form(x64):
    s = 1.0 / LEAST_FED.smoothness
    at = fedprox_fixed_point(LEAST_FED, step=s)
    got = run(fedprox_exact(residual_loss, step=s, objective="sum", prox="closed-form"), 60)
    np.testing.assert_allclose(got, at, atol=1e-10)
    assert np.linalg.norm(at - LEAST_FED.minimizer) > 1e-3


def test_fedsplit_of_the_simulator_stops_at_the_least_squares_solution(x64):
    stacked = np.linalg.lstsq(np.concatenate(LEAST.designs), np.concatenate(LEAST.responses), rcond=None)[0]
    alg = fedsplit(
        residual_loss,
        strong_convexity=LEAST_FED.mu,
        smoothness=LEAST_FED.smoothness,
        objective="sum",
        prox="closed-form",
    )
    np.testing.assert_allclose(run(alg, 40), stacked, atol=1e-10)
    np.testing.assert_allclose(fedsplit_fixed_point(LEAST_FED).x, stacked, atol=1e-12)
