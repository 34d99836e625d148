"""Clipped uploads, the size of the noise, the adaptive bound, and the accountant."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import fedbraid as fb
from fedbraid.core import Aggregate, Exchange, StructureError, check_structure, numbers_drawn, reduce_reports
from fedbraid.costs import cost, data_shapes
from fedbraid.local import ClientData
from fedbraid.simulation.rounds import say_noise_is_seeded
from fedbraid.transforms import (
    adaptive_clip,
    clip,
    dp,
    elastic,
    epsilon,
    epsilon_by_round,
    epsilon_of_rows,
    median,
    quantize,
)
from told import told
from transforms.toy import holding, many_rounds, one_round, sending
from zoo import clients, loss, start

rng = np.random.default_rng(3)
NORMS = np.array([0.3, 0.7, 1.1, 1.9, 4.0])
VECTORS = NORMS[:, None] * (v := rng.normal(size=(5, 6))) / np.linalg.norm(v, axis=1)[:, None]


def all_of(up):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(up)])


# --- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_clipping_bounds_the_whole_upload_aux_included():
    """SCAFFOLD sends an update and a change of its control variate: the bound is on both together."""
    plain, bound = fb.scaffold(loss, client_lr=0.05), 0.9
    cut = clip(plain, bound=bound)
    split, seen = clients(), []
    down, state = plain.exchanges[0].send(plain.init(start())), plain.init_client(start())

    @jax.jit
    def both(data, key):
        return [alg.exchanges[0].client(down, state, data, key).up for alg in (plain, cut)]

    for i in range(5):
        arrays = {k: jnp.asarray(v) for k, v in split.arrays.items()}
        data = ClientData(arrays, jnp.int32(split.offsets[i]), jnp.int32(split.sizes[i]), 9)
        meant, sent = both(data, jax.random.key(i))
        size = np.linalg.norm(all_of(meant))
        assert np.linalg.norm(all_of(sent)) <= bound * (1 + 1e-14)
        np.testing.assert_allclose(all_of(sent), all_of(meant) * min(1, bound / size), rtol=1e-12)
        seen.append((size, np.linalg.norm(all_of(meant.pseudograd)), np.linalg.norm(all_of(meant.aux))))
    # the test is not trivial: some upload is over the bound, and both parts contribute to its norm
    assert any(size > bound for size, _, _ in seen)
    assert all(a > 0 and b > 0 for _, a, b in seen)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.usefixtures("x64")
def test_the_server_gets_the_clipped_uploads_and_the_metrics_say_which(opaque):
    alg = clip(sending(6, aux=True, opaque=opaque), bound=1.0)
    server, _, _, metrics = one_round(alg, {"x": jnp.zeros(6)}, VECTORS)
    size = np.sqrt(2) * NORMS  # the pseudograd is u, the aux -u
    np.testing.assert_allclose(server["x"], (VECTORS * np.minimum(1, 1 / size)[:, None]).sum(0), rtol=1e-10)
    np.testing.assert_array_equal(metrics["clipped"], size > 1)


@pytest.mark.usefixtures("x64")
def test_without_a_bound_nothing_changes():
    alg = fb.fedavg(loss, client_lr=0.05, weighting="uniform", batch_size=None)
    plain = one_round(alg, start(), clients())[0].params
    for neutral in (clip(alg, bound=math.inf), dp(alg, noise=0.0, bound=math.inf)):
        np.testing.assert_allclose(all_of(one_round(neutral, start(), clients())[0].params), all_of(plain), rtol=1e-14)


def test_zero_and_non_finite_uploads():
    alg = clip(sending(3), bound=0.5)

    @jax.jit
    def sent(u):
        down = alg.exchanges[0].send({"x": jnp.zeros(3)})
        return alg.exchanges[0].client(down, jnp.zeros(()), ClientData.of({"u": u[None]}), jax.random.key(0)).up

    np.testing.assert_array_equal(sent(jnp.zeros(3)).pseudograd["x"], np.zeros(3))
    huge = sent(jnp.array([3e30, 0.0, -4e30])).pseudograd["x"]  # its square overflows float32
    np.testing.assert_allclose(huge, [0.3, 0, -0.4], rtol=1e-6)
    for bad in (np.nan, np.inf):
        assert not alg.exchanges[0].admit(sent(jnp.array([1.0, bad, 0.0])))


# --- the adaptive bound ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_the_bound_follows_the_quantile_by_the_formula():
    """With constant uploads: the recursion of Andrew et al. in NumPy, which converges to the quantile."""
    alg = adaptive_clip(sending(6), quantile=0.5, initial=0.2, rate=0.3)
    exchange = alg.exchanges[0]
    first = exchange._replace(client=lambda down, k, data, key: still(exchange.client(down, k, data, key), k))
    still_alg = alg._replace(exchanges=(first,))
    server, _ = many_rounds(still_alg, {"x": jnp.zeros(6)}, holding(VECTORS), np.ones((40, 5), bool))
    bound, total = 0.2, np.zeros(6)
    for _ in range(40):
        total += (VECTORS * np.minimum(1, bound / NORMS)[:, None]).sum(0)
        bound *= np.exp(-0.3 * (np.mean(bound >= NORMS) - 0.5))
    np.testing.assert_allclose(server.own["train"], bound, rtol=1e-10)
    np.testing.assert_allclose(server.inner["x"], total, rtol=1e-9)
    assert NORMS[1] < bound < NORMS[3]


def still(report, k):
    return report._replace(state=k)


def test_adaptive_clipping_sends_a_number_down_and_a_byte_up():
    plain, adaptive = (
        cost(alg, {"x": jnp.zeros(6)}, holding(VECTORS)) for alg in (sending(6), adaptive_clip(sending(6)))
    )
    assert (adaptive.down - plain.down, adaptive.up - plain.up) == (4, 1)


# --- noise -----------------------------------------------------------------------------------------------------------

WIDE = 20_000


@functools.cache
def noise_of(where, quantile=None, arrived=8, seed=0):
    """One round with zero uploads: the server's result is the noise alone."""
    shares = 8 if where == "clients" else None
    alg = dp(sending(WIDE), noise=1.5, bound=0.4, where=where, shares=shares, quantile=quantile)
    vectors = np.zeros((8, WIDE), np.float32)
    server, *_ = one_round(alg, {"x": jnp.zeros(WIDE)}, vectors, there=np.arange(8) < arrived, seed=seed)
    return np.asarray(alg.params(server)["x"], float), server


@pytest.mark.parametrize(
    ("where", "arrived", "quantile"),
    [("server", 8, None), ("server", 3, None), ("clients", 8, None), ("clients", 3, None), ("server", 8, 0.5)],
)
def test_the_sum_carries_noise_of_the_promised_size(where, arrived, quantile):
    x, _ = noise_of(where, quantile, arrived)
    z = 1.5 if quantile is None else (1.5**-2 - (2 * 5 * 1.5) ** -2) ** -0.5
    deviation = z * 0.4 * (np.sqrt(arrived / 8) if where == "clients" else 1)
    assert abs(x.mean()) < 5 * deviation / np.sqrt(WIDE)
    assert abs(x.std() / deviation - 1) < 5 / np.sqrt(2 * WIDE)
    assert abs(np.mean(np.abs(x) < deviation) - math.erf(np.sqrt(0.5))) < 5 * 0.47 / np.sqrt(WIDE)  # normal


def test_the_bits_are_noised_too():
    """All uploads are within the bound, so without noise the bound would move by exp(-rate (1 - quantile))."""
    bound = float(noise_of("server", 0.5)[1].own["train"])
    share = 0.5 - np.log(bound / 0.4) / 0.2
    assert share != pytest.approx(1.0, abs=1e-4)
    assert abs(share - 1) < 5 * 7.5 / 8


@pytest.mark.usefixtures("x64")
def test_weights_are_equal_under_dp():
    alg = dp(sending(6, weight=lambda u: 1 + 10 * jnp.abs(u[0])), noise=0.0, bound=100.0)
    server, *_ = one_round(alg, {"x": jnp.zeros(6)}, VECTORS)
    np.testing.assert_allclose(server["x"], VECTORS.sum(0), rtol=1e-10)


@pytest.mark.parametrize("where", ["server", "clients"])
def test_another_key_gives_other_noise(where):
    a, b = noise_of(where)[0], noise_of(where, seed=1)[0]
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(WIDE)


def test_the_noise_is_drawn_by_the_engine_and_not_from_the_clients_or_the_servers_key():
    """The functions that get keys are the same for every key; all noise comes from ``draw``."""
    for where, shares in (("server", None), ("clients", 2)):
        alg = dp(sending(4), noise=1.0, bound=0.4, where=where, shares=shares, quantile=0.5)
        (exchange,) = alg.exchanges
        server = alg.init({"x": jnp.zeros(4)})
        down, data = exchange.send(server), ClientData.of({"u": jnp.ones((1, 4))})
        one, two = (exchange.client(down, jnp.zeros(()), data, jax.random.key(seed)) for seed in (0, 1))
        np.testing.assert_array_equal(all_of(one.up), all_of(two.up))
        up, weight, count = reduce_reports(exchange.reducer, jax.tree.map(lambda leaf: leaf[None], one.up), jnp.ones(1))
        aggregate = Aggregate(up, weight, count, 2)
        one, two = (exchange.receive(server, aggregate, jax.random.key(seed)) for seed in (0, 1))
        np.testing.assert_array_equal(all_of(one), all_of(two))
        assert exchange.sealed is not None
        drawn = [
            numbers_drawn(exchange.sealed.client, up, down),
            numbers_drawn(exchange.sealed.server, aggregate, 2.0, down),
        ]
        assert [len(shapes) for shapes in drawn] == ([0, 2] if where == "server" else [2, 0])  # upload and bit


def test_a_guarantee_without_noise_is_refused():
    """A mechanism that takes its noise from elsewhere, for example from a key, does not draw any."""
    alg = dp(sending(3), noise=1.0)
    (exchange,) = alg.exchanges
    assert exchange.sealed is not None
    silent = exchange.sealed._replace(server=lambda aggregate, expected, down, draw: aggregate)
    wrong = alg._replace(exchanges=(exchange._replace(sealed=silent),))
    shapes = data_shapes(holding(np.zeros((2, 3))))
    check_structure(alg, {"x": jnp.zeros(3)}, shapes)
    with pytest.raises(StructureError, match="never from a key"):
        check_structure(wrong, {"x": jnp.zeros(3)}, shapes)


def test_the_simulator_says_once_that_its_noise_protects_nothing():
    alg, data = dp(sending(3), noise=1.0), holding(np.zeros((2, 3)))
    say_noise_is_seeded.cache_clear()
    with told("protect nothing") as texts:
        for _ in range(2):
            fb.simulate(alg, {"x": jnp.zeros(3)}, data, rounds=1, devices=1)
    assert len(texts) == 1


@pytest.mark.usefixtures("x64")
def test_a_private_mean_is_the_sum_over_the_number_of_uploads_expected():
    """Two of five uploads arrive. Without noise the mean is their sum / 5, and SCAFFOLD's invariants agree with it."""
    there = np.array([True, False, False, True, False])
    alg = dp(sending(6), noise=0.0, bound=1.0)
    server, *_ = one_round(alg, {"x": jnp.zeros(6)}, VECTORS, there=there)
    clipped = VECTORS * np.minimum(1, 1 / NORMS)[:, None]
    np.testing.assert_allclose(server["x"] / 5, clipped[there].sum(0) / 5, rtol=1e-10)  # ``sending`` multiplies by 5


@pytest.mark.usefixtures("x64")
def test_a_lost_bit_counts_as_neither_within_nor_outside():
    alg = dp(sending(6), noise=0.0, bound=1.0, quantile=0.5, rate=0.3)
    server, *_ = one_round(alg, {"x": jnp.zeros(6)}, VECTORS, there=np.array([True, False, False, True, True]))
    share = 0.5 + (1 * 0.5 - 2 * 0.5) / 5  # one upload within the bound, two outside, two lost
    np.testing.assert_allclose(server.own["train"], np.exp(-0.3 * (share - 0.5)), rtol=1e-10)


# --- the accountant --------------------------------------------------------------------------------------------------


def by_dp_accounting(events, delta):
    """The smallest epsilon of dp-accounting's two accountants; the events are (noise multiplier, rate, number)."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld, rdp

    accountants = rdp.RdpAccountant(), pld.PLDAccountant(value_discretization_interval=1e-3)
    for accountant in accountants:
        for z, q, count in events:
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)), count)
    return min(accountant.get_epsilon(delta) for accountant in accountants)


def near(value):
    return pytest.approx(value, rel=2e-3)


def test_epsilon_is_dp_accountings_own():
    poisson = functools.partial(epsilon, cohorts="poisson")
    assert poisson(1.0, 0.01, 1000, 1e-6) == near(by_dp_accounting([(1.0, 0.01, 1000)], 1e-6))
    assert epsilon(1.0, 0.01, 1000, 1e-6) == near(by_dp_accounting([(0.5, 0.01, 1000)], 1e-6))
    assert epsilon(0.7, 1.0, 3, 1e-5) == near(by_dp_accounting([(0.7, 1.0, 3)], 1e-5))
    assert epsilon(1.0, 0.1, 300, 1e-5) == near(57.44)  # by PLD; 81.3 by Renyi divergences
    assert epsilon(0.0, 0.1, 1, 1e-5) == math.inf
    assert epsilon(1.0, 0.1, 0, 1e-5) == 0


def lost_at(eps, q, shift, flip):
    """The exact delta at ``eps`` of (1 - q) N(0) + q N(shift) against N(0), by quadrature; ``flip`` exchanges them."""
    x = np.linspace(-15, 15 + shift, 600_001)
    one = (1 - q) * stats.norm.pdf(x) + q * stats.norm.pdf(x - shift)
    other = stats.norm.pdf(x)
    one, other = (other, one) if flip else (one, other)
    return np.trapezoid(np.maximum(one - np.exp(eps) * other, 0), x)


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.3), (2.0, 0.1)])
def test_fixed_cohorts_cost_exactly_what_the_worst_clients_lose(z, q):
    """One round of a fixed cohort, where all other clients send -C and one client C: the exact loss of privacy.

    If the client is removed, another client takes its place in the cohort: the sum moves by 2 C. The formula for
    Poisson sampling promises less epsilon than this round costs.
    """
    delta = 1e-4

    def exact(eps):
        return max(lost_at(eps, q, 2 / z, flip) for flip in (False, True)) - delta

    found = optimize.brentq(exact, 1e-6, 50)
    assert epsilon(z, q, 1, delta) == near(found)
    assert epsilon(z, q, 1, delta, cohorts="poisson") < 0.8 * found


def two_exchanges(cohort):
    alg = sending(3)
    first = alg.exchanges[0]
    second = Exchange("again", first.send, first.client, first.receive, cohort=cohort)
    return alg._replace(exchanges=(first, second))


def test_epsilon_by_round_composes_what_was_released():
    account = functools.partial(epsilon_by_round, sampling=0.05, rounds=20, delta=1e-5)
    one = account(dp(sending(3), noise=1.2))
    by_default = epsilon_by_round(dp(sending(3), noise=1.2, delta=1e-5), sampling=0.05, rounds=20)
    np.testing.assert_array_equal(one, by_default)
    assert one[-1] == near(epsilon(1.2, 0.05, 20, 1e-5))
    assert one[9] == near(epsilon(1.2, 0.05, 10, 1e-5))
    for i in range(20):  # 16 of them tight
        assert epsilon(1.2, 0.05, i + 1, 1e-5) <= one[i] * (1 + 1e-9)
    assert np.all(np.diff(one) >= 0)
    # a fresh cohort costs like twice the rounds; the same cohort like one mechanism with less noise
    fresh, same = (account(dp(two_exchanges(cohort), noise=1.2)) for cohort in ("fresh", "same"))
    assert fresh[-1] == near(epsilon(1.2, 0.05, 40, 1e-5))
    assert same[-1] == near(epsilon(1.2 / np.sqrt(2), 0.05, 20, 1e-5))
    assert same[-1] > fresh[-1]
    assert np.all(np.isinf(account(dp(sending(3), noise=0.0))))


def test_epsilon_of_all_clients_is_exact_in_every_round():
    found = epsilon_by_round(dp(sending(3), noise=3.0), sampling=1.0, rounds=5, delta=1e-5)
    for i, eps in enumerate(found):
        shift = np.sqrt(i + 1) / 3  # rounds without sampling are one Gaussian mechanism
        assert lost_at(eps, 1.0, shift, False) == pytest.approx(1e-5, rel=1e-3)


def test_fewer_uploads_than_shares_mean_less_noise_and_a_larger_epsilon():
    alg = dp(sending(3), noise=1.2, where="clients", shares=10)
    arrived = np.array([10, 5, 0, 10])
    spent = epsilon_by_round(alg, sampling=0.1, rounds=4, delta=1e-5, history={"train/arrived": arrived})
    assert spent[-1] == near(by_dp_accounting([(0.6, 0.1, 2), (0.6 * np.sqrt(0.5), 0.1, 1)], 1e-5))
    assert spent[2] == spent[1]  # no upload arrived
    with pytest.raises(ValueError, match="history"):
        epsilon_by_round(alg, sampling=0.1, rounds=4, delta=1e-5)


def test_epsilon_of_rows_counts_every_release():
    """A round of two exchanges, the first exchange of that round again (the server crashed after it), another rate."""
    alg = dp(two_exchanges("fresh"), noise=1.2)
    whole = {"train/sampling": 0.5, "train/arrived": 4, "again/sampling": 0.5, "again/arrived": 4}
    part = {"train/sampling": 0.25, "train/arrived": 4}
    assert epsilon_of_rows(alg, [whole, part]) == near(by_dp_accounting([(0.6, 0.5, 2), (0.6, 0.25, 1)], 1e-5))
    skipped = {"train/sampling": 0.25, "train/arrived": 0}
    assert epsilon_of_rows(alg, [whole, part, skipped]) == epsilon_of_rows(alg, [whole, part])
    assert epsilon_of_rows(alg, []) == 0


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: clip(sending(3), bound=0.0), "bound"),
        (lambda: clip(sending(3), bound=float("nan")), "bound"),
        (lambda: clip(sending(3), exchanges=["tain"]), "tain"),
        (lambda: adaptive_clip(sending(3), quantile=1.2), "quantile"),
        (lambda: adaptive_clip(sending(3), initial=0.0), "initial"),
        (lambda: dp(sending(3), noise=-1.0), "noise"),
        (lambda: dp(sending(3), bound=math.inf), "finite bound"),
        (lambda: dp(sending(3), where="both"), "where"),
        (lambda: dp(sending(3), delta=0.0), "delta"),
        (lambda: dp(sending(3), where="clients"), "shares"),
        (lambda: dp(sending(3), shares=5), "shares"),
        (lambda: dp(sending(3), quantile=0.5, bit_noise=0.1), "bit_noise"),
        (lambda: dp(sending(3), bit_noise=3.0), "bit_noise"),
        (lambda: dp(dp(sending(3))), "twice"),
        (lambda: dp(median(sending(3))), "averaged"),
        (lambda: dp(fb.scaffold(loss)), "clients"),
        (lambda: dp(fb.fedsplit(loss)), "where='clients'"),
        (lambda: clip(dp(sending(3))), "dp outside"),
        (lambda: adaptive_clip(dp(sending(3))), "dp outside"),
        (lambda: median(dp(sending(3))), "dp outside"),
        (lambda: elastic(dp(sending(3)), lambda params, batch: batch["x"]), "dp outside"),
        (lambda: quantize(dp(sending(3), quantile=0.5)), "dp outside"),
        (lambda: epsilon(-1.0, 0.1, 1, 1e-5), "noise"),
        (lambda: epsilon(1.0, 0.0, 1, 1e-5), "sampling"),
        (lambda: epsilon(1.0, 0.1, 1, 0.0), "delta"),
        (lambda: epsilon(1.0, 0.1, 1, 1e-5, cohorts="all"), "cohorts"),
        (lambda: epsilon_by_round(sending(3), sampling=0.1, rounds=1, delta=1e-5), "dp"),
    ],
)
def test_bad_arguments_are_refused(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_whole_numbers_cannot_be_clipped():
    alg = clip(adaptive_clip(sending(3)), bound=1.0)
    with pytest.raises(StructureError, match="within"):
        check_structure(alg, {"x": jnp.zeros(3)}, data_shapes(holding(np.zeros((2, 3)))))
