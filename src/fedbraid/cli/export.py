"""``fedbraid export``: the parameters of a run as one file."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedbraid.cli.notes import as_notes


def command(
    run: Annotated[Path, typer.Argument(help="run folder, of a simulated or a deployed run")],
    file: Annotated[Path, typer.Argument(help="file to write: NAME.safetensors or NAME.npz")],
    best: Annotated[bool, typer.Option("--best", help="parameters of the best evaluation instead of the last")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="for a model with LoRA adapters: all weights, with the adapters added")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Write the parameters of a run as safetensors or npz, named by their path in the model's tree."""
    import jax

    from fedbraid.experiment.loading import load_run

    loaded = load_run(run)
    with as_notes(Console(stderr=True, highlight=False)):
        loaded.export(file, best=best, merged=merged)
    params = loaded.best if best else loaded.params
    leaves = jax.tree.leaves(loaded.model.merge(params) if merged and loaded.model.merge else params)
    written = {"out": str(file), "arrays": len(leaves), "parameters": sum(leaf.size for leaf in leaves)}
    if json:
        return print(json_.dumps(written))
    Console(highlight=False).print(
        f"[bold]{file}[/]: {written['arrays']} arrays, {written['parameters']:,} parameters", soft_wrap=True
    )
