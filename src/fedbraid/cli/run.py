"""``fedbraid run``: train a model as a configuration says."""

from __future__ import annotations

import contextlib
import datetime
import json as json_
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbraid.cli.groups import Output, with_groups
from fedbraid.cli.notes import as_notes
from fedbraid.cli.stopping import BY_CTRL_C, BY_SIGTERM, exit_status
from fedbraid.metric import is_client_column
from fedbraid.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from fedbraid.experiment.summary import RunSummary


DIVERGED = 3  # exit status of a run that diverged


class Hosts(NamedTuple):
    """Options of a run on several hosts."""

    at: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            help="run on several hosts: ADDRESS:PORT of the first host, or auto under SLURM, Open MPI or Kubernetes",
        ),
    ] = None
    host_count: Annotated[int | None, typer.Option(help="number of hosts")] = None
    host_id: Annotated[int | None, typer.Option(help="number of this host, from 0; host 0 writes the files")] = None


@with_groups
def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file (default: the embedded configuration)")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as algorithm.client_lr=0.05; may be repeated")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run folder to make (default: runs/NAME-TIME)")] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder to continue")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="print how the run would be computed, and do not train")
    ] = False,
    *,
    where: Hosts,
    output: Output,
) -> None:
    """Train a model as a configuration says; write a run folder with metrics, checkpoints and a picture.

    Without CONFIG it trains FedAuto ahead on the embedded digits (50 clients), which takes seconds.

    Exit status: 0 if the run is finished, 2 for a mistake in the input, 3 if the run diverged, 130 if you stopped it.
    """
    from fedbraid.experiment import ConfigError
    from fedbraid.simulation import hosts, use_cores

    console = Console(stderr=True, highlight=False)
    hosts.check(*where)
    with as_notes(console):
        loaded, folder, done = _what(config, settings or [], out, resume)
    if done is not None:
        return _already(console, done, folder, output)
    if explain:
        use_cores(loaded.engine.devices)
        with as_notes(console):
            return _explain(loaded, output.json)
    again = resume is not None
    if where.at is None:
        use_cores(loaded.engine.devices)
        try:
            status = _train(console, loaded, folder, again, output)
        except MemoryError as error:
            raise ConfigError(str(error)) from None
    else:
        status = _train_on_hosts(console, loaded, folder, again, where, output)
    if status:
        sys.exit(status)


def _what(
    config: Path | None, settings: list[str], out: Path | None, resume: Path | None
) -> tuple[Any, Path, RunSummary | None]:
    """The configuration to run, the run folder, and the summary of a run that is finished already."""
    from fedbraid.experiment import ConfigError, load_config
    from fedbraid.experiment.runfolder import finished, read_config

    if resume is not None:
        if config is not None or out is not None:
            raise ConfigError("--resume takes everything from the run folder: leave out CONFIG and --out")
        loaded = read_config(resume, settings)
        return loaded, resume, finished(resume, loaded.rounds, loaded.stop)
    loaded = load_config(config, settings)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    # data may be the path of a store, and both may be module:attribute
    what = f"{loaded.algorithm.name}-{Path(loaded.data.name).name}".replace(":", "-")
    return loaded, out if out is not None else Path("runs") / f"{what}-{stamp}", None


def _already(console: Console, summary: RunSummary, folder: Path, output: Output) -> None:
    """A resumed run that is finished: nothing to do, so that a queue may restart it."""
    if output.json:
        print(json_.dumps(summary.to_json()))
    if not output.quiet:
        more = f"Train on with more: fedbraid run --resume {folder} --set rounds=N"
        if summary.stopped:
            more = f"It ended early: {summary.stopped}. Train on with another [stop], such as --set stop.patience=N"
        console.print(f"the run in {folder} is finished: {summary.rounds} rounds. {more}", soft_wrap=True)


def _train_on_hosts(console: Console, loaded: Any, folder: Path, again: bool, where: Hosts, output: Output) -> int:
    """Run as one of several hosts; returns the exit status."""
    from fedbraid.simulation import hosts, use_cores

    assert where.at is not None
    joined = hosts.watch_over(lambda sentence: console.print(f"[bold red]error:[/] {sentence}", soft_wrap=True))
    with _exit_at_once(console):
        hosts.join(where.at, where.host_count, where.host_id)
        joined()
        use_cores(loaded.engine.devices)
        for line in hosts.placement(loaded.engine.devices):
            if hosts.is_first() and output.shown:
                console.print(line, soft_wrap=True)
        return _train(console, loaded, folder, again, output)


def _explain(loaded: Any, json: bool) -> None:
    from fedbraid.experiment.explain import explain_config

    errors = Console(stderr=True, highlight=False)
    with as_notes(errors), errors.status("compiling the program of a client; nothing is trained"):
        found = explain_config(loaded)
    if json:
        return print(json_.dumps(found))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{found['plan']}[/]: {found['how']}")
    console.print(f"devices: {', '.join(found['devices'])}; data {found['data']}; values {found['values']}")
    for line in found["memory"]:
        console.print(escape(line))
    for exchange in found["exchanges"]:
        down, up = format_bytes(exchange["down"]), format_bytes(exchange["up"])
        console.print(f"exchange {exchange['name']}: a client receives {down}, sends {up}")
        for line in found["convolutions"][exchange["name"]] or ["no XLA convolution"]:
            console.print(f"  {escape(line)}")
        for line in (*found["gradients"][exchange["name"]], *found["matrices"][exchange["name"]]):
            console.print(f"  {escape(line)}")
        if found["kernels"][exchange["name"]]:
            console.print(f"  kernels: {escape(', '.join(found['kernels'][exchange['name']]))}")


def _train(console: Console, loaded: Any, folder: Path, again: bool, output: Output) -> int:
    """Run and print the results. Returns the exit status: 0 if the run is finished, 3 if it diverged."""
    from fedbraid.experiment import run_config
    from fedbraid.simulation import hosts

    first = hosts.is_first()
    with _Watch(console, loaded.rounds, show=first and output.shown) as watch:
        watched = {"on_built": watch.built, "on_progress": watch.progress, "on_evaluation": watch.progress}
        summary = run_config(loaded, folder, resume=again, **watched)
    if first and output.json:
        print(json_.dumps(summary.to_json()))
    elif first and not output.quiet:
        _closing(Console(highlight=False), summary)
    if first and not summary.finished:
        console.print(
            f"stopped after round {summary.rounds}; continue with: fedbraid run --resume {folder}", soft_wrap=True
        )
    if first and summary.diverged:
        console.print(f"[bold red]error:[/] {escape(summary.problem)}", soft_wrap=True)
    if not summary.finished:
        return watch.status
    return DIVERGED if summary.diverged else 0


@contextlib.contextmanager
def _exit_at_once(console: Console) -> Iterator[None]:
    """With several hosts: an error ends this process at once, so that the other hosts do not wait for it."""
    from fedbraid.cli.app import system_error
    from fedbraid.simulation import hosts

    status = 1
    try:
        yield
        return
    except (ValueError, MemoryError, OSError, hosts.HostLost) as error:
        status = 2 if isinstance(error, ValueError) else 1
        reason = system_error(error) if isinstance(error, OSError) else str(error)
        console.print(f"[bold red]error:[/] process {hosts.number()}: {escape(reason)}", soft_wrap=True)
    except KeyboardInterrupt as stopped:
        status = exit_status(stopped)
    except BaseException:
        traceback.print_exc()
    hosts.leave(status)


class _Watch:
    """The progress bar and the handler of Ctrl-C and SIGTERM.

    Both end the run after a checkpoint. A second Ctrl-C ends it at once.
    """

    def __init__(self, console: Console, rounds: int, *, show: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.console, self.show, self.stop, self.status = console, show, False, BY_CTRL_C
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
        self.loading = console.status("loading the data and building the model")

    def __enter__(self) -> _Watch:
        self.before = {one: signal.signal(one, self._interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
        self.notes = contextlib.ExitStack()
        self.notes.enter_context(as_notes(self.console))
        if self.show:
            self.loading.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loading.stop()
        if self.bar.live.is_started:
            self.bar.stop()
        for one, before in self.before.items():
            signal.signal(one, before)
        self.notes.close()

    def _interrupt(self, number: int, _: object) -> None:
        if self.stop and number == signal.SIGINT:  # schedulers may send SIGTERM to a process more than once
            raise KeyboardInterrupt
        if not self.stop:
            self.status = BY_SIGTERM if number == signal.SIGTERM else BY_CTRL_C
        self.stop = True
        self.bar.update(self.task, news="stopping after this round ...")

    def built(self, experiment: Any) -> None:
        config, data = experiment.config, experiment.data
        self.loading.stop()
        if self.show:
            from fedbraid.experiment.assembly import from_elsewhere

            others = from_elsewhere(config)
            self.console.print(
                f"[bold]{escape(config.algorithm.name)}[/] on [bold]{escape(config.data.name)}[/]: "
                f"{data.train.num_clients} clients, {data.train.num_examples:,} examples, model "
                f"{escape(config.model.name)}, cohort {config.cohort}"
                + (f", {config.attack.share:.0%} of the clients are attackers" if config.attack.share else "")
                + (f"; code that is not fedbraid's: {escape(', '.join(others))}" if others else ""),
                soft_wrap=True,
            )
            self.bar.start()

    def progress(self, now: Any) -> bool:
        before_round, before_seconds = self.last
        if now.round > before_round:  # not the report after an evaluation
            if now.seconds > before_seconds and before_round:
                self.rate = (now.round - before_round) / (now.seconds - before_seconds)
            self.bytes += sum(v for k, v in now.row.items() if "/bytes_" in k) * (now.round - before_round)
            self.last = (now.round, now.seconds)
        loss = next((v for k, v in now.row.items() if k.endswith("/loss")), None)
        news = [] if loss is None else [f"loss {loss:.3f}"]
        shown = next((name for name in ("test_personal_accuracy", "test_accuracy") if name in now.row), None)
        if shown is not None:
            news.append(f"{shown.removeprefix('test_').replace('_', ' ')} {now.row[shown]:.3f}")
        if now.evaluating or self.rate:
            news.append("evaluating" if now.evaluating else format_rate(self.rate))
        news.append(format_bytes(self.bytes))
        if "simulated_seconds" in now.row:
            news.append(f"{format_seconds(now.row['simulated_seconds'])} simulated")
        if not self.stop:
            self.bar.update(self.task, completed=now.round, news="  ".join(news))
        return self.stop


def _closing(console: Console, summary: RunSummary) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    final, sent = summary.final, summary.bytes
    known = summary.rounds and summary.seconds > 0
    speed = f" ({format_rate(summary.rounds_per_second)} with compilation)" if known else ""
    rows = [
        ("rounds", f"{summary.rounds} in {summary.seconds:.1f} s{speed}"),
        ("sent", f"{format_bytes(sent['down'])} down, {format_bytes(sent['up'])} up"),
    ]
    if summary.simulated_seconds is not None:
        rows.append(("simulated time", format_seconds(summary.simulated_seconds)))
    spread = "clients: mean {mean:.3f}, worst tenth {worst_tenth:.3f}, worst {worst:.3f}, sd {deviation:.3f}"
    accuracies = [name for name in ("test_personal_accuracy", "test_accuracy") if name in final]
    for name in accuracies:
        clients = {word: final[f"{name}_client_{word}"] for word in ("mean", "worst_tenth", "worst", "deviation")}
        rows.append((name.replace("_", " "), f"[bold]{final[name]:.4f}[/]   ({spread.format(**clients)})"))
    for name, value in final.items():
        if name.startswith("test_") and name not in accuracies and not is_client_column(name):
            rows.append((name.replace("_", " "), f"{value:.4f}"))
    best = summary.best
    if best and best["round"] != summary.rounds:
        rows.append(("best", f"{best['metric']} {best['value']:.4f} after round {best['round']}"))
    if summary.stopped:
        rows.append(("ended early", escape(summary.stopped)))
    if "epsilon" in final:
        rows.append(("epsilon", f"{final['epsilon']:.3g} (differential privacy per client)"))
    rows += [("picture", f"{summary.out}/curves.png"), ("run folder", summary.out)]
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=True)
