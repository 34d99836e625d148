"""Proximal solvers, FedGD, exact FedProx and FedSplit against NumPy, SciPy and the paper's closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import fedbraid as fb
from closed_forms import loss, problem, rounds_of, surrogate_minimizer
from fedbraid.algorithms import prox
from fedbraid.core import Aggregate, Up
from fedbraid.local import masked_mean
from fedbraid.simulation import bernoulli
from fedbraid.transforms import top_k
from fedbraid.transforms.clients import map_report

pytestmark = pytest.mark.usefixtures("x64")

P = problem()
LOW, HIGH = P.extremes  # 1 and 4
KNOWN = {"strong_convexity": LOW, "smoothness": HIGH}
S = 1 / np.sqrt(LOW * HIGH)
X = np.array([0.3, -1.2, 0.8])
EYE = np.eye(3)


def land(alg, rounds=100, start=X, p=P):
    """The server's model and the clients' states after full rounds."""
    server, states = rounds_of(alg, jnp.asarray(start), p, rounds)
    return np.asarray(alg.params(server)), states


def exact_prox(j, v, s=S, p=P):
    return np.linalg.solve(EYE + s * p.A[j], v + s * p.b[j])


# --- solvers ----------------------------------------------------------------------------------------------------------


def quadratic(u):
    return 0.5 * u["a"] @ jnp.asarray(P.A[0]) @ u["a"] - jnp.asarray(P.b[0]) @ u["a"]


EXACT = {
    "closed_form": prox.closed_form(),
    "newton": prox.newton(),
    "newton, cg": prox.newton(linear="cg"),
    "accelerated": prox.accelerated(tolerance=1e-10),
    "accelerated, l and L known": prox.accelerated(tolerance=1e-10, **KNOWN),
    "backtracking": prox.backtracking(200, tolerance=1e-10),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_prox_of_a_quadratic(name):
    for s in (0.2, 30.0):
        point = jax.jit(lambda v, s=s: EXACT[name](quadratic, v, s, {}, v))({"a": jnp.asarray(X)}).point["a"]
        np.testing.assert_allclose(point, exact_prox(0, X, s), atol=1e-9)


def logistic_data(seed=0, n=12):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)) + seed, np.where(rng.random(n) < 0.6, 1.0, -1.0)


def logistic_loss(params, batch, key):
    return masked_mean(jnp.logaddexp(0.0, -batch["y"] * (batch["x"] @ params)), batch["mask"])


@pytest.mark.parametrize("name", [n for n in EXACT if n not in ("closed_form", "accelerated, l and L known")])
def test_prox_of_a_logistic_loss_is_scipys(name):
    x, y = logistic_data()
    s, v = 20.0, 3 * X

    def h(u):
        return s * np.mean(np.logaddexp(0, -y * (x @ u))) + 0.5 * np.sum((u - v) ** 2)

    def grad(u):
        return -s * (y / (1 + np.exp(y * (x @ u)))) @ x / len(y) + u - v

    best = minimize(h, v, jac=grad, method="BFGS", options={"gtol": 1e-11}).x

    def f(u):
        return jnp.mean(jnp.logaddexp(0.0, -y * (x @ u)))

    solution = jax.jit(lambda v: EXACT[name](f, v, s, {}, v))(jnp.asarray(v))
    np.testing.assert_allclose(solution.point, best, atol=1e-8)
    assert solution.steps < 200


def test_newton_backtracks_where_full_steps_diverge():
    """Newton on sqrt(1 + u^2) overshoots from far away; the prox of 1000 times that has tiny extra curvature."""
    solution = prox.newton(tolerance=1e-10)(
        lambda u: jnp.sum(jnp.sqrt(1 + u**2)), jnp.array([50.0]), 1000.0, {}, jnp.array([50.0])
    )
    u = solution.point[0]
    np.testing.assert_allclose(1000 * u / np.sqrt(1 + u**2) + u, 50.0, atol=1e-8)


def test_gradient_steps_are_the_papers_recursion_and_obey_its_bound():
    """Eq. (17) with the step of Corollary 1; eq. (18) bounds the error."""
    alpha, kappa = 1 / (1 + S * (LOW + HIGH) / 2), HIGH / LOW
    v = {"a": jnp.asarray(X)}
    for e in (1, 4, 10):
        u = X.copy()
        for _ in range(e):
            u = u - alpha * (S * (P.A[0] @ u - P.b[0]) + (u - X))
        point = prox.gradient_steps(e, **KNOWN)(quadratic, v, S, {}, v).point["a"]
        np.testing.assert_allclose(point, u, rtol=1e-12)
        best = exact_prox(0, X)
        assert np.linalg.norm(u - best) <= (1 - 1 / (np.sqrt(kappa) + 1)) ** e * np.linalg.norm(X - best)


def test_solvers_stop_in_single_precision():
    """A tolerance below the precision of float32 must not run to the last step."""
    f32 = jnp.float32
    A, b = jnp.asarray(P.A[0], f32), jnp.asarray(P.b[0], f32)

    def f(u):
        return 0.5 * u @ A @ u - b @ u

    for solver in (prox.accelerated(), prox.newton(), prox.backtracking(500, tolerance=1e-8)):
        v = 100 * jnp.asarray(X, f32)
        solution = solver(f, v, f32(1.0), {}, v)
        assert solution.steps < 200
        np.testing.assert_allclose(solution.point, exact_prox(0, 100 * X, 1.0), rtol=1e-4)


def test_backtracking_never_ends_higher():
    """Also on a loss that is not convex."""

    def f(u):
        return jnp.sum(jnp.sin(30 * u))

    for start in (0.1, 0.7, 2.0):
        v = jnp.array([start])
        u = prox.backtracking(20)(f, v, 0.5, {}, v).point
        assert 0.5 * f(u) + 0.5 * (u - v) @ (u - v) <= 0.5 * f(v)
        assert u != v


@pytest.mark.parametrize("method", ["dense", "lanczos"])
def test_curvature(method):
    split = problem(sizes=(9, 7), d=5, top=7.0, seed=2).split
    c = prox.curvature(loss, jnp.zeros(5), split, method=method)
    values = np.array([np.linalg.eigvalsh(x.T @ x / len(x)) for x in (split.client(i)["x"] for i in range(2))])
    np.testing.assert_allclose(c.lows, values[:, 0], rtol=1e-8)
    np.testing.assert_allclose(c.highs, values[:, -1], rtol=1e-8)
    np.testing.assert_allclose([c.strong_convexity, c.smoothness, c.kappa], [1.0, 7.0, 7.0], rtol=1e-8)
    np.testing.assert_allclose(c.step, 1 / np.sqrt(7.0), rtol=1e-8)


def test_curvature_of_sums_and_from_too_few_steps():
    one = prox.curvature(loss, jnp.zeros(3), P.split, objective="sum")
    np.testing.assert_allclose(one.highs, 4.0 * P.n, rtol=1e-8)
    few = prox.curvature(loss, jnp.zeros(3), P.split, method="lanczos", steps=2)
    assert np.all(few.lows >= 1 - 1e-9)
    assert np.all(few.highs <= 4 + 1e-9)
    # a client of one direction: the Krylov space is exhausted at once, and no eigenvalue may be added after that
    flat = fb.Split.from_clients([{"x": np.eye(3) * np.sqrt(3), "y": np.ones(3)}])
    same = prox.curvature(loss, jnp.zeros(3), flat, method="lanczos")
    np.testing.assert_allclose([same.strong_convexity, same.smoothness], 1.0, rtol=1e-9)


# --- Prop. 1 and 2: the limits of FedGD and exact FedProx -------------------------------------------------------------


@pytest.mark.parametrize(("objective", "s", "e"), [("mean", 0.1, 1), ("mean", 0.1, 6), ("sum", 0.01, 6)])
def test_fedgd_stops_at_equation_10(objective, s, e):
    scale = np.ones(4) if objective == "mean" else P.n
    H, r = np.zeros((3, 3)), np.zeros(3)
    for A, b in zip(P.A * scale[:, None, None], P.b * scale[:, None], strict=True):
        powers = sum(np.linalg.matrix_power(EYE - s * A, k) for k in range(e))
        H, r = H + A @ powers, r + powers @ b
    landed, _ = land(fb.fedgd(loss, step=s, local_steps=e, objective=objective), rounds=800)
    np.testing.assert_allclose(landed, np.linalg.solve(H, r), atol=1e-9)
    pooled = surrogate_minimizer(P, (1,), 0.0, weights=scale)
    assert (np.linalg.norm(landed - pooled) > 1e-2) == (e > 1)


@pytest.mark.parametrize(("objective", "solver"), [("mean", "closed-form"), ("mean", "newton"), ("sum", "closed-form")])
def test_fedprox_exact_stops_where_the_moreau_envelopes_cancel(objective, solver):
    s, scale = 0.5, np.ones(4) if objective == "mean" else P.n
    H, r = np.zeros((3, 3)), np.zeros(3)
    for A, b in zip(P.A * scale[:, None, None], P.b * scale[:, None], strict=True):
        H = H + EYE - np.linalg.inv(EYE + s * A)
        r = r + np.linalg.solve(A + EYE / s, b)
    alg = fb.fedprox_exact(loss, step=s, prox=solver, objective=objective)
    landed, _ = land(alg)
    np.testing.assert_allclose(landed, np.linalg.solve(H, r), atol=1e-9)
    assert np.linalg.norm(landed - surrogate_minimizer(P, (1,), 0.0, weights=scale)) > 1e-2


# --- FedSplit ---------------------------------------------------------------------------------------------------------


def split_rounds(rounds, prox_of, relaxation=1.0, s=S, start=X, p=P):
    """Algorithm 1 in NumPy: x after every round, and the last z."""
    z, path = np.tile(start, (len(p.A), 1)), []
    for _ in range(rounds):
        x = z.mean(0)
        half = np.array([prox_of(j, 2 * x - z[j]) for j in range(len(p.A))])
        z = z + 2 * relaxation * (half - x)
        path.append(z.mean(0))
    return np.array(path), z


def test_fedsplit_is_algorithm_1():
    for relaxation in (1.0, 0.5):
        path, z = split_rounds(4, exact_prox, relaxation)
        x, states = land(fb.fedsplit(loss, prox="closed-form", relaxation=relaxation, **KNOWN), rounds=4)
        np.testing.assert_allclose(x, path[-1], rtol=1e-10)
        np.testing.assert_allclose(states.z, z, rtol=1e-10)


def test_theorem_1_holds_round_by_round():
    path, _ = split_rounds(30, exact_prox)
    star = P.optimum
    z_star = star - S * (P.A @ star - P.b)
    start = np.linalg.norm(np.tile(X, (4, 1)) - z_star) / np.sqrt(4)
    rho = 1 - 2 / (np.sqrt(HIGH / LOW) + 1)
    for t, x in enumerate(path, start=1):
        assert np.linalg.norm(x - star) <= rho**t * start + 1e-12


@pytest.mark.parametrize("solver", ["closed-form", "newton", "accelerated"])
def test_fedsplit_reaches_the_optimum(solver):
    alg = fb.fedsplit(loss, prox=solver, tolerance=1e-11, **KNOWN)
    x, states = land(alg, rounds=60)
    assert np.abs(x - P.optimum).max() < 1e-8
    np.testing.assert_allclose(states.z, P.optimum - S * (P.A @ P.optimum - P.b), atol=1e-8)  # Prop. 3


def test_your_own_prox():
    """The normal equations of the batch, solved by the user."""

    def solve(v, s, batch):
        x, n = batch["x"] * batch["mask"][:, None], batch["mask"].sum()
        return jnp.linalg.solve(jnp.eye(3) + s * x.T @ x / n, v + s * x.T @ batch["y"] / n)

    x, _ = land(fb.fedsplit(loss, prox=prox.given(solve), **KNOWN), rounds=60)
    assert np.abs(x - P.optimum).max() < 1e-8


def test_constants_estimated_from_the_data():
    """For least squares l, L and the step are exact; with l = 0 there is no such step."""
    for method in ("dense", "lanczos"):
        alg = fb.fedsplit(loss, prox="gradient", local_steps=3, estimate=method, data=P.split, params=jnp.zeros(3))
        known = fb.fedsplit(loss, prox="gradient", local_steps=3, **KNOWN)
        np.testing.assert_allclose(land(alg, rounds=5)[0], land(known, rounds=5)[0], rtol=1e-8)
    flat = fb.Split.from_clients([{"x": np.array([[1.0, 0.0, 0.0]]), "y": np.ones(1)}])
    with pytest.raises(ValueError, match="strong_convexity"):
        fb.fedsplit(loss, prox="gradient", estimate="dense", data=flat, params=jnp.zeros(3))
    with pytest.raises(ValueError, match="leave them out"):
        fb.fedsplit(loss, estimate="dense", data=P.split, params=jnp.zeros(3), smoothness=1.0)


def test_the_pooled_optimum_by_sums():
    low, high = LOW * P.n.min(), HIGH * P.n.max()
    alg = fb.fedsplit(loss, prox="closed-form", strong_convexity=low, smoothness=high, objective="sum")
    x, y = P.split.arrays["x"], P.split.arrays["y"]
    assert np.abs(land(alg, rounds=80)[0] - np.linalg.lstsq(x, y)[0]).max() < 1e-8


def test_inexact_prox_stops_at_the_floor_that_theory_gives():
    """e gradient steps are an affine map; the method converges to its fixed point, within (sqrt(kappa) + 1) b of x*."""
    alpha, kappa, errors = 1 / (1 + S * (LOW + HIGH) / 2), HIGH / LOW, []
    for e in (1, 3, 8):

        def inexact(j, v, e=e):
            shrink = np.linalg.matrix_power(EYE - alpha * (EYE + S * P.A[j]), e)
            best = exact_prox(j, v)
            return best + shrink @ (v - best)

        # T z = z as a linear system: apply T to the basis
        T = lambda z: split_rounds_once(z, inexact)  # noqa: E731
        zero = T(np.zeros((4, 3)))
        basis = np.eye(12).reshape(12, 4, 3)
        M = np.array([(T(v) - zero).ravel() for v in basis]).T
        z = np.linalg.solve(np.eye(12) - M, zero.ravel()).reshape(4, 3)
        x = z.mean(0)
        landed, _ = land(fb.fedsplit(loss, prox="gradient", local_steps=e, start="point", **KNOWN), rounds=150)
        np.testing.assert_allclose(landed, x, atol=1e-9)
        b = max(np.linalg.norm(inexact(j, 2 * x - z[j]) - exact_prox(j, 2 * x - z[j])) for j in range(4))
        errors.append(np.linalg.norm(x - P.optimum))
        assert 0 < errors[-1] <= (np.sqrt(kappa) + 1) * b
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


@pytest.mark.parametrize("solver", ["gradient", "backtracking"])
def test_two_steps_from_the_servers_model_leave_no_floor(solver):
    """At the fixed point prox(2 x* - z_j*) = x*, which is where the solver starts."""
    landed, states = land(fb.fedsplit(loss, prox=solver, local_steps=2, step=S, **KNOWN), rounds=300)
    assert np.abs(landed - P.optimum).max() < 1e-8
    np.testing.assert_allclose(states.z, P.optimum - S * (P.A @ P.optimum - P.b), atol=1e-8)


def split_rounds_once(z, prox_of):
    x = z.mean(0)
    return z + 2 * (np.array([prox_of(j, 2 * x - z[j]) for j in range(4)]) - x)


def test_logistic_by_newton_is_scipys_optimum():
    clients = [logistic_data(seed, n) for seed, n in ((0, 12), (1, 9), (2, 15))]
    split = fb.Split.from_clients([{"x": x, "y": y} for x, y in clients])

    def ridge(params, batch, key):
        return logistic_loss(params, batch, key) + 0.05 * jnp.sum(params**2)

    def total(u):
        return sum(np.mean(np.logaddexp(0, -y * (x @ u))) + 0.05 * u @ u for x, y in clients)

    def grad(u):
        return sum(-(y / (1 + np.exp(y * (x @ u)))) @ x / len(y) + 0.1 * u for x, y in clients)

    best = minimize(total, np.zeros(3), jac=grad, method="BFGS", options={"gtol": 1e-11}).x
    c = prox.curvature(ridge, jnp.zeros(3), split)
    alg = fb.fedsplit(ridge, prox="newton", tolerance=1e-11, strong_convexity=0.1, smoothness=c.smoothness)
    server, _ = rounds_of(alg, jnp.zeros(3), P._replace(split=split, n=split.sizes), 150)
    np.testing.assert_allclose(server.params, best, atol=1e-8)


def test_theorem_2_regularizes_about_the_start():
    """Clients without strong convexity: the minimizer of sum_j f_j + lambda/2 ||x - x_1||^2, and epsilon-optimal."""
    rng = np.random.default_rng(4)
    data = [(rng.normal(size=(2, 3)), rng.normal(size=2)) for _ in range(3)]  # rank 2 of 3 each, together of rank 3
    split = fb.Split.from_clients([{"x": x, "y": y} for x, y in data])
    A = np.array([x.T @ x / 2 for x, _ in data])
    b = np.array([x.T @ y / 2 for x, y in data])
    star = np.linalg.solve(A.sum(0), b.sum(0))
    high = np.linalg.eigvalsh(A).max()

    def F(u):
        return sum(0.5 * np.mean((x @ u - y) ** 2) for x, y in data)

    epsilon = 0.1
    lam = epsilon / (3 * np.sum((X - star) ** 2))
    alg = fb.fedsplit(loss, prox="closed-form", regularization=lam, smoothness=high)
    x, states = land(alg, rounds=400, p=P._replace(split=split, n=split.sizes))
    regularized = np.linalg.solve(A.sum(0) + 3 * lam * EYE, b.sum(0) + 3 * lam * X)
    np.testing.assert_allclose(x, regularized, atol=1e-8)
    assert 1e-4 < F(x) - F(star) <= epsilon
    # and the step is that of the theorem: 1 / sqrt(lambda (L + lambda))
    z = regularized - (A @ regularized - b + lam * (regularized - X)) / np.sqrt(lam * (high + lam))
    np.testing.assert_allclose(states.z, z, atol=1e-6)


def simulate(alg, rounds, **options):
    return fb.simulate(alg, jnp.asarray(X), P.split, rounds=rounds, devices=1, **options)


def violation(result):
    return np.abs(np.asarray(result.params) - np.asarray(result.states.z).mean(0)).max()


def test_part_of_the_clients_lossy_arrival_and_the_optimum_all_the_same():
    alg = fb.fedsplit(loss, prox="closed-form", **KNOWN)
    result = simulate(alg, 300, cohort=2, arrival=bernoulli(0.3))
    assert violation(result) < 1e-12
    assert np.abs(result.params - P.optimum).max() < 1e-8
    arrived = result.history["prox/arrived"] > 0
    assert np.all(result.history["prox/residual"][arrived] < 1e-9)  # of the exact prox, as clients report it


@pytest.mark.parametrize("reconciled", [True, False])
def test_lossy_uploads_keep_the_mean(reconciled):
    """Uploads rounded to tenths: with reconciliation x = mean z_j up to rounding errors, without it x differs."""
    alg = fb.fedsplit(loss, prox="closed-form", **KNOWN)
    exchange = alg.exchanges[0]

    def rounded(report, down, state, key):
        decoded = Up(jnp.round(report.up.pseudograd, 1))
        kept = exchange.reconcile(report.state, report.up, decoded) if reconciled else report.state
        return report._replace(up=decoded, state=kept)

    lossy = alg._replace(exchanges=(exchange._replace(client=map_report(exchange.client, rounded)),))
    result = simulate(lossy, 20, cohort=3, arrival=bernoulli(0.2))
    assert violation(result) < 1e-12 if reconciled else violation(result) > 1e-3


def test_one_coordinate_in_three_is_enough():
    """z_j changes by what was sent, so the next round computes the rest again: no error feedback is needed."""
    alg = top_k(fb.fedsplit(loss, prox="closed-form", **KNOWN), fraction=0.3, error_feedback=False)
    result = simulate(alg, 400, cohort=3)
    assert fb.cost(alg, jnp.zeros(3), P.split).up < 3 * 8
    assert violation(result) < 1e-12
    assert np.abs(result.params - P.optimum).max() < 1e-8


def test_rates_may_be_swept():
    def landed(s):
        return rounds_of(fb.fedsplit(loss, step=s, prox="newton", relaxation=1.0), jnp.asarray(X), P, 2)[0].params

    for s, x in zip((0.3, 0.6), jax.vmap(landed)(jnp.array([0.3, 0.6])), strict=True):
        path, _ = split_rounds(2, lambda j, v, s=s: exact_prox(j, v, s), s=s)
        np.testing.assert_allclose(x, path[-1], rtol=1e-8)


def test_what_it_sends_and_keeps():
    split = fb.fedsplit(loss)
    assert fb.cost(split, jnp.zeros(3), P.split).multiple == 2
    assert jax.tree.map(jnp.shape, split.init_client(jnp.zeros(3))) == ((3,), ())
    anchored = fb.fedsplit(loss, regularization=0.1)
    assert jax.tree.map(jnp.shape, anchored.init_client(jnp.zeros(3))) == ((3,), (3,))
    assert fb.cost(anchored, jnp.zeros(3), P.split).multiple == 2


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: fb.fedsplit(loss, step=0.0), "step"),
        (lambda: fb.fedsplit(loss, prox="exact"), "prox"),
        (lambda: fb.fedsplit(loss, prox="gradient"), "smoothness"),
        (lambda: fb.fedsplit(loss, prox="gradient", smoothness=1.0), "strong_convexity"),
        (lambda: fb.fedsplit(loss, strong_convexity=2.0, smoothness=1.0), "strong_convexity"),
        (lambda: fb.fedsplit(loss, strong_convexity=0.0, smoothness=1.0), "strong_convexity"),
        (lambda: fb.fedsplit(loss, regularization=-1.0), "regularization"),
        (lambda: fb.fedsplit(loss, relaxation=1.5), "relaxation"),
        (lambda: fb.fedsplit(loss, local_steps=0), "local_steps"),
        (lambda: fb.fedsplit(loss, tolerance=-1.0), "tolerance"),
        (lambda: fb.fedsplit(loss, objective="total"), "objective"),
        (lambda: fb.fedsplit(loss, start="zero"), "start"),
        (lambda: fb.fedprox_exact(loss, step=-1.0), "step"),
        (lambda: fb.fedprox_exact(loss, weighting="rows"), "weighting"),
        (lambda: fb.fedgd(loss, step=0.0), "step"),
        (lambda: fb.fedgd(loss, local_steps=0), "steps"),
        (lambda: prox.curvature(loss, jnp.zeros(3), P.split, method="power"), "method"),
        (lambda: prox.curvature(loss, jnp.zeros(5000), P.split), "lanczos"),
        (lambda: prox.closed_form()(jnp.sum, jnp.zeros(5000), 1.0, {}, None), "accelerated"),
        (lambda: prox.Curvature(0.0, 1.0, np.zeros(1), np.ones(1)).step, "regularization"),
    ],
)
def test_refusals(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_without_a_population_it_is_refused():
    alg = fb.fedsplit(loss)
    aggregate = Aggregate(Up(jnp.zeros(3)), 2.0, 2, None)
    with pytest.raises(ValueError, match="population"):
        alg.exchanges[0].receive(alg.init(jnp.zeros(3)), aggregate, None)


# --- stochastic proxes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_a_stochastic_prox_on_all_examples_is_that_of_gradient_steps(objective):
    known = KNOWN if objective == "mean" else {"strong_convexity": 6 * LOW, "smoothness": 9 * HIGH}
    options = {"local_steps": 3, "objective": objective, "start": "point", **known}
    noisy, plain = (land(fb.fedsplit(loss, prox=prox, **options), 8)[0] for prox in ("stochastic", "gradient"))
    np.testing.assert_allclose(noisy, plain, rtol=1e-12)
    assert np.abs(plain - X).max() > 1e-2


def noisy_means(scale, seed=0):
    """Clients whose examples scatter about their own mean: only the gradients of batches have noise."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(3):
        scatter = rng.normal(size=(12, 2))
        clients.append({"e": rng.normal(size=2) + scale * (scatter - scatter.mean(0))})
    return fb.Split.from_clients(clients)


def test_the_floor_of_a_stochastic_prox_is_its_noise():
    """With the same batches of quadratics, the error is proportional to the noise; rates and batch sizes lower it."""

    def square(params, batch, key):
        each = 0.5 * jnp.sum(jnp.array([1.0, 4.0]) * (params - batch["e"]) ** 2, -1)
        return masked_mean(each, batch["mask"])

    def error(scale, **options):
        given = {"prox_lr": 0.2, "batch_size": 3, "local_steps": 8} | options
        alg = fb.fedsplit(square, step=0.5, prox="stochastic", **given)
        data = noisy_means(scale)
        best = data.arrays["e"].mean(0)  # all clients have 12 examples
        return np.asarray(fb.simulate(alg, jnp.zeros(2), data, rounds=60, devices=1).params) - best

    assert np.linalg.norm(error(0.0)) < 1e-8
    one = error(1.0)
    assert 1e-3 < np.linalg.norm(one) < 1
    np.testing.assert_allclose(error(2.0), 2 * one, rtol=1e-5, atol=1e-8)
    assert np.linalg.norm(error(1.0, batch_size=12)) < 1e-8  # all examples in a batch: no noise
    assert np.linalg.norm(error(1.0, prox_lr=0.02, local_steps=80)) < np.linalg.norm(one)
