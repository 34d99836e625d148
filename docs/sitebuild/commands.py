"""The page of the command line: every command, argument and option, from the typer app."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import get_type_hints

import click
import typer.main

from fedbraid.cli.app import make_app

Path = tuple[str, ...]  # the words of a command


@cache
def application() -> click.Group:
    """The command line as click sees it."""
    app = typer.main.get_command(make_app())
    assert isinstance(app, click.Group) or hasattr(app, "commands")
    return app  # pyright: ignore[reportReturnType]


def walk(
    command: click.Command, path: tuple[str, ...] = ("fedbraid",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words; groups before their commands."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


def commands_page() -> str:
    """The page as Markdown."""
    lines = [
        "# Command line",
        "",
        "Every command with its arguments and options. `fedbraid COMMAND --help` prints the same in a terminal.",
        "",
    ]
    for path, command in walk(application()):
        if len(path) == 1:
            continue
        lines += [f"{'#' * len(path)} {' '.join(path)}", "", _about(command), ""]
        if getattr(command, "commands", None):
            continue
        context = click.Context(command, info_name=" ".join(path))
        usage = " ".join(command.collect_usage_pieces(context))
        lines += ["```text", f"{' '.join(path)} {usage}", "```", ""]
        rows = [
            _row(parameter, help_of(parameter, command))
            for parameter in command.params
            if not getattr(parameter, "hidden", False)
        ]
        if rows:
            lines += ["| argument or option | value | default | what it does |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def help_of(parameter: click.Parameter, command: click.Command) -> str:
    """The help of an option or argument. Newer clicks drop that of typer's arguments: it is read from the function."""
    if text := getattr(parameter, "help", None):
        return text
    function = inspect.unwrap(command.callback) if command.callback else None
    hint = get_type_hints(function, include_extras=True).get(parameter.name or "") if function else None
    return next((info.help for info in getattr(hint, "__metadata__", ()) if getattr(info, "help", None)), "")


def _about(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or command.short_help or "")
    return text.replace("\b", "").replace("<", "&lt;")


def _row(parameter: click.Parameter, text: str) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = (
        ", ".join(f"`{name}`" for name in names)
        if parameter.param_type_name == "option"
        else f"`{parameter.human_readable_name}`"
    )
    kind = parameter.type
    value = "" if getattr(parameter, "is_flag", False) else _value(kind)
    if parameter.multiple or parameter.nargs == -1:
        value += ", any number of times" if parameter.param_type_name == "option" else " ..."
    given = parameter.default
    default = (
        "required" if parameter.required else "" if given in (None, (), [], False) or callable(given) else f"`{given}`"
    )
    cells = (shown, value, default, text.replace("\n", " "))
    return f"| {' | '.join(map(_cell, cells))} |"


def _value(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    limits = [getattr(kind, "min", None), getattr(kind, "max", None)]
    if any(limit is not None for limit in limits):
        low, high = limits
        return f"{kind.name} {'' if low is None else f'from {low}'} {'' if high is None else f'to {high}'}".strip()
    return kind.name


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
