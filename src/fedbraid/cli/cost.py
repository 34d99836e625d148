"""``fedbraid cost``: the communication of a configuration, without running it."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file (default: the embedded configuration)")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as algorithm.name=scaffold; may be repeated")
    ] = None,
    secure: Annotated[
        int | None, typer.Option("--secure", help="count secure aggregation, with 64 or 32 bits an entry")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Bytes down and up per exchange, measured on the messages, also as multiples of the model (FedAvg: 2x)."""
    from fedbraid.costs import cost
    from fedbraid.experiment import build, load_config
    from fedbraid.masking import Secure

    loaded = load_config(config, settings or [])
    experiment = build(loaded)
    cohort = experiment.data.train.num_clients if loaded.cohort == "all" else int(loaded.cohort)
    masked = None if secure is None else Secure.from_table({"bits": secure}, cohort)
    traffic = cost(experiment.algorithm, experiment.params, experiment.data, secure=masked)
    report = {
        "algorithm": loaded.algorithm.name,
        "transforms": [named.name for named in loaded.transforms],
        "model_bytes": traffic.model,
        "exchanges": [
            {"name": e.name, "down": e.down, "up": e.up, "multiple": (e.down + e.up) / traffic.model}
            for e in traffic.exchanges
        ],
        "down": traffic.down,
        "up": traffic.up,
        "multiple": traffic.multiple,
        "cohort": cohort,
        "secure": None if masked is None else masked.name,
        "rounds": loaded.rounds,
        "round_bytes": cohort * (traffic.down + traffic.up),
        "run_bytes": loaded.rounds * cohort * (traffic.down + traffic.up),
    }
    if json:
        print(json_.dumps(report))
    else:
        _show(Console(highlight=False), report)


def _show(console: Console, report: dict[str, Any]) -> None:
    from fedbraid.units import format_bytes

    name = report["algorithm"]
    for outer in report["transforms"]:
        name = f"{outer}({name})"
    if report["secure"]:
        name += f", {report['secure']}"
    console.print(f"[bold]{name}[/], a model of {format_bytes(report['model_bytes'])}; one client in one round:")
    table = Table("exchange", "down", "up", "models", box=None, padding=(0, 3, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for one in report["exchanges"]:
        table.add_row(one["name"], f"{one['down']:,} B", f"{one['up']:,} B", _times(one["multiple"]))
    if len(report["exchanges"]) > 1:
        table.add_row("total", f"{report['down']:,} B", f"{report['up']:,} B", _times(report["multiple"]))
    console.print(table)
    console.print(
        f"{_times(report['multiple'])} the model (FedAvg: 2x); a round of {report['cohort']} clients "
        f"{'per exchange ' if len(report['exchanges']) > 1 else ''}sends {format_bytes(report['round_bytes'])}, "
        f"{report['rounds']:,} rounds {format_bytes(report['run_bytes'])}",
        soft_wrap=True,
    )


def _times(multiple: float) -> str:
    """A multiple of the model's size.

    >>> _times(2.0), _times(1.2604)
    ('2x', '1.26x')
    """
    return f"{multiple:.3g}x"
