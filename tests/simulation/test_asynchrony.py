"""FedBuff and FedAsync: their laws, an independent simulation, kept models, resumed runs, and what is refused."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import Split, simulate
from fedbraid import transforms as tf
from fedbraid.costs import cost
from fedbraid.simulation import Asynchrony, Checkpoints, Clock, fedasync, fedbuff, semi_synchronous
from fedbraid.simulation.clock import devices_of
from fedbraid.simulation.timeline import Timeline, Timing

SIZES = (3, 10, 4, 17, 8, 5, 9, 2)
START = jnp.zeros(2)
SLOW = Clock(seconds_per_step=1.0, speed_sigma=1.0, jitter_sigma=0.5)


def loss(params, batch, key):
    weights = batch["mask"] / jnp.maximum(jnp.sum(batch["mask"]), 1)
    return 0.5 * jnp.sum(weights * batch["scale"] * jnp.sum((params - batch["x"]) ** 2, -1))


def clients() -> Split:
    rng = np.random.default_rng(0)
    rows = [
        {"x": rng.normal(i, 1.0, size=(n, 2)).astype(np.float32), "scale": np.full(n, 0.5 + 0.3 * i, np.float32)}
        for i, n in enumerate(SIZES)
    ]
    return Split.from_clients(rows)


def fedavg(**options):
    return fb.fedavg(loss, **{"client_lr": 0.1, "batch_size": 4} | options)


def timeline(how: Asynchrony, clock: Clock = SLOW, *, cohort: int, population: int = 8, seed: int = 0) -> Timeline:
    alg = fedavg(steps=1)
    many = Split.from_clients([{"x": np.zeros((1, 2), np.float32), "scale": np.ones(1, np.float32)}] * population)
    return Timeline(Timing(clock, how, cohort), seed, alg.exchanges, many, cost(alg, START, many))


# --- laws ------------------------------------------------------------------------------------------------------------

ALGORITHMS = {
    "fedavg": lambda: fedavg(),
    "fedadam": lambda: fb.fedadam(loss, client_lr=0.1, server_lr=0.1, batch_size=4),
    "client states": lambda: tf.top_k(fedavg(), fraction=0.5),
    "median": lambda: tf.median(fedavg()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fedbuff_without_delay_whose_buffer_is_the_cohort_is_the_synchronous_run_bit_for_bit(name):
    alg, options = ALGORITHMS[name](), {"rounds": 6, "cohort": 5, "devices": 1, "seed": 3}
    rounds = simulate(alg, START, clients(), **options)
    steps = simulate(alg, START, clients(), asynchrony=fedbuff(5), **options)
    assert np.array_equal(rounds.params, steps.params)
    assert np.array_equal(rounds.history["train/loss"], steps.history["train/loss"])
    assert np.array_equal(rounds.history["train/bytes_down"], steps.history["train/bytes_down"])
    assert not steps.history["staleness"].any()


def test_staleness_weights_are_the_published_ones():
    tau = np.arange(8)
    assert fedbuff().weights(tau) == pytest.approx(1 / np.sqrt(1 + tau))
    assert fedasync(0.6, staleness="constant").weights(tau) == pytest.approx(np.full(8, 0.6))
    assert fedasync(0.9, a=0.7).weights(tau) == pytest.approx(0.9 * (tau + 1.0) ** -0.7)
    hinge = [0.5 if t <= 4 else 0.5 / (10.0 * (t - 4) + 1) for t in tau]
    assert fedasync(0.5, staleness="hinge").weights(tau) == pytest.approx(hinge)


def test_weights_of_a_step_sum_as_published():
    """FedBuff divides by the number of uploads, not by the sum of staleness weights: stale steps are shorter."""
    data = Split.from_clients([{"x": np.ones((1, 2), np.float32), "scale": np.ones(1, np.float32)}] * 8)
    how, cohort, lr = fedbuff(3), 6, 0.01
    alg = fb.fedavg(lambda p, batch, key: jnp.sum(p), client_lr=lr, batch_size=1)  # every upload is (lr, lr)
    result = simulate(alg, START, data, rounds=12, cohort=cohort, clock=SLOW, asynchrony=how, devices=1)
    line = Timeline(Timing(SLOW, how, cohort), 0, alg.exchanges, data, cost(alg, START, data))
    moved = 0.0
    for s in range(12):
        moved -= lr * np.sum(1 / np.sqrt(1 + s - line.at(s).arrivals.versions)) / 3
    assert np.asarray(result.params) == pytest.approx([moved, moved], rel=1e-5)
    assert result.history["staleness"].max() > 1


# --- an independent simulation ---------------------------------------------------------------------------------------


def by_hand(kind: str, steps: int, durations, *, buffer: int, alpha: float = 0.6) -> tuple[np.ndarray, list, list]:
    """FedBuff and FedAsync on quadratics with all clients at work, in NumPy: model, end times, staleness.

    ``durations(version, client)``. Every client takes two full gradient steps with rate 0.1.
    """
    rows = [clients().client(i) for i in range(8)]
    x, versions = np.zeros(2), [np.zeros(2)]
    sent = dict.fromkeys(range(8), 0)
    arrives = {i: durations(0, i) for i in range(8)}
    times, stale, waiting = [], [], []
    while len(times) < steps:
        i = min(arrives, key=lambda i: arrives[i])
        now = arrives.pop(i)
        waiting.append(i)
        if len(waiting) < buffer:
            continue
        total, weight, taus = np.zeros(2), 0.0, []
        for j in waiting:
            old, scale = versions[sent[j]], rows[j]["scale"][0]
            own = old.copy()
            for _ in range(2):
                own -= 0.1 * scale * (own - rows[j]["x"].mean(0))
            tau = len(times) - sent[j]
            if kind == "fedbuff":
                total += SIZES[j] * (old - own) / np.sqrt(1 + tau)
                weight += SIZES[j]
            else:
                mixing = alpha * (tau + 1) ** -0.5
                x = (1 - mixing) * x + mixing * own
            taus.append(tau)
        if kind == "fedbuff":
            x = x - total / weight
        versions.append(x.copy())
        times.append(now)
        stale.append(np.mean(taus))
        for j in waiting:
            sent[j] = len(times)
            arrives[j] = now + durations(len(times), j)
        waiting = []
    return x, times, stale


@pytest.mark.parametrize("how", [fedbuff(3), fedasync(0.6)], ids=["fedbuff", "fedasync"])
@pytest.mark.parametrize("plan", ["sequential", "chunks"])
def test_they_agree_with_an_event_simulation_in_numpy(how, plan):
    alg, steps = fedavg(batch_size=None, steps=2), 40
    result = simulate(alg, START, clients(), rounds=steps, seed=1, clock=SLOW, asynchrony=how, devices=1, plan=plan)
    devices = devices_of(SLOW, 1, alg.exchanges, clients(), cost(alg, START, clients()))
    x, times, stale = by_hand(how.name, steps, lambda v, i: float(devices.seconds(0, v, i)), buffer=how.uploads(8))
    assert np.asarray(result.params) == pytest.approx(x, rel=2e-4)
    assert result.history["simulated_seconds"] == pytest.approx(times)
    assert result.history["staleness"] == pytest.approx(stale)
    assert max(stale) >= 2


# --- the timeline and the models that are kept -----------------------------------------------------------------------

CASES = list(itertools.product(((1, 6), (3, 6), (6, 6), (4, 20)), ("always", "day-night"), (0.0, 0.3)))


@pytest.mark.parametrize(("sizes", "availability", "lost"), CASES)
def test_a_client_has_one_piece_of_work_and_its_model_is_kept_until_it_arrives(sizes, availability, lost):
    (buffer, cohort), population, steps = sizes, 24, 300
    clock = Clock(
        seconds_per_step=1.0, speed_sigma=1.0, jitter_sigma=0.5, availability=availability, day=30.0, lost=lost
    )
    line = timeline(fedbuff(buffer), clock, cohort=cohort, population=population)
    held: dict[int, int] = {}  # by place: the version that is stored there
    last: dict[int, int] = {}  # by client: the step that took its last upload in
    asked, most = 0, 0
    for s in range(steps):
        time = line.at(s)
        arrivals = time.arrivals
        held[arrivals.store] = s
        assert len(arrivals.clients) <= buffer
        assert len(set(arrivals.clients.tolist())) == len(arrivals.clients)
        for client, version, place in zip(arrivals.clients, arrivals.versions, arrivals.places, strict=True):
            assert held[int(place)] == version <= s
            assert version > last.get(int(client), -1)
            last[int(client)] = s
        asked += time.asked[0]
        most = max(most, arrivals.store, *arrivals.places.tolist(), 0)
    assert most + 1 == line.places(steps) <= cohort
    assert asked >= sum(len(line.at(s).ids[0]) for s in range(steps))


def test_models_are_shared_so_that_far_fewer_than_the_cohort_are_kept():
    assert timeline(fedbuff(5), Clock(), cohort=5).places(50) == 1  # no delay: only the newest
    few = timeline(fedbuff(50), Clock(seconds_per_step=1.0, jitter_sigma=0.3), cohort=200, population=1000)
    assert few.places(300) < 20
    assert timeline(fedasync(), cohort=8).places(500) == 8  # the bound is reached


def test_all_clients_are_started_about_equally_often_if_they_are_equally_fast():
    line = timeline(fedbuff(5), Clock(seconds_per_step=1.0, jitter_sigma=1.0), cohort=20, population=60)
    counts = Counter(int(c) for s in range(3000) for c in line.at(s).ids[0])
    expected = 3000 * 5 / 60
    assert sum((counts[i] - expected) ** 2 / expected for i in range(60)) < 100  # chi-squared, 59 degrees of freedom


def test_a_resumed_run_gives_the_same_bytes(tmp_path):
    alg = tf.top_k(fedavg(), fraction=0.5)  # clients keep states
    clock = Clock(seconds_per_step=1.0, speed_sigma=1.0, jitter_sigma=0.5, availability="day-night", day=60.0, lost=0.1)
    options = {"cohort": 5, "seed": 4, "clock": clock, "asynchrony": fedbuff(2), "devices": 1}
    whole = simulate(alg, START, clients(), rounds=40, **options)
    saved = Checkpoints(tmp_path / "checkpoints", every=7)
    simulate(alg, START, clients(), rounds=23, checkpoints=saved, **options)  # fewer rounds may keep fewer models
    again = simulate(alg, START, clients(), rounds=40, checkpoints=saved._replace(resume=True), **options)
    assert np.array_equal(whole.params, again.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole.states, again.states))
    for name, column in whole.history.items():
        assert np.array_equal(column, again.history[name]), name
    other = options | {"asynchrony": fedbuff(3)}
    with pytest.raises(ValueError, match="is of another run: timing was"):
        simulate(alg, START, clients(), rounds=40, checkpoints=saved._replace(resume=True), **other)


def test_client_states_on_the_host_and_streamed_data_give_the_same_model():
    alg = tf.top_k(fedavg(), fraction=0.5)
    options = {"rounds": 12, "cohort": 5, "clock": SLOW, "asynchrony": fedbuff(2), "devices": 1}
    here = simulate(alg, START, clients(), **options)
    there = simulate(alg, START, clients(), states_in="host", data_in="host", **options)
    assert np.asarray(there.params) == pytest.approx(np.asarray(here.params), rel=1e-5)


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "scaffold": (lambda: fb.scaffold(loss), "mean of the clients' c_i"),
    "feddyn": (lambda: fb.feddyn(loss), "mean of the clients' g_i"),
    "fedsplit": (lambda: fb.fedsplit(loss, step=0.1), "must have the newest x"),
    "mime": (lambda: fb.mime(loss, base="sgd"), r"2 exchanges \(.*\), which must follow each other"),
    "dp": (lambda: tf.dp(fedavg()), "its epsilon would be wrong"),
    "extrapolation": (lambda: tf.fedexp(fedavg()), "compares the lengths of uploads"),
    "momentum": (lambda: fb.mimelite_mvr(loss, protocol="lagged"), "last two models"),
    "reducer": (lambda: tf.adaptive_clip(fedavg()), "cannot have staleness weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asynchronous_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        simulate(make(), START, clients(), rounds=1, cohort=4, asynchrony=fedbuff(2))


def test_private_semi_synchronous_rounds_are_refused():
    private = tf.dp(fedavg())
    with pytest.raises(ValueError, match="fast clients take part more often"):
        simulate(private, START, clients(), rounds=1, cohort=4, asynchrony=semi_synchronous(1.5))
    with pytest.raises(ValueError, match="equally likely"):
        simulate(private, START, clients(), rounds=1, cohort=4, clock=Clock(availability="day-night"))


def test_a_buffer_is_at_most_the_cohort_and_lanes_are_refused():
    with pytest.raises(ValueError, match=r"buffer = 5.*cohort = 4"):
        simulate(fedavg(), START, clients(), rounds=1, cohort=4, asynchrony=fedbuff(5))
    with pytest.raises(ValueError, match="different models"):
        simulate(fedavg(), START, clients(), rounds=1, cohort=4, asynchrony=fedbuff(2), plan="lanes")
