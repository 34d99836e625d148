"""Simulated time and asynchronous steps from a configuration: run, sweep, compare and report."""

import numpy as np
import pytest

from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.experiment.collect import collect
from fedbraid.experiment.compare import run_comparison
from fedbraid.experiment.comparison import load_comparison
from fedbraid.experiment.points import points_program
from fedbraid.experiment.report import _comparison_table, write_report
from fedbraid.experiment.run import run_config
from fedbraid.experiment.runfolder import read_metrics, read_summary
from fedbraid.simulation import simulate
from fedbraid.units import format_seconds

TINY = ["data.clients=8", "model={name='softmax_regression'}", "cohort=4", "rounds=6", "evaluation.every=3"]
TINY += ["algorithm.name=fedavg"]
CLOCK = ["clock.seconds_per_step=0.5", "clock.speed_sigma=1.0"]
BUFFER = [*TINY, *CLOCK, "asynchrony.name=fedbuff", "asynchrony.buffer=2"]


def test_a_run_reports_simulated_time(tmp_path):
    summary = run_config(load_config(settings=BUFFER), tmp_path / "run")
    table = read_metrics(tmp_path / "run")
    assert np.all(np.diff(table["simulated_seconds"]) >= 0)
    assert summary.simulated_seconds == table["simulated_seconds"][-1] > 0
    assert read_summary(tmp_path / "run") == summary
    assert ("simulated time", format_seconds(summary.simulated_seconds)) in summary.rows()
    assert table["staleness"].max() > 0
    written = load_config(tmp_path / "run" / "config.toml")
    assert written.asynchrony.buffer == 2
    assert written.clock.speed_sigma == 1.0


def test_points_that_run_together_equal_single_runs():
    config = load_config(settings=BUFFER)
    experiment = build(config)
    keys = ("algorithm.client_lr",)
    program = points_program(config, experiment.data, keys, points=2, seeds=[1], test=experiment.data.test)
    rates = [0.05, 0.2]
    for seed in (1,):
        together = program.run([{keys[0]: rate} for rate in rates], seed=seed, rounds=6)
        for i, rate in enumerate(rates):
            one = build(load_config(settings=[*BUFFER, f"algorithm.client_lr={rate}", f"seed={seed}"]))
            options = {"rounds": 6, "cohort": 4, "seed": seed, "metrics": one.metrics, "devices": 1}
            timing = {"clock": config.clock, "asynchrony": config.asynchrony}
            alone = simulate(one.algorithm, one.params, one.data, **options, **timing)
            for name in ("simulated_seconds", "staleness", "train/bytes_down"):
                assert np.array_equal(together.history[name][i], alone.history[name]), name
            assert together.history["train/loss"][i] == pytest.approx(alone.history["train/loss"], rel=1e-4)
            last = together.evaluations["test_loss"][i][-1]
            assert last == pytest.approx(alone.evaluations["test_loss"][-1], rel=1e-4)


def test_methods_of_a_comparison_have_their_own_asynchrony(tmp_path):
    (tmp_path / "compare.toml").write_text(
        """
        rounds = 4
        cohort = 4
        evaluation = {every = 2}
        data = {name = "digits", clients = 8}
        model = {name = "softmax_regression"}
        clock = {seconds_per_step = 0.5, speed_sigma = 1.0}
        compare = {seeds = 1, last = 2, target = 0.2, drift = 0, baselines = []}
        methods = [
            {name = "fedavg", label = "FedAvg"},
            {name = "fedavg", label = "FedBuff", rounds = 8, asynchrony = {name = "fedbuff", buffer = 2}},
        ]
        """
    )
    summary = run_comparison(load_comparison(tmp_path / "compare.toml"), tmp_path / "out")
    times = [row["simulated_seconds_to_target"] for row in summary["methods"]]
    tables = [read_metrics(tmp_path / "out" / row["folder"] / "seed-0") for row in summary["methods"]]
    assert [len(table["round"]) for table in tables] == [4, 8]
    for row, time, table in zip(summary["methods"], times, tables, strict=True):
        assert time == table["simulated_seconds"][int(row["rounds_to_target"]) - 1]
    assert times[1] < times[0]  # a step with two uploads does not wait for the slowest client
    write_report(collect([tmp_path / "out"]), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "simulated time to 0.2" in page
    whole = _comparison_table(summary | {"target": None})
    assert ">simulated time<" in whole
    assert format_seconds(summary["methods"][0]["simulated_seconds"]) in whole
    assert "Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022." in page
    assert list(tmp_path.rglob("test-accuracy-simulated.png"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["asynchrony.name=fedbuff", "asynchrony.buffer=2", "algorithm.name=scaffold"], "mean of the clients' c_i"),
        (["asynchrony.name=fedbuff", "asynchrony.buffer=5"], "buffer = 5"),
        (["clock.latency=1.0", "arrival.drop=0.1"], r"\[clock\] lost"),
        (["clock.lost=2"], "clock.*lost must be"),
        (["clock.availability=nowhere.csv"], "cannot read the trace nowhere.csv"),
        (["asynchrony.name=fedbuf"], "fedbuff"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        build(load_config(settings=[*TINY, *settings]))
