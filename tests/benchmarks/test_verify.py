"""benchmarks/verify.py compares kernels with XLA's operations; here on a CPU, in Pallas' interpret mode."""

import importlib
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.local import ClientData
from fedbraid.lowering import Lanes, LoweringOptions, explain, grown, kernels
from fedbraid.lowering.kernels import updates

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTH, WORDS = 16, 128


@pytest.fixture
def verify(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    monkeypatch.setattr(grown, "HEAVY", 0)
    yield importlib.import_module("verify")
    for name in ("verify", "rewrites", "gpu", "turns"):
        sys.modules.pop(name, None)


def small_gpt(*, measure, **options):
    """A round of a small transformer: two clients on lanes, two steps each."""
    model = models.gpt(WORDS, layers=1, width=64, heads=2, length=LENGTH, tied=False)
    text = np.random.default_rng(0).integers(1, WORDS, (16, LENGTH + 1)).astype(np.int32)
    split = fb.Split({"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}, np.array([0, 8, 16]))
    make = partial(_fedavg, model.loss)
    params = model.init(jax.random.key(0))
    return measure(make, split, params=params, rounds=9, cohort=2, plan="lanes", chunk=2, **options)


def _fedavg(loss, lr):
    return fb.fedavg(loss, client_lr=lr, batch_size=4, epochs=1)


def test_kernels_agree_with_xla_and_a_wrong_one_is_named(verify, monkeypatch):
    found = verify.verify(small_gpt, rounds=1)
    assert set(found) == {"bfloat16, XLA", "bfloat16", "tf32"}
    assert verify.wrong(found) == []
    assert found["bfloat16"] != found["bfloat16, XLA"]  # other programs
    assert 0 < max(found["bfloat16"].values()) < 0.2

    right = updates.add_product
    monkeypatch.setattr(updates, "add_product", lambda w, x, y, scale: right(w, x, y, -scale))
    said = verify.wrong(verify.verify(small_gpt, rounds=1))
    assert said
    assert all(line.startswith("bfloat16: ") for line in said)
    assert any("has a relative error of 2.0" in line for line in said)


def test_errors_that_are_not_numbers_fail(verify):
    assert len(verify.wrong({"bfloat16, XLA": {"a": 0.1}, "tf32": {"a": float("nan")}})) == 1


def kernels_called(make, split, *, params, precision, **_):
    data = ClientData.of({name: jnp.asarray(array[:8]) for name, array in split.arrays.items()})
    found = explain(make(0.05), params, data, LoweringOptions(precision=precision), Lanes(2))
    return {line.split(" x ")[0] for line in found.kernels["train"]}


def test_each_rewrite_can_be_switched_off(verify):
    from rewrites import REWRITES, without

    def called():
        jax.clear_caches()
        return small_gpt(measure=kernels_called, precision="bfloat16")

    every, gone = called(), {}
    for name in REWRITES:
        with without([name]):
            gone[name] = every - called()
    assert gone["kernels"] == every
    assert gone["updates"] == {"add_product", "add_scaled"}
    assert gone["epilogues"] == {"dense_activation", "dense_activation_back"}
    assert gone["halves"] == gone["updates"] | gone["epilogues"]
    assert {"attention_with_bias", "attention_back_with_bias"} <= gone["attention"]
    assert {"row_norm", "row_norm_back", "add_row_norm", "add_row_norm_back"} == gone["norms"]
    assert gone["epilogues"] <= gone["activations"]
    assert called() == every
