"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import fedbraid

MODULES = sorted(
    found.name for found in pkgutil.walk_packages(fedbraid.__path__, "fedbraid.") if not found.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    tried = sum(bool(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name)))
    assert tried > 100
