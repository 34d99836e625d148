"""CIFAR's python batches, which are pickles, read without pickle.

Python's unpickler calls what the file names and allocates what the file declares. This reader parses the opcodes with
``pickletools`` (which reads no more than there is) and runs the few that a batch needs: dictionaries, lists, text,
bytes, integers, and NumPy's way to write one array of bytes.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid.data.formats.archive import read_bytes

__all__ = ["read_batch"]


class _Global(NamedTuple):
    """A name that the stream mentions. Nothing is imported."""

    name: str


class _Array:
    """An array in the stream; its state is set by BUILD."""

    state: Any = None


_MARK = object()
_CALLS = {
    "numpy.core.multiarray _reconstruct": lambda *_: _Array(),
    "numpy._core.multiarray _reconstruct": lambda *_: _Array(),
    "numpy dtype": lambda kind, *_: _Global(f"dtype {kind}"),
    "_codecs encode": lambda text, *_: text.encode("latin1"),  # bytes in old protocols, by newer Pythons
}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG")
_TEXT = ("BINSTRING", "SHORT_BINSTRING", "STRING", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE")
_VALUES = frozenset((*_NUMBERS, *_TEXT, "BINBYTES", "SHORT_BINBYTES"))
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def read_batch(file: Path) -> dict[str, Any]:
    """The dictionary of a batch, with text as keys; ``data`` is a uint8 array."""
    try:
        batch = _run(read_bytes(file))
        if not isinstance(batch, dict):
            raise ValueError("the batch is not a dictionary")
        named = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
        if isinstance(data := named.get("data"), _Array):
            named["data"] = _array(data.state)
        return named
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a readable CIFAR batch, damaged or cut short ({_line(error)})") from error


def _array(state: Any) -> np.ndarray:
    _, shape, dtype, fortran, raw = state
    raw = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 pickles bytes as a string
    if dtype != _Global("dtype u1") or fortran or not isinstance(raw, bytes):
        raise ValueError("the batch's data are not plain bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _run(blob: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        at = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    for opcode, argument, _ in pickletools.genops(blob):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANT:
            stack.append(_CONSTANT[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "STOP":
            return stack[-1]
        elif name not in ("PROTO", "FRAME"):
            _combine(name, argument, stack, since_mark)
    raise ValueError("the stream ends early")


def _combine(name: str, argument: Any, stack: list[Any], since_mark: Any) -> None:
    """Run an opcode that builds a value from others."""
    if name == "APPEND":
        value = stack.pop()
        stack[-1].append(value)
    elif name == "APPENDS":
        items = since_mark()
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name in ("TUPLE", "LIST", "DICT"):
        items = since_mark()
        made = {"TUPLE": tuple, "LIST": list}.get(name)
        stack.append(made(items) if made else dict(zip(items[::2], items[1::2], strict=True)))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        if len(stack) < count:
            raise ValueError("the stream is damaged")
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "GLOBAL":
        if argument not in (*_CALLS, "numpy ndarray"):
            raise ValueError(f"the file calls {argument.replace(' ', '.')}, which a CIFAR batch never needs; refused")
        stack.append(_Global(argument))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack[-1] = _CALLS[stack[-1].name](*arguments)
    elif name == "BUILD":
        state = stack.pop()
        if isinstance(stack[-1], _Array):
            stack[-1].state = state
    else:
        raise ValueError(f"the opcode {name} is not part of a CIFAR batch; refused")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
