"""Runs, tuning, comparisons and reports show the clients' own models beside the global one."""

import json
from pathlib import Path

import numpy as np
import pytest

from drawn import legend, lines, record
from fedbraid.experiment import ConfigError, build, load_config, run_config
from fedbraid.experiment.collect import collect
from fedbraid.experiment.compare import run_comparison
from fedbraid.experiment.comparison import load_comparison
from fedbraid.experiment.figures import draw_run
from fedbraid.experiment.judging import metric_of
from fedbraid.experiment.lab import Lab, parse_settings
from fedbraid.experiment.report import write_report
from fedbraid.experiment.runfolder import read_clients, read_metrics
from fedbraid.experiment.trials import read_trials

COMMON = """
rounds = 4
cohort = 4
data = { name = "digits", clients = 6, partition = "dirichlet", alpha = 0.3 }
model = { name = "softmax_regression" }
evaluation = { every = 2 }
"""
PRIVATE = 'transforms = [{ name = "private", leaves = "b" }]\n'
COMPARE = (
    COMMON
    + """
compare = { seeds = 1, last = 4, drift = 0, baselines = [], metric = "accuracy" }
sweep = { validation = 0.25 }
[[methods]]
name = "fedavg"
client_lr = 0.1
[[methods]]
label = "fedper"
name = "fedavg"
over = { client_lr = [0.02, 0.1] }
transforms = [{ name = "private", leaves = "b" }]
"""
)


def written(folder, text):
    path = folder / "given.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    config = load_config(
        written(folder, COMMON + PRIVATE + 'algorithm = { name = "fedavg" }\n[stop]\ntarget = 0.2\nkeep = 1\n')
    )
    return run_config(config, folder / "run")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        figures = record(patch)
        summary = run_comparison(load_comparison(written(folder, COMPARE)), folder / "out")
    return summary, folder / "out", figures


def test_a_run_is_judged_by_the_model_that_clients_use(run):
    assert run.best["metric"] == "test_personal_accuracy"
    assert run.stopped.startswith("the target was reached: test_personal_accuracy")
    assert run.metrics["test_personal_loss"] == "lower"
    clients = read_clients(Path(run.out))
    assert {"test_accuracy", "test_personal_accuracy"} <= set(clients)
    own = np.average(clients["test_personal_accuracy"], weights=clients["examples"])
    assert run.final["test_personal_accuracy"] == pytest.approx(own, abs=1e-6)
    assert run.final["test_personal_accuracy"] > run.final["test_accuracy"]


def test_stop_may_name_either_model(tmp_path):
    for name, full in (("accuracy", "test_accuracy"), ("personal_loss", "test_personal_loss")):
        text = COMMON + PRIVATE + f'algorithm = {{ name = "fedavg" }}\n[stop]\nmetric = "{name}"\n'
        assert metric_of(build(load_config(written(tmp_path, text)))).name == full
    text = COMMON + 'algorithm = { name = "fedavg" }\n[stop]\nmetric = "personal_loss"\n'
    with pytest.raises(ConfigError, match="'personal_loss' is not measured"):
        metric_of(build(load_config(written(tmp_path, text))))


def test_tuning_judges_the_model_that_clients_use(tmp_path):
    settings = parse_settings({"over": {"algorithm.client_lr": [0.1]}, "validation": 0.25})
    for private, metric in ((PRIVATE, "validation_personal_accuracy"), ("", "validation_accuracy")):
        config = load_config(written(tmp_path, COMMON + private + 'algorithm = { name = "fedavg" }\n'))
        assert Lab(config, settings).criterion.metric.name == metric


def test_a_comparison_has_rows_for_both_models(compared):
    summary, out, _ = compared
    plain, own = summary["methods"]
    assert "personal" not in plain
    table = read_metrics(out / "fedper" / "seed-0")
    for row, column in ((own, "test_accuracy"), (own["personal"], "test_personal_accuracy")):
        seen = table[column][np.isfinite(table[column])]
        assert row["score"] == pytest.approx(float(np.mean(seen)))
    assert own["personal"]["clients"]["deviation"] > 0
    assert own["tuned_by"] == "highest validation_personal_accuracy, averaged over the last 4 rounds"
    trials = read_trials(out / "trials.parquet")
    assert {row["metric"] for row in trials} == {"validation_personal_accuracy"}
    assert own["bytes_per_client"]["models"] < plain["bytes_per_client"]["models"]


def test_the_report_shows_both_models(compared, run, tmp_path):
    _, out, figures = compared
    assert legend(figures[-1].axes[0]) == ["fedavg", "fedper", "fedper (personal)"]
    write_report(collect([out]), tmp_path / "compared.html", plots=False)
    page = (tmp_path / "compared.html").read_text()
    heads = [
        page.index(f'<th scope="row">{label}</th>') for label in ("fedavg", "fedper (personal)", "fedper (global)")
    ]
    assert heads == sorted(heads)
    assert "the model that each client uses" in page
    write_report(collect([Path(run.out)]), tmp_path / "run.html", plots=False)
    page = (tmp_path / "run.html").read_text()
    row = page[page.index("(personal)</th>") :].split("</tr>")[0]
    assert f"{run.final['test_personal_accuracy']:.4f}" in row
    assert f"{run.final['test_personal_accuracy_client_deviation']:.4f}" in row
    row = page[page.index("(global)</th>") :].split("</tr>")[0]
    assert f"{run.final['test_accuracy']:.4f}" in row
    data = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    assert {"test_accuracy", "test_personal_accuracy"} <= set(data["curves"]) & set(data["clients"])


def test_the_picture_of_a_run_has_both_models(run):
    table = read_metrics(Path(run.out))
    loss, accuracy = draw_run(table, "own models").axes
    assert "test, personal models" in legend(loss)
    drawn = lines(accuracy)["test, personal models"]
    np.testing.assert_array_equal(drawn[:, 1], table["test_personal_accuracy"][drawn[:, 0].astype(int) - 1])
