"""Every example in the docstrings runs, every public name has one, and closed forms stand alone."""

import ast
import doctest
import importlib
import inspect

import pytest

from fedbraid import theory

MODULES = ["quadratics", "surrogate", "frontier", "splitting", "bounds", "figures", "constants", "diagnose"]
SHOWN_TOGETHER = {"Theta", "Surrogate", "Point", "ServerOptimizer", "Frontier", "SplitPoint", "Regularized"}
DRAWN = {f"figure_{i}" for i in (1, 2, 3, 4, 5, 7, 8, 9, 10)}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"fedbraid.theory.{name}")
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


def test_every_public_function_has_an_example():
    for name in theory.__all__:
        thing = getattr(theory, name)
        if callable(thing) and name not in SHOWN_TOGETHER | {"Assumption", "LeastSquares"}:
            assert ">>>" in (thing.__doc__ or ""), name


@pytest.mark.parametrize("name", ["quadratics", "surrogate", "frontier", "splitting", "bounds"])
def test_closed_forms_stand_alone(name):
    """NumPy, SciPy and the data container: not the simulator, not jax, not a plotting library."""
    module = importlib.import_module(f"fedbraid.theory.{name}")
    tree = ast.parse(inspect.getsource(module))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {m for m in imported if m.startswith("fedbraid")}
    assert all(m.startswith("fedbraid.theory.") or m == "fedbraid.data.federated" for m in ours)
    assert not {m.split(".")[0] for m in imported} & {"jax", "matplotlib", "equinox", "optax"}
