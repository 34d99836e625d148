"""Data sets by name, as configs write them: ``load("digits", partition="dirichlet", alpha=0.3, clients=50)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedbraid.data import digits
from fedbraid.data.federated import FederatedData
from fedbraid.data.partition import PARTITIONERS
from fedbraid.data.plain import from_arrays, partition_options

__all__ = ["CATALOG", "Entry", "load"]


class Entry(NamedTuple):
    """A data set that a config can name: its loader, its default options, and what it is."""

    load: Callable[..., FederatedData]
    defaults: Mapping[str, Any]
    about: str


def load(name: str, **options: Any) -> FederatedData:
    """A data set by its catalog name; options override the entry's defaults.

    >>> data = load("digits", partition="dirichlet", alpha=0.3, clients=50, test_fraction=0.2, seed=0)
    >>> data.train.num_clients, data.train.num_examples + data.test.num_examples
    (50, 1797)
    """
    if name not in CATALOG:
        raise ValueError(f"unknown data set {name!r}; known: {', '.join(CATALOG)}")
    entry = CATALOG[name]
    defaults = dict(entry.defaults)
    if options.get("partition", defaults.get("partition")) != defaults.get("partition"):
        # another partition than the default: the default's own options (alpha, clients) would only be refused
        known = partition_options(options["partition"])
        every = {o for p in PARTITIONERS for o in partition_options(p)} - {"seed"}
        defaults = {k: v for k, v in defaults.items() if k not in every or k in known}
    return entry.load(**{**defaults, **options})


def _digits(**options: Any) -> FederatedData:
    return from_arrays(digits.arrays(), name="digits", info=digits.INFO, preprocess=digits.PREPROCESS, **options)


CATALOG: Mapping[str, Entry] = {
    "digits": Entry(
        _digits,
        {"partition": "dirichlet", "alpha": 0.3, "clients": 50, "test_fraction": 0.2, "seed": 0},
        "1,797 digits of 8x8 pixels, inside the package",
    ),
}
