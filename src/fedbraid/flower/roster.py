"""The connected nodes: they join, say which client they are, leave, and come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedbraid.flower import wire
from fedbraid.flower.identity import Messages
from fedbraid.flower.mailbox import Mailbox, Outgoing, Reply
from fedbraid.flower.pack import MessageError, check_layout
from fedbraid.flower.policy import Policy
from fedbraid.flower.states import INIT
from fedbraid.flower.wire import Greeting, Presence, Refusal, content, read_plain
from fedbraid.limited_json import read_json

PRESENCE = 4 << 20  # largest size of a node's answer to a greeting, in bytes
RETRY = 15.0  # seconds after which a node that could not answer is greeted again

__all__ = ["Node", "Roster", "Terms"]


class Node(NamedTuple):
    """A node that has answered its greeting and was accepted."""

    id: int
    client: int
    examples: int
    held: frozenset[str] = frozenset()  # tags of its client's states when it was greeted


class Terms(NamedTuple):
    """The settings of a run that every node must match."""

    run: str
    fingerprint: str
    schema: str
    population: int
    exchanges: tuple[str, ...]
    messages: tuple[Messages, ...]
    params: ArrayRecord | None  # the first parameters, if clients keep state and make their first state from them
    first: str = INIT  # the tag of that state
    max_examples: int = Policy().max_examples
    masked: bool = False  # secure aggregation: nodes do not tell their numbers of examples


class Roster:
    """The connected clients of the population, and the node of each.

    If two nodes claim the same client, the second waits until the first fails to answer or leaves. So a restarted node
    gets its client back at once, and a node with a copied config does not displace the original. A node without the
    state that its client should have never displaces another node. If the client has no other node, its state is lost.

    base: (client) -> the tag of the state that the client's next work starts from.
    """

    terms: Terms

    def __init__(self, grid: Grid, mailbox: Mailbox, terms: Terms, base: Callable[[int], str]) -> None:
        self._grid, self._mailbox, self.terms, self._base = grid, mailbox, terms, base
        self.clients: dict[int, Node] = {}
        self.lost: dict[int, Node] = {}  # connected clients that lost their state
        self._greeted: dict[int, str] = {}  # node -> tag of the first state in its last greeting
        self.refused: dict[int, str] = {}  # node -> the reason
        self._retry: dict[int, float] = {}  # node that could not answer -> when to greet it again
        self._rivals: dict[int, Node] = {}
        self._failing: set[int] = set()
        self._doubted: set[int] = set()  # nodes to greet again; they keep their clients

    def greet(self) -> None:
        """Greet new nodes, and remove nodes that are gone."""
        online = set(self._grid.get_node_ids())
        self.clients = {client: node for client, node in self.clients.items() if node.id in online}
        self.lost = {client: node for client, node in self.lost.items() if node.id in online}
        self._rivals = {id_: node for id_, node in self._rivals.items() if id_ in online}
        for rival in list(self._rivals.values()):
            self._settle(rival, heard=False)
        known = {node.id for node in (*self.clients.values(), *self.lost.values())}
        own = {node.id: client for client, node in self.clients.items()}
        known = known - self._doubted | set(self._rivals) | set(self.refused)
        known |= {node for node, when in self._retry.items() if when > time.monotonic()}
        fresh = sorted(online - known - self._mailbox.waiting(wire.HELLO))
        free = [client for client in range(self.terms.population) if client not in self.clients]
        t = self.terms
        outgoing = []
        for node in fresh:
            offer = own[node] if node in own else free.pop(0) if free else 0
            greeting = Greeting(t.run, t.fingerprint, t.schema, t.population, offer, t.first)
            self._greeted[node] = t.first
            outgoing.append(Outgoing(node, -1, f"query.{wire.HELLO}", content(greeting, t.params)))
        self._doubted.clear()
        self._mailbox.send(outgoing, tag=wire.HELLO, group=wire.HELLO)

    def hear(self, reply: Reply) -> str | None:
        """Process a node's answer to a greeting. Returns the reason if the node is not accepted, else None."""
        if reply.message is None:  # the node crashed or left; it may answer later
            self._retry[reply.sent.node] = time.monotonic() + RETRY
            return f"node {reply.sent.node} could not answer: {wire.one_line(reply.error)}"
        try:
            if wire.bounded_bytes(reply.message, PRESENCE) > PRESENCE:
                raise MessageError("its answer to the greeting is far too large")
            if wire.is_refusal(reply.message):
                raise MessageError(read_plain(reply.message, Refusal).refused)
            presence = read_plain(reply.message, Presence)
            self._check(presence)
            held = frozenset(map(str, read_json(presence.held)))
        except wire.UNREADABLE as error:
            return self.refuse(reply.sent.node, str(error))
        self._settle(Node(reply.sent.node, presence.client, presence.examples, held))
        return None

    def refuse(self, node: int, why: str) -> str:
        """Refuse a node for the rest of the run; returns the message for the user."""
        self.refused[node] = f"node {node} is refused: {wire.one_line(why)}"
        return self.refused[node]

    def _check(self, presence: Presence) -> None:
        t = self.terms
        if presence.fingerprint != t.fingerprint:
            raise MessageError(f"its fingerprint is {presence.fingerprint}, the server's {t.fingerprint}")
        for name, ours, (down, up) in zip(t.exchanges, t.messages, read_json(presence.layouts), strict=True):
            check_layout(ours.down, down, f"exchange {name!r}, message down")
            check_layout(ours.up, up, f"exchange {name!r}, upload")
        if not 0 <= presence.client < t.population:
            raise MessageError(f"client {presence.client} is not in a population of {t.population}")
        if not (0 if t.masked else 1) <= presence.examples <= t.max_examples:
            raise MessageError(
                f"it states {presence.examples} examples, the policy allows 1 to {t.max_examples} (max_examples)"
            )

    def _settle(self, node: Node, *, heard: bool = True) -> None:
        """Assign a node to its client, or let it wait. heard: ``node.held`` comes from an answer of just now."""
        holder = self.clients.get(node.client)
        self._rivals.pop(node.id, None)
        free = holder is None or holder.id == node.id
        if self.terms.params is None or self._base(node.client) in node.held:
            if free or (holder is not None and holder.id in self._failing):
                self.clients[node.client] = node
                self.lost.pop(node.client, None)
            else:
                self._rivals[node.id] = node
        elif not free:
            self._rivals[node.id] = node
        elif heard and self._greeted.get(node.id) == self.terms.first:
            self.clients.pop(node.client, None)
            self.lost[node.client] = node
        # else the list of its states may be out of date, and it is greeted again

    def admit(self, node: Node) -> None:
        """Accept a client that had lost its state. Its next work must start from a state that its node holds."""
        self.lost.pop(node.client, None)
        self._settle(node)

    def renew(self, terms: Terms) -> None:
        """Set new terms. All nodes must be greeted again."""
        self.terms = terms
        self.clients, self.lost, self._rivals = {}, {}, {}

    def answered(self, node: int) -> None:
        self._failing.discard(node)

    def missed(self, node: int) -> None:
        """Mark a node that did not answer an order. A node that waits for the same client may replace it."""
        self._failing.add(node)

    def doubt(self, node: int) -> None:
        """Greet a node again, because it may have other data than it stated."""
        self._doubted.add(node)

    def forget(self, node: int) -> None:
        """Remove a node, so that it is greeted again."""
        self.clients = {client: known for client, known in self.clients.items() if known.id != node}
