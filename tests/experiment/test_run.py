"""``fedbraid run`` as a user runs it: real processes, killed and resumed; and its errors for bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid.algorithms import ALGORITHMS
from fedbraid.cli.app import make_app
from fedbraid.data import mark
from fedbraid.data.catalog import CATALOG
from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.experiment.comparison import load_comparison
from fedbraid.experiment.config import dump
from fedbraid.experiment.figures import draw_run, save
from fedbraid.experiment.run import run_config
from fedbraid.experiment.runfolder import determining, read_config, read_metrics, read_summary, write_config
from fedbraid.experiment.summary import RunSummary
from fedbraid.simulation.checkpoint import CheckpointError
from fedbraid.transforms import TRANSFORMS, attack
from told import told

SMALL = ("rounds=40", "cohort=5", "model.hidden=[8]", "data.clients=10", "evaluation.every=10", "checkpoint.every=2")


def command(*arguments):
    return [sys.executable, "-m", "fedbraid", *map(str, arguments)]


def with_ctrl_c(*arguments):
    """A shell starts background jobs with SIGINT ignored, and a process inherits that: here it is not ignored."""
    usual = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", usual, *command(*arguments)]


def settings(*values):
    return [part for value in values for part in ("--set", value)]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    own = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return own | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def fedbraid(env, *arguments, **options):
    return subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def whole(env, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = fedbraid(env, "run", *settings(*SMALL), "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), out


def test_json_has_what_is_promised(whole):
    summary, out = whole
    assert summary["algorithm"] == "fedauto_ahead"  # the default
    assert (summary["rounds"], summary["finished"], summary["out"]) == (40, True, str(out))
    assert summary["rounds_per_second"] == pytest.approx(40 / summary["seconds"])
    assert 0 < summary["final"]["test_accuracy"] <= 1
    assert summary["final"]["test_loss"] > 0
    # 64 x 8 + 8 + 8 x 10 + 10 parameters and 4 numbers, of 4 bytes each, 5 clients, 40 rounds, both ways
    assert summary["bytes"] == {"down": 614 * 4 * 5 * 40, "up": 614 * 4 * 5 * 40}
    assert len(summary["params_sha256"]) == 64
    assert summary["engine"]["masked_share"] == 0
    assert summary["metrics"] == {"test_accuracy": "higher", "test_loss": "lower", "train/loss": "lower"}
    assert summary["diverged"] is False
    assert RunSummary.from_json(summary) == read_summary(out)


def test_the_run_folder_is_complete(whole, tmp_path):
    _, out = whole
    assert load_config(out / "config.toml").rounds == 40
    table = pq.read_table(out / "metrics.parquet")
    assert table.num_rows == 40
    assert table["test_accuracy"].null_count == 36
    columns = read_metrics(out)
    save(draw_run(columns, "fedauto_ahead on digits: mlp, cohort 5, seed 0"), tmp_path / "again.png")
    np.testing.assert_array_equal(imread(tmp_path / "again.png"), imread(out / "curves.png"))
    assert np.all(np.diff(columns["bytes_up"]) > 0)
    assert columns["train/loss"][-1] < columns["train/loss"][0]


def test_the_same_config_gives_the_same_bytes(env, whole, tmp_path):
    again = fedbraid(env, "run", whole[1] / "config.toml", "--out", tmp_path / "again", "--json")
    assert json.loads(again.stdout)["params_sha256"] == whole[0]["params_sha256"]


def test_a_run_without_a_test_split_says_that_nothing_is_evaluated(tmp_path):
    with told("data 'digits' has no test split, so runs on this data have nothing to evaluate on; hold out"):
        summary = run_config(load_config(settings=[*SMALL, "rounds=1", "data.test_fraction=0"]), tmp_path / "run")
    assert not any(name.startswith("test_") for name in summary.final)


def test_ctrl_c_saves_and_says_how_to_go_on(env, tmp_path):
    out = tmp_path / "run"
    arguments = ["run", *settings(*SMALL, "rounds=100000", "checkpoint.every=100000"), "--out", out, "--quiet"]
    process = subprocess.Popen(with_ctrl_c(*arguments), env=env, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    deadline = time.time() + 120
    while not (out / "config.toml").exists() and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"fedbraid run --resume {out}" in errors.replace("\n", "")
    assert any((out / "checkpoints").iterdir())


def test_a_run_folder_is_never_overwritten(env, whole):
    refused = fedbraid(env, "run", "--out", whole[1])
    assert refused.returncode == 2
    assert "not empty" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_finished_run_is_not_run_again_so_that_a_queue_may_restart_it(env, whole):
    written = (whole[1] / "summary.json").stat().st_mtime_ns
    finished = fedbraid(env, "run", "--resume", whole[1], "--json")
    assert finished.returncode == 0
    assert "is finished: 40 rounds" in finished.stderr
    assert json.loads(finished.stdout) == whole[0]
    assert (whole[1] / "summary.json").stat().st_mtime_ns == written


def test_ctrl_c_while_the_command_starts_is_quiet(env):
    """While it imports: NumPy is loaded, jax not yet fully."""
    process = subprocess.Popen(with_ctrl_c("run", "--quiet"), env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while "numpy" not in Path(f"/proc/{process.pid}/maps").read_text() and time.time() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors == ""
    assert process.returncode == 130


TINY = [
    "cohort=2",
    "model.hidden=[4]",
    "data.clients=4",
    "evaluation.every=2",
    "checkpoint.every=1",
    "engine.devices=1",
]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A finished run of three rounds."""
    out = tmp_path_factory.mktemp("three") / "run"
    config = load_config(settings=[*TINY, "rounds=3"])
    run_config(config, out)
    return config, out


def test_a_run_that_starts_again_after_a_crash_leaves_no_partial_file(three, tmp_path):
    """The process was killed while it wrote its first file."""
    out = tmp_path / "run"
    out.mkdir()
    (out / ".partial-0a1b2c3d-config.toml").write_text("roun")
    run_config(three[0], out)
    assert not list(out.glob(".partial-*"))


def test_a_finished_run_trains_on_with_more_rounds(three, tmp_path):
    """The same bytes as a run that had all rounds from the start, and the evaluation of round 3 is dropped."""
    shutil.copytree(three[1], tmp_path / "longer")
    config = load_config(settings=[*TINY, "rounds=6"])
    longer = run_config(config, tmp_path / "longer", resume=True)
    whole = run_config(config, tmp_path / "whole")
    assert (longer.params_sha256, longer.rounds, longer.finished) == (whole.params_sha256, 6, True)
    tables = [read_metrics(tmp_path / name) for name in ("longer", "whole")]
    for name, column in tables[1].items():
        if name != "seconds":
            np.testing.assert_array_equal(tables[0][name], column, err_msg=name)
    assert read_config(tmp_path / "longer") == config
    with pytest.raises(ConfigError, match=r"rounds = 3: .* has 6; they may only grow"):
        run_config(three[0], tmp_path / "longer", resume=True)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("algorithm.caution=0.7", r"algorithm\.caution was its default and is now 0\.7"),
        ("seed=3", "seed was 0 and is now 3|seed was its default and is now 3"),
        ("cohort=3", "cohort was 2 and is now 3"),
        ("data.clients=5", r"data\.clients was 4 and is now 5"),
        ("evaluation.every=1", r"evaluation\.every was 2 and is now 1"),
        ('transforms=[{name="top_k", fraction=0.5}]', r"transforms\.0\.fraction was its default and is now 0\.5"),
    ],
)
def test_a_resume_is_the_same_run(three, tmp_path, setting, words):
    """Refused by the run folder; and if its config.toml was replaced, by the checkpoint."""
    out, other = tmp_path / "run", load_config(settings=[*TINY, "rounds=4", setting])
    shutil.copytree(three[1], out)
    with pytest.raises(ConfigError, match=words):
        run_config(other, out, resume=True)
    with pytest.raises(ConfigError, match=r"Only rounds and the keys of \[engine\], \[checkpoint\], \[stop\] and"):
        read_config(out, [setting])
    write_config(out, other)
    with pytest.raises(CheckpointError, match=f"another run: .*{words}"):
        run_config(other, out, resume=True)


def test_how_a_run_is_computed_may_change(three):
    changed = read_config(three[1], ["engine.chunk=2", "checkpoint.every=7", "rounds=9"])
    assert (changed.engine.chunk, changed.checkpoint.every, changed.rounds) == (2, 7, 9)
    assert determining(changed) == determining(three[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["rounds=-1"], ["rounds", "-1", "greater than or equal to 1"]),
        (["round=5"], ["'round'", "did you mean 'rounds'"]),
        (["engine.plan=fast"], ["engine.plan", "fast", "sequential"]),
        (["engine.chunks=3"], ["'chunks'", "did you mean 'chunk'"]),
        (["arrival.drop=1.5"], ["arrival.drop", "1.5"]),
        (["attack.share=1"], ["attack.share", "less than 1"]),
        (["attack.factor=nan"], ["attack.factor", "finite"]),
        (["attack.share=0.001"], ["attack.share", "0.001 of 50 clients marks none", "0.02"]),
        (["algorithm.name=fedavgg"], ["'fedavgg'", "did you mean 'fedavg'"]),
        (["algorithm.name=fedavg", "algorithm.client_rate=0.1"], ["'client_rate'", "client_lr"]),
        (["algorithm.name=fedavg", "algorithm.client_lr=-0.1"], ["client_lr", "-0.1"]),
        (["algorithm.client_lr=0.1"], ["fedauto_ahead", "algorithm.name=fedavg"]),
        (["algorithm.batch_size=0"], ["batch_size", "0"]),
        (["data.name=digit"], ["'digit'", "did you mean 'digits'"]),
        (["model.name=mlpp"], ["'mlpp'", "did you mean 'mlp'"]),
        (["cohort=51"], ["cohort = 51", "50 clients"]),
        (["algorithm.name=local_update", "algorithm.gamma=0.1", "algorithm.theta=[0.0]"], ["theta"]),
        (["algorithm.name=local_update", "algorithm.gamma=-0.1"], ["gamma", "-0.1"]),
        (["transforms=[{name='clipp'}]"], ["'clipp'"]),
        (["rounds"], ["key=value"]),
        (["rounds=ten"], ['rounds = "ten": must be a whole number']),
        (["cohort=0"], ["cohort = 0: must be greater than or equal to 1 or 'all'"]),
        (["evaluation.metrics=acc"], ['evaluation.metrics = "acc": must be a list in brackets']),
        (["algorithm.nam=fedavg"], ["'nam' does not exist; did you mean 'name'"]),
        (["algorithm=fedavg"], ['algorithm = "fedavg": must be a section with a name', "--set algorithm.name=fedavg"]),
        (["data=digits"], ["--set data.name=digits"]),
        (["transforms=['clip']"], ['must be a table with a name, such as {name = "clip"}']),
        (["transforms.0.name=clip"], ['must be a list of tables, such as [{name = "clip"']),
        (["data.alfa=1"], ["partition 'dirichlet' has no option 'alfa' (did you mean 'alpha'?)"]),
        (["model.hiden=[3]"], ["did you mean 'hidden'"]),
        (["algorithm.epochs=1.5"], ["option epochs of algorithm 'fedauto_ahead' must be a whole number, got 1.5"]),
        (["algorithm.name=mime", "algorithm.recipe=3"], ["option recipe of algorithm 'mime' must be a table, got 3"]),
        (["algorithm.name=fedavg", "algorithm.client_opt=3"], ["client_opt must be one of sgd", "got 3"]),
        (["algorithm.shuffle=3"], ["must be true or false, got 3"]),
        (["rounds.x=3", "rounds=3", "rounds.y=1"], ["'rounds'"]),
    ],
)
def test_bad_configs_are_refused_by_key(given, words):
    with pytest.raises(ConfigError) as error:
        build(load_config(settings=given))
    for word in words:
        assert word in str(error.value)


def test_an_attack_in_a_config_is_that_of_python():
    def run(experiment, algorithm, data):
        return fb.simulate(algorithm, experiment.params, data, rounds=2, cohort=10, seed=5, devices=1).params

    honest = build(load_config(settings=[*SMALL, "seed=5"]))
    lies = ["attack.share=0.3", "attack.factor=-2", "attack.seed=7"]
    attacked = build(load_config(settings=[*SMALL, "seed=5", *lies]))
    assert "byzantine" not in honest.data.train.arrays
    marked = mark(honest.data, 0.3, seed=7)
    assert marked.train.arrays["byzantine"].any()
    want = run(honest, attack(honest.algorithm, factor=-2.0), marked)
    got = run(attacked, attacked.algorithm, attacked.data)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, run(honest, honest.algorithm, honest.data))
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_a_bad_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "bare.toml").write_text("[data]\nname = digits")
    with pytest.raises(ConfigError, match=r"line 2.*: name = digits; write text in quotes"):
        load_config(tmp_path / "bare.toml")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean bare\.toml\? .*bad\.toml, bare\.toml"):
        load_config(tmp_path / "bear.toml")
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        load_config(tmp_path / "nowhere" / "c.toml")
    with pytest.raises(ConfigError, match="key=value"):  # `--set algorithm.client_lr 0.1`
        load_config(Path("0.1"), ["algorithm.client_lr"])


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_configs_that_come_along_name_what_there_is(path):
    several = "[[methods]]" in path.read_text()
    comparison = load_comparison(path) if several else None
    configs = [load_config(path)] if comparison is None else [*map(comparison.config, range(len(comparison.methods)))]
    for config in configs:
        assert config.algorithm.name in ALGORITHMS
        assert all(named.name in TRANSFORMS for named in config.transforms)
        assert config.data.name in CATALOG


def test_dumped_configs_load_to_the_same(tmp_path):
    config = load_config(settings=["algorithm.name=fedprox", "algorithm.alpha=0.5", "cohort=all", "arrival.deadline=3"])
    (tmp_path / "c.toml").write_text(dump(config))
    assert load_config(tmp_path / "c.toml") == config


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "models"])
def test_list_says_what_can_be_named(kind):
    listed = json.loads(CliRunner().invoke(make_app(), ["list", kind, "--json"]).stdout)[kind]
    names = [entry["name"] for entry in listed]
    assert {"algorithms": "fedavg", "datasets": "digits", "models": "mlp"}[kind] in names
    assert all(entry["about"] for entry in listed)
