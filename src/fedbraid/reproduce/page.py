"""The page of a reproduction (table, figure, deviations), and the index of all pages in a folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from fedbraid import __version__, files
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Kind, Size
from fedbraid.reproduce.registry import entries
from fedbraid.reproduce.see import SEE

__all__ = ["page_text", "render", "write_index", "write_page"]

DPI = 80


def write_page(
    out: Path, name: str, entry: Entry, evidence: Evidence, *, size: Size, seconds: float, machine: str
) -> dict[str, Any]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [_row(finding) for finding in evidence.findings]
    evidence.figure.savefig(out / f"{name}.png", dpi=DPI, metadata={"Software": None})
    result = {
        "name": name,
        "title": entry.title,
        "size": size,
        "findings": rows,
        **_counts(rows),
        "notes": list(evidence.notes),
        "seconds": round(seconds, 1),
        "machine": machine,
        "version": __version__,
    }
    _write(out, entry, result)
    return result


def _write(out: Path, entry: Entry, result: Mapping[str, Any]) -> None:
    files.write_text(out / f"{result['name']}.json", json.dumps(result, indent=1) + "\n")
    files.write_text(out / f"{result['name']}.md", page_text(entry, result))


def render(out: Path) -> Path:
    """Write the pages and the index of a folder again from the JSON files in it; nothing is run.

    Use it after a change of an entry's texts, or of a row in a JSON file. The title comes from the entry, the counts
    from the rows. JSON files of unknown names are left alone.
    """
    for result in _results(out):
        if result["name"] in entries():
            entry = entries()[result["name"]]
            _write(out, entry, {**result, "title": entry.title})
    return write_index(out)


def _results(out: Path) -> list[dict[str, Any]]:
    """The results of a folder, with counts from their rows. Rows of earlier versions have no kind: comparisons."""
    paths = sorted(out.glob("*.json"), key=lambda path: _counted(path.stem))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for result in found:
        result["findings"] = [{"kind": "paper", **row} for row in result["findings"]]
        result |= _counts(result["findings"])
    return found


def _of_kind(rows: Iterable[Mapping[str, Any]], kind: Kind) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Comparisons with the paper (``within``, ``of``), and checks of our own (``own_within``, ``own_of``)."""
    paper, own = _of_kind(rows, "paper"), _of_kind(rows, "own")
    return {
        "within": sum(row["within"] for row in paper),
        "of": len(paper),
        "own_within": sum(row["within"] for row in own),
        "own_of": len(own),
    }


def _row(finding: Finding) -> dict[str, Any]:
    ours = finding.ours
    if ours is not None and not isinstance(ours, bool):
        ours = float(ours) if math.isfinite(ours) else str(ours)
    return {
        "what": finding.what,
        "kind": finding.kind,
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
    if result["size"] == "full" and name in SEE:
        lines += [f"*What to see: {SEE[name]}*", ""]
    paper, own = _of_kind(result["findings"], "paper"), _of_kind(result["findings"], "own")
    lines += _rows("paper", paper) if paper else ["No row of this form compares with the paper."]
    if own:
        about = "The paper does not state these: identities, and our code against independent computations."
        lines += ["", "## Checks of our own", "", about, "", *_rows("expected", own)]
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


def _rows(head: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return _table(
        ("", head, "ours", "band we accept", "within"),
        [
            (row["what"], row["paper"], shown(row["ours"]), row["band"], "yes" if row["within"] else "**no**")
            for row in rows
        ],
    )


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
    found = _results(out)
    lines = [
        "# Reproductions",
        "",
        "Figures and tables of five papers, with the paper's numbers and ours. A row of a page is *within* if our",
        "number lies in the band that the entry states. Rows outside of their band are listed too.",
        "*Comparisons* are rows with a statement of the paper. *Own checks* are rows that the paper does not state:",
        "identities, and our code against independent computations.",
        "`fedbraid reproduce --list` lists the entries; `fedbraid reproduce NAME --full` runs one and writes its page.",
        "`fedbraid reproduce --render` writes the pages and this index again from the JSON files, without a run.",
        "",
    ]
    rows = []
    for r in found:
        link = f"[{r['name']}]({r['name']}.md)"
        rows.append((link, r["title"], r["size"], *_shares(r), f"{r['seconds']:.4g}", r["machine"]))
    total = {key: sum(r[key] for r in found) for key in ("within", "of", "own_within", "own_of")}
    rows.append((f"**all {len(found)}**", "", "", *(f"**{share}**" for share in _shares(total)), "", ""))
    heads = ("entry", "what", "size", "comparisons within", "own checks within", "seconds", "machine")
    lines += _table(heads, rows)
    lines += _not_run({r["name"] for r in found})
    path = out / "README.md"
    files.write_text(path, "\n".join(lines) + "\n")
    return path


def _shares(counts: Mapping[str, Any]) -> tuple[str, str]:
    return f"{counts['within']} of {counts['of']}", f"{counts['own_within']} of {counts['own_of']}"


def _not_run(found: Set[str]) -> list[str]:
    """A section that lists the entries without a result."""
    missing = sorted(entries().keys() - found, key=_counted)
    if not missing:
        return []
    rows = [(name, entries()[name].title, ", ".join(entries()[name].needs)) for name in missing]
    about = [
        "These entries have not been run with the paper's setting here: their results are unknown. If you have the",
        "data that one needs, `fedbraid reproduce NAME --full --data DATA=FOLDER` runs it.",
    ]
    return ["", "## Not run yet", "", *about, "", *_table(("entry", "what", "data for --full"), rows)]
