"""Several hosts: two real processes with two devices each give the results of one process with four devices."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from fedbraid.cli.run import command
from fedbraid.experiment import ConfigError, load_config, run_config
from fedbraid.experiment.runfolder import CHECKPOINTS, read_metrics, read_summary
from fedbraid.simulation import checkpoint, hosts

SETTINGS = ["model.name=softmax_regression", "cohort=8", "arrival.drop=0.2", "evaluation.every=4"]


@pytest.fixture
def start():
    """Starts the processes of one run, with little optimization by the compiler, and ends them with the test."""
    started = []

    def begin(folder, settings, count=2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
        sets = [word for one in [*settings, "engine.devices=2"] for word in ("--set", one)]
        command = [sys.executable, "-m", "fedbraid", "run", *sets, "--out", str(folder)]
        command += ["--hosts", f"127.0.0.1:{port}", "--host-count", str(count)]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        for i in range(count):
            started.append(subprocess.Popen([*command, "--host-id", str(i)], env={**os.environ, **flags}, **streams))
        return started

    yield begin
    for process in started:
        with process:
            process.kill()


def saved(folder):
    """The round, the server and the client states of the newest checkpoint."""
    round_, tree = checkpoint.load(checkpoint.latest(folder / CHECKPOINTS))
    return round_, tree["server"], tree["states"] or {}


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(np.asarray(a[name]), np.asarray(b[name]), rtol=0, atol=1e-6)


def test_two_hosts_do_what_one_with_as_many_devices_does(tmp_path, start):
    settings = [*SETTINGS, "rounds=8", "engine.data_in=host"]
    both = start(tmp_path / "two", settings)
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "process 0 of 2 on" in said[0]
    assert "process 1 of 2 on" in said[0]
    assert "error" not in said[1]
    run_config(load_config(settings=settings), tmp_path / "one")
    one, two = (read_summary(tmp_path / name).engine for name in ("one", "two"))
    assert (two["hosts"], two["devices"]) == (2, 4)
    assert (one["hosts"], one["devices"], one["local_steps"]) == (1, 4, two["local_steps"])
    close(saved(tmp_path / "one")[1], saved(tmp_path / "two")[1])
    a, b = (read_metrics(tmp_path / name) for name in ("one", "two"))
    for name in a.keys() - {"seconds"}:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5)


def test_a_killed_host_stops_the_others_and_the_run_goes_on_without_it(tmp_path, start):
    """SCAFFOLD: the first host keeps all client states."""
    settings = [*SETTINGS, "algorithm.name=scaffold", "engine.states_in=host", "checkpoint.every=8"]
    endless, folder = [*settings, "rounds=5000"], tmp_path / "two"
    first, other = start(folder, endless)
    until = time.monotonic() + 100
    while not list(folder.glob(f"{CHECKPOINTS}/0*")) and time.monotonic() < until:
        assert other.poll() is None, other.stderr.read()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    said = other.communicate(timeout=60)[1]
    assert other.returncode == 1
    assert "a host of this run no longer answers: all hosts stop" in said
    assert "Traceback" not in said
    first.communicate(timeout=60)

    done, server, states = saved(folder)
    run_config(load_config(settings=[*settings, f"rounds={done}"]), tmp_path / "one")
    _, same_server, same_states = saved(tmp_path / "one")
    close(server, same_server)
    close(states, same_states)

    # continued on one host
    summary = run_config(load_config(settings=endless), folder, resume=True, on_progress=lambda now: now.round > done)
    assert summary.rounds > done
    run_config(load_config(settings=[*settings, f"rounds={summary.rounds}"]), tmp_path / "whole")
    close(saved(folder)[1], saved(tmp_path / "whole")[1])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("10.0.0.1", 2, 0), "ADDRESS:PORT"),
        (("10.0.0.1:0", 2, 0), "ADDRESS:PORT"),
        (("10.0.0.1:99999", 2, 0), "ADDRESS:PORT"),
        (("10.0.0.1:900", None, 0), "--host-count"),
        (("10.0.0.1:900", 2, 2), "from 0 to 1"),
        (("10.0.0.1:900", 0, 0), "at least 1"),
        (("auto", 2, None), "--host-count"),
        ((None, None, 1), "--hosts"),
    ],
)
def test_bad_hosts_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        hosts.check(*options)


def test_a_resumed_run_may_change_its_engine_alone(tmp_path):
    config = load_config(settings=[*SETTINGS, "rounds=4"])
    run_config(config, tmp_path / "run", on_progress=lambda progress: True)
    with pytest.raises(ConfigError, match="keeps its configuration"):
        command(resume=tmp_path / "run", settings=["cohort=4"])
    command(resume=tmp_path / "run", settings=["engine.devices=1", "engine.plan=chunks", "engine.chunk=2"], quiet=True)
    assert read_summary(tmp_path / "run").engine["chunk"] == 2
