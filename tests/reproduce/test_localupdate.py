"""The experiments with the paper's networks: the runs they request, and their findings for runs with known results."""

import importlib
import json
import math
import re

import numpy as np
import pytest

from fedbraid.reproduce import entries, reproduce
from fedbraid.reproduce.entry import Job
from fedbraid.reproduce.localupdate import _cifar100, _training
from fedbraid.reproduce.localupdate._client_rates import learned, losses, tuned

# name: (model, layers, batch, steps, rounds, client rates, server rates, evaluations in the last 100 rounds)
HALF_DECADES = [10 ** (-3 + k / 2) for k in range(9)]
PAPER = {
    "fig6-cnn": ("emnist_cnn", None, 20, 50, 200, [10**-1.5, 0.1, 10**-0.5], [10**-1.5, 0.1, 10**-0.5], 10),
    "fig12-cnn": ("emnist_cnn", None, 20, 10, 600, [0, 1e-3, 1e-2, 0.1, 1, 10], [0.01], 4),
    "fig12-shakespeare": ("char_lstm", 2, 4, 10, 600, [0, 1e-3, 1e-2, 0.1, 1, 10], [0.01], 4),
    "fig13-cnn": ("emnist_cnn", None, 20, 10, 300, [0, 1e-3, 1e-2, 0.1, 1], HALF_DECADES, 10),
    "fig13-shakespeare": ("char_lstm", 2, 4, 10, 300, [0, 1e-3, 1e-2, 0.1, 1], HALF_DECADES, 10),
}
TARGETS = {0.0: 0.10, 1e-3: 0.12, 1e-2: 0.15, 0.1: 0.3, 1.0: 0.6}  # final loss by client rate, increasing
SPEEDS = {0.0: 0.01, 1e-3: 0.02, 1e-2: 0.05, 0.1: 0.2, 1.0: 0.3}  # speed by client rate, increasing
BEST = 10**-1.5  # the best server rate


def scripted(asked, *, flat=False):
    """Replaces training: curves as the paper describes them, or (``flat``) the same curve at all client rates."""

    def train(name, config, data, points, *, marks=(), swap=None, **rest):
        asked.append((name, config, points, data))
        every, total = config.evaluation.every, config.rounds
        rounds = np.array(sorted({*range(every, total, every), *marks, total}))
        rows, scores, diverged = [], [], []
        for point in points:
            gamma, eta = point["algorithm.gamma"], point["algorithm.server_lr"]
            diverged.append(gamma > 1 or eta > 5)
            key = 0.1 if flat else min(TARGETS, key=lambda g, gamma=gamma: abs(g - gamma))
            off = 0.1 * abs(math.log10(eta / BEST))
            rows.append((TARGETS[key] + off + 4 * np.exp(-SPEEDS[key] * rounds)).tolist())
            gain = 0.0 if swap is None or flat else 0.05
            scores.append((0.8 - off + gain - 0.7 * np.exp(-(0.02 + gain) * rounds)).tolist())
        return {"points": points, "rounds": rounds.tolist(), "diverged": diverged, "seconds": 1.0} | {
            "test_loss": rows, "test_accuracy": scores,
        }  # fmt: skip

    return train


def judged(name, monkeypatch, tmp_path, **script):
    asked = []
    monkeypatch.setattr(_training, "train", scripted(asked, **script))
    monkeypatch.setattr(_training.Task, "load", lambda task, job, on_train=False: (task.data, on_train))
    return asked, entries()[f"localupdate-{name}"].run(Job("full", tmp_path))


@pytest.mark.parametrize("name", PAPER)
def test_a_run_as_the_paper_describes_it_is_within_everywhere(name, monkeypatch, tmp_path):
    asked, evidence = judged(name, monkeypatch, tmp_path)
    assert [finding for finding in evidence.findings if not finding.within] == []
    model, layers, batch, steps, rounds, gammas, rates, late = PAPER[name]
    images = name.endswith("cnn")
    for _, config, points, data in asked:
        assert (config.model.name, config.model.options.get("layers")) == (model, layers)
        assert (config.cohort, config.rounds) == (10, rounds)
        options = config.algorithm.options
        assert (options["batch_size"], options["steps"], options["weighting"]) == (batch, steps, "uniform")
        found = sorted((p["algorithm.gamma"], p["algorithm.server_lr"]) for p in points)
        assert found == [pytest.approx((g, e)) for g in sorted(gammas) for e in sorted(rates)]
        assert data == ("femnist" if images else "shakespeare", not name.startswith("fig6"))  # evaluated on
    line = evidence.figure.axes[0].lines[0]
    assert np.sum(line.get_xdata() > rounds - 100) == late
    if name == "fig6-cnn":
        alphas = {n: config.algorithm.options["alpha"] for n, config, *_ in asked}
        assert alphas == {"none": 0.0, "nesterov": 0.0, "heavy-ball": 0.0, "alpha-0.1": 0.1, "alpha-1": 1.0}


@pytest.mark.parametrize("name", PAPER)
def test_a_run_in_which_nothing_depends_on_what_the_paper_says_is_not(name, monkeypatch, tmp_path):
    _, evidence = judged(name, monkeypatch, tmp_path, flat=True)
    missed = {finding.what.split(":")[0] for finding in evidence.findings if not finding.within}
    if name == "fig6-cnn":
        assert missed == {"Nesterov", "heavy ball"}
    elif name.startswith("fig12"):
        assert len(missed) == 3  # all findings except that the largest rate diverges
    else:
        assert missed >= {"client rate with the lowest loss after 20 rounds"}


def test_what_the_figure_leaves_out():
    result = {
        "points": [{"algorithm.gamma": g} for g in (0.0, 0.1, 1.0, 10.0)],
        "test_loss": [[2.0, 1.5], [1.8, 1.9], [3.0, 2.5], [1.0, None]],
        "diverged": [False, False, False, True],
    }
    assert set(losses(result)) == {0.0, 0.1, 1.0}
    assert set(learned(losses(result))) == {0.0, 0.1}  # the final loss of 1.0 is above the first loss of 0


@pytest.mark.parametrize(
    ("stays", "lost", "behind"),
    [
        ({0.0: 9.0}, (), 600),  # gamma = 0 keeps its first loss
        ({1e-2: 9.0}, (), 0),
        (dict.fromkeys((0.0, 1e-3, 1e-2, 0.1, 1.0), 9.0), (), 0),
        ({}, (0.0,), math.nan),
        ({}, (1e-2,), math.nan),
    ],
)
def test_client_rates_that_learn_nothing_are_no_error(stays, lost, behind, monkeypatch, tmp_path):
    real = scripted([])

    def train(*args, **options):
        result = real(*args, **options)
        for i, gamma in enumerate(point["algorithm.gamma"] for point in result["points"]):
            if gamma in stays:
                result["test_loss"][i] = [stays[gamma]] * len(result["rounds"])
            result["diverged"][i] |= gamma in lost
        return result

    monkeypatch.setattr(_training, "train", train)
    monkeypatch.setattr(_training.Task, "load", lambda task, job, on_train=False: None)
    evidence = entries()["localupdate-fig12-cnn"].run(Job("full", tmp_path))
    row = next(finding for finding in evidence.findings if "still above" in finding.what)
    assert row.ours == pytest.approx(behind, nan_ok=True)
    assert row.within == (behind > 0)
    left_out = re.findall(r"[\d.]*\d", evidence.notes[1])
    assert {float(number) for number in left_out} == {*stays, *lost, 10.0}


def test_client_rates_that_all_diverge_have_nothing_to_compare(monkeypatch, tmp_path):
    real = scripted([])
    monkeypatch.setattr(
        _training, "train", lambda *a, **o: (r := real(*a, **o)) | {"diverged": [True] * len(r["points"])}
    )
    monkeypatch.setattr(_training.Task, "load", lambda task, job, on_train=False: None)
    with pytest.raises(ValueError, match=r"every gamma of .* diverged"):
        entries()["localupdate-fig12-cnn"].run(Job("full", tmp_path))


def test_the_rate_is_chosen_by_the_last_rounds_alone():
    result = {
        "points": [{"algorithm.gamma": 0.0, "algorithm.server_lr": eta} for eta in (0.1, 1.0, 10.0)],
        "rounds": [50, 150, 200],
        "test_loss": [[1.0, 1.0, 0.9], [9.0, 0.5, 0.6], [0.1, 0.1, 0.1]],
        "diverged": [False, False, True],
    }
    assert tuned(result, 100)[0.0][0] == 1.0
    assert tuned(result, 200)[0.0][0] == 0.1


@pytest.mark.parametrize("name", ["fig12-cifar100", "fig13-cifar100"])
def test_cifar100_runs_where_a_user_has_the_files_of_tff(name, monkeypatch, tmp_path):
    """A few generated images in TFF's HDF5 layout, a small MLP, few rounds; all else as for the real files."""
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    folder = tmp_path / "fed_cifar100"
    folder.mkdir()
    for split, clients in (("train", 11), ("test", 2)):
        with h5py.File(folder / f"fed_cifar100_{split}.h5", "w") as file:
            for i in range(clients):
                image = rng.integers(0, 100, (2, 32, 32, 3), np.uint8)
                image[0, :16] += 100  # the class is the bright half
                image[1, 16:] += 100
                file[f"examples/{i}/image"] = image
                file[f"examples/{i}/label"] = np.array([3, 97])
                file[f"examples/{i}/coarse_label"] = rng.integers(0, 20, 2)
    module = importlib.import_module(f"fedbraid.reproduce.localupdate.{name.replace('-', '_')}")
    network = module.CIFAR.model
    small = module.CIFAR._replace(model=_cifar100.SMALL.model)
    changed = {"CIFAR": small, "ROUNDS": 8, "EVERY": 1, "STEPS": 2, "LAST": 1, "LATE": None, "RATES": (0.01, 0.1)}
    for key, value in changed.items():
        monkeypatch.setattr(module, key, value, raising=False)
    result = reproduce(f"localupdate-{name}", size="full", out=tmp_path / "out", data={"cifar100": folder})
    assert result["of"] == len(result["findings"]) > 2
    assert all(row["ours"] is not None for row in result["findings"])
    assert network == {"name": "resnet18_gn"}  # of the entry itself; its size is tested with the models
    kept = json.loads(next((tmp_path / "out" / "work").rglob("*.json")).read_text())
    assert np.isfinite(kept["test_loss"][0]).all()
    assert not kept["diverged"][0]
    page = (tmp_path / "out" / f"localupdate-{name}.md").read_text()
    assert "fed_cifar100_train.h5" in page
    assert "--data cifar100=FOLDER" in page
