"""A column of Table 2 on FEMNIST's writers: run all methods with one model, and check the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbraid.data.catalog import load
from fedbraid.reproduce.entry import Evidence, Finding, Job
from fedbraid.reproduce.mime._table2 import WAYS, accuracies, draw, notes, run_method

LAST, MARGIN = 50, 3.0


def run_column(job: Job, model: Mapping[str, Any], *, rounds: int, piece: int | None = None) -> dict[str, Any]:
    """The twelve methods at nine client rates each."""
    data = replace(load("femnist", path=str(job.path_of("femnist"))), unseen=None)
    marks = range(rounds - LAST + 10, rounds + 1, 10)
    options: dict[str, Any] = {"model": model, "rounds": rounds, "marks": marks, "piece": piece}
    return {name: run_method(name, data, work=job.work, tell=job.tell, **options) for name in WAYS}


def judge_column(results: Mapping[str, Mapping[str, Any]], paper: Mapping[str, float], *, title: str) -> Evidence:
    ours = accuracies(results, LAST)
    findings = [
        Finding(f"{name}, accuracy in %", f"{value}", ours[name], value - MARGIN, value + MARGIN)
        for name, value in paper.items()
    ]
    finite = {name: value for name, value in ours.items() if math.isfinite(value)}
    ranked = sorted(finite, key=lambda name: -finite[name])
    apart = max(paper.values()) - min(paper.values())
    findings += [
        Finding("MimeAdam and MimeLiteAdam are the best two", "yes", set(ranked[:2]) == {"MimeAdam", "MimeLiteAdam"}),
        Finding("best less worst, in points", f"{apart:.1f}", max(finite.values()) - min(finite.values()), 0.0, 3.0),
        Finding("MimeLiteSGD is FedAvgSGD", "yes", ours["MimeLiteSGD"] == ours["FedAvgSGD"]),
    ]
    figure = draw(results, paper, LAST, margin=MARGIN, title=f"{title}, 40 models sent per round")
    return Evidence(tuple(findings), figure, notes(results, LAST))
