"""The engine, in addition to the laws: plans do not change results, failures are counted, bad input is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.simulation import bernoulli, deadline, simulate
from fedbraid.simulation import plan as plan_module
from fedbraid.simulation import run as run_module
from fedbraid.simulation.devices import client_mesh
from fedbraid.simulation.feed import Feed
from fedbraid.simulation.plan import TOGETHER, Plan, lay_out
from fedbraid.simulation.tally import total
from told import told
from zoo import ROWS, clients, counting, loss, start

pytestmark = pytest.mark.usefixtures("x64")


def close(a, b, tolerance=1e-12):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


OPTIONS = {"rounds": 5, "cohort": 3, "arrival": bernoulli(0.3)}


def reference():
    return simulate(counting(), jnp.float64(2.0), clients(), devices=1, **OPTIONS)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("plan", ["sequential", "chunks"])
def test_streamed_data_is_the_same_run(devices, plan):
    streamed = simulate(counting(), jnp.float64(2.0), clients(), data_in="host", devices=devices, plan=plan, **OPTIONS)
    assert streamed.info.streamed
    close(streamed.params, reference().params)
    close(streamed.states, reference().states)


def test_states_on_the_host_are_the_same_run(tmp_path):
    want = reference()
    for where in ("host", tmp_path / "states"):
        got = simulate(counting(), jnp.float64(2.0), clients(), states_in=where, devices=2, **OPTIONS)
        close(got.params, want.params)
        close(got.states.read(np.arange(5)), want.states)
    assert (tmp_path / "states" / "states.bin").stat().st_size == 5 * (4 + 8)  # every client: a count and a sum


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 4},
        {"devices": 3, "plan": "chunks", "chunk": 2},
        {"plan": "chunks"},
        {"plan": "lanes", "devices": 1, "chunk": 3},
        {"plan": "lanes", "devices": 2},
    ],
)
def test_layout_changes_float32_results_by_rounding_only(options):
    with jax.enable_x64(False):
        alg = ROWS["fedavg"].make(batch_size=2, epochs=2)
        split = fb.Split({k: v.astype(np.float32) for k, v in clients().arrays.items()}, clients().offsets)
        base = simulate(alg, start(), split, rounds=10, cohort=4, devices=1)
        other = simulate(alg, start(), split, rounds=10, cohort=4, **options)
        close(base.params, other.params, 1e-5)


def test_log_normal_sizes_are_balanced_and_nothing_is_masked():
    rng = np.random.default_rng(0)
    for devices in (2, 4):
        loads = []
        for _ in range(20):
            steps = -(-np.maximum(1, rng.lognormal(np.log(200), 0.6, 100)).astype(int) // 20)
            plan = Plan("sequential", devices, 100, 1)
            slots, load = lay_out(plan, np.arange(100), np.arange(100), steps * 20, [steps], 100)
            loads.append(load)
            assert sorted(slots.ids[slots.ids < 100].tolist()) == list(range(100))
            work = np.where(slots.ids < 100, steps[np.minimum(slots.ids, 99)], 0).reshape(devices, -1).sum(1)
            assert work.max() <= 1.1 * work.min()
        assert all(load.masked == 0 for load in loads)
        assert max(load.imbalance for load in loads) < 1.1


@pytest.mark.parametrize("name", ["scaffold", "mime", "transform:median", "transform:elastic"])
def test_clients_that_end_alone_or_together_are_settled_alike(name):
    """States, exchanges, gathered uploads and several folds; five lanes for five clients leave no slot empty."""
    alg = ROWS[name].make(batch_size=2, epochs=1)
    base = simulate(alg, start(), clients(), rounds=2, devices=1, plan="sequential")
    for chunk in (3, 5):
        lanes = simulate(alg, start(), clients(), rounds=2, devices=1, plan="lanes", chunk=chunk)
        close(base.params, lanes.params)
        close(base.states, lanes.states)
        assert lanes.history["train/arrived"].tolist() == [5, 5]


def test_sorted_chunks_mask_less_than_one_wide_vmap():
    rng = np.random.default_rng(0)
    steps = -(-np.maximum(1, rng.lognormal(np.log(200), 0.6, 100)).astype(int) // 20)

    def masked(chunk):
        _, load = lay_out(Plan("chunks", 1, 100, chunk), np.arange(100), np.arange(100), steps, [steps], 100)
        return load.masked / (load.masked + load.steps)

    brute = 1 - steps.sum() / (100 * steps.max())
    assert masked(100) == pytest.approx(brute)
    assert masked(10) < masked(25) < masked(100)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "transform:median"])
def test_clients_that_take_as_many_steps_end_together(name):
    """All clients take the same number of steps; with three lanes for five clients one lane is empty at the end."""
    alg = ROWS[name].make(batch_size=2, steps=3)
    base = simulate(alg, start(), clients(), rounds=2, devices=1, plan="sequential")
    lanes = simulate(alg, start(), clients(), rounds=2, devices=1, plan="lanes", chunk=3)
    assert base.info.plan.alike == 0 < lanes.info.plan.alike
    close(base.params, lanes.params)
    close(base.states, lanes.states)
    ragged = simulate(ROWS[name].make(batch_size=2), start(), clients(), rounds=1, devices=1, plan="lanes", chunk=3)
    assert ragged.info.plan.alike == 0, "clients of 1 to 9 examples take different numbers of steps"


@pytest.mark.parametrize(("fit", "lanes"), [(None, 100), (500, 100), (40, 34), (99, 50)])
def test_clients_alike_take_as_many_lanes_as_fit_and_leave_none_idle_at_the_end(fit, lanes, monkeypatch):
    monkeypatch.setattr(plan_module, "most_clients", lambda need, mesh: fit)
    many = fb.Split({k: np.concatenate([v] * 40) for k, v in clients().arrays.items()}, np.arange(201))
    for alg, wanted in ((fb.fedavg(loss, steps=2), lanes), (fb.fedavg(loss, batch_size=1, epochs=2), lanes)):
        chosen = plan_module.choose_plan(
            alg, start(), fb.FederatedData(many), client_mesh(1), fb.EngineOptions(plan="lanes"), 100
        )
        assert (chosen.chunk, chosen.alike) == (wanted, 1)
    ragged = plan_module.choose_plan(
        fb.fedavg(loss, batch_size=1),
        start(),
        fb.FederatedData(clients()),
        client_mesh(1),
        fb.EngineOptions(plan="lanes"),
        5,
    )
    assert (ragged.chunk, ragged.alike) == (5, 0)


@pytest.mark.parametrize("many", [1, 31, 32, 47, 100, 300])
def test_sums_over_many_clients_leave_none_out(many):
    """Sums over many rows are made in groups. The expected sums are of whole numbers, which are exact."""
    rows = np.arange(many * 6).reshape(many, 2, 3) ** 2 % 101
    for dtype in (jnp.float64, jnp.int32):
        summed = total({"a": jnp.asarray(rows, dtype), "b": jnp.ones(many, dtype)})
        assert {leaf.dtype for leaf in summed.values()} == {jnp.dtype(dtype)}
        np.testing.assert_array_equal(summed["a"], rows.sum(0))
        assert int(summed["b"]) == many


def test_endings_of_clients_alike_are_one_a_queue():
    steps = np.full(11, 7)
    plan = Plan("lanes", 1, 11, 4, alike=140)
    slots, _ = lay_out(plan, np.arange(11), np.arange(11), steps * 20, [steps], 11)
    table = slots.lanes[0]
    assert table.events.tolist() == [3]
    assert table.wait[:3].tolist() == [7, 7, 7]
    assert [(row < 11).sum() for row in table.slot[:3]] == [4, 4, 3]
    # the engine relies on this order: it reads the result of entry i on lane i
    assert table.lane[:3].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 4]]


@pytest.mark.parametrize("alike", [0, 140])
def test_devices_that_get_fewer_clients_than_lanes(alike):
    steps = np.full(5, 7)
    plan = Plan("lanes", 4, 5, 2, alike=alike)  # clients per device: 2, 2, 1 and 0
    slots, load = lay_out(plan, np.arange(5), np.arange(5), steps * 20, [steps], 5)
    assert slots.live.tolist() == [2, 2, 1, 0]
    assert slots.lanes[0].events.tolist() == [1, 1, 1, 0]
    assert load.steps == 35


def test_lanes_mask_little_where_a_wide_vmap_masks_most():
    rng, loads = np.random.default_rng(0), []
    for _ in range(20):
        steps = -(-np.maximum(1, rng.lognormal(np.log(200), 0.6, 100)).astype(int) // 20)
        slots, load = lay_out(Plan("lanes", 1, 100, 25), np.arange(100), np.arange(100), steps * 20, [steps], 100)
        loads.append(load)
        # replay the timetable: every client runs on one lane for exactly its steps
        table = slots.lanes[0]
        running, since, now = dict(enumerate(table.first)), dict.fromkeys(range(25), 0), 0
        ended = []
        for e in range(table.events[0]):
            now += table.wait[e]
            for lane, slot, following in zip(table.lane[e], table.slot[e], table.next[e], strict=True):
                if slot < 100:
                    assert running[lane] == slot
                    assert now - since[lane] == steps[slots.ids[slot]]
                    running[lane], since[lane] = following, now
                    ended.append(slot)
        assert sorted(ended) == list(range(100))
        assert (table.lane[table.slot == 100] == 25).all(), "padding has no lane"
    # over several rounds, because in a single round one client may be longer than a lane's share
    assert sum(load.masked for load in loads) < 0.1 * sum(load.masked + load.steps for load in loads)


def test_clients_of_a_lane_are_ordered_so_that_several_lanes_end_together():
    """Each lane has the clients that it would get anyway, so no lane is longer; but there are fewer events."""
    rng, events, before = np.random.default_rng(1), [], []
    for _ in range(20):
        steps = -(-np.maximum(1, rng.lognormal(np.log(200), 0.6, 100)).astype(int) // 20)
        slots, load = lay_out(Plan("lanes", 1, 100, 25), np.arange(100), np.arange(100), steps * 20, [steps], 100)
        events.append(int(slots.lanes[0].events[0]))
        lanes, ends = [0] * 25, []
        for length in sorted(steps.tolist(), reverse=True):  # longest first, to the lane with the least work
            lane = lanes.index(min(lanes))
            lanes[lane] += length
            ends.append(lanes[lane])
        before.append(sum(-(-ends.count(tick) // TOGETHER) for tick in set(ends)))
        assert load.steps + load.masked == 25 * max(lanes)
    assert sum(events) < 0.9 * sum(before)


@pytest.mark.parametrize(("seconds", "portions"), [(1e-9, [1] * 7), (1e9, [1, 1, 5])])
def test_a_call_takes_as_many_rounds_as_its_seconds_allow(seconds, portions, monkeypatch):
    """With several CPU devices memory grows within a call, so a long run must be divided into many calls."""
    taken, made = [], Feed.portion
    monkeypatch.setattr(run_module, "CALL", seconds)
    monkeypatch.setattr(Feed, "portion", lambda feed, first, number: taken.append(number) or made(feed, first, number))
    result = simulate(counting(), jnp.float64(2.0), clients(), devices=1, **OPTIONS | {"rounds": 7})
    assert taken == portions
    monkeypatch.undo()
    close(result.params, simulate(counting(), jnp.float64(2.0), clients(), devices=1, **OPTIONS | {"rounds": 7}).params)


def test_non_finite_uploads_are_dropped_counted_and_do_not_touch_state():
    poisoned = clients()
    y = poisoned.arrays["y"].copy()
    y[poisoned.offsets[1]] = 1e200  # squares to infinity inside the loss, but the data itself is finite
    bad = fb.Split({**poisoned.arrays, "y": y}, poisoned.offsets)
    alg = fb.fedavg(lambda p, b, k: jnp.sum((b["x"] @ p["w"] - b["y"]) ** 8 * b["mask"]) * 1e-9, client_lr=0.1)
    result = simulate(alg, start(), bad, rounds=3, devices=1)
    assert np.asarray(result.history["train/refused"]).tolist() == [1, 1, 1]
    assert np.asarray(result.history["train/arrived"]).tolist() == [4, 4, 4]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


def test_drop_rate_and_deadline_are_what_they_say():
    keys = jax.random.split(jax.random.key(0), 20_000)
    assert np.mean(jax.vmap(lambda k: bernoulli(0.3)(k, 1))(keys)) == pytest.approx(0.7, abs=0.01)
    # with sigma 0 nothing is random: 5 steps of 2 seconds and 1 second of latency are 11 seconds
    for limit, arrives in ((10.9, False), (11.1, True)):
        assert bool(deadline(limit, seconds_per_step=2.0, sigma=0.0)(keys[0], 5)) is arrives
    # no work, only latency: with the median latency as the limit, half of the uploads arrive
    late = deadline(3.0, seconds_per_step=0.0, median=3.0, sigma=1.0)
    assert np.mean(jax.vmap(lambda k: late(k, 1))(keys)) == pytest.approx(0.5, abs=0.01)


def test_bytes_in_the_history_follow_who_arrived():
    result = simulate(counting(), jnp.float64(2.0), clients(), devices=1, **OPTIONS)
    arrived = np.asarray(result.history["two/arrived"])
    assert arrived.min() < 3
    np.testing.assert_array_equal(result.history["two/bytes_up"], arrived * 8)
    np.testing.assert_array_equal(result.history["two/bytes_down"], np.full(5, 3 * 8))


def test_two_algorithms_see_the_same_cohorts():
    seen = {}
    for name in ("fedavg", "fedavgm"):
        asked = []

        def spy(key, steps, asked=asked):
            jax.debug.callback(lambda s: asked.append(int(s)), steps)
            return jnp.array(True)

        simulate(
            ROWS[name].make(batch_size=1, epochs=1), start(), clients(), rounds=4, cohort=2, devices=1, arrival=spy
        )
        jax.effects_barrier()
        seen[name] = sorted(asked)
    assert seen["fedavg"] == seen["fedavgm"]
    assert len(seen["fedavg"]) == 8


def test_progress_says_when_a_model_is_evaluated():
    """An evaluation may take minutes: it is reported before it begins, without its scores, and cannot end the run."""
    seen = []

    def look(now):
        seen.append((now.round, now.evaluating, "test_loss" in now.row))
        return now.evaluating

    looks = {"on_progress": look, "on_evaluation": look}

    metrics = fb.Metrics(lambda p, batch: {"loss": (batch["x"][:, 0] * p, batch["mask"])})
    data = fb.FederatedData(clients(), clients())
    simulate(counting(), jnp.float64(2.0), data, metrics=metrics, rounds=4, cohort=3, eval_every=4, **looks)
    assert seen[-2:] == [(4, True, False), (4, False, True)]
    assert [now for now in seen if now[1]] == [(4, True, False)]


def test_evaluation_by_client():
    split = clients()
    data = fb.FederatedData(split, split)

    def metrics(params, batch):
        return {
            "loss": (batch["y"] * batch["mask"], batch["mask"]),
            "accuracy": (batch["y"] * batch["mask"], batch["mask"]),
        }

    result = simulate(fb.fedavg(loss), start(), data, rounds=4, metrics=metrics, eval_every=3, devices=1)
    assert np.asarray(result.evaluations["round"]).tolist() == [3, 4]
    means = np.array([split.client(i)["y"].mean() for i in range(5)])
    row = {k: float(v[0]) for k, v in result.evaluations.items()}
    assert row["test_loss"] == pytest.approx(split.arrays["y"].mean())
    assert row["test_loss_client_mean"] == pytest.approx(means.mean())
    assert row["test_accuracy_client_worst"] == pytest.approx(means.min())
    assert row["test_loss_client_worst"] == pytest.approx(means.max())
    assert row["test_accuracy_client_worst_tenth"] == pytest.approx(np.percentile(means, 10))
    assert row["test_loss_client_worst_tenth"] == pytest.approx(np.percentile(means, 90))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"cohort": 6}, "population of 5"),
        ({"cohort": 0}, "cohort"),
        ({"rounds": 0}, "rounds"),
        ({"eval_every": 0}, "eval_every"),
        ({"plan": "vmap"}, "plan"),
        ({"devices": 99}, "devices"),
        ({"chunk": 0, "plan": "chunks"}, "chunk"),
        ({"metrics": lambda p, b: {}}, "test split"),
    ],
)
def test_bad_options_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        simulate(fb.fedavg(loss), start(), clients(), **({"rounds": 1} | options))


def test_bad_data_is_refused_by_client_and_field():
    good = clients()
    empty = fb.Split(good.arrays, np.array([0, 3, 3, 16, 23, 28]), ("a", "b", "c", "d", "e"))
    with pytest.raises(ValueError, match=r"client 1 \(b\) has no examples"):
        simulate(fb.fedavg(loss), start(), empty, rounds=1)
    x = good.arrays["x"].copy()
    x[14, 1] = np.nan
    with pytest.raises(ValueError, match=r"'x' of client 2 is not finite in its row 2"):
        simulate(fb.fedavg(loss), start(), fb.Split({**good.arrays, "x": x}, good.offsets), rounds=1)
    with pytest.raises(ValueError, match="mask"):
        simulate(fb.fedavg(loss), start(), fb.Split({**good.arrays, "mask": x}, good.offsets), rounds=1)


def test_state_that_is_hardly_used_is_warned_of():
    with told(match="less than once"):
        simulate(counting(), jnp.float64(2.0), clients(), rounds=1, cohort=2, devices=1)
