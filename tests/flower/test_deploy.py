"""``fedbraid deploy`` without a network: the app that it writes, its checks, and its error messages."""

import json
import shutil
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace

import jax
import numpy as np
import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

from fedbraid.data import Pipeline, from_arrays
from fedbraid.data.store import write_store
from fedbraid.experiment import build, load_config
from fedbraid.experiment.assembly import assemble, load_named
from fedbraid.experiment.config import parse
from fedbraid.experiment.runfolder import read_clients, read_metrics, read_summary
from fedbraid.flower import InProcessGrid, federation_client_app, federation_server_app, load_federation
from fedbraid.flower.certificates import (
    Certificates,
    check_certificates,
    check_node_key,
    make_certificates,
    make_node_key,
)
from fedbraid.flower.check import check_site
from fedbraid.flower.client import room_for
from fedbraid.flower.federation import written_description
from fedbraid.flower.launch import Rehearsal
from fedbraid.flower.project import write_app
from fedbraid.simulation import simulate
from fedbraid.simulation.evaluate import client_values, evaluator

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from libraries that Flower uses
BASE = ["data.clients=3", "cohort=2", "rounds=2", "evaluation.every=1", "model.hidden=[8]"]


def cli(*words):
    from fedbraid.cli.app import make_app

    return CliRunner().invoke(make_app(), ["deploy", *map(str, words)])


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deploy") / "My App"
    result = cli("init", folder, *(word for setting in BASE for word in ("--set", setting)), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["population"] == 3
    return folder


def test_the_app_is_one_that_flower_accepts(app):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(app / "pyproject.toml")
    assert not warnings
    assert config["project"]["name"] == "my-app"
    assert len(build_fab_from_disk(app)) > 1000
    assert "Put the loading of sites' own data here" in (app / "federation" / "client.py").read_text()
    for name in ("client.py", "server.py"):
        compile((app / "federation" / name).read_text(), name, "exec")


def run_in_simulator(experiment):
    options = {"rounds": 2, "cohort": 2, "metrics": experiment.metrics, "eval_every": 1, "devices": 1}
    return simulate(experiment.algorithm, experiment.params, experiment.data, **options)


@pytest.fixture(scope="module")
def run_simulated(app):
    """The app's experiment as ``fedbraid run`` computes it, and each client's metrics at the end."""
    experiment = build(load_federation(app / "federation").config)
    simulated = run_in_simulator(experiment)
    sums = evaluator(experiment.metrics, experiment.data.test)(simulated.params)
    return simulated, {f"test_{name}": values for name, values in client_values(sums).items()}


def serve_in_process(federation, out):
    """The federation's client and server apps in this process, on the experiment's own three clients."""

    def load(context):
        return federation.rehearsal_rows(context.node_config.get("partition-id"))

    def load_test(context):
        return federation.rehearsal_test(context.node_config.get("partition-id"))

    client = federation_client_app(federation, load, load_test, cache=False)
    grid = InProcessGrid(client, {10 + i: {"partition-id": i} for i in range(3)})
    federation_server_app(federation)(grid, Context(1, 1, {}, RecordDict(), {"out": str(out)}))
    return grid


@pytest.mark.parametrize("clients", [0, "all"])
def test_an_apps_run_is_the_simulated_run_and_writes_its_folder(app, run_simulated, clients, tmp_path):
    """The app's own client and server, in one process: the same model, metrics and files as ``fedbraid run``.

    clients: how many clients evaluate on their own test data; without it the server evaluates on all test data.
    """
    place = tmp_path / "federation"
    shutil.copytree(app / "federation", place)
    about = (place / "federation.toml").read_text()
    assert "evaluate_clients = 0\n" in about
    (place / "federation.toml").write_text(
        about.replace("evaluate_clients = 0\n", f"evaluate_clients = {json.dumps(clients)}\n")
    )
    out = tmp_path / "run"
    grid = serve_in_process(load_federation(place), out)
    simulated, by_client = run_simulated
    table, summary = read_metrics(out), read_summary(out)
    for name, column in simulated.evaluations.items():
        np.testing.assert_allclose(table[name], column, rtol=1e-5)
    for name, values in by_client.items():
        np.testing.assert_allclose(read_clients(out)[name], values, rtol=1e-5)
    if clients:  # the server also evaluates on all test data
        np.testing.assert_allclose(table["server_accuracy"], simulated.evaluations["test_accuracy"], rtol=1e-5)
        sent = table["train/bytes_down"] + table["evaluate/bytes_down"]
        np.testing.assert_allclose(table["bytes_down"], np.cumsum(sent))
    np.testing.assert_allclose(table["train/loss"], simulated.history["train/loss"], rtol=1e-5)
    np.testing.assert_allclose(table["train/bytes_up"], simulated.history["train/bytes_up"])
    assert np.all(np.diff(table["seconds"]) > 0)
    assert summary.finished
    assert summary.final["test_accuracy"] == pytest.approx(float(simulated.evaluations["test_accuracy"][-1]))
    assert {p.name for p in out.iterdir()} >= {"config.toml", "metrics.parquet", "clients.parquet", "curves.png"}
    assert tomllib.loads((out / "config.toml").read_text())["rounds"] == 2
    with pytest.raises(ValueError, match="finished"):  # a finished run is not overwritten
        federation_server_app(load_federation(place))(grid, Context(1, 1, {}, RecordDict(), {"out": str(out)}))


PIPELINES = {  # pipelines that change the shape of x, with the number of features after them
    "random-features": ([{"name": "scale", "factor": 1 / 16}, {"name": "random-features", "features": 30}], 125),
    "crop": ([{"name": "scale"}, {"name": "crop-flip", "size": 10}, {"name": "standardize"}], 100),
}


@pytest.mark.parametrize("clients", [0, "all"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_that_changes_shapes_is_deployed_as_it_is_simulated(name, clients, tmp_path):
    """Model, loss and metrics see the same preprocessed (and augmented) batches on a site as in the simulator."""
    steps, width = PIPELINES[name]
    data = {"name": "digits", "clients": 3, "preprocess": steps}
    if name == "crop":
        rng = np.random.default_rng(0)
        images = {"x": rng.integers(0, 256, (30, 14, 13), np.uint8), "y": np.arange(30, dtype=np.int32) % 3}
        write_store(
            tmp_path / "store", from_arrays(images, clients=3, test_fraction=0.3, info={"classes": 3}, preprocess=None)
        )
        data = {"name": str(tmp_path / "store"), "preprocess": steps}
    config = parse(
        {
            "rounds": 2,
            "cohort": 2,
            "data": data,
            "model": {"name": "mlp", "hidden": [8]},
            "algorithm": {"name": "fedavg", "batch_size": 4},
            "transforms": [{"name": "elastic"}],
            "evaluation": {"every": 1},
        }
    )
    write_app(tmp_path / "app", config, evaluate_clients=clients)
    federation = load_federation(tmp_path / "app" / "federation")
    experiment = build(config)
    assert [leaf.shape for leaf in jax.tree.leaves(experiment.params)] == [
        leaf.shape for leaf in jax.tree.leaves(federation.experiment.shapes)
    ]
    assert experiment.params[0]["w"].shape == (width, 8)
    simulated = run_in_simulator(experiment)
    serve_in_process(federation, tmp_path / "run")
    table = read_metrics(tmp_path / "run")
    logged = {name: simulated.history[name] for name in ("train/loss", "train/boosted", "train/mean_factor")}
    for column, values in {**simulated.evaluations, **logged}.items():
        np.testing.assert_allclose(table[column], values, rtol=2e-5)
    other = load_federation(tmp_path / "app" / "federation")
    fewer = replace(other.description, preprocess=Pipeline.of(*steps[:1]))
    assert replace(other, description=fewer).fingerprint != federation.fingerprint


def test_every_site_has_the_fingerprint_of_what_it_computes(app, tmp_path):
    mine = load_federation(app / "federation").fingerprint

    def other(*settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_app(folder, load_config(None, [*BASE, *settings]))
        return load_federation(folder / "federation").fingerprint

    assert other() == mine
    assert other("seed=5") == mine  # the seed is sent with every order
    assert other("algorithm.caution=0.7") != mine
    assert other("model.hidden=[9]") != mine


def test_a_description_is_enough_to_assemble_but_has_no_examples():
    config = load_config(None, BASE)
    data = load_named(config)
    made = assemble(config, data.description)
    assert jax.tree.map(lambda leaf: leaf.shape, made.params) == jax.tree.map(lambda leaf: leaf.shape, made.shapes)
    with pytest.raises(ValueError, match="without the data"):
        _ = made.data
    own = replace(data.description, preprocess=lambda batch, key, train: batch)
    with pytest.raises(ValueError, match="a Python function and cannot be written to a file"):
        written_description(own)
    for step, reason in (({"name": "crop-flip"}, "crops images"), ({"name": "scale", "field": "z"}, "has x, y")):
        with pytest.raises(ValueError, match=rf"\[data\] name = 'digits': .*{reason}"):
            assemble(config, replace(data.description, preprocess=Pipeline.of(step)))


def test_check_loads_a_sites_data_as_its_node_would(app, tmp_path):
    assert cli("check", app, "--node-config", "partition-id=1").exit_code == 0
    rows = load_federation(app / "federation").rehearsal_rows(0)
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    np.savez(good, **rows)
    np.savez(bad, **(rows | {"x": rows["x"][:, :63]}))
    assert check_site(app, f'data="{good}"')["examples"] == len(rows["y"])
    assert check_site(app, f'data="{good}"')["test_examples"] == 0  # the site has no test data of its own
    assert check_site(app, f'data="{good}" test-data="{good}"')["test_examples"] == len(rows["y"])
    assert check_site(app, "partition-id=1")["test_examples"] == len(
        load_federation(app / "federation").rehearsal_test(1)["y"]
    )
    result = cli("check", app, "--node-config", f'data="{good}"', "--json")
    assert json.loads(result.stdout)["examples"] == len(rows["y"])
    assert check_site(app, 'loader="flower.small:two_digits"')["examples"] == 2
    for config, word in (
        ('loader="flower.small:nothing"', "has no 'nothing'"),
        (f'data="{bad}"', r"field 'x': one example has shape \(63,\), the schema asks for \(64,\)"),
        ('data="/nowhere.npz"', "load_data cannot read the data"),
        (f'data="{good}" test-data="/nowhere.npz"', "load_test cannot read the data"),
        (f'data="{good}" test-data="{bad}"', "load_test: field 'x'"),
        ('partition-id=0 test-loader="flower.small:nothing"', "has no 'nothing'"),
        ("partition-id=3", "clients are numbered 0 to 2"),
        ("client=1", r"says neither data=\"FILE.npz\" nor loader=.* set partition-id, from 0 to 2"),
        ("partition-id=one", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=word):
            check_site(app, config)


def test_refusals_are_one_line(app, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        cases = [
            (["init", tmp_path / "full"], "is not empty"),
            (["init", tmp_path / "new", tmp_path / "none.toml"], "cannot read the configuration"),
            (["init", tmp_path / "new", "--set", "algorithm.name=fedagv"], "did you mean 'fedavg'"),
            (
                ["init", tmp_path / "new", "--set", "cohort=all", "--evaluate-clients", "some"],
                'must be "all" or a whole',
            ),
            (["init", tmp_path / "new", "--set", "attack.share=0.2"], "[attack] is for simulations"),
            (["init", tmp_path / "new", "--set", "algorithm.name=fedsplit"], "reads the data of all clients together"),
            (["up", tmp_path], "is not an app"),
            (["up", app, "--nodes", 4], "at most the population of 3"),
            (["up", app, "--nodes", 0], "at least 1"),
            (["up", app, "--port", port], f"port {port} of this machine cannot be used"),
            (["up", app, "--port", 99999], "from 1 to 65535"),
            (["run", app], "no rehearsal"),
            (["status", app], "no rehearsal"),
            (["run", app, "--address", "127.0.0.1:9"], "cannot reach the SuperLink at 127.0.0.1:9"),
            (["run", app, "--address", "h:1", "--root-certificates", tmp_path / "no.crt"], "no.crt is missing"),
            (["run", app, "--address", "h:1", "--resume", tmp_path], "not a run folder"),
            (["run", app, "--address", "h:1", "--out", tmp_path / "full"], "is not empty"),
            (["run", app, "--out", "a", "--resume", "b"], "leave out --out"),
        ]
        for words, reason in cases:
            result = cli(*words)
            assert isinstance(result.exception, ValueError), (words, result.output)
            assert reason in str(result.exception)
            assert "\n" not in str(result.exception)
    assert cli("down", app, "--json").stdout.strip() == '{"stopped": []}'


def test_certificates_that_cannot_be_used_are_refused_in_one_line(tmp_path, app):
    good = make_certificates(tmp_path / "good")
    check_certificates(good)
    assert (good.key.stat().st_mode & 0o777) == 0o600
    old = make_certificates(tmp_path / "old", days=-0.5)
    other = make_certificates(tmp_path / "other")
    (tmp_path / "text").write_text("hello")
    cases = [
        (old, "expired on"),
        (good._replace(key=other.key), "does not belong to the certificate"),
        (good._replace(authority=other.authority), "was not issued by"),
        (good._replace(certificate=tmp_path / "text"), "not a PEM certificate"),
        (good._replace(key=tmp_path / "text"), "not an unencrypted PEM private key"),
        (Certificates.at(tmp_path / "none"), "is missing"),
    ]
    for files, reason in cases:
        with pytest.raises(ValueError, match=reason):
            check_certificates(files)
    # `up --tls` refuses them, too, before anything starts
    rehearsal = Rehearsal(app)
    make_certificates(rehearsal.certificates.authority.parent, days=-0.5)
    with pytest.raises(ValueError, match="expired on"):
        rehearsal.up(1, tls=True)
    rehearsal.certificates.key.unlink()
    with pytest.raises(ValueError, match="is missing"):
        rehearsal.up(1, tls=True)
    assert not rehearsal.processes()


def test_keys_and_certificates_from_the_command_line(tmp_path):
    words = ("certificates", tmp_path / "tls", "--host", "server.example.org", "--host", "10.0.0.7", "--json")
    made = json.loads(cli(*words).stdout)
    check_certificates(Certificates.at(tmp_path / "tls"))
    assert made["key"].endswith("server.key")
    assert isinstance(cli(*words).exception, ValueError)  # existing files are not overwritten
    assert json.loads(cli("key", tmp_path / "node", "--json").stdout)["public"].endswith("node.pub")
    check_node_key(tmp_path / "node")


def test_node_keys_are_flowers(tmp_path):
    from flwr.cli.supernode.register import try_load_public_key

    public = make_node_key(tmp_path / "node")
    assert try_load_public_key(public)
    before = (tmp_path / "node").read_bytes()
    make_node_key(tmp_path / "node")
    assert (tmp_path / "node").read_bytes() == before
    (tmp_path / "bad").write_text("hello")
    for place, reason in ((tmp_path / "bad", "OpenSSH"), (tmp_path / "none", "missing")):
        with pytest.raises(ValueError, match=reason):
            check_node_key(place)


def test_rows_are_padded_to_few_sizes():
    rooms = [room_for(n) for n in range(1, 3000)]
    assert all(n <= room <= max(16, n * 1.126) for n, room in enumerate(rooms, 1))
    assert len(set(rooms)) < 70


def test_the_library_does_not_import_flower():
    code = "import sys, fedbraid; from fedbraid.cli.app import make_app; make_app(); sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
