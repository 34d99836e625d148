"""Every example in the docstrings runs, every public name has one, and closed forms import nothing else."""

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

from fedbraid import theory

MODULES = sorted(found.name for found in pkgutil.walk_packages(theory.__path__, "fedbraid.theory."))
NEED_JAX = "fedbraid.theory.constants"
NEEDS_MATPLOTLIB = "fedbraid.theory.figures"
SHOWN_TOGETHER = {  # shown in the example of the function that returns or takes them
    *("Theta", "Surrogate", "Point", "ServerOptimizer", "Frontier", "SplitPoint", "Regularized", "Assumption"),
    *("LeastSquares", "LinearProblem", "LogisticProblem", "Clients", "Constants", "Estimate"),
}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("package", ["fedbraid.theory", "fedbraid.theory.constants", "fedbraid.problems"])
def test_every_public_function_has_an_example(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing) and name not in SHOWN_TOGETHER:
            assert ">>>" in (thing.__doc__ or ""), name


def imports_of(name):
    """Every module that a module imports, also inside functions."""
    tree = ast.parse(Path(importlib.import_module(name).__file__).read_text())
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return found | {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


@pytest.mark.parametrize("name", MODULES)
def test_theory_stands_alone(name):
    """NumPy, SciPy, random problems, step sizes, colours; jax only for constants, matplotlib only for figures."""
    imported = imports_of(name)
    ours = {m for m in imported if m.startswith("fedbraid")}
    others = {m for m in ours if m != "fedbraid.theory" and not m.startswith("fedbraid.theory.")}
    assert others <= {"fedbraid.problems", "fedbraid.recipes", "fedbraid.drawing"}
    roots = {m.split(".")[0] for m in imported}
    assert not roots & {"equinox", "optax"}
    assert "jax" not in roots or name.startswith(NEED_JAX)
    assert "matplotlib" not in roots or name == NEEDS_MATPLOTLIB


def test_the_generators_of_problems_need_numpy_alone():
    assert {m.split(".")[0] for m in imports_of("fedbraid.problems")} <= {"__future__", "math", "typing", "numpy"}


def test_closed_forms_load_neither_jax_nor_matplotlib():
    """`bounds` names `Constants` in annotations only."""
    for name in MODULES:
        if not name.startswith((NEED_JAX, NEEDS_MATPLOTLIB)):
            tree = ast.parse(Path(importlib.import_module(name).__file__).read_text())
            at_run_time = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
            assert not any(m.startswith((NEED_JAX, NEEDS_MATPLOTLIB)) for m in at_run_time), name
