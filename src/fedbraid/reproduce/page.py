"""The page of a reproduction (table, figure, deviations), and the index of all pages in a folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from fedbraid import __version__
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Size
from fedbraid.reproduce.registry import entries

__all__ = ["page_text", "write_index", "write_page"]

DPI = 80


def write_page(
    out: Path, name: str, entry: Entry, evidence: Evidence, *, size: Size, seconds: float, machine: str
) -> dict[str, Any]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    evidence.figure.savefig(out / f"{name}.png", dpi=DPI, metadata={"Software": None})
    result = {
        "name": name,
        "title": entry.title,
        "size": size,
        "findings": [_row(finding) for finding in evidence.findings],
        "within": sum(finding.within for finding in evidence.findings),
        "of": len(evidence.findings),
        "notes": list(evidence.notes),
        "seconds": round(seconds, 1),
        "machine": machine,
        "version": __version__,
    }
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(page_text(entry, result), encoding="utf-8")
    return result


def _row(finding: Finding) -> dict[str, Any]:
    ours = finding.ours
    if ours is not None and not isinstance(ours, bool):
        ours = float(ours) if math.isfinite(ours) else str(ours)
    return {
        "what": finding.what,
        "paper": finding.paper,
        "ours": ours,
        "band": finding.band,
        "within": finding.within,
    }


def shown(ours: Any) -> str:
    """A value as the tables show it.

    >>> shown(True), shown(0.123456), shown(12345.6), shown(None)
    ('yes', '0.1235', '1.235e+04', 'not run')
    """
    if ours is None:
        return "not run"
    if isinstance(ours, bool):
        return "yes" if ours else "no"
    return f"{ours:.4g}" if isinstance(ours, int | float) else str(ours)


def page_text(entry: Entry, result: Mapping[str, Any]) -> str:
    """The page as Markdown, from the texts of an entry and the content of its JSON file.

    After a change of the texts, ``NAME.md`` can be written again without a new run.
    """
    name = result["name"]
    lines = [f"# {entry.title}", "", f"{entry.paper}", "", f"![{entry.title}]({name}.png)", ""]
    lines += _table(
        ("", "paper", "ours", "band we accept", "within"),
        [
            (row["what"], row["paper"], shown(row["ours"]), row["band"], "yes" if row["within"] else "**no**")
            for row in result["findings"]
        ],
    )
    about = entry.setting if result["size"] == "full" else f"Quick form: {entry.quick}"
    lines += ["", "## Setting", "", about]
    if result["size"] == "full" and entry.deviations:
        lines += ["", "## Deviations from the paper", "", *_items(entry.deviations)]
    remarks = [*(entry.remarks if result["size"] == "full" else ()), *result["notes"]]
    if remarks:
        lines += ["", "## Remarks", "", *_items(remarks)]
    data = "".join(f" --data {needed}=FOLDER" for needed in entry.needs) if result["size"] == "full" else ""
    lines += [
        "",
        "## How it was run",
        "",
        f"`fedbraid reproduce {name} --{result['size']}{data}`: {result['seconds']:.4g} s on {result['machine']},"
        f" fedbraid {result['version']}.",
        "",
    ]
    return "\n".join(lines)


def _items(texts: Iterable[str]) -> list[str]:
    return [f"- {text}" for text in texts]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return lines + ["| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in rows]


def _counted(name: str) -> list[str]:
    """A sort key that puts fig10 after fig9."""
    return [f"{int(part):04}" if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def write_index(out: Path) -> Path:
    """Write ``README.md`` of a folder from the results in it, and list the entries without a result."""
    found = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(out.glob("*.json"), key=lambda path: _counted(path.stem))
    ]
    lines = [
        "# Reproductions",
        "",
        "Figures and tables of five papers, with the paper's numbers and ours. A row is *within* if our number lies",
        "in the band that the entry states. Rows outside of their band are listed too.",
        "`fedbraid reproduce --list` lists the entries; `fedbraid reproduce NAME --full` runs one and writes its page.",
        "",
    ]
    rows = []
    for r in found:
        link, within = f"[{r['name']}]({r['name']}.md)", f"{r['within']} of {r['of']}"
        rows.append((link, r["title"], r["size"], within, f"{r['seconds']:.4g}", r["machine"]))
    lines += _table(("entry", "what", "size", "within", "seconds", "machine"), rows)
    lines += _not_run({r["name"] for r in found})
    path = out / "README.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _not_run(found: Set[str]) -> list[str]:
    """A section that lists the entries without a result."""
    missing = sorted(entries().keys() - found, key=_counted)
    if not missing:
        return []
    rows = [(name, entries()[name].title, ", ".join(entries()[name].needs)) for name in missing]
    about = "These entries have not been run with the paper's setting: their results are unknown."
    return ["", "## Not run yet", "", about, "", *_table(("entry", "what", "data for --full"), rows)]
