"""Reports: the page shows the data of the folders, loads nothing from the network, and works in a real browser."""

import html
import json
import os
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from drawn import check_figure, lines, record
from fedbraid import algorithms, transforms
from fedbraid.cli.app import make_app
from fedbraid.experiment import ConfigError, live, load_config, run_config, runfolder
from fedbraid.experiment.assembly import build
from fedbraid.experiment.citations import citation
from fedbraid.experiment.collect import collect
from fedbraid.experiment.config import dump, parse, read_tree
from fedbraid.experiment.differences import config_difference
from fedbraid.experiment.divergence import diverged
from fedbraid.experiment.lab import SweepSettings
from fedbraid.experiment.pagedata import page_data
from fedbraid.experiment.report import _comparison_table, write_report
from fedbraid.experiment.summary import RunSummary, machine_of_run, summarize_run
from fedbraid.experiment.sweep import write_sweep
from fedbraid.experiment.trials import write_trials
from fedbraid.experiment.tuningplot import tuning_plot
from fedbraid.metric import Metric
from fedbraid.simulation import Progress

RATE, SERVER = "algorithm.client_lr", "algorithm.server_lr"
ROUNDS = 40
PLOTTED = []  # the figures that the report of the fixture `page` wrote, each as PNG and as PDF
ARTIFACTS = Path(__file__).parents[2] / "artifacts"


def curve(rate, seed):
    """The columns of a synthetic run, from a formula that the tests use."""
    rounds = np.arange(1, ROUNDS + 1)
    return rounds, 1 - np.exp(-rate * rounds) + 0.01 * seed


def a_run(folder, *settings, seed=0, rate=0.1, finished=True, own=None):
    """A run folder written without a run. ``own``: the direction of its additional metric "rank_error"."""
    config = load_config(settings=[f"rounds={ROUNDS}", f"seed={seed}", f"{RATE}={rate}", *settings])
    folder.mkdir(parents=True)
    (folder / runfolder.CONFIG).write_text(dump(config))
    rounds, accuracy = curve(rate, seed)
    history = {"train/loss": np.exp(-rate * rounds), "train/bytes_down": np.full(ROUNDS, 500.0)}
    history["train/bytes_up"] = np.full(ROUNDS, 300.0)
    evaluations = {"round": rounds[9::10], "test_accuracy": accuracy[9::10], "test_loss": 2 - accuracy[9::10]}
    clients = {"test_accuracy": np.array([0.5, np.nan, 0.9, 0.1])}
    declared = []
    if own is not None:
        declared = [Metric("rank_error", own)]
        evaluations["test_rank_error"] = 1 + accuracy[9::10]
        clients["test_rank_error"] = np.array([0.5, np.nan, 0.9, 0.1])
    table = runfolder.columns(history, evaluations, ROUNDS) | {"seconds": 0.5 * rounds}
    runfolder.write_metrics(folder, table)
    runfolder.write_clients(folder, clients)
    split = {"name": "dirichlet", "alpha": 0.3, "clients": 50}
    about = {"declared": declared, "clients": 50, "partition": split, "finished": finished, "out": str(folder)}
    summary = summarize_run(config, table, evaluations, seconds=20.0, **about)
    runfolder.write_summary(folder, summary)
    return folder


def trial(i, rate, server, score, status="finished", seed=1000):
    own = {"point": i, "seed": seed, RATE: rate, SERVER: server, "status": status, "rounds": 40}
    return own | {"metric": "validation_accuracy", "score": score, "rounds_to_target": None}


TRIALS = [
    trial(0, 0.1, 1.0, 0.5),
    trial(0, 0.1, 1.0, 0.7, seed=1001),
    trial(1, 0.1, 3.0, 0.9),
    trial(2, 1.0, 1.0, 0.8),
    trial(3, 1.0, 3.0, None, "diverged"),
]


def a_sweep(folder):
    folder.mkdir()
    keys = {RATE: [0.1, 1.0], SERVER: [1.0, 3.0]}
    write_sweep(folder / "sweep.toml", load_config(), SweepSettings(over=keys))
    write_trials(folder / "trials.parquet", TRIALS, {"version": "0.1.0"})
    summary = {"kind": "sweep", "algorithm": "fedavg", "keys": list(keys), "best": {RATE: 0.1, SERVER: 3.0}}
    (folder / "summary.json").write_text(json.dumps(summary | {"criterion": "highest validation_accuracy"}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        a_run(root / "slow", seed=0),
        a_run(root / "slow-again", seed=1),
        a_run(root / "fast", "algorithm.name=fedavgm", rate=0.3),
        a_sweep(root / "sweep"),
    ]


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        figures = record(patch)
        written = write_report(collect(folders), out, title="A </script> & <b>title")
    PLOTTED[:] = figures
    return out, written


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


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    binary = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    yield made
    made.quit()


def screen(browser, width, height=900, scheme="light"):
    device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def load(browser, out):
    browser.get(out.as_uri())
    ready = "return document.documentElement.dataset.ready === 'true' && !!document.querySelector('.plot svg')"
    for _ in range(100):
        if browser.execute_async_script(
            f"const done = arguments[0]; requestAnimationFrame(() => done((() => {{{ready}}})()))"
        ):
            return
    raise AssertionError("the plots were not drawn")


def keep_picture(browser, name, scheme="light"):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    width = browser.execute_script("return window.innerWidth")
    screen(browser, width, height, scheme)
    ARTIFACTS.mkdir(exist_ok=True)
    browser.save_screenshot(str(ARTIFACTS / f"report-{name}.png"))


BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


def test_it_loads_without_a_word_and_asks_for_nothing(browser, page):
    screen(browser, 1100)
    browser.get_log("performance")
    load(browser, page[0])
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    shown = browser.execute_script(
        "return [...document.querySelectorAll('section:not([hidden]) h2')].map(h => h.textContent)"
    )
    assert shown == [
        "Results",
        "Curves",
        "Tuning",
        "Client by client",
        "What differs",
        "How they were run",
        "Methods",
        "Run it again",
    ]
    keep_picture(browser, "light")


def test_hovering_shows_the_values(browser, page):
    from selenium.webdriver import ActionChains, Keys

    screen(browser, 1100)
    load(browser, page[0])
    plot = browser.find_element("css selector", "#curves .plot")
    size = plot.size
    ActionChains(browser).move_to_element_with_offset(plot, size["width"] // 2 - 20, 0).perform()
    told = browser.find_element("css selector", "#curves .tip").text
    assert "round 40" in told
    fast, slow = curve(0.3, 0)[1][-1], (curve(0.1, 0)[1][-1] + curve(0.1, 1)[1][-1]) / 2
    assert re.search(rf"fast\s+{fast:.4g}", told)
    assert re.search(rf"slow\s+{slow:.4g}\s+\(", told)  # with its range over the seeds
    assert told.index("fast") < told.index("slow") if fast > slow else told.index("slow") < told.index("fast")
    cell = browser.find_element("css selector", "#tunings .cell")
    ActionChains(browser).move_to_element(cell).perform()
    assert "0.6" in browser.find_element("css selector", "#tunings .tip").text
    assert browser.find_elements("css selector", "#curves .tip") == []  # the pointer has left the plot
    browser.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_RIGHT)
    assert "round 10" in browser.find_element("css selector", "#curves .tip").text  # by arrow keys, without a pointer


def test_toggles_change_what_is_drawn(browser, page):
    screen(browser, 1100)
    load(browser, page[0])

    def lines():
        return browser.execute_script(
            "return [...document.querySelectorAll('#curves .plot .line')].map(l => l.getAttribute('d'))"
        )

    def press(selector):
        browser.find_element("css selector", selector).click()

    first = lines()
    assert len(first) == 2
    press("#curves [data-value='bytes']")
    assert "bytes" in browser.find_element("css selector", "#curves .plot .label").text
    press("#curves [data-value='rounds']")
    assert lines() == first
    press("#curves .legend button:nth-child(2)")
    assert len(lines()) == 1
    press("#curves .legend button:nth-child(2)")
    buttons = {b.text: b for b in browser.find_elements("css selector", "#curves .controls > button")}
    buttons["each seed"].click()
    assert len(lines()) == 3
    buttons["each seed"].click()
    choice = browser.find_element("css selector", "#curves select")
    browser.execute_script("arguments[0].value = 'train/loss'; arguments[0].dispatchEvent(new Event('change'))", choice)
    assert buttons["log scale"].get_attribute("aria-pressed") == "true"
    # exp(-rate t) on a log scale is a straight line
    points = np.array([[float(v) for v in pair.split(",")] for pair in re.split("[ML]", lines()[0])[1:]])
    slopes = np.diff(points[:, 1]) / np.diff(points[:, 0])
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-2)
    assert browser.get_log("browser") == []


def test_a_click_sorts_by_a_column(browser, page):
    screen(browser, 1100)
    load(browser, page[0])
    table = browser.find_element("css selector", "table")

    def order():
        return [th.text for th in table.find_elements("css selector", "tbody th")]

    heads = {th.text: th for th in table.find_elements("css selector", "thead th")}
    heads["accuracy"].click()
    assert order() == ["slow", "fast"]
    assert heads["accuracy"].get_attribute("aria-sort") == "ascending"
    heads["accuracy"].click()
    assert order() == ["fast", "slow"]
    heads["loss"].click()
    assert order() == ["fast", "slow"]
    assert heads["accuracy"].get_attribute("aria-sort") is None


def test_curves_can_be_zoomed_and_smoothed(browser, page):
    from selenium.webdriver import ActionChains

    screen(browser, 1100)
    load(browser, page[0])
    choice = browser.find_element("css selector", "#curves select")
    browser.execute_script("arguments[0].value = 'train/loss'; arguments[0].dispatchEvent(new Event('change'))", choice)

    def ticks():
        found = browser.find_elements("css selector", "#curves .plot text[text-anchor=middle]:not(.label)")
        return [float(tick.text) for tick in found]

    whole = ticks()
    assert whole[-1] == 40
    plot = browser.find_element("css selector", "#curves .plot")
    ActionChains(browser).move_to_element_with_offset(plot, -200, 0).click_and_hold().move_by_offset(
        200, 0
    ).release().perform()
    assert min(ticks()) > 1
    assert max(ticks()) < 25  # a part of the first half
    buttons = {b.text: b for b in browser.find_elements("css selector", "#curves .controls .choices button")}
    buttons["all"].click()
    assert ticks() == whole
    buttons["zoom +"].click()
    assert max(ticks()) < 40
    buttons["zoom −"].click()
    assert ticks() == whole

    def heights():
        paths = browser.execute_script(
            "return [...document.querySelectorAll('#curves .line')].map(l => l.getAttribute('d'))"
        )
        return np.array([float(pair.split(",")[1]) for pair in re.split("[ML]", paths[0])[1:]])

    rough = heights()
    slider = browser.find_element("css selector", "#curves input[type=range]")
    browser.execute_script("arguments[0].value = 0.9; arguments[0].dispatchEvent(new Event('input'))", slider)
    smooth = heights()
    assert len(browser.find_elements("css selector", "#curves .raw")) == 2  # the values themselves stay visible
    assert smooth[0] == pytest.approx(rough[0], abs=0.5)  # no bias towards 0
    assert smooth[-1] < rough[-1]  # the mean of a falling curve lags behind it; y points down
    assert browser.get_log("browser") == []


def test_nothing_is_hidden_on_a_screen_of_1400_pixels(browser, folders, tmp_path):
    wide = a_run(tmp_path / "a run with quite a long name", "algorithm.name=scaffold", rate=0.2, own="lower")
    write_report(collect([*folders, wide]), tmp_path / "r.html", plots=False)
    screen(browser, 1400)
    load(browser, tmp_path / "r.html")
    hidden = "return [...document.querySelectorAll('.frame')].filter(f => f.scrollWidth > f.clientWidth).length"
    assert browser.execute_script(hidden) == 0
    tops = "return ['legend', 'plot'].map(c => document.querySelector(`#curves .${c}`).offsetTop)"
    assert np.diff(browser.execute_script(tops)) > 0
    named = "return [...document.querySelectorAll('#curves .plot .label')].map(t => t.textContent)"
    assert browser.execute_script(named) == ["round (number)", "test accuracy (higher is better)"]
    keep_picture(browser, "wide")


def test_light_and_dark_follow_the_system_and_the_button(browser, page):
    screen(browser, 1100, scheme="dark")
    load(browser, page[0])
    dark = browser.execute_script(BACKGROUND)
    assert sum(map(int, re.findall(r"\d+", dark))) < 120
    keep_picture(browser, "dark", "dark")
    browser.find_element("id", "theme").click()
    light = browser.execute_script(BACKGROUND)
    assert light == "rgb(255, 255, 255)"
    browser.find_element("id", "theme").click()
    assert browser.execute_script(BACKGROUND) == dark


def test_a_phone_can_read_it(browser, page):
    screen(browser, 390)
    load(browser, page[0])
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    small = browser.execute_script(
        "return [...document.querySelectorAll('button, select')].filter(b => b.offsetHeight < 34).length"
    )
    assert small == 0
    keep_picture(browser, "phone")
