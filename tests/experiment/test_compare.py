"""Comparisons: all methods have equal conditions, and the table agrees with the runs."""

import copy
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from drawn import lines, record
from fedbraid import algorithms, cost, simulate
from fedbraid.cli.app import make_app
from fedbraid.cli.compare import _closing
from fedbraid.data import FederatedData, Split
from fedbraid.experiment import ConfigError, baselines, load_config, run_config
from fedbraid.experiment.collect import collect
from fedbraid.experiment.compare import Final, _statistics, run_comparison
from fedbraid.experiment.comparison import cohorts_of, load_comparison, reopen_comparison
from fedbraid.experiment.pagedata import page_data
from fedbraid.experiment.runfolder import read_clients, read_metrics, read_summary
from fedbraid.experiment.trials import Criterion, read_trials
from fedbraid.metric import Metric
from fedbraid.units import format_seconds
from told import told

TOML = """
rounds = 6
cohort = 4
data = { name = "digits", clients = 8 }
model = { name = "softmax_regression" }
evaluation = { every = 2 }
clock = { seconds_per_step = 0.5, speed_sigma = 1.0 }
algorithm = { batch_size = 10 }
compare = { seeds = 2, last = 4, target = 0.35, drift = 1 }
sweep = { validation = 0.25 }

[[methods]]
label = "one"
name = "fedavg"
over = { client_lr = [0.01, 0.1] }

[[methods]]
label = "two"
name = "fedavg"
over = { client_lr = [0.01, 0.1] }

[[methods]]
label = "lost"
name = "fedavg"
over = { client_lr = [1e37, 1e38] }

[[methods]]
label = "as it is"
name = "fedavg"
client_lr = 0.05
"""


def loss(params, batch, key):
    return jnp.sum(params**2) + jnp.mean(batch["x"])


def costs(*members):
    data = {"x": np.zeros((5, 1), np.float32)}
    return [cost(make(loss), jnp.zeros(1000), data) for make in members]


def method(name, base=None):
    factory = getattr(algorithms, name)
    return (lambda f: factory(f)) if base is None else (lambda f: factory(f, base=base, protocol="split-cohort"))


@pytest.mark.parametrize(("fedavg", "expected"), [(20, [20, 8, 8, 6, 6, 6, 5]), (50, [50, 20, 20, 16, 16, 16, 14])])
def test_equal_total_communication_gives_the_clients_of_the_mime_paper(fedavg, expected):
    """Karimireddy et al. (2021), Table 4: EMNIST and Shakespeare (20 clients), StackOverflow (50)."""
    rows = [
        method("fedavg"),
        method("mimelite", "momentum"),
        method("mimelite", "adagrad"),
        method("mimelite", "adam"),
        method("mime", "momentum"),
        method("mime", "adagrad"),
        method("mime", "adam"),
    ]
    assert cohorts_of("total-communication", fedavg, costs(*rows)) == expected


def test_equal_client_communication_counts_what_goes_up():
    both = costs(method("fedavg"), method("mime", "momentum"), method("scaffold"))
    # a pair of clients of the split cohort sends two models up, and so does one client of SCAFFOLD
    assert cohorts_of("client-communication", 20, both) == [20, 10, 10]
    assert cohorts_of("rounds", 20, both) == [20, 20, 20]
    with pytest.raises(ConfigError, match="no client"):
        cohorts_of("total-communication", 1, both)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    (folder / "c.toml").write_text(TOML)
    out = folder / "out"
    return run_comparison(load_comparison(folder / "c.toml"), out), out


def rows_of(summary):
    return {row["label"]: row for row in summary["methods"]}


def test_a_method_beside_itself_comes_out_the_same(compared):
    """Same cohorts, same initial model, same grid: the results must be equal."""
    summary, out = compared
    one, two = rows_of(summary)["one"], rows_of(summary)["two"]
    for name in ("best", "score", "deviation", "rounds_to_target", "bytes_to_target", "clients", "bytes"):
        assert one[name] == two[name]
    a, b = (read_metrics(out / row["folder"] / "seed-1") for row in (one, two))
    for name, column in a.items():
        if name != "seconds":
            np.testing.assert_array_equal(column, b[name])


def test_the_table_is_what_the_run_folders_hold(compared):
    summary, out = compared
    row = rows_of(summary)["one"]
    scores, rounds, sent, tenth, worst = [], [], [], [], []
    for seed in (0, 1):
        table = read_metrics(out / "one" / f"seed-{seed}")
        evaluated = table["test_accuracy"][np.array([1, 3, 5])]
        scores.append(evaluated[1:].mean())  # the last 4 rounds were evaluated twice
        reached = next(i for i, value in zip((2, 4, 6), evaluated, strict=True) if value >= 0.35)
        rounds.append(reached)
        sent.append((64 * 10 + 10) * 4 * 2 * 4 * reached)  # bytes of the model, both ways, 4 clients
        clients = read_clients(out / "one" / f"seed-{seed}")["test_accuracy"]
        tenth.append(np.nanpercentile(clients, 10))
        worst.append(np.nanmin(clients))
    assert row["score"] == pytest.approx(np.mean(scores))
    assert row["deviation"] == pytest.approx(np.std(scores, ddof=1))
    assert row["rounds_to_target"] == np.mean(rounds)
    assert row["bytes_to_target"] == np.mean(sent)
    assert row["clients"]["worst_tenth"] == pytest.approx(np.mean(tenth))
    assert row["clients"]["worst"] == pytest.approx(np.mean(worst))
    assert summary["tuned_on"] == "25% of every client's training examples, seed 1000"


def test_a_run_of_a_comparison_can_be_repeated_alone(compared, tmp_path):
    _, out = compared
    place = out / "one" / "seed-1"
    run_config(load_config(place / "config.toml"), tmp_path / "again")
    again, there = read_metrics(tmp_path / "again"), read_metrics(place)
    for name in ("train/loss", "test_loss", "bytes_up"):
        np.testing.assert_allclose(again[name], there[name], rtol=1e-4)
    np.testing.assert_allclose(
        read_clients(tmp_path / "again")["test_loss"], read_clients(place)["test_loss"], rtol=1e-3
    )


def test_a_method_that_only_diverges_is_told_and_stops_no_other(compared):
    summary, out = compared
    lost = rows_of(summary)["lost"]
    assert lost["best"] is None
    assert (lost["trials"], lost["trials_diverged"]) == (2, 2)
    assert "score" not in lost
    assert sum(row["status"] == "diverged" for row in read_trials(out / "trials.parquet")) == 2
    assert rows_of(summary)["as it is"]["trials"] == 0  # no grid, nothing tuned
    assert rows_of(summary)["as it is"]["score"] > 0


def test_a_stopped_comparison_goes_on(compared, monkeypatch):
    summary, out = compared
    figures = record(monkeypatch)
    kept = (out / "one" / "seed-0" / "metrics.parquet").stat().st_mtime_ns
    (out / "two" / "seed-1" / "summary.json").unlink()
    again = run_comparison(reopen_comparison(out), out, resume=True)
    assert (out / "one" / "seed-0" / "metrics.parquet").stat().st_mtime_ns == kept
    ours, theirs = rows_of(again)["two"], rows_of(summary)["two"]
    assert ours["scores"] == pytest.approx(theirs["scores"], rel=1e-5)
    (axis,) = figures[-1].axes  # compare.png: means over the seeds
    drawn = lines(axis)
    assert list(drawn) == ["one", "two", "as it is"]
    tables = [read_metrics(out / "one" / f"seed-{seed}") for seed in (0, 1)]
    means = np.mean([table["test_accuracy"] for table in tables], axis=0)[[1, 3, 5]]
    np.testing.assert_allclose(drawn["one"], np.c_[[2, 4, 6], means])


# --- baselines -------------------------------------------------------------------------------------------------------


def distance(params, batch, key=None):
    return 0.5 * jnp.sum(jnp.sum((params - batch["x"]) ** 2, 1) * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)


@pytest.fixture(scope="module")
def points():
    """Clients of 3, 5 and 2 points in the plane, and the loss of a model: its mean squared distance to them / 2."""
    rng = np.random.default_rng(0)
    return FederatedData(Split.from_clients([{"x": rng.normal(i, 1, (n, 2))} for i, n in enumerate((3, 5, 2))]))


def test_a_client_alone_descends_on_its_own_loss_and_sends_nothing(points):
    alg = baselines.alone(algorithms.fedavg(distance, client_lr=0.3, batch_size=None, steps=2))
    start = jnp.ones(2)
    assert cost(alg, start, points).multiple == 0
    result = simulate(alg, start, points, rounds=4)
    own, _ = result.states
    centres = np.array([points.train.client(i)["x"].mean(0) for i in range(3)])
    np.testing.assert_allclose(own, centres + 0.7**8 * (1 - centres), rtol=1e-5)  # eight steps of gradient descent
    np.testing.assert_array_equal(result.params, start)
    with pytest.raises(ValueError, match="fedavg"):
        baselines.alone(alg._replace(exchanges=(alg.exchanges[0]._replace(client=distance),)))


def test_pooled_data_is_gradient_descent_on_all_examples(points):
    alg = algorithms.fedavg(distance, client_lr=0.3, batch_size=None, steps=2)
    result = simulate(alg, jnp.ones(2), baselines.pool(points), rounds=4)
    centre = points.train.arrays["x"].mean(0)
    np.testing.assert_allclose(result.params, centre + 0.7**8 * (1 - centre), rtol=1e-5)


def test_each_example_is_judged_by_the_model_of_its_own_client(points):
    def metrics(params, batch):
        return {"loss": (jnp.sum((params - batch["x"]) ** 2, 1) * batch["mask"], batch["mask"])}

    models = jnp.array([[0.0, 0.0], [1.0, 2.0], [5.0, 5.0]])
    sums, weights = baselines._own_scores(metrics, points.train)(models)["loss"]
    expected = [np.sum((np.asarray(models[i]) - points.train.client(i)["x"]) ** 2) for i in range(3)]
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_array_equal(weights, [3, 5, 2])
    mean = baselines._everywhere(metrics, points.train, (), "test_loss", 0)(models)
    whole = [np.mean(np.sum((np.asarray(m) - points.train.arrays["x"]) ** 2, 1)) for m in models]
    assert mean == pytest.approx(np.mean(whole), rel=1e-5)


def test_a_comparison_has_rows_of_local_and_of_pooled_training(compared):
    summary, out = compared
    local, pooled = summary["baselines"]
    assert [row["label"] for row in (local, pooled)] == ["local only", "pooled data"]
    assert not {"local only", "pooled data"} & set(rows_of(summary))
    for row in (local, pooled):
        assert row["bytes"] == 0
        assert row["trials"] == 2  # as many points as the methods
        assert row["best"]["algorithm.client_lr"] in (0.01, 0.1)
        assert len(row["scores"]) == 2
        assert row["seconds"] > 0
        assert row["clients"]["worst"] <= row["clients"]["median"]
    assert local["everywhere"] < local["score"]  # a client has few classes, all clients have ten
    # 6 rounds of 4 in 8 clients: 3 rounds for each. A client has 157 training examples on average, 10 in a batch
    assert "3 rounds" in local["about"]
    assert "batches of 40" in pooled["about"]
    assert pooled["score"] > rows_of(summary)["one"]["score"]
    told = CliRunner().invoke(make_app(), ["compare", "--resume", str(out)]).stdout
    assert told.index("as it") < told.index("local") < told.index("pooled")


def test_baselines_are_the_same_for_all_methods_of_a_comparison(tmp_path):
    grid = 'over = { client_lr = "logspace(-2, 0, 3)", server_lr = [0.5, 1.0] }'
    (tmp_path / "c.toml").write_text(TOML.replace("over = { client_lr = [0.01, 0.1] }", grid, 1))
    options, rates = baselines._reference(load_comparison(tmp_path / "c.toml"))
    assert options == {"batch_size": 10}
    np.testing.assert_allclose(rates, np.geomspace(0.01, 1, 6), rtol=1e-5)  # six points, as the largest grid
    (tmp_path / "d.toml").write_text(TOML.replace("drift = 1", "baselines = []"))
    assert load_comparison(tmp_path / "d.toml").settings.baselines == ()
    (tmp_path / "e.toml").write_text(TOML.replace("drift = 1", 'baselines = ["central"]'))
    with pytest.raises(ConfigError, match="'local' or 'pooled'"):
        load_comparison(tmp_path / "e.toml")


def test_many_clients_are_drawn_and_models_bounded(points, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(baselines, "LEAST_CLIENTS", 2)
    large = SimpleNamespace(shapes=jax.ShapeDtypeStruct((10**9,), np.float32))
    data = FederatedData(points.train, points.train, validation=points.train)
    held, final = baselines._some_clients(data, data, large, 5, seed=0)
    assert held.train.num_clients == held.validation.num_clients == final.train.num_clients == 2
    assert final.aligned
    small = SimpleNamespace(shapes=jax.ShapeDtypeStruct((10,), np.float32))
    assert baselines._some_clients(data, data, small, 5, seed=0)[1].train.num_clients == 3


def test_no_local_row_where_test_clients_are_others(points):
    with told("no row 'local only'"):
        other = FederatedData(points.train, Split.from_clients([points.train.client(0)]))
        assert baselines.run_baseline("local", None, other, None) is None


# --- directions and reports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "reached", "clients"),
    [
        ("lower", 3, {"worst": 4.0, "worst_tenth": 3.7, "median": 2.5, "best_tenth": 1.3, "deviation": 1.25**0.5}),
        ("higher", 1, {"worst": 1.0, "worst_tenth": 1.3, "median": 2.5, "best_tenth": 3.7, "deviation": 1.25**0.5}),
    ],
)
def test_a_table_follows_the_direction_of_its_metric(better, reached, clients):
    column = np.array([4.0, 3.0, 1.0])
    table = {"round": np.array([1, 2, 3]), "test_m": column, "seconds": column}
    table |= {"bytes_down": np.array([1.0, 2.0, 3.0]), "bytes_up": np.zeros(3)}
    finals = [Final(0, table, {"test_m": np.array([1.0, 2.0, 3.0, 4.0, np.nan])}, False)]
    found = _statistics(finals, Criterion(Metric("test_m", better), 2, target=2.0))
    assert found["rounds_to_target"] == reached
    assert found["bytes_to_target"] == reached
    assert found["clients"] == pytest.approx(clients)
    assert found["score"] == 2.0


def test_a_comparison_says_its_direction(compared):
    summary, out = compared
    assert (summary["metric"], summary["better"]) == ("test_accuracy", "higher")
    assert read_summary(out / "one" / "seed-0").metrics["test_loss"] == "lower"


def test_its_report_has_everything(compared):
    _, out = compared
    found = collect([out])
    assert list(found.groups) == ["one", "two", "as it is"]
    assert [tuned.label for tuned in found.tunings] == ["one", "two", "lost"]
    assert any("lost: every point" in notice for notice in found.notices)
    page = page_data(found)
    assert len(page["curves"]["test_accuracy"]["series"]) == 3
    drift = page["drift"][0]["rounds"]
    assert drift[0][0] == 0  # clients start from one model
    assert max(drift[0]) > 0
    assert [point["status"] for point in page["tunings"][2]["points"]] == ["diverged", "diverged"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[[methods]]", "[[method]]"), ["nothing to compare", "[[methods]]"]),
        (("algorithm = {", 'algorithm = { name = "fedavg", '), ["[[methods]]"]),
        (("seeds = 2", "seed = 2"), ["'seed'", "[compare]", "did you mean 'seeds'"]),
        (("seeds = 2", 'protocol = "bytes"'), ["compare.protocol", "bytes", "total-communication"]),
        (('label = "two"', 'label = "one"'), ["methods[1].label", "one"]),
        (('label = "two"', 'label = "One"'), ["methods[1].label"]),
        (("validation = 0.25", "over = { x = 1 }"), ["[[methods]]"]),
        (("validation = 0.25", "seed = 1"), ["[1]", "sweep.seed"]),
        (("over = { client_lr = [0.01, 0.1] }", 'over = { "data.alpha" = [1, 2] }'), ["data.alpha", "same for all"]),
        (('name = "fedavg"\nover', "over"), ["methods[0].name"]),
    ],
)
def test_bad_comparisons_are_refused(change, words, tmp_path):
    assert change[0] in TOML
    (tmp_path / "c.toml").write_text(TOML.replace(*change))
    with pytest.raises(ConfigError) as error:
        load_comparison(tmp_path / "c.toml")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_options_and_names_are_refused_before_anything_runs(tmp_path):
    for change, word in (
        (('name = "fedavg"', 'name = "fedavgg"'), "fedavgg"),
        (("client_lr = [", "client_rate = ["), "client_rate"),
    ):
        (tmp_path / "c.toml").write_text(TOML.replace(*change))
        with pytest.raises(ConfigError, match=word):
            run_comparison(load_comparison(tmp_path / "c.toml"), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_embedded_comparison_is_valid():
    comparison = load_comparison(settings=["compare.seeds=5", "rounds=7"])
    assert comparison.settings.seeds == 5
    assert comparison.base.rounds == 7
    assert len(comparison.methods) == 5
    assert comparison.config(0).algorithm.options == {"epochs": 2}


def test_the_command_refuses_politely(compared, tmp_path):
    _, out = compared
    app = make_app()
    for arguments, word in (
        (["compare", "--out", str(out)], "not empty"),
        (["compare", "--resume", str(tmp_path)], "no compare.toml"),
        (["compare", "--resume", str(out), "--protocol", "rounds"], "leave out"),
    ):
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, ValueError)
        assert word in str(refused.exception)
    done = CliRunner().invoke(app, ["compare", "--resume", str(out), "--json"])
    assert json.loads(done.stdout)["kind"] == "compare"
    told = CliRunner().invoke(app, ["compare", "--resume", str(out)])
    assert "diverged" in told.stdout
    assert "fedbraid report" in told.stdout


@pytest.mark.parametrize("target", [0.35, None])
def test_the_printed_table_has_the_simulated_time(compared, target):
    summary, out = copy.deepcopy(compared[0]), compared[1]
    final = [read_metrics(out / rows_of(summary)["one"]["folder"] / f"seed-{s}")["simulated_seconds"] for s in (0, 1)]
    console = Console(width=200, record=True, file=io.StringIO())
    _closing(console, summary | {"target": target}, out)
    text = console.export_text()
    whole = rows_of(summary)["one"]["simulated_seconds"]
    assert whole == pytest.approx(np.mean([column[-1] for column in final]))
    shown = whole if target is None else rows_of(summary)["one"]["simulated_seconds_to_target"]
    assert ("  time to 0.35" in text) == (target is not None)
    assert format_seconds(shown) in next(line for line in text.splitlines() if line.startswith("one"))
    for row in summary["methods"]:
        row.pop("simulated_seconds", None)  # a folder of an earlier version
    _closing(console, summary, out)
    assert "simulated" not in console.export_text()
