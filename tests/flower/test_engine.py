"""Engine options at a deployed site: those for the client's programs are used, others are said to have no effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedbraid import fedavg
from fedbraid.experiment import build, load_config
from fedbraid.experiment.runfolder import read_metrics
from fedbraid.experiment.tensors import named_arrays, write_npz
from fedbraid.flower import (
    InProcessGrid,
    Policy,
    TooFewError,
    client_app,
    federation_client_app,
    federation_server_app,
    load_federation,
)
from fedbraid.flower.project import write_app
from fedbraid.lowering import LoweringOptions
from fedbraid.lowering.microbatch import recording_microbatches
from fedbraid.models import mlp
from fedbraid.simulation import simulate
from flower.small import SPLIT, deploy, load
from told import collecting, told
from zoo import start

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from libraries that Flower uses
BASE = ["data.clients=3", "cohort=2", "rounds=2", "evaluation.every=1", "model.name=mlp", "model.hidden=[8]"]
BASE += ["algorithm.name=fedavg", "algorithm.client_lr=0.05"]
LORA = ["model.lora={rank=2, targets='w'}", "algorithm.client_opt=adamw", "algorithm.client_opt_state=kept"]


def served(config, folder):
    """A configuration as an app, its client and server in this process; the history of the run."""
    write_app(folder / "app", config)
    federation = load_federation(folder / "app" / "federation")

    def rows(context):
        return federation.rehearsal_rows(context.node_config["partition-id"])

    client = federation_client_app(federation, rows, lambda context: None, cache=False)
    grid = InProcessGrid(client, {10 + i: {"partition-id": i} for i in range(3)})
    federation_server_app(federation)(grid, Context(1, 1, {}, RecordDict(), {"out": str(folder / "run")}))
    return read_metrics(folder / "run")


def test_adapters_trained_in_microbatches_at_a_site_are_those_of_the_simulator(tmp_path):
    config = load_config(settings=[*BASE, *LORA, "engine.microbatch=7"])
    with recording_microbatches() as lines:
        found = served(config, tmp_path)
    assert "gradients of 20 examples in 3 microbatches of 7" in lines
    whole = build(load_config(settings=[*BASE, *LORA]))
    run = simulate(
        whole.algorithm, whole.params, whole.data, rounds=2, cohort=2, metrics=whole.metrics, eval_every=1, devices=1
    )
    np.testing.assert_allclose(found["train/loss"], run.history["train/loss"], rtol=1e-4)
    np.testing.assert_allclose(found["test_loss"], run.evaluations["test_loss"], rtol=1e-4)


def test_a_site_refuses_microbatches_of_a_loss_that_is_a_sum(capsys):
    def total(params, batch, key):
        errors = (batch["x"] @ params["w"] + params["b"]) ** 2
        return jnp.sum(errors * batch["mask"].reshape(-1, *[1] * (errors.ndim - 1)))

    alg = fedavg(total, client_lr=0.01, batch_size=3)
    app = client_app(alg, start(), load, cache=False, engine=LoweringOptions(microbatch=2))
    grid = InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(SPLIT.num_clients)})
    with pytest.raises(TooFewError, match="0 of 5"):
        deploy(alg, grid, rounds=1, policy=Policy(deadline=0.1, join=0.1, too_few="abort"))
    assert "is not the mean of those over its parts" in capsys.readouterr().out


def test_settings_that_a_deployment_ignores_are_said(tmp_path):
    more = ["engine.plan=lanes", "engine.chunk=4", "engine.microbatch=4", "arrival.drop=0.1", "stop.target=0.9"]
    with told(r"^engine.plan, engine.chunk: deployments ignore it") as texts:
        write_app(tmp_path / "one", load_config(settings=[*BASE, *more]))
    assert {text.split(" of")[0] for text in texts if text[0] == "["} == {"[arrival]", "[stop]"}
    with collecting() as texts:
        write_app(tmp_path / "two", load_config(settings=BASE))
    assert not texts


def test_the_frozen_weights_are_a_part_of_what_clients_compute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fingerprints = []
    for seed in (0, 0, 1):
        write_npz(tmp_path / "base.npz", named_arrays(mlp(64, 10, hidden=[8]).init(jax.random.key(seed))))
        with told("every site need the file base.npz"):
            write_app(
                tmp_path / str(len(fingerprints)), load_config(settings=[*BASE, *LORA, "model.lora.weights=base.npz"])
            )
        fingerprints.append(load_federation(tmp_path / str(len(fingerprints)) / "federation").fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
