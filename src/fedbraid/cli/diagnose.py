"""``fedbraid diagnose``: estimate the constants of a configuration's data, and give advice from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedbraid.cli.finite_json import print_json
from fedbraid.cli.notes import as_notes

if TYPE_CHECKING:
    from fedbraid.experiment.diagnosis import Diagnosis


def command(
    config: Annotated[Path | None, typer.Argument(help="TOML file (default: the embedded configuration)")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(help="rounds of the short run")] = 20,
    points: Annotated[int, typer.Option(help="number of rounds of the short run at which to estimate")] = 3,
    clients: Annotated[
        int | None, typer.Option(help="clients to estimate from (default: 50; 10 for large models)")
    ] = None,
    probe: Annotated[bool, typer.Option(help="try one round each with 1 to 32 local steps")] = True,
    verify: Annotated[int, typer.Option(help="train with configured and advised settings, with this many seeds")] = 0,
    target: Annotated[
        float | None,
        typer.Option(help="--verify counts the rounds to this value (default: 0.9 for accuracy, else as configured)"),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="metric of --verify (default: test_accuracy, else test_loss)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write a picture (.png, .pdf or .svg)")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Estimate the constants of your data along a short run, and explain them. `fedbraid advise` chooses settings."""
    from fedbraid.experiment.config import load_config
    from fedbraid.experiment.diagnosis import diagnose, diagnosis_figure, goal_of
    from fedbraid.experiment.diagnosis import verify as run_both
    from fedbraid.simulation import use_cores

    loaded = load_config(config, settings or [])
    use_cores(loaded.engine.devices)
    console = Console(stderr=True, highlight=False)
    with as_notes(console), console.status("loading the data and building the model") as status:
        found = diagnose(
            loaded,
            rounds=rounds,
            points=points,
            clients=clients,
            probe_steps=(1, 2, 4, 8, 16, 32) if probe else (),
            tell=status.update,
        )
    result: dict[str, Any] = found.as_dict()
    if out is not None:
        from fedbraid.theory.figures import save

        result["picture"] = str(save(diagnosis_figure(found), out))
    if verify:
        metric, target = goal_of(loaded, metric, target)
        with as_notes(console), console.status(f"training {verify} times as configured and as advised"):
            counted = run_both(loaded, found.changes, target=target, seeds=verify, metric=metric)
        result["verify"] = {"metric": metric, "target": target, **counted}
    if json:
        return print_json(result)
    _print(found, loaded.algorithm.options)
    if verify:
        print(f"\nrounds until {metric} reaches {target:g}")
        for name in ("configured", "advised"):
            print(f"  {name:<12} {result['verify'][name]}")
        print(_verdict(result["verify"]["configured"], result["verify"]["advised"], loaded.rounds))
    if out is not None:
        print(f"\nwrote {out}")
    print("\nto choose a method and its rates by a pilot: fedbraid advise" + ("" if config is None else f" {config}"))
    return None


def _print(found: Diagnosis, options: Mapping[str, Any]) -> None:
    """The advice first, then what it is based on."""
    print("advice")
    for sentence in found.advice.sentences:
        print(f"- {sentence}")
    if found.changes:
        print("\nsettings to try\n  " + "\n  ".join(f"--set {change}" for change in found.changes))
        if "epochs" in options and any("steps=" in change for change in found.changes):
            print("  and remove algorithm.epochs from the configuration: steps replaces it")
    print("\nnot known")
    for line in found.advice.unknown:
        print(f"- {line}")
    for at, constants in zip(found.rounds, found.points, strict=True):
        print(f"\nconstants after round {at}")
        print("  " + str(constants).split("\nnote:")[0].replace("\n", "\n  "))


def _verdict(configured: Sequence[int | None], advised: Sequence[int | None], rounds: int) -> str:
    """Whether the advised settings helped, in one sentence.

    >>> _verdict([20, 40], [10, 20], 50)
    'the advice helped: 15 rounds instead of 30 on average'
    >>> _verdict([20, 40], [None, 20], 50)
    'the advice did not help: the target was reached with 1 of 2 seeds, and with 2 of 2 as configured'
    """
    before, after = ([n for n in counts if n is not None] for counts in (configured, advised))
    if not before and not after:
        return f"neither reached the target in {rounds} rounds: the comparison says nothing; choose another --target"
    if len(before) != len(after):
        word = "helped" if len(after) > len(before) else "did not help"
        seeds = len(advised)
        return (
            f"the advice {word}: the target was reached with {len(after)} of {seeds} seeds, and with {len(before)} of "
            f"{seeds} as configured"
        )
    mean_before, mean_after = sum(before) / len(before), sum(after) / len(after)
    word = "helped" if mean_after < mean_before else "did not help"
    return f"the advice {word}: {mean_after:.3g} rounds instead of {mean_before:.3g} on average"
