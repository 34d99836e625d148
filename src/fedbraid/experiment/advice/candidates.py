"""The methods that `advise` tries, each with the rates it starts from. This table is the only place that lists them.

Rates lie on one lattice, the powers of the square root of ten: 0.1, 0.316, 1, 3.16 and so on. A race starts with the
client rates around a centre that the constants of the data give, and with the server rates of this table. It then moves
along the lattice when the best rate is the smallest or the largest that was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedbraid.experiment.advice import averaging
from fedbraid.experiment.assembly import find_parts
from fedbraid.experiment.config import Config, ConfigError, parse
from fedbraid.names import options_of

__all__ = [
    "METHODS",
    "Method",
    "Setting",
    "base_of",
    "configured",
    "methods_of",
    "neighbour",
    "on_lattice",
    "program_of",
    "rate_names",
    "with_setting",
]

LATTICE = 2  # points per factor of ten
CLIENT_RATES = ("client_lr", "gamma", "lr")  # names of the rate of local steps; an algorithm has at most one of them
SERVER_RATE = "server_lr"
DEFAULT_RATE = 0.1
SHARED = ("batch_size", "epochs", "steps", "shuffle", "weighting", "client_opt", "client_opt_state")


LOCAL = ("batch_size", "epochs", "steps", "shuffle")  # those of them that the family of `averaging` takes as they are
RENAMED = {
    "fedprox": {"alpha": "alpha"},
    "fedavgm": {"momentum": "beta"},
    "fedacg": {"lam": "beta", "beta": "alpha"},
    "fedcm": {"alpha": "own"},
}
"""Options of members of the family, and the numbers that they are there."""


class Method(NamedTuple):
    """One algorithm, and where its search starts.

    options: options that differ from the algorithm's defaults. offsets: client rates, in lattice steps from the centre.
    server: server rates. against: the error of a round that the method reduces, "drift" or "sampling"; empty if it is
    for all cases. asked: it runs only if it is named, because another method of the table does the same better.
    """

    name: str
    options: Mapping[str, Any] = {}
    offsets: Sequence[int] = (-1, 0, 1)
    server: Sequence[float] = (1.0,)
    against: str = ""
    asked: bool = False
    about: str = ""


METHODS = (
    Method("fedauto_ahead", about="measures its rates, and shortens noisy server steps"),
    Method("fedacg", offsets=(-2, -1, 0), about="the server sends its model one momentum step ahead"),
    Method("fedcm", offsets=(0, 1), about="clients add the last round's mean step to their own"),
    # the server scales every coordinate, so the client rate may be far below that of FedAvg, which limits drift
    Method("fedadam", offsets=range(-2, 1), server=(0.03162, 0.1, 0.3162), about="the server scales every coordinate"),
    Method("scaffold", offsets=(-1, 0, 1), server=(1.0, 3.162), against="drift", about="control variates remove drift"),
    Method("fedavg", offsets=range(-2, 6), about="local SGD"),
    Method("fedavgm", server=(0.1, 0.3162), against="sampling", asked=True, about="server momentum; see fedacg"),
    Method("fedprox", options={"alpha": 0.1}, against="drift", asked=True, about="a proximal term limits drift"),
    Method("mimelite", asked=True, about="clients use the server's momentum; see fedcm"),
)


class Setting(NamedTuple):
    """One point of the search: a method, a multiple of the configured local work, and the rates of the method."""

    method: str
    work: int
    rates: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {value:.3g}" for name, value in self.rates)
        more = f", {self.work}x local work" if self.work != 1 else ""
        return f"{self.method} ({rates}{more})" if rates or more else self.method


def on_lattice(value: float) -> float:
    """The nearest rate of the lattice.

    >>> [on_lattice(x) for x in (0.1, 0.3, 0.0009)]
    [0.1, 0.3162, 0.001]
    """
    return float(f"{10 ** (round(LATTICE * math.log10(value)) / LATTICE):.4g}")


def neighbour(value: float, steps: int) -> float:
    """The rate ``steps`` further on the lattice; a rate between two of its points is first moved to the nearest.

    >>> neighbour(0.1, 1), neighbour(0.3162, -2), neighbour(1.0, 1)
    (0.3162, 0.03162, 3.162)
    """
    return on_lattice(on_lattice(value) * 10 ** (steps / LATTICE))


def methods_of(config: Config, only: Sequence[str] = ()) -> tuple[Method, ...]:
    """The methods to try: those of the table that need not be asked for, or ``only`` these, and the configured one."""
    known = {method.name: method for method in METHODS}
    usual = [method.name for method in METHODS if not method.asked]
    for name in only:
        if name not in known and name != config.algorithm.name:
            raise ConfigError(f"method {name!r} is not in the list of methods to try: {', '.join(known)}")
    own = config.algorithm.name
    chosen = {name: known[name] for name in (only or usual) if name in known}
    if own not in chosen:
        chosen[own] = known.get(own, Method(own, about="as configured"))
    return tuple(chosen.values())


def rate_names(config: Config) -> tuple[str, ...]:
    """The rates of a configuration's algorithm that are searched: of the clients, then of the server.

    An algorithm without a client rate tunes itself: it runs as it is configured.
    """
    takes = options_of(find_parts(config)["algorithm"].thing)
    client = next((name for name in CLIENT_RATES if name in takes), None)
    return () if client is None else tuple(name for name in (client, SERVER_RATE) if name in takes)


def base_of(config: Config, method: Method) -> Config:
    """The configuration with another algorithm. It keeps the options that say how clients go over their data."""
    own = config.algorithm
    if method.name == own.name:
        options = {**method.options, **own.options}
    else:
        named = parse({**config.model_dump(), "algorithm": {"name": method.name}})
        takes = options_of(find_parts(named)["algorithm"].thing)
        options = {key: value for key, value in own.options.items() if key in SHARED and key in takes}
        options |= method.options
    return parse({**config.model_dump(), "algorithm": {"name": method.name, **options}})


def configured(config: Config) -> Setting:
    """The setting of the configuration itself. A rate that changes over rounds counts with its full value."""
    takes = options_of(find_parts(config)["algorithm"].thing)
    rates = []
    for name in rate_names(config):
        value = config.algorithm.options.get(name, takes[name])
        value = value.get("value") if isinstance(value, Mapping) else value
        # the default rate of mimelite depends on its base: it is None here
        rates.append((name, float(value) if isinstance(value, int | float) else DEFAULT_RATE))
    return Setting(config.algorithm.name, 1, tuple(rates))


def more_work(config: Config, times: int) -> Config:
    """The configuration with a multiple of its local work: of its steps if it has them, else of its epochs."""
    if times == 1:
        return config
    own = config.algorithm.options
    key = "steps" if own.get("steps") is not None else "epochs"
    more = {**own, key: times * int(own.get(key) or 1)}
    return parse({**config.model_dump(), "algorithm": {"name": config.algorithm.name, **more}})


def with_setting(config: Config, methods: Sequence[Method], setting: Setting) -> Config:
    """The whole configuration of a setting."""
    method = next(one for one in methods if one.name == setting.method)
    base = more_work(base_of(config, method), setting.work)
    options = {**base.algorithm.options, **dict(setting.rates)}
    return parse({**base.model_dump(), "algorithm": {"name": method.name, **options}})


def program_of(
    config: Config, methods: Sequence[Method], setting: Setting, *, stateful: bool = True
) -> tuple[str, Config, dict[str, Any]]:
    """Which program runs a setting: its name, its configuration, and the point that the setting is in it.

    The members of `averaging` share one program. A member with options that the family does not have, such as another
    kind of momentum, has a program of its own; so has SCAFFOLD if the program is not ``stateful``.
    """
    whole = with_setting(config, methods, setting)
    options, rates = whole.algorithm.options, dict(setting.rates)
    rest = {key: value for key, value in options.items() if key not in rates}
    numbers = _numbers(setting.method, rest) if stateful or setting.method != "scaffold" else {}
    if not numbers or set(rest) - set(LOCAL):
        point = {f"algorithm.{name}": value for name, value in rates.items()} or {"algorithm.name": setting.method}
        return setting.method, whole, point
    shared = parse(
        {
            **whole.model_dump(),
            "algorithm": {"name": averaging.NAME, **rest, **rates, **numbers, "stateful": stateful},
        }
    )
    return "averaging", shared, {f"algorithm.{name}": value for name, value in (rates | numbers).items()}


def _numbers(method: str, rest: dict[str, Any]) -> dict[str, float]:
    """The numbers of a member of the family; empty if it is none. Takes the options that they stand for from ``rest``.

    >>> given = {"momentum": 0.5, "epochs": 2}
    >>> _numbers("fedavgm", given)["beta"], given
    (0.5, {'epochs': 2})
    """
    numbers = dict(averaging.MEMBERS.get(method, {}))
    if not numbers:
        return {}
    for option, name in RENAMED.get(method, {}).items():
        numbers[name] = rest.pop(option, numbers[name])
    if method == "fedavgm" and rest.get("kind", "heavy-ball") in ("heavy-ball", "average"):
        numbers["fresh"] = 1.0 - numbers["beta"] if rest.pop("kind", "") == "average" else 1.0
    if method != "fedcm" and rest.get("weighting") in ("examples", "uniform"):
        numbers["uniform"] = float(rest.pop("weighting") == "uniform")
    return numbers
