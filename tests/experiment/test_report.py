"""Reports: the page shows the data of the folders and loads nothing from the network; trackers get the same numbers."""

import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from drawn import check_figure, lines
from experiment.report_folders import PLOTTED, RATE, ROUNDS, SERVER, a_run, a_sweep, curve, trial
from fedbraid import algorithms, transforms
from fedbraid.cli.app import make_app
from fedbraid.experiment import ConfigError, load_config
from fedbraid.experiment.citations import citation
from fedbraid.experiment.collect import collect
from fedbraid.experiment.differences import config_difference
from fedbraid.experiment.pagedata import page_data
from fedbraid.experiment.report import _comparison_table, write_report
from fedbraid.experiment.summary import RunSummary, machine_of_run
from fedbraid.experiment.tuningplot import tuning_plot


def data_of(out):
    return json.loads(re.search(r'id="data">(.*?)</script>', out.read_text(), re.S)[1])


class Links(HTMLParser):
    """All addresses that a page could load, and whether its elements are closed."""

    def __init__(self):
        super().__init__()
        self.fetched, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_fetches_nothing(page):
    out, written = page
    text = out.read_text()
    links = Links()
    links.feed(text)
    assert links.open == []
    assert links.fetched == ["data:,"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text  # the browser enforces it
    assert written["bytes"] == len(text.encode()) < 200_000


def test_titles_cannot_break_out(page):
    text = page[0].read_text()
    assert "<h1>A &lt;/script&gt; &amp; &lt;b&gt;title</h1>" in text
    assert "</script> & <b>" not in text


def test_curves_on_the_page_are_those_of_the_runs(page):
    curves = data_of(page[0])["curves"]["test_accuracy"]["series"]
    assert [one["label"] for one in curves] == ["slow", "fast"]  # two runs that differ only in their seed are one line
    slow = curves[0]["axes"]
    rounds, zero = curve(0.1, 0)
    one = curve(0.1, 1)[1]
    np.testing.assert_allclose(slow["rounds"]["x"], [10, 20, 30, 40])
    np.testing.assert_allclose(slow["rounds"]["mean"], (zero + one)[9::10] / 2, rtol=1e-5)
    np.testing.assert_allclose(slow["rounds"]["low"], zero[9::10], rtol=1e-5)
    np.testing.assert_allclose(slow["rounds"]["high"], one[9::10], rtol=1e-5)
    np.testing.assert_allclose(slow["bytes"]["x"], 800.0 * rounds[9::10])
    np.testing.assert_allclose(slow["seconds"]["x"], 0.5 * rounds[9::10])
    np.testing.assert_allclose(slow["rounds"]["each"][1][1], one[9::10], rtol=1e-5)
    assert curves[0]["seeds"] == [0, 1]


def test_a_deployed_run_is_beside_the_simulated_one(tmp_path):
    runs = [a_run(tmp_path / name) for name in ("simulated", "deployed")]
    assert list(collect(runs).groups) == ["simulated"]  # the same method twice
    summary = json.loads((runs[1] / "summary.json").read_text())
    summary["engine"] = {"plan": "flower"}
    (runs[1] / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match="does not match its checksum"):
        collect(runs)
    del summary["sha256"]
    (runs[1] / "summary.json").write_text(json.dumps(summary))
    assert list(collect(runs).groups) == ["simulated", "deployed"]


def test_clients_are_sorted_from_worst_to_best_without_the_empty(page):
    clients = data_of(page[0])["clients"]["test_accuracy"]
    assert clients[1] == {"label": "fast", "values": [0.1, 0.5, 0.9]}
    assert clients[0]["values"] == [0.1, 0.1, 0.5, 0.5, 0.9, 0.9]  # both seeds


def test_maps_show_means_over_seeds_and_what_diverged(page):
    tuning = data_of(page[0])["tunings"][0]
    assert (tuning["kind"], tuning["x"], tuning["y"]) == ("map", RATE, SERVER)
    cells = {(tuning["xs"][c["x"]], tuning["ys"][c["y"]]): (c["score"], c["status"]) for c in tuning["cells"]}
    assert cells == {
        (0.1, 1.0): (0.6, "finished"),
        (0.1, 3.0): (0.9, "finished"),
        (1.0, 1.0): (0.8, "finished"),
        (1.0, 3.0): (None, "diverged"),
    }


def test_a_map_of_two_among_three_keys_shows_the_best_over_the_third():
    rows = [
        trial(i, rate, 1.0, score) | {"algorithm.epochs": e}
        for i, (rate, e, score) in enumerate(
            [(0.1, 1, 0.3), (0.1, 2, 0.4), (1.0, 1, 0.6), (1.0, 2, 0.5), (10.0, 1, 0.2), (10.0, 2, None)]
        )
    ]
    rows[-1]["status"] = "diverged"
    plot = tuning_plot(
        [
            row | {SERVER: s}
            for s in (1.0, 3.0, 9.0)
            for row in [
                {**row, "point": row["point"] + 10 * s, "score": row["score"] and row["score"] + s / 100}
                for row in rows
            ]
        ],
        [RATE, SERVER, "algorithm.epochs"],
    )
    best = {(plot["xs"][c["x"]], plot["ys"][c["y"]]): c["score"] for c in plot["cells"]}
    assert best[0.1, 3.0] == pytest.approx(0.43)
    assert best[1.0, 9.0] == pytest.approx(0.69)
    assert best[10.0, 1.0] == pytest.approx(0.21)  # the cell also has a diverged point


def test_configurations_are_told_apart(page):
    rows = config_difference(
        {"a": load_config(settings=["seed=1"]), "b": load_config(settings=[f"{RATE}=0.5", "rounds=7"])}
    )
    assert dict(rows) == {RATE: [None, "0.5"], "rounds": ["200", "7"]}
    text = page[0].read_text()
    assert re.search(r"algorithm\.name</th><td>&quot;fedavg&quot;</td><td>&quot;fedavgm&quot;</td>", text)
    assert "fedbraid run" in text
    assert "--out NEW" in text


def test_every_method_is_cited_with_a_year():
    for name in algorithms.ALGORITHMS:
        cited = citation("algorithm", name)
        assert cited.about
        assert re.search(r"\b(19|20)\d\d\b", cited.paper + cited.about), name
    for name in transforms.TRANSFORMS:
        assert citation("transform", name).about


def test_every_plot_is_there_as_png_and_pdf(page):
    out, written = page
    names = {Path(path).name for path in written["plots"]}
    wanted = {f"{m}-{a}" for m in ("test-accuracy", "test-loss", "train-loss") for a in ("rounds", "bytes", "seconds")}
    wanted |= {"clients-test-accuracy", "tuning-fedavg-sweep"}
    assert names == {f"{name}.{kind}" for name in wanted for kind in ("png", "pdf")}
    assert [line.split()[1] for line in written["told"]] == [Path(path).stem for path in written["plots"][::2]]
    for path in map(Path, written["plots"]):
        assert path.parent == out.parent / "report-plots"
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")
    names = [Path(path).stem for path in written["plots"]]
    plots = dict(zip(names, PLOTTED, strict=True))
    for figure in plots.values():
        check_figure(figure)
    # the PNGs show the same data as the page
    for metric, file in (("test_accuracy", "test-accuracy"), ("train/loss", "train-loss")):
        for one in data_of(out)["curves"][metric]["series"]:
            for axis, line in one["axes"].items():
                (drawn,) = plots[f"{file}-{axis}"].axes
                np.testing.assert_allclose(lines(drawn)[one["label"]], np.c_[line["x"], line["mean"]])
    assert list(lines(plots["clients-test-accuracy"].axes[0])) == ["slow", "fast"]
    assert plots["train-loss-rounds"].axes[0].get_yscale() == "log"
    assert plots["test-accuracy-rounds"].axes[0].get_yscale() == "linear"


def test_long_curves_are_thinned_by_means(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbraid.experiment.pagedata.MOST_POINTS", 10)
    found = collect([a_run(tmp_path / "long")])
    line = page_data(found)["curves"]["train/loss"]["series"][0]["axes"]["rounds"]
    values = np.exp(-0.1 * np.arange(1, ROUNDS + 1)).reshape(10, 4)
    np.testing.assert_allclose(line["mean"], values.mean(1), rtol=1e-5)


def test_every_column_is_explained_and_every_run_says_how_it_was_made(page):
    text = page[0].read_text()
    heads = re.findall(r'<th scope="col" title="([^"]*)">(.*?)</th>', text)
    assert len(heads) == text.count('scope="col"') > 15
    assert all(len(title) > 10 for title, _ in heads), heads
    assert len({title for title, _ in heads}) > 15  # not one sentence for all
    setup = text[text.index("How they were run") :]
    row = re.findall(r"<td[^>]*>(.*?)</td>", re.search(r'<th scope="row">slow</th>(.*?)</tr>', setup)[1])
    machine = machine_of_run()
    assert row[:3] == ["digits", "50", "10"]
    assert row[3] == "dirichlet, alpha 0.3"
    assert row[6][:10] == machine["date"][:10]
    assert machine["hardware"] in html.unescape(row[7])
    assert f"{machine['cores']} cores" in row[7]
    assert f"jax {machine['jax']}" in row[8]
    assert f"fedbraid {RunSummary.version}" in row[8]


def test_a_comparison_sets_baselines_apart_and_marks_the_best_method():
    row = {"best": {RATE: 0.1}, "score": 0.8, "deviation": None, "trials": 5, "trials_diverged": 0, "bytes": 0}
    row |= {"clients": {"worst_tenth": 0.3, "median": 0.5, "worst": 0.1}, "about": "each client alone", "seconds": 3.0}
    own = {"cohort": 10, "bytes_per_client": {"models": 2.0}, "rounds_to_target": 4.0, "bytes_to_target": 5e3}
    summary = {"metric": "test_accuracy", "better": "higher", "target": 0.7, "seeds": [0], "criterion": "highest"}
    summary |= {"protocol": "rounds", "tuned_on": None}
    summary["methods"] = [row | own | {"label": "one"}, row | own | {"label": "two", "score": 0.7}]
    summary["baselines"] = [
        row | {"label": "local only", "everywhere": 0.25},
        row | {"label": "pooled data", "score": 0.9},
    ]
    text = _comparison_table(summary)
    methods, apart = text.split('<tbody class="apart">')
    assert "one" in methods
    assert "local only" not in methods
    assert apart.index("local only") < apart.index("pooled data")
    assert re.findall(r"<strong[^>]*>(.*?)</strong>", text) == [
        "0.8000"
    ]  # the best method, though pooled data is better
    assert "0.2500" in apart  # on the test examples of all clients
    assert "It took 3 s" in apart
    widths = [len(re.findall("<t[dh]", one)) for one in re.findall("<tr>(.*?)</tr>", text)]
    assert len(set(widths)) == 1


# --- bad input -------------------------------------------------------------------------------------------------------


def test_runs_on_different_data_are_told_on_the_page(folders, tmp_path):
    other = a_run(tmp_path / "other", "data.clients=7")
    write_report(collect([folders[0], other]), tmp_path / "r.html", plots=False)
    notice = re.search(r'<ul id="notices">(.*?)</ul>', (tmp_path / "r.html").read_text())[1]
    assert "different data" in notice
    assert "clients: 7" in notice
    assert collect(folders[:3]).notices == []


def test_incomplete_and_foreign_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"not the folder of a run.*config\.toml"):
        collect([tmp_path / "empty"])
    with pytest.raises(ConfigError, match=r"nothing to report"):
        collect([])
    for gone in ("summary.json", "metrics.parquet"):
        folder = a_run(tmp_path / gone)
        (folder / gone).unlink()
        with pytest.raises(ConfigError, match=r"incomplete.*--resume"):
            collect([folder])
    with pytest.raises(ConfigError, match="stopped after round 40"):
        collect([a_run(tmp_path / "stopped", finished=False)])
    older = a_run(tmp_path / "older")
    summary = json.loads((older / "summary.json").read_text())
    del summary["sha256"]
    (older / "summary.json").write_text(json.dumps(summary | {"format": 0, "version": "0.0.1"}))
    with pytest.raises(ConfigError, match=r"format 0.*0\.0\.1"):
        collect([older])
    broken = a_run(tmp_path / "broken")
    (broken / "metrics.parquet").write_bytes(b"PAR")
    with pytest.raises(ConfigError, match=r"cannot read.*metrics\.parquet"):
        collect([broken])
    half = a_sweep(tmp_path / "half")
    (half / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"incomplete.*sweep --resume"):
        collect([half])


def test_the_command_writes_beside_the_first_folder(folders, tmp_path):
    run = shutil.copytree(folders[0], tmp_path / "run")
    done = CliRunner().invoke(make_app(), ["report", str(run), "--no-plots", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["out"] == str(run / "report.html")
    refused = CliRunner().invoke(make_app(), ["report", str(run), "--out", str(tmp_path)])
    assert "is a folder" in str(refused.exception)


# --- elsewhere -------------------------------------------------------------------------------------------------------


def test_runs_go_to_tensorboard(folders, tmp_path):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: pip install 'fedbraid[track]'")
    from tensorboardX.proto.event_pb2 import Event

    from fedbraid.experiment.track import send

    send(collect(folders[:2]).runs, f"tensorboard:{tmp_path}")
    (file,) = (tmp_path / "slow-seed-1").iterdir()
    record, found, at = file.read_bytes(), {}, 0
    while at < len(record):  # a length of 8 bytes, its checksum of 4, the event, its checksum of 4
        length = int.from_bytes(record[at : at + 8], "little")
        for value in Event.FromString(record[at + 12 : at + 12 + length]).summary.value:
            found.setdefault(value.tag, []).append(value.simple_value)
        at += 16 + length
    np.testing.assert_allclose(found["test_accuracy"], curve(0.1, 1)[1][9::10], rtol=1e-6)
    assert len(found["train/loss"]) == ROUNDS


def test_runs_go_to_mlflow(folders, tmp_path, monkeypatch):
    pytest.importorskip("mlflow.tracking", reason="needs mlflow-skinny: pip install 'fedbraid[track]'")
    from mlflow.tracking import MlflowClient

    from fedbraid.experiment.track import send

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    send(collect(folders[:1]).runs, f"mlflow:{tmp_path.as_uri()}")
    client = MlflowClient(tracking_uri=tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("fedbraid").experiment_id])
    assert run.data.params["algorithm.client_lr"] == "0.1"
    history = client.get_metric_history(run.info.run_id, "test_accuracy")
    assert [m.step for m in history] == [10, 20, 30, 40]
    np.testing.assert_allclose([m.value for m in history], curve(0.1, 0)[1][9::10])


def test_other_sinks_are_refused(folders):
    from fedbraid.experiment.track import send

    for sink in ("comet:x", "tensorboard", "mlflow:"):
        with pytest.raises(ConfigError, match="tensorboard:FOLDER or mlflow:URI"):
            send(collect(folders[:1]).runs, sink)
