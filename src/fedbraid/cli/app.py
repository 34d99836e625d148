"""The entry point: the commands and groups, and the printing of errors."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any, get_type_hints

import click
import click.exceptions
import typer
import typer.core
from rich.console import Console

from fedbraid.cli.stopping import catch_sigterm, exit_status
from fedbraid.start import started

GROUPS = {
    "theory": "Compute what a method converges to, and how fast, without training.",
    "data": "List, import, partition, inspect and plot data.",
    "deploy": "Run an algorithm on separate machines through Flower.",
}
COMMANDS = (
    "run",
    "tune-engine",
    "sweep",
    "compare",
    "advise",
    "report",
    "export",
    "reproduce",
    "list",
    "cost",
    "diagnose",
)


class _Commands(typer.core.TyperGroup):
    """The commands; one that is stopped by Ctrl-C or SIGTERM exits without a message of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _complete(self)

    def invoke(self, ctx: Any) -> Any:
        with _quiet_when_stopped():
            return super().invoke(ctx)


def _complete(command: Any) -> None:
    """Adapt typer below 0.21 to newer clicks, in a command and its sub-commands.

    Click 8.5 deletes the help texts that typer gives to arguments: they are read again from the function. Click 8.4
    suggests commands itself: typer would repeat the suggestion.
    """
    function = inspect.unwrap(command.callback) if command.callback else None
    hints = get_type_hints(function, include_extras=True) if function else {}
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperArgument) and not parameter.help:
            infos = getattr(hints.get(parameter.name), "__metadata__", ())
            parameter.help = next((info.help for info in infos if getattr(info, "help", None)), None)
    if hasattr(click.exceptions, "NoSuchCommand"):
        command.suggest_commands = False
    for inner in getattr(command, "commands", {}).values():
        _complete(inner)


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="fedbraid",
        cls=_Commands,
        help="Train models on the data of many clients (federated learning): simulate, compare, tune and deploy. "
        "Start with: fedbraid run",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(help=app.info.help)(_options)
    for name in COMMANDS:
        if (module := _module(name)) is not None:
            app.command(name)(module.command)
    for name, about in GROUPS.items():
        if (module := _module(name)) is not None:
            app.add_typer(module.app, name=name, help=about)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        import fedbraid

        print(f"fedbraid {fedbraid.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """The options of the program itself."""


def _module(name: str):
    where = "listing" if name == "list" else name.replace("-", "_")
    if importlib.util.find_spec(f"fedbraid.cli.{where}") is None:
        return None
    return importlib.import_module(f"fedbraid.cli.{where}")


def main() -> None:
    """Run the command line.

    A ValueError (a mistake of the user) is printed in red and exits with 2. An error of the operating system, and too
    little memory, exit with 1.
    """
    catch_sigterm()
    started()
    try:
        with _quiet_when_stopped():
            make_app()()
    except ValueError as error:
        _print_error(str(error))
        sys.exit(2)
    except OSError as error:
        _print_error(system_error(error))
        sys.exit(1)
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and "failed to map segment" not in str(error):
            raise
        _print_error(f"out of memory: {error or 'a limit on memory or address space (ulimit -v) is too low'}")
        sys.exit(1)


@contextlib.contextmanager
def _quiet_when_stopped() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stopped:
        sys.exit(exit_status(stopped))


def system_error(error: OSError) -> str:
    """An error of the operating system as one line: the path, the reason, and what to do about a full disk.

    >>> system_error(PermissionError(errno.EACCES, "Permission denied", "runs/mine"))
    'runs/mine: Permission denied; check who may read and write it, or choose another place (--out)'
    """
    if error.strerror is None:
        return " ".join(str(error).split()) or type(error).__name__
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    return f"{' -> '.join(paths)}{': ' if paths else ''}{error.strerror}{_NEXT.get(error.errno or 0, '')}"


_NEXT = {
    errno.ENOSPC: "; free some space and run the command again",
    errno.EDQUOT: "; free some space and run the command again",
    errno.EACCES: "; check who may read and write it, or choose another place (--out)",
    errno.EROFS: "; choose a place that you may write to (--out)",
    errno.ENOTDIR: "; a part of this path is a file, not a folder: check the path, or choose another place (--out)",
}


def _print_error(text: str) -> None:
    message = Console(stderr=True, highlight=False)
    for line in text.splitlines():
        message.print(f"[bold red]error:[/] {_plain(line)}", soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
