"""Adding an algorithm touches a known list of places; this fails if one was forgotten."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedbraid as fb

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", list(fb.algorithms.ALGORITHMS))
def test_every_algorithm_is_in_the_readme_the_docs_and_the_changelog(name):
    word = f"`{name}`"
    assert word in (ROOT / "README.md").read_text()
    assert any(re.search(rf"(`|## ){name}\b", page.read_text()) for page in (ROOT / "docs" / "algorithms").glob("*.md"))
    assert word in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", list(fb.transforms.TRANSFORMS))
def test_every_transform_is_in_the_docs_and_the_changelog(name):
    word = f"`{name}`"
    assert word in (ROOT / "docs" / "transforms.md").read_text()
    assert word in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_is_documented():
    for name in fb.__all__:
        thing = getattr(fb, name)
        assert callable(thing) or thing.__doc__ or name == "MEAN", name
        if callable(thing):
            assert thing.__doc__, name


def _undocumented(kind: type) -> list[str]:
    """The public methods and properties that a class defines without a docstring."""
    found = []
    for name, member in vars(kind).items():
        function = next((f for at in ("fget", "func", "__func__") if (f := getattr(member, at, None))), member)
        ours = inspect.isfunction(function) and function.__module__.startswith("fedbraid")
        if ours and not name.startswith("_") and not function.__doc__:
            found.append(f"{kind.__module__}.{kind.__name__}.{name}")
    return found


def test_members_of_public_classes_are_documented():
    packages = [
        fb,
        *(importlib.import_module(m.name) for m in pkgutil.walk_packages(fb.__path__, "fedbraid.") if m.ispkg),
    ]
    public = {id(thing): thing for p in packages for name in getattr(p, "__all__", ()) if (thing := getattr(p, name))}
    kinds = [thing for thing in public.values() if inspect.isclass(thing) and thing.__module__.startswith("fedbraid")]
    assert len(kinds) > 50
    assert [name for kind in kinds for name in _undocumented(kind)] == []


def test_importing_fedbraid_is_light():
    """``import fedbraid`` loads no deployment, plotting, checkpoint or data-format library."""
    heavy = ("flwr", "matplotlib", "orbax", "torch", "h5py", "pyarrow", "dp_accounting", "optuna")
    code = f"import sys, fedbraid; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
