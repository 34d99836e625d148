"""Large populations: only clients that were asked take memory, and a checkpoint does not copy states in a folder."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbraid as fb
from fedbraid import address
from fedbraid.data.store import StoreWriter
from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.simulation import Checkpoints, HostStates, checkpoint, simulate
from told import collecting, told
from zoo import clients, counting

MB = 1 << 20


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


# --- the store of states, beside a plain dictionary of what was written ----------------------------------------------

FIRST = {"c": np.arange(3, dtype=np.float32), "n": np.int8(7)}
ids = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
deeds = st.lists(st.one_of(ids, st.just("save"), st.integers(1, checkpoint.KEEP + 1)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(deeds, st.booleans())
def test_states_are_those_of_a_plain_dictionary(tmp_path_factory, deeds, in_folder):
    """Random sequences of writes, checkpoints, and returns to any checkpoint that is still kept."""
    folder = tmp_path_factory.mktemp("states") if in_folder else None
    store, plain, saved = HostStates(FIRST, 10, folder), {}, []
    for count, deed in enumerate(deeds):
        if deed == "save":
            saved.append((store.export(), dict(plain)))
        elif isinstance(deed, int):
            if len(saved) >= deed:
                exported, plain = saved[-deed][0], dict(saved[-deed][1])
                saved = saved[: len(saved) - deed + 1]  # later checkpoints will be written again
                store = HostStates(FIRST, 10, folder)
                store.restore(exported)
        else:
            rows = np.array([*deed, 10])  # 10 is not a client but an empty slot
            new = {"c": np.full((len(rows), 3), count, np.float32), "n": np.full(len(rows), -count, np.int8)}
            store.write(rows, new)
            plain |= dict.fromkeys(deed, count)
        got = store.read(np.arange(11))
        for i in range(11):
            assert got["c"][i].tolist() == ([plain[i]] * 3 if i in plain else [0, 1, 2])
            assert got["n"][i] == (-plain[i] if i in plain else 7)
    assert store.touched.tolist() == sorted(plain)


def test_records_are_used_again_when_no_checkpoint_needs_them(tmp_path):
    store = HostStates(FIRST, 1000, tmp_path)
    for round_ in range(50):
        store.write(np.arange(10), {"c": np.full((10, 3), round_, np.float32), "n": np.zeros(10, np.int8)})
        store.export()
    # the records in use and those of the kept checkpoints, not 50 * 10 records
    assert (tmp_path / "states.bin").stat().st_size <= (1 + checkpoint.KEEP + 1) * 10 * 13


def test_a_folder_that_another_run_used_is_refused(tmp_path):
    store = HostStates(FIRST, 10, tmp_path)
    store.write(np.array([1]), {"c": np.ones((1, 3), np.float32), "n": np.zeros(1, np.int8)})
    saved = store.export()
    HostStates(FIRST, 10, tmp_path).write(np.array([1]), {"c": np.zeros((1, 3), np.float32), "n": np.zeros(1, np.int8)})
    with pytest.raises(checkpoint.CheckpointError, match=r"no longer in"):
        HostStates(FIRST, 10, tmp_path).restore(saved)


@pytest.mark.parametrize(("before", "after"), [("device", "host"), ("host", "device"), ("folder", "device")])
def test_states_move_to_another_place_with_a_checkpoint(tmp_path, before, after):
    options = {"rounds": 4, "cohort": 3, "devices": 1}
    place = {"folder": tmp_path / "states"}
    whole = simulate(counting(), jnp.float32(2.0), clients(), **options)
    saving = Checkpoints(tmp_path / "saved", every=2)
    early = {"checkpoints": saving, "on_progress": lambda progress: progress.round >= 2}
    simulate(counting(), jnp.float32(2.0), clients(), states_in=place.get(before, before), **early, **options)
    moved = simulate(
        counting(),
        jnp.float32(2.0),
        clients(),
        states_in=place.get(after, after),
        checkpoints=saving._replace(resume=True),
        **options,
    )
    assert np.asarray(moved.params).tobytes() == np.asarray(whole.params).tobytes()
    states = moved.states.read(np.arange(5)) if after == "host" else moved.states
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(whole.states), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- populations -----------------------------------------------------------------------------------------------------


def pull(params, batch, key):
    """Each client pulls every weight towards its own numbers."""
    towards = jnp.sum(batch["x"].astype(jnp.float32) * batch["mask"][:, None]) / 100
    return 0.5 * jnp.mean((params - towards) ** 2) * params.size


def sparse_split(path: Path, population: int, width: int) -> fb.Split:
    """One example per client in a file; the first number of client i is i mod 251."""
    x = np.memmap(path, np.uint8, "w+", shape=(population, width))
    x[:, 0] = np.arange(population) % 251
    x.flush()
    return fb.Split({"x": np.memmap(path, np.uint8, "r", shape=(population, width))}, np.arange(population + 1))


def test_a_million_stateless_clients_take_no_more_memory_than_a_thousand(tmp_path):
    def run(population):
        data = sparse_split(tmp_path / f"{population}.bin", population, 400)
        alg = fb.fedavg(pull, client_lr=0.1, batch_size=1)
        options = {"rounds": 5, "cohort": 20, "devices": 2, "data_in": "host"}
        return simulate(alg, jnp.zeros(8), data, **options)

    run(1_000)  # compiles
    before = resident()
    run(1_000_000)
    assert resident() - before < 100 * MB  # the data is 400 MB, and would be 800 MB on two devices


def test_states_of_forty_gigabytes_take_the_room_of_those_who_were_asked(tmp_path):
    population, width, cohort, rounds = 100_000, 100_000, 4, 4
    data = sparse_split(tmp_path / "data.bin", population, 1)
    alg = fb.scaffold(pull, client_lr=0.1, batch_size=1)

    def run(folder, **more):
        with collecting():  # a notice says that hardly any client is asked twice
            return simulate(
                alg, jnp.zeros(width), data, rounds=rounds, cohort=cohort, devices=1, states_in=folder, **more
            )

    before = resident()
    whole = run(tmp_path / "whole")
    asked = sorted({int(i) for r in range(rounds) for i in address.cohort(0, r, 0, population, cohort)})
    assert resident() - before < 200 * MB  # all states together are 40 GB
    assert whole.states.touched.tolist() == asked
    one = width * 4
    assert allocated(tmp_path / "whole" / "states.bin") <= 1.1 * len(asked) * one
    # SCAFFOLD, one step from c = c_i = 0 in the first round: c_i is the client's gradient at 0
    first = address.cohort(0, 0, 0, population, cohort)
    once = [i for i in first if all(i not in address.cohort(0, r, 0, population, cohort) for r in (1, 2, 3))]
    got = np.asarray(jax.tree.leaves(whole.states.read(np.array(once)))[0])
    np.testing.assert_allclose(got, -data.arrays["x"][once].astype(float) / 100 * np.ones(width), rtol=1e-5)

    saving = Checkpoints(tmp_path / "saved", every=1)
    run(tmp_path / "parts", checkpoints=saving, on_progress=lambda progress: progress.round >= 2)
    # two checkpoints of a server (a model and c), without the client states
    size = sum(allocated(p) for p in (tmp_path / "saved").rglob("*") if p.is_file())
    assert size < 2 * 2 * one + MB
    resumed = run(tmp_path / "parts", checkpoints=saving._replace(resume=True))
    assert np.asarray(resumed.params).tobytes() == np.asarray(whole.params).tobytes()
    everyone = [jax.tree.leaves(run.states.read(np.array(asked))) for run in (whole, resumed)]
    assert all(np.array_equal(a, b) for a, b in zip(*everyone, strict=True))


def test_a_store_is_named_by_its_folder(tmp_path):
    with StoreWriter(tmp_path / "mine", info={"classes": 2}) as writer:
        for i in range(6):
            writer.add("train", f"c{i}", {"x": np.full((2, 3), i, np.uint8), "y": np.array([0, 1], np.uint8)})
    settings = [f"data.name={tmp_path / 'mine'}", "model.name=softmax_regression", "cohort=2"]
    with told("the field 'x' stores bytes and there is no preprocessing.*data.preprocess"):
        assert build(load_config(settings=settings)).data.train.num_clients == 6
    for steps in ('[{name="scale"}]', '[{name="scale", factor=1.0}]'):  # with the proposed settings the notice is gone
        made = build(load_config(settings=[*settings, f"data.preprocess={steps}"]))
        assert made.data.train.preprocess == made.data.preprocess is not None
    with pytest.raises(ConfigError, match=r"data.name .*yours' does not exist"):
        build(load_config(settings=[f"data.name={tmp_path / 'yours'}"]))
