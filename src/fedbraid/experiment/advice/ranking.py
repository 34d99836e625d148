"""Which of several curves reaches its targets in the fewest rounds, when the target is not known.

A setting is not judged by its loss after a fixed number of rounds: early losses favour small rates. It is judged by the
rounds that it needs to a *level* of the metric, compared with the fastest setting, averaged over several levels. The
levels are shares of the largest improvement over the initial model, from 80% to 99%: low ones reward a quick start,
high ones a curve that settles at a good level. The *regret* of a setting is the mean over the levels of
log((its rounds + early) / (fewest rounds + early)). A regret of log 2 means twice the rounds. ``early`` is a small part
of the configured rounds, so that a few rounds more or less at the very beginning count little.

A level counts as reached in the first evaluation from which on the curve keeps it on average (see `kept`). If a curve
has not reached a level yet, its trend says when it would: the straight line through the second half of the curve, over
the logarithm of the round.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

__all__ = ["Curves", "Ranking", "kept", "rank", "rounds_to"]

KEEP = 20  # rounds over which a level must be kept at least; a short peak does not count
SHARES = (0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99)  # of the largest improvement
BEST = 5  # settings from which noise is estimated
ERRORS = 2.0  # standard errors by which the largest improvement is reduced: the best of many curves is partly luck
MOST = 8.0  # a curve that does not reach a level counts with at most this many times all rounds


Key = TypeVar("Key", bound=Hashable)


class Curves(NamedTuple):
    """The evaluated metric of one setting, with its sign such that higher is better."""

    rounds: np.ndarray  # [evaluations]
    values: np.ndarray  # [seeds, evaluations]

    @property
    def window(self) -> int:
        """The number of evaluations in `KEEP` rounds, at least 2."""
        every = float(np.median(np.diff(self.rounds))) if len(self.rounds) > 1 else 1.0
        return max(2, math.ceil(KEEP / every))

    def kept(self) -> np.ndarray:
        """The levels that each seed has reached and kept, [seeds, evaluations]."""
        return kept(self.values, self.window)

    def kept_on_average(self) -> np.ndarray:
        """The levels that the mean over the seeds has reached and kept, [evaluations]."""
        return kept(self.values.mean(0), self.window)


class Ranking(NamedTuple, Generic[Key]):
    """Settings from best to worst.

    regret: by setting, of the curve averaged over the seeds.
    noise: its standard error over the seeds. levels: values of the metric times its sign, and ``rounds`` to them.
    ends: where the curve settles, the mean of its last values with the worst seed.
    """

    order: list[Key]
    regret: dict[Key, float]
    noise: dict[Key, float]
    rounds: dict[Key, np.ndarray]
    levels: np.ndarray
    ends: dict[Key, float]

    def close_to_best(self, least: float = math.log(1.1)) -> list[Key]:
        """The settings that may be as good as the best: their regret is within two standard errors, or ``least``."""
        best = self.order[0]
        return [one for one in self.order[1:] if self._gap(one, best) <= max(least, 2 * self._joint(one, best))]

    def _gap(self, one: Key, best: Key) -> float:
        return self.regret[one] - self.regret[best]

    def _joint(self, one: Key, best: Key) -> float:
        return math.hypot(self.noise[one], self.noise[best])


def kept(values: np.ndarray, window: int = KEEP) -> np.ndarray:
    """The best level that a curve has reached and kept, after each evaluation; values [..., evaluations].

    A level is kept if the mean of an evaluation and those after it has it: of ``window`` of them, later of a fifth of
    those so far. The mean estimates the curve that many seeds would have; single values would favour smooth curves.

    >>> kept(np.array([0.0, 1.0] + 8 * [0.0] + 4 * [2.0]), 10).round(2).tolist()
    [0.1, 0.3, 0.4, 0.6, 0.8, 0.89, 1.0, 1.14, 1.33, 1.6, 2.0, 2.0, 2.0, 2.0]
    """
    count = values.shape[-1]
    means = np.empty(values.shape)
    for first in range(count):  # not by cumulative sums: a huge loss at the beginning would cancel the later ones
        means[..., first] = values[..., first : first + max(window, first // 5)].mean(-1)
    return np.maximum.accumulate(means, -1)


def rounds_to(rounds: np.ndarray, best: np.ndarray, levels: Sequence[float] | np.ndarray) -> np.ndarray:
    """The rounds in which one curve, as `kept` gives it, reaches each level; by its trend where it does not.

    >>> at, log = np.arange(1, 101), np.log(np.arange(1, 101))
    >>> rounds_to(at, log, [math.log(50), math.log(200)]).round(2).tolist()
    [50.0, 200.0]
    """
    found = np.empty(len(levels))
    last = float(rounds[-1])
    late = rounds >= last / 2
    slope = 0.0
    if late.sum() >= 2:
        slope = float(np.polyfit(np.log(rounds[late]), best[late], 1)[0])
    for i, level in enumerate(levels):
        reached = best >= level
        if reached.any():
            found[i] = _between(rounds, best, int(np.argmax(reached)), level)
        else:
            needed = (level - best[-1]) / slope if slope > 0 else math.inf
            found[i] = last * min(MOST, math.exp(min(needed, 50.0)))
    return found


def _between(rounds: np.ndarray, best: np.ndarray, at: int, level: float) -> float:
    """The round in which a line between two evaluations crosses the level."""
    if at == 0 or best[at] <= best[at - 1]:
        return float(rounds[at])
    share = (level - best[at - 1]) / (best[at] - best[at - 1])
    return float(rounds[at - 1] + share * (rounds[at] - rounds[at - 1]))


def rank(
    curves: Mapping[Key, Curves], start: float, *, early: float = 0.0, target: float | None = None
) -> Ranking[Key]:
    """Settings from best to worst by their regret.

    curves: they end in the same round and are finite. start: the value of the initial model. early: rounds that are
    added before rounds are compared. target: the one level that counts, if it is known.

    >>> at = np.arange(1.0, 201.0)
    >>> rise = lambda rate: Curves(at, np.stack([1 - np.exp(-rate * at)] * 2))
    >>> found = rank({"slow": rise(0.03), "fast": rise(0.12), "middle": rise(0.06)}, start=0.0)
    >>> found.order, round(math.exp(found.regret["middle"]), 1)
    (['fast', 'middle', 'slow'], 2.5)
    """
    if not curves:
        raise ValueError("rank needs the curves of at least one setting")
    rounds = next(iter(curves.values())).rounds.astype(float)
    # a curve that is worse than the initial model has no trend yet: a fall from a huge loss predicts nothing
    mean = {one: np.maximum(curve.kept_on_average(), start) for one, curve in curves.items()}
    spread = _spread([np.maximum(curve.values[:, -curve.window :].mean(1), start) for curve in curves.values()])
    levels = _levels(list(mean.values()), start, spread) if target is None else np.array([target])
    times = {one: rounds_to(rounds, own, levels) for one, own in mean.items()}
    fewest = np.log(np.min(list(times.values()), 0) + early)
    regret = {one: float((np.log(own + early) - fewest).mean()) for one, own in times.items()}
    # settings with the same regret, such as those that have not improved on the initial model yet, by their last values
    ends = {one: float(curve.values[:, -curve.window :].mean(1).min()) for one, curve in curves.items()}
    order = sorted(curves, key=lambda one: (regret[one], -ends[one]))
    pooled = _pooled([_by_seed(curves[one], levels, start, early) for one in order[:BEST]])
    noise = {one: pooled / math.sqrt(len(curve.values)) for one, curve in curves.items()}
    return Ranking(order, regret, noise, times, levels, ends)


def _by_seed(curve: Curves, levels: np.ndarray, start: float, early: float) -> np.ndarray:
    """The mean over levels of log(rounds + early), for each seed alone."""
    best = np.maximum(curve.kept(), start)
    return np.array([np.log(rounds_to(curve.rounds, one, levels) + early).mean() for one in best])


def _levels(best: Sequence[np.ndarray], start: float, spread: float) -> np.ndarray:
    """Shares of the largest improvement, less `ERRORS` times the standard error ``spread``."""
    top = max(own[-1] for own in best)
    return start + np.array(SHARES) * (max(top - ERRORS * spread, min(top, start)) - start)


def _spread(ends: Sequence[np.ndarray]) -> float:
    """The standard error over seeds of the mean of the last values, for a typical good curve.

    It is the median over the best curves, divided by the median of the chi-squared distribution: one of them may have a
    seed that fails, and then says nothing about the noise of the others.
    """
    best = sorted(ends, key=lambda own: -own.mean())[:BEST]
    free = len(best[0]) - 1
    if free == 0:
        return 0.0
    variance = float(np.median([own.var(ddof=1) for own in best])) / (1 - 2 / (9 * free)) ** 3
    return math.sqrt(variance / len(best[0]))


def _pooled(groups: Sequence[np.ndarray]) -> float:
    """The standard deviation within groups; 0 if every group has one value."""
    squares = sum(float(((own - own.mean()) ** 2).sum()) for own in groups)
    free = sum(len(own) - 1 for own in groups)
    return math.sqrt(squares / free) if free else 0.0
