"""Which method for what: the page is made from its data, and every federation and method can be built."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from fedbraid import algorithms
from fedbraid.data import catalog

FOLDER = Path(__file__).parents[2] / "benchmarks" / "which_method"


def module(name):
    spec = importlib.util.spec_from_file_location(f"which_method_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def bench():
    return module("__main__")


def test_the_page_is_made_from_its_data(bench):
    found = json.loads(bench.DATA.read_text())
    assert list(found) == list(bench.FEDERATIONS)
    assert bench.PAGE.read_text() == bench.page(found)
    for rows in found.values():
        assert list(rows) == [*bench.GLOBAL, *bench.PERSONAL]
        assert {name for name, row in rows.items() if "personal" in row} == set(bench.PERSONAL)


def test_its_methods_exist(bench):
    assert {*bench.GLOBAL, *bench.PERSONAL} <= set(algorithms.ALGORITHMS)


def test_two_groups_contradict_each_other():
    plain, renamed = catalog.load("digits", partition="iid", clients=20, seed=0), module("federations").groups()
    for one, other in ((plain.train, renamed.train), (plain.test, renamed.test)):
        np.testing.assert_array_equal(one.client(2)["y"], other.client(2)["y"])
        np.testing.assert_array_equal(9 - one.client(3)["y"], other.client(3)["y"])
