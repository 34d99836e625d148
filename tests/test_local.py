"""The batches of a client: every example is used the requested number of times, in an order that depends on its key."""

import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbraid
from fedbraid import models
from fedbraid.local import Batches, ClientData, batches_of, grad, local_work, masked_mean, shuffled, value_and_grad
from fedbraid.transforms.clients import map_inputs, map_report

pytestmark = pytest.mark.core


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**31))
def test_shuffled_is_a_permutation(n, seed):
    positions = jnp.arange(3000)  # one compiled program: positions past n are not read
    order = np.asarray(shuffled(jax.random.key(seed), jnp.where(positions < n, positions, 0), n))[:n]
    assert np.array_equal(np.sort(order), np.arange(n))


def test_shuffled_of_one_that_is_known_when_compiling():
    assert jax.jit(lambda key: shuffled(key, jnp.zeros(3, jnp.int32), 1))(jax.random.key(0)).tolist() == [0, 0, 0]


def test_shuffled_is_uniform_over_permutations():
    n, draws = 4, 48_000
    keys = jax.random.split(jax.random.key(7), draws)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: shuffled(key, jnp.arange(n), n)))(keys))
    counts = Counter(map(tuple, orders.tolist()))
    assert set(counts) == set(itertools.permutations(range(n)))
    expected = draws / math.factorial(n)
    chi2 = sum((c - expected) ** 2 / expected for c in counts.values())
    assert chi2 < 52  # 99.95% point of chi-squared with 23 degrees of freedom


def client(n, offset=0, cap=None):
    rows = np.arange(100.0)
    return ClientData({"x": jnp.asarray(rows)}, jnp.int32(offset), jnp.int32(n), cap or n)


def walk(batches, data, key=None):
    key = jax.random.key(0) if key is None else key
    taken = [batches.take(data, k, key) for k in range(int(batches.count(int(data.size))))]
    return [np.asarray(b["x"])[np.asarray(b["mask"]) > 0].tolist() for b in taken]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 30), size=st.integers(1, 12), epochs=st.integers(1, 3), shuffle=st.booleans())
def test_an_epoch_sees_every_example_once(n, size, epochs, shuffle):
    batches = Batches(size, epochs=epochs, shuffle=shuffle)
    seen = walk(batches, client(n, offset=40))
    per_epoch = -(-n // size)
    assert len(seen) == epochs * per_epoch
    for e in range(epochs):
        rows = sorted(flat(seen[e * per_epoch : (e + 1) * per_epoch]))
        assert rows == [40.0 + i for i in range(n)]


def test_steps_go_round_and_epochs_differ_in_order():
    seen = walk(Batches(4, steps=6), client(8))
    assert len(seen) == 6
    epochs = [flat(seen[i : i + 2]) for i in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_on_the_key_alone():
    batches, key = Batches(3, epochs=1), jax.random.key(5)
    assert walk(batches, client(7), key) == walk(batches, client(7, cap=50), key)
    assert walk(batches, client(7), key) != walk(batches, client(7), jax.random.key(6))


def test_without_a_size_all_examples_are_one_batch():
    assert walk(Batches(None, steps=2), client(5, cap=9)) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


@settings(max_examples=15, deadline=None)
@given(n=st.integers(2, 60), cut=st.floats(0.05, 0.95))
def test_parts_are_disjoint_and_cover(n, cut):
    one, two = (walk(Batches(5, epochs=1, part=p), client(n)) for p in ((0.0, cut), (cut, 1.0)))
    one, two = sorted(flat(one)), sorted(flat(two))
    assert one
    assert two
    assert one + two == list(range(n))


def test_a_part_of_a_single_example_is_that_example():
    for part in ((0.0, 0.5), (0.5, 1.0)):
        assert walk(Batches(5, epochs=1, part=part), client(1)) == [[0.0]]


def test_counts_agree_between_host_and_device():
    batches, sizes = Batches(4, epochs=3, part=(0.0, 0.7)), np.arange(1, 40)
    np.testing.assert_array_equal(batches.count(sizes), jax.vmap(batches.count)(jnp.asarray(sizes)))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"steps": -1}, "steps"),
        ({"epochs": 1, "steps": 1}, "epochs"),
        ({"part": (0.5, 0.5)}, "part"),
        ({"part": (0.0, 1.5)}, "part"),
        ({"batchsize": 3}, "batchsize.*batch_size"),
    ],
)
def test_refusals(options, word):
    with pytest.raises(ValueError, match=word):
        batches_of(**options)


def test_masked_mean_ignores_padding_and_survives_none():
    assert float(masked_mean(jnp.array([2.0, 4.0, 1e9]), jnp.array([1.0, 1.0, 0.0]))) == 3.0
    assert float(masked_mean(jnp.ones(3), jnp.zeros(3))) == 0.0


def test_a_changed_client_is_still_cut_into_steps():
    from fedbraid.core import Report

    def total(state_offset):
        return local_work(
            start=lambda down, state, key: state + state_offset,
            step=lambda carry, batch, key, down: carry + down * jnp.sum(batch["x"] * batch["mask"]),
            finish=lambda carry, down, state, n: Report(carry, n),
            batches=Batches(2, epochs=1),
        )

    work = map_inputs(total(0.5), down=lambda d: d["scale"], state=lambda s: s[0])
    work = map_report(work, lambda report, down, state, key: report._replace(up=(report.up, down["scale"], state[1])))
    assert type(work) is type(total(0.0))
    report = work({"scale": 10.0}, (1.0, "kept"), client(3), jax.random.key(0))
    assert (float(report.up[0]), report.up[1], report.up[2], int(report.weight)) == (1.5 + 10 * 3.0, 10.0, "kept", 3)


def test_a_model_in_place_of_its_loss_is_refused_with_the_next_step():
    model = models.softmax_regression(4, classes=2)
    for differentiate in (grad, value_and_grad):
        with pytest.raises(TypeError, match=r"got a Model; pass model\.loss instead of the model"):
            differentiate(model)
    with pytest.raises(ValueError, match=r"unknown option 'lr'.*client_lr.*batch_size"):
        batches_of(lr=0.1)


def test_arguments_of_simulate_in_the_wrong_order_are_named():
    model = models.softmax_regression(4, classes=2)
    params = model.init(jax.random.key(0))
    data = fedbraid.Split.from_clients([{"x": np.zeros((3, 4), np.float32), "y": np.zeros(3, np.int32)}])
    with pytest.raises(ValueError, match=r"data must be a FederatedData or a Split, got a dict; .*params, data"):
        fedbraid.simulate(fedbraid.fedavg(model.loss), data, params, rounds=1)
