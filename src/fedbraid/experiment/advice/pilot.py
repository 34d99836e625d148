"""The pilot: which settings race, and what the race found.

1. The constants of the data give a centre for the client rates and leave out methods that cannot pay.
2. FedAvg runs over nine client rates to the first horizon. The other methods start around its best rate.
3. The race goes on to longer horizons with fewer settings (see `race`).
4. The settings that are close to the best run with further seeds, and the best of all seeds is the advice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

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
from fedbraid.experiment.advice.race import FINALISTS, HOPEFUL, MORE_SEEDS, NEAR, Race, best_of_each
from fedbraid.experiment.advice.ranking import Ranking

__all__ = ["Found", "grid", "run_pilot"]

SECOND = 14  # settings that continue to the second horizon
CLOSE = 4  # settings that run with further seeds at most
WORTH = 1.5  # more local work is advised only if it saves this factor of rounds


class Found(NamedTuple):
    """What a pilot found.

    ranking: the settings that ran to the last horizon. final: those of them that ran with further seeds, with all
    seeds. best: the advised setting. configured: the setting of the configuration. tried: all settings.
    """

    best: Setting | None
    configured: Setting
    ranking: Ranking | None
    final: Ranking | None
    tried: list[Setting]


def grid(race: Race, method: Method, centre: float, work: int = 1) -> list[Setting]:
    """The settings from which the search of a method starts; ``centre``: a client rate."""
    names = rate_names(base_of(race.config, method))
    values = []
    for name in names:
        if name in CLIENT_RATES:
            values.append([(name, neighbour(centre, offset)) for offset in method.offsets])
        else:
            values.append([(SERVER_RATE, rate) for rate in method.server])
    return [Setting(method.name, work, rates) for rates in itertools.product(*values)]


def run_pilot(race: Race, centre: float, *, works: Sequence[int] = (1,)) -> Found:
    """Run the whole race. ``works``: multiples of the configured local work that are tried for the best method."""
    own = configured(race.config)
    first, last = race.horizons.rounds[0], race.horizons.last
    scout, *others = sorted(race.methods, key=lambda method: method.name != "fedavg")
    field = race.first([own, *grid(race, scout, centre)], first)
    centre = _best_client_rate(race, field, first, on_lattice(centre))
    starts = [one for method in others for one in grid(race, method, centre)]
    field = race.first([*field, *starts], first) if starts else field
    tried = list(field)
    for horizon, longer in itertools.pairwise(race.horizons.rounds):
        keep, regret = (SECOND, HOPEFUL) if longer != last else (FINALISTS, NEAR)
        field = race.narrow(field, horizon, keep, regret)
        field += [own] if own not in field and race.alive([own], horizon) else []
        race.run(field, longer)
        field = race.move(field, tried, longer, NEAR if longer != last else 0.0)
        tried += [one for one in field if one not in tried]
    ranking = race.ranking(field, last)
    if ranking is None:
        return Found(None, own, None, None, tried)
    for work in works:
        if work != 1:
            field += _with_more_work(race, ranking, work, tried)
    ranking = race.ranking(field, last)
    assert ranking is not None
    final = _with_more_seeds(race, ranking)
    return Found(_choose(final, ranking), own, ranking, final, tried)


def _best_client_rate(race: Race, field: Sequence[Setting], rounds: int, fallback: float) -> float:
    """The client rate of the best setting of the scout; of the configuration if it has no such rate."""
    found = race.ranking(field, rounds)
    best: Any = None if found is None else found.order[0]
    rates = {} if best is None else dict(best.rates)
    return next((rates[name] for name in CLIENT_RATES if name in rates), fallback)


def _with_more_work(race: Race, ranking: Ranking, work: int, tried: list[Setting]) -> list[Setting]:
    """The best setting with more local work, at its rates and at a smaller client rate; run to the last horizon."""
    best: Any = ranking.order[0]
    more = [best._replace(work=work)]
    if best.rates:
        name = best.rates[0][0]
        lower = tuple((key, neighbour(value, -1) if key == name else value) for key, value in best.rates)
        more.append(best._replace(work=work, rates=lower))
    race.run(more, race.horizons.last)
    tried += more
    return race.alive(more, race.horizons.last)


def _with_more_seeds(race: Race, ranking: Ranking) -> Ranking:
    """The best setting and those close to it, with all tuning seeds."""
    some: list[Any] = [ranking.order[0], *ranking.close_to_best()][:CLOSE]
    if len(some) == 1:
        return ranking
    last, seeds = race.horizons.last, race.settings.seed_list
    race.run(some, last, seeds[-MORE_SEEDS:])
    return race.ranking(some, last, seeds) or ranking


def _choose(final: Ranking, ranking: Ranking) -> Any:
    """The best setting. More local work must save a factor of `WORTH` in rounds, else the best with less is taken."""
    best: Any = final.order[0]
    if best.work == 1:
        return best
    for one in [*final.order, *ranking.order]:
        table = final if one in final.order else ranking
        if one.work == 1:  # type: ignore[attr-defined]
            return best if table.regret[one] - table.regret[table.order[0]] >= math.log(WORTH) else one
    return best
