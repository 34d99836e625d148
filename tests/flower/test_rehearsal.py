"""Real rehearsals on loopback: a SuperLink and three SuperNodes as processes, with faults, crashes and restarts.

A message takes seconds here (Flower starts a process for each), so rounds are few and each test covers many things.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
from flwr.cli.supernode.register import try_load_public_key
from flwr.proto.control_pb2 import RegisterNodeRequest
from matplotlib.image import imread
from typer.testing import CliRunner

from fedbraid.cli.app import make_app as make_cli
from fedbraid.experiment import build, load_config
from fedbraid.experiment.figures import draw_run, save
from fedbraid.experiment.runfolder import read_metrics, read_summary
from fedbraid.flower import InProcessGrid, Policy, client_app, load_federation, serve
from fedbraid.flower.certificates import make_node_key
from fedbraid.flower.launch import Link, Rehearsal, online, run_app, runs_of, start_run
from fedbraid.flower.project import write_app
from fedbraid.simulation import checkpoint, simulate
from told import told

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # Flower's own

BASE = ("data.clients=3", "cohort=all", "evaluation.every=1", "model.hidden=[16]", "algorithm.batch_size=20")

# Appended to an app's client. The node's config gives the kind of fault and its round ("kind@round").
FAULTY = """

import pathlib, time
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

honest = app


class Faulty(ClientApp):
    def __call__(self, message, context):
        kind, _, round_ = context.node_config.get("fault", "").partition("@")
        if not kind or message.content["fedbraid"].get("round") != int(round_):
            return honest(message, context)
        if kind == "hang":
            pathlib.Path(context.node_config["marker"]).touch()
            time.sleep(600)
        reply = honest(message, context)
        array = reply.content["arrays"]["float32"]
        numbers = np.frombuffer(array.data, np.float32).copy()
        if kind == "nan":
            numbers[3] = np.nan
        elif kind == "shape":
            numbers = numbers[:-5]
        elif kind == "huge":
            numbers = np.zeros(25_000_000, np.float32)
        sent = Array("float32", numbers.shape, array.stype, numbers.tobytes())
        reply.content["arrays"] = ArrayRecord({"float32": sent})
        return reply


app = Faulty()
"""


def make_app(folder: Path, *settings: str, faulty: bool = False, secure: bool = False, **policy) -> Path:
    write_app(folder, load_config(None, [*BASE, *settings]), secure=secure)
    package = folder / "federation"
    about = tomllib.loads((package / "federation.toml").read_text())
    about["policy"] |= {"deadline": 120.0, "join": 90.0} | policy
    (package / "federation.toml").write_text(tomli_w.dumps(about))
    if faulty:
        client = package / "client.py"
        client.write_text(client.read_text() + FAULTY)
    return folder


@pytest.fixture
def rehearse():
    """Makes rehearsals, and stops them at the end of the test."""
    made = []

    def start(app: Path, *, nodes: int = 3, **options) -> Rehearsal:
        made.append(Rehearsal(app))
        made[-1].up(nodes, **options)
        return made[-1]

    yield start
    for rehearsal in made:
        rehearsal.down()
        until = time.monotonic() + 10
        while rehearsal.processes() and time.monotonic() < until:
            time.sleep(0.2)
        assert not rehearsal.processes(), "processes outlive their rehearsal"


def server_processes(rehearsal: Rehearsal) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in rehearsal.processes("superlink")}
    return [pid for pid, words in names.items() if b"flwr-serverapp" in words]


def wait_for(condition, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def deploy_run(app: Path, *words: str, log: Path) -> subprocess.Popen:
    program = Path(sys.executable).with_name("fedbraid")
    with log.open("w") as out:
        return subprocess.Popen([program, "deploy", "run", app, *words], stdout=out, stderr=subprocess.STDOUT)


def saved(out: Path) -> tuple[dict, dict]:
    """(server's arrays, the rest) of a run's last checkpoint."""
    _, tree = checkpoint.load(checkpoint.latest(out / "checkpoints"))
    return tree["server"], json.loads(np.asarray(tree["run"]["json"]).tobytes())


def simulated(*settings: str):
    experiment = build(load_config(None, [*BASE, *settings]))
    rounds = experiment.config.rounds
    return simulate(experiment.algorithm, experiment.params, experiment.data, rounds=rounds, devices=1)


def test_fedavg_with_tls_registered_nodes_and_bad_replies(rehearse, tmp_path):
    """NaN and a wrong shape in round 1, 100 MB of garbage in round 2: rejected and reported; training continues.

    A stranger who has ``ca.crt`` and reaches the port for the nodes can do nothing.
    """
    app = make_app(tmp_path / "app", "rounds=2", "algorithm.name=fedavg", "algorithm.client_lr=0.3", faulty=True)
    faults = {0: {"fault": "nan@0"}, 1: {"fault": "shape@0"}, 2: {"fault": "huge@1"}}
    rehearsal = rehearse(app, tls=True, configs=faults)
    with rehearsal.link.control() as control:
        nodes = online(control)
        assert len(nodes) == 3
        check_strangers_at_the_gate(rehearsal, app, tmp_path)
        assert sorted(online(control)) == sorted(nodes)
        assert runs_of(control) == {}
        stranger = tmp_path / "stranger"
        make_node_key(stranger)
        refused = rehearsal.start_node(7, key=stranger)
        lines: list[str] = []
        status, details = run_app(rehearsal.link, app, str(tmp_path / "run"), on_line=lines.append)
        assert (status, details) == ("finished:completed", "")
        assert sorted(online(control)) == sorted(nodes)
    assert not refused.alive
    assert "Failed to activate SuperNode" in Path(refused.log).read_text()
    summary = read_summary(tmp_path / "run")
    assert {k: v for k, v in summary.engine["counts"].items() if v} == {
        "nonfinite": 1,
        "malformed": 1,
        "oversized": 1,
    }
    table = read_metrics(tmp_path / "run")
    assert table["train/arrived"].tolist() == [1, 2]
    for client, word in ((0, "nonfinite"), (1, "malformed: leaf .pseudograd"), (2, "oversized: it sent 100 MB")):
        (note,) = [line for line in lines if word in line]
        assert note.startswith(f"client {client} (node ")
    assert table["test_loss"][-1] < 1.9  # ln 10 = 2.30 is the loss of a uniform guess
    title = "fedavg on digits, deployed: mlp, cohort all, seed 0"
    save(draw_run(table, title), tmp_path / "again.png")  # the picture in the run folder is drawn from these columns
    np.testing.assert_array_equal(imread(tmp_path / "again.png"), imread(tmp_path / "run" / "curves.png"))
    check_strangers_without_the_gate(rehearsal, app, tmp_path)


STRANGE = """
from pathlib import Path
from flwr.serverapp import ServerApp
app = ServerApp()


@app.main()
def main(grid, context):
    Path(context.run_config["marker"]).write_text("a stranger's code ran on the server")
"""


def attack(address: str, rehearsal: Rehearsal, app: Path, tmp_path: Path) -> list[str]:
    """A stranger with ca.crt registers an own node, starts an own app and lists the runs; why each is refused, or "".

    The app's server writes the file ``strange-marker``.
    """
    folder = tmp_path / "strange"
    if not folder.exists():
        shutil.copytree(app, folder, ignore=shutil.ignore_patterns(".rehearsal"))
        (folder / "federation" / "server.py").write_text(STRANGE)
        about = tomllib.loads((folder / "pyproject.toml").read_text())
        about["tool"]["flwr"]["app"]["config"]["marker"] = str(tmp_path / "strange-marker")
        (folder / "pyproject.toml").write_text(tomli_w.dumps(about))
    key = try_load_public_key(make_node_key(tmp_path / "strange-key"))
    link = Link(address, rehearsal.certificates.authority, tmp_path / "stranger-home")
    attempts = (
        lambda control: control.RegisterNode(RegisterNodeRequest(public_key=key)),
        lambda control: start_run(control, folder, {}),
        runs_of,
    )
    reasons = []
    for attempt in attempts:
        try:
            with link.control() as control:
                attempt(control)
            reasons.append("")
        except ValueError as error:
            reasons.append(str(error))
    return reasons


def check(app: Path, address: str, rehearsal: Rehearsal) -> str:
    """What ``fedbraid deploy check`` says about an address."""
    words = ["deploy", "check", app, "--node-config", "partition-id=0", "--address", address, "--json"]
    words += ["--root-certificates", rehearsal.certificates.authority]
    result = CliRunner().invoke(make_cli(), [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["exposure"]


def check_strangers_at_the_gate(rehearsal: Rehearsal, app: Path, tmp_path: Path) -> None:
    """Set up by the documented default, every attempt is refused, and `deploy check` has nothing to say."""
    address = f"127.0.0.1:{rehearsal.settings['gate']}"
    for reason in attack(address, rehearsal, app, tmp_path):
        assert "403" in reason
        assert "this port is only for the calls of nodes" in reason
    assert check(app, address, rehearsal) == "closed"  # any notice fails the test


def check_strangers_without_the_gate(rehearsal: Rehearsal, app: Path, tmp_path: Path) -> None:
    """The same attempts at the SuperLink's own port, as if it were open to the network: all succeed, and it warns."""
    address = f"127.0.0.1:{rehearsal.settings['port']}"
    with told("whoever reaches this port can run code on the server and on every node"):
        assert check(app, address, rehearsal) == "open"
    assert attack(address, rehearsal, app, tmp_path) == ["", "", ""]
    wait_for((tmp_path / "strange-marker").exists, 60, "the stranger's code")


def test_mime_two_phase_and_scaffold_survive_kills_of_a_node_and_of_the_server(rehearse, tmp_path):
    mime = ("rounds=1", "algorithm.name=mime", "algorithm.client_lr=1.0")
    scaffold = ("rounds=4", "algorithm.name=scaffold", "algorithm.client_lr=0.3")
    first = make_app(tmp_path / "mime", *mime)
    marker = tmp_path / "marker"
    app = make_app(tmp_path / "scaffold", *scaffold, faulty=True, deadline=25.0, minimum=2, too_few="wait")
    rehearsal = rehearse(app, configs={2: {"fault": "hang@1", "marker": str(marker)}})

    # Mime: two exchanges per round, the same model as in the simulator
    lines: list[str] = []
    assert run_app(rehearsal.link, first, str(tmp_path / "mime-run"), on_line=lines.append)[0] == "finished:completed"
    whole = simulated(*mime)
    arrays, _ = saved(tmp_path / "mime-run")
    server = checkpoint.unpack(whole.server, arrays, "server")
    for a, b in zip(jax.tree.leaves(server), jax.tree.leaves(whole.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "nodes 6/6" in lines[0]  # three nodes, asked twice
    assert read_metrics(tmp_path / "mime-run")["test_accuracy"][-1] > 0.3

    # SCAFFOLD: a node is killed in the middle of round 2 and comes back, the server is killed in round 4
    out, log = tmp_path / "scaffold-run", tmp_path / "scaffold.log"
    running = deploy_run(app, "--out", str(out), log=log)
    try:
        wait_for(marker.exists, 400, "round 2 on node 2")
        rehearsal.kill("node-2")
        rehearsal.start_node(2)
        wait_for(lambda: "round 3/4" in log.read_text(), 400, "round 3")
        (server_pid,) = server_processes(rehearsal)
        os.kill(server_pid, signal.SIGKILL)
    finally:
        running.kill()
        running.wait()
    told = log.read_text()
    assert "client 2" in told
    assert "missing" in told
    arrays, rest = saved(out)
    assert len(rest["history"]) == 3
    assert [row["train/arrived"] for row in rest["history"]][:2] == [3, 2]

    again = deploy_run(app, "--resume", str(out), log=log)
    assert again.wait(timeout=180) == 0, log.read_text()
    assert "round 4/4" in log.read_text()
    summary = read_summary(out)
    assert summary.finished
    assert summary.rounds == 4
    arrived = read_metrics(out)["train/arrived"].tolist()
    assert arrived[:2] == [3, 2]
    assert arrived[3] == 3  # the node that was killed is back
    check_scaffold(out, rehearsal, scaffold)
    third = (out / "checkpoints" / "00000003" / "manifest.json").stat().st_mtime
    compiled = [place.stat().st_mtime for place in (rehearsal.folder / "compiled").glob("*-cache")]
    assert len(compiled) >= 2
    assert max(compiled) < third  # compiled programs were reused over messages, restarts and runs


def check_scaffold(out: Path, rehearsal: Rehearsal, settings: tuple[str, ...]) -> None:
    """c = mean of c_i: the server's from its checkpoint, the clients' from their nodes' folders."""
    experiment = build(load_config(None, [*BASE, *settings]))
    arrays, rest = saved(out)
    like = jax.tree.map(jax.numpy.asarray, experiment.algorithm.init(experiment.params))
    server = checkpoint.unpack(like, arrays, "server")
    folder = rehearsal.folder / "states" / rest["run"]
    own = []
    for client in range(3):
        with np.load(folder / str(client) / f"{rest['taken'][str(client)]}.npz", allow_pickle=False) as archive:
            own.append(archive["float32"].view(np.float32).astype(np.float64))
    c = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(server.c)])
    assert np.abs(c).max() > 1e-3
    np.testing.assert_allclose(np.mean(own, 0), c, atol=1e-6)


def test_secure_aggregation_with_a_node_that_dies_between_its_shares_and_its_upload(rehearse, tmp_path):
    """Five nodes, four must stay. The model is that of a run without masks over the four, to fixed-point rounding."""
    settings = ("rounds=1", "data.clients=5", "algorithm.name=fedavg", "algorithm.client_lr=0.3")
    app, marker = tmp_path / "app", tmp_path / "marker"
    make_app(app, *settings, faulty=True, secure=True, deadline=40.0, too_few="abort")
    rehearsal = rehearse(app, nodes=5, configs={4: {"fault": "hang@0", "marker": str(marker)}})
    out, log = tmp_path / "run", tmp_path / "run.log"
    running = deploy_run(app, "--out", str(out), log=log)
    try:
        wait_for(marker.exists, 400, "the upload on node 4")
        rehearsal.kill("node-4")
        assert running.wait(timeout=180) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
    told, summary = log.read_text(), read_summary(out)
    assert "secure aggregation: at least 4 of 5 clients" in told
    assert "client 4" in told
    assert summary.engine["secure"] == load_federation(app / "federation").secure.name
    table = read_metrics(out)
    assert table["train/arrived"].tolist() == [4]
    assert table["train/asked"].tolist() == [5]

    plain, first = without_masks(app, settings, clients=4)
    arrays, _ = saved(out)
    server = checkpoint.unpack(plain.server, arrays, "server")
    pairs = zip(jax.tree.leaves(plain.params), jax.tree.leaves(first), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-2
    for a, b in zip(jax.tree.leaves(server), jax.tree.leaves(plain.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # float32; a sum of masked uploads is exact to 1e-11


def without_masks(app: Path, settings: tuple[str, ...], *, clients: int):
    """One round with the first clients only, in process and without secure aggregation, and the first parameters."""
    experiment = build(load_config(None, [*BASE, *settings]))
    alg, params, split = experiment.algorithm, experiment.params, experiment.data.train
    shared = {"fingerprint": "same", "preprocess": split.preprocess}
    client = client_app(alg, params, lambda site: split.client(site.node_config["partition-id"]), cache=False, **shared)
    grid = InProcessGrid(client, {i: {"partition-id": i} for i in range(clients)})
    schema = load_federation(app / "federation").schema
    served = serve(
        alg, params, grid, rounds=1, schema=schema, population=split.num_clients, policy=Policy(join=0.1), **shared
    )
    return served, params
