"""The records that travel: an order down, an answer up, and what a node and the server say to each other first.

A Flower message carries records. Ours has a small one of plain values (``fedbraid``), and the numbers packed by dtype
(``arrays``). Round, exchange, client and seed address the client's randomness; ``base`` and ``durable`` say which of
its states the client starts from and which it must keep (see :mod:`fedbraid.flower.states`).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeVar, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedbraid.flower.pack import MessageError

__all__ = [
    "Answer",
    "Greeting",
    "Order",
    "Presence",
    "Question",
    "Refusal",
    "Tested",
    "action_of",
    "content",
    "serialized_bytes",
]

PLAIN, ARRAYS, METRICS = "fedbraid", "arrays", "metrics"
HELLO = "hello"
EVALUATE = "evaluate"  # Flower's own type of message
SAFE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,79}")  # names that become file names on a node


class Greeting(NamedTuple):
    """Server to node, before anything else: what this federation computes."""

    run: str
    fingerprint: str
    schema: str
    population: int
    client: int  # the number that the node has if its site does not say one
    first: str  # the name of the state that these parameters make, a client's first


class Presence(NamedTuple):
    """Node to server: who it is and what it holds. Layouts (of each exchange's messages) and tags are JSON."""

    client: int
    examples: int
    fingerprint: str
    layouts: str
    held: str
    versions: str


class Order(NamedTuple):
    """Server to node: one client's part of one exchange of one round. It says all that a restarted node must know."""

    run: str
    fingerprint: str
    schema: str
    round: int
    exchange: int
    client: int
    seed: int
    tag: str  # the name of the state that this work leads to
    base: str  # the state to start from: the one whose upload the server took last
    durable: str  # the state that a restarted server would ask to start from
    layout: str  # digest of the upload that is expected


class Answer(NamedTuple):
    """Node to server: an upload."""

    tag: str
    weight: float
    layout: str
    leaves: str = ""  # the upload's layout in full, when it is not the expected one


class Question(NamedTuple):
    """Server to node: how good is this model on the client's own test data?"""

    run: str
    fingerprint: str
    schema: str
    client: int
    tag: str
    layout: str  # digest of the sums that are expected


class Tested(NamedTuple):
    """Node to server: sums over that many test examples; without any, no sums."""

    tag: str
    examples: int
    layout: str
    leaves: str = ""  # the layout of the sums in full, when it is not the expected one


class Refusal(NamedTuple):
    """Node to server: why there is no upload. ``greet`` asks to be greeted anew."""

    refused: str
    greet: bool = False


T = TypeVar("T")


def action_of(exchange: str) -> str:
    """The Flower action of an exchange: its name as an identifier.

    >>> action_of("full gradient")
    'full_gradient'
    """
    name = re.sub(r"\W", "_", exchange)
    return name if name.isidentifier() else f"x{name}"


def content(plain: Any, arrays: ArrayRecord | None = None, metrics: dict[str, float] | None = None) -> RecordDict:
    """The content of a message."""
    out: dict[str, Any] = {PLAIN: ConfigRecord(dict(plain._asdict()))}
    if arrays:
        out[ARRAYS] = arrays
    if metrics:
        out[METRICS] = MetricRecord(dict(metrics))
    return RecordDict(out)


def read_plain(message: Message, kind: type[T]) -> T:
    """The plain part of a message, every field there and of its type."""
    if PLAIN not in message.content.config_records:
        raise MessageError(f"the message has no {PLAIN!r} record; its sender does not run fedbraid")
    record = message.content.config_records[PLAIN]
    values = {}
    for name, type_ in get_type_hints(kind).items():
        if name not in record:
            raise MessageError(f"the message has no field {name!r}")
        value = record[name]
        if type(value) is not type_:
            raise MessageError(f"field {name!r} should be {type_.__name__}, got {value!r:.80}")
        if name in ("run", "tag", "base", "durable", "first") and not SAFE.fullmatch(str(value)):
            raise MessageError(f"field {name!r} should be a short name, got {value!r:.80}")
        values[name] = value
    return kind(**values)


def is_refusal(message: Message) -> bool:
    return "refused" in message.content.config_records.get(PLAIN, {})


def arrays_in(message: Message) -> ArrayRecord:
    """The numbers a message carries; none is an empty record."""
    return message.content.array_records.get(ARRAYS, ArrayRecord())


def metrics_in(message: Message) -> dict[str, float]:
    """The scalars a message carries beside its upload."""
    record = message.content.metric_records.get(METRICS, {})
    return {name: float(value) for name, value in record.items() if isinstance(value, int | float)}


def array_bytes(message: Message) -> int:
    """Bytes of all arrays in a message, whatever records they are in."""
    return sum(len(a.data) for record in message.content.array_records.values() for a in record.values())


def bounded_bytes(message: Message, limit: int) -> int:
    """Bytes of a message as it was serialised; of one whose arrays are already too many, those alone."""
    size = array_bytes(message)
    return size if size > limit else serialized_bytes(message)


def serialized_bytes(message: Message) -> int:
    """Bytes of a message as Flower serialises it: every object that it sends."""
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())
