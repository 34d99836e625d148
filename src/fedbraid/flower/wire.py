"""The records in messages: greetings and their answers, orders and their answers, evaluations, refusals.

A Flower message contains records. Ours has a small one of plain values (``fedbraid``), and the arrays packed by dtype
(``arrays``). Round, exchange, client and seed determine the client's random key, but not the noise of differential
privacy (:mod:`fedbraid.flower.entropy`). ``base`` and ``durable`` say which of its states the client starts from and
which it must keep (see :mod:`fedbraid.flower.states`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
ENTRIES = 1000  # number of names in all records of a message; a message with more is not read
WORDS = 300  # characters of a text of a node that are shown
EVALUATE = "evaluate"  # Flower's own type of message
LARGEST_METRIC = 1e38  # a larger number is not a measurement, and sums of such numbers are not finite
SAFE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,79}")  # allowed names, because they become file names on a node


# What reading a reply may raise. A reply is written by somebody else, so all of these are faults of the reply.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class Greeting(NamedTuple):
    """Server to node, the first message: what this federation computes."""

    run: str
    fingerprint: str
    schema: str
    population: int
    client: int  # the node's client number if its config does not give one
    first: str  # the tag of the client's first state, which is made from these parameters


class Presence(NamedTuple):
    """Node to server, the answer to a greeting. ``layouts`` (of each exchange's messages) and ``held`` are JSON."""

    client: int
    examples: int
    fingerprint: str
    layouts: str
    held: str
    versions: str


class Order(NamedTuple):
    """Server to node: one client's work in one exchange of one round. It has all that a restarted node needs."""

    run: str
    fingerprint: str
    schema: str
    round: int
    exchange: int
    client: int
    seed: int
    tag: str  # the tag of the state after this work
    base: str  # the tag of the state to start from, that of the client's last accepted upload
    durable: str  # the tag of the state from which a restarted server would continue
    layout: str  # digest of the expected upload's layout


class Answer(NamedTuple):
    """Node to server: an upload."""

    tag: str
    weight: float
    layout: str
    leaves: str = ""  # the full layout of the upload, if it is not the expected one


class Question(NamedTuple):
    """Server to node: evaluate this model, and the client's own one, on the client's own test data."""

    run: str
    fingerprint: str
    schema: str
    client: int
    tag: str
    base: str  # tag of the client state that its own model is made of
    layout: str  # digest of the expected sums' layout


class Tested(NamedTuple):
    """Node to server: sums over its test examples; no sums if it has none."""

    tag: str
    examples: int
    layout: str
    leaves: str = ""  # the full layout of the sums, if it is not the expected one


class Refusal(NamedTuple):
    """Node to server: why there is no upload. ``greet`` asks for a new greeting."""

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
    """The plain values of a message. Checks that every field is there and has its type."""
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
    """The arrays in a message; an empty record if there are none."""
    return message.content.array_records.get(ARRAYS, ArrayRecord())


def metrics_in(message: Message, expected: Sequence[str]) -> dict[str, float]:
    """The expected metrics in a message, if they are finite numbers. Other names are ignored."""
    record = message.content.metric_records.get(METRICS, {})
    found = {name: record[name] for name in expected if name in record}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and abs(value) <= LARGEST_METRIC
    }


def one_line(text: str, limit: int = WORDS) -> str:
    """A text that a node sent, for the terminal and the log: one line, without control characters, not too long.

    >>> one_line("all is well\\nround 9/9\\x1b[2J"), one_line("a" * 9, limit=4)
    ('all is well round 9/9 [2J', 'aaaa ...')
    """
    shown = "".join(c if c.isprintable() else " " for c in text[:limit])
    return f"{shown} ..." if len(text) > limit else shown


def entries(message: Message) -> int:
    """The number of names in all records of a message."""
    return sum(1 + len(record) for record in message.content.values())


def array_bytes(message: Message) -> int:
    """Bytes of all arrays in all records of a message."""
    return sum(len(a.data) for record in message.content.array_records.values() for a in record.values())


def bounded_bytes(message: Message, limit: int) -> int:
    """Serialised bytes of a message; if its arrays or its texts alone are above the limit, only their bytes."""
    if (many := entries(message)) > ENTRIES:
        raise MessageError(f"it has {many} names in its records, at most {ENTRIES} are read")
    values = (v for record in message.content.config_records.values() for v in record.values())
    size = array_bytes(message) + sum(len(v) for v in values if isinstance(v, str | bytes | list))
    return size if size > limit else serialized_bytes(message)


def serialized_bytes(message: Message) -> int:
    """Bytes of a message as Flower serialises it: the sum over all its objects."""
    return sum(len(item.deflate()) for item in get_all_nested_objects(message).values())
