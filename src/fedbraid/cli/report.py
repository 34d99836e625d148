"""``fedbraid report``: runs, sweeps and comparisons on one page."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    folders: Annotated[list[Path], typer.Argument(help="folders of runs, sweeps or comparisons", metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write (default: report.html in the first folder)")
    ] = None,
    title: Annotated[str | None, typer.Option(help="heading of the page")] = None,
    drift: Annotated[int, typer.Option(help="repeat this many first rounds of single runs, to show client drift")] = 0,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="whether to write every plot as PNG and PDF, too")
    ] = True,
    to: Annotated[
        list[str] | None, typer.Option("--to", help="also send the runs to tensorboard:FOLDER or mlflow:URI")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="follow runs that are going on, until they end")] = False,
    open_: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Write one HTML file that opens offline: curves, tuning maps, clients, drift, differences, citations."""
    from fedbraid.experiment.collect import collect
    from fedbraid.experiment.report import write_report

    place = out if out is not None else folders[0] / "report.html"
    if live:
        _follow(folders, place, title, open_=open_)
    with Console(stderr=True, highlight=False).status("reading the folders") as status:
        found = collect(folders, drift=drift)
        written = write_report(found, place, title=title, plots=plots, tell=status.update)
    if to:
        from fedbraid.experiment.track import send

        written["sent"] = {sink: send(found.runs, sink) for sink in to}
    if open_ and not live:
        import webbrowser

        webbrowser.open(place.resolve().as_uri())
    if json:
        print(json_.dumps(written))
        return
    console = Console(highlight=False)
    for notice in written["notices"]:
        console.print(f"[yellow]{notice}[/]")
    pictures = f"; {len(written['plots'])} pictures in {place.stem}-plots/" if written["plots"] else ""
    console.print(f"[bold]{place}[/] ({written['bytes'] / 1000:.0f} kB){pictures}", soft_wrap=True)


def _follow(folders: list[Path], place: Path, title: str | None, *, open_: bool) -> None:
    """Rewrite the page every few seconds until no run is going on. The browser reads it again by itself."""
    import time
    import webbrowser

    from fedbraid.experiment.collect import collect
    from fedbraid.experiment.live import EVERY, SILENT, running
    from fedbraid.experiment.report import write_report
    from fedbraid.experiment.runfolder import CONFIG, finished, read_config

    console = Console(stderr=True, highlight=False)
    first, began = True, time.monotonic()
    while True:
        going_on = [f for f in folders if (f / CONFIG).is_file() and finished(f, read_config(f).rounds) is None]
        if not going_on:
            return
        if all(running(f) for f in going_on):
            write_report(collect(folders, live=True), place, title=title, plots=False, refresh=5)
            if first:
                console.print(f"following in [bold]{place}[/]; end with Ctrl-C", soft_wrap=True)
                if open_:
                    webbrowser.open(place.resolve().as_uri())
            first = False
        elif first and time.monotonic() - began > SILENT:
            return  # no news: the error says how to continue the run
        time.sleep(EVERY)
