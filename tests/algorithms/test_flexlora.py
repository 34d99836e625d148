"""FlexLoRA against the SVD of the mean product, and its laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.algorithms._flexlora import A, B, mean_of_products
from fedbraid.core import StructureError
from fedbraid.models.low_rank import LORA_A, LORA_B
from fedbraid.simulation import fedasync, fedbuff
from fedbraid.simulation.clock import Clock
from fedbraid.testing import check

RNG = np.random.default_rng(3)


def factors(k, m, n, r):
    return RNG.normal(size=(k, m, r)).astype(np.float32), RNG.normal(size=(k, r, n)).astype(np.float32)


@pytest.mark.parametrize(("k", "m", "n", "r"), [(4, 7, 9, 2), (5, 3, 4, 2), (2, 6, 2, 3)])
def test_the_factors_are_those_of_the_svd_of_the_dense_mean(k, m, n, r):
    a, b = factors(k, m, n, r)
    share = RNG.dirichlet(np.ones(k)).astype(np.float32)
    left, right = map(np.asarray, mean_of_products(a, b, share))
    u, s, vt = np.linalg.svd(np.einsum("k,kmr,krn->mn", *(x.astype(float) for x in (share, a, b))), full_matrices=False)
    few = min(r, len(s))
    best = (u[:, :few] * s[:few]) @ vt[:few]
    np.testing.assert_allclose(left @ right, best, atol=2e-5)
    assert left.shape == (m, r)
    assert right.shape == (r, n)
    np.testing.assert_allclose((left.T @ left)[:few, :few], np.eye(few), atol=1e-5)
    # the mean of the factors is worse
    means = np.einsum("k,kmr->mr", share, a) @ np.einsum("k,krn->rn", share, b)
    mean = np.einsum("k,kmr,krn->mn", share, a, b)
    assert np.linalg.norm(mean - left @ right) < np.linalg.norm(mean - means)


def test_equal_clients_keep_their_product_and_missing_ones_do_not_count():
    a, b = factors(1, 6, 5, 2)
    same = np.repeat(a, 3, 0), np.repeat(b, 3, 0)
    left, right = mean_of_products(*same, jnp.array([0.2, 0.5, 0.3]))
    np.testing.assert_allclose(left @ right, a[0] @ b[0], atol=1e-5)
    same[0][1], same[1][1] = np.nan, np.inf
    left, right = mean_of_products(*same, jnp.array([0.4, 0.0, 0.6]))
    np.testing.assert_allclose(left @ right, a[0] @ b[0], atol=1e-5)


def test_zero_products_keep_directions_to_learn_in():
    a, b = factors(3, 6, 5, 2)
    left, right = mean_of_products(a, 0 * b, jnp.full(3, 1 / 3))
    np.testing.assert_allclose(right, 0, atol=1e-7)
    np.testing.assert_allclose(left.T @ left, np.eye(2), atol=1e-5)


def loss(params, batch, key):
    pair = params["layer"]
    residual = batch["x"] @ pair[A] @ pair[B] + params["bias"] - batch["y"]
    return fb.local.masked_mean(jnp.sum(residual**2, -1), batch["mask"])


def federation(dtype=np.float32):
    return [{"x": RNG.normal(size=(n, 4)).astype(dtype), "y": RNG.normal(size=(n, 3)).astype(dtype)} for n in (4, 2, 6)]


def first_model(dtype=np.float32):
    start = {"layer": {A: RNG.normal(size=(4, 2)), B: RNG.normal(size=(2, 3))}, "bias": np.ones(3)}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), start)


@pytest.mark.usefixtures("x64")
def test_it_obeys_the_laws_of_all_algorithms():
    alg = fb.flexlora(loss, client_lr=0.02, batch_size=None, steps=2)
    params = jax.tree.map(jnp.asarray, first_model(np.float64))
    checked = check(alg, params=params, data=fb.Split.from_clients(federation(np.float64)))
    assert {"engine", "plan", "order", "resume", "deployed", "weight"} <= set(checked.held)


def test_a_round_is_local_training_and_the_svd_of_the_weighted_mean():
    assert (A, B) == (LORA_A, LORA_B)
    clients, start = federation(), first_model()
    alg = fb.flexlora(loss, client_lr=0.02, batch_size=None, steps=2)
    found = fb.simulate(alg, start, fb.Split.from_clients(clients), rounds=1).params
    ends = []
    for data in clients:
        y = start
        for _ in range(2):
            gradient = jax.grad(loss)(y, data | {"mask": np.ones(len(data["x"]), np.float32)}, None)
            y = jax.tree.map(lambda y, g: y - 0.02 * g, y, gradient)
        ends.append(y)
    shares = np.array([4, 2, 6]) / 12
    mean = sum(w * np.asarray(y["layer"][A], float) @ np.asarray(y["layer"][B], float)
               for w, y in zip(shares, ends, strict=True))  # fmt: skip
    u, s, vt = np.linalg.svd(mean)
    np.testing.assert_allclose(found["layer"][A] @ found["layer"][B], (u[:, :2] * s[:2]) @ vt[:2], atol=1e-5)
    expected = sum(w * np.asarray(y["bias"]) for w, y in zip(shares, ends, strict=True))
    np.testing.assert_allclose(found["bias"], expected, rtol=1e-5)


def test_stacked_layers_are_factored_one_by_one():
    a, b = factors(3, 6, 5, 2)
    share = jnp.array([0.2, 0.5, 0.3])
    left, right = mean_of_products(np.stack([a, 2 * a]), np.stack([b, b]), share)
    one = mean_of_products(a, b, share)
    np.testing.assert_allclose(left[0] @ right[0], one[0] @ one[1], atol=1e-5)
    np.testing.assert_allclose(left[1] @ right[1], 2 * one[0] @ one[1], atol=1e-5)


def test_without_adapters_it_is_fedavg():
    from fedbraid.testing.problem import clients, start
    from fedbraid.testing.problem import loss as squares

    options = {"client_lr": 0.05, "batch_size": 3}
    runs = [fb.simulate(make(squares, **options), start(), clients(), rounds=2, cohort=3).params
            for make in (fb.flexlora, fb.fedavg)]  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *runs)
    with pytest.raises(ValueError, match="client_lr"):
        fb.flexlora(squares, client_lr=-1.0)


def test_both_factors_must_be_shared():
    alg = fb.transforms.private(fb.flexlora(loss, client_lr=0.02, batch_size=2), "*.lora_b")
    with pytest.raises(StructureError, match="both factors must be shared"):
        fb.simulate(alg, first_model(), fb.Split.from_clients(federation()), rounds=1)


CHANGING = {
    "clip": lambda alg: fb.transforms.clip(alg, bound=1.0),
    "adaptive_clip": fb.transforms.adaptive_clip,
    "norm_bound": lambda alg: fb.transforms.norm_bound(alg, bound=1.0),
    "top_k": lambda alg: fb.transforms.top_k(alg, error_feedback=False),
    "quantize": lambda alg: fb.transforms.quantize(alg, error_feedback=True),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("method", [fb.flexlora, fb.pfnm])
def test_transforms_of_changes_are_refused_because_uploads_are_models(name, method):
    with pytest.raises(StructureError, match=f"{name}: exchange 'train' sends whole models"):
        CHANGING[name](method(loss))


@pytest.mark.parametrize("mode", [fedasync(), fedbuff(2)])
def test_uploads_of_older_factors_are_refused(mode):
    with pytest.raises(ValueError, match="whole factors, which are not changes"):
        fb.simulate(
            fb.flexlora(loss),
            first_model(),
            fb.Split.from_clients(federation()),
            rounds=2,
            clock=Clock(),
            asynchrony=mode,
        )


def test_a_pair_of_factors_may_be_private():
    """The server averages the products of the others."""
    start = first_model()
    two = {"own": start["layer"], "layer": start["layer"], "bias": start["bias"]}

    def with_own(params, batch, key):
        return loss(params, batch, key) + 0.1 * jnp.sum((params["own"][A] @ params["own"][B]) ** 2)

    alg = fb.transforms.private(fb.flexlora(with_own, client_lr=0.02, batch_size=None, steps=2), "own")
    data = fb.Split.from_clients(federation())
    found = fb.simulate(alg, two, data, rounds=1).params
    shared = fb.simulate(fb.flexlora(loss, client_lr=0.02, batch_size=None, steps=2), start, data, rounds=1).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found["layer"], shared["layer"])
    np.testing.assert_array_equal(found["own"][A], start["layer"][A])
