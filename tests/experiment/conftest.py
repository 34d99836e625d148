"""Folders and a report that several files of tests read."""

import pytest

from drawn import record
from experiment.report_folders import PLOTTED, a_run, a_sweep
from fedbraid.experiment.collect import collect
from fedbraid.experiment.report import write_report


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Three runs and a sweep."""
    root = tmp_path_factory.mktemp("runs")
    return [
        a_run(root / "slow", seed=0),
        a_run(root / "slow-again", seed=1),
        a_run(root / "fast", "algorithm.name=fedavgm", rate=0.3),
        a_sweep(root / "sweep"),
    ]


@pytest.fixture(scope="session")
def page(folders, tmp_path_factory):
    """The report of these folders: its file, and what was written."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        figures = record(patch)
        told: list[str] = []
        written = write_report(collect(folders), out, title="A </script> & <b>title", tell=told.append)
        written["told"] = told
    PLOTTED[:] = figures
    return out, written
