"""Mime's theorems: the drift of Theorem I, Corollaries II and III, Theorems IV to VI, and the recipes of step sizes.

Drifts are measured in NumPy loops of the paper's updates, as exact expectations over all orders of batches, and in the
simulator (`trace_shadow`). The closed forms are compared with evaluations by `fractions` and by minimization.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

import fedbraid as fb
from fedbraid import recipes, theory
from fedbraid.data.federated import Split
from fedbraid.simulation.shadow import trace_shadow
from fedbraid.theory.constants import estimate

L = 2.0  # of every batch of every generated client


class Clients:
    """Clients with ``n`` batches each: quadratic losses with curvatures in [-L, L], or logistic losses."""

    def __init__(self, seed, kind, clients=3, batches=2, dim=2):
        rng = np.random.default_rng(seed)
        self.kind = kind
        if kind == "quadratic":  # not convex: Theorem I does not need it
            q = np.linalg.qr(rng.normal(size=(clients, batches, dim, dim)))[0]
            values = rng.uniform(-L, L, (clients, batches, dim))
            values[..., 0] = rng.choice([-L, L], (clients, batches))
            self.a = np.einsum("cbij,cbj,cbkj->cbik", q, values, q)
            self.b = rng.normal(size=(clients, batches, dim)) * 10 ** rng.uniform(-1, 1)
        else:  # f = 4 L log(1 + exp(-y z.x)) with ||z|| = 1 is L-smooth
            z = rng.normal(size=(clients, batches, dim))
            self.z = z / np.linalg.norm(z, axis=-1, keepdims=True) * rng.choice([-1, 1], (clients, batches, 1))

    def gradient(self, i, j, x):
        """Of client i's batch j."""
        if self.kind == "quadratic":
            return self.a[i, j] @ x + self.b[i, j]
        z = self.z[i, j]
        return -4 * L * z / (1 + np.exp(z @ x))

    def full(self, i, x):
        return np.mean([self.gradient(i, j, x) for j in range(2)], axis=0)

    def constants(self, x):
        """G^2 and sigma^2 at x, and grad f(x)."""
        means = np.array([self.full(i, x) for i in range(3)])
        spread = [np.mean([np.sum((self.gradient(i, j, x) - means[i]) ** 2) for j in range(2)]) for i in range(3)]
        return float(np.mean(np.sum((means - means.mean(0)) ** 2, -1))), max(spread), means.mean(0)


def drift_of_client(clients, i, order, x, lr, scale, c):
    """Sum over steps of ``grad f_i(y; zeta) - grad f_i(x; zeta)`` for one order of batches; c: Mime's correction."""
    y, total = x.copy(), np.zeros_like(x)
    for j in order:
        change = clients.gradient(i, j, y) - clients.gradient(i, j, x)
        g = clients.gradient(i, j, y) if c is None else change + c
        total += change
        y = y - lr * scale * g  # U(g) = scale g, element by element: sgd, adagrad, adam with b1 = 0
    return total, y


problems = {
    "seed": st.integers(0, 10**6),
    "kind": st.sampled_from(["quadratic", "logistic"]),
    "share": st.floats(0.05, 1.0),
    "steps": st.integers(1, 4),
}


@settings(max_examples=40, deadline=None)
@given(**problems)
def test_mime_drifts_less_than_theorem_1_says(seed, kind, share, steps):
    """For every order of batches, not only on average; and the round is one step of U on g + e (Lemma 5)."""
    clients = Clients(seed, kind)
    rng = np.random.default_rng(seed)
    x, scale = rng.normal(size=2), rng.uniform(0.1, 3.0, 2)
    lr = share / (2 * L * scale.max() * steps)
    c = np.mean([clients.full(i, x) for i in range(3)], axis=0)
    bounds = {
        name: theory.mime_drift_bound(
            "mime", client_lr=lr, steps=steps, smoothness=L, gradient2=c @ c, lipschitz=scale.max(), constant=name
        ).value
        for name in ("theorem", "lemma")
    }
    assert bounds["lemma"] == pytest.approx(18 * bounds["theorem"])
    for order in itertools.product(range(2), repeat=steps):
        found = [drift_of_client(clients, i, order, x, lr, scale, c) for i in range(3)]
        e = np.mean([total for total, _ in found], axis=0) / steps
        assert e @ e <= bounds["theorem"] * (1 + 1e-9) + 1e-24
        after = np.mean([y for _, y in found], axis=0)
        np.testing.assert_allclose(after, x - steps * lr * scale * (c + e), atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(**problems)
def test_mimelite_drifts_less_than_theorem_1_says_in_expectation(seed, kind, share, steps):
    """E ||e||^2 over all orders of batches, drawn with replacement; clients take part all (their mean is exact)."""
    clients = Clients(seed, kind)
    x = np.random.default_rng(seed).normal(size=2)
    lr = share / (2 * L * steps)
    G2, sigma2, gradient = clients.constants(x)
    orders = list(itertools.product(range(2), repeat=steps))
    per_client = [
        [drift_of_client(clients, i, order, x, lr, 1.0, None)[0] / steps for order in orders] for i in range(3)
    ]
    # the clients draw independently: E ||mean_i e_i||^2 = ||mean_i E e_i||^2 + sum_i Var(e_i) / 9
    means = np.array([np.mean(found, axis=0) for found in per_client])
    spread = [np.mean(np.sum((np.array(f) - m) ** 2, -1)) for f, m in zip(per_client, means, strict=True)]
    expected = np.sum(means.mean(0) ** 2) + sum(spread) / 9
    bound = theory.mime_drift_bound(
        "mimelite", client_lr=lr, steps=steps, smoothness=L, gradient2=gradient @ gradient, G2=G2, sigma2=sigma2
    )
    assert expected <= bound.value * (1 + 1e-9) + 1e-24
    assert bound.terms["clients"] == pytest.approx(18 * (L * lr * steps) ** 2 * G2)


def logistic(params, batch, key):
    losses = jnp.log1p(jnp.exp(-batch["y"] * (batch["x"] @ params)))
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


@pytest.mark.parametrize("method", ["mime", "mimelite"])
def test_the_drift_of_simulated_rounds_is_below_the_bound(method):
    """Full batches of logistic clients; L from `theory.constants`' definition, here an exact bound: max ||x||^2 / 4."""
    rng = np.random.default_rng(3)
    rows = [{"x": rng.normal(size=(6, 3)) + i, "y": rng.choice([-1.0, 1.0], 6)} for i in range(4)]
    split, steps = Split.from_clients(rows), 5
    smooth = max(float(np.linalg.eigvalsh(r["x"].T @ r["x"] / 6)[-1]) / 4 for r in rows)
    lr = 1 / (2 * smooth * steps)
    with jax.enable_x64(True):
        alg = getattr(fb, method)(logistic, base="sgd", client_lr=lr, steps=steps, batch_size=None, weighting="uniform")
        trace = trace_shadow(alg, jnp.zeros(3), split, rounds=3)
        seen = estimate(logistic, jnp.zeros(3), split)

    def gradient(i, x):
        z, y = rows[i]["x"], rows[i]["y"]
        return -(z.T @ (y / (1 + np.exp(y * (z @ x))))) / 6

    assert seen.L_client_max.value <= smooth * (1 + 1e-6)  # at 0 the Hessian of a client is x'x / 4 n: attained
    for t in range(3):
        x = trace.server[t]
        at_x = np.array([gradient(i, x) for i in range(4)])
        paths = trace.iterates[t][np.argsort(trace.clients[t])]
        e = np.mean([[gradient(i, y) - at_x[i] for y in paths[i][:-1]] for i in range(4)], axis=(0, 1))
        mean = at_x.mean(0)
        np.testing.assert_allclose(trace.server[t + 1], x - lr * steps * (mean + e), atol=1e-10)
        bound = theory.mime_drift_bound(
            method,
            client_lr=lr,
            steps=steps,
            smoothness=smooth,
            gradient2=mean @ mean,
            G2=float(np.mean(np.sum((at_x - mean) ** 2, -1))),
            constant="theorem",
        )
        assert 0 < e @ e <= bound.value


def test_a_step_outside_theorem_1_is_refused():
    with pytest.raises(ValueError, match=r"1 / \(2 L B\)"):
        theory.mime_drift_bound("mime", client_lr=0.11, steps=5, smoothness=1.0, gradient2=1.0)
    with pytest.raises(ValueError, match="mimelite"):
        theory.mime_drift_bound("fedavg", client_lr=0.01, steps=5, smoothness=1.0, gradient2=1.0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 4))
def test_the_gradient_of_a_round_has_the_variance_of_theorem_1(seed, steps):
    """Over all pairs of clients (S = 2, with replacement) and all orders of batches, exactly."""
    clients = Clients(seed, "quadratic")
    x = np.random.default_rng(seed).normal(size=2)
    G2, sigma2, gradient = clients.constants(x)
    means = [clients.full(i, x) for i in range(3)]
    pairs = list(itertools.product(range(3), repeat=2))
    mime = np.mean([np.sum(((means[i] + means[j]) / 2 - gradient) ** 2) for i, j in pairs])
    assert mime == pytest.approx(theory.mime_noise_bound("mime", G2=G2, sampled=2).value)
    orders = list(itertools.product(range(2), repeat=steps))
    # a client's mean over its batches: its variance over the orders, independent of the other client's
    own = [np.mean([np.sum((np.mean([clients.gradient(i, j, x) for j in o], 0) - means[i]) ** 2) for o in orders])
           for i in range(3)]  # fmt: skip
    lite = mime + np.mean(own) / 2
    assert lite <= theory.mime_noise_bound("mimelite", G2=G2, sampled=2, steps=steps, sigma2=sigma2).value * (1 + 1e-9)


positive = st.floats(1e-3, 1e3)
setting = {
    "smoothness": positive,
    "G2": positive,
    "gap": positive,
    "steps": st.integers(1, 1000),
    "sampled": st.integers(1, 1000),
    "rounds": st.integers(1, 10**6),
}


@given(**setting, sigma2=positive, lite=st.booleans())
def test_corollary_2_follows_from_its_lemma_by_the_step_size(lite, sigma2, **known):
    """The recipe satisfies K eta <= 1 / (12 L), and the bound is at most the corollary's closed form."""
    found = recipes.sgd_steps(**known, sigma2=sigma2, lite=lite)
    eta = known["steps"] * found.client_lr
    smooth, S, T, F = (known[k] for k in ("smoothness", "sampled", "rounds", "gap"))
    assert eta <= 1 / (12 * smooth) * (1 + 1e-12)
    bound = theory.mime_sgd_bound("mimelite" if lite else "mime", **known, sigma2=sigma2)
    variance = smooth * known["G2"] * F / (S * T)
    tail = 192 * smooth * F / T
    if not lite:
        closed = 32 * math.sqrt(3 * variance) + tail  # printed with 16: it counts one of two equal terms
        best = minimize_scalar(
            lambda e: 16 * F / (e * T) + 48 * smooth * e * known["G2"] / S,
            bounds=(0, 1 / (12 * smooth)),
            method="bounded",
            options={"xatol": 1e-12 / smooth},
        )
        assert bound.value <= best.fun * (1 + 1e-6)  # for Mime the recipe is the best step size of the lemma
    else:
        tilde = math.sqrt(known["G2"] + sigma2 / known["steps"])
        closed = 32 * math.sqrt(variance) + 84 * (smooth * tilde * F / T) ** (2 / 3) + tail
    assert bound.value <= closed * (1 + 1e-9)
    assert min(found.limits.values()) == found.client_lr


def test_corollary_2_is_its_lemma_substituted():
    """Where the variance decides the step, both terms are equal and their sum is 32 sqrt(3 L G^2 F / (S T))."""
    known = {"smoothness": 2.0, "G2": 5.0, "gap": 3.0, "steps": 7, "sampled": 4, "rounds": 10**6}
    bound = theory.mime_sgd_bound("mime", **known)
    assert bound.value == pytest.approx(32 * math.sqrt(3 * 2.0 * 5.0 * 3.0 / (4 * 10**6)))
    assert bound.terms["optimization"] == pytest.approx(bound.terms["statistics"])


@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("mu", [None, 0.05])
def test_mime_with_sgd_stays_below_corollary_2(lite, mu):
    """All clients take part, so G^2 / S is not even needed: quadratic clients, the recipe's step, in NumPy."""
    rng = np.random.default_rng(5)
    q = np.linalg.qr(rng.normal(size=(4, 3, 3)))[0]
    a = np.einsum("nij,j,nkj->nik", q, [0.1, 0.5, 1.0], q)
    b = rng.normal(size=(4, 3))
    best = np.linalg.solve(a.mean(0), -b.mean(0))
    value = lambda x: np.mean([x @ h @ x / 2 + v @ x for h, v in zip(a, b, strict=True)])  # noqa: E731
    x, steps, rounds = best + 3.0, 4, 400
    known = {"smoothness": 1.0, "gap": value(x) - value(best), "steps": steps, "sampled": 4, "rounds": rounds}
    G2 = 30.0  # over the region that the run visits; checked below
    lr = recipes.sgd_steps(**known, G2=G2, lite=lite, mu=mu).client_lr
    squares = []
    for _ in range(rounds):
        at_x = a @ x + b
        c = at_x.mean(0)
        assert np.mean(np.sum((at_x - c) ** 2, -1)) <= G2
        squares.append(c @ c)
        ys = np.repeat(x[None], 4, 0)
        for _ in range(steps):
            g = np.einsum("nij,nj->ni", a, ys) + b
            ys = ys - lr * (g if lite else g - at_x + c)
        x = ys.mean(0)
    weights = np.ones(rounds) if mu is None else (1 - mu * steps * lr / 8) ** np.arange(rounds - 1, -1, -1.0)
    bound = theory.mime_sgd_bound("mimelite" if lite else "mime", **known, G2=G2, mu=mu)
    assert np.average(squares, weights=weights) <= bound.value


@given(
    smoothness=positive,
    largest_gradient=positive,
    eps=st.floats(1e-3, 1.0),
    steps=st.integers(1, 100),
    sampled=st.integers(1, 1000),
    lite=st.booleans(),
)
def test_corollary_3_satisfies_the_conditions_of_its_lemmas(smoothness, largest_gradient, eps, steps, sampled, lite):
    """Lemmas 14 to 16 with B = 1 / eps: each inequality that the proof uses about the step size."""
    known = {"smoothness": smoothness, "largest_gradient": largest_gradient, "eps": eps, "sampled": sampled}
    eta = steps * recipes.adam_steps(**known, steps=steps, lite=lite).client_lr
    H = max(largest_gradient, math.sqrt(eps) - eps)
    S = sampled if lite else 1
    assert (H + eps) ** 2 >= eps * (1 - 1e-12)
    assert smoothness * eta / eps**2 <= 1 / (4 * (H + eps)) * (1 + 1e-9)
    assert 18 * (smoothness * eta) ** 2 * (H + eps) / eps**4 <= 1 / (8 * S * (H + eps)) * (1 + 1e-9)
    assert eta <= eps / (2 * smoothness) * (1 + 1e-9)  # Theorem I with B = 1 / eps
    bound = theory.mime_adam_bound(
        "mimelite" if lite else "mime", **known, steps=steps, G2=2.0, sigma2=3.0, gap=1.5, rounds=50
    )
    root = math.sqrt(sampled) if lite else 1
    assert bound.terms["optimization"] == pytest.approx(96 * smoothness * root * (H + eps) ** 2 * 1.5 / (eps**2 * 50))
    assert bound.terms["statistics"] == pytest.approx(2 * (2.0 + (3.0 / steps if lite else 0)) / sampled)


@given(**setting, delta=positive, sigma2=positive, lite=st.booleans())
def test_theorems_5_and_6_satisfy_the_conditions_of_their_lemmas(lite, sigma2, delta, **known):
    """Lemmas 20 to 24, and the closed form that the substitution gives."""
    found = recipes.mvr_steps(**known, delta=delta, sigma2=sigma2, lite=lite)
    smooth, G2, F, K, S, T = (known[k] for k in ("smoothness", "G2", "gap", "steps", "sampled", "rounds"))
    eta, a = found.client_lr, found.a
    slack = 1 + 1e-9
    assert eta <= 1 / smooth * slack
    for factor in (6, 51, 192, 864):
        assert eta <= 1 / (factor * delta * K) * slack
    assert 1 / T <= a * slack <= slack**2
    for factor in (912, 1536, 2592):
        assert a * slack >= factor * (K * delta * eta) ** 2
    assert found.warmup == T
    noise = G2 + sigma2 if lite else G2 / S
    bound = theory.mime_mvr_bound("mimelite" if lite else "mime", **known, delta=delta, sigma2=sigma2)
    cube = (delta**2 * noise * F**2 / T**2) ** (1 / 3)  # printed with F: its units need F^2, as Theorem IV's T has
    closed = (
        24 * (smooth + 864 * delta * K) * F / (K * T)
        + (24 * 6936 ** (1 / 3) + 408 * 2592 / 6936 ** (2 / 3)) * cube
        + (2304 / 23 + 408) * noise / T
    )
    assert bound.value <= closed * slack
    assert bound.terms["optimization"] == pytest.approx(24 * F / (eta * K * T))


def test_theorem_5_refuses_what_its_lemmas_do_not_allow():
    known = {"smoothness": 1.0, "delta": 0.1, "G2": 1.0, "gap": 1.0, "steps": 10, "sampled": 5, "rounds": 100}
    with pytest.raises(ValueError, match="client_lr"):
        theory.mime_mvr_bound("mime", **known, client_lr=0.01)
    eta = 1 / 864
    with pytest.raises(ValueError, match="2592"):  # Theorem V's printed constant is too small for Lemma 23
        theory.mime_mvr_bound("mime", **known, client_lr=eta, a=1536 * (eta * 0.1 * 10) ** 2)


def test_rounds_are_the_fewest_that_reach_epsilon():
    known = {"smoothness": 2.0, "G2": 3.0, "gap": 1.5, "steps": 8, "sampled": 400}
    more = {"largest_gradient": 1.0, "eps": 0.1, "sigma2": 2.0}
    cases = [
        (theory.mime_sgd_rounds, theory.mime_sgd_bound, known),
        (theory.mime_sgd_rounds, theory.mime_sgd_bound, known | {"mu": 0.1}),
        (theory.mime_adam_rounds, theory.mime_adam_bound, known | more),
        (theory.mime_mvr_rounds, theory.mime_mvr_bound, known | {"delta": 0.25}),
    ]
    for rounds, bound, constants in cases:
        for method in ("mime", "mimelite"):
            fewest = rounds(method, 0.2, **constants)
            assert bound(method, **constants, rounds=fewest).value <= 0.2 * (1 + 1e-9)
            assert bound(method, **constants, rounds=fewest - 1).value > 0.2
    with pytest.raises(ValueError, match="sample more clients"):
        theory.mime_adam_rounds("mime", 0.2, **(known | more | {"sampled": 10}))


def test_mime_takes_its_rate_from_the_recipe():
    constants = {"smoothness": 2.0, "G2": 3.0, "gap": 1.5, "sampled": 4, "rounds": 50}
    rows = [{"x": np.full((4, 3), i + 1.0), "y": np.array([1.0, -1.0, 1.0, 1.0])} for i in range(3)]
    split = Split.from_clients(rows)
    rate = recipes.sgd_steps(**constants, steps=4).client_lr
    ends = [
        fb.simulate(fb.mime(logistic, base="sgd", steps=4, **choice), jnp.zeros(3), split, rounds=2, devices=1).params
        for choice in ({"recipe": constants}, {"client_lr": rate})
    ]
    np.testing.assert_array_equal(*ends)
    assert np.abs(np.asarray(ends[0])).max() > 0
    adam = {"base": "adam", "b1": 0, "eps": 0.1, "steps": 4, "recipe": {"smoothness": 2.0, "largest_gradient": 1.0}}
    for factory in (fb.mime, fb.mimelite):
        factory(logistic, **adam)
    refused = [
        (fb.mime, {"recipe": constants, "base": "sgd"}, "steps"),
        (fb.mime, {"recipe": constants, "base": "sgd", "steps": 4, "client_lr": 0.1}, "leave it out"),
        (fb.mime, {"recipe": constants, "base": "momentum", "steps": 4}, "mime_mvr"),
        (fb.mime, adam | {"b1": 0.9}, "b1=0"),
        (fb.mimelite, adam | {"recipe": {"smoothness": 1.0}}, "largest_gradient"),
        (fb.locmime, {"recipe": constants, "base": "sgd", "steps": 4}, "locmime"),
    ]
    for factory, options, word in refused:
        with pytest.raises(ValueError, match=word):
            factory(logistic, **options)
