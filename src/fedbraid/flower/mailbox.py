"""Messages over a Grid: sending them, and matching the replies to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbraid.flower.wire import serialized_bytes

__all__ = ["Mailbox", "Outgoing", "Reply", "Sent"]


class Outgoing(NamedTuple):
    """One message to send."""

    node: int
    client: int
    kind: str  # Flower's message type
    content: RecordDict


class Sent(NamedTuple):
    """A message that was sent and not yet answered. The sender of a reply is known from it, not from the reply."""

    node: int
    client: int
    tag: str
    expires: float


class Reply(NamedTuple):
    """A reply: a message, or the reason why there is none."""

    sent: Sent
    message: Message | None
    error: str = ""


class Mailbox:
    """The messages of a run. Replies are matched to the messages that they answer, also if they come late."""

    def __init__(self, grid: Grid, *, keep: float) -> None:
        self._grid, self._keep = grid, keep
        self._waiting: dict[str, Sent] = {}
        self._careful = False

    def waiting(self, tag: str) -> set[int]:
        """The nodes that have not yet answered a message with this tag."""
        return {sent.node for sent in self._waiting.values() if sent.tag == tag}

    def send(self, outgoing: Sequence[Outgoing], *, tag: str, group: str) -> int:
        """Send messages; returns their serialised bytes."""
        if not outgoing:
            return 0
        messages = [Message(x.content, x.node, x.kind, ttl=self._keep, group_id=group) for x in outgoing]
        size = sum(serialized_bytes(message) for message in messages)
        expires = time.monotonic() + self._keep
        for request, id_ in zip(outgoing, self._grid.push_messages(messages), strict=False):
            if id_:
                self._waiting[id_] = Sent(request.node, request.client, tag, expires)
        return size

    def replies(self) -> list[Reply]:
        """The replies that have arrived. A reply that Flower cannot read counts as failed and does not end the run."""
        now = time.monotonic()
        self._waiting = {id_: sent for id_, sent in self._waiting.items() if sent.expires >= now}
        if not self._waiting:
            return []
        if not self._careful:
            try:
                return self._match(self._grid.pull_messages(list(self._waiting)))
            except httpx.HTTPError:  # the SuperLink cannot be reached; this is not an unreadable reply
                raise
            except Exception:  # Flower raises many kinds of errors on invalid bytes
                self._careful = True
        found = []  # from now on replies are read one by one, so that an unreadable one does not affect others
        for id_, sent in list(self._waiting.items()):
            try:
                found += self._match(self._grid.pull_messages([id_]))
            except httpx.HTTPError:
                raise
            except Exception as error:
                del self._waiting[id_]
                found.append(Reply(sent, None, f"unreadable: {error}"))
        return found

    def _match(self, messages) -> list[Reply]:
        found = []
        for message in messages:
            sent = self._waiting.pop(message.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            if message.has_error():
                found.append(Reply(sent, None, str(message.error.reason)))
            else:
                found.append(Reply(sent, message))
        return found
