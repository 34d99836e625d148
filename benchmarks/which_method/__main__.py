"""Which method for what: global and personal methods on four federations, tuned fairly, 3 seeds.

    python benchmarks/which_method [--out runs/which-method] [--only NAME ...]   # runs what is not there yet
    python benchmarks/which_method --page                                        # the page from docs/which-method.json

Each federation is one comparison (``fedbraid compare``), whose file is written to OUT/NAME.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs/which-method.json", ROOT / "docs/which-method.md"
RATES = "logspace(-2, 0, 5)"
MLP = {"name": "mlp", "hidden": [64]}
FEDERATIONS: dict[str, dict[str, Any]] = {
    "iid": {
        "words": "iid: digits spread at random over 20 clients",
        "data": {"name": "digits", "partition": "iid", "clients": 20},
        "model": MLP,
    },
    "labels": {
        "words": "other labels: digits, 20 clients, labels by Dirichlet 0.1",
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.1, "clients": 20},
        "model": MLP,
    },
    "models": {
        "words": "other models: Synthetic(1, 1), 30 clients, each with its own softmax model",
        "data": {"name": "synthetic-heterogeneous", "alpha": 1.0, "beta": 1.0, "clients": 30},
        "model": {"name": "mlp", "hidden": [32]},
        "rates": "logspace(-3, 0, 7)",
    },
    "groups": {
        "words": "two groups: digits on 20 clients, half of them call the digit d 9 - d",
        "data": {"name": "federations:groups"},
        "model": MLP,
        "rates": "logspace(-2, 0.5, 6)",
    },
}
GLOBAL = ("fedavg", "fedprox", "scaffold", "fedadam")
PERSONAL = ("fedper", "fedrep", "lg_fedavg", "fedbabu", "ditto", "apfl", "pfedme", "fedala", "ifca", "local_only")
OPTIONS: dict[str, dict[str, Any]] = {
    "fedadam": {"server_lr": 0.03},
    "ifca": {"clusters": 2},
    "fedprox": {"alpha": 0.1},
}


def comparison(name: str) -> dict[str, Any]:
    """The comparison of one federation, as `fedbraid compare` reads it."""
    chosen = FEDERATIONS[name]
    methods = [
        {"name": method, "over": {"client_lr": chosen.get("rates", RATES)}, **OPTIONS.get(method, {})}
        for method in (*GLOBAL, *PERSONAL)
    ]
    return {
        "rounds": 100,
        "cohort": 10,
        "data": chosen["data"],
        "model": chosen["model"],
        "algorithm": {"epochs": 2, "batch_size": 10},
        "evaluation": {"every": 10},
        "compare": {"seeds": 3, "last": 30, "drift": 0, "baselines": []},
        "sweep": {"seeds": 1},
        "methods": methods,
    }


def measured(name: str, out: Path) -> dict[str, Any]:
    """The rows of one federation: the score of each method's model, for personal ones of both models."""
    folder = out / name
    if not (folder / "summary.json").exists():
        written = out / f"{name}.toml"
        written.write_text(tomli_w.dumps(comparison(name)))
        command = [sys.executable, "-m", "fedbraid", "compare", str(written), "--out", str(folder)]
        paths = {"PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}"}
        subprocess.run(command, check=True, env={**os.environ, **paths})
    summary = json.loads((folder / "summary.json").read_text())
    rows = {}
    for row in summary["methods"]:
        own = row.get("personal")
        rows[row["label"]] = {"global": _score(row), **({"personal": _score(own)} if own else {}), "best": row["best"]}
    return rows


def _score(row: Any) -> dict[str, float]:
    """Mean and deviation over the seeds, and the worst tenth of the clients; nothing if every trial diverged."""
    if row.get("score") is None:
        return {}
    found = {"score": row["score"], "deviation": row["deviation"], "worst_tenth": row["clients"]["worst_tenth"]}
    return {name: round(value, 5) for name, value in found.items()}


def page(found: dict[str, Any]) -> str:
    """The page, from the rows of all federations."""
    names = list(found)
    heads = ["method", *names]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    used = {n: {m: rows.get("personal", rows["global"]) for m, rows in found[n].items()} for n in names}
    best = {n: max(cell.get("score", 0) for cell in used[n].values()) for n in names}
    for method in used[names[0]]:
        cells = []
        for n in names:
            cell = used[n].get(method, {})
            if "score" not in cell:
                cells.append("diverged")
                continue
            text = f"{100 * cell['score']:.1f} ± {100 * cell.get('deviation', 0):.1f}"
            text += f" ({100 * cell['worst_tenth']:.0f})" if "worst_tenth" in cell else ""
            cells.append(f"**{text}**" if cell["score"] >= best[n] - 0.005 else text)
        kind = "personal" if method in PERSONAL else "global"
        lines.append(f"| `{method}` ({kind}) | {' | '.join(cells)} |")
    words = "\n".join(f"- **{n}**: {FEDERATIONS[n]['words'].split(': ', 1)[1]}" for n in names)
    return TEXT.format(words=words, table="\n".join(lines))


TEXT = """# Which method for what

Global methods train one model for all clients. Personal methods give each client its own model. Which one is better
depends on how clients differ. Use this page to choose which kind of method to try first. The table has four small
federations.

{words}

Accuracy in % on each client's own test examples, of the model that the clients use: mean ± deviation over 3 seeds, in
parentheses the worst tenth of the clients. Bold: within half a point of the best.

{table}

100 rounds of 10 clients, 2 local epochs, batches of 10. The client rate of every method was tuned over five to seven
values (0.01 to 1; on *groups* to 3.2, on *models* from 0.001) on a validation split, with one other seed. A method
whose results vary between seeds at a large rate may have been given such a rate (FedPer on *iid* and *groups*). All
other options are defaults, except that FedAdam's server rate is 0.03, FedProx has alpha 0.1 and IFCA two clusters.

## How to read it

- **Clients have similar data** (*iid*): use a global method. A personal model learns from one client's examples only,
  so it has less data.
- **Clients differ in their labels or in their models** (*labels*, *models*): a personal method is better, here by
  three points. Compare it with *local only*: a client that has only two classes is easy for its own model.
- **Clients form groups with contradictory labels** (*groups*): no single model can be right for all. IFCA
  finds the groups.

## What can go wrong

- The scores here are of clients that took part. A new client has no personal model yet: see the page of each method.
- A personal model may be better on average and worse for a few clients: look at the worst tenth.
- Your federation may differ from these four. Run the comparison on your data: replace `[data]` in a file that
  `python benchmarks/which_method` writes, and call `fedbraid compare FILE`.

## Repeat it

`python benchmarks/which_method` runs the four comparisons (minutes on two cores) and writes `docs/which-method.json`;
`--page` writes this page from it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/which-method"))
    parser.add_argument("--only", nargs="+", choices=tuple(FEDERATIONS), default=tuple(FEDERATIONS))
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        options.out.mkdir(parents=True, exist_ok=True)
        found = json.loads(DATA.read_text()) if DATA.exists() else {}
        for name in options.only:
            found[name] = measured(name, options.out)
            ordered = {n: found[n] for n in FEDERATIONS if n in found}
            DATA.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
