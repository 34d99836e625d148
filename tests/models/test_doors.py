"""The examples of "Bring your model" in docs/models.md run as they stand, where their libraries are installed."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
SECTION = PAGE[PAGE.index("## Bring your model") : PAGE.index("### How fast")]
SHARED, *DOORS = SECTION.split("\n### ")
NEEDED = {"Flax linen": ["flax"], "Flax nnx": ["flax"], "PyTorch": ["torch", "torchax"]}
NEEDED["Hugging Face"] = [*NEEDED["PyTorch"], "transformers"]


def code(text):
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return compile(block, "docs/models.md", "exec")


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.partition("\n")[0])
def test_the_example_trains(door):
    missing = [name for name in NEEDED.get(door.partition("\n")[0], []) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}")
    names = {"__name__": "docs"}
    exec(code(SHARED), names)
    exec(code(door), names)
    losses = names["run"].history["train/loss"]
    assert len(losses) == 2
    assert np.all(np.isfinite(losses))
    assert losses[1] != losses[0]


def test_every_door_of_the_table_has_an_example():
    assert [door.partition("\n")[0] for door in DOORS] == ["Functions", "Equinox", *NEEDED]
    rows = [row for row in SHARED.splitlines() if row.startswith("| a") or row.startswith("| functions")]
    assert len(rows) == len(DOORS)
