"""The pilot: which settings race, and what the race found.

1. The constants of the data give a centre for the client rates and leave out methods that cannot pay.
2. FedAvg runs over eight client rates to the first horizon. The other methods start around its best rate.
3. The race goes on to longer horizons with fewer settings (see `race`).
4. The settings that are close to the best at the end run with further seeds.
5. The best ones and the configured one run on to all configured rounds: a setting that is ahead in the race may settle
   at a worse level. The best of them is the advice; if several are as good, see `_choose`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedbraid.experiment.advice.candidates import (
    CLIENT_RATES,
    SERVER_RATE,
    Method,
    Setting,
    base_of,
    configured,
    neighbour,
    on_lattice,
    rate_names,
)
from fedbraid.experiment.advice.race import HOPEFUL, NEAR, Race
from fedbraid.experiment.advice.ranking import Ranking

__all__ = ["Found", "grid", "run_pilot"]

KEPT = (6, 3)  # settings that continue after the first horizon, and after the others, at least
FINALISTS = 3  # settings that run with further seeds at most
CLOSE = math.log(1.3)  # with at most this regret
CHECKED = 4  # settings that run to all configured rounds, the configured one included
TIE = math.log(1.1)  # settings that are this close are as good
CHANGE = math.log(1.25)  # the configured setting is changed only if another one saves this factor of rounds
SETTLES = 0.05  # of the best improvement; settings whose last values differ by less settle about as well
WORTH = 1.5  # more local work is advised only if it saves this factor of rounds


class Found(NamedTuple):
    """What a pilot found.

    ranking: the settings that ran to the last horizon. final: those of them that were compared last, after all
    configured rounds if the budget allows it. seeds: with which they were compared. best: the advised setting.
    configured: the setting of the configuration. tried: all settings. left_out: methods that did not run, with the
    reason.
    """

    best: Setting | None
    configured: Setting
    ranking: Ranking[Setting] | None
    final: Ranking[Setting] | None
    tried: list[Setting]
    left_out: Mapping[str, str] = {}
    seeds: Sequence[int] = ()


def grid(race: Race, method: Method, centre: float, least: float = 0.0) -> list[Setting]:
    """The settings from which the search of a method starts. centre: of the client rates, and ``least`` of them."""
    names = rate_names(base_of(race.config, method))
    values = []
    for name in names:
        if name in CLIENT_RATES:
            rates = [neighbour(centre, offset) for offset in method.offsets]
            values.append([(name, rate) for rate in rates if rate >= least])
        else:
            values.append([(SERVER_RATE, rate) for rate in method.server])
    return [Setting(method.name, 1, rates) for rates in itertools.product(*values)]


def run_pilot(race: Race, centre: float, *, least: float = 0.0, works: Sequence[int] = (1,)) -> Found:
    """Run the whole race.

    centre, least: of the client rates, see `screening`. works: multiples of the configured local work; those other than
    1 are tried with the best setting.
    """
    own, first = configured(race.config), race.horizons[0]
    scout, *others = sorted(race.methods, key=lambda method: method.name != "fedavg")
    field = race.first([own, *grid(race, scout, centre, least)], first)
    centre = _best_client_rate(race, field, first, on_lattice(centre))
    left_out: dict[str, str] = {}
    starts: list[Setting] = []
    for method in others:
        more = grid(race, method, centre, least)
        if race.affords([*starts, *more], first):
            starts += more
        else:
            left_out[method.name] = "the budget does not allow it"
    field = race.first([*field, *starts], first) if starts else field
    tried = list(field)
    for horizon, longer in itertools.pairwise(race.horizons):
        field = _affordable(race, _continuing(race, field, own, horizon), longer)
        if not field:
            break
        race.run(field, longer)
        field = race.move(field, tried, longer, 0.0)
        tried += [one for one in field if one not in tried]
    field = [one for one in tried if race.rows_of(one, race.reached)]
    ranking = race.ranking(field, race.reached)
    if ranking is None:
        return Found(None, own, None, None, tried, left_out)
    for work in works:
        if work != 1:
            field += _with_more_work(race, ranking, work, tried)
    ranking = race.ranking(field, race.reached)
    assert ranking is not None
    final, seeds = _with_more_seeds(race, ranking, own)
    if race.reached < race.whole:
        final, seeds = _to_the_end(race, final, seeds, ranking, own)
    best = None if final is None else _choose(final, ranking, own, race.start)
    return Found(best, own, ranking, final, tried, left_out, seeds)


def _continuing(race: Race, field: Sequence[Setting], own: Setting, horizon: int) -> list[Setting]:
    """The settings that go on to a longer horizon; the configured one always does, for comparison."""
    keep, regret = (KEPT[0], HOPEFUL) if horizon == race.horizons[0] else (KEPT[1], NEAR)
    chosen = race.narrow(field, horizon, keep, regret)
    return chosen + ([own] if chosen and own not in chosen and race.alive([own], horizon) else [])


def _affordable(race: Race, field: list[Setting], rounds: int) -> list[Setting]:
    """The best settings of a field (its first ones) that the budget allows to run; none if it allows not even one."""
    while len(field) > 1 and not race.affords(field, rounds):
        field = field[: len(field) * 2 // 3]
    return field if race.affords(field, rounds) else []


def _best_client_rate(race: Race, field: Sequence[Setting], rounds: int, fallback: float) -> float:
    """The client rate of the best setting that has one."""
    found = race.ranking(field, rounds)
    rates = [] if found is None else [dict(one.rates) for one in found.order]
    return next((own[name] for own in rates for name in CLIENT_RATES if name in own), fallback)


def _with_more_work(race: Race, ranking: Ranking[Setting], work: int, tried: list[Setting]) -> list[Setting]:
    """The best setting with more local work, at its rates and at a smaller client rate; run to the last horizon."""
    best = ranking.order[0]
    more = [best._replace(work=work)]
    if best.rates:
        name = best.rates[0][0]
        lower = tuple((key, neighbour(value, -1) if key == name else value) for key, value in best.rates)
        more.append(best._replace(work=work, rates=lower))
    if not race.affords(more, race.reached):
        return []
    race.run(more, race.reached)
    tried += more
    return race.alive(more, race.reached)


def _with_more_seeds(race: Race, ranking: Ranking[Setting], own: Setting) -> tuple[Ranking[Setting], Sequence[int]]:
    """The settings that are close to the best, with all tuning seeds; those that diverge with one are left out.

    If the configured setting is close, it is one of them: it is kept unless another one is better. The second result
    are the seeds of the ranking.
    """
    order = ranking.order
    close = [one for one in order if ranking.regret[one] - ranking.regret[order[0]] <= CLOSE]
    some = [one for i, one in enumerate(close) if i < FINALISTS or one == own]
    last, seeds = race.reached, race.settings.seed_list
    if not race.affords(some, last, seeds):
        return ranking, race.seeds
    race.run(some, last, seeds)
    found = race.ranking(some, last, seeds)
    if found is not None:
        return found, seeds
    rest = [one for one in order if one not in some]  # all of them diverged with a further seed
    return race.ranking(rest, last) or ranking, race.seeds


def _to_the_end(
    race: Race, final: Ranking[Setting], seeds: Sequence[int], ranking: Ranking[Setting], own: Setting
) -> tuple[Ranking[Setting] | None, Sequence[int]]:
    """The best settings and the configured one after all configured rounds, with the first tuning seeds.

    ``final`` as it was if the budget does not allow it. Settings that diverge on the way are left out; if all do, the
    others of ``ranking`` are compared as far as they ran, and None says that there are no others.
    """
    last = race.reached
    field = [one for one in dict.fromkeys([final.order[0], own, *final.order, *ranking.order]) if one in ranking.regret]
    some = race.alive(field, last)[:CHECKED]
    if not race.affords(some, race.whole):
        return final, seeds
    race.run(some, race.whole)
    found = race.ranking(some, race.whole)
    if found is None:
        race.reached = last
        found = race.ranking([one for one in field if one not in some], last)
    return found, race.seeds


def _choose(final: Ranking[Setting], ranking: Ranking[Setting], own: Setting, start: float) -> Setting:
    """The best setting. If it settles clearly worse (with its worst seed) than another one that is as good, that one: a
    setting that overfits, has much noise or is close to divergence settles worse.

    The configured setting is kept if no other one saves a factor of `CHANGE` in rounds and it settles about as well.
    More local work must save a factor of `WORTH` in rounds, else the best with less is taken.
    """
    best = final.order[0]
    as_good = [one for one in final.order if one.work == best.work and final.regret[one] - final.regret[best] <= TIE]
    settled = max(final.ends[one] for one in as_good) - SETTLES * (max(final.levels) - start)
    safest = next(one for one in as_good if final.ends[one] >= settled)
    near = own in final.regret and own.work == best.work and final.regret[own] - final.regret[best] <= CHANGE
    if near and final.ends[own] >= settled:
        return own
    if best.work == 1:
        return safest
    for one in [*final.order, *ranking.order]:
        table = final if one in final.order else ranking
        if one.work == 1:
            return safest if table.regret[one] - table.regret[table.order[0]] >= math.log(WORTH) else one
    return safest
