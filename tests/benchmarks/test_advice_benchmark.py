"""The rules of benchmarks/advice on hand-made curves, and one federation from data to ratio with tiny settings."""

import doctest
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fedbraid.experiment.config import Stop
from fedbraid.experiment.judging import why_stopped
from fedbraid.metric import Metric

FOLDER = Path(__file__).parents[2] / "benchmarks" / "advice"


@pytest.fixture(scope="module")
def bench():
    """Imports a module of the benchmark."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


def test_a_target_counts_from_the_first_round_of_five_that_keep_it_on_average(bench):
    rounds_to = bench("curves").rounds_to
    assert rounds_to([5, 4, 3, 2, 1, 1, 1, 1, 1, 1], 3) == 3
    assert rounds_to([5, 1, 5, 5, 5, 5, 5, 1, 1, 1, 1, 1], 2) == 8  # one good round is not kept
    assert rounds_to([9, 2, 3, 1, 2, 2, 9], 2) == 2  # 2, 3, 1, 2, 2 are 2 on average, although one of them is not
    assert rounds_to([9, 3, 1, 1, 1, 1, 1, 1], 2) == 3  # round 2 itself is above the target
    assert rounds_to([9, 9, 9, 1, 1, 1, 1], 2) is None  # four rounds are too few to keep it
    assert rounds_to([1, 1, 1, 1, np.inf, 1, 1, 1, 1, 1], 2) == 6


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_is_that_of_stop_in_configurations(bench, seed):
    rng = np.random.default_rng(seed)
    curve = np.exp(-np.arange(60) / 15) + 0.2 * rng.standard_normal(60)
    seen = {"round": np.arange(1, 61), "test_loss": curve}
    why = why_stopped(Stop(target=0.25), Metric("test_loss", "lower"), seen)
    assert f"after round {bench('curves').rounds_to(curve, 0.25)} and" in why


def test_the_target_is_the_first_share_for_which_the_best_needs_twenty_rounds(bench):
    set_target = bench("curves").set_target
    rounds = np.arange(1, 201)
    slow, fast = 2 - np.minimum(rounds / 100, 1), 2 - np.minimum(rounds / 20, 0.875)
    found = set_target(2.0, [slow])  # from 2 to 1; 80% of it after 80 rounds
    assert (found["share"], found["rounds"]) == (0.8, 80)
    assert found["target"] == pytest.approx(1.2)
    found = set_target(2.0, [slow, fast])
    # 80 to 85% of the best improvement (1.0) are reached by the fast one in 16 and 17 rounds, 90% only by the slow one
    assert (found["share"], found["rounds"]) == (0.9, 90)
    assert set_target(2.0, [slow], least=95)["share"] == 0.95
    quick = np.ones(200)  # done after one round: no share takes 20 rounds, and the result says so
    assert set_target(2.0, [quick])["rounds"] == 1


def test_tuning_prefers_a_steady_curve_to_a_lucky_dip(bench):
    curves = bench("curves")
    rounds = np.arange(1, 101)
    steady = 1 - np.minimum(rounds / 50, 1)
    dip = np.full(100, 0.5)
    dip[20:25] = 0.19  # reaches 80% in round 21, and nothing more
    goal = {"start": 1.0, "best": 0.0, "share": 0.85}
    assert curves.rounds_to(dip, 0.2) < curves.rounds_to(steady, 0.2)
    assert curves.effort(dip, goal) == pytest.approx((21 * 200 * 200) ** (1 / 3))
    assert curves.effort(steady, goal) == pytest.approx((40 * 43 * 45) ** (1 / 3))  # 42.5 rounds for 85%


def test_the_examples_in_the_rules_hold(bench):
    assert doctest.testmod(bench("curves")).failed == 0
    assert doctest.testmod(bench("curves")).attempted >= 7


def test_one_diverged_seed_is_not_averaged_away(bench):
    curves = bench("curves")
    curve = curves.mean_curve([[1.0] * 10, [1.0] * 9 + [np.nan]])
    assert np.isinf(curve[-1])
    assert curves.rounds_to(curve, 1.0) == 1
    assert curves.rounds_to(curves.mean_curve([[1.0] * 10, [np.nan] * 10]), 1.0) is None
    assert curves.ratio(None, 20) == curves.ratio(201, 20) == 10
    assert curves.summary([1, 1.2, 2, 4])["within_1.2"] == 0.5


def test_no_target_is_closer_to_the_best_level_than_the_noise_of_the_seeds(bench):
    curves = bench("curves")
    rounds = np.arange(1, 201)
    found = curves.set_target(1.0, [np.maximum(1 - rounds / 10, 0)])  # 98% after 10 rounds, 99.8% after 10
    assert found["share"] <= 0.98
    assert found["rounds"] < curves.LEAST


def test_the_held_out_federations_have_the_kinds_of_models_of_those_for_design(bench):
    federations = bench("federations")
    halves = {half: federations.of_half(half) for half in ("design", "second", "third", "fourth", "held out")}
    assert [len(some) for some in halves.values()] == [16, 12, 12, 11, 14]
    assert set(bench("prepare").MAKERS) == set(federations.BY_NAME)
    kinds = [sorted({federations.BY_NAME[name].model for name in some}) for some in halves.values()]
    assert all(one == kinds[0] for one in kinds)


def test_the_page_does_not_count_federations_that_are_too_easy(bench):
    page = bench("page")

    def results(rounds, ratio):
        advice = {"ratio": ratio, "client_work": 5.0, "advice_seconds": 9.0, "advice_cpu_seconds": 1.0}
        return {
            "best": {"rounds": rounds, "method": "fedavg", "values": {}},
            "target": {"share": 0.8},
            "tuning": {"fedavg": {"client_work": 50.0, "seconds": 9.0, "cpu_seconds": 4.0}},
            "candidates": {"advice": advice, "defaults: fedavg": {"ratio": 3.0}, "self: fedauto_ahead": {"ratio": 0.5}},
        }

    found = {"crime": results(20, 1.0), "fares": results(3, 10.0)}
    words = page._in_short(found)
    assert "within 1.2x on 1 of 1" in words
    assert "10% to 10% of the client work" in words
    assert "25% to 25% of its seconds" in words
    assert "`fedauto_ahead`, without any tuning: within 1.2x on 1 of 1" in words
    assert "worse than the default method on crime." in words  # 1.0 against 0.5; fares does not count
    assert "from FedAvg" not in words
    found["crime"]["candidates"]["advice, from FedAvg"] = {"ratio": 2.5}
    words = page._in_short(found)
    assert "within 2x on 0 of 1, geometric mean 2.50. It is worse than FedAvg's defaults on none." in words
    found["crime"]["pairs"] = [{"sweep": 8.0, "advice": 1.0}, {"sweep": 12.0, "advice": 3.0}]  # they count instead
    assert "20% to 20% of its seconds" in page._in_short(found)
    assert "| crime | 50 | 5 (10%) | 10.0 | 2.0 (20%) |" in page._cost_table(found)
    assert "| fares | 50 | 5 (10%) | 4.0 | 1.0 (25%) |" in page._cost_table(found)
    table = page._main_table(found)
    assert "| fares (too easy) |" in table
    assert "**1.00**" in table


def test_seconds_are_those_of_new_processes(bench, tmp_path, monkeypatch):
    seconds = bench("seconds")
    assert seconds._alone(os.getpid) != os.getpid()
    monkeypatch.setattr(seconds, "_alone", lambda function, *given: function(*given))
    monkeypatch.setattr(seconds, "sweep_seconds", lambda name, data: 8.0)
    (tmp_path / "advising_by_hand.py").write_text("asked = []\nadvise = asked.append\n")
    monkeypatch.syspath_prepend(tmp_path)
    bench("prepare").write("skewed-squares", tmp_path, None)
    (found,) = seconds.pairs("skewed-squares", tmp_path, "advising_by_hand:advise", 1)
    assert found["sweep"] == 8
    assert 0 <= found["advice"] < 1
    assert importlib.import_module("advising_by_hand").asked[0]["algorithm"]["name"] == "fedavg"


def test_a_configuration_without_a_method_is_advised_from_the_default_one(bench, monkeypatch):
    library = bench("library_advice")
    monkeypatch.setattr(library, "advise", lambda tree: tree)
    asked = library.advise_unnamed({"rounds": 7, "algorithm": {"name": "fedavg", "epochs": 2}})
    assert asked == {"rounds": 7, "algorithm": {"name": "fedauto_ahead", "epochs": 2}}


def test_a_federation_from_data_to_table(bench, tmp_path, monkeypatch):
    measure = bench("measure")
    monkeypatch.setattr(measure, "REFERENCES", {"fedavg": {"client_lr": (0.01, 0.03, 0.1)}})
    monkeypatch.setattr(measure, "TEST_SEEDS", (1, 2))
    bench("prepare").write("skewed-squares", tmp_path, None)
    data = bench("federations").load(which="skewed-squares", folder=str(tmp_path))
    rows = [split.num_examples for split in (data.train, data.validation, data.test)]
    assert rows == [960, 320, 320]
    every = np.concatenate([split.arrays["y"] for split in (data.train, data.validation, data.test)])
    assert len(np.unique(every)) == 1600  # no row is in two splits

    lab = measure.Lab("skewed-squares", tmp_path, tmp_path, rounds=30)
    lab.reference()
    best = lab.results["best"]
    found = lab.score("same", "fedavg", best["values"])
    assert found["rounds"] == best["rounds"]
    assert found["ratio"] == 1
    assert lab.score("idle", "fedavg", {"client_lr": 1e-6})["ratio"] == 10
    assert measure.Lab("skewed-squares", tmp_path, tmp_path).results == json.loads(lab.path.read_text())
    assert bench("page").tables(["skewed-squares"], tmp_path, tmp_path / "page.md") is None
    page = (tmp_path / "page.md").read_text()
    assert "| skewed-squares (too easy) | strong heterogeneity" in page

    assert bench("page").pack(["skewed-squares"], tmp_path, tmp_path / "figures.json") is None
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "points" not in figures["skewed-squares"]["tuning"]["fedavg"]
    figures["exam"] = figures.pop("skewed-squares")
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    none, packed = tmp_path / "none", tmp_path / "figures.json"
    assert bench("page").tables(["exam"], none, tmp_path / "page.md", packed) is None
    again = (tmp_path / "page.md").read_text()
    assert "| exam (too easy) |" in again
    design = [
        text[text.index("## The federations for design") : text.index("## Run it again")] for text in (page, again)
    ]
    assert design[0].split("## Which constants")[0].strip() in design[1]  # its section stays as it was
