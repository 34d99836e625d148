"""Files that hold their own checksum, so that a file that was cut, changed or damaged later is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbraid.limited_json import read_json

__all__ = [
    "Damaged",
    "Unsealed",
    "read_sealed",
    "seal_json",
    "seal_lines",
    "table_sha256",
    "unseal_json",
    "unseal_lines",
]

LINE = "# sha256 of the lines above: "
KEY = "sha256"


class Damaged(ValueError):
    """The content does not match its checksum."""


class Unsealed(Damaged):
    """There is no checksum: the end of the file is missing, or an older version wrote it."""


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def seal_lines(text: str) -> str:
    """Lines of text, such as TOML, with a last line that holds their checksum as a comment.

    >>> unseal_lines(seal_lines("rounds = 50"))
    'rounds = 50\\n'
    >>> unseal_lines(seal_lines("rounds = 50").replace("5", "6", 1))
    Traceback (most recent call last):
    fedbraid.sealed.Damaged: it does not match its checksum
    """
    text = text if text.endswith("\n") else text + "\n"
    return f"{text}{LINE}{_sha256(text)}\n"


def unseal_lines(text: str) -> str:
    """The lines without the checksum."""
    lines, mark, checksum = text.rpartition(LINE)
    if not mark:
        raise Unsealed("it has no checksum")
    if checksum != f"{_sha256(lines)}\n":
        raise Damaged("it does not match its checksum")
    return lines


def seal_json(tree: Mapping[str, Any]) -> str:
    """An object as JSON with its checksum under the key ``sha256``.

    >>> unseal_json(seal_json({"rounds": 50}))
    {'rounds': 50}
    """
    plain = json.loads(json.dumps(tree))  # the keys and values that a reader will see
    return json.dumps({**plain, KEY: _sha256(json.dumps(plain, sort_keys=True))}, indent=1)


def unseal_json(text: str | bytes) -> dict[str, Any]:
    """The object without the checksum. Text without a checksum is accepted: older versions wrote none."""
    try:
        tree = read_json(text)
    except ValueError as error:
        raise Damaged(f"it is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise Damaged("it is not a JSON object")
    checksum = tree.pop(KEY, None)
    if checksum is not None and checksum != _sha256(json.dumps(tree, sort_keys=True)):
        raise Damaged("it does not match its checksum")
    return tree


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in a sealed JSON file. `Damaged` names the file."""
    try:
        return unseal_json(path.read_bytes())
    except Damaged as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def table_sha256(table: Any) -> str:
    """The checksum of the columns of an Arrow table: names and values."""
    digest = hashlib.sha256()
    for name in table.column_names:
        column = table[name]
        digest.update(f"{name}\0{len(column)}\0".encode())
        try:
            digest.update(_plain_bytes(column) if _is_plain(column.type) else _as_json(column))
        except (TypeError, ValueError) as error:
            raise Damaged(f"the column {name!r} cannot be read: {error}") from None
    return digest.hexdigest()


def _is_plain(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_integer(kind) or types.is_floating(kind)


def _plain_bytes(column: Any) -> bytes:
    values = column.to_numpy()
    return f"{values.dtype}\0".encode() + values.tobytes()


def _as_json(column: Any) -> bytes:
    return json.dumps(column.to_pylist(), default=str).encode()
