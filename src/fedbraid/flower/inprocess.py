"""A federation in one process: real ClientApp and ServerApp objects, real Flower messages, no network.

It is for tests, and to try a deployment without other machines. Flower's own code serialises every message and every
node's context and reads them back, as between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedbraid.flower.wire import serialized_bytes

__all__ = ["InProcessGrid"]

Tamper = Callable[[Message, Message], Message | None]


class InProcessGrid(Grid):
    """A Grid whose nodes are contexts in this process.

    Args:
        app: the ClientApp that every node runs, or one per node id.
        nodes: the config of each node, by its id. Nodes may join, leave or restart between rounds.
        tamper: (order, reply) -> the reply that arrives instead, or None if it is lost. Tests inject faults with it.

    >>> import jax.numpy as jnp, numpy as np
    >>> from fedbraid import fedavg
    >>> from fedbraid.flower import client_app, schema_of, server_app
    >>> alg = fedavg(lambda p, batch, key: jnp.sum((p - batch["x"].mean(0)) ** 2), client_lr=0.25)
    >>> rows = {"x": np.ones((4, 3), np.float32)}
    >>> grid = InProcessGrid(client_app(alg, jnp.zeros(3), lambda context: rows), {10: {}, 11: {}})
    >>> app = server_app(alg, jnp.zeros(3), schema=schema_of(rows), rounds=2, population=2, say=lambda line: None,
    ...                  on_end=lambda served: print(served.params))
    >>> grid.run_server(app)
    [0.75 0.75 0.75]
    """

    def __init__(
        self,
        app: ClientApp | Mapping[int, ClientApp],
        nodes: Mapping[int, Mapping[str, Any]],
        *,
        tamper: Tamper | None = None,
    ) -> None:
        self.apps = app
        self.tamper = tamper
        self.contexts: dict[int, Context] = {}
        for node, config in nodes.items():
            self.join(node, config)
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.wire: list[tuple[str, int]] = []  # ("down" or "up", serialised bytes) of every message
        self._replies: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def join(self, node: int, config: Mapping[str, Any]) -> None:
        """Add a node, or restart one. A restarted node keeps only its config."""
        self.contexts[node] = Context(1, node, dict(config), RecordDict(), {})

    def leave(self, node: int) -> None:
        """Remove a node."""
        del self.contexts[node]

    def run_server(self, app: ServerApp) -> None:
        """Run a ServerApp on this grid."""
        app(self, Context(1, 1, {}, RecordDict(), {}))

    # -- the interface of Flower's Grid

    def set_run(self, run: Run) -> None:
        """Not supported: there is no run."""
        raise NotImplementedError("InProcessGrid has no run: fedbraid's server creates its messages itself")

    @property
    def run(self) -> Run:
        """Not supported: there is no run."""
        raise NotImplementedError("InProcessGrid has no run: fedbraid's server creates its messages itself")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Not supported: messages are made by the server."""
        raise NotImplementedError("InProcessGrid has no run: fedbraid's server creates its messages itself")

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver messages; nodes answer at once. Returns the ids of the messages."""
        ids = []
        for message in messages:
            self.wire.append(("down", serialized_bytes(message)))
            arrived = _travel(message)
            ids.append(arrived.metadata.message_id)
            self.sent.append(arrived)
            node = arrived.metadata.dst_node_id
            if node in self.contexts and (reply := self._handle(node, arrived)) is not None:
                self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to messages with these ids, as far as they have arrived. Each is returned once."""
        return [self._replies.pop(id_) for id_ in list(message_ids) if id_ in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Deliver messages and return the replies to them."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _handle(self, node: int, message: Message) -> Message | None:
        context = self.contexts[node]
        app = self.apps[node] if isinstance(self.apps, Mapping) else self.apps
        try:
            reply = app(message, context)
        except Exception as error:  # as a node's process handles exceptions of its ClientApp
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        if node in self.contexts and self.contexts[node] is context:
            self.contexts[node] = context_from_proto(context_to_proto(context))
        if self.tamper is not None and (reply := self.tamper(message, reply)) is None:
            return None
        self.wire.append(("up", serialized_bytes(reply)))
        arrived = _travel(reply)
        self.received.append(arrived)
        return arrived


def _travel(message: Message) -> Message:
    """The message as the receiver reads it from its bytes."""
    id_ = message.object_id
    contents = {i: item.deflate() for i, item in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(id_, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = id_
    return arrived
