"""The summary of a pilot in words, for the command line and for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbraid.units import format_bytes

__all__ = ["lines_of"]


def lines_of(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of a summary: a short name and a sentence each."""
    pilot = summary["pilot"]
    lines = [("reason", sentence) for sentence in summary.get("reasons", ())]
    lines.append(
        (
            "pilot",
            f"{summary['settings']} settings of {len(summary['methods'])} methods ({', '.join(summary['methods'])}), "
            f"{pilot['trials']} trials of up to {summary['rounds']} rounds: {pilot['rounds']:,} rounds in all (those "
            f"of {pilot['configured_runs']:.3g} configured runs); {format_bytes(pilot['bytes'])} in a federation; "
            f"{pilot['seconds']:.0f} s",
        )
    )
    lines.append(("judged by", f"rounds to levels of {summary['metric']}; {summary['judged_on']}"))
    if summary["advised"] is None:
        return [*lines, ("problem", summary["problem"])]
    lines.append(("advice", setting_words(summary["advised"])))
    if summary["levels"]:
        lines.append(("saves", _saved(summary)))
    certain = "no other setting is as good within the noise of the seeds"
    lines.append(("certain", f"yes: {certain}" if summary["sure"] else "no, see below"))
    return [*lines, *(("note", doubt) for doubt in summary["doubts"])]


def setting_words(setting: Mapping[str, Any]) -> str:
    """One setting: the method and its rates.

    >>> setting_words({"method": "fedadam", "local_work": 1, "client_lr": 1.0, "server_lr": 0.1})
    'fedadam, client_lr = 1, server_lr = 0.1'
    """
    rates = [f"{k} = {v:.4g}" for k, v in setting.items() if k not in ("method", "local_work", "times_the_rounds")]
    more = [f"{setting['local_work']} times the local work"] if setting["local_work"] != 1 else []
    return ", ".join([setting["method"], *rates, *more])


def _saved(summary: Mapping[str, Any]) -> str:
    """Rounds, bytes and local steps of the advised and the configured setting, at the middle one of the levels."""
    level = summary["levels"][len(summary["levels"]) // 2]
    new, old = level["advised"], level["configured"]
    goal = f"{summary['metric']} {'<=' if summary['better'] == 'lower' else '>='} {level['value']:.4g}"
    words = f"to {goal}: {_cost(new)}"
    if old is None:
        return f"{words}; as configured the run diverges or was stopped early"
    return f"{words}; as configured {_cost(old)}"


def _cost(one: Mapping[str, Any]) -> str:
    about = "about " if one["predicted"] else ""
    trend = ", by its trend" if one["predicted"] else ""
    cost = f"{format_bytes(one['bytes'])}, {one['local_steps']:,.0f} local steps{trend}"
    return f"{about}{one['rounds']:.0f} rounds ({cost})"
