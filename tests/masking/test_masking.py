"""Laws of secure aggregation, without messages: codes, shares, masks, dropouts, and what a server cannot do."""

import itertools
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbraid.masking import Secure, keys, member, shamir, sizes
from fedbraid.masking.fixed_point import (
    Codec,
    RangeError,
    check_leaves,
    decode,
    decode_tree,
    encode,
    encode_tree,
)
from fedbraid.masking.member import Member, ProtocolError, announce, deal, mask, reveal
from fedbraid.masking.unmask import Dealt, UnmaskError, unmask

QUICK = settings(max_examples=60, deadline=None)
CODECS = st.builds(Codec.of, st.sampled_from([32, 64]), st.floats(1e-3, 1e6), st.integers(2, 2000))


# --- fixed point


@QUICK
@given(CODECS, st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_a_decoded_number_is_at_most_half_a_unit_away(codec, shares):
    numbers = np.array(shares) * codec.bound
    off = decode(codec, encode(codec, numbers)) - numbers
    # beyond half a unit only the rounding of float64 itself, where a unit is below its precision
    assert np.all(np.abs(off) <= codec.unit / 2 + np.spacing(np.abs(numbers)))


@QUICK
@given(CODECS, st.data())
def test_sums_of_codes_are_codes_of_sums_and_never_wrap(codec, data):
    """Also at the extreme: every client sends the bound with the same sign."""
    sign = data.draw(st.sampled_from([1.0, -1.0]))
    few = data.draw(st.integers(1, 12))
    numbers = data.draw(st.lists(st.floats(-1, 1), min_size=few, max_size=few))
    numbers = np.array([sign * codec.bound] * (codec.clients - few) + [codec.bound * x for x in numbers])[
        -codec.clients :
    ]
    words = np.sum(encode(codec, numbers), dtype=codec.dtype)
    exact = sum(round(Fraction(x) * Fraction(codec.scale)) for x in numbers.tolist())
    assert int(words.view(f"int{codec.bits}")) == exact
    assert codec.clients * (Fraction(codec.bound) * Fraction(codec.scale) + Fraction(1, 2)) < 2 ** (codec.bits - 1)
    twice = Fraction(codec.scale) * 2
    assert codec.clients * (Fraction(codec.bound) * twice + Fraction(1, 2)) > 2 ** (codec.bits - 1) - 1  # the largest


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 4.001, -4.001])
def test_numbers_out_of_range_are_refused_without_telling_them(bad):
    codec = Codec.of(32, 4.0, 3)
    with pytest.raises(RangeError, match=r"\['w'\].*bound 4") as error:
        encode_tree(codec, {"w": np.array([0.0, bad])})
    assert "4.001" not in str(error.value)


def test_trees_keep_their_dtypes_and_integers_are_exact():
    codec = Codec.of(64, 100.0, 3)
    tree = {"a": jnp.array([0.5, -3.25], jnp.bfloat16), "b": jnp.array([[7, -9]], jnp.int32), "c": jnp.float32(99.5)}
    found = decode_tree(codec, encode_tree(codec, tree) * np.uint64(2), jax.eval_shape(lambda: tree))
    for leaf, twice in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        assert twice.dtype == leaf.dtype
        assert twice.shape == leaf.shape
        np.testing.assert_array_equal(np.asarray(twice, float), 2 * np.asarray(leaf, float))
    with pytest.raises(RangeError, match="integer"):
        encode(Codec.of(32, 1.0, 3), np.array([2**30]))
    with pytest.raises(ValueError, match=r"leaf \['key'\] as bool"):
        check_leaves({"key": np.array([True])}, "exchange 'train'")


# --- Shamir


def test_the_field_is_prime_and_holds_32_bytes():
    assert pow(3, shamir.PRIME - 1, shamir.PRIME) == 1
    n = shamir.PRIME - 1  # Miller-Rabin with the first primes; 2^256 + 297 is the known next prime
    twos = (n & -n).bit_length() - 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, n >> twos, shamir.PRIME)
        assert x in (1, n) or any((x := x * x % shamir.PRIME) == n for _ in range(twos - 1))
    assert 1 << 256 < shamir.PRIME < 1 << 8 * shamir.SHARE


@QUICK
@given(st.data())
def test_any_threshold_shares_recover_the_secret(data):
    points = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=9, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    secret = data.draw(st.integers(0, 2**256 - 1))
    shares = shamir.split(secret, points, threshold)
    chosen = data.draw(st.permutations(points))[: data.draw(st.integers(threshold, len(points)))]
    assert shamir.combine({point: shares[point] for point in chosen}) == secret
    assert all(shamir.from_bytes(shamir.to_bytes(share)) == share for share in shares.values())


def test_fewer_shares_fit_every_secret_equally(monkeypatch):
    """Exhaustive in the field of 7: over all polynomials, two shares of three are uniform for every secret."""
    seen: dict[int, Counter] = {}
    for secret in range(7):
        seen[secret] = Counter()
        for coefficients in itertools.product(range(7), repeat=2):
            drawn = iter(coefficients)
            monkeypatch.setattr(shamir.secrets, "randbelow", lambda prime, drawn=drawn: next(drawn))
            shares = shamir.split(secret, [1, 3, 4, 6], 3, prime=7)
            seen[secret].update(itertools.combinations(sorted(shares.items()), 2))
            for four in itertools.combinations(shares.items(), 3):
                assert shamir.combine(dict(four), prime=7) == secret
    assert all(counts == seen[0] for counts in seen.values())
    assert set(seen[0].values()) == {1}  # every pair of values at every pair of points, once


def test_wrong_shares_are_noticed_by_the_check_and_left_out():
    shares = shamir.split(99, range(1, 8), 4)
    assert shamir.combine(shares | {2: shares[2] + 1}) != 99
    bad = shares | {1: 5, 4: 6, 7: 7}
    assert shamir.recover(bad, 4, lambda secret: secret == 99) == 99
    assert shamir.recover(bad | {2: 1}, 4, lambda secret: secret == 99) is None
    assert shamir.recover(dict(list(shares.items())[:3]), 4, lambda secret: True) is None
    assert shamir.from_bytes(member.NO_SHARE) is None
    many = shamir.split(5, range(1, 101), 60)
    assert shamir.recover(many | {1: 0, 50: 0}, 60, lambda secret: secret == 5) == 5  # among 1e28 sets


# --- masks and dropouts

SECURE = Secure(clients=6, threshold=4, bits=32, bound=8.0)


def uploads(secure, clients=None, entries=5, seed=0):
    draws = np.random.default_rng(seed)
    out = {}
    for i in range(secure.clients if clients is None else clients):
        numbers, weight = draws.uniform(-secure.bound, secure.bound, entries), draws.integers(1, 50)
        out[10 * i] = numbers, [encode(secure.codec, numbers), encode(secure.weights, [float(weight)])]
    return out


class Server:
    """All that a server sees of one exchange."""

    def __init__(self, secure, ups, *, no_keys=(), no_shares=(), no_upload=(), no_reveal=()):
        self.secure, self.ups = secure, ups
        members = {i: announce("run/0.0", i) for i in ups if i not in no_keys}
        self.public = {i: m.public for i, m in members.items()}
        self.boxes, self.dealt = {}, {}
        for i, m in members.items():
            members[i], boxes, promise = deal(secure, m, self.public)
            if i not in no_shares:
                self.boxes[i], self.dealt[i] = boxes, Dealt(m.public, promise)
        self.members, self.masked = {}, {}
        for i in self.dealt:
            received = {j: self.boxes[j][i] for j in self.dealt if j != i}
            kept = Member.from_json(members[i].to_json())  # as between two messages
            self.members[i], words = mask(secure, kept, received, ups[i][1])
            if i not in no_upload:
                self.masked[i] = words
        self.revealed = {
            i: reveal(secure, self.members[i], list(self.masked)) for i in self.masked if i not in no_reveal
        }

    def sum(self):
        return unmask(self.secure, "run/0.0", self.dealt, self.masked, self.revealed)

    def expected(self):
        return [sum(parts[1:], parts[0]) for parts in zip(*(self.ups[i][1] for i in self.masked), strict=True)]


STEPS = ("no_keys", "no_shares", "no_upload", "no_reveal")


def test_the_sum_is_exact_for_every_pattern_of_dropouts_down_to_the_threshold():
    """Five clients, each drops in one of four steps or not at all; all patterns up to the choice of clients."""
    secure = Secure(clients=5, threshold=3)
    ups = uploads(secure)
    for many in range(3):
        for where in itertools.combinations_with_replacement(STEPS, many):
            for who in itertools.combinations(ups, many):
                gone = {step: [i for i, at in zip(who, where, strict=True) if at == step] for step in STEPS}
                server = Server(secure, ups, **gone)
                for found, expected in zip(server.sum(), server.expected(), strict=True):
                    np.testing.assert_array_equal(found, expected)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sums_of_any_uploads_survive_dropouts(data):
    clients = data.draw(st.integers(2, 8))
    threshold = data.draw(st.integers(clients // 2 + 1, clients).filter(lambda t: t >= 2))
    secure = Secure(clients, threshold, bits=data.draw(st.sampled_from([32, 64])), bound=data.draw(st.floats(0.1, 99)))
    ups = uploads(secure, entries=data.draw(st.integers(1, 40)), seed=data.draw(st.integers(0, 99)))
    gone = data.draw(st.lists(st.sampled_from(sorted(ups)), unique=True, max_size=clients - threshold))
    fall = {step: [] for step in STEPS}
    for i in gone:
        fall[data.draw(st.sampled_from(STEPS))].append(i)
    server = Server(secure, ups, **fall)
    body, head = server.sum()
    np.testing.assert_array_equal(head, server.expected()[1])
    exact = sum(ups[i][0] for i in server.masked)
    np.testing.assert_allclose(decode(secure.codec, body), exact, rtol=1e-12, atol=secure.codec.unit / 2 * clients)


def test_a_mask_with_a_wrong_sign_or_none_does_not_cancel(monkeypatch):
    """The check of the sums can fail: with masks that do not cancel the sum is wrong."""
    honest = member.pair_stream
    for broken in (lambda *given: [-one for one in honest(*given)] if given[1] == 0 else honest(*given),):
        with monkeypatch.context() as patch:
            patch.setattr(member, "pair_stream", broken)
            server = Server(SECURE, uploads(SECURE))
        assert not np.array_equal(server.sum()[0], server.expected()[0])


def test_below_the_threshold_nothing_is_revealed():
    ups = uploads(SECURE)
    for step in STEPS[:2]:
        with pytest.raises(ProtocolError, match="3 clients"):
            Server(SECURE, ups, **{step: [0, 10, 20]})
    with pytest.raises(ProtocolError, match="3 clients sent masked uploads"):
        Server(SECURE, ups, no_upload=[0, 10, 20])
    server = Server(SECURE, ups, no_reveal=[0, 10, 20])
    with pytest.raises(UnmaskError, match="3 revealed"):
        server.sum()
    # also a server that does not keep to the rule gets no seed from three shares
    shares = {i + 1: shamir.from_bytes(given[0]) for i, given in server.revealed.items()}
    seed = server.members[0].seed
    assert shamir.combine(shares) != int.from_bytes(seed, "big")
    assert shamir.recover(shares, 4, lambda secret: True) is None


def test_a_late_upload_of_a_client_that_dropped_stays_masked():
    """The server has its pairwise key then, but not its seed."""
    ups = uploads(SECURE)
    server = Server(SECURE, ups, no_upload=[30])
    late = mask(
        SECURE, server.members[30]._replace(step="dealt"), {j: server.boxes[j][30] for j in ups if j != 30}, ups[30][1]
    )
    words = late[1]
    for j in ups:
        if j != 30:
            pairwise = member.pair_stream("run/0.0", 30, j, server.members[30].pair, server.public[j][32:], words)
            words = [a - b for a, b in zip(words, pairwise, strict=True)]
    assert not np.array_equal(words[0], ups[30][1][0])
    own = keys.stream(server.members[30].seed, words)
    np.testing.assert_array_equal(words[0] - own[0], ups[30][1][0])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", ["zeros", "bound", "random"])
def test_one_masked_upload_alone_is_uniform(bits, kind):
    """Chi-square over its bytes and Kolmogorov-Smirnov over its words, whatever the upload."""
    secure = Secure(clients=3, bits=bits, bound=4.0)
    size = 1 << 14
    numbers = {
        "zeros": np.zeros(size),
        "bound": np.full(size, 4.0),
        "random": np.random.default_rng(1).normal(size=size),
    }
    words = encode(secure.codec, np.clip(numbers[kind], -4, 4))
    ups = {i: (None, [words]) for i in range(3)}
    masked = Server(secure, ups).masked
    for found in masked.values():
        counts = np.bincount(found[0].view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
        assert stats.kstest(found[0] / 2.0**bits, "uniform").pvalue > 1e-6
        assert abs(np.corrcoef(found[0].astype(float), numbers[kind] + np.arange(size) * 1e-9)[0, 1]) < 6 / np.sqrt(
            size
        )
    # the test can fail: the sum without masks is far from uniform
    plain = np.bincount(words.view(np.uint8), minlength=256)
    assert stats.chisquare(plain).pvalue < 1e-6


# --- what a client refuses, and what others cannot spoil


def test_a_client_answers_each_step_once_and_never_gives_both_secrets_of_another():
    server = Server(SECURE, uploads(SECURE))
    ups, alice = server.ups, server.members[0]
    others = {j: server.boxes[j][0] for j in ups if j != 0}
    for step, call in (
        ("announced", lambda: deal(SECURE, alice, server.public)),
        ("dealt", lambda: mask(SECURE, alice, others, ups[0][1])),
    ):
        with pytest.raises(ProtocolError, match=f"'masked', the request is for '{step}'"):
            call()
    shares = alice.shares
    for survivors in itertools.chain.from_iterable(itertools.combinations(ups, n) for n in range(7)):
        if len(survivors) < 4 or 0 not in survivors:
            with pytest.raises(ProtocolError):
                reveal(SECURE, alice, survivors)
        else:
            given = reveal(SECURE, alice, survivors)
            assert given == {i: shares[i][33:] if i in survivors else shares[i][:33] for i in ups}
    for wrong in ([0, 10, 20, 70], [0, 0, 10, 20, 30]):
        with pytest.raises(ProtocolError):
            reveal(SECURE, alice, wrong)


def test_two_views_of_the_survivors_never_give_both_secrets():
    """A server tells some clients that client 0 survived and others that it dropped, in every way."""
    for clients, threshold in ((4, 3), (5, 3), (6, 4)):
        secure = Secure(clients, threshold)
        server = Server(secure, uploads(secure))
        whole, most = list(server.ups), 0
        for told in itertools.product([True, False], repeat=clients - 1):
            views = dict(zip(whole[1:], told, strict=True))
            given = {i: reveal(secure, server.members[i], whole if there else whole[1:]) for i, there in views.items()}
            given[0] = reveal(secure, server.members[0], whole)
            shares = {i: server.members[i].shares[0] for i in whole}
            seeds = sum(given[i][0] == shares[i][33:] for i in whole)
            pairs = sum(given[i][0] == shares[i][:33] for i in whole)
            most = max(most, min(seeds, pairs))
        assert 0 < most < threshold
    for threshold in (1, 2, 3, 7):
        with pytest.raises(ValueError, match=r"secure\.threshold"):
            Secure(clients=6, threshold=threshold)


def test_keys_of_the_server_in_place_of_the_clients_own_are_refused():
    members = {i: announce("run", i) for i in range(6)}
    public = {i: m.public for i, m in members.items()}
    wrong = [
        public | {0: announce("run", 0).public},
        {i: key for i, key in public.items() if i},
        public | {1: public[2]},
        public | {1: public[1][:40]},
        {i: public[i] for i in range(3)},
        public | {9: announce("run", 9).public},
    ]
    for keys_ in wrong:
        with pytest.raises(ProtocolError):
            deal(SECURE, members[0], keys_)
    with pytest.raises(ValueError, match=r".+"):
        keys.check_public(bytes(32))


def test_garbled_shares_of_one_client_do_not_stop_the_others():
    """Client 0's sealed shares are garbage for two clients, and client 10 reveals wrong ones."""
    ups = uploads(SECURE)
    clean = Server(SECURE, ups)
    garbled = dict(clean.revealed)
    garbled[10] = {i: shamir.to_bytes(7) for i in ups}
    garbled[20] = garbled[20] | {0: member.NO_SHARE}
    np.testing.assert_array_equal(unmask(SECURE, "run/0.0", clean.dealt, clean.masked, garbled)[0], clean.expected()[0])
    garbled |= {30: {i: shamir.to_bytes(8) for i in ups}, 40: {i: shamir.to_bytes(9) for i in ups}}
    with pytest.raises(UnmaskError, match="client 0 cannot be restored"):
        unmask(SECURE, "run/0.0", clean.dealt, clean.masked, garbled)
    boxes = {j: clean.boxes[j][0] for j in ups if j != 0}
    damaged = bytes([boxes[10][0] ^ 1]) + boxes[10][1:]
    dealt = clean.members[0]._replace(step="dealt", shares={0: clean.members[0].shares[0]})
    after, words = mask(SECURE, dealt, boxes | {10: damaged}, ups[0][1])
    assert after.shares[10] == 2 * member.NO_SHARE
    np.testing.assert_array_equal(words[0], clean.masked[0][0])
    swapped = mask(SECURE, dealt, boxes | {10: boxes[20]}, ups[0][1])[0]
    assert swapped.shares[10] == 2 * member.NO_SHARE  # sealed for one pair only


# --- settings and sizes


def test_settings_name_what_is_wrong():
    for options, word in (
        ({"clients": 1}, "clients"),
        ({"clients": 5, "bits": 16}, "bits"),
        ({"clients": 5, "bound": 0}, "bound"),
        ({"clients": 5, "bound": float("inf")}, "bound"),
        ({"clients": 40_000, "bits": 32}, "64 bits"),
    ):
        with pytest.raises(ValueError, match=word):
            Secure(**options)
    for table, word in (({"treshold": 3}, "treshold"), ({"threshold": 1.5}, "threshold"), ({"threshold": 0.3}, "half")):
        with pytest.raises(ValueError, match=word):
            Secure.from_table(table, 6)
    with pytest.raises(ValueError, match="cohort"):
        Secure.from_table({}, 1)
    assert [Secure(clients=n).threshold for n in (2, 3, 4, 5, 6, 9, 100)] == [2, 3, 3, 4, 5, 7, 67]


def test_the_stated_sizes_are_those_of_keys_and_shares():
    server = Server(SECURE, uploads(SECURE))
    assert {len(key) for key in server.public.values()} == {sizes.KEYS}
    assert {len(box) for boxes in server.boxes.values() for box in boxes.values()} == {sizes.SEALED}
    assert {len(dealt.commitment) for dealt in server.dealt.values()} == {sizes.COMMITMENT}
    assert {len(share) for given in server.revealed.values() for share in given.values()} == {sizes.SHARE}
