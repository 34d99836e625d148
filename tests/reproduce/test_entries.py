"""The quick form of every entry confirms the paper, and its page shows the findings."""

import json
import shutil
from pathlib import Path

import pytest

from drawn import check_figure, record
from fedbraid.experiment.config import ConfigError
from fedbraid.reproduce import Entry, Evidence, Finding, entries, render, reproduce, write_index, write_page
from fedbraid.reproduce.page import page_text

# Rows whose expected value is 0 or 1, and which the paper states. All other such rows are checks of our own.
STATED = {
    "fedavg-bound": ("noise term, equal clients: exponent of eta",),  # Theorem 2.1: eta sigma^2 / M
    "mime-fig4": ("points lost at the default against its best",),  # Appendix B.2: the defaults are nearly the best
    "mime-table1": (
        "Mime's rounds over the server's",  # Table 1: the same cells
        "mime_mvr: exponent of delta",  # Table 1: delta G / (sqrt(S) epsilon^(3/2))
        "is under the lower bound for delta / L below",  # Section 4.3: faster when delta <= L
    ),
    "mime-table2-emnist-cnn": ("MimeLiteSGD is FedAvgSGD",),  # Table 2: one row for both
    "mime-table2-shakespeare": ("MimeLiteSGD is FedAvgSGD",),
}


def _unmarked(name, row):
    """Whether a row counts as a comparison though its value (0, 1 or none given) is not one that the paper states."""
    if row["kind"] == "own" or row["paper"] not in ("0", "1", "none given"):
        return False
    return not any(part in row["what"] for part in STATED.get(name, ()))


@pytest.mark.parametrize("name", list(entries()))
def test_the_quick_form_finds_what_the_paper_says(name, tmp_path, monkeypatch):
    figures = record(monkeypatch)
    result = reproduce(name, size="quick", out=tmp_path)
    assert result["of"] + result["own_of"] == len(result["findings"]) > 0
    assert [row["what"] for row in result["findings"] if _unmarked(name, row)] == []
    assert [row for row in result["findings"] if not row["within"]] == []
    assert (tmp_path / f"{name}.png").is_file()
    check_figure(figures[-1])
    assert json.loads((tmp_path / f"{name}.json").read_text()) == result


@pytest.mark.parametrize("name", list(entries()))
def test_entries_say_what_they_do(name):
    entry = entries()[name]
    assert entry.paper
    assert entry.setting.strip()
    assert entry.quick.strip()


def test_a_miss_is_shown_as_one(tmp_path):
    from matplotlib.figure import Figure

    entry = Entry("a title", "a paper", "a setting", "quickly", run=lambda job: None, deviations=("smaller",))
    evidence = Evidence((Finding("x", "3", 4.0, 2.9, 3.1), Finding("y", "1", float("nan"), 0, 2)), Figure(), ("odd",))
    result = write_page(tmp_path, "one", entry, evidence, size="full", seconds=1.0, machine="a machine")
    assert (result["within"], result["of"]) == (0, 2)
    page = (tmp_path / "one.md").read_text()
    assert "| x | 3 | 4 | 2.9 to 3.1 | **no** |" in page
    assert "- smaller" in page
    assert "- odd" in page
    assert "0 of 2" in write_index(tmp_path).read_text()


def test_checks_of_our_own_are_shown_and_counted_apart(tmp_path):
    from matplotlib.figure import Figure

    rows = (
        Finding("x", "3", 4.0, 2.9, 3.1),
        Finding("y", "0", 0.0, 0.0, 1e-9, kind="own"),
        Finding("z", "5", 5.0, 4.9, 5.1),
        Finding("w", "1", 2.0, 1.0, 1.0, kind="own"),
        Finding("v", "1", 1.0, 1.0, 1.0, kind="own"),
    )
    entry = Entry("a title", "a paper", "a setting", "quickly", run=lambda job: None)
    result = write_page(tmp_path, "one", entry, Evidence(rows, Figure()), size="full", seconds=1.0, machine="")
    write_page(tmp_path, "two", entry, Evidence(rows[:1], Figure()), size="full", seconds=1.0, machine="")
    assert [result[key] for key in ("within", "of", "own_within", "own_of")] == [1, 2, 2, 3]
    paper, own = (tmp_path / "one.md").read_text().split("## Checks of our own")
    assert ["| x |" in paper, "| z |" in paper, "| y |" in paper] == [True, True, False]
    assert ["| y | 0 |" in own, "| w | 1 | 2 | 1 | **no** |" in own, "| x |" in own] == [True, True, False]
    assert "Checks of our own" not in (tmp_path / "two.md").read_text()
    index = write_index(tmp_path).read_text()
    assert "| full | 1 of 2 | 2 of 3 |" in index
    assert "| **all 2** |  |  | **1 of 3** | **2 of 3** |" in index


def test_pages_are_rendered_again_from_the_json_without_a_run(tmp_path, monkeypatch):
    name = "mime-table4"
    shutil.copy(PAGES / f"{name}.json", tmp_path)
    result = json.loads((tmp_path / f"{name}.json").read_text())
    result["title"] = "an old title"
    result["findings"][0]["kind"] = "own"
    (tmp_path / f"{name}.json").write_text(json.dumps(result))
    (tmp_path / "other.json").write_text(json.dumps(_page("other")))
    monkeypatch.setattr(type(entries()[name]), "run", property(lambda self: pytest.fail("an entry was run")))
    assert render(tmp_path) == tmp_path / "README.md"
    again = json.loads((tmp_path / f"{name}.json").read_text())
    assert (again["title"], again["of"], again["own_of"]) == (entries()[name].title, 20, 1)
    assert "## Checks of our own" in (tmp_path / f"{name}.md").read_text()
    assert "| **all 2** |  |  | **21 of 21** | **1 of 1** |" in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "other.md").exists()


def _page(name):
    row = {"what": "x", "kind": "paper", "paper": "3", "ours": 3.0, "band": "3", "within": True}
    title = entries()[name].title if name in entries() else name
    return {"name": name, "title": title, "size": "full", "findings": [row], "seconds": 1, "machine": ""}


def test_the_index_says_what_was_not_run(tmp_path):
    run, left = "localupdate-fig12", "localupdate-fig12-cnn"
    (tmp_path / f"{run}.json").write_text(json.dumps(_page(run)))
    before, after = write_index(tmp_path).read_text().split("\n## Not run yet\n")
    assert f"[{run}]({run}.md)" in before
    assert left not in before
    assert f"| {run} |" not in after
    assert f"| {left} | {entries()[left].title} | femnist |" in after
    assert [name for name in entries() if name != run and f"| {name} |" not in after] == []
    assert after.index("| localupdate-fig9 |") < after.index("| localupdate-fig10 |")


def test_an_index_of_all_entries_has_nothing_to_add(tmp_path):
    for name in entries():
        (tmp_path / f"{name}.json").write_text(json.dumps(_page(name)))
    assert "Not run yet" not in write_index(tmp_path).read_text()


PAGES = Path(__file__).parents[2] / "docs" / "reproductions"


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.json")), ids=lambda path: path.stem)
def test_our_pages_have_the_words_of_their_entries(path):
    """A page is made from the texts of an entry and its committed result: after a change of texts, write it again."""
    result = json.loads(path.read_text())
    entry = entries()[path.stem]
    assert result["title"] == entry.title
    assert [row["what"] for row in result["findings"] if _unmarked(path.stem, row)] == []
    kinds = {kind: [row["within"] for row in result["findings"] if row["kind"] == kind] for kind in ("paper", "own")}
    assert (sum(kinds["paper"]), len(kinds["paper"])) == (result["within"], result["of"])
    assert (sum(kinds["own"]), len(kinds["own"])) == (result["own_within"], result["own_of"])
    assert path.with_suffix(".md").read_text() == page_text(entry, result)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("fedsplit-fig2a", "s = 0.051 with l* at the optimum"),
        ("mime-fig2", "with server momentum over without, at the rate 0.3"),
    ],
)
def test_a_row_that_missed_stays_a_row(name, what):
    """A statement that missed its band under one definition is not replaced by another definition that holds."""
    rows = json.loads((PAGES / f"{name}.json").read_text())["findings"]
    (row,) = [row for row in rows if what in row["what"]]
    assert (row["kind"], row["within"]) == ("paper", False)


def test_the_index_of_our_pages_names_every_entry():
    """Each entry has a page or is listed as not run; if it has a page, ``--list`` does not say "not run yet"."""
    pages = PAGES
    with_page, _, not_run = (pages / "README.md").read_text().partition("## Not run yet")
    for name, entry in entries().items():
        if (pages / f"{name}.json").exists():
            assert f"[{name}]({name}.md)" in with_page
            assert "not run yet" not in entry.duration
        else:
            assert f"| {name} |" in not_run


def test_unknown_names_and_missing_data_are_refused_before_work(tmp_path):
    with pytest.raises(ConfigError, match="mime-table4"):
        reproduce("mime-table44", out=tmp_path)
    for name, entry in entries().items():
        if entry.needs:
            with pytest.raises(ConfigError, match=f"--data {entry.needs[0]}="):
                reproduce(name, size="full", out=tmp_path)
            with pytest.raises(ConfigError, match="no such file or folder"):
                reproduce(name, size="full", out=tmp_path, data={n: Path("/no/such") for n in entry.needs})
    assert not list(tmp_path.iterdir())
