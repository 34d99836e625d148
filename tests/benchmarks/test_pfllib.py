"""The comparison with PFLlib: its split is complete, every method of it is built, and its page says what is there."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.data import digits
from fedbraid.models import mlp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("pfllib", ROOT / "benchmarks" / "pfllib.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_split_has_every_digit_once_and_whole_training_batches(bench, tmp_path):
    bench.write_split(tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    train, test = (bench.read_split(tmp_path, part, settings["clients"]) for part in ("train", "test"))
    assert not any(np.asarray(train.sizes) % settings["batch_size"])
    assert min(train.sizes) > 0
    assert min(test.sizes) > 0
    rows = np.concatenate([np.column_stack([s.arrays["x"] * 16, s.arrays["y"]]) for s in (train, test)])
    stored = digits.arrays()
    expected = np.column_stack([stored["x"], stored["y"]])
    assert sorted(map(bytes, rows.round().astype(np.uint8))) == sorted(map(bytes, expected.astype(np.uint8)))


def test_every_compared_method_is_built(bench):
    model = mlp(64, 10, hidden=(100,))
    for name in bench.SETTINGS["methods"]:
        assert isinstance(bench.ours(name, bench.SETTINGS, model), fb.Algorithm)


def test_the_page_counts_the_methods_that_are_here():
    page = (ROOT / "docs" / "pfllib.md").read_text()
    table = page.split("| PFLlib | here |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.count("|") == 3 and "---" not in line]
    for row in rows:
        found = re.findall(r"`(\w+)`", row)
        assert found
        assert set(found) <= set(fb.algorithms.ALGORITHMS)
    assert int(re.search(r"(\d+) of these 40 are here", page).group(1)) == len(rows)  # type: ignore[union-attr]
    missing = re.search(r"Not here: (.*?)\.\n", page, re.DOTALL).group(1).split(",")  # type: ignore[union-attr]
    assert len(rows) + len(missing) == 40
