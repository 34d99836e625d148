"""Published counts of the data sets, which an import compares with its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fedbraid.data.federated import FederatedData

__all__ = ["PUBLISHED", "Published", "differences"]


class Published(NamedTuple):
    """Counts from a paper or from the source's page; ``train_clients`` is None for sets without clients."""

    source: str
    train_clients: int | None
    train_examples: int
    test_examples: int
    classes: int


PUBLISHED: Mapping[str, Published] = {
    "digits": Published("UCI optical digits, test part", None, 1_797, 0, 10),
    "mnist": Published("LeCun et al. (1998)", None, 60_000, 10_000, 10),
    "fashion-mnist": Published("Xiao et al. (2017)", None, 60_000, 10_000, 10),
    "cifar10": Published("Krizhevsky (2009)", None, 50_000, 10_000, 10),
    "cifar100": Published("Charles & Konecny, Table 3", 500, 50_000, 10_000, 100),
    "cinic10": Published("Darlow et al. (2018)", None, 90_000, 90_000, 10),
    "emnist62": Published("Charles & Konecny, Table 3", 3_400, 671_585, 77_483, 62),
    "femnist": Published("Charles & Konecny, Table 3", 3_400, 671_585, 77_483, 62),
    "shakespeare": Published("Charles & Konecny, Table 3", 715, 16_068, 2_356, 90),
    "stackoverflow": Published("TFF, and Karimireddy et al., Table 3", 342_477, 135_818_730, 16_586_035, 10_004),
}


def differences(name: str, data: FederatedData, *, natural: bool = True) -> list[str]:
    """One line for each count that differs from the published one; empty if they agree or the set is unknown.

    Test examples are those of the test split and of clients that never train.
    """
    expected = PUBLISHED.get(name)
    if expected is None:
        return []
    test = sum(split.num_examples for split in (data.test, data.unseen) if split is not None)
    pairs = [
        ("train examples", data.train.num_examples, expected.train_examples),
        ("test examples", test, expected.test_examples),
    ]
    if natural and expected.train_clients is not None:
        pairs.insert(0, ("train clients", data.train.num_clients, expected.train_clients))
    return [
        f"{what}: {found:,} here, {wanted:,} published ({expected.source})"
        for what, found, wanted in pairs
        if found != wanted
    ]
