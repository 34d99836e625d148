"""``fedbraid sweep``: many points of a configuration, as few programs as there are shapes."""

from __future__ import annotations

import datetime
import json as json_
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedbraid.cli.notes import as_notes


def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file, with a sweep section or without")] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", help="KEY=VALUES, such as algorithm.client_lr=logspace(-4,0,9) or 0.1,0.3,1; may be repeated"
        ),
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value of the configuration")] = None,
    seeds: Annotated[int | None, typer.Option(help="tuning seeds per point")] = None,
    search: Annotated[str | None, typer.Option(help="grid, random or adaptive (optuna)")] = None,
    trials: Annotated[int | None, typer.Option(help="points of a random or adaptive search")] = None,
    halving: Annotated[
        int | None, typer.Option(help="successive halving: each rung keeps one point in so many")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="what to judge by: accuracy, loss, train/loss ...")] = None,
    last: Annotated[int | None, typer.Option(help="rounds at the end that the metric is averaged over")] = None,
    target: Annotated[float | None, typer.Option(help="judge by the rounds to this value of the metric")] = None,
    validation: Annotated[
        float | None, typer.Option(help="share of each client's training examples to tune on")
    ] = None,
    at_once: Annotated[int | None, typer.Option(help="points in one program at most (default: what fits)")] = None,
    out: Annotated[Path | None, typer.Option(help="folder to make (default: runs/sweep-NAME-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder of a stopped sweep to go on with")] = None,
    cluster: Annotated[str | None, typer.Option(help="deal the points out to workers: slurm, or local")] = None,
    workers: Annotated[int | None, typer.Option(help="workers on the cluster at most (default: 4)")] = None,
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the workers, such as slurm_partition=gpu, gpus_per_node=1, timeout_min=60"),
    ] = None,
    bundle: Annotated[int | None, typer.Option(hidden=True, help="what a worker runs: one bundle of --resume")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, no table")] = False,
) -> None:
    """Try many values of keys and find the best, on a validation split and on seeds of its own."""
    from fedbraid.experiment import ConfigError
    from fedbraid.experiment.cluster import BUNDLES, Cluster, collect, run_bundle, sweep_on
    from fedbraid.experiment.config import read_tree
    from fedbraid.experiment.sweep import load_sweep, reopen_sweep, run_sweep
    from fedbraid.simulation import use_cores

    given = {
        "seeds": seeds,
        "search": search,
        "trials": trials,
        "halving": halving,
        "metric": metric,
        "last": last,
        "target": target,
        "validation": validation,
        "at_once": at_once,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if over:
        changes["over"] = dict(_split(one) for one in over)
    if cluster not in (None, "slurm", "local"):
        raise ConfigError(f"--cluster must be slurm or local, got {cluster!r}")
    if cluster is None and (workers is not None or cluster_set):
        raise ConfigError("--workers and --cluster-set go with --cluster slurm or --cluster local")
    if bundle is not None and (resume is None or cluster is not None):
        raise ConfigError("--bundle goes with --resume FOLDER alone: it is what the workers of a cluster run")
    if resume is not None:
        if config is not None or settings or out is not None or changes:
            raise ConfigError("--resume takes everything from the folder: leave out CONFIG and all other options")
        loaded, tuning = reopen_sweep(resume)
        folder = resume
    else:
        loaded, tuning = load_sweep(config, settings or [], changes)
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        what = f"sweep-{loaded.algorithm.name}-{Path(loaded.data.name).name}"  # data may be the path of a store
        folder = out if out is not None else Path("runs") / f"{what}-{stamp}"
    console = Console(stderr=True, highlight=False)
    try:
        with as_notes(console), Bar(console, show=not (quiet or json)) as bar:
            again: dict[str, Any] = {"resume": resume is not None, "on_news": bar.news}
            if cluster is not None:
                there = Cluster(cluster, 4 if workers is None else workers, read_tree(None, cluster_set or []))
                summary = sweep_on(there, loaded, tuning, folder, **again)
            else:
                use_cores(loaded.engine.devices)
                if bundle is not None:
                    run_bundle(folder, bundle, on_news=bar.news)
                    return
                if resume is not None and (folder / BUNDLES).is_file():
                    collect(folder)  # what workers finished is not run again
                summary = run_sweep(loaded, tuning, folder, **again)
    except KeyboardInterrupt:
        console.print(f"stopped; the finished trials are kept. Go on with: fedbraid sweep --resume {folder}")
        sys.exit(130)
    if json:
        print(json_.dumps(summary))
    elif not quiet:
        _closing(Console(highlight=False), summary, folder)


def _split(text: str) -> tuple[str, str]:
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ValueError(f"--over reads KEY=VALUES, such as algorithm.client_lr=logspace(-4,0,9); got {text!r}")
    return key.strip(), values.strip()


class Bar:
    """A progress bar over trials and rounds that tells the best so far."""

    def __init__(self, console: Console, *, show: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            transient=True,
            disable=not show,
        )
        self.task = self.bar.add_task("", total=1.0, news="compiling")
        self.about = ""

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def news(self, now: Any) -> None:
        parts = [self.about] if self.about else []
        parts.append(now.doing)
        if now.best is not None:
            values = ", ".join(f"{key.split('.')[-1]}={show(value)}" for key, value in now.best.items())
            parts.append(f"best {now.score:.4g} at {values}")
        if now.diverged:
            parts.append(f"{now.diverged} diverged")
        self.bar.update(self.task, completed=now.done, news="; ".join(parts))


def show(value: Any) -> str:
    """A value for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _closing(console: Console, summary: dict[str, Any], folder: Path) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    programs = f"{summary['programs']} program{'s' if summary['programs'] != 1 else ''}"
    counts = f"{summary['points']} points, {summary['trials']} trials in {summary['seconds']:.1f} s, {programs}"
    if summary["diverged"]:
        counts += f"; {summary['diverged']} diverged"
    if summary["stopped"]:
        counts += f"; {summary['stopped']} stopped early"
    table.add_row("tried", counts)
    table.add_row("judged by", f"{summary['criterion']}; {summary['tuned_on']}")
    if summary["best"] is None:
        table.add_row("best", "[bold]none[/]: every point diverged or was stopped")
    else:
        values = ", ".join(f"{key} = {show(value)}" for key, value in summary["best"].items())
        spread = "" if summary["deviation"] is None else f" ± {summary['deviation']:.2g}"
        table.add_row("best", f"[bold]{values}[/]   ({summary['score']:.4f}{spread})")
        for key in summary["at_edge"]:
            table.add_row("", f"[yellow]{key} is best at the edge of its values: look beyond[/]")
        table.add_row("train and test it", f"fedbraid run {folder}/best.toml")
    table.add_row("picture", f"{folder}/sweep.png")
    table.add_row("all trials", f"{folder}/trials.parquet")
    console.print(table, soft_wrap=True)
