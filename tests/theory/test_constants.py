"""Constants of data against exact values: NumPy on least squares and on logistic regression."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid.data.federated import Split
from fedbraid.theory import drift_bound, gaussian_least_squares, logistic_clients
from fedbraid.theory.constants import Hessians, envelope, estimate, gradients


def masked(values, batch):
    return jnp.sum(values * batch["mask"]) / jnp.sum(batch["mask"])


def square_loss(x, batch, key):
    return masked(0.5 * (batch["x"] @ x - batch["y"]) ** 2, batch)


def logistic_loss(x, batch, key):
    return masked(jnp.logaddexp(0.0, -batch["y"] * (batch["x"] @ x)), batch) + 0.05 * jnp.sum(x**2)


def exact(split, x, kind, batch_size, weighting):
    """All constants from per-example gradients and Hessians, written out."""
    grads, hessians, noise = [], [], []
    for i in range(split.num_clients):
        client = split.client(i)
        a, y = np.asarray(client["x"], float), np.asarray(client["y"], float)
        if kind == "square":
            each = (a @ x - y)[:, None] * a
            H = a.T @ a / len(a)
        else:
            s = 1 / (1 + np.exp(y * (a @ x)))
            each = -(y * s)[:, None] * a + 0.1 * x
            H = (a * (s * (1 - s))[:, None]).T @ a / len(a) + 0.1 * np.eye(len(x))
        n, B = len(a), min(batch_size, len(a))
        S2 = np.sum((each - each.mean(0)) ** 2) / (n - 1)
        grads.append(each.mean(0))
        hessians.append(H)
        noise.append(S2 / B * (1 - B / n))
    w = (
        split.sizes / split.sizes.sum()
        if weighting == "examples"
        else np.full(split.num_clients, 1 / split.num_clients)
    )
    grads, hessians, noise = np.array(grads), np.array(hessians), np.array(noise)
    mean, H = w @ grads, np.einsum("i,iab->ab", w, hessians)
    apart = np.linalg.norm(grads - mean, axis=1)
    each = np.linalg.eigvalsh(hessians)
    return {
        "L": np.linalg.eigvalsh(H)[-1],
        "mu": np.linalg.eigvalsh(H)[0],
        "L_client_max": each.max(),
        "mu_client_min": each.min(),
        "sigma2": w @ noise,
        "G2": w @ apart**2,
        "B2": w @ np.sum(grads**2, axis=1) / np.sum(mean**2),
        "zeta": apart.max(),
        "delta": max(np.abs(np.linalg.eigvalsh(h - H)).max() for h in hessians),
        "grad_norm2": np.sum(mean**2),
    }


def least_squares(**options):
    return Split.from_clients(gaussian_least_squares(**options).clients())


def uneven(split, sizes):
    return Split.from_clients([{k: a[:n] for k, a in split.client(i).items()} for i, n in enumerate(sizes)])


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("kind", ["square", "logistic"])
def test_all_clients_give_the_exact_constants(kind, weighting):
    if kind == "square":
        split, loss = least_squares(clients=5, dim=6, examples=60, seed=3), square_loss
    else:
        split, loss = Split.from_clients(logistic_clients(clients=5, dim=6, examples=60, seed=3)), logistic_loss
    split = uneven(split, [60, 31, 17, 44, 8])
    x = 0.3 * np.random.default_rng(0).standard_normal(6)
    with jax.enable_x64(True):
        got = estimate(loss, jnp.asarray(x), split, batch_size=4, weighting=weighting)
    for name, value in exact(split, x, kind, 4, weighting).items():
        assert getattr(got, name).value == pytest.approx(value, rel=1e-6), name
        assert getattr(got, name).stderr == 0.0, name  # all clients were sampled
    assert got.convex_here
    assert got.notes == ()


def test_the_loss_gets_preprocessed_batches():
    """A split that preprocesses has the constants of the data as preprocessed by hand, in gradients and Hessians."""
    split = least_squares(clients=3, dim=4, examples=12, seed=5)
    done = Split.from_clients([{**split.client(i), "x": 2 * split.client(i)["x"] - 1} for i in range(3)])

    def prepare(batch, key, train):
        assert key is None  # no augmentation
        assert not train
        return {**batch, "x": 2 * batch["x"] - 1}

    x = 0.3 * np.random.default_rng(0).standard_normal(4)
    with jax.enable_x64(True):
        got = estimate(square_loss, jnp.asarray(x), dataclasses.replace(split, preprocess=prepare), batch_size=4)
    for name, value in exact(done, x, "square", 4, "examples").items():
        assert getattr(got, name).value == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("kind", ["square", "logistic"])
def test_lanczos_in_float32_is_within_five_percent(kind):
    """The method for large models: only Hessian-vector products, with the default tolerance."""
    if kind == "square":
        split, loss = least_squares(clients=4, dim=30, examples=80, seed=1), square_loss
    else:
        split, loss = Split.from_clients(logistic_clients(clients=4, dim=30, examples=80, seed=1)), logistic_loss
    x = 0.2 * np.random.default_rng(0).standard_normal(30)
    got = estimate(loss, jnp.asarray(x, jnp.float32), split, hessians=Hessians(dense=0, compared=4), batch_size=1)
    truth = exact(split, x, kind, 1, "examples")
    for name in ("L", "L_client_max", "delta", "sigma2", "G2", "B2", "zeta"):
        assert getattr(got, name).value == pytest.approx(truth[name], rel=0.05), name
    # small eigenvalues are accurate to a share of the largest; the notes say so
    assert abs(got.mu.value - truth["mu"]) <= 0.05 * truth["L"]
    assert any("resolved to" in note for note in got.notes)


def test_products_with_one_client_and_with_the_mean_are_one_program():
    split = least_squares(clients=3, dim=5, examples=20, seed=2)
    traced = []

    def loss(params, batch, key):
        traced.append(batch["mask"].shape)
        return square_loss(params, batch, key)

    estimate(loss, jnp.zeros(5, jnp.float32), split, hessians=Hessians(dense=0, compared=1), batch_size=None)
    # rows of a whole client: once to see whether the loss has a forward mode, and once for the only program
    assert traced.count((20,)) == 2


def test_sampling_clients_is_unbiased_within_its_standard_errors():
    """40 of 200 clients are sampled: over seeds, the errors match the standard errors and have mean 0."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((200, 2)) * [1.0, 0.3] + [0.5, 0.0]
    split = Split.from_clients([{"x": np.tile(c, (2, 1))} for c in centers])

    def loss(x, batch, key):
        return masked(0.5 * jnp.sum((x - batch["x"]) ** 2, axis=1), batch)

    mean = centers.mean(0)
    truth = {
        "G2": np.mean(np.sum((centers - mean) ** 2, axis=1)),
        "grad_norm2": np.sum(mean**2),
        "loss": 0.5 * np.mean(np.sum(centers**2, axis=1)),
    }
    found = [estimate(loss, jnp.zeros(2), split, clients=40, seed=s, hessians=None) for s in range(30)]
    for name, value in truth.items():
        values = np.array([getattr(c, name).value for c in found])
        errors = np.array([getattr(c, name).stderr for c in found])
        assert abs(values.mean() - value) < 4 * values.std() / math.sqrt(30), name
        assert 0.6 < values.std() / errors.mean() < 1.6, name
    assert math.isnan(found[0].L.value)
    assert any("40 of 200" in note for note in found[0].notes)


def test_batches_of_a_large_model_give_the_same_noise_as_single_examples(monkeypatch):
    """The noise is computed between batches for large models, between examples for small ones: the same S^2 in mean."""
    split = least_squares(clients=3, dim=40, examples=400, seed=2)
    x = jnp.zeros(40)
    small = estimate(square_loss, x, split, batch_size=10, hessians=None)
    monkeypatch.setattr(gradients, "PER_EXAMPLE_LIMIT", 100)  # as if 40 parameters were many
    large = [estimate(square_loss, x, split, batch_size=10, hessians=None, seed=s).sigma2.value for s in range(8)]
    assert np.mean(large) == pytest.approx(small.sigma2.value, rel=0.1)
    assert large[0] != small.sigma2.value


def test_negative_curvature_is_found_and_reaches_the_bounds():
    split = Split.from_clients([{"x": np.array([[c]])} for c in (0.5, 1.0, 1.5)])

    def saddle(x, batch, key):
        return masked(0.5 * (x[0] - batch["x"][:, 0]) ** 2 - 0.25 * x[1] ** 2, batch)

    got = estimate(saddle, jnp.zeros(2), split)
    assert got.mu.value == pytest.approx(-0.5, rel=1e-4)
    assert not got.convex_here
    b = drift_bound(eta=0.1, tau=2, evidence=got)
    assert not b.proven
    assert "contradicts it" in str(b)


def test_a_loss_with_its_own_reverse_rule_works_too():
    @jax.custom_vjp
    def half_square(r):
        return 0.5 * r**2

    half_square.defvjp(lambda r: (0.5 * r**2, r), lambda r, g: (g * r,))

    def loss(x, batch, key):
        return masked(half_square(batch["x"] @ x - batch["y"]), batch)

    split = least_squares(clients=2, dim=3, examples=20)
    plain, own = (estimate(f, jnp.zeros(3), split) for f in (square_loss, loss))
    assert own.L.value == pytest.approx(plain.L.value, rel=1e-5)


def test_a_point_of_zero_mean_gradient_has_no_b():
    split = Split.from_clients([{"x": np.array([[c]])} for c in (-1.0, 1.0)])
    got = estimate(lambda x, b, k: masked(0.5 * (x[0] - b["x"][:, 0]) ** 2, b), jnp.zeros(1), split)
    assert math.isinf(got.B2.value)
    assert any("B^2 is not determined" in note for note in got.notes)
    assert got.G2.value == pytest.approx(1.0)


def test_identical_clients_have_no_dissimilarity():
    one = gaussian_least_squares(clients=1, dim=3, examples=10)
    member = {"x": one.designs[0], "y": one.responses[0]}
    got = estimate(square_loss, jnp.ones(3), Split.from_clients([member] * 4))
    assert got.G2.value == pytest.approx(0.0, abs=1e-9)
    assert got.delta.value == pytest.approx(0.0, abs=1e-5)
    assert got.B2.value == pytest.approx(1.0, rel=1e-5)


def test_envelope_takes_the_worst_and_the_table_prints():
    split = least_squares(clients=3, dim=2, examples=10)
    points = [estimate(square_loss, x * jnp.ones(2), split) for x in (0.0, 5.0)]
    worst = envelope(points)
    assert worst.G2.value == max(p.G2.value for p in points)
    assert worst.mu.value == min(p.mu.value for p in points)
    text = str(points[0])
    assert all(name in text for name in ("sigma^2", "G^2", "B^2", "zeta", "delta", "mu"))
    plain = points[0].as_dict()
    assert plain["L"]["value"] == points[0].L.value
    assert {f.name for f in dataclasses.fields(points[0])} >= set(plain) - {"batch_size"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"weighting": "size"}, "weighting must be"),
    ],
)
def test_bad_input_is_refused_by_name(options, message):
    split = least_squares(clients=2, dim=2, examples=4)
    with pytest.raises(ValueError, match=message):
        estimate(square_loss, jnp.zeros(2), split, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, "examples must be at least 1"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"compared": 0}, "compared must be at least 1"),
        ({"tolerance": 0.0}, "tolerance must lie between 0 and 1"),
    ],
)
def test_bad_options_of_hessians_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Hessians(**options)


def test_bad_data_and_parameters_are_refused():
    split = least_squares(clients=2, dim=2, examples=4)
    with pytest.raises(ValueError, match="floating"):
        estimate(square_loss, jnp.zeros(2, jnp.int32), split)
    with pytest.raises(ValueError, match="loss of client 0 is not finite"):
        estimate(lambda x, b, k: jnp.log(x[0]) * jnp.sum(b["mask"]), jnp.array([-1.0]), split)
    with pytest.raises(ValueError, match="at least one point"):
        envelope([])
