"""Reports: one HTML file of runs, sweeps and comparisons that opens offline, and every plot as PNG and PDF.

`collect` reads folders, `page_data` makes of them what the page shows, `write_report` puts that into the page's
template. The page fetches nothing: its policy forbids the network, and its renderer is the small script beside this
module (``page/``). Tables are plain HTML and can be read without the script.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedbraid
from fedbraid import algorithms, transforms
from fedbraid.experiment import runfolder
from fedbraid.experiment.compare import COMPARE, DRIFT, SUMMARY, trace_drift
from fedbraid.experiment.config import Config, ConfigError, dump, load_config
from fedbraid.experiment.figures import draw_clients, draw_curves, draw_drift, draw_tuning, save, series, tuning_plot
from fedbraid.experiment.sweep import SWEEP, TRIALS
from fedbraid.experiment.trials import Row, read_trials

__all__ = [
    "Collection",
    "Entry",
    "Tuned",
    "citation",
    "collect",
    "config_difference",
    "flat",
    "page_data",
    "write_report",
]

MOST_POINTS = 400  # of a curve on the page
AXES = ("rounds", "bytes", "seconds")


class Entry(NamedTuple):
    """A run folder, read."""

    folder: Path
    label: str  # of the runs that differ from it in their seed alone
    config: Config
    summary: dict[str, Any]
    table: dict[str, np.ndarray]
    clients: dict[str, np.ndarray]
    drift: dict[str, Any] | None


class Tuned(NamedTuple):
    """The trials of one tuning."""

    label: str
    rows: list[Row]
    keys: list[str]
    best: dict[str, Any] | None
    criterion: str


class Collection(NamedTuple):
    """What was found in the folders of a report."""

    entries: list[Entry]
    tunings: list[Tuned]
    comparisons: list[dict[str, Any]]  # their summaries
    commands: list[str]  # that make it again
    notices: list[str]

    @property
    def groups(self) -> dict[str, list[Entry]]:
        """Entries by label, in order."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.label, []).append(entry)
        return found


# --- reading ---------------------------------------------------------------------------------------------------------


def collect(folders: Sequence[Path], *, drift: int = 0) -> Collection:
    """Read folders of runs, sweeps and comparisons; refuse what is none of them, incomplete or of another version.

    With ``drift`` the first so many rounds of plain runs are gone through again, every local step recorded.
    """
    if not folders:
        raise ConfigError("nothing to report on: name folders of runs, sweeps or comparisons")
    entries: list[Entry] = []
    tunings: list[Tuned] = []
    comparisons: list[dict[str, Any]] = []
    commands: list[str] = []
    for folder in folders:
        if (folder / COMPARE).is_file():
            summary = _summary(folder, "compare")
            comparisons.append(summary)
            entries += _compared(folder, summary)
            tunings += _tunings(folder, summary)
            commands.append(f"fedbraid compare {folder / COMPARE}")
        elif (folder / SWEEP).is_file():
            summary = _summary(folder, "sweep")
            label = f"{summary['algorithm']} ({folder.name})"
            tunings.append(
                Tuned(label, read_trials(folder / TRIALS), summary["keys"], summary["best"], summary["criterion"])
            )
            commands.append(f"fedbraid sweep {folder / SWEEP}")
        elif (folder / runfolder.CONFIG).is_file():
            entries.append(_run(folder, folder.name, drift))
            commands.append(f"fedbraid run {folder / runfolder.CONFIG}")
        elif not folder.exists():
            raise ConfigError(f"{folder} does not exist")
        else:
            raise ConfigError(
                f"{folder} is no folder of a run, a sweep or a comparison: it has none of {runfolder.CONFIG}, {SWEEP}, "
                f"{COMPARE}"
            )
    entries = _named(entries)
    return Collection(entries, tunings, comparisons, commands, _notices(entries, comparisons))


def _summary(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.is_file():
        raise ConfigError(
            f"{folder} is incomplete: it has no {SUMMARY}; finish it with fedbraid {kind} --resume {folder}"
        )
    summary = json.loads(path.read_text())
    if summary.get("kind") != kind:
        raise ConfigError(f"{path} is not the summary of a {kind}: {summary.get('kind')!r}")
    return summary


def _run(folder: Path, label: str, drift: int = 0) -> Entry:
    summary = runfolder.read_summary(folder)
    if not summary.get("finished"):
        raise ConfigError(
            f"the run in {folder} stopped after round {summary.get('rounds')}; finish it: --resume {folder}"
        )
    config = load_config(folder / runfolder.CONFIG)
    traced = None
    if drift:
        from fedbraid.experiment.assembly import load_named

        traced = trace_drift(config, load_named(config), drift)
    return Entry(folder, label, config, summary, runfolder.read_metrics(folder), runfolder.read_clients(folder), traced)


def _compared(folder: Path, summary: Mapping[str, Any]) -> list[Entry]:
    entries = []
    for method in summary["methods"]:
        place = folder / method["folder"]
        drift = json.loads((place / DRIFT).read_text()) if (place / DRIFT).is_file() else None
        for seed in summary["seeds"] if method["best"] is not None else ():
            entries.append(_run(place / f"seed-{seed}", method["label"])._replace(drift=drift))
    return entries


def _tunings(folder: Path, summary: Mapping[str, Any]) -> list[Tuned]:
    if not (folder / TRIALS).is_file():
        return []
    rows = read_trials(folder / TRIALS)
    own = {method["label"]: [row for row in rows if row["method"] == method["label"]] for method in summary["methods"]}
    return [
        Tuned(method["label"], own[method["label"]], method["tuned_over"], method["best"], method["tuned_by"])
        for method in summary["methods"]
        if own[method["label"]]
    ]


def _named(entries: list[Entry]) -> list[Entry]:
    """Plain runs that differ in their seed alone get one label; labels that would clash get the folder's name."""

    def method(entry: Entry) -> str:
        deployed = entry.summary.get("engine", {}).get("plan") == "flower"  # is to be compared with simulated ones
        return f"{deployed} {dump(entry.config.model_copy(update={'seed': 0}))}"

    same: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        same.setdefault(method(entry) + entry.folder.parent.name, []).append(i)
    named = list(entries)
    for members in same.values():
        if len(members) > 1:
            for i in members:
                named[i] = named[i]._replace(label=entries[members[0]].label)
    owners: dict[str, str] = {}
    for i, entry in enumerate(named):
        key = method(entry)
        if owners.setdefault(entry.label, key) != key:
            named[i] = entry._replace(label=f"{entry.label} ({entry.folder.parent.name})")
    return named


def _notices(entries: Sequence[Entry], comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before comparing."""

    def several(values: Sequence[Any]) -> list[str]:
        return sorted({json.dumps(v, sort_keys=True, default=str) for v in values})

    notices = []
    data = several([entry.config.data.model_dump() for entry in entries])
    if len(data) > 1:
        names = ", ".join(re.sub(r'["{}]', "", one) for one in data)
        notices.append(f"These runs are on different data, so their scores do not compare: {names}.")
    for what, values in (
        ("models", [entry.config.model.model_dump() for entry in entries]),
        ("numbers of rounds", [entry.config.rounds for entry in entries]),
        ("versions of fedbraid", [entry.summary.get("version") for entry in entries]),
    ):
        if len(several(values)) > 1:
            notices.append(f"These runs have different {what}: {', '.join(several(values))}.")
    for summary in comparisons:
        for method in summary["methods"]:
            if method["best"] is None:
                notices.append(f"{method['label']}: every point of its grid diverged, so it was not run.")
            elif method["at_edge"]:
                keys = ", ".join(method["at_edge"])
                notices.append(f"{method['label']} is best at the edge of its grid ({keys}): look beyond.")
    for entry in entries:
        if entry.summary.get("diverged"):
            notices.append(f"{entry.label}, seed {entry.config.seed}, diverged.")
    return notices


# --- what the page shows ---------------------------------------------------------------------------------------------


def page_data(found: Collection) -> dict[str, Any]:
    """Curves, clients, tunings and drift, thinned and rounded, as the page's script reads them."""
    groups = found.groups
    metrics = _metrics(found)
    curves: dict[str, Any] = {}
    for metric in metrics:
        curves[metric] = {
            "log": "loss" in metric and all(_positive(e.table[metric]) for e in found.entries if metric in e.table),
            "series": [
                {"label": label, "axes": _axes(own, metric), "seeds": [e.config.seed for e in own]}
                for label, own in groups.items()
                if all(metric in entry.table for entry in own)
            ],
        }
    return {
        "labels": list(groups),
        "curves": curves,
        "clients": _clients(groups),
        "tunings": [
            _rounded({"label": t.label, "criterion": t.criterion, "best": t.best, **tuning_plot(t.rows, t.keys)})
            for t in found.tunings
        ],
        "drift": _drifts(groups),
    }


def _drifts(groups: Mapping[str, list[Entry]]) -> list[dict[str, Any]]:
    """Drift per label and round over local steps; what is rounding error beside the largest is 0."""
    found = []
    for label, own in groups.items():
        if own[0].drift and "drift" in own[0].drift:
            drift = np.array(own[0].drift["drift"])
            found.append({"label": label, "rounds": _rounded(np.where(drift < 1e-10 * drift.max(), 0.0, drift))})
    return found


def _metrics(found: Collection) -> list[str]:
    """Evaluated metrics first, accuracy before loss; then what was logged of the training."""
    names = list(dict.fromkeys(name for entry in found.entries for name in entry.table))
    pooled = [n for n in names if n.startswith("test_") and "_client_" not in n]
    spread = [
        n for n in names if n.startswith("test_") and n.endswith(("_client_mean", "_client_p10", "_client_worst"))
    ]
    logged = [n for n in names if n.endswith("/loss")]
    return [*sorted(pooled), *logged, *sorted(spread)]


def _positive(column: np.ndarray) -> bool:
    seen = column[np.isfinite(column)]
    return len(seen) > 0 and bool(seen.min() > 0)


def _axes(entries: Sequence[Entry], metric: str) -> dict[str, Any]:
    """Per axis: x and the mean, least and largest value; and each seed's own line, thinned."""
    axes = {}
    for against in AXES:
        tables = [entry.table for entry in entries]
        if against == "seconds" and not all("seconds" in t and np.isfinite(t["seconds"]).all() for t in tables):
            continue
        if not all(np.isfinite(t[metric]).any() for t in tables):
            continue
        line = _thinned(series(tables, metric, against))
        each = [_thinned(series([table], metric, against)) for table in tables]
        axes[against] = _rounded(line) | {"each": [_rounded([one["x"], one["mean"]]) for one in each]}
    return axes


def _thinned(line: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """At most so many points: means over stretches of equal length, which also calms a noisy training loss."""
    length = len(line["x"])
    if length <= MOST_POINTS:
        return dict(line)
    cuts = np.array_split(np.arange(length), MOST_POINTS)
    return {name: np.array([column[cut].mean() for cut in cuts]) for name, column in line.items()}


def _clients(groups: Mapping[str, list[Entry]]) -> dict[str, Any]:
    """Per metric and label the clients' values from worst to best, pooled over the seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for label, own in groups.items():
        for metric in own[0].clients:
            if metric == "client" or any(metric not in entry.clients for entry in own):
                continue
            values = np.concatenate([np.asarray(entry.clients[metric], float) for entry in own])
            values = np.sort(values[np.isfinite(values)])
            if "loss" in metric or "error" in metric:
                values = values[::-1]
            found.setdefault(metric, []).append({"label": label, "values": _rounded(_quantiles(values))})
    return dict(sorted(found.items()))


def _quantiles(values: np.ndarray) -> np.ndarray:
    if len(values) <= MOST_POINTS:
        return values
    return values[np.linspace(0, len(values) - 1, MOST_POINTS).round().astype(int)]


def _rounded(value: Any) -> Any:
    """Six digits are more than a screen shows; nan and infinities, which JSON has not, are null."""
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _rounded(value.tolist())
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value


def config_difference(configs: Mapping[str, Config]) -> list[tuple[str, list[str | None]]]:
    """The keys at which configurations differ, with the value of each; None where it is the default."""
    each = [flat(config.model_dump(mode="json")) for config in configs.values()]
    rows = []
    for key in sorted({key for one in each for key in one} - {"seed"}):
        if len({json.dumps(one[key]) if key in one else None for one in each}) > 1:
            rows.append((key, [_shown(one[key]) if key in one else None for one in each]))
    return rows


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def flat(tree: Any, before: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys.

    >>> flat({"a": {"b": 1}, "c": [{"d": 2}]})
    {'a.b': 1, 'c.0.d': 2}
    """
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(one, Mapping) for one in tree):
        items = enumerate(tree)
    else:
        return {before: tree}
    return {k: v for name, one in items for k, v in flat(one, f"{before}.{name}" if before else str(name)).items()}


class Citation(NamedTuple):
    """Where a method comes from: its own line, and the paper that heads its module."""

    name: str
    about: str
    paper: str


def citation(kind: str, name: str) -> Citation:
    """The citation of an algorithm or a transform, from the docstrings that carry it.

    >>> citation("algorithm", "scaffold").paper.split(".")[-3].strip()
    'ICML 2020'
    """
    factory = (algorithms.ALGORITHMS if kind == "algorithm" else transforms.TRANSFORMS)[name]
    module = inspect.getmodule(factory)
    about = (inspect.getdoc(factory) or "").split("\n\n")[0]
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")[1:] if module else []
    paper = next((p for p in paragraphs if re.search(r"\b(19|20)\d\d\b", p) and not p.startswith(" ")), "")
    return Citation(name, " ".join(about.split()), " ".join(paper.split()))


# --- writing ---------------------------------------------------------------------------------------------------------


def write_report(found: Collection, out: Path, *, title: str | None = None, plots: bool = True) -> dict[str, Any]:
    """Write the page to ``out`` and, beside it, a folder with every plot as PNG and PDF; returns what was written."""
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
        "VERSION": html.escape(fedbraid.__version__),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        # a "</script>" inside a string would end the element
        "DATA": json.dumps(page_data(found), separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))
    out.write_text(page, encoding="utf-8")
    pictures = _plots(found, out.parent / f"{out.stem}-plots") if plots else []
    return {
        "out": str(out),
        "bytes": len(page.encode()),
        "runs": len(found.entries),
        "tunings": len(found.tunings),
        "notices": found.notices,
        "plots": [str(path) for path in pictures],
    }


def _asset(name: str) -> str:
    return files("fedbraid.experiment").joinpath("page", name).read_text(encoding="utf-8")


def _title(found: Collection) -> str:
    names = list(dict.fromkeys(entry.config.data.name for entry in found.entries))
    labels = list(found.groups) or [tuned.label for tuned in found.tunings]
    what = " vs ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    return f"{what} on {', '.join(names)}" if names else f"Tuning of {what}"


def _subtitle(found: Collection) -> str:
    entries = found.entries
    if not entries:
        return f"{sum(len(t.rows) for t in found.tunings)} trials"
    first = entries[0].config
    same = all(entry.config.model == first.model for entry in entries)
    parts = [f"{len(entries)} run{'s' if len(entries) > 1 else ''}"]
    if same:
        options = ", ".join(f"{key} {json.dumps(value)}" for key, value in first.model.options.items())
        parts.append(f"model {first.model.name}" + (f" ({options})" if options else ""))
    if len({entry.config.rounds for entry in entries}) == 1:
        parts.append(f"{first.rounds} rounds")
    parts += [f"equal {summary['protocol'].replace('-', ' ')}" for summary in found.comparisons]
    return " · ".join(parts)


def _cell(value: Any) -> str:
    return f"<td>{html.escape(str(value))}</td>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose first column heads its rows; it scrolls inside its frame on a narrow screen."""
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(str(row[0]))}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows
    )
    return f'<div class="frame"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _amount(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _spread(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.4f}"


def _results(found: Collection) -> str:
    if found.comparisons:
        return "".join(map(_comparison_table, found.comparisons))
    if not found.entries:
        rows = [
            [t.label, ", ".join(f"{k} = {v}" for k, v in (t.best or {}).items()) or "none", t.criterion, len(t.rows)]
            for t in found.tunings
        ]
        return _table(["tuning", "best", "judged by", "trials"], rows)
    names = [n for n in _metrics(found) if n.startswith("test_")]
    shown = [n for n in names if n.endswith(("_client_p10", "_client_worst"))]
    shown = [n for n in names if "_client_" not in n] + [n for n in shown if "accuracy" in n]
    rows = []
    for label, own in found.groups.items():
        finals = [entry.summary["final"] for entry in own]
        sent = float(np.mean([entry.summary["bytes"]["down"] + entry.summary["bytes"]["up"] for entry in own]))
        scores = [_spread([f[n] for f in finals]) if all(n in f for f in finals) else "–" for n in shown]
        seconds = np.mean([entry.summary["seconds"] for entry in own])
        name = own[0].config.algorithm.name
        rows.append([label, name, len(own), *scores, _amount(sent), f"{seconds:.1f} s"])
    heads = ["run", "algorithm", "seeds", *(n.removeprefix("test_").replace("_", " ") for n in shown), "sent", "time"]
    return _table(heads, rows)


def _comparison_table(summary: Mapping[str, Any]) -> str:
    metric, target = str(summary["metric"]).removeprefix("test_"), summary["target"]
    heads = ["method", f"{metric}, last rounds", "tuned to", "clients a round", "models a client"]
    heads += [f"rounds to {target:g}", f"sent to {target:g}"] if target is not None else []
    heads += ["10th percentile of clients", "median client", "worst client", "sent in all", "diverged trials"]
    rows = []
    for row in summary["methods"]:
        best = (
            ", ".join(
                f"{key.removeprefix('algorithm.')} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in (row["best"] or {}).items()
            )
            or "–"
        )
        cells: list[Any] = [row["label"]]
        if row["best"] is None or row.get("score") is None:
            cells.append("diverged")
        else:
            cells.append(f"{row['score']:.4f}" + ("" if row["deviation"] is None else f" ± {row['deviation']:.4f}"))
        cells += [best, row["cohort"], f"{row['bytes_per_client']['models']:.3g}"]
        if target is not None:
            rounds = row.get("rounds_to_target")
            never = f"{row.get('reached', 0)} of {len(summary['seeds'])} seeds"
            cells += [never if rounds is None else f"{rounds:.0f}", _amount(row.get("bytes_to_target"))]
        clients = row.get("clients") or {}
        cells += [f"{clients[name]:.3f}" if name in clients else "–" for name in ("p10", "p50", "worst")]
        cells += [_amount(row.get("bytes")), f"{row['trials_diverged']} of {row['trials']}"]
        rows.append(cells)
    seeds = ", ".join(map(str, summary["seeds"]))
    about = (
        f"{summary['criterion']}; mean ± deviation over seeds {seeds}. Equal {summary['protocol'].replace('-', ' ')}."
    )
    if summary["tuned_on"]:
        about += f" Tuned on {summary['tuned_on']}, never on the test set."
    return _table(heads, rows) + f'<p class="note">{html.escape(about)}</p>'


def _difference(found: Collection) -> str:
    groups = found.groups
    if len(groups) < 2:
        return '<p class="note">There is one configuration only.</p>'
    rows = config_difference({label: own[0].config for label, own in groups.items()})
    if not rows:
        return '<p class="note">The configurations are the same.</p>'
    return _table(["key", *groups], [[key, *("default" if v is None else v for v in values)] for key, values in rows])


def _methods(found: Collection) -> str:
    named: dict[tuple[str, str], None] = {}
    for entry in found.entries:
        named[("algorithm", entry.config.algorithm.name)] = None
        for transform in entry.config.transforms:
            named[("transform", transform.name)] = None
    items = []
    for kind, name in named:
        known = algorithms.ALGORITHMS if kind == "algorithm" else transforms.TRANSFORMS
        if name not in known:
            continue
        cited = citation(kind, name)
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
    for metric in [m for m in _metrics(found) if "_client_" not in m]:
        for against in AXES:
            lines = []
            for label, own in groups.items():
                if all(metric in entry.table for entry in own) and against in (axes := _axes(own, metric)):
                    line = {k: np.asarray(axes[against][k], float) for k in ("x", "mean", "low", "high")}
                    lines.append({"label": label, **line})
            if lines:
                keep(draw_curves(lines, metric, against), f"{metric}-{against}")
    for metric, lines in _clients(groups).items():
        keep(draw_clients(lines, metric), f"clients-{metric}")
    for tuned in found.tunings:
        found_best = {"best": tuned.best, "criterion": tuned.criterion}
        keep(draw_tuning(tuned.rows, tuned.keys, found_best, f"tuning: {tuned.label}"), f"tuning-{tuned.label}")
    if drifts := _drifts(groups):
        keep(draw_drift([{"label": d["label"], "drift": d["rounds"]} for d in drifts]), "drift")
    return paths
