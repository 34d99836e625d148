"""LocalUpdate and its members against closed forms and plain NumPy recursions."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbraid as fb
from closed_forms import distortion, loss, problem, rounds_of, surrogate_minimizer, uploads
from fedbraid.algorithms import server_optimizers
from fedbraid.simulation.rounds import say_fewer_clients
from told import told

pytestmark = pytest.mark.usefixtures("x64")

P = problem()
X = np.array([0.3, -1.2, 0.8])
WHOLE = {"batch_size": None, "steps": 5}


def land(alg, rounds=1500, start=None):
    start = jnp.zeros(3) if start is None else jnp.asarray(start)
    return np.asarray(alg.params(rounds_of(alg, start, P, rounds)[0]))


def messages(alg):
    """What each client sends from X."""
    return np.asarray(uploads(alg, jnp.asarray(X), P).pseudograd)


# --- Theorem 1: the message, and the limit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "gamma", "alpha"),
    [
        ((1, 1, 1, 1, 1), 0.1, 0.0),
        ((1, 1, 1), 0.1, 0.7),
        ((0, 0, 1), 0.15, 0.3),
        ((2, 0, 0.5), 0.1, 0.2),
        ((1, 1), 0.0, 0.4),
    ],
)
def test_a_message_is_the_gradient_of_the_surrogate(theta, gamma, alpha):
    alg = fb.local_update(loss, gamma=gamma, alpha=alpha, theta=theta, batch_size=None)
    expected = [distortion(A, theta, gamma, alpha) @ (A @ X - b) for A, b in zip(P.A, P.b, strict=True)]
    np.testing.assert_allclose(messages(alg), expected, rtol=1e-10)


LANDINGS = {
    "fedavg": (lambda: fb.fedavg(loss, client_lr=0.1, weighting="uniform", **WHOLE), (1,) * 5, 0.1, 0.0, None),
    "fedavg, by examples": (lambda: fb.fedavg(loss, client_lr=0.1, **WHOLE), (1,) * 5, 0.1, 0.0, P.n),
    "fedprox": (lambda: fb.fedprox(loss, client_lr=0.1, alpha=0.8, **WHOLE), (1,) * 5, 0.1, 0.8, P.n),
    "reptile": (lambda: fb.reptile(loss, client_lr=0.1, server_lr=0.7, **WHOLE), (1,) * 5, 0.1, 0.0, None),
    "meta_minibatch_prox": (
        lambda: fb.meta_minibatch_prox(loss, client_lr=0.1, alpha=0.5, **WHOLE),
        (1,) * 5,
        0.1,
        0.5,
        None,
    ),
    "fomaml": (lambda: fb.fomaml(loss, client_lr=0.15, **WHOLE), (0, 0, 0, 0, 1), 0.15, 0.0, None),
    "fedavgm": (lambda: fb.fedavgm(loss, client_lr=0.1, **WHOLE), (1,) * 5, 0.1, 0.0, P.n),
}


@pytest.mark.parametrize("name", list(LANDINGS))
def test_members_stop_at_the_minimizer_of_their_surrogate(name):
    make, theta, gamma, alpha, weights = LANDINGS[name]
    expected = surrogate_minimizer(P, theta, gamma, alpha, weights)
    np.testing.assert_allclose(land(make()), expected, atol=1e-9)
    pooled = P.optimum if weights is None else surrogate_minimizer(P, (1,), 0.0, 0.0, weights)
    assert np.linalg.norm(expected - pooled) > 1e-2  # and that is not the optimum


def test_without_local_rate_it_makes_progress_to_the_optimum():
    """gamma = 0 is allowed: the message is a sum of gradients, not a model delta."""
    for make in (
        lambda: fb.fedsgd(loss, server_lr=0.05, weighting="uniform", **WHOLE),
        lambda: fb.local_update(
            loss, gamma=0.0, alpha=0.5, server_opt=optax.sgd(0.05), weighting="uniform", **WHOLE
        ),  # at the server's model the proximal term is 0 in every step
    ):
        np.testing.assert_allclose(messages(make()), 5 * (P.A @ X - P.b), rtol=1e-10)
        np.testing.assert_allclose(land(make()), P.optimum, atol=1e-9)


# --- identities -------------------------------------------------------------------------------------------------------


def same(a, b, rounds=3, **options):
    results = [
        fb.simulate(alg, jnp.asarray(X), P.split, rounds=rounds, cohort=3, devices=1, **options) for alg in (a, b)
    ]
    np.testing.assert_allclose(results[0].params, results[1].params, rtol=1e-12)
    assert np.abs(results[0].params - X).max() > 1e-3  # both moved


def test_fedprox_without_pull_is_fedavg():
    local = {"client_lr": 0.05, "batch_size": 4, "epochs": 2}
    same(fb.fedprox(loss, alpha=0.0, **local), fb.fedavg(loss, **local))


def test_theta_of_one_is_minibatch_sgd_whatever_gamma():
    one = fb.local_update(loss, gamma=0.3, alpha=0.5, theta=(1.0,), server_opt=optax.sgd(0.1), batch_size=4)
    same(one, fb.minibatch_sgd(loss, lr=0.1, batch_size=4))
    mean = np.average([A @ X - b for A, b in zip(P.A, P.b, strict=True)], axis=0, weights=P.n)
    moved = land(fb.minibatch_sgd(loss, lr=0.1, batch_size=None), rounds=1, start=X)
    np.testing.assert_allclose(moved, X - 0.1 * mean, rtol=1e-12)


def test_a_delta_is_gamma_times_the_sum_of_gradients():
    local = {"gamma": 0.07, "alpha": 0.4, "batch_size": 4, "epochs": 2}  # ragged batches, in the same order
    delta, gradients = (fb.local_update(loss, message=kind, **local) for kind in ("delta", "gradients"))
    np.testing.assert_allclose(messages(delta), 0.07 * messages(gradients), rtol=1e-10)


def test_lookahead_goes_part_of_the_way():
    alone = problem(sizes=(6,), seed=3)
    alg = fb.lookahead(loss, client_lr=0.1, server_lr=0.5, **WHOLE)
    moved = rounds_of(alg, jnp.asarray(X), alone, 1)[0].params
    fast = X.copy()
    for _ in range(5):
        fast = fast - 0.1 * (alone.A[0] @ fast - alone.b[0])
    np.testing.assert_allclose(moved, X + 0.5 * (fast - X), rtol=1e-12)


def test_lookahead_says_once_that_it_is_for_one_client():
    alg = fb.lookahead(loss, client_lr=0.1, **WHOLE)
    say_fewer_clients.cache_clear()
    fb.simulate(alg, jnp.asarray(X), P.split, rounds=1, cohort=1, devices=1)  # a notice here would fail the test
    with told("defined for at most 1 client") as texts:
        for _ in range(2):
            fb.simulate(alg, jnp.asarray(X), P.split, rounds=1, cohort=2, devices=1)
    assert len(texts) == 1


def test_fedavgm_is_that_of_its_paper():
    """Hsu et al. 2019: v <- beta v + delta, x <- x - v, with the mean update delta by examples; by default."""
    x, v = X.copy(), np.zeros(3)
    for _ in range(4):
        deltas = []
        for A, b in zip(P.A, P.b, strict=True):
            y = x.copy()
            for _ in range(5):
                y = y - 0.1 * (A @ y - b)
            deltas.append(x - y)
        v = 0.9 * v + np.average(deltas, axis=0, weights=P.n)
        x = x - v
    moved = land(fb.fedavgm(loss, client_lr=0.1, **WHOLE), rounds=4, start=X)
    np.testing.assert_allclose(moved, x, rtol=1e-12)


def test_examples_or_uniform():
    deltas = messages(fb.fedavg(loss, client_lr=0.1, **WHOLE))
    for weighting, weights in (("examples", P.n), ("uniform", np.ones(4))):
        moved = land(fb.fedavg(loss, client_lr=0.1, weighting=weighting, **WHOLE), rounds=1, start=X)
        np.testing.assert_allclose(moved, X - np.average(deltas, axis=0, weights=weights), rtol=1e-12)


# --- server optimizers against NumPy ----------------------------------------------------------------------------------


def drive(opt, gradients):
    """The models after each of the gradients, from X."""
    server = server_optimizers.ServerState({"w": jnp.asarray(X)}, opt.init({"w": jnp.asarray(X)}))
    path = []
    for g in gradients:
        server = server_optimizers.server_step(opt, server, {"w": jnp.asarray(g)})
        path.append(np.asarray(server.params["w"]))
    return np.array(path)


GRADIENTS = np.random.default_rng(5).normal(size=(6, 3))


@pytest.mark.parametrize("kind", ["heavy-ball", "nesterov", "average"])
def test_server_momentum(kind):
    lr, beta = 0.2, 0.9
    x, m, expected = X.copy(), np.zeros(3), []
    for g in GRADIENTS:
        if kind == "average":
            m = (1 - beta) * g + beta * m
            x = x - lr * m
        else:
            m = g + beta * m
            x = x - lr * (m if kind == "heavy-ball" else g + beta * m)
        expected.append(x)
    np.testing.assert_allclose(drive(server_optimizers.momentum(lr, beta, kind=kind), GRADIENTS), expected, rtol=1e-12)


def test_heavy_ball_is_the_two_term_recursion():
    """x_{t+1} = x_t - lr g_t + beta (x_t - x_{t-1}), as in Lessard et al. and in the surrogate's rates."""
    lr, beta = 0.2, 0.8
    now, before, expected = X.copy(), X.copy(), []
    for g in GRADIENTS:
        now, before = now - lr * g + beta * (now - before), now
        expected.append(now)
    np.testing.assert_allclose(drive(server_optimizers.momentum(lr, beta), GRADIENTS), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_adaptive_server_optimizers(kind):
    """Reddi et al. 2021, Algorithm 2: v starts at tau^2, without bias correction."""
    lr, b1, b2, tau = 0.1, 0.8, 0.95, 0.3
    x, m, v, expected = X.copy(), np.zeros(3), np.full(3, tau**2), []
    for g in GRADIENTS:
        m = b1 * m + (1 - b1) * g
        if kind == "adagrad":
            v = v + g**2
        elif kind == "adam":
            v = b2 * v + (1 - b2) * g**2
        else:
            v = np.where(v > g**2, v - (1 - b2) * g**2, np.where(v < g**2, v + (1 - b2) * g**2, v))
        x = x - lr * m / (np.sqrt(v) + tau)
        expected.append(x)
    opt = server_optimizers.adaptive(kind, lr, b1=b1, b2=b2, tau=tau)
    np.testing.assert_allclose(drive(opt, GRADIENTS), expected, rtol=1e-12)


def test_bias_correction_is_adam_as_optax_has_it():
    lr, b1, b2, eps = 0.1, 0.8, 0.95, 1e-3
    x, m, v, expected = X.copy(), np.zeros(3), np.zeros(3), []
    for t, g in enumerate(GRADIENTS, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        x = x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        expected.append(x)
    ours = drive(server_optimizers.adaptive("adam", lr, b1=b1, b2=b2, tau=eps, bias_correction=True), GRADIENTS)
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    np.testing.assert_allclose(ours, drive(optax.adam(lr, b1=b1, b2=b2, eps=eps), GRADIENTS), rtol=1e-9)


@pytest.mark.parametrize(
    ("factory", "kind", "b1"), [("fedadam", "adam", 0.9), ("fedyogi", "yogi", 0.9), ("fedadagrad", "adagrad", 0.0)]
)
def test_adaptive_members_take_the_mean_delta_as_gradient(factory, kind, b1):
    lr, tau = 0.05, 0.01
    alg = getattr(fb, factory)(loss, client_lr=0.1, server_lr=lr, tau=tau, **WHOLE)
    g = np.average(messages(fb.fedavg(loss, client_lr=0.1, **WHOLE)), axis=0, weights=P.n)
    v = {"adagrad": tau**2 + g**2, "adam": 0.99 * tau**2 + 0.01 * g**2}.get(kind)
    if v is None:
        v = tau**2 + 0.01 * g**2 * np.sign(g**2 - tau**2)
    expected = X - lr * (1 - b1) * g / (np.sqrt(v) + tau)
    np.testing.assert_allclose(land(alg, rounds=1, start=X), expected, rtol=1e-10)
