"""Laws of partitions: every row once, the given sizes, reproducible seeds, the distributions of the papers."""

from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.data import partition as p

FAST = settings(max_examples=40, deadline=None)
labels_st = st.lists(st.integers(0, 5), min_size=12, max_size=80).map(np.array)


def once(parts, n):
    return sorted(np.concatenate(parts).tolist()) == list(range(n))


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@FAST
@given(n=st.integers(1, 200), clients=st.integers(1, 20), seed=st.integers(0, 1000))
def test_iid_uses_every_row_once_in_equal_shares(n, clients, seed):
    if clients > n:
        with pytest.raises(ValueError, match="clients"):
            p.iid(n, clients=clients, seed=seed)
        return
    parts = p.iid(n, clients=clients, seed=seed)
    sizes = [len(x) for x in parts]
    assert once(parts, n)
    assert max(sizes) - min(sizes) <= 1
    assert same(parts, p.iid(n, clients=clients, seed=seed))


@FAST
@given(n=st.integers(10, 300), clients=st.integers(1, 10), sigma=st.floats(0, 3), seed=st.integers(0, 1000))
def test_log_normal_sizes_sum_and_respect_the_minimum(n, clients, sigma, seed):
    least = n // clients // 2 or 1
    parts = p.log_normal(n, clients=clients, sigma=sigma, min_size=least, seed=seed)
    assert once(parts, n)
    assert len(parts) == clients
    assert min(len(x) for x in parts) >= least
    assert same(parts, p.log_normal(n, clients=clients, sigma=sigma, min_size=least, seed=seed))


@FAST
@given(
    labels=labels_st,
    clients=st.integers(1, 6),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    sigma=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_dirichlet_per_client_gives_the_sizes_asked_for(labels, clients, alpha, sigma, seed):
    parts = p.dirichlet(labels, clients=clients, alpha=alpha, per="client", sigma=sigma, seed=seed)
    assert once(parts, len(labels))
    sizes = [len(x) for x in parts]
    if sigma == 0:
        assert sizes == [len(x) for x in np.array_split(labels, clients)]
    assert min(sizes) >= 1
    assert same(parts, p.dirichlet(labels, clients=clients, alpha=alpha, per="client", sigma=sigma, seed=seed))


@FAST
@given(labels=labels_st, clients=st.integers(1, 4), seed=st.integers(0, 1000))
def test_dirichlet_per_class_and_shards_use_every_row_once(labels, clients, seed):
    parts = p.dirichlet(labels, clients=clients, alpha=5.0, seed=seed, retries=1000)
    assert once(parts, len(labels))
    kinds = len(set(labels.tolist()))
    per_client = -(-kinds // clients)
    for equal in (False, True):
        cut = p.shards(labels, clients=clients, per_client=per_client, equal=equal, seed=seed)
        assert once(cut, len(labels))
        if equal:
            sizes = [len(x) for x in cut]
            assert max(sizes) - min(sizes) <= per_client
        else:
            assert max(len(set(labels[x].tolist())) for x in cut) <= per_client


@FAST
@given(
    tree=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    per_label=st.integers(1, 6),
    alpha=st.sampled_from([1e-3, 0.1, 10.0]),
    seed=st.integers(0, 1000),
)
def test_pachinko_is_a_partition_into_equal_clients(tree, per_label, alpha, seed):
    coarse_of = np.repeat(np.arange(len(tree)), tree)
    fine = np.repeat(np.arange(len(coarse_of)), per_label)
    clients = per_label  # so that rows per client = number of fine labels
    parts = p.pachinko(coarse_of[fine], fine, clients=clients, alpha=alpha, beta=10.0, seed=seed)
    assert once(parts, len(fine))
    assert {len(x) for x in parts} == {len(coarse_of)}
    assert same(parts, p.pachinko(coarse_of[fine], fine, clients=clients, alpha=alpha, beta=10.0, seed=seed))


def exact_draws(weights, left, m):
    """The exact distribution of the counts of m draws, by enumeration. Labels without rows left are removed, and the
    rest is renormalised."""
    states = {tuple([0] * len(left)): Fraction(1)}
    for _ in range(m):
        fresh = Counter()
        for counts, chance in states.items():
            open_ = [k for k in range(len(left)) if counts[k] < left[k]]
            total = sum(weights[k] for k in open_)
            for k in open_:
                step = list(counts)
                step[k] += 1
                fresh[tuple(step)] += chance * weights[k] / total
        states = fresh
    return states


def test_drawing_with_removal_has_the_distribution_of_the_one_by_one_loop():
    weights, left, m = [Fraction(6), Fraction(3), Fraction(1)], [2, 3, 2], 5
    exact = exact_draws(weights, left, m)
    assert sum(exact.values()) == 1
    rng = np.random.default_rng(0)
    log_p, runs = np.log([0.6, 0.3, 0.1]), 12_000
    seen = Counter(tuple(p._draw_without_replacement(rng, m, log_p, np.array(left)).tolist()) for _ in range(runs))
    assert set(seen) <= set(exact)
    for counts, chance in exact.items():
        spread = 5 * np.sqrt(float(chance * (1 - chance)) / runs)
        assert abs(seen[counts] / runs - float(chance)) < spread, counts


def exact_pachinko(tree, left, m):
    """The same for the two-stage draw with equal probabilities: coarse label first, then one of its fine labels."""
    states = {tuple([0] * len(left)): Fraction(1)}
    for _ in range(m):
        fresh = Counter()
        for counts, chance in states.items():
            groups = [[k for k in group if counts[k] < left[k]] for group in tree]
            groups = [g for g in groups if g]
            for group in groups:
                for k in group:
                    step = list(counts)
                    step[k] += 1
                    fresh[tuple(step)] += chance / len(groups) / len(group)
        states = fresh
    return states


def test_pachinko_renormalises_within_the_coarse_label_against_brute_force():
    # A large Dirichlet parameter makes both multinomials uniform, so that the process can be enumerated. Coarse label 0
    # has fine labels 0 and 1 with 1 and 4 rows, coarse label 1 has the fine label 2 with 3 rows: fine label 0 runs out
    # early, and its share must go to label 1, not to label 2.
    fine = np.repeat([0, 1, 2], [1, 4, 3])
    coarse = np.where(fine < 2, 0, 1)
    exact = exact_pachinko([[0, 1], [2]], [1, 4, 3], 4)
    runs = 3_000
    seen = Counter()
    for seed in range(runs):
        first = p.pachinko(coarse, fine, clients=2, size=4, alpha=1e9, beta=1e9, seed=seed)[0]
        seen[tuple(np.bincount(fine[first], minlength=3).tolist())] += 1
    assert set(seen) <= set(exact)
    for counts, chance in exact.items():
        spread = 5 * np.sqrt(float(chance * (1 - chance)) / runs)
        assert abs(seen[counts] / runs - float(chance)) < spread, counts
    flat = exact_draws([Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)], [1, 4, 3], 4)
    gap = max(abs(float(flat[c] - exact[c])) for c in exact)
    assert gap > 0.05  # the test can distinguish the two-stage rule from a flat renormalisation


def test_pachinko_draws_both_levels_with_their_own_dirichlet():
    # Before any label is used up the counts of a client of size n are Dirichlet-multinomial, with factorial moments
    # E[c_k (c_k - 1)] / (n (n - 1)) = (a + 1) / (K (K a + 1)). This is exact, so the counts determine alpha and beta.
    coarse, fine, n = np.repeat([0, 1, 2], 240), np.repeat(np.arange(6), 120), 40
    alpha, beta = 0.4, 1.5
    pairs, given = [], []
    for seed in range(500):
        first = p.pachinko(coarse, fine, clients=18, alpha=alpha, beta=beta, seed=seed)[0]
        top = np.bincount(coarse[first], minlength=3)
        low = np.bincount(fine[first], minlength=6).reshape(3, 2)
        pairs.append(np.mean(top * (top - 1)) / (n * (n - 1)))
        given += [np.mean(c * (c - 1)) / (m * (m - 1)) for c, m in zip(low, top, strict=True) if m > 5]
    assert np.mean(pairs) == pytest.approx((alpha + 1) / (3 * (3 * alpha + 1)), rel=0.06)
    assert np.mean(given) == pytest.approx((beta + 1) / (2 * (2 * beta + 1)), rel=0.06)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_dirichlet_draws_have_the_moments_of_their_parameter(alpha):
    k = 4
    draws = np.exp(p._log_dirichlet(np.random.default_rng(3), alpha, (40_000, k)))
    assert np.allclose(draws.sum(1), 1)
    assert np.allclose(draws.mean(0), 1 / k, atol=0.01)
    # E[p_k^2] of a symmetric Dirichlet: (alpha + 1) / (k (k alpha + 1))
    assert np.allclose((draws**2).mean(0), (alpha + 1) / (k * (k * alpha + 1)), atol=0.01)


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_dirichlet_per_class_skews_the_clients_as_alpha_says(alpha):
    labels, clients = np.repeat(np.arange(40), 500), 5
    parts = p.dirichlet(labels, clients=clients, alpha=alpha, seed=1)
    shares = p.label_counts(parts, labels) / 500
    expected = (alpha + 1) / (clients * (clients * alpha + 1))
    assert np.mean(shares**2) == pytest.approx(expected, rel=0.2)


def test_log_normal_spread_is_sigma():
    sizes = np.array([len(x) for x in p.log_normal(1_000_000, clients=2_000, sigma=0.6, seed=0)])
    assert np.std(np.log(sizes)) == pytest.approx(0.6, rel=0.1)


def test_cifar100_by_pachinko_is_the_published_shape():
    fine = np.repeat(np.arange(100), 500)
    parts = p.pachinko(fine // 5, fine, clients=500, size=100, seed=0)
    p.check_partition(parts, 50_000)
    assert {len(x) for x in parts} == {100}
    # most clients hold few coarse labels: Dirichlet(0.1) over 20 has 1 / sum p^2 of about (20 * 0.1 + 1) / 1.1 = 2.7
    coarse_counts = p.label_counts(parts, fine // 5)
    assert 3 <= np.mean((coarse_counts > 0).sum(1)) <= 9


@FAST
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), fraction=st.floats(0, 0.99), seed=st.integers(0, 99))
def test_hold_out_keeps_one_row_and_loses_none(sizes, fraction, seed):
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    train, held = p.hold_out(parts, fraction=fraction, seed=seed)
    for part, a, b in zip(parts, train, held, strict=True):
        assert sorted([*a.tolist(), *b.tolist()]) == part.tolist()
        assert len(a) >= 1
        assert abs(len(b) - fraction * len(part)) <= 1 or len(b) == len(part) - 1


@FAST
@given(labels=labels_st, clients=st.integers(1, 5), test=st.lists(st.integers(0, 6), min_size=1, max_size=60))
def test_match_labels_deals_test_rows_in_the_train_ratios(labels, clients, test):
    test = np.array(test)
    parts = p.iid(len(labels), clients=clients, seed=0)
    dealt = p.match_labels(parts, labels, test, seed=0)
    assert once(dealt, len(test))
    for label in set(test.tolist()):
        weight = np.array([np.sum(labels[x] == label) for x in parts])
        weight = weight if weight.any() else np.ones(clients)
        due = weight / weight.sum() * np.sum(test == label)
        found = np.array([np.sum(test[x] == label) for x in dealt])
        assert np.all(np.abs(found - due) < 1 + 1e-9)


@FAST
@given(
    weights=st.lists(st.floats(0.001, 100), min_size=1, max_size=8), extra=st.integers(0, 50), least=st.integers(0, 3)
)
def test_apportionment_sums_and_respects_the_least(weights, extra, least):
    total = least * len(weights) + extra
    out = p._apportion(np.array(weights), total, least)
    assert out.sum() == total
    assert out.min() >= least


def test_by_id_keeps_the_rows_of_each_name():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, 50)
    parts, names = p.by_id(ids)
    assert names == tuple(str(i) for i in range(5))
    for name, part in zip(names, parts, strict=True):
        assert part.tolist() == [i for i in range(50) if str(ids[i]) == name]


def test_summary_of_a_known_split():
    labels = np.array([0, 0, 1, 1])
    alike = p.summarize([np.array([0, 2]), np.array([1, 3])], labels)
    apart = p.summarize([np.array([0, 1]), np.array([2, 3])], labels)
    assert (alike.divergence, apart.divergence) == (0.0, 0.5)
    assert (alike.labels_per_client, apart.labels_per_client) == (2.0, 1.0)
    assert (apart.size_min, apart.size_median, apart.size_max) == (2, 2.0, 2)


Y = np.arange(20) % 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: p.iid(5, clients=6), "clients"),
        (lambda: p.iid(5, clients=0), "clients"),
        (lambda: p.iid(5, clients=2, seed=-1), "seed"),
        (lambda: p.dirichlet(Y, clients=2, alpha=0), "alpha"),
        (lambda: p.dirichlet(Y, clients=2, alpha=float("nan")), "alpha"),
        (lambda: p.dirichlet(Y, clients=2, alpha=1, per="row"), "per must be"),
        (lambda: p.dirichlet(Y, clients=2, alpha=1, sigma=0.5), 'per="client"'),
        (lambda: p.dirichlet(Y, clients=4, alpha=1, min_size=6), "min_size"),
        (lambda: p.dirichlet(Y.astype(float), clients=2, alpha=1), "integers"),
        (lambda: p.dirichlet(np.zeros((2, 2), int), clients=2, alpha=1), "1-d"),
        (lambda: p.log_normal(10, clients=2, sigma=-1), "sigma"),
        (lambda: p.shards(Y, clients=2, per_client=1), "cannot hold"),
        (lambda: p.shards(Y, clients=10, per_client=3), "shards"),
        (lambda: p.pachinko(Y, Y, clients=3, size=5), "size"),
        (lambda: p.pachinko(Y, Y[:-1], clients=2), "same rows"),
        (lambda: p.pachinko(np.arange(20) % 3, Y, clients=2), "more than one coarse"),
        (lambda: p.by_id(["a", None]), "null in row 1"),
        (lambda: p.by_id(np.array([1.0, np.nan])), "null in row 1"),
        (lambda: p.by_id([]), "non-empty"),
        (lambda: p.hold_out([np.arange(3)], fraction=1.0), "fraction"),
        (lambda: p.check_partition([np.array([0, 0])], 2), "row 0 is used 2 times"),
    ],
)
def test_bad_requests_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_dirichlet_that_cannot_be_met_ends_and_says_what_to_do():
    with pytest.raises(ValueError, match="larger alpha, fewer clients") as error:
        p.dirichlet(np.zeros(100, int), clients=50, alpha=0.01, min_size=2, retries=20)
    assert "20 draws" in str(error.value)
    # per="client", which fixes the sizes, works with the same options
    parts = p.dirichlet(np.zeros(100, int), clients=50, alpha=0.01, min_size=2, per="client")
    assert {len(x) for x in parts} == {2}


def test_every_seed_gives_another_split():
    splits = {tuple(np.concatenate(p.dirichlet(Y, clients=3, alpha=1.0, seed=s)).tolist()) for s in range(8)}
    assert len(splits) == 8


def test_rows_are_shuffled_within_clients():
    parts = p.dirichlet(np.zeros(400, int), clients=2, alpha=100.0, seed=0)
    assert all(np.any(np.diff(x) < 0) for x in parts)
    sorted_pairs = sum(int(a < b) for x, y in product(parts, parts) if x is y for a, b in zip(x, y[1:], strict=False))
    assert 150 < sorted_pairs < 250
