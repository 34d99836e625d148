"""What a federated algorithm is: a short, fixed tuple of exchanges between the server and its clients.

In an exchange the server sends one message to a cohort, each client computes an upload from it, its own state and its
own data, the uploads are reduced, and the server updates its state with the result. Everything is a pure function over
pytrees, so the simulator, a deployment and the cost of a round are three interpreters of the same object.
"""

from __future__ import annotations

from fedbraid.core.arguments import StaticValueError, check_choice, check_count, check_number, is_traced, is_zero
from fedbraid.core.contract import (
    MEAN,
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Guarantee,
    Logged,
    Reducer,
    Report,
    Up,
    finite,
    keep,
    logged,
    noised,
    numbers_drawn,
    receive_noised,
    reduce_reports,
    replay,
    same,
)
from fedbraid.core.place import failure, place_of
from fedbraid.core.structure import MessageShapes, StructureError, check_structure, message_shapes

__all__ = [
    "MEAN",
    "Aggregate",
    "Algorithm",
    "Down",
    "Exchange",
    "Guarantee",
    "Logged",
    "MessageShapes",
    "Reducer",
    "Report",
    "StaticValueError",
    "StructureError",
    "Up",
    "check_choice",
    "check_count",
    "check_number",
    "check_structure",
    "failure",
    "finite",
    "is_traced",
    "is_zero",
    "keep",
    "logged",
    "message_shapes",
    "noised",
    "numbers_drawn",
    "place_of",
    "receive_noised",
    "reduce_reports",
    "replay",
    "same",
]
