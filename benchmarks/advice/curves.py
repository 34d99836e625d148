"""Rules over loss curves: when a target is reached and kept, and which target is set. NumPy only.

A *curve* holds the loss after rounds 1, 2, 3 ... of one setting, averaged over seeds. Values that are not finite count
as infinite, so a setting that diverges on one seed never reaches a target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

KEEP = 5  # evaluations over which a target must be kept, the first one included
LEAST = 20  # rounds that the best method needs at least
LEVEL = 20  # evaluations over which the best level is averaged, so that it is not a lucky dip
HIGHEST = 0.98  # share of a target at most: closer to the best level, the noise of the test seeds decides
SHARES = (0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998)  # of the best improvement
MOST = 10.0  # a candidate that needs more than this many times the best method's rounds counts as this ratio


def mean_curve(curves: Any) -> np.ndarray:
    """The mean over the first axis (seeds), infinite where a value is not finite.

    >>> mean_curve([[3.0, 1.0, 1.0], [1.0, float("nan"), 3.0]]).tolist()
    [2.0, inf, 2.0]
    """
    curves = np.asarray(curves, float)
    return np.where(np.isfinite(curves).all(0), np.where(np.isfinite(curves), curves, 0).mean(0), np.inf)


def kept(curve: Any, keep: int = KEEP) -> np.ndarray:
    """Means of each evaluation and the ``keep - 1`` after it.

    >>> kept([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]).tolist()
    [3.0, 2.0]
    """
    curve = np.asarray(curve, float)
    if len(curve) < keep:
        return np.zeros(0)
    return np.lib.stride_tricks.sliding_window_view(curve, keep).mean(-1)


def rounds_to(curve: Any, target: float) -> int | None:
    """The first round with a loss of at most ``target`` that is kept on average; None if there is none.

    This is the rule of ``[stop]`` in configurations: the evaluation itself and the mean of it and the four after it.

    >>> rounds_to([9, 1, 9, 9, 9, 9, 2, 1, 1, 1, 1], 2.0)  # the dip in round 2 is not kept
    7
    """
    means = kept(curve)
    hits = np.flatnonzero((means <= target) & (np.asarray(curve, float)[: len(means)] <= target))
    return int(hits[0]) + 1 if len(hits) else None


def best_level(curves: Iterable[Any]) -> float:
    """The lowest mean loss over ``LEVEL`` evaluations in a row, of all curves."""
    return min((float(kept(curve, min(LEVEL, len(curve))).min()) for curve in curves), default=np.inf)


def target_of(start: float, curves: Sequence[Any], share: float) -> dict[str, float]:
    """The target of a share: the initial loss less this share of the best improvement of any of the curves.

    ``rounds`` is what the fastest curve needs, 0 if none reaches it.
    """
    best = best_level(curves)
    target = start - share * (start - best)
    found = [rounds for rounds in (rounds_to(curve, target) for curve in curves) if rounds is not None]
    return {"target": target, "share": share, "start": start, "best": best, "rounds": min(found, default=0)}


def set_target(start: float, curves: Sequence[Any], *, least: int = LEAST) -> dict[str, float]:
    """The target of the first share in ``SHARES`` with which the fastest curve needs at least ``least`` rounds.

    If there is none, that of the share with which it needs the most rounds: the federation is too easy to be counted.
    No share is above `HIGHEST`.

    >>> curve = 1 - np.minimum(np.arange(1, 101) / 50, 1)  # falls by 0.02 a round, from 1 to 0
    >>> found = set_target(1.0, [curve])
    >>> round(found["target"], 6), found["share"], found["rounds"]
    (0.2, 0.8, 40)
    """
    found = [target_of(start, curves, share) for share in SHARES if share <= HIGHEST]
    return next((one for one in found if one["rounds"] >= least), max(found, key=lambda one: one["rounds"]))


def effort(curve: Any, goal: dict[str, float]) -> float:
    """How slow a setting is, for tuning: the geometric mean of its rounds to the target and to both shares beside it.

    One target alone would reward a lucky dip of a noisy curve. A target that is not reached counts as twice the
    length of the curve.

    >>> curve = 1 - np.minimum(np.arange(1, 101) / 100, 1)  # 80, 85 and 90% after 80, 85 and 90 rounds
    >>> round(effort(curve, {"start": 1.0, "best": 0.0, "share": 0.85}), 2)
    84.9
    """
    at = SHARES.index(goal["share"])
    shares = SHARES[max(at - 1, 0) : at + 2]
    found = [rounds_to(curve, goal["start"] - share * (goal["start"] - goal["best"])) for share in shares]
    return float(np.exp(np.mean(np.log([2 * len(curve) if rounds is None else rounds for rounds in found]))))


def ratio(rounds: int | None, best: int) -> float:
    """How many times the best method's rounds; at most ``MOST``, also if the target is not reached.

    >>> ratio(30, 20), ratio(None, 20), ratio(500, 20)
    (1.5, 10.0, 10.0)
    """
    return MOST if rounds is None else min(MOST, rounds / best)


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean, and shares within 1.2x and 2x.

    >>> summary([1.0, 4.0])
    {'mean': 2.0, 'within_1.2': 0.5, 'within_2': 0.5}
    """
    values = np.asarray(ratios, float)
    return {
        "mean": round(float(np.exp(np.log(values).mean())), 6),
        "within_1.2": float((values <= 1.2 + 1e-9).mean()),
        "within_2": float((values <= 2 + 1e-9).mean()),
    }
