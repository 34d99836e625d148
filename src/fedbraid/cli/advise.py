"""``fedbraid advise``: find an algorithm and its rates for a configuration by a short pilot."""

from __future__ import annotations

import datetime
import json as json_
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbraid.cli.groups import Output, with_groups
from fedbraid.cli.notes import as_notes
from fedbraid.cli.stopping import exit_status

NO_ADVICE = 3  # exit status if there is no advice: every setting diverged, or nothing was learnt


class Pilot(NamedTuple):
    """Options that override keys of the ``[advise]`` section."""

    budget: Annotated[
        str | None, typer.Option(help="rounds of all trials together, such as 6000, or a time: 90s, 10min, 1h")
    ] = None
    methods: Annotated[str | None, typer.Option(help="methods to try, such as fedavg,scaffold (default: all)")] = None
    local_work: Annotated[
        str | None, typer.Option(help="multiples of the configured local work to try, such as 1,4")
    ] = None
    seeds: Annotated[int | None, typer.Option(help="tuning seeds of every trial, at least 2")] = None
    metric: Annotated[str | None, typer.Option(help="metric to judge by (default: the loss)")] = None
    target: Annotated[float | None, typer.Option(help="value of the metric to reach (default: several levels)")] = None
    validation: Annotated[float | None, typer.Option(help="share of each client's examples to judge on")] = None

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that were given."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if self.methods is not None:
            given["methods"] = tuple(name.strip() for name in self.methods.split(",") if name.strip())
        if self.local_work is not None:
            given["local_work"] = tuple(_whole(part) for part in self.local_work.split(","))
        return given


class Federation(NamedTuple):
    """Options for a federation that cannot be simulated."""

    plan: Annotated[
        Path | None,
        typer.Option(help="folder to make: write the runs of a pilot on a real federation; nothing runs"),
    ] = None
    most_bytes: Annotated[str | None, typer.Option("--bytes", help="bytes that --plan may send, such as 2GB")] = None
    from_runs: Annotated[
        list[Path] | None, typer.Option(help="decide from finished runs; may be repeated, also with a folder of runs")
    ] = None


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"--local-work must be whole numbers such as 1,4; got {text.strip()!r}")
    return int(text)


@with_groups
def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file (default: the embedded configuration)")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value of the configuration")] = None,
    out: Annotated[Path | None, typer.Option(help="folder to make (default: runs/advise-NAME-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder of a stopped pilot to continue")] = None,
    *,
    pilot: Pilot,
    federation: Federation,
    output: Output,
) -> None:
    """Find an algorithm and its rates by a short pilot on a validation split, and write advised.toml."""
    from fedbraid.experiment.advice.advising import load_advice, reopen_advice
    from fedbraid.experiment.config import ConfigError

    if federation.plan is not None or federation.from_runs:
        return _without_simulator(load_advice(config, settings or [], pilot.changes), out, federation, output)
    if resume is not None:
        if config is not None or settings or out is not None or pilot.changes:
            raise ConfigError("--resume takes everything from the folder: leave out CONFIG and all other options")
        advice, folder = reopen_advice(resume), resume
    else:
        advice = load_advice(config, settings or [], pilot.changes)
        folder = out if out is not None else _folder(advice[0].data.name)
    return _simulated(advice, folder, resume=resume is not None, output=output)


def _folder(data: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"advise-{Path(data).name.replace(':', '-')}-{stamp}"


def _simulated(advice: tuple[Any, Any], folder: Path, *, resume: bool, output: Output) -> None:
    from fedbraid.experiment.advice.advising import run_advice
    from fedbraid.experiment.advice.words import lines_of
    from fedbraid.simulation import use_cores

    use_cores(advice[0].engine.devices)
    console = Console(stderr=True, highlight=False)
    try:
        with as_notes(console), _Bar(console, show=output.shown) as bar:
            summary = run_advice(*advice, folder, resume=resume, on_news=bar.news)
    except KeyboardInterrupt as stopped:
        console.print(
            f"stopped; the finished trials are kept. Continue with: fedbraid advise --resume {folder}", soft_wrap=True
        )
        sys.exit(exit_status(stopped))
    if output.json:
        print(json_.dumps(summary))
    elif not output.quiet:
        lines = lines_of(summary)
        if summary["advised"] is not None:
            lines.append(("train and test it", f"fedbraid run {folder}/advised.toml"))
        _print([*lines, ("picture", f"{folder}/advise.png"), ("all trials", f"{folder}/trials.parquet")])
    if summary["problem"]:
        console.print(f"[bold red]{escape(summary['problem'])}[/]", soft_wrap=True)
        sys.exit(NO_ADVICE)


def _without_simulator(advice: tuple[Any, Any], out: Path | None, federation: Federation, output: Output) -> None:
    from fedbraid.experiment.advice.federation import decide, plan_lines, write_plan
    from fedbraid.experiment.advice.words import lines_of

    if federation.plan is not None:
        made = write_plan(*advice, federation.plan, most=federation.most_bytes)
        if output.json:
            print(json_.dumps(made))
        elif not output.quiet:
            _print(plan_lines(made))
        return
    folder = out if out is not None else _folder(advice[0].data.name)
    summary = decide(federation.from_runs or [], folder, target=advice[1].target, metric=advice[1].metric)
    if output.json:
        print(json_.dumps(summary))
    elif not output.quiet:
        _print(lines_of(summary))
    if summary["problem"]:
        Console(stderr=True, highlight=False).print(f"[bold red]{escape(summary['problem'])}[/]", soft_wrap=True)
        sys.exit(NO_ADVICE)


def _print(lines: Sequence[tuple[str, str]]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    before = ""
    for name, words in lines:
        bold = name in ("advice", "problem")
        table.add_row("" if name == before else name, f"[bold]{escape(words)}[/]" if bold else escape(words))
        before = name
    Console(highlight=False).print(table, soft_wrap=True)


class _Bar:
    """A progress bar of the rounds of all trials that are planned so far."""

    def __init__(self, console: Console, *, show: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn()
        text = TextColumn("{task.fields[news]}")
        hidden = not show or not (console.is_terminal or console.is_jupyter)
        self.bar = Progress(*columns, text, console=console, transient=True, disable=hidden)
        self.task = self.bar.add_task("", total=1.0, news="the constants of the data")

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.bar.disable:
            self.bar.stop()

    def news(self, now: Any) -> None:
        parts = [now.doing, *([] if now.best is None else [f"best so far {now.best}"])]
        if now.diverged:
            parts.append(f"{now.diverged} trials diverged")
        self.bar.update(self.task, completed=now.done, news=escape("; ".join(parts)))
