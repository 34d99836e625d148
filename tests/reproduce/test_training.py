"""Training runs of entries: resumed parts equal one run, and saved results of another configuration are not used."""

import json
import math

import numpy as np
import pytest

from fedbraid.data.catalog import load
from fedbraid.experiment.config import parse
from fedbraid.reproduce.mime._table2 import WAYS
from fedbraid.reproduce.training import best, rounds_to, score, train

RATES = [{"algorithm.client_lr": 0.1}, {"algorithm.client_lr": 0.01}]


def config(rounds=4):
    return parse(
        {
            "rounds": rounds,
            "cohort": 3,
            "model": {"name": "softmax_regression"},
            "algorithm": {"name": "fedavgm", "batch_size": 20, "epochs": 1},
            "evaluation": {"every": 2},
        }
    )


class Stopped(Exception):
    pass


@pytest.mark.parametrize("evaluations", [1, 2])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(evaluations, tmp_path):
    """Stopped after the first checkpoint, or after the last one but before its result was written."""
    data = load("digits", clients=6)
    whole = train("run", config(), data, RATES, work=tmp_path / "whole")
    seen = []

    def stop(line):
        seen.append(line)
        if len(seen) == evaluations:
            raise Stopped

    with pytest.raises(Stopped):
        train("run", config(), data, RATES, work=tmp_path / "parts", piece=2, tell=stop)
    assert (tmp_path / "parts" / "run-0" / "checkpoints").is_dir()
    lines = []
    parts = train("run", config(), data, RATES, work=tmp_path / "parts", piece=2, tell=lines.append)
    assert len(lines) == 2 - evaluations  # only what was left was run
    assert parts["rounds"] == whole["rounds"] == [2, 4]
    for name in ("test_accuracy", "test_loss", "train_loss"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6)
    assert [p.name for p in (tmp_path / "parts").iterdir()] == ["run.json"]
    again = train("run", config(), data, RATES, work=tmp_path / "parts", tell=lines.append)
    assert again == parts
    assert len(lines) == 2 - evaluations


def test_a_kept_result_answers_its_own_question_only(tmp_path):
    data = load("digits", clients=6)
    short = train("run", config(2), data, RATES[:1], work=tmp_path)
    longer = train("run", config(4), data, RATES[:1], work=tmp_path)
    assert (short["rounds"], longer["rounds"]) == ([2], [2, 4])
    path = tmp_path / "run.json"
    kept = json.loads(path.read_text())
    del kept["asked"]["config"]["evaluation"]  # as if the section did not exist then: its default counts
    path.write_text(json.dumps(kept | {"rounds": "kept"}))
    assert train("run", config(4), data, RATES[:1], work=tmp_path)["rounds"] == [2, 4]  # every = 2 is not the default
    kept["asked"]["config"]["evaluation"] = {"every": 2}
    kept["asked"]["config"]["engine"] = {"plan": "sequential"}  # the engine does not change results
    path.write_text(json.dumps(kept | {"rounds": "kept"}))
    assert train("run", config(4), data, RATES[:1], work=tmp_path)["rounds"] == "kept"
    assert longer["test_loss"][0][0] == pytest.approx(short["test_loss"][0][0], rel=1e-6)


def test_the_adam_that_is_swapped_in_moves_every_coordinate_by_the_rate_at_first():
    """optax's Adam with both averages corrected: the first step is g / (|g| + eps), for any size of g."""
    import jax
    import jax.numpy as jnp

    options = {**WAYS["MimeLiteAdam"].options, "client_lr": 0.5, "server_lr": 1.0, "batch_size": 2, "epochs": 1}
    swap = WAYS["MimeLiteAdam"].swap
    assert swap is not None
    alg = swap(lambda params, batch, key: jnp.sum(params * jnp.array([1e-3, -20.0])), options)
    params = jnp.zeros(2)
    train_exchange = alg.exchanges[-1]
    from fedbraid.local import ClientData

    rows = ClientData.of({"x": np.zeros((2, 1), np.float32)})
    report = train_exchange.client(train_exchange.send(alg.init(params)), (), rows, jax.random.key(0))
    np.testing.assert_allclose(report.up.pseudograd, [0.5, -0.5], rtol=2e-4)


def test_scores_leave_out_what_diverged():
    result = {
        "rounds": [5, 10],
        "points": [{}, {}],
        "diverged": [True, False],
        "test_accuracy": [[0.9, 0.9], [0.1, 0.3]],
    }
    assert math.isnan(score(result, 0))
    assert best(result, last=10) == (1, pytest.approx(0.2))
    assert best(result, last=1) == (1, pytest.approx(0.3))
    assert rounds_to(result, 1, 0.2) == pytest.approx(7.5)
    assert rounds_to(result, 1, 0.4) == math.inf
    both = {**result, "diverged": [True, True]}
    assert math.isnan(best(both)[1])
