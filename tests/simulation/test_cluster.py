"""Sweeps by workers: the trials equal those on one machine, and a finished bundle is not run again."""

import json
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.experiment import ConfigError, cluster
from fedbraid.experiment.cluster import Cluster, bundles, run_bundle, sweep_on
from fedbraid.experiment.sweep import TRIALS, load_sweep, run_sweep
from fedbraid.experiment.trials import read_trials

SETTINGS = [
    "algorithm.name=fedavg",
    "rounds=4",
    "model.name=softmax_regression",
    "cohort=4",
    "evaluation.every=2",
    "engine.devices=1",
]
OVER = {"algorithm.client_lr": [0.01, 0.1], "algorithm.epochs": [1, 2]}


def sweep(**changes):
    return load_sweep(None, SETTINGS, {"over": OVER, **changes})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 12))
def test_bundles_are_even_and_cut_few_groups(sizes, workers):
    ids = iter(range(100))
    groups = [[next(ids) for _ in range(size)] for size in sizes]
    dealt = bundles(groups, workers)
    assert sorted(i for part in dealt for i in part) == list(range(sum(sizes)))
    assert len(dealt) == min(workers, sum(sizes))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    programs = sum(bool(set(part) & set(group)) for part in dealt for group in groups)
    assert programs <= len(groups) + len(dealt) - 1


def test_workers_find_what_one_machine_finds_and_repeat_nothing(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    config, tuning = sweep()
    there, out = Cluster("local", 2), tmp_path / "dealt"
    with monkeypatch.context() as patch:  # a launch in which only one worker finishes
        patch.setattr(cluster, "_work", lambda executor, commands, out, news: run_bundle(out, 0))
        with pytest.raises(ConfigError, match=r"1 of 2 bundles did not finish \(1\).*--resume"):
            sweep_on(there, config, tuning, out)
    before = (out / "bundles" / "0.parquet").stat().st_mtime_ns

    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    told = []
    summary = sweep_on(there, config, tuning, out, resume=True, on_news=lambda news: told.append(news.doing))
    assert (out / "bundles" / "0.parquet").stat().st_mtime_ns == before
    assert len(list((out / "jobs").glob("*_submitted.pkl"))) == 1
    assert told[-1].startswith("2 of 2 bundles done")

    alone = run_sweep(config, tuning, tmp_path / "alone")
    assert {**summary, "score": pytest.approx(summary["score"], abs=1e-6)} | {
        name: alone[name] for name in ("seconds", "out")
    } == alone | {"bundles": 2}
    rows, want = ({r["point"]: r for r in read_trials(p / TRIALS)} for p in (out, tmp_path / "alone"))
    assert rows.keys() == want.keys() == {0, 1, 2, 3}
    for i, row in want.items():
        assert rows[i]["score"] == pytest.approx(row["score"], abs=1e-6)
        assert [rows[i][key] for key in OVER] == [row[key] for key in OVER]
    assert json.loads((out / "summary.json").read_text())["bundles"] == 2


@pytest.mark.parametrize(
    ("changes", "there", "word"),
    [
        ({"search": "adaptive", "trials": 4}, Cluster("local", 2), "adaptive"),
        ({"halving": 2}, Cluster("local", 2), "halving"),
        ({}, Cluster("local", 0), "workers must be at least 1, got 0"),
        ({}, Cluster("slurm", 2), "srun"),
        ({}, Cluster("local", 2, {"slurm_partitoin": "gpu"}), "partitoin"),
    ],
)
def test_what_cannot_be_divided_is_refused_and_leaves_nothing(tmp_path, monkeypatch, changes, there, word):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(ConfigError, match=word):
        sweep_on(there, *sweep(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_submitit_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"fedbraid\[cluster\]"):
        sweep_on(Cluster("local", 2), *sweep(), tmp_path / "out")


def test_a_bundle_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a sweep that was divided among workers"):
        run_bundle(tmp_path, 0)
    (tmp_path / "bundles.json").write_text('{"bundles": [[0]]}')
    with pytest.raises(ConfigError, match="from 0 to 0"):
        run_bundle(tmp_path, 1)
