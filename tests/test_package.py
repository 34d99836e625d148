"""The package: one version, type information, and files that name what exists."""

import importlib.metadata
import re
import subprocess
import sys
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
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    called = set()
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        text = file.read_text()
        named = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", r"matrix.\1", text)
        for target in re.findall(r"run: make (\S+)", named):
            key = target.removeprefix("matrix.")
            called |= {target} if key == target else set(re.findall(rf"\b{key}: (\w+)", text))
    assert called >= {"test", "docs", "wheel", "lowest", "newest"}
    assert called <= targets


def test_the_core_works_without_the_heavy_packages_of_commands_and_files():
    """Simulation and tuning need jax, numpy and optax. Tables, checkpoints, pictures and the commands need more."""
    code = """
import sys
for name in ("cryptography", "equinox", "flwr", "matplotlib", "orbax", "pandas", "pyarrow", "rich", "torch", "typer"):
    sys.modules[name] = None
import numpy as np
import fedbraid as fb
import fedbraid.experiment.tuning
data = fb.Split.from_clients([{"x": np.full((2, 1), i, np.float32)} for i in range(3)])
loss = lambda params, batch, key: ((params - batch["x"]) ** 2 * batch["mask"][:, None]).sum()
print(float(fb.simulate(fb.fedavg(loss, client_lr=0.1), np.zeros(1, np.float32), data, rounds=50, cohort=3).params[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - 1.0) < 1e-3  # the mean of 0, 1 and 2


def test_the_lowest_python_is_that_of_the_workflows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=")
    listed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    tested = set(re.findall(r'python(?:-version)?: "(3\.\d+)"', (ROOT / ".github/workflows/test.yml").read_text()))
    assert lowest == listed[0]
    assert tested == set(listed)
