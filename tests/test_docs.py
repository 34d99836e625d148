"""The documentation: its code runs or parses, its links lead somewhere, and the reference pages are complete."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import click
import pytest
import yaml
from sitebuild import DOCS, EXECUTED, ROOT, blocks, configuration, gallery, stage
from sitebuild.api import INTERNAL, api_pages, packages, public_names
from sitebuild.commands import application, commands_page, help_of, walk
from sitebuild.docstrings import to_markdown
from sitebuild.execute import run_page
from sitebuild.links import PROJECT, anchors_of, is_external, links_of, place, resolve
from sitebuild.notebook import notebook_page

from fedbraid.experiment.comparison import load_comparison
from fedbraid.experiment.config import Config, ConfigError, load_config, parse
from fedbraid.experiment.lab import parse_settings
from fedbraid.flower import Policy
from fedbraid.reproduce import entries
from fedbraid.reproduce.see import SEE
from told import collecting

PAGES = [ROOT / "README.md", *(ROOT / name for name in PROJECT), *stage.sources()]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TUTORIALS = [p for p in stage.sources() if p.parent.name in EXECUTED and list(blocks.blocks_of(p.read_text()))]
# other packages that examples import, and that need not be installed here
OTHERS = {"torch", "flax", "transformers", "fedjax", "ourdata", "fedexp_method"}
# top-level keys of TOML blocks that are no configurations of fedbraid, and what they configure
OTHER_TOML = {"superlink": "Flower's connections", "project": "a pyproject.toml", "fedbraid": "entry points"}
FEDERATION_TOML = {"policy", "secure", "evaluate", "evaluate_clients", "checkpoint_every"}
# what makes tutorials quick enough to run in every test; the build of the site runs them as they stand
SMALLER = {
    "README": {},
    "first-run": {"rounds=40": "rounds=3", "rounds = 40": "rounds = 5"},
    "own-csv": {"rounds=60": "rounds=3"},
    "write-an-algorithm": {
        "rounds = 40": "rounds = 3",
        "rounds=40": "rounds=3",
        'skip=["deployed", "resume"]': 'skip=[law for law in fb.testing.LAWS if law not in ("structure", "sign")]',
    },
    "compare": {
        "rounds = 40": "rounds = 5",
        "last = 20": "last = 2",
        "drift = 0": "drift = 0\nbaselines = []",
        "seeds = 2": "seeds = 1",
        'over = { client_lr = "logspace(-1.5, 0.5, 5)" }': "client_lr = 0.3",  # nothing is tuned: fewer programs
    },
    "theory": {"steps[::2]": "steps[:1]"},
    "deploy": {"rounds = 2\n": "rounds = 1\n"},
}
SHORTER = {"rounds=40": "rounds=3"}


@cache
def text_of(page: Path) -> str:
    return page.read_text()


def all_blocks(*languages):
    for page in PAGES:
        for block in blocks.blocks_of(text_of(page)):
            if block.language in languages:
                yield page, block


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_tutorials_run(page, tmp_path):
    smaller = SMALLER[page.stem] if page.parent.name == "learn" else SHORTER
    with collecting():  # few rounds: that state is hardly used is said
        done = run_page(page, tmp_path, building=False, smaller=smaller)
    assert all("Traceback" not in one.printed for one in done)
    made = [found["file"] for found in blocks.PICTURE.finditer(text_of(page))]
    assert [name for name in made if not (tmp_path / name).is_file()] == []
    if page.parent.name == "coming-from" and page.stem != "README":
        ours = "".join(one.printed for one in done)
        assert re.search(r"0\.\d+", ours)  # an accuracy


def test_every_learning_page_runs_something_and_has_the_four_parts():
    for page in TUTORIALS:
        if page.parent.name == "learn" and page.stem != "README":
            text = text_of(page)
            parts = ["**What it is.**", "**When to use it.**", "## What can go wrong"]
            places = [text.find(part) for part in parts]
            assert -1 not in places, (page, parts)
            assert places == sorted(places), page
            assert any(block.when == "always" for block in blocks.blocks_of(text)), page


def test_blocks_that_do_not_run_say_why():
    for page in TUTORIALS:
        for block in blocks.blocks_of(text_of(page)):
            assert block.when == "always" or len(block.reason) > 5, f"{page}:{block.line}"


def test_every_picture_of_a_tutorial_is_explained():
    for page in TUTORIALS:
        text = text_of(page)
        pictures = len(blocks.PICTURE.findall(text)) + text.count("plt.subplots(")
        assert text.count("*What to see: ") == pictures, page


# Python


def test_python_parses_and_its_imports_exist():
    checked = 0
    for page, block in all_blocks("python"):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.code.startswith(">>> "):
            _run_doctest(block.code, where)
            continue
        tree = ast.parse(block.code, where)
        for node in ast.walk(tree):
            checked += _check_import(node, where)
            checked += _check_attribute(node, where)
    assert checked > 150


def _run_doctest(code, where):
    example = doctest.DocTestParser().get_doctest(code, {}, where, where, 0)
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0, where


def _check_import(node, where):
    if isinstance(node, ast.Import):
        wanted = [(alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        wanted = [(node.module, alias.name) for alias in node.names]
    else:
        return 0
    for module, name in wanted:
        top = module.split(".")[0]
        if top in OTHERS and importlib.util.find_spec(top) is None:
            continue
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            assert importlib.util.find_spec(f"{module}.{name}"), f"{where}: {module} has no {name}"
    return len(wanted)


def _check_attribute(node, where):
    """``fb.X`` and ``fedbraid.X`` exist."""
    if not (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("fb", "fedbraid")
    ):
        return 0
    found = hasattr(importlib.import_module("fedbraid"), node.attr)
    assert found or importlib.util.find_spec(f"fedbraid.{node.attr}"), f"{where}: fedbraid.{node.attr}"
    return 1


# commands


def _words_of(text):
    """Commands in shell blocks, in blocks without a language that begin with a prompt, and in inline code."""
    for block in blocks.blocks_of(text):
        if block.language in ("sh", "console"):
            yield from blocks.commands_of(block.code)
        elif not block.language:
            prompts = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
            yield from blocks.commands_of("\n".join(prompts))
    for code in re.findall(r"`(fedbraid [a-z][^`\n]*)`", blocks.FENCE.sub("", text)):
        if not re.search(r"\.\.\.|\bNAME\b|\|", code):
            yield from ([*words, *_missing_value(words)] for words in blocks.commands_of(code))


def _missing_value(words):
    """Text names an option without its value: ``fedbraid diagnose --verify``."""
    return ["1"] if words[1] == "diagnose" and words[-1] == "--verify" else []


def _parse(words):
    """Parse a command with the command line's own parser; files need not exist."""
    command, path = application(), ["fedbraid"]
    arguments = list(words[1:])
    while getattr(command, "commands", None) and arguments and arguments[0] in command.commands:
        path.append(arguments[0])
        command = command.commands[arguments.pop(0)]
    if getattr(command, "commands", None):
        assert not arguments or arguments[0].startswith("-"), f"{' '.join(words)}: there is no such command"
        return {}
    context = click.Context(command, info_name=" ".join(path))
    given, left, _ = command.make_parser(context).parse_args([a for a in arguments if a != "--help"])
    assert not left, f"{' '.join(words)}: {left} is too much"
    for parameter in command.params:
        if isinstance(parameter.type, click.Choice) and parameter.name in given:
            assert given[parameter.name] in parameter.type.choices, words
    return given


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name):
    for words in _words_of(text_of(ROOT / name)):
        if words[0] != "fedbraid" or len(words) == 1:
            continue
        try:
            given = _parse(words)
        except click.ClickException as error:
            pytest.fail(f"{' '.join(words)}: {error.message}")
        if words[1] != "data":
            _check_settings(given, " ".join(words))


def _check_settings(given, where):
    """The ``--set`` of a command; a configuration file may give other keys that they need."""
    [*settings] = given.get("settings") or given.get("set_") or ()
    wrong = ""
    try:
        load_config(settings=settings)
    except ConfigError as error:
        wrong = str(error)
    assert not wrong or (given.get("config") and "does not exist" not in wrong), f"{where}: {wrong}"


def test_a_wrong_option_is_found():
    with pytest.raises(click.ClickException):
        _parse(["fedbraid", "run", "--quickly"])
    with pytest.raises(AssertionError, match="roundss"):
        _check_settings(_parse(["fedbraid", "run", "my.toml", "--set", "roundss=3"]), "here")
    with pytest.raises(AssertionError, match="no such command"):
        _parse(["fedbraid", "train"])
    with pytest.raises(AssertionError, match="too much"):
        _parse(["fedbraid", "run", "a.toml", "b.toml"])


# TOML


def test_toml_blocks_are_valid():
    kinds = {"run": 0, "compare": 0, "sweep": 0, "other": 0}
    for page, block in all_blocks("toml"):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        tree = tomllib.loads(block.code)
        kinds[_check_toml(tree, where)] += 1
    assert kinds["run"] > 12
    assert kinds["compare"] > 1


def _check_toml(tree, where):
    if set(tree) & set(OTHER_TOML):
        assert set(tree) <= set(OTHER_TOML), where
        return "other"
    if set(tree) <= FEDERATION_TOML:
        Policy(**tree.get("policy", {})).check()
        return "other"
    if "methods" in tree or "compare" in tree:
        kept = {key: value for key, value in tree.items() if key not in ("methods", "compare", "sweep")}
        parse({**kept, "algorithm": {"name": "common", **kept.get("algorithm", {})}})
        return "compare"
    if "sweep" in tree:
        parse_settings(tree.pop("sweep"))
        parse(tree)
        return "sweep"
    parse(tree)
    return "run"


def test_comparisons_in_tutorials_load(tmp_path):
    [block] = [b for b in blocks.blocks_of(text_of(DOCS / "learn/compare.md")) if b.language == "toml"]
    (tmp_path / "compare.toml").write_text(block.code)
    assert len(load_comparison(tmp_path / "compare.toml").methods) == 2


# links


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    generated = [*stage.generated_names()]
    for target in links_of(blocks.SITE.sub("", text_of(page))):
        if is_external(target):
            assert target.startswith(("https://", "mailto:")), f"{name}: {target}"
            continue
        file, anchor = resolve(page, target)
        assert file.exists(), f"{name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(text_of(file)), f"{name}: {target}"
    for hidden in blocks.SITE.findall(text_of(page)):
        assert [link for link in links_of(hidden) if link not in generated and not (page.parent / link).exists()] == []


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [place(page) for page in stage.sources()] + [f"project/{name}" for name in PROJECT]
    pages += [*stage.generated_names(), "first_steps.md"]
    found = list(stage._entries(stage.navigation(nav, pages)))
    assert sorted(found) == sorted(set(pages))


def test_navigation_refuses_pages_that_do_not_exist():
    with pytest.raises(ValueError, match=r"gone\.md"):
        stage.navigation([{"Do": ["gone.md"]}], ["a.md"])


def test_nothing_is_loaded_from_another_host():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not [url for url in settings["extra"]["polyfills"] + settings["extra_css"] if "//" in url]
    for page in PAGES:
        bare = blocks.FENCE.sub("", text_of(page))
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:img|script|iframe)[^>]+src=.?https?:", bare), page


# the reference


def test_every_public_name_is_on_a_page():
    pages = api_pages()
    for package, rows in public_names().items():
        page = pages[f"reference/api/{package}.md"]
        assert {row.name for row in rows} == {f"{package}.{name}" for name in importlib.import_module(package).__all__}
        for row in rows:
            if row.path is None:  # it is documented on another page
                assert f"`{row.name}`" in page
                last = row.name.rpartition(".")[2]
                home = pages.get(f"reference/api/{row.home}.md", "")
                assert f"::: {row.home}.{last}\n" in home or f"# {row.home}\n" in home, row
            else:
                assert f"::: {row.path}\n" in f"{page}\n" or f"{{ #{row.path} }}" in page, row
    assert {"fedbraid", "fedbraid.core", "fedbraid.algorithms"} <= {package.__name__ for package in packages()}


def test_the_policy_names_the_modules_that_are_not_public():
    text = (DOCS / "policy.md").read_text().partition("which serve the")[2].partition("\n\n")[0]
    assert re.findall(r"`fedbraid\.(\w+)`", text) == list(INTERNAL)
    for name in INTERNAL:
        importlib.import_module(f"fedbraid.{name}")


def test_every_command_and_option_is_on_its_page():
    page = commands_page()
    seen = 0
    for path, command in walk(application()):
        if len(path) > 1:
            assert re.search(rf"^#+ {' '.join(path)}$", page, re.MULTILINE), path
        for parameter in command.params if len(path) > 1 else ():
            if getattr(parameter, "hidden", False):
                continue
            assert help_of(parameter, command), f"{path}: {parameter.name} has no help"
            section = page.split(f"# {' '.join(path)}\n", 1)[1].split("\n#", 1)[0]
            names = parameter.opts if parameter.param_type_name == "option" else [parameter.human_readable_name]
            assert all(f"`{name}`" in section.replace("\\|", "|") for name in names), (path, names)
            seen += 1
    assert seen > 150


def test_every_key_has_a_default_a_range_a_unit_and_a_text():
    page = configuration.configuration_page()
    for section, kind in configuration.sections().items():
        for key in configuration.keys_of(section, kind):
            name = f"{section}.{key.name}" if section else key.name
            assert f"| `{name}` | " in page
            assert key.text, f"{name}: write `{key.name}: ...` into the docstring of {kind.__name__}"
            assert key.default, name
            assert key.allowed, name
            assert key.unit or not key.numeric, f"{name}: write `{key.name} [unit]: ...` into the docstring"
    inner = set(configuration.sections())
    assert set(Config.model_fields) - inner == {key.name for key in configuration.keys_of("", Config)}
    assert "| `arrival.drop` | `0.0` | number, from 0, below 1 | share |" in page


def test_the_first_line_of_a_docstring_is_a_sentence():
    assert (
        to_markdown("APFL: FedAvg, and a model.\n\nalpha: its weight.")
        == "APFL: FedAvg, and a model.\n\n- **`alpha`**: its weight."
    )


def test_docstrings_become_markdown():
    text = to_markdown("What [it] is.\n\nname: of *it*.\nother: more\n    text.\n\n>>> 1\n1\n\nSee :func:`f`.")
    assert text.startswith("What \\[it\\] is.\n\n- **`name`**: of \\*it\\*.\n- **`other`**: more\n    text.")
    assert "```pycon\n>>> 1\n1\n```" in text
    assert text.endswith("See ``f``.")


# the gallery and the notebook


def test_no_picture_is_there_twice():
    pictures = [path for path in DOCS.rglob("*") if path.suffix in (".png", ".svg")]
    assert len(pictures) > 10
    by_bytes = {path.read_bytes(): path for path in pictures}
    assert len(by_bytes) == len(pictures), sorted(set(pictures) - set(by_bytes.values()))


def test_the_gallery_has_every_reproduction_and_six_examples():
    page = gallery.gallery_page()
    run = [file.stem for file in (DOCS / "reproductions").glob("*.json")]
    assert set(run) <= set(entries())
    assert set(run) == set(SEE), "write a sentence on the picture in fedbraid/reproduce/see.py"
    for name in run:
        assert f"(reproductions/{name}.png)" in page
        assert f"`fedbraid reproduce {name}" in page
    examples = gallery.examples()
    assert len(examples) >= 6
    for one in examples:
        assert (DOCS / "gallery" / one["picture"]).is_file()
        assert (DOCS / one["page"]).is_file()
        assert one["seconds"] > 0
        [words] = blocks.commands_of(one["command"])
        _parse(words)
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page):
        assert (DOCS / picture).is_file()


def test_the_notebook_becomes_a_page(tmp_path):
    page = notebook_page(DOCS / "first_steps.ipynb", tmp_path, "pictures")
    cells = json.loads(text_of(DOCS / "first_steps.ipynb"))["cells"]
    for cell in cells:
        assert "".join(cell["source"]) in page
    assert len(list(tmp_path.glob("*.png"))) == page.count("(pictures/")
    assert len(page) > 2000
