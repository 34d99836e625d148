"""Rates that change: over a client's local steps, or over the rounds of any algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Logged, Report, check_count, check_number, logged
from fedbraid.local import ClientData, Fold, LocalWork

__all__ = ["SCHEDULES", "over_rounds", "schedule"]

PyTree = Any
Schedule = Callable[[Any], Any]  # (count of steps or rounds, from 0) -> factor of the base value


def _linear(t: Any, end: Any) -> Any:
    return 1 + (end - 1) * t


def _cosine(t: Any, end: Any) -> Any:
    return end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * t))


def _exponential(t: Any, end: Any) -> Any:
    return jnp.exp(t * jnp.log(end))


def _constant(t: Any, end: Any) -> Any:
    return jnp.ones_like(t)


SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
}
"""Shapes of schedules: from 1 at the start to ``end`` after ``over`` steps, and ``end`` from then on."""


def schedule(spec: Mapping[str, Any] | Schedule | None, what: str = "schedule") -> Schedule | None:
    """A schedule from a table: its factor at every count. None stays None; a function is used as it is.

    The table has a ``name`` in `SCHEDULES`, ``over`` (steps or rounds until the end), ``end`` (factor at the end,
    default 0; 0.01 for "exponential") and ``warmup`` (steps at the start that rise linearly, default 0).

    >>> rate = schedule({"name": "cosine", "over": 100, "warmup": 10})
    >>> [round(float(rate(t)), 3) for t in (0, 9, 10, 55, 100, 500)]
    [0.1, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if spec is None or callable(spec):
        return spec
    table = dict(spec)
    name = table.pop("name", None)
    if name not in SCHEDULES:
        raise ValueError(f"{what}.name must be one of {', '.join(SCHEDULES)}, got {name!r}")
    end = table.pop("end", 0.01 if name == "exponential" else 0.0)
    over, warmup = table.pop("over", None), table.pop("warmup", 0)
    if table:
        raise ValueError(f"{what} takes name, over, end and warmup, got {', '.join(table)}")
    check_number(f"{what}.end", end, low=0, open_low=name == "exponential")
    check_count(f"{what}.warmup", warmup, low=0)
    if name != "constant":
        check_count(f"{what}.over", over, low=warmup + 1)
    length = 1 if name == "constant" else over - warmup

    def factor(count: Any) -> Any:
        count = jnp.asarray(count).astype(jnp.result_type(float))
        falling = SCHEDULES[name](jnp.clip((count - warmup) / length, 0, 1), end)
        return jnp.where(count < warmup, (count + 1) / max(warmup, 1), falling)

    return factor


# --- over rounds -----------------------------------------------------------------------------------------------------


class Scheduled(NamedTuple):
    """The server of an algorithm whose rates change over rounds, and the number of completed rounds."""

    server: PyTree
    round: Any


def over_rounds(make: Callable[..., Algorithm], values: Mapping[str, Callable[[Any], Any]]) -> Algorithm:
    """The algorithm ``make(**rates)`` whose rates depend on the round; the server sends the round along (4 bytes).

    values: for each rate, a function ``round -> value``, with rounds counted from 0. Any optax schedule is one.

    >>> import fedbraid as fb, jax.numpy as jnp, numpy as np, optax
    >>> loss = lambda params, batch, key: 0.5 * jnp.mean((params - batch["x"]) ** 2)
    >>> falling = optax.exponential_decay(0.5, 1, 0.998)
    >>> alg = over_rounds(lambda **rates: fb.fedavg(loss, batch_size=None, **rates), {"client_lr": falling})
    >>> data = fb.Split.from_clients([{"x": np.ones((4, 1), np.float32)}])
    >>> round(float(fb.simulate(alg, jnp.zeros(1), data, rounds=2).params[0]), 4)
    0.7495
    """

    def at(round_: Any) -> Algorithm:
        return make(**{name: value(round_) for name, value in values.items()})

    first = at(jnp.int32(0))  # reducers, batches and names do not depend on rates
    last = len(first.exchanges) - 1

    def exchange(i: int, plain: Exchange) -> Exchange:
        def receive(server: Scheduled, aggregate: Aggregate, key: Any) -> Logged:
            inner = logged(at(server.round).exchanges[i].receive(server.server, aggregate, key))
            return Logged(Scheduled(inner.server, server.round + (i == last)), inner.logs)

        return plain._replace(
            send=lambda server: _tagged(at(server.round).exchanges[i].send(server.server), server.round),
            client=_client(lambda round_: at(round_).exchanges[i].client, plain.client),
            receive=receive,
        )

    def personal(server: Scheduled, state: Any) -> Any:
        of_round = at(server.round).personal
        assert of_round is not None
        return of_round(server.server, state)

    return Algorithm(
        init=lambda params: Scheduled(first.init(params), jnp.int32(0)),
        init_client=first.init_client,
        exchanges=tuple(exchange(i, plain) for i, plain in enumerate(first.exchanges)),
        params=lambda server: first.params(server.server),
        personal=first.personal and personal,
    )


def _tagged(down: Down, round_: Any) -> Down:
    return Down(down.params, (down.aux, round_))


def _untagged(down: Down) -> tuple[Down, Any]:
    inner, round_ = down.aux
    return Down(down.params, inner), round_


def _client(at: Callable[[Any], Callable], plain: Callable) -> Callable:
    """The client whose rates are those of the round in its message; local steps stay local steps."""
    if not isinstance(plain, LocalWork):

        def run(down: Down, state: PyTree, data: ClientData, key: Any) -> Report:
            inner, round_ = _untagged(down)
            return at(round_)(inner, state, data, key)

        return run

    def work(down: Down) -> tuple[Down, LocalWork]:
        inner, round_ = _untagged(down)
        found = at(round_)
        assert isinstance(found, LocalWork)
        return inner, found

    def fold(j: int, one: Fold) -> Fold:
        def start(down: Down, state: PyTree, key: Any) -> PyTree:
            inner, found = work(down)
            return found.folds[j].start(inner, state, key)

        def step(carry: PyTree, batch: dict, key: Any, down: Down) -> PyTree:
            inner, found = work(down)
            return found.folds[j].step(carry, batch, key, inner)

        def finish(carry: PyTree, down: Down, state: PyTree, n: Any) -> Any:
            inner, found = work(down)
            return found.folds[j].finish(carry, inner, state, n)

        return Fold(start, step, finish, one.batches)

    def combine(results: tuple, down: Down, state: PyTree, key: Any) -> Report:
        inner, found = work(down)
        return found.combine(results, inner, state, key)

    return LocalWork(tuple(fold(j, one) for j, one in enumerate(plain.folds)), combine)
