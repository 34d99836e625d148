"""Out of device memory: the run continues with fewer clients at a time and gives the same result."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.simulation import Checkpoints, simulate
from told import collecting, told
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")

OPTIONS = {"rounds": 4, "cohort": 4, "devices": 1}


def scarce(limit, *, after=0):
    """The zoo's loss on a device that runs out of memory with more than ``limit`` clients, from some call on."""
    calls = []

    def allocate(mask):
        calls.append(mask.shape)
        together = mask.shape[0] if mask.ndim > 1 else 1
        if together > limit and len(calls) > after:
            raise MemoryError(f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {together} clients.")
        return np.zeros(mask.shape[:-1], np.float32)

    def hungry(params, batch, key):
        # the program itself fails in the middle of its work, like a real device
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return loss(params, batch, key) + jax.pure_callback(allocate, shape, batch["mask"], vmap_method="broadcast_all")

    return hungry


def algorithm(loss):
    return fb.scaffold(loss, client_lr=0.05, batch_size=2, epochs=2)


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-12, atol=1e-12)


@functools.cache
def undisturbed():
    return simulate(algorithm(loss), start(), clients(), **OPTIONS)


@pytest.mark.parametrize(
    ("plan", "limit", "states_in", "data_in", "halved"),
    [
        ("chunks", 2, "device", "host", [("4", "2")]),  # it keeps this chunk
        ("lanes", 1, "host", "device", [("4", "2"), ("2", "1")]),
    ],
)
def test_the_chunk_halves_and_nothing_is_lost(plan, limit, states_in, data_in, halved):
    whole = undisturbed()
    with told(match="out of device memory") as notices:
        got = simulate(
            algorithm(scarce(limit, after=3)),
            start(),
            clients(),
            plan=plan,
            chunk=4,
            states_in=states_in,
            data_in=data_in,
            on_progress=lambda progress: None,  # short calls: rounds before the failing one must not be repeated
            **OPTIONS,
        )
    assert [re.search(r"with (\d) .* again with (\d)$", n).groups() for n in notices] == halved
    assert got.info.plan.chunk == limit
    close(got.params, whole.params)
    states = got.states.read(np.arange(5)) if states_in == "host" else got.states
    close(states, whole.states)
    assert got.info.steps == whole.info.steps
    for name, column in whole.history.items():
        np.testing.assert_allclose(got.history[name], column, rtol=1e-12)


def test_an_exchange_that_fails_takes_the_round_back():
    """Two exchanges, states on the host: the second fails in every round, and the first must not be applied twice."""

    def two(second):
        base = algorithm(loss).exchanges[0]
        other = algorithm(second).exchanges[0]._replace(name="again", cohort="same")
        return algorithm(loss)._replace(exchanges=(base, other))

    whole = simulate(two(loss), start(), clients(), **OPTIONS)
    with collecting():
        got = simulate(two(scarce(1)), start(), clients(), plan="chunks", chunk=2, states_in="host", **OPTIONS)
    close(got.params, whole.params)
    close(got.states.read(np.arange(5)), whole.states)


def test_one_client_that_does_not_fit_is_an_error_and_the_checkpoint_stays(tmp_path):
    options = {**OPTIONS, "checkpoints": Checkpoints(tmp_path, every=1)}
    seen = []
    with pytest.raises(MemoryError, match=r"round \d with one client at a time.*data_in.*RESOURCE_EXHAUSTED"):
        simulate(
            algorithm(scarce(0, after=30)), start(), clients(), plan="sequential", on_progress=seen.append, **options
        )
    assert seen  # some rounds were completed; a larger device continues from there
    resumed = simulate(
        algorithm(loss), start(), clients(), **{**options, "checkpoints": Checkpoints(tmp_path, every=1, resume=True)}
    )
    close(resumed.params, undisturbed().params)


def test_other_errors_are_not_taken_for_it():
    def broken(params, batch, key):
        def fail(mask):
            raise ValueError("a bug")

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return loss(params, batch, key) + jax.pure_callback(fail, shape, batch["mask"], vmap_method="sequential")

    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        simulate(algorithm(broken), start(), clients(), plan="chunks", chunk=4, **OPTIONS)


def test_a_resumed_run_keeps_the_chunk_that_was_halved(tmp_path):
    """A run halves its chunk when memory runs out. Resumed, it uses the same chunk and so ends with the same bits."""

    def run(alg, rounds, resume):
        options = {"checkpoints": Checkpoints(tmp_path, 1, resume), "rounds": rounds, "devices": 1, "plan": "chunks"}
        return simulate(alg, start(), clients(), **options)

    with collecting():
        assert run(algorithm(scarce(2)), 2, False).info.plan.chunk == 2
    resumed = run(algorithm(loss), 4, True)
    assert resumed.info.plan.chunk == 2
    whole = simulate(algorithm(loss), start(), clients(), rounds=4, devices=1, plan="chunks", chunk=2)
    for ours, theirs in zip(*map(jax.tree.leaves, (resumed.params, whole.params)), strict=True):
        assert np.array_equal(ours, theirs)  # the same bits
