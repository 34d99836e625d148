"""Puts the sources of the site into one folder, with everything generated, and writes the configuration of MkDocs."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sitebuild import DOCS, EXECUTED, LEFT_OUT, ROOT
from sitebuild.blocks import SITE
from sitebuild.execute import executed, pages_to_execute, run_pages
from sitebuild.links import PROJECT, for_the_site, place

LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "sh", ".cff": "yaml"}
WIDE = ("coming-from",)  # folders whose pages have code side by side, and therefore no table of contents
COPIED = {".png", ".svg", ".js", ".css", ".jpg", ".json"}


def sources() -> list[Path]:
    """The Markdown files of ``docs`` that are pages of the site."""
    pages = sorted(DOCS.rglob("*.md"))
    return [page for page in pages if not any(page.is_relative_to(DOCS / folder) for folder in LEFT_OUT)]


def stage(out: Path, *, cache: Path, execute: bool = True) -> Path:
    """Write the sources of the site to ``out/pages``; returns the configuration file. ``cache``: of executed pages."""
    pages = out / "pages"
    shutil.rmtree(out, ignore_errors=True)
    _copy_pictures(pages)
    run = pages_to_execute(DOCS, EXECUTED) if execute else []
    run_pages(run, cache)
    needed: list[Path] = []
    for page in [*sources(), *(ROOT / name for name in PROJECT)]:
        text = page.read_text()
        if page in run:
            made = pages / "executed"
            text = executed(page, cache=cache, pictures=made, link=os.path.relpath(made, (pages / place(page)).parent))
        text, files = for_the_site(SITE.sub(lambda found: found["text"], text), page)
        needed += files
        wide = page.parent.name in WIDE
        _write(pages / place(page), f"---\nhide: [toc]\n---\n\n{text}" if wide else text)
    _write_files(pages, needed)
    _write_generated(pages)
    return _write_configuration(out, pages)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _copy_pictures(pages: Path) -> None:
    for file in sorted(DOCS.rglob("*")):
        if file.suffix in COPIED and not any(file.is_relative_to(DOCS / folder) for folder in LEFT_OUT):
            copy = pages / file.relative_to(DOCS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _write_files(pages: Path, needed: list[Path]) -> None:
    """Files outside of ``docs`` that pages link to, as pages; a folder is a list of its files."""
    todo = [
        file for file in dict.fromkeys(needed) if not place(file).startswith("project/") and place(file) != "README.md"
    ]
    for file in todo:
        if file.is_dir():
            inner = sorted(one for one in file.rglob("*") if one.is_file() and one.suffix in LANGUAGES)
            links = [
                f"- [{one.relative_to(file)}]({os.path.relpath(place(one), Path(place(file)).parent)})" for one in inner
            ]
            _write(pages / place(file), "\n".join([f"# {file.relative_to(ROOT)}", "", *links, ""]))
            todo += [one for one in inner if one not in todo]
        elif file.suffix == ".md":
            text, _ = for_the_site(file.read_text(), file)
            _write(pages / place(file), text)
        else:
            language = LANGUAGES.get(file.suffix, "text")
            text = file.read_text().rstrip()
            _write(pages / place(file), f"# {file.relative_to(ROOT)}\n\n````{language}\n{text}\n````\n")


def generated() -> dict[str, str]:
    """The pages that are made from the source of the library and from committed results."""
    from sitebuild.api import api_pages
    from sitebuild.commands import commands_page
    from sitebuild.configuration import configuration_page
    from sitebuild.gallery import gallery_page

    return api_pages() | {
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        "gallery.md": gallery_page(),
    }


def generated_names() -> list[str]:
    """The paths of the generated pages, without making them."""
    from sitebuild.api import packages

    api = [f"reference/api/{package.__name__}.md" for package in packages()]
    return [*api, "reference/api/index.md", "reference/commands.md", "reference/configuration.md", "gallery.md"]


def _write_generated(pages: Path) -> None:
    from sitebuild.notebook import notebook_page

    for name, text in generated().items():
        _write(pages / name, text)
    for notebook in DOCS.glob("*.ipynb"):
        made = notebook_page(notebook, pages / "executed", "executed")
        text, _ = for_the_site(made, notebook)
        _write(pages / place(notebook), text)


def navigation(nav: list[Any], pages: list[str]) -> list[Any]:
    """``nav`` with its patterns replaced by the pages that they match and that are not named elsewhere.

    A name without ``*`` must exist. A pattern may match nothing, so that pages can be listed before they are written.

    >>> navigation([{"Do": ["a.md", "b*.md"]}, {"More": ["*.md"]}], ["a.md", "b2.md", "b1.md", "c.md"])
    [{'Do': ['a.md', 'b1.md', 'b2.md']}, {'More': ['c.md']}]
    """
    taken = {entry for entry in _entries(nav) if "*" not in entry}
    if missing := sorted(taken - set(pages)):
        raise ValueError(f"mkdocs.yml names pages that do not exist: {', '.join(missing)}")
    patterns = sorted((e for e in _entries(nav) if "*" in e), key=lambda e: (-e.count("/"), -len(e)))
    matched: dict[str, list[str]] = {}
    for pattern in patterns:  # the most special pattern takes a page
        found = (page for page in pages if page not in taken and _matches(page, pattern))
        matched[pattern] = sorted(found, key=lambda page: page.removesuffix(".md"))
        taken |= set(matched[pattern])

    def expand(entry: Any) -> list[Any]:
        if isinstance(entry, str):
            return matched.get(entry, [entry])
        [(title, inner)] = entry.items()
        if isinstance(inner, str):
            return [entry]
        found = [one for part in inner for one in expand(part)]
        return [{title: found}] if found else []

    return [one for entry in nav for one in expand(entry)]


def _matches(page: str, pattern: str) -> bool:
    return page.count("/") == pattern.count("/") and fnmatch.fnmatchcase(page, pattern)


def _entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for inner in nav.values():
            yield from _entries(inner)
    else:
        for entry in nav:
            yield from _entries(entry)


def _write_configuration(out: Path, pages: Path) -> Path:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found = [str(page.relative_to(pages)) for page in pages.rglob("*.md")]
    linked = [page for page in found if page.startswith("files/")]  # reached by links, not by the navigation
    settings["nav"] = navigation(settings["nav"], [page for page in found if page not in linked])
    settings["not_in_nav"] = "files/"
    settings["docs_dir"] = str(pages)
    settings["site_dir"] = str(ROOT / settings["site_dir"])
    for plugin in settings["plugins"]:
        if "mkdocstrings" in plugin:
            python = plugin["mkdocstrings"]["handlers"]["python"]
            python["paths"] = [str(ROOT / path) for path in python["paths"]]
            python["options"]["extensions"] = [f"{Path(__file__).parent / 'docstrings.py'}:PlainDocstrings"]
    file = out / "mkdocs.yml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return file
