"""Compression: bytes that are sent, unbiased rounding, and error feedback that loses nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.core import Down, Report, StructureError, Up, check_structure
from fedbraid.costs import cost, data_shapes
from fedbraid.local import ClientData
from fedbraid.transforms import clip, dp, qsgd, quantize, top_k
from fedbraid.transforms.codes import Quantized, Sparse, decoded, per_byte, quantized, scaled, sparse
from transforms.toy import holding, many_rounds, sending

rng = np.random.default_rng(0)
KEYS = jax.random.split(jax.random.key(1), 4000)


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "many"), [(1, 5), (2, 3), (3, 2), (7, 2), (8, 1), (127, 1)])
def test_numbers_on_the_grid_are_packed_and_read_back_exactly(levels, many):
    """All integers from -levels to levels, with a length that is no multiple of the numbers per byte."""
    whole = np.concatenate([np.arange(-levels, levels + 1), rng.integers(-levels, levels + 1, 9)])
    x = (0.25 * whole).astype(np.float32).reshape(1, -1)
    code = jax.jit(lambda k: quantized(k, jnp.asarray(x), levels=levels, norm="max", bucket=None))(jax.random.key(0))
    assert per_byte(levels) == many
    assert code.packed.dtype == jnp.uint8
    assert code.packed.shape == (-(-x.size // many),)
    np.testing.assert_array_equal(code.decode(), x)
    np.testing.assert_array_equal(code.scaled(-2.0).decode(), -2 * x)


@pytest.mark.parametrize(
    ("levels", "norm", "bucket"), [(127, "max", None), (7, "max", 4), (4, "l2", None), (1, "l2", 5)]
)
def test_rounding_is_unbiased_with_the_variance_of_the_formula(levels, norm, bucket):
    x = rng.normal(size=13).astype(np.float32)
    step = np.empty(13)
    width = bucket or 13
    for a in range(0, 13, width):
        part = x[a : a + width]
        step[a : a + width] = (np.abs(part).max() if norm == "max" else np.linalg.norm(part)) / levels
    fraction = x / step - np.floor(x / step)
    variance = fraction * (1 - fraction) * step**2

    encode = functools.partial(quantized, levels=levels, norm=norm, bucket=bucket)

    @jax.jit
    @jax.vmap
    def draw(key):
        return encode(key, jnp.asarray(x)).decode(), encode(key, jnp.asarray(x), shrink=True).decode()

    draws, shrunk = (np.asarray(a, np.float64) for a in draw(KEYS))
    spread = np.sqrt(variance / len(draws))
    assert np.all(np.abs(draws.mean(0) - x) <= 5 * spread + 1e-5 * step)
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.25, atol=1e-3 * (step**2).max())
    assert np.all(np.abs(draws - x) <= step * (1 + 1e-5))

    omega = variance.sum() / (x**2).sum()
    error = ((shrunk - x) ** 2).sum(1)
    expected = omega / (1 + omega) * (x**2).sum()  # a contraction, though omega itself may be above 1
    assert abs(error.mean() - expected) <= 5 * error.std() / np.sqrt(len(error)) + 1e-6


def test_one_level_in_a_long_vector_is_a_contraction_only_when_shrunk():
    x = jnp.asarray(rng.normal(size=400), jnp.float32)

    def error(shrink):
        one = lambda k: quantized(k, x, levels=1, norm="l2", bucket=None, shrink=shrink).decode()  # noqa: E731
        out = jax.jit(jax.vmap(one))(KEYS[:200])
        return float(np.mean(np.sum((np.asarray(out) - x) ** 2, 1)) / np.sum(np.asarray(x) ** 2))

    assert error(False) > 5
    assert error(True) < 1


def test_top_k_is_what_sorting_says():
    x = rng.normal(size=(4, 5)).astype(np.float32)
    code = sparse(jnp.asarray(x), 6)
    kept = np.argsort(-np.abs(x).ravel())[:6]
    expected = np.zeros(20, np.float32)
    expected[kept] = x.ravel()[kept]
    np.testing.assert_array_equal(code.decode(), expected.reshape(4, 5))
    assert code.places.dtype == jnp.uint8
    np.testing.assert_array_equal(decoded(scaled({"v": code}, 3.0))["v"], 3 * expected.reshape(4, 5))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_does_not_decode_to_something_finite(bad):
    x = jnp.array([1.0, bad, 0.0, 2.0])

    @jax.jit
    def read_back(key):
        return quantized(key, x, levels=7, norm="max", bucket=None).decode(), sparse(x, 1).decode()

    for got in read_back(jax.random.key(0)):
        assert not np.all(np.isfinite(got))


def test_an_array_of_zeros_stays_zero():
    for norm in ("max", "l2"):
        code = jax.jit(lambda k, n=norm: quantized(k, jnp.zeros(5), levels=7, norm=n, bucket=2, shrink=True).decode())
        np.testing.assert_array_equal(code(jax.random.key(0)), np.zeros(5))


# --- on the wire -----------------------------------------------------------------------------------------------------

PARAMS = {"w": jnp.zeros((100, 30)), "b": jnp.zeros(10), "s": jnp.zeros(())}


def test_cost_shows_the_bytes_that_are_sent():
    alg = sending_like(PARAMS)
    data = {"u": np.zeros((1, 1), np.float32)}

    def up(transform, **options):
        return cost(transform(alg, **options), PARAMS, data).up

    assert cost(alg, PARAMS, data).up == 4 * 3011
    assert up(quantize) == (3000 + 4) + (10 + 4) + 4  # the scalar is sent unchanged: its code is not smaller
    assert up(quantize, bits=4) == (1500 + 4) + (5 + 4) + 4
    assert up(qsgd, levels=1, bucket=500) == (600 + 6 * 4) + (2 + 4) + 4
    assert up(top_k, fraction=0.01) == 30 * (4 + 2) + 1 * (4 + 1) + 4
    assert up(lambda a: quantize(top_k(a, fraction=0.1))) == (300 + 4 + 300 * 2) + (4 + 1) + 4
    assert up(top_k, fraction=1.0) == 4 * 3011


def sending_like(params):
    """Clients send an upload with the structure of the parameters."""
    base = sending(1)

    def client(down, state, data, key):
        return Report(Up(down.params), jnp.ones(()), state)

    exchange = base.exchanges[0]._replace(client=client, receive=lambda server, aggregate, key: server)
    return base._replace(exchanges=(exchange,))


def test_the_codes_in_an_upload_are_of_the_right_kind():
    alg = quantize(top_k(sending(40), fraction=0.2))
    down, state = Down({"x": jnp.zeros(40)}), alg.init_client({"x": jnp.zeros(40)})
    data = ClientData.of({"u": np.zeros((1, 40))})
    code = jax.eval_shape(alg.exchanges[0].client, down, state, data, jax.random.key(0)).up.pseudograd["x"]
    assert isinstance(code, Sparse)
    assert isinstance(code.values, Quantized)


# --- error feedback --------------------------------------------------------------------------------------------------

VECTORS = rng.normal(size=(4, 6))
FEEDBACK = {
    "top_k": lambda alg: top_k(alg, fraction=0.3),
    "int4": lambda alg: quantize(alg, bits=4, error_feedback=True),
    "qsgd": lambda alg: qsgd(alg, levels=1, error_feedback=True),
}


@pytest.mark.parametrize("name", FEEDBACK)
@pytest.mark.usefixtures("x64")
def test_what_was_left_out_is_kept_and_nothing_is_lost_with_a_lost_upload(name):
    """The server's sum plus the clients' residuals is the sum of all arrived uploads before compression."""
    alg = FEEDBACK[name](sending(6))
    there = np.random.default_rng(1).random((12, 4)) < 0.6
    server, states = many_rounds(alg, {"x": jnp.zeros(6)}, holding(VECTORS), there)
    arrived = np.asarray(states.inner)  # before compression, client i's k-th upload is k u_i
    np.testing.assert_array_equal(arrived, there.sum(0))
    meant = sum(n * (n + 1) / 2 * u for n, u in zip(arrived, VECTORS, strict=True))
    residual = np.asarray(states.own["train"]["x"])
    assert np.abs(residual).max() > 0.1  # the code has an error, so the test is not trivial
    np.testing.assert_allclose(np.asarray(server["x"]) + residual.sum(0), meant, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_the_residual_of_top_k_stays_within_the_bound_of_a_contraction():
    """With |e+| <= q |u + e| and |u| = 1, |e| never exceeds q / (1 - q)."""
    u = jnp.asarray(VECTORS[0] / np.linalg.norm(VECTORS[0]))
    q = np.sqrt(1 - 2 / 6)

    def step(e, _):
        e = (u + e) - sparse(u + e, 2).decode()
        return e, jnp.linalg.norm(e)

    _, sizes = jax.lax.scan(step, jnp.zeros(6), None, length=200)
    assert np.max(sizes) <= q / (1 - q) + 1e-12
    assert np.min(sizes) > 0.1


@pytest.mark.usefixtures("x64")
def test_top_k_finds_the_optimum_of_disagreeing_clients_only_with_feedback():
    """Each client has its own optimum. Without error feedback, top-k does not end at their mean."""
    points = np.array([[8.0, 1.0, 1.0], [-7.0, 1.0, 2.0], [0.5, 1.0, 9.0]])
    data = holding(points)

    def loss(params, batch, key):
        return 0.5 * jnp.sum((params - batch["u"][0]) ** 2)

    def error(feedback):
        alg = top_k(fb.minibatch_sgd(loss, lr=0.02, batch_size=1), fraction=0.3, error_feedback=feedback)
        server, _ = many_rounds(alg, jnp.zeros(3), data, np.ones((600, 3), bool))
        return np.linalg.norm(np.asarray(server.params) - points.mean(0))

    assert error(True) < 0.1
    assert error(False) > 0.5


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda alg: quantize(alg, bits=3), "bits"),
        (lambda alg: quantize(alg, bucket=0), "bucket"),
        (lambda alg: qsgd(alg, levels=0), "levels"),
        (lambda alg: qsgd(alg, levels=128), "levels"),
        (lambda alg: top_k(alg, fraction=0.0), "fraction"),
        (lambda alg: top_k(alg, fraction=1.5), "fraction"),
        (lambda alg: top_k(alg, exchanges=["prox"]), "prox"),
        (lambda alg: quantize(dp(alg)), "dp outside"),
    ],
)
def test_bad_arguments_are_refused(make, word):
    with pytest.raises(ValueError, match=word):
        make(sending(6))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda alg: quantize(quantize(alg)), "once"),
        (lambda alg: top_k(quantize(alg)), "innermost"),
        (lambda alg: top_k(quantize(alg), error_feedback=False), "inside"),
        (lambda alg: quantize(top_k(alg, error_feedback=False, fraction=0.1), error_feedback=True), "innermost"),
        (lambda alg: dp(quantize(alg), where="clients", shares=3), "cannot add Gaussian noise"),
    ],
)
def test_stacks_that_make_no_sense_are_refused_before_anything_compiles(make, word):
    with pytest.raises(StructureError, match=word):
        check_structure(make(sending(40)), {"x": jnp.zeros(40)}, data_shapes(holding(np.zeros((2, 40)))))


def test_clipping_a_code_clips_what_it_stands_for():
    u = rng.normal(size=(1, 40)).astype(np.float32) * 10
    for inner in (quantize(sending(40)), top_k(sending(40), fraction=0.2), quantize(top_k(sending(40), fraction=0.2))):
        alg = clip(inner, bound=0.5)
        down, state = Down({"x": jnp.zeros(40)}), alg.init_client({"x": jnp.zeros(40)})

        @jax.jit
        def both(data, key, down=down, state=state, clients=(inner.exchanges[0].client, alg.exchanges[0].client)):
            return [decoded(client(down, state, data, key).up).pseudograd["x"] for client in clients]

        whole, cut = map(np.asarray, both(ClientData.of({"u": u}), jax.random.key(0)))
        assert abs(np.linalg.norm(cut) - 0.5) < 1e-6
        np.testing.assert_allclose(cut, whole * 0.5 / np.linalg.norm(whole), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", [fb.fedsplit, fb.feddyn])
def test_feedback_is_refused_where_clients_follow_what_was_decoded_anyway(make):
    alg, data = make(lambda params, batch, key: jnp.sum(params**2)), {"x": np.ones((4, 3), np.float32)}
    with pytest.raises(StructureError, match="error_feedback=False"):
        cost(top_k(alg, fraction=0.5), jnp.ones(3), data)
    cost(top_k(alg, fraction=0.5, error_feedback=False), jnp.ones(3), data)
    # SCAFFOLD reconciles only its decoded control variate, which is in the aux and has no residual
    cost(top_k(fb.scaffold(lambda params, batch, key: jnp.sum(params**2)), fraction=0.5), jnp.ones(3), data)
