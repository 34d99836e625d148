"""The program itself: its version, its list of commands, and how it is stopped."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
from typer.testing import CliRunner

import fedbraid
from fedbraid.cli.app import COMMANDS, GROUPS, make_app
from fedbraid.cli.stopping import Terminated, catch_sigterm


def test_the_version_is_printed():
    result = CliRunner().invoke(make_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"fedbraid {fedbraid.__version__}\n")


def test_help_names_every_command():
    text = CliRunner().invoke(make_app(), ["--help"]).stdout
    assert "Federated optimization" in text
    assert all(name in text for name in (*COMMANDS, *GROUPS))


def test_sigterm_inside_a_callback_of_the_garbage_collector_is_not_lost():
    """Python ignores exceptions in such a callback, and jax has one."""
    sent, before = [], signal.getsignal(signal.SIGTERM)

    def callback(phase, info):
        if not sent:
            sent.append(phase)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)  # the handler runs here

    def collect():
        gc.collect()
        time.sleep(5)

    catch_sigterm()
    gc.callbacks.append(callback)
    try:
        with pytest.raises(Terminated):
            collect()
    finally:
        gc.callbacks.remove(callback)
        signal.signal(signal.SIGTERM, before)
    assert sent == ["start"]
