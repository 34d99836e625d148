"""Sweeps: a tuning with its own folder.

Tuning has its own seeds and its own validation split, held out of the training examples of every client. It does not
use the test set. A trial is one point run with one seed. Every trial is one row of ``trials.parquet`` with its curve,
also if it diverged. The file is rewritten after every program, so a sweep that was stopped continues from there.

    sweep.toml        the configuration and a [sweep] section: `fedbraid sweep sweep.toml` repeats it
    trials.parquet    one row per trial
    best.toml         the configuration with the best point: `fedbraid run best.toml` trains it and tests it
    summary.json      what `fedbraid sweep --json` prints
    sweep.png         the scores over the points
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbraid import files
from fedbraid.experiment.config import Config, ConfigError, dump, parse, read_tree
from fedbraid.experiment.figures import save
from fedbraid.experiment.grids import grid
from fedbraid.experiment.judging import notice_unused
from fedbraid.experiment.lab import Lab, SweepSettings, parse_settings
from fedbraid.experiment.points import with_values
from fedbraid.experiment.runfolder import check_free, held, read_sealed_toml
from fedbraid.experiment.trials import Trials
from fedbraid.experiment.tuning import News, tune
from fedbraid.experiment.tuningplot import draw_tuning
from fedbraid.sealed import seal_json, seal_lines
from fedbraid.version import __version__

__all__ = ["load_sweep", "reopen_sweep", "run_sweep", "write_sweep"]

SWEEP, TRIALS, BEST, SUMMARY, PICTURE = "sweep.toml", "trials.parquet", "best.toml", "summary.json", "sweep.png"


def load_sweep(
    path: Path | None, settings: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> tuple[Config, SweepSettings]:
    """A configuration and its sweep settings, from a TOML file with a ``[sweep]`` section; ``changes`` override it.

    ``grid`` names a grid of `fedbraid.experiment.grids`: its values are added to ``over``, which has priority.
    """
    tree = read_tree(path, settings)
    section = tree.pop("sweep", {})
    if not isinstance(section, Mapping):
        raise ConfigError("sweep must be a section: [sweep]")
    section = {**section, **(changes or {})}
    config, named = parse(tree), section.pop("grid", None)
    if named is not None:
        found = grid(named, config)
        config = with_values(config, {f"algorithm.{key}": value for key, value in found.fixed.items()})
        section["over"] = {**found.over, **section.get("over", {})}
    return config, parse_settings(section)


def write_sweep(path: Path, config: Config, settings: SweepSettings) -> None:
    """Write the file that `load_sweep` reads."""
    files.write_text(path, seal_lines(_text(config, settings)))


def _text(config: Config, settings: SweepSettings) -> str:
    import tomli_w

    tree = tomllib.loads(dump(config)) | {"sweep": settings.model_dump(mode="json", exclude_none=True)}
    return tomli_w.dumps(tree)


def about(settings: SweepSettings) -> dict[str, Any]:
    """The metadata of a file of trials."""
    return {"version": __version__, "kind": "sweep", "keys": list(settings.over)}


def check_folder(out: Path) -> None:
    """Refuse a folder that is not empty, so that nothing is overwritten."""
    if out.exists():
        if not out.is_dir():
            raise ConfigError(f"{out} is a file: name a folder")
        check_free(out)


def run_sweep(
    config: Config,
    settings: SweepSettings,
    out: Path,
    *,
    resume: bool = False,
    on_news: Callable[[News], Any] | None = None,
) -> dict[str, Any]:
    """Tune ``config``, write the sweep's folder and return its summary.

    The folder must be new, or with ``resume`` that of a stopped sweep: its trials are kept. While the sweep runs, no
    other process can write to the folder.
    """
    with contextlib.ExitStack() as stack:
        if resume:
            stack.enter_context(held(out))
        else:
            check_folder(out)
        lab = Lab(config, settings)  # errors are found before a folder is made
        notice_unused(config, "sweeps")
        if not resume:
            stack.enter_context(held(out))
            check_folder(out)  # another process may have started since
            write_sweep(out / SWEEP, config, settings)
        return sweep_in(lab, out, on_news)


def sweep_in(lab: Lab, out: Path, on_news: Callable[[News], Any] | None = None) -> dict[str, Any]:
    """Run the trials that are missing in a folder that this process holds, and write the results."""
    config, settings = lab.config, lab.settings
    trials = Trials(out / TRIALS, about(settings))
    found = tune(lab, trials, on_news=on_news)
    summary = {
        "kind": "sweep",
        "version": __version__,
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "model": config.model.name,
        "rounds": config.rounds,
        "keys": list(settings.over),
        "search": settings.search,
        "seeds": settings.seeds,
        **found,
        "out": str(out),
    }
    if found["best"] is not None:
        files.write_text(out / BEST, dump(with_values(config, found["best"])))
    save(draw_tuning(trials.rows, list(settings.over), found), out / PICTURE)
    files.write_text(out / SUMMARY, seal_json(summary))
    return summary


def reopen_sweep(folder: Path) -> tuple[Config, SweepSettings]:
    """The configuration and the settings of a sweep to continue."""
    if not (folder / SWEEP).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a sweep: it has no {SWEEP}. If the sweep was stopped before it wrote this "
            f"file, start it again with --out {folder}"
        )
    read_sealed_toml(folder / SWEEP, lambda: _text(*load_sweep(folder / SWEEP)))
    return load_sweep(folder / SWEEP)
