"""Who is there: nodes come, say who they are, go, and come back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import NamedTuple

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedbraid.flower import wire
from fedbraid.flower.identity import Messages
from fedbraid.flower.pack import MessageError, check_layout
from fedbraid.flower.post import Letter, Post, Reply
from fedbraid.flower.states import INIT
from fedbraid.flower.wire import Greeting, Presence, Refusal, content, read_plain

PRESENCE = 4 << 20  # bytes that a node's answer to a greeting has at most
RETRY = 15.0  # seconds after which a node that could not answer is greeted again

__all__ = ["Node", "Roster", "Terms"]


class Node(NamedTuple):
    """A node that was greeted and may work."""

    id: int
    client: int
    examples: int


class Terms(NamedTuple):
    """What a node must agree with."""

    run: str
    fingerprint: str
    schema: str
    population: int
    exchanges: tuple[str, ...]
    messages: tuple[Messages, ...]
    params: ArrayRecord | None  # the first parameters, if clients make their first state from them


class Roster:
    """The clients of the population that are connected, each by its node.

    A node that says it is a client which another node already is waits until that one fails to answer or goes: so a
    restarted node gets its place back at once, and a copy of a node's config does not displace the node.
    """

    def __init__(self, grid: Grid, post: Post, terms: Terms) -> None:
        self._grid, self._post, self.terms = grid, post, terms
        self.clients: dict[int, Node] = {}
        self.refused: dict[int, str] = {}  # node -> why
        self._retry: dict[int, float] = {}  # node that could not answer -> when to greet it again
        self._rivals: dict[int, Node] = {}
        self._failing: set[int] = set()

    def greet(self) -> None:
        """Greet the nodes that came, forget those that went."""
        online = set(self._grid.get_node_ids())
        self.clients = {client: node for client, node in self.clients.items() if node.id in online}
        self._rivals = {id_: node for id_, node in self._rivals.items() if id_ in online}
        for rival in list(self._rivals.values()):
            self._settle(rival)
        known = {node.id for node in self.clients.values()} | set(self._rivals) | set(self.refused)
        known |= {node for node, when in self._retry.items() if when > time.monotonic()}
        fresh = sorted(online - known - self._post.waiting(wire.HELLO))
        free = [client for client in range(self.terms.population) if client not in self.clients]
        t = self.terms
        letters = []
        for i, node in enumerate(fresh):
            offer = free[i] if i < len(free) else 0
            greeting = Greeting(t.run, t.fingerprint, t.schema, t.population, offer)
            letters.append(Letter(node, -1, f"query.{wire.HELLO}", content(greeting, t.params)))
        self._post.send(letters, tag=wire.HELLO, group=wire.HELLO)

    def hear(self, reply: Reply, taken: Mapping[int, str]) -> str | None:
        """A node's answer to a greeting. Returns why it is not let in, if it is not."""
        if reply.message is None:  # a crash there, or a node that went: it may be well a little later
            self._retry[reply.ticket.node] = time.monotonic() + RETRY
            return f"node {reply.ticket.node} could not answer: {reply.error}"
        try:
            if wire.bounded_bytes(reply.message, PRESENCE) > PRESENCE:
                raise MessageError("its answer to the greeting is far too large")
            if wire.is_refusal(reply.message):
                raise MessageError(read_plain(reply.message, Refusal).refused)
            presence = read_plain(reply.message, Presence)
            self._check(presence, taken)
        except (ValueError, TypeError) as error:
            self.refused[reply.ticket.node] = f"node {reply.ticket.node} is refused: {error}"
            return self.refused[reply.ticket.node]
        self._settle(Node(reply.ticket.node, presence.client, presence.examples))
        return None

    def _check(self, presence: Presence, taken: Mapping[int, str]) -> None:
        t = self.terms
        if presence.fingerprint != t.fingerprint:
            raise MessageError(f"its fingerprint is {presence.fingerprint}, the server's {t.fingerprint}")
        for name, ours, (down, up) in zip(t.exchanges, t.messages, json.loads(presence.layouts), strict=True):
            check_layout(ours.down, down, f"exchange {name!r}, message down")
            check_layout(ours.up, up, f"exchange {name!r}, upload")
        if not 0 <= presence.client < t.population:
            raise MessageError(f"client {presence.client} is not in a population of {t.population}")
        base, held = taken.get(presence.client, INIT), json.loads(presence.held)
        if t.params is not None and base not in held:
            raise MessageError(
                f"client {presence.client} lost its state {base!r} (it holds {held}): it no longer agrees with the "
                "server; give nodes a state-dir that outlives them"
            )

    def _settle(self, node: Node) -> None:
        holder = self.clients.get(node.client)
        self._rivals.pop(node.id, None)
        if holder is None or holder.id == node.id or holder.id in self._failing:
            self.clients[node.client] = node
        else:
            self._rivals[node.id] = node

    def answered(self, node: int) -> None:
        self._failing.discard(node)

    def missed(self, node: int) -> None:
        """A node left an order unanswered: whoever waits for its place may have it."""
        self._failing.add(node)

    def forget(self, node: int) -> None:
        """Greet a node anew."""
        self.clients = {client: known for client, known in self.clients.items() if known.id != node}
