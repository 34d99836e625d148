"""``fedbraid reproduce``: figures and tables of the papers, with the paper's numbers and ours."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table


def command(
    names: Annotated[list[str] | None, typer.Argument(help="names from --list, or 'all'", metavar="NAME...")] = None,
    list_: Annotated[bool, typer.Option("--list", help="list the entries")] = False,
    render_: Annotated[
        bool, typer.Option("--render", help="write pages and index again from the JSON files in --out; runs nothing")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="the paper's settings, or small ones that take seconds")
    ] = False,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="folders of data for --full: shakespeare=FOLDER, femnist=FOLDER")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for pages, figures and unfinished work")] = Path("reproductions"),
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Reproduce figures and tables of the papers. Each gets a figure and a table of the paper's numbers and ours."""
    from fedbraid.experiment.config import ConfigError
    from fedbraid.reproduce import entries, render, reproduce, write_index
    from fedbraid.simulation import use_cores

    if list_:
        return _list(json)
    if render_:
        if names or not out.is_dir():
            raise ConfigError("--render takes no names and needs --out FOLDER, an existing folder of results")
        print(render(out))
        return None
    if not names:
        raise ConfigError("name an entry, or 'all'; fedbraid reproduce --list shows them")
    places = {}
    for given in data or []:
        name, equals, place = given.partition("=")
        if not equals or not place:
            raise ConfigError(f"--data must be NAME=FOLDER, got {given!r}")
        places[name] = Path(place)
    use_cores()
    console = Console(highlight=False, stderr=json)
    results = []
    for name in list(entries()) if names == ["all"] else names:
        with console.status(name) as status:

            def tell(line: str, name: str = name, status: Status = status) -> None:
                status.update(f"{name}: {line}")

            results.append(reproduce(name, size="full" if full else "quick", out=out, data=places, tell=tell))
        if not json:
            _print(console, results[-1], out)
    write_index(out)
    if json:
        print(json_.dumps({"results": results}))


def _list(json: bool) -> None:
    from fedbraid.reproduce import entries

    if json:
        about = {n: {"title": e.title, "paper": e.paper, "needs": e.needs} for n, e in entries().items()}
        print(json_.dumps(about))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True, overflow="ignore", min_width=max(map(len, entries())))
    for head in ("what", "data for --full", "--full takes"):
        table.add_column(head)
    for name, entry in entries().items():
        table.add_row(name, entry.title, ", ".join(entry.needs), entry.duration)
    Console(highlight=False).print(table)


def _print(console: Console, result: dict, out: Path) -> None:
    from fedbraid.reproduce.page import shown

    titles = {"paper": f"{result['name']}: {result['title']}", "own": "Checks of our own"}
    for kind, title in titles.items():
        rows = [row for row in result["findings"] if row["kind"] == kind]
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for head in ("", "paper" if kind == "paper" else "expected", "ours", "band we accept", "within"):
            table.add_column(head)
        for row in rows:
            within = "[green]yes[/]" if row["within"] else "[red]no[/]"
            table.add_row(row["what"], row["paper"], shown(row["ours"]), row["band"], within)
        if rows:
            console.print(table)
    console.print(f"[bold]{out / result['name']}.md[/] and .png, {result['seconds']:.4g} s\n", soft_wrap=True)
