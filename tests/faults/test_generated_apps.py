"""Hostile names of data sets and fields: the app that `deploy init` writes holds them as data, never as code."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from amount import cases
from typer.testing import CliRunner

import flower.conftest  # noqa: F401  (Flower without telemetry)
from fedbraid.data import from_arrays
from fedbraid.data.store import write_store
from fedbraid.experiment import load_config
from fedbraid.experiment.config import Config
from fedbraid.flower import load_federation, project
from fedbraid.flower.project import write_app

CODE = "__import__('pathlib').Path('MARKER').touch()"
PIECES = ['"', "'", '"""', "'''", "\\", "\\\\", "\n", "\r", "\r\n", "\t", "\x00", "\x1b", "\x7f", "\u2028", "\ufeff"]
PIECES += ["$", "${what}", "$fields", "$$", "{", "}", "{0}", "%s", "#", "=", "[", "]", "[[tool]]", ",", ":", "`"]
PIECES += ["class", "None", "import os", "federation", "..", "/", "//", "C:\\x", " ", "é", "漢字", "\u202e", "\ud800"]
PIECES += [f'"""\n{CODE}\n"""', f"'\n{CODE}\n#", f'"\n[tool.x]\ny = "{CODE}', f"\\N{{DIGIT ONE}}{CODE}", "a" * 300]

STATEMENTS = {  # of the generated files, whatever the names are
    "__init__.py": ["Expr"],
    "client.py": ["Expr", "ImportFrom", "Import", "ImportFrom", "ImportFrom", "Assign", "Assign"]
    + ["FunctionDef"] * 3
    + ["Assign"],
    "server.py": ["Expr", "ImportFrom", "ImportFrom", "Assign"],
}


def hostile_name(rng: np.random.Generator) -> str:
    return "".join(PIECES[rng.integers(len(PIECES))] for _ in range(rng.integers(1, 5)))


def three_clients(extra: str):
    arrays = {"x": np.zeros((9, 4), np.float32), "y": np.arange(9, dtype=np.int32) % 3}
    arrays[extra] = np.zeros((9, 2), np.float32)
    return from_arrays(arrays, clients=3, test_fraction=0.0, info={"classes": 3}, preprocess=None)


def configured(name: str) -> Config:
    config = load_config(None, ["model.hidden=[4]", "cohort=all", "rounds=2"])
    return config.model_copy(update={"data": config.data.model_copy(update={"name": name})})


def check_app(folder: Path, field: str, name: str) -> str:
    """What is wrong with the files of an app; empty if all can be read and hold the names as they are."""
    for place in folder.rglob("*.toml"):
        tomllib.loads(place.read_text(encoding="utf-8"))
    trees = {place.name: ast.parse(place.read_text(encoding="utf-8")) for place in folder.rglob("*.py")}
    if any(
        "MARKER" in ast.dump(node) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)
    ):
        return "a name became code"
    (schema,) = (
        ast.literal_eval(node.value)
        for node in trees["client.py"].body
        if isinstance(node, ast.Assign) and ast.dump(node.targets[0]) == ast.dump(ast.Name("SCHEMA", ast.Store()))
    )
    federation = tomllib.loads((folder / "federation" / "federation.toml").read_text(encoding="utf-8"))
    experiment = tomllib.loads((folder / "federation" / "experiment.toml").read_text(encoding="utf-8"))
    if set(schema) != {"x", "y", field} or set(federation["schema"]) != set(schema):
        return f"other fields: {list(schema)}, {list(federation['schema'])}"
    if experiment["data"]["name"] != name:
        return f"another name: {experiment['data']['name']!r}"
    kinds = {name: [type(node).__name__ for node in tree.body] for name, tree in trees.items()}
    if kinds != STATEMENTS:
        return f"other statements: {kinds}"
    if set(load_federation(folder / "federation").schema) != set(schema):
        return "the app reads other fields"
    return ""


def test_hostile_names_stay_data_or_are_refused(tmp_path, tally, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project, "assemble", lambda config, description: None)  # the model does not matter here
    monkeypatch.setattr(project, "find_parts", lambda config: {})  # nor does it matter that no such data set exists
    written = 0
    for i in range(cases(60, 600)):
        rng = np.random.default_rng([19, i])
        field, name = hostile_name(rng), hostile_name(rng)
        folder, wrong = tmp_path / f"app{i}", ""
        try:
            data = three_clients(field)
            monkeypatch.setattr(project, "load_named", lambda config, data=data: data)
            write_app(folder, configured(name))
            wrong, written = check_app(folder, field, name), written + 1
        except ValueError as error:
            if not str(error) or folder.exists():
                wrong = f"refused after writing, or without a reason: {error!r}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        tally.case(not wrong, f"case {i}, field {field!r}, data {name!r}: {wrong}")
    tally.check()
    assert written > 20
    assert not (tmp_path / "MARKER").exists()


def test_hostile_folders_become_plain_project_names(tmp_path, tally, monkeypatch):
    monkeypatch.setattr(project, "assemble", lambda config, description: None)
    data = three_clients("z")
    monkeypatch.setattr(project, "load_named", lambda config: data)
    for i in range(cases(15, 150)):
        name = hostile_name(np.random.default_rng([20, i])).replace("/", "_")  # one folder, inside tmp_path
        wrong = ""
        try:
            write_app(tmp_path / str(i) / name, configured("digits"))
            (found,) = (tmp_path / str(i)).rglob("pyproject.toml")
            called = tomllib.loads(found.read_text(encoding="utf-8"))["project"]["name"]
            if not called.isascii() or not called.replace("-", "").isalnum() or len(called) > 64:
                wrong = f"called {called!r}"
        except (OSError, ValueError):  # the system cannot have such a folder
            pass
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        tally.case(not wrong, f"{name!r}: {wrong}")
    tally.check()


def test_a_store_with_a_field_that_is_code_is_deployed_as_data_or_refused(tmp_path, monkeypatch):
    """The whole way: a stored data set with a hostile field, `deploy init`, and the generated client is imported."""
    from fedbraid.cli.app import make_app

    monkeypatch.chdir(tmp_path)
    field = f'z"""\n{CODE}\n"""'
    try:
        write_store(tmp_path / "store", three_clients(field))
    except ValueError:
        return  # such a name is refused even earlier
    words = ["deploy", "init", str(tmp_path / "app"), "--set", f"data.name={tmp_path / 'store'}", "--json"]
    words += ["--set", "model.hidden=[4]", "--set", "cohort=all", "--set", "rounds=1"]
    result = CliRunner().invoke(make_app(), words)
    if result.exit_code:
        assert isinstance(result.exception, ValueError), result.output
        assert not (tmp_path / "app").exists()
    else:
        assert json.loads(result.stdout)["population"] == 3
        assert check_app(tmp_path / "app", field, str(tmp_path / "store")) == ""
        exec(compile((tmp_path / "app/federation/__init__.py").read_text(), "init", "exec"), {})
    assert not (tmp_path / "MARKER").exists()


def test_errors_of_the_system_are_one_line(tmp_path):
    from fedbraid.cli.app import make_app

    (tmp_path / "file").write_text("")
    for words in (
        ["deploy", "key", str(tmp_path / "file" / "key")],
        ["deploy", "certificates", str(tmp_path / "file" / "tls"), "--host", "a"],
        ["deploy", "init", str(tmp_path / "file" / "app"), "--set", "data.clients=3"],
        ["deploy", "key", str(tmp_path / ("a" * 5000))],
    ):
        result = CliRunner().invoke(make_app(), words)
        assert isinstance(result.exception, ValueError), (words, result.exception)
        assert "\n" not in str(result.exception)
        assert str(result.exception)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_state_of_a_node_counts_as_lost(damage, tmp_path, caplog):
    from fedbraid.flower.states import FolderStates

    states = FolderStates(tmp_path / "run" / "0")
    states.write("init", {"float32": np.arange(300, dtype=np.float32)})
    states.write("1.0.a", {"float32": np.ones(300, np.float32)})
    place = tmp_path / "run" / "0" / "1.0.a.npz"
    assert place.stat().st_mode & 0o777 == 0o600
    content = place.read_bytes()
    if damage == "flipped":
        place.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    else:
        place.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
        assert states.held() == ["init"]
    with caplog.at_level("WARNING", logger="flwr"):
        assert states.read("1.0.a") is None
    assert states.held() == ["init"]
    assert not place.exists()
    assert states.read("init")["float32"][299] == 299
