"""Simulated time: durations by the stated formula, by address, with availability, lost clients and deadlines."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid import Split, fedavg, simulate
from fedbraid.address import cohort as draw_cohort
from fedbraid.algorithms import mime
from fedbraid.costs import cost
from fedbraid.simulation import Clock, bernoulli, semi_synchronous
from fedbraid.simulation.asynchrony import Asynchrony
from fedbraid.simulation.availability import DayAndNight, read_trace
from fedbraid.simulation.clock import devices_of
from fedbraid.simulation.timeline import Timeline, Timing

SIZES = (3, 10, 4, 17, 8, 5)


def loss(params, batch, key):
    return 0.5 * jnp.sum(jnp.mean((params - batch["x"]) ** 2 * batch["mask"][:, None], 0))


def clients() -> Split:
    rng = np.random.default_rng(0)
    return Split.from_clients([{"x": rng.normal(size=(n, 2)).astype(np.float32)} for n in SIZES])


ALG = fedavg(loss, client_lr=0.1, batch_size=4, epochs=2)
START = jnp.zeros(2)


def timeline(clock: Clock, how: Asynchrony | None = None, *, cohort: int = 3, seed: int = 0, alg=ALG) -> Timeline:
    timing = Timing(clock, how or Asynchrony(), cohort)
    return Timeline(timing, seed, alg.exchanges, clients(), cost(alg, START, clients()))


def drawn(clock: Clock, seed: int = 0):
    return devices_of(clock, seed, ALG.exchanges, clients(), cost(ALG, START, clients()))


def test_a_client_takes_as_long_as_its_steps_examples_and_bytes_say():
    """By hand: 2 epochs in batches of 4, 8 bytes each way; client 1 has 10 examples, so 2 * 3 steps."""
    plain = drawn(Clock(seconds_per_step=2.0)).seconds(0, 0, np.arange(6))
    assert plain.tolist() == [2.0 * 2 * -(-n // 4) for n in SIZES]
    examples = drawn(Clock(seconds_per_example=0.5)).seconds(0, 0, np.arange(6))
    assert examples.tolist() == [0.5 * 2 * n for n in SIZES]
    sent = drawn(Clock(latency=0.25, bandwidth_down=16.0, bandwidth_up=4.0)).seconds(0, 0, np.arange(6))
    assert sent.tolist() == [0.25 + 8 / 16 + 8 / 4] * 6
    few = fedavg(loss, batch_size=4, steps=4)  # client 0: batches of 3 in each of 4 epochs; client 1: 4 + 4 + 2 + 4
    of_few = devices_of(Clock(seconds_per_example=1.0), 0, few.exchanges, clients(), cost(few, START, clients()))
    assert of_few.seconds(0, 0, np.arange(2)).tolist() == [12.0, 14.0]


def test_speeds_are_log_normal_and_jitter_has_its_own_draw_for_every_round():
    many = Split.from_clients([{"x": np.zeros((1, 2), np.float32)}] * 4000)
    clock = Clock(seconds_per_step=3.0, speed_sigma=0.8, jitter_sigma=0.3)
    alg = fedavg(loss, batch_size=1)
    devices = devices_of(clock, 5, alg.exchanges, many, cost(alg, START, many))
    logs = np.log(devices.work[0] / 3.0)
    assert abs(logs.mean()) < 0.05
    assert abs(logs.std() - 0.8) < 0.03
    ids = np.arange(4000)
    first, second = (np.log(devices.seconds(0, r, ids) / devices.work[0]) for r in (0, 1))
    assert abs(first.std() - 0.3) < 0.02
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    # by address: one client, a permuted cohort and the whole population have the same durations
    order = np.random.default_rng(0).permutation(ids)[:50]
    assert np.array_equal(devices.seconds(0, 3, order), devices.seconds(0, 3, ids)[order])
    assert devices.seconds(0, 3, 17) == devices.seconds(0, 3, ids)[17]


def test_a_synchronous_round_takes_as_long_as_its_slowest_client_and_computes_the_same_model():
    clock = Clock(seconds_per_step=1.5, speed_sigma=1.0, jitter_sigma=0.5, latency=0.5, latency_sigma=0.4)
    without = simulate(ALG, START, clients(), rounds=5, cohort=3, seed=2, devices=1)
    timed = simulate(ALG, START, clients(), rounds=5, cohort=3, seed=2, devices=1, clock=clock)
    assert np.array_equal(without.params, timed.params)
    assert "simulated_seconds" not in without.history
    devices, time = drawn(clock, seed=2), 0.0
    for r in range(5):
        time += max(devices.seconds(0, r, int(i)) for i in draw_cohort(2, r, 0, 6, 3))
        assert timed.history["simulated_seconds"][r] == pytest.approx(time, rel=1e-12)


def test_two_exchanges_follow_each_other():
    alg = mime(loss, base="sgd", client_lr=0.1, batch_size=4)
    assert len(alg.exchanges) == 2
    line = timeline(Clock(seconds_per_step=1.0), alg=alg)
    devices = devices_of(Clock(seconds_per_step=1.0), 0, alg.exchanges, clients(), cost(alg, START, clients()))
    first = line.at(0)
    assert first.seconds == sum(devices.seconds(e, 0, first.ids[e]).max() for e in (0, 1))


def test_rounds_may_be_asked_for_in_any_order():
    clock = Clock(seconds_per_step=1.0, jitter_sigma=1.0, availability="day-night", day=40.0, lost=0.2)
    line, again = timeline(clock), timeline(clock)
    in_order = [line.at(r) for r in range(400)]
    for r in (399, 3, 390, 0):
        one, other = again.at(r), in_order[r]
        assert one.seconds == other.seconds
        assert np.array_equal(one.ids[0], other.ids[0])


def test_clients_work_only_while_they_are_available():
    day = DayAndNight(np.array([0.0, 0.75]), 100.0, 0.5)
    assert day.until(np.array([0, 1]), 10.0).tolist() == [50.0, 10.0]
    assert day.until(0, 60.0) == 60.0
    assert day.following(0, 10.0) == 10.0
    assert 100.0 <= day.following(0, 60.0) < 100.001
    assert day.until(0, float(day.following(0, 60.0))) == pytest.approx(150.0)
    # durations of 60 s and more never fit into a day of 50 s
    slow = timeline(Clock(seconds_per_step=100.0, availability="day-night", day=100.0, awake=0.5))
    times = [slow.at(r) for r in range(10)]
    assert all(len(t.ids[0]) == 0 for t in times)
    assert all(later.seconds > sooner.seconds for sooner, later in itertools.pairwise(times))


def test_a_trace_has_one_row_per_client_and_interval(tmp_path):
    (tmp_path / "trace.csv").write_text("client,start,end\n2,0,5\n2,4,9\n1,20,30\n4,29,100\n")
    trace = read_trace(tmp_path / "trace.csv", 6)
    assert trace.until(np.array([2, 1, 0]), 3.0).tolist() == [9.0, 3.0, 3.0]
    assert trace.following(np.array([2, 1, 0]), 9.0).tolist() == [100.0, 20.0, np.inf]  # the trace repeats after 100 s
    assert trace.until(2, 104.0) == 109.0
    line = timeline(Clock(latency=1.0, availability=str(tmp_path / "trace.csv")), cohort=6)
    asked = [line.at(r) for r in range(20)]
    assert [t.ids[0].tolist() for t in asked[:9]] == [[2]] * 9
    assert asked[8].seconds == 9.0
    assert asked[9].ids[0].tolist() == [1]
    assert asked[9].seconds == 21.0
    (tmp_path / "bad.csv").write_text("client,start,end\nx,0,5\n")
    with pytest.raises(ValueError, match=r"line 2: client 'x' is neither a number from 0 to 5"):
        read_trace(tmp_path / "bad.csv", 6)
    (tmp_path / "bad.csv").write_text("client,start\n0,0\n")
    with pytest.raises(ValueError, match="no column 'end'"):
        read_trace(tmp_path / "bad.csv", 6)


def test_a_lost_client_is_waited_for_and_does_not_count():
    clock = Clock(seconds_per_step=1.0, lost=0.5)
    line, whole = timeline(clock, cohort=6), timeline(Clock(seconds_per_step=1.0), cohort=6)
    rounds = [line.at(r) for r in range(200)]
    assert np.mean([len(t.ids[0]) for t in rounds]) == pytest.approx(3.0, abs=0.3)
    assert [t.seconds for t in rounds] == [whole.at(r).seconds for r in range(200)]
    result = simulate(ALG, START, clients(), rounds=4, devices=1, clock=clock)
    assert result.history["train/arrived"].tolist() == [len(t.ids[0]) for t in rounds[:4]]
    assert result.history["train/bytes_down"].tolist() == [6 * 8.0] * 4


def test_a_semi_synchronous_server_takes_the_first_uploads():
    clock = Clock(seconds_per_step=1.0, speed_sigma=1.0, jitter_sigma=0.5)
    line, devices = timeline(clock, semi_synchronous(2.0), cohort=3), drawn(clock)
    time = 0.0
    for r in range(20):
        asked = draw_cohort(0, r, 0, 6, 6)
        took = devices.seconds(0, r, asked)
        fastest = np.argsort(took)[:3]
        time += took[fastest[-1]]
        assert line.at(r).ids[0].tolist() == np.sort(asked[fastest]).tolist()
        assert line.at(r).asked == (6,)
        assert line.at(r).seconds == pytest.approx(time)


def test_a_deadline_ends_a_round():
    clock = Clock(seconds_per_step=1.0, speed_sigma=1.0)
    line, devices = timeline(clock, semi_synchronous(1.0, deadline=5.0), cohort=6), drawn(clock)
    took = devices.seconds(0, 0, np.arange(6))
    assert 0 < np.sum(took <= 5.0) < 6
    assert line.at(0).ids[0].tolist() == np.flatnonzero(took <= 5.0).tolist()
    assert [line.at(r).seconds for r in range(3)] == [5.0, 10.0, 15.0]
    result = simulate(
        ALG, START, clients(), rounds=2, devices=1, clock=clock, asynchrony=semi_synchronous(1.0, deadline=5.0)
    )
    only = simulate(ALG, START, clients(), rounds=2, devices=1, arrival=_by_steps(took))
    assert np.array_equal(result.params, only.params)


def _by_steps(took):
    """An arrival model by the number of steps: clients of these sizes have different numbers, or the same fate."""
    steps = np.array([2 * -(-n // 4) for n in SIZES])
    return lambda key, n: jnp.any(jnp.asarray(steps[took <= 5.0]) == n)


def test_what_does_not_fit_a_clock_is_refused():
    with pytest.raises(ValueError, match="the clock decides which uploads arrive"):
        simulate(ALG, START, clients(), rounds=1, clock=Clock(latency=1.0), arrival=bernoulli(0.5))
    with pytest.raises(ValueError, match="lost must be a finite number"):
        Clock(lost=1.0)
    with pytest.raises(ValueError, match="cannot read the trace nowhere"):
        simulate(ALG, START, clients(), rounds=1, clock=Clock(availability="nowhere.csv"))
