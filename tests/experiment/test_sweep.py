"""Sweeps: search spaces, scores, whole sweeps, and the direction of their metric."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from drawn import legend, record
from experiment.sweep_settings import NAN, RATE, SMALL, small
from fedbraid.cli.app import make_app
from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment import ConfigError, build, lab, load_config, search, sweep
from fedbraid.experiment.lab import Lab, SweepSettings, hold_out_validation
from fedbraid.experiment.points import points_program
from fedbraid.experiment.sweep import run_sweep
from fedbraid.experiment.trials import Criterion, Trials, best_point, judged_by, read_trials
from fedbraid.experiment.tuning import tune
from fedbraid.metric import Metric
from told import told

ACCURACY, LOSS = Metric("validation_accuracy", "higher"), Metric("validation_loss", "lower")


# --- search spaces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("logspace(-4,0,9)", 10 ** np.linspace(-4, 0, 9)),
        ("linspace(0, 1, 5)", [0, 0.25, 0.5, 0.75, 1]),
        ("geomspace(0.1,10,3)", [0.1, 1, 10]),
        ("0.1,0.3,1", [0.1, 0.3, 1]),
        ("[1, 2]", [1, 2]),
        ([0.5, 1], [0.5, 1]),
        (0.5, [0.5]),
    ],
)
def test_values_are_read_as_written(written, values):
    found = search.over("k", written)
    np.testing.assert_allclose(found.values, values, rtol=1e-11)


def test_words_lists_and_ranges_are_values_too():
    assert search.over("k", "examples, uniform").values == ("examples", "uniform")
    assert search.over("k", "[[8], [16, 8]]").values == ([8], [16, 8])
    assert search.over("k", "loguniform(1e-4, 1)") == search.Range(1e-4, 1.0, "loguniform")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("logspace(-4,0)", ["k", "3 finite numbers"]),
        ("logspace(-4,0,9", ["'logspace(-4,0,9' has no closing bracket", "logspace(-4,0,9) (powers of ten)"]),
        ("logspace(-4,x,3)", ["an argument that is not a number"]),
        ("logspace(-4,0,2.5)", ["whole number"]),
        ("lograin(1,2,3)", ["lograin", "logspace"]),
        ("loguniform(0,1)", ["low > 0"]),
        ("uniform(1,1)", ["low < high"]),
        ("integers(1.5,3)", ["whole numbers"]),
        ("0.1,0.1", ["differ"]),
        ("[0.1, inf]", ["finite"]),
        ("[]", ["no values"]),
    ],
)
def test_bad_values_are_refused(written, words):
    with pytest.raises(ValueError) as error:
        search.over("k", written)
    assert all(word in str(error.value) for word in words)


def test_samples_cover_their_ranges_and_extend():
    space = {
        "a": search.Range(1e-4, 1, "loguniform"),
        "b": search.Range(1, 3, "integers"),
        "c": search.Choice(("x", "y")),
    }
    many = search.sample(space, 3000, seed=1)
    logs = np.log10([p["a"] for p in many])
    assert np.histogram(logs, 4, (-4, 0))[0].min() > 650  # of 750 expected: uniform in the exponent
    assert {p["b"] for p in many} == {1, 2, 3}
    assert {p["c"] for p in many} == {"x", "y"}
    assert search.sample(space, 5, seed=1) == many[:5]
    assert search.sample(space, 5, seed=2) != many[:5]


@pytest.mark.parametrize(
    ("rounds", "points", "eta"), [(900, 9, 3), (1000, 27, 3), (64, 16, 2), (10, 100, 3), (5, 2, 4)]
)
def test_rungs_halve_points_and_multiply_rounds(rounds, points, eta):
    ladder = search.rungs(rounds, points, eta)
    marks, kept = zip(*ladder, strict=True)
    assert marks[-1] == rounds
    assert list(marks) == sorted(set(marks))
    assert kept[-1] == 0
    assert kept[-2] == 1  # one point reaches the last rung
    alive = [points, *kept[:-1]]
    spent = sum((r - before) * n for r, before, n in zip(marks, [0, *marks], alive, strict=False))
    assert spent < 0.7 * rounds * points  # halving saves rounds


def test_adaptive_search_goes_where_it_is_better_and_repeats():
    pytest.importorskip("optuna")
    space = {"a": search.Range(1e-4, 1, "loguniform"), "b": search.Choice((3, 1, 2)), "c": search.Choice(("x", "y"))}

    def loss(p):  # best at a = 0.01, b = 2, c = y; everything above 0.3 diverges
        return math.inf if p["a"] > 0.3 else (np.log10(p["a"]) + 2) ** 2 + (p["b"] - 2) ** 2 + (p["c"] == "x")

    seen = []
    for _ in range(6):
        asked = search.adapt(space, seen, 6, seed=3)
        assert asked == search.adapt(space, seen, 6, seed=3)
        assert all(1e-4 <= p["a"] <= 1 and p["b"] in (1, 2, 3) and p["c"] in ("x", "y") for p in asked)
        seen += [(p, loss(p)) for p in asked]
    late, early = [min(v, 9.0) for _, v in seen[24:]], [min(v, 9.0) for _, v in seen[:12]]
    assert np.mean(late) < 0.6 * np.mean(early)


# --- scores ----------------------------------------------------------------------------------------------------------


def rows(*scores, reached=None, status="finished", rounds=100):
    return [
        {"point": i, "seed": s, "x": i, "status": "diverged" if v is None else status, "rounds": rounds, "score": v}
        | {"rounds_to_target": None if reached is None else reached[i]}
        for i, own in enumerate(scores)
        for s, v in enumerate(own)
    ]


def test_the_best_point_is_best_on_the_mean_over_seeds_and_never_diverged():
    found = best_point(rows([0.5, 0.9], [0.75, 0.75], [0.99, None]), ["x"], Criterion(ACCURACY), 100)
    assert found["best"] == {"x": 1}
    assert found["score"] == pytest.approx(0.75)
    lowest = best_point(rows([0.5, 0.9], [0.75, 0.75]), ["x"], Criterion(LOSS), 100)
    assert lowest["best"] == {"x": 0}
    assert lowest["deviation"] == pytest.approx(np.std([0.5, 0.9], ddof=1))
    assert best_point(rows([None]), ["x"], Criterion(ACCURACY), 100)["best"] is None
    stopped = rows([0.9], status="stopped", rounds=30) + [row | {"point": 7, "x": 7} for row in rows([0.1])]
    assert best_point(stopped, ["x"], Criterion(ACCURACY), 100)["best"] == {"x": 7}


def test_with_a_target_the_fastest_is_best_and_the_nearest_misses_come_last():
    criterion = Criterion(ACCURACY, 100, target=0.8)
    found = best_point(rows([0.81], [0.99], [0.79], [0.2], reached=[40, 60, None, None]), ["x"], criterion, 100)
    assert found["best"] == {"x": 0}
    assert found["rounds_to_target"] == 40
    miss = [criterion.loss([row], 100) for row in rows([0.79], [0.2], reached=[None, None])]
    assert 60 < miss[0] < miss[1] < math.inf


# --- data ------------------------------------------------------------------------------------------------------------


def test_validation_is_carved_out_of_training_examples_alone():
    clients = [{"x": np.arange(10.0) + 100 * i, "y": np.full(10, i)} for i in range(3)] + [{"x": [999.0], "y": [3]}]
    data = FederatedData(Split.from_clients(clients), Split.from_clients([{"x": [-1.0], "y": [0]}] * 4))
    held, about = hold_out_validation(data, 0.3, seed=5)
    assert held.test is None
    assert held.unseen is None
    assert "30%" in about
    for i, client in enumerate(clients):
        train, validation = held.train.client(i), held.validation.client(i)
        np.testing.assert_array_equal(np.sort(np.concatenate([train["x"], validation["x"]])), client["x"])
        assert len(validation["x"]) == (3 if i < 3 else 0)  # a single example stays in the training split
        assert np.all(train["y"] == i)
    again, _ = hold_out_validation(data, 0.3, seed=5)
    np.testing.assert_array_equal(again.validation.arrays["x"], held.validation.arrays["x"])
    other, _ = hold_out_validation(data, 0.3, seed=6)
    assert np.any(other.validation.arrays["x"] != held.validation.arrays["x"])
    with pytest.raises(ConfigError, match="no client"):
        hold_out_validation(FederatedData(Split.from_clients(clients[-1:])), 0.3, seed=0)
    own = FederatedData(data.train, data.test, validation=data.test)
    assert hold_out_validation(own, None, seed=0)[0].validation is data.test


def same(row, other):
    """Two rows of the same trial, up to rounding."""
    for name in ("status", "rounds", "seed", "curve/round"):
        assert row[name] == other[name]
    if row["score"] is not None:
        assert row["score"] == pytest.approx(other["score"], rel=1e-5)
        np.testing.assert_allclose(row["curve/validation_loss"], other["curve/validation_loss"], rtol=1e-4)


# --- whole sweeps ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three learning rates (one diverges) times two numbers of epochs, with two seeds."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    tuning = SweepSettings(over={RATE: [0.03, 0.3, NAN], "algorithm.epochs": [1, 2]}, seeds=2, last=4)
    return run_sweep(small(), tuning, out), out, tuning


def test_every_trial_is_a_row(swept):
    summary, out, _ = swept
    table = pq.read_table(out / "trials.parquet")
    found = table.to_pylist()
    assert len(found) == 3 * 2 * 2 == summary["trials"]
    assert {(r[RATE], r["algorithm.epochs"], r["seed"]) for r in found} == {
        (rate, epochs, seed) for rate in (0.03, 0.3, NAN) for epochs in (1, 2) for seed in (1000, 1001)
    }
    lost = [r for r in found if r["status"] == "diverged"]
    assert len(lost) == 4 == summary["diverged"]
    assert all(r[RATE] == NAN and r["score"] is None for r in lost)
    assert summary["traced"] == [RATE]
    assert summary["programs"] == 2  # one for each number of epochs


def test_scores_are_averages_over_the_last_rounds_of_the_curve(swept):
    summary, out, _ = swept
    found = read_trials(out / "trials.parquet")
    by_point = {}
    for row in found:
        if row["status"] == "finished":
            curve = np.array(row["curve/validation_accuracy"])
            late = np.array(row["curve/round"]) > 6 - 4
            assert row["score"] == pytest.approx(curve[late].mean())
            by_point.setdefault((row[RATE], row["algorithm.epochs"]), []).append(row["score"])
    best = max(by_point, key=lambda p: np.mean(by_point[p]))
    assert summary["best"] == {RATE: best[0], "algorithm.epochs": best[1]}
    assert summary["criterion"] == "highest validation_accuracy, averaged over the last 4 rounds"
    assert load_config(out / "best.toml").algorithm.options == {"client_lr": best[0], "epochs": best[1]}


def test_bytes_are_those_of_the_messages(swept):
    _, out, _ = swept
    model = (64 * 10 + 10) * 4
    for row in read_trials(out / "trials.parquet"):
        assert row["bytes_down"] == model * 4 * 6
        if row["status"] == "finished":
            assert row["bytes_up"] == model * 4 * 6


def test_the_test_set_plays_no_part(swept, monkeypatch):
    _, out, tuning = swept
    data = build(small()).data
    poisoned = {name: np.zeros_like(a) for name, a in data.test.arrays.items()}
    monkeypatch.setattr(
        lab,
        "load_named",
        lambda config: FederatedData(
            data.train, Split(poisoned, data.test.offsets), data.name, data.info, data.preprocess
        ),
    )
    found = Trials(None)
    few = tuning.model_copy(update={"over": {RATE: [0.03, 0.3], "algorithm.epochs": [1]}, "seeds": 1})
    tune(Lab(small(), few), found)
    honest = {(r[RATE], r["algorithm.epochs"], r["seed"]): r for r in read_trials(out / "trials.parquet")}
    for row in found.rows:
        assert row["score"] == pytest.approx(honest[row[RATE], 1, 1000]["score"], abs=1e-6)


def test_a_stopped_sweep_goes_on_and_ends_the_same(swept, tmp_path):
    summary, out, tuning = swept
    whole = read_trials(out / "trials.parquet")
    again = tmp_path / "again"
    again.mkdir()
    sweep.write_sweep(again / "sweep.toml", small(), tuning)
    some = [row for row in whole if not (row["seed"] == 1001 and row["algorithm.epochs"] == 2)]
    Trials(again / "trials.parquet").add(some)
    resumed = run_sweep(*sweep.reopen_sweep(again), again, resume=True)
    assert resumed["programs"] == 1  # only the missing trials were run
    assert resumed["best"] == summary["best"]
    by_id = {(r["point"], r["seed"]): r for r in whole}
    rows_ = read_trials(again / "trials.parquet")
    assert len(rows_) == len(whole)
    for row in rows_:
        same(row, by_id[row["point"], row["seed"]])


def test_chunks_do_not_change_the_trials(swept):
    _, out, tuning = swept
    found = Trials(None)
    chunked = tuning.model_copy(update={"over": {RATE: [0.03, 0.3, NAN], "algorithm.epochs": [1]}, "at_once": 1})
    tune(Lab(small(), chunked.model_copy(update={"seeds": 1})), found)
    assert {row["together"] for row in found.rows} == {1}
    whole = {(r[RATE], r["seed"]): r for r in read_trials(out / "trials.parquet") if r["algorithm.epochs"] == 1}
    for row in found.rows:
        assert row["status"] == whole[row[RATE], row["seed"]]["status"]
        if row["score"] is not None:
            assert row["score"] == pytest.approx(whole[row[RATE], row["seed"]]["score"], abs=1e-5)


def test_halving_stops_the_worse_and_can_go_on(tmp_path):
    tuning = SweepSettings(over={RATE: [1e-6, 0.03, 0.3, NAN]}, halving=2, last=2)
    config = small("rounds=8")
    file = Trials(tmp_path / "trials.parquet")
    found = tune(Lab(config, tuning), file)
    status = {row[RATE]: (row["status"], row["rounds"]) for row in file.rows}
    assert status[NAN] == ("diverged", 2)
    assert status[1e-6] == ("stopped", 2)
    assert sorted([status[0.03], status[0.3]]) == [("finished", 8), ("stopped", 4)]
    assert found["best"][RATE] == next(rate for rate, how in status.items() if how == ("finished", 8))
    # killed after the first rung: the resumed sweep computes the lost models and the remaining rungs again
    resumed = Trials(tmp_path / "resumed.parquet")
    resumed.add([row for row in file.rows if row["rounds"] == 2])
    tune(Lab(config, tuning), resumed)
    by_rate = {row[RATE]: row for row in file.rows}
    assert len(resumed.rows) == 4
    for row in resumed.rows:
        same(row, by_rate[row[RATE]])


def test_adaptive_search_runs_in_batches_and_goes_on(tmp_path):
    pytest.importorskip("optuna")
    tuning = SweepSettings(over={RATE: "loguniform(1e-3, 1)"}, search="adaptive", trials=4, batch=2)
    file = Trials(tmp_path / "a.parquet")
    tune(Lab(small("rounds=2"), tuning), file)
    assert [row["together"] for row in file.rows] == [2, 2, 2, 2]
    resumed = Trials(tmp_path / "b.parquet")
    resumed.add(file.rows[:2])
    tune(Lab(small("rounds=2"), tuning), resumed)
    assert [row[RATE] for row in resumed.rows] == [row[RATE] for row in file.rows]


OWN_MODEL = """
import jax.numpy as jnp
from fedbraid import Metric, Metrics
from fedbraid.models import Model, softmax_regression


def model(declared: bool = True) -> Model:
    base = softmax_regression(64, 10)

    def metrics(params, batch):
        scores = base.metrics(params, batch)
        losses, weights = scores["loss"]
        return {"perplexity": (jnp.exp(losses) * weights, weights), "error_free": scores["accuracy"]}

    own = (Metric("error_free", better="higher"),) if declared else ()
    return base._replace(metrics=Metrics(metrics, own))
"""


# --- directions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A user's model with a well-known metric and a metric of its own."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return (
        "rounds=4",
        "cohort=4",
        "data.clients=8",
        "evaluation.every=2",
        "algorithm.name=fedavg",
        "model.name=own_model:model",
    )


RATES = [1e-5, 0.1]  # with the first one, the loss hardly changes


@pytest.mark.parametrize(
    ("metric", "better", "best", "word"),
    [
        ("perplexity", None, 0.1, "lowest"),
        ("error_free", None, 0.1, "highest"),
        ("perplexity", "higher", 1e-5, "highest"),  # --better overrides the direction of the metric
    ],
)
def test_a_sweep_goes_in_the_direction_of_its_metric(own_model, metric, better, best, word, tmp_path):
    settings = SweepSettings(over={RATE: RATES}, metric=metric, better=better, last=2)
    summary = run_sweep(load_config(settings=own_model), settings, tmp_path / "out")
    scores = {row[RATE]: row["score"] for row in read_trials(tmp_path / "out" / "trials.parquet")}
    low, high = sorted(RATES, key=scores.__getitem__)
    assert summary["best"][RATE] == (low if word == "lowest" else high) == best
    assert summary["criterion"].startswith(f"{word} validation_{metric}")
    assert summary["better"] == {"lowest": "lower", "highest": "higher"}[word]
    rows_ = read_trials(tmp_path / "out" / "trials.parquet")
    assert {row["better"] for row in rows_} == {summary["better"]}  # the file records the direction
    assert {judged_by(row) for row in rows_} == {Metric(f"validation_{metric}", summary["better"])}


def test_no_more_rounds_are_averaged_than_there_are(own_model):
    lab = Lab(load_config(settings=own_model), SweepSettings(over={RATE: RATES}, last=1000))
    assert str(lab.criterion).endswith(f"averaged over the last {load_config(settings=own_model).rounds} rounds")


def test_halving_keeps_the_points_with_the_lowest_perplexity(own_model):
    file = Trials(None)
    settings = SweepSettings(over={RATE: [1e-5, 0.1, 0.05]}, metric="perplexity", halving=3, last=2)
    tune(Lab(load_config(settings=own_model), settings), file)
    stopped = [row for row in file.rows if row["status"] == "stopped"]
    (finished,) = [row for row in file.rows if row["status"] == "finished"]
    assert len(stopped) == 2
    early = finished["curve/validation_perplexity"][0]
    assert all(early < row["curve/validation_perplexity"][-1] for row in stopped)


def test_a_metric_without_a_direction_is_refused_before_anything_runs(own_model, tmp_path, monkeypatch):
    config = load_config(settings=[*own_model, "model.declared=false"])
    monkeypatch.setattr(lab, "points_program", None)  # fails if a program is made
    for metric in (None, "error_free", "perplexity"):
        with pytest.raises(ValueError, match=r"metric 'error_free' has no known direction.*Metrics\(function"):
            run_sweep(config, SweepSettings(over={RATE: RATES}, metric=metric), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    clipped = small("transforms=[{name='clip', bound=1.0}]")
    with pytest.raises(ConfigError, match=r"metric 'clipped' .*better = \"higher\" or \"lower\" beside metric"):
        run_sweep(clipped, SweepSettings(over={RATE: RATES}, metric="train/clipped"), tmp_path / "out")


def test_trials_of_older_versions_are_judged_by_well_known_names():
    assert judged_by({"metric": "validation_perplexity"}).better == "lower"
    with pytest.raises(ValueError, match="error_free"):
        judged_by({"metric": "validation_error_free"})


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "more", "words"),
    [
        ({"algorithm.client_rate": [0.1]}, {}, ["client_rate", "client_lr"]),
        ({"algoritm.client_lr": [0.1]}, {}, ["algoritm", "algorithm"]),
        ({RATE: ["fast"]}, {}, ["client_lr", "fast"]),
        ({RATE: [0.1, -1.0]}, {}, ["client_lr", "-1"]),
        ({"algorithm.epochs": [0.5]}, {}, ["epochs", "0.5"]),
        ({"cohort": [4, 9]}, {}, ["cohort = 9", "8 clients"]),
        ({"seed": [1, 2]}, {}, ["seeds"]),
        ({"rounds": [1, 2]}, {}, ["rounds"]),
        ({"engine.chunk": [1, 2]}, {}, ["engine.chunk", "results"]),
        ({"transforms.0.bound": [1.0]}, {}, ["transforms"]),
        ({RATE: "uniform(0,1)"}, {}, ["number of points"]),
        ({RATE: [0.1]}, {"trials": 3}, ["trials"]),
        ({RATE: [0.1]}, {"metric": "f1"}, ["f1", "validation_accuracy", "train/loss"]),
        ({RATE: [0.1]}, {"seed": 0}, ["seed = 0"]),
        ({RATE: "linspace(0.1,1,500)", "algorithm.alpha": "linspace(0,1,500)"}, {}, ["250,000 points", "100,000"]),
        ({}, {}, ["nothing to sweep over"]),
    ],
)
def test_bad_sweeps_are_refused_before_anything_runs(over, more, words, tmp_path):
    with pytest.raises(ValueError) as error:
        run_sweep(small(), SweepSettings(over=over, **more), tmp_path / "out")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_point_that_cannot_fit_says_how_large_it_is(monkeypatch):
    config = small()
    data = build(config).data
    monkeypatch.setattr("fedbraid.simulation.points.total_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"one point of this sweep needs .* GB and there are .* GB to use"):
        points_program(config, data, [RATE], points=2, seeds=[3], test=data.test)


def test_trials_of_another_format_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "trials.parquet"
    monkeypatch.setattr("fedbraid.experiment.trials.FORMAT", 99)
    Trials(file, {"version": "9.9"}).add([{"point": 0}])
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"format 99.*9\.9"):
        read_trials(file)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trials(file)
    with told("cannot read.*Its trials run again"):
        assert Trials(file).rows == []


def test_the_command_sweeps_and_says_what_to_do_next(tmp_path, monkeypatch):
    out, figures = tmp_path / "cli", record(monkeypatch)
    settings = [part for value in (*SMALL, "rounds=2") for part in ("--set", value)]
    over = ["--over", f"{RATE}=logspace(-2,-1,2)"]
    app = make_app()
    done = CliRunner().invoke(app, ["sweep", *settings, *over, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["points"] == 2
    (axis,) = figures[0].axes
    assert (out / "sweep.png").is_file()
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("client_lr", "validation_accuracy")
    assert legend(axis) == [f"best: {summary['score']:.4g}"]
    scores = {row[RATE]: row["score"] for row in read_trials(out / "trials.parquet")}
    drawn = axis.containers[0].lines[0].get_xydata()
    np.testing.assert_allclose(drawn, sorted(scores.items()))
    for arguments, word in (
        (["sweep", *settings, *over, "--out", str(out)], "not empty"),
        (["sweep", "--over", "algorithm.client_lr"], "KEY=VALUES"),
        (["sweep", "--resume", str(tmp_path)], "no sweep.toml"),
        (["sweep", "--resume", str(out), "--seeds", "3"], "leave out"),
    ):
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, ValueError)
        assert word in str(refused.exception)


def test_a_sweep_over_the_share_of_liars_marks_as_many():
    made = Lab(small("attack.factor=3"), SweepSettings(over={"attack.share": "0.25,0.5"}))
    for share, liars in ((0.25, 2), (0.5, 4)):
        train = made.data_of(small("attack.factor=3", f"attack.share={share}")).train
        assert sum(train.client(c)["byzantine"].any() for c in range(8)) == liars


def test_trials_are_written_at_most_once_in_an_interval(tmp_path):
    path = tmp_path / "trials.parquet"
    trials = Trials(path, every=1e6)
    trials.add([{"point": 0, "seed": 1}])
    assert not path.exists()
    trials.write()
    assert len(read_trials(path)) == 1
    trials.every = 0.0
    trials.add([{"point": 1, "seed": 1}])
    assert [row["point"] for row in read_trials(path)] == [0, 1]
