"""The data's preprocessing is applied when batches are taken: in training, in evaluation and in fine-tuning."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import FederatedData
from fedbraid.costs import cost
from fedbraid.data.preprocess import Pipeline
from fedbraid.local import Batches, ClientData
from fedbraid.simulation import simulate
from fedbraid.simulation.evaluate import evaluator
from fedbraid.simulation.fine_tuning import adaptation, divide
from fedbraid.simulation.shadow import trace_shadow
from fedbraid.transforms import elastic
from zoo import clients, loss, start

PLAIN = clients()
LOCAL = {"batch_size": 2, "epochs": 1}
PLANS = ({"plan": "sequential"}, {"plan": "chunks", "chunk": 2}, {"plan": "lanes", "chunk": 2}, {"data_in": "host"})


def narrow(batch, key, train):
    """Drops two of the five stored columns."""
    del key, train
    return {**batch, "x": batch["x"][:, :3] / 2}


def noisy(batch, key, train):
    """The same, with random noise in training (an augmentation)."""
    x = narrow(batch, key, train)["x"]
    return {**batch, "x": x + jax.random.normal(key, x.shape, x.dtype) if train else x}


def stored(preprocess):
    """Stored examples that become the zoo's own examples by preprocessing; the zoo's loss needs the preprocessing."""
    x = np.concatenate([2 * PLAIN.arrays["x"], np.ones((PLAIN.num_examples, 2))], 1)
    return replace(PLAIN, arrays={**PLAIN.arrays, "x": x}, preprocess=preprocess)


def metrics(params, batch):
    residual = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return {"error": (residual**2 * batch["mask"], batch["mask"])}


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", PLANS, ids=str)
def test_preprocessed_data_are_the_data_that_they_are_made_into(how, x64):
    alg = fb.fedavg(loss, client_lr=0.05, **LOCAL)
    options = {"rounds": 3, "cohort": 3, "metrics": metrics, "eval_every": 1, "devices": 1, **how}
    wide = stored(narrow)
    want = simulate(alg, start(), FederatedData(PLAIN, PLAIN), **options)
    got = simulate(alg, start(), FederatedData(wide, wide), **options)
    close(got.params, want.params)
    close(got.evaluations, want.evaluations)
    close(
        simulate(alg, start(), wide, **options | {"metrics": None}).params, want.params
    )  # a split has its own preprocessing
    assert cost(alg, start(), wide) == cost(alg, start(), PLAIN)


def test_augmentation_has_the_key_of_its_step(x64):
    """The preprocessing gets the key of its step: it draws the numbers that the loss would draw from this key."""

    def by_hand(params, batch, key):
        return loss(params, noisy(batch, key, True), key)

    options = {"rounds": 2, "cohort": 3, "devices": 1}
    # steps of a fold, a client's own loop, and all examples at once; every algorithm is in tests/flower/test_zoo.py
    for make, local in ((fb.mime, LOCAL), (fb.maml, {}), (fb.fedprox_exact, {})):
        want = simulate(make(by_hand, **local), start(), stored(None), **options)
        got = simulate(make(loss, **local), start(), stored(noisy), **options)
        close(got.params, want.params)


def test_only_training_augments(x64):
    data, key = ClientData.of(stored(None).client(1)), jax.random.key(3)
    data = replace(data, preprocess=noisy)
    clean = PLAIN.client(1)["x"]
    np.testing.assert_allclose(data.everything()["x"], clean)
    assert np.abs(data.everything(key)["x"] - clean).min() > 0
    every = Batches(None, epochs=1)
    np.testing.assert_allclose(every.take(data, 0, key)["x"], clean)
    assert np.abs(every.take(data, 0, key, key)["x"] - clean).min() > 0
    np.testing.assert_allclose(replace(every, augment=False).take(data, 0, key, key)["x"], clean)
    np.testing.assert_allclose(
        evaluator(metrics, stored(noisy))(start())["error"], evaluator(metrics, PLAIN)(start())["error"]
    )


def test_sensitivities_are_measured_without_augmentation(x64):
    def outputs(params, batch):
        return batch["x"] @ params["w"] + params["b"]

    def omega(split):
        alg = elastic(fb.fedavg(loss, **LOCAL), outputs, held_out=0.5)
        exchange = alg.exchanges[0]
        data = replace(ClientData.of(split.client(1)), preprocess=split.preprocess)
        return exchange.client(exchange.send(alg.init(start())), (), data, jax.random.key(0)).up.aux.omega

    close(omega(stored(noisy)), omega(PLAIN))


def test_fine_tuning_and_traces_read_preprocessed_batches(x64):
    wide = stored(narrow)
    assert all(part.preprocess is narrow for part in divide(wide, 0.5))
    want, got = (adaptation(loss, metrics, split, steps=2)(start()) for split in (PLAIN, wide))
    close(got, want)
    alg = fb.fedavg(loss, **LOCAL)
    want, got = (trace_shadow(alg, start(), split, rounds=2).iterates for split in (PLAIN, wide))
    close(got, want)


def test_all_splits_of_a_data_set_carry_its_preprocessing():
    scale, half = Pipeline.of({"name": "scale"}), Pipeline.of({"name": "scale", "factor": 0.5})
    data = FederatedData(PLAIN, PLAIN, preprocess=scale)
    assert data.train.preprocess is data.test.preprocess is scale
    assert PLAIN.preprocess is None
    assert FederatedData(data.train).preprocess is scale  # taken from the train split
    assert replace(data, preprocess=half).test.preprocess is half
    assert replace(data, preprocess=None).train.preprocess is None
    assert replace(data, test=PLAIN).test.preprocess is scale
    assert replace(data, train=stored(narrow)).train.preprocess is scale  # the data set's own preprocessing is used


def test_shapes_are_those_after_preprocessing():
    about = FederatedData(stored(narrow)).description
    assert about.fields["x"].shape == (5,)
    assert about.shapes == {"x": (3,), "y": ()}
    assert about.population == 5
    assert jnp.shape(start()["w"]) == about.shapes["x"]
