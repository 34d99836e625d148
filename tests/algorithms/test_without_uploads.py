"""A round whose uploads are all lost does not move the server's model, for every server optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.algorithms.server_optimizers import adaptive
from fedbraid.simulation import simulate
from fedbraid.simulation.tally import Sizes, server_step
from fedbraid.testing.problem import clients, loss, start


def _bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi"])
def test_the_server_keeps_its_state_bit_for_bit(name):
    """At the start, and after a step, when the optimizer has momentum; the next upload gives a finite model."""
    alg = getattr(fb, name)(loss, client_lr=0.05)
    exchange = alg.exchanges[0]
    key, draw = jax.random.key(0), address.server_noise(jax.random.key(0))
    sizes = Sizes(population=5, cohort=1)
    step = jax.jit(lambda server, up, count: server_step(exchange, server, (up, count, count), sizes, key, draw))
    none = fb.Up(jax.tree.map(jnp.zeros_like, start()))
    some = fb.Up(jax.tree.map(lambda leaf: leaf + 0.1, start()))
    first = jax.tree.map(jnp.asarray, alg.init(start()))
    lost, _ = step(first, none, jnp.float32(0))
    assert _bits(lost) == _bits(first)
    moved, _ = step(lost, some, jnp.float32(1))
    assert _bits(alg.params(moved)) != _bits(alg.params(first))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(moved))
    again, _ = step(moved, none, jnp.float32(0))
    assert _bits(again) == _bits(moved)


def test_a_run_that_loses_its_first_round_stays_finite():
    """The first upload arrives in round 2."""
    split = clients(dtype=np.float32)
    alg = fb.fedyogi(loss, client_lr=0.05)
    result = simulate(
        alg, start(jnp.float32), split, rounds=3, cohort=1, arrival=fb.simulation.bernoulli(0.5), seed=0, devices=1
    )
    arrived = result.history["train/arrived"]
    assert arrived[0] == 0
    assert arrived.sum() > 0
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(result.server))


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_uploads_whose_squares_overflow_do_not_give_nan(kind):
    """Two uploads of 1e30 in float32: their squares are infinite, so later steps are 0, not NaN."""
    opt = adaptive(kind, 0.1)
    params = jnp.ones(2)
    state = opt.init(params)
    for size in (1e30, 1e30, 1.0):
        updates, state = opt.update(jnp.full(2, size), state)
        assert np.isfinite(np.asarray(updates)).all()
