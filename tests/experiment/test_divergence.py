"""Divergence is said: one line with round, cause and next step, exit status 3, and a notice in the report."""

from __future__ import annotations

import json

import pytest

from fedbraid.cli.run import DIVERGED, command
from fedbraid.experiment.citations import citation
from fedbraid.experiment.collect import collect
from fedbraid.experiment.config import load_config
from fedbraid.experiment.diagnosis import diagnose
from fedbraid.experiment.divergence import divergence
from fedbraid.experiment.run import run_config
from told import told

TINY = ["data.clients=4", "model={name='softmax_regression'}", "cohort=2", "rounds=4", "evaluation.every=2"]
TINY += ["algorithm.name=fedacg"]


@pytest.mark.parametrize("rate", ["1e4", "1e38"])  # a finite loss that explodes, and one that is not finite
def test_a_run_that_diverges_says_so(tmp_path, rate):
    summary = run_config(load_config(settings=[*TINY, f"algorithm.client_lr={rate}"]), tmp_path / "run")
    assert summary.diverged
    assert "diverged at round" in summary.problem
    assert f"try --set algorithm.client_lr=1 (now {float(rate):.3g})" in summary.problem
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["problem"] == summary.problem
    assert any("diverged at round" in notice for notice in collect([tmp_path / "run"]).notices)


def test_a_run_that_learns_says_nothing(tmp_path):
    summary = run_config(load_config(settings=[*TINY, "algorithm.client_lr=0.1"]), tmp_path / "run")
    assert (summary.diverged, summary.problem) == (False, "")


def test_the_command_prints_one_line_and_exits_with_3(tmp_path, capsys):
    settings = [*TINY, "algorithm.name=fedavg", "algorithm.client_lr=1e4"]
    with pytest.raises(SystemExit) as ended:
        command(settings=settings, out=tmp_path / "run")
    assert ended.value.code == DIVERGED == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "diverged" in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: diverged at round 2")


def test_without_a_rate_the_advice_names_none():
    config = load_config(settings=["algorithm={name='fedsplit'}", "cohort='all'"])
    assert "lower the rates" in divergence(config, {}, {"round": [1], "test_loss": [float("nan")]}, ())


@pytest.mark.parametrize("name", ["fedavg", "fedacg"])  # a huge model; uploads that are refused, so the model stays
def test_diagnose_lowers_the_rate_of_a_run_that_diverges(name):
    config = load_config(settings=[*TINY, f"algorithm.name={name}", "algorithm.client_lr=1e5"])
    with told("with algorithm.client_lr = 1e.05.* the run diverges within 2 rounds: .* along a run with"):
        found = diagnose(config, rounds=2, points=2, clients=2, probe_steps=())
    assert found.points[-1].L_client_max.value > 0


def test_methods_cite_their_own_papers():
    assert "McMahan" in citation("algorithm", "fedavg").paper
    assert "2017" in citation("algorithm", "fedavg").paper
    assert "Hsu" in citation("algorithm", "fedavgm").paper
    assert "Konecny" in citation("algorithm", "local_update").paper
