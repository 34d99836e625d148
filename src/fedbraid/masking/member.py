"""A client's side of one secure exchange: four steps, each done once.

announce: make two key pairs. deal: share the secrets among the clients. mask: add the masks to the upload. reveal: give
the server, for each client, the share of its seed (its upload counts) or the share of its key (it dropped out), never
both. Each step returns the member after it, and checks that it is the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedbraid.masking import keys as k
from fedbraid.masking import shamir
from fedbraid.masking.settings import Secure

__all__ = ["Member", "ProtocolError", "announce", "deal", "mask", "pair_stream", "reveal"]

Words = Sequence[np.ndarray]  # unsigned arrays: added modulo a power of two
NO_SHARE = b"\xff" * shamir.SHARE  # not an element of the field


class ProtocolError(ValueError):
    """A request that the protocol does not allow: the client refuses it."""


class Member(NamedTuple):
    """A client's secrets during one exchange. They stay on the client and are forgotten after it."""

    name: str  # of run and exchange: it is part of every derived key
    number: int
    step: str
    channel: bytes  # private key for the shares
    pair: bytes  # private key for the pairwise masks
    seed: bytes = b""  # of the client's own mask
    keys: Mapping[int, bytes] = {}
    shares: Mapping[int, bytes] = {}

    @property
    def public(self) -> bytes:
        """The two public keys, joined."""
        return k.public_of(self.channel) + k.public_of(self.pair)

    def to_json(self) -> str:
        plain = self._replace(
            channel=self.channel.hex(),  # pyright: ignore[reportArgumentType]
            pair=self.pair.hex(),  # pyright: ignore[reportArgumentType]
            seed=self.seed.hex(),  # pyright: ignore[reportArgumentType]
            keys={i: data.hex() for i, data in self.keys.items()},  # pyright: ignore[reportArgumentType]
            shares={i: data.hex() for i, data in self.shares.items()},  # pyright: ignore[reportArgumentType]
        )
        return json.dumps(plain._asdict())

    @staticmethod
    def from_json(text: str) -> Member:
        plain = json.loads(text)
        for field in ("channel", "pair", "seed"):
            plain[field] = bytes.fromhex(plain[field])
        for field in ("keys", "shares"):
            plain[field] = {int(i): bytes.fromhex(data) for i, data in plain[field].items()}
        return Member(**plain)


def announce(name: str, number: int) -> Member:
    """Start an exchange with fresh keys; ``member.public`` is sent."""
    return Member(name, number, "announced", k.new_private(), k.new_private())


def deal(secure: Secure, member: Member, keys: Mapping[int, bytes]) -> tuple[Member, dict[int, bytes], bytes]:
    """Share this client's key and a new seed among the clients of ``keys``.

    Returns the member, a sealed share for every other client, and a commitment to the seed.
    """
    _check_step(member, "announced")
    _check_many(secure, len(keys), "sent keys")
    if keys.get(member.number) != member.public:
        raise ProtocolError("the list of keys does not have this client's own keys")
    halves = [data[i : i + k.KEY] for data in keys.values() for i in (0, k.KEY)]
    if any(len(data) != 2 * k.KEY for data in keys.values()) or len(set(halves)) < len(halves):
        raise ProtocolError("the list of keys has a key twice, or one of a wrong length")
    seed = k.new_private()
    points = [i + 1 for i in keys]
    of_key, of_seed = (
        shamir.split(int.from_bytes(secret, "big"), points, secure.threshold) for secret in (member.pair, seed)
    )
    shares = {i: shamir.to_bytes(of_key[i + 1]) + shamir.to_bytes(of_seed[i + 1]) for i in keys}
    sealed = {}
    for i in sorted(keys):
        if i != member.number:
            key = k.pair_key(member.channel, keys[i][: k.KEY], _share_purpose(member.name, member.number, i))
            sealed[i] = k.sealed(key, shares[i])
    own = {member.number: shares[member.number]}
    member = member._replace(step="dealt", seed=seed, keys=dict(keys), shares=own)
    return member, sealed, k.commitment(seed)


def mask(
    secure: Secure, member: Member, received: Mapping[int, bytes], words: Words
) -> tuple[Member, list[np.ndarray]]:
    """The upload with the client's own mask and one mask for each client of ``received``, and the member after it."""
    _check_step(member, "dealt")
    _check_many(secure, len(received) + 1, "dealt shares")
    if member.number in received or not set(received) <= set(member.keys):
        raise ProtocolError("the list of shares has clients that sent no keys")
    shares = dict(member.shares)
    for i, box in received.items():
        key = k.pair_key(member.channel, member.keys[i][: k.KEY], _share_purpose(member.name, i, member.number))
        text = k.opened(key, box)
        # without a valid share this client cannot help to restore i's secrets; the masks are agreed all the same
        shares[i] = text if text is not None and len(text) == 2 * shamir.SHARE else 2 * NO_SHARE
    total = [a + b for a, b in zip(words, k.stream(member.seed, words), strict=True)]
    for i in received:
        pairwise = pair_stream(member.name, member.number, i, member.pair, member.keys[i][k.KEY :], words)
        total = [a + b for a, b in zip(total, pairwise, strict=True)]
    return member._replace(step="masked", shares=shares), total


def pair_stream(name: str, number: int, other: int, private: bytes, public: bytes, words: Words) -> list[np.ndarray]:
    """The mask that client ``number`` adds for client ``other``; the other one adds its negative."""
    low, high = sorted((number, other))
    found = k.stream(k.pair_key(private, public, f"fedbraid mask|{name}|{low}|{high}"), words)
    return found if number < other else [np.zeros_like(one) - one for one in found]


def reveal(secure: Secure, member: Member, survivors: Sequence[int]) -> dict[int, bytes]:
    """One share of each client: of its seed if its upload counts, else of its key. Forget the member afterwards."""
    _check_step(member, "masked")
    counted = set(survivors)
    _check_many(secure, len(counted), "sent masked uploads")
    if member.number not in counted or not counted <= set(member.shares) or len(counted) < len(survivors):
        raise ProtocolError("the list of uploads does not have this client, or it has clients that dealt no shares")
    half = shamir.SHARE
    return {i: share[half:] if i in counted else share[:half] for i, share in sorted(member.shares.items())}


def _share_purpose(name: str, sender: int, receiver: int) -> str:
    return f"fedbraid share|{name}|{sender}|{receiver}"


def _check_step(member: Member, wanted: str) -> None:
    if member.step != wanted:
        raise ProtocolError(f"this exchange is at the step {member.step!r}, the request is for {wanted!r}")


def _check_many(secure: Secure, many: int, what: str) -> None:
    if not secure.threshold <= many <= secure.clients:
        raise ProtocolError(
            f"{many} clients {what}; from {secure.threshold} to {secure.clients} must, by this site's own settings"
        )
