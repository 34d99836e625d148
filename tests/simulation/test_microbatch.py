"""`engine.microbatch`: the same gradients as whole batches, in less memory; refused where it would be wrong."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.core import StructureError
from fedbraid.local import WEIGHTS, dividing, masked_mean, rewriting, value_and_grad
from fedbraid.lowering import LoweringOptions, lower
from fedbraid.lowering.microbatch import in_microbatches, microbatches
from fedbraid.lowering.mixed import narrow_activations
from fedbraid.simulation.means import _checked
from told import collecting, told

KEY = jax.random.key(0)
SIZES = (7, 13, 20, 4, 1)  # batches of 8: some are full, some have padding, one has a single example


@pytest.fixture(autouse=True)
def _fresh():
    _checked.clear()


def clients(dtype: str = "float32") -> fb.Split:
    rng = np.random.default_rng(0)
    return fb.Split.from_clients(
        [{"x": rng.normal(size=(n, 5)).astype(dtype), "y": rng.integers(0, 3, n)} for n in SIZES]
    )


def start(model, dtype="float64"):
    return jax.tree.map(lambda leaf: leaf.astype(dtype) + 0.1, model.init(KEY))


def apart(a, b) -> float:
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def errors(w, batch):
    return (batch["x"] @ w - batch["y"].astype(w.dtype)) ** 2


def mean(w, batch, key):
    return masked_mean(errors(w, batch), batch["mask"])


# --- the same results ------------------------------------------------------------------------------------------------

METHODS = {
    "fedavg": partial(fb.fedavg, client_lr=0.1),
    "fedprox": partial(fb.fedprox, client_lr=0.1, alpha=0.1),
    "fedadam": partial(fb.fedadam, client_lr=0.1),
    "scaffold": partial(fb.scaffold, client_lr=0.1),
    "mimelite": fb.mimelite,
    "mime": fb.mime,
    "feddyn": partial(fb.feddyn, client_lr=0.1),
    "minibatch_sgd": fb.minibatch_sgd,
}


@pytest.mark.parametrize("name", METHODS)
def test_the_same_run_as_with_whole_batches(name, x64):
    model, data = models.mlp(5, 3, hidden=(6,)), clients("float64")

    def run(microbatch):
        alg = METHODS[name](model.loss, batch_size=8)
        return fb.simulate(alg, start(model), data, rounds=2, devices=1, microbatch=microbatch)

    whole, parts = run(None), run(3)
    assert apart(whole.params, start(model)) > 1e-3  # it moved
    assert apart(whole.params, parts.params) < 1e-12
    assert apart(whole.states, parts.states) < 1e-12 if jax.tree.leaves(whole.states) else True
    np.testing.assert_allclose(whole.history["train/loss"], parts.history["train/loss"], rtol=1e-12)


@pytest.mark.parametrize("plan", ["sequential", "chunks", "lanes"])
def test_under_every_plan(plan, x64):
    model, data = models.softmax_regression(5, 3), clients("float64")
    whole, parts = (
        fb.simulate(
            fb.scaffold(model.loss, batch_size=8), start(model), data, rounds=2, plan=plan, chunk=2, microbatch=m
        )
        for m in (None, 3)
    )
    assert apart(whole.params, parts.params) < 1e-12


def test_a_batch_of_all_examples_is_divided(x64):
    data, w = clients("float64"), jnp.ones(5)
    whole, parts = (
        fb.simulate(fb.fedavg(mean, batch_size=None), w, data, rounds=2, devices=1, microbatch=m).params
        for m in (None, 6)
    )
    assert apart(whole, w) > 1e-3
    assert apart(whole, parts) < 1e-12


def batch_of(real, rows=8, dtype=float):
    rng = np.random.default_rng(1)
    return {
        "x": jnp.asarray(rng.normal(size=(rows, 5)), dtype),
        "y": jnp.asarray(rng.normal(size=rows), dtype),
        "mask": (jnp.arange(rows) < real).astype(dtype),
    }


@pytest.mark.parametrize("real", [8, 5, 3, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_microbatch_of_padding_does_not_count(real, size, x64):
    def loss(w, batch, key):  # 0 / 0 if all rows are padding
        return jnp.sum(errors(w, batch) * batch["mask"]) / jnp.sum(batch["mask"]) + jnp.sum(w**2)

    batch, w = batch_of(real), jnp.arange(5.0)
    both = jax.value_and_grad(loss)
    whole, parts = both(w, batch, KEY), in_microbatches(loss, both, size)(w, batch, KEY)
    assert apart(whole, parts) < 1e-12


def test_terms_without_examples_remain_if_the_whole_batch_is_padding():
    def loss(w, batch, key):
        return masked_mean(errors(w, batch), batch["mask"]) + jnp.sum(w**2)

    w, both = jnp.arange(5.0), jax.value_and_grad(loss)
    value, g = in_microbatches(loss, both, 3)(w, batch_of(0, dtype="float32"), KEY)
    np.testing.assert_allclose(value, 30.0, rtol=1e-6)
    np.testing.assert_allclose(g, 2 * w, rtol=1e-6)


def test_tokens_count_not_examples():
    """The loss of a language model is a mean over tokens: an example with few of them has a small weight."""
    model = models.llama(11, layers=1, width=8, heads=2)
    rows = np.random.default_rng(0).integers(1, 11, (6, 9)).astype(np.int32)
    rows[1, 3:] = rows[4, 1:] = 0  # padding tokens
    batch = {"x": jnp.asarray(rows[:, :-1]), "y": jnp.asarray(rows[:, 1:]), "mask": jnp.array([1.0, 1, 1, 1, 1, 0])}
    params, both = model.init(KEY), jax.value_and_grad(model.loss)
    whole, parts = both(params, batch, KEY), in_microbatches(model.loss, both, 2)(params, batch, KEY)
    assert apart(whole, parts) < 1e-5
    plain = in_microbatches(lambda *args: model.loss(*args), both, 2)(params, batch, KEY)  # weights not declared
    assert apart(whole, plain) > 1e-2

    data = fb.Split.from_clients([{name: np.asarray(batch[name]) for name in "xy"}] * 2)
    run = partial(fb.simulate, params=params, data=data, rounds=1, devices=1, microbatch=2)
    run(fb.fedavg(model.loss, batch_size=4))
    with pytest.raises(ValueError, match="example_weights"):
        run(fb.fedavg(lambda *args: model.loss(*args), batch_size=4))
    adapted = models.lora(model, rank=2, base=params)
    assert getattr(adapted.loss, WEIGHTS)(None, batch).tolist() == [8, 2, 8, 8, 0, 0]


def test_every_microbatch_has_its_own_random_numbers():
    def loss(w, batch, key):
        return w * masked_mean(jax.random.normal(key, batch["mask"].shape), batch["mask"])

    found = in_microbatches(loss, jax.grad(loss), 4)(jnp.float32(1), batch_of(8, dtype="float32"), KEY)
    wanted = [jax.random.normal(jax.random.fold_in(KEY, i), (4,)).mean() for i in range(2)]
    assert wanted[0] != wanted[1]
    np.testing.assert_allclose(found, np.mean(wanted), rtol=1e-5)


def test_with_values_in_bfloat16():
    def loss(w, batch, key):
        return masked_mean(jnp.sum(jnp.tanh(jnp.tanh(batch["x"] @ w[0]) @ w[1]) @ w[2], -1) ** 2, batch["mask"])

    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.normal(size=s), "float32") for s in ((5, 7), (7, 6), (6, 2))]
    batch = batch_of(7, dtype="float32")

    def step(w, batch, key):
        return value_and_grad(loss)(w, batch, key)

    with rewriting(narrow_activations):
        whole = step(w, batch, KEY)
        with dividing(microbatches(3)):
            parts = step(w, batch, KEY)
            program = jax.make_jaxpr(step)(w, batch, KEY)
    (loop,) = (e for e in program.eqns if e.primitive.name == "scan")
    assert "bf16[3,7]" in str(loop.params["jaxpr"])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(parts)} == {"float32"}
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * float(jnp.max(jnp.abs(a))))


def test_gradients_of_gradients():
    """MAML differentiates through local gradients."""
    batch, w = batch_of(7, dtype="float32"), jnp.arange(5.0)
    inner = in_microbatches(mean, jax.grad(mean), 3)
    wanted = jax.grad(lambda w: jnp.sum(jax.grad(mean)(w, batch, KEY) ** 3))(w)
    np.testing.assert_allclose(jax.grad(lambda w: jnp.sum(inner(w, batch, KEY) ** 3))(w), wanted, rtol=1e-4)


def test_rates_may_be_traced():
    data, w = clients(), jnp.ones(5)

    def run(rate, microbatch):
        return fb.simulate(
            fb.fedavg(mean, client_lr=rate, batch_size=8), w, data, rounds=1, devices=1, microbatch=microbatch
        ).params

    rates = jnp.array([0.01, 0.02])
    whole, parts = (jax.vmap(partial(run, microbatch=m))(rates) for m in (None, 3))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)


# --- less memory -----------------------------------------------------------------------------------------------------


def memory(model, batch, **options) -> int:
    """Bytes of temporary memory of a client's compiled program."""
    params, data = model.init(KEY), fb.ClientData.of(batch)
    alg = lower(fb.fedavg(model.loss, batch_size=len(batch["x"]), steps=2), LoweringOptions(**options))
    exchange = alg.exchanges[0]
    down = exchange.send(alg.init(params))
    compiled = jax.jit(lambda down: exchange.client(down, alg.init_client(params), data, KEY)).lower(down).compile()
    used = compiled.memory_analysis()
    assert used is not None
    return used.temp_size_in_bytes


def test_a_client_needs_less_memory():
    rows = np.random.default_rng(0).integers(1, 50, (16, 65)).astype(np.int32)
    model, batch = models.llama(50, layers=4, width=32, heads=2), {"x": rows[:, :-1], "y": rows[:, 1:]}
    whole, parts = memory(model, batch), memory(model, batch, microbatch=2)
    assert parts < 0.3 * whole
    assert memory(model, batch, microbatch=2, remat="layers") < 0.8 * parts


# --- refused, or said ------------------------------------------------------------------------------------------------


def run_with(loss, microbatch=3, method=fb.fedavg, **options):
    return fb.simulate(
        method(loss, batch_size=8, **options), jnp.ones(5), clients(), rounds=1, devices=1, microbatch=microbatch
    )


def a_sum(w, batch, key):
    return jnp.sum(errors(w, batch) * batch["mask"])


def a_root(w, batch, key):
    return jnp.sqrt(mean(w, batch, key))


def a_contrast(w, batch, key):
    z = batch["x"] * w * batch["mask"][:, None]
    return masked_mean(jax.nn.logsumexp(z @ z.T, -1), batch["mask"])


def noisy_sum(w, batch, key):
    return a_sum(w, {**batch, "x": batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)}, key)


@pytest.mark.parametrize("loss", [a_sum, a_root, a_contrast, noisy_sum])
def test_a_loss_that_is_not_a_mean_is_refused(loss):
    with pytest.raises(ValueError, match=r"microbatch = 3.*not the mean.*masked_mean"):
        run_with(loss)


def test_a_loss_with_dropout_is_accepted():
    def loss(w, batch, key):
        return mean(w, {**batch, "x": batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)}, key)

    run_with(loss)


def test_sam_is_refused_since_its_point_depends_on_the_whole_batch():
    with pytest.raises(ValueError, match="microbatch = 3"):
        run_with(mean, method=fb.fedsam, rho=0.5)


def test_batch_normalisation_is_refused():
    def loss(w, batch, key):
        return mean(w, batch, key)

    from fedbraid.local import STATISTICS, Statistics, collecting_statistics

    setattr(loss, STATISTICS, Statistics(("w",), lambda w, batch, key: (loss(w, batch, key), None)))
    with dividing(microbatches(3)), collecting_statistics(), pytest.raises(StructureError, match="batch normalisation"):
        value_and_grad(loss)(jnp.ones(5), batch_of(8, dtype="float32"), KEY)


def test_a_field_that_is_not_one_row_for_each_example_is_refused():
    batch = batch_of(8, dtype="float32")
    with pytest.raises(StructureError, match=r"'table'.*8 examples"):
        in_microbatches(mean, jax.grad(mean), 3)(jnp.ones(5), {**batch, "table": jnp.ones(4)}, KEY)
    wanted = jax.grad(mean)(jnp.ones(5), batch, KEY)  # a scalar is the same in every part
    found = in_microbatches(mean, jax.grad(mean), 3)(jnp.ones(5), {**batch, "leading": jnp.bool_(True)}, KEY)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_microbatch_that_is_not_smaller_than_the_batch_is_said():
    with told("microbatch=8 has no effect: a batch has 8 examples"):
        run_with(mean, microbatch=8)


def test_gradients_outside_the_seam_are_said():
    def moon(loss, **options):
        return fb.moon(loss, lambda w, batch: batch["x"] * w, **options)

    with told("microbatch=3 has no effect: the function that is differentiated does not take the batch"):
        run_with(mean, method=moon)

    def own(loss, **options):
        from fedbraid.local import Batches, local_work

        alg = fb.fedavg(loss, **options)
        work = local_work(
            lambda down, state, key: down.params,
            lambda w, batch, key, down: w - 0.1 * jax.grad(loss)(w, batch, key),
            lambda w, down, state, n: fb.Report(fb.Up(down.params - w), n.astype(float)),
            Batches(8, epochs=1),
        )
        return alg._replace(exchanges=(alg.exchanges[0]._replace(client=work),))

    with told("microbatch=3 has no effect: clients compute no gradient with fedbraid.local"):
        run_with(mean, method=own)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_size_that_is_no_count_is_refused(size):
    with pytest.raises(ValueError, match="microbatch"):
        LoweringOptions(microbatch=size)


def test_explain_names_the_microbatches_and_the_memory_of_a_client():
    from fedbraid.experiment.config import load_config
    from fedbraid.experiment.explain import explain_config

    settings = ["model.name=softmax_regression", "algorithm.batch_size=20", "engine.microbatch=6"]
    found = explain_config(load_config(settings=settings))
    assert found["gradients"] == {"train": ["gradients of 20 examples in 4 microbatches of 5"]}
    assert found["memory"][0] == "one client at a time on each device"
    assert "with microbatches of 6 by the compiled program" in found["memory"][1]
    with collecting() as texts:
        without = explain_config(load_config(settings=settings[:2]))
    assert without["gradients"] == {"train": []}
    assert not texts
    with collecting() as texts:
        explain_config(load_config(settings=[*settings[:2], "engine.precision=bfloat16"]))
    assert [text for text in texts if "precision='bfloat16' has no effect on a CPU" in text]
