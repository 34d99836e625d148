"""The laws that every algorithm and every transform obeys, over the whole zoo."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.core import Aggregate, message_shapes, reduce_reports
from fedbraid.costs import data_shapes
from fedbraid.local import ClientData, LocalWork
from fedbraid.simulation import bernoulli, run, simulate
from fedbraid.simulation.plan import cohorts_of
from zoo import ALGORITHMS, ROWS, TRANSFORMS, clients, gradient, loss, optimum, start

RAGGED = {"batch_size": 2, "epochs": 1}  # batches that do not divide any client's examples evenly
WHOLE = {"batch_size": None, "steps": 2}  # no randomness
LOSSY = bernoulli(0.5)
ROUNDS, COHORT = 4, 2
every_row = pytest.mark.parametrize("name", list(ROWS))

pytestmark = pytest.mark.usefixtures("x64")


def close(a, b, tolerance=1e-9):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def interpret(alg, split, *, rounds, cohort, seed=0, arrival=None):
    """A plain reading of the abstraction, client by client in Python: what any engine must agree with."""
    arrays = {k: jnp.asarray(v) for k, v in split.arrays.items()}
    server, states = strong(alg.init(start())), [strong(alg.init_client(start()))] * split.num_clients
    work = [jax.jit(exchange.client) for exchange in alg.exchanges]
    take_in = [jax.jit(partial(_take_in, exchange, split.num_clients)) for exchange in alg.exchanges]
    for round_ in range(rounds):
        cohorts = cohorts_of(alg, seed, round_, split.num_clients, cohort)
        for index, exchange in enumerate(alg.exchanges):
            key = address.exchange_key(jax.random.key(seed), round_, index)
            down, ups, weights = strong(exchange.send(server)), [], []
            for i in cohorts[index].tolist():
                data = ClientData(arrays, jnp.int32(split.offsets[i]), jnp.int32(split.sizes[i]), max(split.sizes))
                report = work[index](down, states[i], data, address.client_key(key, i))
                steps = exchange.client.count(data.size) if isinstance(exchange.client, LocalWork) else 1
                if arrival is not None and not arrival(address.arrival_key(key, i), steps):
                    continue
                states[i] = report.state
                ups.append(report.up)
                weights.append(report.weight)
            if ups:
                server = take_in[index](server, ups, weights, address.server_key(key))
    return alg.params(server), states


def strong(tree):
    """Numbers whose dtype is theirs, not the next operand's: a client's program is then compiled once."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype), tree)


def _take_in(exchange, population, server, ups, weights, key):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ups)
    up, weight, count = reduce_reports(exchange.reducer, stacked, jnp.stack(weights))
    return exchange.receive(server, Aggregate(up, weight, count, population), key)


def _telling_seed():
    """A seed whose first rounds hold what the laws are about: a round nobody answers, and a client never asked."""
    for seed in range(1000):
        asked, empty = set(), [False, False]
        for round_ in range(ROUNDS):
            for index in range(2):
                ids = address.cohort(seed, round_, index, 5, COHORT).tolist()
                key = address.exchange_key(jax.random.key(seed), round_, index)
                asked |= set(ids)
                empty[index] |= not any(LOSSY(address.arrival_key(key, i), 1) for i in ids)
        if len(asked) < 5 and all(empty):
            return seed
    raise AssertionError("no such seed")


@functools.cache
def lossy_run(name):
    """Rounds of partial, lossy cohorts in portions of two, on one device; and how often the program was compiled."""
    programs, portions, make = [], [], run.compile_rounds

    def spy(*args, **options):
        programs.append(make(*args, **options))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "WINDOW", 2)
        patch.setattr(run, "compile_rounds", spy)
        alg = ROWS[name].make(**RAGGED)
        result = simulate(
            alg,
            start(),
            clients(),
            rounds=ROUNDS,
            cohort=COHORT,
            seed=seed(),
            arrival=LOSSY,
            devices=1,
            on_progress=lambda progress: portions.append(progress.round),
        )
    assert len(portions) >= 2
    return result, programs[0].rounds._cache_size()


seed = functools.cache(_telling_seed)


@every_row
def test_engine_is_the_plain_reading(name):
    """The compiled engine does what the abstraction says; states commit, and the server moves, only on arrival."""
    params, states = interpret(
        ROWS[name].make(**RAGGED), clients(), rounds=ROUNDS, cohort=COHORT, seed=seed(), arrival=LOSSY
    )
    result, _ = lossy_run(name)
    close(result.params, params)
    close(result.states, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    assert result.info.masked_share == 0


@every_row
def test_round_two_onward_compiles_nothing(name):
    _, compiled = lossy_run(name)
    assert compiled == 1


@every_row
def test_plan_devices_and_portions_change_nothing(name):
    """Lanes on two devices (an algorithm of opaque clients runs in chunks there) against one client after the other."""
    alg, (one, _) = ROWS[name].make(**RAGGED), lossy_run(name)
    spread = simulate(
        alg,
        start(),
        clients(),
        rounds=ROUNDS,
        cohort=COHORT,
        seed=seed(),
        arrival=LOSSY,
        devices=2,
        plan="lanes",
        chunk=1,
    )
    close(one.params, spread.params)
    close(one.states, spread.states)


@every_row
def test_a_client_never_asked_keeps_its_state_bit_for_bit(name):
    result, _ = lossy_run(name)
    alg = ROWS[name].make(**RAGGED)
    asked = {i for r in range(ROUNDS) for ids in cohorts_of(alg, seed(), r, 5, COHORT) for i in ids.tolist()}
    assert len(asked) < 5
    for i in set(range(5)) - asked:
        same_bits(jax.tree.map(lambda leaf, i=i: leaf[i], result.states), alg.init_client(start()))


@pytest.mark.parametrize("plan", ["sequential", "chunks"])
def test_same_seed_same_bits(plan):
    options = {"rounds": 5, "cohort": 3, "devices": 2, "plan": plan}
    a, b = (simulate(ROWS["fedavgm"].make(**RAGGED), start(), clients(), **options) for _ in range(2))
    same_bits(a.params, b.params)
    other = simulate(ROWS["fedavgm"].make(**RAGGED), start(), clients(), seed=1, **options)
    assert np.asarray(other.params["w"]).tobytes() != np.asarray(a.params["w"]).tobytes()


@every_row
def test_sign(name):
    """One round with everyone moves against the gradient."""
    x = start()
    moved = simulate(ROWS[name].make(**WHOLE), x, clients(), rounds=1, devices=1).params
    parts = zip(*map(jax.tree.leaves, (x, moved, gradient(x, clients()))), strict=True)
    assert sum(jnp.vdot(a - b, g) for a, b, g in parts) > 0


@every_row
def test_an_upload_of_weight_zero_counts_for_nothing(name):
    """For the reduction itself, on uploads of the row's own kind but with numbers at random."""
    alg, rng = ROWS[name].make(**WHOLE), np.random.default_rng(0)

    def some(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=(4, *leaf.shape)), leaf.dtype)
        return jnp.asarray(rng.integers(0, 2, (4, *leaf.shape)), leaf.dtype)

    for exchange, shapes in zip(alg.exchanges, message_shapes(alg, start(), data_shapes(clients())), strict=True):
        four = jax.tree.map(some, shapes.up)
        three = jax.tree.map(lambda leaf: leaf[:3], four)
        reduce = jax.jit(partial(reduce_reports, exchange.reducer))
        plain, weight, count = reduce(three, jnp.array([1.0, 2.0, 1.5]))
        padded, weight2, count2 = reduce(four, jnp.array([1.0, 2.0, 1.5, 0.0]))
        close(plain, padded)
        assert (weight, count) == (weight2, count2)


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.invariant])
def test_invariant_under_loss(name):
    row = ROWS[name]
    full = simulate(row.make(**RAGGED), start(), clients(), rounds=6, cohort=3, devices=1)
    for result in (full, lossy_run(name)[0]):
        assert row.invariant(result.server, result.states) < 1e-9


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.exact])
def test_optimum_is_a_fixed_point(name):
    """Long enough with everyone, it arrives at the optimum that NumPy finds."""
    result = simulate(ROWS[name].make(**WHOLE), start(), clients(), rounds=3000, devices=1)
    close(result.params, optimum(), 1e-8)


@every_row
def test_refusals_name_the_argument(name):
    for call, word in ROWS[name].refuses:
        with pytest.raises(ValueError, match=word):
            call()


def test_a_sweep_is_a_vmap():
    def run_one(lr):
        return simulate(fb.fedavg(loss, client_lr=lr, **RAGGED), start(), clients(), rounds=2, cohort=3).params

    rates = jnp.array([0.01, 0.05])
    together = jax.vmap(run_one)(rates)
    for i, lr in enumerate(rates):
        close(jax.tree.map(lambda leaf, i=i: leaf[i], together), run_one(float(lr)))


def test_every_algorithm_and_transform_has_a_row():
    assert set(fb.algorithms.ALGORITHMS) == set(ALGORITHMS)
    assert set(fb.transforms.TRANSFORMS) == set(TRANSFORMS)
