"""Requests to clients: sending messages, and receiving and checking the answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from flwr.app import Message

from fedbraid.flower import wire
from fedbraid.flower.mailbox import Mailbox, Outgoing, Reply
from fedbraid.flower.pack import Layout
from fedbraid.flower.policy import Policy, TooFewError
from fedbraid.flower.roster import Roster
from fedbraid.flower.wire import Refusal, read_plain
from fedbraid.units import format_bytes

__all__ = ["POLL", "Asked", "Requests"]

SLACK = 1 << 20  # bytes by which a reply may be larger than its upload; a larger reply is not read
POLL = (0.01, 0.5)  # seconds between two polls for replies: at first, and at most
LOOK = 2.0  # seconds between two checks for new or returning nodes
FAULTS = ("missing", "malformed", "nonfinite", "oversized", "failed", "refused")


class Asked(NamedTuple):
    """A request to a cohort, in progress: an exchange or an evaluation."""

    name: str
    round: int
    tag: str
    minimum: int  # number of answers that it needs
    wanted: Layout  # expected layout of an answer's arrays
    request: Callable[[int, int], Outgoing]  # (client, node) -> the message to send
    read: Callable[[int, Message], Any]  # (client, reply) -> its checked content; None if it is not finite
    uploads: dict[int, Any]
    awaited: dict[int, tuple[int, float]]  # client -> the node that was asked, and when
    notes: list[str]
    tally: Counter[str]  # bytes "down" and "up", and numbers of rejected replies by kind


class Requests:
    """Sends requests to clients and receives their answers.

    counts: how many replies of the whole run were late, missing, malformed and so on. The run owns this counter.
    """

    mailbox: Mailbox
    roster: Roster
    policy: Policy
    counts: Counter[str]
    say: Callable[[str], None]

    def __init__(
        self, mailbox: Mailbox, roster: Roster, policy: Policy, counts: Counter[str], say: Callable[[str], None]
    ) -> None:
        self.mailbox, self.roster, self.policy, self.counts, self.say = mailbox, roster, policy, counts, say
        self.open: dict[str, Asked] = {}  # by tag: requests that stay open while others are made (asynchronous steps)

    def listen(self, asked: Asked | None) -> int:
        """Process the replies that have arrived: to greetings, to the current request, and late ones."""
        replies = self.mailbox.replies()
        for reply in replies:
            if reply.sent.tag == wire.HELLO:
                if reason := self.roster.hear(reply):
                    self.counts["refused"] += reply.sent.node in self.roster.refused
                    self.say(reason)
                continue
            to = asked if asked is not None and reply.sent.tag == asked.tag else self.open.get(reply.sent.tag)
            if to is not None and self.is_awaited(to, reply):
                self.judge(to, reply)
            elif to is None or to is not asked:
                self.counts["late"] += reply.message is not None
        return len(replies)

    def is_awaited(self, asked: Asked, reply: Reply) -> bool:
        """Whether a client's reply is still awaited. An error of a node does not count if another node was asked."""
        node, _ = asked.awaited.get(reply.sent.client, (None, 0.0))
        return node is not None and (reply.message is not None or node == reply.sent.node)

    def judge(self, asked: Asked, reply: Reply) -> None:
        """Accept the upload in a reply, or add a note that says why the client is left out."""
        node, client = reply.sent.node, reply.sent.client
        if reply.message is None:
            self.roster.missed(node)
        else:
            self.roster.answered(node)
        del asked.awaited[client]
        kind, reason = self.take(asked, client, reply)
        if kind:
            asked.tally[kind] += 1
            asked.notes.append(f"client {client} (node {node}) left out, {kind}: {wire.one_line(reason)}")

    def take(self, asked: Asked, client: int, reply: Reply) -> tuple[str, str]:
        """Accept an upload and return two empty strings, or return the kind of fault and the reason."""
        message = reply.message
        if message is None:
            return "failed", reply.error
        wanted = asked.wanted.nbytes
        try:
            if (size := wire.bounded_bytes(message, wanted + SLACK)) > wanted + SLACK:
                return "oversized", f"it sent {format_bytes(size)}, an answer should have {format_bytes(wanted)}"
            asked.tally["up"] += size
            if wire.is_refusal(message):
                refusal = read_plain(message, Refusal)
                if refusal.greet:
                    self.roster.forget(reply.sent.node)
                return "refused", refusal.refused
            upload = asked.read(client, message)
        except wire.UNREADABLE as error:
            return "malformed", str(error) or type(error).__name__
        if upload is None:
            return "nonfinite", "its upload is not finite"
        asked.uploads[client] = upload
        return "", ""

    def ask(self, asked: Asked, clients: list[int]) -> None:
        outgoing = []
        for client in clients:
            node = self.roster.clients[client].id
            outgoing.append(asked.request(client, node))
            asked.awaited[client] = (node, time.monotonic())
        asked.tally["down"] += self.mailbox.send(outgoing, tag=asked.tag, group=str(asked.round + 1))

    def look_around(self, asked: Asked, cohort: list[int], *, again: bool) -> None:
        """Greet new nodes, and ask clients again that are now on another node.

        again: also ask clients whose answer failed, or who did not answer within the deadline.
        """
        self.roster.greet()
        now, anew = time.monotonic(), []
        for client in cohort:
            node = self.roster.clients.get(client)
            if node is None or client in asked.uploads:
                continue
            before, since = asked.awaited.get(client, (None, 0.0))
            moved = before is not None and before != node.id
            if moved or (again and (before is None or now - since > self.policy.deadline)):
                anew.append(client)
        self.ask(asked, anew)

    def collect(self, asked: Asked, cohort: list[int], *, most: int | None = None, limit: float | None = None) -> bool:
        """Ask a cohort and wait until all have answered or the deadline has passed. True if enough answers came.

        most: end as soon as this many have answered; the answers after them are late. limit: seconds instead of the
        policy's deadline.
        """
        policy, began = self.policy, time.monotonic()
        self.ask(asked, cohort)
        within = policy.deadline if limit is None else limit
        deadline, look, pause = began + within, began + LOOK, POLL[0]
        while True:
            heard = self.listen(asked)
            now = time.monotonic()
            enough = len(asked.uploads) >= asked.minimum
            if most is not None and len(asked.uploads) >= most:
                self.end_early(asked, most)
                return enough
            waits = policy.too_few == "wait" and not enough
            if now >= deadline:
                for node, _ in asked.awaited.values():
                    self.roster.missed(node)
            if not waits and (now >= deadline or not asked.awaited):
                break
            if waits and self.roster.lost:  # a lost state can be replaced only between rounds
                break
            if waits and now - began > policy.patience:
                raise TooFewError(self.shortage(asked, f"{policy.patience:g} s, the policy's patience"))
            if now >= look:
                self.look_around(asked, cohort, again=waits and now >= deadline)
                look = time.monotonic() + LOOK
            pause = POLL[0] if heard else min(2 * pause, POLL[1])
            ends = look if now >= deadline else min(look, deadline)
            time.sleep(max(0.0, min(pause, ends - time.monotonic())))
        for client, (node, _) in sorted(asked.awaited.items()):
            asked.notes.append(f"client {client} (node {node}) left out, missing: no reply in {within:g} s")
        asked.tally["missing"] += len(asked.awaited)
        return enough

    def end_early(self, asked: Asked, most: int) -> None:
        """Keep the first ``most`` answers. Those that came with them and those that will come count as late."""
        for client in list(asked.uploads)[most:]:
            del asked.uploads[client]
            self.counts["late"] += 1
        asked.awaited.clear()

    def shortage(self, asked: Asked, within: str) -> str:
        notes = "".join(f"\n  {note}" for note in asked.notes)
        return (
            f"round {asked.round + 1}, {asked.name}: {len(asked.uploads)} uploads within {within}; at least "
            f"{asked.minimum} are needed{notes}"
        )

    def account(self, asked: Asked, started: float, many: int, size: int, taken: int) -> dict[str, float]:
        """Bytes, seconds and faults of an exchange or an evaluation, as columns of the history.

        many: number of clients asked. size: bytes of arrays sent to each. taken: number of accepted answers.
        """
        self.counts.update({kind: asked.tally[kind] for kind in FAULTS})
        return {
            "refused": asked.tally["nonfinite"],  # the simulator's column for uploads that are not admitted
            "bytes_down": float(many * size),
            "bytes_up": float(taken * asked.wanted.nbytes),
            "asked": many,
            "wire_down": float(asked.tally["down"]),
            "wire_up": float(asked.tally["up"]),
            "seconds": time.monotonic() - started,
            "missing": asked.tally["missing"],
            "rejected": sum(asked.tally[kind] for kind in ("malformed", "oversized", "failed", "refused")),
        }
