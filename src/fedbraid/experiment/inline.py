"""Runs, comparisons, advice and reports from Python, as objects that a notebook shows."""

from __future__ import annotations

import datetime
import html
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbraid import files
from fedbraid.drawing import image_html, table_html
from fedbraid.experiment.advice.advising import ADVISED, AdviceSettings, load_advice, run_advice
from fedbraid.experiment.advice.advising import PICTURE as ADVICE_PICTURE
from fedbraid.experiment.advice.words import lines_of
from fedbraid.experiment.collect import collect
from fedbraid.experiment.compare import PICTURE, run_comparison
from fedbraid.experiment.comparison import load_comparison
from fedbraid.experiment.config import Config, load_config, parse
from fedbraid.experiment.loading import Run, load_run
from fedbraid.experiment.report import write_report
from fedbraid.experiment.run import run_config
from fedbraid.simulation import Progress
from fedbraid.simulation.bar import progress_bar

__all__ = ["Advised", "Compared", "Report", "advise", "compare", "load_run", "report", "run"]


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    progress: bool = True,
    on_progress: Callable[[Progress], bool | None] | None = None,
) -> Run:
    """Train as a configuration says, like ``fedbraid run``, and return the run.

    config: a TOML file, nested mappings, or a `Config`; default: the embedded configuration.
    out: the run folder (default: ``runs/NAME-TIME``). settings: changes of the form ``"algorithm.client_lr=0.05"``.
    """
    if isinstance(config, Mapping):
        loaded = parse(config)
    else:
        loaded = (
            config if isinstance(config, Config) else load_config(None if config is None else Path(config), settings)
        )
    if settings and isinstance(config, Mapping | Config):
        raise ValueError("settings change a TOML file or the default; change the mapping itself")
    folder = _folder(out, f"{loaded.algorithm.name}-{Path(loaded.data.name).name}".replace(":", "-"))
    if not progress:
        run_config(loaded, folder, resume=resume, on_progress=on_progress)
        return load_run(folder)
    with progress_bar(loaded.rounds) as show:

        def shown(now: Progress) -> bool | None:
            show(now)
            return None if on_progress is None else on_progress(now)

        run_config(loaded, folder, resume=resume, on_progress=shown, on_evaluation=show)
    return load_run(folder)


def _folder(out: str | Path | None, name: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(out) if out is not None else Path("runs") / f"{name}-{stamp}"


@dataclass(frozen=True, repr=False)
class Report:
    """A report as one HTML page. A notebook shows it in a frame; `save` writes it to a file."""

    page: str
    folders: tuple[Path, ...]

    def save(self, path: str | Path) -> Path:
        """Write the page to a file; returns its path."""
        files.write_text(Path(path), self.page)
        return Path(path)

    def __repr__(self) -> str:
        return f"Report of {', '.join(map(str, self.folders))}: {len(self.page) / 1000:.0f} kB; save(path) writes it"

    def _repr_html_(self) -> str:
        """A frame of its own: the page's styles and scripts do not touch the notebook."""
        inside = html.escape(self.page, quote=True)
        return f'<iframe srcdoc="{inside}" style="width:100%;height:640px;border:0" sandbox="allow-scripts"></iframe>'


def report(*folders: str | Path | Run, title: str | None = None) -> Report:
    """The report of folders of runs, sweeps or comparisons, like ``fedbraid report``."""
    if not folders:
        raise ValueError("report needs at least one folder of a run, a sweep or a comparison")
    places = tuple(one.folder if isinstance(one, Run) else Path(one) for one in folders)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        write_report(collect(list(places)), page, title=title, plots=False)
        return Report(page.read_text(encoding="utf-8"), places)


@dataclass(frozen=True, repr=False)
class Compared:
    """The result of a comparison. ``summary`` is what ``fedbraid compare --json`` prints."""

    folder: Path
    summary: Mapping[str, Any]

    @property
    def scores(self) -> dict[str, float | None]:
        """The score of every method, by its label; None for a method that diverged."""
        return {row["label"]: row.get("score") for row in self.summary["methods"]}

    def report(self, title: str | None = None) -> Report:
        """The report of the comparison as one HTML page."""
        return report(self.folder, title=title)

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for row in (*self.summary["methods"], *self.summary.get("baselines", ())):
            score, spread = row.get("score"), row.get("deviation")
            words = "diverged" if score is None else f"{score:.4g}" + ("" if spread is None else f" ± {spread:.2g}")
            tuned = ", ".join(f"{key} = {value}" for key, value in (row.get("best") or {}).items())
            label = f"({row['label']})" if "kind" in row else row["label"]  # baselines are set apart from methods
            rows.append((label, words, tuned or "-"))
        return rows

    def __repr__(self) -> str:
        lines = [f"  {label}: {score}" for label, score, _ in self._rows()]
        return "\n".join([f"Compared in {self.folder}, by {self.summary['criterion']}", *lines])

    def _repr_html_(self) -> str:
        picture = self.folder / PICTURE
        shown = image_html(picture.read_bytes(), "curves of the methods") if picture.is_file() else ""
        return table_html(self._rows(), ["method", str(self.summary["criterion"]), "tuned to"]) + shown


def compare(
    config: str | Path, out: str | Path | None = None, *, settings: Sequence[str] = (), resume: bool = False
) -> Compared:
    """Compare the methods of a TOML file under equal conditions, like ``fedbraid compare``."""
    comparison = load_comparison(Path(config), list(settings))
    folder = _folder(out, f"compare-{comparison.base.data.name}")
    return Compared(folder, run_comparison(comparison, folder, resume=resume))


@dataclass(frozen=True, repr=False)
class Advised:
    """The result of `advise`. ``summary`` is what ``fedbraid advise --json`` prints."""

    folder: Path
    summary: Mapping[str, Any]

    @property
    def config(self) -> Config | None:
        """The advised configuration, ready for `run`; None if there is no advice."""
        return None if self.summary["advised"] is None else load_config(self.folder / ADVISED)

    @property
    def problem(self) -> str:
        """Why there is no advice; empty if there is one."""
        return str(self.summary["problem"])

    def __repr__(self) -> str:
        return "\n".join(
            [f"Advised in {self.folder}", *(f"  {name}: {words}" for name, words in lines_of(self.summary))]
        )

    def _repr_html_(self) -> str:
        picture = self.folder / ADVICE_PICTURE
        shown = image_html(picture.read_bytes(), "curves and rates of the pilot") if picture.is_file() else ""
        return table_html(lines_of(self.summary)) + shown


def advise(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    **options: Any,
) -> Advised:
    """Find an algorithm and its rates for a configuration by a short pilot, like ``fedbraid advise``.

    options: keys of the section ``[advise]``, such as ``budget="5min"`` (see `AdviceSettings`).
    """
    if isinstance(config, Mapping | Config):
        if settings:
            raise ValueError("settings change a TOML file or the default; change the mapping itself")
        loaded = config if isinstance(config, Config) else parse(config)
        how = AdviceSettings.model_validate(options)
    else:
        loaded, how = load_advice(None if config is None else Path(config), settings, options)
    folder = _folder(out, f"advise-{Path(loaded.data.name).name}".replace(":", "-"))
    return Advised(folder, run_advice(loaded, how, folder, resume=resume))
