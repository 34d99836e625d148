"""The entry point: the commands and groups, and the printing of errors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated

import typer
from rich.console import Console

GROUPS = {
    "theory": "what a method converges to, and how fast",
    "data": "import, split and inspect data",
    "deploy": "a real federation through Flower",
}
COMMANDS = ("run", "tune-engine", "sweep", "compare", "report", "reproduce", "list", "cost", "diagnose")


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="fedbraid",
        help="Federated optimization: write an algorithm once, simulate, understand, tune, deploy.",
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
    """Run the command line. A ValueError (a mistake of the user) is printed in red and exits with code 2."""
    try:
        make_app()()
    except ValueError as error:
        message = Console(stderr=True, highlight=False)
        for line in str(error).splitlines():
            message.print(f"[bold red]error:[/] {_plain(line)}", soft_wrap=True)
        sys.exit(2)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
