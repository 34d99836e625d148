"""Reports: one HTML file of runs, sweeps and comparisons that opens offline, and every plot as PNG and PDF.

`collect` reads folders, `page_data` computes the data of the page, and `write_report` puts it into the page's template
(``page/``). The page loads nothing from the network; its content security policy forbids network access. Tables are
plain HTML and can be read without JavaScript.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid import files
from fedbraid.experiment.citations import citation
from fedbraid.experiment.collect import Collection, ReportedRun
from fedbraid.experiment.columns import explain, explain_metric
from fedbraid.experiment.comparison import global_model, own_models, rows_by_model
from fedbraid.experiment.config import ConfigError, dump
from fedbraid.experiment.differences import config_difference
from fedbraid.experiment.figures import draw_clients, draw_curves, draw_drift, save
from fedbraid.experiment.pagedata import AXES, clients_of, columns_of, curves_of, drifts_of, page_data
from fedbraid.experiment.trials import judged_by
from fedbraid.experiment.tuningplot import draw_tuning
from fedbraid.metric import GINI, MEAN, Metric, global_column, is_client_column, is_personal_column
from fedbraid.units import format_bytes, format_seconds
from fedbraid.version import __version__

__all__ = ["write_report"]


def write_report(
    found: Collection,
    out: Path,
    *,
    title: str | None = None,
    plots: bool = True,
    refresh: int | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """Write the page to ``out`` and every plot as PNG and PDF into a folder next to it; returns what was written.

    refresh: seconds after which a browser reads the file again, for a page that follows a run.
    tell: is called with what is done next, for a terminal.
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name an HTML file, such as {out / 'report.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    heading = title or _title(found)
    parts = {
        "TITLE": html.escape(heading),
        "SUBTITLE": html.escape(_subtitle(found)),
        "NOTICES": "".join(f"<li>{html.escape(notice)}</li>" for notice in found.notices),
        "REFRESH": "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">',
        "RESULTS": _results(found),
        "SETUP": _setup(found),
        "DIFFERENCE": _difference(found),
        "METHODS": _methods(found),
        "AGAIN": _again(found),
        "VERSION": html.escape(__version__),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        # a "</script>" inside a string would end the element
        "DATA": json.dumps(page_data(found), separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))
    files.write_text(out, page)
    pictures = _plots(found, out.parent / f"{out.stem}-plots", tell) if plots else []
    return {
        "out": str(out),
        "bytes": len(page.encode()),
        "runs": len(found.runs),
        "tunings": len(found.tunings),
        "notices": found.notices,
        "plots": [str(path) for path in pictures],
    }


def _asset(name: str) -> str:
    return resources.files("fedbraid.experiment").joinpath("page", name).read_text(encoding="utf-8")


def _title(found: Collection) -> str:
    names = list(dict.fromkeys(run.config.data.name for run in found.runs))
    labels = list(found.groups) or [tuned.label for tuned in found.tunings]
    what = " vs ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    return f"{what} on {', '.join(names)}" if names else f"Tuning of {what}"


def _subtitle(found: Collection) -> str:
    runs = found.runs
    if not runs:
        return f"{sum(len(t.rows) for t in found.tunings)} trials"
    first = runs[0].config
    same = all(run.config.model == first.model for run in runs)
    parts = [f"{len(runs)} run{'s' if len(runs) > 1 else ''}"]
    if same:
        options = ", ".join(f"{key} {json.dumps(value)}" for key, value in first.model.options.items())
        parts.append(f"model {first.model.name}" + (f" ({options})" if options else ""))
    if len({run.config.rounds for run in runs}) == 1:
        parts.append(f"{first.rounds} rounds")
    parts += [f"equal {summary['protocol'].replace('-', ' ')}" for summary in found.comparisons]
    return " · ".join(parts)


class Cell(NamedTuple):
    """The text of a cell, and the number by which its column is sorted."""

    text: str
    value: float | None = None


def _cell(value: Any, *, best: bool = False) -> str:
    text = html.escape(value.text if isinstance(value, Cell) else str(value))
    number = value.value if isinstance(value, Cell) else None
    sort = "" if number is None or not np.isfinite(number) else f' data-value="{number:.9g}"'
    return (
        f'<td{sort}><strong title="the best of this column">{text}</strong></td>' if best else f"<td{sort}>{text}</td>"
    )


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    best: Mapping[int, Sequence[int]] | None = None,
    *,
    about: Mapping[str, str] | None = None,
    apart: Sequence[Sequence[Any]] = (),
) -> str:
    """A table whose first column names its rows; on a narrow screen it scrolls inside its frame.

    best: by column, the rows whose cell is the best of that column. about: explanations of columns by their heads,
    besides those of `columns.COLUMNS`. apart: rows after the others, set apart from them.
    """
    marked, texts = best or {}, about or {}

    def head(name: str) -> str:
        text = texts.get(name) or explain(name)
        return f'<th scope="col" title="{html.escape(text)}">{html.escape(name)}</th>'

    def row(i: int, cells: Sequence[Any], marked: Mapping[int, Sequence[int]]) -> str:
        return (
            f'<tr><th scope="row">{html.escape(str(cells[0]))}</th>'
            + "".join(_cell(value, best=i in marked.get(j, ())) for j, value in enumerate(cells[1:], 1))
            + "</tr>"
        )

    body = "".join(row(i, cells, marked) for i, cells in enumerate(rows))
    last = "".join(row(i, cells, {}) for i, cells in enumerate(apart))
    last = f'<tbody class="apart">{last}</tbody>' if last else ""
    heading = "".join(map(head, heads))
    return f'<div class="frame"><table><thead><tr>{heading}</tr></thead><tbody>{body}</tbody>{last}</table></div>'


def _amount(count: float | None) -> Cell:
    return Cell("–") if count is None else Cell(format_bytes(count), count)


def _duration(seconds: float | None) -> Cell:
    return Cell("–") if seconds is None else Cell(format_seconds(seconds), seconds)


def _spread(values: Sequence[float]) -> Cell:
    mean = f"{np.mean(values):.4f}"
    text = mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.4f}"
    return Cell(text, float(np.mean(values)))


def _best_rows(values: Sequence[float | None], metric: Metric) -> list[int]:
    """The rows with the best value; none if only one row has a value."""
    known = {i: value for i, value in enumerate(values) if value is not None and np.isfinite(value)}
    if len(known) < 2:
        return []
    return [i for i, value in known.items() if value == metric.best(known.values())]


def _results(found: Collection) -> str:
    if found.comparisons:
        return "".join(map(_comparison_table, found.comparisons))
    return _runs_table(found) if found.runs else _tunings_table(found)


def _tunings_table(found: Collection) -> str:
    rows = [
        [t.label, ", ".join(f"{k} = {v}" for k, v in (t.best or {}).items()) or "none", t.criterion, len(t.rows)]
        for t in found.tunings
    ]
    return _table(["tuning", "best", "judged by", "trials"], rows)


def _runs_table(found: Collection) -> str:
    names = [n for n in columns_of(found) if n.startswith("test_") and not is_personal_column(n)]
    of_clients = [n for n in names if is_client_column(n) and not n.endswith((MEAN, GINI))]
    # those of the accuracy are enough: those of the loss are similar
    of_clients = [n for n in of_clients if "accuracy" in n] or of_clients
    shown = [n for n in names if not is_client_column(n)] + of_clients
    rows, means = [], []
    timed = any(run.summary.simulated_seconds is not None for run in found.runs)
    for label, own, finals in _rows_of_models(found):
        scores = [[f[n] for f in finals] if all(n in f for f in finals) else None for n in shown]
        means.append([None if one is None else float(np.mean(one)) for one in scores])
        sent = float(np.mean([sum(run.summary.bytes.values()) for run in own]))
        seconds = np.mean([run.summary.seconds for run in own])
        cells = ["–" if one is None else _spread(one) for one in scores]
        took = Cell(f"{seconds:.1f} s", float(seconds))
        rows.append([label, own[0].config.algorithm.name, len(own), *cells, _amount(sent), took])
        if timed:
            clocks = [clock for run in own if (clock := run.summary.simulated_seconds) is not None]
            rows[-1].append(_duration(float(np.mean(clocks)) if len(clocks) == len(own) else None))
    best = {3 + j: _best_rows([row[j] for row in means], found.metric(name)) for j, name in enumerate(shown)}
    names = [n.removeprefix("test_").replace("_", " ") for n in shown]
    about = {head: explain_metric(n, found.metric(n)) for head, n in zip(names, shown, strict=True)}
    heads = ["run", "algorithm", "seeds", *names, "sent", "time", *(["simulated time"] if timed else [])]
    return _table(heads, rows, best, about=about)


def _rows_of_models(found: Collection) -> Iterator[tuple[str, Sequence[ReportedRun], Sequence[Mapping[str, float]]]]:
    """Label, runs and last scores of every row: of the clients' own models, if there are any, and of the global one."""
    for label, own in found.groups.items():
        finals = [run.summary.final for run in own]
        if all(any(map(is_personal_column, final)) for final in finals):
            personal = [{global_column(n): v for n, v in f.items() if is_personal_column(n)} for f in finals]
            yield own_models(label), own, personal
            label = global_model(label)
        yield label, own, finals


def _setup(found: Collection) -> str:
    """Clients, partition, date, hardware and versions of the runs, one row per label."""
    if not found.runs:
        return '<p class="note">No runs here, only tuning.</p>'
    heads = ["run", "data", "clients", "cohort", "partition", "model", "rounds", "date", "hardware", "versions"]
    return _table(heads, [_setup_cells(label, own) for label, own in found.groups.items()])


def _setup_cells(label: str, own: Sequence[ReportedRun]) -> list[Any]:
    config, machine, options = own[0].config, own[0].summary.machine, own[0].config.data.options
    clients = machine.get("clients", options.get("clients"))
    split = machine.get("partition") or options.get("partition") or "clients of the data"
    model = ", ".join([config.model.name, *(f"{k} {json.dumps(v)}" for k, v in config.model.options.items())])
    dates = sorted(str(run.summary.machine["date"]) for run in own if "date" in run.summary.machine)
    told = sorted({_hardware(run.summary.machine) for run in own})
    versions = sorted({f"fedbraid {run.summary.version}, jax {run.summary.machine.get('jax', '?')}" for run in own})
    return [
        label,
        config.data.name,
        "–" if clients is None else clients,
        config.cohort,
        split,
        model,
        config.rounds,
        dates[-1].replace("T", " ").removesuffix("+00:00") if dates else "–",
        "; ".join(told),
        "; ".join(versions),
    ]


def _hardware(machine: Mapping[str, Any]) -> str:
    if "hardware" not in machine:
        return "–"  # an older version of fedbraid
    devices, cores = machine.get("devices", 1), machine.get("cores", "?")
    return f"{machine['hardware']}, {devices} device{'s' if devices != 1 else ''}, {cores} cores"


def _comparison_table(summary: Mapping[str, Any]) -> str:
    metric, target = str(summary["metric"]).removeprefix("test_"), summary["target"]
    heads = ["method", f"{metric}, last rounds", "tuned to", "clients a round", "models a client"]
    heads += [f"rounds to {target:g}", f"sent to {target:g}"] if target is not None else []
    if _has_clock(summary):
        heads.append("simulated time" if target is None else f"simulated time to {target:g}")
    heads += ["worst tenth of clients", "median client", "worst client", "deviation of clients"]
    heads += ["sent in all", "diverged trials"]
    methods = rows_by_model(summary["methods"])
    rows = [_method_cells(row, summary) for row in methods]
    best = {}
    if summary["metric"] is not None:
        judged = judged_by(summary)
        best[1] = _best_rows([row.get("score") for row in methods], judged)
    seeds = ", ".join(map(str, summary["seeds"]))
    about = (
        f"{summary['criterion']}; mean ± deviation over seeds {seeds}. Equal {summary['protocol'].replace('-', ' ')}. "
        "A tenth of the clients are worse than the value of the worst tenth."
    )
    if len(methods) > len(summary["methods"]):
        about += " Rows 'personal' have the model that each client uses, the other rows the global model."
    if summary["tuned_on"]:
        about += f" Tuned on {summary['tuned_on']}, without the test set."
    baselines = summary.get("baselines", ())
    notes = [about, *(_baseline_note(row) for row in baselines)]
    texts = {heads[1]: explain_metric(str(summary["metric"]), judged_by(summary))} if summary["metric"] else {}
    apart = [_baseline_cells(row, summary) for row in baselines]
    table = _table(heads, rows, best, about=texts, apart=apart)
    return table + "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)


def _has_clock(summary: Mapping[str, Any]) -> bool:
    """Whether a comparison ran in simulated time."""
    return any(
        row.get(key) is not None
        for row in summary["methods"]
        for key in ("simulated_seconds", "simulated_seconds_to_target")
    )


def _baseline_note(row: Mapping[str, Any]) -> str:
    everywhere = row.get("everywhere")
    more = "" if everywhere is None else f"; on the test examples of all clients its model has {everywhere:.4f}"
    return f"{row['label'].capitalize()}: {row['about']}{more}. It took {row['seconds']:.0f} s."


def _baseline_cells(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Any]:
    """A baseline's row of the table of a comparison: it sends nothing, and has no clients a round."""
    cells = [row["label"], _score(row), _tuned_to(row), "–", "0"]
    cells += ["–", "–"] if summary["target"] is not None else []
    cells += ["–"] if _has_clock(summary) else []
    return [*cells, *_of_clients(row), _amount(0), f"{row['trials_diverged']} of {row['trials']}"]


def _method_cells(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Any]:
    """A method's row of the table of a comparison."""
    cells: list[Any] = [row["label"], _score(row), _tuned_to(row), row["cohort"]]
    cells.append(f"{row['bytes_per_client']['models']:.3g}")
    if summary["target"] is not None:
        rounds = row.get("rounds_to_target")
        never = f"{row.get('reached', 0)} of {len(summary['seeds'])} seeds"
        cells += [never if rounds is None else Cell(f"{rounds:.0f}", rounds), _amount(row.get("bytes_to_target"))]
    if _has_clock(summary):
        key = "simulated_seconds" if summary["target"] is None else "simulated_seconds_to_target"
        cells.append(_duration(row.get(key)))
    return [*cells, *_of_clients(row), _amount(row.get("bytes")), f"{row['trials_diverged']} of {row['trials']}"]


def _score(row: Mapping[str, Any]) -> Cell:
    if row["best"] is None or row.get("score") is None:
        return Cell("diverged")
    return Cell(
        f"{row['score']:.4f}" + ("" if row["deviation"] is None else f" ± {row['deviation']:.4f}"), row["score"]
    )


def _tuned_to(row: Mapping[str, Any]) -> str:
    values = [
        f"{key.removeprefix('algorithm.')} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in (row["best"] or {}).items()
    ]
    return ", ".join(values) or "–"


def _of_clients(row: Mapping[str, Any]) -> list[str]:
    clients = row.get("clients") or {}
    cells = []
    older = {"worst_tenth": "p10", "median": "p50"}  # names of older versions
    for name in ("worst_tenth", "median", "worst", "deviation"):
        value = clients.get(name, clients.get(older.get(name, name)))
        cells.append("–" if value is None else f"{value:.3f}")
    return cells


def _difference(found: Collection) -> str:
    groups = found.groups
    if len(groups) < 2:
        return '<p class="note">There is only one configuration.</p>'
    rows = config_difference({label: own[0].config for label, own in groups.items()})
    if not rows:
        return '<p class="note">The configurations are the same.</p>'
    about = {label: f"The value of {label}." for label in groups}
    rows = [[key, *("default" if v is None else v for v in values)] for key, values in rows]
    return _table(["key", *groups], rows, about=about)


def _methods(found: Collection) -> str:
    named: dict[tuple[str, str], Path | None] = {}
    for run in found.runs:
        folder = None if run.config.modules is None else Path(run.config.modules)
        named[("algorithm", run.config.algorithm.name)] = folder
        for transform in run.config.transforms:
            named[("transform", transform.name)] = folder
        if run.config.asynchrony.name != "none":
            named[("asynchrony", run.config.asynchrony.name)] = None
    items = []
    for (kind, name), folder in named.items():
        try:
            cited = citation(kind, name, folder)
        except ValueError:  # a package that is not installed here, or a method of another version
            continue
        paper = f"<br><cite>{html.escape(cited.paper)}</cite>" if cited.paper else ""
        items.append(f"<dt><code>{html.escape(name)}</code></dt><dd>{html.escape(cited.about)}{paper}</dd>")
    return f"<dl>{''.join(items)}</dl>" if items else '<p class="note">No runs here, only tuning.</p>'


def _again(found: Collection) -> str:
    commands = "\n".join(f"{command} --out NEW" for command in found.commands)
    configs = "".join(
        f"<details><summary>configuration of {html.escape(label)}, seed {own[0].config.seed}</summary>"
        f"<pre>{html.escape(dump(own[0].config))}</pre></details>"
        for label, own in found.groups.items()
    )
    return f"<pre>{html.escape(commands)}</pre>{configs}"


def _plots(found: Collection, folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Every plot of the page as PNG and PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []

    def keep(figure: Any, name: str) -> None:
        file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        tell(f"drawing {file} (--no-plots leaves the pictures out)")
        paths.extend(save(figure, folder / f"{file}.png", pdf=True))

    groups = found.groups
    for name in [column for column in columns_of(found) if not is_client_column(column)]:
        for against in AXES:
            lines = []
            for label, own in groups.items():
                if all(name in run.table for run in own) and against in (axes := curves_of(own, name)):
                    line = {k: np.asarray(axes[against][k], float) for k in ("x", "mean", "low", "high")}
                    lines.append({"label": label, **line})
            if lines:
                keep(draw_curves(lines, found.metric(name), against), f"{name}-{against}")
    for metric, lines in clients_of(found).items():
        keep(draw_clients(lines, metric), f"clients-{metric}")
    for tuned in found.tunings:
        found_best = {"best": tuned.best, "criterion": tuned.criterion}
        keep(draw_tuning(tuned.rows, tuned.keys, found_best, f"tuning: {tuned.label}"), f"tuning-{tuned.label}")
    if drifts := drifts_of(groups):
        keep(draw_drift([{"label": d["label"], "drift": d["rounds"]} for d in drifts]), "drift")
    return paths
