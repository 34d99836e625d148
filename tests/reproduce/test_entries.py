"""The quick form of every entry confirms the paper, and its page shows the findings."""

import json
from pathlib import Path

import pytest

from drawn import check_figure, record
from fedbraid.experiment.config import ConfigError
from fedbraid.reproduce import Entry, Evidence, Finding, entries, reproduce, write_index, write_page
from fedbraid.reproduce.page import page_text


@pytest.mark.parametrize("name", list(entries()))
def test_the_quick_form_finds_what_the_paper_says(name, tmp_path, monkeypatch):
    figures = record(monkeypatch)
    result = reproduce(name, size="quick", out=tmp_path)
    assert result["of"] > 0
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


def test_the_index_says_what_was_not_run(tmp_path):
    run, left = "localupdate-fig12", "localupdate-fig12-cnn"
    page = {
        "name": run,
        "title": entries()[run].title,
        "size": "full",
        "within": 4,
        "of": 4,
        "seconds": 1,
        "machine": "",
    }
    (tmp_path / f"{run}.json").write_text(json.dumps(page))
    before, after = write_index(tmp_path).read_text().split("\n## Not run yet\n")
    assert f"[{run}]({run}.md)" in before
    assert left not in before
    assert f"| {run} |" not in after
    assert f"| {left} | {entries()[left].title} | femnist |" in after
    assert [name for name in entries() if name != run and f"| {name} |" not in after] == []
    assert after.index("| localupdate-fig9 |") < after.index("| localupdate-fig10 |")


def test_an_index_of_all_entries_has_nothing_to_add(tmp_path):
    for name, entry in entries().items():
        page = {"name": name, "title": entry.title, "size": "full", "within": 1, "of": 1, "seconds": 1, "machine": ""}
        (tmp_path / f"{name}.json").write_text(json.dumps(page))
    assert "Not run yet" not in write_index(tmp_path).read_text()


PAGES = Path(__file__).parents[2] / "docs" / "reproductions"


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.json")), ids=lambda path: path.stem)
def test_our_pages_have_the_words_of_their_entries(path):
    """A page is made from the texts of an entry and its committed result: after a change of texts, write it again."""
    result = json.loads(path.read_text())
    entry = entries()[path.stem]
    assert result["title"] == entry.title
    assert path.with_suffix(".md").read_text() == page_text(entry, result)


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
