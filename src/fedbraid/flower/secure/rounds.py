"""The server's side of secure aggregation: the four messages of an exchange, and the sum that they give."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message

from fedbraid.core import Algorithm, MessageShapes
from fedbraid.costs import nbytes
from fedbraid.flower import wire
from fedbraid.flower.aggregate import Summed
from fedbraid.flower.asking import POLL, Asked, Requests
from fedbraid.flower.mailbox import Outgoing
from fedbraid.flower.pack import MessageError, layout_of, records
from fedbraid.flower.policy import TooFewError
from fedbraid.flower.secure.messages import DEAL, KEYS, OPEN, RECORD, Call, Done, check_sums, read_tree
from fedbraid.flower.wire import content, read_plain
from fedbraid.masking import Secure, sizes
from fedbraid.masking.fixed_point import check_leaves, decode, decode_tree
from fedbraid.masking.keys import KEY, check_public
from fedbraid.masking.sizes import Summand, summand_of
from fedbraid.masking.unmask import Dealt, UnmaskError, unmask
from fedbraid.notices import notice

__all__ = ["SecureRounds", "Step", "secure_rounds"]

PyTree = Any
COMPRESSED = 0.9  # an upload smaller than this share of its decoded form counts as compressed


class Step(NamedTuple):
    """One message of a secure exchange to several clients.

    down, up: arrays or shapes of the message to each client, and of its answer.
    """

    name: str  # of the Flower action
    up: PyTree
    read: Callable[[dict[str, np.ndarray]], Any]
    down: Callable[[int], PyTree]  # (client) -> arrays


def secure_rounds(
    secure: Secure, alg: Algorithm, messages: Iterable[MessageShapes], requests: Requests
) -> SecureRounds:
    """The secure exchanges of an algorithm whose messages have these shapes. Refuses one that needs single uploads."""
    check_sums(alg)
    summands = []
    for exchange, message in zip(alg.exchanges, messages, strict=True):
        summand = summand_of(exchange, message.up, message.metrics)
        check_leaves(summand.lifted, f"exchange {exchange.name!r}")
        sent, masked = nbytes(message.up), nbytes(sizes.mask_up(secure, summand))
        if sent < COMPRESSED * nbytes(summand.lifted):
            notice(
                f"exchange {exchange.name!r}: a compressed upload has {sent:,} bytes, but a masked one {masked:,}: "
                "sums need decoded entries, so compression saves nothing"
            )
        summands.append(summand)
    return SecureRounds(secure, summands, requests)


class SecureRounds:
    """Collects the sum of the uploads of an exchange, without seeing single ones."""

    secure: Secure
    summands: list[Summand]
    requests: Requests

    def __init__(self, secure: Secure, summands: list[Summand], requests: Requests) -> None:
        self.secure, self.summands, self.requests = secure, summands, requests
        self.need: int = max(secure.threshold, requests.policy.minimum)

    def collect(
        self, index: int, asked: Asked, order: Callable[[str], Asked], draw: Callable[[], list[int]]
    ) -> tuple[Asked, list[int], Summed | None]:
        """Run one exchange; returns the request for uploads, the cohort, and the sum; None if there are too few.

        asked: the exchange's own request. order: (suffix of the tag) -> the same with another tag. draw: the clients to
        ask. With the policy "wait", an exchange with too few clients is repeated, with new keys and another tag.
        """
        requests, policy, began, attempt = self.requests, self.requests.policy, time.monotonic(), 0
        asked = asked._replace(minimum=self.need)
        while True:
            cohort = draw()
            summed = self.attempt(index, asked, cohort)
            if summed is not None or policy.too_few != "wait" or requests.roster.lost:
                return asked, cohort, summed
            if time.monotonic() - began > policy.patience:
                raise TooFewError(requests.shortage(asked, f"{policy.patience:g} s, the policy's patience"))
            requests.roster.greet()
            requests.listen(None)
            time.sleep(POLL[1])
            attempt += 1
            asked = order(f"-{attempt}")._replace(minimum=self.need, notes=asked.notes, tally=asked.tally)

    def attempt(self, index: int, asked: Asked, cohort: list[int]) -> Summed | None:
        """The four messages; the uploads of the sum are noted in ``asked``.

        Clients that do not answer one message are not sent the next.
        """
        secure, tag = self.secure, asked.tag
        run = self.requests.roster.terms.run
        keys = self.ask(asked, Step(KEYS, sizes.keys_up(), _read_keys, lambda client: {}), cohort)
        keys = _without_copies(asked, keys)
        if not self.enough(asked, keys, "sent keys"):
            return None
        table = {"clients": np.array(sorted(keys), np.int32), "keys": np.stack([_array(keys[i]) for i in sorted(keys)])}
        step = Step(DEAL, sizes.deal_up(len(keys)), lambda found: found, lambda client: table)
        dealt = self.ask(asked, step, sorted(keys))
        if not self.enough(asked, dealt, "dealt shares"):
            return None
        members = sorted(dealt)
        boxes = {i: _boxes(i, sorted(keys), found["shares"]) for i, found in dealt.items()}
        masked = self.uploads(index, asked, members, boxes)
        if not self.enough(asked, masked, "sent masked uploads"):
            return None
        survivors = {"clients": np.array(sorted(masked), np.int32)}
        step = Step(OPEN, sizes.open_up(len(members)), lambda found: found["shares"], lambda client: survivors)
        opened = self.ask(asked, step, sorted(masked))
        if not self.enough(asked, opened, "helped to unmask the sum", need=secure.threshold):
            return None
        known = {i: Dealt(keys[i], dealt[i]["commitment"].tobytes()) for i in members}
        shares = {i: dict(zip(members, (row.tobytes() for row in rows), strict=True)) for i, rows in opened.items()}
        words = {i: (found["body"], found["head"]) for i, found in masked.items()}
        try:
            body, head = unmask(secure, f"{run}/{tag}", known, words, shares)
            summed = self.total(index, body, head, len(masked))
        except UnmaskError as error:
            asked.notes.append(f"the uploads cannot be unmasked: {error}")
            self.exclude(asked, error.client)
            return None
        asked.uploads.update(masked)
        return summed

    def exclude(self, asked: Asked, client: int | None) -> None:
        """Refuse the node of a client that dealt wrong shares, so that it does not stop every exchange."""
        roster = self.requests.roster
        if client in roster.clients:
            node = roster.clients[client].id
            asked.tally["refused"] += 1
            asked.notes.append(
                roster.refuse(node, f"the secrets of client {client} cannot be restored from its shares")
            )
            roster.forget(node)

    def total(self, index: int, body: np.ndarray, head: np.ndarray, count: int) -> Summed:
        """The sum in the reducer's form, with the weighted means of the metrics."""
        summand = self.summands[index]
        weight, *rest = decode(self.secure.weights, head).tolist()
        if weight < 0:
            raise UnmaskError("the sum of the weights is negative: a client sent a wrong masked upload")
        means = {
            name: top / below if below > 0 else float("nan")
            for name, top, below in zip(summand.metrics, rest[::2], rest[1::2], strict=True)
        }
        return Summed(decode_tree(self.secure.codec, body, summand.lifted), weight, count, means)

    def enough(self, asked: Asked, answers: dict[int, Any], what: str, *, need: int = 0) -> bool:
        need = need or self.need
        if len(answers) >= need:
            return True
        asked.notes.append(f"secure aggregation: {len(answers)} clients {what}, at least {need} must")
        return False

    # -- single messages

    def ask(self, asked: Asked, step: Step, clients: list[int]) -> dict[int, Any]:
        """Send a step to the clients; returns the answers."""
        run, tag = self.requests.roster.terms.run, asked.tag

        def request(client: int, node: int) -> Outgoing:
            words = content(Call(run, tag, client), records(step.down(client)))
            return Outgoing(node, client, f"query.{step.name}", words)

        return self.send(asked._replace(tag=f"{tag}.{step.name}", request=request), step, clients)

    def uploads(
        self, index: int, asked: Asked, members: list[int], boxes: dict[int, dict[int, np.ndarray]]
    ) -> dict[int, Any]:
        """Send the exchange's own message with the shares for each client; returns the masked uploads."""
        down = asked.request(members[0], 0).content
        size = sum(len(array.data) for record in down.array_records.values() for array in record.values())

        def shares(client: int) -> PyTree:
            others = [i for i in members if i != client]
            rows = np.stack([boxes[i][client] for i in others])
            return {"clients": np.array(others, np.int32), "shares": rows}

        def request(client: int, node: int) -> Outgoing:
            whole = asked.request(client, node)
            whole.content[RECORD] = records(shares(client))
            return whole

        step = Step("", sizes.mask_up(self.secure, self.summands[index]), lambda found: found, shares)
        return self.send(asked._replace(request=request), step, members, extra=size)

    def send(self, asked: Asked, step: Step, clients: list[int], *, extra: int = 0) -> dict[int, Any]:
        here = [client for client in clients if client in self.requests.roster.clients]
        for client in sorted(set(clients) - set(here)):
            asked.notes.append(f"client {client} left out, missing: its node is gone")
            asked.tally["missing"] += 1
        tag = asked.tag.removesuffix(f".{step.name}")

        def read(client: int, message: Message) -> Any:
            done = read_plain(message, Done)
            if done.tag != tag:
                raise MessageError(f"it answers request {done.tag!r}, but the current request is {tag!r}")
            return step.read(read_tree(step.up, wire.arrays_in(message)))

        wanted = layout_of(step.up)
        one = asked._replace(read=read, wanted=wanted, minimum=0, uploads={}, awaited={})
        self.requests.collect(one, here)
        asked.tally["arrays_down"] += sum(nbytes(step.down(client)) + extra for client in here)
        asked.tally["arrays_up"] += len(one.uploads) * wanted.nbytes
        return one.uploads

    def columns(self, asked: Asked) -> dict[str, float]:
        """Bytes of arrays of an exchange, as `fedbraid.cost` counts them: columns of the history."""
        return {f"bytes_{way}": float(asked.tally[f"arrays_{way}"]) for way in ("down", "up")}


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _halves(keys: bytes) -> tuple[bytes, bytes]:
    return keys[:KEY], keys[KEY:]


def _read_keys(found: dict[str, np.ndarray]) -> bytes:
    keys = found["keys"].tobytes()
    for half in _halves(keys):
        check_public(half)
    return keys


def _without_copies(asked: Asked, keys: dict[int, bytes]) -> dict[int, bytes]:
    """The keys that no other client sent, too: the others refuse a list with a key twice."""
    count = Counter(half for one in keys.values() for half in _halves(one))
    copies = [client for client, one in keys.items() if any(count[half] > 1 for half in _halves(one))]
    asked.notes.extend(f"client {client} left out, malformed: it sent a key twice, or another's" for client in copies)
    asked.tally["malformed"] += len(copies)
    return {client: one for client, one in keys.items() if client not in copies}


def _boxes(sender: int, clients: list[int], shares: np.ndarray) -> dict[int, np.ndarray]:
    """By receiver, the sealed shares of one sender."""
    return dict(zip([i for i in clients if i != sender], shares, strict=True))
