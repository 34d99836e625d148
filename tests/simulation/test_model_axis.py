"""`engine.model_devices`: the model of one client over several devices. The results are those of one device."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fedbraid as fb
from fedbraid import models
from fedbraid.local import masked_mean
from fedbraid.lowering import captured
from fedbraid.simulation import Checkpoints, Clock, fedbuff
from fedbraid.simulation.devices import client_mesh
from fedbraid.simulation.model_axis import SMALL, model_sharding
from fedbraid.simulation.plan import client_bytes
from fedbraid.transforms import median

KEY = jax.random.key(0)
MODEL = models.mlp(32, 4, hidden=(64, 48))


def clients() -> fb.Split:
    rng = np.random.default_rng(0)
    return fb.Split.from_clients(
        [{"x": rng.normal(size=(n, 32)), "y": rng.integers(0, 4, n)} for n in (7, 13, 20, 4, 1, 9)]
    )


def params():
    return jax.tree.map(lambda leaf: leaf.astype(float), MODEL.init(KEY))


def apart(a, b) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in pairs)


def part(tree) -> float:
    """The largest part of a tree's bytes that is on one device."""
    leaves = jax.tree.leaves(tree)
    held = {
        d: sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == d)
        for d in jax.devices()
    }
    return max(held.values()) / sum(leaf.nbytes for leaf in leaves)


METHODS = {
    "fedavg": partial(fb.fedavg, client_lr=0.1),
    "scaffold": partial(fb.scaffold, client_lr=0.1),
    "fedadam": partial(fb.fedadam, client_lr=0.1),
}


@cache
def algorithm(name):
    return METHODS[name](MODEL.loss, batch_size=8)


@cache
def on_one_device(name):
    """A run in float64; see `x64`."""
    return fb.simulate(algorithm(name), params(), clients(), rounds=2, cohort=5, devices=1)


def run(name, **options):
    return fb.simulate(algorithm(name), params(), clients(), rounds=2, cohort=5, **options)


# --- the same results, and a part of the memory ----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model_devices", [2, 4])
def test_the_same_run_as_on_one_device(name, model_devices, x64):
    found, wanted = run(name, model_devices=model_devices), on_one_device(name)
    assert apart(wanted.params, params()) > 1e-3  # it moved
    assert apart(found.params, wanted.params) < 1e-12
    assert apart(found.history["train/loss"], wanted.history["train/loss"]) < 1e-12
    # two groups of two devices, or one group of four
    assert (found.info.plan.kind, found.info.plan.devices) == (
        ("chunks", 2) if model_devices == 2 else ("sequential", 1)
    )
    assert part(found.server) < 1 / model_devices + 0.1  # optimizer states, too; small leaves are on all devices
    if jax.tree.leaves(wanted.states):
        assert apart(found.states, wanted.states) < 1e-12
        assert part(found.states) < 1 / model_devices + 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "chunks", "chunk": 2},
        {"plan": "chunks", "chunk": 3, "devices": 2},
        {"data_in": "host"},
        {"data_in": "host", "states_in": "host", "chunk": 2},
        {"microbatch": 3},
    ],
    ids=str,
)
def test_with_other_options(options, x64):
    found = run("scaffold", model_devices=2, **options)
    assert apart(found.params, on_one_device("scaffold").params) < 1e-12


def test_a_reducer_that_gathers_uploads(x64):
    alg = median(fb.fedavg(MODEL.loss, batch_size=8))
    wanted, found = (
        fb.simulate(alg, params(), clients(), rounds=2, **options) for options in ({"devices": 1}, {"model_devices": 2})
    )
    assert apart(wanted.params, params()) > 1e-3
    assert apart(found.params, wanted.params) < 1e-12


def test_clients_of_different_lengths_do_not_deadlock(x64):
    """A step that moves parts between devices: all devices must take part, also those whose client has ended."""

    def loss(w, batch, key):
        return masked_mean(jnp.sum((batch["x"] @ w + batch["x"] @ jnp.roll(w, 3, 1)) ** 2, -1), batch["mask"])

    alg, w = fb.fedavg(loss, client_lr=0.001, batch_size=2), jnp.ones((32, 64))
    wanted, found = (
        fb.simulate(alg, w, clients(), rounds=2, **options).params for options in ({"devices": 1}, {"model_devices": 2})
    )
    assert apart(wanted, w) > 1e-3
    assert apart(found, wanted) < 1e-12


def test_a_frozen_base_is_divided_too():
    """The base model under LoRA adapters is captured by the loss: an argument of the program."""
    whole = models.llama(64, layers=2, width=64, heads=2)
    base = whole.init(KEY)
    model = models.lora(whole, base, rank=2)
    rows = np.random.default_rng(0).integers(1, 64, (6, 9)).astype(np.int32)
    data = fb.Split.from_clients([{"x": rows[i : i + 3, :-1], "y": rows[i : i + 3, 1:]} for i in (0, 3)])
    alg, start = fb.fedavg(model.loss, client_lr=0.5, batch_size=2), model.init(KEY)
    wanted, found = (
        fb.simulate(alg, start, data, rounds=2, **options).params for options in ({"devices": 1}, {"model_devices": 2})
    )
    assert apart(wanted, start) > 1e-3
    assert apart(found, wanted) < 1e-5
    mesh = client_mesh(2, 2)
    program = captured.jit(lambda x: x @ base["layers"]["gate"][0], sharding=partial(model_sharding, mesh))
    program(jax.device_put(jnp.ones((1, 64)), model_sharding(mesh, (1, 64))))
    (lifted,) = program._lifted.values()
    assert lifted is not None
    assert part(lifted.captured) == 0.5


def test_each_device_needs_less_memory():
    model = models.mlp(256, 10, hidden=(512, 512))
    data = fb.Split.from_clients([{"x": np.ones((4, 256), np.float32), "y": np.zeros(4, np.int32)}] * 2)
    alg, shapes = fb.fedadam(model.loss, batch_size=4), jax.eval_shape(model.init, KEY)
    one, two, four = (client_bytes(alg, shapes, data, fb.EngineOptions(model_devices=n)) for n in (1, 2, 4))
    assert one is not None
    assert two is not None
    assert four is not None
    assert two < 0.6 * one
    assert four < 0.6 * two


def test_evaluation_and_checkpoints(tmp_path, x64):
    data = fb.FederatedData(clients(), test=clients())

    def train(rounds, folder, resume=False, **options):
        saved = Checkpoints(folder, every=1, resume=resume)
        return fb.simulate(
            algorithm("scaffold"), params(), data, rounds=rounds, metrics=MODEL.metrics, checkpoints=saved, **options
        )

    wanted = train(2, tmp_path / "one", devices=1)
    train(1, tmp_path / "two", model_devices=2)
    found = train(2, tmp_path / "two", resume=True, model_devices=2)
    assert apart(found.params, wanted.params) < 1e-12
    assert apart(found.evaluations["test_loss"][-1:], wanted.evaluations["test_loss"][-1:]) < 1e-12
    assert part(found.server) < 0.6
    assert part(found.states) < 0.6


# --- which axis ------------------------------------------------------------------------------------------------------


def test_arrays_are_divided_along_their_largest_axis_that_fits():
    mesh = client_mesh(4, 4)
    assert model_sharding(mesh, (64, 128)).spec == P(None, "model")
    assert model_sharding(mesh, (128, 62)).spec == P("model")
    assert model_sharding(mesh, (64, 127)).spec == P("model")
    assert model_sharding(mesh, (63, 127)).spec == P()
    assert model_sharding(mesh, (SMALL,)).spec == P()
    assert model_sharding(mesh, (2 * SMALL,)).spec == P("model")
    assert model_sharding(mesh, (4096, 64, 32), leading=1).spec == P(None, "model")  # not the axis of clients


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_devices": 3}, r"model_devices = 3: it must divide the number of devices, which is 4"),
        ({"model_devices": 8}, r"model_devices = 8: it must divide"),
        ({"model_devices": 0}, "model_devices"),
        ({"model_devices": 2, "plan": "lanes"}, r"model_devices = 2.*got plan = \"lanes\""),
        ({"model_devices": 2, "plan": "sequential"}, r'"sequential": 2 groups of 2 devices.*model_devices = 4'),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        run("fedavg", **options)


def test_several_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="model_devices = 2: a model can be divided over the devices of one host only"):
        client_mesh(None, 2)


def test_an_asynchronous_run_is_refused():
    with pytest.raises(ValueError, match="model_devices = 2: an asynchronous run"):
        run("fedavg", model_devices=2, clock=Clock(), asynchrony=fedbuff(2))


def test_points_that_run_together_are_refused():
    from fedbraid.simulation.loop import Schedule
    from fedbraid.simulation.one_point import PointTask, Study
    from fedbraid.simulation.points import Points
    from fedbraid.simulation.program import Task

    data = fb.FederatedData(clients())
    task = PointTask(Task(algorithm("fedavg"), data), None, lambda seed: MODEL.init(KEY))
    study = Study(lambda values, data: task, (), {}, data)
    with pytest.raises(ValueError, match="model_devices = 2: points"):
        Points(study, cohort=2, points=2, options=fb.EngineOptions(model_devices=2), schedule=Schedule(1), seeds=(0,))


def test_explain_says_what_a_client_needs_on_each_device():
    from fedbraid.experiment.config import load_config
    from fedbraid.experiment.explain import explain_config

    found = explain_config(load_config(settings=["engine.model_devices=2"]))
    assert found["how"].startswith("each group of 2 devices runs 1 client at a time")
    assert "on each of its 2 devices by the compiled program" in found["memory"][0]
