"""The settings of secure aggregation. All sites and the server must have the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbraid.core import check_choice, check_count, check_number
from fedbraid.masking.fixed_point import Codec

__all__ = ["Secure"]

WEIGHTS = 2.0**24  # least bound of weights and of weighted metrics; they always have 64 bits


@dataclass(frozen=True)
class Secure:
    """Settings of secure aggregation: the server learns only sums over at least ``threshold`` clients.

    clients [clients]: number of clients that are asked in a round (the cohort). The range of the sums is chosen for
        this number, so no more clients take part.
    threshold [clients]: number of clients that must stay until the end of an exchange; more than half of ``clients``.
        Default: more than two thirds.
    bits [bits]: size of a masked entry: 64 or 32. With 32, choose a small ``bound``.
    bound [number]: the largest absolute value that an entry of an upload times its weight may have. A client with a
        larger entry sends no upload.

    >>> secure = Secure(clients=5)
    >>> secure.threshold, secure.codec.unit < 1e-11, Secure(clients=5, bits=32, bound=8.0).codec.unit < 1e-7
    (4, True, True)
    """

    clients: int
    threshold: int = 0  # 0: the default
    bits: int = 64
    bound: float = 2.0**20

    def __post_init__(self) -> None:
        check_count("secure.clients", self.clients, low=2)
        if not self.threshold:
            object.__setattr__(self, "threshold", max(2, 2 * self.clients // 3 + 1))
        check_count("secure.threshold", self.threshold, low=2)
        if not self.clients / 2 < self.threshold <= self.clients:
            raise ValueError(
                f"secure.threshold must be more than half of the {self.clients} clients of a round and at most "
                f"{self.clients}, got {self.threshold}: with a half or less, a server could ask two halves of them for "
                "different secrets of the same client"
            )
        check_choice("secure.bits", self.bits, (32, 64))
        check_number("secure.bound", self.bound, low=0, open_low=True)
        _ = self.codec  # refuses settings that leave too few levels

    @property
    def codec(self) -> Codec:
        """The fixed-point code of the entries of uploads."""
        return Codec.of(self.bits, self.bound, self.clients)

    @property
    def weights(self) -> Codec:
        """The fixed-point code of weights and of metrics times weights."""
        return Codec.of(64, max(float(self.bound), WEIGHTS), self.clients)

    @property
    def name(self) -> str:
        """The settings in one word, for fingerprints."""
        return f"secure-{self.threshold}of{self.clients}-{self.bits}bit-{float(self.bound):g}"

    def describe(self) -> str:
        """One line for the user."""
        return (
            f"secure aggregation: at least {self.threshold} of {self.clients} clients; weighted entries up to "
            f"{float(self.bound):g} in units of {self.codec.unit:.2g}, {self.bits // 8} bytes each"
        )

    @staticmethod
    def from_table(table: Mapping[str, Any], cohort: int) -> Secure:
        """The settings in the section ``[secure]`` of a federation, for a cohort of this size.

        There ``threshold`` may also be a fraction of the cohort, rounded up.

        >>> Secure.from_table({"threshold": 0.6}, 7).threshold, Secure.from_table({"threshold": 4}, 7).threshold
        (5, 4)
        """
        known = {"threshold", "bits", "bound"}
        if unknown := sorted(set(table) - known):
            raise ValueError(f"[secure] has the unknown key {unknown[0]!r}; it may have {', '.join(sorted(known))}")
        options = dict(table)
        threshold = options.get("threshold")
        if isinstance(threshold, float):
            check_number("secure.threshold", threshold, low=0, high=1, open_low=True)
            options["threshold"] = math.ceil(threshold * cohort - 1e-9)
        elif threshold is not None:
            check_count("secure.threshold", threshold, low=2)
        if cohort < 2:
            raise ValueError(f"secure aggregation needs a cohort of at least 2 clients, got {cohort}")
        return Secure(cohort, **options)
