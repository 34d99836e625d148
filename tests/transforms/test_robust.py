"""Robust reductions against brute force, also with absent uploads."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import fedbraid as fb
from fedbraid.core import reduce_reports
from fedbraid.local import ClientData
from fedbraid.transforms import (
    admit_if,
    attack,
    clip,
    geometric_median,
    krum,
    median,
    multi_krum,
    norm_bound,
    quantize,
    trimmed_mean,
)
from fedbraid.transforms.uploads import norm
from transforms.toy import one_round, sending
from zoo import loss

rng = np.random.default_rng(5)
GOOD = rng.normal(size=(9, 5))
UPLOADS = np.concatenate([GOOD, 50 + 10 * rng.normal(size=(2, 5))])[[9, 0, 1, 2, 10, 3, 4, 5, 6, 7, 8]]

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def program(transform, options):
    reducer = transform(sending(5), **dict(options)).exchanges[0].reducer
    return jax.jit(lambda ups, weights: reduce_reports(reducer, ups, weights)[0])


def reduced(transform, rows, there=None, **options):
    """The result of the transform's reducer on stacked rows, two leaves each; absent rows hold arbitrary values."""
    rows = np.asarray(rows)
    there = np.ones(len(rows), bool) if there is None else np.asarray(there)
    rows = np.where(there[:, None], rows, 7.7)
    stacked = {"a": jnp.asarray(rows[:, :2]), "b": jnp.asarray(rows[:, 2:])}
    up = program(transform, tuple(options.items()))(stacked, there * 3.0)
    return np.concatenate([up["a"], up["b"]])


def krum_by_hand(rows, bad, many):
    """Blanchard et al.: the mean of the ``many`` rows with the smallest scores, each minimised over all neighbours."""
    n = len(rows)
    scores = [
        min(
            sum(np.sum((rows[i] - rows[j]) ** 2) for j in near)
            for near in itertools.combinations([j for j in range(n) if j != i], n - bad - 2)
        )
        for i in range(n)
    ]
    return rows[np.argsort(scores)[:many]].mean(0)


def geometric_by_scipy(rows):
    objective = lambda x: np.sum(np.linalg.norm(rows - x, axis=1))  # noqa: E731
    return optimize.minimize(objective, np.median(rows, 0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 0}).x


RULES = {
    "median": (median, {}, lambda rows: np.median(rows, 0), 1e-12),
    "trimmed": (
        trimmed_mean,
        {"trim": 0.2},
        lambda rows: stats.trim_mean(rows, np.ceil(0.2 * len(rows)) / len(rows)),
        1e-12,
    ),
    "geometric": (geometric_median, {"iterations": 300}, geometric_by_scipy, 1e-6),
    "krum": (krum, {"fraction": 0.2}, lambda rows: krum_by_hand(rows, int(np.ceil(0.2 * len(rows))), 1), 1e-12),
    "multi_krum": (
        multi_krum,
        {"fraction": 0.2, "keep": 0.5},
        lambda rows: krum_by_hand(rows, int(np.ceil(0.2 * len(rows))), len(rows) // 2),
        1e-12,
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("there", [np.ones(11, bool), np.arange(11) % 4 != 2, np.arange(11) % 3 != 0])
def test_a_rule_is_what_brute_force_says_of_those_who_are_there(name, there):
    transform, options, by_hand, tolerance = RULES[name]
    got = reduced(transform, UPLOADS, there, **options)
    np.testing.assert_allclose(got, by_hand(UPLOADS[there]), rtol=tolerance, atol=tolerance)
    order = np.random.default_rng(0).permutation(11)
    np.testing.assert_allclose(reduced(transform, UPLOADS[order], there[order], **options), got, rtol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_two_bad_uploads_of_any_size_stay_without_influence(name):
    transform, options, _, _ = RULES[name]
    centre, radius = GOOD.mean(0), np.linalg.norm(GOOD - GOOD.mean(0), axis=1).max()
    for size in (1e3, 1e9):
        rows = np.concatenate([GOOD, size * np.ones((1, 5)), -size * np.ones((1, 5)) * [1, -1, 1, 1, 1]])
        assert np.linalg.norm(reduced(transform, rows, **options) - centre) < radius
        assert np.linalg.norm(rows.mean(0) - centre) > 20 * radius  # the mean moves far


def test_neutral_settings_are_the_mean():
    np.testing.assert_allclose(reduced(trimmed_mean, UPLOADS, trim=0.0), UPLOADS.mean(0), rtol=1e-12)
    np.testing.assert_allclose(reduced(multi_krum, UPLOADS, fraction=0.0, keep=1.0), UPLOADS.mean(0), rtol=1e-12)
    np.testing.assert_allclose(reduced(norm_bound, UPLOADS, bound=float("inf")), UPLOADS.mean(0), rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_small_cohorts(name):
    """One upload, or several equal ones, give that upload. No uploads give a finite result."""
    transform, options, _, _ = RULES[name]
    one = np.arange(11) == 2
    np.testing.assert_allclose(reduced(transform, UPLOADS, one, **options), UPLOADS[2], rtol=1e-9)
    np.testing.assert_allclose(reduced(transform, np.ones((11, 5)), **options), np.ones(5), rtol=1e-9)
    assert np.all(np.isfinite(reduced(transform, UPLOADS, np.zeros(11, bool), **options)))


def test_uploads_have_one_vote_whatever_they_claim_to_weigh():
    alg = median(sending(5, weight=lambda u: jnp.where(u[0] > 20, 1e6, 1.0)))
    server, *_ = one_round(alg, {"x": jnp.zeros(5)}, UPLOADS)
    np.testing.assert_allclose(server["x"], 11 * np.median(UPLOADS, 0), rtol=1e-10)


def test_a_rule_reads_uploads_through_their_codes():
    """In both orders, codes are decoded before uploads are compared."""
    rows = np.round(UPLOADS) * 7  # int8 codes of these rows are not exact
    outer, inner = (
        one_round(alg, {"x": jnp.zeros(5)}, rows)[0]["x"] / 11
        for alg in (quantize(median(sending(5))), median(quantize(sending(5))))
    )
    step = np.abs(rows).max() / 127
    np.testing.assert_allclose(outer, np.median(rows, 0), atol=step)
    np.testing.assert_allclose(outer, inner, rtol=1e-12)


def test_norm_bounding_is_done_by_the_server_and_clipping_by_the_client():
    vectors = GOOD[:4] * np.array([1, 1, 100, 1])[:, None]
    size = np.linalg.norm(vectors, axis=1)
    expected = (vectors * np.minimum(1, 2.0 / size)[:, None]).sum(0)
    server, _, sent, _ = one_round(norm_bound(sending(5), bound=2.0), {"x": jnp.zeros(5)}, vectors)
    np.testing.assert_allclose(sent.pseudograd["x"], vectors)  # uploads are not changed
    np.testing.assert_allclose(server["x"], expected, rtol=1e-10)
    server, _, sent, _ = one_round(clip(sending(5), bound=2.0), {"x": jnp.zeros(5)}, vectors)
    assert np.linalg.norm(sent.pseudograd["x"], axis=1).max() < 2.0 + 1e-9
    np.testing.assert_allclose(server["x"], expected, rtol=1e-10)


def test_admission():
    alg = admit_if(quantize(sending(5)), lambda up: norm(up) < 10.0)
    down, admit = alg.exchanges[0].send({"x": jnp.zeros(5)}), alg.exchanges[0].admit

    @jax.jit
    def admitted(u):
        report = alg.exchanges[0].client(down, jnp.zeros(()), ClientData.of({"u": u[None]}), jax.random.key(0))
        return admit(report.up)

    assert admitted(jnp.ones(5))
    assert not admitted(100 * jnp.ones(5))
    assert not admitted(jnp.array([1.0, np.nan, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("rule", [median, trimmed_mean, geometric_median, krum, multi_krum])
def test_rank_rules_are_refused_where_clients_keep_what_they_sent(rule):
    for alg in (fb.scaffold(loss), fb.fedsplit(loss), fb.feddyn(loss)):
        with pytest.raises(ValueError, match="states of server and clients would disagree"):
            rule(alg)
        norm_bound(alg)
    with pytest.raises(ValueError, match="does not average"):
        rule(median(sending(5)))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda alg: trimmed_mean(alg, trim=0.5), "trim"),
        (lambda alg: trimmed_mean(alg, trim=-0.1), "trim"),
        (lambda alg: krum(alg, fraction=0.5), "fraction"),
        (lambda alg: multi_krum(alg, keep=0.0), "keep"),
        (lambda alg: geometric_median(alg, iterations=0), "iterations"),
        (lambda alg: norm_bound(alg, bound=-1.0), "bound"),
        (lambda alg: attack(alg, factor=float("nan")), "factor"),
    ],
)
def test_bad_arguments_are_refused(make, word):
    with pytest.raises(ValueError, match=word):
        make(sending(5))
