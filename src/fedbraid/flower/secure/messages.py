"""What the messages of secure aggregation have in common, and which algorithms it can carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord

from fedbraid.core import Algorithm
from fedbraid.flower.pack import MessageError, layout_of, read_records
from fedbraid.masking import Secure

__all__ = ["DEAL", "KEYS", "OPEN", "RECORD", "Call", "Done", "check_sums", "counted", "read_tree", "signed"]

KEYS, DEAL, OPEN = "secure_keys", "secure_deal", "secure_open"  # actions
RECORD = "secure"  # the record with the shares, in the message of an exchange


class Call(NamedTuple):
    """Server to node: one step of a secure exchange."""

    run: str
    tag: str
    client: int


class Done(NamedTuple):
    """Node to server: the step is done; the arrays have the result."""

    tag: str


def check_sums(alg: Algorithm) -> None:
    """Refuse an algorithm whose server needs single uploads."""
    for exchange in alg.exchanges:
        where = f"exchange {exchange.name!r}"
        if exchange.reducer.kind != "sum":
            raise ValueError(
                f"secure aggregation shows the server only sums, but {where} compares single uploads (a rank rule like "
                "median or krum): remove that transform, or set no [secure]"
            )
        if exchange.guards:
            raise ValueError(
                f"secure aggregation shows the server only sums, but in {where} the server checks single uploads by "
                f"{', '.join(exchange.guards)}: use clip instead (the clients do it), or set no [secure]"
            )


def signed(fingerprint: str, secure: Secure | None) -> str:
    """The fingerprint with the settings of secure aggregation: sites with other settings are refused."""
    return fingerprint if secure is None else f"{fingerprint}+{secure.name}"


def read_tree(shapes: Any, record: Mapping[str, Array]) -> Any:
    """The arrays of these shapes in a record, checked."""
    return read_records(layout_of(shapes), record)


def counted(record: ArrayRecord) -> int:
    """For how many clients a record has numbers (int32)."""
    if "int32" not in record:
        raise MessageError("the message has no list of clients")
    return len(record["int32"].data) // np.dtype(np.int32).itemsize
