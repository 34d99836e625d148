"""``fedbraid cost``: the figures of the papers' tables, from the command line."""

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from fedbraid.cli.cost import command

app = typer.Typer()
app.command()(command)


def run(*settings, json_out=True, config=None):
    arguments = [] if config is None else [str(config)]
    for setting in settings:
        arguments += ["--set", setting]
    result = CliRunner().invoke(app, [*arguments, "--json"] if json_out else arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout) if json_out else result.stdout


SPLIT = ("algorithm.protocol=split-cohort",)
TABLE = {  # models both ways: the communication table of elastic aggregation, and Table 4 of Mime
    "FedAvg": (("algorithm.name=fedavg",), 2),
    "SCAFFOLD": (("algorithm.name=scaffold",), 4),
    "Elastic": (("algorithm.name=fedavg", 'transforms=[{name="elastic"}]'), 3),
    "MimeLiteMom": (("algorithm.name=mimelite", "algorithm.base=momentum", *SPLIT), 5),
    "MimeLiteAdam": (("algorithm.name=mimelite", "algorithm.base=adam", *SPLIT), 6),
    "MimeMom": (("algorithm.name=mime", "algorithm.base=momentum", *SPLIT), 6),
    "MimeAdam": (("algorithm.name=mime", "algorithm.base=adam", *SPLIT), 7),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_tables(name):
    settings, multiple = TABLE[name]
    assert run(*settings)["multiple"] == multiple


def test_a_file_with_a_stack(tmp_path):
    """The digits MLP has arrays of 4096, 64, 640 and 10 numbers. A twentieth of each is sent, one byte per value."""
    file = tmp_path / "stack.toml"
    file.write_text(
        'cohort = 7\nrounds = 11\nalgorithm.name = "fedavg"\n'
        '[[transforms]]\nname = "top_k"\nfraction = 0.05\n[[transforms]]\nname = "quantize"\n'
    )
    report = run(config=file)
    places = 205 * 2 + 4 * 1 + 32 * 2 + 1 * 1
    values = (205 + 4) + (4 + 4) + (32 + 4) + 4  # plus one scale each; a single number is sent unchanged
    assert report["transforms"] == ["top_k", "quantize"]
    assert report["up"] == places + values
    assert report["round_bytes"] == 7 * (report["down"] + report["up"])
    assert report["run_bytes"] == 11 * report["round_bytes"]


def test_for_people():
    text = run(*TABLE["MimeAdam"][0], json_out=False)
    assert re.search(r"^total .* 7x", text, re.M)
    assert "FedAvg: 2x" in text


def test_mistakes_are_value_errors():
    with pytest.raises(ValueError, match="elastic"):
        run('transforms=[{name="elastc"}]')
    with pytest.raises(ValueError, match="norm_bound"):
        run("algorithm.name=scaffold", 'transforms=[{name="median"}]')
