"""Rooms of the package import only the rooms that the table in docs/architecture.md allows.

A room is a sub-package or a single module directly under src/fedbraid. Imports inside functions also count.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fedbraid

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fedbraid"


def _load(path: Path):
    spec = importlib.util.spec_from_file_location("architecture", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = _load(ROOT / "docs" / "architecture.py")  # reads the table, draws the picture
ALLOWED: dict[str, set[str]] = page.allowed(page.PAGE.read_text())


class Edge(NamedTuple):
    """One import of another room."""

    room: str
    target: str
    where: str  # file:line


def rooms_of(source: Path) -> set[str]:
    """The rooms of a package: ``fedbraid`` stands for its ``__init__.py``; ``__main__`` belongs to ``cli``."""
    inside = {path.stem for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return inside - {"__init__", "__main__"} | {"fedbraid"}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file; ``package`` is the base of relative imports."""
    roots = {"fedbraid"}  # names bound to the package itself
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.asname or alias.name for alias in node.names if alias.name == "fedbraid"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in roots:
            yield node.lineno, f"fedbraid.{node.attr}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"fedbraid(\.\w+)+\.?", str(node.value)):
            yield node.lineno, str(node.value)  # for importlib.import_module; also the beginning of an f-string


def edges_of(source: Path) -> list[Edge]:
    """Every import between rooms of the package in the folder ``source``."""
    rooms, found = rooms_of(source), []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        room = {"__init__": "fedbraid", "__main__": "cli"}.get(parts[0], parts[0])
        package = ".".join(["fedbraid", *parts[:-1]])
        for line, name in imported(ast.parse(path.read_text()), package):
            first, _, rest = name.partition(".")
            if first != "fedbraid":
                continue
            target = rest.partition(".")[0]
            target = target if target in rooms else "fedbraid"
            if target != room:
                found.append(Edge(room, target, f"{path.relative_to(source)}:{line}"))
    return found


def forbidden(edges: list[Edge], allowed: dict[str, set[str]]) -> list[str]:
    """The imports that the table does not allow, in words."""
    return [f"{e.where}: {e.room} imports {e.target}" for e in edges if e.target not in allowed.get(e.room, ())]


def cycle(edges: list[Edge]) -> list[str]:
    """A cycle of rooms that import each other; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for edge in edges:
        graph.setdefault(edge.room, set()).add(edge.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_room_has_its_line_in_the_table():
    assert rooms_of(SOURCE) == set(ALLOWED)


def test_rooms_import_what_the_table_allows():
    assert not forbidden(edges_of(SOURCE), ALLOWED)


def test_no_rooms_import_each_other_in_a_circle():
    assert not cycle(edges_of(SOURCE))
    assert not cycle([Edge(room, target, "") for room, targets in ALLOWED.items() for target in targets])


def test_the_picture_is_drawn_from_the_table():
    """After a change of the table: ``python docs/architecture.py``."""
    assert page.PICTURE.read_text() == page.draw(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "import fedbraid.cli.app",
        "from fedbraid.cli import app",
        "from fedbraid import cli",
        "from .cli import app",
        "from . import cli",
        "def f():\n    from fedbraid.cli.app import make_app",
        "if TYPE_CHECKING:\n    from fedbraid.cli.app import make_app",
        "import fedbraid as fb\nfb.cli.main()",
        "importlib.import_module('fedbraid.cli.app')",
        "importlib.import_module(f'fedbraid.cli.{name}')",
    ],
)
def test_a_forbidden_import_is_found_in_any_form(tmp_path, text):
    """A test package in which ``core``, which may import no room, imports ``cli``."""
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("from fedbraid.core import Algorithm\n")
    (tmp_path / "cli" / "app.py").write_text("")
    (tmp_path / "core.py").write_text("import numpy\n")
    assert not forbidden(edges_of(tmp_path), ALLOWED)
    (tmp_path / "core.py").write_text(text)
    edges = edges_of(tmp_path)
    assert any(line.startswith("core.py") and line.endswith("core imports cli") for line in forbidden(edges, ALLOWED))
    assert {"cli", "core"} <= set(cycle(edges))


def test_no_module_is_hidden_by_another_thing_of_its_name():
    """``import fedbraid.a.b as x`` and ``fedbraid.a.b`` are the module, for every module of the package."""
    for found in pkgutil.walk_packages(fedbraid.__path__, "fedbraid."):
        if found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        parent, _, name = found.name.rpartition(".")
        assert getattr(importlib.import_module(parent), name) is module, f"{found.name} is hidden"


def test_import_needs_no_fcntl():
    """``fcntl`` exists on Unix only."""
    code = "import sys; sys.modules['fcntl'] = None; import fedbraid"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


UNIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
UNIX_NAMES = {  # not on Windows; sched_getaffinity not on macOS
    "os": (
        "fork",
        "getpgid",
        "geteuid",
        "getuid",
        "killpg",
        "O_DIRECTORY",
        "O_NOFOLLOW",
        "sched_getaffinity",
        "sysconf",
    ),
    "signal": ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "setitimer"),
}


def unix_only_at_import(tree: ast.AST) -> list[str]:
    """Names that exist on Unix only and that a module uses when it is imported, that is outside of functions."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name in UNIX_MODULES]
        elif isinstance(node, ast.ImportFrom):
            imported = UNIX_NAMES.get(node.module or "", ())
            found += [node.module] if node.module in UNIX_MODULES else []
            found += [f"{node.module}.{name.name}" for name in node.names if name.name in imported]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found += [name] if name in {f"{m}.{n}" for m, names in UNIX_NAMES.items() for n in names} else []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            signature = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
            signature += getattr(node, "decorator_list", [])
            for part in signature:  # evaluated at import; the body is not
                found += unix_only_at_import(ast.Expression(part))
        else:
            found += unix_only_at_import(node)
    return found


def test_no_module_needs_unix_when_it_is_imported():
    text = (
        "import os, signal\ntry:\n    import resource\nfinally:\n    END = signal.SIGKILL\ndef f(a=os.fork): os.killpg"
    )
    assert unix_only_at_import(ast.parse(text)) == ["resource", "signal.SIGKILL", "os.fork"]
    for path in sorted(SOURCE.rglob("*.py")):
        assert not unix_only_at_import(ast.parse(path.read_text(encoding="utf-8"))), path
