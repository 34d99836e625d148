"""The package: one version, type information, and files that name what exists."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import fedbraid

ROOT = Path(__file__).parents[1]


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert importlib.metadata.version("fedbraid") == fedbraid.__version__
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == fedbraid.__version__


def test_type_checkers_of_users_read_our_types():
    assert (Path(fedbraid.__file__).parent / "py.typed").is_file()


def test_workflows_call_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    workflows = list((ROOT / ".github/workflows").glob("*.yml"))
    called = {target for file in workflows for target in re.findall(r"run: make (\S+)", file.read_text())}
    assert called == {"test", "docs", "wheel"}
    for target in called:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_lowest_python_is_that_of_the_workflows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=")
    listed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', (ROOT / ".github/workflows/test.yml").read_text()))
    assert lowest == listed[0]
    assert tested == set(listed)
