"""Several points of a sweep as one program: the same numbers as single runs."""

import jax
import numpy as np
import pytest

from experiment.sweep_settings import NAN, RATE, small
from fedbraid import address, simulate
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment import build
from fedbraid.experiment.points import brief_init, points_program, traceable, with_values
from fedbraid.lowering.compiler import BRIEF, ONCE, brief_options
from fedbraid.simulation import Checkpoints
from fedbraid.simulation.feed import Feed
from told import told


@pytest.fixture(scope="module")
def several():
    """Five points as one program, also for algorithms with client states and with two exchanges per round."""
    config = small("algorithm.name=scaffold", f"{RATE}=0.1")
    data = build(config).data
    points = [{RATE: rate} for rate in (0.01, 0.03, 0.1, NAN, 0.3)]
    program = points_program(config, data, [RATE], points=5, seeds=[3], test=data.test)
    return config, data, points, program, program.run(points, seed=3, rounds=6)


def test_one_program_is_as_many_runs(several):
    config, data, points, program, outcome = several
    assert program.own_points  # more points than the four devices of the tests: each device runs its own points
    for j in (0, 2):
        one = build(with_values(config, points[j] | {"seed": 3}))
        run = simulate(one.algorithm, one.params, data, rounds=6, cohort=4, seed=3, metrics=one.metrics, eval_every=2)
        for name, column in run.history.items():
            np.testing.assert_allclose(outcome.history[name][j], column, rtol=1e-4, atol=1e-6, err_msg=name)
        for name, column in run.evaluations.items():
            if name != "round":
                np.testing.assert_allclose(outcome.evaluations[name][j], column, rtol=1e-4, atol=1e-5, err_msg=name)
    assert outcome.evaluations["round"].tolist() == [2, 4, 6]


@pytest.mark.parametrize(("seconds", "portions"), [(1e-9, [1] * 6), (1e9, [1, 1, 2, 2])])
def test_a_call_of_several_points_takes_no_longer_than_it_may(several, seconds, portions, monkeypatch):
    """Evaluated every second round; the number of rounds per compiled call changes nothing."""
    _, _, points, program, outcome = several
    taken, made = [], Feed.portion
    monkeypatch.setattr("fedbraid.simulation.rounds.CALL", seconds)
    monkeypatch.setattr(Feed, "portion", lambda feed, first, number: taken.append(number) or made(feed, first, number))
    again = program.run(points, seed=3, rounds=6)
    assert taken == portions
    for name, column in again.history.items():
        np.testing.assert_array_equal(column, outcome.history[name], err_msg=name)


def test_a_diverged_point_is_told_and_harms_no_other(several):
    _, _, points, program, outcome = several
    assert outcome.diverged.tolist() == [False, False, False, True, False]
    sound = [points[i] for i in (0, 1, 2, 2, 4)]
    without = program.run(sound, seed=3, rounds=6)
    for name, column in without.evaluations.items():
        if name != "round":
            np.testing.assert_array_equal(column[[0, 1, 2, 4]], outcome.evaluations[name][[0, 1, 2, 4]])


def test_going_on_is_as_if_it_had_not_stopped(several):
    _, _, points, program, outcome = several
    first = program.run(points[:3], seed=3, rounds=4, keep=True)
    rest = program.run(points[1:3], seed=3, rounds=6, start=first.take(np.array([1, 2])))
    for mine, whole in ((rest.history, outcome.history), (rest.evaluations, outcome.evaluations)):
        for name, column in mine.items():
            np.testing.assert_array_equal(column, whole[name] if name == "round" else whole[name][1:3], err_msg=name)
    assert rest.rounds == 6
    assert np.all(np.diff(rest.seconds) > 0)


def test_streamed_data_gives_the_same(several):
    """Cohorts streamed from the host, with a seed whose cohorts are larger than those of the configuration's seed."""
    config, data, points, _, outcome = several
    streamed = with_values(config, {"engine.data_in": "host", "cohort": 4})
    program = points_program(streamed, data, [RATE], points=2, seeds=[0, 1, 3], test=data.test)
    assert program.feed.stream
    again = program.run(points[:2], seed=3, rounds=6)
    for name, column in again.history.items():
        np.testing.assert_allclose(column, outcome.history[name][:2], rtol=1e-4, atol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match=r"seeds \[0, 1, 3\], got 7"):
        program.run(points[:2], seed=7, rounds=6)


def test_streamed_cohorts_of_unequal_clients_fit_one_program(several):
    """Cohorts differ in their numbers of examples by a factor of up to 40, over rounds and over seeds."""
    config = several[0]
    rng = np.random.default_rng(0)
    clients = [{"x": rng.normal(size=(n, 64)).astype(np.float32), "y": rng.integers(0, 10, n)} for n in (200, *[5] * 9)]
    data = FederatedData(Split.from_clients(clients), info={"classes": 10})
    large_first = [0 in address.cohort(seed, 0, 0, 10, 2) for seed in range(20)]  # the large client is in round 0
    points, seeds = [{RATE: 0.01}, {RATE: 0.1}], (large_first.index(True), large_first.index(False))
    found = []
    for place in ("device", "host"):
        placed = with_values(config, {"engine.data_in": place, "cohort": 2, "engine.devices": 1})
        program = points_program(placed, data, [RATE], points=2, seeds=seeds)
        found.append([program.run(points, seed=seed, rounds=4).history["train/loss"] for seed in seeds])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_a_sweep_says_which_options_have_no_effect(several):
    config, data = several[:2]
    for values, words in (
        ({"engine.precision": "bfloat16"}, "bfloat16.* has no effect on a CPU"),
        ({"engine.matrices": "grown"}, "it needs the plan 'lanes'"),
    ):
        with told(words):
            points_program(with_values(config, values), data, [RATE], points=2, seeds=[3])


def test_client_states_on_the_host_give_the_same(several, tmp_path):
    """Points keep their client states in memory or in a folder of the host, and can be stopped and gone on from."""
    config, data, points, _, outcome = several
    for place in ("host", str(tmp_path / "states")):
        on_host = with_values(config, {"engine.states_in": place})
        program = points_program(on_host, data, [RATE], points=3, seeds=[3], test=data.test)
        assert program.on_host
        first = program.run(points[:3], seed=3, rounds=4, keep=True)
        again = program.run(points[:3], seed=3, rounds=6, start=first)
        for name, column in again.history.items():
            np.testing.assert_allclose(column, outcome.history[name][:3], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_sweep_is_resumed_from_its_checkpoint(several, tmp_path):
    _, _, points, program, outcome = several

    def stop(round_):
        if round_ == 4:
            raise KeyboardInterrupt

    saving = Checkpoints(tmp_path, every=2, resume=True)
    with pytest.raises(KeyboardInterrupt):
        program.run(points, seed=3, rounds=6, checkpoints=saving, on_progress=stop)
    rounds = []
    again = program.run(points, seed=3, rounds=6, checkpoints=saving, on_progress=rounds.append)
    assert rounds == [6]
    for mine, whole in ((again.history, outcome.history), (again.evaluations, outcome.evaluations)):
        for name, column in mine.items():
            np.testing.assert_array_equal(column, whole[name], err_msg=name)
    assert np.all(np.diff(again.seconds) > 0)
    np.testing.assert_array_equal(again.diverged, outcome.diverged)


def test_on_lanes_a_sweep_keeps_as_many_as_shorten_a_round(several):
    """One client of 20 steps and nine of 1: a second lane runs the nine, a third would be idle."""
    config, _, points, _, _ = several
    rng = np.random.default_rng(0)
    sizes = [200, *[10] * 9]
    clients = [{"x": rng.normal(size=(n, 64)).astype(np.float32), "y": rng.integers(0, 10, n)} for n in sizes]
    data = FederatedData(Split.from_clients(clients), info={"classes": 10})
    lanes = with_values(config, {"cohort": "all", "algorithm.batch_size": 10, "engine.plan": "lanes"})
    program = points_program(lanes, data, [RATE], points=5, seeds=[3])
    assert program.plan.chunk == 2
    reference = points_program(with_values(lanes, {"engine.plan": "sequential"}), data, [RATE], points=5, seeds=[3])
    ours, theirs = (p.run(points, seed=3, rounds=2).history["train/loss"] for p in (program, reference))
    np.testing.assert_allclose(ours[:3], theirs[:3], rtol=1e-4)


def test_rates_are_traced_and_counts_are_not():
    config = small("algorithm.name=fedprox", "transforms=[{name='clip', bound=1.0}]")
    data = build(config).data
    values = {
        RATE: [0.1, 0.2],
        "algorithm.alpha": [0, 1],
        "algorithm.epochs": [1, 2],
        "algorithm.weighting": ["examples", "uniform"],
        "model.l2": [0.0, 0.1],
        "transforms.0.bound": [1.0, 2.0],
        "cohort": [3, 4],
    }
    assert set(traceable(config, data, values)) == {RATE, "algorithm.alpha", "model.l2", "transforms.0.bound"}


NESTED = (
    "algorithm.client_lr={value=0.1, schedule='cosine', over=4}",
    "algorithm.client_opt={name='adamw', weight_decay=0.1}",
    "model.name=mlp",
    "model.hidden=[6]",
    "model.lora={rank=2, alpha=4.0, targets='w'}",
    "transforms=[{name='clip', bound=1.0}]",
)


def test_values_inside_tables_are_traced_in_their_place():
    """The rest of a table, such as the schedule of a rate, stays as it is configured."""
    config = small(*NESTED)
    data = build(config).data
    keys = ("algorithm.client_lr.value", "algorithm.client_opt.weight_decay", "model.lora.alpha")
    points = [dict(zip(keys, values, strict=True)) for values in ((0.1, 0.1, 4.0), (0.02, 0.5, 16.0))]
    program = points_program(config, data, keys, points=2, seeds=[3], test=data.test)
    outcome = program.run(points, seed=3, rounds=6)
    for j, point in enumerate(points):
        one = build(with_values(config, point | {"seed": 3}))
        run = simulate(one.algorithm, one.params, data, rounds=6, cohort=4, seed=3, metrics=one.metrics, eval_every=2)
        np.testing.assert_allclose(outcome.evaluations["test_loss"][j], run.evaluations["test_loss"], rtol=1e-4)


def test_rates_inside_tables_are_traced_and_counts_are_not():
    config = small(*NESTED)
    traced = ("algorithm.client_lr.value", "algorithm.client_opt.weight_decay", "model.lora.alpha")
    values = {key: [1, 2] for key in (*traced, "algorithm.client_lr.over", "model.lora.rank")}
    assert set(traceable(config, build(config).data, values)) == set(traced)


def test_programs_that_compile_fast_give_the_same_numbers(several):
    config, data, points, _, outcome = several
    program = points_program(config, data, [RATE], points=5, seeds=[3], test=data.test, brief=True)
    assert program.compiler["compiler_options"] == brief_options(BRIEF)
    brief = program.run(points, seed=3, rounds=6)
    for name in ("test_loss", "test_accuracy"):
        good = [0, 1, 2, 4]  # point 3 has no finite rate
        np.testing.assert_allclose(brief.evaluations[name][good], outcome.evaluations[name][good], rtol=1e-5)
    experiment = build(config)
    key = address.init_key(3)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (brief_init(experiment)(key), experiment.model.init(key))), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_single_point_with_little_work_is_not_optimized(several):
    config, data, points, _, outcome = several
    program = points_program(config, data, [RATE], points=1, seeds=[3], test=data.test, brief=True)
    assert program.compiler["compiler_options"] == brief_options(ONCE)
    once = program.run(points[:1], seed=3, rounds=6)
    np.testing.assert_allclose(once.evaluations["test_loss"][0], outcome.evaluations["test_loss"][0], rtol=1e-5)
    longer = config.model_copy(update={"rounds": 100_000})
    program = points_program(longer, data, [RATE], points=1, seeds=[3], test=data.test, brief=True)
    assert program.compiler["compiler_options"] == brief_options(BRIEF)


def test_unknown_compiler_options_are_left_out_and_known_ones_kept():
    level = {"xla_backend_optimization_level": 1}
    assert brief_options({"xla_no_such_option": 1, **level}) == level
