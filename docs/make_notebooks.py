"""Makes and executes the notebooks of this folder: `python docs/make_notebooks.py`.

It needs `pip install 'fedbraid[notebooks]'`. The cells are written here. A test
checks that the notebook has these cells and that they run in order.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
NOTEBOOK = HERE / "first_steps.ipynb"
MOST_BYTES = 300_000

CELLS = [
    (
        "markdown",
        """# First steps

Data that is spread over clients, a run, a comparison, an algorithm of your own, and a plot. Every cell takes seconds on
a laptop. Nothing is downloaded: the digits are part of the package.""",
    ),
    (
        "code",
        """import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import fedbraid as fb
from fedbraid import models
from fedbraid.data.catalog import load

ROUNDS = 60
SEEDS = 2
folder = Path(tempfile.mkdtemp())  # the runs of this notebook go here""",
    ),
    (
        "markdown",
        """## Data

1,797 images of digits, divided over 50 clients. A small `alpha` gives each client few digits. Your own table is one
line, too: see [data.md](data.md) for CSV files, frames and Hugging Face data sets.""",
    ),
    (
        "code",
        """data = load("digits", partition="dirichlet", alpha=0.3, clients=50)
data""",
    ),
    (
        "markdown",
        """## A run

A configuration says everything. The same text in a TOML file runs with `fedbraid run config.toml`.""",
    ),
    (
        "code",
        """config = {
    "rounds": ROUNDS,
    "cohort": 10,
    "data": {"name": "digits", "alpha": 0.3, "clients": 50},
    "model": {"name": "mlp", "hidden": [64]},
    "algorithm": {"name": "fedavg", "client_lr": 0.3, "epochs": 2},
}
run = fb.run(config, folder / "fedavg", progress=False)
run""",
    ),
    ("markdown", "The history is a table with one row per round. Evaluated columns have values every 10 rounds."),
    (
        "code",
        """columns = ["train/loss", "test_accuracy", "test_accuracy_client_worst_tenth", "bytes_up"]
history = run.to_pandas()[columns]
history[history["test_accuracy"].notna()].tail(4).round(3)""",
    ),
    ("markdown", "The trained model answers for raw examples:"),
    (
        "code",
        """few = {name: field[:8] for name, field in data.test.arrays.items()}
print("predicted", run.predict(few["x"]).argmax(1).tolist())
print("true     ", few["y"].tolist())""",
    ),
    (
        "markdown",
        """## A comparison

Three methods with the same data, model, cohorts and initial parameters. Each is tuned over its own rates on a
validation split, then tested with several seeds. The two rows in brackets are no methods: *local only* says what
clients reach alone, *pooled data* what one machine reaches that has all examples ([sweeps.md](sweeps.md)).""",
    ),
    (
        "code",
        """(folder / "compare.toml").write_text(f\"\"\"
rounds = {ROUNDS}
cohort = 10
data = {{ name = "digits", alpha = 0.3, clients = 50 }}
model = {{ name = "mlp", hidden = [64] }}
algorithm = {{ epochs = 2 }}
compare = {{ seeds = {SEEDS}, last = 20, drift = 0 }}
[[methods]]
label = "FedAvg"
name = "fedavg"
over = {{ client_lr = "logspace(-1, 0.5, 4)" }}
[[methods]]
label = "FedAvgM"
name = "fedavgm"
kind = "average"
over = {{ client_lr = "logspace(-1, 0.5, 4)" }}
[[methods]]
label = "SCAFFOLD"
name = "scaffold"
over = {{ client_lr = "logspace(-1, 0.5, 4)" }}
\"\"\")
compared = fb.compare(folder / "compare.toml", folder / "compared")
compared""",
    ),
    (
        "markdown",
        """`compared.report()` shows the whole page here; `fedbraid report FOLDER` writes it to a file
([reports.md](reports.md)).

## An algorithm of your own

A client gets the model, takes local steps, and sends an upload. The server gets the mean of the uploads. Here clients
send only the signs of their update, and its mean size. [extending.md](extending.md) says how configurations name such
an algorithm, and `fedbraid.testing.check(algorithm)` tests it.""",
    ),
    (
        "code",
        """def signed(loss, *, client_lr=0.1, epochs=1) -> fb.Algorithm:
    \"\"\"FedAvg with uploads of one sign per parameter.\"\"\"

    def start(down, state, key):
        return down.params

    def step(params, batch, key, down):
        gradient = jax.grad(loss)(params, batch, key)
        return jax.tree.map(lambda y, g: y - client_lr * g, params, gradient)

    def finish(params, down, state, n):
        update = jax.tree.map(jnp.subtract, down.params, params)
        return fb.Report(fb.Up(jax.tree.map(lambda u: jnp.sign(u) * jnp.abs(u).mean(), update)), jnp.ones(()))

    def receive(server, aggregate, key):
        return jax.tree.map(jnp.subtract, server, aggregate.up.pseudograd)

    work = fb.local_work(start, step, finish, fb.Batches(20, epochs=epochs))
    exchange = fb.Exchange("train", lambda server: fb.Down(server), work, receive)
    return fb.Algorithm(lambda params: params, lambda params: (), (exchange,), lambda server: server)


model = models.mlp(64, hidden=(64,), classes=10)
params = model.init(jax.random.key(0))


def simulate(algorithm):
    return fb.simulate(algorithm, params, data, rounds=ROUNDS, cohort=10, metrics=model.metrics, eval_every=5)


results = {
    "FedAvg": simulate(fb.fedavg(model.loss, client_lr=0.3, epochs=2)),
    "signs only": simulate(signed(model.loss, client_lr=0.3, epochs=2)),
}
{name: round(float(result.evaluations["test_accuracy"][-1]), 3) for name, result in results.items()}""",
    ),
    ("markdown", "## A plot"),
    (
        "code",
        """figure, axis = plt.subplots(figsize=(5.5, 3), layout="constrained")
for name, result in results.items():
    axis.plot(result.evaluations["round"], result.evaluations["test_accuracy"], marker="o", ms=3, label=name)
axis.set_xlabel("round")
axis.set_ylabel("test accuracy")
axis.legend(frameon=False, loc="lower right")
axis.grid(alpha=0.3);""",
    ),
    (
        "markdown",
        """## Where to go

- your data: [data.md](data.md); your model: [models.md](models.md); your algorithm: [extending.md](extending.md)
- tune and compare: [sweeps.md](sweeps.md); look: [reports.md](reports.md); resume and load: [runs.md](runs.md)
- on real devices: [deploy.md](deploy.md)""",
    ),
]


def main() -> int:
    import nbformat
    from nbclient import NotebookClient

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [make[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(CELLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of execution: they would differ every time
    nbformat.write(notebook, NOTEBOOK)
    size = NOTEBOOK.stat().st_size
    print(f"{NOTEBOOK}: {size / 1000:.0f} kB")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
