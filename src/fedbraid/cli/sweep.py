"""``fedbraid sweep``: try many points of a configuration. Points with equal shapes run as one program."""

from __future__ import annotations

import datetime
import json as json_
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from fedbraid.cli.groups import Output, with_groups
from fedbraid.cli.notes import as_notes
from fedbraid.cli.stopping import exit_status


class Search(NamedTuple):
    """Options that override keys of the ``[sweep]`` section."""

    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", help="KEY=VALUES, such as algorithm.client_lr=logspace(-4,0,9) or 0.1,0.3,1; may be repeated"
        ),
    ] = None
    grid: Annotated[str | None, typer.Option(help="a named grid: mime-light or mime-heavy; --over adds to it")] = None
    seeds: Annotated[int | None, typer.Option(help="tuning seeds per point")] = None
    search: Annotated[str | None, typer.Option(help="grid, random or adaptive (optuna)")] = None
    trials: Annotated[int | None, typer.Option(help="points of a random or adaptive search")] = None
    halving: Annotated[
        int | None, typer.Option(help="successive halving: after each stage, continue with one of this many points")
    ] = None
    metric: Annotated[str | None, typer.Option(help="metric to compare by: accuracy, loss, train/loss ...")] = None
    better: Annotated[
        str | None, typer.Option(help="higher or lower, for a metric that does not declare its direction")
    ] = None
    last: Annotated[int | None, typer.Option(help="average the metric over this many last rounds")] = None
    target: Annotated[float | None, typer.Option(help="compare by the rounds until the metric has this value")] = None
    validation: Annotated[float | None, typer.Option(help="share of each client's training examples to tune on")] = None
    at_once: Annotated[int | None, typer.Option(help="points in one program at most (default: by memory)")] = None

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that were given."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return given | ({"over": dict(_split(one) for one in self.over)} if self.over else {})


class Workers(NamedTuple):
    """Options of a sweep on a cluster."""

    cluster: Annotated[str | None, typer.Option(help="divide the points among workers: slurm, or local")] = None
    workers: Annotated[int | None, typer.Option(help="workers on the cluster at most (default: 4)")] = None
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the workers, such as slurm_partition=gpu, gpus_per_node=1, timeout_min=60"),
    ] = None
    bundle: Annotated[int | None, typer.Option(hidden=True, help="bundle of --resume that this worker runs")] = None

    def check(self, resume: Path | None) -> None:
        from fedbraid.experiment import ConfigError

        if self.cluster not in (None, "slurm", "local"):
            raise ConfigError(f"--cluster must be slurm or local, got {self.cluster!r}")
        if self.cluster is None and (self.workers is not None or self.cluster_set):
            raise ConfigError("--workers and --cluster-set need --cluster slurm or --cluster local")
        if self.bundle is not None and (resume is None or self.cluster is not None):
            raise ConfigError("--bundle needs --resume FOLDER and no --cluster: only workers of a cluster use it")


@with_groups
def command(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file, with or without a [sweep] section (default: the embedded configuration)"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as algorithm.name=fedprox; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder to make (default: runs/sweep-NAME-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder of a stopped sweep to continue")] = None,
    *,
    search: Search,
    where: Workers,
    output: Output,
) -> None:
    """Try many values of configuration keys and find the best, by scores on a validation split and tuning seeds."""
    from fedbraid.experiment import ConfigError
    from fedbraid.experiment.sweep import load_sweep, reopen_sweep

    where.check(resume)
    if resume is not None:
        if config is not None or settings or out is not None or search.changes:
            raise ConfigError("--resume takes everything from the folder: leave out CONFIG and all other options")
        sweep, folder = reopen_sweep(resume), resume
    else:
        sweep = load_sweep(config, settings or [], search.changes)
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        loaded = sweep[0]
        what = f"sweep-{loaded.algorithm.name}-{Path(loaded.data.name).name}"  # data may be the path of a store
        folder = out if out is not None else Path("runs") / f"{what}-{stamp}"
    console = Console(stderr=True, highlight=False)
    try:
        with as_notes(console), Bar(console, show=output.shown) as bar:
            summary = _sweep(sweep, folder, where, resume=resume is not None, on_news=bar.news)
    except KeyboardInterrupt as stopped:
        console.print(
            f"stopped; the finished trials are kept. Continue with: fedbraid sweep --resume {folder}", soft_wrap=True
        )
        sys.exit(exit_status(stopped))
    if summary is None:
        return
    if output.json:
        print(json_.dumps(summary))
    elif not output.quiet:
        _closing(Console(highlight=False), summary, folder)


def _sweep(sweep: tuple[Any, Any], folder: Path, where: Workers, **again: Any) -> dict[str, Any] | None:
    """Run the sweep on this machine or by workers. A worker runs one bundle of the sweep and returns None."""
    from fedbraid.experiment.cluster import BUNDLES, Cluster, collect, run_bundle, sweep_on
    from fedbraid.experiment.config import read_tree
    from fedbraid.experiment.runfolder import held
    from fedbraid.experiment.sweep import run_sweep
    from fedbraid.simulation import use_cores

    if where.cluster in ("slurm", "local"):
        workers = 4 if where.workers is None else where.workers
        there = Cluster(where.cluster, workers, read_tree(None, where.cluster_set or []))
        return sweep_on(there, *sweep, folder, **again)
    use_cores(sweep[0].engine.devices)
    if where.bundle is not None:
        run_bundle(folder, where.bundle, on_news=again["on_news"])
        return None
    if again["resume"] and (folder / BUNDLES).is_file():
        with held(folder):
            collect(folder)  # the trials that workers have finished, so that they are not run again
    return run_sweep(*sweep, folder, **again)


def _split(text: str) -> tuple[str, str]:
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ValueError(f"--over must be KEY=VALUES, such as algorithm.client_lr=logspace(-4,0,9); got {text!r}")
    return key.strip(), values.strip()


class Bar:
    """A progress bar of trials and rounds that shows the best point so far."""

    def __init__(self, console: Console, *, show: bool) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskID,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self.bar: Progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            transient=True,
            disable=not show or not (console.is_terminal or console.is_jupyter),
        )
        self.task: TaskID = self.bar.add_task("", total=1.0, news="compiling")
        self.about = ""

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.bar.disable:
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
    """A value as short text."""
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
            table.add_row("", f"[yellow]{key} is best at the edge of its values: try values beyond it[/]")
        table.add_row("train and test it", f"fedbraid run {folder}/best.toml")
    table.add_row("picture", f"{folder}/sweep.png")
    table.add_row("all trials", f"{folder}/trials.parquet")
    console.print(table, soft_wrap=True)
