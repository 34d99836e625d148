"""The leaderboard: its page says what its data says, every method is listed, and a cell repeats to the same numbers."""

import doctest
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import zoo
from fedbraid.algorithms import ALGORITHMS
from fedbraid.experiment.search import grid, over

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "leaderboard"
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def bench():
    """Imports a module of the leaderboard."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path[:] = before


def test_every_method_for_one_global_model_is_measured_or_left_out_with_a_reason(bench):
    plan = bench("plan")
    listed = {*plan.BY_METHOD, *plan.LEFT_OUT}
    missing = [name for name in ALGORITHMS if name not in listed and zoo.ALGORITHMS[name].make().personal is None]
    assert not missing, "add these to METHODS or LEFT_OUT of benchmarks/leaderboard/plan.py"
    assert not set(plan.BY_METHOD) & set(plan.LEFT_OUT)


def test_all_methods_have_the_same_budget(bench):
    plan = bench("plan")
    for method in plan.METHODS:
        space = {key: over(key, given) for key, given in method.over.items()}
        assert len(grid(space)) == plan.POINTS, method.name


def test_examples_in_docstrings(bench):
    found = doctest.testmod(bench("board"))
    assert found.attempted
    assert not found.failed


def test_ranks_follow_the_direction_of_the_metric(bench):
    ranks = bench("board").ranks
    cells = {"a": {"score": 0.2}, "b": {"score": 0.1}, "c": {"score": None}, "d": {"score": 0.2}, "e": {}}
    assert ranks(cells, "accuracy") == {"a": 1.5, "d": 1.5, "b": 3, "c": 4.5, "e": 4.5}
    assert ranks(cells, "squared_error") == {"b": 1, "a": 2.5, "d": 2.5, "c": 4.5, "e": 4.5}


def test_a_cell_repeats_to_the_numbers_of_compare(bench, tmp_path, monkeypatch):
    """The cell runs in memory; `run_comparison` of the same TOML runs in a folder. Both give the same numbers."""
    plan = bench("plan")
    monkeypatch.setattr(plan, "TEST_SEEDS", 2)
    two_rates = plan.Method("mimelite", {"client_lr": [0.1, 1.0]}, {"base": "momentum"})
    monkeypatch.setitem(plan.BY_METHOD, "mimelite", two_rates)
    bench("prepare").write("breast-cancer", tmp_path, None)
    cell = bench("cell").measure("breast-cancer", "mimelite", tmp_path, rounds=4)
    assert cell["passes"] == 2  # a full gradient and an epoch of steps

    import tomli_w

    from fedbraid.experiment.compare import run_comparison
    from fedbraid.experiment.comparison import load_comparison

    toml = tmp_path / "compare.toml"
    toml.write_text(tomli_w.dumps(plan.comparison_tree("breast-cancer", "mimelite", tmp_path, rounds=4)))
    summary = run_comparison(load_comparison(toml), tmp_path / "out")
    row = summary["methods"][0]
    assert cell["scores"] == [float(f"{score:.6g}") for score in row["scores"]]
    assert cell["best"] == {"client_lr": row["best"]["algorithm.client_lr"]}
    assert cell["worst_tenth"] == float(f"{row['clients']['worst_tenth']:.6g}")
    assert cell["bytes_per_round"] * 4 == row["bytes"]
    assert summary["tuned_on"] == "the data's own validation split, seed 1000"
    board = {"cells": [cell]}
    assert agreement(cell, board) == "the same numbers as published"
    assert "score" in agreement(cell | {"score": 0.0}, board)


def agreement(cell, board):
    spec = importlib.util.spec_from_file_location("leaderboard_main", FOLDER / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.agreement(cell, board)
