"""The program itself: its version and its list of commands."""

from __future__ import annotations

from typer.testing import CliRunner

import fedbraid
from fedbraid.cli.app import COMMANDS, GROUPS, make_app


def test_the_version_is_printed():
    result = CliRunner().invoke(make_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"fedbraid {fedbraid.__version__}\n")


def test_help_names_every_command():
    text = CliRunner().invoke(make_app(), ["--help"]).stdout
    assert "Federated optimization" in text
    assert all(name in text for name in (*COMMANDS, *GROUPS))
