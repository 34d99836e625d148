"""Tuning: the fastest of what was timed is taken and remembered, for this job alone, and no number depends on it."""

import concurrent.futures
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.experiment import ConfigError, load_config
from fedbraid.experiment.explain import explain_config
from fedbraid.local import masked_mean
from fedbraid.simulation import Checkpoints, bernoulli, simulate, tune
from fedbraid.simulation import plan as plans
from fedbraid.simulation.devices import client_mesh
from fedbraid.simulation.plan import Plan
from told import collecting, told
from zoo import ROWS, clients, counting, loss, start

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBRAID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / tune.FILE


def ladder(*chunks, kind="chunks"):
    return [Plan(kind, 1, 64, chunk) for chunk in chunks]


def clock(monkeypatch, seconds):
    """Nothing is rehearsed: plans take as long as ``seconds`` says, by their words. Returns those that were timed."""
    asked = []

    def measure(self, plan):
        asked.append(tune.words(plan))
        return seconds[tune.words(plan)]

    monkeypatch.setattr(tune.Meter, "__call__", measure)
    return asked


def quietly(*args, **options):
    """A run, and what it had to say."""
    with collecting() as said:
        result = simulate(*args, **options)
    return result, said


def close(a, b, tolerance=1e-12):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


# --- which are tried, and which is taken ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_at", "seconds", "tried", "best"),
    [
        (0, {1: 5, 2: 6, 4: 4, 8: 3, 16: 3.5, 32: 4, 64: 1}, [1, 2, 4, 8, 16, 32], 8),  # over one bump, not over two
        (0, {1: 1, 2: 2, 4: 2, 8: 0}, [1, 2, 4], 1),
        (3, {8: 2, 16: 3, 32: 3, 4: 1, 2: 1.5, 1: 1.7}, [8, 16, 32, 4, 2, 1], 4),  # nothing better above: below
        (3, {8: 2, 16: 1, 32: 3, 64: 3}, [8, 16, 32, 64], 16),  # better above: not below
        (3, {8: 2, 16: None, 4: 2, 2: 3}, [8, 16, 4, 2], 4),  # 16 do not fit, so 32 do not; of equals the smaller
        (3, {8: None, 4: None, 2: 3, 1: 4}, [8, 4, 2, 1], 2),
    ],
)
def test_the_search_ends_where_plans_get_slower(start_at, seconds, tried, best):
    plans, asked = ladder(1, 2, 4, 8, 16, 32, 64), []

    def measure(plan):
        asked.append(plan.chunk)
        return seconds[plan.chunk]

    times = tune.search(plans, start_at, measure)
    assert asked[: len(tried)] == tried
    assert {plan.chunk: t for plan, t in times.items()} == {chunk: seconds[chunk] for chunk in tried}
    fit = [chunk for chunk in tried if seconds[chunk] is not None]
    assert tune.fastest(times).chunk == best
    assert asked[len(tried) :] == sorted(fit, key=seconds.get)[:2] * 2  # the final


def test_the_final_takes_back_what_a_disturbance_decided():
    slow_once = iter([9.0, 2.0, 3.0, 3.0, 2.0, 4.0, 2.0, 1.0])  # by 1, 2, 4 and 8 at a time; by 2 and 4 again, twice
    plans = ladder(1, 2, 4, 8)
    times = tune.search(plans, 0, lambda plan: next(slow_once))
    assert times[plans[1]] == 2.0
    assert times[plans[2]] == 1.0
    assert tune.fastest(times) == plans[2]


def test_nothing_fits():
    assert tune.fastest(tune.search(ladder(1, 2), 1, lambda plan: None)) is None


def test_candidates_leave_few_slots_empty_and_fit_memory():
    cpu, begin = tune.candidates("auto", Plan("sequential", 2, 50, 1), cpu=True, most=None)
    assert [tune.words(p) for p in cpu] == ["sequential", *(f"chunks of {c}" for c in (2, 4, 7, 13, 25))]
    assert begin == 0
    for plan in cpu[1:]:  # the fewest clients at a time that need as few turns
        assert -(-25 // plan.chunk) < -(-25 // (plan.chunk - 1))
    few, _ = tune.candidates("auto", Plan("sequential", 2, 50, 1), cpu=True, most=6)
    assert [p.chunk for p in few] == [1, 2, 4, 5]
    none, _ = tune.candidates("auto", Plan("sequential", 2, 50, 1), cpu=True, most=1)
    assert [p.kind for p in none] == ["sequential"]
    gpu, begin = tune.candidates("auto", Plan("lanes", 1, 100, 32), cpu=False, most=64)
    assert gpu[begin] == Plan("lanes", 1, 100, 32)
    assert max(p.chunk for p in gpu) <= 64
    assert {p.kind for p in gpu} == {"lanes"}
    asked, begin = tune.candidates("chunks", Plan("chunks", 1, 10, 10), cpu=True, most=None)
    assert (asked[0], begin) == (Plan("chunks", 1, 10, 1), 0)


def test_a_timing_is_of_the_same_rounds_for_every_plan_and_its_shortest_counts(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(tune.time, "perf_counter", lambda: now[0])

    def stage(plan):
        compiled, calls = [], []

        def rehearse(number):
            if not compiled:
                compiled.append(number)
                now[0] += 100.0
                return
            calls.append(number)
            asked.append(number)
            pace = 0.02 if plan.chunk == 1 else 0.01
            now[0] += number * pace * (1.5 if len(calls) == 2 else 1.0)  # disturbed once

        return rehearse

    meter = tune.Meter(stage, 64)
    one, two = ladder(1, 2)
    assert meter(one) == pytest.approx(0.02)
    assert meter(two) == pytest.approx(0.01)
    assert asked == [1] + [6] * 2 * tune.REPEATS  # the first is to find out how many make up a timing
    assert tune.Meter(stage, 3)(one) == pytest.approx(0.02)
    assert asked[-1] == 3


# --- a run that is tuned ----------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_told_and_remembered(monkeypatch, cache):
    alg, options = fb.fedsgd(loss, server_lr=0.05), {"rounds": 2, "devices": 1}
    asked = clock(monkeypatch, {"sequential": 0.003, "chunks of 2": 0.002, "chunks of 3": 0.001, "chunks of 5": 0.002})
    first, said = quietly(alg, start(), clients(), chunk="tuned", **options)
    assert first.info.plan == Plan("chunks", 1, 5, 3)
    assert first.info.tuning.how == "measured"
    assert first.info.tuning.seconds["chunks of 2"] == 0.002
    assert asked[:4] == ["sequential", "chunks of 2", "chunks of 3", "chunks of 5"]
    assert len(said) == 2
    assert "timing the first rounds under sequential, chunks of 2, chunks of 3, chunks of 5" in said[0]
    assert "chunks of 3, the fastest (a round: sequential 3 ms, chunks of 2 2 ms, chunks of 3 1 ms" in said[1]
    assert str(cache) in said[1]

    del asked[:]
    for chunk, expected in (("tuned", ["remembered"]), ("auto", [])):  # auto takes it too, and says nothing
        again, said = quietly(alg, start(), clients(), chunk=chunk, **options)
        assert again.info.plan == first.info.plan
        assert again.info.tuning == ("remembered", first.info.tuning.seconds)
        assert [word for word in expected if word in said[0]] == expected
        assert len(said) == len(expected)
    rated, _ = quietly(fb.fedsgd(loss, server_lr=0.01), start(), clients(), chunk="tuned", **options)
    assert rated.info.tuning.how == "remembered"  # another rate takes no other time
    assert asked == []
    assert simulate(alg, start(), clients(), plan="sequential", chunk="tuned", **options).info.tuning is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("counting", {"devices": 1}),  # stateful, of three exchanges
        ("counting", {"devices": 2, "data_in": "host", "states_in": "host"}),
        ("fedsgd", {"devices": 1, "plan": "lanes"}),
    ],
)
def test_a_real_measurement_disturbs_nothing(name, options, monkeypatch):
    if options != {"devices": 1}:  # the first is as users have it
        monkeypatch.setattr(tune, "SPAN", 0.002)
    alg = counting() if name == "counting" else ROWS[name].make()
    params = jnp.float64(2.0) if name == "counting" else start()
    run = {"rounds": 3, "cohort": 4 if name == "counting" else 2, "arrival": bernoulli(0.3), "seed": 3}
    plain = simulate(alg, params, clients(), plan="sequential", devices=1, **run)
    tuned, said = quietly(alg, params, clients(), chunk="tuned", **run, **options)
    assert "timing" in said[0]
    times = {name: t for name, t in tuned.info.tuning.seconds.items() if t is not None}
    assert len(times) > 1
    assert min(times.values()) > 0
    assert min(times, key=times.get) == tune.words(tuned.info.plan)
    close(tuned.params, plain.params)
    on_host = options.get("states_in") == "host"
    close(tuned.states.read(np.arange(5)) if on_host else tuned.states, plain.states)
    assert tuned.history.keys() == plain.history.keys()
    for column in plain.history:
        np.testing.assert_allclose(tuned.history[column], plain.history[column], rtol=1e-12)
    assert tuned.info.steps == plain.info.steps
    again, said = quietly(alg, params, clients(), chunk="tuned", **run, **options)
    assert again.info.tuning == ("remembered", tuned.info.tuning.seconds)
    assert len(said) == 1
    close(again.params, plain.params)


def test_what_does_not_fit_is_passed_over(monkeypatch):
    monkeypatch.setattr(tune, "SPAN", 0.002)

    def hungry(params, batch, key):
        def allocate(mask):
            if mask.ndim > 1 and mask.shape[0] > 2:
                raise MemoryError("RESOURCE_EXHAUSTED: Out of memory")
            return np.zeros(mask.shape[:-1], np.float32)

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return loss(params, batch, key) + jax.pure_callback(allocate, shape, batch["mask"], vmap_method="broadcast_all")

    alg = fb.fedsgd(hungry, server_lr=0.05)
    tuned, said = quietly(alg, start(), clients(), rounds=3, devices=1, plan="chunks", chunk="tuned")
    assert tuned.info.tuning.seconds["chunks of 3"] is None
    assert "chunks of 3 out of memory" in said[1]
    assert "chunks of 5" not in tuned.info.tuning.seconds
    assert tuned.info.plan.chunk <= 2


def test_a_choice_of_one_is_not_timed(monkeypatch, cache):
    asked = clock(monkeypatch, {})
    result, said = quietly(counting(), jnp.float64(2.0), clients(), rounds=3, cohort=2, devices=2, chunk="tuned")
    assert (result.info.plan.kind, result.info.tuning, asked) == ("sequential", None, [])
    assert said == ["chunk = 'tuned': sequential, the only plan for 2 clients on 2 devices"]


def test_less_room_than_then_halves_what_is_remembered(monkeypatch):
    record = tune.Record("chunks", 20, {}, 1000, "")
    base, mesh = Plan("sequential", 1, 30, 1), client_mesh(1)
    for free, chunk in ((1e6, 20), (2 * 19_999, 10), (2 * 4_999, 2), (0, 1)):
        monkeypatch.setattr(plans, "free_memory", lambda device, free=free: free)
        assert tune._fitting(record, base, mesh).chunk == chunk


def test_under_a_transformation_it_is_auto(cache):
    def final(rate):
        return simulate(fb.fedsgd(loss, server_lr=rate), start(), clients(), rounds=2, devices=1, chunk="tuned").params

    with told(match=r"'tuned' is taken as 'auto': inside jax.vmap or jax.jit") as said:
        got = jax.vmap(final)(jnp.array([0.01, 0.05]))
    assert len(said) == 1
    assert not cache.exists()
    want = simulate(fb.fedsgd(loss, server_lr=0.05), start(), clients(), rounds=2, devices=1).params
    close(jax.tree.map(lambda leaf: leaf[1], got), want)


def test_a_resumed_run_keeps_its_plan(monkeypatch, tmp_path, cache):
    asked = clock(monkeypatch, {"sequential": 0.003, "chunks of 2": 0.001, "chunks of 3": 0.002, "chunks of 5": 0.004})

    def run(chunk, folder, *, until=4, resume=False):
        options = {"checkpoints": Checkpoints(tmp_path / folder, 1, resume), "rounds": 4, "devices": 1}
        stop = lambda progress: progress.round == until  # noqa: E731
        return quietly(counting(), jnp.float64(2.0), clients(), chunk=chunk, on_progress=stop, **options)

    assert run("auto", "rule", until=2)[0].info.plan.kind == "sequential"
    assert run("tuned", "tuned", until=2)[0].info.plan.chunk == 2
    # one that was by rule stays as it was, whatever was remembered since, until it is asked to be tuned
    by_rule, _ = run("auto", "rule", until=3, resume=True)
    assert (by_rule.info.plan.kind, by_rule.info.tuning) == ("sequential", None)
    assert run("tuned", "rule", resume=True)[0].info.plan.chunk == 2
    cache.unlink()  # the checkpoint knows
    del asked[:]
    resumed, said = run("tuned", "tuned", resume=True)
    assert (resumed.info.plan.chunk, resumed.info.tuning.how, asked, said) == (2, "resumed", [], [])
    whole = simulate(counting(), jnp.float64(2.0), clients(), rounds=4, devices=1, plan="chunks", chunk=2)
    for ours, theirs in zip(*map(jax.tree.leaves, (resumed.params, whole.params)), strict=True):
        assert np.array_equal(ours, theirs)  # the same bits


# --- what is the same job ---------------------------------------------------------------------------------------------


def job(alg=None, *, params=None, split=None, cohort=4, kind="auto", devices=1, stream=False, arrival=None):
    alg = fb.fedavg(loss, client_lr=0.05, batch_size=2) if alg is None else alg
    rest = (arrival or bernoulli(0.3), "fast", "default")
    mesh, split = client_mesh(devices), clients() if split is None else split
    return tune.Job(alg, start() if params is None else params, split, mesh, kind, cohort, stream, False, *rest)


def wider(params, batch, key):
    return loss(params, batch, key) + jnp.sum(jnp.tanh(batch["x"] @ batch["x"].T) * 0)


def until(tolerance):
    def solved(params, batch, key):
        residual = jax.lax.while_loop(lambda r: r > tolerance, lambda r: r / 2, jnp.float64(1.0))
        return loss(params, batch, key) + jax.lax.stop_gradient(residual) * masked_mean(batch["y"], batch["mask"])

    return solved


def test_the_key_tells_jobs_apart():
    here = job()
    same = here.look, here.program

    def key(*args, **options):
        one = job(*args, **options)
        return one.look, one.program if one.look == here.look else None

    assert key() == same
    assert key(fb.fedavg(loss, client_lr=0.01, batch_size=2)) == same  # rates take no time
    short = clients()
    cut = fb.Split({k: v[:-1] for k, v in short.arrays.items()}, np.minimum(short.offsets, short.num_examples - 1))
    shifted = fb.Split(short.arrays, np.array([0, 5, 14, 16, 23, 28]))  # as many examples, as long a client
    others = {
        "batch size": key(fb.fedavg(loss, client_lr=0.05, batch_size=3)),
        "epochs": key(fb.fedavg(loss, client_lr=0.05, batch_size=2, epochs=2)),
        "algorithm": key(fb.scaffold(loss, client_lr=0.05, batch_size=2)),
        "model": key(fb.fedavg(wider, client_lr=0.05, batch_size=2)),
        "params": key(params={"w": jnp.zeros(3, jnp.float32), "b": jnp.zeros((), jnp.float32)}),
        "cohort": key(cohort=3),
        "plan": key(kind="lanes"),
        "devices": key(devices=2),
        "streamed": key(stream=True),
        "examples": key(split=cut),
        "sizes": key(split=shifted),
        "arrival": key(arrival=lambda key, steps: steps < 100),
        "tolerance": key(fb.fedavg(until(0.1), batch_size=2)),
        "other tolerance": key(fb.fedavg(until(1e-9), batch_size=2)),
    }
    assert len({same, *others.values()}) == 1 + len(others)
    with jax.enable_x64(False):
        assert key() != same


def test_the_key_is_of_this_machine(monkeypatch):
    here = job().look
    known = tune.machine(client_mesh(1))
    for what in ("device", "devices", "memory", "jax", "fedbraid", "flags", "cores"):
        with monkeypatch.context() as patch:
            patch.setattr(tune, "machine", lambda mesh, what=what: known | {what: "another"})
            assert job().look != here


# --- what is remembered -----------------------------------------------------------------------------------------------

RECORD = tune.Record("chunks", 2, {"sequential": 2.0, "chunks of 2": 1.0, "chunks of 4": None}, 1234, "2026-01-02")


class Known(NamedTuple):
    """A job whose hashes are known."""

    look: str = "look"
    program: str = "program"


def test_a_record_comes_back_and_another_job_has_none(cache):
    one, other = Known(), Known(program="other")
    assert tune.recall(one) is None
    assert str(cache) in tune.remember(one, RECORD)
    assert tune.recall(one) == RECORD
    assert tune.recall(other) is None
    tune.remember(other, RECORD._replace(chunk=3))
    assert [tune.recall(j).chunk for j in (one, other)] == [2, 3]


def test_no_program_is_traced_for_a_job_that_looks_like_none(cache):
    def untraceable(params, batch, key):
        raise AssertionError("traced")

    tune.remember(job(), RECORD)
    other = job(fb.fedavg(untraceable, batch_size=3))
    assert tune.recall(other) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 99, "plans": {}}', '{"format": 1, "plans": [1]}', '{"format": 1}', "\xff\xfe"],
)
def test_a_file_that_is_none_of_ours_is_ignored_and_rewritten(cache, text):
    cache.parent.mkdir()
    cache.write_bytes(text.encode("latin-1"))
    with told(match=r"plans.json .*: it is ignored") as said:
        assert tune.recall(Known()) is None
    assert len(said) == 1
    tune.remember(Known(), RECORD)
    assert tune.recall(Known()) == RECORD
    assert {p.name for p in cache.parent.iterdir()} == {tune.FILE, f"{tune.FILE}.lock"}


@pytest.mark.parametrize(
    "change", [{"kind": "threads"}, {"chunk": 0}, {"chunk": "2"}, {"chunk": True}, {"seconds": 3}, {"more": 1}]
)
def test_a_record_that_makes_no_sense_is_none(cache, change):
    tune.remember(Known(), RECORD)
    tree = json.loads(cache.read_text())
    tree["plans"]["look"]["program"] |= change
    cache.write_text(json.dumps(tree))
    assert tune.recall(Known()) is None


def test_many_runs_may_write_at_once(cache):
    jobs = [Known(f"{i % 3}", f"{i}") for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: tune.remember(one, RECORD._replace(chunk=int(one.program) + 1)), jobs))
    assert [tune.recall(one).chunk for one in jobs] == list(range(1, 21))


def test_only_the_newest_stay(cache, monkeypatch):
    monkeypatch.setattr(tune, "MOST", 2)
    jobs = [Known(program=f"{i}") for i in range(3)]
    for one in jobs:
        tune.remember(one, RECORD._replace(when=f"2026-01-0{one.program}"))
    assert [tune.recall(one) is None for one in jobs] == [True, False, False]


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDBRAID_CACHE", str(tmp_path / "file" / "cache"))
    assert tune.recall(Known()) is None
    assert tune.remember(Known(), RECORD).startswith("not remembered: ")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDBRAID_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tune.cache_folder() == tmp_path / "xdg" / "fedbraid"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tune.cache_folder() == tmp_path / ".cache" / "fedbraid"


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True, "fast", None, np.zeros(2)])
def test_a_chunk_that_is_none_is_refused_with_all_that_are_allowed(chunk):
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, 'auto' or 'tuned', got"):
        simulate(fb.fedavg(loss), start(), clients(), rounds=1, chunk=chunk)


def test_the_configuration_knows_the_word():
    assert load_config(settings=["engine.chunk=tuned"]).engine.chunk == "tuned"
    assert load_config(settings=["engine.chunk=3"]).engine.chunk == 3
    for bad in ("0", "fast", "1.5"):
        with pytest.raises(ConfigError, match=r"engine.chunk = .*at least 1, 'auto' or 'tuned'") as error:
            load_config(settings=[f"engine.chunk={bad}"])
        assert "\n" not in str(error.value)


def test_it_is_explained_and_never_measured(monkeypatch, cache):
    asked = clock(monkeypatch, {"sequential": 0.003, "chunks of 2": 0.001, "chunks of 3": 0.002, "chunks of 5": 0.004})
    with jax.enable_x64(False):
        config = load_config(settings=["model.name=softmax_regression", "cohort=5", "rounds=2", "engine.devices=1"])
        tuned = config.model_copy(update={"engine": config.engine.model_copy(update={"chunk": "tuned"})})
        assert "by rule: nothing is remembered" in explain_config(config)["how"]
        found = explain_config(tuned)
        assert (found["plan"], found["chunk"]) == ("sequential", 1)
        assert "until chunk = 'tuned' is measured before the first round" in found["how"]
        assert asked == []
        from fedbraid.experiment.assembly import build

        built = build(config)
        options = {"metrics": built.metrics, "cohort": 5, "devices": 1, "arrival": built.arrival}
        result, _ = quietly(built.algorithm, built.params, built.data, rounds=2, chunk="tuned", **options)
        assert result.info.plan.chunk == 2
        del asked[:]
        for one in (config, tuned):
            found = explain_config(one)
            assert (found["plan"], found["chunk"]) == ("chunks", 2)
            assert "remembered from 2" in found["how"]
            assert "sequential 3 ms, chunks of 2 1 ms" in found["how"]
        assert asked == []
