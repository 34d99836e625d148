"""Checkpoints: they are complete, damaged ones are refused with their name, a resumed run gives the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid.simulation import Checkpoints, checkpoint, simulate
from zoo import ROWS, clients, counting, start

TREE = {"server": checkpoint.pack({"w": jnp.arange(3.0), "key": jax.random.key(3)}), "log": {"n": np.arange(4)}}


def test_round_trip_with_typed_keys(tmp_path):
    place = checkpoint.save(tmp_path, 7, TREE)
    assert checkpoint.verify(place) is None
    round_, tree = checkpoint.load(checkpoint.latest(tmp_path))
    like = {"w": jnp.zeros(3), "key": jax.random.key(0)}
    back = checkpoint.unpack(like, tree["server"], "server")
    assert round_ == 7
    assert np.array_equal(back["w"], np.arange(3.0))
    assert jax.random.uniform(back["key"]) == jax.random.uniform(jax.random.key(3))


def test_only_the_newest_are_kept(tmp_path):
    for round_ in (1, 2, 3, 10):
        checkpoint.save(tmp_path, round_, {"a": {"x": np.zeros(1)}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000003", "00000010"]


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_a_damaged_one_is_refused_and_the_newest_good_one_named(tmp_path, damage):
    for round_ in (5, 6):
        checkpoint.save(tmp_path, round_, TREE)
    files = sorted(p for p in (tmp_path / "00000006" / "arrays").rglob("*") if p.is_file() and p.stat().st_size > 0)
    victim = tmp_path / "00000006" / "manifest.json" if damage == "manifest" else files[-1]
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(checkpoint.CheckpointError, match=r"00000006 is damaged.*newest good one is .*00000005"):
        checkpoint.latest(tmp_path)


def test_a_half_written_one_is_not_seen(tmp_path):
    checkpoint.save(tmp_path, 5, TREE)
    (tmp_path / "partial-00000006").mkdir()
    assert checkpoint.latest(tmp_path).name == "00000005"


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.latest(tmp_path)


def test_another_structure_is_refused(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"server, array 0000.*\[3\].*\[4\]"):
        checkpoint.unpack({"w": jnp.zeros(4)}, {"0000": np.zeros(3, np.float32)}, "server")


@pytest.mark.parametrize("states_in", ["device", "host"])
def test_a_stopped_and_resumed_run_is_bit_identical(tmp_path, states_in):
    options = {"rounds": 9, "cohort": 3, "devices": 1, "states_in": states_in}
    whole = simulate(counting(), jnp.float32(2.0), clients(), **options)
    stopped = simulate(
        counting(),
        jnp.float32(2.0),
        clients(),
        checkpoints=Checkpoints(tmp_path, every=2),
        on_progress=lambda progress: progress.round >= 5,
        **options,
    )
    assert 5 <= stopped.info.stopped_at < 9  # the rounds in a portion depend on the speed of the machine
    resumed = simulate(
        counting(), jnp.float32(2.0), clients(), checkpoints=Checkpoints(tmp_path, every=2, resume=True), **options
    )
    assert np.asarray(resumed.params).tobytes() == np.asarray(whole.params).tobytes()
    for name, column in whole.history.items():
        np.testing.assert_array_equal(column, resumed.history[name])
    assert resumed.info.steps == whole.info.steps


def test_evaluations_survive_a_resume(tmp_path):
    import fedbraid as fb

    split = clients()
    metrics = lambda params, batch: {"loss": (params["b"] * batch["mask"], batch["mask"])}  # noqa: E731
    options = {"rounds": 6, "cohort": 2, "devices": 1, "metrics": metrics, "eval_every": 2}
    alg, data = ROWS["fedadam"].make(batch_size=2, epochs=1), fb.FederatedData(split, split)
    whole = simulate(alg, start(), data, **options)
    saving = Checkpoints(tmp_path, every=3)
    simulate(alg, start(), data, checkpoints=saving, on_progress=lambda p: p.round >= 3, **options)
    resumed = simulate(alg, start(), data, checkpoints=saving._replace(resume=True), **options)
    for name, column in whole.evaluations.items():
        np.testing.assert_array_equal(column, resumed.evaluations[name])
