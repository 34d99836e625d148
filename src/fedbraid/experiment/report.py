"""Reports: one HTML file of runs, sweeps and comparisons that opens offline, and every plot as PNG and PDF.

`collect` reads folders, `page_data` computes the data of the page, and `write_report` puts it into the page's template
(``page/``). The page loads nothing from the network; its content security policy forbids network access. Tables are
plain HTML and can be read without JavaScript.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid import files
from fedbraid.experiment.citations import citation
from fedbraid.experiment.collect import Collection
from fedbraid.experiment.config import ConfigError, dump
from fedbraid.experiment.differences import config_difference
from fedbraid.experiment.figures import draw_clients, draw_curves, draw_drift, save
from fedbraid.experiment.pagedata import AXES, clients_of, columns_of, curves_of, drifts_of, page_data
from fedbraid.experiment.trials import judged_by
from fedbraid.experiment.tuningplot import draw_tuning
from fedbraid.metric import MEAN, Metric, is_client_column
from fedbraid.units import format_bytes
from fedbraid.version import __version__

__all__ = ["write_report"]


def write_report(found: Collection, out: Path, *, title: str | None = None, plots: bool = True) -> dict[str, Any]:
    """Write the page to ``out`` and every plot as PNG and PDF into a folder next to it; returns what was written."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name an HTML file, such as {out / 'report.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    heading = title or _title(found)
    parts = {
        "TITLE": html.escape(heading),
        "SUBTITLE": html.escape(_subtitle(found)),
        "NOTICES": "".join(f"<li>{html.escape(notice)}</li>" for notice in found.notices),
        "RESULTS": _results(found),
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
    pictures = _plots(found, out.parent / f"{out.stem}-plots") if plots else []
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


def _cell(value: Any, *, best: bool = False) -> str:
    text = html.escape(str(value))
    return f"<td><strong>{text}</strong></td>" if best else f"<td>{text}</td>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], best: Mapping[int, Sequence[int]] | None = None) -> str:
    """A table whose first column names its rows; on a narrow screen it scrolls inside its frame.

    best: by column, the rows whose cell is the best of that column.
    """
    marked = best or {}
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(str(row[0]))}</th>'
        + "".join(_cell(value, best=i in marked.get(j, ())) for j, value in enumerate(row[1:], 1))
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return f'<div class="frame"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _amount(count: float | None) -> str:
    return "–" if count is None else format_bytes(count)


def _spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.4f}"


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
    names = [n for n in columns_of(found) if n.startswith("test_")]
    of_clients = [n for n in names if is_client_column(n) and not n.endswith(MEAN)]
    # those of the accuracy are enough: those of the loss are similar
    of_clients = [n for n in of_clients if not found.metric(n).lower_is_better] or of_clients
    shown = [n for n in names if not is_client_column(n)] + of_clients
    rows, means = [], []
    for label, own in found.groups.items():
        finals = [run.summary.final for run in own]
        scores = [[f[n] for f in finals] if all(n in f for f in finals) else None for n in shown]
        means.append([None if one is None else float(np.mean(one)) for one in scores])
        sent = float(np.mean([sum(run.summary.bytes.values()) for run in own]))
        seconds = np.mean([run.summary.seconds for run in own])
        cells = ["–" if one is None else _spread(one) for one in scores]
        rows.append([label, own[0].config.algorithm.name, len(own), *cells, _amount(sent), f"{seconds:.1f} s"])
    best = {3 + j: _best_rows([row[j] for row in means], found.metric(name)) for j, name in enumerate(shown)}
    heads = ["run", "algorithm", "seeds", *(n.removeprefix("test_").replace("_", " ") for n in shown), "sent", "time"]
    return _table(heads, rows, best)


def _comparison_table(summary: Mapping[str, Any]) -> str:
    metric, target = str(summary["metric"]).removeprefix("test_"), summary["target"]
    heads = ["method", f"{metric}, last rounds", "tuned to", "clients a round", "models a client"]
    heads += [f"rounds to {target:g}", f"sent to {target:g}"] if target is not None else []
    heads += ["worst tenth of clients", "median client", "worst client", "sent in all", "diverged trials"]
    rows = [_method_cells(row, summary) for row in summary["methods"]]
    best = {}
    if summary["metric"] is not None:
        judged = judged_by(summary)
        best[1] = _best_rows([row.get("score") for row in summary["methods"]], judged)
    seeds = ", ".join(map(str, summary["seeds"]))
    about = (
        f"{summary['criterion']}; mean ± deviation over seeds {seeds}. Equal {summary['protocol'].replace('-', ' ')}. "
        "A tenth of the clients are worse than the value of the worst tenth."
    )
    if summary["tuned_on"]:
        about += f" Tuned on {summary['tuned_on']}, without the test set."
    return _table(heads, rows, best) + f'<p class="note">{html.escape(about)}</p>'


def _method_cells(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Any]:
    """A method's row of the table of a comparison."""
    values = [
        f"{key.removeprefix('algorithm.')} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in (row["best"] or {}).items()
    ]
    cells: list[Any] = [row["label"]]
    if row["best"] is None or row.get("score") is None:
        cells.append("diverged")
    else:
        cells.append(f"{row['score']:.4f}" + ("" if row["deviation"] is None else f" ± {row['deviation']:.4f}"))
    cells += [", ".join(values) or "–", row["cohort"], f"{row['bytes_per_client']['models']:.3g}"]
    if summary["target"] is not None:
        rounds = row.get("rounds_to_target")
        never = f"{row.get('reached', 0)} of {len(summary['seeds'])} seeds"
        cells += [never if rounds is None else f"{rounds:.0f}", _amount(row.get("bytes_to_target"))]
    clients = row.get("clients") or {}
    for name, before in (("worst_tenth", "p10"), ("median", "p50"), ("worst", "worst")):  # `before`: older versions
        value = clients.get(name, clients.get(before))
        cells.append("–" if value is None else f"{value:.3f}")
    return [*cells, _amount(row.get("bytes")), f"{row['trials_diverged']} of {row['trials']}"]


def _difference(found: Collection) -> str:
    groups = found.groups
    if len(groups) < 2:
        return '<p class="note">There is only one configuration.</p>'
    rows = config_difference({label: own[0].config for label, own in groups.items()})
    if not rows:
        return '<p class="note">The configurations are the same.</p>'
    return _table(["key", *groups], [[key, *("default" if v is None else v for v in values)] for key, values in rows])


def _methods(found: Collection) -> str:
    named: dict[tuple[str, str], Path | None] = {}
    for run in found.runs:
        folder = None if run.config.modules is None else Path(run.config.modules)
        named[("algorithm", run.config.algorithm.name)] = folder
        for transform in run.config.transforms:
            named[("transform", transform.name)] = folder
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


def _plots(found: Collection, folder: Path) -> list[Path]:
    """Every plot of the page as PNG and PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []

    def keep(figure: Any, name: str) -> None:
        paths.extend(save(figure, folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.png", pdf=True))

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
