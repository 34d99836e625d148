"""The run folder of a deployed run: it is loaded like that of a simulated one, without the data."""

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.experiment import build, load_config
from fedbraid.experiment.params import params_sha256
from fedbraid.flower.record import open_folder, write_run
from fedbraid.flower.server import Served
from told import told

SETTINGS = ["rounds=2", "cohort=2", "model.hidden=[4]", "data.clients=4"]


def test_a_deployed_run_is_loaded_and_predicts_without_data(tmp_path, monkeypatch):
    config = load_config(settings=SETTINGS)
    experiment = build(config)
    history = {"seconds": np.ones(2), "train/loss": np.ones(2), "train/bytes_up": np.ones(2)}
    history["train/bytes_down"] = np.ones(2)
    scores = {"round": np.array([2]), "test_accuracy": np.array([0.5])}
    served = Served(experiment.params, (), history, scores, 2, 2.0, {}, {0: 1}, {}, {})
    out = tmp_path / "run"
    open_folder(out, config)
    summary = write_run(out, config, served, finished=True, description=experiment.description)
    monkeypatch.setattr("fedbraid.experiment.assembly.load_data", lambda *_, **__: pytest.fail("the data is loaded"))
    run = fb.load_run(out)
    assert run.summary.deployed
    assert params_sha256(run.params) == summary.params_sha256
    x = experiment.data.test.arrays["x"][:6]
    batch = experiment.data.preprocess({"x": x}, None, False)
    np.testing.assert_allclose(run.predict(x), experiment.model.predict(experiment.params, batch["x"]), rtol=1e-5)
    assert run.export(tmp_path / "model.npz").stat().st_size > 0
    assert "deployed" in run._repr_html_()


def test_sections_for_simulated_runs_are_not_ignored_silently(tmp_path):
    with told(r"\[stop\].*deployed runs ignore it") as texts:
        open_folder(
            tmp_path / "run", load_config(settings=[*SETTINGS, "stop.patience=3", 'track.to=["tensorboard:x"]'])
        )
    assert any("[track]" in text for text in texts)
