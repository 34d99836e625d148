"""The result of a pilot as plain values: the advice, what it saves, and what the pilot cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbraid.experiment.advice.candidates import Setting
from fedbraid.experiment.advice.pilot import Found
from fedbraid.experiment.advice.race import Race
from fedbraid.experiment.advice.ranking import rounds_to
from fedbraid.version import __version__

__all__ = ["summarize"]


def summarize(race: Race, found: Found, problem: str, doubts: Sequence[str]) -> dict[str, Any]:
    """The summary of a pilot; ``advised`` is None if there is a problem."""
    seeds = race.settings.seed_list
    summary: dict[str, Any] = {
        "kind": "advise",
        "version": __version__,
        "data": race.config.data.name,
        "model": race.config.model.name,
        "metric": race.metric.name,
        "better": race.metric.better,
        "judged_on": f"{race.held[1]}, seeds {', '.join(map(str, seeds))}",
        "problem": problem,
        "sure": not problem and found.final is not None and not found.final.close_to_best(),
        "doubts": list(doubts),
        "settings": len(found.tried),
        "methods": sorted({one.method for one in found.tried}),
        "horizons": list(race.horizons),
        "rounds": race.reached,
        "pilot": _pilot_cost(race),
        "advised": None,
        "configured": _about(found.configured),
        "runners_up": [],
        "levels": [],
    }
    if problem or found.best is None or found.final is None:
        return summary
    summary["advised"] = _about(found.best)
    for one in found.final.close_to_best():
        if one != found.best:
            times = math.exp(found.final.regret[one] - found.final.regret[found.best])
            summary["runners_up"].append(_about(one) | {"times_the_rounds": times})
    summary["levels"] = _levels(race, found)
    return summary


def _about(setting: Setting) -> dict[str, Any]:
    return {"method": setting.method, "local_work": setting.work, **dict(setting.rates)}


def _pilot_cost(race: Race) -> dict[str, Any]:
    """Rounds, bytes and local steps of all trials together, and the seconds they took."""
    cohort = _cohort(race)
    rounds = sum(race.used.values())
    steps = sum(count * cohort * race.work_of(one) for (one, _), count in race.used.items())
    sent = sum(count * cohort * race.bytes_of(one) for (one, _), count in race.used.items())
    return {
        "trials": len(race.used),
        "rounds": rounds,
        "configured_runs": rounds / race.config.rounds,
        "bytes": int(sent),
        "local_steps": steps,
        "seconds": race.elapsed,
    }


def _cohort(race: Race) -> int:
    return race.held[0].train.num_clients if race.config.cohort == "all" else int(race.config.cohort)


def _levels(race: Race, found: Found) -> list[dict[str, Any]]:
    """Rounds, bytes and local steps of the advised and of the configured setting to each level."""
    assert found.final is not None
    assert found.best is not None
    cohort, rows = _cohort(race), []
    levels = found.final.levels
    curves = {"advised": found.best, "configured": found.configured}
    times: dict[str, np.ndarray | None] = {}
    for name, setting in curves.items():
        usable = race.rows_of(setting, race.reached) and race.alive([setting], race.reached)
        if not usable:
            times[name] = None
            continue
        own = race.curves(setting, race.reached)
        times[name] = rounds_to(own.rounds.astype(float), own.kept_on_average(), levels)
    for i, level in enumerate(levels):
        row: dict[str, Any] = {"value": float(level * race.metric.sign)}
        for name, setting in curves.items():
            own = times[name]
            if own is None:
                row[name] = None
                continue
            rounds = float(own[i])
            row[name] = {
                "rounds": rounds,
                "predicted": rounds > race.reached,
                "bytes": rounds * cohort * race.bytes_of(setting),
                "local_steps": rounds * cohort * race.work_of(setting),
            }
        rows.append(row)
    return rows
