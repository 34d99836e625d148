"""The server's side: from masked uploads and revealed shares to their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedbraid.masking import keys as k
from fedbraid.masking import shamir
from fedbraid.masking.member import Words, pair_stream
from fedbraid.masking.settings import Secure

__all__ = ["Dealt", "UnmaskError", "unmask"]


class UnmaskError(ValueError):
    """The sum cannot be unmasked: there are too few shares, or wrong ones.

    client: the one whose secrets cannot be restored; None if too few clients took part.
    """

    def __init__(self, reason: str, client: int | None = None) -> None:
        super().__init__(reason)
        self.client = client


class Dealt(NamedTuple):
    """What the server knows of a client that dealt its shares."""

    public: bytes  # two public keys, joined
    commitment: bytes  # to the seed of its own mask


def unmask(
    secure: Secure,
    name: str,
    dealt: Mapping[int, Dealt],
    masked: Mapping[int, Words],
    revealed: Mapping[int, Mapping[int, bytes]],
) -> list[np.ndarray]:
    """The sum of the uploads of ``masked``, without the masks.

    dealt: the clients that dealt shares; those without a masked upload dropped out. revealed: by revealing client, the
    share of each client of ``dealt``.
    """
    if min(len(masked), len(revealed)) < secure.threshold:
        raise UnmaskError(
            f"{len(masked)} clients sent masked uploads and {len(revealed)} revealed shares; at least "
            f"{secure.threshold} must do both"
        )
    total = [np.sum(parts, axis=0, dtype=parts[0].dtype) for parts in zip(*masked.values(), strict=True)]
    for i, client in dealt.items():
        shares = {}
        for holder, given in revealed.items():
            if (share := shamir.from_bytes(given[i])) is not None:
                shares[holder + 1] = share
        if i in masked:
            seed = _recover(secure, shares, i, "seed", lambda data, c=client: k.commitment(data) == c.commitment)
            masks = [k.stream(seed, total)]
        else:
            pair = _recover(secure, shares, i, "key", lambda data, c=client: k.public_of(data) == c.public[k.KEY :])
            # what the others added for i: the negative of what i would have added for them
            masks = [
                [np.zeros_like(one) - one for one in pair_stream(name, i, j, pair, dealt[j].public[k.KEY :], total)]
                for j in masked
            ]
        for one in masks:
            total = [a - b for a, b in zip(total, one, strict=True)]
    return total


def _recover(secure: Secure, shares: Mapping[int, int], client: int, what: str, right) -> bytes:
    def check(secret: int) -> bool:
        return secret < 1 << 8 * k.KEY and right(secret.to_bytes(k.KEY, "big"))

    found = shamir.recover(shares, secure.threshold, check)
    if found is None:
        raise UnmaskError(
            f"the {what} of client {client} cannot be restored from {len(shares)} shares: fewer than "
            f"{secure.threshold} of them are right",
            client,
        )
    return found.to_bytes(k.KEY, "big")
