"""`engine.remat`: the same gradients with less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.lowering import LoweringOptions, lower, remat
from told import told

KEY = jax.random.key(0)


def memory_and_step(model, batch, how):
    """Temporary memory of a step of FedAvg, and what a client sends."""
    params = model.init(KEY)
    data = fb.ClientData.of(batch)
    alg = lower(fb.fedavg(model.loss, client_lr=0.1, batch_size=len(batch["x"])), LoweringOptions(remat=how))
    exchange = alg.exchanges[0]
    down = exchange.send(alg.init(params))
    program = jax.jit(lambda down: exchange.client(down, alg.init_client(params), data, KEY))
    compiled = program.lower(down).compile()
    used = compiled.memory_analysis()
    assert used is not None
    return used.temp_size_in_bytes, compiled(down)


def text(count, length, vocab):
    rows = np.random.default_rng(0).integers(1, vocab, (count, length + 1)).astype(np.int32)
    return {"x": jnp.asarray(rows[:, :-1]), "y": jnp.asarray(rows[:, 1:])}


def test_less_memory_and_the_same_step():
    model, batch = models.llama(50, layers=12, width=32, heads=2), text(8, 64, 50)
    (plain, wanted), (less, found) = (memory_and_step(model, batch, how) for how in ("none", "layers"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    assert less < 0.6 * plain


def test_a_model_without_a_loop_is_reported():
    remat._say_no_loop.cache_clear()
    with told("no loop over layers"):
        jax.eval_shape(remat.remat_layers(lambda w: jnp.sum(w @ w)), jnp.ones((2, 2)))


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ValueError, match="remat"):
        LoweringOptions(remat="all")  # pyright: ignore[reportArgumentType]


def test_explain_says_how_many_clients_fit_and_what_remat_saves(monkeypatch):
    from fedbraid.experiment import explain as module
    from fedbraid.experiment.config import load_config

    config = load_config(settings=["model.name=softmax_regression", "engine.plan=chunks"])
    needs = {"none": 4_000_000, "layers": 1_000_000}
    monkeypatch.setattr(module, "client_bytes", lambda alg, params, data, options: needs[options.remat])
    monkeypatch.setattr("fedbraid.simulation.plan.total_memory", lambda device: 80_000_000)
    monkeypatch.setattr(module, "total_memory", lambda device: 80_000_000)
    first, second = module.explain_config(config)["memory"]
    assert "10 fit" in first
    assert "40 fit" in second
    needs["layers"] = needs["none"]  # a model without a loop
    assert len(module.explain_config(config)["memory"]) == 1
    assert module.explain_config(config)["values"] == "float32"


def test_explain_says_how_large_the_frozen_weights_are():
    from fedbraid.experiment.config import load_config
    from fedbraid.experiment.explain import explain_config

    settings = ["algorithm.name=fedavg", "model.name=mlp", "model.hidden=[300]", "model.lora.targets=w"]
    memory = explain_config(load_config(settings=settings))["memory"]
    # the matrix [64, 300]; the second one and the biases are too small to be an argument of the program
    assert "frozen weights of 76.8 kB are stored once on each device, for all clients" in memory
    assert not any("frozen" in line for line in explain_config(load_config(settings=settings[:3]))["memory"])
