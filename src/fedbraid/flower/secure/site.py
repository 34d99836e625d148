"""The client's side of secure aggregation: it answers four messages, and refuses what the protocol does not allow.

Its secrets are kept in the node's context between the messages: in the memory of the SuperNode's process, not on disk.
A node that restarts in the middle of an exchange has lost them, and counts as one that dropped out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from fedbraid.core import Algorithm, Exchange, Report
from fedbraid.flower import wire
from fedbraid.flower.pack import records
from fedbraid.flower.secure.messages import DEAL, KEYS, OPEN, RECORD, Call, Done, check_sums, counted, read_tree
from fedbraid.flower.secure.once import claim
from fedbraid.flower.wire import Order, content, read_plain
from fedbraid.masking import Secure, sizes
from fedbraid.masking.fixed_point import RangeError, encode, encode_tree
from fedbraid.masking.member import Member, ProtocolError, announce, deal, mask, reveal

__all__ = ["SecureSite"]

PyTree = Any
Handler = Callable[[Message, Context], Message]


def _lifted(exchange: Exchange, up: PyTree, weight: Any) -> tuple[Any, PyTree]:
    """Whether the upload may be sent, and what the server adds up. The server cannot check it: the client does."""
    weight = jnp.asarray(weight).astype(jnp.result_type(float))
    return exchange.admit(up) & jnp.isfinite(weight) & (weight >= 0), exchange.reducer.lift(up, weight)


class SecureSite:
    """A site's handlers. The settings are the site's own: a server cannot lower the threshold or ask without masks."""

    def __init__(self, secure: Secure, alg: Algorithm) -> None:
        check_sums(alg)
        self.secure = secure
        self.lifts: list[Callable[..., tuple[Any, PyTree]]] = [
            jax.jit(partial(_lifted, exchange)) for exchange in alg.exchanges
        ]

    def actions(self) -> dict[str, Handler]:
        return {KEYS: self.keys, DEAL: self.deal, OPEN: self.open}

    def keys(self, message: Message, context: Context) -> Message:
        """Make new keys. The secrets of an earlier exchange are forgotten."""
        call = read_plain(message, Call)
        member = announce(f"{call.run}/{call.tag}", call.client)
        _store(context, call.run, member)
        return _done(message, call.tag, {"keys": _array(member.public)})

    def deal(self, message: Message, context: Context) -> Message:
        """Share the secrets of this exchange among the clients."""
        call = read_plain(message, Call)
        member = _load(context, call.run, call.tag, call.client)
        arrays = wire.arrays_in(message)
        found = read_tree(sizes.deal_down(counted(arrays)), arrays)
        keys = dict(zip(_clients(found), map(_bytes, found["keys"]), strict=True))
        member, boxes, promise = deal(self.secure, member, keys)
        claim(context, member, "deal")
        _store(context, call.run, member)
        shares = np.stack([_array(boxes[i]) for i in sorted(boxes)])
        return _done(message, call.tag, {"commitment": _array(promise), "shares": shares})

    def check(self, message: Message, context: Context, order: Order) -> tuple[Member, dict[int, bytes]]:
        """Before the client's work: its secrets, and the shares that the others dealt it."""
        record = message.content.array_records.get(RECORD)
        if record is None:
            raise ProtocolError("this site uses secure aggregation and sends no upload without masks")
        member = _load(context, order.run, order.tag, order.client)
        found = read_tree(sizes.mask_down(counted(record) + 1), record)
        return member, dict(zip(_clients(found), map(_bytes, found["shares"]), strict=True))

    def answer(
        self, message: Message, context: Context, order: Order, held: tuple[Member, dict[int, bytes]], report: Report
    ) -> Message:
        """The masked upload."""
        member, received = held
        words = self.words(order.exchange, report)
        member, (body, head) = mask(self.secure, member, received, words)
        claim(context, member, "mask")
        _store(context, order.run, member)
        return _done(message, order.tag, {"body": body, "head": head})

    def words(self, exchange: int, report: Report) -> list[np.ndarray]:
        """The summand as integers: the lifted upload; and its weight and weighted metrics."""
        admitted, lifted = self.lifts[exchange](report.up, report.weight)
        weight, code = float(report.weight), self.secure.weights
        if not admitted:
            raise ValueError("this client's upload is not finite, or not admitted: it sends none")
        try:
            head = [encode(code, weight)]
            body = encode_tree(self.secure.codec, lifted)
        except RangeError as error:
            raise ValueError(f"this client sends no upload: {error}; a larger bound in [secure] allows it") from None
        for name in sorted(report.metrics):
            try:
                head += [encode(code, float(report.metrics[name]) * weight), encode(code, weight)]
            except RangeError:  # the upload counts without this metric
                head += [encode(code, 0.0), encode(code, 0.0)]
        return [body, np.stack(head)]

    def open(self, message: Message, context: Context) -> Message:
        """Give one share of each client, and forget the secrets of this exchange."""
        call = read_plain(message, Call)
        member = _load(context, call.run, call.tag, call.client)
        arrays = wire.arrays_in(message)
        found = read_tree(sizes.open_down(counted(arrays)), arrays)
        shares = reveal(self.secure, member, _clients(found))
        claim(context, member, "open")
        del context.state[_key(call.run)]
        return _done(message, call.tag, {"shares": np.stack([_array(shares[i]) for i in sorted(shares)])})


def _clients(found: dict[str, np.ndarray]) -> list[int]:
    numbers = found["clients"].tolist()
    if len(set(numbers)) < len(numbers) or any(number < 0 for number in numbers):
        raise ProtocolError("the list of clients has one twice, or a negative number")
    return numbers


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _bytes(row: np.ndarray) -> bytes:
    return row.tobytes()


def _done(message: Message, tag: str, arrays: dict[str, Any]) -> Message:
    sent: ArrayRecord = records(arrays)
    return Message(content(Done(tag), sent), reply_to=message)


# --- secrets between messages


def _key(run: str) -> str:
    return f"fedbraid.secure/{run}"


def _store(context: Context, run: str, member: Member) -> None:
    context.state[_key(run)] = ConfigRecord({"member": member.to_json()})


def _load(context: Context, run: str, tag: str, client: int) -> Member:
    record = context.state.config_records.get(_key(run))
    member = None if record is None else Member.from_json(str(record["member"]))
    if member is None or (member.name, member.number) != (f"{run}/{tag}", client):
        raise ProtocolError("this node has no keys for this exchange: it restarted, or it has answered already")
    return member
