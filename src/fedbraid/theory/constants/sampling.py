"""Clients as this package reads them, a random sample of them, and estimators over the sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fedbraid.theory.constants.table import Estimate

__all__ = ["Clients", "Sample", "draw", "padded"]

MASK = "mask"  # the field of a batch that is 1 for real rows and 0 for padding


class Clients(Protocol):
    """Examples grouped by client; `fedbraid.Split` is one. It may have ``preprocess(batch, key, train) -> batch``."""

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        ...

    @property
    def sizes(self) -> np.ndarray:
        """Every client's number of examples."""
        ...

    def client(self, i: int) -> Mapping[str, np.ndarray]:
        """Client ``i``'s own examples, by field."""
        ...

    def name_of(self, i: int) -> str:
        """Client ``i`` in words, for error messages."""
        ...

    def check(self) -> None:
        """Refuse data without examples, with empty clients or with values that are not finite."""
        ...


class Sample(NamedTuple):
    """Sampled clients, and estimators of population values from them."""

    ids: np.ndarray
    weights: np.ndarray  # of the sampled clients, summing to 1
    population: int
    concentration: float  # sum of squared weights over the whole population

    def some(self, count: int, rng: np.random.Generator) -> Sample:
        """A smaller sample: ``count`` of these clients."""
        if count >= len(self.ids):
            return self
        return self.part(np.sort(rng.choice(len(self.ids), count, replace=False)))

    def part(self, at: np.ndarray) -> Sample:
        """The clients at the given positions of the sample."""
        return self._replace(ids=self.ids[at], weights=self.weights[at] / self.weights[at].sum())

    @property
    def unseen(self) -> float:
        """Finite population correction: 0 when all clients were sampled."""
        return 1.0 - len(self.ids) / self.population

    def mean(self, values: np.ndarray) -> Estimate:
        """The weighted mean over clients and its standard error (ratio estimator, linearised)."""
        m, centre = len(self.ids), float(self.weights @ values)
        if m < 2:
            return Estimate(centre, math.nan if self.unseen > 0 else 0.0)
        spread = m / (m - 1) * float(np.sum((self.weights * (values - centre)) ** 2))
        return Estimate(centre, math.sqrt(self.unseen * spread))

    def largest(self, values: np.ndarray, rng: np.random.Generator) -> Estimate:
        """The maximum over the sample. Its error is a bootstrap estimate, which uses only the sampled values."""
        if self.unseen == 0 or len(values) < 2:
            return Estimate(float(np.max(values)))
        draws = rng.choice(values, (200, len(values))).max(1)
        return Estimate(float(np.max(values)), float(draws.std()) * math.sqrt(self.unseen))


def draw(data: Clients, clients: int, weighting: str, rng: np.random.Generator) -> Sample:
    """Sample clients without replacement; all of them if there are fewer."""
    count = min(clients, data.num_clients)
    ids = np.sort(rng.choice(data.num_clients, count, replace=False))
    w = data.sizes.astype(float) if weighting == "examples" else np.ones(data.num_clients)
    return Sample(ids, w[ids] / w[ids].sum(), data.num_clients, float(np.sum((w / w.sum()) ** 2)))


def padded(client: Mapping[str, np.ndarray], picked: Sequence[np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Batches of ``size`` rows ``[k, size, ...]``; padding repeats row 0 and is masked out.

    A batch without rows keeps one row in its mask, because a mean over no rows is NaN. Its caller gives it weight 0.
    """
    index = np.zeros((len(picked), size), np.int64)
    mask = np.zeros((len(picked), size), np.float32)
    for k, rows in enumerate(picked):
        index[k, : len(rows)], mask[k, : max(len(rows), 1)] = rows, 1.0
    batch = {name: np.asarray(a)[index] for name, a in client.items()}
    return {**batch, MASK: mask}
