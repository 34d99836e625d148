"""The gallery: examples and reproductions, each with its picture, command and time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sitebuild import DOCS

EXAMPLES = DOCS / "gallery"
REPRODUCTIONS = DOCS / "reproductions"


def examples() -> list[dict[str, Any]]:
    """The examples of the gallery, with the seconds and the machine of their last run."""
    from sitebuild.examples import COMMANDS

    ran = {row["name"]: row for row in json.loads((EXAMPLES / "examples.json").read_text())}
    return [one._asdict() | ran[one.name] | {"picture": f"{one.name}.png"} for one in COMMANDS]


def reproductions() -> list[dict[str, Any]]:
    """The JSON files of the reproductions, in the order of their names."""
    return [json.loads(file.read_text()) for file in sorted(REPRODUCTIONS.glob("*.json"), key=_numbered)]


def _numbered(file: Path) -> tuple[str, int, str]:
    paper, _, rest = file.stem.partition("-")
    digits = "".join(c for c in rest.split("-")[0] if c.isdigit())
    return paper, int(digits or 0), rest


def gallery_page() -> str:
    """The page as Markdown; pictures are cards that link to more."""
    lines = [
        "# Gallery",
        "",
        "Pictures that the library draws, each with the command that draws it and the time that it took.",
        "",
    ]
    if (DOCS / "leaderboard.md").exists():
        lines += ["The [leaderboard](leaderboard.md) compares all methods on several federations.", ""]
    lines += ["## Examples", "", '<div class="grid cards" markdown>', ""]
    for one in examples():
        lines += _card(one["title"], f"gallery/{one['picture']}", one["page"], one["see"], one["command"], one)
    lines += ["</div>", "", "## Reproductions of papers", ""]
    lines += [
        "Figures and tables of papers, computed again. A *comparison* is a row with a statement of the paper; it is",
        "within if our number is in the band that the page states. Each picture links to the page with all rows.",
        "",
        '<div class="grid cards" markdown>',
        "",
    ]
    for one in reproductions():
        name = one["name"]
        command = f"fedbraid reproduce {name}" + (" --full" if one["size"] == "full" else "")
        see = f"{_first(one)} In all, {one['within']} of {one['of']} comparisons are within."
        lines += _card(one["title"], f"reproductions/{name}.png", f"reproductions/{name}.md", see, command, one)
    return "\n".join([*lines, "</div>", ""])


def _first(one: dict[str, Any]) -> str:
    """The first statement of the paper and our number for it: what to look at."""
    found = next((row for row in one["findings"] if row.get("kind", "paper") == "paper"), one["findings"][0])
    ours = found["ours"]
    said = (
        {True: "yes", False: "no", None: "not run"}.get(ours)
        if ours is None or isinstance(ours, bool)
        else f"{ours:.4g}"
    )
    return f"{found['what']} (paper: {found['paper']}; ours: {said})."


def _card(title: str, picture: str, page: str, see: str, command: str, one: dict[str, Any]) -> list[str]:
    return [
        f"-   **[{title}]({page})**",
        "",
        f"    [![{title}]({picture}){{ loading=lazy }}]({page})",
        "",
        f"    What to see: {see}",
        "",
        f"    `{command}`",
        "",
        f"    {one['seconds']:g} s on {one['machine']}",
        "",
    ]
