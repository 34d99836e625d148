"""The laws that every algorithm and every transform obeys, over the whole zoo.

All of them run under strict dtype promotion: no operation of the library may rely on JAX's implicit conversion of
integers or booleans to floats. ``make check`` runs only the laws marked ``core``.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import jax
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.data.federated import Split
from fedbraid.simulation import simulate
from fedbraid.simulation.plan import cohorts_of
from fedbraid.testing import laws
from fedbraid.testing.problem import gradient
from fedbraid.testing.reference import interpret
from shared_programs import COHORT, LOSSY, RAGGED, compiled, lossy, program, ragged, sharing
from zoo import ALGORITHMS, ELSEWHERE, IMAGES, LOCAL, ROWS, TRANSFORMS, clients, optimum, start

WHOLE = {"batch_size": None, "steps": 2}  # full batches, which need no shuffling
ROUNDS, SEED = 4, {"float64": 3360, "float32": 1876}  # of lossy runs; see test_the_seeds_tell
LONG = 3000  # rounds to the optimum
ROUNDING = {"float64": 1e-9, "float32": 2e-4}  # results that differ by rounding, after a few rounds
every_row = pytest.mark.parametrize("name", list(ROWS))
core = pytest.mark.core


pytestmark = pytest.mark.usefixtures("x64", "strict")


close = functools.partial(laws.agrees, "engine", "two results differ", causes=laws.ENGINE)
same_bits = functools.partial(laws.same_bits, "engine", "two results differ", causes=laws.ENGINE)


def differ(a, b):
    return any((np.asarray(x) != np.asarray(y)).any() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_the_seeds_tell():
    """In a lossy run there is a round without any answer, in either exchange, and a client that is never asked.

    An empty slot, which has the number of the first client that does not exist, would answer if it were asked.
    """
    for dtype, seed in SEED.items():
        asked, empty, beyond = set(), [False, False], [False, False]
        with jax.enable_x64(dtype == "float64"):
            for round_, index in itertools.product(range(ROUNDS), range(2)):
                ids = address.cohort(seed, round_, index, 5, COHORT).tolist()
                key = address.exchange_key(jax.random.key(seed), round_, index)
                asked |= set(ids)
                empty[index] |= not any(LOSSY(address.arrival_key(key, i), 1) for i in ids)
                beyond[index] |= bool(LOSSY(address.arrival_key(key, 5), 1))
        assert len(asked) < 5
        assert all(empty)
        assert all(beyond)


# --- runs that several laws use: each is computed once per row --------------------------------------------------------


@functools.cache
def whole(name):
    return ROWS[name].make(**WHOLE)


@functools.cache
def lossy_run(name):
    """Rounds with partial cohorts and lost uploads, two per call, on one device; and the number of compilations."""
    portions = []
    look = {"on_progress": lambda progress: portions.append(progress.round)}
    result = lossy(name, rounds=ROUNDS, seed=SEED["float64"], **look)
    assert len(portions) >= 2
    return result, compiled(ragged(name))


def spread_run(name, dtype, **plan):
    """The same rounds in one call, on two devices."""
    options = {"rounds": ROUNDS, "cohort": COHORT, "seed": SEED[dtype], "arrival": LOSSY, "devices": 2}
    with sharing():
        return simulate(ragged(name), start(), clients(dtype=dtype), **options, **plan)


def plain_run(name, dtype):
    """The same rounds by the reference: parameters, and the states of all clients stacked."""
    split = clients(dtype=dtype)
    return interpret(ragged(name), start(), split, rounds=ROUNDS, cohort=COHORT, seed=SEED[dtype], arrival=LOSSY)


def whole_run(alg, rounds, split=None):
    """The first rounds of a long run with all clients and full batches: one program for any number of rounds."""
    done = []

    def stop(progress):
        done.append(progress.round)
        return progress.round >= rounds

    split = clients() if split is None else split
    # progress is reported after every round, except in the long run
    options = {} if rounds == LONG else {"on_progress": stop}
    with sharing():
        result = simulate(alg, start(), split, rounds=LONG, devices=1, **options)
    assert rounds == LONG or done == list(range(1, rounds + 1))
    return result


@functools.cache
def two_rounds(name):
    return whole_run(whole(name), 2)


# --- the engine ------------------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=core), "float32"])
def test_engine_is_the_plain_reading(name, dtype):
    """The compiled engine equals the reference; only uploads that arrived change client states and the server.

    In float64 one client after the other, in float32 two at a time on each of two devices.
    """
    with jax.enable_x64(dtype == "float64"):
        params, states = plain_run(name, dtype)
        result = lossy_run(name)[0] if dtype == "float64" else spread_run(name, dtype, plan="chunks", chunk=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {np.dtype(dtype)}
    close(result.params, params, tolerance=ROUNDING[dtype])
    close(result.states, states, tolerance=ROUNDING[dtype])
    assert dtype == "float32" or result.info.masked_share == 0  # chunks are padded to the largest client


@every_row
def test_round_two_onward_compiles_nothing(name):
    assert lossy_run(name)[1] == [1]


@every_row
def test_plan_devices_and_portions_change_nothing(name):
    """Lanes on two devices (opaque clients always run in chunks) against one client after the other."""
    one, spread = lossy_run(name)[0], spread_run(name, "float64", plan="lanes", chunk=1)  # the first counts programs
    close(one.params, spread.params)
    close(one.states, spread.states)


@every_row
def test_a_client_never_asked_keeps_its_state_bit_for_bit(name):
    result, _ = lossy_run(name)
    alg = ragged(name)
    asked = {i for r in range(ROUNDS) for ids in cohorts_of(alg, SEED["float64"], r, 5, COHORT) for i in ids.tolist()}
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


@core
@every_row
def test_the_order_of_the_clients_changes_nothing(name):
    """Client order[i] of the data becomes client i: same parameters and server state, and states in the new order.

    With all clients and full batches most rows draw no random numbers on clients. If clients do draw, the test gives
    them their old keys, which depend on the client's number. Nothing else depends on it.
    """
    plain = two_rounds(name)
    order = np.array([3, 0, 4, 2, 1])  # the old number of the client at each new position
    split = Split.from_clients([clients().client(i) for i in order])
    if ROWS[name].draws:
        with laws.numbered(order):  # on a new algorithm: the program of the shared one has other keys
            moved = whole_run(ROWS[name].make(**WHOLE), 2, split)
    else:
        moved = whole_run(whole(name), 2, split)
    laws.order_changes_nothing(plain, moved, order)


# --- the algorithm ---------------------------------------------------------------------------------------------------


@core
@every_row
def test_sign(name):
    """One round with all clients moves the model against the gradient."""
    laws.moves_downhill(start(), whole_run(whole(name), 1).params, gradient(start(), clients()))


@every_row
def test_an_upload_of_weight_zero_counts_for_nothing(name):
    """For the reduction itself, on uploads with the row's structure and random numbers."""
    laws.weight_zero_counts_for_nothing(whole(name), start(), clients())


@every_row
def test_messages_and_dtypes_depend_on_the_parameters_only(name):
    laws.messages_fit_every_site(whole(name), start(), clients())
    laws.dtypes_stay(whole(name), start(), clients())


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.invariant])
def test_invariant_with_everyone_and_under_loss(name):
    laws.keeps_invariant(ROWS[name].invariant, two_rounds(name), lossy_run(name)[0])


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.exact])
def test_optimum_is_a_fixed_point(name):
    """After many rounds with all clients, the model is the optimum that NumPy computes."""
    close(whole_run(whole(name), LONG).params, optimum(), tolerance=1e-8)


@every_row
def test_refusals_name_the_argument(name):
    for call, word in ROWS[name].refuses:
        with pytest.raises(ValueError, match=word):
            call()


# --- how it is built and computed ------------------------------------------------------------------------------------

VARIED = [
    (name, i)
    for name, row in ROWS.items()
    for i in range(-1 if row.rates else 0, len(row.varied))  # -1: the row's own options
]


@pytest.mark.parametrize(("name", "which"), [pytest.param(n, i, id=f"{n}:{i}" if i >= 0 else n) for n, i in VARIED])
def test_a_sweep_over_every_rate_is_a_vmap(name, which):
    """Two values of all rates at once, traced in one program, give what two runs with plain numbers give."""
    row = ROWS[name]
    options, second = ({}, row.rates) if which < 0 else row.varied[which]
    first = row.first(second, options)

    def run_one(rates):
        result = simulate(row.make(**WHOLE, **{**options, **rates}), start(), clients(), rounds=2, devices=1)
        return result.params, result.server, result.states

    shared = two_rounds(name) if which < 0 else None
    alone = [] if shared is None else [(shared.params, shared.server, shared.states)]
    laws.rates_may_be_traced(run_one, first, second, alone=alone)


@pytest.mark.parametrize("name", list(ROWS))
def test_every_rate_is_in_its_row(name):
    """Options that may be traced are annotated ``Any``; all of them are in the law above."""
    row = ROWS[name]
    hints = get_type_hints(row.factory)
    named = {option for option, hint in hints.items() if hint is Any and option != "return"}
    for hint in hints.values():  # of **options: Unpack[a TypedDict]
        if get_origin(hint) is Unpack:
            named |= {option for option, typed in get_type_hints(*get_args(hint)).items() if typed is Any}
    named -= {"params", *LOCAL}  # fedsplit's params are a tree
    assert named == {*row.rates, *(option for varied in row.varied for option in varied.rates)}


@every_row
def test_convolutions_rewritten_and_native_agree(name):
    """On a network with a convolution; the rewritten program contains no convolution."""
    alg, options = ROWS[name].make(IMAGES, **WHOLE), {"rounds": 2, "cohort": 2, "devices": 1}
    with sharing():
        fast, native = (
            simulate(alg, IMAGES.start(), IMAGES.clients(), convolutions=how, **options) for how in ("fast", "native")
        )
    assert "stablehlo.convolution" in program(alg, convolutions="native")
    assert "stablehlo.convolution" not in program(alg, convolutions="fast")
    close(fast.params, native.params)
    close(fast.server, native.server)
    close(fast.states, native.states)
    assert differ(fast.params, IMAGES.start())


def test_every_algorithm_and_transform_has_a_row():
    assert set(fb.algorithms.ALGORITHMS) == {*ALGORITHMS, *ELSEWHERE}
    for name, place in ELSEWHERE.items():
        assert re.search(rf"fb\.{name}\(.*\bcheck\(", (Path(__file__).parent / place).read_text(), re.DOTALL)
    assert set(fb.transforms.TRANSFORMS) == set(TRANSFORMS)
