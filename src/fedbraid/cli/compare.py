"""``fedbraid compare``: several methods under equal conditions."""

from __future__ import annotations

import datetime
import json as json_
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedbraid.cli.groups import Output, with_groups
from fedbraid.cli.notes import as_notes
from fedbraid.cli.stopping import exit_status


@with_groups
def command(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file with [[methods]] (default: the embedded comparison of five methods)"),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, such as compare.seeds=5")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="equal for all methods: rounds, client-communication or total-communication"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder to make (default: runs/compare-DATA-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder of a stopped comparison to continue")] = None,
    *,
    output: Output,
) -> None:
    """Tune, run and test several methods with the same cohorts, initial model and seeds; print one table."""
    from fedbraid.cli.sweep import Bar
    from fedbraid.experiment import ConfigError
    from fedbraid.experiment.compare import run_comparison
    from fedbraid.experiment.comparison import load_comparison, reopen_comparison
    from fedbraid.simulation import use_cores

    if resume is not None:
        if config is not None or settings or out is not None or protocol:
            raise ConfigError("--resume takes everything from the folder: leave out CONFIG and all other options")
        comparison, folder = reopen_comparison(resume), resume
    else:
        extra = [f"compare.protocol={protocol}"] if protocol else []
        comparison = load_comparison(config, [*(settings or []), *extra])
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = out if out is not None else Path("runs") / f"compare-{comparison.base.data.name}-{stamp}"
    use_cores(comparison.base.engine.devices)
    console = Console(stderr=True, highlight=False)
    try:
        with as_notes(console), Bar(console, show=output.shown) as bar:

            def told(label: str, news: Any) -> None:
                bar.about = label
                bar.news(news)

            summary = run_comparison(comparison, folder, resume=resume is not None, on_news=told)
    except KeyboardInterrupt as stopped:
        console.print(
            f"stopped; finished work is kept. Continue with: fedbraid compare --resume {folder}", soft_wrap=True
        )
        sys.exit(exit_status(stopped))
    if output.json:
        print(json_.dumps(summary))
    elif not output.quiet:
        _closing(Console(highlight=False), summary, folder)


def _closing(console: Console, summary: dict[str, Any], folder: Path) -> None:
    from fedbraid.experiment.comparison import rows_by_model

    methods = rows_by_model(summary["methods"])
    timed = any(row.get("simulated_seconds") is not None for row in methods)
    table = _table(summary, methods, timed)
    if console.width < 100:
        table.padding = (0, 1, 0, 0)
    console.print(table)
    over = ", ".join(map(str, summary["seeds"]))
    equal = summary["protocol"].replace("-", " ")
    console.print(f"\n{summary['criterion']}; mean ± deviation over seeds {over}; equal {equal}.")
    console.print("worst tenth: 10% of the clients score worse, each on its own test examples, with the last model.")
    if timed:
        console.print("time: simulated, by the clock of the configuration; mean over seeds.")
    if summary["tuned_on"]:
        console.print(f"Tuned on {summary['tuned_on']}; the test set was not used.")
    for row in summary.get("baselines", ()):
        elsewhere = row.get("everywhere")
        more = "" if elsewhere is None else f". On all clients' examples its model has {elsewhere:.4f} on average"
        console.print(f"[italic]{row['label']}[/]: {row['about']}{more} ({row['seconds']:.0f} s).", soft_wrap=True)
    edges = [f"{row['label']}: {key.split('.')[-1]}" for row in methods if row["best"] for key in row["at_edge"]]
    if edges:
        console.print(f"[yellow]best at the edge of the grid, try values beyond it: {'; '.join(edges)}[/]")
    console.print(f"\nnext: fedbraid report {folder} --open", soft_wrap=True)


def _table(summary: dict[str, Any], methods: list[dict[str, Any]], timed: bool) -> Table:
    """One row per method, then the baselines. timed: whether the configuration has a clock."""
    from fedbraid.experiment.trials import judged_by

    metric, target = summary["metric"], summary["target"]
    heads = ["method", "tuned to", "cohort", (metric or "score").removeprefix("test_")]
    heads += [f"rounds to {target:g}", f"sent to {target:g}"] if target is not None else []
    heads += ["time" if target is None else f"time to {target:g}"] if timed else []
    heads += ["worst tenth", "worst"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    scores = [row["score"] for row in methods if row.get("score") is not None]
    best = judged_by(summary).best(scores) if scores else None
    for row in methods:
        table.add_row(*_cells(row, summary, best, timed))
    for baseline in _baseline_rows(summary, timed):
        table.add_row(*baseline, style="italic")
    return table


def _cells(row: dict[str, Any], summary: dict[str, Any], best: float | None, timed: bool) -> list[str]:
    """The cells of a method. best: the best score of all methods, which is printed in bold."""
    from fedbraid.cli.sweep import show
    from fedbraid.units import format_bytes, format_seconds

    if row["best"] is None:
        return [row["label"], "every point diverged", str(row["cohort"])]
    values = ", ".join(f"{key.split('.')[-1]} {show(value)}" for key, value in row["best"].items())
    cells = [row["label"], values, str(row["cohort"])]
    if row["score"] is None:
        cells.append(f"{row['diverged']} diverged")
    else:
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2g}"
        score = f"{row['score']:.4f}"
        cells.append((f"[bold]{score}[/]" if row["score"] == best else score) + spread)
    if summary["target"] is not None:
        never = f"{row['reached']} of {len(summary['seeds'])} seeds"
        rounds, sent = row["rounds_to_target"], row["bytes_to_target"]
        cells += [never if rounds is None else f"{rounds:.0f}", "" if sent is None else format_bytes(sent)]
    if timed:
        time = row.get("simulated_seconds" if summary["target"] is None else "simulated_seconds_to_target")
        cells.append("" if time is None else format_seconds(time))
    clients = row["clients"] or {}
    return cells + [f"{clients[name]:.3f}" if name in clients else "" for name in ("worst_tenth", "worst")]


def _baseline_rows(summary: dict[str, Any], timed: bool) -> list[list[str]]:
    """The rows of the baselines, after an empty row: they are no methods, send nothing and are never the best."""
    from fedbraid.cli.sweep import show

    rows: list[list[str]] = []
    for row in summary.get("baselines", ()):
        values = ", ".join(f"{key.split('.')[-1]} {show(value)}" for key, value in (row["best"] or {}).items())
        spread = "" if row["deviation"] is None else f" ± {row['deviation']:.2g}"
        score = "diverged" if row["score"] is None else f"{row['score']:.4f}{spread}"
        clients = row["clients"] or {}
        rest = [f"{clients[name]:.3f}" if name in clients else "" for name in ("worst_tenth", "worst")]
        empty = [""] * ((2 if summary["target"] is not None else 0) + timed)
        rows.append([row["label"], values or "every point diverged", "-", score, *empty, *rest])
    return [[], *rows] if rows else []
