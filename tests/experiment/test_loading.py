"""A run as a Python object: loaded, exported, shown; ended early by its stop section; followed live."""

import json
import shutil
import sys
import time
import types
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.cli.app import make_app
from fedbraid.data.preprocess import Pipeline
from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.experiment.config import Stop
from fedbraid.experiment.diagnosis.advice import Probe, Settings, advise
from fedbraid.experiment.diagnosis.measurement import Diagnosis
from fedbraid.experiment.judging import why_stopped
from fedbraid.experiment.params import BEST, PARAMS, params_sha256, write_params
from fedbraid.experiment.run import run_config
from fedbraid.experiment.runfolder import finished, read_config, read_metrics, read_summary
from fedbraid.experiment.tensors import named_arrays, read_tensors, tree_of
from fedbraid.metric import Metric
from fedbraid.simulation import Progress
from fedbraid.simulation.bar import progress_bar
from fedbraid.simulation.history import History
from told import told

TINY = ["cohort=2", "model.hidden=[4]", "data.clients=4", "evaluation.every=1", "checkpoint.every=100"]
TINY += ["engine.devices=1"]
ACCURACY = Metric("test_accuracy", "higher")


def config(*settings):
    return load_config(settings=[*TINY, *settings])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A finished run of six rounds and its result in Python."""
    out = tmp_path_factory.mktemp("shared") / "run"
    made = config("rounds=6")
    return made, run_config(made, out), out


# --- loading and exporting -------------------------------------------------------------------------------------------


def test_a_run_is_loaded_with_its_model_and_predicts_as_in_training(shared):
    made, summary, out = shared
    run = fb.load_run(str(out))
    assert params_sha256(run.params) == summary.params_sha256
    assert (run.config, run.summary, run.rounds) == (made, summary, 6)
    assert run.history["train/loss"].shape == (6,)
    np.testing.assert_array_equal(run.evaluations["round"], np.arange(1, 7))
    test = build(made).data.test
    assert test.preprocess is not None  # pixels of 0 to 16 are scaled: predictions need it
    logits = run.predict(test.arrays["x"], batch_size=100)
    right = np.mean(logits.argmax(1) == test.arrays["y"])
    assert right == pytest.approx(summary.final["test_accuracy"], abs=1e-6)
    np.testing.assert_array_equal(run.predict({"x": test.arrays["x"][:3]}), run.predict(test.arrays["x"][:3]))
    with pytest.raises(ConfigError, match=r"shape \(3, 5\).*\(64,\)"):
        run.predict(np.zeros((3, 5)))


def test_the_model_of_a_run_needs_no_data(shared, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the data is loaded")

    monkeypatch.setattr("fedbraid.experiment.assembly.load_data", refuse)
    assert fb.load_run(shared[2]).predict(np.zeros((2, 64), np.uint8)).shape == (2, 10)


def test_the_history_is_a_frame(shared, monkeypatch):
    run = fb.load_run(shared[2])
    frame = run.frame
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(frame["test_loss"], run.history["test_loss"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        run.to_pandas()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    np.testing.assert_array_equal(run.frame["test_loss"], run.history["test_loss"])


def test_a_missing_column_of_a_loaded_run_names_the_nearest_one(shared):
    run = fb.load_run(shared[2])
    with pytest.raises(KeyError, match="no column 'accuracy'; did you mean 'test_accuracy'"):
        run.evaluations["accuracy"]
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        run.history["train/los"]


def test_parameters_are_exported_under_the_names_of_the_tree(shared, tmp_path):
    run = fb.load_run(shared[2])
    want = {f"{i}.{name}": np.asarray(a) for i, layer in enumerate(run.params) for name, a in layer.items()}
    tensors = read_tensors(run.export(tmp_path / "model.safetensors")).arrays
    done = CliRunner().invoke(make_app(), ["export", str(shared[2]), str(tmp_path / "model.npz"), "--json"])
    assert json.loads(done.stdout)["parameters"] == 64 * 4 + 4 + 4 * 10 + 10
    with np.load(tmp_path / "model.npz") as archive:
        for found in (tensors, archive):
            assert set(found) == set(want)
            for name, array in want.items():
                np.testing.assert_array_equal(found[name], array)
    with pytest.raises(ConfigError, match=r"\.safetensors or \.npz"):
        run.export(tmp_path / "model.pt")


def test_parameters_of_another_model_are_refused(shared, tmp_path):
    out = shutil.copytree(shared[2], tmp_path / "run")
    other = [{"w": np.zeros((64, 4), np.float32)}]
    write_params(out / PARAMS, other, round=6)
    with pytest.raises(ConfigError, match="another round than the summary"):
        _ = fb.load_run(out).params
    with pytest.raises(ValueError, match=r"only the model has '0\.b'"):
        tree_of(named_arrays(other), fb.load_run(shared[2]).params)


def test_a_lost_file_of_parameters_is_written_again_by_a_resume(shared, tmp_path):
    out = shutil.copytree(shared[2], tmp_path / "run")
    (out / PARAMS).unlink()
    with pytest.raises(ConfigError, match=r"no params\.safetensors.*--resume"):
        _ = fb.load_run(out).params
    with told("written again"):
        assert finished(out, 6) is None
    run_config(shared[0], out, resume=True)
    assert params_sha256(fb.load_run(out).params) == shared[1].params_sha256


def test_a_stopped_and_a_killed_run_are_loaded(shared, tmp_path):
    """A killed run has no results: its last checkpoint has the parameters and the history."""
    stopped = run_config(shared[0], tmp_path / "run", on_progress=lambda now: now.round >= 3)
    run = fb.load_run(tmp_path / "run")
    assert (run.rounds, run.summary.finished) == (3, False)
    assert params_sha256(run.params) == stopped.params_sha256
    for name in ("summary.json", "metrics.parquet", "clients.parquet", PARAMS):
        (tmp_path / "run" / name).unlink()
    killed = fb.load_run(tmp_path / "run")
    assert params_sha256(killed.params) == stopped.params_sha256
    assert killed.summary is None
    assert "from the last checkpoint" in repr(killed)
    np.testing.assert_array_equal(killed.history["test_loss"], run.history["test_loss"])


# --- ending early ----------------------------------------------------------------------------------------------------


def seen(*values):
    return {"round": np.arange(1, len(values) + 1) * 10, "test_accuracy": np.array(values)}


@pytest.mark.parametrize(
    ("stop", "values", "ends"),
    [
        (Stop(target=0.8, keep=1), (0.5, 0.8), "0.8 after round 20 (target"),
        (Stop(target=0.8, keep=3), (0.9, 0.7, 0.7, 0.9, 0.8, 0.7), "0.9 after round 40 and 0.8 on average to round 60"),
        (Stop(target=0.8, keep=3), (0.7, 0.9, 0.9), None),  # the window that began at the target is not full
        (Stop(target=0.8, keep=2), (0.9, float("nan"), 0.7), None),
        (Stop(patience=2), (0.5, 0.6, 0.6, 0.6), "0.6 after round 20, was 2 evaluations old after round 40"),
        (Stop(patience=2), (0.5, 0.6, 0.6, 0.7), None),
        (Stop(patience=2), (float("nan"), float("nan"), float("nan")), "not finite in 3 evaluations"),
        (Stop(), (0.5, 0.5, 0.5, 0.5), None),
    ],
)
def test_when_a_run_ends(stop, values, ends):
    why = why_stopped(stop, ACCURACY, seen(*values))
    assert (ends in why) if ends else why == ""


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """A run that ended because of its patience, with the best model before the last."""
    out = tmp_path_factory.mktemp("early") / "run"
    made = config("rounds=40", "stop.patience=2", "algorithm.name=fedacg", "algorithm.client_lr=0.3")
    return made, run_config(made, out), out


def test_patience_ends_a_run_and_the_summary_says_why(early):
    _, summary, out = early
    assert summary.finished
    assert summary.rounds < 40
    assert summary.stopped.startswith("no improvement")
    assert summary.best["round"] == summary.rounds - 2
    assert read_summary(out) == summary
    assert finished(out, 40) is not None
    values = read_metrics(out)["test_accuracy"]
    assert summary.best["value"] == values.max() == values[summary.best["round"] - 1]
    done = CliRunner().invoke(make_app(), ["run", "--resume", str(out)])
    assert done.exit_code == 0
    assert "ended early" in done.output
    assert "stop.patience" in done.output


def test_the_best_model_is_kept_beside_the_last(early):
    made, summary, out = early
    run, test = fb.load_run(out), build(made).data.test
    right = {best: np.mean(run.predict(test.arrays["x"], best=best).argmax(1) == test.arrays["y"]) for best in (0, 1)}
    assert right[1] == pytest.approx(summary.best["value"], abs=1e-6)
    assert right[0] == pytest.approx(summary.final["test_accuracy"], abs=1e-6)
    assert right[1] > right[0]
    assert read_tensors(out / BEST).metadata["round"] == str(summary.best["round"])


def test_a_run_that_was_stopped_in_between_ends_in_the_same_round(early, tmp_path):
    """Also if the process died after the last checkpoint, before it wrote results."""
    made, summary, _ = early
    run_config(made, tmp_path / "run", on_progress=lambda now: now.round >= summary.rounds - 1)
    for _ in range(2):
        again = run_config(made, tmp_path / "run", resume=True)
        assert (again.rounds, again.stopped, again.best) == (summary.rounds, summary.stopped, summary.best)
        assert again.params_sha256 == summary.params_sha256
        (tmp_path / "run" / "summary.json").unlink()
    assert read_tensors(tmp_path / "run" / BEST).metadata == read_tensors(early[2] / BEST).metadata


def test_a_run_that_ended_early_trains_on_with_another_stop(early, tmp_path):
    _, summary, out = early
    shutil.copytree(out, tmp_path / "run")
    more = read_config(out, ["stop.patience=100", f"rounds={summary.rounds + 2}"])
    with pytest.raises(ConfigError, match="may only grow"):
        run_config(more, tmp_path / "run", resume=True)
    more = read_config(out, ["stop.patience=3"])
    assert finished(out, 40, more.stop) is None
    longer = run_config(more, tmp_path / "run", resume=True)
    assert longer.rounds > summary.rounds
    assert read_config(tmp_path / "run").stop.patience == 3
    whole = run_config(more.model_copy(update={"rounds": longer.rounds, "stop": Stop()}), tmp_path / "whole")
    assert whole.params_sha256 == longer.params_sha256


def test_a_target_ends_a_run(early, tmp_path):
    reached = run_config(config("rounds=40", "stop.target=2.3", "stop.keep=2", "stop.metric=loss"), tmp_path / "run")
    assert reached.stopped.startswith("the target was reached: test_loss was")
    losses = read_metrics(tmp_path / "run")["test_loss"]
    assert len(losses) < 40
    assert losses[-2] <= 2.3
    assert losses[-2:].mean() <= 2.3


def test_mistakes_in_stop_are_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"stop\.metric: metric 'f1' is not measured; there are.*test_accuracy"):
        run_config(config("stop.metric=f1"), tmp_path / "run")
    for given in ("stop.keep=0", "stop.patience=0", "stop.target=nan", "stop.patience=true"):
        with pytest.raises(ConfigError, match=given.split("=")[0].replace(".", r"\.")):
            config(given)
    without = build(config())
    monkeypatch.setattr("fedbraid.experiment.run.build", lambda made: replace(without, config=made, examples=bare))
    bare = replace(without.data, test=None)
    with pytest.raises(ConfigError, match=r"stop\.target: the data has no test split"):
        run_config(config("stop.target=0.5"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- live trackers ---------------------------------------------------------------------------------------------------


def scalars(folder):
    """{name: [(step, value)]} of the event files in a folder of TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.iterdir()):
        record, at = file.read_bytes(), 0
        while at < len(record):  # a length of 8 bytes, its checksum of 4, the event, its checksum of 4
            length = int.from_bytes(record[at : at + 8], "little")
            if at + 16 + length > len(record):  # an event that is being written
                break
            event = Event.FromString(record[at + 12 : at + 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            at += 16 + length
    return found


def test_numbers_are_in_tensorboard_while_the_run_goes_on_and_after_a_resume(shared, tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: pip install 'fedbraid[track]'")

    class Second(float):
        """A time of one and the same second in names of files: tensorboardX names them by ``str(time.time())[:10]``."""

        def __str__(self):
            return "1700000000.0"

    monkeypatch.setattr("tensorboardX.event_file_writer.time", types.SimpleNamespace(time=lambda: Second(time.time())))
    tracked = config("rounds=6", f'track.to=["tensorboard:{tmp_path}/logs"]')
    during = []

    def look(now):
        deadline = time.monotonic() + 60
        while (seen := len(scalars(tmp_path / "logs" / "run").get("train/loss", ()))) < now.round:
            assert time.monotonic() < deadline, f"{seen} of {now.round} rounds are in the file"
            time.sleep(0.05)
        during.append((now.round, seen))
        return now.round >= 3

    with told(r"go to .*/logs/run; see them with: tensorboard --logdir .*/logs"):
        run_config(tracked, tmp_path / "run", on_progress=look)
    assert during == [(1, 1), (2, 2), (3, 3)]
    with told("go to"):
        run_config(tracked, tmp_path / "run", resume=True)
    found, table = scalars(tmp_path / "logs" / "run"), read_metrics(tmp_path / "run")
    for name in ("train/loss", "test_accuracy"):
        assert [step for step, _ in found[name]] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose([value for _, value in found[name]], table[name], rtol=1e-6)


def test_mlflow_has_one_run_for_a_run_that_was_resumed(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking", reason="needs mlflow-skinny: pip install 'fedbraid[track]'")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracked = config("rounds=4", f'track.to=["mlflow:{tmp_path.as_uri()}/ml"]')
    with told("go to the experiment 'fedbraid'"):
        run_config(tracked, tmp_path / "run", on_progress=lambda now: now.round >= 2)
    with told("go to"):
        run_config(tracked, tmp_path / "run", resume=True)
    client = MlflowClient(tracking_uri=f"{tmp_path.as_uri()}/ml")
    (run,) = client.search_runs([client.get_experiment_by_name("fedbraid").experiment_id])
    assert run.info.status == "FINISHED"
    sent = client.get_metric_history(run.info.run_id, "test_accuracy")
    assert sorted(m.step for m in sent) == [1, 2, 3, 4]


@pytest.fixture
def wandb(monkeypatch):
    """A package with the calls of wandb that are used."""
    calls = types.SimpleNamespace(init=[], log=[], finished=[])

    class Run:
        id, dir, url = "abc", "wandb/offline-run-1/files", "https://wandb.ai/x"

        def log(self, values, step):
            calls.log.append((step, values))

        def finish(self, exit_code):
            calls.finished.append(exit_code)

    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()
    module.init = lambda **options: calls.init.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_is_offline_unless_asked_otherwise(wandb, tmp_path):
    tracked = config("rounds=3", 'track.to=["wandb:mine"]')
    with told("nothing is uploaded until you run: wandb sync wandb/offline-run-1"):
        run_config(tracked, tmp_path / "run", on_progress=lambda now: now.round >= 2)
    online = config("rounds=3", 'track.to=["wandb+online:mine"]')
    with told("go to https"):
        run_config(online, tmp_path / "run", resume=True)
    assert [(one["mode"], one["id"]) for one in wandb.init] == [("offline", None), ("online", None)]
    assert [step for step, _ in wandb.log] == [1, 2, 3]
    assert wandb.log[-1][1]["test_accuracy"] == pytest.approx(read_metrics(tmp_path / "run")["test_accuracy"][-1])
    assert wandb.finished == [0, 0]


def test_a_tracker_that_fails_does_not_end_the_run(shared, wandb, tmp_path, monkeypatch):
    def broken(**options):
        raise OSError("no space left")

    monkeypatch.setattr(sys.modules["wandb"], "init", broken)
    with told(r"wandb:mine: sending failed \(no space left\)\. The run goes on"):
        summary = run_config(config("rounds=6", 'track.to=["wandb:mine"]'), tmp_path / "run")
    assert summary.params_sha256 == shared[1].params_sha256


def test_sinks_that_cannot_be_used_are_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for sink, words in (("comet:x", "tensorboard:FOLDER"), ("wandb:x", "pip install wandb"), ("mlflow:x", "track")):
        with pytest.raises(ConfigError, match=words):
            run_config(config(f'track.to=["{sink}"]'), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_since_a_round_have_their_evaluations():
    history = History.__new__(History)
    history.logs = [{"loss": np.array([1.0])}, {"loss": np.array([2.0, 3.0, 4.0])}]
    history.evaluations = [{"round": 2, "acc": 0.2}, {"round": 4, "acc": 0.4}]
    assert [row["round"] for row in history.since(0)] == [1, 2, 3, 4]
    assert history.since(2) == [{"round": 3, "loss": 3.0}, {"round": 4, "loss": 4.0, "acc": 0.4}]
    assert history.since(4) == []


# --- notebooks -------------------------------------------------------------------------------------------------------


def a_diagnosis():
    from fedbraid.theory.constants import Constants
    from fedbraid.theory.constants import Estimate as E

    names = [
        "L",
        "mu",
        "L_client_max",
        "L_client_mean",
        "mu_client_min",
        "sigma2",
        "G2",
        "B2",
        "zeta",
        "delta",
        "delta_mean",
        "grad_norm2",
        "loss",
    ]
    numbers = (4.0, 0.5, 8.0, 5.0, 0.2, 0.1, 2.0, 5.0, 3.0, 1.0, 0.7, 0.5, 1.0)
    known = {name: E(value) for name, value in zip(names, numbers, strict=True)}
    constants = Constants(**known, clients=10, population=100, batch_size=20)
    settings = Settings("fedavg", 0.3, 5.0, 10, 100, 200)
    probes = (Probe(1, {1.0: 0.1, 2.0: 0.2}), Probe(4, {1.0: 0.3, 2.0: 0.1}))
    return Diagnosis(settings, (5,), (constants,), probes, advise([constants], settings), ("algorithm.client_lr=0.1",))


def test_objects_have_short_reprs_and_pictures(shared):
    experiment, run, found = build(shared[0]), fb.load_run(shared[2]), a_diagnosis()
    algorithm, data = experiment.algorithm, experiment.data
    how = {"rounds": 2, "cohort": 2, "devices": 1, "metrics": experiment.metrics}
    result = fb.simulate(algorithm, experiment.params, data, **how)
    things = [data, data.train, algorithm, result, run, run.summary]
    for thing in [*things, found, found.advice]:
        page = thing._repr_html_()
        assert "<svg" in page or "data:image/png" in page, type(thing)
        assert len(page) < 400_000
    for thing in things:
        assert len(repr(thing)) < 500, repr(thing)
    assert "4 clients, 1,438 examples" in repr(data)
    assert repr(algorithm) == "Algorithm: train"
    assert "test_accuracy" in repr(run)
    assert "--set algorithm.client_lr=0.1" in repr(found)
    assert len(run.plot().axes) == 2


def test_html_escapes_what_comes_from_outside():
    evil = "<script>alert(1)</script>"
    clients = [{"x": np.zeros((2, 1)), "y": np.zeros(2, np.int32)}]
    data = fb.FederatedData(fb.Split.from_clients(clients), name=evil)
    assert evil not in data._repr_html_()
    exchange = build(config()).algorithm.exchanges[0]._replace(name=evil)
    assert evil not in build(config()).algorithm._replace(exchanges=(exchange,))._repr_html_()


def test_reports_and_runs_are_shown_inline(shared, tmp_path, capsys):
    run = fb.run(settings=[*TINY, "rounds=2"], out=tmp_path / "run")
    assert (run.rounds, run.summary.finished) == (2, True)
    assert "round" in capsys.readouterr().err
    shown = fb.report(run, shared[2], title="two runs")
    page = shown._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "two runs" in page
    assert "</html" not in page  # the page is inside an attribute
    assert shown.save(tmp_path / "r.html").read_text() == shown.page


def test_a_comparison_is_shown_inline(tmp_path):
    (tmp_path / "c.toml").write_text(
        "rounds = 2\ncohort = 2\ndata.clients = 4\nmodel.hidden = [4]\nevaluation.every = 1\nengine.devices = 1\n"
        '[compare]\nseeds = 1\ndrift = 0\nbaselines = []\n[[methods]]\nname = "fedavg"\n[[methods]]\nname = "fedprox"\n'
    )
    compared = fb.compare(tmp_path / "c.toml", tmp_path / "out")
    assert set(compared.scores) == {"fedavg", "fedprox"}
    assert "data:image/png" in compared._repr_html_()
    assert "fedprox: 0." in repr(compared)
    with pytest.raises(ConfigError, match="runs of a comparison keep none"):
        _ = fb.load_run(tmp_path / "out" / "fedavg" / "seed-0").params


def test_the_bar_of_a_notebook_needs_no_widgets(shared, monkeypatch):
    """A stand-in of IPython with a kernel: the cell's HTML is replaced."""
    pages = []
    handle = types.SimpleNamespace(update=pages.append)
    display = types.ModuleType("IPython.display")
    display.HTML = lambda text: text
    display.display = lambda page, display_id: pages.append(page) or handle
    ipython = types.ModuleType("IPython")
    ipython.display, ipython.get_ipython = display, lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with progress_bar(10) as show:
        show(Progress(4, {"train/loss": 0.5}, 2.0))
    assert "round 0 of 10" in pages[0]
    assert "round 4 of 10" in pages[1]
    assert "train/loss 0.500" in pages[1]
    experiment = build(shared[0])
    fb.simulate(experiment.algorithm, experiment.params, experiment.data, rounds=2, cohort=2, devices=1, progress=True)
    assert "round 2 of 2" in pages[-1]


def test_preprocessing_without_a_name_is_loaded_with_the_data(shared, tmp_path):
    """A Python function cannot be written to a file: the data is loaded."""
    description = build(shared[0]).description
    own = replace(description, preprocess=lambda batch, key, train: dict(batch))
    write_params(tmp_path / "x.safetensors", {"w": np.ones(1)}, round=1, description=own)
    assert "data" not in read_tensors(tmp_path / "x.safetensors").metadata
    named = replace(description, preprocess=Pipeline.of({"name": "scale"}))
    write_params(tmp_path / "x.safetensors", {"w": np.ones(1)}, round=1, description=named)
    assert "scale" in read_tensors(tmp_path / "x.safetensors").metadata["data"]
