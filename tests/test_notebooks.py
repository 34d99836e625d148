"""The notebooks of the documentation: executed, small, as their script writes them, and their cells run."""

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_notebooks", DOCS / "make_notebooks.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_notebook_is_executed_small_and_what_the_script_writes(script):
    text = script.NOTEBOOK.read_text()
    assert len(text) < script.MOST_BYTES
    cells = json.loads(text)["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == script.CELLS
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))  # in order, in one go
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    shown = [json.dumps(output) for output in outputs]
    assert sum("image/png" in one for one in shown) >= 3  # pictures
    assert sum("(local only)" in one and "(pooled data)" in one for one in shown) == 1
    assert sum("<table" in one for one in shown) >= 3  # short tables
    assert "/root/" not in text
    assert "/home/" not in text


def test_its_cells_run_in_order(script, tmp_path, monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    code = "\n".join(text for kind, text in script.CELLS if kind == "code")
    for large, small in (
        ("ROUNDS = 60", "ROUNDS = 10"),
        ("SEEDS = 2", "SEEDS = 1"),
        ("drift = 0", "drift = 0, baselines = []"),
        ('over = {{ client_lr = "logspace(-1, 0.5, 4)" }}', "client_lr = 0.3"),  # nothing is tuned: fewer programs
    ):
        assert large in code
        code = code.replace(large, small)
    names = {"__name__": "notebook"}
    exec(compile(code, "first_steps.ipynb", "exec"), names)
    assert len(names["history"]) == 10
    assert list(names["compared"].scores) == ["FedAvg", "FedAvgM", "SCAFFOLD"]
    assert "<table" in names["compared"]._repr_html_()
    assert len(names["results"]["signs only"].evaluations["round"]) == 2
    assert "predicted [" in capsys.readouterr().out
    plt.close("all")
