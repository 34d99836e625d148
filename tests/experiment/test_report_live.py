"""Reports of a run that is going on, and the direction of every metric."""

import json
import os
import re
import shutil
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from experiment.report_folders import ROUNDS, a_run
from fedbraid.cli.app import make_app
from fedbraid.experiment import ConfigError, live, load_config, run_config, runfolder
from fedbraid.experiment.assembly import build
from fedbraid.experiment.collect import collect
from fedbraid.experiment.config import parse, read_tree
from fedbraid.experiment.divergence import diverged
from fedbraid.experiment.pagedata import page_data
from fedbraid.experiment.report import write_report
from fedbraid.experiment.summary import RunSummary
from fedbraid.metric import Metric
from fedbraid.simulation import Progress

# --- a run that is going on -------------------------------------------------------------------------------------------


def progress(recorded, *rounds, loss=0.5):
    for at in rounds:
        row = {"train/loss": loss, "train/bytes_down": 10.0, "train/bytes_up": 5.0, "test_accuracy": at / 100}
        recorded(Progress(at, row, 0.1 * at))


@pytest.fixture
def going_on(tmp_path, monkeypatch):
    """The folder of a run, and the function that takes its progress."""
    monkeypatch.setattr(live, "EVERY", 0.0)
    experiment = build(load_config(settings=["rounds=40", "evaluation.every=10", "data.clients=8", "cohort=2"]))
    folder = tmp_path / "run"
    runfolder.create(folder, experiment.config)
    return folder, live.recorder(folder, experiment), experiment


def test_a_run_that_is_going_on_can_be_read(going_on, tmp_path):
    folder, recorded, experiment = going_on
    progress(recorded, 5, 10, 17, 20)
    with pytest.raises(ConfigError, match="incomplete"):
        collect([folder])
    found = collect([folder], live=True)
    (run,) = found.runs
    np.testing.assert_array_equal(run.table["round"], [5, 10, 17, 20])
    np.testing.assert_array_equal(run.table["test_accuracy"], [np.nan, 0.1, np.nan, 0.2])  # rounds that were evaluated
    np.testing.assert_array_equal(run.table["bytes_down"], [50, 100, 170, 200])
    assert run.summary.metrics["test_accuracy"] == "higher"
    assert run.summary.machine["clients"] == 8
    assert found.notices == ["run is at round 20 of 40."]
    write_report(found, tmp_path / "r.html", plots=False, refresh=5)
    assert '<meta http-equiv="refresh" content="5">' in (tmp_path / "r.html").read_text()
    # the run is resumed from the checkpoint of round 12
    progress(live.recorder(folder, experiment), 13, 20)
    again = collect([folder], live=True).runs[0].table
    np.testing.assert_array_equal(again["round"], [5, 10, 13, 20])
    old = time.time() - 1000
    os.utime(folder / live.LIVE, (old, old))
    (notice,) = collect([folder], live=True).notices
    assert re.search(r"nothing for 1000 s\. If it was stopped, continue it with --resume", notice)


def test_rows_of_a_long_run_are_thinned(monkeypatch):
    monkeypatch.setattr(live, "MOST_ROWS", 4)
    rows = [{"round": float(i)} | ({"test_loss": 1.0} if i == 3 else {}) for i in range(6)]
    assert [row["round"] for row in live._thinned(rows)] == [0, 2, 3, 4, 5]


def test_a_finished_run_leaves_no_rows_and_its_page_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "EVERY", 0.0)
    seen = []

    def look(now):
        if (tmp_path / "run" / live.LIVE).is_file():
            seen.append(collect([tmp_path / "run"], live=True).runs[0].summary.rounds)

    settings = ["rounds=4", "evaluation.every=2", "data.clients=4", "cohort=2"]
    run_config(
        parse(read_tree(None, settings) | {"model": {"name": "softmax_regression"}}), tmp_path / "run", on_progress=look
    )
    assert seen
    assert seen[-1] == 4
    assert not (tmp_path / "run" / live.LIVE).exists()
    done = CliRunner().invoke(make_app(), ["report", "--live", str(tmp_path / "run"), "--no-plots", "--json"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "run" / "report.html").read_text()
    assert 'http-equiv="refresh"' not in text
    assert "Client by client" in text


def test_the_command_follows_a_run_to_its_end(going_on, monkeypatch):
    folder, recorded, _ = going_on
    progress(recorded, 10)
    pages, page = [], folder / "report.html"

    def sleep(_):
        pages.append(page.read_text())
        assert len(pages) < 4
        if len(pages) == 1:
            progress(recorded, 20)
        else:  # the run ends
            shutil.copytree(a_run(folder.parent / "done", "data.clients=8"), folder, dirs_exist_ok=True)
            live.forget(folder)

    monkeypatch.setattr(time, "sleep", sleep)
    done = CliRunner().invoke(make_app(), ["report", "--live", str(folder), "--no-plots"])
    assert done.exit_code == 0, done.output
    assert [re.search(r"is at round \d+ of 40", text)[0] for text in pages] == [
        "is at round 10 of 40",
        "is at round 20 of 40",
    ]
    assert "is at round" not in page.read_text()


# --- directions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "values", "best"), [("lower", [0.9, 0.5, 0.1], "slow"), ("higher", [0.1, 0.5, 0.9], "fast")]
)
def test_a_report_reads_the_direction_from_the_folders(own, values, best, tmp_path):
    runs = [a_run(tmp_path / "slow", own=own), a_run(tmp_path / "fast", rate=0.3, own=own)]
    found = collect(runs)
    assert found.metric("test_rank_error") == Metric("test_rank_error", own)
    page = page_data(found)
    assert [one["values"] for one in page["clients"]["test_rank_error"]] == [values, values]  # from worst to best
    assert page["curves"]["test_rank_error"]["better"] == own
    assert page["curves"]["test_rank_error"]["log"] == (own == "lower")
    write_report(found, tmp_path / "r.html", plots=False)
    text = (tmp_path / "r.html").read_text()
    rows = dict(re.findall(r'<tr><th scope="row">(slow|fast)</th>(.*?)</tr>', text)[:2])
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', text)
    marked = {
        name: [i for i, cell in enumerate(re.findall(r"<td[^>]*>(.*?)</td>", row), 1) if "<strong" in cell]
        for name, row in rows.items()
    }
    column = heads.index("rank error")
    assert [name for name, cells in marked.items() if column in cells] == [best]
    assert [name for name, cells in marked.items() if heads.index("loss") in cells] == ["fast"]
    assert [name for name, cells in marked.items() if heads.index("accuracy") in cells] == ["fast"]


def test_runs_that_disagree_on_a_direction_are_told(tmp_path):
    found = collect([a_run(tmp_path / own, own=own) for own in ("lower", "higher")])
    assert any("disagree" in notice and "test_rank_error" in notice for notice in found.notices)


def test_folders_of_older_versions_are_read_by_well_known_names(tmp_path):
    run = a_run(tmp_path / "run")
    place = run / "summary.json"
    old = json.loads(place.read_text())
    del old["metrics"], old["diverged"], old["sha256"]  # older versions wrote none of them
    old["final"]["test_loss_client_p10"] = 3.0
    place.write_text(json.dumps(old))
    found = collect([run])
    assert found.metric("test_loss").lower_is_better
    assert found.runs[0].summary.final["test_loss_client_worst_tenth"] == 3.0
    own = a_run(tmp_path / "own", own="higher")
    place = own / "summary.json"
    old = json.loads(place.read_text())
    del old["metrics"], old["sha256"]
    place.write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=r"own does not say whether higher or lower 'test_rank_error' is better"):
        page_data(collect([own]))


def test_a_summary_is_the_same_from_json_and_says_every_direction(tmp_path):
    summary = runfolder.read_summary(a_run(tmp_path / "run", own="lower"))
    assert RunSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    assert summary.metrics == {
        "test_accuracy": "higher",
        "test_loss": "lower",
        "test_rank_error": "lower",
        "train/loss": "lower",
    }
    assert summary.to_json()["rounds_per_second"] == ROUNDS / 20
    assert summary.bytes == {"down": 500 * ROUNDS, "up": 300 * ROUNDS}
    with pytest.raises(ConfigError, match="incomplete: it has no rounds"):
        RunSummary.from_json({"format": 1, "algorithm": "fedavg", "seconds": 1.0, "finished": True})


def test_a_run_diverged_if_nothing_finite_is_left():
    ok = {"t/refused": np.array([1, 0]), "t/arrived": np.array([1, 2])}
    assert not diverged(ok, {"test_loss": [1.0], "test_loss_client_mean": [np.nan]}, {"w": np.ones(2)})
    lost = ok | {"t/refused": np.array([0, 3]), "t/arrived": np.array([2, 0])}
    assert diverged(lost, {}) == (2, "every upload was refused: none was finite")
    assert diverged(ok, {"round": [5, 10], "test_loss": [1.0, np.inf]}) == (10, "test_loss is not finite")
    assert diverged(ok, {}, {"w": np.array([1.0, np.nan])}) == (2, "the model is not finite")
