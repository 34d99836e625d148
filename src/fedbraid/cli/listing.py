"""``fedbraid list``: the algorithms, data sets, models, partitions and transforms of configurations."""

from __future__ import annotations

import inspect
import json as json_
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from fedbraid.names import Found, Names

KINDS = ("algorithms", "datasets", "models", "partitions", "transforms")
# arguments that a run provides: they are no options
GIVEN = (
    "loss",
    "alg",
    "outputs",
    "features",
    "num_features",
    "data",
    "population",
    "params",
    "example_shapes",
    "num_classes",
)
ROWS = ("n", "labels", "coarse", "fine", "arrays")  # the same for partitions


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _names(kind: str) -> Names:
    from fedbraid import algorithms, models, transforms
    from fedbraid.data import catalog, partition

    rooms = {
        "algorithms": algorithms,
        "datasets": catalog,
        "models": models,
        "partitions": partition,
        "transforms": transforms,
    }
    return rooms[kind].NAMES


def _entry(kind: str, found: Found) -> dict[str, Any]:
    from fedbraid.data.catalog import Entry
    from fedbraid.names import options_of

    if isinstance(found.thing, Entry):
        about, options = found.thing.about, dict(found.thing.defaults)
    elif callable(found.thing):
        skip = GIVEN if kind != "partitions" else ROWS
        about, options = _first_line(found.thing), options_of(found.thing, skip=skip)
    else:  # a model itself, not a factory of it
        about, options = "", {}
    return {"name": found.name, "about": about, "options": _plain(options), "from": found.source}


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    simple = (int, float, str, bool, type(None))
    return {
        k: (None if v is inspect.Parameter.empty else v if isinstance(v, simple) else str(v))
        for k, v in options.items()
    }


def command(
    kind: Annotated[str, typer.Argument(help="algorithms, datasets, models, partitions or transforms")],
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """List the names that a configuration can use, with their options, defaults and where they come from."""
    from fedbraid.experiment.config import ConfigError, unknown

    if kind not in KINDS:
        raise ConfigError(unknown("list of", kind, KINDS))
    listed = _names(kind).listed()
    entries = [_entry(kind, found) for found in listed if not isinstance(found, str)]
    if kind == "partitions":
        entries.append({"name": "natural", "about": "The clients of the data.", "options": {}, "from": "fedbraid"})
    broken = [reason for reason in listed if isinstance(reason, str)]
    if json:
        print(json_.dumps({kind: entries, "unusable": broken}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True, overflow="ignore", min_width=max(len(e["name"]) for e in entries))
    table.add_column("what it is")
    table.add_column("options", overflow="fold")
    table.add_column("from")
    for entry in entries:
        options = ", ".join(k if v is None else f"{k}={v}" for k, v in entry["options"].items())
        cells = (entry["about"], options, entry["from"])
        table.add_row(f"[bold]{escape(entry['name'])}[/]", *map(escape, cells))
    Console(highlight=False).print(table)
    for reason in broken:
        Console(highlight=False, soft_wrap=True).print(f"[yellow]cannot be used:[/] {escape(reason)}")
