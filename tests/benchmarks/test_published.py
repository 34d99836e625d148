"""Published numbers: the tables of docs/benchmarks.md are those of the files, and slower programs are noticed."""

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
OLD = {"cnn": {"seconds": 1.0, "products": 200.0, "commit": "abc1234", "date": "2026-01-01"}}


@pytest.fixture(scope="module")
def published():
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("published")
    sys.path[:] = before


@pytest.mark.parametrize("module", ["published", "record"])
def test_examples_in_docstrings(published, module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed


def test_the_tables_of_the_page_are_made_from_the_files(published):
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert published.page(text) == text, "run: python benchmarks/published.py --page"
    changed = text.replace("| emnist-cnn (W1)", "| emnist-cnn")
    assert changed != text
    assert published.page(changed) == text


def test_the_picture_and_the_ratios_of_the_readme_are_those_of_the_tables(published):
    found = published.read(published.CPU)
    drawn = published.picture(found)
    assert published.PICTURE.read_text(encoding="utf-8") == drawn, "run: python benchmarks/published.py --page"
    for one in found["speed"].values():
        for _, ratio in one.get("peers", {"rows": {}})["rows"].values():
            assert f">{ratio:.2f}</text>" in drawn
    assert published.in_short(found) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_number_has_a_commit_of_this_repository_and_a_date(published):
    numbers = [*published.read(published.CPU)["speed"].values(), *published.read(published.GPU)["rows"].values()]
    for one in numbers:
        assert len(one["date"]) == 10, one
        assert len(one["commit"].rstrip("+")) >= 7, one
    assert set(published.LABELS) == set(published.read(published.CPU)["speed"])


def test_every_row_of_a_gpu_is_in_a_table_and_is_measured_by_a_program(published):
    gpu = importlib.import_module("gpu")
    shown, compared = (
        {*published.GPU_ROWS, *published.LORA_ROWS},
        " ".join(text for _, text in published.GPU_ROWS.values()),
    )
    shown |= set(re.findall(r"\{(.*?)\}", compared))
    programs, others = gpu.published_programs(torch=True), {"users, cnn", "torch, cnn", "sweep, lstm"}
    assert shown - others <= set(programs)
    assert set(published.read(published.GPU)["rows"]) <= shown | set(programs)


def test_a_table_without_numbers_says_so(published):
    nothing = {"rows": {}, "speed": {}}
    for table in ("against_table", "lora_table", "accuracy_table", "fl_simulator_table", "gpu_table", "eager_table"):
        assert getattr(published, table)(nothing) == "Not measured yet."


def test_a_slower_machine_is_no_regression_but_a_slower_program_is(published):
    def now(seconds, rate):
        return {"cnn": {"seconds": seconds, "products": seconds * rate}}

    assert published.regressions(OLD, now(4.0, 50.0)) == []  # a quarter of the speed, in products and in rounds
    assert published.regressions(OLD, now(0.5, 430.0)) == []  # 7.5% slower than its machine: within the limit
    (said,) = published.regressions(OLD, now(0.6, 400.0))  # a faster machine hides a program that is 20% slower
    assert "20% slower" in said
    assert "abc1234 (2026-01-01)" in said
    assert published.regressions(OLD, {"new": {"seconds": 1.0, "products": 1.0}}) == []


def test_check_measures_compares_and_fails(published, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(published, "measured", lambda workloads, extra: {"cnn": {**OLD["cnn"], "products": 230.0}})
    last = tmp_path / "last.json"
    assert published.check(last, ["cnn"], None) == 2  # nothing to compare with is not a success
    assert published.check(last, ["cnn"], tmp_path / "new.json") == 0  # except for a first run that is kept
    last.write_text(json.dumps({"speed": OLD}))
    assert published.check(last, ["cnn"], None) == 1
    assert "15% slower" in capsys.readouterr().out
    (tmp_path / "new.json").rename(last)
    assert published.check(last, ["cnn"], None) == 0


def test_peers_that_were_not_measured_again_keep_their_numbers_and_date(published):
    peers = {"rows": {"FedJAX": [2.0, 2.0]}, "commit": "abc1234", "date": "2026-01-01"}
    old = {"speed": {"cnn": {**OLD["cnn"], "peers": peers}}}
    new = {"cnn": {"seconds": 0.5, "products": 100.0, "commit": "def5678", "date": "2026-02-02"}}
    found = published.merged(old, new, {})["speed"]["cnn"]
    assert found["peers"] == peers
    assert found["commit"] == "def5678"


def test_one_core_beside_eager_pytorch_is_a_part_of_the_same_file(published, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_COMMIT", "def5678")
    place, old = tmp_path / "cpu.json", {"median": 0.1, "share_of_products": 0.5}
    gpt = {"programs": {"fedbraid": old, "torch": {**old, "ratio": 1.1}}, "commit": "abc1234", "date": "2026-01-01"}
    place.write_text(json.dumps({"speed": OLD, "eager": {"gpt": gpt}}))
    published.take_eager({"resnet": {"programs": {"fedbraid": {**old, "median": 0.2}}}}, place)
    found = published.read(place)
    assert found["speed"] == OLD
    assert found["eager"]["gpt"] == gpt  # was not measured
    assert published.merged(found, {}, {})["eager"] == found["eager"]
    lines = published.eager_table(found).splitlines()[2:]
    assert [line.split(" | ")[2:5] for line in lines[:2]] == [["100", "0.50", ""], ["100", "0.50", "1.10"]]
    assert "| 200 |" in lines[2]
    assert "def5678" in lines[2]


def test_rows_of_a_gpu_that_became_slower_are_named(published, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BENCHMARK_COMMIT", "def5678")
    old = {name: {"seconds": 1e-3, "commit": "abc1234", "date": "2026-01-01"} for name in ("lstm", "cnn")}
    report = {
        "device": "GPU",
        "jax": "1",
        "lstm": {"seconds": 1.06e-3},
        "cnn": {"seconds": 1.04e-3},
        "floors": {"a": 1},
    }
    (said,) = published.slower_rows(old, report)
    assert said == "lstm: 1.06 ms, 1.00 at abc1234 (2026-01-01): 6% slower"
    place = tmp_path / "gpu.json"
    assert published.check_gpu(old, report, ["lstm", "cnn"], place) == 1
    assert published.check_gpu(old, report | {"lstm": {"seconds": 1e-3}}, ["lstm", "cnn"], place) == 0
    assert "none of 2 rows is more than 5% slower" in capsys.readouterr().out
    assert published.check_gpu(old, report, ["cnn", "gpt", "torch gpt"], place) == 2  # its program failed
    assert "gpt: not measured" in capsys.readouterr().out
    assert published.check_gpu({}, report, ["cnn"], place) == 2  # nothing to compare with is not a success
    place.write_text(json.dumps({"rows": {"sweep, lstm": old["lstm"]}}))
    published.take_gpu(report, place)
    rows = published.read(place)["rows"]
    assert rows["sweep, lstm"] == old["lstm"]  # was not measured
    assert rows["cnn"]["seconds"] == 1.04e-3
    assert rows["cnn"]["commit"] == "def5678"


def test_a_row_is_compared_with_the_file_before_it_is_written_into_it(published, tmp_path, monkeypatch, capsys):
    gpu, place = importlib.import_module("gpu"), tmp_path / "gpu.json"
    monkeypatch.setenv("BENCHMARK_COMMIT", "def5678")
    old = {"seconds": 1e-3, "commit": "abc1234", "date": "2026-01-01"}
    now = json.dumps({"device": "GPU", "jax": "1", "gpt, bfloat16": {"seconds": 2e-3}})
    monkeypatch.setattr(gpu, "measure_in_turn", lambda programs, **options: [(name, now) for name in programs])
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--published", "--only", "gpt, b", f"--out={place}", f"--check={place}"]
    )
    place.write_text(json.dumps({"rows": {"gpt, bfloat16": old}}))
    assert gpu.main() == 1
    assert "gpt, bfloat16: 2.00 ms, 1.00 at abc1234 (2026-01-01): 100% slower" in capsys.readouterr().out
    assert published.read(place)["rows"]["gpt, bfloat16"]["seconds"] == 2e-3


@pytest.mark.parametrize("script", ["gpu.py", "published.py"])
def test_the_commands_of_the_page_exist(script):
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert "--check" in done.stdout


def test_accuracies_are_kept_with_the_machine_that_computed_them(published, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_COMMIT", "def5678")
    lines, gpu, cpu = tmp_path / "lines", tmp_path / "gpu.json", tmp_path / "cpu.json"
    rows = [
        {"task": "femnist", "precision": how, "seed": seed, "rounds": 9, "device": device, "score": score + seed}
        for device, scores in (("cpu", (60.0, 60.5)), ("NVIDIA H200", (70.0, 69.5)))
        for how, score in zip(("float32", "bfloat16"), scores, strict=True)
        for seed in (0, 1)
    ]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cpu.write_text(json.dumps({"speed": OLD}))
    published.take_runs([lines], gpu, cpu)
    assert published.read(cpu)["speed"] == OLD
    table = published.accuracy_table(published.read(gpu), published.read(cpu)).splitlines()[2:]
    assert [line.split(" | ")[2:7] for line in table] == [
        ["NVIDIA H200", "70.50", "70.00", "-0.50 (0.00)", "2"],
        ["CPU, emulated", "60.50", "61.00", "+0.50 (0.00)", "2"],
    ]
