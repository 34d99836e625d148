"""The program itself: its version, its list of commands, and how it is stopped."""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import types

import click
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import fedbraid
from fedbraid.cli import stopping
from fedbraid.cli.app import COMMANDS, GROUPS, make_app, system_error


def test_the_version_is_printed():
    result = CliRunner().invoke(make_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"fedbraid {fedbraid.__version__}\n")


def test_the_bar_of_a_run_says_evaluating_and_counts_a_round_once():
    from fedbraid.cli.run import _Watch
    from fedbraid.simulation import Progress

    watch = _Watch(Console(quiet=True), 10, show=False)
    row = {"train/loss": 0.5, "train/bytes_up": 100.0}
    watch.progress(Progress(2, row, 1.0))
    watch.progress(Progress(4, row, 2.0))
    watch.progress(Progress(4, row, 2.1, evaluating=True))
    assert watch.bar.tasks[0].fields["news"] == "loss 0.500  evaluating  400 B"
    watch.progress(Progress(4, row, 60.0))
    assert watch.bar.tasks[0].fields["news"] == "loss 0.500  2.0 rounds/s  400 B"


def test_help_names_every_command():
    text = CliRunner().invoke(make_app(), ["--help"]).stdout
    assert "federated learning" in text
    assert all(name in text for name in (*COMMANDS, *GROUPS))


DROPPED = """
import gc, signal, sys, time, weakref
from fedbraid.cli.stopping import catch_sigterm, exit_status

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
number, place, left = getattr(signal, sys.argv[1]), sys.argv[2], 3

def send(*_):
    global left
    if left:
        left -= 1
        signal.raise_signal(number)

class Thing: pass

def drop():
    if place == "collector":
        gc.callbacks.append(send)
        gc.collect()
        gc.callbacks.remove(send)
    else:
        thing = Thing()
        reference = weakref.ref(thing, send)
        del thing

class Broken:
    def __del__(self):
        raise ValueError("shown as before")

catch_sigterm()
catch_sigterm()  # twice is once
Broken()
try:
    for _ in range(3):
        drop()
    assert not left
    time.sleep(20)
except KeyboardInterrupt as stopped:
    time.sleep(0.3)  # a second stop would end this process
    sys.exit(exit_status(stopped))
"""


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("place", ["collector", "reference"])
def test_a_stop_that_python_drops_is_sent_again(place, number, status):
    """Python drops what is raised while the garbage collector or a weak reference calls back; jax has such calls."""
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, number, place], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    assert done.stderr.count("shown as before") == 1
    assert done.stderr.count("Traceback") == 1  # the other error's


def test_help_explains_arguments():
    """Click 8.5 drops the help texts of typer's arguments; the command line restores them."""
    run = CliRunner().invoke(make_app(), ["run", "--help"]).stdout
    assert "TOML file (default" in run
    table = CliRunner().invoke(make_app(), ["data", "import", "csv", "--help"]).stdout
    assert "CSV files with a header" in table


def test_a_stop_that_arrives_while_it_is_sent_again_is_not_lost(monkeypatch):
    """On a busy machine the timer may be faster than the end of its own start."""
    sent: list[int] = []

    class Early(threading.Thread):
        def __init__(self, seconds, function, arguments):
            super().__init__()
            sent.append(arguments[0])

        def start(self):
            if len(sent) == 1:
                raise stopping.Terminated

    monkeypatch.setattr(stopping.threading, "Timer", Early)
    hook = stopping._SendAgain(lambda dropped: None)
    hook(types.SimpleNamespace(exc_value=stopping.Terminated()))
    assert sent == [signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "runs/mine: .*; check who may read and write it, or choose another place"),
        (errno.EROFS, "; choose a place that you may write to"),
        (errno.ENOTDIR, "; a part of this path is a file, not a folder"),
        (errno.ENOSPC, "; free some space and run the command again"),
        (errno.ENOENT, "runs/mine: No such file or directory$"),
    ],
)
def test_errors_of_the_operating_system_say_what_to_do(number, words):
    assert re.search(words, system_error(OSError(number, os.strerror(number), "runs/mine")))


def test_a_misspelt_command_is_corrected_once():
    """By click or by typer; their oldest versions correct nothing."""
    by_typer = "suggest_commands" in inspect.signature(typer.core.TyperGroup.__init__).parameters
    either = by_typer or hasattr(click.exceptions, "NoSuchCommand")
    assert CliRunner().invoke(make_app(), ["rn"]).output.count("Did you mean") == int(either)
