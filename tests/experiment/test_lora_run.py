"""A configured run with [model.lora]: trained, costed, loaded, exported with and without its base."""

import jax
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.costs import cost
from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import ConfigError, load_config, parse, read_tree
from fedbraid.models import mlp
from told import collecting, told

LORA = ["rounds=2", "cohort=5", "model.hidden=[12]", "model.lora.rank=2", "model.lora.targets=w"]


def test_adapters_are_trained_sent_saved_and_merged(tmp_path):
    config = load_config(settings=[*LORA, "algorithm.name=fedavg", "algorithm.client_opt=adamw"])
    assert config.model.name == "mlp"
    experiment = build(config)
    adapters = 2 * (64 + 12) + 2 * (12 + 10)
    assert cost(experiment.algorithm, experiment.params, experiment.data).up == 4 * adapters
    fb.run(config, out=tmp_path / "run")
    loaded = fb.load_run(tmp_path / "run")
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == adapters
    with np.load(loaded.export(tmp_path / "whole.npz", merged=True)) as found:
        merged = [{"w": found[f"{i}.w"], "b": found[f"{i}.b"]} for i in (0, 1)]
    x = np.asarray(loaded.experiment.data.train.arrays["x"][:6])
    np.testing.assert_allclose(
        loaded.predict(x), mlp(64, 10, hidden=[12]).predict(merged, _prepared(loaded, x)), rtol=1e-4, atol=1e-4
    )
    assert np.any(merged[0]["w"] != mlp(64, 10, hidden=[12]).init(jax.random.key(0))[0]["w"])


def _prepared(loaded, x):
    prepare = loaded.description.preprocess
    return x if prepare is None else prepare({"x": x, "mask": np.ones(len(x), np.float32)}, None, False)["x"]


def test_merged_weights_without_the_factors_of_the_clients_are_said_to_be_the_base(tmp_path):
    private = {"transforms": [{"name": "private", "leaves": "*.lora_b"}]}
    tree = read_tree(None, [*LORA, "algorithm.name=fedavg"]) | private
    with collecting():  # the state of clients is hardly used
        fb.run(parse(tree), out=tmp_path / "run")
    with told("all factors lora_b of the server are zero, so the merged weights are those of the base"):
        fb.load_run(tmp_path / "run").export(tmp_path / "whole.npz", merged=True)


def test_only_adapters_can_be_merged(tmp_path):
    fb.run(load_config(settings=["rounds=1", "cohort=2", "model.hidden=[4]"]), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="only a model with adapters can be merged"):
        fb.load_run(tmp_path / "run").export(tmp_path / "whole.npz", merged=True)
