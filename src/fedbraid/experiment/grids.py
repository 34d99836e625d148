"""Named grids of sweeps: those of a paper, filled in for the algorithm of a configuration.

``mime-light`` and ``mime-heavy`` are the two searches of Karimireddy et al. (Mime), Appendix C.4. Both fix the momentum
0.9, Adam's 0.9 and 0.99, and Adagrad's initial value 0.1. The light one searches the client rate, with server rate 1
and epsilon 1e-7. The heavy one searches client and server rates, and epsilon for adaptive methods. The paper counts 567
= 9 * 9 * 7 points, but lists eight values of epsilon; the grid here has all eight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fedbraid.experiment.assembly import find_parts
from fedbraid.experiment.config import Config, ConfigError, unknown
from fedbraid.names import options_of
from fedbraid.notices import notice

__all__ = ["GRIDS", "Grid", "grid"]

CLIENT_RATES = tuple(10.0 ** (-k / 2) for k in range(9))  # 1 to 1e-4
SERVER_RATES = tuple(10.0 ** (1 - k / 2) for k in range(9))  # 10 to 1e-3
EPSILONS = tuple(10.0**-k for k in range(8))  # 1 to 1e-7
GRIDS = ("mime-light", "mime-heavy")


class Grid(NamedTuple):
    """Values to search over, by key of the configuration, and options of the algorithm that are fixed."""

    over: dict[str, list[float]]
    fixed: dict[str, float]


def grid(name: str, config: Config) -> Grid:
    """A named grid for the algorithm of a configuration. Options that the configuration sets are not fixed again.

    >>> from fedbraid.experiment.config import parse
    >>> found = grid("mime-heavy", parse({"algorithm": {"name": "mime", "base": "adam"}}))
    >>> {key: len(values) for key, values in found.over.items()}
    {'algorithm.client_lr': 9, 'algorithm.server_lr': 9, 'algorithm.eps': 8}
    >>> found.fixed
    {'b1': 0.9, 'b2': 0.99}
    """
    if name not in GRIDS:
        raise ConfigError(unknown("grid", name, GRIDS))
    declared = options_of(find_parts(config)["algorithm"].thing)
    if "client_lr" not in declared or "server_lr" not in declared:
        raise ConfigError(f"grid {name} searches client_lr and server_lr, which {config.algorithm.name} does not have")
    base, epsilon = _base(config, declared)
    fixed = {"momentum": _momentum(declared), "adam": {"b1": 0.9, "b2": 0.99}, "adagrad": {"initial": 0.1}}.get(
        base, {}
    )
    if base == "adagrad" and "initial" not in declared:
        notice(f"{config.algorithm.name} starts Adagrad's sum at tau^2; the paper's grids start it at 0.1")
        fixed = {}
    over = {"algorithm.client_lr": list(CLIENT_RATES)}
    if name == "mime-heavy":
        over["algorithm.server_lr"] = list(SERVER_RATES)
        if epsilon is not None:
            over[f"algorithm.{epsilon}"] = list(EPSILONS)
    else:
        fixed = {**fixed, "server_lr": 1.0, **({epsilon: 1e-7} if epsilon is not None else {})}
    return Grid(over, {key: value for key, value in fixed.items() if key not in config.algorithm.options})


def _momentum(declared: dict[str, Any]) -> dict[str, float]:
    return {"beta": 0.9} if "beta" in declared else {"momentum": 0.9}


def _base(config: Config, declared: dict[str, Any]) -> tuple[str, str | None]:
    """The optimizer whose options are fixed, and the option that is its epsilon, if it has one."""
    name = config.algorithm.name
    if "base" in declared:  # mime, mimelite, locmime
        base = config.algorithm.options.get("base", declared["base"])
        return base, "eps" if base in ("adam", "adagrad") else None
    known = {"fedavgm": "momentum", "fedadam": "adam", "fedyogi": "adam", "fedadagrad": "adagrad"}
    return known.get(name, "sgd"), "tau" if name in ("fedadam", "fedyogi", "fedadagrad") else None
