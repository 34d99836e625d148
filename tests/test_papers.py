"""docs/papers.md: every name, test and page in it exists, and nothing is left open that exists."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

from fedbraid.algorithms import NAMES
from fedbraid.reproduce import entries

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| item |", "| ---"))
]
PENDING = re.findall(r"<!-- pending: (.*?) -->", PAGE.read_text())  # other work completes these rows


@functools.cache
def functions_of(path):
    nodes = ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def exists(name):
    """Whether a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            functools.reduce(getattr, parts[cut:], found)
        except AttributeError:
            return False
        return True
    return False


def test_names_exist():
    names = set(re.findall(r"`(fedbraid(?:\.\w+)+)`", PAGE.read_text()))
    assert len(names) > 80
    assert sorted(name for name in names if not exists(name)) == []


def test_tests_exist():
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text()))
    assert len(named) > 80
    assert sorted(f"{path}::{name}" for path, name in named if name not in functions_of(path)) == []


def test_pages_exist_and_every_page_is_in_the_table():
    links = set(re.findall(r"\]\(([\w/.-]+\.md)\)", PAGE.read_text()))
    assert sorted(link for link in links if not (PAGE.parent / link).is_file()) == []
    pages = {f"reproductions/{path.stem}.md" for path in (ROOT / "docs" / "reproductions").glob("*.json")}
    assert sorted(pages - links) == []


def test_every_item_says_where_it_is_and_how_it_is_tested():
    for row in ROWS:
        assert len(row) == 5, row
        assert row[2], row
        assert "::" in row[3] or any(f"pending: {name}" in " ".join(row) for name in PENDING), row
        assert "missing" not in " ".join(row)
    not_run = [row[0] for row in ROWS if row[4].startswith("not run")]
    assert all("cannot be had here" in row[4] for row in ROWS if row[4].startswith("not run"))
    assert len(not_run) == 2  # CIFAR-100 and StackOverflow


@pytest.mark.parametrize("name", PENDING or ["none"])
def test_what_exists_is_not_left_open(name):
    """When an algorithm or an entry arrives, its row must name it."""
    assert name not in NAMES.own
    assert name not in entries()
