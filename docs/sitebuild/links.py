"""Links between Markdown files: where they lead in the repository, and where in the site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sitebuild import DOCS, ROOT
from sitebuild.blocks import FENCE

LINK = re.compile(r"(?P<open>\]\()(?P<target>[^)\s]+)(?P<close>\))")
INLINE = re.compile(r"`+[^`\n]*`+")
PROJECT = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")  # pages of the site, too


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with everything outside of fenced and inline code changed."""
    parts, end = [], 0
    spans = sorted([found.span() for found in FENCE.finditer(text)])
    for start, stop in spans:
        parts += [_outside_inline(text[end:start], change), text[start:stop]]
        end = stop
    return "".join([*parts, _outside_inline(text[end:], change)])


def _outside_inline(text: str, change: Callable[[str], str]) -> str:
    """Links whose words are code stay whole: only the part in brackets is hidden from ``change``."""
    kept: list[str] = []

    def hide(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\x00{len(kept) - 1}\x00"

    changed = change(INLINE.sub(hide, text))
    return re.sub(r"\x00(\d+)\x00", lambda found: kept[int(found[1])], changed)


def links_of(text: str) -> list[str]:
    """The targets of all links and pictures of a page, without those in code."""
    found: list[str] = []

    def note(part: str) -> str:
        found.extend(link["target"] for link in LINK.finditer(part))
        return part

    outside_code(text, note)
    return found


def is_external(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def resolve(page: Path, target: str) -> tuple[Path, str]:
    """The file in the repository that a link of ``page`` leads to, and its anchor."""
    path, _, anchor = target.partition("#")
    return (Path(os.path.normpath(page.parent / path)) if path else page), anchor


def place(file: Path) -> str:
    """Where a file of the repository is in the sources of the site."""
    if file.is_relative_to(DOCS):
        inside = file.relative_to(DOCS)
        if file.is_dir():
            return str(inside / ("index.md" if (file / "index.md").exists() else "README.md"))
        return str(inside.with_suffix(".md") if inside.suffix == ".ipynb" else inside)
    inside = file.relative_to(ROOT)
    if str(inside) in PROJECT:
        return f"project/{inside}"
    if str(inside) == "README.md":
        return "README.md"
    return f"files/{inside}/index.md" if file.is_dir() else f"files/{inside}.md"


def for_the_site(text: str, page: Path) -> tuple[str, list[Path]]:
    """The text with links as the site needs them, and the files outside of ``docs`` that it links to."""
    needed: list[Path] = []
    here = Path(place(page)).parent

    def change(link: re.Match[str]) -> str:
        target = link["target"]
        if is_external(target) or target.startswith("#"):
            return link[0]
        file, anchor = resolve(page, target)
        if not file.exists():  # a generated page
            return link[0]
        if not file.is_relative_to(DOCS):
            needed.append(file)
        there = os.path.relpath(place(file), here)
        return f"{link['open']}{there}{'#' + anchor if anchor else ''}{link['close']}"

    return outside_code(text, lambda part: LINK.sub(change, part)), needed


def anchors_of(text: str) -> Iterator[str]:
    """The anchors of the headings of a page, as both GitHub and MkDocs make them."""
    seen: dict[str, int] = {}
    bare = FENCE.sub("", text)
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", bare, re.M):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip())
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        yield f"{slug}-{count}" if count else slug
