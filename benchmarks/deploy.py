"""Seconds of one message phase: this library and Flower's own FedAvg, on the same nodes, model and data.

Starts a SuperLink and SuperNodes on this machine and runs both apps in turn on them. A phase begins when the ServerApp
sends the orders and ends when all replies have arrived. Flower's app follows its documentation: a ClientApp that trains
with plain JAX, and the strategy FedAvg on the server. Both apps cache their compiled steps on disk. The benchmark also
measures the processor time of a node's process for one order, with an empty and with a warm compilation cache.

    python benchmarks/deploy.py [--nodes 3] [--rounds 5] [--repeats 2] [--hidden 64] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from fedbraid.experiment import build, load_config
from fedbraid.experiment.runfolder import read_metrics
from fedbraid.flower.launch import Rehearsal, run_app
from fedbraid.flower.project import write_app

RATIO = 1.2  # the largest allowed ratio of the medians

PEER = """\
[project]
name = "peer"
version = "1.0.0"
description = "FedAvg as Flower has it"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "peer.server:app"
clientapp = "peer.client:app"

[tool.flwr.app.config]
out = "run"
rounds = 3
"""

PEER_CLIENT = """\
import jax, jax.numpy as jnp, numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
BATCH, RATE = 20, 0.1


def loss(params, x, y):
    *inner, (w, b) = params
    for v, c in inner:
        x = jax.nn.relu(x @ v + c)
    scores = jax.nn.log_softmax(x @ w + b)
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


@jax.jit
def epoch(params, x, y):
    def step(params, batch):
        value, slope = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, slope), value

    return jax.lax.scan(step, params, (x, y))


@app.train()
def train(message, context):
    jax.config.update("jax_compilation_cache_dir", context.node_config["cache-dir"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with np.load(context.node_config["data"]) as archive:
        x, y = archive["x"].astype(np.float32) / 16, archive["y"]
    n = len(y) // BATCH * BATCH
    x, y = x[:n].reshape(-1, BATCH, x.shape[1]), y[:n].reshape(-1, BATCH)
    flat = message.content["arrays"].to_numpy_ndarrays()
    params = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    params, losses = epoch(params, x, y)
    arrays = ArrayRecord([np.asarray(leaf) for pair in params for leaf in pair])
    metrics = MetricRecord({"loss": float(losses.mean()), "num-examples": n})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""

PEER_SERVER = """\
import json, time
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
SIZES = %(sizes)s


class Timed(FedAvg):
    seconds = []

    def configure_train(self, *args):
        messages = super().configure_train(*args)
        self.began = time.monotonic()
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.seconds.append(time.monotonic() - self.began)
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid, context):
    rng = np.random.default_rng(0)
    arrays = []
    for a, b in zip(SIZES, SIZES[1:]):
        arrays += [(rng.normal(size=(a, b)) / np.sqrt(a)).astype(np.float32), np.zeros(b, np.float32)]
    strategy = Timed(fraction_evaluate=0.0, min_available_nodes=%(nodes)d, min_train_nodes=%(nodes)d)
    strategy.start(grid, ArrayRecord(arrays), num_rounds=int(context.run_config["rounds"]))
    out = Path(context.run_config["out"])
    out.mkdir(parents=True)
    (out / "seconds.json").write_text(json.dumps(strategy.seconds))
"""

ONE_ORDER = """
import sys, time
began, spent = time.perf_counter(), time.process_time()
import flwr.supernode.runtime.run_clientapp
sys.path.insert(0, sys.argv[1])
from federation.client import FEDERATION, app
import jax.numpy as jnp, jax
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedbraid.core import Down
from fedbraid.flower.identity import schema_to_json
from fedbraid.flower.pack import records
from fedbraid.flower.wire import Order, content
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), FEDERATION.experiment.shapes)
schema = schema_to_json(FEDERATION.schema)
order = Order("run", FEDERATION.fingerprint, schema, 0, 0, 0, 0, "0.0.a", "init", "init", "")
message = Message(content(order, records(Down(params))), 5, "train.train")
config = {"partition-id": 0, "data": sys.argv[2], "cache-dir": sys.argv[3]}
ready = time.process_time()
reply = app(message, Context(1, 5, config, RecordDict(), {}))
assert "weight" in reply.content["fedbraid"], reply.content["fedbraid"]
print(ready - spent, time.process_time() - ready)
"""


def write_peer(folder: Path, sizes: list[int], nodes: int) -> None:
    package = folder / "peer"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PEER)
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(PEER_CLIENT)
    (package / "server.py").write_text(PEER_SERVER % {"sizes": sizes, "nodes": nodes})


def node_seconds(app: Path, data: Path, cache: Path) -> tuple[float, float]:
    """Processor seconds of one node process: until it has the order, and for the order."""
    command = [sys.executable, "-W", "ignore", "-c", ONE_ORDER, str(app), str(data), str(cache)]
    start, work = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
    return float(start), float(work)


def measure(nodes: int, rounds: int, repeats: int, hidden: int) -> dict:
    folder = Path(tempfile.mkdtemp(prefix="fedbraid-deploy-"))
    settings = [f"data.clients={nodes}", "cohort=all", f"rounds={rounds}", f"model.hidden=[{hidden}]"]
    config = load_config(None, [*settings, "algorithm={name='fedavg', batch_size=20, client_lr=0.1}"])
    ours, peer = folder / "ours", folder / "peer"
    write_app(ours, config)
    write_peer(peer, [64, hidden, 10], nodes)
    data = build(config).data
    configs = {}
    for i in range(nodes):
        place = folder / f"site-{i}.npz"
        np.savez(place, **data.train.client(i))
        configs[i] = {"data": str(place)}
    cold = node_seconds(ours, folder / "site-0.npz", folder / "cache")
    warm = node_seconds(ours, folder / "site-0.npz", folder / "cache")
    found: dict[str, list[float]] = {"fedbraid": [], "flower": []}
    rehearsal = Rehearsal(ours)
    rehearsal.up(nodes, configs=configs)
    try:
        for i in range(repeats):
            for name, app in (("fedbraid", ours), ("flower", peer)):
                out = folder / f"run-{name}-{i}"
                ended, details = run_app(rehearsal.link, app, str(out), rounds=rounds)
                if ended != "finished:completed":
                    raise SystemExit(f"{name}: the run ended as {ended}: {details}")
                if name == "fedbraid":
                    seconds = read_metrics(out)["train/seconds"].tolist()
                else:
                    seconds = json.loads((out / "seconds.json").read_text())
                found[name] += seconds[1:]  # the first phase of a run may compile
    finally:
        rehearsal.down()
        shutil.rmtree(folder)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {
        "nodes": nodes,
        "phases": {name: len(seconds) for name, seconds in found.items()},
        "seconds": found,
        "median": medians,
        "ratio": medians["fedbraid"] / medians["flower"],
        "node_process": {"start": warm[0], "work_cold": cold[1], "work_warm": warm[1]},
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--nodes", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args()
    result = measure(chosen.nodes, chosen.rounds, chosen.repeats, chosen.hidden)
    if chosen.json:
        print(json.dumps(result))
        return
    node = result["node_process"]
    print(f"{'':12}{'phases':>8}{'median s':>10}{'fastest s':>11}{'slowest s':>11}")
    for name, seconds in result["seconds"].items():
        print(f"{name:12}{len(seconds):8}{result['median'][name]:10.2f}{min(seconds):11.2f}{max(seconds):11.2f}")
    print(f"ratio of medians {result['ratio']:.2f} (at most {RATIO})")
    print(f"a node process: {node['start']:.2f} s of processor time to start; then for one order")
    print(f"  {node['work_cold']:.2f} s with an empty compilation cache, {node['work_warm']:.2f} s with a warm one")


if __name__ == "__main__":
    main()
