"""The fault harness: hostile inputs are generated, counted, and each must end in a clear error or a correct result.

`make test` runs a small sample of every generator. `make faults` runs all of it: FEDBRAID_FAULTS=whole.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when Flower is imported
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

PROPERTY = "faults"  # the name under which a test reports its counts, also from another worker


class Tally:
    """Counts the cases of one test: `tried` is every case, `held` those that ended as they should."""

    def __init__(self, what: str) -> None:
        self.what, self.tried, self.held = what, 0, 0
        self.failures: list[str] = []
        self.checked = False

    def case(self, held: bool, name: str) -> None:
        """Count one case; ``name`` describes it if it did not hold."""
        self.tried += 1
        self.held += bool(held)
        if not held:
            self.failures.append(name)

    def check(self) -> None:
        """Fail the test if a case did not hold, or if no case ran."""
        self.checked = True
        assert self.tried, f"{self.what}: no case was tried"
        assert not self.failures, f"{self.what}: {len(self.failures)} of {self.tried} failed: {self.failures[:10]}"


@pytest.fixture
def tally(request: pytest.FixtureRequest, record_property):
    """A `Tally` named after the test; its counts appear at the end of the run."""
    counts = Tally(request.node.name)
    yield counts
    record_property(PROPERTY, [request.node.nodeid, counts.tried, counts.held])
    assert counts.checked, "the test must end with tally.check()"


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Commands of fedbraid as child processes that start fast, see forks.py."""
    from forks import Forks

    server = Forks(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def undisturbed(forks, tmp_path_factory):
    """(result, number of file operations, folder, seconds) of the tiny run without any fault."""
    from tiny import arguments, result

    out, report = tmp_path_factory.mktemp("undisturbed") / "run", tmp_path_factory.mktemp("count") / "operations"
    forks.run(*arguments(out.with_name("first")))  # compiles, if the cache is empty
    ended = forks.run(*arguments(out), fault={"kind": "count", "root": str(out), "report": str(report)})
    assert ended.status == 0, ended.err
    return result(out), int(report.read_text()), out, ended.seconds


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per test of the harness: cases tried and held."""
    rows: Counter[str] = Counter()
    lines = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") != "teardown":
                continue
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    where, tried, held = value
                    rows["tried"], rows["held"] = rows["tried"] + tried, rows["held"] + held
                    lines.append(f"{tried:6d} {held:6d}  {where.removeprefix('tests/faults/')}")
    if lines:
        terminalreporter.section("faults: tried, held")
        terminalreporter.write_line("\n".join(sorted(lines, key=lambda line: line[14:])))
        terminalreporter.write_line(f"{rows['tried']:6d} {rows['held']:6d}  in all")
