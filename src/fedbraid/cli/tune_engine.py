"""``fedbraid tune-engine``: find the fastest plan of the engine on this machine."""

from __future__ import annotations

import json as json_
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedbraid.cli.notes import as_notes


def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file (default: the embedded configuration)")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as cohort=100; may be repeated")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="TOML file to write: the configuration with the fastest plan")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Time the first rounds under several plans and print the fastest as engine.plan and engine.chunk.

    Results of a run do not depend on the plan beyond rounding. The plan is not stored: put the printed lines into the
    configuration to use it.
    """
    from fedbraid.experiment import ConfigError, build, load_config
    from fedbraid.experiment.config import dump
    from fedbraid.simulation import time_plans, use_cores

    loaded = load_config(config, settings or [])
    if write is not None and write.exists():
        raise ConfigError(f"--write {write}: the file exists; choose another name")
    use_cores(loaded.engine.devices)
    experiment = build(loaded)
    console = Console(stderr=True, highlight=False)
    with as_notes(console):
        found = time_plans(
            experiment.algorithm,
            experiment.params,
            experiment.data,
            rounds=loaded.rounds,
            cohort=None if loaded.cohort == "all" else loaded.cohort,
            seed=loaded.seed,
            arrival=experiment.arrival,
            engine=loaded.engine,
            tell=lambda line: console.print(line, soft_wrap=True),
        )
    chosen = replace(loaded.engine, plan=found.options.plan, chunk=found.options.chunk)
    if write is not None:
        write.write_text(dump(loaded.model_copy(update={"engine": chosen})))
        console.print(f"written to {write}", soft_wrap=True)
    if json:
        report = {"plan": chosen.plan, "chunk": chosen.chunk, "seconds": found.seconds}
        print(json_.dumps(report | {"out": None if write is None else str(write)}))
    else:
        print(f'[engine]\nplan = "{chosen.plan}"\nchunk = {json_.dumps(chosen.chunk)}')
