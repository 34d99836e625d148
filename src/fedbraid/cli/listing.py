"""``fedbraid list``: the algorithms, data sets, models and transforms of configurations."""

from __future__ import annotations

import inspect
import json as json_
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

KINDS = ("algorithms", "datasets", "models", "transforms")


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _entries(kind: str) -> list[dict[str, Any]]:
    from fedbraid import algorithms, transforms
    from fedbraid.data.catalog import CATALOG
    from fedbraid.experiment.config import options_of
    from fedbraid.models import MODELS

    if kind == "datasets":
        return [{"name": n, "about": e.about, "options": _plain(dict(e.defaults))} for n, e in CATALOG.items()]
    table = {"algorithms": algorithms.ALGORITHMS, "models": MODELS, "transforms": transforms.TRANSFORMS}[kind]
    given = ("loss", "alg", "outputs", "data", "population", "params")
    return [
        {"name": name, "about": _first_line(factory), "options": _plain(options_of(factory, skip=given))}
        for name, factory in table.items()
    ]


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    simple = (int, float, str, bool, type(None))
    return {
        k: (None if v is inspect.Parameter.empty else v if isinstance(v, simple) else str(v))
        for k, v in options.items()
    }


def command(
    kind: Annotated[str, typer.Argument(help="algorithms, datasets, models or transforms")],
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """List the names that a configuration can use, with their options and defaults."""
    from fedbraid.experiment.config import ConfigError, unknown

    if kind not in KINDS:
        raise ConfigError(unknown("list of", kind, KINDS))
    entries = _entries(kind)
    if json:
        print(json_.dumps({kind: entries}))
        return
    table = Table("name", "what it is", "options", box=None, padding=(0, 2, 0, 0))
    for entry in entries:
        options = ", ".join(k if v is None else f"{k}={v}" for k, v in entry["options"].items())
        table.add_row(f"[bold]{entry['name']}[/]", entry["about"], options)
    Console(highlight=False).print(table)
