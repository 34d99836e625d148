"""Asking clients: messages out, answers in, and what of them counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from flwr.app import Message

from fedbraid.flower import wire
from fedbraid.flower.pack import Layout
from fedbraid.flower.policy import Policy, TooFewError
from fedbraid.flower.post import Letter, Post, Reply
from fedbraid.flower.roster import Roster
from fedbraid.flower.wire import Refusal, read_plain
from fedbraid.units import format_bytes

__all__ = ["POLL", "Asked", "Desk"]

SLACK = 1 << 20  # bytes by which a reply may be larger than its upload; a larger one is not read
POLL = (0.01, 0.5)  # seconds between two looks for replies: first, and at most
LOOK = 2.0  # seconds between two looks for nodes that came or came back
FAULTS = ("missing", "malformed", "nonfinite", "oversized", "failed", "refused")


class Asked(NamedTuple):
    """What a cohort was asked, in progress: an exchange, or an evaluation."""

    name: str
    round: int
    tag: str
    minimum: int  # answers that it needs
    wanted: Layout  # of an answer's numbers
    letter: Callable[[int, int], Letter]  # (client, node) -> what it is asked
    read: Callable[[Message], Any]  # what came, checked; None if it is not finite
    uploads: dict[int, Any]
    awaited: dict[int, tuple[int, float]]  # client -> the node that was asked, and when
    notes: list[str]
    tally: Counter  # bytes "down" and "up", and numbers of replies by kind


class Desk:
    """Asks clients through the mail of a run and takes their answers in.

    counts: how many replies of the whole run were late, missing, malformed and so on; kept by the run.
    """

    def __init__(self, post: Post, roster: Roster, policy: Policy, counts: Counter, say: Callable[[str], None]) -> None:
        self.post, self.roster, self.policy, self.counts, self.say = post, roster, policy, counts, say

    def listen(self, asked: Asked | None) -> int:
        """Take in what has come: presences, uploads of the exchange in progress, and what came too late."""
        replies = self.post.replies()
        for reply in replies:
            if reply.ticket.tag == wire.HELLO:
                if reason := self.roster.hear(reply):
                    self.counts["refused"] += reply.ticket.node in self.roster.refused
                    self.say(reason)
            elif asked is None or reply.ticket.tag != asked.tag:
                self.counts["late"] += reply.message is not None
            elif self.is_awaited(asked, reply):
                self.judge(asked, reply)
        return len(replies)

    def is_awaited(self, asked: Asked, reply: Reply) -> bool:
        """Whether a reply settles a client's part: a node that is gone does not, if another was asked in its place."""
        node, _ = asked.awaited.get(reply.ticket.client, (None, 0.0))
        return node is not None and (reply.message is not None or node == reply.ticket.node)

    def judge(self, asked: Asked, reply: Reply) -> None:
        """One reply: an upload that counts, or a note that says whose does not, and why."""
        node, client = reply.ticket.node, reply.ticket.client
        if reply.message is None:
            self.roster.missed(node)
        else:
            self.roster.answered(node)
        del asked.awaited[client]
        kind, reason = self.take(asked, client, reply)
        if kind:
            asked.tally[kind] += 1
            asked.notes.append(f"client {client} (node {node}) left out, {kind}: {reason}")

    def take(self, asked: Asked, client: int, reply: Reply) -> tuple[str, str]:
        """Take an upload in; else what is wrong with it, as a kind and a sentence."""
        message = reply.message
        if message is None:
            return "failed", reply.error
        wanted = asked.wanted.nbytes
        if (size := wire.bounded_bytes(message, wanted + SLACK)) > wanted + SLACK:
            return "oversized", f"it sent {format_bytes(size)}, an answer here has {format_bytes(wanted)}"
        asked.tally["up"] += size
        try:
            if wire.is_refusal(message):
                refusal = read_plain(message, Refusal)
                if refusal.greet:
                    self.roster.forget(reply.ticket.node)
                return "refused", refusal.refused
            upload = asked.read(message)
        except (ValueError, TypeError) as error:
            return "malformed", str(error)
        if upload is None:
            return "nonfinite", "its upload is not finite"
        asked.uploads[client] = upload
        return "", ""

    def ask(self, asked: Asked, clients: list[int]) -> None:
        letters = []
        for client in clients:
            node = self.roster.clients[client].id
            letters.append(asked.letter(client, node))
            asked.awaited[client] = (node, time.monotonic())
        asked.tally["down"] += self.post.send(letters, tag=asked.tag, group=str(asked.round + 1))

    def look_around(self, asked: Asked, cohort: list[int], *, again: bool) -> None:
        """Greet nodes that came meanwhile, and ask a client anew whose place another node has taken.

        again: ask also those that failed, and those that let a whole deadline pass.
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

    def collect(self, asked: Asked, cohort: list[int]) -> bool:
        """Ask, and wait until all have answered or the deadline has passed. True if enough answers came."""
        policy, began = self.policy, time.monotonic()
        self.ask(asked, cohort)
        deadline, look, pause = began + policy.deadline, began + LOOK, POLL[0]
        while True:
            heard = self.listen(asked)
            now = time.monotonic()
            enough = len(asked.uploads) >= asked.minimum
            waits = policy.too_few == "wait" and not enough
            if now >= deadline:
                for node, _ in asked.awaited.values():
                    self.roster.missed(node)
            if not waits and (now >= deadline or not asked.awaited):
                break
            if waits and self.roster.lost:  # it can be helped only between rounds
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
            asked.notes.append(f"client {client} (node {node}) left out, missing: no reply in {policy.deadline:g} s")
        asked.tally["missing"] += len(asked.awaited)
        return enough

    def shortage(self, asked: Asked, within: str) -> str:
        notes = "".join(f"\n  {note}" for note in asked.notes)
        return (
            f"round {asked.round + 1}, {asked.name}: {len(asked.uploads)} uploads within {within}; at least "
            f"{asked.minimum} are needed{notes}"
        )

    def account(self, asked: Asked, started: float, many: int, size: int, taken: int) -> dict[str, float]:
        """What an exchange or an evaluation cost, and what went wrong in it, as columns of the history.

        many clients were sent ``size`` bytes of numbers each; ``taken`` of their answers counted.
        """
        self.counts.update({kind: asked.tally[kind] for kind in FAULTS})
        return {
            "refused": asked.tally["nonfinite"],  # the simulator's word for an upload that is not admitted
            "bytes_down": float(many * size),
            "bytes_up": float(taken * asked.wanted.nbytes),
            "asked": many,
            "wire_down": float(asked.tally["down"]),
            "wire_up": float(asked.tally["up"]),
            "seconds": time.monotonic() - started,
            "missing": asked.tally["missing"],
            "rejected": sum(asked.tally[kind] for kind in ("malformed", "oversized", "failed", "refused")),
        }
