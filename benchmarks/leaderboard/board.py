"""The leaderboard's data, page and picture, from the files of its cells."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plan

import record

DATA, PAGE, PICTURE = "leaderboard.json", "leaderboard.md", "images/leaderboard.svg"
KEPT = (
    *("federation", "method", "rounds", "trials", "best", "at_edge", "score", "scores", "worst_tenth"),
    *("rounds_to_target", "reached", "diverged", "bytes_per_round", "passes", "seconds"),
)
LOWER = ("squared_error",)  # metrics that are better if they are lower
Board = dict[str, Any]


def collect(cells: Path, docs: Path, commit: str | None, *, update: bool = False) -> str:
    """Write the data of the page from the cells in a folder; returns a sentence about them.

    commit: that of the code that measured them, if they were measured in a copy without a repository.
    update: replace these cells in the data, and keep the others. The page then says at which commit they were measured.
    """
    found = [json.loads(path.read_text()) for path in sorted(cells.glob("*.json"))]
    if not found:
        raise SystemExit(f"there are no cells in {cells}")
    order = plan.cells()
    found = [cell for cell in found if (cell["federation"], cell["method"]) in order]
    about = found[0].get("about") or record.about()
    about["commit"] = commit or about["commit"]
    if update:
        board = json.loads((docs / DATA).read_text(encoding="utf-8"))
        later = {cell["method"]: about["commit"] for cell in found}
        about = board["about"] | {"later": board["about"].get("later", {}) | later}
        new = {(cell["federation"], cell["method"]) for cell in found}
        found += [cell for cell in board["cells"] if (cell["federation"], cell["method"]) not in new]
    found.sort(key=lambda cell: order.index((cell["federation"], cell["method"])))
    about |= {"core_seconds": round(sum(cell["seconds"] for cell in found)), "points": plan.POINTS}
    rows = [json.dumps({key: cell[key] for key in KEPT if key in cell}) for cell in found]
    text = f'{{"about": {json.dumps(about)},\n"cells": [\n' + ",\n".join(rows) + "\n]}\n"
    (docs / DATA).write_text(text, encoding="utf-8")
    return f"{len(found)} of {len(order)} cells, {about['core_seconds']:,} core-seconds"


def write_page(docs: Path) -> None:
    """Write the page and the picture from the data."""
    board = json.loads((docs / DATA).read_text(encoding="utf-8"))
    (docs / PAGE).write_text(page(board), encoding="utf-8")
    draw(board, docs / PICTURE)


# --- numbers ---------------------------------------------------------------------------------------------------------


def by_federation(board: Board) -> dict[str, dict[str, Board]]:
    """Cells by federation and method, in the order of the plan."""
    found: dict[str, dict[str, Board]] = {}
    for federation in plan.FEDERATIONS:
        cells = {c["method"]: c for c in board["cells"] if c["federation"] == federation.name}
        if cells:
            found[federation.name] = cells
    return found


def ranks(cells: dict[str, Board], metric: str) -> dict[str, float]:
    """The rank of each method on a federation: 1 is the best, equal scores share their mean rank.

    Methods without a score (diverged) share the last ranks.

    >>> cells = {"a": {"score": 0.5}, "b": {"score": 0.9}, "c": {"score": 0.5}, "d": {"score": None}}
    >>> ranks(cells, "accuracy")
    {'a': 2.5, 'b': 1.0, 'c': 2.5, 'd': 4.0}
    """
    sign = 1 if metric in LOWER else -1
    lost = float("inf")
    keys = {name: lost if cell.get("score") is None else sign * cell["score"] for name, cell in cells.items()}
    ordered = sorted(keys.values())
    first = {key: ordered.index(key) + 1 for key in ordered}
    return {name: first[key] + (ordered.count(key) - 1) / 2 for name, key in keys.items()}


def summary(board: Board) -> list[Board]:
    """One row per method: its mean rank, where it is the best, and its cost relative to FedAvg, best first."""
    found = by_federation(board)
    places = {name: ranks(cells, plan.BY_FEDERATION[name].metric) for name, cells in found.items()}
    rows = []
    for method in plan.BY_METHOD:
        on = [name for name, cells in found.items() if method in cells]
        if not on:
            continue
        cells = [found[name][method] for name in on]
        row: Board = {"method": method, "on": len(on), "rank": statistics.mean(places[name][method] for name in on)}
        row["first"] = [name for name in on if places[name][method] == 1]
        row["reached"] = sum(cell.get("rounds_to_target") is not None for cell in cells)
        row["rounds"] = _against(found, on, method, "rounds_to_target")
        row["bytes"] = _against(found, on, method, "bytes_per_round")
        row["passes"] = _against(found, on, method, "passes")
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["on"], row["rank"]))


def _against(found: dict[str, dict[str, Board]], on: list[str], method: str, key: str) -> float | None:
    """The median over federations of a number, divided by FedAvg's; None if it is never known."""
    ratios = []
    for name in on:
        own, usual = found[name][method].get(key), found[name].get("fedavg", {}).get(key)
        if own is not None and usual:
            ratios.append(own / usual)
    return statistics.median(ratios) if ratios else None


# --- words -----------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Leaderboard

Which method is best, if every method gets the same effort of tuning? Here {methods} methods that train
one global model run on {federations} federations, {cells} cells in all. The federations are made from files and
packages: natural clients (schools, writers, patients, roles) and label skew drawn from Dirichlet distributions,
classification and regression, from least squares to a CNN and an LSTM.

**When to use it.** To choose the two or three methods that you try first on your own data. Then run
[`fedbraid compare`](sweeps.md) or [`fedbraid advise`](advise.md) there: the order differs from federation to
federation, as the picture shows.

![Score of every method on every federation](images/leaderboard.svg)

*What to see: a row is a method, a column a federation. Dark cells are the best scores of their column. No row is dark
everywhere, and the order of the rows is an average only.*
"""
RULES = """\
## The rules

- *Tuning.* Every method tries {points} settings of its own options with one tuning seed on validation data
  (`benchmarks/leaderboard/plan.py` lists them). Methods with one rate try {points} rates, others six rates and three
  values of a second option. The setting with the best score on validation data is tested with {seeds} other seeds.
- *Score.* The metric on the test split, averaged over the evaluations of the last {last} rounds and over the seeds.
  The number after ± is the standard deviation over the seeds. Differences that are smaller say nothing.
- *Worst tenth.* A tenth of the clients score worse than this, each on its own test examples, with the last model.
- *Rounds.* The first evaluated round that reaches the target, averaged over the seeds; evaluated every {every} rounds.
  Empty if a seed does not reach it. The targets were set before the methods were compared, a little below what tuned
  FedAvg reaches.
- *Sent.* Bytes of all messages down and up until that round.
- *Passes.* Client work per round, counted: how often a client evaluates the loss or a gradient on each of its
  examples. One epoch of gradient steps is 1 pass.
- *Local work.* All methods have the federation's batch size and epochs, if they have such options. Methods that need
  the same number of local steps on all clients take that of a client of mean size.

**What can go wrong.** The budget is small, so a method with more options than a grid of {points} points can cover is at
a disadvantage. "At the edge" in the tables means that the best value was the first or last of the grid, so a wider grid
may be better. Methods for fairness (`afl`, `q_fedavg`) are ranked by the mean score, which is not what they optimise:
see their worst tenth. `fedauto` and `fedauto_ahead` were designed by us on federations of
[the benchmark of advice](advice-benchmark.md), `fedauto` on five of these (digits-mlp, chem97, femnist-cnn, nafld2,
breast-cancer) and `fedauto_ahead` on all eight: their fair tests are the held-out federations there.
"""
ENDING = """\
## Repeat it

```
python benchmarks/leaderboard --cell digits-mlp fedavg
python benchmarks/leaderboard --all --processes 8 --files FOLDER
```

The first command measures one cell (other names: the tables above) and says whether it agrees with this page. It makes
the data if it is missing: `pip install "fedbraid[benchmarks]"`. For femnist-cnn and shakespeare-b add `--files FOLDER`,
with `femnist/femnist_writers.npz` and `tff-shakespeare/shakespeare_train.h5`.

All eight cells of FedAvg were repeated on another machine (an AMD EPYC instead of an Intel Xeon, jax 0.10.2 instead of
0.11.2, Python 3.11 instead of 3.12): scores, worst tenths and tuned values were the same to six digits. On other
processors floating-point sums may differ in their last digits, and a long run can turn that into another third digit.

Measured on {date} at commit {commit}: fedbraid {fedbraid}, jax {jax}, Python {python}; {machine};
{core_seconds:,} core-seconds in all.{later} Data: `docs/leaderboard.json`.
"""


def page(board: Board) -> str:
    """The page as Markdown."""
    found, rows = by_federation(board), summary(board)
    every = len(plan.METHODS)
    methods = f"all {every}" if len(rows) == every else f"{len(rows)} of the library's {every}"
    intro = INTRODUCTION.format(methods=methods, federations=len(found), cells=len(board["cells"]))
    rules = RULES.format(points=plan.POINTS, seeds=plan.TEST_SEEDS, last=plan.LAST, every=plan.EVERY)
    parts = [intro, "## All methods\n", _summary_table(rows, len(found)), rules]
    parts += ["## Each federation\n", *(_federation_part(name, cells) for name, cells in found.items())]
    left = [f"- `{name}`: {why}" for name, why in plan.LEFT_OUT.items()]
    left.append("- methods for personal models: the page is about one model for all clients")
    parts += ["## Methods that are not measured\n", "\n".join(left) + "\n", _missing(found)]
    later = "".join(
        f" The cells of `{method}` were measured later, at commit {commit}, on another machine."
        for method, commit in board["about"].get("later", {}).items()
    )
    parts.append(ENDING.format(**board["about"] | {"later": later}))
    return "\n".join(parts)


def _missing(found: dict[str, dict[str, Board]]) -> str:
    """A sentence about cells of the plan that are not in the data; empty if all are."""
    names = []
    for method in plan.BY_METHOD:
        on = [name for name in plan.BY_FEDERATION if method not in found.get(name, {})]
        if len(on) == len(plan.FEDERATIONS):
            names.append(f"`{method}`")
        elif on:
            names.append(f"`{method}` on {', '.join(on)}")
    return f"Planned and not measured yet, for lack of time: {'; '.join(names)}.\n" if names else ""


def _summary_table(rows: list[Board], federations: int) -> str:
    text = (
        "Best first. *Mean rank* is over the federations (1 is the best). *Rounds*, *bytes* and *passes* are ratios to "
        "FedAvg (medians over federations): rounds to the target, where both reach it; bytes and client work per "
        "round.\n\n"
    )
    heads = ["method", "mean rank", "best on", "targets reached", "rounds", "bytes a round", "passes a round"]
    table = []
    for row in rows:
        short = "" if row["on"] == federations else f" (on {row['on']})"
        cells = [f"`{row['method']}`{short}", f"{row['rank']:.1f}", ", ".join(row["first"])]
        cells.append(f"{row['reached']} of {row['on']}")
        cells += ["" if row[key] is None else f"{row[key]:.2f}x" for key in ("rounds", "bytes", "passes")]
        table.append(cells)
    return text + record.markdown(heads, table) + "\n"


def _federation_part(name: str, cells: dict[str, Board]) -> str:
    about = plan.BY_FEDERATION[name]
    lower = about.metric in LOWER
    metric = about.metric.replace("_", " ")
    lines = [
        f"### {name}\n",
        f"{about.task[0].upper()}{about.task[1:]}. Clients: {about.clients}. {about.rounds} rounds. Metric: {metric}, "
        f"{'lower' if lower else 'higher'} is better. Target: {about.target:g}.\n",
    ]
    places = ranks(cells, about.metric)
    ordered = sorted(cells, key=lambda method: (places[method], list(plan.BY_METHOD).index(method)))
    heads = ["method", metric, "worst tenth", "rounds", "sent", "passes", "tuned to"]
    rows = [[f"`{method}`", *_cells(cells[method])] for method in ordered]
    return "\n".join([*lines, record.markdown(heads, rows)]) + "\n"


def _cells(cell: Board) -> list[str]:
    """The cells of a row after its name."""
    from fedbraid.units import format_bytes

    if cell.get("score") is None:
        diverged = cell.get("diverged")
        return [f"{diverged} of {plan.TEST_SEEDS} seeds diverged" if diverged else "diverged", *[""] * 5]
    spread = statistics.stdev(cell["scores"]) if len(cell["scores"]) > 1 else 0.0
    rounds = cell["rounds_to_target"]
    sent = "" if rounds is None else format_bytes(rounds * cell["bytes_per_round"])
    edges = f" (at the edge: {', '.join(cell['at_edge'])})" if cell["at_edge"] else ""
    values = ", ".join(f"{key} {value:.3g}" for key, value in cell["best"].items())
    worst = "" if cell["worst_tenth"] is None else f"{cell['worst_tenth']:.3g}"
    return [
        f"{cell['score']:.4f} ± {spread:.2g}",
        worst,
        "" if rounds is None else f"{rounds:.0f}",
        sent,
        f"{cell['passes']:g}",
        values + edges,
    ]


# --- picture ---------------------------------------------------------------------------------------------------------


def _readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has the larger contrast on a colour (relative luminance of WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def draw(board: Board, path: Path) -> None:
    """A table of scores; the colour is the rank in the column."""
    import matplotlib
    from matplotlib.figure import Figure

    found, rows = by_federation(board), summary(board)
    methods, names = [row["method"] for row in rows], list(found)
    places = {name: ranks(cells, plan.BY_FEDERATION[name].metric) for name, cells in found.items()}
    last = len(methods)
    matplotlib.rcParams |= {"svg.hashsalt": "leaderboard", "svg.fonttype": "none"}
    figure = Figure(figsize=(1.6 + 1.15 * len(names), 1.3 + 0.27 * last), layout="constrained")
    axis = figure.add_subplot()
    shade = [[places[name].get(method, float("nan")) for name in names] for method in methods]
    image = axis.imshow(shade, cmap="Blues_r", vmin=1, vmax=1.3 * last, aspect="auto")
    for i, method in enumerate(methods):
        for j, name in enumerate(names):
            cell = found[name].get(method)
            if cell is None:
                continue
            text = "diverged" if cell.get("score") is None else f"{cell['score']:.3f}"
            colour = image.cmap(image.norm(places[name][method]))
            axis.text(j, i, text, ha="center", va="center", fontsize=7.5, color=_readable_on(colour))
    heads = [f"{name}\n{plan.BY_FEDERATION[name].metric.replace('_', ' ')}" for name in names]
    axis.set_xticks(range(len(names)), heads, fontsize=7.5)
    axis.xaxis.tick_top()
    axis.set_yticks(range(last), [f"{row['method']}  {row['rank']:.1f}" for row in rows], fontsize=8)
    axis.set_ylabel("method and its mean rank, best first", fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axis, shrink=0.5, pad=0.01, boundaries=range(1, last + 1))
    bar.set_label("rank on the federation (1: the best)", fontsize=8)
    bar.ax.invert_yaxis()
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, metadata={"Date": None})
