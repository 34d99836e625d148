"""``fedbraid run``: train what a configuration says."""

from __future__ import annotations

import contextlib
import datetime
import json as json_
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbraid.cli.notes import as_notes


def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file; without one the embedded default runs")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as algorithm.client_lr=0.05; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder to make (default: runs/NAME-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder to continue")] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            help="run on several hosts: ADDRESS:PORT of the first; or auto, under SLURM, Open MPI or Kubernetes",
        ),
    ] = None,
    host_count: Annotated[int | None, typer.Option(help="how many hosts there are")] = None,
    host_id: Annotated[int | None, typer.Option(help="which of them this is, from 0; the first one writes")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="only say how it would be computed")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, no table")] = False,
) -> None:
    """Train a model as a configuration says; write a run folder with metrics, checkpoints and a picture."""
    from fedbraid.experiment import ConfigError, load_config
    from fedbraid.experiment.runfolder import CONFIG, reopen
    from fedbraid.simulation import hosts, use_cores

    if resume is not None:
        if config is not None or out is not None or not all(s.startswith("engine.") for s in settings or []):
            raise ConfigError(
                "--resume takes everything from the run folder: leave out CONFIG, --out and --set, except for keys of "
                "engine, which change no results"
            )
        reopen(resume)  # refuses what is no run, or is finished
        loaded, folder = load_config(resume / CONFIG, settings or []), resume
    else:
        loaded = load_config(config, settings or [])
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        what = f"{loaded.algorithm.name}-{Path(loaded.data.name).name}"  # data may be the path of a store
        folder = out if out is not None else Path("runs") / f"{what}-{stamp}"
    hosts.check(at, host_count, host_id)
    if explain:
        use_cores(loaded.engine.devices)
        return _explain(loaded, json)
    console = Console(stderr=True, highlight=False)
    if at is None:
        use_cores(loaded.engine.devices)
        try:
            finished = _train(console, loaded, folder, resume is not None, json, quiet)
        except MemoryError as error:
            raise ConfigError(str(error)) from None
        if not finished:
            sys.exit(130)
        return
    joined = hosts.watch_over(lambda sentence: console.print(f"[bold red]error:[/] {sentence}", soft_wrap=True))
    with _together(console):
        hosts.join(at, host_count, host_id)
        joined()
        use_cores(loaded.engine.devices)
        for line in hosts.placement(loaded.engine.devices):
            if hosts.is_first() and not (quiet or json):
                console.print(line, soft_wrap=True)
        finished = _train(console, loaded, folder, resume is not None, json, quiet)
    if not finished:
        sys.exit(130)


def _explain(loaded: Any, json: bool) -> None:
    from fedbraid.experiment.explain import explain_config

    found = explain_config(loaded)
    if json:
        return print(json_.dumps(found))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{found['plan']}[/]: {found['how']}")
    console.print(f"devices: {', '.join(found['devices'])}; data {found['data']}")
    for exchange in found["exchanges"]:
        console.print(
            f"exchange {exchange['name']}: a client gets {size(exchange['down'])}, sends {size(exchange['up'])}"
        )
        for line in found["convolutions"][exchange["name"]] or ["no convolution of XLA's"]:
            console.print(f"  {escape(line)}")
        for line in found["matrices"][exchange["name"]]:
            console.print(f"  {escape(line)}")
        if found["kernels"][exchange["name"]]:
            console.print(f"  kernels: {escape(', '.join(found['kernels'][exchange['name']]))}")


def _train(console: Console, loaded: Any, folder: Path, resume: bool, json: bool, quiet: bool) -> bool:
    """Run, and tell of it; whether it came to its end."""
    from fedbraid.experiment import run_config
    from fedbraid.simulation import hosts

    first = hosts.is_first()
    with _Watch(console, loaded.rounds, show=first and not (quiet or json)) as watch:
        summary = run_config(loaded, folder, resume=resume, on_built=watch.built, on_progress=watch.progress)
    if first and json:
        print(json_.dumps(summary))
    elif first and not quiet:
        _closing(Console(highlight=False), summary)
    if first and not summary["finished"]:
        console.print(f"stopped after round {summary['rounds']}; go on with: fedbraid run --resume {folder}")
    return summary["finished"]


@contextlib.contextmanager
def _together(console: Console) -> Iterator[None]:
    """One of several hosts: whatever goes wrong here ends this process at once, so that the others need not wait."""
    from fedbraid.simulation import hosts

    status = 1
    try:
        yield
        return
    except (ValueError, MemoryError, OSError, hosts.HostLost) as error:
        status = 2 if isinstance(error, ValueError) else 1
        console.print(f"[bold red]error:[/] process {hosts.number()}: {escape(str(error))}", soft_wrap=True)
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    hosts.leave(status)


class _Watch:
    """The progress bar, and Ctrl-C: the first one ends the run after a checkpoint, the second at once."""

    def __init__(self, console: Console, rounds: int, *, show: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console, self.show, self.stop = console, show, False
        self.cost: Any = None
        self.cohort = 0
        self.bytes = 0.0
        self.last: tuple[int, float] = (0, 0.0)
        self.rate = 0.0
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not show,
        )
        self.task = self.bar.add_task("", total=rounds, news="compiling")

    def __enter__(self) -> _Watch:
        self.before = signal.signal(signal.SIGINT, self._interrupt)
        self.notes = contextlib.ExitStack()
        self.notes.enter_context(as_notes(self.console))
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar.live.is_started:
            self.bar.stop()
        signal.signal(signal.SIGINT, self.before)
        self.notes.close()

    def _interrupt(self, *_: object) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        self.bar.update(self.task, news="stopping after this round ...")

    def built(self, experiment: Any) -> None:
        config, data = experiment.config, experiment.data
        if self.show:
            self.console.print(
                f"[bold]{config.algorithm.name}[/] on [bold]{config.data.name}[/]: {data.train.num_clients} clients, "
                f"{data.train.num_examples:,} examples, model {config.model.name}, cohort {config.cohort}"
                + (f", {config.attack.share:.0%} of the clients lie" if config.attack.share else "")
            )
            self.bar.start()

    def progress(self, now: Any) -> bool:
        before_round, before_seconds = self.last
        if now.seconds > before_seconds and before_round:
            self.rate = (now.round - before_round) / (now.seconds - before_seconds)
        sent = sum(v for k, v in now.row.items() if "/bytes_" in k) * (now.round - before_round)
        self.bytes += sent
        self.last = (now.round, now.seconds)
        loss = next((v for k, v in now.row.items() if k.endswith("/loss")), None)
        news = [] if loss is None else [f"loss {loss:.3f}"]
        if "test_accuracy" in now.row:
            news.append(f"accuracy {now.row['test_accuracy']:.3f}")
        if self.rate:
            news.append(f"{self.rate:.1f} rounds/s")
        news.append(size(self.bytes))
        if not self.stop:
            self.bar.update(self.task, completed=now.round, news="  ".join(news))
        return self.stop


def size(count: float) -> str:
    """Bytes for people.

    >>> size(12_345_678)
    '12.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _closing(console: Console, summary: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    final = summary["final"]
    rows = [
        ("rounds", f"{summary['rounds']} in {summary['seconds']:.1f} s ({summary['rounds_per_second']:.1f} a second)"),
        ("sent", f"{size(summary['bytes']['down'])} down, {size(summary['bytes']['up'])} up"),
    ]
    if "test_accuracy" in final:
        clients = {word: final[f"test_accuracy_client_{word}"] for word in ("mean", "p10", "worst")}
        spread = "clients: mean {mean:.3f}, 10th percentile {p10:.3f}, worst {worst:.3f}".format(**clients)
        rows.append(("test accuracy", f"[bold]{final['test_accuracy']:.4f}[/]   ({spread})"))
    if "test_loss" in final:
        rows.append(("test loss", f"{final['test_loss']:.4f}"))
    if "epsilon" in final:
        rows.append(("epsilon", f"{final['epsilon']:.3g} (differential privacy, by client)"))
    rows += [("picture", f"{summary['out']}/curves.png"), ("run folder", summary["out"])]
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=True)
