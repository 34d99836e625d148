"""Timing of plans: the fastest plan is found, and results do not depend on the timing."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.cli.app import make_app
from fedbraid.experiment import ConfigError, load_config
from fedbraid.experiment.explain import explain_config
from fedbraid.simulation import bernoulli, simulate, time_plans, tuning
from fedbraid.simulation.plan import Plan
from zoo import ROWS, clients, counting, loss, start

pytestmark = pytest.mark.usefixtures("x64")


def ladder(*chunks, kind="chunks"):
    return [Plan(kind, 1, 64, chunk) for chunk in chunks]


def close(a, b, tolerance=1e-12):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


# --- which plans are tried, and which one is chosen -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_at", "seconds", "tried", "best"),
    [
        (
            0,
            {1: 5, 2: 6, 4: 4, 8: 3, 16: 3.5, 32: 4, 64: 1},
            [1, 2, 4, 8, 16, 32],
            8,
        ),  # continues after one slower plan, stops after two
        (0, {1: 1, 2: 2, 4: 2, 8: 0}, [1, 2, 4], 1),
        (
            3,
            {8: 2, 16: 3, 32: 3, 4: 1, 2: 1.5, 1: 1.7},
            [8, 16, 32, 4, 2, 1],
            4,
        ),  # no larger chunk is faster: tries smaller ones
        (3, {8: 2, 16: 1, 32: 3, 64: 3}, [8, 16, 32, 64], 16),  # a larger chunk is faster: tries no smaller ones
        (
            3,
            {8: 2, 16: None, 4: 2, 2: 3},
            [8, 16, 4, 2],
            4,
        ),  # 16 do not fit, so 32 is not tried; of equal times the smaller chunk
        (3, {8: None, 4: None, 2: 3, 1: 4}, [8, 4, 2, 1], 2),
    ],
)
def test_the_search_ends_where_plans_get_slower(start_at, seconds, tried, best):
    plans, asked = ladder(1, 2, 4, 8, 16, 32, 64), []

    def measure(plan):
        asked.append(plan.chunk)
        return seconds[plan.chunk]

    times = tuning.search(plans, start_at, measure)
    assert asked[: len(tried)] == tried
    assert {plan.chunk: t for plan, t in times.items()} == {chunk: seconds[chunk] for chunk in tried}
    fit = [chunk for chunk in tried if seconds[chunk] is not None]
    assert tuning.fastest(times).chunk == best
    assert asked[len(tried) :] == sorted(fit, key=seconds.get)[:2] * 2  # the two fastest again, in turn


def test_the_final_takes_back_what_a_disturbance_decided():
    slow_once = iter([9.0, 2.0, 3.0, 3.0, 2.0, 4.0, 2.0, 1.0])  # by 1, 2, 4 and 8 at a time; by 2 and 4 again, twice
    plans = ladder(1, 2, 4, 8)
    times = tuning.search(plans, 0, lambda plan: next(slow_once))
    assert times[plans[1]] == 2.0
    assert times[plans[2]] == 1.0
    assert tuning.fastest(times) == plans[2]


def test_nothing_fits():
    assert tuning.fastest(tuning.search(ladder(1, 2), 1, lambda plan: None)) is None


def test_candidates_leave_few_slots_empty_and_fit_memory():
    cpu, begin = tuning.candidates("auto", Plan("sequential", 2, 50, 1), cpu=True, most=None)
    assert [p.words() for p in cpu] == ["sequential", *(f"chunks of {c}" for c in (2, 4, 7, 13, 25))]
    assert begin == 0
    for plan in cpu[1:]:  # no smaller chunk needs the same number of chunks
        assert -(-25 // plan.chunk) < -(-25 // (plan.chunk - 1))
    few, _ = tuning.candidates("auto", Plan("sequential", 2, 50, 1), cpu=True, most=6)
    assert [p.chunk for p in few] == [1, 2, 4, 5]
    none, _ = tuning.candidates("auto", Plan("sequential", 2, 50, 1), cpu=True, most=1)
    assert [p.kind for p in none] == ["sequential"]
    gpu, begin = tuning.candidates("auto", Plan("lanes", 1, 100, 32), cpu=False, most=64)
    assert gpu[begin] == Plan("lanes", 1, 100, 32)
    assert max(p.chunk for p in gpu) <= 64
    assert {p.kind for p in gpu} == {"lanes"}
    asked, begin = tuning.candidates("chunks", Plan("chunks", 1, 10, 10), cpu=True, most=None)
    assert (asked[0], begin) == (Plan("chunks", 1, 10, 1), 0)


def test_a_timing_is_of_the_same_rounds_for_every_plan_and_its_shortest_counts(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])

    def stage(plan):
        compiled, calls = [], []

        def time_rounds(number):
            if not compiled:
                compiled.append(number)
                now[0] += 100.0
                return
            calls.append(number)
            asked.append(number)
            pace = 0.02 if plan.chunk == 1 else 0.01
            now[0] += number * pace * (1.5 if len(calls) == 2 else 1.0)  # one timing is disturbed by other work

        return SimpleNamespace(time_rounds=time_rounds)

    meter = tuning.Meter(stage, 64)
    one, two = ladder(1, 2)
    assert meter(one) == pytest.approx(0.02)
    assert meter(two) == pytest.approx(0.01)
    assert asked == [1] + [6] * 2 * tuning.REPEATS  # the first call finds the number of rounds in a timing
    assert tuning.Meter(stage, 3)(one) == pytest.approx(0.02)
    assert asked[-1] == 3


# --- real rounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("counting", {"devices": 1}),  # stateful, with three exchanges
        ("counting", {"devices": 2, "data_in": "host", "states_in": "host"}),
        ("fedsgd", {"devices": 1, "plan": "lanes"}),
    ],
)
def test_the_fastest_of_real_timings_is_chosen_and_computes_the_same(name, options, monkeypatch):
    if options != {"devices": 1}:  # the first case keeps the default SPAN
        monkeypatch.setattr(tuning, "SPAN", 0.002)
    alg = counting() if name == "counting" else ROWS[name].make()
    params = jnp.float64(2.0) if name == "counting" else start()
    run = {"cohort": 4 if name == "counting" else 2, "arrival": bernoulli(0.3), "seed": 3}
    lines = []
    found = time_plans(alg, params, clients(), rounds=3, tell=lines.append, **run, **options)
    times = {name: t for name, t in found.seconds.items() if t is not None}
    assert len(times) > 1
    assert min(times.values()) > 0
    assert len(lines) >= len(times)
    plain = simulate(alg, params, clients(), rounds=3, plan="sequential", devices=1, **run)
    tuned = simulate(alg, params, clients(), rounds=3, engine=found.options, **run)
    assert tuned.info.plan.words() == min(times, key=times.get)
    close(tuned.params, plain.params)
    on_host = options.get("states_in") == "host"
    close(tuned.states.read(np.arange(5)) if on_host else tuned.states, plain.states)


def test_what_does_not_fit_is_passed_over(monkeypatch):
    monkeypatch.setattr(tuning, "SPAN", 0.002)

    def hungry(params, batch, key):
        def allocate(mask):
            if mask.ndim > 1 and mask.shape[0] > 2:
                raise MemoryError("RESOURCE_EXHAUSTED: Out of memory")
            return np.zeros(mask.shape[:-1], np.float32)

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return loss(params, batch, key) + jax.pure_callback(allocate, shape, batch["mask"], vmap_method="broadcast_all")

    lines = []
    alg = fb.fedsgd(hungry, server_lr=0.05)
    found = time_plans(alg, start(), clients(), rounds=3, devices=1, plan="chunks", tell=lines.append)
    assert found.seconds["chunks of 3"] is None
    assert "chunks of 3: out of memory" in lines
    assert "chunks of 5" not in found.seconds
    assert found.options.chunk <= 2


def test_the_rule_does_not_look_at_what_else_the_machine_does(monkeypatch):
    """The same configuration gets the same plan, whatever memory is free."""
    plans = []
    for free in (1 << 20, 1 << 40):
        monkeypatch.setattr("fedbraid.simulation.placement.free_memory", lambda device, free=free: free)
        monkeypatch.setattr("fedbraid.simulation.devices.host_memory", lambda free=free: free)
        run = simulate(fb.fedsgd(loss), start(), clients(), rounds=1, devices=1, plan="chunks", data_in="device")
        plans.append(run.info.plan)
    assert plans[0] == plans[1]


# --- the option and the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True, "fast", "tuned", None, np.zeros(2)])
def test_a_chunk_that_is_none_is_refused_with_all_that_are_allowed(chunk):
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1 or 'auto', got"):
        simulate(fb.fedavg(loss), start(), clients(), rounds=1, chunk=chunk)


def test_the_configuration_checks_the_chunk():
    assert load_config(settings=["engine.chunk=3"]).engine.chunk == 3
    for bad in ("0", "fast", "1.5", "tuned"):
        with pytest.raises(ConfigError, match=r"engine") as error:
            load_config(settings=[f"engine.chunk={bad}"])
        assert "chunk" in str(error.value)


def test_the_command_writes_a_configuration_that_explains_itself(tmp_path):
    with jax.enable_x64(False):
        out = tmp_path / "tuned.toml"
        settings = ["model.name=softmax_regression", "cohort=5", "rounds=2", "engine.devices=1", "engine.plan=chunks"]
        sets = [word for one in settings for word in ("--set", one)]
        result = CliRunner().invoke(make_app(), ["tune-engine", *sets, "--write", str(out), "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout.splitlines()[-1])
        timed = {name: t for name, t in found["seconds"].items() if t is not None}
        assert min(timed, key=timed.get) == f"chunks of {found['chunk']}"
        written = load_config(out)
        assert (written.engine.plan, written.engine.chunk) == ("chunks", found["chunk"])
        assert written.model_copy(update={"engine": load_config(settings=settings).engine}) == load_config(
            settings=settings
        )
        explained = explain_config(written)
        assert (explained["plan"], explained["chunk"]) == ("chunks", found["chunk"])
        assert "as asked" in explained["how"]
        again = CliRunner().invoke(make_app(), ["tune-engine", *sets, "--write", str(out)])
        assert isinstance(again.exception, ConfigError)
